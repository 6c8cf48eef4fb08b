"""A request at a worker: its event, its rollout so far, its turns, and the token counts that are
watched.

Invariant: it knows the response from the trace, but what others see of it (`rollout`) has generated
tokens only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import simpy

from simrl.engine.state import PAUSE, WATCH
from simrl.runtime.rollout import Rollout
from simrl.trace.trace import Response, Sample, Turn


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """A sample at a worker, from `submit` to its end there.

    `rollout` is its response up to the last closed segment, at first the one of other workers, with
    `tokens_before` tokens. The request ends at `length` tokens: the response's end, or earlier.
    `slot` is its place in the engine; None while it waits for its KV cache or its environment. The
    open segment began at `started_s`. `prefill` fires when a prefill worker has computed its
    context; its KV cache is then on its way. `ends`: it ends with that; whether its response is
    then done, and what fires."""

    event: simpy.Event
    response: Response
    rollout: Rollout
    tokens_before: int
    length: int
    cached: float
    started_s: float = 0.0
    slot: int | None = None
    prefill: simpy.Event | None = None
    ends: tuple[bool, tuple[simpy.Event, ...]] | None = None
    watches: list[tuple[int, simpy.Event]] = field(default_factory=list)
    _turn: int = 0  # index of the first turn that may not have ended

    @property
    def sample(self) -> Sample:
        return self.rollout.sample

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV cache is fetched when the request begins: the share `cached` of all known
        tokens but the last generated one and the environment's answer to it."""
        rollout, tokens = self.rollout, self.rollout.tokens
        if not self.cached or not tokens:
            return 0
        turn = self.turn_at(tokens)
        unseen = 1 if turn is None else 1 + turn.observation_tokens
        return int(
            self.cached * (self.sample.prompt_tokens + rollout.observation_tokens + tokens - unseen)
        )

    def start_over(self) -> None:
        """Lose all tokens, and every answer of the environment."""
        self.rollout = self.rollout._replace(
            segments=(), first_token_s=math.nan, carried_tokens=0, observation_tokens=0
        )
        self.tokens_before = self._turn = 0

    def turn_at(self, tokens: int) -> Turn | None:
        """Return the turn that the environment answers when the response has `tokens`."""
        turns = self.response.turns
        if self._turn < len(turns) and turns[self._turn].end_tokens == tokens:
            return turns[self._turn]
        return next((turn for turn in turns if turn.end_tokens == tokens), None)

    def end_turn(self, turn: Turn, now_s: float) -> None:
        """End a turn now; the environment answers after its seconds."""
        self.rollout = self.rollout._replace(
            observation_tokens=self.rollout.observation_tokens + turn.observation_tokens,
            environment_until_s=now_s + turn.environment_s,
        )

    def next_stop(self, tokens: int) -> tuple[int, int] | None:
        """Return the token at which the engine stops next, and the kind of stop: a turn ends or a
        watched count is reached. None if neither is ahead."""
        turns, stop = self.response.turns, None
        while self._turn < len(turns) and turns[self._turn].end_tokens <= tokens:
            self._turn += 1
        if self._turn < len(turns) and turns[self._turn].end_tokens < self.length:
            stop = turns[self._turn].end_tokens, PAUSE
        if not self.watches:
            return stop
        ahead = [(watched, WATCH) for watched, _ in self.watches if tokens < watched < self.length]
        return min(ahead if stop is None else [*ahead, stop], default=None)

    def take_watches(self, tokens: int) -> list[simpy.Event]:
        """Remove the watches that are reached with `tokens`, and return their events."""
        reached = [event for watched, event in self.watches if watched <= tokens]
        self.watches = [watch for watch in self.watches if watch[0] > tokens]
        return reached
