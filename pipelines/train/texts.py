"""What the training voices say: everyday sentences, word mixes and numbers.

The last `NUM_TEST` sentences are held out: no training text contains one, and the word mixes use
the vocabulary of the training sentences only.
"""

from __future__ import annotations

import re

import numpy as np

__all__ = ["TEST_SENTENCES", "TRAIN_SENTENCES", "sample_text"]

_TRAIN = """
Good morning, did you sleep well on the new pillow?
The bus to the airport leaves every fifteen minutes.
My sister paints tiny boats on smooth river stones.
Please put the blue folder back on the bottom shelf.
We ran out of pepper, but there is plenty of salt.
Which of these photographs would you hang above the fireplace?
Five brave foxes followed the farmer's van through the valley.
I moved the meeting from Monday to Thursday afternoon.
A warm breeze pushed the paper boat across the pond.
Could you spell your last name for me, please?
The baker brought a basket of plum buns before breakfast.
Nobody warned us about the thunder over the north ridge.
Her voice was soft, yet everyone in the hall could hear it.
They judged each cheese by its shape, smell and texture.
Let me check whether that size is still available.
Seven small ships sailed south as the storm passed.
The puppy jumped off the porch and chased a beetle.
You owe me nothing, the coffee is on the house.
My father fixed the clock with a bent paper clip.
Thank you, that is exactly what I was hoping for.
Whose umbrella is dripping all over the kitchen floor?
Bob and Pam bumped into Mabel by the pumpkin booth.
The judge asked a simple question and waited.
I would rather walk than wait for another taxi.
Their garden is full of thyme, mint and wild roses.
Open your mouth wide and say ah, said the dentist.
The museum shows old maps of rivers and roads.
Please hold the line while I look up your order.
A flock of white geese flew over the frozen field.
He measured the room twice and still bought the wrong rug.
What time should we feed the fish this evening?
The volume is far too loud for such a small room.
Perhaps the simplest plan will work the best.
We bought bamboo poles, a rope and a huge balloon.
Cheap shoes hurt your feet after a few hours.
Oh no, I left my keys inside the car again!
The weather should improve by the middle of the week.
Every village has a shop, a church and a football team.
Push the button twice, then pull the lever gently.
Our youngest cousin plays the violin in a youth orchestra.
It took us three days to climb that mountain.
The room smelled of fresh paint and old books.
Would you like your eggs boiled, fried or scrambled?
Move the pump behind the barn before the rain comes.
I believe you have a very good point there.
The nurse gave the boy a yellow plaster with stars.
Few people have ever seen the valley from above.
She shrugged, picked up the phone and called a plumber.
An owl hooted somewhere beyond the orchard wall.
Why are there so many pigeons around the fountain?
The train was late, so we shared a sandwich on the platform.
My favourite part of the film is the very beginning.
Two thirds of the class chose the harder question.
Go straight ahead, then turn left at the pharmacy.
The wolf in the story wore a woolly brown coat.
This recipe needs half a cup of maple syrup.
I promise to water your plants while you are away.
Does the price include breakfast and parking?
A good pair of boots is worth the money.
The children built a fort from pillows and blankets.
He whispered the password and the wooden door opened.
We usually have lunch around half past twelve.
The view from the bridge is better after sunset.
Please remove your shoes and move to the back of the room.
Nothing beats a bowl of hot soup on a cold day.
The mouse squeezed through a gap beneath the fence.
I have never heard anyone explain it so clearly.
How much further is it to the petrol station?
The choir sang a cheerful song about the ocean.
Both brothers became famous for their beautiful furniture.
Turn the volume down, the baby is finally asleep.
You can pay by card, by phone or with cash.
The last bus had already left when we arrived.
A purple kite was caught in the tallest poplar.
Water boils faster if you put a lid on the pot.
Is there anything else that I can help you with?
They agreed to divide the apples equally.
The doctor wrote a long letter to the insurance company.
Maybe we could meet somewhere in the middle.
The old elevator creaked between the fourth and fifth floor.
My neighbour grows tomatoes, beans and bright red peppers.
She joined the club because she loves to row.
Never mind, we will find another way to do it.
The wind blew the newspaper off the bench.
Your parcel should arrive on Wednesday before noon.
I was surprised by how quiet the city seemed.
The zebra yawned while the visitors took pictures.
Where did you put the scissors that I gave you?
A thin layer of ice covered the path to the mill.
The orange juice is fresh and the toast is warm.
Everybody loves a story with a happy ending.
We have both vanilla and peach ice cream today.
The pilot thanked us for flying and wished us a pleasant stay.
This is the third time that the printer has jammed.
Keep your ticket, you will need it on the way out.
Ruth thought about the path through the heath.
The chef chopped shallots, chives and a cherry pepper.
Very few visitors ever leave without a souvenir.
It was a pleasure to talk to you this afternoon.
The goat climbed onto the roof of the wagon.
Look at the moon, it is almost perfectly round!
I would love to, but I promised to cook tonight.
The lawyer read the whole agreement aloud.
Please speak a little slower, the line is not clear.
Their uncle owns a boat shop near the harbour.
A broad avenue leads from the palace to the park.
The film begins at eight and ends around ten.
My computer shows a map of the whole building.
You should always measure twice and cut once.
The soap bubble floated up, wobbled and popped.
I think we have enough chairs for everyone.
The guide explained how the ancient bridge was built.
What a lovely surprise, come in and sit down!
The farm sells milk, butter, and eggs from happy hens.
He bought a used van for less than nine hundred pounds.
Our flight was moved from gate six to gate twenty.
Beth mopped the floor and wiped the marble table.
A shy boy offered her a seat by the window.
The company will open a new office in the spring.
Yes, of course, I will send it to you right away.
No, I am afraid that room is already taken.
The river is shallow enough to cross on foot.
Wash the spinach well, then let it dry on a towel.
Usually the measure of success is how calm you feel.
The audience clapped before the song was over.
""".strip().splitlines()

