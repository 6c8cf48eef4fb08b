"""The state of an engine as arrays, and what moves a request between its lists: running, waiting, holding blocks.

Invariant: free blocks, those of running requests, those held and those of requests that leave sum to all blocks; a request is
in one list at most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.speculation.bandit_kernel import BanditState
from simrl.speculation.decoding import OLD_TOKENS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# What changes in a pass: slots, drafts, counters, what passes went to, gauges, flags, what a bandit has learnt.
State = tuple[Ints, Ints, Ints, Floats, Floats, Ints, BanditState]
# A request's slot, the time of the boundary at which it stopped, and how: END, PAUSE or WATCH.
Stop = tuple[int, float, int]

# Kinds of stops: the response ends; the request leaves the batch and keeps its cache; the caller is told, no more.
END, PAUSE, WATCH = range(3)

# Rows of `slots` (one column a request). `BLOCKS` are held, `STOP_AT` is the number of generated tokens at which it next leaves
# the batch, `WATCH_AT` the one at which the caller is told; `REACHED` tokens had been computed once, when the cache was last
# lost, `LOST_BY` what (an entry of `spent`); `SEEN_AT` passes are over when an async scheduler sees it ...
PROMPT, RESPONSE, GENERATED, COMPUTED, SCHEDULED, BLOCKS, STOP_AT, STOP_KIND, WATCH_AT, REACHED, LOST_BY, SEEN_AT = (
    range(12)
)
# ... and the lists kept beside them: running in order of admission, waiting (a ring), those that hold blocks without
# running (paused, or waiting again) in order of their pause, stopped in the last pass and how.
RUNNING, WAITING, HOLDING, STOPPED, STOPPED_KIND = range(12, 17)
SLOT_ROWS = 17
# Rows of `times`: when a request's first and last token came; the hardness of its acceptance (`simrl.speculation.acceptance`).
FIRST_TOKEN, LAST_TOKEN, HARDNESS = range(3)
TIME_ROWS = 3
# Entries of `counters`: the state (those that leave stopped in a pass that an async scheduler does not know yet) ...
(
    N_RUNNING,
    WAITING_HEAD,
    N_WAITING,
    N_HOLDING,
    N_STOPPED,
    FREE_BLOCKS,
    HELD_BLOCKS,
    ADMITTING,
    N_LEAVING,
    LEAVING_BLOCKS,
) = range(10)
# ... and totals since the engine was made.
PASSES, GENERATED_TOTAL, PREFILL_TOTAL, PREEMPTIONS = range(10, 14)
COUNTERS = 14
# Entries of `spent`, totals since the engine was made: seconds of the passes, by what they went to. Decoding is what a pass
# would take without anything else; what prefill makes it longer goes by the tokens: computed for the first time, or again
# because the cache was lost to another worker, to preemption, to new weights, or to a drafter that starts; drafting and
# verification go by the tokens that stood and those that did not; what a slow worker takes longer is apart ...
DECODE_S, PREFILL_S, MOVED_S, PREEMPTED_S, RELOADED_S, REDRAFTED_S, STOOD_S, WASTED_S, SLOWED_S = range(9)
# ... and sequences that decoded, summed over the passes.
DECODED = 9
SPENT = 10
NEVER = 2**62


class Limits(NamedTuple):
    """What bounds a pass. Names as in vLLM; `kv_blocks` blocks of `block_size` tokens hold the KV cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks: int
    async_scheduling: bool = False


@njit(cache=True)
def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + block_size - 1) // block_size


@njit(cache=True)
def known_tokens(slots: Ints, drafts: Ints, slot: int) -> int:
    """Tokens whose KV a request needs before it decodes: what it has, and the old response that is yet to be verified."""
    return slots[PROMPT, slot] + slots[GENERATED, slot] + drafts[OLD_TOKENS, slot]


@njit(cache=True)
def queue_up(slots: Ints, counters: Ints, slot: int) -> None:
    """A request joins the end of the queue."""
    slots[WAITING, (counters[WAITING_HEAD] + counters[N_WAITING]) % slots.shape[1]] = slot
    slots[SEEN_AT, slot] = counters[PASSES] + 1
    counters[N_WAITING] += 1


