"""simulate(scenario) -> Result: builds the actors of a prepared scenario, runs its pipeline and
closes open spans."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.core import EmptySchedule

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.elastic import ElasticPool, adapt
from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.errors import InputError, StoppedError
from simrl.pipelines.context import Layout, RunContext
from simrl.pipelines.dynamic_sampling import rewards_differ
from simrl.profile.profile import TableProfile, Tables
from simrl.profile.rollout_times import RolloutTimes
from simrl.result.result import PREFILL_LANE, REST_LANE, Lane, Result
from simrl.runtime.agents import Agents
from simrl.runtime.drafting import Drafting, tail_drafting
from simrl.runtime.faults import inject
from simrl.runtime.history import LengthHistory
from simrl.runtime.prompt_keys import PromptKeys
from simrl.runtime.recorder import Recorder
from simrl.runtime.simulated_trainer import SimulatedRewarder, SimulatedTrainer
from simrl.runtime.simulated_worker import (
    SimulatedWorker,
    cache_totals,
    simulated_workers as worker_fleet,
)
from simrl.runtime.spot_trainer import spot_trainer
from simrl.runtime.trainer import Rewarder, Trainer
from simrl.runtime.worker import Worker
from simrl.scenario.model import Scenario
from simrl.simulate.evaluation import Evaluator
from simrl.simulate.judge import Judge
from simrl.simulate.length_ranker import RankedLengths
from simrl.simulate.memory import cache_capacity_tokens
from simrl.simulate.prepare import Prepared, longest_allowed, prepare
from simrl.speculation.deployment import typical_context_tokens
from simrl.speculation.plan import draft_costs
from simrl.speculation.siblings import old_lengths
from simrl.trace.workload import Workload
from simrl.training.costs import deal, longest_first, pack

MakeLearners = Callable[["Schedule", Sequence[int]], tuple[Trainer, Rewarder]]


def simulate(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> Result:
    """Run a scenario to its last policy update; `on_step` is called after each. Raise `InputError`
    as `prepare` does."""
    return simulate_prepared(prepare(scenario), on_step)


def simulate_prepared(
    prepared: Prepared,
    on_step: Callable[[int], None] | None = None,
    make_learners: MakeLearners | None = None,
) -> Result:
    """Run a prepared scenario to its last policy update; `on_step` is called after each, and
    `make_learners` is as in `Schedule`."""
    # A run makes millions of small objects and hardly any reference cycles: the search for cycles
    # takes a third of its time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _result_of(prepared, on_step, make_learners)
    finally:
        if collects:
            gc.enable()


def _result_of(
    prepared: Prepared,
    on_step: Callable[[int], None] | None,
    make_learners: MakeLearners | None,
) -> Result:
    # A function of its own: the schedule, whose actors refer to each other, must be out of reach
    # when garbage is collected again, or it enters an older generation and the objects of the run
    # are kept for long.
    schedule = Schedule(prepared, simpy.Environment(), simulated_workers, on_step, make_learners)
    schedule.run()
    return schedule.result()


class _Fleet(NamedTuple):
    """Workers of one size, with their dispatcher and what was profiled of them before the run."""

    workers: Sequence[Worker]
    dispatcher: Dispatcher
    times: RolloutTimes


class Schedule:
    """A prepared scenario with its actors, on SimPy's clock or the wall's.

    `make_workers` gives `units` rollout workers, and may look up the rest here; `make_learners`
    gives a trainer for some lanes and a rewarder (default: simulated ones). `run` goes to the last
    policy update; `result` is what has happened so far, also if something stopped the run. `once`:
    AReaL and verl's fully asynchronous recipe submit nothing after the trace's last group, and
    `StoppedError` is raised if it has too few groups for the updates. All other pipelines repeat
    the trace."""

    def __init__(
        self,
        prepared: Prepared,
        env: simpy.Environment,
        make_workers: Callable[[Schedule], Sequence[Worker]],
        on_step: Callable[[int], None] | None = None,
        make_learners: MakeLearners | None = None,
        once: bool = False,
    ) -> None:
        scenario, system = prepared.scenario, prepared.system
        self.prepared, self.env = prepared, env
        self.units, lanes, train_lanes = _lanes(prepared)
        self._simulates, self.deployment = make_workers is simulated_workers, prepared.deployment
        self._by_groups = self._simulates and prepared.only_ends_count
        self._inputs = prepared.inputs()
        self._finished = env.event()

        def stepped(step: int) -> None:
            if on_step is not None:
                on_step(step)
            if step + 1 == scenario.steps:
                self._finished.succeed()

        lanes += (
            [Lane(f"judge-{i:03d}", judge.tp) for i in range((judge.gpus or 0) // judge.tp)]
            if (judge := scenario.judge)
            else []
        )
        self.recorder = Recorder(lanes, stepped, self._forget)
        self.workload = Workload(prepared.trace, once)
        self.spot = spot_trainer(
            prepared.drafts,
            self.deployment,
            self.recorder,
            self.units,
            prepared.colocated,
            system.log_probs > 0,
        )
        self.agents = Agents(env, prepared.agents)
        self.prompts = PromptKeys(system.on_update.salted)
        self.workers = list(make_workers(self))
        accuracy = system.dispatch.ranker_accuracy
        ranker = (
            None if accuracy is None else RankedLengths(prepared.trace, accuracy, scenario.seed)
        )
        self._fleets = [self._fleet(prepared, self.workers, ranker)]
        self.dispatcher = self._fleets[0].dispatcher
        if prepared.prefill is not None:
            self._fleets.append(self._prefill_fleet(prepared.prefill))
        self.agents.on_turn = self.dispatcher.turn
        self.trainer, self.rewarder = (make_learners or simulated_learners)(self, train_lanes)
        context = RunContext(
            env=env,
            workers=self.workers,
            dispatcher=self.dispatcher,
            trainer=self.trainer,
            rewarder=self.rewarder,
            recorder=self.recorder,
            workload=self.workload,
            times=self._fleets[0].times,
            steps=scenario.steps,
            context_tokens=longest_allowed(prepared.trace),
            on_update=system.on_update,
            best_of_n=prepared.tail.rule if prepared.tail else None,
            dynamic_sampling=system.dynamic_sampling,
            accepts=rewards_differ if system.filter_groups is True else lambda group: True,
            prefill=[worker for fleet in self._fleets[1:] for worker in fleet.workers],
        )
        if scenario.evaluation is not None and prepared.evaluation_trace is not None:
            evaluator = Evaluator(
                context,
                scenario.evaluation,
                prepared.evaluation_trace,
                prepared.evaluates_beside,
            )
            context = replace(context, around=evaluator.around)
        if prepared.layouts:
            context = replace(context, layouts=self._layouts(context, prepared))
        if prepared.is_elastic:
            trainer, rank = cast(SimulatedTrainer, self.trainer), scenario.training.gpus_per_rank
            pool = ElasticPool(
                env,
                self.workers,
                self.dispatcher,
                trainer,
                self.recorder,
                prepared.may_train,
                rank,
            )
            context = replace(context, pool=pool)
        if system.adapt_split_every:
            env.process(adapt(env, pool, system.adapt_split_every))
        self._faults = inject(
            env, scenario.faults, scenario.seed, [fleet[:2] for fleet in self._fleets]
        )
        env.process(system.pipeline(context))

    def _fleet(
        self, size: Prepared, workers: Sequence[Worker], history: LengthHistory | None
    ) -> _Fleet:
        """Return workers with their dispatcher and their times."""
        trace, limits = size.trace, size.limits
        capacity, most = (
            cache_capacity_tokens(limits, typical_context_tokens(trace)),
            limits.max_num_seqs,
        )
        config, kv_tokens = size.scenario.agents, limits.dp * capacity
        dispatcher = Dispatcher(
            self.env,
            workers,
            size.system.dispatch,
            self.recorder,
            kv_tokens,
            config.max_concurrent,
            history,
            config.acting_token_weight or 1.0,
        )
        for worker in cast(Sequence[SimulatedWorker], workers) if self._by_groups else ():
            worker.offer_groups(dispatcher.unfinished)
        costs = draft_costs(size.drafts, size.deployment, most) if size.drafts else None
        prompt_tokens = round(float(trace.column("prompt_tokens").mean()))
        return _Fleet(
            workers,
            dispatcher,
            RolloutTimes(
                size.profile,
                trace.metadata.cap_tokens,
                most,
                prompt_tokens,
                capacity,
                costs,
                replace(size.tau, spans={}) if size.tau else None,
            ),
        )

    def _prefill_fleet(self, size: Prepared) -> _Fleet:
        """Return prefill workers, and let the other workers decode what they prefill."""
        workers = worker_fleet(
            self.env,
            size.workers,
            size.profile.tables,
            size.limits,
            size.costs,
            self.workload.responses,
            self.recorder,
            prompts=self.prompts,
            decode_lanes=self.units,
        )
        fleet = self._fleet(size, workers, None)
        self.agents.pool = fleet.dispatcher
        self.agents.kv_s_per_token = self.prepared.costs.fetch_s_per_token
        return fleet

    def _layouts(self, run: RunContext, first: Prepared) -> tuple[Layout, ...]:
        """Return the run in each size of its planner (RollPacker), the cluster's first. Larger
        workers have several lanes."""
        layouts = [Layout(run, first.tp, first.costs.load_s, partial(_take_over, self.workers))]
        for size in first.layouts:
            lanes, agents = size.gpus_per_worker // first.gpus_per_worker, copy(self.agents)
            agents.rules = size.agents
            workers = worker_fleet(
                self.env,
                size.workers,
                size.profile.tables,
                size.limits,
                size.costs,
                self.workload.responses,
                self.recorder,
                agents=agents,
                lanes=lanes,
            )
            fleet = self._fleet(size, workers, self.dispatcher.history)
            self._fleets.append(fleet)
            formed = replace(
                run,
                workers=workers,
                dispatcher=fleet.dispatcher,
                times=fleet.times,
                lanes_each=lanes,
            )
            layouts.append(Layout(formed, size.tp, size.costs.load_s, partial(_take_over, workers)))
        return tuple(layouts)

    def _forget(self, uids: Sequence[int]) -> None:
        self.workload.forget(uids)
        for fleet in self._fleets:
            fleet.dispatcher.forget(uids)

    def run(self) -> None:
        """Run to the last policy update; later work of the pipeline is not part of the result. If
        the run stands still before, nothing but faults being under way or due, raise
        `StoppedError`, or `InputError` if its pipeline submits no group."""
        try:
            self.env.run(until=self._finished)
        except RuntimeError as error:
            if not isinstance(error.__context__, EmptySchedule):
                raise
            stream = None if self.dispatcher.lost else self.recorder.facts.get("stream")
            if stream is not None and (words := stream.starved()):
                raise InputError(
                    f"system {self.prepared.system.name} stands still: {words}"
                ) from error
            raise StoppedError(self._standstill()) from error

    def _standstill(self) -> str:
        """Return a line that says what a run that stands still waits for."""
        at_workers = sum(int(fleet.dispatcher.unfinished.sum()) for fleet in self._fleets)
        waiting = sum(len(fleet.dispatcher.waiting()) for fleet in self._fleets)
        tools = self.agents.tools and f", {self.agents.tools.waiting} tool calls wait for a slot"
        lost = ", ".join(map(str, self.dispatcher.lost))
        return (
            f"{self.prepared.system.name} stands still after {len(self.recorder.steps)} of {self.prepared.scenario.steps} "
            f"updates: no forward pass, load, tool call, reward or training is under way or due; {at_workers} samples are at "
            f"workers, {waiting} wait for one{tools or ''}{f'; lost: worker {lost}' if lost else ''}. Its pipeline waits for "
            "something that never happens: report this with the scenario"
        )

    def result(self) -> Result:
        """Return the result up to now. Call it once: it closes open spans and requests."""
        prepared, now_s, facts = self.prepared, self.env.now, self.recorder.facts
        for workers, dispatcher, _ in self._fleets:
            for worker in workers:
                worker.stop(now_s)
            if workers[0].groups is not None:
                workers[0].groups.stop()
            for rollout in dispatcher.waiting():
                self.recorder.request_ended(rollout, 0)
        metadata = {
            **self._inputs,
            "full_batch": _full_batch(
                prepared.profile, prepared.limits, *self.recorder.context().astype(np.float64)
            ),
            "faults": self._faults,
        }
        if prepared.system.reads_tau:
            measured, of = self._fleets[0].times.tau, prepared.profile.metadata
            metadata["tau"] = {
                "kind": "measured" if measured else "computed",
                "source": measured.source if measured else f"{of.model} on {of.gpu}, tp {of.tp}",
            }
        if "admission" in facts:
            metadata["admission"] = dict(facts["admission"].seconds)
        metadata |= {
            key: facts[key]
            for key in ("planner", "stale_samples", "history")
            if key in facts and facts[key] != {}
        }
        if self._simulates and (prepared.prefill or prepared).limits.prefix_caching:
            metadata["prefix_cache"] = cache_totals(
                cast(SimulatedWorker, worker) for fleet in self._fleets for worker in fleet.workers
            )
        if prepared.has_turns or self.agents.rules.deadline_s < np.inf:
            self.agents.stop()
            metadata["agents"] = self.agents.facts() | (
                self.dispatcher.programs.figures if prepared.system.dispatch.programs else {}
            )
        if self.spot is not None:
            metadata |= self.spot.facts(now_s)
        if isinstance(self.rewarder, Judge):
            metadata["judge"] |= self.rewarder.stop(now_s)
        return self.recorder.result(now_s, metadata)


def _lanes(prepared: Prepared) -> tuple[int, list[Lane], list[int]]:
    """Return the number of units (rollout workers; in an elastic pool, also GPUs that may become
    one), all lanes, first the lanes of units, and the indices of the lanes that train."""
    unit, units = prepared.gpus_per_worker, prepared.workers
    if prepared.is_elastic:
        units = prepared.scenario.cluster.gpus // unit
    lanes = [Lane(f"rollout-{i:03d}", unit) for i in range(units)]
    if size := prepared.prefill:
        lanes += [
            Lane(f"{PREFILL_LANE}-{units + i:03d}", size.gpus_per_worker)
            for i in range(size.workers)
        ]
    if prepared.is_elastic:
        return units, lanes, list(range(prepared.workers, units))
    if not prepared.colocated:
        rest = (
            prepared.gpus - prepared.train_gpus - prepared.rollout_gpus
        )  # too few for another worker: idle
        lanes.append(Lane("train", prepared.train_gpus))
        return units, [*lanes, *([Lane(REST_LANE, rest)] if rest else [])], [len(lanes) - 1]
    if prepared.train_gpus > prepared.rollout_gpus:  # too few for another worker: they train only
        lanes.append(Lane(REST_LANE, prepared.train_gpus - prepared.rollout_gpus))
    trained = len(lanes) if prepared.prefill else -(-prepared.train_gpus // unit)
    return units, lanes, list(range(min(trained, len(lanes))))


def simulated_workers(schedule: Schedule) -> list[SimulatedWorker]:
    """Return the workers on SimPy's clock."""
    prepared, drafting, drafters = schedule.prepared, None, {}
    deployment, seed, most = (
        schedule.deployment,
        prepared.scenario.seed,
        prepared.limits.max_num_seqs,
    )
    if prepared.drafts is not None:
        drafting = Drafting(prepared.drafts, deployment, most, seed, schedule.spot)
        schedule.recorder.facts |= drafting.facts
        schedule.recorder.on_dropped = partial(drafting.dropped, schedule.env)
    if prepared.tail is not None:
        drafters = tail_drafting(prepared.tail, deployment, most, seed)
    return worker_fleet(
        schedule.env,
        schedule.units,
        prepared.profile.tables,
        prepared.limits,
        prepared.costs,
        schedule.workload.responses,
        schedule.recorder,
        drafting,
        drafters,
        schedule.agents,
        prompts=schedule.prompts,
    )


