"""The requests of an engine, and what moves one between its lists: running, waiting, holding
blocks.

Invariant: blocks that are free, of running requests, held, and of leaving requests sum to all
blocks; a request is in the queue or in the batch, not in both.

Helpers called for every request take records, not arrays, and are inlined: an array costs a
reference count a call, unless its caller is `lean`.
"""

from __future__ import annotations

import numpy as np

from simrl.engine.prefix_cache import (
    count_held,
    evict,
    find,
    give_back,
    held_alone,
    leave_node,
    new_node,
    node_of,
)
from simrl.engine.state import (
    END,
    FOUND_AGAIN,
    LEAVING,
    MOVED,
    NEVER,
    OWN,
    PROMPT,
    RUNNING,
    UNKNOWN,
    WAITING,
    Limits,
    Request,
    Requests,
    Totals,
)
from simrl.profile.compiled import inlined, lean, lean_kernel
from simrl.speculation.decoding import NONE, Records

# SGLang 0.5.23: SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS, and the
# longest queue that it sorts by prefixes (managers/schedule_policy.py)
LEAST_OF_RATIO, DECAY_PASSES, MOST_SORTED = 0.14, 600, 128


@lean
def blocks_of(tokens: int, block_size: int) -> int:
    """Return the blocks that hold `tokens`."""
    return (tokens + block_size - 1) // block_size


@lean
def most_in_window(limits: Limits) -> int:
    """Return the most blocks that a sequence has in a window group: of the window and of the tokens
    that passes compute."""
    computing = limits.max_num_batched_tokens * (2 if limits.async_scheduling else 1)
    return blocks_of(limits.window_tokens - 1 + computing, limits.block_size) + 1


@lean_kernel
def blocks_to_start(tokens: int, limits: Limits) -> int:
    """Return the blocks that have to be there before a sequence of `tokens` starts."""
    columns = blocks_of(tokens, limits.block_size)
    blocks = limits.full_groups * columns + limits.state_blocks
    if limits.window_groups > 0:
        blocks += limits.window_groups * min(columns, most_in_window(limits))
    return blocks


@lean
def more_blocks(request: Request, tokens: int, limits: Limits) -> int:
    """Return the blocks that a request takes to have room for `tokens`; below 0: it gives back what
    left its windows."""
    if limits.window_groups == 0:
        groups, blocks = limits.full_groups, request.blocks - limits.state_blocks
        if groups * tokens <= blocks * limits.block_size:  # without the division
            return 0
        return groups * blocks_of(tokens, limits.block_size) - blocks
    columns = blocks_of(tokens, limits.block_size)
    processed = request.computed + request.rejected - request.in_flight
    left = max(processed - limits.window_tokens + 1, 0) // limits.block_size
    blocks = (
        limits.full_groups * columns + limits.window_groups * (columns - left) + limits.state_blocks
    )
    return blocks - request.blocks


@lean_kernel
def capacity_tokens(limits: Limits) -> int:
    """Return the tokens of the longest sequence that fits alone."""
    room = limits.kv_blocks - limits.state_blocks
    columns = room // (limits.full_groups + limits.window_groups)
    if limits.window_groups > 0 and columns > most_in_window(limits):
        room -= limits.window_groups * most_in_window(limits)
        columns = room // limits.full_groups if limits.full_groups > 0 else 2**40
    return max(columns, 0) * limits.block_size


def is_plain(limits: Limits) -> bool:
    """Return whether all layers keep every token, so that a sequence has a block for each
    `block_size` tokens."""
    return limits.full_groups == 1 and limits.window_groups == 0 and limits.state_blocks == 0


@lean
def known_tokens(request: Request) -> int:
    """Return the tokens whose KV a request needs before it decodes; an old response yet to be
    verified counts."""
    return request.prompt + request.generated + request.old_tokens


