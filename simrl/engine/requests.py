"""The requests of an engine, and what moves one between its lists: running, waiting, holding blocks.

Invariant: free blocks, those of running requests, those held and those of requests that leave sum to all blocks; a request is
in one list at most.

`Request`, `Totals` and `simrl.speculation.decoding.Draft` name the fields of structured arrays (`fields_of`), one record a
request, one for all totals. Compiled code reads a field as an attribute: `r[slot].computed`, `t.free_blocks`. Helpers called
for every request take records, not arrays, and are inlined: an array costs a reference count a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.speculation.decoding import Draft, Drafts, Gauges, Records, fields_of

# A request's slot, the time of the boundary at which it stopped, and how: END, PAUSE or WATCH.
Stop = tuple[int, float, int]
# Kinds of stops: the response ends; the request leaves the batch and keeps its cache; the caller is informed, no more.
END, PAUSE, WATCH = range(3)
# Why a request lost its cache: it moved to another worker, was preempted, got new weights, or a drafter started that needs it.
MOVED, PREEMPTED, RELOADED, REDRAFTED = range(4)
NEVER = 2**62


class Request:
    """One entry a request (a slot), but for the lists at the end, whose entries are slots."""

    running: int  # `n_running` slots in order of admission
    generated: int
    computed: int  # tokens with KV
    blocks: int  # that it holds
    prompt: int
    stop_at: int  # generated tokens at which it next leaves the batch …
    watch_at: int  # generated tokens at which the caller is informed
    scheduled: int  # tokens of the pass that is being scheduled
    response: int
    stop_kind: int  # … by END or PAUSE
    reached: int  # tokens that had been computed when the cache was last lost …
    lost_by: int  # … and why: MOVED, PREEMPTED, RELOADED or REDRAFTED
    seen_at: int  # an async scheduler sees it waiting when that many passes are over
    first_token_s: float
    last_token_s: float
    ticket: int  # of a request of a group (`engine.fleet`); -1 of one whose stops are events
    waiting: int  # a ring of `n_waiting` slots from `waiting_head` on
    holding: int  # `n_holding` slots that hold blocks without running (paused, or waiting again), oldest pause first
    stopped: int  # `n_stopped` slots that stopped in the last pass …
    stopped_kind: int  # … and how
    free: int  # `n_free` slots without a request, the last one to be used next


Requests = Sequence[Request]


class Totals(Gauges):
    """The state of the engine, and totals since it was made.

    The seconds of all passes are split by what they went to. `decode_s` is what passes would take without anything else. What
    prefill adds is split by its tokens: computed for the first time, or again, by why the cache was lost. Drafting and
    verification are split by accepted and rejected draft tokens. What a slow worker takes longer is `slowed_s` alone.
    """

    now_s: float
    slowdown: float
    admitting: int
    n_running: int
    n_waiting: int
    waiting_head: int
    n_holding: int
    n_stopped: int
    n_free: int
    n_leaving: int  # stopped in a pass that an async scheduler does not know yet
    free_blocks: int
    held_blocks: int
    leaving_blocks: int

    passes: int
    generated_tokens: int
    prefill_tokens: int
    preemptions: int
    decode_s: float
    prefill_s: float
    recompute_moved_s: float
    recompute_preempted_s: float
    recompute_reloaded_s: float
    recompute_redrafted_s: float
    drafts_accepted_s: float
    drafts_rejected_s: float
    slowed_s: float
    decodes: int  # sequences that decoded, summed over the passes


REQUESTS, DRAFTS, TOTALS = fields_of(Request), fields_of(Draft), fields_of(Totals)


class Columns(dict[str, NDArray[Any]]):
    """The fields of records, each looked up once."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __missing__(self, name: str) -> NDArray[Any]:
        self[name] = column = self._records[name]
        return column


