"""The loop around an engine, in a process of its own: takes commands, steps, tells what happened.

Invariant: commands take effect in their order at the first boundary between two steps after they came, at once if the engine is
idle. Every token that a stay gained is reported once, with the weights that made it; what a stay gained before something
happened to it (its end, other weights) is reported before that.

Messages are plain data, over a pipe of the own processes or by Ray. Times are `time.monotonic()` of this process. Tokens are
reported when something happens, and else every `REPORT_EVERY_S`: so much is generated anew if the engine is killed, and so
often whoever controls it has a message of every engine to read.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from replay.proposer import DrafterSetup, Forced
from replay.vllm_adapter import EngineSettings, VllmEngine, explained
from simrl.errors import InputError

REPORT_EVERY_S = 0.25  # 32 engines with 100 samples each then have 13 thousand entries a second to tell

# Commands.


class Begin(NamedTuple):
    """A stay: `tokens` more after `prompt_ids` and `token_ids`, those it had before. `forced` is what a drafter is told whose
    acceptance is forced."""

    stay: int
    prompt_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokens: int
    forced: Forced | None = None


class Abort(NamedTuple):
    """Ends a stay."""

    stay: int


class Load(NamedTuple):
    """Other weights, from a folder; `held_s` longer than they take."""

    key: int
    version: int
    folder: str
    running: Literal["recompute", "keep", "drain"]
    held_s: float


class Watch(NamedTuple):
    """To be told when the response of a stay has so many tokens, those before it counted."""

    key: int
    stay: int
    tokens: int


class Ask(NamedTuple):
    """How far a stay is: an answer that comes with its tokens so far."""

    key: int
    stay: int


class Slow(NamedTuple):
    """Every step takes so many times as long."""

    factor: float


class Draft(NamedTuple):
    """A call of the drafter: what it learns, whether it drafts."""

    call: str
    arguments: tuple[Any, ...]


class DraftWindow(NamedTuple):
    """A stay drafts so many tokens from the next pass on."""

    stay: int
    tokens: int


class Reset(NamedTuple):
    """As after the start: nothing runs, the first weights, nothing learnt. The answer says when that is so."""

    key: int
    folder: str


class Close(NamedTuple):
    """The process ends."""


Command = Begin | Abort | Load | Watch | Ask | Slow | Draft | DraftWindow | Reset | Close

# Reports.


class Ready(NamedTuple):
    """The engine is up."""

    pid: int
    version: str
    kv_cache_tokens: int
    vocabulary: int
    monotonic_s: float


class Failed(NamedTuple):
    """What went wrong, in a line, and where."""

    message: str
    trace: str


class Begun(NamedTuple):
    """A stay is at the engine."""

    stay: int
    at_s: float


class Gained(NamedTuple):
    """Tokens of a stay up to `until_s`; `first_s` is when the stay's first one came, for the report that has it."""

    stay: int
    token_ids: tuple[int, ...]
    first_s: float | None
    until_s: float


class Ended(NamedTuple):
    """A stay is over, `whole` if it has all its tokens. `drafts`: drafted, accepted, verifications, verified tokens."""

    stay: int
    at_s: float
    whole: bool
    drafts: tuple[int, int, int, int]


class Loaded(NamedTuple):
    """The weights are others; nothing was generated in between."""

    key: int
    version: int
    started_s: float
    finished_s: float


class Reached(NamedTuple):
    """What was watched, asked or reset is so; a reset tells the size of the vocabulary."""

    key: int
    at_s: float
    drafts: tuple[int, int, int, int] = (0, 0, 0, 0)
    vocabulary: int = 0


class Alive(NamedTuple):
    """The engine stands at a boundary, and nothing else is to be told."""

    at_s: float


Report = Ready | Failed | Begun | Gained | Ended | Loaded | Reached | Alive


class Channel(Protocol):
    """Lists of commands come in, lists of reports go out."""

    def poll(self, timeout_s: float | None) -> bool: ...

    def recv(self) -> Sequence[Command]: ...

    def send(self, reports: Sequence[Report]) -> None: ...


@dataclass
class _Stay:
    stay: int
    request_id: str
    have: int  # tokens of the response
    unreported: list[int] = field(default_factory=list)
    first_s: float | None = None
    told_first: bool = False
    watches: list[tuple[int, int]] = field(default_factory=list)  # tokens, key
    drafts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # vLLM's own, as `Ended` has them