@inlined
def is_resting(request: Request) -> bool:
    """Return whether a request is in the batch once more though it was paused: all that the
    scheduler does not know is its next token."""
    return bool(request.once_more == 1 and request.status != LEAVING)


@lean
def waiting_at(r: Requests, t: Totals, place: int) -> int:
    """Return where the ring has entry `place` of the queue; -1 and `n_waiting` are free entries
    before and behind it."""
    return (t.waiting_head + place) % len(r)


@lean
def queue_up(r: Requests, t: Totals, slot: int) -> None:
    """Append a request to the queue. An idle SGLang takes its ratio of the start again."""
    if t.n_running + t.n_waiting == 0:
        t.token_ratio = t.decays = 0
    r[waiting_at(r, t, t.n_waiting)].waiting = slot
    r[slot].seen_at = t.passes + 1
    r[slot].status = WAITING
    t.n_waiting += 1


@lean_kernel
def enqueue(
    r: Requests,
    totals: Records,
    prompt: int,
    response: int,
    generated: int,
    cached: int,
    prompt_key: int,
    shared_tokens: int,
    sample_key: int,
    continues: bool,
) -> int:
    """Append a new request to the queue. It holds no blocks, but `cached` tokens will not have to
    be computed. See `Engine.submit` about the keys. Return its slot; one must be free."""
    t = totals[0]
    t.n_free -= 1
    slot = r[t.n_free].free
    q = r[slot]
    q.prompt = prompt
    q.response = response
    q.generated = generated
    q.computed = cached
    q.scheduled = q.in_flight = q.blocks = 0
    q.stop_at = response
    q.stop_kind = END
    q.watch_at = NEVER
    q.reached = prompt + generated - 1 if generated > 0 else 0
    q.lost_by = MOVED
    q.first_token_s = q.last_token_s = np.nan
    q.pinned_until_s = 0.0
    q.complete = q.gained = q.rejected = q.once_more = 0
    q.sample_key = sample_key
    q.ticket = q.prompt_node = q.last_node = q.own_node = -1
    q.shared = q.first_own = q.covering = 0
    q.continues = continues
    _forget_drafts(q)
    if t.prefix_caching == 1:
        _ask_for(r, t, slot, prompt_key, shared_tokens)
    queue_up(r, t, slot)
    return slot


@inlined
def _forget_drafts(request: Request) -> None:
    """Let a new request draft from nothing."""
    request.source = NONE
    request.at = request.proposed = request.drafted = request.accepted = 0
    request.old_tokens = request.old_accepted = 0
    request.drafted_total = request.accepted_total = request.misses_total = 0
    request.verifications = request.verified_total = request.unverified_total = 0
    request.coupled = request.waits_for_drafts = request.drafter_prompt = 0


@inlined
def _ask_for(r: Requests, t: Totals, slot: int, prompt_key: int, shared_tokens: int) -> None:
    """Let a new request find its prompt, and what it left here before."""
    q, most = r[slot], (shared_tokens - t.last_apart) // t.block_size
    if prompt_key >= 0 and shared_tokens >= t.block_size:
        node = node_of(r, PROMPT, prompt_key)
        if node < 0 and t.n_spare > 0:
            node = new_node(r, t, PROMPT, prompt_key, 0)
            r[node].node_most = most
        if node >= 0 and r[node].node_most == most:  # else it is another prompt of that name
            r[node].node_users += 1
            q.prompt_node = node
            q.first_own = shared_tokens // t.block_size
    if q.sample_key >= 0 and q.generated > 0:
        q.own_node = UNKNOWN


@inlined
def free_slot(r: Requests, t: Totals, slot: int) -> None:
    """Let a slot be used again. Until then it has what its request had at its end."""
    r[t.n_free].free = slot
    t.n_free += 1


