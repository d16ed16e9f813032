from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import av
import numpy as np

from rtgen.types import Pixels
from tests.webrtc.live import run
from webrtc.encoder import Encoded, VideoEncoder
from webrtc.playout import Picture
from webrtc.tracks import PacketTrack
from webrtc.video_sender import MAX_UNSENT, Sent, VideoSender


class SlowEncoder(VideoEncoder):
    """Encodes when it is allowed to."""

    def __init__(self) -> None:
        super().__init__("H264", Fraction(25), bitrate=500_000)
        self.go = threading.Semaphore(0)

    def encode(self, rgb: Pixels, position: int, *, key: bool = False) -> Encoded:
        assert self.go.acquire(timeout=10)
        return super().encode(rgb, position, key=key)


def picture(number: int) -> Picture:
    return Picture(
        position=1920 * number,
        rgb=np.full((32, 32, 3), 10 * number % 256, np.uint8),
        media_time=Fraction(number, 25),
        generation=0,
        is_repeat=False,
    )


class Stage:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.track = PacketTrack("video", MAX_UNSENT)
        self.encoder = SlowEncoder()
        self.sent: list[Sent] = []
        self.sender = VideoSender(self.track, self.encoder, pool, self.sent.append)
        self.task = asyncio.create_task(self.sender.run())

    async def settle(self, sent: int | None = None) -> None:
        """Waits until so many pictures were sent, or else for a moment."""
        for _ in range(20 if sent is None else 2000):
            if sent is not None and len(self.sent) >= sent:
                return
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        self.encoder.go.release(10)
        await self.settle()
        self.task.cancel()


def test_at_most_two_pictures_are_unsent_and_the_rest_is_dropped_before_the_encoder() -> None:
    async def work() -> None:
        with ThreadPoolExecutor(1) as pool:
            stage = Stage(pool)
            assert [stage.sender.offer(picture(n), 0) for n in range(4)] == [True, True] + [
                False
            ] * 2
            stage.encoder.go.release(2)
            await stage.settle(2)
            assert [s.picture.position for s in stage.sent] == [0, 1920]
            # Sent to the track, but the connection has not taken them.
            assert not stage.sender.offer(picture(4), 0)
            await stage.track.recv()
            assert stage.sender.offer(picture(5), 0)
            await stage.end()

    run(work())


def test_after_a_flush_nothing_older_is_sent_and_decoding_goes_on() -> None:
    async def work() -> None:
        with ThreadPoolExecutor(1) as pool:
            stage = Stage(pool)
            reader = av.CodecContext.create("h264", "r")
            assert isinstance(reader, av.VideoCodecContext)
            shown = 0
            for number in range(3):
                assert stage.sender.offer(picture(number), 0)
                stage.encoder.go.release()
                await stage.settle(number + 1)
                shown += len(reader.decode(av.Packet(bytes(await stage.track.recv()))))
            assert stage.sender.offer(picture(3), 0)  # is being encoded
            await stage.settle()
            assert stage.sender.offer(picture(4), 0)  # waits
            stage.sender.flush()
            assert stage.sender.offer(picture(5), 0)
            stage.encoder.go.release(3)
            await stage.settle(4)
            assert [s.picture.position // 1920 for s in stage.sent] == [0, 1, 2, 5]
            assert stage.sent[-1].encoded.is_key  # the picture in the encoder was lost on purpose
            shown += len(reader.decode(av.Packet(bytes(await stage.track.recv()))))
            assert shown == 4
            await stage.end()

    run(work())


def test_key_frames_are_made_on_request_but_not_in_a_storm() -> None:
    async def work() -> None:
        with ThreadPoolExecutor(1) as pool:
            stage = Stage(pool)
            stage.encoder.go.release(100)
            for number in range(20):
                stage.sender.request_key()
                assert stage.sender.offer(picture(number), 0)
                await stage.track.recv()
            keys = [n for n, sent in enumerate(stage.sent) if sent.encoded.is_key]
            assert keys == [0, 7, 14]  # a quarter of a second apart
            await stage.end()

    run(work())
