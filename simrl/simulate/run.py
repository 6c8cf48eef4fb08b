"""simulate(scenario) -> Result: builds the actors of a prepared scenario, runs its pipeline and closes open spans."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.core import EmptySchedule

from simrl.dispatch.dispatcher import Dispatcher
from simrl.dispatch.split import adapt
from simrl.dispatch.streamrl import LongestFirst
from simrl.dispatch.waiting import Fifo
from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.errors import StoppedError
from simrl.pipelines.context import RunContext
from simrl.pipelines.dynamic_sampling import rewards_differ
from simrl.profile.profile import Tables
from simrl.profile.rollout_times import RolloutTimes
from simrl.result.result import REST_LANE, Lane, Result
from simrl.runtime.agents import Agents
from simrl.runtime.drafting import Drafting, tail_drafting
from simrl.runtime.faults import inject
from simrl.runtime.history import LengthHistory
from simrl.runtime.recorder import Recorder
from simrl.runtime.simulated_trainer import SimulatedRewarder, SimulatedTrainer
from simrl.runtime.simulated_worker import SimulatedWorker
from simrl.runtime.simulated_worker import simulated_workers as worker_fleet
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.runtime.trainer import Rewarder, Trainer
from simrl.runtime.worker import Worker
from simrl.scenario.model import Scenario
from simrl.simulate.length_ranker import RankedLengths
from simrl.simulate.memory import room_tokens
from simrl.simulate.prepare import Prepared, prepare
from simrl.speculation.deployment import typical_context_tokens
from simrl.speculation.draft_times import pace_of
from simrl.speculation.plan import draft_costs
from simrl.trace.workload import Workload
from simrl.training.costs import deal, longest_first, pack


def simulate(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> Result:
    """Run a scenario to its last policy update; `on_step` is called after each. Raise `InputError` as `prepare` does."""
    return simulate_prepared(prepare(scenario), on_step)


def simulate_prepared(prepared: Prepared, on_step: Callable[[int], None] | None = None) -> Result:
    """Run a prepared scenario to its last policy update; `on_step` is called after each."""
    # A run makes millions of small objects and hardly any reference cycles: the search for cycles takes a third of its time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _result_of(prepared, on_step)
    finally:
        if collects:
            gc.enable()


def _result_of(prepared: Prepared, on_step: Callable[[int], None] | None) -> Result:
    # A function of its own: the schedule, whose actors refer to each other, must be out of reach when garbage is collected
    # again, or it enters an older generation and the objects of the run are kept for long.
    schedule = Schedule(prepared, simpy.Environment(), simulated_workers, on_step)
    schedule.run()
    return schedule.result()


class Schedule:
    """A prepared scenario with its actors, on SimPy's clock or the wall's.

    `make_workers` gives `units` rollout workers, and may look up the rest here; `make_learners` gives a trainer for some lanes
    and a rewarder (default: simulated ones). `run` goes to the last policy update; `result` is what has happened so far, also
    if something stopped the run. `once`: AReaL and verl's fully asynchronous recipe submit nothing after the trace's last
    group, and `StoppedError` is raised if it has too few groups for the updates. All other pipelines repeat the trace."""

    def __init__(
        self,
        prepared: Prepared,
        env: simpy.Environment,
        make_workers: Callable[[Schedule], Sequence[Worker]],
        on_step: Callable[[int], None] | None = None,
        make_learners: Callable[[Schedule, Sequence[int]], tuple[Trainer, Rewarder]] | None = None,
        once: bool = False,
    ) -> None:
        scenario, system = prepared.scenario, prepared.system
        self.prepared, self.env = prepared, env
        adapts = system.adapt_split_every > 0
        self.units = scenario.cluster.gpus // prepared.gpus_per_worker if adapts else prepared.workers
        lanes, train_lanes = _lanes(prepared, self.units)
        self._finished = env.event()

        def stepped(step: int) -> None:
            if on_step is not None:
                on_step(step)
            if step + 1 == scenario.steps:
                self._finished.succeed()

        self.recorder = Recorder(lanes, stepped, self._forget)
        self.workload = Workload(prepared.trace, once)
        self.spot = _spot_trainer(prepared, self.recorder, self.units)
        self.agents = Agents(env, prepared.agents)
        self.workers = list(make_workers(self))
        accuracy = system.dispatch.ranker_accuracy
        ranker = None if accuracy is None else RankedLengths(prepared.trace, accuracy, scenario.seed)
        self.dispatcher = self._dispatcher(self.workers, prepared.limits, ranker)
        self._simulates = make_workers is simulated_workers
        if self._simulates:
            _offer_groups(prepared, cast(list[SimulatedWorker], self.workers), self.dispatcher)
        self._everybody: list[tuple[Dispatcher, Sequence[Worker]]] = [(self.dispatcher, self.workers)]
        self.trainer, rewarder = (make_learners or simulated_learners)(self, train_lanes)
        context = RunContext(
            env=env,
            workers=list(self.workers),
            dispatcher=self.dispatcher,
            trainer=self.trainer,
            rewarder=rewarder,
            recorder=self.recorder,
            workload=self.workload,
            times=self._times(prepared),
            steps=scenario.steps,
            best_of_n=prepared.tail.rule if prepared.tail else None,
            dynamic_sampling=system.dynamic_sampling,
            accepts=rewards_differ if system.filter_groups else lambda group: True,
            tp=prepared.tp,
            load_s=prepared.costs.load_s,
            form=partial(_take_over, self.workers),
        )
        context = replace(context, layouts=tuple(self._formed(context, layout) for layout in prepared.layouts))
        if adapts:
            self._lend(train_lanes)
        self._faults = inject(env, scenario.faults, scenario.seed, self.workers, self.dispatcher)
        env.process(system.pipeline(context))

    def _room_tokens(self, limits: Limits) -> int:
        return room_tokens(limits, typical_context_tokens(self.prepared.trace))

    def _dispatcher(self, workers: Sequence[Worker], limits: Limits, history: LengthHistory | None) -> Dispatcher:
        rule, most = self.prepared.system.dispatch, self.prepared.scenario.agents.max_concurrent
        room = limits.dp * self._room_tokens(limits)
        return Dispatcher(self.env, workers, rule, self.recorder, room, most, history)

    def _times(self, layout: Prepared) -> RolloutTimes:
        trace, most = self.prepared.trace, layout.limits.max_num_seqs
        return RolloutTimes(
            layout.profile,
            trace.metadata.cap_tokens,
            most,
            round(float(trace.column("prompt_tokens").mean())),
            self._room_tokens(layout.limits),
            draft_costs(layout.drafts, layout, most) if layout.drafts else None,
        )

    def _formed(self, run: RunContext, layout: Prepared) -> RunContext:
        """Return the run in another layout, whose workers are simulated ones on several of the lanes each."""
        each = layout.gpus_per_worker // self.prepared.gpus_per_worker
        shared = layout.profile.tables, layout.limits, layout.costs, self.workload.responses
        agents = copy(self.agents)
        agents.rules = layout.agents
        workers = worker_fleet(self.env, layout.workers, *shared, self.recorder, agents=agents, lanes=each)
        dispatcher = self._dispatcher(workers, layout.limits, self.dispatcher.history)
        _offer_groups(layout, workers, dispatcher)
        self._everybody.append((dispatcher, workers))
        return replace(
            run,
            workers=list(workers),
            dispatcher=dispatcher,
            times=self._times(layout),
            tp=layout.tp,
            lanes_each=each,
            load_s=layout.costs.load_s,
            form=partial(_take_over, workers),
        )

    def _forget(self, uids: Sequence[int]) -> None:
        self.workload.forget(uids)
        for dispatcher, _ in self._everybody:
            dispatcher.forget(uids)

    def _lend(self, train_lanes: Sequence[int]) -> None:
        """Give the trainer its workers' GPUs, and let the split adapt while it runs."""
        for lane in train_lanes:
            self.dispatcher.retire(lane)
            self.workers[lane].lend()
            self.recorder.role(lane, "train", 0.0)
        every, trainer = self.prepared.system.adapt_split_every, cast(SimulatedTrainer, self.trainer)
        self.env.process(
            adapt(self.env, self.workers, self.dispatcher, trainer, self.recorder, every, self.prepared.may_train)
        )

    def run(self) -> None:
        """Run to the last policy update; later work of the pipeline is not part of the result. Raise `StoppedError` if the run
        stands still before: nothing but faults is under way or due."""
        try:
            self.env.run(until=self._finished)
        except RuntimeError as error:
            if not isinstance(error.__context__, EmptySchedule):
                raise
            raise StoppedError(self._standstill()) from error

    def _standstill(self) -> str:
        """Return a line that says what a run that stands still waits for."""
        at_workers = sum(int(dispatcher.unfinished.sum()) for dispatcher, _ in self._everybody)
        waiting = sum(len(dispatcher.waiting()) for dispatcher, _ in self._everybody)
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
        for dispatcher, workers in self._everybody:
            groups = workers[0].groups
            for worker in workers:
                worker.stop(self.env.now)
            if groups is not None:
                groups.stop()
            for rollout in dispatcher.waiting():
                self.recorder.request_ended(rollout, 0)
        metadata = {
            **self.prepared.inputs(),
            "full_batch": _full_batch(self.prepared, *self.recorder.context().astype(np.float64)),
            "faults": self._faults,
        }
        if (admission := self.recorder.facts.get("admission")) is not None:
            metadata["admission"] = dict(admission.seconds)
        if (planned := self.recorder.facts.get("planner")) is not None:
            metadata["planner"] = planned
        if self._simulates and self.prepared.limits.prefix_caching:
            metadata["prefix_cache"] = _prefix_cache(
                [cast(SimulatedWorker, each) for _, workers in self._everybody for each in workers]
            )
        if self._simulates and (self.prepared.has_turns or self.agents.rules.deadline_s < np.inf):
            self.agents.stop()
            metadata["agents"] = self.agents.facts()
        if self.spot is not None:
            self.spot.stop(self.env.now)
            metadata["drafter_updates_behind"] = self.spot.behind
            metadata["drafter_training"] = {"iterations": self.spot.iterations, "saving_s": self.spot.saving_s}
        return self.recorder.result(self.env.now, metadata)


