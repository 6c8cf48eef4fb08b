"""The requests of an engine, and what moves one between its lists: running, waiting, holding blocks.

Invariant: free blocks, those of running requests, those held and those of requests that leave sum to all blocks; a request is
in one list at most.

`Request` and `Totals` name the fields of structured arrays (`fields_of`), one record a request, one for all totals. Compiled
code reads a field as an attribute: `r[slot].computed`, `t.free_blocks`. Helpers called for every request take records, not
arrays, and are inlined: an array costs a reference count a call, unless its caller is `lean`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.engine.prefix_cache import (
    OWN,
    PROMPT,
    CacheTotals,
    Node,
    count_held,
    evict,
    find,
    give_back,
    held_alone,
    leave_node,
    new_node,
    node_of,
)
from simrl.profile.compiled import inlined, lean, lean_kernel
from simrl.speculation.bandit import BanditState
from simrl.speculation.decoding import NONE, Draft, Gauges, Ints, Records, fields_of

# A request's slot, the time of the boundary at which it stopped, and how: END, PAUSE or WATCH.
Stop = tuple[int, float, int]
# Kinds of stops: the response ends; the request leaves the batch and keeps its cache; the caller is informed, no more.
END, PAUSE, WATCH = range(3)
# Why a request lost its cache: it moved to another worker, was preempted, got new weights, or a drafter started that needs it.
MOVED, PREEMPTED, RELOADED, REDRAFTED = np.arange(4)
FOUND_AGAIN = np.bool_(True)
NEVER: Any = np.int64(2**62)  # numba compiles a function anew for each Python integer it is called with
UNKNOWN = -2


class Request(Draft, Node):
    """One entry a request (a slot), but for nodes, and for the lists at the end, whose entries are slots.

    What every pass reads and writes comes first, on a few cache lines.
    """

    running: int  # `n_running` slots in order of admission
    generated: int
    computed: int  # tokens with KV
    blocks: int  # that it holds
    prompt: int
    stop_at: int  # generated tokens at which it next leaves the batch …
    watch_at: int  # generated tokens at which the caller is informed
    scheduled: int  # tokens of the pass that is being scheduled
    gained: int  # tokens in its last pass if that decoded, 0 if it computed the rest of its context, -1 if a part
    rejected: int  # draft tokens of its last pass that were rejected; an async scheduler does not know it yet
    going: int  # it takes part in one more pass, scheduled before it was aborted (1), paused (2) or ended (3); else 0
    response: int
    stop_kind: int  # … by END or PAUSE
    reached: int  # tokens that had been computed when the cache was last lost …
    lost_by: int  # … and why: MOVED, PREEMPTED, RELOADED or REDRAFTED
    in_flight: int  # tokens of the pass in flight, if the scheduler is async and there are window groups
    seen_at: int  # an async scheduler sees it waiting when that many passes are over
    first_token_s: float
    last_token_s: float
    pinned_until_s: float  # of a paused one whose blocks nobody may have; else 0
    # With a prefix cache (`engine.prefix_cache`):
    sample_key: int  # -1 of one whose text nobody asks for after its end
    prompt_node: int  # -1: its prompt is not shared …
    shared: int  # … blocks of it that the request holds …
    last_node: int  # … and the copy of its last block that it holds; -1 if none
    first_own: int  # block from which on its text is its own
    own_node: int  # what it left in the list; -1 if nothing, UNKNOWN until it is first in line
    covering: int  # whether it computes its prompt
    continues: int  # whether its text may be asked for after its end

    ticket: int  # of a request of a group (`engine.fleet`); -1 of one whose stops are events
    waiting: int  # a ring of `n_waiting` slots from `waiting_head` on
    holding: int  # `n_holding` slots that hold blocks without running (paused, or waiting again), oldest pause first
    stopped: int  # `n_stopped` slots that stopped in the last pass …
    stopped_kind: int  # … and how
    leaving: int  # `n_leaving` slots that stopped in the last pass, which an async scheduler does not know yet …
    leaving_kind: int  # … how …
    leaving_at: int  # … and how many running requests are ahead; -1 of one that goes on once more
    free: int  # `n_free` slots without a request, the last one to be used next


Requests = Sequence[Request]


class PassWork:
    """The work of the pass that is scheduled, and its seconds."""

    query: int  # tokens in all
    sampled: int  # positions that need logits
    prefill: int  # prefill tokens …
    prefill_work: float  # … and their attention work
    decoding: int  # decoding sequences …
    decode_kv: int  # … the tokens that they attend to …
    drafted: int  # … their draft tokens …
    accepted: int  # … and those accepted
    proposing: int  # requests that draft …
    levels: int  # … the draft steps of the one that takes most …
    proposed: int  # … of these, requests in the pass …
    proposed_drafted: int  # … their draft tokens …
    proposed_accepted: int  # … and those accepted
    modelled: int  # requests in the pass with a tree …
    modelled_accepted: int  # … and the accepted tokens of these
    flying: int  # requests in the pass of a decoupled drafter
    draft_s: float  # of the drafting round before the pass
    straggler_s: float  # what decoding alone waits for its longest sequences …
    straggler_of_all_s: float  # … and the pass
    own_s: float  # of the pass (of planned ones: of them all) without the other ranks of lock step …
    decoding_s: float  # … of its decoding alone, without drafts …
    verifying_s: float  # … and what the draft tokens add
    lengths: int  # the sum of the decoding sequences' in the first of planned passes …
    mean_kv: float  # … their mean in the next one …
    cell: int  # … its cell in the attention's grid …
    cell_kv: float  # … where that begins …
    cell_s: float  # … the attention there …
    slope_s: float  # … a token more …
    cell_end_kv: float  # … and where it ends
    fixed_s: float  # of planned passes without attention …
    own_fixed_s: float  # … and without the other ranks of lock step


class Totals(PassWork, Gauges, CacheTotals):
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
    n_leaving: int
    leaving_places: int  # that these have beside the running ones
    n_going: int  # running or waiting ones that take part in one more pass
    async_scheduling: int
    ahead: int  # whether the pass to come is scheduled already
    padding: int  # draft tokens, to be rejected, of an admitted request that has one token to compute
    free_blocks: int
    held_blocks: int

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
    lock_step_s: float  # what a rank waits for the other ranks (`engine.lock_step`)
    decodes: int  # sequences that decoded, summed over the passes
    slot_s: float  # seconds of the passes, times the requests that run in each


REQUESTS, TOTALS = fields_of(Request), fields_of(Totals)


class Drafting(NamedTuple):
    """What engines that draft keep beside their requests."""

    bandits: BanditState  # of each row
    places: Ints  # (rows, rows of the trace): who has which (`Engine.draft_from`)
    readable: Ints  # scratch: how many tokens of each row of a group may be read
    meanwhile: Ints  # scratch, (2, 2 × longest window + 2): see `engine.drafts`


class Engines(NamedTuple):
    """The arrays of some engines: a row a data-parallel rank, the rows of an engine side by side; a column a slot."""

    requests: NDArray[Any]  # (rows, slots)
    totals: NDArray[Any]  # (rows,)
    scratch: Ints  # (slots or more,)
    drafting: Any  # `Drafting` of engines that draft, else None


class Columns(dict[str, NDArray[Any]]):
    """The fields of records, each looked up once."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __missing__(self, name: str) -> NDArray[Any]:
        self[name] = column = self._records[name]
        return column