@inlined
def admit(r: Requests, t: Totals) -> int:
    """Move the first waiting request to the running ones. Returns it."""
    slot = r[t.waiting_head].waiting
    t.waiting_head = waiting_at(r, t, 1)
    t.n_waiting -= 1
    r[t.n_running].running = slot
    t.n_running += 1
    t.full_at = 0
    r[slot].kept = known_tokens(r[slot])
    if r[slot].status == WAITING:  # else it was aborted since
        r[slot].status = RUNNING
    release(r, t, slot)
    return slot


@lean
def free(r: Requests, t: Totals, slot: int, cause: int) -> None:
    """Take a request's blocks and its cache; it may come back."""
    if t.prefix_caching == 0:
        t.free_blocks += r[slot].blocks
        r[slot].blocks = 0
    elif r[slot].blocks > 0:
        give_back(r, t, slot, _hashed_tokens(r[slot], t), FOUND_AGAIN)
    forget(r[slot], cause)


@lean
def _hashed_tokens(request: Request, t: Totals) -> int:
    """Return the tokens whose full blocks others may find, of a request that leaves between two
    passes: without what drafts gained in the last one, which a scheduler that waits for it would
    have noted in the next."""
    computed = min(
        request.computed, request.prompt + request.generated
    )  # without what is left of an old response
    return computed if t.async_scheduling == 1 else computed - max(request.gained - 1, 0)


@lean
def end(r: Requests, t: Totals, slot: int, found_again: bool) -> None:
    """Take the blocks and the cache of a request that has ended here; `found_again`: its text may
    be asked for later."""
    if t.prefix_caching == 0:
        free(r, t, slot, MOVED)
        return
    if r[slot].blocks > 0:
        give_back(r, t, slot, _hashed_tokens(r[slot], t), found_again and r[slot].sample_key >= 0)
    if r[slot].own_node >= 0:
        leave_node(r, t, r[slot].own_node)
        r[slot].own_node = -1
    if r[slot].prompt_node >= 0:
        leave_node(r, t, r[slot].prompt_node)
        r[slot].prompt_node = -1
    forget(r[slot], MOVED)


@lean
def forget(request: Request, cause: int) -> None:
    """Forget what a request had computed."""
    if request.computed > 0:
        request.reached = max(request.reached, request.computed)
        request.lost_by = cause
        request.computed = 0
    request.complete = 0
    request.gained = 0
    request.rejected = 0
    request.in_flight = 0


@lean_kernel
def hold(r: Requests, t: Totals, slot: int) -> None:
    """Let a request keep its blocks without running."""
    r[t.n_holding].holding = slot
    t.n_holding += 1
    if t.prefix_caching == 1:
        count_held(r, t, slot, 1)
    else:
        t.held_blocks += r[slot].blocks


@lean
def release(r: Requests, t: Totals, slot: int) -> None:
    """Undo `hold`, if the request holds blocks: it runs now, or its blocks are about to be
    freed."""
    if r[slot].blocks == 0:
        return
    kept = 0
    for i in range(t.n_holding):
        other = r[i].holding
        if other != slot:
            r[kept].holding = other
            kept += 1
    if kept == t.n_holding:
        return
    t.n_holding = kept
    if t.prefix_caching == 1:
        count_held(r, t, slot, -1)
    else:
        t.held_blocks -= r[slot].blocks


@lean
def make_room(r: Requests, t: Totals, blocks: int, cause: int) -> None:
    """Drop held caches, oldest first, until `blocks` are free or none is held."""
    while blocks > t.free_blocks and t.n_holding > 0:
        slot = r[0].holding
        release(r, t, slot)
        free(r, t, slot, cause)


@lean
def _to_come(generated: int, limits: Limits) -> float:
    """Return the blocks of the tokens that may follow `generated` ones, as SGLang clips them."""
    tokens = min(limits.max_new_tokens - generated, limits.clip_max_new_tokens)
    return limits.full_groups * tokens / limits.block_size


