"""Published facts: the size of the whole benchmark, and three models' scores on it.

Scores over all samples are from the model card huggingface.co/turing-motors/Terra. Scores by class are from the output
of the notebook compute_score.ipynb in github.com/turingmotors/ACT-Bench, which has none for Terra v2.
"""

from dataclasses import dataclass

from terra.act_bench.scores import ALL

NUM_SAMPLES = 2286
# Number of scored samples by class; samples of other categories are not scored.
NUM_SCORED = {
    "curving_to_left": 162,
    "curving_to_right": 188,
    "straight_constant_high_speed": 303,
    "straight_constant_low_speed": 238,
    "straight_accelerating": 273,
    "straight_decelerating": 218,
    "starting": 89,
    "stopping": 508,
    "stopped": 0,
}
NUM_SCORED[ALL] = sum(NUM_SCORED.values())


@dataclass(frozen=True)
class PublishedScore:
    """Accuracy in [0, 1], and average and final displacement error in meters."""

    accuracy: float
    ade: float
    fde: float


# Scores by model and class.
PUBLISHED = {
    "Vista": {
        ALL: PublishedScore(0.307, 4.50, 8.66),
        "curving_to_left": PublishedScore(0.123, 3.59, 8.01),
        "curving_to_right": PublishedScore(0.489, 3.73, 8.52),
        "straight_constant_high_speed": PublishedScore(0.307, 5.72, 11.28),
        "straight_constant_low_speed": PublishedScore(0.895, 2.79, 5.34),
        "straight_accelerating": PublishedScore(0.231, 6.46, 14.98),
        "straight_decelerating": PublishedScore(0.188, 6.37, 11.56),
        "starting": PublishedScore(0.180, 3.23, 10.32),
        "stopping": PublishedScore(0.136, 3.50, 3.97),
    },
    "Terra v1": {
        ALL: PublishedScore(0.441, 3.98, 8.21),
        "curving_to_left": PublishedScore(0.414, 3.82, 7.78),
        "curving_to_right": PublishedScore(1.000, 3.78, 8.06),
        "straight_constant_high_speed": PublishedScore(0.406, 4.28, 9.25),
        "straight_constant_low_speed": PublishedScore(0.542, 2.48, 5.36),
        "straight_accelerating": PublishedScore(0.040, 5.69, 14.17),
        "straight_decelerating": PublishedScore(0.505, 5.37, 10.53),
        "starting": PublishedScore(0.393, 4.52, 14.01),
        "stopping": PublishedScore(0.413, 3.00, 3.91),
    },
    "Terra v2": {ALL: PublishedScore(0.632, 3.86, 8.05)},
}
