"""Several jobs on one cluster by time-sharing: a pool of GPUs belongs to one job at a time.

python experiments/share.py a.yaml b.yaml [KEY=VALUE …]

Jobs with GPUs of their own for rollout and training (`split`) take a pool for a phase: while one job
trains, another rolls out, both on-policy. Colocated jobs (`verl_colocated`) take all GPUs for a step. A
pool is lent in the order of the requests. When the job before was another one, its states first go to
its hosts, then this job's come back: weights at the rollout workers; weights and optimizer states at the
trainer. All jobs run on one SimPy clock, each with a result as of a run alone; its waiting is a span
`wait_for_pool`.

Invariant: no GPU has two jobs at an instant (`require_exclusive`). A job keeps its lengths, batches and
updates; only its seconds change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import simpy
import typer
from rich.console import Console

from simrl.errors import InputError, refuse
from simrl.pipelines.batchwise import batchwise
from simrl.pipelines.context import RunContext
from simrl.profile.precision import weight_bytes_per_gpu
from simrl.result.metrics import summary
from simrl.result.result import Result
from simrl.runtime.events import gather, on_fire
from simrl.runtime.rollout import Rollout
from simrl.runtime.simulated_trainer import SimulatedTrainer
from simrl.runtime.trainer import Rewarder, Trainer
from simrl.scenario.load import load_scenarios
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import Schedule, simulate_prepared, simulated_learners, simulated_workers
from simrl.training.costs import Ints
from simrl.training.weight_sync import PINNED_SHARE

WAITS = "wait_for_pool"
SAME_S = 1e-9


class Pool(simpy.Resource):
    """GPUs that one job has at a time, and the job that had them last."""

    def __init__(self, env: simpy.Environment) -> None:
        super().__init__(env, capacity=1)
        self.last: Job | None = None


@dataclass
class Job:
    """A scenario on shared pools: `copy_s` are the seconds, one way, of its states in each pool."""

    prepared: Prepared
    env: simpy.Environment
    pools: Mapping[str, Pool]
    copy_s: Mapping[str, float]
    over: simpy.Event = field(init=False)
    result: Result | None = None
    waited_s: dict[str, float] = field(default_factory=lambda: {"rollout": 0.0, "train": 0.0})

    def __post_init__(self) -> None:
        self.over = self.env.event()
        self._held: dict[str, simpy.resources.resource.Request] = {}
        self._ended = False
        system = replace(self.prepared.system, pipeline=partial(self._on_pools, self.prepared))
        prepared = replace(self.prepared, system=system)
        learners = partial(_learners, self)
        self.schedule = Schedule(prepared, self.env, simulated_workers, self._updated, learners)
        on_fire(self.over, lambda _: setattr(self, "result", self.schedule.result()))

    def _on_pools(self, prepared: Prepared, run: RunContext) -> simpy.events.ProcessGenerator:
        yield from self.take("rollout")
        yield from prepared.system.pipeline(replace(run, around=self.around))

    def _updated(self, step: int) -> None:
        if step + 1 == self.prepared.scenario.steps:
            self._ended = True
            self.over.succeed()

    def around(self, load: Any) -> simpy.Event:
        """Load weights once the job has the rollout workers."""
        return self.env.process(self._load(load))

    def _load(self, load: Any) -> simpy.events.ProcessGenerator:
        yield from self.take("rollout")
        yield load()

    def take(self, use: str) -> simpy.events.ProcessGenerator:
        """Wait for a pool, and bring the states in; never again after the last update."""
        if self._ended:
            yield self.env.event()
        pool, asked_s = self.pools[use], self.env.now
        self._held[use] = pool.request()
        yield self._held[use]
        self.waited_s[use] += self.env.now - asked_s
        self._span(use, WAITS, asked_s)
        if pool.last not in (None, self):
            taken_s = self.env.now
            yield self.env.timeout(pool.last.copy_s[use] + self.copy_s[use])  # type: ignore[union-attr]
            self._span(use, "switch", taken_s)
        pool.last = self

    def give(self, use: str) -> None:
        """Give a pool back."""
        self.pools[use].release(self._held.pop(use))

    def _span(self, use: str, kind: str, since_s: float) -> None:
        recorder, now_s = self.schedule.recorder, self.env.now
        for lane, (name, _) in enumerate(recorder.lanes):
            if name.startswith(use) and now_s > since_s:
                recorder.span(lane, kind, since_s, now_s, self.schedule.trainer.version)


class _Trainer(SimulatedTrainer):
    """A trainer that takes its pool for an update, or gives all GPUs back after it (colocated)."""

    job: Job

    def _begin(self, lengths: Ints) -> simpy.events.ProcessGenerator:
        if not self.job.prepared.colocated:
            self.job.give("rollout")
            yield from self.job.take("train")
        yield from super()._begin(lengths)

    def _finish(
        self, rollouts: list[Rollout], started_s: float, publish: bool
    ) -> simpy.events.ProcessGenerator:
        step = yield from super()._finish(rollouts, started_s, publish)
        self.job.give("rollout" if self.job.prepared.colocated else "train")
        return step


def _learners(job: Job, schedule: Schedule, lanes: Sequence[int]) -> tuple[Trainer, Rewarder]:
    _, rewarder = simulated_learners(schedule, lanes)
    costs = job.prepared.training_costs(job.prepared.train_gpus)
    trainer = _Trainer(schedule.env, costs, lanes, schedule.recorder)
    trainer.job = job
    return trainer, rewarder


def share(jobs: Sequence[Prepared]) -> list[Job]:
    """Run jobs on one cluster. Raise `InputError` for jobs that cannot share it."""
    for job in jobs:
        _require_phases(job, jobs[0])
    env = simpy.Environment()
    rollout, train = Pool(env), Pool(env)
    pools = {"rollout": rollout, "train": rollout if jobs[0].colocated else train}
    run = [Job(prepared, env, pools, copy_s(prepared)) for prepared in jobs]
    env.run(until=gather(env, [job.over for job in run]))
    require_exclusive([job.result for job in run if job.result is not None])
    return run


def copy_s(job: Prepared) -> dict[str, float]:
    """Return the seconds, one way, in which a job's states in each pool go to or from the hosts. Of
    colocated jobs that the system's own phases move, nothing is left to copy."""
    cluster, training = job.scenario.cluster, job.scenario.training
    precision = job.scenario.precision.weights
    weights = weight_bytes_per_gpu(job.model, job.tp, cluster.dp, cluster.ep, precision)
    weights_s = weights / (PINNED_SHARE * job.gpu.host_bytes_per_s)
    costs = job.training_costs(job.train_gpus)
    states_s = costs.state_bytes / costs.copied_bytes_per_s
    if not job.colocated:
        return {"rollout": weights_s, "train": states_s}
    moved = training.offload == "switch"
    return {"rollout": weights_s * (not training.rollout_offload) + states_s * (not moved)}


