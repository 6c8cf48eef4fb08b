"""A streaming pipeline: an update trains the finished groups submitted first; groups that have become too old are dropped.

Invariant: at version v, at most (v + 1 + ahead) · B groups were submitted and not dropped, B being the groups of a batch. No
trained token is older than `max_age` updates.
"""

from functools import partial
from typing import Annotated

import simpy
from pydantic import Field, validate_call

from simrl.dispatch.rules import DISPATCHES
from simrl.pipelines.context import RunContext
from simrl.pipelines.streaming import GroupStream
from simrl.systems.system import System


def pipeline(run: RunContext, *, ahead: int, max_age: int) -> simpy.events.ProcessGenerator:
    """Train whenever a batch of groups is finished that are young enough, then let all workers load the weights in flight."""
    trainer, batch = run.trainer, run.workload.batch_groups

    def room() -> int:
        return (trainer.version + 1 + ahead) * batch - stream.kept

    stream = GroupStream(run, room)
    stream.admit()  # begins the run
    for _ in range(run.steps):
        drop_old(stream, trainer.version - max_age)
        while len(stream.buffer) < batch:
            yield stream.news_for_update()  # the next group is finished and scored
            drop_old(stream, trainer.version - max_age)
        yield trainer.train(stream.take(sorted(stream.buffer)[:batch]))
        loaded = run.load_weights()
        stream.admit()  # the version has grown, and with it the room
        yield loaded


def drop_old(stream: GroupStream, oldest_version: int) -> None:
    """Drop finished groups with a token of an older version."""
    stream.drop([group for group in stream.buffer if group.oldest_version < oldest_version])


@validate_call
def fresh_stream(
    ahead: Annotated[int, Field(ge=0, le=100)] = 4,
    max_age: Annotated[int, Field(ge=0, le=100)] = 1,
    rollout_share: Annotated[float, Field(gt=0, lt=1)] = 0.75,
) -> System:
    """Fully asynchronous; groups with tokens older than `max_age` updates are dropped; off-policyness at most `max_age`.

    Groups are submitted while those submitted and not dropped exceed the trained ones by at most `ahead` + 1 batches. A batch
    of finished groups trains, in the order of their submission. Weights are loaded in flight.
    Not modelled: what dropping long responses does to learning.
    """
    return System(
        name="fresh_stream",
        pipeline=partial(pipeline, ahead=ahead, max_age=max_age),
        schedule=f"fully asynchronous, {ahead} batches ahead",
        dispatch=DISPATCHES["least_requests"],
        rollout_share=rollout_share,
        paper="none",
        off_policyness=max_age,
    )
