"""Prefill: the requests of one decode worker that are at a prefill worker, or whose KV cache is on
its way.

Invariant: a request stays at its decode worker from its start to its end. Whenever its context has
to be computed (it begins, a tool has answered, an update has interrupted it), it is a request at a
prefill worker for one more token. Its KV cache then crosses the links of both workers: a link sends
one cache after the other. The decode worker admits it when it has blocks for that cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import simpy

from simrl.runtime.events import call_at, on_fire
from simrl.runtime.requests import WorkerRequest
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample

if TYPE_CHECKING:
    from simrl.runtime.simulated_worker import SimulatedWorker


class Pool(Protocol):
    """The dispatcher of the prefill workers, as a decode worker needs it."""

    def submit(
        self, samples: Sequence[Sample], partials: Sequence[Rollout | None], max_tokens: int
    ) -> list[simpy.Event]: ...

    def withdraw(self, samples: Sequence[Sample]) -> simpy.Event: ...


class Prefill:
    """The way of a decode worker's requests through the prefill workers of `pool`. `links` has for
    each lane the time at which its link has sent all; a token's KV takes `s_per_token`."""

    def __init__(
        self, worker: SimulatedWorker, pool: Pool, links: dict[int, float], s_per_token: float
    ) -> None:
        self._worker, self._pool, self._links, self._s = worker, pool, links, s_per_token
        self._under_way: dict[WorkerRequest, simpy.Event] = {}

    def begin(self, request: WorkerRequest) -> None:
        """Let a request's context be computed."""
        if self._worker.is_here(request):
            rollout = request.rollout
            [end] = self._pool.submit([rollout.sample], [rollout], rollout.tokens + 1)
            self._under_way[request] = end
            on_fire(end, lambda end: self._send(request, end.value))

    def _send(self, request: WorkerRequest, rollout: Rollout) -> None:
        """Send the KV cache of what was prefilled, unless its request or its turn ends."""
        env, tokens = self._worker.env, rollout.tokens
        ready_s = env.now
        if tokens < request.length and not request.ends and not request.turn_at(tokens):
            both = rollout.segments[-1].worker, self._worker.lane
            context = request.sample.prompt_tokens + rollout.observation_tokens + tokens - 1
            ready_s = max(ready_s, *(self._links.get(lane, 0.0) for lane in both))
            ready_s += context * self._s
            self._links.update(dict.fromkeys(both, ready_s))
        arrive = partial(self._arrive, request, rollout)
        call_at(env, ready_s, lambda: self._worker.command(arrive))

    def _arrive(self, request: WorkerRequest, rollout: Rollout) -> None:
        del self._under_way[request]
        self._worker.prefilled(request, rollout, self)

    def ends(self, request: WorkerRequest, done: bool, *events: simpy.Event) -> bool:
        """End a request when its prefill has ended, which is soon. Return False for a request that
        has none under way."""
        if (end := self._under_way.get(request)) is None:
            return False
        if not end.triggered:
            self._pool.withdraw([request.sample])
        was_done, others = request.ends or (False, ())
        request.ends = was_done or done, (*others, *events)
        return True
