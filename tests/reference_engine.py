"""The engine's rule, written slowly: one Python object a request, one pass at a time, scipy for the profile.

It shares no code with `simrl.engine` or `simrl.interpolation`; hypothesis holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from simrl.engine import END, PAUSE, WATCH, Limits
from simrl.profile import Tables


@dataclass(eq=False)
class Request:
    prompt: int
    response: int
    generated: int = 0
    computed: int = 0
    first_token_s: float = float("nan")
    stop_at: int | None = None
    stop_kind: int = WATCH

    @property
    def known(self) -> int:
        return self.prompt + self.generated


@dataclass
class ReferenceEngine:
    tables: Tables
    limits: Limits
    now_s: float = 0.0
    slowdown: float = 1.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)  # paused or waiting again, with their caches; oldest pause first
    admitting: bool = True
    passes: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    stops: list[tuple[Request, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        t = self.tables
        self._attention = RegularGridInterpolator(t[4:8], t.attention_s)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    @property
    def free_blocks(self) -> int:
        return self.limits.kv_blocks - sum(self.blocks(r.computed) for r in self.running + self.held)

    @property
    def totals(self) -> dict[str, int]:
        return {
            "passes": self.passes,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens": self.prefill_tokens,
            "preemptions": self.preemptions,
        }

    @property
    def busy(self) -> bool:
        return bool(self.running) or (bool(self.waiting) and self.admitting)

    def submit(self, prompt: int, response: int, generated: int = 0, cached: int = 0) -> Request:
        request = Request(prompt, response, generated, cached)
        self.waiting.append(request)
        return request

    def stop_at(self, request: Request, tokens: int, kind: int) -> None:
        request.stop_at, request.stop_kind = tokens, kind

    def resume(self, request: Request, observation_tokens: int) -> None:
        request.prompt += observation_tokens
        self.waiting.append(request)

    def evict_oldest(self) -> int:
        request = self.held.pop(0)
        blocks, request.computed = self.blocks(request.computed), 0
        return blocks

    def abort(self, request: Request) -> None:
        self.held = [r for r in self.held if r is not request]
        self.running = [r for r in self.running if r is not request]
        self.waiting = [r for r in self.waiting if r is not request]

    def recompute_running(self) -> None:
        for request in reversed(self.running):
            request.computed = 0
            self.waiting.insert(0, request)
        self.running = []
        while self.held:
            self.evict_oldest()
        for request in self.waiting:
            request.computed = 0

    def settle(self, time_s: float) -> None:
        while self.busy and self.now_s <= time_s:
            self.iterate()
        if not self.busy:
            self.now_s = max(self.now_s, time_s)

    def iterate(self) -> None:
        budget = self.limits.max_num_batched_tokens
        plan: list[tuple[Request, int]] = []
        free = self.free_blocks
        preempted = False
        while len(plan) < len(self.running) and budget > 0:
            request = self.running[len(plan)]
            new = min(request.known - request.computed, budget)
            need = self.blocks(request.computed + new) - self.blocks(request.computed)
            while need > free and self.held:
                free += self.evict_oldest()
            while need > free:
                victim = self.running.pop()
                free += self.blocks(victim.computed)
                victim.computed = 0
                self.waiting.insert(0, victim)
                self.preemptions += 1
                preempted = True
                if victim is request:
                    break
            if preempted and request not in self.running:
                break
            free -= need
            budget -= new
            plan.append((request, new))
        while (
            not preempted
            and self.admitting
            and self.waiting
            and budget > 0
            and len(self.running) < self.limits.max_num_seqs
        ):
            request = self.waiting[0]
            new = min(request.known - request.computed, budget)
            if self.blocks(request.known) > free + sum(self.blocks(r.computed) for r in self.held):
                break
            self.running.append(self.waiting.pop(0))
            need = self.blocks(request.computed + new)
            if request in self.held:
                self.held.remove(request)
                need -= self.blocks(request.computed)
            while need > free:
                free += self.evict_oldest()
            free -= need
            budget -= new
            plan.append((request, new))
        self.now_s += self.slowdown * self.pass_s(plan)
        self.passes += 1
        for request, new in plan:
            request.computed += new
            if request.computed == request.known:
                request.generated += 1
                self.generated_tokens += 1
                if request.generated == 1:
                    request.first_token_s = self.now_s
        for request in list(self.running):
            if request.generated == request.response:
                self.running.remove(request)
                self.stops.append((request, self.now_s, END))
            elif request.generated == request.stop_at:
                request.stop_at = None
                self.stops.append((request, self.now_s, request.stop_kind))
                if request.stop_kind == PAUSE:
                    self.running.remove(request)
                    self.held.append(request)

    def pass_s(self, plan: list[tuple[Request, int]]) -> float:
        t = self.tables
        decode = [r.computed + 1 for r, new in plan if new == 1 and r.computed > 0]
        prefill = [(new, r.computed) for r, new in plan if not (new == 1 and r.computed > 0)]
        tokens = sum(new for new, _ in prefill)
        self.prefill_tokens += tokens
        work = sum(new * (cached + new / 2) for new, cached in prefill)
        chunk = context = 0.0
        if prefill:
            chunk, context = float(tokens), work / tokens - tokens / 2
            if context < 0:
                chunk, context = float(np.sqrt(2 * work)), 0.0
        point = [chunk, context, len(decode), np.mean(decode) if decode else 0.0]
        edges = [(g[0], g[-1]) for g in t[4:8]]
        attention = self._attention([np.clip(x, low, high) for x, (low, high) in zip(point, edges, strict=True)])[0]
        dense = np.interp(sum(new for _, new in plan), t.dense_tokens, t.dense_s)
        sampled = np.interp(len(plan), t.sampled_sequences, t.sampled_s)
        return float(dense + attention + sampled + t.between_passes_s)
