"""KV-aware admission of programs, close to the words of the rule: every figure is computed anew from a list of programs."""

from dataclasses import dataclass


@dataclass
class Listed:
    uid: int
    tokens: int = 0
    requests: int = 0
    state: str = "reasons"  # or "acts"
    engine: int | None = None
    paused: tuple[int, int] | None = None  # place among all pauses, tokens then
    origin: int | None = None
    marked: bool = False
    waits_since_s: float | None = None


class ListedPrograms:
    def __init__(self, engines, kv_tokens, weight):
        self.engines, self.kv_tokens, self.weight = engines, kv_tokens, weight
        self.programs, self.pauses = [], 0

    def of(self, uid):
        return next((p for p in self.programs if p.uid == uid), None)

    def used(self, engine):
        sums = {"reasons": 0, "acts": 0}
        for p in self.programs:
            if p.engine == engine:
                sums[p.state] += p.tokens
        return int(sums["reasons"] + self.weight * sums["acts"])

    def room(self, engine):
        here = sum(p.engine == engine for p in self.programs)
        return self.kv_tokens - self.used(engine) - 100 * here

    def waiting(self):
        paused = [p for p in self.programs if p.paused is not None]
        return sorted(paused, key=lambda p: p.paused[0])

    def pause(self, p):
        self.pauses += 1
        p.paused, p.origin, p.engine, p.marked = (self.pauses, p.tokens), p.engine, None, False

    def resume(self, p, engine):
        p.engine, p.paused, p.origin, p.waits_since_s = engine, None, None, None

    def request(self, uid, tokens, now_s, able):
        p = self.of(uid)
        if p is None:
            p = Listed(uid)
            self.programs.append(p)
        p.requests, p.tokens, p.state = p.requests + 1, tokens, "reasons"
        if p.engine is not None and p.engine not in able:
            p.engine = None
        if p.engine is None and p.paused is None:
            roomy = [e for e in able if self.room(e) >= tokens + 100]
            if self.waiting() or not roomy:
                self.pause(p)
            else:
                self.resume(p, min(roomy, key=lambda e: (self.used(e), e)))
        if p.paused is not None:
            p.waits_since_s = now_s
        return p.engine

    def turn_ended(self, uid, tokens):
        p = self.of(uid)
        p.tokens, p.state, p.waits_since_s = tokens, "acts", None
        if p.marked:
            self.pause(p)

    def release(self, uid):
        self.programs.remove(self.of(uid))

    def check(self, now_s, able):
        resumed = self.greedy(able)
        for engine in able:
            here = sorted((p for p in self.programs if p.engine == engine), key=lambda p: p.tokens)
            for p in (p for p in here if p.state == "acts"):
                if self.room(engine) < 0:
                    self.pause(p)
            for p in (p for p in here if p.engine == engine):
                p.marked = p.marked or self.room(engine) < 0
        for p in self.waiting():
            if able and p.waits_since_s is not None and now_s - 1800 >= p.waits_since_s:
                counts = [sum(q.engine == e for q in self.programs) for e in able]
                self.resume(p, p.origin if p.origin in able else able[counts.index(min(counts))])
                resumed[p.uid] = p.engine
        return resumed

    def greedy(self, able):
        order = [(self.room(e), e) for e in able if self.room(e) > 100]
        left, chosen, resumed = sum(room for room, _ in order), [], {}
        ranks = [[], [], []]
        for p in sorted(self.waiting(), key=lambda p: p.paused[1]):
            ranks[1 if p.requests == 1 else 0 if p.state == "reasons" else 2].append(p)
        for p in ranks[0] + ranks[1] + ranks[2]:
            if p.tokens + 100 <= left:
                chosen, left = [*chosen, p], left - p.tokens - 100
        for p in sorted(chosen, key=lambda p: -p.tokens):
            order = sorted(order, key=lambda entry: -entry[0])
            (room, engine), rest = order[0], order[1:]
            if p.tokens + 100 <= room:
                self.resume(p, engine)
                resumed[p.uid], order = engine, [(room - p.tokens - 100, engine), *rest]
        return resumed
