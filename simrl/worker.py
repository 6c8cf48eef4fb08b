"""RolloutWorker: the inference engine as schedules see it, and its simulated form.

Invariant, on both clocks: commands take effect in the order they were given, at the first boundary between two forward
passes that comes strictly after the instant of the command; at once if the worker is idle. So a reaction to the end of a
response reaches a busy worker one pass later. The commands of one instant arrive together. `submit`'s event always fires,
exactly once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

import numpy as np
import simpy

from simrl.engine import Engine, Limits, Stop
from simrl.events import call_at, call_last
from simrl.profile import Tables
from simrl.result import Recorder
from simrl.rollout import Rollout, Segment, WeightLoad
from simrl.trace import Sample

LoadMode = Literal["recompute", "keep", "drain"]


class RolloutWorker(Protocol):
    """An inference engine that generates samples, one stay a `submit`."""

    @property
    def policy_version(self) -> int: ...

    def submit(self, sample: Sample, partial: Rollout | None = None) -> simpy.Event:
        """Starts a stay, going on from `partial` if given. Fires with `Rollout`: done, or not done if it was aborted."""
        ...

    def abort(self, sample: Sample) -> simpy.Event:
        """Ends a stay. Fires with the `Rollout` so far after the stay's own event did, or with None if it had ended."""
        ...

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        """Changes the weights; fires with a `WeightLoad`.

        Running requests are interrupted and recompute their KV cache under the new weights ("recompute"), are interrupted
        and keep it ("keep"), or end first while nothing new is admitted ("drain").
        """
        ...


class _Stay:
    """A request in the engine: its event and the segments of its response that are closed."""

    __slots__ = ("closed_tokens", "event", "first_token_s", "sample", "segments", "started_s")

    def __init__(self, sample: Sample, event: simpy.Event, partial: Rollout | None, now_s: float) -> None:
        self.sample = sample
        self.event = event
        self.segments = list(partial.segments) if partial else []
        self.closed_tokens = partial.tokens if partial else 0
        self.first_token_s = partial.first_token_s if partial else math.nan
        self.started_s = now_s


