"""simulate(scenario) -> Result: checks that the scenario can exist, builds its actors, runs its pipeline.

Everything that can be wrong with a scenario is found by `prepare`, before anything runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import simpy

import simrl
from simrl.dispatch import Dispatcher
from simrl.drafting import Drafting, DraftPlan, plan_drafting, typical_context
from simrl.engine import Engine
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.faults import FaultyWorker, check_faults, inject
from simrl.hardware import GPUS_PER_NODE, Gpu, ModelShape, gpu, model_shape
from simrl.pipelines import Stage
from simrl.pipelines.dynamic_sampling import rewards_differ
from simrl.profile import ProfileMetadata, RolloutTimes, TableProfile, Tables, read_profile
from simrl.profilers.roofline import roofline_profile
from simrl.result import Lane, Recorder, Result
from simrl.rollout import Rollout
from simrl.scenario import Scenario
from simrl.split import LentWorker, adapt
from simrl.spot_trainer import SpotTrainer
from simrl.synthesis import synthesise
from simrl.systems import System, make_system
from simrl.tail_drafting import TailPlan, plan_tail
from simrl.trace import Trace, read_trace
from simrl.trainer import Rewarder, SimulatedRewarder, SimulatedTrainer, Trainer
from simrl.training import TrainingCosts, deal, longest_first, pack
from simrl.worker import RolloutWorker, SimulatedWorker, WorkerCosts
from simrl.workload import Workload


@dataclass(frozen=True)
class Prepared:
    """A scenario with everything it names, read and found to fit together."""

    scenario: Scenario
    system: System
    model: ModelShape
    gpu: Gpu
    trace: Trace
    profile: TableProfile
    limits: Limits
    workers: int
    train_gpus: int
    costs: WorkerCosts
    drafts: DraftPlan | None = None
    tail: TailPlan | None = None

    @property
    def gpus_per_worker(self) -> int:
        """Those of the tensor-parallel group, and of the drafter beside it."""
        return self.scenario.cluster.tp + (self.drafts.draft_gpus if self.drafts else 0)

    @property
    def colocated(self) -> bool:
        return self.system.rollout_share is None

    @property
    def gpus(self) -> int:
        """All that the system occupies."""
        rollout_gpus = self.workers * self.gpus_per_worker
        return max(rollout_gpus, self.train_gpus) if self.colocated else rollout_gpus + self.train_gpus

    def may_train(self, gpus: int) -> bool:
        """Whether the trainer can do with so many GPUs: whole sequences, enough memory."""
        if gpus == 0 or gpus % self.scenario.training.sequence_parallel:
            return False
        costs = _costs(self.scenario, self.system, self.model, self.gpu, gpus)
        return costs.memory_bytes(_longest_allowed(self.trace)) <= self.gpu.memory_bytes

    def inputs(self) -> dict[str, Any]:
        """What the result rests on: where each number comes from."""
        s = self.scenario
        return {
            "system": self.system.name,
            "label": self.system.label,
            "paper": self.system.paper,
            "variant": s.variant,
            "gpus": self.gpus,
            "rollout_workers": self.workers,
            "train_gpus": self.train_gpus,
            "kv_cache_tokens_per_worker": self.limits.kv_blocks * self.limits.block_size,
            "load_weights_s": self.costs.load_s,
            "load_weights_kind": "assumed" if s.training.load_s is None else "given",
            "trace": self.trace.metadata.model_dump(),
            "trace_steps": len(self.trace.step_slices),
            "profile": {**self.profile.metadata.model_dump(), "corrections": list(self.profile.corrections)},
            "speculation": self.drafts.facts if self.drafts else None,
            "best_of_n": self.tail.facts if self.tail else None,
            "scenario": s.model_dump(),
            "simrl_version": simrl.__version__,
        }


class Inputs:
    """Where `prepare` has the trace and the profile of a scenario from: read, or made, each time. Whoever prepares many
    scenarios may keep what they share. Both raise `InputError` as `prepare` does."""

    def trace(self, scenario: Scenario) -> Trace:
        return _trace(scenario)

    def profile(self, scenario: Scenario, model: ModelShape, kind: Gpu) -> TableProfile:
        return _profile(scenario, model, kind)


def prepare(scenario: Scenario, inputs: Inputs = Inputs()) -> Prepared:  # noqa: B008 (has no state)
    """Raises `InputError` for a scenario that cannot be: GPUs that do not divide, memory that does not suffice, a trace or
    profile that does not belong to it."""
    cluster = scenario.cluster
    system = make_system(scenario.system.name, scenario.system.parameters)
    model, kind = model_shape(scenario.model), gpu(cluster.gpu)
    if cluster.gpus % cluster.tp:
        raise InputError(f"cluster.tp is {cluster.tp}: it does not divide the {cluster.gpus} GPUs; choose a divisor")
    if model.heads % cluster.tp:
        raise InputError(
            f"cluster.tp is {cluster.tp}: it does not divide the {model.heads} attention heads of {model.name}; "
            "choose a divisor"
        )
    trace = inputs.trace(scenario)
    profile = inputs.profile(scenario, model, kind)
    drafts = None
    if system.speculation is not None:
        rollout_gpus = cluster.gpus if system.rollout_share is None else int(cluster.gpus * system.rollout_share + 1e-9)
        drafts = plan_drafting(
            system.speculation, scenario.speculation, trace, profile, model, kind, cluster.tp, rollout_gpus
        )
    workers, train_gpus = _split(cluster.gpus, cluster.tp + (drafts.draft_gpus if drafts else 0), system)
    if train_gpus % scenario.training.sequence_parallel:
        raise InputError(
            f"training.sequence_parallel is {scenario.training.sequence_parallel}: it does not divide the {train_gpus} train "
            "GPUs; choose a divisor"
        )
    check_faults(scenario.faults, workers, system.dispatch.on_loss == "wait", system.adapt_split_every > 0)
    if system.needs_rewards:
        _require_unequal_rewards(trace, system.name)
    tail = None
    if system.best_of_n is not None:
        tail = plan_tail(
            system.best_of_n, drafts, scenario.speculation, trace, profile, model, kind, cluster.tp, cluster.gpus
        )
    limits = _limits(scenario, model, kind, trace, drafts, tail)
    if drafts is not None and drafts.decoupled is not None:
        _require_room_for_drafter(scenario, model, kind, trace, drafts, drafts.decoupled.requests, limits)
    longest = _longest_allowed(trace)
    verified = limits.max_num_batched_tokens if drafts or tail else 0
    profile.require_covers(limits.max_num_batched_tokens, limits.max_num_seqs, longest, verified)
    costs = _costs(scenario, system, model, kind, train_gpus)
    needed = costs.memory_bytes(longest)
    if needed > kind.memory_bytes:
        microbatch = scenario.training.tokens_per_microbatch
        remedies = ["more train GPUs"]
        if costs.state_bytes < kind.memory_bytes:
            remedies += (
                ["more sequence_parallel", "fewer tokens_per_microbatch"]
                if microbatch > longest
                else ["sequence_parallel"]
            )
        raise InputError(
            f"training: {model.name} on {train_gpus} {kind.name} needs {needed / 1e9:.0f} GB a GPU "
            f"({costs.state_bytes / 1e9:.0f} of weights, gradients and optimizer states, the rest activations of "
            f"{max(microbatch, longest)} tokens), it has {kind.memory_bytes / 1e9:.0f}; use {' or '.join(remedies)}"
        )
    one_node = system.rollout_share is None and cluster.gpus <= GPUS_PER_NODE
    link = kind.link_bytes_per_s if one_node else kind.network_bytes_per_s  # each GPU fetches its own part
    if system.host_buffer:
        link = kind.host_bytes_per_s
    load_s = scenario.training.load_s
    if load_s is None:
        load_s = scenario.training.load_overhead_s + model.weight_bytes / cluster.tp / link
    worker_costs = WorkerCosts(
        load_s=load_s,
        fetch_s_per_token=model.kv_bytes_per_token / min(cluster.tp, model.kv_heads) / kind.network_bytes_per_s,
        evaluate_every=scenario.training.evaluate_every,
        evaluate_s=scenario.training.evaluate_s,
        request_s=profile.metadata.request_s or 0.0,
    )
    return Prepared(
        scenario, system, model, kind, trace, profile, limits, workers, train_gpus, worker_costs, drafts, tail
    )


def with_measured_loads(scenario: Scenario, profile: ProfileMetadata | str | Path) -> Scenario:
    """The scenario with `training.load_s` as a profile, or the file of one, has it: seconds in which an engine takes weights
    from a folder, as the engines of a replay do. It is the same where the scenario says that itself, or nobody measured it."""
    if scenario.training.load_s is not None:
        return scenario
    metadata = profile if isinstance(profile, ProfileMetadata) else read_profile(profile).metadata
    training = scenario.training.model_copy(update={"load_s": metadata.load_weights_s})
    return scenario.model_copy(update={"training": training})


def simulate(scenario: Scenario, on_step: Callable[[int], None] | None = None) -> Result:
    """Runs a scenario to its last policy update. `on_step` hears of each. Raises `InputError` as `prepare` does."""
    return simulate_prepared(prepare(scenario), on_step)


def simulate_prepared(prepared: Prepared, on_step: Callable[[int], None] | None = None) -> Result:
    """The same for a scenario that is prepared already."""
    with _garbage_kept():
        return _result_of(prepared, on_step)


def _result_of(prepared: Prepared, on_step: Callable[[int], None] | None) -> Result:
    # A function of its own: the schedule, whose actors know each other, must be out of reach when garbage is looked for again,
    # or it grows old and what the run made is kept for long.
    schedule = Schedule(prepared, simpy.Environment(), simulated_workers, on_step)
    schedule.run()
    return schedule.result()


class Worker(RolloutWorker, FaultyWorker, LentWorker, Protocol):
    """What a schedule's owner does with a worker besides."""

    def stop(self, time_s: float) -> None:
        """The run ends now: closes its spans and records what is unfinished."""
        ...