@njit(cache=True)
def enqueue(
    slots: Ints, times: Floats, counters: Ints, slot: int, prompt: int, response: int, generated: int, cached: int
) -> None:
    """A new request joins the end of the queue. It holds no blocks, but `cached` tokens will not have to be computed."""
    slots[PROMPT, slot] = prompt
    slots[RESPONSE, slot] = response
    slots[GENERATED, slot] = generated
    slots[COMPUTED, slot] = cached
    slots[SCHEDULED, slot] = 0
    slots[BLOCKS, slot] = 0
    slots[STOP_AT, slot] = response
    slots[STOP_KIND, slot] = END
    slots[WATCH_AT, slot] = NEVER
    slots[REACHED, slot] = prompt + generated - 1 if generated > 0 else 0
    slots[LOST_BY, slot] = MOVED_S
    times[FIRST_TOKEN, slot] = np.nan
    times[LAST_TOKEN, slot] = np.nan
    queue_up(slots, counters, slot)


@njit(cache=True)
def free(slots: Ints, counters: Ints, slot: int, cause: int) -> None:
    """A request gives its blocks back; what it had computed is lost, and why."""
    counters[FREE_BLOCKS] += slots[BLOCKS, slot]
    slots[BLOCKS, slot] = 0
    forget(slots, slot, cause)


@njit(cache=True)
def forget(slots: Ints, slot: int, cause: int) -> None:
    """What a request had computed is lost."""
    if slots[COMPUTED, slot] > 0:
        slots[REACHED, slot] = max(slots[REACHED, slot], slots[COMPUTED, slot])
        slots[LOST_BY, slot] = cause
        slots[COMPUTED, slot] = 0


@njit(cache=True)
def hold(slots: Ints, counters: Ints, slot: int) -> None:
    """A request keeps its blocks without running."""
    slots[HOLDING, counters[N_HOLDING]] = slot
    counters[N_HOLDING] += 1
    counters[HELD_BLOCKS] += slots[BLOCKS, slot]


@njit(cache=True)
def release(slots: Ints, counters: Ints, slot: int) -> None:
    """The opposite, if it holds any: its blocks are now those of a running request, or about to be freed."""
    if slots[BLOCKS, slot] == 0:
        return
    kept = 0
    for i in range(counters[N_HOLDING]):
        other = slots[HOLDING, i]
        if other != slot:
            slots[HOLDING, kept] = other
            kept += 1
    counters[N_HOLDING] = kept
    counters[HELD_BLOCKS] -= slots[BLOCKS, slot]


@njit(cache=True)
def make_room(slots: Ints, counters: Ints, blocks: int, cause: int) -> None:
    """Held caches go, oldest first, until so many blocks are free or none is held."""
    while blocks > counters[FREE_BLOCKS] and counters[N_HOLDING] > 0:
        slot = slots[HOLDING, 0]
        release(slots, counters, slot)
        free(slots, counters, slot, cause)


@njit(cache=True)
def preempt_last(slots: Ints, counters: Ints, cause: int) -> int:
    """The youngest running request gives its blocks back and waits, first in line, to recompute its cache."""
    counters[N_RUNNING] -= 1
    slot = slots[RUNNING, counters[N_RUNNING]]
    free(slots, counters, slot, cause)
    capacity = slots.shape[1]
    counters[WAITING_HEAD] = (counters[WAITING_HEAD] - 1) % capacity
    counters[N_WAITING] += 1
    slots[WAITING, counters[WAITING_HEAD]] = slot
    return slot


@njit(cache=True)
def remove(slots: Ints, counters: Ints, slot: int) -> None:
    """Takes a request out, wherever it is."""
    n = counters[N_RUNNING]
    for i in range(n):
        if slots[RUNNING, i] == slot:
            for j in range(i, n - 1):
                slots[RUNNING, j] = slots[RUNNING, j + 1]
            counters[N_RUNNING] = n - 1
            free(slots, counters, slot, MOVED_S)
            return
    release(slots, counters, slot)
    free(slots, counters, slot, MOVED_S)
    capacity = slots.shape[1]
    kept = 0
    for i in range(counters[N_WAITING]):
        other = slots[WAITING, (counters[WAITING_HEAD] + i) % capacity]
        if other != slot:
            slots[WAITING, (counters[WAITING_HEAD] + kept) % capacity] = other
            kept += 1
    counters[N_WAITING] = kept


