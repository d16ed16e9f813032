"""Streaming log-mel features: the audio tokens of one unit.

A unit of 4 frames at 25 fps is 160 ms. Its tokens hold 48 mel rows at 100 Hz: the sound before the
unit, the unit itself, and what fits into the look-ahead. The scaling is fixed (no utterance
statistics), so the features of a unit depend on that window of sound and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rtgen.errors import ConfigError, ShapeError

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MelConfig:
    """The mel front end; lengths in samples at `sample_rate`.

    Attributes:
        sample_rate: of the sound that comes in, Hz.
        num_mels: mel bands per row.
        window: samples of one analysis window.
        hop: samples from row to row.
        unit: samples of one unit.
        lookahead: samples after the unit that must be there before it can be conditioned.
        num_tokens: audio tokens per unit.
        rows_per_token: consecutive rows that make one token.
    """

    sample_rate: int = 16000
    num_mels: int = 64
    window: int = 400
    hop: int = 160
    unit: int = 2560
    lookahead: int = 1920
    num_tokens: int = 12
    rows_per_token: int = 4

    def __post_init__(self) -> None:
        if self.unit % self.hop:
            raise ConfigError(f"unit ({self.unit}) must be a multiple of the hop ({self.hop})")
        if self.history < 0:
            raise ConfigError(
                f"{self.num_rows} rows must cover a unit of {self.unit} samples and its look-ahead"
            )

    @property
    def num_rows(self) -> int:
        """Mel rows in the tokens of one unit."""
        return self.num_tokens * self.rows_per_token

    @property
    def audio_dim(self) -> int:
        """Width of one audio token."""
        return self.rows_per_token * self.num_mels

    @property
    def last_row(self) -> int:
        """First sample of the last row, from the start of the unit."""
        return (self.unit + self.lookahead - self.window) // self.hop * self.hop

    @property
    def history(self) -> int:
        """Samples before the unit that its first row reads."""
        return (self.num_rows - 1) * self.hop - self.last_row


def mel_filters(num_mels: int, sample_rate: int, fft_size: int) -> FloatArray:
    """Triangular filters on the HTK mel scale, 2595 log10(1 + f/700), between 50 and 7800 Hz.

    Returns:
        float32 [fft_size // 2 + 1, num_mels].
    """
    top = min(7800.0, sample_rate / 2)
    mels = np.linspace(2595 * np.log10(1 + 50 / 700), 2595 * np.log10(1 + top / 700), num_mels + 2)
    edges = 700 * (10 ** (mels / 2595) - 1) * fft_size / sample_rate
    bins = np.arange(fft_size // 2 + 1)[:, None]
    rise = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    filters = np.clip(np.minimum(rise, fall), 0, None)
    # Low bands are narrower than a bin: give each at least its nearest bin.
    for band in np.flatnonzero(filters.sum(0) < 0.5):
        filters[round(edges[band + 1]), band] = 1.0
    return filters.astype(np.float32)


def log_mel(samples: FloatArray, config: MelConfig, filters: FloatArray) -> FloatArray:
    """Log-mel rows of a whole stretch of sound.

    Args:
        samples: float32 [n] in [-1, 1]; the first sample only primes the pre-emphasis.
        config: front end.
        filters: as `mel_filters`.

    Returns:
        float32 [(n - 1 - window) // hop + 1, num_mels], about zero mean and unit scale for speech.
    """
    emphasised = samples[1:] - 0.97 * samples[:-1]
    windows = np.lib.stride_tricks.sliding_window_view(emphasised, config.window)[:: config.hop]
    taper = np.hanning(config.window).astype(np.float32)
    fft_size = 2 * (filters.shape[0] - 1)
    power = np.abs(np.fft.rfft(windows * taper, fft_size)) ** 2
    return ((np.log(power @ filters + 1e-4) + 4) / 3).astype(np.float32)


@dataclass(slots=True)
class MelFrontEnd:
    """Audio tokens unit by unit; the state is the sound that the next unit looks back to."""

    config: MelConfig = field(default_factory=MelConfig)
    _filters: FloatArray = field(init=False, repr=False)
    _history: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        fft_size = 1 << (self.config.window - 1).bit_length()
        self._filters = mel_filters(self.config.num_mels, self.config.sample_rate, fft_size)
        self._history = np.zeros(self.config.history + 1, np.float32)

    def step(self, audio: FloatArray) -> FloatArray:
        """Tokens of the next unit.

        Args:
            audio: float32 [unit + lookahead] in [-1, 1]: the unit's sound and what follows it.

        Returns:
            float32 [num_tokens, audio_dim].

        Raises:
            ShapeError: another number of samples.
        """
        config = self.config
        if audio.shape != (config.unit + config.lookahead,):
            raise ShapeError(
                f"a unit takes {config.unit + config.lookahead} samples (with look-ahead), "
                f"got shape {audio.shape}"
            )
        samples = np.concatenate([self._history, audio.astype(np.float32, copy=False)])
        rows = log_mel(samples, config, self._filters)[: config.num_rows]
        self._history = samples[config.unit : config.unit + config.history + 1].copy()
        return rows.reshape(config.num_tokens, config.audio_dim)

    def snapshot(self) -> FloatArray:
        """The state, to give back to `restore`."""
        return self._history.copy()

    def restore(self, state: FloatArray) -> None:
        """Returns to a state taken by `snapshot`."""
        if state.shape != self._history.shape:
            raise ShapeError(f"state must be {self._history.shape}, got {state.shape}")
        self._history = state.copy()


def rows_of_track(audio: FloatArray, config: MelConfig) -> FloatArray:
    """Mel rows of a whole recording, those of unit u from row u * (unit / hop) on.

    Args:
        audio: float32 [n]; silence is assumed before and after it.
        config: front end.

    Returns:
        float32 [R, num_mels]; rows [k, k + num_rows) of a unit that begins at row k are what
        `MelFrontEnd.step` gives for it, R is just enough for the last whole unit.
    """
    count = len(audio) // config.unit
    padded = np.concatenate(
        [np.zeros(config.history + 1), audio, np.zeros(config.lookahead + config.window)]
    ).astype(np.float32)
    fft_size = 1 << (config.window - 1).bit_length()
    rows = log_mel(padded, config, mel_filters(config.num_mels, config.sample_rate, fft_size))
    return rows[: max(count - 1, 0) * (config.unit // config.hop) + config.num_rows]


def tokens_of_track(audio: FloatArray, config: MelConfig) -> FloatArray:
    """Tokens of every whole unit of a recording, as `MelFrontEnd` makes them one by one.

    Args:
        audio: float32 [n]; silence is assumed before and after it.
        config: front end.

    Returns:
        float32 [n // unit, num_tokens, audio_dim].
    """
    count = len(audio) // config.unit
    starts = np.arange(count)[:, None] * (config.unit // config.hop) + np.arange(config.num_rows)
    rows = rows_of_track(audio, config)
    return rows[starts].reshape(count, config.num_tokens, config.audio_dim)
