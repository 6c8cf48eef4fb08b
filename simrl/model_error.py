"""How far simrl's own predictions were off where they were tested: what two options have to be apart to be told apart.

The figures are those of experiments/recorded_run.md, "Predicted and measured": three schedules of one policy, really trained on
vLLM engines, and how many times as long an update of one takes as of the other. They are of one small model on two cores; how
far predictions for a GPU cluster are off nobody has measured.
"""

from __future__ import annotations

from typing import NamedTuple

SOURCE = "experiments/recorded_run.md: real runs of three schedules on two cores"


class Tested(NamedTuple):
    """A ratio of seconds an update of two schedules: as measured, and as predicted from the synchronous run's lengths and from
    each run's own."""

    schedules: str
    measured: float
    predicted: tuple[float, float]


RATIOS = (
    Tested("synchronous against one-step-off", 1.50, (1.58, 1.53)),
    Tested("synchronous against AReaL, η = 2", 1.70, (1.77, 1.80)),
    Tested("one-step-off against AReaL, η = 2", 1.13, (1.12, 1.18)),
)
# Of a ratio between two options: the largest error of any of them.
RATIO_ERROR = max(abs(predicted / tested.measured - 1) for tested in RATIOS for predicted in tested.predicted)
WHOLE_RUNS_TOO_FAST = (0.09, 0.145)  # of the time of whole runs, by schedule
