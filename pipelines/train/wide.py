"""Labels that cover the face's range instead of following a dialogue.

An autoencoder or a label-to-latent regressor that saw dialogue alone fails first on poses that
are rare there; these labels are for half of its frames.
"""

from __future__ import annotations

import numpy as np

from pipelines.motion import CONTROL_NAMES
from pipelines.train.tracks import make_track
from pipelines.train.visemes import FaceTrack, face_weights

__all__ = ["wide_labels"]

# Standard deviations of yaw, pitch, roll, gaze x and gaze y in live motion, radians.
_LIVE_STD = (0.062, 0.032, 0.028, 0.105, 0.045)
_WIDE = 1.6


def wide_labels(num_frames: int, seed: int) -> FaceTrack:
    """Returns labels of independent frames that cover more than live motion does.

    The mouth is that of a random moment of speech, at 0.6 to 1.3 times its strength; blink is
    uniform with extra mass at open and shut; pose and gaze are normal with 1.6 times their live
    spread; expression and breath are uniform. All are independent of each other.
    """
    rng = np.random.default_rng(seed)
    moments = make_track("train", 24.0, seed)
    expression = face_weights(np.zeros_like(moments.face.weights), moments.face.controls)
    speech = np.clip(moments.face.weights - expression, 0.0, 1.0)
    # Three of four frames from where the mouth is at work; the rest as it comes.
    chance = np.where(speech.sum(1) > 0.1, 1.0, 1e-3)
    chance = 0.75 * chance / chance.sum() + 0.25 / len(chance)
    mouth = speech[rng.choice(len(speech), num_frames, p=chance)]
    # Exaggeration must not open lips that are pressed together: all units scale as one.
    mouth = np.clip(mouth * rng.uniform(0.6, 1.3, (num_frames, 1)), 0.0, 1.0)
    controls = np.zeros((num_frames, len(CONTROL_NAMES)), np.float32)
    column = {name: controls[:, index] for index, name in enumerate(CONTROL_NAMES)}
    kind = rng.random(num_frames)
    column["blink"][:] = np.where(kind < 0.5, 0.0, rng.random(num_frames))
    column["blink"][kind > 0.85] = 1.0
    for name, std in zip(("yaw", "pitch", "roll", "gaze_x", "gaze_y"), _LIVE_STD, strict=True):
        column[name][:] = np.clip(rng.standard_normal(num_frames), -2.5, 2.5) * std * _WIDE
    column["smile"][:] = np.where(rng.random(num_frames) < 0.6, 0.4, 0.9) * rng.random(num_frames)
    column["brow"][:] = np.where(rng.random(num_frames) < 0.6, 0.3, 1.0) * rng.random(num_frames)
    column["wide"][:] = np.where(rng.random(num_frames) < 0.6, 0.0, 0.9 * rng.random(num_frames))
    column["breath"][:] = rng.uniform(-0.025, 0.025, num_frames)
    return FaceTrack.from_parts(mouth, controls, np.zeros(num_frames, np.int8))
