"""The engine's rule, written slowly: one Python object a request, one pass at a time, scipy for the profile.

It shares no code with `simrl.engine` or `simrl.interpolation`; hypothesis holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from reference_bandit import BegMabSelector
from scipy.interpolate import RegularGridInterpolator

from simrl.engine.requests import END, PAUSE, WATCH, Limits
from simrl.profile.profile import Tables
from simrl.speculation.acceptance import accepted_tokens
from simrl.speculation.bandit import Strategy
from simrl.speculation.siblings import SiblingIndex, sibling_draft


@dataclass(eq=False)
class Request:
    prompt: int
    response: int
    generated: int = 0
    computed: int = 0
    first_token_s: float = float("nan")
    stop_at: int | None = None
    watch_at: int | None = None
    blocks: int = 0
    seen_at: int = 0  # passes that are over when an asynchronous scheduler sees it waiting
    over: bool = False  # ended or aborted
    # Drafts: (drafted, accepted) at every position, the key and hardness of a model's acceptance, or a row of the trace.
    runs: list[tuple[int, int]] | None = None
    key: int | None = None
    row: int | None = None
    hardness: float = 1.0
    window: int = 0
    proposal: tuple[int, int] | None = None  # of the present pass
    old_tokens: int = 0
    old_accepted: int = 0
    drafted_total: int = 0
    accepted_total: int = 0
    verified_total: int = 0
    stood: int = 0  # in the present pass
    gained: int = 0
    verifications: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.generated + self.old_tokens


@dataclass
class Arm:
    """One way in which a model drafts: chains as long as the window, or trees of a strategy."""

    log_acceptances: list[float]
    round_s: float = 0.0
    step_s: float = 0.0
    tree: Strategy | None = None


@dataclass
class Rules:
    """How the reference drafts. `window` is a function (window, drafted, accepted) -> window."""

    start: int
    window: Callable[[int, int, int], int]
    arms: list[Arm]
    bandit: BegMabSelector | None = None
    gate: Callable[[float, int], bool] | None = None  # (acceptance rate of late, batch) -> open
    elastic: tuple[int, int] | None = None  # threshold, patience
    siblings: SiblingIndex | None = None
    own_text: bool = False


@dataclass
class ReferenceEngine:
    tables: Tables
    limits: Limits
    now_s: float = 0.0
    slowdown: float = 1.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)  # blocks of those that stopped while the next pass was scheduled
    held: list[Request] = field(default_factory=list)  # paused or waiting again, with their caches; oldest pause first
    admitting: bool = True
    passes: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    stops: list[tuple[Request, float, int]] = field(default_factory=list)
    rules: Rules | None = None
    of_row: dict[int, Request] = field(default_factory=dict)  # the latest request for a row of the trace
    late_drafted: float = 0.0
    late_accepted: float = 0.0
    drift: float = 1.0
    calm: int = 0
    speculates: bool = False

    def __post_init__(self) -> None:
        t = self.tables
        self._attention = RegularGridInterpolator(t[4:8], t.attention_s)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    @property
    def free_blocks(self) -> int:
        return self.limits.kv_blocks - sum(r.blocks for r in self.running + self.held) - sum(self.leaving)

    @staticmethod
    def lose(request: Request) -> int:
        blocks, request.blocks, request.computed = request.blocks, 0, 0
        return blocks

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
        request = Request(prompt, response, generated, cached, seen_at=self.passes + 1)
        self.waiting.append(request)
        return request

    def stop_at(self, request: Request, tokens: int, kind: int) -> None:
        if kind == WATCH:
            request.watch_at = tokens
        else:
            request.stop_at = tokens

    def resume(self, request: Request, observation_tokens: int) -> None:
        request.prompt += observation_tokens
        request.seen_at = self.passes + 1
        self.waiting.append(request)

    def evict_oldest(self) -> int:
        return self.lose(self.held.pop(0))

    def draft_from_siblings(self, request: Request, row: int) -> None:
        request.row = row
        self.of_row[row] = request

    def forget_rows(self) -> None:
        self.of_row = {row: request for row, request in self.of_row.items() if not request.over}

    def known(self, index: SiblingIndex, row: int, own_text: bool) -> list[int]:
        """Tokens that may be read now, of each row of the group."""
        group = range(index.group_first[row], index.group_end[row])
        tokens = {r: self.of_row[r].generated if r in self.of_row else 0 for r in group}
        return list((tokens if own_text else tokens | {row: 0}).values())

    def abort(self, request: Request) -> None:
        request.over = True
        self.held = [r for r in self.held if r is not request]
        self.running = [r for r in self.running if r is not request]
        self.waiting = [r for r in self.waiting if r is not request]

    def recompute_running(self) -> None:
        for request in reversed(self.running):
            self.lose(request)
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

    def opened(self) -> bool:
        """Whether the pass to come verifies drafts."""
        if self.rules is None:
            return False
        if self.rules.elastic is not None:
            return self.speculates
        rate = self.late_accepted / self.late_drafted if self.late_drafted >= 1.0 else 1.0
        return self.rules.gate is None or self.rules.gate(rate, len(self.running))

    def drafts(self, request: Request) -> bool:
        """Whether a request has a source, and decodes."""
        if request.runs is request.key is request.row is None:
            return False
        return request.generated > 0 and request.known - request.computed == 1

    def choose(self, modelled: int) -> Arm:
        """How a model drafts in this pass, for so many requests."""
        assert self.rules is not None
        if self.rules.bandit is None or not modelled:
            return self.rules.arms[0]
        strategy = self.rules.bandit.choose(modelled)
        return next(arm for arm in self.rules.arms if arm.tree == strategy)

    def propose(self, request: Request, arm: Arm) -> tuple[int, int]:
        room = self.limits.kv_blocks * self.limits.block_size - request.computed - 1
        window = min(request.window, room)
        if request.runs is not None:
            drafted, accepted = request.runs[request.generated]
            return min(drafted, window), min(accepted, drafted, window)
        assert self.rules is not None
        if request.row is not None:
            assert self.rules.siblings is not None
            known = np.array(self.known(self.rules.siblings, request.row, self.rules.own_text))
            return sibling_draft(self.rules.siblings, request.row, request.generated, known, window)
        assert request.key is not None
        table, hardness = np.array(arm.log_acceptances), request.hardness * self.drift
        if arm.tree is None:
            return window, accepted_tokens(request.key, request.generated, hardness, table, window)
        nodes = min(arm.tree.tokens_to_verify - 1, room)
        levels = accepted_tokens(request.key, request.generated, hardness, table, arm.tree.draft_depth)
        return nodes, min(levels, nodes)

    def admits(self, free: int) -> bool:
        """Whether the first waiting request may start."""
        if not self.admitting or not self.waiting:
            return False
        if len(self.running) + len(self.leaving) >= self.limits.max_num_seqs:
            return False
        if self.limits.async_scheduling and self.waiting[0].seen_at > self.passes:
            return False
        return self.blocks(self.waiting[0].known) <= free + sum(r.blocks for r in self.held)

    def iterate(self) -> None:
        if self.limits.async_scheduling and not self.running and not self.admits(self.free_blocks):
            self.leaving = []
            for request in self.waiting:
                request.seen_at = 0
        budget = self.limits.max_num_batched_tokens
        plan: list[tuple[Request, int]] = []
        free = self.free_blocks
        preempted = False
        opened = self.opened()
        drafting = [r for r in self.running if self.drafts(r)] if opened else []
        for request in self.running:
            request.proposal = None
        draft_s = 0.0
        if drafting:
            arm = self.choose(sum(r.key is not None for r in drafting))
            levels = 0
            for request in drafting:
                request.proposal = self.propose(request, arm)
                in_tree = request.key is not None and arm.tree is not None
                levels = max(levels, arm.tree.draft_depth if in_tree and arm.tree else request.proposal[0])
            draft_s = arm.round_s + levels * arm.step_s
        while len(plan) < len(self.running) and budget > 0:
            request = self.running[len(plan)]
            drafted = request.proposal[0] if request.proposal else 0
            new = min(request.known - request.computed + drafted, budget)
            need = max(self.blocks(request.computed + new) - request.blocks, 0)
            while need > free and self.held:
                free += self.evict_oldest()
            while need > free:
                victim = self.running.pop()
                free += self.lose(victim)
                self.waiting.insert(0, victim)
                self.preemptions += 1
                preempted = True
                if victim is request:
                    break
            if preempted and request not in self.running:
                break
            free -= need
            request.blocks += need
            budget -= new
            if request.proposal:
                request.proposal = (min(request.proposal[0], new - 1), min(request.proposal[1], new - 1))
            plan.append((request, new))
        while not preempted and budget > 0 and self.admits(free):
            request = self.waiting[0]
            new = min(request.known - request.computed, budget)
            self.running.append(self.waiting.pop(0))
            self.held = [r for r in self.held if r is not request]
            request.proposal = None
            need = max(self.blocks(request.computed + new) - request.blocks, 0)
            while need > free:
                free += self.evict_oldest()
            free -= need
            request.blocks += need
            budget -= new
            plan.append((request, new))
        prefilled = self.prefill_tokens
        took_s = self.slowdown * (draft_s + self.pass_s(plan))
        self.now_s += took_s
        prefilled = self.prefill_tokens - prefilled
        self.passes += 1
        for request, new in plan:
            request.computed += new
            drafted, accepted = request.proposal or (0, 0)
            if request.computed == request.known + drafted:
                ahead = min(request.stop_at or request.response, request.response) - request.generated
                gain = min(1 + (accepted if drafted else request.old_accepted), ahead)
                request.stood, request.gained = min(accepted, ahead), gain
                if request.generated == 0:
                    request.first_token_s = self.now_s
                request.generated += gain
                self.generated_tokens += gain
                if request.old_tokens:
                    request.drafted_total += request.old_tokens
                    request.accepted_total += min(request.old_accepted, gain)
                    request.verifications += 1
                    request.verified_total += gain
                request.old_tokens = request.old_accepted = 0
                request.computed = request.known - 1
        verified = [r for r, _ in plan if r.proposal is not None and any(r is running for running in self.running)]
        in_trees = []
        for request in verified:
            assert self.rules is not None and request.proposal is not None
            drafted, accepted = request.proposal
            request.drafted_total += drafted
            request.accepted_total += request.stood
            request.verifications += drafted > 0
            request.verified_total += request.gained if drafted else 0
            self.late_drafted += drafted
            self.late_accepted += accepted
            if request.key is not None and arm.tree is not None:
                in_trees.append(accepted)
            else:
                request.window = self.rules.window(request.window, drafted, accepted)
        gated = self.rules is not None and self.rules.gate is not None and not opened
        if verified or gated:
            self.late_drafted *= 63 / 64
            self.late_accepted *= 63 / 64
        if in_trees:
            assert self.rules is not None and self.rules.bandit is not None and arm.tree is not None
            self.rules.bandit.observe(arm.tree, 1 + sum(in_trees) / len(in_trees), len(in_trees), took_s)
        batch = len(self.running)
        self.leaving = []
        for request in list(self.running):
            watched = request.watch_at is not None and request.generated >= request.watch_at
            if watched:
                request.watch_at = None
            if request.generated == request.response:
                request.over = True
                self.running.remove(request)
                self.leave(request.blocks)
                self.stops.append((request, self.now_s, END))
            elif request.generated == request.stop_at:
                request.stop_at = None
                self.stops.append((request, self.now_s, PAUSE))
                self.running.remove(request)
                self.leave(0)
                self.held.append(request)
            elif watched:
                self.stops.append((request, self.now_s, WATCH))
        if self.rules is not None and self.rules.elastic is not None:
            threshold, patience = self.rules.elastic
            if not self.speculates and not prefilled:
                self.calm = self.calm + 1 if batch <= threshold else 0
                if self.calm >= patience:
                    self.speculates = True
                    if any(r.key is not None for r in self.running):
                        self.recompute_running()

    def leave(self, blocks: int) -> None:
        if self.limits.async_scheduling:
            self.leaving.append(blocks)

    def pass_s(self, plan: list[tuple[Request, int]]) -> float:
        t = self.tables
        verifies = [(r, new) for r, new in plan if r.computed > 0 and new == 1 + (r.proposal or (0, 0))[0]]
        decode = [r.computed + new for r, new in verifies]
        prefills = [(r, new) for r, new in plan if not any(r is v for v, _ in verifies)]
        prefill = [(new, r.computed) for r, new in prefills]
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
        old = sum(max(r.computed + new - max(r.computed, r.prompt), 0) for r, new in prefills if r.old_tokens)
        logits = len(plan) + sum(new - 1 for _, new in verifies) + old
        dense = np.interp(sum(new for _, new in plan), t.dense_tokens, t.dense_s)
        sampled = np.interp(logits, t.sampled_sequences, t.sampled_s)
        straggler = 0.0
        if decode and t.straggler_sequences.size:
            cached = sorted((r.computed for r, _ in verifies), reverse=True)
            n = len(cached)
            which = min(np.searchsorted(t.straggler_sequences, n), t.straggler_sequences.size - 1)
            if prefill:
                rest = max([np.mean(cached), *(computed + new for new, computed in prefill)])
                straggler = max(cached[0] - rest, 0.0) * t.straggler_beside_prefill_s[which]
            else:
                each = np.interp(np.arange(1, n) / n, t.straggler_shares, t.straggler_s[which])
                straggler = float(-np.diff(cached) @ each)
        seconds = dense + attention + sampled + straggler
        return float(max(seconds, t.least_pass_s) + t.between_passes_s)
