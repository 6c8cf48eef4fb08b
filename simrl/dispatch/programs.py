"""KV-aware admission of programs (ThunderAgent, arXiv 2602.13692; the rule is
ThunderAgent-org/ThunderAgent@a7eef77, scheduler/router.py and backend/state.py): which trajectories
of several turns are active at which engine, by the tokens of their contexts.

A program is a trajectory. It reasons from a request on until its turn ends, and acts until its tool
answers. An active program is at one engine; a paused one is at none, and its next request waits.

Invariant: a pure state machine. It owns no clock, engine or request: times and tokens are
arguments, engines and pauses are results. A context counts as its last request or response reported
it. As in the code: no tokens count as shared; a mark frees nothing before the turn ends, so that an
engine that lacks room without acting programs marks all of its programs; marks are never taken
back. A request that has waited for `FORCED_AFTER_S` is let through at the next check (in the code
at once).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

CHECK_S = 5.0  # --scheduler-interval
TOKENS_A_PROGRAM = 100  # room for the next tokens of each active program
FORCED_AFTER_S = 1800.0


@dataclass(slots=True, eq=False)
class Program:
    """A program; `engine` is where it is, or was before its pause (None: nowhere yet). `marked`: it
    is paused when its turn ends. `waits_since_s` is the time of a request that waits for room."""

    tokens: int = 0
    requests: int = 0
    engine: int | None = None
    acts: bool = False
    marked: bool = False
    waits_since_s: float = math.inf


class Programs:
    """The programs of some engines, whose KV caches hold `kv_tokens` each; `takes` tells which
    engines take programs now, and the caller changes it. Tokens of acting programs count
    `acting_weight` (--acting-token-weight). `paused` has the tokens at each pause."""

    def __init__(self, takes: Sequence[bool], kv_tokens: int, acting_weight: float) -> None:
        self.figures = {"pauses": 0, "moves": 0, "forced": 0, "waited_s": 0.0}
        self.paused: dict[int, int] = {}
        self._all: dict[int, Program] = {}
        self._at: list[dict[int, Program]] = [{} for _ in takes]
        self._takes, self._kv_tokens, self._acting_weight = takes, kv_tokens, acting_weight

    def __contains__(self, uid: int) -> bool:
        return uid in self._all

    def request(self, uid: int, tokens: int, now_s: float) -> int | None:
        """Note a request with a context of `tokens`. Return its engine; None: it waits. A new
        program starts where the fewest tokens are, if there is room and none is paused."""
        program = self._all.setdefault(uid, Program())
        program.tokens, program.requests, program.acts = tokens, program.requests + 1, False
        program.waits_since_s = now_s
        if program.engine is None and uid not in self.paused:
            able = [e for e in self._able() if self._room(e) >= tokens + TOKENS_A_PROGRAM]
            if self.paused or not able:
                self.paused[uid] = tokens
            else:
                self.put(uid, min(able, key=self._used), now_s)
        return None if uid in self.paused else program.engine

    def turn_ended(self, uid: int, tokens: int) -> bool:
        """Note the end of a turn, with a context of `tokens`: the program acts. Return whether it
        is paused; False also for an unknown one."""
        if (program := self._all.get(uid)) is None:
            return False
        program.tokens, program.acts, program.waits_since_s = tokens, True, math.inf
        if program.marked:
            self.pause(uid)
        return uid in self.paused

    def put(self, uid: int, engine: int, now_s: float) -> None:
        """Make a program active at an engine."""
        program = self._all.setdefault(uid, Program())
        if program.engine is not None:
            self._at[program.engine].pop(uid, None)
            self.figures["moves"] += program.engine != engine
        self.figures["waited_s"] += max(now_s - program.waits_since_s, 0.0)
        program.engine, program.waits_since_s = engine, math.inf
        self._at[engine][uid] = program
        self.paused.pop(uid, None)

    def pause(self, uid: int) -> None:
        """Take a program from its engine."""
        program = self._all[uid]
        self.figures["pauses"] += 1
        self._at[program.engine].pop(uid)
        self.paused[uid], program.marked = program.tokens, False

    def release(self, uid: int) -> None:
        """Forget a program that has ended."""
        program = self._all.pop(uid)
        self.paused.pop(uid, None)
        if program.engine is not None:
            self._at[program.engine].pop(uid, None)

    def check(self, now_s: float) -> dict[int, int]:
        """Resume programs where there is room, and pause some where there is none: those that act,
        the smallest first; then all others are marked. Return the engines of the resumed ones."""
        resumed = self._force(now_s) | self._resume(now_s)
        for engine in self._able():
            here = self._all.items() if self._room(engine) < 0 else ()
            active = [entry for entry in here if entry[0] in self._at[engine]]
            for uid, program in sorted(active, key=lambda entry: (not entry[1].acts, entry[1].tokens)):
                if self._room(engine) < 0 and program.acts:
                    self.pause(uid)
                elif self._room(engine) < 0:
                    program.marked = True
        return resumed

    def _force(self, now_s: float) -> dict[int, int]:
        """Resume the programs whose requests have waited too long, where they were, or where the
        fewest programs are."""
        forced, able = {}, self._able()
        for uid in [uid for uid in self.paused if able]:
            program, fewest = self._all[uid], min(able, key=lambda engine: len(self._at[engine]))
            if now_s >= program.waits_since_s + FORCED_AFTER_S:
                forced[uid] = program.engine if program.engine in able else fewest
                self.put(uid, forced[uid], now_s)
        self.figures["forced"] += len(forced)
        return forced

    def _resume(self, now_s: float) -> dict[int, int]:
        """Resume what fits into the room of all engines: requests of programs that were active
        before new programs, those before acting ones, the smallest first. Of these, the largest is
        placed first, each at the engine with the most room, if that suffices."""
        rooms = [(room, e) for e in self._able() if (room := self._room(e)) > TOKENS_A_PROGRAM]
        left, chosen, resumed = sum(room for room, _ in rooms), [], {}
        for uid in sorted(self.paused, key=self._rank):
            program = self._all[uid]
            needed = program.tokens + TOKENS_A_PROGRAM
            if needed <= left:
                left -= needed
                chosen.append((needed, uid))
        for needed, uid in sorted(chosen, key=itemgetter(0), reverse=True):
            rooms.sort(key=itemgetter(0), reverse=True)
            room, engine = rooms[0]
            if needed <= room:
                self.put(uid, engine, now_s)
                resumed[uid], rooms[0] = engine, (room - needed, engine)
        return resumed

    def _rank(self, uid: int) -> tuple[int, int]:
        """Return the place of a paused program in the order of resumption."""
        program = self._all[uid]
        kind = 1 if program.requests == 1 else 2 if program.acts else 0
        return kind, self.paused[uid]

    def _able(self) -> list[int]:
        return [engine for engine, takes in enumerate(self._takes) if takes]

    def _used(self, engine: int) -> int:
        programs = self._at[engine].values()
        acting = sum(program.tokens for program in programs if program.acts)
        reasoning = sum(program.tokens for program in programs) - acting
        return int(reasoning + self._acting_weight * acting)

    def _room(self, engine: int) -> int:
        return self._kv_tokens - self._used(engine) - TOKENS_A_PROGRAM * len(self._at[engine])