@lean
def _reserved_blocks(r: Requests, t: Totals, limits: Limits, newcomer: Request) -> int:
    """Return the blocks beside a newcomer's context that SGLang wants to be free: for what is to
    come of it, for the whole cap of those whose context this pass ends, and for a share, which decays with
    the passes that decode, of what is to come of the others."""
    least, blocks = LEAST_OF_RATIO * limits.start_ratio, 1 + _to_come(newcomer.generated, limits)
    ratio = t.token_ratio if t.token_ratio > 0 else limits.start_ratio
    if t.decays > 0:
        ratio = max(ratio - t.decays * (limits.start_ratio - least) / DECAY_PASSES, least)
    for i in range(t.n_running):
        q = r[r[i].running]
        if q.scheduled == 0:
            blocks += ratio * _to_come(q.generated, limits)
        else:  # generated tokens are not subtracted here
            blocks += 1 + _to_come(0, limits) * (q.computed + q.scheduled == known_tokens(q))
    return int(blocks) + 1


@lean
def _sort_by_prefix(r: Requests, t: Totals) -> None:
    """Sort the waiting requests by the blocks that each finds, unless SGLang holds them for too
    many."""
    evict(r, t)
    for i in range(1, t.n_waiting if t.n_waiting <= MOST_SORTED else 1):
        slot, place = r[waiting_at(r, t, i)].waiting, i
        while place > 0 and _finds_more(r, t, slot, r[waiting_at(r, t, place - 1)].waiting):
            r[waiting_at(r, t, place)].waiting = r[waiting_at(r, t, place - 1)].waiting
            place -= 1
        r[waiting_at(r, t, place)].waiting = slot


@lean
def _finds_more(r: Requests, t: Totals, slot: int, other: int) -> bool:
    """Return whether one request finds more blocks than another."""
    more = find(r, t, slot, known_tokens(r[slot]))[0] - find(r, t, other, known_tokens(r[other]))[0]
    return bool(more > 0)


@lean
def admissible(r: Requests, t: Totals, limits: Limits, budget: int) -> int:
    """Return the tokens of the first waiting request that may start now; 0 if it has to wait on.

    All its known tokens must fit the blocks that are free or held (its own among them), though only
    a chunk may start (vLLM's `scheduler_reserve_full_isl`, on by default): else requests that come
    back with long prefixes evict one another. Beside other requests, the watermark stays free.
    Under SGLang's rule (`engine.sglang`), so must what it may generate, beside the reserved blocks,
    unless nothing runs.
    """
    if t.n_waiting == 0 or t.admitting == 0:
        return 0
    places = t.n_running + t.leaving_places
    if places >= limits.max_num_seqs or 0 < t.full_at <= places:
        return 0
    if limits.longest_prefix_first:
        _sort_by_prefix(r, t)
    slot = r[t.waiting_head].waiting
    if limits.async_scheduling and r[slot].seen_at > t.passes:
        return 0
    known = known_tokens(r[slot])
    hit_blocks, computed = 0, r[slot].computed
    free_blocks = t.free_blocks + t.held_blocks
    if t.prefix_caching == 1 and r[slot].blocks == 0:
        evict(r, t)
        if r[slot].own_node == UNKNOWN:
            own_node = node_of(r, OWN, r[slot].sample_key)
            if own_node >= 0:
                r[own_node].node_users += 1
                r[slot].own_node = own_node
        hit_blocks, free_ones = find(r, t, slot, known)
        computed = max(hit_blocks * limits.block_size, computed)
        free_blocks -= free_ones
    elif t.prefix_caching == 1:
        hit_blocks = r[slot].blocks
        free_blocks -= held_alone(r, slot)
    if t.decodes_alone == 1 and computed < known - 1:
        return 0
    need = blocks_to_start(known, limits) - hit_blocks + limits.watermark_blocks * (places > 0)
    if limits.sglang and t.n_running > 0:
        need += _reserved_blocks(r, t, limits, r[slot])
    if need > free_blocks:
        t.full_at = places if limits.sglang else 0
        return 0
    return min(known - computed, budget)