def _require_phases(job: Prepared, first: Prepared) -> None:
    """Raise `InputError` for a job that never leaves its pools, or has other pools than the first."""
    system, scenario = job.system, job.scenario
    pipeline = system.pipeline
    alternates = isinstance(pipeline, partial) and pipeline.func is batchwise
    takes_turns = alternates and pipeline.keywords.get("eta") == 0  # type: ignore[union-attr]
    pools, of_first = (
        (one.rollout_gpus, one.train_gpus, one.gpu.name, one.train_gpu.name, one.colocated)
        for one in (job, first)
    )
    refuse(
        (
            not takes_turns or job.is_elastic or job.layouts,
            f"{scenario.name}: system {system.name} never leaves its GPUs to another job; use split or verl_colocated",
        ),
        (
            pools != of_first,
            f"{scenario.name}: its pools are {job.rollout_gpus} and {job.train_gpus} GPUs of {job.gpu.name} and "
            f"{job.train_gpu.name}, and of {first.scenario.name} {first.rollout_gpus} and {first.train_gpus} of "
            f"{first.gpu.name} and {first.train_gpu.name}; give both one cluster and one rollout_share",
        ),
        (
            scenario.faults
            or scenario.evaluation
            or job.drafts
            or job.tail
            or job.judge
            or job.prefill,
            f"{scenario.name}: faults, evaluations, drafts, judges and prefill pools of jobs that share a cluster are not "
            "modelled; leave them out",
        ),
    )


