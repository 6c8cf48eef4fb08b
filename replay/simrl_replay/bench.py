"""Scenes on a real engine: the passes that ran and the seconds of each, timed in the loop of a
replay.

Invariant: a pass is a whole turn of `Host`: the step and the loop around it (taking tokens, reports
over the pipe). The work for requests that begin or end is not part of it and is timed apart. No
request is preempted: scenes fit the KV cache.
"""

from __future__ import annotations

import platform
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from simrl.speculation.windows import Fixed
from simrl_replay.host import (
    Abort,
    Begin,
    Channel,
    Command,
    DraftCall,
    Ended,
    Host,
    Loaded,
    LoadWeights,
    Report,
    answer_each,
    run_host,
)
from simrl_replay.link import EngineLink, device_variables, engine_link, received, start_all
from simrl_replay.proposer import DrafterSetup, Forced
from simrl_replay.trials import trials
from simrl_replay.vllm_adapter import EngineSettings, VllmEngine

LEAD_TURNS = 2  # first turns of a batch, not timed


class Shape(NamedTuple):
    """The work of a pass: `sequences` sequences of mean length `kv_tokens` decode and verify
    `draft_tokens` drafted tokens each; `chunk_tokens` prompt tokens are computed, of one prompt
    after `context_tokens` of its own, or of several short prompts."""

    sequences: int = 0
    draft_tokens: int = 0
    kv_tokens: float = 0.0
    prompts: int = 0
    chunk_tokens: int = 0
    context_tokens: int = 0


class Timed(NamedTuple):
    """Seconds of a pass: the mean of `passes` consecutive ones."""

    shape: Shape
    seconds: float
    passes: int = 1


class Stairs(NamedTuple):
    """A batch of sequences of `kv_tokens` tokens decodes at each batch size in `sequences`, which
    falls."""

    sequences: tuple[int, ...]
    kv_tokens: int
    draft_tokens: int = 0
    turns: int = 24


class Prompts(NamedTuple):
    """`prompts` prompts of `tokens` tokens arrive at once while `sequences` sequences decode;
    repeated `times` times."""

    prompts: int
    tokens: int
    sequences: int = 0
    kv_tokens: int = 0
    times: int = 6


class Loads(NamedTuple):
    """Weight loads of an idle engine from a folder."""

    folder: str
    times: int


class Facts(NamedTuple):
    """Request for the engine's versions, its processor and the tokens that its KV cache holds."""


Scene = Stairs | Prompts | Loads | Facts


