"""The loop around an engine, in a process of its own: takes commands, steps the engine, sends
reports.

Invariant: commands take effect in order at the first boundary between two steps after their
arrival, at once if the engine is idle. New weights are loaded when no pass is in flight: with
asynchronous scheduling, the pass that was scheduled ahead ends first, under the old ones. Every
token of a request is reported once, with the weights that generated it, and before the report of an
event that follows it (the request's end, a weight load).

Messages are plain data, sent over a pipe between processes or by Ray. Times are `time.monotonic()`
of this process. Tokens are reported with events, and otherwise every `REPORT_EVERY_S`: the bound on
the generation lost with a killed engine, and the rate of messages that the controller reads from
every engine.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from simrl.errors import InputError, StoppedError
from simrl.runtime.worker import EngineLoad, LoadMode
from simrl_replay.ahead import DrafterGoneError
from simrl_replay.engine_request import Drafts
from simrl_replay.proposer import DrafterSetup, Forced
from simrl_replay.vllm_adapter import (
    EngineCounters,
    EngineSettings,
    PassWork,
    Progress,
    VllmEngine,
    explained,
)

LOOK_EVERY_S = 0.002  # for awaited weights; a load takes longer
REPORT_EVERY_S = 0.25  # 13 thousand entries a second for 32 engines with 100 samples each

# Commands.


class Begin(NamedTuple):
    """Start a request: generate `tokens` tokens after `prompt_ids` and the earlier `token_ids`.
    `forced` is for a drafter whose acceptance is forced. A request with a `salt` finds prefixes of
    requests with an equal one alone.

    At each of `turns`, in tokens of the response, it leaves the engine until `Resume`. `answers` are
    the environment's so far: the tokens of the response before it, and its own. With `waits` the
    request enters the engine with its first `Resume`."""

    number: int
    prompt_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokens: int
    forced: Forced | None = None
    salt: int | None = None
    turns: tuple[int, ...] = ()
    answers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    waits: bool = False
    window: int | None = None


class Resume(NamedTuple):
    """Let a request go on after the environment's answer."""

    number: int
    answer_ids: tuple[int, ...]


class Abort(NamedTuple):
    """End a request."""

    number: int


class Kill(NamedTuple):
    """End a request whose response then counts as done; report when it has a token, if it has
    none."""

    key: int
    number: int


class LoadWeights(NamedTuple):
    """Load weights from a folder; the load takes `held_s` longer than needed. With a `retry_s`,
    requests that recompute or start over are aborted, and come back so long afterwards. A folder
    that is being written is awaited for at most `awaited_s`; no token is generated meanwhile. The
    weights of a drafter in the folder `drafter`, if it is named, come with them; they are awaited,
    too. With `siblings`, drafts are from siblings in place of the drafter's."""

    key: int
    version: int
    folder: str
    running: LoadMode
    held_s: float
    retry_s: float = 0.0
    awaited_s: float = 0.0
    drafter: str = ""
    siblings: bool = False


class Watch(NamedTuple):
    """Report when a request's response has `tokens` tokens, earlier ones included."""

    key: int
    number: int
    tokens: int


class Ask(NamedTuple):
    """Report a request's tokens so far."""

    key: int
    number: int


class Poll(NamedTuple):
    """Report the engine's load."""

    key: int


class SlowDown(NamedTuple):
    """Slow every step down by `factor`."""

    factor: float


class DraftCall(NamedTuple):
    """Call a method of the drafter, such as `configure` or `learn`."""

    call: str
    arguments: tuple[Any, ...]


class Reset(NamedTuple):
    """Return the engine to its state after the start: no requests, first weights, empty drafter,
    and a drafter's first weights, if their folder is named. Answered by `Reached`."""

    key: int
    folder: str
    drafter: str = ""


class Count(NamedTuple):
    """Report the engine's counters since its reset, and its passes."""


class Close(NamedTuple):
    """End the process."""


Command = (
    Begin
    | Resume
    | Abort
    | Kill
    | LoadWeights
    | Watch
    | Ask
    | Poll
    | SlowDown
    | DraftCall
    | Reset
    | Count
    | Close
)

# Reports.


class Ready(NamedTuple):
    """The engine is up."""

    pid: int
    version: str
    kv_cache_tokens: int
    vocabulary: int
    monotonic_s: float


class Failed(NamedTuple):
    """An error: its message in a line, and the stack trace."""

    message: str
    trace: str


class Begun(NamedTuple):
    """A request has arrived at the engine."""

    number: int
    at_s: float


