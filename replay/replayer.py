"""Replay: a prepared scenario's own schedule, dispatch and drafters, with real engines in place of simulated workers.

Invariant: everything but the rollout workers and the clock is what the simulator runs. Lengths are those of the trace, tokens
are really generated and weights really loaded; training and rewards hold for as long as the simulator says, and the result says
so. A replay that is stopped leaves the result of what had happened by then, and no process.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from replay.clock import WallClock
from replay.host import Close, Command, Draft, Failed, Reached, Reset
from replay.link import Link, ProcessLink, device_variables, start_all, wait_until_ready
from replay.proposer import DrafterSetup
from replay.vllm_adapter import EngineSettings, check_model, check_weights, vllm_version
from replay.vllm_worker import VllmWorker
from simrl.errors import InputError, StoppedError
from simrl.interrupts import ctrl_c_waits
from simrl.result import Result
from simrl.rollout import Rollout
from simrl.simulate import Prepared, Schedule
from simrl.trace import Response, Sample, Trace, TraceMetadata


@dataclass(frozen=True)
class ReplayConfig:
    """What a scenario does not say. `weights` are folders, one a policy version; versions beyond them get the last one.

    Without a report for `step_deadline_s` an engine that has work counts as hung; one that starts has `start_deadline_s`.
    """

    model: Path
    weights: tuple[Path, ...] = ()
    device: str = "cpu"
    dtype: str = "auto"
    dummy_weights: bool = False
    draft_model: Path | None = None
    temperature: float = 1.0
    threads: int = 1
    step_deadline_s: float = 60.0
    start_deadline_s: float = 600.0

    def folder(self, version: int) -> str:
        """Where the weights of a policy version are."""
        folders = self.weights or (self.model,)
        return str(folders[min(version, len(folders) - 1)])


class Measured(NamedTuple):
    """What a replay leaves: its result, the trace of what was generated (with token ids), and what stopped it, if anything."""

    result: Result
    trace: Trace | None
    stopped: BaseException | None


def check_replayable(prepared: Prepared, config: ReplayConfig) -> None:
    """Raises `InputError` for what real engines of this replayer cannot do."""
    system, drafts = prepared.system, prepared.drafts
    refused = {
        "its samples have turns of an environment, and engines here keep no cache through a pause": any(
            name in prepared.trace.table.column_names for name in ("turn_tokens", "environment_s")
        ),
        "its dispatch shares a pool of KV cache among workers, which a plain vLLM has not; choose --dispatch least_requests": (
            system.dispatch.kv_pool
        ),
        "it moves GPUs between rollout and training (adapt_split_every)": system.adapt_split_every > 0,
        "its drafter is decoupled or best-of-N (specactor); choose another --speculation": (
            prepared.tail is not None or (drafts is not None and drafts.decoupled is not None)
        ),
        "it trains its drafter while it runs (tlt); choose another --speculation": (
            drafts is not None and drafts.speculation.training is not None
        ),
        "vLLM verifies a draft model's tokens by rejection sampling (speculation.verification is exact_match)": (
            drafts is not None
            and drafts.acceptance is not None
            and drafts.acceptance.verification == "exact_match"
            and config.temperature > 0
        ),
        "evaluations (training.evaluate_every) are not replayed; set it to 0": prepared.costs.evaluate_every > 0,
    }
    for why, is_so in refused.items():
        if is_so:
            raise InputError(f"{prepared.scenario.file}: {system.label} cannot be replayed: {why}")
    if config.dummy_weights and config.weights:
        raise InputError("--dummy and --weights exclude each other: dummy weights are of no version")


def check_engine(config: ReplayConfig) -> None:
    """Raises `InputError` where vLLM is missing or unknown, or folders hold what it must not load; before anything starts."""
    vllm_version()
    check_model(config.model, config.dummy_weights)
    if config.draft_model is not None:
        check_model(config.draft_model, config.dummy_weights)
    for folder in config.weights:
        check_weights(folder)


def engine_settings(prepared: Prepared, config: ReplayConfig) -> EngineSettings:
    """The engine that the simulator simulates."""
    limits, trace = prepared.limits, prepared.trace
    speculative = None
    if prepared.drafts is not None:
        from replay.speculative import speculative_config

        if config.dummy_weights and config.device == "cpu":
            raise InputError(
                "--dummy with speculation: vLLM accepts drafts of random weights on CUDA alone; give a model's weights"
            )
        speculative = speculative_config(prepared, draft_folder=config.draft_model, synthetic=config.dummy_weights)
    drafted = int(speculative["num_speculative_tokens"]) if speculative else 0
    prompt_tokens, capacity = trace.column("prompt_tokens"), limits.kv_blocks * limits.block_size
    longest = int((prompt_tokens + trace.column("response_tokens")).max())
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
        max_model_len=min(int(prompt_tokens.max()) + trace.metadata.cap_tokens + 2 * drafted, capacity),
        kv_blocks=limits.kv_blocks,
        tp=prepared.scenario.cluster.tp,
        device="cuda" if config.device == "cuda" else "cpu",
        dtype=config.dtype,
        dummy_weights=config.dummy_weights,
        temperature=config.temperature,
        seed=prepared.scenario.seed,
        speculative=speculative,
        threads=config.threads,
        gpu_memory_utilization=prepared.scenario.engine.gpu_memory_utilization,
    )


class Fleet:
    """The engines of a replay, or of several in a row: up when it is made, gone when it is closed. A context manager."""

    def __init__(self, start: Sequence[Callable[[], Link]], start_deadline_s: float = 600.0) -> None:
        self._start = list(start)
        self.links = start_all(self._start, start_deadline_s)

    def restart(self, worker: int) -> Link:
        """A new engine in the place of one that is gone; it is not up yet."""
        self.links[worker].close()
        self.links[worker] = self._start[worker]()
        return self.links[worker]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        with ctrl_c_waits():
            for link in self.links:
                link.send([Close()])  # to all, before one of them is waited for
            for link in self.links:
                link.close()


def process_fleet(workers: int, settings: EngineSettings, config: ReplayConfig, logs: Path) -> Fleet:
    """Engines in processes of this machine; what they print goes to a log each."""
    check_engine(config)
    variables = device_variables(workers, settings)

    def start(i: int) -> Callable[[], Link]:
        return lambda: ProcessLink(f"worker {i}", settings, logs / f"worker-{i:03d}.log", variables=variables[i])

    return Fleet([start(i) for i in range(workers)], config.start_deadline_s)


def replay(
    prepared: Prepared, fleet: Fleet, config: ReplayConfig, on_step: Callable[[int], None] | None = None
) -> Measured:
    """Runs the schedule on the fleet. What stops it (Ctrl-C, an engine that keeps dying) is told in what it returns."""
    check_replayable(prepared, config)
    setup = None
    if prepared.drafts is not None:
        from replay.speculative import drafter_setup

        setup = drafter_setup(prepared)
    env = WallClock()
    happened: list[dict[str, Any]] = []
    prompts = _Prompts(prepared.scenario.seed, _reset(fleet, config, setup))

    def make_workers(schedule: Schedule) -> list[VllmWorker]:
        return [
            VllmWorker(
                env,
                i,
                fleet.links[i],
                lambda i=i: fleet.restart(i),  # type: ignore[misc]
                schedule.workload.responses,
                prompts.ids,
                config.folder,
                schedule.recorder,
                config.step_deadline_s,
                config.start_deadline_s,
                happened.append,
                setup,
                prepared.costs.load_s if config.dummy_weights else 0.0,
            )
            for i in range(schedule.units)
        ]

    env.restart()
    schedule = Schedule(prepared, env, make_workers, on_step)
    history = None
    if setup is not None and setup.kind == "history":
        vllm_workers = [worker for worker in schedule.workers if isinstance(worker, VllmWorker)]
        history = _History(vllm_workers, prepared.trace, schedule.workload.responses)
    for worker in schedule.workers:
        assert isinstance(worker, VllmWorker)
        worker.dispatcher = schedule.dispatcher
        if history is not None:
            worker.on_done, worker.on_back = history.finished, history.tell_all
    stopped: BaseException | None = None
    try:
        schedule.run()
    except (KeyboardInterrupt, StoppedError) as error:
        stopped = error
    result = schedule.result()
    facts = {
        "clock": "wall",
        "complete": stopped is None,
        "stopped_by": None if stopped is None else str(stopped) or "interrupted",
        "engine": f"vLLM {vllm_version()} ({config.device}, {config.dtype})",
        "host": f"{platform.node()}, {platform.processor() or platform.machine()}",
        "weights": "dummy; loads were held for the predicted time, nothing was loaded"
        if config.dummy_weights
        else f"{max(len(config.weights), 1)} versions from folders, really loaded",
        "temperature": config.temperature,
        "prompts": "token ids drawn at random, by seed and prompt_id, as long as the trace says",
        "training": "held for as long as the simulator says; so are rewards",
        "happened": happened,
    }
    result = Result(
        spans=result.spans,
        steps=result.steps,
        samples=result.samples,
        segments=result.segments,
        metadata={**result.metadata, "replay": facts},
    )
    rollouts = [rollout for rollout in schedule.recorder.rollouts() if rollout.done]
    return Measured(result, _as_trace(rollouts, prepared, schedule.workload.responses) if rollouts else None, stopped)


def _reset(fleet: Fleet, config: ReplayConfig, setup: DrafterSetup | None) -> int:
    """All engines as after their start; gives the size of the vocabulary. Reports of an earlier run are dropped."""
    reset: list[Command] = [Reset(-1, config.folder(0)), *([Draft("configure", (setup,))] if setup else [])]
    for link in fleet.links:
        link.send(reset)
    vocabulary = 0
    for i, link in enumerate(fleet.links):
        done = _wait_for_reset(link, config.start_deadline_s)
        if done is None:  # the last replay ended with a dead engine
            link = fleet.restart(i)
            wait_until_ready([link], config.start_deadline_s)
            link.send(reset)
            done = _wait_for_reset(link, config.start_deadline_s)
        if done is None:
            raise StoppedError(f"{link.name}: {link.death()}")
        vocabulary = done.vocabulary
    return vocabulary


def _wait_for_reset(link: Link, deadline_s: float) -> Reached | None:
    """The answer of an engine that is reset; None if it is dead."""
    while link.connection.poll(deadline_s):
        try:
            reports = link.connection.recv()
        except (EOFError, OSError):
            return None
        for report in reports:
            if isinstance(report, Failed):
                raise StoppedError(f"{link.name}: {report.message}")
            if isinstance(report, Reached) and report.key == -1:
                return report
    raise StoppedError(
        f"{link.name}: no answer for {deadline_s:g} s while it loads the first weights; raise --start-deadline"
    )


class _Prompts:
    """Token ids of prompts: all samples of a prompt have the same."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._ids: dict[tuple[int, int], tuple[int, ...]] = {}

    def ids(self, sample: Sample) -> tuple[int, ...]:
        key = (sample.prompt_id, sample.prompt_tokens)
        if key not in self._ids:
            draws = np.random.default_rng([self._seed, *key])
            self._ids[key] = tuple(draws.integers(0, self._vocabulary, sample.prompt_tokens).tolist())
        return self._ids[key]