@njit(cache=True)
def drop_caches(slots: Ints, counters: Ints, cause: int) -> None:
    """Every request loses its cache, those too that wait to bring one; running ones wait before all others, in order."""
    while counters[N_RUNNING] > 0:
        preempt_last(slots, counters, cause)
    make_room(slots, counters, counters[FREE_BLOCKS] + counters[HELD_BLOCKS], cause)
    for i in range(counters[N_WAITING]):
        forget(slots, slots[WAITING, (counters[WAITING_HEAD] + i) % slots.shape[1]], cause)


@njit(cache=True)
def admissible(slots: Ints, drafts: Ints, counters: Ints, limits: Limits, budget: int) -> int:
    """Tokens of the first waiting request that may start now; 0 if it has to wait on.

    All its known tokens must fit the blocks that are free or held (its own among them), though only a chunk may start
    (vLLM's `scheduler_reserve_full_isl`, on by default): else requests that come back with long prefixes evict one another.
    """
    if counters[N_WAITING] == 0 or counters[ADMITTING] == 0:
        return 0
    if counters[N_RUNNING] + counters[N_LEAVING] >= limits.max_num_seqs:
        return 0
    slot = slots[WAITING, counters[WAITING_HEAD]]
    if limits.async_scheduling and slots[SEEN_AT, slot] > counters[PASSES]:
        return 0
    known = known_tokens(slots, drafts, slot)
    if blocks_of(known, limits.block_size) > counters[FREE_BLOCKS] + counters[HELD_BLOCKS]:
        return 0
    return min(known - slots[COMPUTED, slot], budget)


@njit(cache=True)
def know_all(slots: Ints, counters: Ints) -> None:
    """An asynchronous scheduler that could schedule nothing ahead has waited: it knows who has left and who has come."""
    counters[FREE_BLOCKS] += counters[LEAVING_BLOCKS]
    counters[LEAVING_BLOCKS] = 0
    counters[N_LEAVING] = 0
    for i in range(counters[N_WAITING]):
        slots[SEEN_AT, slots[WAITING, (counters[WAITING_HEAD] + i) % slots.shape[1]]] = 0


@njit(cache=True)
def stop(slots: Ints, times: Floats, counters: Ints, limits: Limits, now_s: float) -> None:
    """Lists the running requests that reached a stop; after a pause the next one is the end. Only watched ones run on.

    Under asynchronous scheduling those that leave keep their places and blocks for one pass more: it is scheduled already.
    """
    if limits.async_scheduling:
        counters[FREE_BLOCKS] += counters[LEAVING_BLOCKS]
        counters[LEAVING_BLOCKS] = 0
        counters[N_LEAVING] = 0
    free_before = counters[FREE_BLOCKS]
    kept = 0
    stopped = 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        generated = slots[GENERATED, slot]
        runs_on = True
        if generated >= slots[STOP_AT, slot]:
            kind = slots[STOP_KIND, slot]
            slots[STOPPED, stopped] = slot
            slots[STOPPED_KIND, stopped] = kind
            stopped += 1
            slots[STOP_AT, slot] = slots[RESPONSE, slot]
            slots[STOP_KIND, slot] = END
            runs_on = False
            if kind == PAUSE:
                hold(slots, counters, slot)
            else:
                times[LAST_TOKEN, slot] = now_s
                free(slots, counters, slot, MOVED_S)
        elif generated >= slots[WATCH_AT, slot]:
            slots[STOPPED, stopped] = slot
            slots[STOPPED_KIND, stopped] = WATCH
            stopped += 1
        if generated >= slots[WATCH_AT, slot]:
            slots[WATCH_AT, slot] = NEVER
        if runs_on:
            slots[RUNNING, kept] = slot
            kept += 1
    if limits.async_scheduling:
        counters[N_LEAVING] = counters[N_RUNNING] - kept
        counters[LEAVING_BLOCKS] = counters[FREE_BLOCKS] - free_before
        counters[FREE_BLOCKS] = free_before
    counters[N_RUNNING] = kept
    counters[N_STOPPED] = stopped
