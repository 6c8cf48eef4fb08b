"""The rollout/train split, adapted during the run from the trainer's idle time: GPUs go where they
are missing.

Invariant: units move as `simrl.dispatch.elastic` says; the trainer has a unit from the beginning of
an update on.

AReaL's limitations section (arXiv 2505.24298) asks for such an adaptation. The rule here uses the
trainer's idle time alone: after every `every` updates, the trainer gets the GPUs that would have
kept it busy for `TARGET` of the time. (Rollout idle time is not a usable signal: workers also idle
while the last responses of a step finish, and busy workers may only be running ahead of the
trainer.)
"""

from __future__ import annotations

import math

import simpy

from simrl.dispatch.elastic import ElasticPool

TARGET = 0.85  # share of the time in which the trainer should be busy
BUSY_ENOUGH = (0.75, 0.95)  # nothing moves in between
# share of all units that move at a time: the idle time of a few updates is no forecast
MOST_MOVED = 0.125


def wanted_train_units(units: int, train_units: int, train_busy: float, least: int) -> int:
    """Return how many of all `units` the trainer should have, if it was busy for a share
    `train_busy` of the time with `train_units`. Rollout keeps at least one."""
    low, high = BUSY_ENOUGH
    if low <= train_busy <= high:
        return train_units
    wanted = math.ceil(train_units * train_busy / TARGET)
    most = max(int(units * MOST_MOVED), 1)
    wanted = max(wanted, train_units + 1) if train_busy > high else min(wanted, train_units - 1)
    wanted = min(max(wanted, train_units - most), train_units + most)
    return min(max(wanted, least), units - 1)


def adapt(env: simpy.Environment, pool: ElasticPool, every: int) -> simpy.events.ProcessGenerator:
    """Lend the trainer its units, then adapt the split after every `every` updates."""
    trainer, may_train, gpus = pool.trainer, pool.may_train, pool.unit_gpus
    units = len(pool.workers)
    pool.begin()
    least = next(n for n in range(units + 1) if may_train(n * gpus))
    while True:
        # Measured from the end of an update to the end of another; the wait for the first batch,
        # and the update during which units moved, are not typical.
        yield trainer.published(trainer.version + 1)
        since_s, busy_s = env.now, trainer.busy_s
        yield trainer.published(trainer.version + every)
        lent = trainer.lanes
        wanted = wanted_train_units(
            units, len(lent), (trainer.busy_s - busy_s) / (env.now - since_s), least
        )
        while wanted < units - 1 and not may_train(wanted * gpus):
            wanted += 1  # the next number that the trainer fits
        if not may_train(wanted * gpus):
            continue
        if wanted > len(lent):
            leaving = pool.dispatcher.active[-(wanted - len(lent)) :]
            yield from pool.to_trainer(leaving)
            yield trainer.resize([*trainer.lanes, *leaving])
        elif wanted < len(lent):
            coming = lent[: len(lent) - wanted]
            yield trainer.resize([lane for lane in trainer.lanes if lane not in coming])
            yield from pool.to_rollout(coming)
