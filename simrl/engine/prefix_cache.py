"""The prefix cache: which free blocks hold tokens that a request may find again, as vLLM's block
pool keeps them.

Invariant: the free blocks are those in which nobody finds anything, which are used first, and then
the *list*, used from its oldest end on. In the list are runs of blocks of one text, the last block
of each first, and between them dead blocks: full ones that nobody asks for any more. A text is a
*node*: the full blocks of a prompt that its group shares (PROMPT); the last block of a prompt that
ends with a full block, of which each request has a copy, for its last token is never found (LAST);
the tokens that a request alone has (OWN). A node is in the list if it has blocks and no request
holds it.

Blocks are counted, not numbered, because only these runs matter: a request takes blocks from the
front and finds a text from its beginning. At most one running request is in the middle of a prompt,
so that a prompt's blocks exist once. What passes take (`free_blocks`) leaves the list no later than
`evict`, before anything is found or given back.

Of more than `MANY` nodes, those whose requests have all ended are forgotten before their blocks are
used, the oldest first. Nodes are entries of the requests' array (`simrl.engine.state`), beside the
slots and without relation to them.
"""

from __future__ import annotations

from typing import Any

from simrl.engine.state import LAST, NO_NODE, OWN, PROMPT, Requests, Totals
from simrl.profile.compiled import inlined, lean, lean_kernel
from simrl.speculation.decoding import Records

MANY = 1024


def short_of_nodes(capacity: Any, spare: Any, free: Any, more: Any) -> Any:
    """Return by how many nodes `spare` ones are too few for `more` requests beside those in a
    `capacity` of which some are `free`: each may need one for its prompt, and at a time one for its
    own text and one for a last block."""
    return 2 * (capacity - free) + 3 * more - spare


@lean_kernel
def forget_oldest(r: Requests, totals: Records, spare: int) -> None:
    """Forget texts that nobody may ask for now, the oldest first, until there are `spare` nodes or
    no more such texts."""
    t = totals[0]
    evict(r, t)
    node = t.list_first
    while node >= 0 and t.n_spare < spare:
        before, after, blocks = r[node].node_before, r[node].node_after, r[node].node_blocks
        if r[node].node_users == 0:
            unlist(r, t, node)
            if before >= 0:
                r[before].node_dead += blocks
            else:
                t.list_dead += blocks
            t.listed_blocks += blocks
            t.free_blocks += blocks
            r[node].node_blocks = 0
            drop_if_unused(r, t, node)
        node = after


@inlined
def node_of(r: Requests, kind: int, key: int) -> int:
    """Return the node of a prompt, or of a sample that left; -1 if there is none."""
    node = r[key % len(r)].node_bucket - 1
    while node >= 0 and not (r[node].node_kind == kind and r[node].node_key == key):
        node = r[node].node_next - 1
    return node


@inlined
def new_node(r: Requests, t: Totals, kind: int, key: int, blocks: int) -> int:
    """Return a new node, which `node_of` finds if it has a key."""
    t.n_spare -= 1
    node = r[t.n_spare].node_spare
    n = r[node]
    n.node_kind = kind
    n.node_key = key
    n.node_blocks = n.node_most = blocks
    n.node_prompt = -1
    n.node_refs = n.node_held = n.node_users = n.node_dead = n.node_copy = n.node_next = 0
    if key >= 0:
        _enter(r, node)
    return node


@inlined
def _enter(r: Requests, node: int) -> None:
    """Let `node_of` find a node."""
    bucket = r[node].node_key % len(r)
    r[node].node_next = r[bucket].node_bucket
    r[bucket].node_bucket = node + 1


@lean_kernel
def enter_all(r: Requests) -> None:
    """Let `node_of` find all nodes, in arrays of a new size."""
    for bucket in range(len(r)):
        r[bucket].node_bucket = 0
    for node in range(len(r)):
        if r[node].node_kind in (PROMPT, OWN) and r[node].node_key >= 0:
            _enter(r, node)


@inlined
def _strike_out(r: Requests, node: int) -> None:
    """Let nobody find a node that is dropped."""
    prompt = r[node].node_prompt
    if prompt < 0 and r[node].node_key < 0:
        return
    bucket = r[node].node_key % len(r)
    other = (r[prompt].node_copy if prompt >= 0 else r[bucket].node_bucket) - 1
    if other == node and prompt >= 0:
        r[prompt].node_copy = r[node].node_next
    elif other == node:
        r[bucket].node_bucket = r[node].node_next
    else:
        while r[other].node_next != node + 1:
            other = r[other].node_next - 1
        r[other].node_next = r[node].node_next


@lean
def leave_node(r: Requests, t: Totals, node: int) -> None:
    """Let a node have a user less."""
    r[node].node_users -= 1
    drop_if_unused(r, t, node)