def _take_over(workers: Sequence[Worker], version: int) -> None:
    """Let workers follow others on their GPUs, which have loaded, and evaluated, `version` last."""
    for worker in workers:
        cast(SimulatedWorker, worker).policy_version = version


def simulated_learners(schedule: Schedule, train_lanes: Sequence[int]) -> tuple[Trainer, Rewarder]:
    """Return a trainer whose phases take the times of the scenario's training costs, and a
    rewarder."""
    prepared, env = schedule.prepared, schedule.env
    costs = prepared.training_costs(prepared.train_gpus)
    accepts = rewards_differ if prepared.system.filter_groups == "after_log_probs" else None
    drafts, steps = prepared.drafts, prepared.scenario.steps
    old = drafts and drafts.speculation.verify == "trainer"
    trainer = SimulatedTrainer(
        env,
        costs,
        train_lanes,
        schedule.recorder,
        schedule.spot,
        accepts,
        partial(old_lengths, prepared.trace, steps) if old else None,
    )
    engines, responses = prepared.judge, schedule.workload.responses
    rule = SimulatedRewarder(
        env,
        prepared.scenario.training.reward_s,
        responses,
        kills=prepared.scenario.agents.deadline_s is not None,
    )
    return trainer, Judge(
        env, prepared, engines, rule, schedule.dispatcher, schedule.recorder, responses
    ) if engines else rule


