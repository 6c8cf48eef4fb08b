"""Turns: the requests of one worker between two turns, and their deadlines, on either clock. Pauses:
the same of a simulated worker, which also has their KV cache, and requests at a prefill worker.

Invariant: the next turn begins when the tool call is over and, with offloading, the KV cache is
back. If the call ends while the cache is still copied out, the turn begins with the cache that is
still on the GPU.

With prefill and decode pools, a request stays at its decode worker from its start to its end.
Whenever its context has to be computed (it begins, a tool has answered, an update has interrupted
it), it is a request at a prefill worker for one more token, whose KV cache then crosses the links of
both workers. A link sends one cache after the other. The decode worker admits the request when it
has blocks for that cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import simpy

from simrl.runtime.agents import Agents, HostCopy, HostMemory
from simrl.runtime.events import call_at, on_fire
from simrl.runtime.requests import WorkerRequest
from simrl.runtime.rollout import Rollout
from simrl.trace.trace import Turn

if TYPE_CHECKING:
    from simrl.runtime.simulated_worker import SimulatedWorker


class TurnWorker(Protocol):
    """A worker as `Turns` needs it."""

    @property
    def now_s(self) -> float:
        """The time of the boundary at which it stands; the clock's where only its engine knows
        that."""

    def command(self, command: Callable[[], object]) -> None:
        """Call at the boundary where this instant's commands take effect, or let what is called
        send commands that do."""

    def is_here(self, request: Any) -> bool:
        """Return whether a request of this worker has not left, and is not about to."""

    def kill(self, request: Any, at_first_token: simpy.Event) -> None:
        """End the trajectory of a request as it is, and call `Turns.killed`. If it has no token, let
        `at_first_token` fire when it has one."""


class Turns:
    """Tool calls and deadlines of a worker's requests."""

    def __init__(self, env: simpy.Environment, worker: TurnWorker, agents: Agents) -> None:
        self._env = env
        self._worker = worker
        self._agents = agents

    def answer(
        self, request: WorkerRequest, turn: Turn, now_s: float, resume: Callable[[], object]
    ) -> None:
        """End a turn now, and command `resume` when the environment has answered."""
        self.call_tool(request, turn, now_s, partial(self._answered, request, resume))

    def _answered(self, request: WorkerRequest, resume: Callable[[], object]) -> None:
        self._agents.on_turn(request.rollout, False)
        self._worker.command(resume)

    def call_tool(
        self, request: WorkerRequest, turn: Turn, now_s: float, over: Callable[[], None]
    ) -> None:
        """Let the environment answer a turn, and then call `over`."""
        self._agents.on_turn(request.rollout, True)
        request.end_turn(turn, now_s)
        until_s = request.rollout.environment_until_s
        if self._agents.tools is None:
            self._agents.figures.in_tools_s += turn.environment_s
            call_at(self._env, until_s, over)
        else:
            begin = partial(
                self._agents.tools.begin, request.sample.uid, until_s, turn.environment_s, over
            )
            call_at(self._env, now_s, begin)

    def wait(self, request: WorkerRequest, ready_s: float, enter: Callable[[], None]) -> bool:
        """Call `enter` at `ready_s`, or later if a tool that the request called at another worker
        still runs. Return False if there is nothing to wait for."""

        def wait() -> None:
            call_at(self._env, ready_s, enter)

        tools = self._agents.tools
        if tools is not None and tools.follow(
            request.sample.uid, request.rollout.environment_until_s, wait
        ):
            return True
        if ready_s > self._worker.now_s:
            wait()
            return True
        return False

    def ended(self, request: WorkerRequest, now_s: float) -> None:
        """End the tool calls of a trajectory that has ended; its copies may still have some."""
        if self._agents.tools is not None:
            call_at(self._env, now_s, partial(self._agents.tools.kill, request.sample.uid))

    def stop(self, request: WorkerRequest, now_s: float) -> None:
        """Count the tool call of a request up to now only."""
        if self._agents.tools is None:
            self._agents.figures.in_tools_s -= max(request.rollout.environment_until_s - now_s, 0.0)

    # Deadlines.

    def begin_deadline(self, request: WorkerRequest) -> None:
        """Have a request that begins now killed at its trajectory's deadline."""
        if self._agents.rules.deadline_s < math.inf:
            due_s = self._agents.due_s(request.sample.uid, self._worker.now_s)
            call_at(self._env, due_s, partial(self._due, request))

    def _due(self, request: WorkerRequest) -> None:
        if self._worker.is_here(request):
            at_first_token = self._env.event()
            on_fire(at_first_token, lambda _: self._due(request))
            self._worker.command(partial(self._worker.kill, request, at_first_token))

    def killed(self, request: WorkerRequest, now_s: float) -> None:
        """Note that a trajectory has been ended by its deadline."""
        self._agents.figures.killed += 1
        self.ended(request, now_s)
        self.stop(request, now_s)