class Gained(NamedTuple):
    """Tokens of a request up to `until_s`. `first_s` is the time of its first token, in the first
    report of the request only."""

    number: int
    token_ids: tuple[int, ...]
    first_s: float | None
    until_s: float


class Paused(NamedTuple):
    """End of a request's turn: it has left the engine until `Resume`."""

    number: int
    at_s: float


class Ended(NamedTuple):
    """End of a request, `whole` if it has all its tokens, `killed` by `Kill`. `drafts` are its
    `DraftCounts`."""

    number: int
    at_s: float
    whole: bool
    drafts: Drafts
    killed: bool = False


class Loaded(NamedTuple):
    """Weights were loaded; no token was generated meanwhile. `aborted` are the requests that come
    back later: `Begun` says when."""

    key: int
    version: int
    started_s: float
    finished_s: float
    aborted: tuple[int, ...] = ()


class Reached(NamedTuple):
    """Answer to `Watch`, `Ask` or `Reset`; the answer to a reset has the size of the vocabulary."""

    key: int
    at_s: float
    drafts: Drafts = (0, 0, 0, 0, 0)
    vocabulary: int = 0


class Polled(NamedTuple):
    """Answer to `Poll`; the preemptions of the load are all since the reset."""

    key: int
    load: EngineLoad


class Counted(NamedTuple):
    """Answer to `Count`: the counters, and the passes one after another, each with the values that
    `PASS` names. A pass begins when the last one ends, when a load ends, or when a request comes to
    an idle engine; `cpu_s` is what this thread had of a core until it ended."""

    counters: EngineCounters
    passes: Sequence[float]


PASS = ("began_s", "ended_s", "cpu_s", *PassWork._fields)


class NoRoom(NamedTuple):
    """The link's own report: nothing can run the engine that is to take a lost one's place yet."""

    message: str


class Alive(NamedTuple):
    """The engine is at a boundary and has nothing else to report; or there is room for it again."""

    at_s: float


Report = (
    Ready
    | Failed
    | Begun
    | Gained
    | Paused
    | Ended
    | Loaded
    | Reached
    | Polled
    | Counted
    | NoRoom
    | Alive
)


class Channel(Protocol):
    """The host's end of a line: it receives lists of commands and sends lists of reports."""

    def poll(self, timeout_s: float | None) -> bool:
        """Return whether commands are here; wait so long for them, None: until they are."""

    def recv(self) -> Sequence[Command]:
        """Wait for the next commands, and return them."""

    def send(self, reports: Sequence[Report]) -> None:
        """Send reports."""


@dataclass
class _RunningRequest:
    begin: Begin
    request_id: str
    token_ids: list[int]  # of the response
    unreported: list[int] = field(default_factory=list)
    first_s: float | None = None
    told_first: bool = False
    watches: list[tuple[int, int]] = field(default_factory=list)  # tokens, key
    drafts: list[int] = field(
        default_factory=lambda: [0, 0, 0, 0, 0]
    )  # as in `Ended`: of vLLM's own drafter, or of simrl's before the request left the engine
    answers: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.begin.number

    @property
    def have(self) -> int:
        return len(self.token_ids)

    @property
    def next_stop(self) -> int:
        """Tokens of the response at the end of this turn, or at its own end."""
        end = len(self.begin.token_ids) + self.begin.tokens
        return min((turn for turn in self.begin.turns if turn > self.have), default=end)

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens of the context: the prompt, the response, and the environment's answers."""
        text, at = self.begin.prompt_ids, 0
        for tokens, answer_ids in self.answers:
            text, at = (*text, *self.token_ids[at:tokens], *answer_ids), tokens
        return (*text, *self.token_ids[at:])


