"""SimulatedWorker: the inference engine in a simulation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Concatenate, NamedTuple, ParamSpec

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
from simrl.runtime.prompt_keys import PromptKeys
from simrl.runtime.recorder import Recorder
from simrl.runtime.requests import WorkerRequest
from simrl.runtime.rollout import Rollout, Segment, WeightLoad, grown
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.runtime.worker import EngineLoad, LoadMode, WorkerCosts
from simrl.speculation.decoding import Decoding, Ints
from simrl.trace.trace import Response, Sample

Arguments = ParamSpec("Arguments")


class _Load(NamedTuple):
    """A load of weights that was asked for; `event` fires when it is done."""

    version: int
    running: LoadMode
    retry_s: float
    event: simpy.Event


def simulated_workers(
    env: simpy.Environment,
    number: int,
    tables: Tables,
    limits: Limits,
    costs: WorkerCosts,
    responses: Mapping[int, Response],
    recorder: Recorder,
    drafting: Drafting | None = None,
    drafters: Mapping[str, Drafting] | None = None,
    agents: Agents | None = None,
    lanes: int = 1,
    prompts: PromptKeys | None = None,
    decode_lanes: int = 0,
) -> list[SimulatedWorker]:
    """Return workers with an engine for each drafter. Each worker has `lanes` of the recorder.
    Workers that prefill for others have theirs behind the `decode_lanes`."""
    prompts = prompts or PromptKeys()
    methods: list[tuple[str | None, Drafting | None]] = [(None, drafting)]
    methods += (drafters or {}).items()
    fleets: dict[str | None, tuple[Generation, int, Drafting | None]] = {}
    # Engines that draft are in one fleet: no step of another fleet then keeps it from the next.
    for drafts in (False, True):
        alike = [(name, method) for name, method in methods if (method is not None) == drafts]
        ways: list[tuple[Decoding | None, list[int]]] = [
            (method.decoding, [method.key(i) for i in range(number)])
            if method
            else (None, [0] * number)
            for _, method in alike
        ]
        if alike:
            shared = responses, recorder, costs.request_s, prompts
            blocks = [
                min(limits.kv_blocks, method.kv_blocks) if name and method else limits.kv_blocks
                for name, method in alike
            ]
            generation = Generation(env, Fleet(tables, limits, *ways, kv_blocks=blocks), *shared)
            fleets |= {name: (generation, i * number, of) for i, (name, of) in enumerate(alike)}
    workers = [
        SimulatedWorker(
            env, i, fleets, costs, responses, recorder, prompts, agents, lanes, decode_lanes
        )
        for i in range(number)
    ]
    for generation, _, _ in fleets.values():
        generation.workers += workers
    return workers


def cache_totals(workers: Iterable[SimulatedWorker]) -> dict[str, int]:
    """Return the tokens that all engines were asked to find, that they found, and that they
    computed."""
    totals = [engine.totals for worker in workers for engine in worker.engines]
    return {
        name: sum(engine[name] for engine in totals)
        for name in ("lookup_tokens", "hit_tokens", "prefill_tokens")
    }


def at_boundary(
    act: Callable[Concatenate[SimulatedWorker, simpy.Event, Arguments], None],
) -> Callable[Concatenate[SimulatedWorker, Arguments], simpy.Event]:
    """Let a method of a worker act at its next boundary, and return the event that it lets fire."""

    def ask(
        worker: SimulatedWorker, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> simpy.Event:
        event = worker.env.event()
        worker.command(lambda: act(worker, event, *args, **kwargs))
        return event

    return ask


class SimulatedWorker:
    """A `RolloutWorker` on SimPy's clock with the exact engine, which looks up the responses of its
    samples in the trace.

    At commands and stops, its engine stands at a boundary that is never before `env.now` while it
    is busy.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        fleets: Mapping[str | None, tuple[Generation, int, Drafting | None]],
        costs: WorkerCosts,
        responses: Mapping[int, Response],
        recorder: Recorder,
        prompts: PromptKeys,
        agents: Agents | None = None,
        lanes: int = 1,
        decode_lanes: int = 0,
    ) -> None:
        self.policy_version, self.index, self._lanes = 0, index, lanes
        self.lane, self._prefills = decode_lanes + index * lanes, decode_lanes > 0
        # An engine for each drafter, all on these GPUs, each with what its drafter leaves to the KV
        # cache; at most one of them has requests.
        self._drafters = {
            name: (generation, generation.fleet.engines[first + index], method)
            for name, (generation, first, method) in fleets.items()
        }
        self._generation, self.engine, self._drafting = self._drafters[None]
        self.engines = [engine for _, engine, _ in self._drafters.values()]
        self.groups: Generation | None = None  # set where the worker takes whole groups
        self.load_delay_s, self._spent_before = 0.0, self.engine.spent
        self.env, self._costs, self._responses, self._recorder = env, costs, responses, recorder
        self._agents = agents or Agents(env, PLAIN)
        self._pauses = Pauses(env, self, self._agents)
        self._requests: dict[int, WorkerRequest] = {}
        self._in_slot: dict[int, WorkerRequest] = {}
        self._decoding: set[int] = set()  # slots that are not paused
        self._commands: list[Callable[[], object]] = []
        self._admits = True  # whether requests may enter
        self._loads: deque[_Load] = deque()
        self._prompts = prompts
        self.aside: set[int] = set()  # slots that were interrupted and will be sent again
        self._tokens_before = self._asked_version = self._preemptions = 0
        self._kv_version = 0  # the oldest weights whose KV cache counts
        self._spot = self._drafting.spot if self._drafting else None
        self._notices: deque[Callable[[], None]] = deque()  # to the spot trainer
        self._busy_since_s: float | None = None
        self._busy_kind = "rollout"
        self._lost_since_s: float | None = None
        self._is_lent = False  # its absence is no loss

    @property
    def now_s(self) -> float:
        """The time of the engine's boundary."""
        return float(self.engine.now_s)

    @property
    def generated_total(self) -> int:
        """Tokens since the start, with all drafters."""
        return sum(engine.generated_total for engine in self.engines)

    def submit(
        self,
        sample: Sample,
        partial: Rollout | None = None,
        max_tokens: int | None = None,
        cached: float = 0.0,
    ) -> simpy.Event:
        self._prompts.salt(sample)  # a group begins here
        response, before = self._responses[sample.uid], partial or Rollout(sample, (), False)
        length = response.tokens if max_tokens is None else min(response.tokens, max_tokens)
        request = WorkerRequest(self.env.event(), response, before, before.tokens, length, cached)
        self.command(lambda: self._begin(request))
        return request.event

    @at_boundary
    def abort(self, event: simpy.Event, sample: Sample) -> None:
        if request := self._requests.get(sample.uid):
            self.finish_early(request, False, event)
        else:
            self._fire(event)

    def load_weights(
        self, version: int, running: LoadMode = "recompute", retry_s: float = 0.0
    ) -> simpy.Event:
        self._prompts.version = version
        return self._ask_for_weights(version, running, retry_s)

    @at_boundary
    def _ask_for_weights(
        self, event: simpy.Event, version: int, running: LoadMode, retry_s: float
    ) -> None:
        self._asked_version = version
        self._loads.append(_Load(version, running, retry_s, event))
        self._load_what_may()

    @at_boundary
    def when(self, event: simpy.Event, sample: Sample, tokens: int) -> None:
        if request := self._requests.get(sample.uid):
            self.watch(request, tokens, event)

    @at_boundary
    def progress(self, event: simpy.Event, samples: Sequence[Sample]) -> None:
        here = [self._requests.get(sample.uid) for sample in samples]
        self._fire(event, [request and self._counted(request) for request in here])

    def _counted(self, request: WorkerRequest) -> Rollout:
        """Return the rollout of a request as it is, drafts included."""
        rollout, drafting = self._so_far(request, self.engine.now_s), self._drafting
        return drafting.counted(self.engine, request.slot, rollout) if drafting else rollout

    @at_boundary
    def load(self, event: simpy.Event) -> None:
        engine, limits = self.engine, self.engine.limits
        preemptions = sum(each.preemptions for each in self.engines)
        usage = 1.0 - engine.free_blocks / (limits.kv_blocks * limits.dp)
        new, self._preemptions = preemptions - self._preemptions, preemptions
        self._fire(
            event,
            EngineLoad(limits.kv_tokens * limits.dp, usage, engine.running, engine.waiting, new),
        )

    @at_boundary
    def draft_with(self, event: simpy.Event, drafter: str | None) -> None:
        self._change_drafter(drafter)
        self._fire(event)

    def slow_down(self, factor: float) -> None:
        self.command(lambda: setattr(self.engine, "slowdown", factor))

    def fail(self) -> None:
        self.command(self._leave_run)

    @at_boundary
    def lend(self, event: simpy.Event) -> None:
        self._leave_run(is_lent=True)
        self._fire(event)

    @at_boundary
    def restore(self, event: simpy.Event) -> None:
        if self._lost_since_s is None:
            return self._fire(event)
        load = self._take_weights(
            self._asked_version
        )  # the others have evaluated what was due meanwhile
        if self._is_lent:
            self._span("load_weights", load.started_s, load.finished_s)
        self._close_lost_span(self.engine.now_s)
        self._lost_since_s = None
        self._notify_if_idle()
        self._fire(event, load)

    def stop(self, time_s: float) -> None:
        """End the simulation now, at `time_s`: close spans, and record unfinished requests as their
        running pass ends."""
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
            call_last(self.env, self._flush)
        self._commands.append(command)

    def _fire(self, event: simpy.Event, value: object = None) -> None:
        """Let an event fire at the engine's boundary."""
        call_at(self.env, self.engine.now_s, partial(event.succeed, value))

    def _flush(self) -> None:
        """Run to the boundary at which the commands of this instant take effect, and give them to
        the engine."""
        commands, self._commands = self._commands, []
        for stopped_s, event, value in self._settle(self.env.now):
            call_at(self.env, stopped_s, partial(event.succeed, value))
        self._load_what_may()
        for command in commands:
            command()
        self._generation.go_on(self)

    def _settle(self, time_s: float) -> list[tuple[float, simpy.Event, object]]:
        """Run to the first boundary after a time, or move the idle engine there; return the events
        to fire (`_stopped`)."""
        fired = []
        while self.engine.stops_before(time_s):
            fired += self._stopped(self.engine.stops())
        return fired

    def _begin(self, request: WorkerRequest) -> None:
        if self._lost_since_s is not None:
            return self._fire(request.event, request.rollout)
        if not self._requests:
            self._notify(lambda spot, now_s: spot.serves(self.index, now_s))
        self._requests[request.sample.uid] = request
        if self._drafting is not None:
            self._drafting.begins(request.sample)
        request.started_s = self.engine.now_s
        self._pauses.begin_deadline(request)
        fetch_s = self._costs.fetch_s_per_token * (
            request.computed_tokens if request.cached == 1.0 else 0
        )
        ready_s = max(self.engine.now_s + fetch_s, request.rollout.environment_until_s)
        elsewhere = self._agents.pool is not None and not request.cached
        enter = self._pauses.prefill if elsewhere else self._enter
        if not self._pauses.wait(request, ready_s, lambda: self.command(lambda: enter(request))):
            enter(request)

    def _enter(self, request: WorkerRequest) -> None:
        """Add a request to the engine's queue."""
        if not self.is_here(request):
            return  # aborted meanwhile
        sample, rollout, length = request.sample, request.rollout, request.length
        lengths = (
            sample.prompt_tokens + rollout.observation_tokens,
            length,
            rollout.tokens,
            request.computed_tokens,
        )
        prompt_key, is_cut = self._prompts.key(sample), length < request.response.tokens
        keys = prompt_key, sample.uid, sample.prompt_tokens, is_cut
        request.slot = slot = self.engine.submit(*lengths, *keys)
        self.engine.now_s += self._costs.request_s
        self._give_drafts(request)
        self._in_slot[slot] = request
        self.decode(request, slot)

    def _give_drafts(self, request: WorkerRequest) -> None:
        """Give a request in the engine its drafts, now or when they are there."""
        if self._drafting is None or request.slot is None or not self.is_here(request):
            return
        of_request = request.slot, request.sample, request.response, self.env.now, self.index
        if (later_s := self._drafting.give(self.engine, *of_request)) is not None:
            call_at(self.env, later_s, lambda: self.command(lambda: self._give_drafts(request)))

    def decode(self, request: WorkerRequest, slot: int) -> None:
        """Follow a request that the engine queues now."""
        request.started_s = now_s = self.engine.now_s
        self._decoding.add(slot)
        self.open_rollout_span(now_s, "evaluate" if request.sample.is_evaluation else "rollout")
        if request.watches or request.response.turns:
            self._set_stop(request)

    def _rest(self, slot: int, now_s: float) -> None:
        self._decoding.discard(slot)
        if not self._decodes:
            self.close_rollout_span(now_s)

    @property
    def _decodes(self) -> bool:
        in_groups = self.engine.fleet.members["in_groups"].item(self.engine.index)
        resting = sum(slot not in self._in_slot for slot in self.aside)
        return bool(self._decoding) or in_groups > resting

    @property
    def heeds_stops(self) -> bool:
        """True while each stop matters: a load waits for the running requests."""
        return bool(self._loads)

    def offer_groups(self, unfinished: Ints) -> None:
        """Offer to generate whole groups; `unfinished` is their dispatcher's count of requests at
        each worker."""
        self.groups = self._generation
        fleet = self._generation.fleet
        fleet.arrays = fleet.arrays._replace(unfinished=unfinished)

    def ticket_left(self) -> None:
        """Continue after a request of a group was withdrawn."""
        if not self._decodes:
            self.close_rollout_span(self.engine.now_s)
        self._load_what_may()

    def finish_early(self, request: WorkerRequest, done: bool, *events: simpy.Event) -> None:
        """End a request before its length, and let its event and `events` fire with its rollout."""
        if self._pauses.ends(request, done, *events):
            return
        del self._requests[request.sample.uid]
        rollout = self._leave(request, done)
        self._notify_if_idle()
        for event in (request.event, *events):
            self._fire(event, rollout)
        self._load_what_may()

    def _leave(self, request: WorkerRequest, done: bool = False) -> Rollout:
        """Take a request out of the engine. Return its rollout."""
        rollout = self._rollout(request, self.engine.now_s, done)
        self.take_out(request)
        return rollout

    def take_out(self, request: WorkerRequest) -> None:
        """Take a request out of the engine, if it is there, as it is."""
        if request.slot is not None:
            self.engine.abort(request.slot)
            self.aside.discard(request.slot)
            del self._in_slot[request.slot]
            self._rest(request.slot, self.engine.now_s)
            request.slot = None

    def prefilled(self, request: WorkerRequest, rollout: Rollout) -> None:
        """Go on with a request whose KV cache has come from a prefill worker, or which ends."""
        made = rollout.tokens - request.rollout.tokens
        is_over = request.ends is not None or rollout.tokens >= request.length
        (ended, events), request.ends = request.ends or (False, ()), None
        request.rollout, request.tokens_before = rollout, request.tokens_before + made
        request.prefill, request.cached = None, 1.0
        for event in request.take_watches(rollout.tokens):
            self._fire(event)
        if made and not rollout.done and (turn := request.turn_at(rollout.tokens)):
            self._pauses.call_tool(
                request, turn, rollout.finished_s, partial(self._pauses.prefill, request)
            )
        elif not is_over and rollout.segments[-1].policy_version < self._kv_version:
            self._pauses.prefill(request)
        elif not is_over:
            self._enter(request)
        if is_over:
            self.finish_early(request, ended or rollout.done, *events)

    def _leave_run(self, is_lent: bool = False) -> None:
        """Lose the GPUs, or lend them: all requests end as they are, without their KV cache."""
        if self._lost_since_s is not None:
            return
        self._is_lent = is_lent
        for uid, request in list(self._requests.items()):
            if not self._pauses.ends(request, False):
                del self._requests[uid]
                self._fire(request.event, self._leave(request))
        self._forget_caches()
        self._lost_since_s = self.engine.now_s
        self._notify(lambda spot, at_s: spot.occupied([self.index], at_s))
        self._load_what_may()

    def _forget_caches(self) -> None:
        """Drop all KV cache, which old weights computed."""
        for engine in self.engines:
            engine.recompute_running()
        self._pauses.host.clear()

    def _load_what_may(self) -> None:
        """Load weights in the order of the commands; a "drain" delays itself and later loads until
        nothing runs."""
        if not self._loads and self._admits:
            return
        while self._loads and (self._loads[0].running != "drain" or self.engine.running == 0):
            self._load(self._loads.popleft())
        self.engine.admitting = self._admits = not self._loads

    def _load(self, asked: _Load) -> None:
        version, running, retry_s, event = asked
        if self._lost_since_s is not None:
            return self._fire(event, WeightLoad(version, self.engine.now_s, self.engine.now_s))
        for request in self._in_slot.values():
            self._close_segment(request, self.engine.now_s)
        self._generation.close_segments(self, self.engine.now_s)
        if running != "keep":
            self._forget_caches()
            self._kv_version = version
        elsewhere = self._decoding if self._agents.pool and running != "keep" else ()
        again_elsewhere = [self._in_slot[slot] for slot in sorted(elsewhere)]
        interrupted = self._interrupt(running, retry_s)
        self.close_rollout_span(self.engine.now_s)
        if not self._requests:
            self._notify(lambda spot, now_s: spot.occupied([self.index], now_s))
        every, before = self._costs.evaluate_every, self.policy_version
        load = self._take_weights(version)
        self._span("load_weights", load.started_s, load.finished_s)
        if every and version // every > before // every:  # one is due, if not at this very version
            self.engine.now_s += self._costs.evaluate_s
            self._span("evaluate", load.finished_s, self.engine.now_s)
        again = partial(self._send_again, interrupted)
        if retry_s > 0 and interrupted:
            call_at(self.env, load.started_s + retry_s, partial(self.command, again))
        elif interrupted:
            again()
        for request in again_elsewhere:
            call_at(self.env, load.started_s + retry_s, partial(self._pauses.prefill, request))
        if self._decodes:
            self.open_rollout_span(self.engine.now_s)
        self._notify_if_idle()
        self._fire(event, load)

    def _interrupt(self, running: LoadMode, retry_s: float) -> list[int]:
        """Take what runs or waits out of the engine, if it starts over or is sent again later.
        Return its slots."""
        starts_over = running == "start_over"
        if not starts_over and (running != "recompute" or retry_s == 0):
            return []
        slots = self.engine.set_aside(starts_over)
        self.aside.update(slots)
        self._decoding.difference_update(slots)
        if starts_over:
            for slot in self._in_slot.keys() & slots:
                request = self._in_slot[slot]
                self.engine.forget_answers(slot, request.rollout.observation_tokens)
                lost = request.rollout.tokens - request.tokens_before
                self._recorder.started_over(request.sample, lost)
                request.start_over()
            self._generation.start_over(self, slots)
        return slots

    def _send_again(self, slots: Sequence[int]) -> None:
        """Queue interrupted requests again, but for those that were aborted meanwhile."""
        slots = [slot for slot in slots if slot in self.aside]
        self.aside.difference_update(slots)
        self.engine.queue_again(slots)
        for slot in slots:
            if slot in self._in_slot:
                self.decode(self._in_slot[slot], slot)
        self._generation.sent_again(self, slots, self.engine.now_s)
        if self._decodes:
            self.open_rollout_span(self.engine.now_s)

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
            raise RuntimeError(
                f"worker {self.index} is to draft with {drafter} while it has requests"
            )
        before = self.engine
        before.fleet.changed(before.index)
        self._generation, self.engine, self._drafting = self._drafters[drafter]
        self.engine.now_s, self.engine.slowdown = before.now_s, before.slowdown
        self.engine.admitting = before.admitting
        if self._drafting is not None:
            self._drafting.weights_loaded(self.engine, self.policy_version)
        if self._drafting is not None and drafter is not None and self._drafting.load_s > 0:
            self.engine.now_s += self._drafting.load_s
            self._span("load_drafter", self.engine.now_s - self._drafting.load_s, self.engine.now_s)

    def kill(self, request: WorkerRequest, at_first_token: simpy.Event) -> None:
        """End the trajectory of a request as it is; one without a token goes on to its first."""
        if self.is_here(request) and self.tokens_of(request) == 0:
            self.watch(request, 1, at_first_token)
        elif self.is_here(request):
            self._pauses.killed(request, self.now_s)
            self.finish_early(request, True)

    def is_here(self, request: WorkerRequest) -> bool:
        """Return whether a request has not left."""
        return self._requests.get(request.sample.uid) is request

    def tokens_of(self, request: WorkerRequest) -> int:
        """Return the tokens of a request's response at the boundary."""
        return (
            request.rollout.tokens
            if request.slot is None
            else self.engine.generated_tokens(request.slot)
        )

    def watch(self, request: WorkerRequest, tokens: int, event: simpy.Event) -> None:
        """Let an event fire when the response of a request has `tokens`."""
        if self.tokens_of(request) >= tokens:
            return self._fire(event)
        request.watches.append((tokens, event))
        self._set_stop(request)

    def _set_stop(self, request: WorkerRequest) -> None:
        """Set the token at which the engine stops next for a request: the end of a turn, or a
        watched count."""
        if request.slot is None or request.slot not in self._decoding:
            return
        stop = request.next_stop(self.engine.generated_tokens(request.slot))
        if stop is not None:
            self.engine.stop_at(request.slot, *stop)

    def take_stops(self) -> None:
        """Handle the stops at the engine's boundary."""
        for _, event, value in self._stopped(self.engine.stops()):
            event.succeed(value)
        self._load_what_may()

    def _stopped(self, stops: list[Stop]) -> list[tuple[float, simpy.Event, object]]:
        """Handle the engine's stops. Return the events to fire: the time, the event and its
        value."""
        fired: list[tuple[float, simpy.Event, object]] = []
        for slot, stopped_s, kind in stops:
            request = self._in_slot.get(slot)
            if request is None:  # of a group
                self._rest(slot, stopped_s)
                continue
            if request.watches:
                reached = request.take_watches(self.engine.generated_tokens(slot))
                fired += [(stopped_s, event, None) for event in reached]
            if kind == END:
                del self._in_slot[slot], self._requests[request.sample.uid]
                self._notify_if_idle(stopped_s)
                done = request.length == request.response.tokens
                if done and request.response.turns:
                    self._pauses.ended(request, stopped_s)
                turn = None if done or self._prefills else request.turn_at(request.length)
                if turn is not None:  # cut at the end of a turn: the environment answers meanwhile
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
        """Return and record the rollout of a request that ends."""
        self._close_segment(request, now_s)
        request.rollout = rollout = request.rollout._replace(done=done)
        if self._drafting is not None:
            rollout = self._drafting.counted(self.engine, request.slot, rollout)
            self._drafting.ends(self.engine, request.slot, rollout, now_s)
        self._recorder.request_ended(rollout, rollout.tokens - request.tokens_before)
        return rollout

    def _so_far(self, request: WorkerRequest, now_s: float) -> Rollout:
        """Return the rollout of a request with its open segment, as if that ended now."""
        slot, rollout = request.slot, request.rollout
        if slot is None:
            return rollout
        segments, first_token_s = rollout.segments, rollout.first_token_s
        tokens = self.engine.generated_tokens(slot) - rollout.tokens
        if tokens > 0:
            segments = (
                *segments,
                Segment(self.lane, self.policy_version, tokens, request.started_s, now_s),
            )
        if math.isnan(first_token_s):
            first_token_s = self.engine.first_token_s(slot)
        return grown(rollout, segments, first_token_s)

    def _close_segment(self, request: WorkerRequest, now_s: float) -> None:
        request.rollout, request.started_s = self._so_far(request, now_s), now_s

    def _span(
        self, kind: str, started_s: float, ended_s: float, tokens: int = 0, work: Work | None = None
    ) -> None:
        """Record a span on the worker's lanes, under its present weights."""
        self._recorder.span(
            self.lane, kind, started_s, ended_s, self.policy_version, tokens, work, self._lanes
        )

    def _close_lost_span(self, now_s: float) -> None:
        if self._lost_since_s is not None and not self._is_lent:
            self._span("lost", self._lost_since_s, now_s)

    def _notify(
        self, notice: Callable[[SpotTrainer, float], None], now_s: float | None = None
    ) -> None:
        """Notify the spot trainer, if there is one, at the engine's boundary. Notices arrive in the
        order in which they were made, also where rounding sets two of one instant apart."""
        if self._spot is None:
            return
        at_s = self.engine.now_s if now_s is None else now_s
        self._notices.append(partial(notice, self._spot, at_s))
        call_at(self.env, at_s, lambda: self._notices.popleft()())

    def _notify_if_idle(self, now_s: float | None = None) -> None:
        if not self._requests:
            self._notify(lambda spot, at_s: spot.idle(self.index, at_s), now_s)

    def open_rollout_span(self, now_s: float, kind: str = "rollout") -> None:
        """Begin a span of generation, if there is none: of kind "evaluate" until a request of
        training enters."""
        if self._busy_kind == "evaluate" != kind:
            self.close_rollout_span(now_s)
        if self._busy_since_s is None:
            self._busy_since_s, self._busy_kind = now_s, kind
            self._tokens_before = self.engine.generated_total
            self._spent_before = self.engine.spent

    def close_rollout_span(self, now_s: float) -> None:
        """End the span of generation, if there is one."""
        if self._busy_since_s is not None:
            tokens = self.engine.generated_total - self._tokens_before
            work = Work(*(self.engine.spent - self._spent_before).tolist())
            self._span(self._busy_kind, self._busy_since_s, now_s, tokens, work)
            self._busy_since_s = None
