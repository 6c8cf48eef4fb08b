"""Data-parallel attention ranks in lock step, as vLLM runs a mixture of experts with `--data-parallel-size`: one worker.

Invariant: every rank schedules its own requests, over its own KV blocks, as an `Engine` does; all ranks make a pass together.

    pass = max over ranks (dense + attention + sampled) + experts(tokens of all ranks) + between_passes_s

A rank without work makes a dummy pass of one token while another has work. While the largest rank's pass fits a CUDA graph
(`Limits.graph_tokens`), all ranks are padded to its tokens, which also go through the experts; otherwise none is. Under async
scheduling a dummy pass is scheduled ahead like any other, so a request at an idle rank waits for it.

A request goes to the rank with the least load as vLLM's balancer counts it: its unfinished requests and, where some wait, a
penalty on these by how full the KV cache is; ties go round. It stays there until it ends or leaves, also between its turns.

Not modelled: that the balancer's counts are up to 100 ms old; the up to 16 dummy passes after the last request; that without
CUDA graphs in one rank's pass all ranks launch their kernels one by one; drafts; microbatches that hide the exchange.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from simrl.engine.engine import COUNTED, MEANWHILE, SPENT, Engine, run
from simrl.engine.requests import REQUESTS, TOTALS, Engines, Limits, Stop, Until
from simrl.engine.resolved import resolved
from simrl.profile.compiled import kernel
from simrl.profile.profile import Tables
from simrl.speculation.bandit import bandit_states
from simrl.speculation.decoding import Decoding, Floats


@kernel
def least_loaded(e: Engines, limits: Limits, first: int) -> int:
    """Return the rank that a new request goes to; of equal ones the first from `first` on, in turn."""
    n_ranks, best, least = e.totals.shape[0], 0, np.inf
    for i in range(n_ranks):
        k = (first + i) % n_ranks
        t = e.totals[k]
        used = 1.0 - t.free_blocks / limits.kv_blocks
        load = t.n_running + t.n_waiting - t.n_going + 6.0 * t.n_waiting * max(used - 0.5, 0.0)
        if load < least:
            best, least = k, load
    return best


class LockStep:
    """A worker of `limits.dp` ranks with the interface of an `Engine` without drafts. A slot is one of a rank's, times the
    number of ranks, plus the rank."""

    decoding = None
    goes_pass_by_pass = False

    def __init__(self, tables: Tables, limits: Limits) -> None:
        self.limits = limits
        self._tables = tables
        self.ranks = [Engine(tables, limits) for _ in range(limits.dp)]
        self._submitted = 0
        self._here = self._there = _ranks(limits.dp, 0)
        self._make_room(16)
        self._run = resolved(run, self._here, 0, tables, limits, None, Until(0.0, True))
        self._least_loaded = resolved(least_loaded, self._here, limits, 0)

    @property
    def now_s(self) -> float:
        return self.ranks[0].now_s

    @now_s.setter
    def now_s(self, time_s: float) -> None:
        self._here.totals["now_s"] = time_s

    @property
    def slowdown(self) -> float:
        return self.ranks[0].slowdown

    @slowdown.setter
    def slowdown(self, factor: float) -> None:
        self._here.totals["slowdown"] = factor

    @property
    def admitting(self) -> bool:
        """Return whether waiting requests may start."""
        return self.ranks[0].admitting

    @admitting.setter
    def admitting(self, admitting: bool) -> None:
        self._here.totals["admitting"] = admitting

    @property
    def running(self) -> int:
        return sum(rank.running for rank in self.ranks)

    @property
    def waiting(self) -> int:
        return sum(rank.waiting for rank in self.ranks)

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV caches that no request holds."""
        return sum(rank.free_blocks for rank in self.ranks)

    @property
    def busy(self) -> bool:
        """True if a next pass would do something now."""
        return any(rank.busy for rank in self.ranks)

    @property
    def generated_total(self) -> int:
        return int(self._here.totals["generated_tokens"].sum())

    @property
    def spent(self) -> Floats:
        """The totals `SPENT`: the seconds of a mean rank, and the sums of the others over all ranks."""
        summed = np.sum([rank.spent for rank in self.ranks], axis=0)
        seconds = [name.endswith("_s") and name != "slot_s" for name in SPENT]
        return np.where(seconds, summed / len(self.ranks), summed)

    @property
    def totals(self) -> dict[str, int]:
        """Passes, and over all ranks generated tokens, prefilled tokens and preemptions since the start."""
        summed = {name: sum(rank.totals[name] for rank in self.ranks) for name in COUNTED}
        return {**summed, "passes": self.ranks[0].totals["passes"]}

    def submit(self, *request: Any, **more: Any) -> int:
        """Do as `Engine.submit`, at the rank with the least load."""
        k = self._least_loaded(self._here, self.limits, self._submitted % self.limits.dp)
        slot = self.ranks[k].submit(*request, **more)
        self._submitted += 1
        return slot * self.limits.dp + k

    def settle(self, time_s: float) -> list[Stop]:
        """Do as `Engine.settle`."""
        stops: list[Stop] = []
        until, now_s = Until(time_s, True), -np.inf
        while now_s <= time_s and self.busy:
            now_s = self._run(self._here, 0, self._tables, self.limits, None, until)
            stops += self.stops()
        if now_s <= time_s:
            self.now_s = max(self.now_s, time_s)
        return stops

    def next_stop_s(self) -> float:
        """Do as `Engine.next_stop_s`."""
        if not self.busy:
            return np.inf
        for array, other in zip(self._there[:2], self._here[:2], strict=True):
            array.view(np.int64)[:] = other.view(np.int64)
        stop_s: float = self._run(self._there, 0, self._tables, self.limits, None, self._looks_ahead)
        return stop_s if self._there.totals["n_stopped"].any() else np.inf

    def take_next_stop(self) -> list[Stop]:
        """Move to the boundary that `next_stop_s` found, and return what stopped there."""
        self._here, self._there = self._there, self._here
        for k, rank in enumerate(self.ranks):
            rank.hold(self._here.requests[k], self._here.totals[k : k + 1])
        return self.stops()

    def run_until_idle(self) -> None:
        """Run everything that was submitted."""
        self._run(self._here, 0, self._tables, self.limits, None, Until(np.inf, False))

    def stops(self) -> list[Stop]:
        """Return what stopped in the last pass, now."""
        dp = self.limits.dp
        return [(slot * dp + k, now_s, kind) for k, rank in enumerate(self.ranks) for slot, now_s, kind in rank.stops()]

    @property
    def _looks_ahead(self) -> Until:
        """The end of a look ahead."""
        return Until(min(rank.paused.next_stop.time_s for rank in self.ranks), True)

    def recompute_running(self) -> None:
        """Drop the KV caches of all requests; see `Engine.recompute_running`."""
        for rank in self.ranks:
            rank.recompute_running()

    def require_fits(self, prompt_tokens: int, response_tokens: int) -> None:
        """Raise `InputError` for a request that never fits the KV cache of a rank."""
        self.ranks[0].require_fits(prompt_tokens, response_tokens)

    def _at(self, slot: int) -> tuple[Engine, int]:
        """Return the rank of a slot, and its number there."""
        return self.ranks[slot % self.limits.dp], slot // self.limits.dp

    def stop_at(self, slot: int, tokens: int, kind: int) -> None:
        """Do as `Engine.stop_at`."""
        rank, at = self._at(slot)
        rank.stop_at(at, tokens, kind)

    def resume(self, slot: int, observation_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Do as `Engine.resume`."""
        rank, at = self._at(slot)
        rank.resume(at, observation_tokens, cached_tokens)

    def drop_paused(self, slot: int) -> None:
        """Do as `Engine.drop_paused`."""
        rank, at = self._at(slot)
        rank.drop_paused(at)

    def pin_paused(self, slot: int, until_s: float) -> None:
        """Do as `Engine.pin_paused`."""
        rank, at = self._at(slot)
        rank.pin_paused(at, until_s)

    def unpin_paused(self, slot: int, until_s: float) -> None:
        """Do as `Engine.unpin_paused`."""
        rank, at = self._at(slot)
        rank.unpin_paused(at, until_s)

    def abort(self, slot: int) -> int:
        """Do as `Engine.abort`."""
        rank, at = self._at(slot)
        return rank.abort(at)

    def found_tokens(self, slot: int) -> int:
        """Do as `Engine.found_tokens`."""
        rank, at = self._at(slot)
        return rank.found_tokens(at)

    def computed_tokens(self, slot: int) -> int:
        """Return the tokens of a request whose KV is in its rank's cache."""
        rank, at = self._at(slot)
        return rank.computed_tokens(at)

    def generated_tokens(self, slot: int) -> int:
        rank, at = self._at(slot)
        return rank.generated_tokens(at)

    def first_token_s(self, slot: int) -> float:
        """Do as `Engine.first_token_s`."""
        rank, at = self._at(slot)
        return rank.first_token_s(at)

    def _make_room(self, capacity: int) -> None:
        """Make room for `capacity` requests at each rank."""
        self._here, self._there = _ranks(self.limits.dp, capacity), _ranks(self.limits.dp, capacity)
        for k, rank in enumerate(self.ranks):
            rank.live_in(self._here.requests[k], self._here.totals[k : k + 1], self._make_room)


def _ranks(n: int, capacity: int) -> Engines:
    """Return arrays for n ranks."""
    none = np.zeros((n, 0), np.int64)
    bandits = bandit_states(Decoding().bandit, 0, n)
    return Engines(np.zeros((n, capacity), REQUESTS), np.zeros(n, TOTALS), bandits, none, none[0], MEANWHILE)


def engine_of(tables: Tables, limits: Limits, decoding: Decoding | None = None, key: int = 0) -> Engine:
    """Return an engine, or ranks in lock step, which have its interface: drafts excepted, and nothing drafts then."""
    return Engine(tables, limits, decoding, key) if limits.dp == 1 else cast("Engine", LockStep(tables, limits))
