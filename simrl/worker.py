"""RolloutWorker: the inference engine as schedules see it, and its simulated form.

Invariant, on both clocks: commands take effect in the order they were given, at the first boundary between two forward
passes that comes strictly after the instant of the command; at once if the worker is idle. So a reaction to the end of a
response reaches a busy worker one pass later. The commands of one instant arrive together. `submit`'s event always fires,
exactly once, also when the worker is lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
import simpy

from simrl.drafting import Drafting
from simrl.engine import Engine
from simrl.engine.state import END, PAUSE, WATCH, Floats, Limits
from simrl.events import call_at, call_last
from simrl.profile import Tables
from simrl.result import Recorder, Work
from simrl.rollout import Rollout, Segment, WeightLoad
from simrl.spot_trainer import SpotTrainer
from simrl.trace import Response, Sample, Turn

LoadMode = Literal["recompute", "keep", "drain"]


class TokensReached(NamedTuple):
    """A condition to watch: the sample's response has so many tokens, those of earlier stays counted."""

    sample: Sample
    tokens: int


class RolloutWorker(Protocol):
    """An inference engine that generates samples, one stay a `submit`."""

    @property
    def policy_version(self) -> int: ...

    def submit(
        self, sample: Sample, partial: Rollout | None = None, max_tokens: int | None = None, cached: bool = False
    ) -> simpy.Event:
        """Starts a stay, going on from `partial` if given. Fires with `Rollout`: done, or not done if the response has
        reached `max_tokens` or was aborted. `cached` says that the KV cache of `partial` is in a pool it can be had from."""
        ...

    def abort(self, sample: Sample) -> simpy.Event:
        """Ends a stay. Fires with the `Rollout` so far after the stay's own event did, or with None if it had ended."""
        ...

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        """Changes the weights; fires with a `WeightLoad`.

        Running requests are interrupted and recompute their KV cache under the new weights ("recompute"), are interrupted
        and keep it ("keep"), or end first while nothing new is admitted ("drain"; what waits for an environment does not
        run, and recomputes its cache).
        """
        ...

    def when(self, condition: TokensReached) -> simpy.Event:
        """Fires once, at the first boundary at which the condition holds; never if the stay it watches ends before."""
        ...

    def progress(self, sample: Sample) -> simpy.Event:
        """Fires with the `Rollout` of a stay as it is at the boundary, not done, its drafts counted; with None if no such stay
        is here. (A server that streams what it generates, and counts drafts by request, has it at hand.)"""
        ...

    def draft_with(self, drafter: str | None) -> None:
        """An idle worker drafts with another of the drafters that it holds; None: with its own again."""
        ...


class WorkerCosts(NamedTuple):
    """What a worker's commands take besides forward passes. `fetch_s_per_token` is that of KV cache from a shared pool; an
    evaluation of `evaluate_s` follows the load of every `evaluate_every`th version, or of the first after it that is loaded
    (0: none). `request_s` is the host's work for each request, before the next pass."""

    load_s: float
    fetch_s_per_token: float = 0.0
    evaluate_every: int = 0
    evaluate_s: float = 0.0
    request_s: float = 0.0


class _Stay:
    """A request at the worker: its event, the segments of its response that are closed, what is watched in it."""

    __slots__ = (
        "cached", "closed_tokens", "environment_until_s", "event", "first_token_s", "length", "observation_tokens",
        "partial", "response", "sample", "segments", "slot", "started_s", "watches",
    )  # fmt: skip

    def __init__(
        self, sample: Sample, response: Response, event: simpy.Event, partial: Rollout | None, length: int, cached: bool
    ) -> None:
        self.sample = sample
        self.response = response
        self.event = event
        self.partial = partial
        self.length = length
        self.cached = cached
        self.segments = list(partial.segments) if partial else []
        self.closed_tokens = partial.tokens if partial else 0
        self.first_token_s = partial.first_token_s if partial else math.nan
        self.observation_tokens = partial.observation_tokens if partial else 0
        self.environment_until_s = partial.environment_until_s if partial else 0.0
        self.started_s = 0.0
        self.slot: int | None = None  # None: not in the engine, its cache or its environment is on the way
        self.watches: list[tuple[int, simpy.Event]] = []

    def hear(self, turn: Turn, now_s: float) -> None:
        """A turn has ended now: what the environment says to it is known when it has taken its time."""
        self.observation_tokens += turn.observation_tokens
        self.environment_until_s = now_s + turn.environment_s


