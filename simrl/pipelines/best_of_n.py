"""Best-of-N speculation (SpecActor §4.2): the tail's requests run with several drafters at once, on
workers that it has freed.

Invariant: the generated tokens do not change, since every drafter is verified by exact match. A
worker is freed when neither a sample nor a duplicate is at it; while samples wait in the queue no
worker is, for the dispatcher gives them to empty workers first. Whenever workers are freed, they
get drafters, and requests of low acceptance, by Algorithm 3 or its later form
(`simrl.speculation.best_of_n`). A worker loads its drafter from the host's memory before its
requests begin. A batch is over when the last duplicate and the last load have ended; then every
worker has its own drafter again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import simpy

from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import RunContext
from simrl.pipelines.full_batch import full_batch
from simrl.runtime.events import Signal, gather, on_fire, once_an_instant
from simrl.runtime.rollout import Rollout
from simrl.speculation.best_of_n import BestOfN, assign, counted_acceptance


def best_of_n(run: RunContext) -> Collector:
    """Collect whole batches, and put the workers that a batch's tail frees to work."""
    roll_out = full_batch(run)
    assert run.best_of_n is not None
    rule = run.best_of_n

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        freed = _FreedWorkers(run, rule)
        helping = run.env.process(freed.help())
        yield from roll_out(batch)
        freed.over = True
        freed.wake()
        yield helping

    return collect


class _FreedWorkers:
    """The workers freed in the rollout of one batch, and their help with its tail."""

    def __init__(self, run: RunContext, rule: BestOfN) -> None:
        self.over = False  # nothing of the batch runs any more
        self._run = run
        self._rule = rule
        self._drafter: dict[int, str] = {}  # of the workers that were given one
        self._freed: set[int] = set(range(len(run.workers)))
        self._news = Signal(run.env)
        self.wake = once_an_instant(run.env, self._news.fire)

    def help(self) -> simpy.events.ProcessGenerator:
        """Put freed workers to work until the batch is rolled out, and wait until all duplicates
        have ended."""
        on_fire(self._run.dispatcher.freed(), self._is_freed)
        news = self._news.next
        self.wake()
        while not self.over:
            yield news
            news = self._news.next  # it may come in the middle of an assignment
            freed, self._freed = sorted(self._freed & self._free_workers()), set()
            if freed and not self.over:
                yield from self._assign(freed)
        for worker in range(len(self._run.workers)):
            yield self._run.dispatcher.empty(worker)
        for worker in self._drafter:
            yield self._run.workers[worker].draft_with(None)

    def _is_freed(self, freed: Any) -> None:
        if not self.over:
            on_fire(self._run.dispatcher.freed(), self._is_freed)
            self._freed.add(freed.value)
            self.wake()

    def _free_workers(self) -> set[int]:
        """Return the workers that take samples and have nothing."""
        dispatcher = self._run.dispatcher
        held, duplicated = dispatcher.unfinished, dispatcher.duplicated()
        return {
            worker for worker in dispatcher.active if not held[worker] and not duplicated[worker]
        }

    def _assign(self, freed: Sequence[int]) -> simpy.events.ProcessGenerator:
        """Give freed workers their drafters, and the requests that are assigned to them."""
        rule, dispatcher, workers = self._rule, self._run.dispatcher, self._run.workers
        reports = [
            workers[i].progress(samples) for i, samples in enumerate(dispatcher.held()) if samples
        ]
        reported = yield gather(self._run.env, reports)
        progress = {
            rollout.sample.uid: rollout
            for rollouts in reported
            for rollout in rollouts
            if rollout is not None
        }
        # Meanwhile a sample may have ended or moved, and a worker may have left, or received
        # samples.
        held, duplicated, free = dispatcher.held(), dispatcher.duplicated(), self._free_workers()
        freed = [worker for worker in freed if worker in free]
        active = {
            sample.uid: sample for samples in held for sample in samples if sample.uid in progress
        }
        if not active or not freed:
            return
        drafters = {worker: self._drafter.get(worker, rule.own) for worker in range(len(workers))}
        busy = [worker for worker in dispatcher.active if worker not in freed]
        by_drafter = {
            name: [worker for worker in busy if drafters[worker] == name] for name in rule.drafters
        }
        at = [samples + others for samples, others in zip(held, duplicated, strict=True)]
        load = {worker: len(samples) for worker, samples in enumerate(at)}
        already = {
            (sample.uid, drafters[worker])
            for worker, samples in enumerate(at)
            for sample in samples
        }
        acceptances = _acceptances([progress[uid] for uid in active])
        chosen = assign(rule, acceptances, by_drafter, freed, load, already)
        for name, assigned in chosen.workers.items():
            for worker in assigned:
                if worker in freed and self._drafter.get(worker) != name:
                    self._drafter[worker] = name
                    workers[worker].draft_with(name)
        for (uid, _), worker in chosen.added.items():
            dispatcher.duplicate(active[uid], worker, progress[uid], rule.fetched_share)


def _acceptances(rollouts: Sequence[Rollout]) -> dict[int, float]:
    """Return the acceptance of each request, by uid; the mean of the others where it is unknown, 0
    if none is known."""
    counted = {
        r.sample.uid: counted_acceptance(
            r.drafted_tokens - r.unverified_tokens, r.accepted_tokens, r.verifications
        )
        for r in rollouts
    }
    known = [p for p in counted.values() if not math.isnan(p)]
    mean = fmean(known) if known else 0.0
    return {uid: mean if math.isnan(p) else p for uid, p in counted.items()}
