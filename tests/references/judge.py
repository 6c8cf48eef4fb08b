"""When a judge has scored responses, request by request: one pass at a time, for engines with room for all that comes.

A request joins at the first boundary strictly after it came, or at once where the engine is idle at that instant. Its first
pass computes its context and yields a token, each further pass yields one; it leaves with its last token. It goes to the engine
with the fewest requests, the first of equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class JudgeEngine:
    pass_s: float
    boundary_s: float = 0.0  # where its present pass began
    began_s: float = -1.0  # when it was last idle and got a request
    running: dict[int, int] = field(default_factory=dict)  # tokens to come, by request
    waiting: list[tuple[float, int, int]] = field(default_factory=list)  # came, request, tokens

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def submit(self, came_s: float, request: int, tokens: int) -> None:
        if not self.requests:
            self.boundary_s = self.began_s = came_s
        if came_s == self.began_s:
            self.running[request] = tokens
        else:
            self.waiting.append((came_s, request, tokens))

    def advance(self, until_s: float, ends: dict[int, float]) -> None:
        """Do the passes that end by `until_s`."""
        while self.running and self.boundary_s + self.pass_s <= until_s:
            self.boundary_s += self.pass_s
            for request in list(self.running):
                self.running[request] -= 1
                if not self.running[request]:
                    del self.running[request]
                    ends[request] = self.boundary_s
            self.running |= {
                request: n for came_s, request, n in self.waiting if came_s < self.boundary_s
            }
            self.waiting = [entry for entry in self.waiting if entry[0] >= self.boundary_s]


def standalone(ended: Sequence[tuple[float, int]], engines: int, pass_s: float) -> dict[int, float]:
    """Return when each request is answered, by its place in `ended`: (the end of its response, the tokens of the judge)."""
    pool, ends = [JudgeEngine(pass_s) for _ in range(engines)], dict[int, float]()
    for request, (came_s, tokens) in sorted(enumerate(ended), key=lambda entry: entry[1][0]):
        for engine in pool:
            engine.advance(came_s, ends)
        min(pool, key=lambda engine: engine.requests).submit(came_s, request, tokens)
    for engine in pool:
        engine.advance(float("inf"), ends)
    return ends


def colocated(
    ended: Sequence[tuple[float, int]], engines: int, pass_s: float, swap_s: float
) -> float:
    """Return when the judge's turn is over: the swap, all requests, which begin together, and the swap back."""
    begins_s = max(came_s for came_s, _ in ended) + swap_s
    ends = standalone([(begins_s, tokens) for _, tokens in ended], engines, pass_s)
    return max(ends.values()) + swap_s