class Limits(NamedTuple):
    """Bounds of a pass. Names as in vLLM; `kv_blocks` blocks of `block_size` tokens hold the KV cache.

    Layers that keep unlike things are in groups that share these blocks, as in vLLM: a sequence has a block for each
    `block_size` tokens in each of the `full_groups`, of the last `window_tokens` alone in each of the `window_groups`, and
    `state_blocks` for its states, however long it is. With windows or states, no prefix cache is modelled.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks: int
    async_scheduling: bool = False
    prefix_caching: bool = False
    hold_paused: bool | None = None  # whether paused requests keep their blocks; None: without a prefix cache
    dp: int = 1  # data-parallel ranks in lock step (`engine.lock_step`); all other limits are those of a rank
    graph_tokens: int = 0  # up to which ranks are padded to the largest, for its CUDA graph
    full_groups: int = 1
    window_groups: int = 0
    window_tokens: int = 0
    state_blocks: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens of a cache of these blocks, as vLLM counts them: each group of layers keeps its own block of a token."""
        return self.kv_blocks // (self.full_groups + self.window_groups + self.state_blocks) * self.block_size


class Until(NamedTuple):
    """The end of a run: the first boundary after `time_s`, a stop (if `first_stop`), or an idle engine."""

    time_s: float
    first_stop: bool


@lean
def blocks_of(tokens: int, block_size: int) -> int:
    """Return the blocks that hold `tokens`."""
    return (tokens + block_size - 1) // block_size


@lean
def most_in_window(limits: Limits) -> int:
    """Return the most blocks that a sequence has in a window group: of the window and of the tokens that passes compute."""
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
    """Return the blocks that a request takes to have room for `tokens`; below 0: it gives back what left its windows."""
    if limits.window_groups == 0:
        groups, blocks = limits.full_groups, request.blocks - limits.state_blocks
        if groups * tokens <= blocks * limits.block_size:  # without the division
            return 0
        return groups * blocks_of(tokens, limits.block_size) - blocks
    columns = blocks_of(tokens, limits.block_size)
    processed = request.computed + request.rejected - request.in_flight
    left = max(processed - limits.window_tokens + 1, 0) // limits.block_size
    blocks = limits.full_groups * columns + limits.window_groups * (columns - left) + limits.state_blocks
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
    """Return whether all layers keep every token, so that a sequence has a block for each `block_size` tokens."""
    return limits.full_groups == 1 and limits.window_groups == 0 and limits.state_blocks == 0


