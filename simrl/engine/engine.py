"""Engines and their fleet: continuous batching, exact to the iteration, over arrays.

Invariant: `Engine.now_s` is a boundary between two forward passes, and every pass in the past
happened as vLLM V1 would have scheduled it: running requests first, in order, then waiting ones
first come first served, while `max_num_seqs`, `max_num_batched_tokens` and the KV blocks (for all
known tokens) allow; prompts in chunks. When blocks run out, the caches of paused requests go,
oldest first, then the youngest running request is preempted; what lost its cache computes it again.

Under asynchronous scheduling, a pass is scheduled when the previous one starts. So requests join
one pass later, and places and blocks are free one pass later. Decoupled drafting schedules at the
start of a pass, when its windows are known.

A command takes effect at the boundary where the engine stands, so callers first `settle(t)`: the
first boundary strictly after t, or t itself if the engine is idle. A request ends after exactly
`response_tokens` generated tokens, and may have one pause and one watched token before its end.

With speculation, a pass verifies drafts: a request that decodes brings `drafted` tokens, of which
the first `accepted` are accepted, and gains one more, never more than it has left. Drafts change
when tokens come, never which.

`tests/references/engine.py` is the rule, written slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simrl.engine.fleet import (
    GROUPS,
    MEMBERS,
    STOP,
    TICKETS,
    VOID,
    State,
    advance,
    submit,
    withdraw,
)
from simrl.engine.leaving import (
    drop_caches,
    drop_held,
    pin,
    queue_again,
    remove,
    requeue,
    set_aside,
    unpin,
)
from simrl.engine.prefix_cache import MANY, enter_all, forget_oldest, found_blocks, short_of_nodes
from simrl.engine.repeat import LARGEST_COUNTED_BLOCK
from simrl.engine.requests import capacity_tokens, is_plain
from simrl.engine.resolved import resolved
from simrl.engine.state import (
    END,
    NEVER,
    PAUSED,
    RECORDED,
    RELOADED,
    REQUESTS,
    SIBLING,
    TOTALS,
    WATCH,
    Columns,
    Drafting,
    Engines,
    Limits,
    Spent,
    Stop,
)
from simrl.errors import InputError
from simrl.profile.profile import Tables
from simrl.speculation.bandit import bandit_states
from simrl.speculation.decoding import OPEN, SIBLINGS, Decoding, Floats, Ints, Records
from simrl.speculation.gates import ELASTIC_OFF
from simrl.speculation.windows import MOST_TOKENS

COUNTED = (
    "passes",
    "generated_tokens",
    "prefill_tokens",
    "preemptions",
    "hit_tokens",
    "lookup_tokens",
)
SPENT = (*Spent.__annotations__, "preemptions")
DRAFTED = (
    "drafted_total",
    "accepted_total",
    "verifications",
    "verified_total",
    "unverified_total",
)
NO_ENGINES = np.zeros(0, np.int64)
NO_TICKET = np.array([-1])


class Fleet:
    """The engines of workers with one profile. Each of `methods` has a decoding and the keys that
    seed the draws of its engines' bandits; several have decodings of chains, and may have
    `kv_blocks` of their own."""

    def __init__(
        self,
        tables: Tables,
        limits: Limits,
        *methods: tuple[Decoding | None, Sequence[int]],
        kv_blocks: Sequence[int] | None = None,
    ) -> None:
        if limits.prefix_caching and not is_plain(limits):
            raise ValueError("no prefix cache is modelled of layers with windows or states")
        self.tables = tables
        # The limits and the decoding of each way to draft; engines change theirs with the weights.
        self.ways = tuple(
            (_limits_of(limits._replace(kv_blocks=blocks), decoding), decoding)
            for (decoding, _), blocks in zip(
                methods, kv_blocks or [limits.kv_blocks] * len(methods), strict=True
            )
        )
        way_of = np.repeat(np.arange(len(methods)), [len(keys) for _, keys in methods])
        self.limits, n, rows = self.ways[0][0], way_of.size, way_of.size * limits.dp
        engines = Engines(
            requests=np.zeros((rows, 0), REQUESTS),
            totals=np.zeros(rows, TOTALS),
            scratch=np.zeros(0, np.int64),
            drafting=_drafting([decoding for decoding, _ in methods if decoding], rows),
            record=np.zeros((rows, 0), RECORDED),
        )
        self.arrays = State(
            engines=engines,
            members=np.zeros(n, MEMBERS),
            tickets=np.zeros(0, TICKETS),
            groups=np.zeros(0, GROUPS),
            unfinished=np.zeros(n, np.int64),
            orders=np.zeros(1, np.int64),
        )
        self.members = m = Columns(self.arrays.members)
        m["next_step_s"][:], m["due_s"][:], m["ended"][:] = np.inf, np.inf, -1
        m["heap"][:] = m["place"][:] = np.arange(n)
        m["way"][:] = way_of
        self.t = t = Columns(engines.totals)
        t["slowdown"][:] = t["drift"][:] = t["admitting"][:] = 1
        ways = [self.ways[way] for way in np.repeat(way_of, limits.dp)]
        t["accept_length"][:] = [(decoding or Decoding()).accept_length for _, decoding in ways]
        t["free_blocks"][:], t["draft_ends_s"][:] = [way.kv_blocks for way, _ in ways], np.inf
        t["bandit_key"][:] = np.repeat([key for _, keys in methods for key in keys], limits.dp)
        t["block_size"][:], t["prefix_caching"][:] = limits.block_size, limits.prefix_caching
        t["async_scheduling"][:] = [way.async_scheduling for way, _ in ways]
        t["last_apart"][:] = [not way.sglang for way, _ in ways]
        t["hold_paused"][:] = (
            not limits.prefix_caching if limits.hold_paused is None else limits.hold_paused
        )
        t["list_first"][:] = t["list_last"][:] = -1
        self._changed: list[int] = []  # engines whose next steps are to be planned anew
        self._groups = self._numbers = 0
        self._free_groups: list[int] = []
        self._free_numbers: dict[int, list[int]] = {}  # first ones, by the size of their group
        self._make_slots(64)
        self._resolve()
        self.engines = [Engine(self, e) for e in range(n)]

    def _resolve(self) -> None:
        some = NO_ENGINES, False, False, 0.0, 0.0
        self._advance: Callable[..., tuple[int, int, float]] = resolved(
            advance, self.arrays, *self._how, *some
        )
        lengths = np.zeros((0, 8), np.int64)
        self._submit = resolved(
            submit, self.arrays, self.limits, 0, lengths, NO_ENGINES, 0.0, NO_ENGINES
        )

    def advance(self, now_s: float, event_s: float) -> tuple[int, int, float]:
        """Take steps; see the function `advance`."""
        changed, self._changed = np.array(self._changed, np.int64), []
        return self._advance(self.arrays, *self._how, changed, False, True, now_s, event_s)

    def stops_before(self, engine: Ints, time_s: float, heeds: bool = True) -> bool:
        """Run an engine to the first boundary strictly after `time_s`, or to one where something
        stops that calls Python (then return True); move an idle engine to `time_s`."""
        until = engine, True, heeds, time_s, np.inf
        return self._advance(self.arrays, *self._how, *until)[0] == STOP

    def keep(self, decoding: Decoding, way: int) -> int:
        """Keep a decoding in place of the one with equal times of drafting, that of `way` first, or
        as another way. Return its number."""
        equal = (
            i
            for i in (way, *range(len(self.ways)))
            if (kept := self.ways[i][1])
            and kept.round_s is decoding.round_s
            and self.ways[i][0] == self.ways[way][0]
        )
        number = next(equal, len(self.ways))
        is_new = number == len(self.ways)
        limits, _ = self.ways[way if is_new else number]
        self.ways = (*self.ways[:number], (limits, decoding), *self.ways[number + 1 :])
        if is_new:
            self._resolve()
        return number

    def follow(self, record: Records) -> None:
        """Record the passes from now on, and let those that have seconds take them; shape (rows,
        passes). Engines are of one rank. (A replay is predicted again with its measured seconds.)"""
        self.arrays = self.arrays._replace(engines=self.arrays.engines._replace(record=record))

    @property
    def _how(self) -> tuple[Any, ...]:
        """How engines make passes, as the function `advance` takes it."""
        return self.tables, *self.ways[0], self.ways if len(self.ways) > 1 else None

    def changed(self, engine: int) -> None:
        """Plan an engine's next step anew, behind all that are planned, where it comes at one
        instant with them."""
        orders = self.arrays.orders
        orders[0] += self.arrays.engines.requests.size
        self._changed.append(engine)
        self.members["next_step_s"][engine], self.members["stopped"][engine] = VOID, 0
        self.members["order"][engine] = orders[0]

    def submit(self, engine: int, lengths: Ints, numbers: Ints, request_s: float = 0.0) -> Ints:
        """Queue requests at an engine, where it stands; see the function `submit`. Return their
        slots. Raise `InputError` for one that never fits the KV cache."""
        longest = lengths[lengths[:, :2].sum(axis=1).argmax()] if len(lengths) > 1 else lengths[0]
        self.engines[engine].require_fits(longest.item(0), longest.item(1))
        self._make_room(engine, numbers.size)
        slots = np.empty(numbers.size, np.int64)
        self._submit(self.arrays, self.limits, engine, lengths, numbers, request_s, slots)
        return slots

    # Groups.

    def open_group(self, engines: list[int], needed: int) -> tuple[int, int]:
        """Return the number of a new group, complete with `needed` responses, and of the first of
        its tickets, which are for `engines`."""
        group, size = self._free_groups.pop() if self._free_groups else self._groups, len(engines)
        free = self._free_numbers.setdefault(size, [])
        first = free.pop() if free else self._numbers
        self._groups, self._numbers = max(self._groups, group + 1), max(self._numbers, first + size)
        f = self.arrays
        if self._numbers > f.tickets.size or self._groups > f.groups.size:
            tickets, groups = (
                _longer(f.tickets, 2 * self._numbers),
                _longer(f.groups, 2 * self._groups),
            )
            f = self.arrays = f._replace(tickets=tickets, groups=groups)
        opened = f.tickets[first : first + size]
        opened["engine"], opened["group"] = engines, group
        opened["closed_tokens"], opened["version"], opened["over"] = 0, -1, 0
        opened["whole"], opened["done"] = 1, 0
        f.groups[group] = needed, size
        return group, first

    def close_group(self, group: int, first: int, size: int) -> None:
        """Let the numbers of a group and its tickets be used again."""
        self._free_groups.append(group)
        self._free_numbers[size].append(first)

    def withdraw(self, engine: int, numbers: Ints) -> int:
        """Take tickets out of their engine, where it stands. Return how many were there."""
        return int(withdraw(self.arrays, self.limits, engine, numbers))

    def tickets_in(self, engine: int) -> list[tuple[int, int, float]]:
        """Return the tickets in an engine: the number of each, its tokens, and when it had the
        first."""
        r = self.arrays.engines.requests[engine * self.limits.dp : (engine + 1) * self.limits.dp]
        r = r[r["ticket"] >= 0]
        return list(
            zip(
                *(r[name].tolist() for name in ("ticket", "generated", "first_token_s")),
                strict=True,
            )
        )

    def _make_room(self, engine: int, more: int) -> None:
        """Make room for more requests at any rank of an engine."""
        f, slots, lacking = self.arrays.engines, self.arrays.engines.requests.shape[1], 0
        for row in range(engine * self.limits.dp, (engine + 1) * self.limits.dp):
            free = self.t["n_free"].item(row)
            lacking = max(lacking, more - free)
            if self.limits.prefix_caching:
                nodes = short_of_nodes(slots, self.t["n_spare"].item(row), free, more)
                if (
                    slots >= MANY and nodes > 0
                ):  # some more, for this takes as long as there are nodes
                    spare = self.t["n_spare"].item(row) + nodes + MANY // 4
                    forget_oldest(f.requests[row], f.totals[row : row + 1], spare)
                    nodes = short_of_nodes(slots, self.t["n_spare"].item(row), free, more)
                lacking = max(lacking, nodes)
        if lacking > 0:
            self._make_slots(max(2 * slots, slots + lacking))

    def _make_slots(self, slots: int) -> None:
        """Give every row that many slots; the ring of waiting requests is laid out anew from its
        head."""
        f = self.arrays.engines
        rows, old = f.requests.shape
        requests = np.zeros((rows, slots), REQUESTS)
        requests[:, :old] = f.requests
        requests["last_token_s"][:, old:], requests["ticket"][:, old:] = np.nan, -1
        for row in range(rows):
            t = f.totals[row]
            requests["waiting"][row, :old] = np.roll(f.requests["waiting"][row], -t["waiting_head"])
            requests["free"][row, t["n_free"] : t["n_free"] + slots - old] = np.arange(
                slots - 1, old - 1, -1
            )
            requests["node_spare"][row, t["n_spare"] : t["n_spare"] + slots - old] = np.arange(
                old, slots
            )
            if self.limits.prefix_caching:
                enter_all(requests[row])
        f.totals["waiting_head"] = 0
        f.totals["n_free"] += slots - old
        f.totals["n_spare"] += slots - old
        scratch = np.zeros(max(slots, min(self.limits.block_size, LARGEST_COUNTED_BLOCK)), np.int64)
        self.arrays = self.arrays._replace(engines=f._replace(requests=requests, scratch=scratch))
        self.r = Columns(requests)


def _limits_of(limits: Limits, decoding: Decoding | None) -> Limits:
    """Return the limits of engines that draft so."""
    rule = (decoding or Decoding()).rule
    if rule.decoupled and limits.dp > 1:
        raise ValueError("no decoupled drafts are modelled of data-parallel ranks")
    if rule.decoupled and rule.trees:
        raise ValueError("a decoupled drafter drafts chains; leave its strategies out")
    return limits._replace(async_scheduling=False, sglang=False) if rule.decoupled else limits


def _drafting(decodings: Sequence[Decoding], rows: int) -> Drafting | None:
    """Return what engines of `rows` ranks keep to draft."""
    if not decodings:
        return None
    index = max((d.siblings for d in decodings), key=lambda index: index.group_first.size)
    siblings = np.zeros((rows, index.group_first.size), SIBLING)
    siblings["slot"] = -1
    return Drafting(
        bandits=bandit_states(decodings[0].bandit, decodings[0].rule.rewards, rows),
        siblings=siblings,
        readable=np.zeros(np.max(index.group_end - index.group_first, initial=0), np.int64),
        meanwhile=np.zeros((2, 2 * MOST_TOKENS + 2), np.int64),
    )


def _longer(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Return an array with its entries, and more behind them."""
    longer = np.zeros(size, array.dtype)
    longer[: array.size] = array
    return longer


