"""SimulatedWorker: the inference engine in a simulation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import simpy

from simrl.engine.engine import Fleet
from simrl.engine.state import END, PAUSE, Limits, Stop
from simrl.profile.profile import Tables
from simrl.result.result import Work
from simrl.runtime.agents import PLAIN, Agents
from simrl.runtime.drafting import Drafting
from simrl.runtime.events import call_at, call_last
from simrl.runtime.generation import Generation
from simrl.runtime.pauses import Pauses
from simrl.runtime.recorder import OnLanes, Recorder
from simrl.runtime.requests import WorkerRequest
from simrl.runtime.rollout import Rollout, Segment, WeightLoad
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.runtime.worker import LoadMode, TokensReached, WorkerCosts
from simrl.speculation.decoding import Ints
from simrl.trace.trace import Response, Sample


def simulated_workers(
    env: simpy.Environment,
    number: int,
    tables: Tables,
    limits: Limits,
    costs: WorkerCosts,
    responses: Mapping[int, Response],
    recorder: Recorder | OnLanes,
    drafting: Drafting | None = None,
    drafters: Mapping[str, Drafting] | None = None,
    agents: Agents | None = None,
) -> list[SimulatedWorker]:
    """Return workers with an engine for each drafter: one fleet a drafter."""
    held: dict[str | None, tuple[Generation, Drafting | None]] = {}
    of_groups = recorder.recorder if isinstance(recorder, OnLanes) else recorder
    named: list[tuple[str | None, Drafting | None]] = [(None, drafting), *(drafters or {}).items()]
    for name, each in named:
        decoding, keys = (each.decoding, [each.key(i) for i in range(number)]) if each else (None, [0] * number)
        fleet = Fleet(tables, limits, decoding, keys)
        held[name] = Generation(env, fleet, responses, of_groups, costs.request_s), each
    workers = [SimulatedWorker(env, i, held, costs, responses, recorder, agents) for i in range(number)]
    for generation, _ in held.values():
        generation.workers += workers
    return workers


class SimulatedWorker:
    """A `RolloutWorker` on SimPy's clock around the exact engine. It looks the responses of its samples up in the trace.

    Commands and stops find its engine at a boundary that is never before `env.now` while it is busy.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        held: Mapping[str | None, tuple[Generation, Drafting | None]],
        costs: WorkerCosts,
        responses: Mapping[int, Response],
        recorder: Recorder | OnLanes,
        agents: Agents | None = None,
    ) -> None:
        self.policy_version, self.index, self.lane = 0, index, recorder.lane(index)
        # One for each drafter, all on these GPUs and this KV cache; no more than one of them has requests.
        self._held = held
        self.engines = [generation.fleet.engines[index] for generation, _ in held.values()]
        self._generation, self._drafting = held[None]
        self.engine = self.engines[0]
        self.groups: Generation | None = None  # which it offers to generate
        self.load_delay_s, self._spent_before = 0.0, self.engine.spent
        self._env, self._costs, self._responses, self._recorder = env, costs, responses, recorder
        self._pauses = Pauses(env, self, agents or Agents(env, PLAIN))
        self._requests: dict[int, WorkerRequest] = {}
        self._in_slot: dict[int, WorkerRequest] = {}
        self._decoding: set[int] = set()  # slots that are not paused
        self._commands: list[Callable[[], object]] = []
        self._admits = True  # whether requests may enter
        self._loads: deque[tuple[int, LoadMode, simpy.Event]] = deque()
        self._tokens_before = self._asked_version = 0
        self._spot = self._drafting.spot if self._drafting else None
        self._notices: deque[Callable[[], None]] = deque()  # to the spot trainer
        self._busy_since_s: float | None = None
        self._lost_since_s: float | None = None
        self._away: str | None = None  # the kind of span that says so

    @property
    def generated_total(self) -> int:
        """Tokens since the start, with all drafters."""
        return sum(engine.generated_total for engine in self.engines)

    def submit(
        self, sample: Sample, partial: Rollout | None = None, max_tokens: int | None = None, cached: float = 0.0
    ) -> simpy.Event:
        response, before = self._responses[sample.uid], partial or Rollout(sample, (), False)
        length = response.tokens if max_tokens is None else min(response.tokens, max_tokens)
        request = WorkerRequest(self._env.event(), response, before, length, cached)
        self.command(lambda: self._begin(request))
        return request.event

    def abort(self, sample: Sample) -> simpy.Event:
        return self._ask(partial(self._end_early, sample))

    def load_weights(self, version: int, running: LoadMode = "recompute") -> simpy.Event:
        return self._ask(partial(self._queue_load, version, running))

    def when(self, condition: TokensReached) -> simpy.Event:
        return self._ask(partial(self._watch, condition))

    def progress(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        self.command(lambda: self._report(sample, event))
        return event

    def draft_with(self, drafter: str | None) -> None:
        self.command(lambda: self._change_drafter(drafter))

    def slow_down(self, factor: float) -> None:
        """Let every forward pass take `factor` times as long from now on."""
        self.command(lambda: setattr(self.engine, "slowdown", factor))

    def fail(self) -> None:
        """Lose the worker: its requests end as they are, its KV cache and weights are gone. Until `restore`, samples come back
        at once, and weights count as loaded, so that a pipeline that waits for all workers does not wait for this one."""
        self.command(self._lose)

    def lend(self) -> simpy.Event:
        """Hand the GPUs to the trainer: like `fail`, but no `lost` span is recorded. Fires when they are free."""

        def leave(event: simpy.Event) -> None:
            self._lose(None)
            self._fire(event)

        return self._ask(leave)

    def restore(self) -> simpy.Event:
        """Bring the worker back with the weights asked for last. Fires with a `WeightLoad`; None if it was not away."""
        return self._ask(self._come_back)

    def stop(self, time_s: float) -> None:
        """End the simulation now, at `time_s`: close spans, and record what is unfinished as the pass that runs leaves it."""
        if self._commands:
            self._flush()
        self._settle(time_s)
        self.close_rollout_span(self.engine.now_s)
        self._close_lost_span(time_s)
        for request in self._requests.values():
            self._pauses.stop(request, time_s)
            self._rollout(request, self.engine.now_s, done=False)

    def command(self, command: Callable[[], object]) -> None:
        """Call at the boundary where this instant's commands take effect."""
        if not self._commands:
            call_last(self._env, self._flush)
        self._commands.append(command)

    def _ask(self, command: Callable[[simpy.Event], None]) -> simpy.Event:
        """Give a command that lets the returned event fire."""
        event = self._env.event()
        self.command(lambda: command(event))
        return event

    def _fire(self, event: simpy.Event, value: object = None) -> None:
        """Let an event fire at the engine's boundary."""
        call_at(self._env, self.engine.now_s, partial(event.succeed, value))

    def _flush(self) -> None:
        """Run to the boundary at which the commands of this instant take effect, and give them to the engine."""
        commands, self._commands = self._commands, []
        for stopped_s, event, value in self._settle(self._env.now):
            call_at(self._env, stopped_s, partial(event.succeed, value))
        self._load_what_may()
        for command in commands:
            command()
        self._generation.go_on(self)

    def _settle(self, time_s: float) -> list[tuple[float, simpy.Event, object]]:
        """Run to the first boundary after a time, or move the idle engine there; return the events to fire (`_stopped`)."""
        fired = []
        while self.engine.stops_before(time_s):
            fired += self._stopped(self.engine.stops())
        return fired

    def _begin(self, request: WorkerRequest) -> None:
        if self._lost_since_s is not None:
            return self._fire(request.event, request.before)
        if not self._requests:
            self._notify(lambda spot, now_s: spot.serves(self.index, now_s))
        self._requests[request.sample.uid] = request
        if self._drafting is not None:
            self._drafting.begins(request.sample)
        request.started_s = self.engine.now_s
        self._pauses.begin_deadline(request)
        fetch_s = self._costs.fetch_s_per_token * (request.computed_tokens if request.cached == 1.0 else 0)
        ready_s = max(self.engine.now_s + fetch_s, request.environment_until_s)
        if not self._pauses.wait(request, ready_s, lambda: self.command(lambda: self._enter(request))):
            self._enter(request)

    def _enter(self, request: WorkerRequest) -> None:
        """Add a request to the engine's queue."""
        if not self.is_here(request):
            return  # aborted meanwhile
        sample, tokens, length = request.sample, request.tokens, request.length
        lengths = sample.prompt_tokens + request.observation_tokens, length, tokens, request.computed_tokens
        keys = sample.prompt_id, sample.uid, sample.prompt_tokens, length < request.response.tokens
        request.slot = slot = self.engine.submit(*lengths, *keys)
        self.engine.now_s += self._costs.request_s
        self._give_drafts(request)
        self._in_slot[slot] = request
        self.decode(request, slot)

    def _give_drafts(self, request: WorkerRequest) -> None:
        """Give a request in the engine its drafts, now or when they are there."""
        if self._drafting is None or request.slot is None or not self.is_here(request):
            return
        about = request.slot, request.sample, request.response, self._env.now, self.index
        if (later_s := self._drafting.give(self.engine, *about)) is not None:
            call_at(self._env, later_s, lambda: self.command(lambda: self._give_drafts(request)))

    def decode(self, request: WorkerRequest, slot: int) -> None:
        """Follow a request that the engine queues now."""
        request.started_s = now_s = self.engine.now_s
        self._decoding.add(slot)
        self.open_rollout_span(now_s)
        if request.watches or request.response.turns:
            self._set_stop(request)

    def _rest(self, slot: int, now_s: float) -> None:
        self._decoding.discard(slot)
        if not self._decodes:
            self.close_rollout_span(now_s)

    @property
    def _decodes(self) -> bool:
        return bool(self._decoding) or self._generation.fleet.members["in_groups"].item(self.index) > 0

    @property
    def heeds_stops(self) -> bool:
        """Whether something depends on each stop: a load waits for all that run."""
        return bool(self._loads)

    def offer_groups(self, unfinished: Ints) -> None:
        """Generate whole groups from now on; `unfinished` counts the requests at each worker, as their dispatcher does."""
        self.groups = self._generation
        fleet = self._generation.fleet
        fleet.arrays = fleet.arrays._replace(unfinished=unfinished)

    def ticket_left(self) -> None:
        """Go on without a request of a group that was withdrawn."""
        if not self._decodes:
            self.close_rollout_span(self.engine.now_s)
        self._load_what_may()

    def _end_early(self, sample: Sample, event: simpy.Event) -> None:
        if request := self._requests.get(sample.uid):
            self.finish_early(request, False, event)
        else:
            self._fire(event)

    def finish_early(self, request: WorkerRequest, done: bool, *events: simpy.Event) -> None:
        """End a request before its length, and let its event and more fire with its rollout."""
        del self._requests[request.sample.uid]
        rollout = self._leave(request, done)
        self._notify_if_idle()
        for event in (request.event, *events):
            self._fire(event, rollout)
        self._load_what_may()

    def _leave(self, request: WorkerRequest, done: bool = False) -> Rollout:
        """Take a request out of the engine. Return its rollout."""
        rollout = self._rollout(request, self.engine.now_s, done)
        if request.slot is not None:
            self.engine.abort(request.slot)
            del self._in_slot[request.slot]
            self._rest(request.slot, self.engine.now_s)
            request.slot = None
        return rollout

    def _lose(self, kind: str | None = "lost") -> None:
        if self._lost_since_s is not None:
            return
        self._away = kind
        for request in list(self._requests.values()):
            self._fire(request.event, self._leave(request))
        self._requests.clear()
        self._forget_caches()
        self._lost_since_s = self.engine.now_s
        self._notify(lambda spot, at_s: spot.occupied([self.index], at_s))
        self._load_what_may()

    def _forget_caches(self) -> None:
        """Drop all KV: its weights are gone."""
        for engine in self.engines:
            engine.recompute_running()
        self._pauses.forget()

    def _come_back(self, event: simpy.Event) -> None:
        if self._lost_since_s is None:
            return self._fire(event)
        load = self._take_weights(self._asked_version)  # the others have evaluated what was due meanwhile
        if self._away is None:
            self._recorder.span(self.index, "load_weights", load.started_s, load.finished_s, load.version)
        self._close_lost_span(self.engine.now_s)
        self._lost_since_s = None
        self._notify_if_idle()
        self._fire(event, load)

    def _queue_load(self, version: int, running: LoadMode, event: simpy.Event) -> None:
        self._asked_version = version
        self._loads.append((version, running, event))
        self._load_what_may()

    def _load_what_may(self) -> None:
        """Load weights in the order of the commands; a "drain" holds up the loads behind it until nothing runs."""
        if not self._loads and self._admits:
            return
        while self._loads and (self._loads[0][1] != "drain" or self.engine.running == 0):
            self._load(*self._loads.popleft())
        self.engine.admitting = self._admits = not self._loads

    def _load(self, version: int, running: LoadMode, event: simpy.Event) -> None:
        if self._lost_since_s is not None:
            return self._fire(event, WeightLoad(version, self.engine.now_s, self.engine.now_s))
        for request in self._in_slot.values():
            self._close_segment(request, self.engine.now_s)
        self._generation.close_segments(self, self.engine.now_s)
        if running != "keep":
            self._forget_caches()
        self.close_rollout_span(self.engine.now_s)
        if not self._requests:
            self._notify(lambda spot, now_s: spot.occupied([self.index], now_s))
        every, before = self._costs.evaluate_every, self.policy_version
        load = self._take_weights(version)
        self._recorder.span(self.index, "load_weights", load.started_s, load.finished_s, version)
        if every and version // every > before // every:  # one is due, if not at this very version
            self.engine.now_s += self._costs.evaluate_s
            self._recorder.span(self.index, "evaluate", load.finished_s, self.engine.now_s, version)
        if self._decodes:
            self.open_rollout_span(self.engine.now_s)
        self._notify_if_idle()
        self._fire(event, load)

    def _take_weights(self, version: int) -> WeightLoad:
        started_s = self.engine.now_s
        self.engine.now_s = started_s + self._costs.load_s + self._costs.pause_s + self.load_delay_s
        self.policy_version = version
        if self._drafting is not None and self._drafting.weights_loaded(self.engine, version):
            for request in self._in_slot.values():
                self._give_drafts(request)
        return WeightLoad(version, started_s, self.engine.now_s)

    def _change_drafter(self, drafter: str | None) -> None:
        if self._requests:
            raise RuntimeError(f"worker {self.index} is to draft with {drafter} while it has requests")
        before = self.engine
        before.fleet.changed(before.index)
        self._generation, self._drafting = self._held[drafter]
        self.engine = self._generation.fleet.engines[self.index]
        self.engine.now_s, self.engine.slowdown = before.now_s, before.slowdown
        self.engine.admitting = before.admitting
        if self._drafting is not None:
            self._drafting.weights_loaded(self.engine, self.policy_version)

    def _report(self, sample: Sample, event: simpy.Event) -> None:
        request = self._requests.get(sample.uid)
        rollout = request and request.rollout(False, *self._open_segment(request, self.engine.now_s))
        if request and rollout and self._drafting is not None:
            rollout = self._drafting.counted(self.engine, request.slot, rollout)
        self._fire(event, rollout)

    def is_here(self, request: WorkerRequest) -> bool:
        """Return whether a request has not left."""
        return self._requests.get(request.sample.uid) is request

    def has(self, slot: int, request: WorkerRequest) -> bool:
        """Return whether a request is in this place of the engine."""
        return self._in_slot.get(slot) is request

    def tokens_of(self, request: WorkerRequest) -> int:
        """Return the tokens of a request's response at the boundary."""
        return request.tokens if request.slot is None else self.engine.generated_tokens(request.slot)

    def _watch(self, condition: TokensReached, event: simpy.Event) -> None:
        if request := self._requests.get(condition.sample.uid):
            self.watch(request, condition.tokens, event)

    def watch(self, request: WorkerRequest, tokens: int, event: simpy.Event) -> None:
        """Let an event fire when a request has so many tokens."""
        if self.tokens_of(request) >= tokens:
            return self._fire(event)
        request.watches.append((tokens, event))
        self._set_stop(request)

    def _set_stop(self, request: WorkerRequest) -> None:
        """Tell the engine at which token of a request to stop next: where a turn ends, or a watch holds."""
        if request.slot is None or request.slot not in self._decoding:
            return
        stop = request.next_stop(self.engine.generated_tokens(request.slot))
        if stop is not None:
            self.engine.stop_at(request.slot, *stop)

    def take_stops(self) -> None:
        """Take what has stopped where the engine stands."""
        for _, event, value in self._stopped(self.engine.stops()):
            event.succeed(value)
        self._load_what_may()

    def _stopped(self, stops: list[Stop]) -> list[tuple[float, simpy.Event, object]]:
        """Handle the engine's stops. Return the events to fire: when, which, and with what value."""
        fired: list[tuple[float, simpy.Event, object]] = []
        for slot, stopped_s, kind in stops:
            request = self._in_slot.get(slot)
            if request is None:  # of a group
                self._rest(slot, stopped_s)
                continue
            if request.watches:
                held = request.take_watches(self.engine.generated_tokens(slot))
                fired += [(stopped_s, event, None) for event in held]
            if kind == END:
                del self._in_slot[slot], self._requests[request.sample.uid]
                self._notify_if_idle(stopped_s)
                done = request.length == request.response.tokens
                if done and request.response.turns:
                    self._pauses.ended(request, stopped_s)
                turn = None if done else request.turn_at(request.length)
                if turn is not None:  # cut just where a turn ends: the environment answers meanwhile
                    self._pauses.call_tool(request, turn, stopped_s, lambda: None)
                fired.append((stopped_s, request.event, self._rollout(request, stopped_s, done)))
                self._rest(slot, stopped_s)
            elif kind == PAUSE:
                self._close_segment(request, stopped_s)
                self._rest(slot, stopped_s)
                self._pauses.pause(request, slot, stopped_s)
            else:
                self._set_stop(request)
        return fired

    def _rollout(self, request: WorkerRequest, now_s: float, done: bool) -> Rollout:
        """Return and record what there is of a request that ends."""
        self._close_segment(request, now_s)
        rollout = request.rollout(done)
        if self._drafting is not None:
            rollout = self._drafting.counted(self.engine, request.slot, rollout)
            self._drafting.ends(self.engine, request.slot, rollout, now_s)
        self._recorder.request_ended(rollout, request.tokens - request.before.tokens)
        return rollout

    def _open_segment(self, request: WorkerRequest, now_s: float) -> tuple[Segment | None, float]:
        """Return the segment of a request that goes on, if it has tokens, and the time of its first token."""
        slot, segment, first_token_s = request.slot, None, request.first_token_s
        if slot is not None:
            tokens = self.engine.generated_tokens(slot) - request.tokens
            if tokens > 0:
                segment = Segment(self.lane, self.policy_version, tokens, request.started_s, now_s)
            if math.isnan(first_token_s):
                first_token_s = self.engine.first_token_s(slot)
        return segment, first_token_s

    def _close_segment(self, request: WorkerRequest, now_s: float) -> None:
        segment, request.first_token_s = self._open_segment(request, now_s)
        if segment is not None:
            request.close_segment(segment)
        request.started_s = now_s

    def _close_lost_span(self, now_s: float) -> None:
        if self._lost_since_s is not None and self._away is not None:
            self._recorder.span(self.index, self._away, self._lost_since_s, now_s, self.policy_version)

    def _notify(self, notice: Callable[[SpotTrainer, float], None], now_s: float | None = None) -> None:
        """Notify the spot trainer, if there is one, at the engine's boundary. The clock may round two notices of one instant
        apart, so they arrive in the order in which they were made."""
        if self._spot is None:
            return
        at_s = self.engine.now_s if now_s is None else now_s
        self._notices.append(partial(notice, self._spot, at_s))
        call_at(self._env, at_s, lambda: self._notices.popleft()())

    def _notify_if_idle(self, now_s: float | None = None) -> None:
        if not self._requests:
            self._notify(lambda spot, at_s: spot.idle(self.index, at_s), now_s)

    def open_rollout_span(self, now_s: float) -> None:
        """Begin a span of generation, if there is none."""
        if self._busy_since_s is None:
            self._busy_since_s = now_s
            self._tokens_before = self.engine.generated_total
            self._spent_before = self.engine.spent

    def close_rollout_span(self, now_s: float) -> None:
        """End the span of generation, if there is one."""
        if self._busy_since_s is not None:
            tokens = self.engine.generated_total - self._tokens_before
            work = Work(*(self.engine.spent - self._spent_before).tolist())
            self._recorder.span(self.index, "rollout", self._busy_since_s, now_s, self.policy_version, tokens, work)
            self._busy_since_s = None