def _lanes(prepared: Prepared, units: int) -> tuple[list[Lane], list[int]]:
    """Return all lanes, first the lanes of `units` rollout workers, and the indices of the lanes that train."""
    unit = prepared.gpus_per_worker
    lanes = [Lane(f"rollout-{i:03d}", unit) for i in range(units)]
    if prepared.system.adapt_split_every:
        return lanes, list(range(prepared.workers, units))
    if not prepared.colocated:
        rest = prepared.gpus - prepared.train_gpus - units * unit  # too few for another worker: idle
        return [*lanes, Lane("train", prepared.train_gpus), *([Lane(REST_LANE, rest)] if rest else [])], [units]
    if prepared.train_gpus > units * unit:  # too few for another worker: they train only
        lanes.append(Lane(REST_LANE, prepared.train_gpus - units * unit))
    return lanes, list(range(min(-(-prepared.train_gpus // unit), len(lanes))))


def simulated_workers(schedule: Schedule) -> list[SimulatedWorker]:
    """Return the workers on SimPy's clock."""
    prepared, drafting, drafters = schedule.prepared, None, {}
    seed, most = prepared.scenario.seed, prepared.limits.max_num_seqs
    if prepared.drafts is not None:
        drafting = Drafting(prepared.drafts, prepared, most, seed, schedule.spot)
    if prepared.tail is not None:
        drafters = tail_drafting(prepared.tail, prepared, most, seed)
    shared = prepared.profile.tables, prepared.limits, prepared.costs, schedule.workload.responses, schedule.recorder
    more = drafting, drafters, schedule.agents
    return worker_fleet(schedule.env, schedule.units, *shared, *more)


def _offer_groups(prepared: Prepared, workers: Sequence[SimulatedWorker], dispatcher: Dispatcher) -> None:
    """Let workers generate groups of which only the end is an event; not where each response matters: for drafting, turns of an
    environment, a rule of dispatch, faults, ranks in lock step."""
    scenario, rule = prepared.scenario, prepared.system.dispatch
    capped = scenario.agents.max_concurrent or scenario.agents.deadline_s or prepared.has_turns
    watched = prepared.drafts or prepared.tail or capped or scenario.faults or prepared.system.adapt_split_every
    watched = watched or prepared.limits.dp > 1
    if watched or rule.per_worker or rule.chunk_tokens or rule.kv_room or rule.queue not in (Fifo, LongestFirst):
        return
    for worker in workers:
        worker.offer_groups(dispatcher.unfinished)


def _take_over(workers: Sequence[Worker], version: int) -> None:
    """Let workers follow others on their GPUs, which have loaded, and evaluated, `version` last."""
    for worker in workers:
        cast(SimulatedWorker, worker).policy_version = version


def _prefix_cache(workers: Sequence[SimulatedWorker]) -> dict[str, int]:
    """Return what all engines were asked to find, what they found, and what they computed."""
    totals = [engine.totals for worker in workers for engine in worker.engines]
    return {name: sum(each[name] for each in totals) for name in ("lookup_tokens", "hit_tokens", "prefill_tokens")}


def simulated_learners(schedule: Schedule, train_lanes: Sequence[int]) -> tuple[Trainer, Rewarder]:
    """Return a trainer whose phases take the times of the scenario's training costs, and a rewarder."""
    prepared, env = schedule.prepared, schedule.env
    costs = prepared.training_costs(prepared.train_gpus)
    trainer = SimulatedTrainer(env, costs, train_lanes, schedule.recorder, schedule.spot)
    kills = prepared.scenario.agents.deadline_s is not None
    return trainer, SimulatedRewarder(env, prepared.scenario.training.reward_s, schedule.workload.responses, kills)


def _spot_trainer(prepared: Prepared, recorder: Recorder, units: int) -> SpotTrainer | None:
    """Return the trainer of the drafter on idle workers; None if the method trains no drafter."""
    training = prepared.drafts.speculation.training if prepared.drafts else None
    if prepared.drafts is None or training is None or not training.adaptive:
        return None
    pace = pace_of(prepared.model, prepared.gpu, prepared.scenario.cluster.tp, training.efficiency)
    return SpotTrainer(training, recorder, units, prepared.colocated, prepared.drafts.first_version, pace)


def _full_batch(prepared: Prepared, tokens: NDArray[np.float64], prompts: NDArray[np.float64]) -> dict[str, Any] | None:
    """Return the most sequences that a worker can decode at a time at the mean context in which this run's tokens were
    generated, and the seconds of such a pass (the ideal of `simrl explain`). None if nothing was generated."""
    if not tokens.sum():
        return None
    context = float(np.average(prompts + tokens / 2, weights=tokens))
    limits = prepared.limits
    sequences = max(min(limits.max_num_seqs, int(room_tokens(limits, context) / context)), 1)
    seconds = prepared.profile.decode_s(sequences, context)
    return {"sequences": limits.dp * sequences, "context_tokens": context, "pass_s": seconds}


def compile_engine(dp: int = 1) -> None:
    """Compile the kernels of the engine, or of `dp` ranks, or load them: numba keeps them on disk, for later processes too."""
    axis, flat = np.array([0.0, 8.0]), np.zeros(2)
    tables = Tables(axis, flat, axis, flat, axis, axis, axis, axis, np.zeros((2, 2, 2, 2)), 1.0)
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=8, block_size=1, kv_blocks=8, hold_paused=False, dp=dp)
    engine = one_engine(tables, limits)
    engine.submit(1, 2)
    engine.settle(0.0)
    engine.recompute_running()
    engine.run_until_idle()


def compile_training() -> None:
    """Compile the kernels of a training step, or load them."""
    lengths = np.array([2, 1])
    pack(lengths, longest_first(lengths), deal(lengths, longest_first(lengths), 2), 3)