_TEST = """
The weaver above the bakery makes blankets from pure wool.
Could somebody help me move this piano away from the wall?
I always forget whether the pump is on or off.
Four firefighters carried a heavy pipe up the stairs.
Our teacher showed us how to fold a paper frog.
The soup was good, but the bread was even better.
May I borrow your bicycle until Friday evening?
Big drops of rain fell on the tin roof of the shed.
She chose a pale green shirt and a matching belt.
There were thirty seven people in the waiting room.
Honestly, I did not expect the show to be that funny.
The fisherman mended his nets beneath the harbour wall.
How many cups of flour do I need for the pie?
A sudden noise woke the parrot and the whole family.
We watched the sun go down behind the power station.
The shop on the corner closes at a quarter to nine.
Please remember to bring a map and a bottle of water.
Jupiter is far bigger than all the other planets together.
My brother never leaves home without his favourite cap.
What would you do with a whole month of free time?
The path through the woods is muddy after the storm.
Both of the twins play football in the village team.
You were right, the bus stop is just around the bend.
An honest answer would save us all a lot of trouble.
Well, that is all for now, goodbye and take care!
""".strip().splitlines()

TRAIN_SENTENCES: tuple[str, ...] = tuple(_TRAIN)
TEST_SENTENCES: tuple[str, ...] = tuple(_TEST)

_WORDS = tuple(sorted({w for s in _TRAIN for w in re.findall(r"[a-z']+", s.lower())}))
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen twenty thirty "
    "forty fifty sixty seventy eighty ninety hundred thousand million half"
).split()


def sample_text(rng: np.random.Generator, *, held_out: bool) -> str:
    """Returns something to say: a sentence, a mix of known words or a row of numbers.

    Args:
        rng: drawn from.
        held_out: True gives one of `TEST_SENTENCES`; False never does.
    """
    if held_out:
        return TEST_SENTENCES[rng.integers(len(TEST_SENTENCES))]
    kind = rng.random()
    if kind < 0.5:
        return TRAIN_SENTENCES[rng.integers(len(TRAIN_SENTENCES))]
    if kind < 0.88:
        return " ".join(rng.choice(_WORDS, rng.integers(4, 9))) + "."
    return " ".join(rng.choice(_NUMBERS, rng.integers(3, 8))) + "."
