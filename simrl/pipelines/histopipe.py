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

With over-sampling or dynamic sampling, an update begins once the buffer holds a batch's number of
responses, in the groups that came first (§4.2: "sufficient samples matching the batch size"), and
all that outliers carry into it. What else its step has is aborted and dropped: trained a step
later, it would be two versions old. While groups with unequal rewards do not fill a batch, its step
draws another round, as soon as all groups of the one before are scored (verl's recipe), for the
workers that have begun the step.
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
from simrl.pipelines.dynamic_sampling import rewards_differ, too_few
from simrl.pipelines.rounds import times
from simrl.runtime.events import gather, on_fire
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample


def histopipe(run: RunContext, *, rule: HistoPipe) -> simpy.events.ProcessGenerator:
    """Train step after step, each when all its samples are finished or carried into the next
    step, or enough are; with `parts`, its mini-batches as they come (Fig. 4b)."""
    steps = _Steps(run, rule)
    workers = range(len(run.workers))
    for together in [[worker] for worker in workers] if rule.weight_buffer else [[*workers]]:
        run.env.process(steps.work(together))
    for _ in range(run.steps):
        batch = yield steps.batches.get()
        streamed = run.trainer.train_parts(batch.parts) if rule.parts else None
        yield batch.complete
        complete_s = run.env.now
        update = yield streamed or run.trainer.train(batch.rollouts)
        steps.train_s = update.finished_s - max(update.started_s, complete_s)


@dataclass
class _Step:
    """A step of the run: its batch, its plans, the first made when the first worker asks for it,
    one more for each further round, and its progress.

    By worker: the predicted end, once begun. By uid: the worker of each submitted sample, and the
    group so far of each unfinished one. `kept` samples will be in the batch; `carried` come from
    the step before, and wait for the worker that is predicted to end last.
    """

    k: int
    batch: Batch
    plans: list[Plan] = field(default_factory=list)
    siblings: dict[int, list[Rollout | None]] = field(default_factory=dict)
    kept: int = 0
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
        self._round_groups = times(rule.over_sampling, run.workload.batch_groups)
        over_sampled = run.dynamic_sampling is not None or rule.over_sampling > 1
        self._enough = run.workload.batch_responses if over_sampled else None
        self._parts = rule.parts
        self._migrates = rule.migration
        self._planner = Planner(rule, run.dispatcher.history, run.times)
        self._steps: list[_Step] = []
        self._migrated: set[int] = set()
        self._withdrawn: set[int] = set()

    def work(self, workers: list[int]) -> simpy.events.ProcessGenerator:
        """Take workers through the steps, each of which they begin at once."""
        run, loaded = self._run, 0
        for k in count():
            while run.dispatcher.unfinished[workers].any():
                yield gather(run.env, [run.dispatcher.empty(worker) for worker in workers])
            yield run.trainer.published(k - 1)
            while run.dynamic_sampling is not None and run.dispatcher.unfinished[workers].any():
                yield gather(run.env, [run.dispatcher.empty(worker) for worker in workers])
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
            step = _Step(len(self._steps), Batch(run, parts=self._parts))
            step.batch.enough = self._enough
            if run.dynamic_sampling is not None:
                step.batch.accepts = rewards_differ
            if self._enough is not None:
                on_fire(step.batch.complete, partial(self._drop_rest, step))
            self._draw(step, run.dispatcher.active or list(range(len(run.workers))))
            self._steps.append(step)
            self.batches.put(step.batch)
        return self._steps[k]

    def _draw(self, step: _Step, workers: list[int]) -> None:
        """Draw a round of groups for a step, and plan it for these workers."""
        run, now_s = self._run, self._run.env.now
        groups = (
            run.workload.next_batch()
            if self._enough is None
            else run.workload.next_groups(self._round_groups)
        )
        ends_s = self._steps[-1].ends_s if self._steps else {}
        busy_s = [max(ends_s.get(worker, now_s) - now_s, 0.0) for worker in workers]
        step.plans.append(self._planner.plan(step.k, groups, workers, busy_s, self.train_s))
        for group in groups:
            so_far: list[Rollout | None] = [None] * len(group)
            step.siblings.update(dict.fromkeys((sample.uid for sample in group), so_far))
            step.kept += len(group)

    def _draw_again(self, step: _Step, settled: Any) -> None:
        """Draw another round for a step whose batch is not full."""
        rule, active = self._run.dynamic_sampling, self._run.dispatcher.active
        if step.batch.full or step.siblings or rule is None:
            return
        if len(step.plans) == rule.max_rounds:
            raise too_few(step.batch, len(step.plans), self._round_groups, step.batch.size)
        self._draw(step, [worker for worker in active if worker in step.ends_s] or active)
        for worker, samples in step.plans[-1].parts.items():
            if samples:
                self._submit(step, [Rollout(sample, (), False) for sample in samples], worker)

    def _begin(self, step: _Step, worker: int) -> None:
        """Submit a worker's part of a step; the worker predicted to end last takes what was carried
        into the step."""
        plan = step.plans[0]
        samples = [each for each in plan.parts.get(worker, []) if each.uid in step.siblings]
        rollouts = [Rollout(sample, (), False) for sample in samples]
        step.ends_s[worker] = self._run.env.now + plan.predicted_s.get(worker, 0.0)
        if worker == plan.last_worker:
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
            for plan in step.plans
            for rank, group in enumerate(plan.groups)
            if group.unfinished.pop(sample.uid, None)
        ]
        self._planner.observe(rollout, ranks[0] if ranks else UNRANKED)
        self._watch_the_last(step)
        self._withdrawn.discard(sample.uid)
        if sample.uid not in step.siblings:  # its batch is full
            self._drop([rollout])
            return
        if not rollout.done:
            self._carry(step, rollout)
        so_far = step.siblings.pop(sample.uid)
        so_far[so_far.index(None)] = rollout
        if None not in so_far:
            finished = [sibling for sibling in so_far if sibling is not None and sibling.done]
            if finished:
                step.batch.add(finished)
        if not step.siblings and self._run.dynamic_sampling is None:
            step.batch.close()
        elif not step.siblings:
            on_fire(step.batch.settled(), partial(self._draw_again, step))

    def _drop_rest(self, step: _Step, complete: Any) -> None:
        """Drop what a step has that is not in its full batch: finished siblings of unfinished
        responses at once, and these when they have come back."""
        left, step.siblings = step.siblings, {}
        for so_far in {id(so_far): so_far for so_far in left.values()}.values():
            self._drop([rollout for rollout in so_far if rollout is not None and rollout.done])
        parts = [part for plan in step.plans for part in plan.parts.values()]
        rest = [sample for part in parts for sample in part if sample.uid in left]
        running = [each for each in rest if each.uid in step.worker_of]
        self._run.dispatcher.withdraw([each for each in running if each.uid not in self._withdrawn])
        never_begun = [each for each in rest if each.uid not in step.worker_of]
        self._run.recorder.on_dropped([Rollout(sample, (), False) for sample in never_begun])

    def _drop(self, rollouts: list[Rollout]) -> None:
        """Drop responses; of a group with a dropped one, the history has the finished ones."""
        self._run.recorder.dropped(rollouts)
        self._run.dispatcher.history.observe([each for each in rollouts if not each.done])

    def _watch_the_last(self, step: _Step) -> None:
        """Watch the last samples of each ranking group, once they are submitted, for those that
        become outliers."""
        for plan in step.plans if self._migrates else []:
            for group in plan.groups:
                last = group.unfinished
                if len(last) > group.last or any(uid not in step.worker_of for uid in last):
                    continue
                group.last = -1
                for sample in last.values():
                    if sample.uid not in self._migrated:
                        worker = self._run.workers[step.worker_of[sample.uid]]
                        on_fire(
                            worker.when(sample, group.outlier_tokens),
                            partial(self._migrate, step, plan, sample),
                        )

    def _migrate(self, step: _Step, plan: Plan, sample: Sample, reached: Any) -> None:
        """Migrate an outlier (§6.3): to another worker of its step or, if none is busy with a
        longer group, into the next."""
        if sample.uid not in step.siblings:
            return  # it has ended at this very boundary
        self._migrated.add(sample.uid)
        # A step keeps a response, or a batch of those that it over-samples and will not draw again.
        least = 1 if self._run.dynamic_sampling is not None else self._enough or 1
        target = plan.destination(
            step.worker_of[sample.uid],
            Counter(worker for uid, worker in step.worker_of.items() if uid in step.siblings),
        )
        if target is not None:
            step.worker_of[sample.uid] = target
            self._run.dispatcher.move(sample, target)
        elif step.kept > least and not any(later.batch.full for later in self._steps[step.k + 1 :]):
            # a full batch takes no more
            step.kept -= 1
            self._withdrawn.add(sample.uid)
            self._run.dispatcher.withdraw([sample])

    def _carry(self, step: _Step, rollout: Rollout) -> None:
        """Carry a response into the next unfinished step: to the worker predicted to end last, when
        it begins or at once."""
        later = self._step(step.k + 1)
        if later.batch.full:
            self._drop([rollout])
            return
        while not later.siblings and self._run.dynamic_sampling is None:
            later = self._step(later.k + 1)
        carried = rollout._replace(carried_tokens=rollout.tokens)
        later.kept += 1
        later.batch.awaited += 1
        later.siblings[rollout.sample.uid] = [None]
        if (last_worker := later.plans[0].last_worker) in later.ends_s:
            self._submit(later, [carried], last_worker)
        else:
            later.carried.append(carried)