class Pauses(Turns):
    """Tool calls, deadlines and copies of KV cache of a simulated worker's requests."""

    _worker: SimulatedWorker

    def __init__(self, env: simpy.Environment, worker: SimulatedWorker, agents: Agents) -> None:
        super().__init__(env, worker, agents)
        self._kv = agents.rules.kv
        self.host = HostMemory(agents.rules, agents.figures)

    def pause(self, request: WorkerRequest, slot: int, now_s: float) -> None:
        """End a turn at the engine's boundary."""
        turn = request.turn_at(request.rollout.tokens)
        assert turn is not None
        if self._kv == "offload":
            self._offload(request, slot, now_s)
        here = self._fetch if self._kv == "offload" else partial(self._resume, copy=None, blocks=0)
        go_on = here if self._agents.pool is None else self.prefill
        resume = partial(go_on, request, slot, turn.observation_tokens)
        self.answer(request, turn, now_s, resume)

    def _offload(self, request: WorkerRequest, slot: int, now_s: float) -> None:
        engine = self._worker.engine
        blocks = engine.computed_tokens(slot) // engine.limits.block_size
        until_s = self.host.store(request.sample.uid, blocks, now_s)
        if until_s <= now_s:
            engine.drop_paused(slot)
            return
        engine.pin_paused(slot, until_s)
        unpin = partial(self._worker.engine.unpin_paused, slot, until_s)
        call_at(self._env, until_s, partial(self._worker.command, unpin))

    def _fetch(self, request: WorkerRequest, slot: int, observation_tokens: int) -> None:
        """Copy back the blocks that the engine does not find itself, and resume."""
        if not self._worker.is_here(request):
            return  # it was aborted meanwhile
        uid, now_s, engine = request.sample.uid, self._env.now, self._worker.engine
        resume = partial(self._resume, request, slot, observation_tokens)
        on_gpu = engine.found_tokens(slot) // engine.limits.block_size
        copy, blocks, ready_s = self.host.load(uid, on_gpu, now_s)
        if ready_s > now_s:
            call_at(self._env, ready_s, lambda: self._worker.command(partial(resume, copy, blocks)))
        else:
            resume(copy, blocks)

    def _resume(
        self,
        request: WorkerRequest,
        slot: int,
        observation_tokens: int,
        copy: HostCopy | None,
        blocks: int,
    ) -> None:
        if not self._worker.is_here(request):
            return
        tokens = blocks * self._worker.engine.limits.block_size
        if copy is not None and not self.host.has(request.sample.uid, copy):
            tokens = 0  # a copy that old weights computed
        self._worker.engine.resume(slot, observation_tokens, tokens)
        self._worker.decode(request, slot)

    # Prefill elsewhere.

    def prefill(self, request: WorkerRequest, *_: int) -> None:
        """Let the context of a request be computed by a prefill worker."""
        if self._worker.is_here(request):
            self._worker.take_out(request)
            before = request.rollout
            [end] = self._agents.pool.submit([before.sample], [before], before.tokens + 1)
            request.prefill = end
            on_fire(end, lambda end: self._send(request, end.value))

    def _send(self, request: WorkerRequest, rollout: Rollout) -> None:
        """Send the KV cache of what was prefilled, unless its request or its turn ends."""
        ready_s, tokens, agents = self._env.now, rollout.tokens, self._agents
        if tokens < request.length and not request.ends and not request.turn_at(tokens):
            both = rollout.segments[-1].worker, self._worker.lane
            context = request.sample.prompt_tokens + rollout.observation_tokens + tokens - 1
            free_s = max(ready_s, *(agents.links.get(lane, 0.0) for lane in both))
            ready_s = free_s + context * agents.kv_s_per_token
            agents.links.update(dict.fromkeys(both, ready_s))
        arrive = partial(self._worker.prefilled, request, rollout)
        call_at(self._env, ready_s, partial(self._worker.command, arrive))

    def ends(self, request: WorkerRequest, done: bool, *events: simpy.Event) -> bool:
        """End a request when its prefill has ended, which is soon. Return False for a request
        without one."""
        if request.prefill is None:
            return False
        if not request.prefill.triggered:
            self._agents.pool.withdraw([request.sample])
        was_done, others = request.ends or (False, ())
        request.ends = was_done or done, (*others, *events)
        return True
