"""VllmWorker: a `RolloutWorker` that is a real vLLM engine at the other end of a `Link`.

Invariant: what a schedule may rely on at a `SimulatedWorker` holds here: commands take effect in their order at the first
boundary after they are given, those of one instant together; `submit`'s event fires exactly once, also when the engine dies or
hangs, with every token that was reported; times are the engine's own, on the schedule's clock.

An engine that is lost is started again, is told the weights it was last asked for, and takes samples again then; its samples go
on elsewhere from their last token, by the dispatcher's rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

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
from simrl.errors import StoppedError
from simrl.events import call_last
from simrl.result import Recorder
from simrl.rollout import Rollout, Segment, WeightLoad
from simrl.trace import Response, Sample
from simrl.worker import LoadMode, TokensReached

MOST_RESTARTS = 3
Drafts = tuple[int, int, int, int]  # drafted, accepted, verifications, verified tokens


class HearsOfLosses(Protocol):
    """The dispatcher, as far as losses go."""

    def retire(self, worker: int, lost: bool = False) -> None: ...

    def found(self, worker: int) -> None: ...


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
        self.begun_s: float | None = None  # of the open segment
        self.until_s = 0.0
        self.drafts: Drafts = (0, 0, 0, 0)


class VllmWorker:
    """One engine, as schedules see it. `weights` gives the folder of a policy version, `prompt_ids` the tokens of a prompt.

    `start` starts the engine anew after a loss; without a report for `deadline_s` while it has work, it counts as hung and is
    killed. `tell` hears what happened to it, for the result.
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
        tell: Callable[[dict[str, Any]], None],
        setup: Any = None,
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
        self._tell = tell
        self._setup = setup
        self._commands: list[Command] = []
        self._stays: dict[int, _Stay] = {}  # by sample
        self._by_number: dict[int, _Stay] = {}
        self._numbers = 0
        self._answers: dict[int, Callable[[Reached], None]] = {}
        self._loads: dict[int, tuple[int, simpy.Event]] = {}
        self._busy_since_s: float | None = None
        self._tokens_before = 0
        self._asked_version = 0
        self._heard_s = 0.0
        self._lost_since_s: float | None = None
        self._planned = False  # the loss is one that a scenario asked for
        self._back: list[simpy.Event] = []
        self._restarts = 0
        self._slowdown = 1.0
        env.listen(link.connection, self._hear, self._gone)
        env.check(self._look)

    # What a schedule asks for.

    def submit(
        self, sample: Sample, partial: Rollout | None = None, max_tokens: int | None = None, cached: bool = False
    ) -> simpy.Event:
        event = self._env.event()
        if self._lost_since_s is not None:
            return event.succeed(partial or Rollout(sample, (), False))
        total = self._responses[sample.uid].tokens
        length = total if max_tokens is None else min(total, max_tokens)
        self._numbers += 1
        stay = _Stay(self._numbers, sample, length, length == total, event, partial)
        self._stays[sample.uid] = self._by_number[stay.number] = stay
        had = tuple(stay.token_ids)
        self._command(Begin(stay.number, sample.prompt_id, self._prompt_ids(sample), had, length - len(had)))
        return event

    def abort(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        stay = self._stays.get(sample.uid)
        if stay is None:
            return event.succeed()
        # Which of the two comes first, its end or the abort, only the engine knows.
        stay_event = stay.event

        def ended(_: simpy.Event) -> None:
            rollout = stay_event.value
            event.succeed(None if rollout.done or rollout.tokens == stay.length else rollout)

        assert stay_event.callbacks is not None
        stay_event.callbacks.append(ended)
        self._command(Abort(stay.number))
        return event

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        event = self._env.event()
        self._asked_version = version
        if self._lost_since_s is not None:
            return event.succeed(WeightLoad(version, self._env.now, self._env.now))
        key = self._key()
        self._loads[key] = (version, event)
        self._command(Load(key, version, self._weights(version), running, self.load_delay_s))
        return event

    def when(self, condition: TokensReached) -> simpy.Event:
        event = self._env.event()
        stay = self._stays.get(condition.sample.uid)
        if stay is not None:
            key = self._key()
            self._answers[key] = lambda _: event.succeed()
            self._command(Watch(key, stay.number, condition.tokens))
        return event

    def progress(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        stay = self._stays.get(sample.uid)
        if stay is None:
            return event.succeed()
        key = self._key()

        def answer(reached: Reached) -> None:
            stay.drafts = reached.drafts
            event.succeed(self._rollout(stay, done=False) if stay.number in self._by_number else None)

        self._answers[key] = answer
        self._command(Ask(key, stay.number))
        return event

    def draft_with(self, drafter: str | None) -> None:
        raise NotImplementedError  # refused before a replay starts

    def draft(self, call: str, *arguments: Any) -> None:
        """A call of the engine's drafter: what it is to learn, whether it drafts."""
        self._command(Draft(call, arguments))

    # Faults that a scenario asks for.

    def slow_down(self, factor: float) -> None:
        self._slowdown = factor
        self._command(Slow(factor))

    def fail(self) -> None:
        """Kills the engine's process; it stays down until `restore`."""
        if self._lost_since_s is None:
            self._planned = True
            self._lose()
            self._env.forget(self.link.connection)
            self.link.kill()

    def restore(self) -> simpy.Event:
        """Starts the engine again. Fires with a `WeightLoad` when it has the weights it was last asked for; with None if it was
        not away."""
        event = self._env.event()
        if self._lost_since_s is None:
            return event.succeed()
        self._back.append(event)
        if self._planned:
            self._restart()
        return event

    def stop(self, time_s: float) -> None:
        """Closes the spans and records what is unfinished: the run is over."""
        self._close_rollout_span(time_s)
        self._close_lost_span(time_s)
        for stay in list(self._stays.values()):
            self._ended(stay, done=False)
        self._env.forget(self.link.connection)

    # To the engine.

    def _key(self) -> int:
        self._numbers += 1
        return self._numbers

    def _command(self, command: Command) -> None:
        """Commands of one instant go together: else a batch would begin with one request."""
        if not self._commands:
            call_last(self._env, self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        commands, self._commands = self._commands, []
        if self._lost_since_s is None:
            if not self._stays or len(self._stays) == sum(isinstance(c, Begin) for c in commands):
                self._heard_s = self._env.wall_s()  # it was idle: its deadline begins now
            self.link.send(commands)

    # From the engine.

    def _time_s(self, monotonic_s: float) -> float:
        return monotonic_s - self.link.offset_s - self._env.monotonic_s

    def _hear(self, reports: Sequence[Report]) -> None:
        self._heard_s = self._env.wall_s()
        for report in reports:
            match report:
                case Begun(number, at_s):
                    if number in self._by_number:
                        self._by_number[number].begun_s = self._time_s(at_s)
                        self._open_rollout_span(self._time_s(at_s))
                case Gained():
                    self._gained(report)
                case Ended(number, at_s, whole, drafts):
                    stay = self._by_number.get(number)
                    if stay is not None:
                        stay.drafts = drafts
                        rollout = self._ended(stay, done=whole and stay.whole)
                        if not self._stays:
                            self._close_rollout_span(self._time_s(at_s))
                        stay.event.succeed(rollout)
                case Loaded():
                    self._loaded(report)
                case Reached(key):
                    self._answers.pop(key)(report)
                case Ready():
                    self._restarted()
                case Failed(message):
                    raise StoppedError(f"{self.link.name}: {message}")
                case Alive():
                    pass

    def _gained(self, report: Gained) -> None:
        stay = self._by_number.get(report.stay)
        if stay is None:
            return
        if report.first_s is not None and math.isnan(stay.first_token_s):
            stay.first_token_s = self._time_s(report.first_s)
        stay.token_ids += report.token_ids
        stay.until_s = self._time_s(report.until_s)
        self.generated_total += len(report.token_ids)

    def _loaded(self, report: Loaded) -> None:
        version, event = self._loads.pop(report.key)
        started_s, finished_s = self._time_s(report.started_s), self._time_s(report.finished_s)
        for stay in self._stays.values():
            self._close_segment(stay)
            if stay.begun_s is not None:
                stay.begun_s = finished_s
        rolling = self._busy_since_s is not None
        self._close_rollout_span(started_s)
        self.policy_version = version
        self._recorder.span(self.index, "load_weights", started_s, finished_s, version)
        if rolling:
            self._open_rollout_span(finished_s)
        event.succeed(WeightLoad(version, started_s, finished_s))

    # Bookkeeping.

    def _ended(self, stay: _Stay, done: bool) -> Rollout:
        del self._stays[stay.sample.uid], self._by_number[stay.number]
        rollout = self._rollout(stay, done)
        self._recorder.stay_ended(rollout, rollout.tokens - (stay.partial.tokens if stay.partial else 0))
        if done and self.on_done is not None:
            self.on_done(rollout)
        return rollout

    def _rollout(self, stay: _Stay, done: bool) -> Rollout:
        self._close_segment(stay)
        before = stay.partial or Rollout(stay.sample, (), False)
        drafted, accepted, verifications, verified = stay.drafts
        return Rollout(
            stay.sample,
            tuple(stay.segments),
            done,
            stay.first_token_s,
            carried_tokens=before.carried_tokens,
            drafted_tokens=before.drafted_tokens + drafted,
            accepted_tokens=before.accepted_tokens + accepted,
            verifications=before.verifications + verifications,
            verified_tokens=before.verified_tokens + verified,
            token_ids=tuple(stay.token_ids),
        )

    def _close_segment(self, stay: _Stay) -> None:
        new = len(stay.token_ids) - stay.closed_tokens
        if new and stay.begun_s is not None:
            stay.segments.append(Segment(self.index, self.policy_version, new, stay.begun_s, stay.until_s))
            stay.closed_tokens += new
            stay.begun_s = stay.until_s

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
        if self._lost_since_s is not None:
            self._recorder.span(self.index, "lost", self._lost_since_s, at_s, self.policy_version)

    # Losses.

    def _look(self) -> None:
        """A step that never ends: nothing is heard of an engine that has work."""
        silent_s = self._env.wall_s() - self._heard_s
        if self._lost_since_s is None and (self._stays or self._loads) and silent_s > self._deadline_s:
            self._happened("hung", f"no step ended for {silent_s:.1f} s (step deadline {self._deadline_s:g} s); killed")
            self._env.forget(self.link.connection)
            self.link.kill()
            self._lost()

    def _gone(self) -> None:
        """Its process is dead."""
        self._happened("died", self.link.death())
        self._lost()

    def _happened(self, kind: str, what: str) -> None:
        self._tell({"kind": kind, "worker": self.index, "at_s": self._env.now, "message": f"{self.link.name}: {what}"})

    def _lost(self) -> None:
        """Nobody asked for it: the engine starts again, unless it does nothing but die."""
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise StoppedError(
                f"{self.link.name}: lost {self._restarts} times; see its log, or let it have fewer samples at once"
            )
        self._planned = False
        assert self.dispatcher is not None
        self.dispatcher.retire(self.index, lost=True)
        self._lose()
        self._restart()
        self._env.process(self._come_back())

    def _come_back(self) -> simpy.events.ProcessGenerator:
        yield self.restore()
        assert self.dispatcher is not None
        self.dispatcher.found(self.index)

    def _lose(self) -> None:
        """Its stays end as they are known; who waits for weights does not wait for this one."""
        now_s = self._env.now
        self._close_rollout_span(now_s)
        if self._lost_since_s is None:  # else it died while it started
            self._lost_since_s = now_s
        self._commands = [command for command in self._commands if not isinstance(command, Begin)]
        for stay in list(self._stays.values()):
            stay.event.succeed(self._ended(stay, done=False))
        for version, event in self._loads.values():
            event.succeed(WeightLoad(version, now_s, now_s))
        self._loads.clear()
        self._answers.clear()

    def _restart(self) -> None:
        self.link = self._start()
        self._env.listen(self.link.connection, self._hear, self._gone)

    def _restarted(self) -> None:
        """It is up, with the first weights: it gets those it was last asked for."""
        back_s = self._env.now
        self._close_lost_span(back_s)
        self._lost_since_s = None
        key, event = self._key(), self._env.event()
        self._loads[key] = (self._asked_version, event)
        commands: list[Command] = [Load(key, self._asked_version, self._weights(self._asked_version), "recompute", 0.0)]
        if self._setup is not None:
            commands.insert(0, Draft("configure", (self._setup,)))
        if self._slowdown > 1.0:
            commands.append(Slow(self._slowdown))
        self.link.send(commands)
        if self.on_back is not None:
            self.on_back(self)
        self._heard_s = self._env.wall_s()
        for waiting in self._back:
            event.callbacks.append(partial(_pass_on, waiting))  # type: ignore[union-attr]
        self._back = []


def _pass_on(to: simpy.Event, event: simpy.Event) -> None:
    to.succeed(event.value)
