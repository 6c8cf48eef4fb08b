"""How requests leave the running ones: they stop, are aborted or preempted, or lose their caches
with all others.

Invariant: what an asynchronous scheduler does not know yet has happened for the caller, and not for
the pass that it has scheduled already (`ahead`): those that stopped keep their place and blocks
until that pass is scheduled here (`n_leaving`), and aborted ones take part in it (`n_once_more`).
"""

from __future__ import annotations

import numpy as np

from simrl.engine.prefix_cache import forget_prefixes
from simrl.engine.requests import (
    end,
    forget,
    free,
    free_slot,
    hold,
    is_resting,
    make_room,
    more_blocks,
    queue_up,
    release,
    waiting_at,
)
from simrl.engine.state import (
    END,
    LEAVING,
    MOVED,
    NEVER,
    NO_PLACE,
    PAUSE,
    PAUSED,
    PREEMPTED,
    RUNNING,
    WAITING,
    WATCH,
    Limits,
    Request,
    Requests,
    Totals,
)
from simrl.profile.compiled import inlined, lean, lean_kernel
from simrl.speculation.decoding import Ints

TOKENS_AHEAD = 20  # SGLANG_RETRACT_DECODE_STEPS


@lean
def preempt_last(r: Requests, t: Totals, cause: int) -> None:
    """Preempt the youngest running request: it gives its blocks back and waits, first in line, to
    recompute its cache; SGLang keeps what it had when it started, and lets it wait last. One that
    stopped in the pass in flight, or was aborted, is gone."""
    last = t.n_leaving - 1
    while last >= 0 and r[last].leaving_at == NO_PLACE:
        last -= 1
    if last >= 0 and r[last].leaving_at >= t.n_running:
        t.leaving_places -= 1
        _unhash_in_flight(r[r[last].leaving], t)
        _leave_now(r, t, r[last].leaving)
        return
    t.n_running -= 1
    slot = r[t.n_running].running
    _unhash_in_flight(r[slot], t)
    if r[slot].once_more == 1:
        t.n_once_more -= 1
        r[slot].once_more = 0
        _leave_now(r, t, slot)
        return
    if cause == PREEMPTED and t.last_apart == 0:
        r[slot].reached = max(r[slot].reached, r[slot].computed)
        r[slot].computed = min(r[slot].computed, r[slot].kept)
        free(r, t, slot, cause)
        queue_up(r, t, slot)
        return
    free(r, t, slot, cause)
    t.waiting_head = waiting_at(r, t, -1)
    t.n_waiting += 1
    r[t.waiting_head].waiting = slot
    r[slot].status = WAITING


@lean
def _unhash_in_flight(request: Request, t: Totals) -> None:
    """Let nobody find the tokens of the pass in flight: the scheduler does not know them."""
    if t.ahead == 1 and t.prefix_caching == 1:
        request.computed -= request.gained


@lean
def keep_room(r: Requests, t: Totals, limits: Limits, drafts: bool) -> None:
    """Retract requests as SGLang does until the others can decode, with drafts up to their windows:
    first those with the fewest generated tokens, of equals those with the longest prompts. The
    share for which admission keeps room is then what the others have generated."""
    t.decays += 1
    if _have_room(r, t, limits, drafts):
        return
    for i in range(1, t.n_running):  # the first to be retracted last
        slot, place = r[i].running, i
        while place > 0 and _rank(r[slot]) > _rank(r[r[place - 1].running]):
            r[place].running = r[place - 1].running
            place -= 1
        r[place].running = slot
    while t.n_running > 1 and not _have_room(r, t, limits, drafts):
        t.preemptions += 1
        preempt_last(r, t, PREEMPTED)
    generated = TOKENS_AHEAD * t.n_running
    for i in range(t.n_running):
        generated += r[r[i].running].generated
    t.token_ratio = min(generated / (limits.max_new_tokens * t.n_running + 1), 1.0)
    t.decays = 0


@lean
def _have_room(r: Requests, t: Totals, limits: Limits, drafts: bool) -> bool:
    """Return whether there are blocks for the next tokens of all running requests."""
    blocks = t.free_blocks + t.held_blocks
    for i in range(t.n_running):
        q = r[r[i].running]
        blocks -= more_blocks(q, q.computed + q.rejected + 1 + drafts * q.window, limits)
    return bool(blocks >= 0)


@lean
def _rank(request: Request) -> tuple[int, int]:
    """Return what orders requests by how long they are kept."""
    return request.generated, -request.prompt


@lean
def leave(r: Requests, t: Totals, slot: int, kind: int) -> None:
    """Let a request that has stopped go, or rest."""
    if kind == END:
        end(r, t, slot, r[slot].continues == 1)
        free_slot(r, t, slot)
    elif kind == PAUSE:
        free(r, t, slot, PREEMPTED if t.prefix_caching == 1 else MOVED)


