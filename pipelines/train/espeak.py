"""espeak-ng with phone times, as a small program: one sentence a run.

    python -I -S espeak.py VOICE WORDS_PER_MINUTE PITCH < text > result

The library carries its phase and its clock remainder from one utterance to the next, so inside a
long-lived process the same sentence never sounds the same twice. A fresh process makes speech a
pure function of its arguments; with ctypes alone it costs about 40 ms. The result is one line of
JSON, {"sample_rate": Hz, "phones": [[sample, name], ...]}, then 16-bit little-endian mono samples.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys

LIBRARY = "libespeak-ng.so.1"
_SYNCHRONOUS = 2
_PHONEME_EVENTS, _PHONEME_IPA, _DONT_EXIT = 1, 2, 0x8000
_EVENT_END, _EVENT_PHONEME = 0, 7
_RATE, _PITCH, _RANGE = 1, 3, 4
_CHARS_UTF8, _END_PAUSE = 1, 0x1000


class EventId(ctypes.Union):
    """`espeak_EVENT.id`."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("string", ctypes.c_char * 8),
    )


class Event(ctypes.Structure):
    """`espeak_EVENT`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", EventId),
    )


Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(Event)
)


def main(voice: str, words_per_minute: int, pitch: int) -> str | None:
    """Speaks standard input to standard output; returns what is wrong, or None."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return str(error)
    sound = bytearray()
    phones: list[tuple[int, str]] = []

    def collect(samples: ctypes._Pointer[ctypes.c_short], count: int, events: object) -> int:
        if samples and count > 0:
            sound.extend(ctypes.string_at(samples, count * 2))
        for index in itertools.count():
            event = events[index]  # type: ignore[index]
            if event.type == _EVENT_END:
                break
            if event.type == _EVENT_PHONEME:
                # The field holds 8 bytes and is not always terminated.
                phones.append((event.sample, event.id.string.decode("utf-8", "ignore")))
        return 0

    options = _PHONEME_EVENTS | _PHONEME_IPA | _DONT_EXIT
    sample_rate = library.espeak_Initialize(_SYNCHRONOUS, 0, None, options)
    if sample_rate <= 0:
        return "espeak-ng found no voice data"
    callback = Callback(collect)
    library.espeak_SetSynthCallback(callback)
    if library.espeak_SetVoiceByName(voice.encode()) != 0:
        return f"espeak-ng has no voice {voice!r}"
    for parameter, value in ((_RATE, words_per_minute), (_PITCH, pitch), (_RANGE, 55)):
        library.espeak_SetParameter(parameter, value, 0)
    text = sys.stdin.buffer.read()
    flags = _CHARS_UTF8 | _END_PAUSE
    library.espeak_Synth(text, len(text) + 1, 0, 1, 0, flags, None, None)
    library.espeak_Synchronize()
    header = json.dumps({"sample_rate": sample_rate, "phones": phones})
    sys.stdout.buffer.write(header.encode() + b"\n" + sound)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
