"""A request at a worker: its event, the closed segments of its response, its turns, what is watched in it.

Invariant: it knows the response from the trace, but what others see of it (`so_far`) has the tokens that are generated only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from simrl.engine.requests import PAUSE, WATCH
from simrl.runtime.rollout import Rollout
from simrl.trace.trace import Response, Sample, Turn


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """A sample at a worker, from `submit` to its end there. `so_far` is its rollout up to the last closed segment, first with
    `tokens_before` from other workers. `length` is where it ends: the response's end, or an earlier token. `slot` is its place
    in the engine; None while its KV cache or its environment is awaited."""

    event: simpy.Event
    response: Response
    so_far: Rollout
    tokens_before: int
    length: int
    cached: bool
    started_s: float = 0.0
    slot: int | None = None
    watches: list[tuple[int, simpy.Event]] = field(default_factory=list)

    @property
    def sample(self) -> Sample:
        return self.so_far.sample

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV cache the pool has when the request begins: all but the last generated one and
        the environment's answer to it."""
        tokens = self.so_far.tokens
        if not self.cached or not tokens:
            return 0
        turn = self.turn_at(tokens)
        unseen = 1 if turn is None else 1 + turn.observation_tokens
        return self.sample.prompt_tokens + self.so_far.observation_tokens + tokens - unseen

    def turn_at(self, tokens: int) -> Turn | None:
        """Return the turn that the environment answers when the response has `tokens`."""
        return next((turn for turn in self.response.turns if turn.end_tokens == tokens), None)

    def end_turn(self, turn: Turn, now_s: float) -> None:
        """End a turn now: the environment's answer is there when its time is over."""
        self.so_far = self.so_far._replace(
            observation_tokens=self.so_far.observation_tokens + turn.observation_tokens,
            environment_until_s=now_s + turn.environment_s,
        )

    def next_stop(self, tokens: int) -> tuple[int, int] | None:
        """Return the next token at which the engine stops, and why: a turn ends, or a watch holds. None if there is none."""
        ends = [(turn.end_tokens, PAUSE) for turn in self.response.turns if tokens < turn.end_tokens < self.length]
        ahead = [(watched, WATCH) for watched, _ in self.watches if tokens < watched < self.length] + ends[:1]
        return min(ahead, default=None)

    def take_watches(self, tokens: int) -> list[simpy.Event]:
        """Remove the watches that hold with `tokens`, and return their events."""
        held = [event for watched, event in self.watches if watched <= tokens]
        self.watches = [watch for watch in self.watches if watch[0] > tokens]
        return held