class Schedule:
    """A prepared scenario with its actors, on a clock: SimPy's own, or that of the wall. `make_workers` gives the rollout
    workers, `units` of them, which may look up the rest here; `make_learners` a trainer for some lanes and a rewarder, by
    default the simulated ones. `run` goes to the last policy update; `result` is what has happened so far, also where
    something stopped the run. `once`: AReaL and verl's fully asynchronous recipe submit nothing after the trace's last
    group; `StoppedError` is raised where it has fewer than the updates train. All other pipelines go over it again."""

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
        unit = prepared.gpus_per_worker
        # Where the split changes, all that may roll out.
        self.units = scenario.cluster.gpus // unit if adapts else prepared.workers
        lanes = [Lane(f"rollout-{i:03d}", unit) for i in range(self.units)]
        if (
            prepared.colocated and prepared.train_gpus > self.units * unit
        ):  # too few for another worker: they train only
            lanes.append(Lane("rollout-rest", prepared.train_gpus - self.units * unit))
        train_lanes = list(range(min(-(-prepared.train_gpus // unit), len(lanes))))
        if adapts:
            train_lanes = list(range(prepared.workers, self.units))
        elif not prepared.colocated:
            train_lanes = [len(lanes)]
            lanes.append(Lane("train", prepared.train_gpus))
        self._finished = env.event()

        def stepped(step: int) -> None:
            if on_step is not None:
                on_step(step)
            if step + 1 == scenario.steps:
                self._finished.succeed()

        self.recorder = recorder = Recorder(lanes, stepped)
        self.workload = Workload(prepared.trace, once)
        self.spot = _spot_trainer(prepared, recorder, self.units)
        self.workers = list(make_workers(self))
        make_learners = make_learners or simulated_learners
        kv_cache_tokens = prepared.limits.kv_blocks * prepared.limits.block_size
        self.dispatcher = Dispatcher(env, self.workers, system.dispatch, recorder, kv_cache_tokens=kv_cache_tokens)
        self.trainer, rewarder = make_learners(self, train_lanes)
        stage = Stage(
            env=env,
            workers=list(self.workers),
            dispatcher=self.dispatcher,
            trainer=self.trainer,
            rewarder=rewarder,
            recorder=recorder,
            workload=self.workload,
            times=_rollout_times(prepared),
            steps=scenario.steps,
            best_of_n=prepared.tail.rule if prepared.tail else None,
            accepts=rewards_differ if system.filter_groups else lambda group: True,
        )
        if adapts:
            for lane in train_lanes:
                self.dispatcher.retire(lane)
                self.workers[lane].lend()
                recorder.role(lane, "train", 0.0)
            split = adapt(
                env,
                self.workers,
                self.dispatcher,
                cast(SimulatedTrainer, self.trainer),
                recorder,
                system.adapt_split_every,
                prepared.may_train,
            )
            env.process(split)
        self._faults = inject(env, scenario.faults, scenario.seed, self.workers, self.dispatcher)
        env.process(system.pipeline(stage))

    def run(self) -> None:
        """Up to the last policy update: what a pipeline does after it is no part of the result."""
        self.env.run(until=self._finished)

    def result(self) -> Result:
        """What happened up to now. Only once: it closes what is open."""
        for worker in self.workers:
            worker.stop(self.env.now)
        for rollout in self.dispatcher.waiting():
            self.recorder.stay_ended(rollout, 0)
        metadata = {
            **self.prepared.inputs(),
            "full_batch": _full_batch(self.prepared, self.recorder.rollouts()),
            "faults": self._faults,
        }
        if self.spot is not None:
            self.spot.stop(self.env.now)
            metadata["drafter_updates_behind"] = self.spot.behind
        return self.recorder.result(self.env.now, metadata)


def simulated_workers(schedule: Schedule) -> list[SimulatedWorker]:
    """Those on SimPy's clock."""
    prepared, trace = schedule.prepared, schedule.prepared.trace
    seed, most = prepared.scenario.seed, prepared.limits.max_num_seqs
    drafting, drafters = None, {}
    if prepared.drafts is not None:
        drafting = Drafting(prepared.drafts, trace, prepared.profile, most, seed, schedule.spot)
    if prepared.tail is not None:
        drafters = prepared.tail.drafters(trace, prepared.profile, most, seed)
    return [
        SimulatedWorker(
            schedule.env,
            i,
            prepared.profile.tables,
            prepared.limits,
            prepared.costs,
            schedule.workload.responses,
            schedule.recorder,
            drafting,
            drafters,
        )
        for i in range(schedule.units)
    ]


def simulated_learners(schedule: Schedule, train_lanes: Sequence[int]) -> tuple[Trainer, Rewarder]:
    """Whose phases take what the scenario's training costs."""
    prepared, scenario, env = schedule.prepared, schedule.prepared.scenario, schedule.env
    costs = _costs(scenario, prepared.system, prepared.model, prepared.gpu, prepared.train_gpus)
    trainer = SimulatedTrainer(env, costs, train_lanes, schedule.recorder, schedule.spot)
    return trainer, SimulatedRewarder(env, scenario.training.reward_s, schedule.workload.responses)


def _spot_trainer(prepared: Prepared, recorder: Recorder, units: int) -> SpotTrainer | None:
    """Where a drafter is trained beside the rollouts, who does that."""
    training = prepared.drafts.speculation.training if prepared.drafts else None
    if prepared.drafts is None or training is None or not training.adaptive:
        return None
    return SpotTrainer(training, recorder, units, prepared.colocated, prepared.drafts.first_version)


def _full_batch(prepared: Prepared, rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    """The most sequences that a worker can decode at a time, of the mean context in which this run's tokens were generated,
    and the seconds of such a pass: what `simrl explain` calls ideal. None where nothing was generated."""
    tokens = np.array([rollout.tokens for rollout in rollouts], np.float64)
    if not tokens.sum():
        return None
    prompts = np.array([rollout.sample.prompt_tokens + rollout.observation_tokens for rollout in rollouts], np.float64)
    context = float(np.average(prompts + tokens / 2, weights=tokens))
    limits = prepared.limits
    sequences = max(min(limits.max_num_seqs, int(limits.kv_blocks * limits.block_size / context)), 1)
    seconds = prepared.profile.decode_s(sequences, context)
    return {"sequences": sequences, "context_tokens": context, "pass_s": seconds}


def _rollout_times(prepared: Prepared) -> RolloutTimes:
    """What a profiling run before the training would know."""
    prompt_tokens = round(float(prepared.trace.column("prompt_tokens").mean()))
    return RolloutTimes(
        prepared.profile, prepared.trace.metadata.cap_tokens, prepared.limits.max_num_seqs, prompt_tokens
    )


def compile_engine() -> None:
    """Compiles the engine's kernels, or loads them: numba keeps them on disk, for later processes too."""
    axis, flat = np.array([0.0, 8.0]), np.zeros(2)
    tables = Tables(axis, flat, axis, flat, axis, axis, axis, axis, np.zeros((2, 2, 2, 2)), 1.0)
    engine = Engine(tables, Limits(max_num_seqs=2, max_num_batched_tokens=8, block_size=1, kv_blocks=8))
    engine.submit(1, 2)
    engine.settle(0.0)
    engine.recompute_running()
    engine.run_until_idle()


def compile_training() -> None:
    """The same for the kernels of a training step."""
    lengths = np.array([2, 1])
    deal(lengths, longest_first(lengths), 2)
    pack(lengths, longest_first(lengths), 3)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """A run makes millions of small objects and hardly a reference cycle: looking for cycles takes a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def gpus_for(scenario: Scenario, workers: int) -> int:
    """The fewest GPUs that give a scenario's system so many rollout workers. Raises `InputError` if no number does."""
    system, tp = make_system(scenario.system.name, scenario.system.parameters), scenario.cluster.tp
    for gpus in range(tp, 128 * workers * tp, tp):
        with suppress(InputError):
            if _split(gpus, tp, system)[0] == workers:
                return gpus
    raise InputError(
        f"system {system.name}: no number of GPUs gives {workers} rollout workers at tp {tp}; ask for others"
    )


def _longest_allowed(trace: Trace) -> int:
    """Tokens of a sequence at most: the longest context that was given, and a response up to the cap."""
    return int((trace.column("prompt_tokens") + trace.observation_tokens()).max()) + trace.metadata.cap_tokens


def _split(gpus: int, tp: int, system: System) -> tuple[int, int]:
    """Rollout workers and train GPUs; what does not make a whole worker goes to training."""
    if system.rollout_share is None:
        extra = int(gpus * system.extra_rollout_gpus + 1e-9) // tp
        if system.extra_rollout_gpus and not extra:
            raise InputError(
                f"system {system.name}: extra_rollout_gpus {system.extra_rollout_gpus} of {gpus} GPUs makes no worker of {tp}; "
                "use more"
            )
        if gpus < tp:
            raise InputError(
                f"system {system.name}: a rollout worker takes {tp} GPUs, those of its drafter included, and there are "
                f"{gpus}; use more GPUs, or fewer draft_gpus"
            )
        return gpus // tp + extra, gpus
    workers = int(gpus * system.rollout_share + 1e-9) // tp
    train_gpus = gpus - workers * tp
    if workers == 0 or train_gpus == 0:
        raise InputError(
            f"system {system.name}: rollout_share {system.rollout_share} of {gpus} GPUs at tp {tp} leaves "
            f"{workers * tp} rollout and {train_gpus} train GPUs; both need some: use more GPUs, or another share"
        )
    return workers, train_gpus


def _trace(scenario: Scenario) -> Trace:
    if scenario.workload.trace is not None:
        return read_trace(scenario.workload.trace)
    assert scenario.workload.synthetic is not None
    return synthesise(scenario.workload.synthetic, scenario.seed)


def _require_unequal_rewards(trace: Trace, system: str) -> None:
    """What a rule that looks at rewards can do with: one for each sample, and a group in which they are not all equal."""
    name = trace.metadata.name
    rewards = trace.column("reward") if "reward" in trace.table.column_names else np.full(len(trace), np.nan)
    missing = int(np.isnan(rewards).sum())
    if missing:
        raise InputError(
            f"{name}: {missing} of {len(trace)} samples have no reward, and {system} drops groups by their rewards; "
            "give them in the column 'reward'"
        )
    groups = np.stack([trace.column("step"), trace.column("prompt_id")], axis=1)
    first = np.flatnonzero(np.r_[True, (groups[1:] != groups[:-1]).any(axis=1)])
    unequal = np.minimum.reduceat(rewards, first) < np.maximum.reduceat(rewards, first)
    single = np.diff(np.r_[first, len(trace)]) == 1
    if not (unequal | single).any():
        raise InputError(
            f"{name}: all rewards of every group are equal, and {system} drops such groups; nothing is left"
        )


def _profile(scenario: Scenario, model: ModelShape, kind: Gpu) -> TableProfile:
    config, tp = scenario.profile, scenario.cluster.tp
    if config.roofline is not None:
        profile = roofline_profile(model, kind, tp, **config.roofline.model_dump(exclude_none=True))
    else:
        assert config.path is not None
        profile = read_profile(config.path)
        found = (profile.metadata.model, profile.metadata.gpu, profile.metadata.tp)
        if found != (model.name, kind.name, tp):
            raise InputError(
                f"{config.path}: a profile of {found[0]} on {found[1]} tp{found[2]}, the scenario has {model.name} on "
                f"{kind.name} tp{tp}; name the profile that belongs to it"
            )
    return profile.with_corrections(
        config.forward_correction, config.between_passes_s, config.sequence_overhead_s, config.least_pass_s
    )


def _limits(
    scenario: Scenario, model: ModelShape, kind: Gpu, trace: Trace, drafts: DraftPlan | None, tail: TailPlan | None
) -> Limits:
    engine, tp = scenario.engine, scenario.cluster.tp
    tokens = engine.kv_cache_tokens
    if tokens is None:
        weights = model.weight_bytes / tp
        drafters = [plan for plan in (drafts, tail) if plan is not None]  # of a worker, one drafts at a time
        weights += sum(plan.weight_bytes for plan in drafters)
        free = kind.memory_bytes * engine.gpu_memory_utilization - engine.reserve_bytes - weights
        kv_bytes = model.kv_bytes_per_token / min(tp, model.kv_heads) + max(
            (plan.kv_bytes_per_token for plan in drafters), default=0.0
        )
        tokens = int(free // kv_bytes)
        if tokens < engine.block_size:
            raise InputError(
                f"{model.name} at tp {tp}: weights take {weights / 1e9:.1f} GB of a {kind.name}'s "
                f"{kind.memory_bytes / 1e9:.1f} GB (× gpu_memory_utilization {engine.gpu_memory_utilization}, less "
                f"{engine.reserve_bytes / 1e9:.0f} GB reserve): "
                "nothing is left for the KV cache; use a larger tp or another GPU"
            )
    known = trace.column("prompt_tokens").astype(int) + trace.observation_tokens()
    longest = int((known + trace.column("response_tokens")).max())
    if longest > tokens // engine.block_size * engine.block_size:
        raise InputError(
            f"{trace.metadata.name}: its longest sample has {longest} tokens, the KV cache of a worker ({model.name}, "
            f"tp {tp}, {kind.name}) holds {tokens}; use a larger tp, more memory for the cache, or a lower cap"
        )
    blocks = tokens // engine.block_size
    return Limits(
        engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size, blocks, engine.async_scheduling
    )


def _require_room_for_drafter(
    scenario: Scenario, model: ModelShape, kind: Gpu, trace: Trace, drafts: DraftPlan, requests: int, limits: Limits
) -> None:
    """A drafter's own GPU holds its weights, a worker's share of the target's (every worker keeps these, SpecActor §4.2), and
    the KV cache of its part of the requests that a worker runs at a time, no more than the worker's own cache has room for."""
    engine, times = scenario.engine, drafts.times
    running = min(requests, engine.max_num_seqs)
    tokens = min(running * typical_context(trace), limits.kv_blocks * limits.block_size)
    kept = model.weight_bytes / scenario.cluster.tp
    kv_bytes = tokens * times.kv_bytes_per_token_per_gpu / drafts.draft_gpus
    room = kind.memory_bytes * engine.gpu_memory_utilization - engine.reserve_bytes
    if times.weight_bytes_per_gpu + kept + kv_bytes > room:
        smaller = times.weight_bytes_per_gpu + kept > room
        raise InputError(
            f"speculation {drafts.speculation.name}: a GPU of the drafter {drafts.speculation.model} needs "
            f"{times.weight_bytes_per_gpu / 1e9:.1f} GB for its weights, {kept / 1e9:.1f} for those of {model.name}, which it "
            f"keeps, and {kv_bytes / 1e9:.1f} for the KV cache of {running} requests on {drafts.draft_gpus}; a {kind.name} has "
            f"{room / 1e9:.1f} (with gpu_memory_utilization {engine.gpu_memory_utilization}, less "
            f"{engine.reserve_bytes / 1e9:.0f} reserve); use a smaller drafter, a larger tp or "
            f"{'decoupled: false' if smaller else 'more draft_gpus'}"
        )


def _costs(scenario: Scenario, system: System, model: ModelShape, kind: Gpu, train_gpus: int) -> TrainingCosts:
    return TrainingCosts(
        model=model,
        gpu=kind,
        gpus=train_gpus,
        config=scenario.training,
        minibatches=system.minibatches,
        log_probs=system.log_probs + scenario.training.extra_log_probs,
        switch=system.rollout_share is None,
        controller=system.controller,
    )
