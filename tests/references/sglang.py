"""SGLang's scheduler, written slowly: one Python object a request, a radix cache of one node a token, one pass at a time.

It shares no code with `simrl.engine`. They are the rules of SGLang 0.5.23 without overlap, mixed chunks, priorities or
speculation, with page size 1 (`managers/schedule_policy.py`, `managers/schedule_batch.py`, `mem_cache/radix_cache.py`), but
for the cache's age: a text is used when a request leaves it, and its leaves are evicted token by token; SGLang evicts whole
nodes, and looking counts as use. A request locks its last token, too, if another one left it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tests.schedule_scenarios import Pass, Progress, Scenario


@dataclass(eq=False)
class Node:
    """A token of a text."""

    parent: Node | None
    token: Hashable
    children: dict[Hashable, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


class Radix:
    """Tokens of texts that requests compute or have left."""

    def __init__(self) -> None:
        self.root, self.clock = Node(None, None), 0
        self.nodes: list[Node] = []

    def match(self, text: Sequence[Hashable]) -> list[Node]:
        path, node = [], self.root
        for token in text:
            if token not in node.children:
                break
            node = node.children[token]
            path.append(node)
        return path

    def insert(self, text: Sequence[Hashable]) -> list[Node]:
        path = self.match(text)
        for token in text[len(path) :]:
            parent = path[-1] if path else self.root
            parent.children[token] = Node(parent, token)
            path.append(parent.children[token])
            self.nodes.append(path[-1])
        return path

    def touch(self, path: Sequence[Node]) -> None:
        self.clock += 1
        for node in path:
            node.used = self.clock

    def evictable(self) -> int:
        return sum(node.locks == 0 for node in self.nodes)

    def evict(self, tokens: int) -> None:
        for _ in range(tokens):
            leaves = [node for node in self.nodes if not node.children and node.locks == 0]
            oldest = min(leaves, key=lambda node: node.used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.token]
            self.nodes.remove(oldest)


@dataclass(eq=False)
class Request:
    """A request: its text is its prompt, of which siblings share the first tokens, and what is its own."""

    i: int
    key: int
    shared: int
    prompt: int
    generated: int
    turn_end: int
    computed: int = 0
    path: list[Node] = field(default_factory=list)  # its locked tokens in the cache …
    alone: int = 0  # … and its tokens beside it
    whole: bool = False  # its context is computed: it decodes

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    def text(self, tokens: int) -> list[Hashable]:
        return [(self.key, p) if p < self.shared else (-1, self.i, p) for p in range(tokens)]


class SglangPlayer:
    """SGLang's scheduler, and the memory it schedules."""

    def __init__(self, scenario: Scenario) -> None:
        self.limits, self.radix = scenario.limits, Radix()
        self.running: list[Request] = []
        self.queue: list[Request] = []
        self.full, self.ratio, self.retractions = False, self.limits.start_ratio, 0
        self.hits = self.looked_up = 0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.queue)

    def idle_until(self, boundary: int) -> None:
        pass

    def submit(self, i: int, progress: Progress) -> None:
        sample = progress.sample
        self.queue.append(
            Request(
                i,
                sample.prompt_key if self.limits.prefix_caching else -2 - i,
                sample.prompt,
                progress.prompt,
                progress.generated,
                progress.turn_end,
            )
        )

    def resume(self, i: int, progress: Progress, observation: int) -> None:
        self.submit(i, progress)

    def abort(self, i: int) -> None:
        for request in [r for r in self.running if r.i == i]:
            self.running.remove(request)
            self.leave(request, keeps=True)
        self.queue = [r for r in self.queue if r.i != i]

    def reset(self) -> None:
        for request in self.running:
            self.leave(request, keeps=False)
        self.queue = self.running + self.queue
        self.running, self.radix = [], Radix()

    @property
    def free(self) -> int:
        """Tokens that are free or can be evicted."""
        locked = len(self.radix.nodes) - self.radix.evictable()
        return self.limits.kv_blocks - locked - sum(r.alone for r in self.running)

    def lock(self, request: Request, path: list[Node]) -> None:
        for node in path[len(request.path) :]:
            node.locks += 1
        request.path = path

    def leave(self, request: Request, keeps: bool) -> None:
        """Free what a request has; if it `keeps`, all its computed tokens can be found again."""
        path = request.path
        if keeps and self.limits.prefix_caching:
            path = self.radix.insert(request.text(request.computed))
        self.radix.touch(path)
        for node in request.path:
            node.locks -= 1
        request.path, request.alone, request.computed, request.whole = [], 0, 0, False
        self.full = False

    def take(self, request: Request, tokens: int) -> None:
        """Let a request have tokens of the memory."""
        request.alone += tokens
        beside = sum(r.alone for r in self.running) + len(self.radix.nodes)
        self.radix.evict(max(beside - self.limits.kv_blocks, 0))

    @property
    def cap(self) -> int:
        """Tokens for which a request keeps room in the pass that computes its context, whatever it has generated."""
        return min(self.limits.max_new_tokens, self.limits.clip_max_new_tokens)

    def to_come(self, request: Request) -> int:
        most = max(self.limits.max_new_tokens - request.generated, 0)
        return min(most, self.limits.clip_max_new_tokens)

    def prefill(self) -> list[tuple[Request, int]]:
        """Schedule a pass of prompts, if there is one."""
        if not self.running:
            self.full = False
        partial = [r for r in self.running if not r.whole]
        if not partial and (self.full or not self.queue):
            return []
        budget, plan = self.limits.max_num_batched_tokens, []
        offset = self.ratio * sum(self.to_come(r) for r in self.running if r.whole)
        self.full = False
        for request in partial:
            tokens = min(request.known - request.computed, budget)
            self.take(request, tokens)
            plan.append((request, tokens))
            offset += 1
            if request.computed + tokens == request.known:
                offset += self.cap
            budget -= tokens
        if self.limits.longest_prefix_first and len(self.queue) <= 128:
            self.queue.sort(key=lambda r: -min(len(self.radix.match(r.text(r.known))), r.known - 1))
        while budget > 0 and self.queue and not self.full:
            if len(self.running) >= self.limits.max_num_seqs:
                break
            request = self.queue[0]
            path = self.radix.match(request.text(request.known))
            cached = min(len(path), request.known - 1)
            free = self.free - sum(node.locks == 0 for node in path)
            need = request.known - cached + self.to_come(request) + 1
            if self.running and need >= free - offset:
                self.full = True
                break
            tokens = min(request.known - cached, budget)
            self.running.append(self.queue.pop(0))
            self.lock(request, path)
            request.computed = cached
            self.take(request, tokens)
            self.hits += cached
            self.looked_up += request.known
            plan.append((request, tokens))
            budget -= tokens
            offset += 1
            if cached + tokens == request.known:
                offset += self.cap
        return plan

    def decode(self) -> list[tuple[Request, int]]:
        """Schedule a pass in which all decode, without those that have to be retracted for it."""
        retracted = []
        if len(self.running) > self.free:
            self.running.sort(key=lambda r: (-r.generated, r.prompt))
        while len(self.running) > 1 and len(self.running) > self.free:
            retracted.append(self.running.pop())
            self.leave(retracted[-1], keeps=False)
        self.queue += retracted
        self.retractions += len(retracted)
        n = len(self.running)
        if retracted:
            made = sum(r.generated for r in self.running)
            self.ratio = min((made + 20 * n) / (self.limits.max_new_tokens * n + 1), 1.0)
        elif n:
            least = 0.14 * self.limits.start_ratio
            self.ratio = max(self.ratio - (self.limits.start_ratio - least) / 600, least)
        for request in self.running:
            self.take(request, 1)
        return [(request, 1) for request in self.running]

    def one_pass(self, reset_follows: bool) -> Pass:
        retractions, hits, looked_up = self.retractions, self.hits, self.looked_up
        plan = self.prefill()
        prefills = bool(plan)
        plan = plan or self.decode()
        assert self.free >= 0
        ended = []
        for request, tokens in plan:
            request.computed += tokens
            if prefills and self.limits.prefix_caching:
                self.keep(request)
            if request.computed == request.known:
                request.generated += 1
                request.whole = True
        for request in [r for r in self.running if r.generated >= r.turn_end]:
            self.running.remove(request)
            self.leave(request, keeps=True)
            ended.append(request.i)
        if not self.busy:
            self.ratio = self.limits.start_ratio
        return Pass(
            {r.i: (r.computed, r.generated) for r in (*self.running, *self.queue)},
            self.retractions - retractions,
            self.hits - hits,
            self.looked_up - looked_up,
            {request.i: tokens for request, tokens in plan},
            ended,
        )

    def keep(self, request: Request) -> None:
        """Let others find what a request has computed of its context; what they have computed, too, is freed."""
        self.lock(request, self.radix.insert(request.text(request.computed)))
        request.alone = 0
