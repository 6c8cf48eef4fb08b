"""One inference engine: continuous batching, exact to the iteration, over arrays.

Invariant: `Engine.now_s` is a boundary between two forward passes, and every pass in the past happened as vLLM V1 would
have scheduled it: running requests first, in order, then waiting ones first come first served, while `max_num_seqs`,
`max_num_batched_tokens` and the KV blocks (for all known tokens) allow; prompts in chunks. When blocks run out, the caches
of paused requests go, oldest first, then the youngest running request is preempted; what lost its cache computes it again.
Under asynchronous scheduling a pass is scheduled when the one before starts, so that it knows neither who comes nor who ends
during that one: requests join a pass later, and the places and blocks of those that end are free a pass later. (Decoupled
drafting cannot do so: which windows a pass verifies is known when it starts.)
What a caller asks takes effect at the boundary where the engine stands, so callers first `settle(t)`: the first boundary
strictly after t, or t itself if the engine is idle. A request ends after exactly `response_tokens` generated tokens, and
may have a pause, and a watched token, before.

With speculation, a pass verifies drafts: a request that decodes brings `drafted` tokens, of which the first `accepted` stand,
and gains one more (what a request has to gain is never exceeded). Which tokens it gains is never changed, only when.

`tests/references/engine.py` is the rule, written slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from simrl.engine.cost import end_of_stretch
from simrl.engine.leaving import drop_caches, remove
from simrl.engine.paused import Paused
from simrl.engine.prefix_cache import MANY, enter_all, forget_oldest, found_blocks, short_of_nodes
from simrl.engine.repeat import busy, plan, repeat
from simrl.engine.requests import (
    END,
    NEVER,
    PAUSE,
    RELOADED,
    REQUESTS,
    TOTALS,
    WATCH,
    Columns,
    Engines,
    Limits,
    Stop,
    Until,
    capacity_tokens,
    enqueue,
    is_plain,
)
from simrl.engine.resolved import Like, resolved, resolved_for
from simrl.engine.step import step
from simrl.errors import InputError
from simrl.profile.compiled import kernel
from simrl.profile.profile import Tables
from simrl.speculation.bandit import BanditState, bandit_state, copied
from simrl.speculation.decoding import OPEN, SIBLINGS, Decoding, Floats, Ints, Records
from simrl.speculation.gates import ELASTIC_OFF
from simrl.speculation.windows import MOST_TOKENS

# What passes went to, in the order of `simrl.result.result.Work`: the totals from decode_s on.
COUNTED = ("passes", "generated_tokens", "prefill_tokens", "preemptions", "hit_tokens", "lookup_tokens")
SPENT = (*(TOTALS.names or ())[-12:], "preemptions")


class Memory(NamedTuple):
    """The memory of drafting beside the requests; see `Engines`."""

    bandit: BanditState
    places: Ints
    readable: Ints


@kernel
def run(e: Engines, first: int, tables: Tables, limits: Limits, d: Decoding | None, until: Until) -> float:
    """Run passes of an engine up to the end of the run. Returns the boundary reached."""
    t = e.totals[first]
    for k in range(limits.dp):
        e.totals[first + k].n_stopped = 0
    while t.now_s <= until.time_s and busy(e, first, limits):
        passes, end_s = plan(e, first, tables, limits, d)
        if passes > 0:
            if end_s > until.time_s:
                passes, end_s = end_of_stretch(e, first, tables, limits, passes, until.time_s)
            repeat(e, first, limits, d, passes, end_s)
        else:
            step(e, first, tables, limits, d)
        stopped = 0
        for k in range(limits.dp):
            stopped += e.totals[first + k].n_stopped
        if until.first_stop and stopped > 0:
            break
    return float(t.now_s)


MEANWHILE = np.zeros((2, 2 * MOST_TOKENS + 2), np.int64)


class _State:
    """The state that a pass changes: totals and requests in one piece of memory; the memory of drafting."""

    def __init__(self, capacity: int, memory: Memory) -> None:
        self._bytes = np.zeros(
            TOTALS.itemsize + capacity * REQUESTS.itemsize, dtype=np.uint8
        )  # records are slow to copy
        self.memory = memory
        self.hold(self._bytes[: TOTALS.itemsize].view(TOTALS), self._bytes[TOTALS.itemsize :].view(REQUESTS))

    def hold(self, totals: Records, requests: Records) -> None:
        """Be these arrays."""
        self.totals, self.requests, self.drafts = totals, requests, requests
        self.t, self.r, self.d = Columns(totals), Columns(requests), Columns(requests)
        memory = self.memory
        bandit = memory.bandit
        bandits = BanditState(bandit.arrived[None], bandit.ordered[None], bandit.counts[None])
        self.engines = Engines(requests[None], totals, bandits, memory.places[None], memory.readable, MEANWHILE)

    def copy_from(self, other: _State) -> None:
        """Become a copy of a state of this capacity."""
        self._bytes[:] = other._bytes
        if self.memory is not other.memory:
            for array, their_array in zip(self.memory.bandit, other.memory.bandit, strict=True):
                array[:] = their_array


class Engine:
    """The state of one engine in simulated time. A request is known by its slot, an integer that is reused after its end.

    `slowdown` multiplies the duration of every pass from the boundary on at which it is set. With a `decoding` (how it drafts),
    requests that have a source (`draft_from`) decode with drafts; `key` is the key of its bandit's draws.

    Raises `InputError` for a request that could never fit the KV cache.
    """

    def __init__(self, tables: Tables, limits: Limits, decoding: Decoding | None = None, key: int = 0) -> None:
        self._tables = tables
        given = decoding
        decoding = decoding or Decoding()
        if decoding.rule.decoupled and decoding.rule.trees:
            raise ValueError("a decoupled drafter drafts chains; leave its strategies out")
        if decoding.rule.decoupled:
            limits = limits._replace(async_scheduling=False)
        self.limits = limits
        if limits.prefix_caching and not is_plain(limits):
            raise ValueError("no prefix cache is modelled of layers with windows or states")
        self._capacity_tokens = capacity_tokens(limits)
        self.paused = Paused(resolved)
        self._left_rows: list[int] = []
        index = decoding.siblings
        memory = Memory(
            bandit_state(decoding.bandit, decoding.rule.rewards),
            places=np.zeros(index.group_first.size, dtype=np.int64),
            readable=np.zeros(np.max(index.group_end - index.group_first, initial=0), dtype=np.int64),
        )
        self._state = _State(0, memory)
        t = self._state.totals
        t["slowdown"] = t["drift"] = t["admitting"] = 1
        t["free_blocks"], t["draft_ends_s"], t["bandit_key"] = limits.kv_blocks, np.inf, key
        t["block_size"], t["prefix_caching"] = limits.block_size, limits.prefix_caching
        t["async_scheduling"] = limits.async_scheduling
        t["hold_paused"] = not limits.prefix_caching if limits.hold_paused is None else limits.hold_paused
        t["list_first"] = t["list_last"] = -1
        self._ahead: _State | None = None  # the state at the next stop; see `next_stop_s`
        self._grow: Callable[[int], None] = self._make_room
        self._grow(16)
        self.decoding = given
        self._enqueue = resolved_for(enqueue, Like(self._state.requests, t, *range(7), False))

    @property
    def now_s(self) -> float:
        return self._state.t["now_s"].item()

    @now_s.setter
    def now_s(self, time_s: float) -> None:
        self._state.t["now_s"][0] = time_s

    @property
    def slowdown(self) -> float:
        return self._state.t["slowdown"].item()

    @slowdown.setter
    def slowdown(self, factor: float) -> None:
        self._state.t["slowdown"][0] = factor

    @property
    def admitting(self) -> bool:
        """Return whether waiting requests may start."""
        return self._state.t["admitting"].item() == 1

    @admitting.setter
    def admitting(self, admitting: bool) -> None:
        self._state.t["admitting"][0] = admitting

    @property
    def drift(self) -> float:
        """Factor on the hardness of every response: how far the policy is from the drafter."""
        return self._state.t["drift"].item()

    @drift.setter
    def drift(self, drift: float) -> None:
        self._state.t["drift"][0] = drift

    @property
    def decoding(self) -> Decoding | None:
        """How it drafts. May be changed between passes, for a decoding with equal siblings, bandit and loops."""
        return self._decoding

    @decoding.setter
    def decoding(self, decoding: Decoding | None) -> None:
        self._decoding, state, until = decoding, self._state, Until(0.0, True)
        if decoding is not None and decoding.rule.gate == OPEN and not (decoding.rule.decoupled or decoding.rule.trees):
            state.totals["padding"] = decoding.rule.window.most_tokens
        self._run_kernel = resolved_for(run, Like(state.engines, 0, self._tables, self.limits, decoding, until))

    @property
    def running(self) -> int:
        going = self._state.r["going"][self._state.r["running"][: self._total("n_running")]]
        return self._total("n_running") - int(np.count_nonzero(going))

    @property
    def waiting(self) -> int:
        return self._total("n_running") + self._total("n_waiting") - self._total("n_going") - self.running

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that no request holds."""
        return self._total("free_blocks")

    @property
    def busy(self) -> bool:
        """True if a next pass would do something now."""
        return self._total("n_running") > 0 or (self._total("n_waiting") > self._total("n_going") and self.admitting)

    @property
    def goes_pass_by_pass(self) -> bool:
        """Whether it matters to no bit of a result where a run is divided: other runs sum the times of many passes."""
        return self._decoding is not None and self._decoding.rule.decoupled

    @property
    def generated_total(self) -> int:
        return self._total("generated_tokens")

    @property
    def spent(self) -> Floats:
        """The seconds of the passes since the start by use: the totals `SPENT`."""
        return np.array([self._state.t[name].item() for name in SPENT], dtype=np.float64)

    @property
    def totals(self) -> dict[str, int]:
        """Passes, generated tokens, prefilled tokens (recomputed ones included) and preemptions since the start."""
        return {name: self._total(name) for name in COUNTED}

    def submit(
        self,
        prompt_tokens: int,
        response_tokens: int,
        generated_tokens: int = 0,
        cached_tokens: int = 0,
        prompt_key: int = -1,
        sample_key: int = -1,
        shared_tokens: int | None = None,
        continues: bool = False,
    ) -> int:
        """Queue a request at this boundary; `generated_tokens` of its response exist and are prefilled. Returns its slot.

        The first `cached_tokens` of all these are not computed: their KV came from elsewhere. They take up blocks from the
        request's admission on. Raises ValueError if there is nothing left to generate or nothing to compute.

        With a prefix cache, requests of one `prompt_key` find each other's first `shared_tokens` (None: the whole prompt); one
        with `generated_tokens` finds what an earlier request of its `sample_key` left when it was aborted, or ended though it
        `continues`. A key of -1 finds nothing.
        """
        if not 0 <= generated_tokens < response_tokens or not 0 <= cached_tokens < prompt_tokens + generated_tokens:
            raise ValueError(
                f"a request of {prompt_tokens} + {response_tokens} tokens with {generated_tokens} generated, "
                f"{cached_tokens} cached"
            )
        self.require_fits(prompt_tokens, response_tokens)
        capacity, free = self._state.requests.size, self._total("n_free")
        if not free or (self.limits.prefix_caching and self._lacks_nodes(capacity, free)):
            self._grow(2 * capacity)
        state = self._state
        lengths = prompt_tokens, response_tokens, generated_tokens, cached_tokens
        shared = prompt_tokens if shared_tokens is None else shared_tokens
        slot: int = self._enqueue(state.requests, state.totals, *lengths, prompt_key, shared, sample_key, continues)
        return slot

    def _lacks_nodes(self, capacity: int, free: int) -> bool:
        """Return whether there are too few nodes for one request more."""
        lacking = short_of_nodes(capacity, self._total("n_spare"), free, 1)
        if lacking > 0 and capacity >= MANY:  # some more, for this takes as long as there are nodes
            forget_oldest(self._state.requests, self._state.totals, self._total("n_spare") + lacking + MANY // 4)
            lacking = short_of_nodes(capacity, self._total("n_spare"), free, 1)
        return bool(lacking > 0)

    def draft_from(
        self, slot: int, source: int, at: int, hardness: float = 1.0, window: int | None = None, runs_at: int = -1
    ) -> None:
        """Let a request draft from a source (see `simrl.speculation.decoding`) from the next pass on, its window as at first.

        With SIBLINGS, `at` is its row of the trace; the group's other rows may draft from its tokens, which stay known when it
        has left until `forget_rows`. Of requests for one row, the latest counts. `runs_at`: the offset of drawn drafts."""
        assert self.decoding is not None
        self._leave_row(slot)
        if source == SIBLINGS:
            if self.decoding.rule.decoupled:
                raise ValueError("a decoupled drafter is a model; siblings are drafted from where the verifier is")
            self._state.memory.places[at] = slot + 1  # -t: it left with t tokens; 0: it was never here
        d = self._state.d
        d["source"][slot], d["at"][slot], d["hardness"][slot], d["runs_at"][slot] = source, at, hardness, runs_at
        d["window"][slot] = self.decoding.rule.window.start_tokens if window is None else window

    def forget_rows(self) -> None:
        """Forget the responses that are over: no request drafts from them any more."""
        for row in self._left_rows:
            if self._state.memory.places[row] < 0:
                self._state.memory.places[row] = 0
        self._left_rows = []

    def _leave_row(self, slot: int) -> None:
        """Keep how many tokens a sibling has that ends, or drafts from another source: its row will never have more."""
        row, places = self._state.d["at"].item(slot), self._state.memory.places
        if self._state.d["source"].item(slot) == SIBLINGS and places.item(row) == slot + 1:
            places[row] = -self.generated_tokens(slot)
            self._left_rows.append(row)

    def verify_old(self, slot: int, old_tokens: int, accepted: int) -> None:
        """Let a request that has no token yet verify an old response with its prompt, of which `accepted` tokens stay."""
        room = self._capacity_tokens - self._state.r["prompt"].item(slot) - 1
        self._state.d["old_tokens"][slot] = min(old_tokens, room)
        self._state.d["old_accepted"][slot] = min(accepted, room)

    def new_rollout(self) -> None:
        """Shut an elastic gate until the batch has been small for long enough."""
        self._state.t["elastic_state"][0] = ELASTIC_OFF

    def drafted(self, slot: int) -> tuple[int, int, int]:
        """Return the tokens that a request drafted (also ahead, whatever became of them), those accepted, and the passes that
        verified. An ended request has them until its slot is used again."""
        d = self._state.d
        return d["drafted_total"].item(slot), d["accepted_total"].item(slot), d["verifications"].item(slot)

    def unverified_tokens(self, slot: int) -> int:
        """Return the drafted tokens in no window that was verified: thrown away, or ahead now. 0 unless decoupled."""
        return self._state.d["unverified_total"].item(slot)

    def verified_tokens(self, slot: int) -> int:
        """Return the tokens that the verifying passes yielded, bonus tokens and corrections included."""
        return self._state.d["verified_total"].item(slot)

    def stop_at(self, slot: int, tokens: int, kind: int) -> None:
        """Set the next stop of a request, in place of the one before: the boundary at which it has `tokens` of its response.

        `kind` is PAUSE or WATCH; a request may have one of each. A pause comes at these tokens exactly, a watched token may be
        passed by a draft; where both come at once, the pause is reported. The end comes first: a stop at `response_tokens` or
        later never is. A stop that was reported is over. Raises ValueError for tokens that the request has already."""
        r = self._state.r
        generated, response = r["generated"].item(slot), r["response"].item(slot)
        if tokens <= generated:
            raise ValueError(f"a stop at {tokens} tokens of a request that has {generated}")
        if kind == WATCH:
            r["watch_at"][slot] = tokens if tokens < response else NEVER
            return
        r["stop_at"][slot] = min(tokens, response)
        r["stop_kind"][slot] = kind if tokens < response else END

    def resume(self, slot: int, observation_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Append a paused request to the queue, with the rest of its cache, or, without one, `cached_tokens` (see `submit`);
        `observation_tokens` of its environment are prefilled. Raises KeyError for a request whose pause was not reported."""
        prompt_tokens = self._state.r["prompt"].item(slot) + observation_tokens
        self.require_fits(prompt_tokens, self._state.r["response"].item(slot))
        self.paused.resume(self._state, slot, prompt_tokens, cached_tokens)

    def drop_paused(self, slot: int) -> None:
        """Drop the cache of a request whose pause was reported at this boundary."""
        self.paused.drop(self._state, slot)

    def pin_paused(self, slot: int, until_s: float) -> None:
        """Keep the cache of a paused request until it resumes, is aborted or unpinned, at `until_s` at the latest."""
        self.paused.pin(self._state, slot, until_s)

    def unpin_paused(self, slot: int, until_s: float) -> None:
        """Drop a cache that was pinned until `until_s`, unless its request has resumed or was aborted."""
        self.paused.unpin(self._state, slot, until_s)

    def abort(self, slot: int) -> int:
        """Take a request out at this boundary. Returns the response tokens it has."""
        self.paused.forget(self._state, slot)
        remove(self._state.requests, self._state.totals[0], slot)
        self._leave_row(slot)
        return self.generated_tokens(slot)

    def recompute_running(self) -> None:
        """Drop the KV caches of all requests, also of paused and waiting ones. Running ones recompute theirs before anything
        that waits, in their order."""
        self.paused.hold_all(self._state)
        drop_caches(self._state.requests, self._state.totals[0], RELOADED)

    def found_tokens(self, slot: int) -> int:
        """Return the tokens of a paused request that it would find in the prefix cache now."""
        if not self.limits.prefix_caching or self._state.r["blocks"].item(slot):
            return self.computed_tokens(slot)
        known = self._state.r["prompt"].item(slot) + self._state.r["generated"].item(slot)
        found: int = found_blocks(self._state.requests, self._state.totals, slot, known)
        return found * self.limits.block_size

    def computed_tokens(self, slot: int) -> int:
        """Return the tokens of a request whose KV is in the cache."""
        return self._state.r["computed"].item(slot)

    def generated_tokens(self, slot: int) -> int:
        return self._state.r["generated"].item(slot)

    def first_token_s(self, slot: int) -> float:
        """Return when the first token of a request came; of an ended one until its slot is used again."""
        return self._state.r["first_token_s"].item(slot)

    def settle(self, time_s: float) -> list[Stop]:
        """Run to the first boundary strictly after `time_s`; move an idle engine to `time_s`.

        Returns what stopped on the way, in order.
        """
        stops: list[Stop] = []
        until, now_s = Until(time_s, True), -np.inf
        while now_s <= time_s and self.busy:
            now_s = self._run(self._state, until)
            stops += self.stops()
        if now_s <= time_s:
            self.now_s = max(self.now_s, time_s)
        return stops

    def next_stop_s(self) -> float:
        """Return when the next request stops if there is no command before; infinity if none does. Changes nothing."""
        if not self.busy:
            return np.inf
        if self._ahead is None:
            memory = self._state.memory
            self._ahead = _State(self._state.requests.size, memory._replace(bandit=copied(memory.bandit)))
        self._ahead.copy_from(self._state)
        stop_s = self._run(self._ahead, self.paused.next_stop)
        return stop_s if self._ahead.t["n_stopped"].item() else np.inf

    def take_next_stop(self) -> list[Stop]:
        """Move to the boundary that `next_stop_s` found, and return what stopped there."""
        assert self._ahead is not None
        self._state, self._ahead = self._ahead, self._state
        return self.stops()

    def run_until_idle(self) -> Floats:
        """Run everything that was submitted. Returns when each slot ended, NaN for unused ones, shape (capacity,)."""
        self._run(self._state, Until(np.inf, False))
        return self._state.r["last_token_s"].copy()

    def _total(self, name: str) -> int:
        return self._state.t[name].item()

    def require_fits(self, prompt_tokens: int, response_tokens: int) -> None:
        """Raise `InputError` for a request that never fits the KV cache."""
        if prompt_tokens + response_tokens > self._capacity_tokens:
            raise InputError(
                f"a sample of {prompt_tokens} + {response_tokens} tokens never fits the KV cache of {self._capacity_tokens} "
                "tokens; use more memory for the cache, a larger tp or a lower cap"
            )

    def _run(self, state: _State, until: Until) -> float:
        """Run a state from its boundary on. Returns the boundary reached."""
        now_s: float = self._run_kernel(state.engines, 0, self._tables, self.limits, self._decoding, until)
        return now_s

    def stops(self) -> list[Stop]:
        """Return what stopped in the last pass, now."""
        stops: list[Stop] = []
        r, now_s = self._state.r, self.now_s
        for i in range(self._total("n_stopped")):  # most often one: plain Python is fastest
            slot, kind = r["stopped"].item(i), r["stopped_kind"].item(i)
            stops.append((slot, now_s, kind))
            if kind == END:
                self._leave_row(slot)
            elif kind == PAUSE:
                self.paused.slots.add(slot)
        return stops

    def slots(self) -> int:
        return self._state.requests.size

    def live_in(self, requests: Records, totals: Records, grow: Callable[[int], None]) -> None:
        """Keep the state in these arrays from now on; `grow` gives more room."""
        state = _State(0, self._state.memory)
        state.hold(totals, requests)
        self._move(state)
        self._grow = grow

    def hold(self, requests: Records, totals: Records) -> None:
        """Go on from the state in these arrays."""
        self._state.hold(totals, requests)

    def _make_room(self, capacity: int) -> None:
        """Make room for `capacity` requests."""
        self._move(_State(capacity, self._state.memory))

    def _move(self, state: _State) -> None:
        """Keep the state in another one, as large or larger; the ring of waiting requests is laid out anew from its head."""
        old, self._state = self._state, state
        held, capacity = old.requests.size, state.requests.size
        state.totals[:], state.requests[:held] = old.totals, old.requests
        state.requests["waiting"][:held] = np.roll(old.requests["waiting"], -self._total("waiting_head"))
        state.requests["last_token_s"][held:], state.requests["ticket"][held:] = np.nan, -1
        state.totals["waiting_head"] = 0
        self._ahead = None
        free = self._total("n_free")
        state.requests["free"][free : free + capacity - held] = np.arange(capacity - 1, held - 1, -1)
        state.totals["n_free"] = free + capacity - held
        spare = self._total("n_spare")
        state.requests["node_spare"][spare : spare + capacity - held] = np.arange(held, capacity)
        state.totals["n_spare"] = spare + capacity - held
        if self.limits.prefix_caching:
            enter_all(state.requests)