class Host:
    """The state of the loop. `turn` is a boundary and, if there is work, the step after it."""

    def __init__(self, engine: VllmEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._requests: dict[int, _RunningRequest] = {}
        self._by_engine_id: dict[str, _RunningRequest] = {}
        self._loads: deque[LoadWeights] = deque()
        # Aborted requests, and the time at which each comes back, the next one first.
        self._aborted: deque[tuple[float, _RunningRequest]] = deque()
        self._reports: list[Report] = []
        self._reported_s = time.monotonic()
        self._slowdown = 1.0
        self._begun = 0
        self._passes = array("d")  # as in `Counted`
        self._boundary_s = 0.0, 0.0  # wall clock and CPU time at which the next pass begins
        self._drafter_folder = ""  # of the weights that the drafter got last
        self.closed = False

    @property
    def requests(self) -> Mapping[int, _RunningRequest]:
        return self._requests

    def run(self) -> None:
        """Run until a `Close` command, or until the controller is gone."""
        while not self.closed:
            self.turn()

    def turn(self) -> None:
        loaded = (
            self._load_what_may()
        )  # if the last step drained the engine: before the commands of this boundary
        self._take_commands(wait=not (self._by_engine_id or self._loads or loaded))
        self._send_again()
        while not self.closed and self._load_what_may():
            self._take_commands(wait=False)  # those that arrived during the load
        if self.closed:
            return
        self._send_what_is_waited_for()
        if self._by_engine_id:
            self._step()
        if self._reports or time.monotonic() - self._reported_s > REPORT_EVERY_S:
            self._report()

    def _take_commands(self, wait: bool) -> None:
        """Carry out all commands that have arrived; with `wait`, wait for the first, or until a
        request comes back, or a sign of life is due."""
        most_s = None
        if self._aborted:
            due_s = self._aborted[0][0] - time.monotonic()
            most_s = min(max(due_s, 0.0), REPORT_EVERY_S)
        while not self.closed and self._channel.poll(most_s if wait else 0.0):
            for command in self._channel.recv():
                self._carry_out(command)
            wait = False

    def _carry_out(self, command: Command) -> None:
        match command:
            case Begin():
                self._begin(command)
            case Resume(number, answer_ids):
                if number in self._requests:
                    request = self._requests[number]
                    if answer_ids:
                        request.answers.append((request.have, answer_ids))
                    self._add(request)
            case Abort(number):
                if number in self._requests:
                    self._abort_for_good(self._requests[number])
            case Kill(key, number):
                if number in self._requests and self._requests[number].have == 0:
                    self._requests[number].watches.append((1, key))
                elif number in self._requests:
                    self._abort_for_good(self._requests[number], killed=True)
            case LoadWeights():
                self._loads.append(command)
                self._load_what_may()
            case Watch(key, number, tokens):
                if number in self._requests:
                    self._requests[number].watches.append((tokens, key))
                    self._tell_watches(self._requests[number], time.monotonic())
            case Ask(key, number):
                drafts: Drafts = (0, 0, 0, 0, 0)
                if number in self._requests:
                    self._tell_tokens(self._requests[number], time.monotonic())
                    drafts = self._drafts(self._requests[number])
                self._reports.append(Reached(key, time.monotonic(), drafts))
            case Poll(key):
                self._reports.append(Polled(key, self._engine.load()))
            case SlowDown(factor):
                self._slowdown = factor
            case DraftCall(call, arguments):
                getattr(self._engine.drafter, call)(*arguments)
            case Reset():
                self._reset(command)
            case Count():
                self._reports.append(Counted(self._engine.counters(), self._passes))
            case Close():
                self.closed = True

    def _begin(self, command: Begin) -> None:
        had, answers = list(command.token_ids), list(command.answers)
        request = _RunningRequest(command, "", had, answers=answers)
        self._requests[command.number] = request
        if not command.waits:
            self._add(request)

    def _add(self, request: _RunningRequest) -> None:
        """Add a request to the engine, with the tokens that it has."""
        self._begun += 1
        if not self._by_engine_id:
            self._boundary_s = time.monotonic(), time.thread_time()
        begin, had = request.begin, tuple(request.token_ids)
        request.request_id = request_id = f"{begin.number}.{self._begun}"
        self._by_engine_id[request_id] = request
        if (drafter := self._engine.drafter) is not None:
            drafter.begins(
                request_id, begin.prompt_id, begin.prompt_ids, had, begin.forced, begin.window
            )
        recorded = begin.forced.recorded[len(had) :] if begin.forced else ()
        follows = self._engine.settings.recorded
        self._engine.add(
            request_id,
            request.text,
            request.next_stop - len(had),
            recorded if follows else (),
            begin.salt,
        )
        self._reports.append(Begun(begin.number, time.monotonic()))

    def _abort_for_good(self, request: _RunningRequest, killed: bool = False) -> None:
        self._abort(request)
        self._end(request, time.monotonic(), whole=False, killed=killed)
        self._load_what_may()

    def _abort(self, request: _RunningRequest) -> None:
        """Take a request out of the engine, if it is there."""
        if request.request_id in self._by_engine_id:
            self._engine.abort(request.request_id)
            self._leave(request)
        else:
            self._aborted = deque(entry for entry in self._aborted if entry[1] is not request)

    def _leave(self, request: _RunningRequest) -> None:
        """Note that a request has left the engine, and keep its counts of drafts."""
        del self._by_engine_id[request.request_id]
        if (drafter := self._engine.drafter) is not None:
            counts = drafter.ends(request.request_id)
            request.drafts = [a + b for a, b in zip(request.drafts, counts, strict=True)]

    def _abort_all(self, load: LoadWeights, now_s: float) -> list[_RunningRequest]:
        """Abort all requests, if the load lets them come back later or start over. Return them."""
        starts_over = load.running == "start_over"
        if not starts_over and (load.running != "recompute" or load.retry_s == 0):
            return []
        aborted = list(self._by_engine_id.values())
        for request in aborted:
            self._abort(request)
            if starts_over:
                request.begin = request.begin._replace(
                    token_ids=(), tokens=request.begin.tokens + len(request.begin.token_ids)
                )
                request.token_ids, request.first_s, request.told_first = [], None, False
                request.answers = []
        if load.retry_s > 0:
            back = [(now_s + load.retry_s, request) for request in aborted]
            self._aborted = deque(sorted([*self._aborted, *back], key=itemgetter(0)))
        return aborted

    def _send_again(self) -> None:
        """Add aborted requests to the engine whose time has come."""
        while self._aborted and self._aborted[0][0] - time.monotonic() < 1e-9:
            self._add(self._aborted.popleft()[1])

    def _step(self) -> None:
        started_s = time.monotonic()
        progress = self._engine.step()
        if self._slowdown > 1.0:
            time.sleep((time.monotonic() - started_s) * (self._slowdown - 1.0))
        (began_s, before_s), self._boundary_s = (
            self._boundary_s,
            (time.monotonic(), time.thread_time()),
        )
        now_s, cpu_s = self._boundary_s
        if (work := self._engine.last_pass) is not None:
            self._passes.extend((began_s, now_s, cpu_s - before_s, *work))
        self._take(progress, now_s)

    def _take(self, progress: Sequence[Progress], now_s: float) -> None:
        """Give requests the tokens of a pass, and let those go that have ended, or ended a turn."""
        for gained in progress:
            request = self._by_engine_id.get(gained.request_id)
            if request is None:
                continue
            if request.first_s is None and gained.token_ids:
                request.first_s = now_s
            if gained.draft_tokens and self._engine.drafter is None:
                _count(request.drafts, gained.draft_tokens, len(gained.token_ids))
            request.unreported += gained.token_ids
            request.token_ids += gained.token_ids
            if request.watches:
                self._tell_watches(request, now_s)
            if gained.finished and request.have in request.begin.turns:
                self._tell_tokens(request, now_s)
                self._leave(request)
                self._reports.append(Paused(request.number, now_s))
            elif gained.finished:
                self._end(request, now_s, whole=True)

    def _load_what_may(self) -> bool:
        """Load weights in the order of the commands; a "drain" load waits, with all behind it,
        until no request runs. Return whether any was loaded."""
        waiting = len(self._loads)
        while self._loads and (self._loads[0].running != "drain" or self._engine.running == 0):
            load = self._loads.popleft()
            self._take(self._engine.settle(), time.monotonic())
            now_s = time.monotonic()
            for request in self._requests.values():
                self._tell_tokens(request, now_s)
            self._send_what_is_waited_for()
            aborted = self._abort_all(load, now_s)
            if load.running != "keep":
                self._engine.recompute_running()
            while time.monotonic() < now_s + load.awaited_s and not Path(load.folder).exists():
                time.sleep(LOOK_EVERY_S)
            self._engine.load_weights(load.folder)
            self._load_drafter(load.drafter)
            if load.held_s:
                time.sleep(load.held_s)
            if self._engine.drafter is not None:
                self._engine.drafter.new_rollout(load.siblings)
            self._boundary_s = time.monotonic(), time.thread_time()
            numbers = tuple(request.number for request in aborted)
            self._reports.append(
                Loaded(load.key, load.version, now_s, self._boundary_s[0], numbers)
            )
            for request in aborted if load.retry_s == 0 else ():
                self._add(request)
        self._engine.admit(not self._loads)
        return len(self._loads) < waiting

    def _load_drafter(self, folder: str) -> None:
        """Load a drafter's weights, unless it has them. The controller, which ends this process if
        it fails, writes them."""
        if folder and folder != self._drafter_folder:
            while not Path(folder).exists():
                time.sleep(LOOK_EVERY_S)
            self._engine.load_drafter(folder)
            self._drafter_folder = folder

    def _reset(self, command: Reset) -> None:
        for request in list(self._requests.values()):
            self._abort(request)
            self._forget(request)
        self._loads.clear()
        self._engine.admit(True)
        self._slowdown = 1.0
        if self._engine.unfinished:
            self._engine.step()  # lets the engine see what was aborted
        self._engine.settle()
        if self._engine.drafter is not None:
            self._engine.drafter.configure(DrafterSetup())
        self._engine.recompute_running()
        self._engine.load_weights(command.folder)
        self._load_drafter(command.drafter)
        self._engine.reset_counters()
        self._passes = array("d")
        self._reports.append(
            Reached(command.key, time.monotonic(), vocabulary=self._engine.vocabulary)
        )

    # Reports.

    def _end(
        self, request: _RunningRequest, now_s: float, whole: bool, killed: bool = False
    ) -> None:
        self._tell_tokens(request, now_s)
        self._reports.append(Ended(request.number, now_s, whole, self._drafts(request), killed))
        self._forget(request)

    def _forget(self, request: _RunningRequest) -> None:
        del self._requests[request.number]
        in_engine = self._by_engine_id.pop(request.request_id, None) is not None
        if in_engine and self._engine.drafter is not None:
            self._engine.drafter.ends(request.request_id)

    def _tell_tokens(self, request: _RunningRequest, now_s: float) -> None:
        if request.unreported:
            first_s = None if request.told_first else request.first_s
            request.told_first = True
            self._reports.append(Gained(request.number, tuple(request.unreported), first_s, now_s))
            request.unreported.clear()

    def _tell_watches(self, request: _RunningRequest, now_s: float) -> None:
        reached = [key for tokens, key in request.watches if tokens <= request.have]
        if reached:
            request.watches = [watch for watch in request.watches if watch[0] > request.have]
            self._tell_tokens(request, now_s)
            self._reports += [Reached(key, now_s) for key in reached]

    def _drafts(self, request: _RunningRequest) -> Drafts:
        drafter, counts = self._engine.drafter, request.drafts
        if drafter is not None and request.request_id in self._by_engine_id:
            now = drafter.counts(request.request_id)
            counts = [a + b for a, b in zip(counts, now, strict=True)]
        drafted, accepted, verifications, verified, unverified = counts
        return drafted, accepted, verifications, verified, unverified

    def _report(self) -> None:
        """Send the pending reports; every `REPORT_EVERY_S` also the tokens that all requests
        gained."""
        now_s = time.monotonic()
        if now_s - self._reported_s > REPORT_EVERY_S:
            self._reported_s = now_s
            for request in self._requests.values():
                self._tell_tokens(request, now_s)
        self._reports = self._reports or [Alive(now_s)]
        self._send_reports()

    def _send_what_is_waited_for(self) -> None:
        """Send events of a boundary before the next step or load: the schedule may react to
        them."""
        if any(not isinstance(report, Begun) for report in self._reports):
            self._send_reports()

    def _send_reports(self) -> None:
        self._channel.send(self._reports)
        self._reports = []


def _count(drafts: list[int], drafted: int, yielded: int) -> None:
    """Add a pass that verified a draft: it yields the accepted tokens and one more."""
    for i, more in enumerate((drafted, yielded - 1, 1, yielded)):
        drafts[i] += more


def run_host(engine: VllmEngine, channel: Channel) -> None:
    """Run the loop of a replay."""
    Host(engine, channel).run()


def serve(
    channel: Channel,
    settings: EngineSettings,
    work: Callable[[VllmEngine, Channel], None] = run_host,
    start: Callable[[EngineSettings], VllmEngine] = VllmEngine,
) -> None:
    """Run an engine's process: start the engine, warm it up, run the loop. An error is sent before
    the process ends."""
    with errors_sent(channel, lambda error: explained(error, settings)):
        engine = start(settings)
        engine.warm_up()
        gc.collect()
        gc.freeze()
        ready = Ready(
            os.getpid(), engine.version, engine.kv_cache_tokens, engine.vocabulary, time.monotonic()
        )
        channel.send([ready])
        work(engine, channel)


@contextmanager
def errors_sent(channel: Channel, describe: Callable[[BaseException], str]) -> Iterator[None]:
    """Send an error of a process's work to its controller; an unexpected one, which `describe` puts
    in a line, ends the process. Without a controller nothing is sent."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller is gone
    except DrafterGoneError as error:
        traceback.print_exc()  # nothing is sent: as a lost engine, it is started again
        raise SystemExit(1) from error
    except (InputError, StoppedError) as error:
        channel.send([Failed(str(error), "")])
    except BaseException as error:
        traceback.print_exc()  # to its log
        channel.send([Failed(describe(error), traceback.format_exc())])
        raise SystemExit(1) from error


def answer_each(channel: Channel, carry_out: Callable[[Any], Any]) -> None:
    """Carry out what the controller sends, one after another, and send each outcome, up to
    `Close`."""
    while True:
        for order in channel.recv():
            if isinstance(order, Close):
                return
            channel.send([carry_out(order)])