@lean
def known_tokens(request: Request) -> int:
    """Return the tokens whose KV a request needs before it decodes; an old response yet to be verified counts."""
    return request.prompt + request.generated + request.old_tokens


@lean
def waiting_at(r: Requests, t: Totals, place: int) -> int:
    """Return where the ring has entry `place` of the queue; -1 and `n_waiting` are free entries before and behind it."""
    return (t.waiting_head + place) % len(r)


@lean
def queue_up(r: Requests, t: Totals, slot: int) -> None:
    """Append a request to the queue."""
    r[waiting_at(r, t, t.n_waiting)].waiting = slot
    r[slot].seen_at = t.passes + 1
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
    """Append a new request to the queue. It holds no blocks, but `cached` tokens will not have to be computed. See
    `Engine.submit` about the keys. Return its slot; one must be free."""
    t = totals[0]
    t.n_free -= 1
    slot = r[t.n_free].free
    q = r[slot]
    q.prompt = prompt
    q.response = response
    q.generated = generated
    q.computed = cached
    q.scheduled = 0
    q.in_flight = 0
    q.blocks = 0
    q.stop_at = response
    q.stop_kind = END
    q.watch_at = NEVER
    q.reached = prompt + generated - 1 if generated > 0 else 0
    q.lost_by = MOVED
    q.first_token_s = np.nan
    q.last_token_s = np.nan
    q.pinned_until_s = 0.0
    q.ticket = -1
    q.gained = -1
    q.rejected = 0
    q.going = 0
    q.sample_key = sample_key
    q.prompt_node = -1
    q.shared = 0
    q.last_node = -1
    q.first_own = 0
    q.own_node = -1
    q.covering = 0
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
    request.at = 0
    request.proposed = 0
    request.drafted = 0
    request.accepted = 0
    request.old_tokens = 0
    request.old_accepted = 0
    request.drafted_total = 0
    request.accepted_total = 0
    request.verifications = 0
    request.verified_total = 0
    request.coupled = 0
    request.misses_total = 0
    request.unverified_total = 0


@inlined
def _ask_for(r: Requests, t: Totals, slot: int, prompt_key: int, shared_tokens: int) -> None:
    """Let a new request find its prompt, and what it left here before."""
    q, most = r[slot], (shared_tokens - 1) // t.block_size
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
    """Return the tokens whose full blocks others may find, of a request that leaves between two passes: without what drafts
    gained in the last one, which a scheduler that waits for it would have noted in the next."""
    computed = min(request.computed, request.prompt + request.generated)  # without what is left of an old response
    return computed if t.async_scheduling == 1 else computed - max(request.gained - 1, 0)


@lean
def end(r: Requests, t: Totals, slot: int, found_again: bool) -> None:
    """Take the blocks and the cache of a request that has ended here; `found_again`: its text may be asked for later."""
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
    request.gained = -1
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
    """Undo `hold`, if the request holds blocks: they are those of a running request now, or about to be freed."""
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
def admissible(r: Requests, t: Totals, limits: Limits, budget: int) -> int:
    """Return the tokens of the first waiting request that may start now; 0 if it has to wait on.

    All its known tokens must fit the blocks that are free or held (its own among them), though only a chunk may start
    (vLLM's `scheduler_reserve_full_isl`, on by default): else requests that come back with long prefixes evict one another.
    """
    if t.n_waiting == 0 or t.admitting == 0:
        return 0
    if t.n_running + t.leaving_places >= limits.max_num_seqs:
        return 0
    slot = r[t.waiting_head].waiting
    if limits.async_scheduling and r[slot].seen_at > t.passes:
        return 0
    known = known_tokens(r[slot])
    found, computed = 0, r[slot].computed
    room = t.free_blocks + t.held_blocks
    if t.prefix_caching == 1 and r[slot].blocks == 0:
        evict(r, t)
        if r[slot].own_node == UNKNOWN:
            own = node_of(r, OWN, r[slot].sample_key)
            if own >= 0:
                r[own].node_users += 1
                r[slot].own_node = own
        found, free_ones = find(r, t, slot, known)
        computed = max(found * limits.block_size, computed)
        room -= free_ones
    elif t.prefix_caching == 1:
        found = r[slot].blocks
        room -= held_alone(r, slot)
    if blocks_to_start(known, limits) - found > room:
        return 0
    return min(known - computed, budget)


@inlined
def may_stop(r: Requests, t: Totals, passes: int, admitted: int) -> bool:
    """Return whether a request that runs, or is among the first `admitted` to wait, may stop within some passes."""
    for i in range(t.n_running + min(t.n_waiting, admitted)):
        slot = r[i].running if i < t.n_running else r[waiting_at(r, t, i - t.n_running)].waiting
        if min(r[slot].stop_at, r[slot].watch_at) - r[slot].generated <= passes:
            return True
    return False
