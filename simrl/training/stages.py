"""Pipeline stages: when the last micro-batch leaves them, executed pass by pass.

Invariant: a stage runs one pass at a time, each as soon as the stage is free and what the pass
needs has arrived. Micro-batches of unlike lengths therefore leave gaps that equal ones do not.

One model has a fixed order of passes at each stage. Actor and critic, trained at once (RLHFuse,
arXiv 2409.13221), fill each other's gaps: the second model's stages lie on the GPUs in reverse, so
that it begins where the first one waits. A stage keeps no more micro-batches of a model under way
than in 1F1B. The paper searches for a schedule by simulated annealing; here each GPU takes the pass
that can begin first, backward before forward, which is 1F1B for one model alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import kernel

Floats = NDArray[np.float64]


@kernel
def stages_s(microbatches_s: Floats, forward: float, alternating: bool) -> float:
    """Return when the last pass ends; the seconds are of each micro-batch at each stage, a share
    `forward` of them forward. A stage begins with all forward passes; `alternating`, with one for
    each stage from it on, and then alternates (1F1B; Megatron, without interleaving)."""
    count, stages = microbatches_s.shape
    ended_s = np.full((2, count, stages), -1.0)  # by forward or backward
    free_s, done = np.zeros(stages), np.zeros(stages, np.int64)
    left = 2 * count * stages
    while left:
        for stage in range(stages):
            ahead = min(stages - stage, count) if alternating else count
            mixed = 2 * (count - ahead)
            while done[stage] < 2 * count:
                k = done[stage] - ahead
                back = 0 if k < 0 or (k < mixed and k % 2 == 1) else 1
                i = (
                    done[stage]
                    if k < 0
                    else k - mixed // 2
                    if k >= mixed
                    else k // 2
                    if back
                    else ahead + k // 2
                )
                before_s = 0.0
                if back:
                    before_s = (
                        ended_s[0, i, stage] if stage == stages - 1 else ended_s[1, i, stage + 1]
                    )
                elif stage > 0:
                    before_s = ended_s[0, i, stage - 1]
                if before_s < 0:
                    break
                share = 1.0 - forward if back else forward
                free_s[stage] = max(free_s[stage], before_s) + share * microbatches_s[i, stage]
                ended_s[back, i, stage] = free_s[stage]
                done[stage] += 1
                left -= 1
    return float(free_s.max())


@kernel
def pipelines_s(microbatches_s: Floats, stages: int, forward: float, models: int) -> float:
    """Return the seconds in which 1 or 2 models go through their micro-batches, each
    `microbatches_s` long at every stage, a share `forward` of it forward."""
    n = microbatches_s.size
    ended = np.zeros((2, models, stages, n))  # by forward or backward
    begun = np.zeros((2, models, stages), np.int64)
    free = np.zeros(stages)
    for _ in range(2 * models * stages * n):
        best_s, best, best_model, best_stage = np.inf, 0, 0, 0
        for model in range(models):
            for stage in range(stages):
                gpu = stage if model == 0 else stages - 1 - stage
                for backward in (1, 0):
                    i = begun[backward, model, stage]
                    before = begun[0, model, stage] if backward else n
                    if i >= min(n, before):
                        continue
                    ready = 0.0
                    if backward:
                        ready = ended[0, model, stage, i]
                        if stage < stages - 1:
                            if begun[1, model, stage + 1] <= i:
                                continue
                            ready = max(ready, ended[1, model, stage + 1, i])
                    else:
                        if i - begun[1, model, stage] >= stages - stage:
                            continue
                        if stage > 0:
                            if begun[0, model, stage - 1] <= i:
                                continue
                            ready = ended[0, model, stage - 1, i]
                    start_s = max(ready, free[gpu])
                    if start_s < best_s or (start_s == best_s and backward > best):
                        best_s, best, best_model, best_stage = start_s, backward, model, stage
        i = begun[best, best_model, best_stage]
        share = 1.0 - forward if best else forward
        end_s = best_s + share * microbatches_s[i]
        ended[best, best_model, best_stage, i] = end_s
        begun[best, best_model, best_stage] += 1
        free[best_stage if best_model == 0 else stages - 1 - best_stage] = end_s
    return float(free.max())
