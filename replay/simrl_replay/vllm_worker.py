"""VllmWorker: a `RolloutWorker` that is a real vLLM engine at the other end of an `EngineLink`.

Invariant: the guarantees of a `SimulatedWorker` hold: commands take effect in order at the first
boundary after they are given, those of one instant together; `submit`'s event fires exactly once,
also when the engine dies or hangs, with every reported token; times are the engine's own, on the
schedule's clock.

A lost engine is restarted, loads the version that was last requested, and takes samples again;
until then, submitted samples come back at once, and weights count as loaded. Its samples go on
elsewhere from their last token, by the dispatcher's rule. While there is no room for the new engine,
the schedule goes on without it, as long as it needs nothing from it. A loss that a scenario injects lasts
until the scenario ends it.

A turn is a request of the engine, which gets the whole context: the prompt, earlier turns, and the
answers of the environment. The engine's process ends it where the trace does; tool calls and
deadlines run on the schedule's clock (`simrl.runtime.pauses.Turns`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import simpy

from simrl.errors import InputError, StoppedError
from simrl.runtime.agents import PLAIN, Agents
from simrl.runtime.drafting import Drafting
from simrl.runtime.events import call_last, gather, on_fire
from simrl.runtime.faults import HearsOfLosses
from simrl.runtime.pauses import Turns
from simrl.runtime.prompt_keys import PromptKeys
from simrl.runtime.recorder import Recorder
from simrl.runtime.rollout import Rollout, WeightLoad
from simrl.runtime.worker import EngineLoad, LoadMode
from simrl.trace.trace import Response, Sample, Turn
from simrl_replay import host
from simrl_replay.clock import WallClock
from simrl_replay.engine_request import EngineRequest
from simrl_replay.link import EngineLink
from simrl_replay.proposer import DrafterSetup, Forced
from simrl_replay.spot_head import SpotHead

MOST_RESTARTS = 3
NO_LOAD = EngineLoad(0, 0.0, 0, 0, 0)


class _Load(NamedTuple):
    """A weight load sent to the engine; `event` is None for a load after a restart. The last
    `evaluate_s` of what it takes are an evaluation of which only the seconds are known."""

    version: int
    event: simpy.Event | None
    held_s: float
    starts_over: bool = False
    evaluate_s: float = 0.0


class _Change(NamedTuple):
    """A change of drafter sent to the engine, at a time; `loads`: it takes a load of a model."""

    event: simpy.Event
    asked_s: float
    loads: bool


class VllmWorker:
    """One engine, as schedules see it. `weights` gives the folder of a policy version, `prompt_ids`
    the tokens of a prompt.

    `start` restarts the engine after a loss. An engine counts as hung, and is killed, without a
    report for `deadline_s` while it has work, or for `start_deadline_s` while it starts or loads
    weights. `prompts` has the salts of prompts. `tell` gets the engine's losses, for the result; `on_done` gets every response;
    `on_back` is called when the engine is back, before anything is submitted to it. Loads are held
    for `held_load_s` longer than they take, as dummy weights have none to load; weights that are
    being written are awaited for `awaited_s`. `forced` gives an
    oracle drafter's inputs for a sample. `setup` is the drafter that it begins with, `tail` has
    those that it may get in its place. `drafting` decides windows and what drafts, and has the spot
    trainer; `head` is the drafter in training. With a `stop_token`, a response is done when it has
    that token; its length in `responses` is the upper bound. `agents` has the tool slots and
    deadlines of all workers; `answer_ids` gives the tokens of an environment's answer to a turn.
    `evaluates`: updates between evaluations that only take time, and that time.
    """

    def __init__(
        self,
        env: WallClock,
        index: int,
        link: EngineLink,
        start: Callable[[], EngineLink],
        responses: Mapping[int, Response],
        prompt_ids: Callable[[Sample], tuple[int, ...]],
        weights: Callable[[int], str],
        recorder: Recorder,
        deadline_s: float,
        start_deadline_s: float,
        tell: Callable[[dict[str, Any]], None],
        setup: DrafterSetup | None = None,
        held_load_s: float = 0.0,
        forced: Callable[[Sample], Forced] | None = None,
        stop_token: int | None = None,
        prompts: PromptKeys | None = None,
        tail: Mapping[str, DrafterSetup] | None = None,
        awaited_s: float = 0.0,
        agents: Agents | None = None,
        answer_ids: Callable[[Sample, Turn], tuple[int, ...]] | None = None,
        evaluates: tuple[int, float] = (0, 0.0),
        drafting: Drafting | None = None,
        head: SpotHead | None = None,
    ) -> None:
        self.policy_version, self.groups = 0, None
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
        self._drafters: dict[str | None, DrafterSetup] = {None: setup or DrafterSetup()}
        self._drafters.update(tail or {})
        self._setup = self._drafters[None]  # of the drafter that it has
        self._held_load_s = held_load_s
        self._evaluates = evaluates
        self._forced = forced
        self._stop_token = stop_token
        self._prompts = prompts or PromptKeys()
        self._drafting, self._head = drafting, head
        self._spot = drafting.spot if drafting else None
        self._awaited_s = awaited_s
        self._turns = Turns(env, self, agents or Agents(env, PLAIN))
        self._answer_ids = answer_ids or (lambda sample, turn: (0,) * turn.observation_tokens)
        # Requests that the engine has back later: they wait for an environment, or were aborted by
        # a load that lets them retry.
        self._away: set[int] = set()
        self._groups: dict[tuple[int, int, int], int] = {}  # numbers, for a drafter of siblings
        self._commands: list[host.Command] = []
        self._requests: dict[int, EngineRequest] = {}  # by number
        self._here: dict[int, EngineRequest] = {}  # by sample, the latest
        self._numbers = 0
        self._asked: dict[int, tuple[EngineRequest, simpy.Event]] = {}
        self._watched: dict[int, simpy.Event] = {}
        self._polls: dict[int, simpy.Event] = {}
        self._preemptions = 0  # as in the last poll
        self._loads: dict[int, _Load] = {}
        self._changes: dict[int, _Change] = {}
        self._busy_since_s: float | None = None
        self._busy_kind = "rollout"
        self._tokens_before = 0
        self._asked_version = 0
        self._heard_s = 0.0
        self._slowdown = 1.0
        # A lost engine is down, starting, or loading its weights.
        self._state: Literal["up", "down", "starting", "loading"] = "up"
        self._lost_since_s = 0.0
        self._planned = False  # the scenario injects the loss, and notifies the dispatcher
        self._back: list[simpy.Event] = []
        self._restarts = 0
        self.without_room = False  # nothing can run the engine that is to take the lost one's place
        env.listen(link.connection, self._hear, self._gone, self._awaits)
        env.check(self._look)
        if self._setup.model_free:
            self.draft("new_rollout", self._siblings_draft(0))

    @property
    def is_up(self) -> bool:
        """True if the engine runs with the weights that were last requested."""
        return self._state == "up"

    # Calls of a schedule.

    def submit(
        self,
        sample: Sample,
        partial: Rollout | None = None,
        max_tokens: int | None = None,
        cached: float = 0.0,
    ) -> simpy.Event:
        event, before = self._env.event(), partial or Rollout(sample, (), False)
        if self._state != "up":
            return event.succeed(before)
        response = self._responses[sample.uid]
        length = response.tokens if max_tokens is None else min(response.tokens, max_tokens)
        self._wake()
        if self._spot is not None and not self._requests:
            self._spot.serves(self.index, self._env.now)
        window = None
        if self._drafting is not None:
            self._drafting.begins(sample)
            window = self._drafting.budget(sample)
        request = EngineRequest(self._key(), response, event, before, length)
        self._requests[request.number] = self._here[sample.uid] = request
        had = tuple(request.token_ids)
        forced = self._forced(sample) if self._forced else None
        self._turns.begin_deadline(request)
        until_s = before.environment_until_s
        if waits := self._turns.wait(request, until_s, lambda: self._resume(request)):
            self._away.add(request.number)
        self._command(
            host.Begin(
                request.number,
                self._text(sample),
                self._prompt_ids(sample),
                had,
                length - len(had),
                forced,
                self._prompts.salt(sample),
                tuple(turn.end_tokens for turn in response.turns if turn.end_tokens < length),
                tuple(
                    (turn.end_tokens, self._answer_ids(sample, turn))
                    for turn in response.turns
                    if turn.end_tokens <= len(had)
                ),
                waits,
                window,
            )
        )
        return event

    def _text(self, sample: Sample) -> int:
        """Return what a sample's drafts come from, as its engine knows it: its prompt, or its group
        in this step alone."""
        if self._setup.kind != "siblings" and not self._setup.model_free:
            return sample.prompt_id
        return self._groups.setdefault(
            (sample.epoch, sample.step, sample.prompt_id), len(self._groups)
        )

    def abort(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        request = self._here.get(sample.uid)
        if request is None:
            return event.succeed()
        first, request.is_leaving = not request.is_leaving, True

        def ended(_: simpy.Event) -> None:
            # Only the engine knows whether its end or the abort came first.
            rollout = cast(Rollout, request.event.value)
            there = request.ended_by_itself or rollout.done or rollout.tokens == request.length
            event.succeed(rollout if first and not there else None)

        on_fire(request.event, ended)
        if first:
            self._command(host.Abort(request.number))
        return event

    def load_weights(
        self, version: int, running: LoadMode = "recompute", retry_s: float = 0.0
    ) -> simpy.Event:
        event = self._env.event()
        self._asked_version = self._prompts.version = version
        if self._state != "up":
            return event.succeed(WeightLoad(version, self._env.now, self._env.now))
        self._wake()
        self._load(version, running, event, retry_s)
        return event

    def when(self, sample: Sample, tokens: int) -> simpy.Event:
        event = self._env.event()
        request = self._here.get(sample.uid)
        if request is not None:
            key = self._key()
            self._watched[key] = event
            self._command(host.Watch(key, request.number, tokens))
        return event

    def progress(self, samples: Sequence[Sample]) -> simpy.Event:
        return gather(self._env, map(self._progress, samples))

    def _progress(self, sample: Sample) -> simpy.Event:
        event = self._env.event()
        request = self._here.get(sample.uid)
        if request is None:
            return event.succeed()
        key = self._key()
        self._asked[key] = request, event
        self._command(host.Ask(key, request.number))
        return event

    def load(self) -> simpy.Event:
        """Poll the engine. One that is lost holds and runs nothing."""
        event = self._env.event()
        if self._state != "up":
            return event.succeed(NO_LOAD)
        self._wake()
        key = self._key()
        self._polls[key] = event
        self._command(host.Poll(key))
        return event

    def draft_with(self, drafter: str | None) -> simpy.Event:
        event, self._setup = self._env.event(), self._drafters[drafter]
        if self._state != "up":
            return event.succeed()
        key = self._key()
        self._changes[key] = _Change(event, self._env.now, self._setup.loads)
        self._command(host.DraftCall("configure", (self._setup, self.index)))
        self._command(host.Ask(key, 0))  # of no request: answered when the drafter is there
        return event

    def lend(self) -> simpy.Event:
        raise InputError(
            f"{self.link.name}: a vLLM engine cannot lend its GPUs; set adapt_split_every to 0"
        )

    def draft(self, call: str, *arguments: Any) -> None:
        """Call the drafter of an engine that is up; `on_back` repeats the calls for a restarted
        one."""
        if self._state == "up":
            self._command(host.DraftCall(call, arguments))

    # Calls of `Turns`.

    @property
    def now_s(self) -> float:
        return self._env.now

    def command(self, command: Callable[[], object]) -> None:
        command()  # what it sends takes effect at the engine's next boundary

    def is_here(self, request: EngineRequest) -> bool:
        return self._requests.get(request.number) is request and not request.is_leaving

    def kill(self, request: EngineRequest, at_first_token: simpy.Event) -> None:
        key = self._key()
        self._watched[key] = at_first_token
        self._command(host.Kill(key, request.number))

    def _pause(self, request: EngineRequest, at_s: float) -> None:
        """End a turn; the next one begins when the environment has answered."""
        request.close_segment(self.index, self.policy_version, at_s)
        self._rest(request, at_s)
        turn = request.turn_at(request.rollout.tokens)
        assert turn is not None
        self._turns.answer(request, turn, at_s, partial(self._resume, request, turn))

    def _resume(self, request: EngineRequest, turn: Turn | None = None) -> None:
        """Let a request go on, after the answer to a turn if it called its tool here."""
        if self.is_here(request):
            self._wake()
            answer = () if turn is None else self._answer_ids(request.sample, turn)
            self._command(host.Resume(request.number, answer))

    # Faults that a scenario injects.

    def slow_down(self, factor: float) -> None:
        self._slowdown = factor
        self._command(host.SlowDown(factor))

    def fail(self) -> None:
        """Kill the engine's process; it stays down until `restore`, even if it was lost and
        restarting."""
        self._planned = True
        self._down()

    def restore(self) -> simpy.Event:
        """Start the engine again. The event fires with a `WeightLoad` when it has loaded the
        version last requested; with None if it was up."""
        event = self._env.event()
        if self._state == "up":
            return event.succeed()
        self._back.append(event)
        if self._state == "down":
            self._restart()
        return event

    def stop(self, time_s: float) -> None:
        """Close the spans and record unfinished requests: the run is over."""
        self._env.forget(self.link.connection)
        self._close_rollout_span(time_s)
        if self._state != "up":
            self._close_lost_span(time_s)
        for request in list(self._requests.values()):
            self._turns.stop(request, time_s)
            self._ended(request, done=False)

    # To the engine.

    def _key(self) -> int:
        self._numbers += 1
        return self._numbers

    def _wake(self) -> None:
        """Start the deadline of an engine that had no work."""
        if not self._requests.keys() - self._away and not self._loads:
            self._heard_s = self._env.wall_s()

    def _load(
        self, version: int, running: LoadMode, event: simpy.Event | None, retry_s: float = 0.0
    ) -> None:
        key, folder = self._key(), self._weights(version)
        if self._spot is not None and not self._requests:
            self._spot.occupied([self.index], self._env.now)
        before = [self.policy_version, *(load.version for load in self._loads.values())][-1]
        every, evaluate_s = self._evaluates
        if event is None or not every or version // every == before // every:
            evaluate_s = 0.0
        head = self._head.head(version) if self._head else ""
        siblings = self._siblings_draft(version)
        held_s = self._held_load_s + self.load_delay_s + evaluate_s
        self._loads[key] = _Load(version, event, held_s, running == "start_over", evaluate_s)
        awaited_s = self._awaited_s
        self._command(
            host.LoadWeights(
                key, version, folder, running, held_s, retry_s, awaited_s, head, siblings
            )
        )

    def _siblings_draft(self, version: int) -> bool:
        """Return whether siblings draft in place of a model under these weights."""
        if self._drafting is None or not self._setup.model_free:
            return False
        return self._drafting.drafts_from_siblings(version)

    def _is_idle(self) -> None:
        """Tell the spot trainer if the worker has nothing to serve."""
        if self._spot is not None and not self._requests:
            self._spot.idle(self.index, self._env.now)

    def _command(self, command: host.Command) -> None:
        """Queue a command: those of one instant are sent together, so that a batch does not begin
        with one request."""
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

    def _awaits(self) -> bool:
        """Return whether the engine has anything to report."""
        starting = self._state == "starting" and not self.without_room
        expected = self._requests or self._loads or self._asked or self._changes or self._polls
        return bool(expected or starting)

    def _hear(self, reports: Sequence[host.Report]) -> None:
        self._heard_s = self._env.wall_s()
        for report in reports:
            match report:
                case host.Begun(number, at_s):
                    request = self._requests[number]
                    request.started_s = self._time_s(at_s)
                    self._away.discard(number)
                    evaluates = request.sample.is_evaluation
                    self._open_rollout_span(
                        request.started_s, "evaluate" if evaluates else "rollout"
                    )
                case host.Paused(number, at_s):
                    self._pause(self._requests[number], self._time_s(at_s))
                case host.Gained():
                    self._gained(report)
                case host.Ended():
                    request = self._requests[report.number]
                    self._rest(request, self._time_s(report.at_s))
                    rollout = self._finished(request, report)
                    self._is_idle()
                    request.event.succeed(rollout)
                case host.Loaded():
                    self._loaded(report)
                case host.Reached():
                    self._answered(report)
                case host.Polled(key, load):
                    new, self._preemptions = load.preemptions - self._preemptions, load.preemptions
                    self._polls.pop(key).succeed(load._replace(preemptions=new))
                case host.Ready():
                    self._ready()
                case host.NoRoom(message):
                    if not self.without_room:
                        self._happened("no room", f"{message}; the others go on without it")
                    self.without_room = True
                case host.Failed(message, trace):
                    raise StoppedError(f"{self.link.name}: {message}") from RuntimeError(trace)
                case host.Alive():
                    self.without_room = False

    def _gained(self, report: host.Gained) -> None:
        request = self._requests[report.number]
        if report.first_s is not None and math.isnan(request.first_token_s):
            request.first_token_s = self._time_s(report.first_s)
        request.token_ids += report.token_ids
        request.until_s = self._time_s(report.until_s)
        self.generated_total += len(report.token_ids)

    def _loaded(self, report: host.Loaded) -> None:
        load = self._loads.pop(report.key)
        started_s, back_s = self._time_s(report.started_s), self._time_s(report.finished_s)
        finished_s = back_s - load.evaluate_s
        if load.event is None:
            self._has_weights_again(WeightLoad(load.version, started_s, finished_s))
            return
        for request in self._requests.values():
            request.close_segment(self.index, self.policy_version, started_s)
        self._away.update(report.aborted)
        for request in [self._requests[number] for number in report.aborted if load.starts_over]:
            self._recorder.started_over(request.sample, request.new_tokens)
            request.start_over()
        rolling = self._busy_since_s is not None and not report.aborted
        self._close_rollout_span(started_s)
        self.policy_version = load.version
        self._recorder.span(self.index, "load_weights", started_s, finished_s, load.version)
        if load.evaluate_s:
            self._recorder.span(self.index, "evaluate", finished_s, back_s, load.version)
        if rolling:
            self._open_rollout_span(back_s, self._busy_kind)
        self._is_idle()
        load.event.succeed(WeightLoad(load.version, started_s, finished_s))

    def _answered(self, report: host.Reached) -> None:
        if report.key in self._changes:
            change, there_s = self._changes.pop(report.key), self._time_s(report.at_s)
            if change.loads:
                self._recorder.span(
                    self.index, "load_drafter", change.asked_s, there_s, self.policy_version
                )
            change.event.succeed()
            return
        if report.key in self._watched:
            self._watched.pop(report.key).succeed()
            return
        request, event = self._asked.pop(report.key)
        request.drafts = report.drafts
        event.succeed(
            request.so_far(self.index, self.policy_version, done=False)
            if request.number in self._requests
            else None
        )

    # Bookkeeping.

    def _rest(self, request: EngineRequest, at_s: float) -> None:
        """Note that a request has left the engine, for now or for good."""
        self._away.add(request.number)
        if not self._requests.keys() - self._away:
            self._close_rollout_span(at_s)

    def _finished(self, request: EngineRequest, end: host.Ended) -> Rollout:
        """Return the rollout of a request that has left the engine for good. One that was cut at the
        end of a turn calls its tool."""
        request.drafts, request.ended_by_itself = end.drafts, end.whole
        at_s, by_stop = self._time_s(end.at_s), request.token_ids[-1:] == [self._stop_token]
        done = end.whole and (request.is_whole or by_stop)
        turn = request.turn_at(request.length) if end.whole and not done else None
        if end.killed:
            self._turns.killed(request, at_s)
        elif done and request.response.turns:
            self._turns.ended(request, at_s)
        elif turn is not None:
            request.close_segment(self.index, self.policy_version, at_s)
            self._turns.call_tool(request, turn, at_s, lambda: None)
        return self._ended(request, done or end.killed)

    def _ended(self, request: EngineRequest, done: bool) -> Rollout:
        del self._requests[request.number]
        self._away.discard(request.number)
        if self._here.get(request.sample.uid) is request:
            del self._here[request.sample.uid]
        rollout = request.so_far(self.index, self.policy_version, done)
        self._recorder.request_ended(rollout, request.new_tokens)
        if done and self.on_done is not None:
            self.on_done(rollout)
        if self._head is not None:
            self._head.finished(rollout)
        if self._drafting is not None:
            self._drafting.observe(rollout, self._env.now)
        return rollout

    def _open_rollout_span(self, at_s: float, kind: str) -> None:
        """Begin a span of generation, if there is none: of kind "evaluate" until a request of
        training enters."""
        if self._busy_kind == "evaluate" != kind:
            self._close_rollout_span(at_s)
        if self._busy_since_s is None:
            self._busy_since_s, self._busy_kind = at_s, kind
            self._tokens_before = self.generated_total

    def _close_rollout_span(self, at_s: float) -> None:
        if self._busy_since_s is not None:
            tokens = self.generated_total - self._tokens_before
            self._recorder.span(
                self.index, self._busy_kind, self._busy_since_s, at_s, self.policy_version, tokens
            )
            self._busy_since_s = None

    def _close_lost_span(self, at_s: float) -> None:
        self._recorder.span(self.index, "lost", self._lost_since_s, at_s, self.policy_version)

    # Losses.

    def _look(self) -> None:
        """Treat an engine that has work and sends no report as hung."""
        silent_s = self._env.wall_s() - self._heard_s
        if self._state == "starting" and not self.without_room:
            what, deadline_s = "it was not up", self._start_deadline_s
        elif self._loads:
            what, deadline_s = "no weights were loaded", self._start_deadline_s
            deadline_s += sum(load.held_s for load in self._loads.values())
        elif self._requests.keys() - self._away or self._polls:
            what, deadline_s = "no step ended", self._deadline_s * self._slowdown
        else:
            return
        if silent_s > deadline_s:
            self._lost("hung", f"{what} for {silent_s:.1f} s (deadline {deadline_s:g} s); killed")

    def _gone(self) -> None:
        self._lost("died", self.link.death())

    def _lost(self, kind: str, what: str) -> None:
        """Restart an engine after a loss that was not injected; raise `StoppedError` after too many
        losses."""
        message = self._happened(kind, what)
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise StoppedError(f"{message}; it was lost {self._restarts} times; see its log")
        if self._state == "up":
            self._planned = False
            assert self.dispatcher is not None
            self.dispatcher.retire(self.index, lost=True)
        self._down()
        self._restart()

    def _happened(self, kind: str, what: str) -> str:
        """Record what became of the engine, and return the line on it."""
        message = f"{self.link.name}: {what}"
        self._tell({"kind": kind, "worker": self.index, "at_s": self._env.now, "message": message})
        return message

    def _down(self) -> None:
        """End the process, if it runs, and all requests with their reported tokens; waiting weight
        loads fire."""
        self._env.forget(self.link.connection)
        self.link.kill()
        if self._state == "up":
            self._lost_since_s = self._env.now
            self._close_rollout_span(self._env.now)
        self._state = "down"
        if self._spot is not None:
            self._spot.occupied([self.index], self._env.now)
        for request in list(self._requests.values()):
            request.event.succeed(self._ended(request, done=False))
        for load in self._loads.values():
            if load.event is not None:
                load.event.succeed(WeightLoad(load.version, self._env.now, self._env.now))
        for event in [
            *(event for _, event in self._asked.values()),
            *(change.event for change in self._changes.values()),
        ]:
            event.succeed()
        for event in self._polls.values():
            event.succeed(NO_LOAD)
        self._loads, self._asked, self._watched, self._changes = {}, {}, {}, {}
        self._polls, self._preemptions = {}, 0

    def _restart(self) -> None:
        self._state, self.without_room = "starting", False
        self._heard_s = self._env.wall_s()
        self.link = self._start()
        self._env.listen(self.link.connection, self._hear, self._gone, self._awaits)

    def _ready(self) -> None:
        self._state = "loading"
        ahead = [each.ahead.process for each in self._drafters.values() if each.ahead is not None]
        if ahead:  # as after a reset: none starts when the worker gets it
            self._command(host.DraftCall("start_drafters", (ahead,)))
        if self._setup.kind != "none":
            self._command(host.DraftCall("configure", (self._setup, self.index)))
        self._load(self._asked_version, "recompute", None)

    def _has_weights_again(self, load: WeightLoad) -> None:
        if load.version != self._asked_version:  # requested meanwhile
            self._load(self._asked_version, "recompute", None)
            return
        self.policy_version = load.version
        self._state = "up"
        self._close_lost_span(self._env.now)
        self._is_idle()
        if self._slowdown > 1.0:
            self._command(host.SlowDown(self._slowdown))
        if self.on_back is not None:
            self.on_back(self)
        waiting, self._back = self._back, []
        for event in waiting:
            event.succeed(load)
        if not self._planned:
            assert self.dispatcher is not None
            self.dispatcher.activate(self.index, lost=True)
