"""VllmWorker: a `RolloutWorker` that is a real vLLM engine at the other end of a `Link`.

Invariant: what a schedule may rely on at a `SimulatedWorker` holds here: commands take effect in their order at the first
boundary after they are given, those of one instant together; `submit`'s event fires exactly once, also when the engine dies or
hangs, with every token that was reported; times are the engine's own, on the schedule's clock.

An engine that is lost is started again, gets the weights it was last asked for, and takes samples again then; until that, what
is submitted comes back at once, and weights count as loaded. Its samples go on elsewhere from their last token, by the
dispatcher's rule. A loss that a scenario asks for lasts until the scenario ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import simpy

from replay.clock import WallClock
from replay.host import (
    Abort,
    Alive,
    Ask,
    Begin,
    Begun,
    Command,
    Draft,
    DraftWindow,
    Ended,
    Failed,
    Gained,
    Load,
    Loaded,
    Reached,
    Ready,
    Report,
    Slow,
    Watch,
)
from replay.link import Link
from replay.proposer import Forced
from simrl.errors import InputError, StoppedError
from simrl.events import call_last, on_fire
from simrl.faults import HearsOfLosses
from simrl.result import Recorder
from simrl.rollout import Rollout, Segment, WeightLoad
from simrl.trace import Response, Sample
from simrl.worker import LoadMode, TokensReached

MOST_RESTARTS = 3
Drafts = tuple[int, int, int, int]  # drafted, accepted, verifications, verified tokens


class _Stay:
    """A request at the engine: its event, the segments that are closed, and the open one."""

    def __init__(
        self, number: int, sample: Sample, length: int, whole: bool, event: simpy.Event, partial: Rollout | None
    ) -> None:
        self.number = number
        self.sample = sample
        self.length = length  # tokens of the response when the stay has come to its end
        self.whole = whole  # the response is complete then
        self.event = event
        self.partial = partial
        self.segments = list(partial.segments) if partial else []
        self.token_ids = list(partial.token_ids or ()) if partial else []
        self.closed_tokens = len(self.token_ids)
        self.first_token_s = partial.first_token_s if partial else math.nan
        self.begun_s = 0.0  # of the open segment
        self.until_s = 0.0
        self.drafts: Drafts = (0, 0, 0, 0)
        self.aborted = False
        self.ended_by_itself = False


class _Load(NamedTuple):
    """Weights that the engine was told to load; `event` is empty for those it gets when it comes back."""

    version: int
    event: simpy.Event | None
    held_s: float


class VllmWorker:
    """One engine, as schedules see it. `weights` gives the folder of a policy version, `prompt_ids` the tokens of a prompt.

    `start` starts the engine anew after a loss. It counts as hung, and is killed, when nothing is heard of it for `deadline_s`
    while it has work, or for `start_deadline_s` while it starts or loads weights. `tell` hears what happened to it, for the
    result; `on_done` hears of every response, `on_back` of the engine's return, when nothing is submitted to it yet. Loads
    are held for `held_load_s` longer than they take: for dummy weights, of which there are no others to load. `forced` gives
    what an oracle drafter is told of a sample. Where engines have a `stop_token`, a response is done when it has that; its
    length in `responses` is the most it may have.
    """

    def __init__(
        self,
        env: WallClock,
        index: int,
        link: Link,
        start: Callable[[], Link],
        responses: Mapping[int, Response],
        prompt_ids: Callable[[Sample], tuple[int, ...]],
        weights: Callable[[int], str],
        recorder: Recorder,
        deadline_s: float,
        start_deadline_s: float,
        tell: Callable[[dict[str, Any]], None],
        setup: Any = None,
        held_load_s: float = 0.0,
        forced: Callable[[Sample], Forced] | None = None,
        stop_token: int | None = None,
    ) -> None:
        self.policy_version = 0
        self.index = index
        self.link = link
        self.load_delay_s = 0.0
        self.generated_total = 0
        self.dispatcher: HearsOfLosses | None = None
        self.on_done: Callable[[Rollout], None] | None = None
        self.on_back: Callable[[VllmWorker], None] | None = None
        self._env = env
        self._start = start
        self._responses = responses
        self._prompt_ids = prompt_ids
        self._weights = weights
        self._recorder = recorder
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._tell = tell
        self._setup = setup
        self._held_load_s = held_load_s
        self._forced = forced
        self._stop_token = stop_token
        self._speculates = True
        self._commands: list[Command] = []
        self._stays: dict[int, _Stay] = {}  # by their numbers
        self._here: dict[int, _Stay] = {}  # by sample, the last one
        self._numbers = 0
        self._asked: dict[int, tuple[_Stay, simpy.Event]] = {}
        self._watched: dict[int, simpy.Event] = {}
        self._loads: dict[int, _Load] = {}
        self._busy_since_s: float | None = None
        self._tokens_before = 0
        self._asked_version = 0
        self._heard_s = 0.0
        self._slowdown = 1.0
        # A lost engine is down, starts, or gets its weights.
        self._state: Literal["up", "down", "starting", "loading"] = "up"
        self._lost_since_s = 0.0
        self._planned = False  # a scenario wants the loss, and tells the dispatcher of it
        self._back: list[simpy.Event] = []
        self._restarts = 0
        env.listen(link.connection, self._hear, self._gone)
        env.check(self._look)

    # What a schedule asks for.

    def submit(
        self, sample: Sample, partial: Rollout | None = None, max_tokens: int | None = None, cached: bool = False
    ) -> simpy.Event:
        event = self._env.event()
        if self._state != "up":
            return event.succeed(partial or Rollout(sample, (), False))
        total = self._responses[sample.uid].tokens
        length = total if max_tokens is None else min(total, max_tokens)
        self._wake()
        stay = _Stay(self._key(), sample, length, length == total, event, partial)
        self._stays[stay.number] = self._here[sample.uid] = stay
        had = tuple(stay.token_ids)
        forced = self._forced(sample) if self._forced else None
        self._command(Begin(stay.number, sample.prompt_id, self._prompt_ids(sample), had, length - len(had), forced))
        return event

    def abort(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        stay = self._here.get(sample.uid)
        if stay is None:
            return event.succeed()
        first, stay.aborted = not stay.aborted, True

        def ended(_: simpy.Event) -> None:
            # Which of the two came first, its end or the abort, only the engine knew.
            rollout = cast(Rollout, stay.event.value)
            there = stay.ended_by_itself or rollout.tokens == stay.length
            event.succeed(rollout if first and not there else None)

        on_fire(stay.event, ended)
        if first:
            self._command(Abort(stay.number))
        return event

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        event = self._env.event()
        self._asked_version = version
        if self._state != "up":
            return event.succeed(WeightLoad(version, self._env.now, self._env.now))
        self._wake()
        self._load(version, running, event)
        return event

    def when(self, condition: TokensReached) -> simpy.Event:
        event = self._env.event()
        stay = self._here.get(condition.sample.uid)
        if stay is not None:
            key = self._key()
            self._watched[key] = event
            self._command(Watch(key, stay.number, condition.tokens))
        return event

    def progress(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        stay = self._here.get(sample.uid)
        if stay is None:
            return event.succeed()
        key = self._key()
        self._asked[key] = stay, event
        self._command(Ask(key, stay.number))
        return event

    def draft_with(self, drafter: str | None) -> None:
        raise NotImplementedError  # refused before a replay starts

    def lend(self) -> simpy.Event:
        raise NotImplementedError  # likewise

    def draft(self, call: str, *arguments: Any) -> None:
        """A call of the drafter of an engine that is up; one that comes back is told anew (`on_back`)."""
        if self._state == "up":
            self._command(Draft(call, arguments))

    def speculate(self, on: bool) -> None:
        """Whether anything is drafted, from the next pass on; the engine that comes after a loss keeps to it."""
        self._require_own_drafter()
        self._speculates = on
        self.draft("enable", on)

    def window(self, sample: Sample, tokens: int) -> None:
        """A sample's window from the next pass on, if it is here; a rule that moves windows moves it from there."""
        self._require_own_drafter()
        most_tokens = self._setup.window.rule.most_tokens
        if not 1 <= tokens <= most_tokens:
            raise InputError(f"a window of {tokens} tokens; the engine was started for 1 to {most_tokens}")
        stay = self._here.get(sample.uid)
        if stay is not None:
            self._command(DraftWindow(stay.number, tokens))

    def _require_own_drafter(self) -> None:
        if self._setup is None:
            raise InputError(
                f"{self.link.name}: only simrl's own drafter has windows and can be turned off; choose histospec, or ngram "
                "with a gate or a window"
            )

    # Faults that a scenario asks for.

    def slow_down(self, factor: float) -> None:
        self._slowdown = factor
        self._command(Slow(factor))

    def fail(self) -> None:
        """Kills the engine's process; it stays down until `restore`, also where it was lost and about to come back."""
        self._planned = True
        self._down()

    def restore(self) -> simpy.Event:
        """Starts the engine again. Fires with a `WeightLoad` when it has the weights it was last asked for; with None if it was
        not away."""
        event = self._env.event()
        if self._state == "up":
            return event.succeed()
        self._back.append(event)
        if self._state == "down":
            self._restart()
        return event

    def stop(self, time_s: float) -> None:
        """Closes the spans and records what is unfinished: the run is over."""
        self._env.forget(self.link.connection)
        self._close_rollout_span(time_s)
        if self._state != "up":
            self._close_lost_span(time_s)
        for stay in list(self._stays.values()):
            self._ended(stay, done=False)

    # To the engine.

    def _key(self) -> int:
        self._numbers += 1
        return self._numbers

    def _wake(self) -> None:
        """Where it has no work, its deadline begins with this."""
        if not self._stays and not self._loads:
            self._heard_s = self._env.wall_s()

    def _load(self, version: int, running: LoadMode, event: simpy.Event | None) -> None:
        key = self._key()
        held_s = self._held_load_s + self.load_delay_s
        self._loads[key] = _Load(version, event, held_s)
        self._command(Load(key, version, self._weights(version), running, held_s))

    def _command(self, command: Command) -> None:
        """Commands of one instant go together: else a batch would begin with one request."""
        if not self._commands:
            call_last(self._env, self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if self._state in ("up", "loading"):
            self.link.send(commands)

    # From the engine.

    def _time_s(self, monotonic_s: float) -> float:
        return monotonic_s - self.link.offset_s - self._env.monotonic_s

    def _hear(self, reports: Sequence[Report]) -> None:
        self._heard_s = self._env.wall_s()
        for report in reports:
            match report:
                case Begun(number, at_s):
                    self._stays[number].begun_s = self._time_s(at_s)
                    self._open_rollout_span(self._time_s(at_s))
                case Gained():
                    self._gained(report)
                case Ended(number, at_s, whole, drafts):
                    stay = self._stays[number]
                    stay.drafts, stay.ended_by_itself = drafts, whole
                    rollout = self._ended(stay, done=whole and (stay.whole or stay.token_ids[-1] == self._stop_token))
                    if not self._stays:
                        self._close_rollout_span(self._time_s(at_s))
                    stay.event.succeed(rollout)
                case Loaded():
                    self._loaded(report)
                case Reached():
                    self._answered(report)
                case Ready():
                    self._ready()
                case Failed(message, trace):
                    raise StoppedError(f"{self.link.name}: {message}") from RuntimeError(trace)
                case Alive():
                    pass

    def _gained(self, report: Gained) -> None:
        stay = self._stays[report.stay]
        if report.first_s is not None and math.isnan(stay.first_token_s):
            stay.first_token_s = self._time_s(report.first_s)
        stay.token_ids += report.token_ids
        stay.until_s = self._time_s(report.until_s)
        self.generated_total += len(report.token_ids)

    def _loaded(self, report: Loaded) -> None:
        load = self._loads.pop(report.key)
        started_s, finished_s = self._time_s(report.started_s), self._time_s(report.finished_s)
        if load.event is None:
            self._has_weights_again(WeightLoad(load.version, started_s, finished_s))
            return
        for stay in self._stays.values():
            stay.segments = self._segments(stay)
            stay.closed_tokens, stay.begun_s = len(stay.token_ids), started_s
        rolling = self._busy_since_s is not None
        self._close_rollout_span(started_s)
        self.policy_version = load.version
        self._recorder.span(self.index, "load_weights", started_s, finished_s, load.version)
        if rolling:
            self._open_rollout_span(finished_s)
        load.event.succeed(WeightLoad(load.version, started_s, finished_s))

    def _answered(self, report: Reached) -> None:
        if report.key in self._watched:
            self._watched.pop(report.key).succeed()
            return
        stay, event = self._asked.pop(report.key)
        stay.drafts = report.drafts
        event.succeed(self._rollout(stay, done=False) if stay.number in self._stays else None)

    # Bookkeeping.

    def _ended(self, stay: _Stay, done: bool) -> Rollout:
        del self._stays[stay.number]
        if self._here.get(stay.sample.uid) is stay:
            del self._here[stay.sample.uid]
        rollout = self._rollout(stay, done)
        self._recorder.stay_ended(rollout, rollout.tokens - (stay.partial.tokens if stay.partial else 0))
        if done and self.on_done is not None:
            self.on_done(rollout)
        return rollout

    def _rollout(self, stay: _Stay, done: bool) -> Rollout:
        before = stay.partial or Rollout(stay.sample, (), False)
        drafted, accepted, verifications, verified = stay.drafts
        return Rollout(
            stay.sample,
            tuple(self._segments(stay)),
            done,
            stay.first_token_s,
            carried_tokens=before.carried_tokens,
            drafted_tokens=before.drafted_tokens + drafted,
            accepted_tokens=before.accepted_tokens + accepted,
            verifications=before.verifications + verifications,
            verified_tokens=before.verified_tokens + verified,
            token_ids=tuple(stay.token_ids),
        )

    def _segments(self, stay: _Stay) -> list[Segment]:
        """Those that other weights closed, and the open one as far as it is."""
        new = len(stay.token_ids) - stay.closed_tokens
        if not new:
            return list(stay.segments)
        return [*stay.segments, Segment(self.index, self.policy_version, new, stay.begun_s, stay.until_s)]

    def _open_rollout_span(self, at_s: float) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = at_s
            self._tokens_before = self.generated_total

    def _close_rollout_span(self, at_s: float) -> None:
        if self._busy_since_s is not None:
            tokens = self.generated_total - self._tokens_before
            self._recorder.span(self.index, "rollout", self._busy_since_s, at_s, self.policy_version, tokens)
            self._busy_since_s = None

    def _close_lost_span(self, at_s: float) -> None:
        self._recorder.span(self.index, "lost", self._lost_since_s, at_s, self.policy_version)

    # Losses.

    def _look(self) -> None:
        """A step that never ends: nothing is heard of an engine that has work."""
        silent_s = self._env.wall_s() - self._heard_s
        if self._state == "starting":
            what, deadline_s = "it was not up", self._start_deadline_s
        elif self._loads:
            what, deadline_s = "no weights were loaded", self._start_deadline_s
            deadline_s += sum(load.held_s for load in self._loads.values())
        elif self._stays:
            what, deadline_s = "no step ended", self._deadline_s * self._slowdown
        else:
            return
        if silent_s > deadline_s:
            self._lost("hung", f"{what} for {silent_s:.1f} s (deadline {deadline_s:g} s); killed")

    def _gone(self) -> None:
        """Its process is dead."""
        self._lost("died", self.link.death())

    def _lost(self, kind: str, what: str) -> None:
        """Nobody asked for it: the engine starts again, unless it does nothing but die."""
        message = f"{self.link.name}: {what}"
        self._tell({"kind": kind, "worker": self.index, "at_s": self._env.now, "message": message})
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise StoppedError(f"{message}; it was lost {self._restarts} times, which is no accident: see its log")
        if self._state == "up":
            self._planned = False
            assert self.dispatcher is not None
            self.dispatcher.retire(self.index, lost=True)
        self._down()
        self._restart()

    def _down(self) -> None:
        """Ends the process, if there still is one. Its stays end as they are known; who waits for weights does not wait for
        this one."""
        self._env.forget(self.link.connection)
        self.link.kill()
        if self._state == "up":
            self._lost_since_s = self._env.now
            self._close_rollout_span(self._env.now)
        self._state = "down"
        for stay in list(self._stays.values()):
            stay.event.succeed(self._ended(stay, done=False))
        for load in self._loads.values():
            if load.event is not None:
                load.event.succeed(WeightLoad(load.version, self._env.now, self._env.now))
        for _, event in self._asked.values():
            event.succeed()
        self._loads, self._asked, self._watched = {}, {}, {}

    def _restart(self) -> None:
        self._state = "starting"
        self._heard_s = self._env.wall_s()
        self.link = self._start()
        self._env.listen(self.link.connection, self._hear, self._gone)

    def _ready(self) -> None:
        """Its process is up, with the first weights."""
        self._state = "loading"
        if self._setup is not None:
            self._command(Draft("configure", (self._setup,)))
        self._load(self._asked_version, "recompute", None)

    def _has_weights_again(self, load: WeightLoad) -> None:
        if load.version != self._asked_version:  # asked for meanwhile
            self._load(self._asked_version, "recompute", None)
            return
        self.policy_version = load.version
        self._state = "up"
        self._close_lost_span(self._env.now)
        if self._slowdown > 1.0:
            self._command(Slow(self._slowdown))
        if not self._speculates:
            self.draft("enable", False)
        if self.on_back is not None:
            self.on_back(self)
        waiting, self._back = self._back, []
        for event in waiting:
            event.succeed(load)
        if not self._planned:
            assert self.dispatcher is not None
            self.dispatcher.found(self.index)