class _History:
    """Tells every engine's drafter of each group that is whole: what the simulated index builders wait for."""

    def __init__(self, workers: Sequence[VllmWorker], trace: Trace, responses: Mapping[int, Response]) -> None:
        self._workers = workers
        self._responses = responses
        self._rewarded = "reward" in trace.table.column_names
        groups = zip(trace.column("prompt_id").tolist(), trace.column("epoch").tolist(), strict=True)
        self._size = Counter(groups)
        self._epochs = 1 + int(trace.column("epoch").max())
        self._finished: dict[tuple[int, int], dict[int, Rollout]] = defaultdict(dict)
        self._whole: list[tuple[int, int]] = []

    def finished(self, rollout: Rollout) -> None:
        """A response is there."""
        sample = rollout.sample
        group = self._finished[sample.prompt_id, sample.epoch]
        size = self._size[sample.prompt_id, sample.epoch % self._epochs]
        if sample.sample >= size or sample.sample in group:
            return
        group[sample.sample] = rollout
        if len(group) == size:
            self._whole.append((sample.prompt_id, sample.epoch))
            for worker in self._workers:
                self._tell(worker, *self._whole[-1])

    def tell_all(self, worker: VllmWorker) -> None:
        """An engine that is new knows nothing."""
        for group in self._whole:
            self._tell(worker, *group)

    def _tell(self, worker: VllmWorker, prompt_id: int, epoch: int) -> None:
        group = [rollout for _, rollout in sorted(self._finished[prompt_id, epoch].items())]
        rewards = [self._responses[rollout.sample.uid].reward for rollout in group] if self._rewarded else None
        worker.draft("learn", prompt_id, epoch, [rollout.token_ids or () for rollout in group], rewards)


def _as_trace(rollouts: Sequence[Rollout], prepared: Prepared, responses: Mapping[int, Response]) -> Trace:
    """What was generated, as a trace to simulate or to draft from: the first pass, where the trace is passed over."""
    metadata = prepared.trace.metadata
    first = {(r.sample.step, r.sample.prompt_id, r.sample.sample): r for r in reversed(rollouts)}
    rollouts = list(first.values())
    samples = [rollout.sample for rollout in rollouts]
    columns: dict[str, Any] = {
        name: [getattr(sample, name) for sample in samples]
        for name in ("step", "epoch", "prompt_id", "sample", "prompt_tokens")
    }
    columns["response_tokens"] = [rollout.tokens for rollout in rollouts]
    columns["response_ids"] = [list(rollout.token_ids or ()) for rollout in rollouts]
    if "reward" in prepared.trace.table.column_names:
        columns["reward"] = [responses[sample.uid].reward for sample in samples]
    columns["policy_version"] = [rollout.segments[-1].policy_version for rollout in rollouts]
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
