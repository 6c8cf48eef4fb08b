"""Pipeline stages: when the last micro-batch leaves them, executed pass by pass.

Invariant: a stage runs its passes in a fixed order, each as soon as the stage is free and what the pass needs has arrived.
Micro-batches of unlike lengths therefore leave gaps that equal ones do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import kernel

Floats = NDArray[np.float64]


@kernel
def forward_only(forward_s: Floats) -> float:
    """Return when the last forward pass ends; `forward_s` has the seconds of each micro-batch at each stage."""
    free_s = np.zeros(forward_s.shape[1])
    for i in range(forward_s.shape[0]):
        arrived_s = 0.0
        for stage in range(forward_s.shape[1]):
            arrived_s = max(arrived_s, free_s[stage]) + forward_s[i, stage]
            free_s[stage] = arrived_s
    return float(free_s[-1])


@kernel
def one_forward_one_backward(forward_s: Floats, backward_s: Floats) -> float:
    """Return when the last backward pass ends; the seconds are of each micro-batch at each stage. A stage begins with a forward
    pass for each stage from it on, and then alternates (1F1B; Megatron, without interleaving)."""
    count, stages = forward_s.shape
    forward_ended_s, backward_ended_s = np.full((count, stages), -1.0), np.full((count, stages), -1.0)
    free_s, done = np.zeros(stages), np.zeros(stages, np.int64)
    left = 2 * count * stages
    while left:
        for stage in range(stages):
            ahead = min(stages - stage, count)
            alternating = 2 * (count - ahead)
            while done[stage] < 2 * count:
                k = done[stage] - ahead
                forward = k < 0 or (k < alternating and k % 2 == 1)
                i = (
                    done[stage]
                    if k < 0
                    else ahead + k // 2
                    if forward
                    else k // 2
                    if k < alternating
                    else k - alternating // 2
                )
                before_s = 0.0
                if forward and stage > 0:
                    before_s = forward_ended_s[i, stage - 1]
                elif not forward:
                    before_s = forward_ended_s[i, stage] if stage == stages - 1 else backward_ended_s[i, stage + 1]
                if before_s < 0:
                    break
                start_s = max(free_s[stage], before_s)
                free_s[stage] = start_s + (forward_s[i, stage] if forward else backward_s[i, stage])
                if forward:
                    forward_ended_s[i, stage] = free_s[stage]
                else:
                    backward_ended_s[i, stage] = free_s[stage]
                done[stage] += 1
                left -= 1
    return float(free_s.max())
