"""Pauses: the requests of one worker between the end of a turn and the begin of the next.

Invariant: a turn goes on when the tool call is over and, with offloading, the KV cache is back. A tool call that is over while
the cache is still copied out goes on with the cache where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import simpy

from simrl.engine.engine import Engine
from simrl.runtime.agents import Agents, HostCopy, HostMemory
from simrl.runtime.events import call_at, on_fire
from simrl.runtime.requests import WorkerRequest
from simrl.trace.trace import Turn


class Turning(Protocol):
    """A worker whose requests have turns."""

    engine: Engine

    def command(self, command: Callable[[], object]) -> None: ...
    def is_here(self, request: WorkerRequest) -> bool: ...
    def has(self, slot: int, request: WorkerRequest) -> bool: ...
    def decode(self, request: WorkerRequest, slot: int) -> None: ...
    def tokens_of(self, request: WorkerRequest) -> int: ...
    def watch(self, request: WorkerRequest, tokens: int, event: simpy.Event) -> None: ...
    def finish_early(self, request: WorkerRequest, done: bool) -> None: ...


class Pauses:
    """What happens between turns: tool calls, copies of KV cache and deadlines of a worker's requests."""

    def __init__(self, env: simpy.Environment, worker: Turning, agents: Agents) -> None:
        self._env = env
        self._worker = worker
        self._agents = agents
        self._kv = agents.rules.kv
        self._host = HostMemory(agents.rules, agents.figures)

    def pause(self, request: WorkerRequest, slot: int, now_s: float) -> None:
        """End a turn at the engine's boundary."""
        turn = request.turn_at(request.tokens)
        assert turn is not None
        if self._kv == "offload":
            self._offload(request, slot, now_s)
        self.call_tool(request, turn, now_s, partial(self._tool_over, request, slot, turn.observation_tokens))

    def call_tool(self, request: WorkerRequest, turn: Turn, now_s: float, over: Callable[[], None]) -> None:
        """Let the environment answer a turn, and then call `over`."""
        request.end_turn(turn, now_s)
        if self._agents.tools is None:
            self._agents.figures.in_tools_s += turn.environment_s
            call_at(self._env, request.environment_until_s, over)
        else:
            about = request.sample.uid, request.environment_until_s, turn.environment_s
            call_at(self._env, now_s, partial(self._agents.tools.begin, *about, over))

    def wait(self, request: WorkerRequest, ready_s: float, enter: Callable[[], None]) -> bool:
        """Call `enter` at `ready_s`, or later if the tool that a request called elsewhere still runs. Return False if there is
        nothing to wait for."""

        def wait() -> None:
            call_at(self._env, ready_s, enter)

        tools = self._agents.tools
        if tools is not None and tools.follow(request.sample.uid, request.environment_until_s, wait):
            return True
        if ready_s > self._worker.engine.now_s:
            wait()
            return True
        return False

    def ended(self, request: WorkerRequest, now_s: float) -> None:
        """End the tool calls of a trajectory that has ended: copies of it may have some."""
        if self._agents.tools is not None:
            call_at(self._env, now_s, partial(self._agents.tools.kill, request.sample.uid))

    def forget(self) -> None:
        """Forget what is in host memory."""
        self._host.clear()

    def _offload(self, request: WorkerRequest, slot: int, now_s: float) -> None:
        engine = self._worker.engine
        blocks = engine.computed_tokens(slot) // engine.limits.block_size
        until_s = self._host.store(request.sample.uid, blocks, now_s)
        if until_s <= now_s:
            engine.drop_paused(slot)
            return
        engine.pin_paused(slot, until_s)
        call_at(
            self._env, until_s, lambda: self._worker.command(partial(self._worker.engine.unpin_paused, slot, until_s))
        )

    def _tool_over(self, request: WorkerRequest, slot: int, observation_tokens: int) -> None:
        """Go on, with the KV cache where it is, or once it is copied back."""
        go_on = self._fetch if self._kv == "offload" else partial(self._resume, copy=None, blocks=0)
        self._worker.command(partial(go_on, request, slot, observation_tokens))

    def _fetch(self, request: WorkerRequest, slot: int, observation_tokens: int) -> None:
        """Copy back what the engine does not find itself, and go on."""
        if not self._worker.has(slot, request):
            return  # it was aborted meanwhile
        uid, now_s, engine = request.sample.uid, self._env.now, self._worker.engine
        resume = partial(self._resume, request, slot, observation_tokens)
        there = engine.found_tokens(slot) // engine.limits.block_size
        loaded = None if self._host.copying(uid, now_s) else self._host.load(uid, there, now_s)
        copy, blocks, ready_s = loaded or (None, 0, now_s)
        if ready_s > now_s:
            call_at(self._env, ready_s, lambda: self._worker.command(partial(resume, copy, blocks)))
        else:
            resume(copy, blocks)

    def _resume(
        self, request: WorkerRequest, slot: int, observation_tokens: int, copy: HostCopy | None, blocks: int
    ) -> None:
        if not self._worker.has(slot, request):
            return
        tokens = blocks * self._worker.engine.limits.block_size
        if copy is not None and not self._host.has(request.sample.uid, copy):
            tokens = 0  # of weights that are gone
        self._worker.engine.resume(slot, observation_tokens, tokens)
        self._worker.decode(request, slot)

    def stop(self, request: WorkerRequest, now_s: float) -> None:
        """Count what a tool call of a request has taken until now, and no more."""
        if self._agents.tools is None:
            self._agents.figures.in_tools_s -= max(request.environment_until_s - now_s, 0.0)

    # Deadlines.

    def begin_deadline(self, request: WorkerRequest) -> None:
        """Let a request that begins be killed at its trajectory's deadline."""
        if self._agents.rules.deadline_s < math.inf:
            due_s = self._agents.due_s(request.sample.uid, self._worker.engine.now_s)
            call_at(self._env, due_s, partial(self._due, request))

    def _due(self, request: WorkerRequest) -> None:
        if self._worker.is_here(request):
            self._worker.command(partial(self._kill, request))

    def _kill(self, request: WorkerRequest) -> None:
        """End a trajectory as it is; with its first token, if it has none."""
        if not self._worker.is_here(request):
            return
        if self._worker.tokens_of(request) == 0:
            event = self._env.event()
            on_fire(event, lambda _: self._due(request))
            self._worker.watch(request, 1, event)
            return
        self._agents.figures.killed += 1
        now_s = self._worker.engine.now_s
        self.ended(request, now_s)
        self.stop(request, now_s)
        self._worker.finish_early(request, True)