@lean
def drop_if_unused(r: Requests, t: Totals, node: int) -> None:
    """Forget a node that has no blocks and no user."""
    while (
        node >= 0
        and r[node].node_blocks == 0
        and r[node].node_users == 0
        and r[node].node_refs == 0
    ):
        prompt = r[node].node_prompt
        _strike_out(r, node)
        r[node].node_kind = NO_NODE
        r[t.n_spare].node_spare = node
        t.n_spare += 1
        node = prompt
        if node >= 0:
            r[node].node_users -= 1


@lean
def append(r: Requests, t: Totals, node: int) -> None:
    """Append a node that nobody holds any more to the list. Its blocks are free."""
    last = t.list_last
    r[node].node_before = last
    r[node].node_after = -1
    if last >= 0:
        r[last].node_after = node
    else:
        t.list_first = node
    t.list_last = node
    t.listed_blocks += r[node].node_blocks
    t.free_blocks += r[node].node_blocks


@lean
def append_dead(r: Requests, t: Totals, blocks: int) -> None:
    """Append blocks to the list that nobody finds again."""
    if t.list_last >= 0:
        r[t.list_last].node_dead += blocks
    else:
        t.list_dead += blocks
    t.listed_blocks += blocks
    t.free_blocks += blocks


@lean
def unlist(r: Requests, t: Totals, node: int) -> None:
    """Take a node out of the list, which keeps the dead blocks behind it. Its blocks are not free
    any more."""
    before, after = r[node].node_before, r[node].node_after
    if before >= 0:
        r[before].node_after = after
        r[before].node_dead += r[node].node_dead
    else:
        t.list_first = after
        t.list_dead += r[node].node_dead
    if after >= 0:
        r[after].node_before = before
    else:
        t.list_last = before
    r[node].node_dead = 0
    t.listed_blocks -= r[node].node_blocks
    t.free_blocks -= r[node].node_blocks


@lean
def evict(r: Requests, t: Totals) -> None:
    """Take the blocks out of the list that passes have used."""
    while t.listed_blocks > t.free_blocks and t.listed_blocks > 0:
        used = t.listed_blocks - t.free_blocks
        if t.list_dead > 0:
            used = min(used, t.list_dead)
            t.list_dead -= used
            t.listed_blocks -= used
            continue
        node = t.list_first
        used = min(used, r[node].node_blocks)
        r[node].node_blocks -= used
        t.listed_blocks -= used
        if r[node].node_blocks == 0:
            unlist(r, t, node)
            drop_if_unused(r, t, node)


@lean
def find(r: Requests, t: Totals, slot: int, known: int) -> tuple[int, int]:
    """Return how many blocks of a request's `known` tokens, without the last one, are found, and
    how many of them are free or held."""
    q = r[slot]
    most = (known - 1) // t.block_size
    hit_blocks, free = 0, 0
    prompt = q.prompt_node
    if prompt >= 0:
        hit_blocks = min(r[prompt].node_blocks, most)
        free = r[prompt].node_blocks if r[prompt].node_refs == r[prompt].node_held else 0
        if hit_blocks < r[prompt].node_most:
            return hit_blocks, free
        if q.first_own > hit_blocks:
            copy = r[prompt].node_copy - 1 if most > hit_blocks else -1
            if copy < 0:
                return hit_blocks, free
            hit_blocks += 1
            free += r[copy].node_refs == r[copy].node_held
    node = q.own_node
    if node >= 0:
        blocks = min(r[node].node_blocks, most - q.first_own)
        hit_blocks += blocks
        free += blocks
    return hit_blocks, free


@lean_kernel
def found_blocks(r: Requests, totals: Records, slot: int, known: int) -> int:
    """Return how many blocks of a request that has none would be found now."""
    evict(r, totals[0])
    return find(r, totals[0], slot, known)[0]


@lean
def take_found(r: Requests, t: Totals, slot: int, known: int) -> None:
    """Give an admitted request what it finds. If more comes from elsewhere, that has blocks of its
    own."""
    q = r[slot]
    hit_blocks, _ = find(r, t, slot, known)
    q.blocks = hit_blocks
    q.computed = max(hit_blocks * t.block_size, q.computed)
    t.hit_tokens += hit_blocks * t.block_size
    prompt, own_node = q.prompt_node, q.own_node
    if prompt >= 0:
        _hold(r, t, prompt)
        q.shared = min(r[prompt].node_blocks, hit_blocks)
        hit_blocks -= q.shared
        if hit_blocks > 0 and q.first_own > q.shared:
            q.last_node = r[prompt].node_copy - 1
            _hold(r, t, q.last_node)
            hit_blocks -= 1
    q.covering = prompt >= 0
    if own_node >= 0:
        if r[own_node].node_blocks > 0:
            unlist(r, t, own_node)
            left = r[own_node].node_blocks - hit_blocks
            if left > 0:  # behind a block that was not found
                append_dead(r, t, left)
            r[own_node].node_blocks = 0
        q.own_node = -1
        leave_node(r, t, own_node)


