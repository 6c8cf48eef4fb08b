"""A request at a worker: its event, the closed segments of its response, its turns, what is watched in it.

Invariant: it knows the response from the trace, but what others see of it (`rollout`) has the tokens that are generated only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from simrl.engine.state import PAUSE, WATCH
from simrl.runtime.rollout import Rollout, Segment
from simrl.trace.trace import Response, Sample, Turn


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """A sample at a worker, from `submit` to its end there, first with the tokens of `before`, its rollout at other workers.
    `length` is where it ends: the response's end, or an earlier token. `slot` is its place in the engine; None while its KV
    cache or its environment is awaited. The rest is as in `Rollout`, up to the last closed segment."""

    event: simpy.Event
    response: Response
    before: Rollout
    length: int
    cached: float
    started_s: float = 0.0
    slot: int | None = None
    watches: list[tuple[int, simpy.Event]] = field(default_factory=list)
    segments: list[Segment] = field(init=False)
    tokens: int = field(init=False)
    first_token_s: float = field(init=False)
    observation_tokens: int = field(init=False)
    environment_until_s: float = field(init=False)
    _turn: int = 0  # index of the first turn that may not have ended

    def __post_init__(self) -> None:
        before = self.before
        self.segments, self.tokens, self.first_token_s = list(before.segments), before.tokens, before.first_token_s
        self.observation_tokens, self.environment_until_s = before.observation_tokens, before.environment_until_s

    @property
    def sample(self) -> Sample:
        return self.before.sample

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV cache is fetched when the request begins: of all but the last generated one and the environment's
        answer to it, the share `cached`."""
        if not self.cached or not self.tokens:
            return 0
        turn = self.turn_at(self.tokens)
        unseen = 1 if turn is None else 1 + turn.observation_tokens
        return int(self.cached * (self.sample.prompt_tokens + self.observation_tokens + self.tokens - unseen))

    def turn_at(self, tokens: int) -> Turn | None:
        """Return the turn that the environment answers when the response has `tokens`."""
        turns = self.response.turns
        if self._turn < len(turns) and turns[self._turn].end_tokens == tokens:
            return turns[self._turn]
        return next((turn for turn in turns if turn.end_tokens == tokens), None)

    def end_turn(self, turn: Turn, now_s: float) -> None:
        """End a turn now: the environment's answer is there when its time is over."""
        self.observation_tokens += turn.observation_tokens
        self.environment_until_s = now_s + turn.environment_s

    def close_segment(self, segment: Segment) -> None:
        """Add a segment to the response."""
        self.segments.append(segment)
        self.tokens += segment.tokens

    def rollout(self, done: bool = False, last: Segment | None = None, first_token_s: float | None = None) -> Rollout:
        """Return the rollout so far, `last` being a segment that goes on."""
        return self.before._replace(
            segments=tuple(self.segments) if last is None else (*self.segments, last),
            done=done,
            first_token_s=self.first_token_s if first_token_s is None else first_token_s,
            observation_tokens=self.observation_tokens,
            environment_until_s=self.environment_until_s,
        )

    def next_stop(self, tokens: int) -> tuple[int, int] | None:
        """Return the next token at which the engine stops, and why: a turn ends, or a watch holds. None if there is none."""
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
        """Remove the watches that hold with `tokens`, and return their events."""
        held = [event for watched, event in self.watches if watched <= tokens]
        self.watches = [watch for watch in self.watches if watch[0] > tokens]
        return held
