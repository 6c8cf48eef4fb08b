"""KV-aware admission of programs (ThunderAgent, arXiv 2602.13692; the rule is
ThunderAgent-org/ThunderAgent@a7eef77, scheduler/router.py and backend/state.py): which trajectories
of several turns are active at which engine, by the tokens of their contexts.

A program is a trajectory. It reasons from a request on until its turn ends, and acts until its tool
answers. An active program is at one engine; a paused one is at none, and its next request waits.

Invariant: a pure state machine. It owns no clock, engine or request: times, tokens and the engines
that take programs (`able`) are arguments, engines and pauses are results. A context counts as its
last request or response reported it (a client that streams would report every 20 tokens). As in the
code: no tokens count as shared; a mark frees nothing before the turn ends, so that an engine that
lacks room without acting programs marks all of its programs; a mark is never taken back. A request
that has waited for `FORCED_AFTER_S` is let through at the next check (in the code at once). A
program whose engine is lost is placed anew (in the code it stays with that engine).
"""

from dataclasses import dataclass
from math import inf
from operator import itemgetter

from simrl.runtime.rollout import Rollout

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
    waits_since_s: float = inf


class Programs:
    """The programs of some engines, whose KV caches hold `kv_tokens` each. Tokens of acting
    programs count `acting_weight` (--acting-token-weight). `paused` has the tokens at each
    pause."""

    def __init__(self, engines: int, kv_tokens: int, acting_weight: float) -> None:
        self.figures = {"pauses": 0, "moves": 0, "waiting_for_room_s": 0.0}
        self.paused: dict[int, int] = {}
        self.all: dict[int, Program] = {}
        self._at: dict[int | None, dict[int, Program]] = {e: {} for e in (None, *range(engines))}
        self._kv_tokens, self._acting_weight = kv_tokens, acting_weight

    def request(self, so_far: Rollout, now_s: float, able: list[int]) -> int | None:
        """Note a request with a context. Return its engine; None: it waits. A new program starts
        where the fewest tokens are, if there is room and none is paused."""
        uid, tokens = so_far.sample.uid, so_far.context_tokens
        program = self.all.setdefault(uid, Program())
        program.requests += 1
        program.tokens, program.acts, program.waits_since_s = tokens, False, now_s
        if uid not in self.paused and program.engine not in able:
            fits = [engine for engine in able if self._room(engine) >= tokens + TOKENS_A_PROGRAM]
            if fits and not self.paused:
                self.put(uid, min(fits, key=self._used), now_s)
            else:
                self._pause(uid)
        return None if uid in self.paused else program.engine

    def turn_ended(self, so_far: Rollout) -> None:
        """Note the end of a turn: the program acts, or is paused."""
        program = self.all[so_far.sample.uid]
        program.tokens, program.acts, program.waits_since_s = so_far.context_tokens, True, inf
        if program.marked:
            self._pause(so_far.sample.uid)

    def put(self, uid: int, engine: int, now_s: float) -> None:
        """Make a program active at an engine."""
        program = self.all.setdefault(uid, Program())
        self.figures["moves"] += program.engine not in (None, engine)
        self.figures["waiting_for_room_s"] += max(now_s - program.waits_since_s, 0.0)
        self._at[program.engine].pop(uid, None)
        program.engine, program.waits_since_s = engine, inf
        self._at[engine][uid] = program
        self.paused.pop(uid, None)

    def release(self, uid: int) -> None:
        """Forget a program that has ended."""
        self._at[self.all.pop(uid).engine].pop(uid, None)
        self.paused.pop(uid, None)

    def check(self, now_s: float, able: list[int]) -> dict[int, int]:
        """Resume programs where there is room, and pause some where there is none: those that act,
        the smallest first; then all others are marked. Let requests through that have waited too
        long. Return the engines of the resumed programs."""
        resumed = self._resume(now_s, able)
        for engine in able:
            for _, uid in sorted((p.tokens, uid) for uid, p in self._at[engine].items() if p.acts):
                if self._room(engine) < 0:
                    self._pause(uid)
            for program in self._at[engine].values() if self._room(engine) < 0 else ():
                program.marked = True
        before_s = now_s - FORCED_AFTER_S if able else -1.0
        for uid in [uid for uid in self.paused if self.all[uid].waits_since_s <= before_s]:
            origin, fewest = self.all[uid].engine, min(able, key=lambda e: len(self._at[e]))
            resumed[uid] = origin if origin in able else fewest
            self.put(uid, resumed[uid], now_s)
        return resumed

    def _resume(self, now_s: float, able: list[int]) -> dict[int, int]:
        """Resume what fits into the room of all engines: requests of programs that were active
        before new programs, those before acting ones, the smallest first. Of these, the largest is
        placed first, each at the engine with the most room, if that suffices."""
        rooms = [(room, e) for e in able if (room := self._room(e)) > TOKENS_A_PROGRAM]
        left, chosen, resumed = sum(room for room, _ in rooms), [], {}
        for uid in sorted(self.paused, key=self._rank):
            if (needed := self.all[uid].tokens + TOKENS_A_PROGRAM) <= left:
                left -= needed
                chosen.append((needed, uid))
        for needed, uid in sorted(chosen, key=itemgetter(0), reverse=True):
            rooms.sort(key=itemgetter(0), reverse=True)
            room, engine = rooms[0]
            if needed <= room:
                self.put(uid, engine, now_s)
                resumed[uid], rooms[0] = engine, (room - needed, engine)
        return resumed

    def _rank(self, uid: int) -> tuple[bool, bool, int]:
        program = self.all[uid]
        return program.requests > 1 and program.acts, program.requests == 1, self.paused[uid]

    def _pause(self, uid: int) -> None:
        program = self.all[uid]
        self.figures["pauses"] += program.engine is not None
        self._at[program.engine].pop(uid, None)
        self.paused[uid], program.marked = program.tokens, False

    def _used(self, engine: int) -> int:
        programs = self._at[engine].values()
        acting = sum(program.tokens for program in programs if program.acts)
        return int(sum(p.tokens for p in programs) - acting + self._acting_weight * acting)

    def _room(self, engine: int) -> int:
        return self._kv_tokens - self._used(engine) - TOKENS_A_PROGRAM * len(self._at[engine])