def _full_batch(
    profile: TableProfile, limits: Limits, tokens: NDArray[np.float64], prompts: NDArray[np.float64]
) -> dict[str, Any] | None:
    """Return the most sequences that a worker can decode at a time at the mean context in which
    this run's tokens were generated, and the seconds of such a pass (the ideal of `simrl explain`).
    None if nothing was generated."""
    if not tokens.sum():
        return None
    context = float(np.average(prompts + tokens / 2, weights=tokens))
    sequences = max(
        min(limits.max_num_seqs, int(cache_capacity_tokens(limits, context) / context)), 1
    )
    pass_s = profile.decode_s(sequences, context)
    return {"sequences": limits.dp * sequences, "context_tokens": context, "pass_s": pass_s}


def compile_engine(dp: int = 1) -> None:
    """Compile the kernels of the engine, or of `dp` ranks, or load them: numba keeps them on disk,
    for later processes too."""
    axis, flat = np.array([0.0, 8.0]), np.zeros(2)
    tables = Tables(axis, flat, axis, flat, axis, axis, axis, axis, np.zeros((2, 2, 2, 2)), 1.0)
    limits = Limits(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        block_size=1,
        kv_blocks=8,
        hold_paused=False,
        dp=dp,
    )
    engine = one_engine(tables, limits)
    engine.submit(1, 2)
    engine.settle(0.0)
    engine.recompute_running()
    engine.run_until_idle()


def compile_training() -> None:
    """Compile the kernels of a training step, or load them."""
    lengths = np.array([2, 1])
    pack(lengths, longest_first(lengths), deal(lengths, longest_first(lengths), 2), 3)
