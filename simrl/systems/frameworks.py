"""Recipes under the names of frameworks, as people launch them today, with the framework's
defaults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from simrl.dispatch.rules import DISPATCHES
from simrl.pipelines.rlinf_dynamic import rlinf_dynamic as rlinf_dynamic_pipeline
from simrl.systems.system import Count, System, recipe


@recipe("rollout_share")
def rlinf_dynamic(
    minibatches: Count = 4,
    max_running_requests: Count = 64,
    pre_process: bool = False,
    wait_before_last: bool = False,
    moves: Literal["tokens", "kv"] = "tokens",
) -> System:
    """Within a step, rollout workers that are no longer needed move to the trainer; on-policy.

    Mini-batches train as their groups are finished (`algorithm.n_minibatches`). After each but the last, workers leave: all if
    nothing runs; else, of those beyond running / `max_running_requests`, as many as lift the trainer to its next data-parallel
    size that divides a mini-batch's groups and fits in memory. Their responses are aborted and go on at the others, which are
    filled one after the other up to the mean; their tokens are prefilled there, or their KV cache comes over the network
    (`moves=kv`). The trainer reshards its states (`training.switch_s` and the network). After the last mini-batch it has its
    first size again, and all workers load the new weights. `pre_process` (`cluster.use_pre_process_policy`): the trainer's GPUs
    roll out, too, until no more than half of the responses run, looked at every second. `wait_before_last`
    (`cluster.use_wait_before_last_iter_policy`): the last mini-batch waits for the end of rollout, and for all GPUs. Defaults
    are those of RLinf's example, with its workers for log-probs at rollout.
    Not modelled: workers for log-probs of their own, which the trainer computes here; a trainer that takes a part of a worker's
    GPUs; RLinf's waits of .1 s for instances that stop.
    """
    return System(
        pipeline=partial(
            rlinf_dynamic_pipeline,
            minibatches=minibatches,
            most_running=max_running_requests,
            pre_process=pre_process,
            wait_before_last=wait_before_last,
        ),
        schedule="synchronous, mini-batches streamed, GPUs change sides",
        dispatch=replace(DISPATCHES["even_split"], kv_pool=moves == "kv"),
        elastic="updates and minibatches" if pre_process else "minibatches",
        paper="RLinf's dynamic scheduling (DynaRL)",
        off_policyness=0,
    )
