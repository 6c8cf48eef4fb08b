"""Prefill and decode pools: the prefill workers, and the requests of a decode worker on their way
to its engine.

Invariant: a request stays at its decode worker from its start to its end. When a turn begins, and
after an update that interrupts it, it waits there for room: a decode worker has KV blocks for it
before its prefill begins (SGLang 0.5.23, `disaggregation/decode.py`). Then it is a request at a
prefill worker, which computes its context and one more token, and its KV cache crosses the links of
both workers. A link sends one cache after the other, at the rate of the slower side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import simpy

from simrl.engine.requests import blocks_to_start
from simrl.runtime.events import call_at, gather, on_fire
from simrl.runtime.faults import HearsOfLosses
from simrl.runtime.requests import WorkerRequest
from simrl.runtime.rollout import Rollout
from simrl.runtime.worker import LoadMode

if TYPE_CHECKING:
    from simrl.runtime.simulated_worker import SimulatedWorker

# SGLang 0.5.23 (num_reserved_decode_tokens): what a decode worker reserves for each of its requests
RESERVED_TOKENS = 512
# sgl-router's cache_aware (balance_abs_threshold, balance_rel_threshold): requests that an
# overloaded worker has more than the one with the fewest, and times as many
MORE, TIMES = 64, 1.5


_Then = Callable[[Rollout, int], None]
Ends = tuple[bool, Sequence[simpy.Event]]  # whether the response is done, and what fires then


class PrefillPool:
    """Prefill workers that all decode workers share. On a link, a token's KV takes `s_per_token`.
    With `by_prefix`, a sample returns to its worker, or goes where its group was last, unless that
    worker is overloaded; otherwise it goes to the worker with the fewest requests."""

    def __init__(
        self,
        env: simpy.Environment,
        workers: Sequence[SimulatedWorker],
        s_per_token: float,
        by_prefix: bool,
    ) -> None:
        self.workers, self._env = workers, env
        self._s_per_token, self._by_prefix = s_per_token, by_prefix
        self._aborted: list[dict[int, bool]] = [{} for _ in workers]  # by uid of their requests
        self._free_s = [0.0] * len(workers)  # when the link of each has sent what waits for it
        self._last: dict[Any, int] = {}  # worker of the last prefill of a sample, and of a group
        self._active = set(range(len(workers)))
        self._waiting: dict[int, tuple[Rollout, _Then]] = {}  # for an active worker
        self._load: tuple[int, simpy.Event] = 0, env.event().succeed()
        for worker in workers:
            worker.prefills = True

    def submit(self, rollout: Rollout, then: _Then) -> None:
        """Prefill a rollout's context. Call `then` with its worker and the rollout, which has one
        more token unless it was aborted."""
        uid = rollout.sample.uid
        if not self._active:
            self._waiting[uid] = rollout, then
            return
        worker = self._place(rollout)
        self._aborted[worker][uid] = False
        end = self.workers[worker].submit(rollout.sample, rollout, rollout.tokens + 1)
        on_fire(end, lambda end: self._ended(rollout, end.value, worker, then))

    def _place(self, rollout: Rollout) -> int:
        """Return the worker of the next prefill of a rollout."""
        sample = rollout.sample
        group = sample.epoch, sample.step, sample.prompt_id
        requests = {worker: len(self._aborted[worker]) for worker in sorted(self._active)}
        fewest = min(requests, key=requests.__getitem__)
        place = self._last.get(sample.uid, self._last.get(group, fewest))
        limit = max(requests[fewest] + MORE, TIMES * requests[fewest])
        if not self._by_prefix or requests.get(place, limit + 1) > limit:
            place = fewest
        self._last[sample.uid] = self._last[group] = place
        return place

    def _ended(self, before: Rollout, rollout: Rollout, worker: int, then: _Then) -> None:
        aborted = self._aborted[worker].pop(rollout.sample.uid)
        if rollout.tokens > before.tokens or aborted:
            then(rollout, worker)
        else:  # its worker was lost
            self.submit(rollout, then)

    def abort(self, rollout: Rollout) -> None:
        """End a rollout's prefill, if it has begun and has not ended."""
        uid = rollout.sample.uid
        for worker, aborted in zip(self.workers, self._aborted, strict=True):
            if uid in aborted:
                aborted[uid] = True
                worker.abort(rollout.sample)
        if uid in self._waiting:
            _, then = self._waiting.pop(uid)
            then(rollout, 0)

    def send(self, worker: int, tokens: int, link_free_s: float) -> float:
        """Send a KV cache from a worker to a link that is free at `link_free_s`. Return when it is
        there."""
        begins_s = max(self._env.now, self._free_s[worker], link_free_s)
        self._free_s[worker] = begins_s + tokens * self._s_per_token
        return self._free_s[worker]

    def load_weights(self, version: int, running: LoadMode, retry_s: float) -> simpy.Event:
        """Load weights at all workers, once for all decode workers that load them."""
        if version > self._load[0]:
            loads = [worker.load_weights(version, running, retry_s) for worker in self.workers]
            self._load = version, gather(self._env, loads)
        return self._load[1]

    def retire(self, worker: int) -> None:
        """Give a lost worker no more prefills."""
        self._active.discard(worker)

    def activate(self, worker: int) -> None:
        """Take a worker back that was lost."""
        self._active.add(worker)
        waiting, self._waiting = self._waiting, {}
        for rollout, then in waiting.values():
            self.submit(rollout, then)