class Limits(NamedTuple):
    """Bounds of a pass. Names as in vLLM; `kv_blocks` blocks of `block_size` tokens hold the KV cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks: int
    async_scheduling: bool = False


class Until(NamedTuple):
    """The end of a run: the first boundary after `time_s`, a stop (if `first_stop`), or an idle engine."""

    time_s: float
    first_stop: bool


@njit(cache=True)
def busy(t: Totals) -> bool:
    """Return whether a next pass would do something."""
    return t.n_running > 0 or (t.n_waiting > 0 and t.admitting == 1)


@njit(cache=True)
def blocks_of(tokens: int, block_size: int) -> int:
    """Return the blocks that hold `tokens`."""
    return (tokens + block_size - 1) // block_size


@njit(cache=True, inline="always")
def known_tokens(request: Request, draft: Draft) -> int:
    """Return the tokens whose KV a request needs before it decodes; an old response yet to be verified counts."""
    return request.prompt + request.generated + draft.old_tokens


@njit(cache=True)
def waiting_at(r: Requests, t: Totals, place: int) -> int:
    """Return where the ring has entry `place` of the queue; -1 and `n_waiting` are free entries before and behind it."""
    return (t.waiting_head + place) % len(r)


@njit(cache=True)
def queue_up(r: Requests, t: Totals, slot: int) -> None:
    """Append a request to the queue."""
    r[waiting_at(r, t, t.n_waiting)].waiting = slot
    r[slot].seen_at = t.passes + 1
    t.n_waiting += 1


@njit(cache=True)
def enqueue(r: Requests, totals: Records, prompt: int, response: int, generated: int, cached: int) -> int:
    """Append a new request to the queue. It holds no blocks, but `cached` tokens will not have to be computed. Return its slot;
    one must be free."""
    t = totals[0]
    t.n_free -= 1
    slot = r[t.n_free].free
    r[slot].prompt = prompt
    r[slot].response = response
    r[slot].generated = generated
    r[slot].computed = cached
    r[slot].scheduled = 0
    r[slot].blocks = 0
    r[slot].stop_at = response
    r[slot].stop_kind = END
    r[slot].watch_at = NEVER
    r[slot].reached = prompt + generated - 1 if generated > 0 else 0
    r[slot].lost_by = MOVED
    r[slot].first_token_s = np.nan
    r[slot].last_token_s = np.nan
    r[slot].ticket = -1
    queue_up(r, t, slot)
    return slot


@njit(cache=True, inline="always")
def free_slot(r: Requests, t: Totals, slot: int) -> None:
    """Let a slot be used again. Until then it has what its request had at its end."""
    r[t.n_free].free = slot
    t.n_free += 1


@njit(cache=True)
def admit(r: Requests, t: Totals) -> int:
    """Move the first waiting request to the running ones. Returns it."""
    slot = r[t.waiting_head].waiting
    t.waiting_head = waiting_at(r, t, 1)
    t.n_waiting -= 1
    r[t.n_running].running = slot
    t.n_running += 1
    release(r, t, slot)
    return slot


@njit(cache=True)
def free(request: Request, t: Totals, cause: int) -> None:
    """Take a request's blocks and its cache."""
    t.free_blocks += request.blocks
    request.blocks = 0
    forget(request, cause)


@njit(cache=True, inline="always")
def forget(request: Request, cause: int) -> None:
    """Forget what a request had computed."""
    if request.computed > 0:
        request.reached = max(request.reached, request.computed)
        request.lost_by = cause
        request.computed = 0


@njit(cache=True)
def hold(r: Requests, t: Totals, slot: int) -> None:
    """Let a request keep its blocks without running."""
    r[t.n_holding].holding = slot
    t.n_holding += 1
    t.held_blocks += r[slot].blocks


@njit(cache=True)
def release(r: Requests, t: Totals, slot: int) -> None:
    """Undo `hold`, if the request holds blocks: they are those of a running request now, or about to be freed."""
    if r[slot].blocks == 0:
        return
    kept = 0
    for i in range(t.n_holding):
        other = r[i].holding
        if other != slot:
            r[kept].holding = other
            kept += 1
    t.n_holding = kept
    t.held_blocks -= r[slot].blocks


@njit(cache=True)
def drop_held(r: Requests, totals: Records, slot: int, limits: Limits) -> None:
    """Drop the cache of a paused request whose pause was reported just now. An async scheduler knows that a pass later."""
    t = totals[0]
    release(r, t, slot)
    free_before = t.free_blocks
    free(r[slot], t, MOVED)
    if limits.async_scheduling:
        t.leaving_blocks += t.free_blocks - free_before
        t.free_blocks = free_before


@njit(cache=True)
def pin(r: Requests, totals: Records, slot: int) -> None:
    """Let nobody have the blocks of a paused request."""
    release(r, totals[0], slot)


@njit(cache=True)
def drop_pinned(r: Requests, totals: Records, slot: int) -> None:
    """Drop the cache of a request whose blocks nobody could have."""
    free(r[slot], totals[0], MOVED)


@njit(cache=True)
def requeue(r: Requests, totals: Records, slot: int, prompt: int, cached: int) -> None:
    """Append a request to the queue again, with this context; if it has no cache, `cached` tokens need not be computed."""
    r[slot].prompt = prompt
    if r[slot].blocks == 0:
        r[slot].computed = cached
    queue_up(r, totals[0], slot)


@njit(cache=True)
def make_room(r: Requests, t: Totals, blocks: int, cause: int) -> None:
    """Drop held caches, oldest first, until `blocks` are free or none is held."""
    while blocks > t.free_blocks and t.n_holding > 0:
        slot = r[0].holding
        release(r, t, slot)
        free(r[slot], t, cause)


