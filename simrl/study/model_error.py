"""The errors of simrl's own predictions where they were tested: how far two options have to differ
to be distinguished.

The figures come from experiments/recorded_run.md, "Predicted and measured": three schedules of one
policy, really trained on vLLM engines, and the ratio of their times of an update. They are of one
small model on two cores; nobody has measured the error of predictions for a GPU cluster.
"""

from __future__ import annotations

from typing import NamedTuple

SOURCE = "experiments/recorded_run.md: real runs of three schedules on two cores"


class Tested(NamedTuple):
    """A ratio of two schedules' seconds an update: as measured, and as predicted from the
    synchronous run's lengths and from each run's own."""

    schedules: str
    measured: float
    predicted: tuple[float, float]


RATIOS = (
    Tested("synchronous against one-step-off", 1.50, (1.58, 1.53)),
    Tested("synchronous against AReaL, η = 2", 1.70, (1.77, 1.80)),
    Tested("one-step-off against AReaL, η = 2", 1.13, (1.12, 1.18)),
)
# Of a ratio between two options: the largest error of any of them.
RATIO_ERROR = max(
    abs(predicted / tested.measured - 1) for tested in RATIOS for predicted in tested.predicted
)
WHOLE_RUNS_TOO_FAST = (0.09, 0.145)  # of the time of whole runs, by schedule
# Of the seconds of a step: the median of 19 steps of real runs that others published
# (experiments/real_runs.md).
STEP_ERROR = 0.15
STEP_SOURCE = "experiments/real_runs.md: the median of 19 steps of verl, NeMo-RL, RLinf and TRL"
