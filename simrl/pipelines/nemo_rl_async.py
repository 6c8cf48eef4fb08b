"""NeMo-RL's asynchronous GRPO (`async_utils`): every group is generated for one update, and that
update waits for it.

Under version v, groups may be submitted for the updates up to v + `max_age`, in order, and no more
than `max_age` batches run at once. The update of version v trains the batch that was generated for
it. While weights are loaded, no group begins; running responses go on with their KV cache,
recompute it, or end before the load.

Invariant: the batch of update k is the groups kB … (k + 1)B - 1 in the order of their submission.
So no trained token is older than `max_age`.
"""

from __future__ import annotations

import simpy

from simrl.pipelines.context import RunContext
from simrl.pipelines.streaming import GroupStream
from simrl.runtime.worker import LoadMode


def nemo_rl_async(
    run: RunContext, *, max_age: int, running: LoadMode
) -> simpy.events.ProcessGenerator:
    """Train each batch as soon as it is complete, then load the weights at all workers; `running`
    says what happens to responses that run then."""
    trainer, batch = run.trainer, run.workload.batch_groups
    version = 0  # that the workers have
    loading = False

    def room() -> int:
        if loading:
            return 0
        return min(
            max_age * batch - len(stream.running), (version + max_age + 1) * batch - stream.kept
        )

    stream = GroupStream(run, room)
    stream.admit()
    for step in range(run.steps):
        while sum(group.number < (step + 1) * batch for group in stream.buffer) < batch:
            yield stream.news_for(batch)
        yield trainer.train(stream.take(sorted(stream.buffer)[:batch]))
        loading = True
        yield run.load_weights(running)
        version, loading = trainer.version, False
        stream.admit()
