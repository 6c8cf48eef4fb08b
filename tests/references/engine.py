"""The engine's rule, written slowly: one Python object a request, one pass at a time, block by block, scipy for the profile.

It shares no code with `simrl.engine` or `simrl.interpolation`; hypothesis holds the two against each other, and
`test_scheduler_vllm` holds it against vLLM's scheduler.

An asynchronous scheduler schedules a pass when the one before starts. Here a pass is scheduled at the boundary before it, with
what was known one boundary earlier: requests that ended or were aborted since (`over`) are still in the batch, those that came
are not seen, and drafts count as accepted. Then it catches up: `catch_up`. A pass that would be empty is scheduled after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from simrl.engine.state import END, PAUSE, WATCH, Limits
from simrl.profile.profile import Tables
from simrl.speculation.acceptance import accepted_tokens
from simrl.speculation.siblings import SiblingIndex, sibling_draft
from tests.references.blocks import Blocks
from tests.references.requests import Arm, Request, Rules


@dataclass
class ReferenceEngine:
    tables: Tables
    limits: Limits
    now_s: float = 0.0
    slowdown: float = 1.0
    batch: list[Request] = field(
        default_factory=list
    )  # in order of admission; with those over, until it is known
    queue: list[Request] = field(default_factory=list)
    news: list[Request] = field(
        default_factory=list
    )  # what sampled in the last pass or left since, in that order
    knows_all: bool = True
    plan: list[tuple[Request, int]] = field(
        default_factory=list
    )  # tokens of each request in the last pass
    held: list[Request] = field(
        default_factory=list
    )  # paused or waiting again, with their caches; oldest pause first
    admitting: bool = True
    passes: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    hit_tokens: int = 0
    lookup_tokens: int = 0
    stops: list[tuple[Request, float, int]] = field(default_factory=list)
    rules: Rules | None = None
    of_row: dict[int, Request] = field(
        default_factory=dict
    )  # the latest request for a row of the trace
    late_drafted: float = 0.0
    late_accepted: float = 0.0
    drift: float = 1.0
    calm: int = 0
    speculates: bool = False
    open: bool = False  # whether the pass to come verifies drafts …
    arm: Arm | None = None  # … and how a model drafted them
    last_prefill: int = -(10**9)  # the last pass with contexts, the first pass being 1
    wave: int = 0  # passes that were over when no rank had a request
    crowded: bool = False  # the last pass that could start requests left some waiting
    decodes_alone: bool = False  # the pass to come computes no context

    def __post_init__(self) -> None:
        t = self.tables
        self._attention = RegularGridInterpolator(t[4:8], t.attention_s)
        self._blocks = Blocks(list(range(self.limits.kv_blocks)))

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    @property
    def running(self) -> list[Request]:
        return [r for r in self.batch if not r.over]

    @property
    def waiting(self) -> list[Request]:
        return [r for r in self.queue if not r.over]

    @property
    def leaving(self) -> list[int]:
        """The blocks of those that are over, but not for the scheduler."""
        return [r.blocks for r in self.batch if r.over]

    @property
    def places(self) -> int:
        """How many take part in the pass to come, with those that are over."""
        return sum(not r.skipped for r in self.batch)

    @property
    def free_blocks(self) -> int:
        return len(self._blocks.free)

    def lose(self, request: Request) -> None:
        """Take a request's blocks and its cache."""
        self._blocks.give_back(request.table + request.beside)
        request.windows, request.states, request.in_flight = [], [], 0
        request.table, request.named, request.computed, request.sampled = [], 0, 0, False
        request.unsure = 0

    @property
    def totals(self) -> dict[str, int]:
        return {
            "passes": self.passes,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens": self.prefill_tokens,
            "preemptions": self.preemptions,
            "hit_tokens": self.hit_tokens,
            "lookup_tokens": self.lookup_tokens,
        }

    @property
    def busy(self) -> bool:
        """Whether a next pass would do something, or is under way with requests that are over."""
        return any(not r.skipped for r in self.batch) or (bool(self.waiting) and self.admitting)

    def submit(
        self,
        prompt: int,
        response: int,
        generated: int = 0,
        cached: int = 0,
        prompt_key: int = -1,
        sample_key: int = -1,
        shared_tokens: int | None = None,
        salt: int | None = None,
    ) -> Request:
        request = Request(prompt, response, generated, cached, seen_at=self.passes + 1)
        request.prompt_key, request.sample_key = prompt_key, sample_key
        request.salt = salt
        request.shared = prompt if shared_tokens is None else shared_tokens
        self.queue.append(request)
        return request

    def stop_at(self, request: Request, tokens: int, kind: int) -> None:
        if kind == WATCH:
            request.watch_at = tokens
        else:
            request.stop_at = tokens

    def resume(self, request: Request, observation_tokens: int) -> None:
        request.prompt += observation_tokens
        request.seen_at = self.passes + 1
        self.queue.append(request)

    def evict_oldest(self) -> None:
        self.lose(self.held.pop(0))

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
        if request in self.queue and (
            self.knows_all or request.seen_at > self.passes or not self.busy
        ):
            self.queue.remove(request)
        if request in self.held and request not in self.queue:  # else it may have been scheduled
            self.held.remove(request)
            self.lose(request)
        if request in self.news:
            self.news.remove(request)
        self.news.append(request)
        if not self.limits.async_scheduling:
            self.catch_up()

    def recompute_running(self) -> None:
        """No pass is scheduled ahead of this: it comes when all that was known is over."""
        self.catch_up()
        for request in reversed(self.batch):
            self.lose(request)
            self.queue.insert(0, request)
        self.batch = []
        while self.held:
            self.evict_oldest()
        for request in self.queue:
            request.computed = 0
        self._blocks.forget()

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
        return self.rules.gate is None or self.rules.gate(rate, self.places)

    def drafts(self, request: Request) -> bool:
        """Whether a request has a source, and decodes: what only recomputes its last token does not."""
        if request.runs is request.key is request.row is None or request.skipped:
            return False
        return request.sampled

    def choose(self, modelled: int) -> Arm:
        """How a model drafts in this pass, for so many requests."""
        assert self.rules is not None
        if self.rules.bandit is None or not modelled:
            return self.rules.arms[0]
        strategy = self.rules.bandit.choose(modelled)
        return next(arm for arm in self.rules.arms if arm.tree == strategy)

    def propose(self, request: Request, arm: Arm) -> tuple[int, int]:
        room = (
            self.limits.kv_blocks * self.limits.block_size - request.computed - request.unsure - 1
        )
        window = max(min(request.window, room), 0)
        if request.over:
            return window, 0
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
        levels = accepted_tokens(
            request.key, request.generated, hardness, table, arm.tree.draft_depth
        )
        return nodes, min(levels, nodes)

    def name_blocks(self, request: Request, tokens: int) -> None:
        """Let the full blocks of a request's first tokens be found."""
        if not self.limits.prefix_caching:
            return
        size = self.limits.block_size
        for block in range(request.named, tokens // size):
            self._blocks.name(request.table[block], request.name(block, size))
            request.named = block + 1

    def catch_up(self) -> None:
        """Let the scheduler know what happened since it scheduled the last pass."""
        for request in self.news:
            if request in self.batch and self.limits.async_scheduling:
                self.name_blocks(request, request.computed)
        for request in [r for r in self.news if r.over]:
            self.batch = [r for r in self.batch if r is not request]
            self.queue = [r for r in self.queue if r is not request]
            self.held = [r for r in self.held if r is not request]
            self.lose(request)
        self.news = []
        for request in self.batch:
            request.delivered, request.unsure = request.prompt + request.generated, 0
        self.knows_all = True

    def find(self, request: Request) -> list[int]:
        """Return the blocks that hold the beginning of a waiting request's text; its last token is always computed."""
        if not self.limits.prefix_caching or request.table:
            return []
        size = self.limits.block_size
        return self._blocks.find(
            request.name(block, size) for block in range((request.known - 1) // size)
        )

    def admits(self) -> bool:
        """Whether the first waiting request may start, as far as places and blocks go."""
        if not self.admitting or not self.queue or len(self.batch) >= self.limits.max_num_seqs:
            return False
        request = self.queue[0]
        if not self.knows_all and request.seen_at > self.passes:
            return False
        return self.fits(request, request.known)

    def fits(self, request: Request, tokens: int) -> bool:
        """Whether there are blocks for so many tokens of the first waiting request."""
        found = self.find(request)
        limits, columns = self.limits, self.blocks(tokens)
        flying = limits.max_num_batched_tokens * (1 + limits.async_scheduling)
        windowed = min(columns, self.blocks(limits.window_tokens - 1 + flying) + 1)
        need = limits.full_groups * columns + limits.window_groups * windowed + limits.state_blocks
        need += self._blocks.unused(found) - len(found)
        need += limits.watermark_blocks if self.batch else 0
        return need <= self.free_blocks + sum(r.blocks for r in self.held)

    def needed(self, request: Request, tokens: int) -> int:
        """Return the blocks that a request takes to have room for `tokens`."""
        limits, columns = self.limits, self.blocks(tokens)
        need = max(limits.full_groups * columns - len(request.table), 0)
        for group in range(limits.window_groups):
            need += max(columns - len(request.windows[group] if request.windows else ()), 0)
        return need + limits.state_blocks - len(request.states)

    def take(self, request: Request, tokens: int) -> None:
        """Let a request take the blocks that it needs, group by group."""
        limits, columns = self.limits, self.blocks(tokens)
        request.table += self._blocks.take(
            max(limits.full_groups * columns - len(request.table), 0)
        )
        request.windows = request.windows or [[] for _ in range(limits.window_groups)]
        for window in request.windows:
            window += self._blocks.take(max(columns - len(window), 0))
        request.states += self._blocks.take(limits.state_blocks - len(request.states))

    def leave_windows(self, request: Request) -> None:
        """Let a request give back the blocks that no longer have a token of a window, by what the scheduler knows."""
        computed = request.computed
        if self.limits.async_scheduling and not self.knows_all:
            computed += request.unsure - request.in_flight
        for window in request.windows:
            for column, block in enumerate(window):
                last = (column + 1) * self.limits.block_size - 1
                if block is not None and last < computed - self.limits.window_tokens + 1:
                    self._blocks.give_back([block])
                    window[column] = None

    def padding(self, request: Request) -> int:
        """Return the drafts with which an admitted request is padded that has only its last token to compute."""
        padding = self.rules.padding if self.rules else 0
        fits_alone = request.known + padding < self.limits.kv_blocks * self.limits.block_size
        return padding if fits_alone and padding < self.limits.max_num_batched_tokens else 0

    def schedule(self) -> list[tuple[Request, int]]:
        """Return the tokens of each request in the next pass."""
        budget = self.limits.max_num_batched_tokens
        plan: list[tuple[Request, int]] = []
        preempted = prefilling = False
        self.decodes_alone = self.puts_contexts_off()
        at = 0
        while at < len(self.batch) and budget > 0:
            request = self.batch[at]
            at += 1
            if request.skipped or (self.decodes_alone and not request.sampled):
                continue
            drafted = request.proposal[0] if request.proposal else 0
            new = min(request.known - request.computed + drafted, budget)
            self.leave_windows(request)
            need = self.needed(request, request.computed + request.unsure + new)
            while need > self.free_blocks and self.held:
                self.evict_oldest()
            while need > self.free_blocks and request in self.batch:
                victim = self.batch.pop()
                self.lose(victim)
                self.preemptions += 1
                preempted = True
                if not victim.over:
                    self.queue.insert(0, victim)
            if request not in self.batch:
                break
            tokens = request.computed + request.unsure + new
            self.take(request, tokens)
            self.name_blocks(request, min(tokens, request.delivered))
            budget -= new
            prefilling |= not request.sampled
            if request.proposal:
                request.proposal = (
                    min(request.proposal[0], new - 1),
                    min(request.proposal[1], new - 1),
                )
            plan.append((request, new))
        decoding, prefilled = bool(plan), False
        while not preempted and budget > 0 and self.admits():
            request = self.queue[0]
            found = self.find(request)
            computed = max(len(found) * self.limits.block_size, request.computed)
            if self.decodes_alone and request.known - computed > 1:
                break
            new = min(request.known - computed, budget)
            request.padding = 0
            if request.known - computed == 1 and not prefilling and (decoding or computed > 0):
                request.padding = self.padding(request)
                new += request.padding
                if new > budget or not self.fits(request, request.known + request.padding):
                    break
            self.batch.append(self.queue.pop(0))
            self.held = [r for r in self.held if r is not request]
            if not request.table:
                self.hit_tokens += len(found) * self.limits.block_size
                self.lookup_tokens += request.known
            self._blocks.use(found)
            request.table += found
            request.named = max(len(found), request.named)
            request.computed, request.proposal = computed, None
            request.delivered, request.sampled = request.prompt + request.generated, False
            while self.needed(request, computed + new) > self.free_blocks:
                self.evict_oldest()
            self.take(request, computed + new)
            self.name_blocks(request, min(computed + new, request.delivered))
            budget -= new
            prefilled |= request.known - computed > 1
            plan.append((request, new))
        if not preempted and not self.decodes_alone:
            self.crowded = any(self.knows_all or r.seen_at <= self.passes for r in self.queue)
        if prefilling or prefilled:
            self.last_prefill = self.passes + 1
        return plan

    def puts_contexts_off(self) -> bool:
        """Return whether the pass to come leaves out all that is not decoding (vLLM's `prefill_schedule_interval`)."""
        interval, number = self.limits.prefill_interval, self.passes + 1
        in_step = (number - 1 - self.wave) % interval == 0
        early = not in_step if self.limits.dp > 1 else number - self.last_prefill < interval
        return early and not self.crowded and any(r.sampled for r in self.batch)

    def draft(self) -> float:
        """Let requests draft for the pass to come; return the seconds of that."""
        self.open = self.opened()
        drafting = [r for r in self.batch if self.drafts(r)] if self.open else []
        for request in self.batch:
            request.proposal = None
        draft_s = 0.0
        if drafting:
            arm = self.arm = self.choose(sum(r.key is not None for r in drafting))
            levels = 0
            for request in drafting:
                request.proposal = self.propose(request, arm)
                in_tree = request.key is not None and arm.tree is not None
                levels = max(
                    levels, arm.tree.draft_depth if in_tree and arm.tree else request.proposal[0]
                )
            draft_s = arm.round_s + levels * arm.step_s
        return draft_s

    def iterate(self) -> None:
        draft_s = self.draft()
        plan, prefilled = self.schedule(), self.prefill_tokens
        seconds = self.pass_s(plan) if plan else 0.0
        places = self.places
        self.catch_up()
        if not plan:
            plan = self.schedule()
            seconds, places = self.pass_s(plan), self.places
        self.plan, flying = plan, dict(plan)
        for request in self.batch:
            request.in_flight = flying.get(request, 0)
        self.knows_all = not self.limits.async_scheduling
        took_s = self.slowdown * (draft_s + seconds)
        self.now_s += took_s
        prefilled = self.prefill_tokens - prefilled
        self.passes += 1
        self.gain(plan)
        self.learn(plan, took_s)
        self.stop()
        if self.rules is not None and self.rules.elastic is not None:
            threshold, patience = self.rules.elastic
            if not self.speculates and not prefilled:
                self.calm = self.calm + 1 if places <= threshold else 0
                if self.calm >= patience:
                    self.speculates = True
                    if any(r.key is not None for r in self.running):
                        self.recompute_running()
        if not self.limits.async_scheduling:
            self.catch_up()

    def learn(self, plan: list[tuple[Request, int]], took_s: float) -> None:
        """Let requests learn from what a pass that took `took_s` has verified."""
        arm = self.arm
        verified = [
            r
            for r, _ in plan
            if r.proposal is not None and any(r is running for running in self.running)
        ]
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
            if request.key is not None and arm is not None and arm.tree is not None:
                in_trees.append(accepted)
            else:
                request.window = self.rules.window(request.window, drafted, accepted)
        gated = self.rules is not None and self.rules.gate is not None and not self.open
        if verified or gated:
            self.late_drafted *= 63 / 64
            self.late_accepted *= 63 / 64
        if in_trees:
            assert self.rules is not None and self.rules.bandit is not None
            assert arm is not None and arm.tree is not None
            self.rules.bandit.observe(
                arm.tree, 1 + sum(in_trees) / len(in_trees), len(in_trees), took_s
            )

    def gain(self, plan: list[tuple[Request, int]]) -> None:
        """Give each request what it computes and gains in a pass that is over."""
        for request, new in plan:
            request.computed += new
            drafted, accepted = request.proposal or (0, 0)
            drafted += request.padding
            request.padding = 0
            request.sampled = request.computed == request.known + drafted
            if request.over:
                continue
            if request.sampled:
                self.news.append(request)
                ahead = (
                    min(request.stop_at or request.response, request.response) - request.generated
                )
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
                verified_old, request.old_tokens, request.old_accepted = request.old_tokens, 0, 0
                request.computed = request.known - 1
                if verified_old:
                    self.name_blocks(request, request.computed)
                if self.limits.async_scheduling:
                    request.unsure = new - gain if drafted else 0

    def stop(self) -> None:
        """Let requests stop that have reached their stops."""
        for request in self.running:
            watched = request.watch_at is not None and request.generated >= request.watch_at
            if watched:
                request.watch_at = None
            if request.generated == request.response:
                request.over, request.skipped = True, request.sure
                self.stops.append((request, self.now_s, END))
            elif request.generated == request.stop_at:
                request.stop_at = None
                self.stops.append((request, self.now_s, PAUSE))
                self.pause(request)
            elif watched:
                self.stops.append((request, self.now_s, WATCH))

    def pause(self, request: Request) -> None:
        """Take a request out of the batch. With a prefix cache its place and its blocks leave as those of one that ends."""
        caching = self.limits.prefix_caching
        left = replace(request, over=True, skipped=request.sure or not caching)
        self.batch = [left if r is request else r for r in self.batch]
        self.news = [left if r is request else r for r in self.news]
        if caching:
            request.table, request.named, request.computed, request.sampled = [], 0, 0, False
            request.unsure = 0
        else:
            left.table = []
            self.held.append(request)

    def pass_s(self, plan: list[tuple[Request, int]]) -> float:
        t = self.tables
        verifies = [
            (r, new)
            for r, new in plan
            if r.computed > 0 and new == 1 + (r.proposal or (0, 0))[0] + r.padding
        ]
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
        attention = self._attention(
            [np.clip(x, low, high) for x, (low, high) in zip(point, edges, strict=True)]
        )[0]
        old = sum(
            max(r.computed + new - max(r.computed, r.prompt), 0)
            for r, new in prefills
            if r.old_tokens
        )
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
        least_s = t.least_pass_s + t.least_sequence_s * (
            logits - sum(new - 1 for _, new in verifies)
        )
        return float(max(seconds, least_s) + t.between_passes_s)