def busy(result: Result) -> Iterable[tuple[str, float, float, int]]:
    """Yield the pool, the seconds and the GPUs of each span in which a job uses GPUs."""
    names = ("lane", "kind", "started_s", "ended_s", "gpus")
    columns = (result.spans.column(name).to_pylist() for name in names)
    for lane, kind, started_s, ended_s, gpus in zip(*columns, strict=True):
        if kind not in ("idle", WAITS):
            yield lane.partition("-")[0], started_s, ended_s, gpus


def require_exclusive(results: Sequence[Result]) -> None:
    """Raise `RuntimeError` if two jobs use the GPUs of a pool at one instant."""
    for pool in ("rollout", "train"):
        uses = sorted(
            (started_s, ended_s, job)
            for job, result in enumerate(results)
            for of, started_s, ended_s, _ in busy(result)
            if of == pool
        )
        until_s = dict.fromkeys(range(len(results)), 0.0)
        for started_s, ended_s, job in uses:
            others_s = max((at for other, at in until_s.items() if other != job), default=0.0)
            if started_s < others_s - SAME_S * max(others_s, 1.0):
                raise RuntimeError(f"{pool}: two jobs have its GPUs at {started_s} s")
            until_s[job] = max(until_s[job], ended_s)


def table(jobs: Sequence[Job]) -> list[str]:
    """Return the lines of a comparison: each job alone and shared, then the cluster."""
    lines = ["job | s a step alone | s a step shared | waits for rollout GPUs | for train GPUs"]
    lines.append("--- | ---: | ---: | ---: | ---:")
    alone_s, used, alone_used = 0.0, 0.0, 0.0
    for job in jobs:
        alone, warmup = simulate_prepared(job.prepared), job.prepared.scenario.warmup_steps
        assert job.result is not None
        end_s, steps = job.result.metadata["end_s"], job.result.steps.num_rows
        shares = [f"{job.waited_s[use] / end_s:.0%}" for use in ("rollout", "train")]
        seconds = [summary(result, warmup)["step_s"] for result in (alone, job.result)]
        name = f"{job.prepared.scenario.name} ({job.prepared.model.name}, {steps} updates)"
        lines.append(" | ".join([name, *(f"{s:.1f}" for s in seconds), *shares]))
        alone_s += alone.metadata["end_s"]
        used, alone_used = (
            total + sum((b - a) * gpus for _, a, b, gpus in busy(of))
            for total, of in ((used, job.result), (alone_used, alone))
        )
    gpus = jobs[0].prepared.gpus
    shared_s = max(job.result.metadata["end_s"] for job in jobs if job.result is not None)
    lines.append(
        f"\nCluster of {gpus} GPUs: {alone_s:.0f} s one job after the other ({1 - alone_used / alone_s / gpus:.0%} idle), "
        f"{shared_s:.0f} s shared ({1 - used / shared_s / gpus:.0%} idle): {alone_s / shared_s:.2f}× as fast."
    )
    return lines


def main(
    files: Annotated[list[str], typer.Argument(help="two scenario files or more, and KEY=VALUE")],
) -> None:
    """Print the table of the files' jobs, which share one cluster; KEY=VALUE changes all of them."""
    names = [argument for argument in files if "=" not in argument]
    changes = tuple(argument for argument in files if "=" in argument)
    try:
        prepared = []
        for file in names:
            scenarios = load_scenarios(file, changes)
            refuse(
                (
                    len(scenarios) != 1,
                    f"{file}: {len(scenarios)} runs; a job is one: give one system",
                )
            )
            prepared += map(prepare, scenarios)
        refuse((len(prepared) < 2, "give the files of two jobs or more"))
        Console(soft_wrap=True).print(
            "\n".join(table(share(prepared))), markup=False, highlight=False
        )
    except InputError as error:
        print(f"share: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