class _Shared:
    """A total that all ranks of an engine have alike."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, engine: Engine, _: type) -> Any:
        return engine.fleet.t[self._name].item(engine.first_row)

    def __set__(self, engine: Engine, value: float) -> None:
        engine.fleet.t[self._name][engine.rows] = value


class Engine:
    """One engine of a fleet: `limits.dp` data-parallel ranks that make their passes together. A
    request is known by its slot, an integer that is reused after its end: a rank's slot, times the
    number of ranks, plus the rank.

    `slowdown` multiplies the duration of every pass from the boundary on at which it is set. With a
    `decoding` (how it drafts), requests that have a source (`draft_from`) decode with drafts.
    """

    now_s, slowdown = _Shared("now_s"), _Shared("slowdown")
    admitting = _Shared("admitting")  # whether waiting requests may start
    drift = _Shared(
        "drift"
    )  # factor on the hardness of every response: how far the policy is from the drafter

    def __init__(self, fleet: Fleet, index: int) -> None:
        self.fleet, self.index, self._dp = fleet, index, fleet.limits.dp
        self.limits, _ = fleet.ways[fleet.members["way"].item(index)]
        self._capacity_tokens = capacity_tokens(self.limits)
        self.first_row = index * self._dp
        self.rows = slice(self.first_row, self.first_row + self._dp)
        self._one = np.array([index])
        self._left_rows: list[int] = []
        self._take_decoding()

    def _take_decoding(self) -> None:
        decoding = self.decoding
        if (
            decoding is not None
            and decoding.rule.gate == OPEN
            and not (decoding.rule.decoupled or decoding.rule.trees or self.limits.sglang)
        ):
            self.fleet.t["padding"][self.rows] = decoding.rule.window.most_tokens

    def require_fits(self, prompt_tokens: int, response_tokens: int) -> None:
        """Raise `InputError` for a request that never fits the KV cache."""
        if prompt_tokens + response_tokens > self._capacity_tokens:
            raise InputError(
                f"a sample of {prompt_tokens} + {response_tokens} tokens never fits the KV cache "
                f"of {self._capacity_tokens} tokens; use more memory for the cache, a larger "
                "tp or a lower cap",
                cause="KV cache of a worker",
            )

    @property
    def decoding(self) -> Decoding | None:
        """How it drafts. May be changed between passes, for a decoding with equal siblings, bandit
        and loops."""
        return self.fleet.ways[self.fleet.members["way"].item(self.index)][1]

    @decoding.setter
    def decoding(self, decoding: Decoding) -> None:
        ways = self.fleet.members["way"]
        ways[self.index] = self.fleet.keep(decoding, ways.item(self.index))
        self._take_decoding()

    @property
    def running(self) -> int:
        r, running = self.fleet.r, 0
        for row in range(self.first_row, self.first_row + self._dp):
            running += (n := self.fleet.t["n_running"].item(row))
            if self.fleet.t["n_once_more"].item(row):
                running -= int(np.count_nonzero(r["once_more"][row, r["running"][row, :n]]))
        return running

    @property
    def waiting(self) -> int:
        return (
            self._total("n_running")
            + self._total("n_waiting")
            - self._total("n_once_more")
            - self.running
        )

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV caches that no request holds."""
        return self._total("free_blocks")

    @property
    def busy(self) -> bool:
        """True if a next pass would do something now."""
        return self._total("n_running") > 0 or (
            self._total("n_waiting") > self._total("n_once_more") and self.admitting
        )

    @property
    def preemptions(self) -> int:
        """Preemptions since the start."""
        return self._total("preemptions")

    @property
    def generated_total(self) -> int:
        return self._total("generated_tokens")

    @property
    def spent(self) -> Floats:
        """The totals `SPENT` since the start: the seconds of a mean rank, and the sums of the
        others over all ranks."""
        t = self.fleet.t
        if self._dp == 1:
            return np.array([t[name].item(self.first_row) for name in SPENT], dtype=np.float64)
        mean = [name.endswith("_s") and name != "slot_s" for name in SPENT]
        summed = np.array([t[name][self.rows].sum() for name in SPENT], dtype=np.float64)
        return np.where(mean, summed / self._dp, summed)

    @property
    def totals(self) -> dict[str, int]:
        """Passes, and over all ranks generated tokens, prefilled tokens (recomputed ones included),
        preemptions and hits since the start."""
        return {name: self._total(name) for name in COUNTED} | {
            "passes": self.fleet.t["passes"].item(self.first_row)
        }

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
        """Queue a request at this boundary; `generated_tokens` of its response exist and are
        prefilled. Returns its slot.

        The first `cached_tokens` of all these are not computed: their KV came from elsewhere. They
        take up blocks from the request's admission on. Raises ValueError if there is nothing left
        to generate or nothing to compute.

        With a prefix cache, requests of one `prompt_key` find each other's first `shared_tokens`
        (None: the whole prompt); one with `generated_tokens` finds what an earlier request of its
        `sample_key` left when it was aborted, or ended though it `continues`. A key of -1 finds
        nothing.
        """
        if (
            not 0 <= generated_tokens < response_tokens
            or not 0 <= cached_tokens < prompt_tokens + generated_tokens
        ):
            raise ValueError(
                f"a request of {prompt_tokens} + {response_tokens} tokens with "
                f"{generated_tokens} generated, "
                f"{cached_tokens} cached"
            )
        shared = prompt_tokens if shared_tokens is None else shared_tokens
        lengths = (
            prompt_tokens,
            response_tokens,
            generated_tokens,
            cached_tokens,
            prompt_key,
            shared,
            sample_key,
            continues,
        )
        return int(self.fleet.submit(self.index, np.array([lengths], np.int64), NO_TICKET).item())

    def draft_from(
        self,
        slot: int,
        source: int,
        at: int,
        hardness: float = 1.0,
        window: int | None = None,
        runs_at: int = -1,
    ) -> None:
        """Let a request draft from a source (see `simrl.speculation.decoding`) from the next pass
        on, its window as at first.

        With SIBLINGS, `at` is its row of the trace; the group's other rows at its rank may draft from
        its tokens, which stay known when it has left until `forget_rows`. Of requests for one row, the
        latest counts. `runs_at`: the offset of drawn drafts."""
        assert self.decoding is not None
        place = self._at(slot)
        self._leave_row(slot)
        if source == SIBLINGS:
            if self.decoding.rule.decoupled:
                raise ValueError(
                    "a decoupled drafter is a model; siblings are drafted from where the verifier "
                    "is"
                )
            self._siblings["slot"][place[0] - self.first_row, at] = place[1]
        d = self.fleet.r
        d["source"][place], d["at"][place], d["hardness"][place], d["runs_at"][place] = (
            source,
            at,
            hardness,
            runs_at,
        )
        d["window"][place] = self.decoding.rule.window.start_tokens if window is None else window

    def forget_rows(self) -> None:
        """Forget the responses that are over: no request drafts from them any more."""
        if self._left_rows:
            self._siblings["tokens"][:, self._left_rows] = 0
        self._left_rows = []

    @property
    def _siblings(self) -> Records:
        return self.fleet.arrays.engines.drafting.siblings[self.rows]

    def _leave_row(self, slot: int) -> None:
        """Keep how many tokens a sibling has that ends, or drafts from another source: its row will
        never have more."""
        if self.decoding is None:
            return
        d, place = self.fleet.r, self._at(slot)
        row, siblings = d["at"].item(place), self._siblings[place[0] - self.first_row]
        if d["source"].item(place) == SIBLINGS and siblings["slot"].item(row) == place[1]:
            siblings[row] = -1, self.generated_tokens(slot)
            self._left_rows.append(row)

    def verify_old(self, slot: int, old_tokens: int, accepted: int) -> None:
        """Let a request that has no token yet verify an old response with its prompt, of which
        `accepted` tokens stay."""
        d, place = self.fleet.r, self._at(slot)
        room = self._capacity_tokens - self.fleet.r["prompt"].item(place) - 1
        d["old_tokens"][place], d["old_accepted"][place] = (
            min(old_tokens, room),
            min(accepted, room),
        )

    def new_rollout(self) -> None:
        """Shut an elastic gate until the batch has been small for long enough."""
        self.fleet.t["elastic_state"][self.rows] = ELASTIC_OFF

    def drafted(self, slot: int) -> list[int]:
        """Return the tokens that a request drafted (also ahead, whatever became of them), those
        accepted, the passes that verified, the tokens that these yielded (bonus tokens and
        corrections included), and the drafted tokens in no window that was verified (thrown away,
        or ahead now; 0 unless decoupled). An ended request has them until its slot is used
        again."""
        place = self._at(slot)
        return [self.fleet.r[name].item(place) for name in DRAFTED]

    def stop_at(self, slot: int, tokens: int, kind: int) -> None:
        """Set the next stop of a request, in place of the one before: the boundary at which it has
        `tokens` of its response.

        `kind` is PAUSE or WATCH; a request may have one of each. A pause comes at these tokens
        exactly, a watched token may be passed by a draft; where both come at once, the pause is
        reported. The end comes first: a stop at `response_tokens` or later never is. A stop that
        was reported is over. Raises ValueError for tokens that the request has already."""
        r, place = self.fleet.r, self._at(slot)
        generated, response = r["generated"].item(place), r["response"].item(place)
        if tokens <= generated:
            raise ValueError(f"a stop at {tokens} tokens of a request that has {generated}")
        if kind == WATCH:
            r["watch_at"][place] = tokens if tokens < response else NEVER
            return
        r["stop_at"][place] = min(tokens, response)
        r["stop_kind"][place] = kind if tokens < response else END

    def resume(self, slot: int, observation_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Append a paused request to the queue, with the rest of its cache, or, without one,
        `cached_tokens` (see `submit`); `observation_tokens` of its environment are prefilled.
        Raises KeyError for a request whose pause was not reported."""
        row, at = self._at(slot)
        prompt_tokens = self.fleet.r["prompt"].item(row, at) + observation_tokens
        self.require_fits(prompt_tokens, self.fleet.r["response"].item(row, at))
        if self.fleet.r["status"].item(row, at) != PAUSED:
            raise KeyError(slot)
        requeue(
            self.fleet.arrays.engines.requests[row],
            self.fleet.arrays.engines.totals[row],
            at,
            prompt_tokens,
            cached_tokens,
        )

    def drop_paused(self, slot: int) -> None:
        """Drop the cache of a request whose pause was reported at this boundary."""
        self._on_row(drop_held, slot)

    def pin_paused(self, slot: int, until_s: float) -> None:
        """Keep the cache of a paused request until it resumes, is aborted or unpinned, at `until_s`
        at the latest."""
        self._on_row(pin, slot, until_s)

    def unpin_paused(self, slot: int, until_s: float) -> None:
        """Drop a cache that was pinned until `until_s`, unless its request has resumed or was
        aborted."""
        self._on_row(unpin, slot, until_s)

    def abort(self, slot: int) -> int:
        """Take a request out at this boundary. Returns the response tokens it has."""
        self._on_row(remove, slot)
        self._leave_row(slot)
        return self.generated_tokens(slot)

    def recompute_running(self) -> None:
        """Drop the KV caches of all requests, also of paused and waiting ones. Running ones
        recompute theirs before anything that waits, in their order."""
        f = self.fleet.arrays.engines
        for row in range(self.first_row, self.first_row + self._dp):
            drop_caches(f.requests[row], f.totals[row], RELOADED)

    def set_aside(self, starts_over: bool = False) -> list[int]:
        """Drop all caches, and take what runs or waits out of the engine until `queue_again`.
        Return these slots, first those that ran, in their order. What `starts_over` has lost its
        tokens."""
        self.recompute_running()
        f, aside = self.fleet.arrays.engines, []
        for rank, row in enumerate(range(self.first_row, self.first_row + self._dp)):
            number = set_aside(f.requests[row], f.totals[row], starts_over, f.scratch)
            aside += [slot * self._dp + rank for slot in f.scratch[:number].tolist()]
        return aside

    def queue_again(self, slots: Sequence[int]) -> None:
        """Append requests that were set aside to the queue, in this order."""
        f, at = self.fleet.arrays.engines, np.array(slots, np.int64)
        for rank, row in enumerate(range(self.first_row, self.first_row + self._dp)):
            here = at[at % self._dp == rank] // self._dp
            queue_again(f.requests[row], f.totals[row], here)

    def forget_answers(self, slot: int, observation_tokens: int) -> None:
        """Take the environment's tokens out of the context of a request that starts over."""
        self.fleet.r["prompt"][self._at(slot)] -= observation_tokens

    def found_tokens(self, slot: int) -> int:
        """Return the tokens of a paused request that it would find in the prefix cache now."""
        row, at = self._at(slot)
        if not self.limits.prefix_caching or self.fleet.r["blocks"].item(row, at):
            return self.computed_tokens(slot)
        f, known = (
            self.fleet.arrays.engines,
            self.fleet.r["prompt"].item(row, at) + self.generated_tokens(slot),
        )
        blocks = found_blocks(f.requests[row], f.totals[row : row + 1], at, known)
        return int(blocks * self.limits.block_size)

    def computed_tokens(self, slot: int) -> int:
        """Return the tokens of a request whose KV is in its rank's cache."""
        return self.fleet.r["computed"].item(self._at(slot))

    def generated_tokens(self, slot: int) -> int:
        return self.fleet.r["generated"].item(self._at(slot))

    def first_token_s(self, slot: int) -> float:
        """Return when the first token of a request came; of an ended one until its slot is used
        again."""
        return self.fleet.r["first_token_s"].item(self._at(slot))

    def stops_before(self, time_s: float) -> bool:
        """Do as `Fleet.stops_before`."""
        return self.fleet.stops_before(self._one, time_s)

    def settle(self, time_s: float) -> list[Stop]:
        """Run to the first boundary strictly after `time_s`; move an idle engine to `time_s`.

        Returns what stopped on the way, in order.
        """
        stops: list[Stop] = []
        while self.stops_before(time_s):
            stops += self.stops()
        return stops

    def next_stops(self, time_s: float = np.inf) -> list[Stop]:
        """Run an engine that is alone in its fleet to its next stop, if that comes by `time_s`;
        return what stopped there."""
        self.fleet.changed(self.index)
        return self.stops() if self.fleet.advance(time_s, time_s)[0] == STOP else []

    def run_until_idle(self) -> Floats:
        """Run everything that was submitted. Returns when each slot ended, NaN for unused ones,
        shape (capacity,)."""
        self.fleet.stops_before(self._one, np.inf, heeds=False)
        return self.fleet.r["last_token_s"][self.first_row].copy()

    def stops(self) -> list[Stop]:
        """Return what stopped where the engine stands."""
        stops: list[Stop] = []
        r, now_s = self.fleet.r, self.now_s
        for rank, row in enumerate(range(self.first_row, self.first_row + self._dp)):
            for i in range(
                self.fleet.t["n_stopped"].item(row)
            ):  # most often one: plain Python is fastest
                slot, kind = (
                    r["stopped"].item(row, i) * self._dp + rank,
                    r["stopped_kind"].item(row, i),
                )
                stops.append((slot, now_s, kind))
                if kind == END:
                    self._leave_row(slot)
        self.fleet.members["stopped"][self.index] = 0
        return stops

    def _total(self, name: str) -> int:
        column = self.fleet.t[name]
        return column.item(self.first_row) if self._dp == 1 else int(column[self.rows].sum())

    def _at(self, slot: int) -> tuple[int, int]:
        """Return the row and the column of a slot."""
        return self.first_row + slot % self._dp, slot // self._dp

    def _on_row(self, kernel: Any, slot: int, *more: Any) -> None:
        """Run a kernel on a request, where the engine stands."""
        row, at = self._at(slot)
        kernel(
            self.fleet.arrays.engines.requests[row],
            self.fleet.arrays.engines.totals[row],
            at,
            *more,
        )


def one_engine(
    tables: Tables, limits: Limits, decoding: Decoding | None = None, key: int = 0
) -> Engine:
    """Return an engine that is alone in its fleet."""
    return Fleet(tables, limits, (decoding, [key])).engines[0]