@inlined
def _leave_now(r: Requests, t: Totals, slot: int) -> None:
    """Let one go that stopped in the last pass."""
    kept = 0
    for i in range(t.n_leaving):
        other, kind, at = r[i].leaving, r[i].leaving_kind, r[i].leaving_at
        if other == slot:
            leave(r, t, slot, kind)
            continue
        r[kept].leaving = other
        r[kept].leaving_kind = kind
        r[kept].leaving_at = at
        kept += 1
    t.n_leaving = kept


@lean
def let_leave(r: Requests, t: Totals) -> None:
    """Let those go that stopped in the last pass, then those that were aborted since, in this
    order: it decides which of their texts are forgotten first."""
    for i in range(t.n_leaving):
        if r[i].leaving_kind == END:
            release(r, t, r[i].leaving)
        leave(r, t, r[i].leaving, r[i].leaving_kind)
    t.n_leaving = 0
    t.leaving_places = 0


@lean
def _leave_later(r: Requests, t: Totals, slot: int, kind: int, place: int) -> None:
    """Let a request leave that an async scheduler still has in its next pass. `place`: how many
    running ones are ahead of its place, which nobody has until then."""
    r[t.n_leaving].leaving = slot
    r[t.n_leaving].leaving_kind = kind
    r[t.n_leaving].leaving_at = place
    t.leaving_places += place != NO_PLACE
    t.n_leaving += 1


@lean_kernel
def drop_held(r: Requests, t: Totals, slot: int) -> None:
    """Drop the cache of a paused request whose pause was reported just now. An async scheduler
    knows that a pass later."""
    release(r, t, slot)
    if t.async_scheduling == 1:
        _leave_later(r, t, slot, PAUSE, NO_PLACE)
    else:
        leave(r, t, slot, PAUSE)


@lean_kernel
def pin(r: Requests, t: Totals, slot: int, until_s: float) -> None:
    """Let nobody have the blocks of a paused request, while they are copied out."""
    release(r, t, slot)
    r[slot].pinned_until_s = until_s


@lean_kernel
def unpin(r: Requests, t: Totals, slot: int, until_s: float) -> None:
    """Drop a cache that was pinned until then, unless its request has resumed or was aborted."""
    if r[slot].pinned_until_s == until_s:
        r[slot].pinned_until_s = 0.0
        free(r, t, slot, MOVED)


@lean
def _let_have(r: Requests, t: Totals, slot: int) -> None:
    """Let others have the blocks of a request, if they are pinned."""
    if r[slot].pinned_until_s > 0.0:
        r[slot].pinned_until_s = 0.0
        hold(r, t, slot)


@lean_kernel
def requeue(r: Requests, t: Totals, slot: int, prompt: int, cached: int) -> None:
    """Append a paused request to the queue again, with this context; if it has no cache, `cached`
    tokens are there."""
    _let_have(r, t, slot)
    r[slot].prompt = prompt
    if r[slot].blocks == 0:
        r[slot].computed = cached
    queue_up(r, t, slot)


@lean_kernel
def set_aside(r: Requests, t: Totals, starts_over: bool, slots: Ints) -> int:
    """Take all requests out of the queue, as if paused, and list them in `slots`; return their
    number. They have no cache. Those that start over lose their tokens."""
    number = t.n_waiting
    for i in range(number):
        slot = slots[i] = r[waiting_at(r, t, i)].waiting
        q = r[slot]
        q.status = PAUSED
        if starts_over:
            q.generated = 0
            q.reached = min(q.reached, q.prompt)
            q.stop_at = q.response
            q.stop_kind = END
            q.watch_at = NEVER
            q.first_token_s = np.nan
    t.n_waiting = 0
    return int(number)


@lean_kernel
def queue_again(r: Requests, t: Totals, slots: Ints) -> None:
    """Append requests that were set aside to the queue again, in this order."""
    for slot in slots:
        queue_up(r, t, slot)


