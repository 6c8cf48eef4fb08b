"""The rule of ranks in lock step, written slowly: reference engines that plan alone and compute together, pass by pass."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from simrl.engine.state import Limits
from simrl.profile.profile import Tables
from tests.references.engine import ReferenceEngine
from tests.references.requests import Request, Rules


@dataclass
class ReferenceLockStep:
    tables: Tables
    limits: Limits
    rules: Rules | None = None  # of each rank, which learns alone
    slowdown: float = 1.0
    now_s: float = 0.0
    waited_s: float = 0.0  # over all ranks
    dummies: int = 0
    submitted: int = 0
    ranks: list[ReferenceEngine] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)  # the rank of each request, by its id

    def __post_init__(self) -> None:
        alone = self.tables._replace(least_pass_s=0.0, least_sequence_s=0.0)
        self.ranks = [
            ReferenceEngine(alone, self.limits, rules=deepcopy(self.rules))
            for _ in range(self.limits.dp)
        ]

    @property
    def busy(self) -> bool:
        return any(rank.busy for rank in self.ranks)

    @property
    def stops(self) -> list[tuple[Request, float, int]]:
        return [stop for rank in self.ranks for stop in rank.stops]

    def rank_of(self, request: Request) -> ReferenceEngine:
        return self.ranks[self.place[id(request)]]

    def submit(self, *lengths: int, **keys: int) -> Request:
        """Submit a request where fewest are unfinished; where some wait, these count more as the KV cache fills."""
        loads = []
        for rank in self.ranks:
            waiting = len(rank.queue)
            used = 1 - rank.free_blocks / self.limits.kv_blocks
            loads.append(len(rank.running) + len(rank.waiting) + 6 * waiting * max(used - 0.5, 0))
        dp = len(self.ranks)
        first = self.submitted % dp
        k = min(range(dp), key=lambda k: (loads[k], (k - first) % dp))
        self.submitted += 1
        request = self.ranks[k].submit(*lengths, **keys)
        self.place[id(request)] = k
        return request

    def experts_s(self, tokens: int) -> float:
        t = self.tables
        return (
            float(np.interp(tokens, t.expert_tokens, t.experts_s)) if t.expert_tokens.size else 0.0
        )

    def dense_s(self, tokens: int) -> float:
        return float(np.interp(tokens, self.tables.dense_tokens, self.tables.dense_s))

    def iterate(self) -> None:
        """Make a pass: each rank drafts and plans as an engine does, and all take as long as the one with the most to do."""
        if not any(rank.batch for rank in self.ranks):
            for rank in self.ranks:
                rank.wave = rank.passes
        round_s = max(rank.draft() for rank in self.ranks)
        plans, alone = self.plans()
        for rank in self.ranks:
            rank.catch_up()
        if not any(plans):
            plans, alone = self.plans()
        tokens = [sum(new for _, new in plan) for plan in plans]
        largest = max(tokens)
        padded = largest <= self.limits.graph_tokens
        in_all = len(plans) * largest if padded else sum(max(n, 1) for n in tokens)
        longest = 0.0
        for n, own_s in zip(tokens, alone, strict=True):
            if n:
                longest = max(
                    longest, own_s + (self.dense_s(largest) - self.dense_s(n) if padded else 0.0)
                )
        pause_s = self.tables.between_passes_s
        sampled = float(max(map(self.hosted, plans)))
        least_s = self.tables.least_pass_s + self.tables.least_sequence_s * sampled
        seconds = max(longest + self.experts_s(in_all), least_s + pause_s)
        took_s = self.slowdown * (round_s + seconds)
        self.now_s += took_s
        for rank, plan in zip(self.ranks, plans, strict=True):
            self.dummies += not plan
            rank.plan, rank.knows_all = plan, not self.limits.async_scheduling
            rank.now_s = self.now_s
            rank.passes += 1
            rank.gain(plan)
            rank.learn(plan, took_s)
            rank.stop()
            if not self.limits.async_scheduling:
                rank.catch_up()

    @staticmethod
    def hosted(plan: list[tuple[Request, int]]) -> int:
        """Return how many tokens the host handles: one a request, and those of old responses that a context verifies."""
        tokens = len(plan)
        for r, new in plan:
            decodes = r.computed > 0 and new == 1 + (r.proposal or (0, 0))[0] + r.padding
            if r.old_tokens and not decodes:
                tokens += max(r.computed + new - max(r.computed, r.prompt), 0)
        return tokens

    def plans(self) -> tuple[list[list[tuple[Request, int]]], list[float]]:
        """Return what each rank computes in the next pass, and how long that takes it without the experts."""
        plans = [rank.schedule() for rank in self.ranks]
        return plans, [
            rank.pass_s(plan) if plan else 0.0 for rank, plan in zip(self.ranks, plans, strict=True)
        ]

    def settle(self, time_s: float) -> None:
        while self.busy and self.now_s <= time_s:
            self.iterate()
        if not self.busy:
            self.now_s = max(self.now_s, time_s)
        for rank in self.ranks:
            rank.now_s = self.now_s