class SimulatedWorker:
    """A `RolloutWorker` on SimPy's clock around the exact engine. `load_s` is what a change of weights takes.

    The engine stands at a boundary that is never before `env.now` while it is busy: either where the last command took
    effect, or where the last end of a response was. From there it looks ahead to the next end and sleeps until it.
    """

    def __init__(
        self, env: simpy.Environment, index: int, tables: Tables, limits: Limits, load_s: float, recorder: Recorder
    ) -> None:
        self.policy_version = 0
        self.index = index
        self.engine = Engine(tables, limits)
        self._env = env
        self._load_s = load_s
        self._recorder = recorder
        self._stays: dict[int, _Stay] = {}
        self._slot_of: dict[int, int] = {}
        self._commands: list[Callable[[], None]] = []
        self._loads: deque[tuple[LoadMode, int, simpy.Event]] = deque()
        self._plan = 0
        self._busy_since_s: float | None = None
        self._tokens_before = 0

    def submit(self, sample: Sample, partial: Rollout | None = None) -> simpy.Event:
        event = self._env.event()
        self._command(lambda: self._begin(sample, event, partial))
        return event

    def abort(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        self._command(lambda: self._end_early(sample, event))
        return event

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        event = self._env.event()
        self._command(lambda: self._queue_load(running, version, event))
        return event

    def stop(self, time_s: float) -> None:
        """Ends the simulation now, at `time_s`: closes the worker's spans and records what is unfinished, as it is at the end
        of the pass that runs."""
        if self._commands:
            self._flush()
        self._ended(self.engine.settle(time_s))
        self._close_rollout_span(self.engine.now_s)
        for slot, stay in self._stays.items():
            self._rollout(slot, stay, self.engine.now_s, done=False)

    # Commands, each run at the boundary where it takes effect.

    def _command(self, command: Callable[[], None]) -> None:
        if not self._commands:
            call_last(self._env, self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        """Runs to the boundary at which the commands of this instant take effect, and gives them to the engine."""
        commands, self._commands = self._commands, []
        for ended_s, event, rollout in self._ended(self.engine.settle(self._env.now)):
            call_at(self._env, ended_s, partial(event.succeed, rollout))
        self._load_what_may()
        for command in commands:
            command()
        self._sleep_until_next_end()

    def _begin(self, sample: Sample, event: simpy.Event, continued: Rollout | None) -> None:
        self._open_rollout_span()
        generated = continued.tokens if continued else 0
        slot = self.engine.submit(sample.prompt_tokens, sample.response_tokens, generated)
        self._stays[slot] = _Stay(sample, event, continued, self.engine.now_s)
        self._slot_of[sample.uid] = slot

    def _end_early(self, sample: Sample, event: simpy.Event) -> None:
        slot = self._slot_of.pop(sample.uid, None)
        if slot is None:
            call_at(self._env, self.engine.now_s, event.succeed)
            return
        stay = self._stays.pop(slot)
        rollout = self._rollout(slot, stay, self.engine.now_s, done=False)
        self.engine.abort(slot)
        call_at(self._env, self.engine.now_s, partial(stay.event.succeed, rollout))
        call_at(self._env, self.engine.now_s, partial(event.succeed, rollout))
        if not self._stays:
            self._close_rollout_span(self.engine.now_s)
        self._load_what_may()

    def _queue_load(self, running: LoadMode, version: int, event: simpy.Event) -> None:
        self._loads.append((running, version, event))
        self._load_what_may()

    def _load_what_may(self) -> None:
        """Changes the weights in the order it was asked; a "drain" holds up those behind it until nothing runs."""
        while self._loads and (self._loads[0][0] != "drain" or self.engine.running == 0):
            self._load(*self._loads.popleft())
        self.engine.admitting = not self._loads

    def _load(self, running: LoadMode, version: int, event: simpy.Event) -> None:
        for slot, stay in self._stays.items():
            self._close_segment(slot, stay, self.engine.now_s)
        if running == "recompute":
            self.engine.recompute_running()
        started_s = self.engine.now_s
        self._close_rollout_span(started_s)
        self.engine.now_s = started_s + self._load_s
        self.policy_version = version
        self._recorder.span(self.index, "load_weights", started_s, self.engine.now_s, version)
        if self._stays:
            self._open_rollout_span()
        load = WeightLoad(version, started_s, self.engine.now_s)
        call_at(self._env, self.engine.now_s, partial(event.succeed, load))

    # Ends of responses.

    def _sleep_until_next_end(self) -> None:
        """Sleeps until the next response ends; a command in between makes another plan and this one void."""
        self._plan += 1
        next_end_s = self.engine.next_stop_s()
        if next_end_s < np.inf:
            call_at(self._env, next_end_s, partial(self._wake, self._plan))

    def _wake(self, plan: int) -> None:
        if plan != self._plan:
            return
        for _, event, rollout in self._ended(self.engine.take_next_stop()):
            event.succeed(rollout)
        self._load_what_may()
        self._sleep_until_next_end()

    def _ended(self, ends: list[Stop]) -> list[tuple[float, simpy.Event, Rollout]]:
        """The stays of the requests that ended: when, the event to fire and what it fires with."""
        fired = []
        for slot, ended_s, _ in ends:
            stay = self._stays.pop(slot)
            del self._slot_of[stay.sample.uid]
            fired.append((ended_s, stay.event, self._rollout(slot, stay, ended_s, done=True)))
        if ends and not self._stays:
            self._close_rollout_span(ends[-1][1])
        return fired

    # Bookkeeping: segments of responses, spans of the worker.

    def _rollout(self, slot: int, stay: _Stay, now_s: float, done: bool) -> Rollout:
        self._close_segment(slot, stay, now_s)
        # Without a token yet, the engine's time may be one that it only looked ahead to.
        if stay.closed_tokens and math.isnan(stay.first_token_s):
            stay.first_token_s = self.engine.first_token_s(slot)
        rollout = Rollout(stay.sample, tuple(stay.segments), done, stay.first_token_s)
        self._recorder.stay_ended(rollout)
        return rollout

    def _close_segment(self, slot: int, stay: _Stay, now_s: float) -> None:
        tokens = self.engine.generated_tokens(slot)
        if tokens > stay.closed_tokens:
            new = tokens - stay.closed_tokens
            stay.segments.append(Segment(self.index, self.policy_version, new, stay.started_s, now_s))
            stay.closed_tokens = tokens
        stay.started_s = now_s

    def _open_rollout_span(self) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = self.engine.now_s
            self._tokens_before = self.engine.generated_total

    def _close_rollout_span(self, now_s: float) -> None:
        if self._busy_since_s is not None:
            tokens = self.engine.generated_total - self._tokens_before
            self._recorder.span(self.index, "rollout", self._busy_since_s, now_s, self.policy_version, tokens)
            self._busy_since_s = None
