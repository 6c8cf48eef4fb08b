"""HistoPipe (RhymeRL, arXiv 2508.18588 §4.2, §6): every worker goes from step to step on its own,
long after short.

Invariant: a worker begins its part of step k when its part of step k - 1 is over and version k - 1
is published, and takes the newest weights from its own host buffer then; so every token is at most
one version old when it is trained, but for those that an inter-step migration carries into the next
step, which are marked (`Rollout.carried_tokens`). There is no barrier between workers: they wait
for one another only because version k - 1 needs all of step k - 2.

`simrl.dispatch.histopipe` plans each step (§6.2, §6.4) and says where an outlier goes (§6.3): to
another worker or, carried, into the next step. Without weight buffers on the hosts there is a
barrier: all workers load together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import simpy

from simrl.dispatch.histopipe import UNRANKED, HistoPipe, Plan, Planner
from simrl.pipelines.batch import Batch
from simrl.pipelines.context import RunContext
from simrl.runtime.events import gather, on_fire
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample


def histopipe(run: RunContext, *, rule: HistoPipe) -> simpy.events.ProcessGenerator:
    """Train step after step, each when all its samples are finished or carried into the next
    step."""
    steps = _Steps(run, rule)
    workers = range(len(run.workers))
    for together in [[worker] for worker in workers] if rule.weight_buffer else [[*workers]]:
        run.env.process(steps.work(together))
    for _ in range(run.steps):
        batch = yield steps.batches.get()
        yield batch.complete
        update = yield run.trainer.train(batch.rollouts)
        steps.train_s = update.finished_s - update.started_s


@dataclass
class _Step:
    """A step of the run: its batch, its plan, made when the first worker asks for it, and its
    progress.

    By worker: the predicted end, once begun. By uid: the worker of each submitted sample, and the
    group so far of each unfinished one. `kept` samples will be in the batch; `carried` come from
    the step before, and wait for the worker that is predicted to end last.
    """

    k: int
    batch: Batch
    plan: Plan
    siblings: dict[int, list[Rollout | None]]
    kept: int
    ends_s: dict[int, float] = field(default_factory=dict)
    worker_of: dict[int, int] = field(default_factory=dict)
    carried: list[Rollout] = field(default_factory=list)


class _Steps:
    """The steps of a run: the samples that each worker begins, and what becomes of them. `train_s`:
    of the last update."""

    def __init__(self, run: RunContext, rule: HistoPipe) -> None:
        self.batches = simpy.Store(run.env)
        self.train_s = 0.0
        self._run = run
        self._migrates = rule.migration
        self._planner = Planner(rule, run.dispatcher.history, run.times)
        self._steps: list[_Step] = []
        self._migrated: set[int] = set()

    def work(self, workers: list[int]) -> simpy.events.ProcessGenerator:
        """Take workers through the steps, each of which they begin at once."""
        run, loaded = self._run, 0
        for k in count():
            while run.dispatcher.unfinished[workers].any():
                yield gather(run.env, [run.dispatcher.empty(worker) for worker in workers])
            yield run.trainer.published(k - 1)
            step = self._step(k)
            if run.trainer.version > loaded:
                loaded = run.trainer.version
                yield gather(
                    run.env, [run.workers[worker].load_weights(loaded) for worker in workers]
                )
                run.dispatcher.weights_changed()
            for worker in workers:
                self._begin(step, worker)

    def _step(self, k: int) -> _Step:
        """Return step k, planned when the first worker asks for it: until then more history may
        come in. While all workers are lost, the plan is for all of them: the first that is back
        takes what waits."""
        run = self._run
        while len(self._steps) <= k:
            number, groups, now_s = len(self._steps), run.workload.next_batch(), run.env.now
            workers = run.dispatcher.active or list(range(len(run.workers)))
            ends_s = self._steps[-1].ends_s if self._steps else {}
            busy_s = [max(ends_s.get(worker, now_s) - now_s, 0.0) for worker in workers]
            plan = self._planner.plan(number, groups, workers, busy_s, self.train_s)
            siblings: dict[int, list[Rollout | None]] = {}
            for group in groups:
                siblings.update(
                    dict.fromkeys((sample.uid for sample in group), [None] * len(group))
                )
            self._steps.append(_Step(number, Batch(run), plan, siblings, kept=len(siblings)))
            self.batches.put(self._steps[-1].batch)
        return self._steps[k]

    def _begin(self, step: _Step, worker: int) -> None:
        """Submit a worker's part of a step; the worker predicted to end last takes what was carried
        into the step."""
        rollouts = [Rollout(sample, (), False) for sample in step.plan.parts.get(worker, [])]
        step.ends_s[worker] = self._run.env.now + step.plan.predicted_s.get(worker, 0.0)
        if worker == step.plan.last_worker:
            rollouts, step.carried = rollouts + step.carried, []
        if rollouts:
            self._submit(step, rollouts, worker)

    def _submit(self, step: _Step, rollouts: list[Rollout], worker: int) -> None:
        """Submit rollouts to a worker. If they have to move, they go to workers whose weights the
        step may use."""
        to, version = [worker] * len(rollouts), max(step.k - 1, 0)
        partials = [rollout if rollout.segments else None for rollout in rollouts]
        samples = [rollout.sample for rollout in rollouts]
        ends = self._run.dispatcher.submit(samples, partials, to=to, min_version=version)
        for sample, end in zip(samples, ends, strict=True):
            step.worker_of[sample.uid] = worker
            on_fire(end, partial(self._ended, step, sample))
        self._watch_the_last(step)

    def _ended(self, step: _Step, sample: Sample, end: Any) -> None:
        """Add a finished sample to its group, or carry an unfinished one into the next step."""
        if not end.ok:
            raise end.value  # a worker that died, or its engine's error
        rollout: Rollout = end.value
        ranks = [
            rank
            for rank, group in enumerate(step.plan.groups)
            if group.unfinished.pop(sample.uid, None)
        ]
        self._planner.observe(rollout, ranks[0] if ranks else UNRANKED)
        self._watch_the_last(step)
        if not rollout.done:
            self._carry(step, rollout)
        so_far = step.siblings.pop(sample.uid)
        so_far[so_far.index(None)] = rollout
        if None not in so_far:
            finished = [sibling for sibling in so_far if sibling is not None and sibling.done]
            if finished:
                step.batch.add(finished)
        if not step.siblings:
            step.batch.close()

    def _watch_the_last(self, step: _Step) -> None:
        """Watch the last samples of each ranking group, once they are submitted, for those that
        become outliers."""
        for group in step.plan.groups if self._migrates else []:
            last = group.unfinished
            if len(last) > group.last or any(uid not in step.worker_of for uid in last):
                continue
            group.last = -1
            for sample in last.values():
                if sample.uid not in self._migrated:
                    worker = self._run.workers[step.worker_of[sample.uid]]
                    on_fire(
                        worker.when(sample, group.outlier_tokens),
                        partial(self._migrate, step, sample),
                    )

    def _migrate(self, step: _Step, sample: Sample, reached: Any) -> None:
        """Migrate an outlier (§6.3): to another worker of its step or, if none is busy with a
        longer group, into the next."""
        if sample.uid not in step.siblings:
            return  # it has ended at this very boundary
        self._migrated.add(sample.uid)
        target = step.plan.destination(
            step.worker_of[sample.uid],
            Counter(worker for uid, worker in step.worker_of.items() if uid in step.siblings),
        )
        if target is not None:
            step.worker_of[sample.uid] = target
            self._run.dispatcher.move(sample, target)
        elif step.kept > 1:  # no step is left without samples
            step.kept -= 1
            self._run.dispatcher.withdraw([sample])

    def _carry(self, step: _Step, rollout: Rollout) -> None:
        """Carry a response into the next unfinished step: to the worker predicted to end last, when
        it begins or at once."""
        later = self._step(step.k + 1)
        while not later.siblings:
            later = self._step(later.k + 1)
        carried = rollout._replace(carried_tokens=rollout.tokens)
        later.kept += 1
        later.siblings[rollout.sample.uid] = [None]
        if later.plan.last_worker in later.ends_s:
            self._submit(later, [carried], later.plan.last_worker)
        else:
            later.carried.append(carried)