class Seen(NamedTuple):
    """Measurements of a scene. `begin_s` and `end_s` are the host's work per request that begins or
    ends, `between_s` the time of a turn outside its step, at one sequence."""

    passes: tuple[Timed, ...] = ()
    begin_s: tuple[float, ...] = ()
    end_s: tuple[float, ...] = ()
    between_s: tuple[float, ...] = ()
    load_s: tuple[float, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


class _Tap:
    """Channel of the measured host: commands are queued here, reports go over the pipe as usual.
    `asked_s` is when commands were last polled: the start of the step."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._commands: deque[Command] = deque()
        self.asked_s = 0.0
        self.loaded: list[Loaded] = []

    def put(self, commands: Sequence[Command]) -> None:
        self._commands.extend(commands)

    def poll(self, timeout_s: float | None) -> bool:
        self._connection.poll(0.0)  # costs what it costs in a replay
        self.asked_s = time.monotonic()
        return bool(self._commands)

    def recv(self) -> list[Command]:
        commands = list(self._commands)
        self._commands.clear()
        return commands

    def send(self, reports: Sequence[Report]) -> None:
        self.loaded += [report for report in reports if isinstance(report, Loaded)]
        self._connection.send(list(reports))


class Bench:
    """A measured engine that runs scenes, one after another."""

    def __init__(self, engine: VllmEngine, connection: Connection) -> None:
        self._engine = engine
        self._tap = _Tap(connection)
        self._host = Host(engine, self._tap)
        self._numbers = 0
        self._drafts = 0
        self._budget = engine.settings.max_num_batched_tokens
        self._random = random.Random(0)
        self._step_s = 0.0
        step = engine.step

        def timed_step() -> Any:
            started_s = time.monotonic()
            progress = step()
            self._step_s = time.monotonic() - started_s
            return progress

        engine.step = timed_step  # type: ignore[method-assign]

    def carry_out(self, scene: Scene) -> Seen:
        match scene:
            case Stairs():
                return self._stairs(scene)
            case Prompts():
                return self._prompts(scene)
            case Loads(folder, times):
                return self._loads(folder, times)
            case Facts():
                return Seen(facts=tuple(facts(self._engine).items()))

    def _stairs(self, scene: Stairs) -> Seen:
        self._draft(scene.draft_tokens)
        most, turns = scene.sequences[0], LEAD_TURNS + scene.turns
        at_once = most * scene.kv_tokens <= self._budget
        to_the_end = len(scene.sequences) == 1 and not scene.draft_tokens and at_once
        tokens = turns + 2  # the first token, the timed ones, the last one
        if not to_the_end:
            tokens = (turns * len(scene.sequences) + 2) * (scene.draft_tokens + 1) + prefill_passes(
                most, scene.kv_tokens, self._budget
            )
        numbers = self._begin(most, scene.kv_tokens, tokens)
        self._until_all_decode(numbers)
        timed, between, ends = [], [], []
        for sequences in scene.sequences:
            self._tap.put([Abort(number) for number in numbers[sequences:]])
            numbers = numbers[:sequences]
            seconds, lengths = [], []
            for _ in range(turns):
                lengths.append(
                    scene.kv_tokens
                    + sum(self._host.requests[number].have for number in numbers) / sequences
                )
                seconds.append(self._turn())
                between.append(seconds[-1] - self._step_s)
            shape = Shape(sequences, scene.draft_tokens, _mean(lengths[LEAD_TURNS:]))
            timed.append(Timed(shape, _mean(seconds[LEAD_TURNS:]), scene.turns))
        if to_the_end:
            ends.append((self._turn() - timed[0].seconds) / most)
        self._end()
        return Seen(
            tuple(timed),
            end_s=tuple(ends),
            between_s=tuple(between) if scene.sequences == (1,) else (),
        )

    def _prompts(self, scene: Prompts) -> Seen:
        self._draft(0)
        room = self._budget - scene.sequences
        turns_each = (
            -(-scene.prompts * scene.tokens // room) + 1
        )  # the prefill, and the decode step that ends them
        decoding_tokens = (
            scene.times * turns_each
            + prefill_passes(scene.sequences, scene.kv_tokens, self._budget)
            + 2
        )
        decoding = self._begin(scene.sequences, scene.kv_tokens, decoding_tokens)
        self._until_all_decode(decoding)
        seconds: dict[tuple[int, int], list[float]] = {}  # by chunk and its context
        begins, lengths = [], []
        for _ in range(scene.times):
            started_s = time.monotonic()
            numbers = self._begin(scene.prompts, scene.tokens, 2)
            begun_s = time.monotonic() - started_s  # time to make the commands
            left, context = scene.prompts * scene.tokens, 0
            while left > 0:
                have = [self._host.requests[number].have for number in decoding]
                lengths.append(scene.kv_tokens + _mean(have) if have else 0.0)
                chunk = min(left, room)
                seconds.setdefault((chunk, context), []).append(self._turn())
                if not context:
                    begins.append((self._tap.asked_s - started_s - begun_s) / scene.prompts)
                left, context = left - chunk, context + chunk
            while any(number in self._host.requests for number in numbers):
                self._host.turn()
        self._end()
        passes = [
            Timed(
                Shape(scene.sequences, 0, _mean(lengths), scene.prompts, chunk, context),
                _mean(each),
                len(each),
            )
            for (chunk, context), each in seconds.items()
        ]
        return Seen(tuple(passes), begin_s=tuple(begins))

    def _loads(self, folder: str, times: int) -> Seen:
        self._tap.loaded.clear()
        for _ in range(times):
            self._tap.put([LoadWeights(0, 0, folder, "recompute", 0.0)])
            self._host.turn()
        return Seen(load_s=tuple(load.finished_s - load.started_s for load in self._tap.loaded))

    def _draft(self, tokens: int) -> None:
        if self._engine.settings.speculative is not None and tokens != self._drafts:
            setup = (
                DrafterSetup(kind="fixed", window=Fixed(tokens=tokens))
                if tokens
                else DrafterSetup()
            )
            self._tap.put([DraftCall("configure", (setup,))])
        self._drafts = tokens

    def _begin(self, requests: int, prompt_tokens: int, tokens: int) -> list[int]:
        numbers = list(range(self._numbers + 1, self._numbers + requests + 1))
        self._numbers += requests
        most = self._engine.vocabulary - 1
        for number in numbers:
            prompt = tuple(self._random.randint(0, most) for _ in range(prompt_tokens))
            # What an engine that follows recorded tokens does for them is part of its passes.
            recorded = Forced((1,) * tokens, 0) if self._engine.settings.recorded else None
            self._tap.put([Begin(number, 0, prompt, (), tokens, recorded)])
        return numbers

    def _turn(self) -> float:
        """Run a turn; return its seconds, counted from when its commands are carried out."""
        self._host.turn()
        return time.monotonic() - self._tap.asked_s

    def _until_all_decode(self, numbers: Sequence[int]) -> None:
        if numbers:
            self._host.turn()
        while any(self._host.requests[number].have == 0 for number in numbers):
            self._host.turn()

    def _end(self) -> None:
        if self._host.requests:
            self._tap.put([Abort(number) for number in self._host.requests])
            self._host.turn()
        while self._engine.unfinished:
            self._engine.step()


def prefill_passes(sequences: int, tokens: int, budget: int) -> int:
    """Return an upper bound on the passes until all prompts are computed, while sequences with a
    computed prompt decode."""
    return -(-sequences * tokens // max(budget - sequences, 1))


def facts(engine: VllmEngine) -> dict[str, str]:
    """Return the installed versions and the name of the processor."""
    import torch

    found = {
        "vllm": engine.version,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in ("transformers", "triton", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {
        "kv_cache_tokens": str(engine.kv_cache_tokens),
        "graph_tokens": str(engine.graph_tokens),
        "dtype": engine.settings.dtype,
        "device": torch.cuda.get_device_name()
        if engine.settings.device == "cuda"
        else _processor(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            return next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def bench(engine: VllmEngine, channel: Channel) -> None:
    """Run the process of a measured engine: receive scenes, send their measurements; the engine's
    reports come in between."""
    assert isinstance(channel, Connection)
    answer_each(channel, Bench(engine, channel).carry_out)


def bench_then_replay(engine: VllmEngine, channel: Channel) -> None:
    """Run scenes up to `Close`, then the loop of a replay up to the next, then trials."""
    bench(engine, channel)
    run_host(engine, channel)
    trials(engine, channel)


def start_bench(
    settings: EngineSettings, neighbours: int, traffic: int, logs: Path, deadline_s: float = 600.0
) -> RemoteBench:
    """Start an engine and its neighbours in processes of their own, and return the bench of the
    first."""
    own, *others = device_variables(1 + neighbours, settings)
    starts = [
        partial(
            engine_link, "measured engine", settings, logs / "measured.log", bench, variables=own
        )
    ]
    beside = settings if settings.speculative is None else replace(settings, speculative=None)
    starts += [
        partial(
            engine_link, f"neighbour {i}", beside, logs / f"neighbour-{i}.log", variables=variables
        )
        for i, variables in enumerate(others)
    ]
    measured, *neighbouring = start_all(starts, deadline_s)
    return RemoteBench(measured, neighbouring, traffic, settings.max_model_len)


class RemoteBench:
    """The bench of an engine in another process, with neighbour engines that generate throughout,
    each with a batch of `traffic` sequences of up to `max_model_len` tokens: engines of one host
    slow each other down. A context manager, which leaves no process."""

    def __init__(
        self,
        measured: EngineLink,
        neighbours: Sequence[EngineLink],
        traffic: int,
        max_model_len: int,
    ) -> None:
        self._bench, self._neighbours, self._most_tokens = measured, neighbours, max_model_len // 2
        self._numbers = 0
        for link in neighbours:
            link.send([self._request() for _ in range(traffic)])

    def __call__(self, scene: Scene) -> Seen:
        """Return the measurements of a scene. Raise `StoppedError` if an engine dies."""
        self._bench.send([scene])  # type: ignore[list-item]
        links = {link.connection: link for link in (self._bench, *self._neighbours)}
        while True:
            for connection in wait(list(links)):
                assert isinstance(connection, Connection)
                link = links[connection]
                for report in received(link):
                    if isinstance(report, Seen):
                        return report
                    if isinstance(report, Ended):
                        link.send([self._request()])

    def _request(self) -> Begin:
        """Return a request of random length, so that the traffic is always a mix."""
        self._numbers += 1
        tokens = self._most_tokens - self._numbers * 37 % (self._most_tokens // 2)
        return Begin(self._numbers, 0, (1,) * 16, (), tokens)

    def __enter__(self) -> RemoteBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for link in (self._bench, *self._neighbours):
            if kind is None:
                link.close()
            else:
                link.kill()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