@lean
def stop(r: Requests, t: Totals) -> None:
    """List the running requests that reached a stop; after a pause the next one is the end. Only
    watched ones run on.

    Under async scheduling those that leave keep their places and blocks for one more pass: it is
    scheduled already.
    """
    if t.n_once_more > 0:
        _let_go(r, t)
    kept = 0
    stopped = 0
    for i in range(t.n_running):
        slot = r[i].running
        q = r[slot]
        generated = q.generated
        ends, watched = generated >= q.stop_at, generated >= q.watch_at
        kind = q.stop_kind
        if ends or watched:
            r[stopped].stopped = slot
            r[stopped].stopped_kind = kind if ends else WATCH
            stopped += 1
        if watched:
            q.watch_at = NEVER
        if not ends:
            r[kept].running = slot
            kept += 1
            continue
        q.stop_at = q.response
        q.stop_kind = END
        q.status = LEAVING if kind == END else PAUSED
        if kind == END:
            q.last_token_s = t.now_s
        elif t.hold_paused == 1:
            hold(r, t, slot)
            kind = WATCH  # nothing is left to do
        if t.async_scheduling == 1 and q.gained > 1 and kind != WATCH:  # the scheduler cannot know
            _go_on_once(q, t)
            r[kept].running = slot
            kept += 1
        if t.async_scheduling == 1:
            _leave_later(r, t, slot, kind, kept if q.once_more == 0 else NO_PLACE)
        else:
            leave(r, t, slot, kind)
    t.n_running = kept
    t.n_stopped = stopped


@lean_kernel
def remove(r: Requests, t: Totals, slot: int) -> None:
    """Take a request out of its list, and free its blocks and slot: after the pass that an async
    scheduler has scheduled."""
    q, was = r[slot], r[slot].status
    _let_have(r, t, slot)
    q.status = LEAVING
    for i in range(t.n_leaving):
        if r[i].leaving == slot and r[i].leaving_kind == PAUSE:  # a turn of it has just ended
            r[i].leaving_kind = END
            q.continues = 1
            _take_from_queue(r, t, slot)
            return
    more_to_do = t.n_running > 0 or (t.n_waiting > t.n_once_more + 1 and t.admitting == 1)
    if t.ahead == 1 and (
        was == RUNNING or (was == WAITING and more_to_do and q.seen_at <= t.passes)
    ):
        q.continues = 1
        _go_on_once(q, t)
        _leave_later(r, t, slot, END, NO_PLACE)
        return
    if was == RUNNING:
        _take_from_running(r, t, slot)
    else:
        release(r, t, slot)
        _take_from_queue(r, t, slot)
    end(r, t, slot, True)
    free_slot(r, t, slot)


@inlined
def _go_on_once(q: Request, t: Totals) -> None:
    """Let a request take part in the pass that is scheduled already, and gain nothing."""
    q.once_more = 1
    if q.status == LEAVING:
        q.stop_at = NEVER
        q.watch_at = NEVER
    t.n_once_more += 1


@lean
def _take_from_running(r: Requests, t: Totals, slot: int) -> None:
    """Take a request out of the running ones."""
    kept = 0
    for i in range(t.n_running):
        other = r[i].running
        if other != slot:
            r[kept].running = other
            kept += 1
    t.n_running = kept


@lean
def _take_from_queue(r: Requests, t: Totals, slot: int) -> None:
    """Take a request out of the queue, if it is there."""
    kept = 0
    for i in range(t.n_waiting):
        other = r[waiting_at(r, t, i)].waiting
        if other != slot:
            r[waiting_at(r, t, kept)].waiting = other
            kept += 1
    t.n_waiting = kept


@lean
def _let_go(r: Requests, t: Totals) -> None:
    """Take those out that have had one more pass, or would not have been in it."""
    for i in range(t.n_running + t.n_waiting - 1, -1, -1):
        runs = i < t.n_running
        slot = r[i].running if runs else r[waiting_at(r, t, i - t.n_running)].waiting
        if r[slot].once_more == 0 or (not runs and is_resting(r[slot])):  # it waits again
            continue
        r[slot].once_more = 0
        if runs:
            _take_from_running(r, t, slot)
        else:
            _take_from_queue(r, t, slot)
    t.n_once_more = 0


@lean
def know_all(r: Requests, t: Totals) -> None:
    """Let an async scheduler that could schedule nothing ahead know who has left and who has come:
    it has waited."""
    t.ahead = 0
    let_leave(r, t)
    if t.n_once_more > 0:
        _let_go(r, t)
    for i in range(t.n_running):
        r[r[i].running].in_flight = 0
    for i in range(t.n_waiting):
        r[r[waiting_at(r, t, i)].waiting].seen_at = 0


@lean_kernel
def drop_caches(r: Requests, t: Totals, cause: int) -> None:
    """Drop the caches of all requests, also those that waiting ones would bring. Running ones go to
    the head of the queue. No pass is in flight then, or scheduled."""
    for slot in range(len(r)):
        _let_have(r, t, slot)
    know_all(r, t)
    while t.n_running > 0:
        preempt_last(r, t, cause)
    make_room(r, t, t.free_blocks + t.held_blocks, cause)
    for i in range(t.n_waiting):
        forget(r[r[waiting_at(r, t, i)].waiting], cause)
    if t.prefix_caching == 1:
        forget_prefixes(r, t)