class Host:
    """The state of the loop. `turn` is one boundary and, if there is something to do, the step after it."""

    def __init__(self, engine: VllmEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._stays: dict[int, _Stay] = {}
        self._by_request: dict[str, _Stay] = {}
        self._loads: deque[Load] = deque()
        self._reports: list[Report] = []
        self._reported_s = time.monotonic()
        self._slowdown = 1.0
        self._requests = 0
        self.closed = False

    @property
    def stays(self) -> Mapping[int, _Stay]:
        """Those that are here, by their number."""
        return self._stays

    @property
    def idle(self) -> bool:
        """Nothing is to be done before the next command."""
        return not self._stays and not self._loads

    def run(self) -> None:
        """Until it is told to close, or nobody is there any more."""
        while not self.closed:
            self.turn()

    def turn(self) -> None:
        self._take_commands(wait=self.idle)
        while not self.closed and self._load_what_may():
            self._take_commands(wait=False)  # it took a while
        if self.closed:
            return
        self._send_what_is_waited_for()
        if self._stays:
            self._step()
        if self._reports or time.monotonic() - self._reported_s > REPORT_EVERY_S:
            self._report()

    def _take_commands(self, wait: bool) -> None:
        """All that have come; waits for some if it is to."""
        while not self.closed and self._channel.poll(None if wait else 0.0):
            for command in self._channel.recv():
                self._carry_out(command)
            wait = False

    def _carry_out(self, command: Command) -> None:
        match command:
            case Begin():
                self._begin(command)
            case Abort(stay):
                if stay in self._stays:
                    self._engine.abort(self._stays[stay].request_id)
                    self._end(self._stays[stay], time.monotonic(), whole=False)
            case Load():
                self._loads.append(command)
                self._load_what_may()
            case Watch(key, stay, tokens):
                if stay in self._stays:
                    self._stays[stay].watches.append((tokens, key))
                    self._tell_watches(self._stays[stay], time.monotonic())
            case Ask(key, stay):
                drafts = (0, 0, 0, 0)
                if stay in self._stays:
                    self._tell_tokens(self._stays[stay], time.monotonic())
                    drafts = self._drafts(self._stays[stay])
                self._reports.append(Reached(key, time.monotonic(), drafts))
            case Slow(factor):
                self._slowdown = factor
            case Draft(call, arguments):
                getattr(self._engine.drafter, call)(*arguments)
            case DraftWindow(stay, tokens):
                if stay in self._stays:
                    self._engine.drafter.window(self._stays[stay].request_id, tokens)
            case Reset():
                self._reset(command)
            case Close():
                self.closed = True

    def _begin(self, command: Begin) -> None:
        self._requests += 1
        request_id = f"{command.stay}.{self._requests}"
        stay = _Stay(command.stay, request_id, len(command.token_ids))
        self._stays[command.stay] = self._by_request[request_id] = stay
        if self._drafts_here:
            self._engine.drafter.begins(
                request_id, command.prompt_id, command.prompt_ids, command.token_ids, command.forced
            )
        self._engine.add(request_id, command.prompt_ids + command.token_ids, command.tokens)
        self._reports.append(Begun(command.stay, time.monotonic()))

    def _step(self) -> None:
        started_s = time.monotonic()
        progress = self._engine.step()
        if self._slowdown > 1.0:
            time.sleep((time.monotonic() - started_s) * (self._slowdown - 1.0))
        now_s = time.monotonic()
        for gained in progress:
            stay = self._by_request.get(gained.request_id)
            if stay is None:
                continue
            if stay.first_s is None and gained.token_ids:
                stay.first_s = now_s
            if gained.draft_tokens:
                _count(stay.drafts, gained.draft_tokens, len(gained.token_ids))
            stay.unreported += gained.token_ids
            stay.have += len(gained.token_ids)
            if stay.watches:
                self._tell_watches(stay, now_s)
            if gained.finished:
                self._end(stay, now_s, whole=True)

    def _load_what_may(self) -> bool:
        """In the order they were asked for; a "drain" holds up what is behind it until nothing runs. Whether any was."""
        waiting = len(self._loads)
        while self._loads and (self._loads[0].running != "drain" or self._engine.running == 0):
            load = self._loads.popleft()
            now_s = time.monotonic()
            for stay in self._stays.values():
                self._tell_tokens(stay, now_s)
            self._send_what_is_waited_for()
            if self._stays and load.running != "keep":
                self._engine.recompute_running()
            self._engine.load_weights(load.folder)
            if load.held_s:
                time.sleep(load.held_s)
            if self._drafts_here:
                self._engine.drafter.new_rollout()
            self._reports.append(Loaded(load.key, load.version, now_s, time.monotonic()))
        self._engine.admit(not self._loads)
        return len(self._loads) < waiting

    def _reset(self, command: Reset) -> None:
        for stay in list(self._stays.values()):
            self._engine.abort(stay.request_id)
            self._forget(stay)
        self._loads.clear()
        self._engine.admit(True)
        self._slowdown = 1.0
        if self._engine.unfinished:
            self._engine.step()  # lets the engine see what was aborted
        if self._drafts_here:
            self._engine.drafter.configure(DrafterSetup())
        self._engine.load_weights(command.folder)
        self._reports.append(Reached(command.key, time.monotonic(), vocabulary=self._engine.vocabulary))

    # What is told.

    def _end(self, stay: _Stay, now_s: float, whole: bool) -> None:
        self._tell_tokens(stay, now_s)
        self._reports.append(Ended(stay.stay, now_s, whole, self._drafts(stay)))
        self._forget(stay)

    def _forget(self, stay: _Stay) -> None:
        del self._stays[stay.stay], self._by_request[stay.request_id]
        if self._drafts_here:
            self._engine.drafter.ends(stay.request_id)

    def _tell_tokens(self, stay: _Stay, now_s: float) -> None:
        if stay.unreported:
            first_s = None if stay.told_first else stay.first_s
            stay.told_first = True
            self._reports.append(Gained(stay.stay, tuple(stay.unreported), first_s, now_s))
            stay.unreported.clear()

    def _tell_watches(self, stay: _Stay, now_s: float) -> None:
        reached = [key for tokens, key in stay.watches if tokens <= stay.have]
        if reached:
            stay.watches = [watch for watch in stay.watches if watch[0] > stay.have]
            self._tell_tokens(stay, now_s)
            self._reports += [Reached(key, now_s) for key in reached]

    def _drafts(self, stay: _Stay) -> tuple[int, int, int, int]:
        counts = self._engine.drafter.counts(stay.request_id) if self._drafts_here else stay.drafts
        drafted, accepted, verifications, verified = counts
        return drafted, accepted, verifications, verified

    @property
    def _drafts_here(self) -> bool:
        return self._engine.settings.speculative is not None and hasattr(self._engine.drafter, "begins")

    def _report(self) -> None:
        """What happened since, and the tokens that everybody gained meanwhile."""
        now_s = time.monotonic()
        if now_s - self._reported_s > REPORT_EVERY_S:
            self._reported_s = now_s
            for stay in self._stays.values():
                self._tell_tokens(stay, now_s)
        self._reports = self._reports or [Alive(now_s)]
        self._send_reports()

    def _send_what_is_waited_for(self) -> None:
        """What happened at a boundary is told before the step or the load that comes next: somebody may react to it."""
        if any(not isinstance(report, Begun) for report in self._reports):
            self._send_reports()

    def _send_reports(self) -> None:
        self._channel.send(self._reports)
        self._reports = []


def _count(drafts: list[int], drafted: int, yielded: int) -> None:
    """A pass that verified a draft yields what was accepted, and a token more."""
    for i, more in enumerate((drafted, yielded - 1, 1, yielded)):
        drafts[i] += more


def run_host(engine: VllmEngine, channel: Channel) -> None:
    """The loop of a replay."""
    Host(engine, channel).run()


def serve(
    channel: Channel,
    settings: EngineSettings,
    work: Callable[[VllmEngine, Channel], None] = run_host,
    start: Callable[[EngineSettings], VllmEngine] = VllmEngine,
) -> None:
    """The life of an engine's process: starts it, warms it up, runs the loop. What goes wrong is sent before it ends."""
    try:
        engine = start(settings)
        engine.warm_up()
        gc.collect()
        gc.freeze()
        ready = Ready(os.getpid(), engine.version, engine.kv_cache_tokens, engine.vocabulary, time.monotonic())
        channel.send([ready])
        work(engine, channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # whoever controlled it is gone
    except InputError as error:
        channel.send([Failed(str(error), "")])
    except BaseException as error:
        traceback.print_exc()  # to its log
        channel.send([Failed(explained(error, settings), traceback.format_exc())])
        raise SystemExit(1) from error