@njit(cache=True)
def preempt_last(r: Requests, t: Totals, cause: int) -> int:
    """Preempt the youngest running request: it gives its blocks back and waits, first in line, to recompute its cache."""
    t.n_running -= 1
    slot = r[t.n_running].running
    free(r[slot], t, cause)
    t.waiting_head = waiting_at(r, t, -1)
    t.n_waiting += 1
    r[t.waiting_head].waiting = slot
    return slot


@njit(cache=True)
def remove(r: Requests, t: Totals, slot: int) -> None:
    """Take a request out of its list, and free its blocks and its slot."""
    free_slot(r, t, slot)
    n = t.n_running
    for i in range(n):
        if r[i].running == slot:
            for j in range(i, n - 1):
                r[j].running = r[j + 1].running
            t.n_running = n - 1
            free(r[slot], t, MOVED)
            return
    release(r, t, slot)
    free(r[slot], t, MOVED)
    kept = 0
    for i in range(t.n_waiting):
        other = r[waiting_at(r, t, i)].waiting
        if other != slot:
            r[waiting_at(r, t, kept)].waiting = other
            kept += 1
    t.n_waiting = kept


@njit(cache=True)
def drop_caches(r: Requests, t: Totals, cause: int) -> None:
    """Drop the caches of all requests, also those that waiting ones would bring. Running ones go to the head of the queue."""
    while t.n_running > 0:
        preempt_last(r, t, cause)
    make_room(r, t, t.free_blocks + t.held_blocks, cause)
    for i in range(t.n_waiting):
        forget(r[r[waiting_at(r, t, i)].waiting], cause)


@njit(cache=True)
def admissible(r: Requests, drafts: Drafts, t: Totals, limits: Limits, budget: int) -> int:
    """Return the tokens of the first waiting request that may start now; 0 if it has to wait on.

    All its known tokens must fit the blocks that are free or held (its own among them), though only a chunk may start
    (vLLM's `scheduler_reserve_full_isl`, on by default): else requests that come back with long prefixes evict one another.
    """
    if t.n_waiting == 0 or t.admitting == 0:
        return 0
    if t.n_running + t.n_leaving >= limits.max_num_seqs:
        return 0
    slot = r[t.waiting_head].waiting
    if limits.async_scheduling and r[slot].seen_at > t.passes:
        return 0
    known = known_tokens(r[slot], drafts[slot])
    if blocks_of(known, limits.block_size) > t.free_blocks + t.held_blocks:
        return 0
    return min(known - r[slot].computed, budget)


@njit(cache=True)
def know_all(r: Requests, t: Totals) -> None:
    """Let an async scheduler that could schedule nothing ahead know who has left and who has come: it has waited."""
    t.free_blocks += t.leaving_blocks
    t.leaving_blocks = 0
    t.n_leaving = 0
    for i in range(t.n_waiting):
        r[r[waiting_at(r, t, i)].waiting].seen_at = 0


@njit(cache=True)
def may_stop(r: Requests, t: Totals, passes: int, admitted: int) -> bool:
    """Return whether a request that runs, or is among the first `admitted` to wait, may stop within some passes."""
    for i in range(t.n_running + min(t.n_waiting, admitted)):
        slot = r[i].running if i < t.n_running else r[waiting_at(r, t, i - t.n_running)].waiting
        if min(r[slot].stop_at, r[slot].watch_at) - r[slot].generated <= passes:
            return True
    return False


@njit(cache=True)
def stop(r: Requests, t: Totals, limits: Limits) -> None:
    """List the running requests that reached a stop; after a pause the next one is the end. Only watched ones run on.

    Under async scheduling those that leave keep their places and blocks for one more pass: it is scheduled already.
    """
    if limits.async_scheduling:
        t.free_blocks += t.leaving_blocks
        t.leaving_blocks = 0
        t.n_leaving = 0
    free_before = t.free_blocks
    kept = 0
    stopped = 0
    for i in range(t.n_running):
        slot = r[i].running
        generated = r[slot].generated
        ends, watched = generated >= r[slot].stop_at, generated >= r[slot].watch_at
        if ends or watched:
            r[stopped].stopped = slot
            r[stopped].stopped_kind = r[slot].stop_kind if ends else WATCH
            stopped += 1
        if watched:
            r[slot].watch_at = NEVER
        if not ends:
            r[kept].running = slot
            kept += 1
            continue
        if r[slot].stop_kind == PAUSE:
            hold(r, t, slot)
        else:
            r[slot].last_token_s = t.now_s
            free(r[slot], t, MOVED)
            free_slot(r, t, slot)
        r[slot].stop_at = r[slot].response
        r[slot].stop_kind = END
    if limits.async_scheduling:
        t.n_leaving = t.n_running - kept
        t.leaving_blocks = t.free_blocks - free_before
        t.free_blocks = free_before
    t.n_running = kept
    t.n_stopped = stopped