@lean
def _hold(r: Requests, t: Totals, node: int) -> None:
    """Let a request hold a node's blocks."""
    if r[node].node_refs == 0 and r[node].node_blocks > 0:
        unlist(r, t, node)
    elif r[node].node_refs == r[node].node_held:
        t.held_blocks -= r[node].node_blocks
    r[node].node_refs += 1


@lean
def cover(r: Requests, t: Totals, slot: int, tokens: int) -> None:
    """Let others find the blocks of a prompt that a request computes in the pass to come, up to
    `tokens`. Others that start in it find them already."""
    prompt, blocks = r[slot].prompt_node, tokens // t.block_size
    most = r[prompt].node_most
    r[slot].shared = max(min(blocks, most), r[prompt].node_blocks)
    r[prompt].node_blocks = r[slot].shared
    if blocks < r[slot].first_own or blocks < most:
        return
    r[slot].covering = 0
    if r[slot].first_own > most and r[slot].last_node < 0 and t.n_spare > 0:
        copy = new_node(r, t, LAST, -1, 1)
        r[copy].node_refs = 1
        r[copy].node_prompt = prompt
        r[prompt].node_users += 1
        _append_copy(r, prompt, copy)
        r[slot].last_node = copy


@lean
def share(r: Requests, t: Totals, slot: int) -> None:
    """Let others find what a request has computed of its prompt in the pass that is over, as in
    SGLang: what others have computed in it, too, is kept once."""
    q, node = r[slot], r[r[slot].prompt_node]
    had, q.shared = q.shared, min(q.computed // t.block_size, node.node_most)
    q.covering = q.shared < node.node_most
    t.free_blocks += max(min(node.node_blocks, q.shared) - had, 0)
    node.node_blocks = max(node.node_blocks, q.shared)


@inlined
def _append_copy(r: Requests, prompt: int, copy: int) -> None:
    """Append a copy of a prompt's last block to those that there are, of which the first is
    found."""
    last = r[prompt].node_copy - 1
    if last < 0:
        r[prompt].node_copy = copy + 1
        return
    while r[last].node_next > 0:
        last = r[last].node_next - 1
    r[last].node_next = copy + 1


@lean
def give_back(r: Requests, t: Totals, slot: int, hashed_tokens: int, found_again: bool) -> None:
    """Give a request's blocks back. Full blocks of its first `hashed_tokens` tokens go to the
    list, where other requests find its prompt, and it finds the rest if it comes back
    (`found_again`)."""
    q = r[slot]
    evict(r, t)
    unshared_blocks = q.blocks - q.shared - (q.last_node >= 0)
    full = min(max(hashed_tokens // t.block_size - q.first_own, 0), unshared_blocks)
    t.free_blocks += unshared_blocks - full
    if full > 0 and found_again and t.n_spare > 0:
        node = new_node(r, t, OWN, q.sample_key, full)
        r[node].node_users = 1
        q.own_node = node
        append(r, t, node)
    elif full > 0:
        append_dead(r, t, full)
    if q.last_node >= 0:
        _let_go(r, t, q.last_node)
        q.last_node = -1
    if q.prompt_node >= 0:
        _let_go(r, t, q.prompt_node)
    q.blocks = 0
    q.shared = 0
    q.covering = 0


@inlined
def _let_go(r: Requests, t: Totals, node: int) -> None:
    """Undo `_hold`."""
    r[node].node_refs -= 1
    if r[node].node_refs == 0 and r[node].node_blocks > 0:
        append(r, t, node)
    elif r[node].node_refs == r[node].node_held:
        t.held_blocks += r[node].node_blocks


@inlined
def count_held(r: Requests, t: Totals, slot: int, change: int) -> None:
    """Count a request among those that hold blocks without running (`change` 1), or no more
    (-1)."""
    if change == -1:
        t.held_blocks -= held_alone(r, slot)
    for node in (r[slot].prompt_node, r[slot].last_node):
        if node >= 0:
            r[node].node_held += change
    if change == 1:
        t.held_blocks += held_alone(r, slot)


@lean
def held_alone(r: Requests, slot: int) -> int:
    """Return the blocks of a request that holds them that no running request has."""
    q = r[slot]
    blocks = q.blocks
    prompt, last = q.prompt_node, q.last_node
    if prompt >= 0 and r[prompt].node_held < r[prompt].node_refs:
        blocks -= q.shared
    if last >= 0 and r[last].node_held < r[last].node_refs:
        blocks -= 1
    return int(blocks)


@lean
def forget_prefixes(r: Requests, t: Totals) -> None:
    """Forget all texts; no request holds blocks of one."""
    evict(r, t)
    for node in range(len(r)):
        if r[node].node_kind != NO_NODE and r[node].node_blocks > 0:
            r[node].node_blocks = 0
            r[node].node_dead = 0
            drop_if_unused(r, t, node)
    t.list_first = -1
    t.list_last = -1
    t.list_dead = 0
    t.listed_blocks = 0