def _turn_at(response: Response, tokens: int) -> Turn | None:
    """The turn that the environment answers when the response has so many tokens."""
    return next((turn for turn in response.turns if turn.end_tokens == tokens), None)


class SimulatedWorker:
    """A `RolloutWorker` on SimPy's clock around the exact engine. It looks up what its samples turn out to be.

    The engine stands at a boundary that is never before `env.now` while it is busy: either where the last command took
    effect, or where the last stop of a response was. From there it looks ahead to the next stop and sleeps until it.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        tables: Tables,
        limits: Limits,
        costs: WorkerCosts,
        responses: Mapping[int, Response],
        recorder: Recorder,
        drafting: Drafting | None = None,
        drafters: Mapping[str, Drafting] | None = None,
    ) -> None:
        self.policy_version = 0
        self.index = index
        # One for each drafter, all over the same GPUs and KV cache; no more than one of them has requests.
        held: list[tuple[str | None, Drafting | None]] = [(None, drafting), *(drafters or {}).items()]
        self._engines = {
            name: (Engine(tables, limits, each.decoding if each else None, each.key(index) if each else 0), each)
            for name, each in held
        }
        self.engine, self._drafting = self._engines[None]
        self.load_delay_s = 0.0
        self._env = env
        self._costs = costs
        self._responses = responses
        self._recorder = recorder
        self._stays: dict[int, _Stay] = {}
        self._in_slot: dict[int, _Stay] = {}
        self._decoding: set[int] = set()  # slots that are not paused
        self._commands: list[Callable[[], None]] = []
        self._loads: deque[tuple[LoadMode, int, simpy.Event]] = deque()
        self._plan = 0
        self._spot = drafting.spot if drafting else None
        self._notices: deque[Callable[[], None]] = deque()  # to the spot trainer
        self._busy_since_s: float | None = None
        self._tokens_before = 0
        self._spent_before: Floats = np.zeros(0)
        self._lost_since_s: float | None = None
        self._away: str | None = None  # the kind of span that says so
        self._asked_version = 0
        self._evaluations = 0

    @property
    def generated_total(self) -> int:
        """Tokens since the start, with whatever drafter."""
        return sum(engine.generated_total for engine, _ in self._engines.values())

    def submit(
        self, sample: Sample, partial: Rollout | None = None, max_tokens: int | None = None, cached: bool = False
    ) -> simpy.Event:
        event = self._env.event()
        response = self._responses[sample.uid]
        length = response.tokens if max_tokens is None else min(response.tokens, max_tokens)
        stay = _Stay(sample, response, event, partial, length, cached)
        self._command(lambda: self._begin(stay))
        return event

    def abort(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        self._command(lambda: self._end_early(sample, event))
        return event

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        event = self._env.event()
        self._command(lambda: self._queue_load(running, version, event))
        return event

    def when(self, condition: TokensReached) -> simpy.Event:
        event = self._env.event()
        self._command(lambda: self._watch(condition, event))
        return event

    def progress(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        self._command(lambda: self._report(sample, event))
        return event

    def draft_with(self, drafter: str | None) -> None:
        self._command(lambda: self._change_drafter(drafter))

    def slow_down(self, factor: float) -> None:
        """Every forward pass takes `factor` times as long from now on."""
        self._command(lambda: setattr(self.engine, "slowdown", factor))

    def fail(self) -> None:
        """The worker is lost: its stays end as they are, its KV cache and weights are gone; until `restore`, what is submitted
        comes back at once, and weights count as loaded, so that who waits for all workers does not wait for this one."""
        self._command(self._lose)

    def lend(self) -> simpy.Event:
        """The same, but it is no loss: the GPUs work for the trainer, whose spans say so. Fires when they are free for it."""
        event = self._env.event()

        def leave() -> None:
            self._lose(None)
            call_at(self._env, self.engine.now_s, event.succeed)

        self._command(leave)
        return event

    def restore(self) -> simpy.Event:
        """The worker is back, and loads the weights that it was last asked to load; after a loss, that counts as lost too.
        Fires when it has them, with a `WeightLoad`; with None if it was not away."""
        event = self._env.event()
        self._command(lambda: self._come_back(event))
        return event

    def stop(self, time_s: float) -> None:
        """Ends the simulation now, at `time_s`: closes the worker's spans and records what is unfinished, as it is at the end
        of the pass that runs."""
        if self._commands:
            self._flush()
        self._stopped(self.engine.settle(time_s))
        self._close_rollout_span(self.engine.now_s)
        self._close_lost_span(time_s)
        for stay in self._stays.values():
            self._rollout(stay, self.engine.now_s, done=False)

    # Commands, each run at the boundary where it takes effect.

    def _command(self, command: Callable[[], None]) -> None:
        if not self._commands:
            call_last(self._env, self._flush)
        self._commands.append(command)

    def _flush(self) -> None:
        """Runs to the boundary at which the commands of this instant take effect, and gives them to the engine."""
        commands, self._commands = self._commands, []
        for stopped_s, event, value in self._stopped(self.engine.settle(self._env.now)):
            call_at(self._env, stopped_s, partial(event.succeed, value))
        self._load_what_may()
        for command in commands:
            command()
        self._sleep_until_next_stop()

    def _begin(self, stay: _Stay) -> None:
        if self._lost_since_s is not None:
            nothing = stay.partial or Rollout(stay.sample, (), False)
            call_at(self._env, self.engine.now_s, partial(stay.event.succeed, nothing))
            return
        if self._spot is not None and not self._stays:
            self._notify(lambda spot, now_s: spot.serves(self.index, now_s))
        self._stays[stay.sample.uid] = stay
        if self._drafting is not None:
            self._drafting.begins(stay.sample)
        stay.started_s = self.engine.now_s
        fetch_s = self._costs.fetch_s_per_token * self._computed_tokens(stay)
        ready_s = max(self.engine.now_s + fetch_s, stay.environment_until_s)
        if ready_s > self.engine.now_s:
            call_at(self._env, ready_s, lambda: self._command(lambda: self._enter(stay)))
        else:
            self._enter(stay)

    def _enter(self, stay: _Stay) -> None:
        """A stay joins the engine's queue."""
        if self._stays.get(stay.sample.uid) is not stay:
            return  # aborted meanwhile
        prompt = stay.sample.prompt_tokens + stay.observation_tokens
        slot = self.engine.submit(prompt, stay.length, stay.closed_tokens, self._computed_tokens(stay))
        self.engine.now_s += self._costs.request_s
        if self._drafting is not None:
            self._drafting.give(self.engine, slot, stay.sample, stay.response, self._env.now)
        stay.slot, stay.started_s = slot, self.engine.now_s
        self._in_slot[slot] = stay
        self._decoding.add(slot)
        self._open_rollout_span()
        self._set_stop(stay)

    def _computed_tokens(self, stay: _Stay) -> int:
        """Tokens of a stay that begins whose KV cache the pool has: all but the last one generated, and but what the
        environment said after it."""
        if not stay.cached or not stay.closed_tokens:
            return 0
        turn = _turn_at(stay.response, stay.closed_tokens)
        unseen = 1 if turn is None else 1 + turn.observation_tokens
        return stay.sample.prompt_tokens + stay.observation_tokens + stay.closed_tokens - unseen

    def _end_early(self, sample: Sample, event: simpy.Event) -> None:
        stay = self._stays.pop(sample.uid, None)
        if stay is None:
            call_at(self._env, self.engine.now_s, event.succeed)
            return
        rollout = self._rollout(stay, self.engine.now_s, done=False)
        self._leave_engine(stay)
        self._notify_if_idle()
        call_at(self._env, self.engine.now_s, partial(stay.event.succeed, rollout))
        call_at(self._env, self.engine.now_s, partial(event.succeed, rollout))
        self._load_what_may()

    def _leave_engine(self, stay: _Stay) -> None:
        if stay.slot is None:
            return
        self.engine.abort(stay.slot)
        del self._in_slot[stay.slot]
        self._decoding.discard(stay.slot)
        stay.slot = None
        if not self._decoding:
            self._close_rollout_span(self.engine.now_s)

    def _lose(self, kind: str | None = "lost") -> None:
        if self._lost_since_s is not None:
            return
        self._away = kind
        now_s = self.engine.now_s
        for stay in list(self._stays.values()):
            rollout = self._rollout(stay, now_s, done=False)
            self._leave_engine(stay)
            call_at(self._env, now_s, partial(stay.event.succeed, rollout))
        self._stays.clear()
        self._lost_since_s = now_s
        self._notify(lambda spot, at_s: spot.occupied([self.index], at_s))
        self._load_what_may()

    def _come_back(self, event: simpy.Event) -> None:
        if self._lost_since_s is None:
            call_at(self._env, self.engine.now_s, event.succeed)
            return
        started_s = self.engine.now_s
        self.engine.now_s = started_s + self._costs.load_s + self.load_delay_s
        self._has_weights(self._asked_version)
        if self._costs.evaluate_every:  # what was due meanwhile, the other workers have evaluated
            self._evaluations = self.policy_version // self._costs.evaluate_every
        if self._away is None:
            self._recorder.span(self.index, "load_weights", started_s, self.engine.now_s, self.policy_version)
        self._close_lost_span(self.engine.now_s)
        self._lost_since_s = None
        self._notify_if_idle()
        load = WeightLoad(self.policy_version, started_s, self.engine.now_s)
        call_at(self._env, self.engine.now_s, partial(event.succeed, load))

    def _queue_load(self, running: LoadMode, version: int, event: simpy.Event) -> None:
        self._asked_version = version
        self._loads.append((running, version, event))
        self._load_what_may()

    def _load_what_may(self) -> None:
        """Changes the weights in the order it was asked; a "drain" holds up those behind it until nothing runs."""
        while self._loads and (self._loads[0][0] != "drain" or self.engine.running == 0):
            self._load(*self._loads.popleft())
        self.engine.admitting = not self._loads

    def _load(self, running: LoadMode, version: int, event: simpy.Event) -> None:
        if self._lost_since_s is not None:
            now_s = self.engine.now_s
            call_at(self._env, now_s, partial(event.succeed, WeightLoad(version, now_s, now_s)))
            return
        for stay in self._in_slot.values():
            self._close_segment(stay, self.engine.now_s)
        if running != "keep":
            self.engine.recompute_running()
        started_s = self.engine.now_s
        self._close_rollout_span(started_s)
        if not self._stays:
            self._notify(lambda spot, now_s: spot.occupied([self.index], now_s))
        self.engine.now_s = started_s + self._costs.load_s + self.load_delay_s
        self._has_weights(version)
        self._recorder.span(self.index, "load_weights", started_s, self.engine.now_s, version)
        load = WeightLoad(version, started_s, self.engine.now_s)
        if self._costs.evaluate_every and version // self._costs.evaluate_every > self._evaluations:
            self._evaluations = version // self._costs.evaluate_every  # one is due, if not at this very version
            loaded_s = self.engine.now_s
            self.engine.now_s += self._costs.evaluate_s
            self._recorder.span(self.index, "evaluate", loaded_s, self.engine.now_s, version)
        if self._decoding:
            self._open_rollout_span()
        self._notify_if_idle()
        call_at(self._env, self.engine.now_s, partial(event.succeed, load))

    def _has_weights(self, version: int) -> None:
        self.policy_version = version
        if self._drafting is not None and self._drafting.weights_loaded(self.engine, version):
            for slot, stay in self._in_slot.items():
                self._drafting.give(self.engine, slot, stay.sample, stay.response, self._env.now)

    # Drafters, and how far a stay is.

    def _change_drafter(self, drafter: str | None) -> None:
        if self._stays:
            raise RuntimeError(f"worker {self.index} is to draft with {drafter} while it has requests")
        before = self.engine
        self.engine, self._drafting = self._engines[drafter]
        self.engine.now_s, self.engine.slowdown = before.now_s, before.slowdown
        self.engine.admitting = before.admitting
        if self._drafting is not None:
            self._drafting.weights_loaded(self.engine, self.policy_version)

    def _report(self, sample: Sample, event: simpy.Event) -> None:
        stay, now_s = self._stays.get(sample.uid), self.engine.now_s
        rollout = None
        if stay is not None:
            segments, first_token_s = list(stay.segments), stay.first_token_s
            tokens = stay.closed_tokens if stay.slot is None else self.engine.generated_tokens(stay.slot)
            if tokens > stay.closed_tokens:
                new = tokens - stay.closed_tokens
                segments.append(Segment(self.index, self.policy_version, new, stay.started_s, now_s))
                if math.isnan(first_token_s) and stay.slot is not None:
                    first_token_s = self.engine.first_token_s(stay.slot)
            rollout = self._as_rollout(stay, segments, first_token_s, done=False)
        call_at(self._env, now_s, partial(event.succeed, rollout))

    # Watching, turns of an environment.

    def _watch(self, condition: TokensReached, event: simpy.Event) -> None:
        stay = self._stays.get(condition.sample.uid)
        if stay is None:
            return
        tokens = stay.closed_tokens if stay.slot is None else self.engine.generated_tokens(stay.slot)
        if tokens >= condition.tokens:
            call_at(self._env, self.engine.now_s, event.succeed)
            return
        stay.watches.append((condition.tokens, event))
        self._set_stop(stay)

    def _set_stop(self, stay: _Stay) -> None:
        """Tells the engine at which token of a stay to stop next: where a turn ends, or where somebody watches."""
        if stay.slot is None or stay.slot not in self._decoding:
            return
        tokens = self.engine.generated_tokens(stay.slot)
        ends = [(turn.end_tokens, PAUSE) for turn in stay.response.turns if tokens < turn.end_tokens < stay.length]
        ahead = [(watched, WATCH) for watched, _ in stay.watches if tokens < watched < stay.length] + ends[:1]
        if ahead:
            self.engine.stop_at(stay.slot, *min(ahead))

    def _tell(self, stay: _Stay, now_s: float) -> list[tuple[float, simpy.Event, object]]:
        """The watches of a stay that hold now."""
        assert stay.slot is not None
        tokens = self.engine.generated_tokens(stay.slot)
        told: list[tuple[float, simpy.Event, object]] = [
            (now_s, event, None) for watched, event in stay.watches if watched <= tokens
        ]
        stay.watches = [watch for watch in stay.watches if watch[0] > tokens]
        return told

    def _pause(self, stay: _Stay, now_s: float) -> None:
        """A turn has ended: the environment takes its time, and then what it says is prefilled."""
        slot = stay.slot
        assert slot is not None
        self._close_segment(stay, now_s)
        turn = _turn_at(stay.response, stay.closed_tokens)
        assert turn is not None
        stay.hear(turn, now_s)
        self._decoding.discard(slot)
        if not self._decoding:
            self._close_rollout_span(now_s)
        resume = partial(self._resume, stay, slot, turn.observation_tokens)
        call_at(self._env, stay.environment_until_s, lambda: self._command(resume))

    def _resume(self, stay: _Stay, slot: int, observation_tokens: int) -> None:
        if self._in_slot.get(slot) is not stay:
            return  # aborted meanwhile
        self.engine.resume(slot, observation_tokens)
        stay.started_s = self.engine.now_s
        self._decoding.add(slot)
        self._open_rollout_span()
        self._set_stop(stay)

    # Stops: ends of responses, pauses, watched tokens.

    def _sleep_until_next_stop(self) -> None:
        """Sleeps until the next stop; a command in between makes another plan and this one void."""
        self._plan += 1
        next_stop_s = self.engine.next_stop_s()
        if next_stop_s < np.inf:
            call_at(self._env, next_stop_s, partial(self._wake, self._plan))

    def _wake(self, plan: int) -> None:
        if plan != self._plan:
            return
        for _, event, value in self._stopped(self.engine.take_next_stop()):
            event.succeed(value)
        self._load_what_may()
        self._sleep_until_next_stop()

    def _stopped(self, stops: list[tuple[int, float, int]]) -> list[tuple[float, simpy.Event, object]]:
        """What follows from the stops that came: when, the event to fire and what it fires with."""
        fired: list[tuple[float, simpy.Event, object]] = []
        for slot, stopped_s, kind in stops:
            stay = self._in_slot[slot]
            fired += self._tell(stay, stopped_s)
            if kind == END:
                del self._in_slot[slot], self._stays[stay.sample.uid]
                self._decoding.discard(slot)
                self._notify_if_idle(stopped_s)
                done = stay.length == stay.response.tokens
                turn = None if done else _turn_at(stay.response, stay.length)
                if turn is not None:  # cut just where a turn ends: the environment answers meanwhile
                    stay.hear(turn, stopped_s)
                fired.append((stopped_s, stay.event, self._rollout(stay, stopped_s, done)))
                if not self._decoding:
                    self._close_rollout_span(stopped_s)
            elif kind == PAUSE:
                self._pause(stay, stopped_s)
            else:
                self._set_stop(stay)
        return fired

    # Bookkeeping: segments of responses, spans of the worker.

    def _rollout(self, stay: _Stay, now_s: float, done: bool) -> Rollout:
        self._close_segment(stay, now_s)
        # Without a token yet, the engine's time may be one that it only looked ahead to.
        if stay.slot is not None and stay.closed_tokens and math.isnan(stay.first_token_s):
            stay.first_token_s = self.engine.first_token_s(stay.slot)
        rollout = self._as_rollout(stay, stay.segments, stay.first_token_s, done)
        if self._drafting is not None:
            self._drafting.ends(rollout, now_s)
        self._recorder.stay_ended(rollout, stay.closed_tokens - (stay.partial.tokens if stay.partial else 0))
        return rollout

    def _as_rollout(self, stay: _Stay, segments: Sequence[Segment], first_token_s: float, done: bool) -> Rollout:
        """What there is of a stay, with what was drafted for it, stays before it counted."""
        rollout = Rollout(
            stay.sample,
            tuple(segments),
            done,
            first_token_s,
            carried_tokens=stay.partial.carried_tokens if stay.partial else 0,
            observation_tokens=stay.observation_tokens,
            environment_until_s=stay.environment_until_s,
        )
        if self._drafting is None:
            return rollout
        drafted, accepted, verifications, verified, unverified = 0, 0, 0, 0, 0
        if stay.slot is not None:
            drafted, accepted, verifications = self.engine.drafted(stay.slot)
            verified, unverified = self.engine.verified_tokens(stay.slot), self.engine.unverified_tokens(stay.slot)
        before = stay.partial or rollout
        return rollout._replace(
            drafted_tokens=before.drafted_tokens + drafted,
            accepted_tokens=before.accepted_tokens + accepted,
            verifications=before.verifications + verifications,
            verified_tokens=before.verified_tokens + verified,
            unverified_tokens=before.unverified_tokens + unverified,
        )

    def _close_segment(self, stay: _Stay, now_s: float) -> None:
        if stay.slot is None:
            return
        tokens = self.engine.generated_tokens(stay.slot)
        if tokens > stay.closed_tokens:
            new = tokens - stay.closed_tokens
            stay.segments.append(Segment(self.index, self.policy_version, new, stay.started_s, now_s))
            stay.closed_tokens = tokens
        stay.started_s = now_s

    def _close_lost_span(self, now_s: float) -> None:
        if self._lost_since_s is not None and self._away is not None:
            self._recorder.span(self.index, self._away, self._lost_since_s, now_s, self.policy_version)

    def _notify(self, notice: Callable[[SpotTrainer, float], None], now_s: float | None = None) -> None:
        """Tells the spot trainer, where there is one, at the boundary at which the engine stands. The clock may round two
        notices of one instant apart, so they are told in the order in which they were made."""
        if self._spot is None:
            return
        at_s = self.engine.now_s if now_s is None else now_s
        self._notices.append(partial(notice, self._spot, at_s))
        call_at(self._env, at_s, lambda: self._notices.popleft()())

    def _notify_if_idle(self, now_s: float | None = None) -> None:
        if not self._stays:
            self._notify(lambda spot, at_s: spot.idle(self.index, at_s), now_s)

    def _open_rollout_span(self) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = self.engine.now_s
            self._tokens_before = self.engine.generated_total
            self._spent_before = self.engine.spent

    def _close_rollout_span(self, now_s: float) -> None:
        if self._busy_since_s is not None:
            tokens = self.engine.generated_total - self._tokens_before
            work = Work(*(self.engine.spent - self._spent_before).tolist())
            self._recorder.span(self.index, "rollout", self._busy_since_s, now_s, self.policy_version, tokens, work)
            self._busy_since_s = None
