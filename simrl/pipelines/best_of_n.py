"""Best-of-N speculation (SpecActor §4.2): the tail's requests run with several drafters at once, on workers that it has freed.

Invariant: what is generated does not change, since every drafter is verified by exact match; a request is done when the first
of its stays has it whole, the others are aborted and are duplicates. A worker is freed when neither a sample nor a duplicate
is at it; while samples wait in the queue none is, for the dispatcher gives them to empty workers first. Freed workers get
drafters, and requests of low acceptance, by Algorithm 3 or its later form (`simrl.speculation.best_of_n`); the routine runs
once whenever workers are freed. A batch is over when the last duplicate has ended, too; then every worker has its own drafter
again.

It is the plain collector with this beside it: what it decides comes from the dispatcher's bookkeeping and from what
verifications showed of each request, which the workers tell.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from statistics import fmean
from typing import Any

import simpy

from simrl.events import call_last, gather, on_fire
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector
from simrl.pipelines.full_batch import full_batch
from simrl.rollout import Rollout
from simrl.speculation.best_of_n import assign_by_drafter, assign_by_request
from simrl.speculation.specactor import counted_acceptance


def best_of_n(stage: Stage) -> Collector:
    """The plain collector, with the workers that its tail frees at work."""
    roll_out = full_batch(stage)

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        tail = _Tail(stage)
        helping = stage.env.process(tail.help())
        yield from roll_out(batch)
        tail.end()
        yield helping

    return collect


class _Tail:
    """One batch's rollout, as far as workers are freed in it."""

    def __init__(self, stage: Stage) -> None:
        assert stage.best_of_n is not None
        self.rule = stage.best_of_n
        self.stage = stage
        self.drafter: dict[int, str] = {}  # of workers that have another than their own
        self.freed: set[int] = set(range(len(stage.workers)))
        self.news = stage.env.event()
        self.told = False
        self.woken = False
        self.over = False

    def help(self) -> simpy.events.ProcessGenerator:
        """Until the batch is rolled out, and all duplicates have ended."""
        dispatcher, workers = self.stage.dispatcher, self.stage.workers
        on_fire(dispatcher.freed(), self.is_freed)
        self.tell()
        while not self.over:
            if not self.woken:  # it may have been in the middle of an assignment
                yield self.news
            self.woken = False
            freed, self.freed = sorted(self.freed & self.free_workers()), set()
            if freed and not self.over:
                yield from self.assign(freed)
        for worker in range(len(workers)):
            yield dispatcher.empty(worker)
        for worker in self.drafter:
            workers[worker].draft_with(None)

    def end(self) -> None:
        """Nothing of the batch runs any more."""
        self.over = True
        self.tell()

    def tell(self) -> None:
        """Wakes the process when all that happens at this instant has happened."""
        if not self.told:
            self.told = True
            call_last(self.stage.env, self.wake)

    def wake(self) -> None:
        self.told, self.woken = False, True
        news, self.news = self.news, self.stage.env.event()
        news.succeed()

    def is_freed(self, freed: Any) -> None:
        if not self.over:
            on_fire(self.stage.dispatcher.freed(), self.is_freed)
            self.freed.add(freed.value)
            self.tell()

    def free_workers(self) -> set[int]:
        """Those that take samples, and have nothing."""
        dispatcher = self.stage.dispatcher
        at_each = zip(dispatcher.number_held(), dispatcher.duplicated(), strict=True)
        empty = {worker for worker, (held, duplicated) in enumerate(at_each) if not held and not duplicated}
        return empty & set(dispatcher.active)

    def assign(self, freed: Sequence[int]) -> simpy.events.ProcessGenerator:
        """The routine: freed workers get their drafters, and begin what is assigned to them."""
        progress = yield from self.ask_for_progress()
        # Meanwhile a sample may have ended or moved, and a worker may have gone, or got samples.
        dispatcher, workers = self.stage.dispatcher, self.stage.workers
        held, duplicated, free = dispatcher.held(), dispatcher.duplicated(), self.free_workers()
        freed = [worker for worker in freed if worker in free]
        active = {sample.uid: sample for samples in held for sample in samples if sample.uid in progress}
        if not active or not freed:
            return
        drafters = {worker: self.drafter.get(worker, self.rule.own) for worker in range(len(workers))}
        there = [worker for worker in dispatcher.active if worker not in freed]
        by_drafter = {name: [w for w in there if drafters[w] == name] for name in self.rule.drafters}
        at = [samples + others for samples, others in zip(held, duplicated, strict=True)]
        load = {worker: len(samples) for worker, samples in enumerate(at)}
        already = {(sample.uid, drafters[worker]) for worker, samples in enumerate(at) for sample in samples}
        acceptances = _known({uid: _acceptance(progress[uid]) for uid in active})
        common = acceptances, by_drafter, freed, load, self.rule.most_load
        if self.rule.assignment == "by_drafter":
            chosen = assign_by_drafter(*common, already)
        else:
            chosen = assign_by_request(*common, self.rule.order, already)
        for name, own in chosen.workers.items():
            for worker in own:
                if worker in freed and self.drafter.get(worker) != name:
                    self.drafter[worker] = name
                    workers[worker].draft_with(name)
        for (uid, _), worker in chosen.added.items():
            dispatcher.duplicate(active[uid], worker, progress[uid], self.rule.kv == "transfer")

    def ask_for_progress(self) -> Generator[simpy.Event, Any, dict[int, Rollout]]:
        """What there is of every sample at a worker, by uid."""
        workers, held = self.stage.workers, self.stage.dispatcher.held()
        asked = [workers[i].progress(sample) for i, samples in enumerate(held) for sample in samples]
        told = yield gather(self.stage.env, asked)
        return {rollout.sample.uid: rollout for rollout in told if rollout is not None}


def _acceptance(rollout: Rollout) -> float:
    verified = rollout.drafted_tokens - rollout.unverified_tokens
    return counted_acceptance(verified, rollout.accepted_tokens, rollout.verifications)


def _known(acceptances: dict[int, float]) -> dict[int, float]:
    """Of whom nothing is known, the mean of the others is assumed; 0 if nothing is known at all."""
    known = [p for p in acceptances.values() if not math.isnan(p)]
    mean = fmean(known) if known else 0.0
    return {uid: mean if math.isnan(p) else p for uid, p in acceptances.items()}
