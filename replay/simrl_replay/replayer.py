"""Replay: a prepared scenario's own schedule, dispatch and drafters, with real engines in place of
simulated workers.

Invariant: everything but the rollout workers and the clock is the simulator's. Lengths are the
trace's, tokens are really generated and weights really loaded; training and rewards take their
simulated time, or are real too (`simrl_replay.trained`), and the result records which. A stopped
replay leaves the result up to then, and no process.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from simrl.errors import InputError, StoppedError, broken
from simrl.interrupts import ctrl_c_waits
from simrl.result.result import Result
from simrl.runtime.drafting import Drafting
from simrl.runtime.rollout import Rollout
from simrl.scenario.presets import constants
from simrl.simulate.prepare import Prepared, longest_allowed
from simrl.simulate.run import Schedule
from simrl.speculation.plan import DraftPlan
from simrl.trace.trace import Response, Sample, Trace, TraceMetadata, Turn
from simrl_replay.ahead import DrafterProcess
from simrl_replay.clock import WallClock
from simrl_replay.host import Close, Command, Count, Counted, DraftCall, Reached, Report, Reset
from simrl_replay.link import (
    EngineLink,
    GoneError,
    ProcessLink,
    device_variables,
    engine_link,
    reports_of,
    spare_gpu,
    start_all,
    wait_until_ready,
)
from simrl_replay.measured_passes import Passes, passes_of
from simrl_replay.proposer import DrafterSetup
from simrl_replay.speculative import (
    TRAINED_FORM,
    DraftFolders,
    answers_of,
    architectures_of,
    drafter_setup,
    drafter_setups,
    forced_setup,
    models_ahead,
    own_config,
    speculative_config,
)
from simrl_replay.spot_head import SpotHead, head_trainer
from simrl_replay.vllm_adapter import (
    EngineSettings,
    check_model,
    check_weights,
    vllm_version,
)
from simrl_replay.vllm_worker import VllmWorker

if TYPE_CHECKING:  # needs torch, which other replays leave to their engines
    from simrl_replay.trained import RealTraining


@dataclass(frozen=True)
class ReplayConfig:
    """Settings of a replay that a scenario does not have. `weights` are folders, one per policy
    version; later versions use the last.

    Without a report for `step_deadline_s`, an engine with work counts as hung; a starting one has
    `start_deadline_s`. With `forced_acceptance` an oracle drafts in place of a draft model: it has
    the trace's tokens, and its drafts are accepted exactly as often as simulated. That needs a
    scenario from `simrl_replay.speculative.forced` whose trace this model generated at temperature
    0. A drafter that the schedule trains is trained with AdamW at `drafter_learning_rate` (the
    default is EAGLE's, arXiv 2401.15077 §5). With `recorded_tokens` every response is the trace's
    own, token by token, whatever the weights. `engines_per_gpu` engines share a GPU: each gets its
    part of `engine.gpu_memory_utilization`, and they start in turn. `graphs` are the CUDA graphs,
    as in `EngineSettings`. `draft_model` is the folder of the draft model; of several,
    `draft_models` has each one's by its name. On a cluster, `copy_weights` gives every node copies
    of the weights also where it sees their path, as on a slow network file system.
    """

    model: Path
    weights: tuple[Path, ...] = ()
    device: str = "cpu"
    dtype: str = "auto"
    dummy_weights: bool = False
    draft_model: Path | None = None
    draft_models: Mapping[str, Path] = field(default_factory=dict)
    temperature: float = 1.0
    forced_acceptance: bool = False
    drafter_learning_rate: float = 3e-5
    recorded_tokens: bool = False
    threads: int = 1
    step_deadline_s: float = 60.0
    start_deadline_s: float = 600.0
    engines_per_gpu: int = 1
    graphs: Literal["compiled", "decode", "full", "none"] = "compiled"
    copy_weights: bool = False

    @property
    def draft_folders(self) -> DraftFolders:
        return DraftFolders(self.draft_model, self.draft_models)

    def folder(self, version: int) -> str:
        folders = self.weights or (self.model,)
        return str(folders[min(version, len(folders) - 1)])


class Measured(NamedTuple):
    """Output of a replay: its result, the trace of the generated tokens, the error that stopped it,
    if any, and the passes of each engine; without passes if an engine was lost."""

    result: Result
    trace: Trace | None
    stopped: BaseException | None
    passes: tuple[Passes, ...] = ()


def check_replayable(prepared: Prepared, config: ReplayConfig) -> None:
    """Raise `InputError` for features that real engines of this replayer lack."""
    system, drafts, limits = prepared.system, prepared.drafts, prepared.limits
    if wrong := broken(
        (
            limits.sglang,
            "engine.scheduler is sglang, and engines here are vLLM's; set engine.scheduler=vllm, with a preset of vLLM",
        ),
        (
            limits.watermark_blocks > 0 or limits.prefill_interval > 1,
            "engine.watermark and engine.prefill_schedule_interval are of vLLM 0.33, which is not known here; leave them out",
        ),
        (
            _times_log_probs(prepared),
            "its engines return log-probs (engine.log_probs), which costs time, and engines here return none; set "
            "engine.log_probs=false",
        ),
        (
            bool(prepared.layouts),
            "it forms workers of other tensor-parallel sizes anew, and engines here keep theirs; leave planner out",
        ),
        (
            prepared.has_turns and prepared.agents.kv in ("keep", "offload"),
            f"agents.kv_while_tool_runs is {prepared.agents.kv}, and vLLM keeps no blocks for a request that has ended; use "
            "cache with engine.prefix_caching, or drop without",
        ),
        (
            system.dispatch.kv_pool,
            "its dispatch shares a pool of KV cache among workers, which vLLM has not; set kv_pool: false",
        ),
        (
            prepared.prefill is not None,
            "real engines here prefill what they decode; leave cluster.prefill out",
        ),
        (
            prepared.is_elastic,
            "it moves GPUs between rollout and training, and engines here keep theirs; "
            + (
                "set adapt_split_every to 0"
                if system.adapt_split_every
                else "choose another system"
            ),
        ),
        (
            bool(drafts and drafts.decoupled) and config.engines_per_gpu > 1,
            "its drafters have GPUs of their own, and engines here share one; let each engine have its own",
        ),
        (
            config.forced_acceptance and prepared.tail is not None,
            "acceptance is forced of one drafter, and freed workers get others (best_of_n); set best_of_n: false",
        ),
        (prepared.limits.dp > 1, "engines here are one rank each (cluster.dp); set it to 1"),
        (
            prepared.scenario.cluster.ep > 1,
            "engines here split every expert (cluster.ep); set it to 1",
        ),
        (
            {prepared.scenario.precision.weights, prepared.scenario.precision.kv_cache} != {"bf16"},
            "engines here run in bfloat16 (precision); leave it out",
        ),
        *_untrainable(drafts, config),
        (
            prepared.limits.async_scheduling and drafts is not None,
            "it drafts when a pass is over, and the next one is scheduled by then; set engine.async_scheduling=false",
        ),
        (
            prepared.limits.async_scheduling
            and prepared.scenario.cluster.tp > 1
            and config.device == "cpu",
            "on a CPU, engines of several ranks schedule no pass ahead; set engine.async_scheduling=false, or cluster.tp=1",
        ),
        (
            prepared.judge is not None,
            "judges are not replayed; use judge=null, and training.reward_s for its seconds",
        ),
        (
            follows_trace(config)
            and prepared.scenario.evaluation is not None
            and prepared.scenario.evaluation.lengths is not None,
            "responses follow the tokens of the workload's trace, and evaluation.lengths has others; leave it out",
        ),
        (
            config.forced_acceptance
            and (drafts is None or drafts.acceptance is None or config.temperature > 0),
            "acceptance is forced of a draft model's tokens at temperature 0 alone",
        ),
        (
            config.forced_acceptance and "response_ids" not in prepared.trace.table.column_names,
            "acceptance is forced by drafting what will come, and the trace has no token ids; replay it once without "
            "speculation at temperature 0, and take the trace that it leaves",
        ),
        (
            config.recorded_tokens and "response_ids" not in prepared.trace.table.column_names,
            "its trace has no token ids to follow; give one that has (simrl trace show)",
        ),
    ):
        raise InputError(f"{prepared.scenario.file}: {system.label} cannot be replayed: {wrong}")
    if config.dummy_weights and config.weights:
        raise InputError("--dummy and --weights exclude each other: dummy weights have no versions")


def _times_log_probs(prepared: Prepared) -> bool:
    """Return whether log-probs of the engines count in the predicted passes."""
    used = constants(prepared.scenario.model_dump(), prepared.profile.metadata)
    return any(constant.key == "engine.log_probs_s" for constant in used)


def follows_trace(config: ReplayConfig) -> bool:
    """Return whether the trace's own tokens are needed."""
    return config.recorded_tokens or config.forced_acceptance


def _untrainable(drafts: DraftPlan | None, config: ReplayConfig) -> list[tuple[bool, str]]:
    """Return what a drafter that is trained lacks here, and whether it does."""
    training = drafts.speculation.training if drafts else None
    if training is None or not training.adaptive:
        return []
    form = architectures_of(config.draft_model) if config.draft_model else ["none"]
    return [
        (
            form != [TRAINED_FORM],
            f"its drafter is trained, and the trainer here has heads of the form {TRAINED_FORM}, not "
            f"{', '.join(form)}; name the folder of one with --draft-model, or set adaptive: false",
        ),
        (
            config.dummy_weights,
            "its drafter is trained on the model's hidden states, and --dummy has random ones; set adaptive: false",
        ),
        (
            not training.save_at_end,
            "a session here saves what it has when it is stopped; set save_at_end: true",
        ),
    ]


def check_engine(config: ReplayConfig) -> None:
    """Raise `InputError`, before anything starts, if vLLM is missing or unknown, or a folder holds
    files that must not be loaded."""
    vllm_version()
    check_model(config.model, config.dummy_weights)
    for folder in [*filter(None, [config.draft_model]), *config.draft_models.values()]:
        check_model(folder, config.dummy_weights)
    for folder in config.weights:
        check_weights(folder)


def engine_settings(prepared: Prepared, config: ReplayConfig) -> EngineSettings:
    """Return the settings of the engine that the scenario simulates."""
    limits, trace = prepared.limits, prepared.trace
    speculative = None
    if prepared.drafts is not None:
        if config.dummy_weights and config.device == "cpu" and not config.recorded_tokens:
            raise InputError(
                "--dummy with speculation: vLLM accepts drafts of random weights on CUDA alone; give a model's weights"
            )
        if config.forced_acceptance:
            speculative = own_config(prepared.drafts.speculation.window.rule.most_tokens)
        else:
            speculative = speculative_config(
                prepared,
                draft_folder=config.draft_model,
                synthetic=config.dummy_weights and not config.recorded_tokens,
                by_name=config.draft_models,
            )
    drafted = int(speculative["num_speculative_tokens"]) if speculative else 0
    traces = [each for each in (trace, prepared.evaluation_trace) if each is not None]
    capacity = limits.kv_blocks * limits.block_size
    longest = max(
        int(
            (
                each.column("prompt_tokens")
                + each.observation_tokens()
                + each.column("response_tokens")
            ).max()
        )
        for each in traces
    )
    if capacity < longest + 2 * drafted:
        raise InputError(
            f"engine.kv_cache_tokens: {capacity} tokens do not hold the longest sample ({longest}"
            + (f", and {2 * drafted} for drafts" if drafted else "")
            + "); raise it, or lower the cap of the trace's lengths"
        )
    return EngineSettings(
        model=str(config.model),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        max_model_len=min(max(map(longest_allowed, traces)) + 2 * drafted, capacity),
        kv_blocks=limits.kv_blocks,
        tp=prepared.scenario.cluster.tp,
        draft_gpus=prepared.drafts.draft_gpus if prepared.drafts else 0,
        device="cuda" if config.device == "cuda" else "cpu",
        dtype=config.dtype,
        dummy_weights=config.dummy_weights,
        temperature=config.temperature,
        seed=prepared.scenario.seed,
        speculative=speculative,
        threads=config.threads,
        gpu_memory_utilization=prepared.scenario.engine.gpu_memory_utilization
        / config.engines_per_gpu,
        prefix_caching=limits.prefix_caching,
        async_scheduling=limits.async_scheduling,
        recorded=config.recorded_tokens,
        graphs="none" if prepared.scenario.engine.enforce_eager else config.graphs,
    )


def engine_gpus(prepared: Prepared, config: ReplayConfig) -> int:
    """Return the number of GPUs that the engines of one machine and their drafters take."""
    return -(-prepared.workers // config.engines_per_gpu) * prepared.gpus_per_worker


def drafter_process(
    settings: EngineSettings, config: ReplayConfig, models: int = 1
) -> DrafterProcess:
    """Return a process for a drafter that works ahead of an engine with these settings; its model
    is named later. It drafts greedily, finds the text that stands in its prefix cache, and holds
    two windows more of each request. Drafters of several `models` share the memory of a GPU."""
    drafted = settings.speculative["num_speculative_tokens"] if settings.speculative else 0
    more_blocks = settings.max_num_seqs * -(-2 * drafted // settings.block_size)
    of_drafter = replace(
        settings,
        tp=1,
        draft_gpus=0,
        kv_blocks=None if settings.kv_blocks is None else settings.kv_blocks + more_blocks,
        temperature=0.0,
        speculative=None,
        stop_token=None,
        recorded=False,
        prefix_caching=True,
        gpu_memory_utilization=settings.gpu_memory_utilization / models,
    )
    return DrafterProcess(
        of_drafter,
        first_gpu=settings.tp,
        start_deadline_s=config.start_deadline_s,
        step_deadline_s=config.step_deadline_s,
    )


class ReplayEngines:
    """The engines of a replay, or of several in a row: up when it is made, with `links` to those
    that are up already, gone when it is closed. A context manager."""

    def __init__(
        self,
        start: Sequence[Callable[[], EngineLink]],
        start_deadline_s: float = 600.0,
        in_turn: bool = False,
        links: Sequence[EngineLink] | None = None,
    ) -> None:
        self._start = list(start)
        self.links = (
            start_all(self._start, start_deadline_s, in_turn) if links is None else list(links)
        )

    def restart(self, worker: int) -> EngineLink:
        """Replace an engine that is gone; return the line to the new one, which is still
        starting."""
        self.links[worker].close()
        self.links[worker] = self._start[worker]()
        return self.links[worker]

    def facts(self) -> dict[str, Any]:
        """Return what a result records of the engines' machines, if there are others than this."""
        return {}

    def __enter__(self) -> ReplayEngines:
        return self

    def __exit__(self, *error: object) -> None:
        with ctrl_c_waits():
            for link in self.links:
                link.send([Close()])  # to all, before waiting for any
            for link in self.links:
                link.close()


def process_fleet(
    workers: int,
    settings: EngineSettings,
    config: ReplayConfig,
    logs: Path,
    seed: Callable[[int, int], int] | None = None,
) -> ReplayEngines:
    """Start engines in processes of this machine, each with a log. Their seed is the settings', or
    `seed(worker, earlier starts)`."""
    check_engine(config)
    variables = device_variables(workers, settings, config.engines_per_gpu)

    def start(i: int, earlier: Iterator[int]) -> EngineLink:
        seeded = settings if seed is None else replace(settings, seed=seed(i, next(earlier)))
        return engine_link(
            f"worker {i}", seeded, logs / f"worker-{i:03d}.log", variables=variables[i]
        )

    starts = [partial(start, i, count()) for i in range(workers)]
    return ReplayEngines(starts, config.start_deadline_s, config.engines_per_gpu > 1)


def replay(
    prepared: Prepared,
    fleet: ReplayEngines,
    config: ReplayConfig,
    on_step: Callable[[int], None] | None = None,
    training: RealTraining | None = None,
) -> Measured:
    """Run the schedule on the fleet, and with a `training` its updates. The error that stops it
    (Ctrl-C, an engine that keeps dying) is in the returned value. A drafter that the schedule
    trains is trained in a process that is up meanwhile."""
    check_replayable(prepared, config)
    drafter_training = prepared.drafts.speculation.training if prepared.drafts else None
    if drafter_training is None or not drafter_training.adaptive:
        return _replay(prepared, fleet, config, on_step, training, None)
    assert config.draft_model is not None  # checked
    with head_trainer(
        config.draft_model,
        config.drafter_learning_rate,
        config.device,
        spare_gpu(engine_gpus(prepared, config)) if config.device == "cuda" else {},
        config.start_deadline_s,
    ) as trainer:
        return _replay(prepared, fleet, config, on_step, training, trainer)


def _replay(
    prepared: Prepared,
    fleet: ReplayEngines,
    config: ReplayConfig,
    on_step: Callable[[int], None] | None,
    training: RealTraining | None,
    trainer: tuple[ProcessLink, Path] | None,
) -> Measured:
    """Run the schedule on the fleet, with the process that trains the drafter, if there is one, and
    the folder for what it writes."""
    setup, tail = None, dict[str, DrafterSetup]()
    if prepared.drafts is not None and config.forced_acceptance:
        setup = forced_setup(prepared)
    elif prepared.drafts is not None:
        folders = config.draft_folders
        models = models_ahead(prepared)
        process = drafter_process(engine_settings(prepared, config), config, max(len(models), 1))
        setup = drafter_setup(prepared, folders, process)
        setups = drafter_setups(prepared, folders, process)
        tail = {name: each for name, each in setups.items() if name is not None}
    env = WallClock()
    happened: list[dict[str, Any]] = []
    vocabulary = reset(fleet, config, setup, tail.values(), trainer is not None)

    @cache
    def prompt_ids(prompt_id: int, tokens: int) -> tuple[int, ...]:
        draws = np.random.default_rng([prepared.scenario.seed, prompt_id, tokens])
        return tuple(draws.integers(0, vocabulary, tokens).tolist())

    def prompt_of(sample: Sample) -> tuple[int, ...]:
        text = training.prompt_ids(sample) if training else None
        return text or prompt_ids(sample.prompt_id, sample.prompt_tokens)

    @cache
    def answer_ids(sample: Sample, turn: Turn) -> tuple[int, ...]:
        draws = np.random.default_rng([prepared.scenario.seed, sample.uid, turn.end_tokens, 1])
        return tuple(draws.integers(0, vocabulary, turn.observation_tokens).tolist())

    # Versions in writing are awaited as long as an engine may take to start; a pause for them is real.
    held_s = prepared.costs.pause_s + (prepared.costs.load_s if config.dummy_weights else 0.0)
    weights, awaited_s = config.folder, 0.0
    if training is not None:
        training.restart()
        weights, awaited_s = training.weights, config.start_deadline_s
        held_s = prepared.system.on_update.pause_s
    heads: list[SpotHead] = []

    def make_workers(schedule: Schedule) -> list[VllmWorker]:
        responses, drafting = schedule.workload.responses, _drafting(schedule)
        if trainer is not None and schedule.spot is not None:
            link, folder = trainer
            heads.append(SpotHead(env, link, schedule.spot, prompt_of, weights, folder))
        answers = answers_of(prepared, responses) if follows_trace(config) else None
        return [
            VllmWorker(
                env,
                i,
                fleet.links[i],
                partial(fleet.restart, i),
                responses,
                prompt_of,
                weights,
                schedule.recorder,
                config.step_deadline_s,
                config.start_deadline_s,
                happened.append,
                setup,
                held_s,
                answers,
                prompts=schedule.prompts,
                tail=tail,
                awaited_s=awaited_s,
                agents=schedule.agents,
                answer_ids=answer_ids,
                evaluates=(prepared.costs.evaluate_every, prepared.costs.evaluate_s),
                drafting=drafting,
                head=heads[0] if heads else None,
            )
            for i in range(schedule.units)
        ]

    env.restart()
    learners = partial(training.learners, prompt_of) if training else None
    schedule = Schedule(prepared, env, make_workers, on_step, learners)
    workers = connected(schedule)
    if setup is not None and setup.kind == "history":
        history = History(workers, prepared.trace, schedule.workload.responses)
        schedule.recorder.on_dropped = history.dropped
        for worker in workers:
            worker.on_done, worker.on_back = history.finished, history.tell_all
    stopped: BaseException | None = None
    counters: list[dict[str, int]] = [{} for _ in fleet.links]
    passes: tuple[Passes, ...] = ()
    try:
        schedule.run()
        up = [worker.is_up for worker in workers]
        counters, rows = counted(fleet, up, config.step_deadline_s)
        if all(rows) and not happened and not prepared.scenario.faults:
            clocks_s = [env.monotonic_s + link.offset_s for link in fleet.links]
            passes = tuple(map(passes_of, rows, clocks_s))
    except (KeyboardInterrupt, StoppedError) as error:
        stopped = error
        without = ", ".join(worker.link.name for worker in workers if worker.without_room)
        if without and isinstance(error, StoppedError):
            stopped = StoppedError(
                f"{without}: no room on the cluster after a loss, and the schedule cannot go on without; add a node, or use "
                f"fewer --workers ({error})"
            )
    result = schedule.result()
    facts = {
        "clock": "wall",
        "complete": stopped is None,
        "stopped_by": None if stopped is None else str(stopped) or "interrupted",
        "engine": f"vLLM {vllm_version()} ({config.device}, {config.dtype})",
        "host": f"{platform.node()}, {platform.processor() or platform.machine()}",
        "weights": "dummy; loads were held for the predicted time, nothing was loaded"
        if config.dummy_weights
        else "trained meanwhile, written to a folder, really loaded"
        if training
        else f"{max(len(config.weights), 1)} versions from folders, really loaded",
        "temperature": config.temperature,
        "forced_acceptance": config.forced_acceptance,
        "recorded_tokens": config.recorded_tokens,
        "prompts": "token ids drawn at random, by seed and prompt_id, as long as the trace says",
        "training": "real"
        if training
        else "held for as long as the simulator says; so are rewards",
        "engines": [
            {**link.place, **each} for link, each in zip(fleet.links, counters, strict=True)
        ],
        "tokens": balance(result, sum(worker.generated_total for worker in workers)),
        "happened": happened,
        **fleet.facts(),
    }
    if training is not None:
        facts["trained"] = training.facts(result)
    if heads:
        facts |= heads[0].facts()
    result = replace(result, metadata={**result.metadata, "replay": facts})
    rollouts = [
        rollout
        for rollout in schedule.recorder.rollouts()
        if rollout.done and not rollout.sample.is_evaluation
    ]
    return Measured(
        result,
        _as_trace(rollouts, prepared, schedule.workload.responses) if rollouts else None,
        stopped,
        passes,
    )


def balance(result: Result, generated: int) -> dict[str, int]:
    """Return the tokens that the engines reported, `generated`, and what became of them: those of
    samples by status, and the ones that no sample keeps. Equal sums show that a loss of engines
    lost and repeated none."""
    samples = result.samples.to_pandas()
    kept = {
        status: int(samples.generated_tokens[samples.status == status].sum())
        for status in ("trained", "dropped", "buffered", "in_flight")
    }
    return {"generated": generated, **kept, "duplicates": int(samples.duplicate_tokens.sum())}


def _drafting(schedule: Schedule) -> Drafting | None:
    """Return the simulated drafting where it decides what engines draft: windows by length, and
    siblings in place of a model that is missing or stale."""
    prepared = schedule.prepared
    if prepared.drafts is None:
        return None
    speculation = prepared.drafts.speculation
    if schedule.spot is None and speculation.model_free is None and speculation.budget is None:
        return None
    most, seed = prepared.limits.max_num_seqs, prepared.scenario.seed
    return Drafting(prepared.drafts, schedule.deployment, most, seed, schedule.spot)


def connected(schedule: Schedule) -> list[VllmWorker]:
    """Return the schedule's workers, with the dispatcher that hears of their losses."""
    workers = [worker for worker in schedule.workers if isinstance(worker, VllmWorker)]
    for worker in workers:
        worker.dispatcher = schedule.dispatcher
    return workers


def reset(
    fleet: ReplayEngines,
    config: ReplayConfig,
    setup: DrafterSetup | None,
    tail: Iterable[DrafterSetup] = (),
    trained: bool = False,
) -> int:
    """Reset all engines to their state after the start, with this drafter (its first weights, if it
    was `trained`), and with the processes of the `tail`'s drafters up; return the size of the
    vocabulary. Reports of an earlier run are dropped."""
    drafters = [each for each in (setup, *tail) if each is not None]
    ahead = [each.ahead.process for each in drafters if each.ahead is not None]
    head = str(config.draft_model) if trained else ""
    resets: list[list[Command]] = [
        [
            Reset(-1, config.folder(0), head),
            *([DraftCall("start_drafters", (ahead,))] if ahead else []),
            *([DraftCall("configure", (setup, worker))] if setup else []),
        ]
        for worker in range(len(fleet.links))
    ]
    for link, reset in zip(fleet.links, resets, strict=True):
        link.send(reset)
    vocabulary = 0
    for i, link in enumerate(fleet.links):
        try:
            vocabulary = _answer(link, Reached, config.start_deadline_s).vocabulary
        except GoneError:  # the engine died in the last replay
            link = fleet.restart(i)
            wait_until_ready([link], config.start_deadline_s)
            link.send(resets[i])
            vocabulary = _answer(link, Reached, config.start_deadline_s).vocabulary
    return vocabulary


def counted(
    fleet: ReplayEngines, up: Sequence[bool], deadline_s: float
) -> tuple[list[dict[str, int]], list[Sequence[float]]]:
    """Return the counters and the passes (`host.Passes`) of each engine since its reset, or since
    its restart after a loss; none of an engine that is gone or, by `up`, starts. Passes after the
    schedule's end, of requests that it left, count until the engine answers."""
    counters: list[dict[str, int]] = [{} for _ in fleet.links]
    passes: list[Sequence[float]] = [() for _ in fleet.links]
    running = [i for i, runs in enumerate(up) if runs]
    for i in running:
        fleet.links[i].send([Count()])
    for i in running:
        link = fleet.links[i]
        with suppress(StoppedError):  # the result is worth more than its counters
            answer = _answer(link, Counted, deadline_s)
            counters[i], passes[i] = answer.counters._asdict(), answer.passes
    return counters, passes


R = TypeVar("R", bound=Report)


def _answer(link: EngineLink, kind: type[R], deadline_s: float) -> R:
    """Return the engine's answer to a reset or a count; drop other reports. Raise `GoneError` if it
    has ended."""
    reports = reports_of(
        link, deadline_s, " while it loads the first weights; raise --start-deadline"
    )
    return next(
        each for each in reports if isinstance(each, kind) and getattr(each, "key", -1) == -1
    )


class History:
    """The complete groups, which the drafters of all engines get, as the simulated index builders do
    (`simrl.runtime.drafting.IndexBuilders`): of a group with dropped responses the finished ones."""

    def __init__(
        self, workers: Sequence[VllmWorker], trace: Trace, responses: Mapping[int, Response]
    ) -> None:
        self._workers = workers
        self._responses = responses
        self._rewarded = "reward" in trace.table.column_names
        groups = zip(
            trace.column("prompt_id").tolist(), trace.column("epoch").tolist(), strict=True
        )
        self._size = Counter(groups)
        self._epochs = 1 + int(trace.column("epoch").max())
        # By sample; None for one that was dropped unfinished.
        self._ended: dict[tuple[int, int], dict[int, Rollout | None]] = defaultdict(dict)
        self._whole: list[tuple[int, int]] = []

    def finished(self, rollout: Rollout) -> None:
        self._record(rollout.sample, rollout)

    def dropped(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            if not rollout.done:
                self._record(rollout.sample, None)

    def _record(self, sample: Sample, rollout: Rollout | None) -> None:
        place = sample.prompt_id, sample.epoch
        group = self._ended[place]
        size = self._size[sample.prompt_id, sample.epoch % self._epochs]
        if sample.sample >= size or group.get(sample.sample) is not None:
            return
        was_whole = len(group) == size
        group[sample.sample] = rollout
        if was_whole:  # a dropped response, generated after all: the drafters lack it alone
            news = [rollout]
        elif len(group) == size:
            self._whole.append(place)
            news = self._in_order(place)
        else:
            return
        for worker in self._workers:
            self._tell(worker, place, news)

    def tell_all(self, worker: VllmWorker) -> None:
        for place in self._whole:
            self._tell(worker, place, self._in_order(place))

    def _in_order(self, place: tuple[int, int]) -> list[Rollout | None]:
        return [rollout for _, rollout in sorted(self._ended[place].items())]

    def _tell(
        self, worker: VllmWorker, place: tuple[int, int], rollouts: Sequence[Rollout | None]
    ) -> None:
        group = [rollout for rollout in rollouts if rollout is not None]
        rewards = (
            [self._responses[rollout.sample.uid].reward for rollout in group]
            if self._rewarded
            else None
        )
        if group:
            worker.draft("learn", *place, [rollout.token_ids or () for rollout in group], rewards)


def _as_trace(
    rollouts: Sequence[Rollout], prepared: Prepared, responses: Mapping[int, Response]
) -> Trace:
    """Return the generated responses as a trace, to simulate or to draft from; only the first epoch
    of a repeated trace."""
    metadata = prepared.trace.metadata
    first = {(r.sample.step, r.sample.prompt_id, r.sample.sample): r for r in reversed(rollouts)}
    rollouts = list(first.values())
    samples = [rollout.sample for rollout in rollouts]
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens")
    columns: dict[str, Any] = {
        **{name: [getattr(sample, name) for sample in samples] for name in names},
        "response_tokens": [rollout.tokens for rollout in rollouts],
        "response_ids": [list(rollout.token_ids or ()) for rollout in rollouts],
        "policy_version": [rollout.segments[-1].policy_version for rollout in rollouts],
    }
    if "reward" in prepared.trace.table.column_names:
        columns["reward"] = [responses[sample.uid].reward for sample in samples]
    if prepared.has_turns:
        turns = [
            [t for t in responses[r.sample.uid].turns if t.end_tokens < r.tokens] for r in rollouts
        ]
        ends = [
            [0, *(t.end_tokens for t in of), r.tokens]
            for of, r in zip(turns, rollouts, strict=True)
        ]
        columns["turn_tokens"] = [np.diff(each).tolist() for each in ends]
        columns["turn_environment_s"] = [[t.environment_s for t in of] for of in turns]
        columns["turn_observation_tokens"] = [[t.observation_tokens for t in of] for of in turns]
    return Trace.from_columns(
        columns,
        TraceMetadata(
            name=f"{metadata.name}-replayed",
            kind="recorded",
            source=f"a replay of {metadata.name} ({metadata.source}): its lengths, tokens generated by {prepared.model.name}",
            licence=metadata.licence,
            tokenizer=f"token ids of {prepared.model.name}",
            cap_tokens=metadata.cap_tokens,
        ),
    )
