"""Two pipelines that fill each other's bubbles: actor and critic, trained at once (RLHFuse, arXiv 2409.13221).

Invariant: the micro-batches of a model pass the stages in order, forward and then backward; a stage keeps no more of them under
way than in 1F1B; a GPU does one at a time. The second model's stages lie on the GPUs in reverse, so that it begins where the
first one waits. The paper searches for a schedule by simulated annealing; here each GPU takes what can begin first, backward
before forward, which is 1F1B for one model alone.
"""

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import kernel

Floats = NDArray[np.float64]


@kernel
def pipelines_s(microbatches_s: Floats, stages: int, forward: float, models: int) -> float:
    """Return the seconds in which 1 or 2 models go through their micro-batches, each `microbatches_s` long at every stage, a
    share `forward` of it forward."""
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
