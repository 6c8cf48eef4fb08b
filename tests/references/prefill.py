"""The life of a request with prefill and decode pools, slowly, as a plain list of events: what `simrl.runtime.pauses` and
`simrl.runtime.simulated_worker` do, for engines with room for all.

A pass takes a second, computes the context of every request that it takes up, and gives every request a token. What reaches a
busy worker at an instant is in the first pass that begins after it; an idle worker begins at the end of the instant. A request:

1. is at the prefill worker with the fewest requests (of equals the first) for one token, in the pass that computes its context;
2. then, unless its turn or its response ends with that token, all of its KV cache but the last token's crosses the link of the
   prefill worker and the link of its decode worker, when both have sent what came before;
3. decodes to the end of its turn, whose KV cache is then gone;
4. when the tool has answered, is back at 1, its context longer by what the tool has said.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

LAST = 1  # at the end of an instant


class Turn(NamedTuple):
    tokens: int  # that the model generates
    tool_s: float = 0.0
    observation: int = 0


@dataclass
class Request:
    at_s: float
    decode: int  # its decode worker
    prompt: int
    turns: Sequence[Turn]
    turn: int = 0
    made: int = 0  # of its turn
    context: int = 0
    ended_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)  # of each turn


@dataclass
class Worker:
    number: int
    running: list[Request] = field(default_factory=list)
    coming: list[tuple[float, Request]] = field(default_factory=list)
    link_free_s: float = 0.0
    requests: int = 0


class Reference:
    """Prefill workers, decode workers, and a clock."""

    def __init__(self, prefill: int, decode: int, s_per_token: float) -> None:
        self.prefill = [Worker(i) for i in range(prefill)]
        self.decode = [Worker(i) for i in range(decode)]
        self.s_per_token = s_per_token
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._number = count()

    def run(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.context = request.prompt
            self.at(request.at_s, lambda request=request: self.prefilled_next(request))
        while self._events:
            self.now_s, _, _, happen = heapq.heappop(self._events)
            happen()

    def at(self, time_s: float, happen: Callable[[], None], order: int = 0) -> None:
        heapq.heappush(self._events, (time_s, order, next(self._number), happen))

    def prefilled_next(self, request: Request) -> None:
        worker = min(self.prefill, key=lambda worker: (worker.requests, worker.number))
        worker.requests += 1
        self.comes(worker, request)

    def comes(self, worker: Worker, request: Request) -> None:
        worker.coming.append((self.now_s, request))
        self.at(self.now_s, lambda: self.begins(worker), LAST)

    def begins(self, worker: Worker) -> None:
        """Begin a pass of an idle worker."""
        if not worker.running and worker.coming:
            self.takes_up(worker, [request for _, request in worker.coming])

    def takes_up(self, worker: Worker, requests: list[Request]) -> None:
        worker.running += requests
        worker.coming = [(at_s, r) for at_s, r in worker.coming if r not in requests]
        self.at(self.now_s + 1.0, lambda: self.pass_ends(worker))

    def pass_ends(self, worker: Worker) -> None:
        running, worker.running = worker.running, []
        for request in running:
            request.made += 1
            request.context += 1
            turn = request.turns[request.turn]
            is_prefill = any(worker is other for other in self.prefill)
            if is_prefill:
                worker.requests -= 1
                request.first_token_s.append(self.now_s)
            if request.made == turn.tokens:
                self.turn_ends(request, turn)
            elif is_prefill:
                self.sent(worker, request)
            else:
                worker.running.append(request)
        earlier = [request for at_s, request in worker.coming if at_s < self.now_s]
        if worker.running or earlier:
            self.takes_up(worker, earlier)

    def turn_ends(self, request: Request, turn: Turn) -> None:
        request.turn, request.made = request.turn + 1, 0
        if request.turn == len(request.turns):
            request.ended_s = self.now_s
            return
        request.context += turn.observation
        self.at(self.now_s + turn.tool_s, lambda: self.prefilled_next(request))

    def sent(self, source: Worker, request: Request) -> None:
        target = self.decode[request.decode]
        begins_s = max(self.now_s, source.link_free_s, target.link_free_s)
        ends_s = begins_s + (request.context - 1) * self.s_per_token
        source.link_free_s = target.link_free_s = ends_s
        self.at(ends_s, lambda: self.comes(target, request))