class Arrivals:
    """The requests of a decode worker that are not in its engine: they wait for room, or are
    prefilled and sent."""

    def __init__(self, env: simpy.Environment, worker: SimulatedWorker, pool: PrefillPool) -> None:
        self.pool, self._env, self._worker = pool, env, worker
        self._waiting: dict[WorkerRequest, None] = {}
        self._blocks: dict[WorkerRequest, int] = {}  # taken for requests that are prefilled or sent
        self._ends: dict[WorkerRequest, Ends] = {}
        self._link_free_s = 0.0

    def begin(self, request: WorkerRequest) -> None:
        """Begin a turn of a request, or go on after an interruption."""
        if self._worker.is_here(request):
            self._waiting[request] = None
            self._worker.command(lambda: None)

    def let_in(self) -> None:
        """Let the prefills begin of requests for which there is room at the engine's boundary."""
        engine, limits = self._worker.engine, self._worker.engine.limits
        while self._waiting and not self._worker.heeds_stops:
            request = next(iter(self._waiting))
            rollout, here = request.rollout, engine.running + engine.waiting + len(self._blocks)
            blocks = blocks_to_start(_context(rollout), limits)
            reserved = (here + 1) * limits.full_groups * RESERVED_TOKENS // limits.block_size
            room = engine.free_blocks - sum(self._blocks.values()) - reserved
            if here and (blocks > room or here >= limits.max_num_seqs * limits.dp):
                return
            del self._waiting[request]
            self._blocks[request] = blocks
            call_at(self._env, engine.now_s, partial(self._prefill, request))

    def _prefill(self, request: WorkerRequest) -> None:
        if request in self._ends:
            self._send(request, request.rollout, 0)
        else:
            self.pool.submit(request.rollout, partial(self._send, request))

    def _send(self, request: WorkerRequest, rollout: Rollout, worker: int) -> None:
        """Send the KV cache of a prefilled rollout, unless its turn or its request ends."""
        at_s, tokens = self._env.now, rollout.tokens
        if not (
            request in self._ends or tokens >= request.length or request.turn_at(tokens) is not None
        ):
            at_s = self.pool.send(worker, _context(rollout) - 1, self._link_free_s)
            self._link_free_s = at_s
        arrive = partial(self._arrive, request, rollout)
        call_at(self._env, at_s, lambda: self._worker.command(arrive))

    def _arrive(self, request: WorkerRequest, rollout: Rollout) -> None:
        del self._blocks[request]
        self._worker.prefilled(request, rollout, self._ends.pop(request, None))

    def delays(self, request: WorkerRequest, done: bool, events: Sequence[simpy.Event]) -> bool:
        """Return whether a request that is to end can do so only when its prefill has ended, which
        then ends it."""
        if request not in self._blocks:
            self._waiting.pop(request, None)
            return False
        was_done, others = self._ends.get(request, (False, ()))
        self._ends[request] = was_done or done, (*others, *events)
        self.pool.abort(request.rollout)
        return True


class PoolsLosses(NamedTuple):
    """The lost workers of both pools; `decode` workers come first."""

    dispatcher: HearsOfLosses
    pool: PrefillPool
    decode: int

    def retire(self, worker: int, lost: bool = False) -> None:
        if worker < self.decode:
            self.dispatcher.retire(worker, lost)
        else:
            self.pool.retire(worker - self.decode)

    def activate(self, worker: int, lost: bool = False) -> None:
        if worker < self.decode:
            self.dispatcher.activate(worker, lost)
        else:
            self.pool.activate(worker - self.decode)


def _context(rollout: Rollout) -> int:
    """Return the known tokens of a rollout."""
    return rollout.sample.prompt_tokens + rollout.observation_tokens + rollout.tokens
