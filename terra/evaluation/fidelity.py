"""Action fidelity: errors of the motion recovered from a video against the instructed motion."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from terra.evaluation.motion import CLASSES, Steps, classify, integrate


def motion_errors(recovered: Steps, instructed: Steps, fps: float) -> dict[str, Float[np.ndarray, " steps"]]:
    """Errors at each frame after the start, where both paths coincide.

    `displacement` (m) is the distance between the two positions; its mean over frames is the ADE, its last value the
    FDE. `heading` (degrees) and `speed` (m/s) are absolute differences.
    """
    ours, theirs = integrate(recovered)[1:], integrate(instructed)[1:]
    return {
        "displacement": np.hypot(*(ours - theirs)[:, :2].T),
        "heading": np.degrees(np.abs(ours[:, 2] - theirs[:, 2])),
        "speed": np.abs(recovered[:, 0] - instructed[:, 0]) * fps,
    }


def confusion(
    recovered: Sequence[Steps], instructed: Sequence[Steps], fps: float
) -> tuple[Bool[np.ndarray, " clips"], Float[np.ndarray, "instructed_class recovered_class"]]:
    """Whether each clip's class (`terra.evaluation.motion.classify`) is the instructed one, and the counts by class."""
    counts = np.zeros((len(CLASSES), len(CLASSES)))
    agree = np.zeros(len(recovered), dtype=bool)
    for index, (ours, theirs) in enumerate(zip(recovered, instructed, strict=True)):
        got, wanted = classify(ours, fps), classify(theirs, fps)
        counts[CLASSES.index(wanted), CLASSES.index(got)] += 1
        agree[index] = got == wanted
    return agree, counts
