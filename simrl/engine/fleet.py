"""A fleet: the engines of all workers side by side, one of them alone being a fleet of one.

Invariant: an engine stands at a boundary between two passes, and its next step is planned: passes
that repeat its batch (`passes`), or one pass of any kind (0). A command takes effect at the first
boundary strictly after it, so a pass is done as soon as the clock is where it begins, and passes
that repeat once the clock is where they end: no command can come in between. Steps are taken in the
order of time over all engines, none beyond the next event of the schedule.

What stops at the end of a step calls Python, which then finds the engine there (`stopped`), or, of
a request of a group, is noted in its ticket, and only the end of the group calls Python.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from simrl.engine.cost import end_of_stretch
from simrl.engine.leaving import remove
from simrl.engine.repeat import busy, plan, repeat
from simrl.engine.requests import Engines, Limits, enqueue
from simrl.engine.step import step
from simrl.profile.compiled import inlined, kernel, part
from simrl.profile.profile import Tables
from simrl.speculation.decoding import Decoding, Floats, Ints, Records, fields_of


class News(IntEnum):
    """What `advance` returns: nothing happens before a time; a group is complete, or over; an
    engine has stopped for Python."""

    WAIT = 0
    GROUP = 1
    STOP = 2


WAIT, GROUP, STOP = News
VOID = -1.0  # the time of a step that is to be planned anew


class Ticket:
    """A request of a group, and what became of it."""

    engine: int
    group: int
    slot: int
    tokens: int  # of the response, when it ends
    closed_tokens: int  # of these, before its open segment
    version: int  # of the weights at its end; -1 until then
    whole: int  # 0 if it ends before its response does
    done: int  # whether its response has ended …
    over: int  # … and the time of its end has come
    order: int  # of its end, among all ends of one instant
    started_s: float  # of its open segment
    first_token_s: float
    ended_s: float
    next_ended: int  # the ticket of its engine that ended after it; -1 if there is none


TICKETS = fields_of(Ticket)


class State(NamedTuple):
    """The arrays of a fleet. Engine e has the rows e · dp … e · dp + dp - 1, one a data-parallel
    rank; a column is a slot."""

    engines: Engines
    next_step_s: Floats  # where the next step ends, or where its only pass begins; VOID: not planned
    passes: Ints
    stopped: Ints  # whether something stopped where the engine stands, whose time has not come …
    calls: Ints  # … and whether that calls Python
    watched: Ints  # whether each stop of an engine calls Python
    order: Ints  # of the stop ahead, among all stops of one instant …
    orders: Ints  # … and the next one, shape (1,)
    submitted: Ints  # requests so far
    in_groups: Ints  # requests of groups in each engine
    versions: Ints  # of its weights
    unfinished: Ints  # requests at each worker, as its dispatcher counts them
    tickets: Records
    left: Ints  # responses of each group to finish before it is complete
    out: Ints  # tickets of each group that are not over
    ended: Ints  # the first ticket of each engine that has ended and is not over; -1 if none …
    last_ended: Ints  # … and the last one
    # What comes next of each engine, the end of a ticket or its step: a heap of engines.
    due_s: Floats
    due_order: Ints
    heap: Ints
    place: Ints  # of each engine in the heap


@inlined
def _reorder(f: State, e: int) -> None:
    """Let the next stop of an engine come behind all that are planned, where it comes at one instant with them."""
    f.orders[0] += f.engines.requests.size
    f.order[e] = f.orders[0]


@kernel
def advance(
    f: State,
    tables: Tables,
    limits: Limits,
    d: Decoding | None,
    settled: Ints,
    heeds: bool,
    now_s: float,
    event_s: float,
) -> tuple[int, int, float]:
    """Take steps up to `now_s`, and those before the next event of the schedule (`event_s`), up to
    one that is an event itself. Return it: WAIT, GROUP or STOP, the group or the engine, its time.

    With `settled` engines, take only their steps, to the first boundary strictly after `now_s`; one
    that is idle moves to `now_s`. STOP is returned only if it `heeds` stops.
    """
    settling, i, void, seen = settled.shape[0] > 0, 0, -1, 0
    while True:
        if settling:
            if i == settled.shape[0]:
                return WAIT, -1, np.inf
            e = settled[i]
            first = e * limits.dp
            if f.stopped[e] == 1 and f.calls[e] == 1 and heeds:
                return STOP, e, f.engines.totals[first].now_s
            f.stopped[e] = 0
            is_busy = busy(f.engines, first, limits)
            if not is_busy or f.engines.totals[first].now_s > now_s:
                for row in range(first, first + limits.dp):
                    if not is_busy and heeds:
                        f.engines.totals[row].now_s = max(f.engines.totals[row].now_s, now_s)
                i += 1
                continue
        else:
            while void < 0 and seen < f.heap.shape[0]:
                if f.next_step_s[seen] == VOID:
                    void = seen
                seen += 1
            e = void if void >= 0 else f.heap[0]
            first = e * limits.dp
            if void < 0:
                due_s, number = f.due_s[e], f.ended[e]
                if due_s == np.inf or (due_s > now_s and due_s >= event_s):
                    return WAIT, -1, due_s
                if number >= 0:
                    ticket = f.tickets[number]
                    group = ticket.group
                    left, out = f.left[group] - ticket.done, f.out[group] - 1
                    news = out == 0 or (left == 0 and ticket.done == 1)
                    if news and due_s > now_s:
                        return WAIT, -1, due_s
                    ticket.over = 1
                    f.ended[e] = ticket.next_ended
                    f.left[group], f.out[group] = left, out
                    f.unfinished[e] -= 1
                    _move_in_heap(f, e)
                    if news:
                        return GROUP, group, due_s
                    continue
                if f.stopped[e] == 1 and f.calls[e] == 1:
                    return (STOP, e, due_s) if due_s <= now_s else (WAIT, -1, due_s)
                if f.stopped[e] == 1:
                    f.stopped[e] = 0
                    _reorder(f, e)
                    f.next_step_s[e] = VOID
        if settling or f.next_step_s[e] == VOID:
            passes, end_s = 0, np.inf
            if busy(f.engines, first, limits):
                passes, end_s = plan(f.engines, first, tables, limits, d)
            if settling and passes > 0 and end_s > now_s:
                passes, end_s = end_of_stretch(f.engines, first, tables, limits, passes, now_s)
            f.passes[e], f.next_step_s[e] = passes, end_s
            if not settling:
                _move_in_heap(f, e)
                void = -1
                continue
        if f.passes[e] > 0:
            repeat(f.engines, first, limits, d, f.passes[e], f.next_step_s[e])
        else:
            step(f.engines, first, tables, limits, d)
        if _note(f, e, limits) > 0:
            _move_in_heap(f, e)
        else:
            void = e


@inlined
def _note(f: State, e: int, limits: Limits) -> int:
    """Note what stopped in an engine's step: its tickets, and whether something calls Python. Return how much it was."""
    first, n_stopped, calls = e * limits.dp, 0, f.watched[e]
    for row in range(first, first + limits.dp):
        for i in range(f.engines.totals[row].n_stopped):
            slot = f.engines.requests[row, i].stopped
            if f.engines.requests[row, slot].ticket >= 0:
                _end_ticket(f, e, row, slot, f.order[e] + n_stopped)
            else:
                calls = 1
            n_stopped += 1
    f.stopped[e] = n_stopped > 0
    f.calls[e] = calls == 1 or f.in_groups[e] == 0
    f.next_step_s[e] = f.engines.totals[first].now_s if n_stopped > 0 else VOID
    return n_stopped


@part
def _end_ticket(f: State, e: int, row: int, slot: int, order: int) -> None:
    """Note the end of a ticket, whose time has not come."""
    request = f.engines.requests[row, slot]
    number = request.ticket
    request.ticket = -1
    ticket = f.tickets[number]
    ticket.tokens = request.generated
    ticket.version = f.versions[e]
    ticket.done = ticket.whole
    ticket.first_token_s = request.first_token_s
    ticket.ended_s = request.last_token_s
    ticket.order = order
    ticket.next_ended = -1
    f.in_groups[e] -= 1
    if f.ended[e] < 0:
        f.ended[e] = number
    else:
        f.tickets[f.last_ended[e]].next_ended = number
    f.last_ended[e] = number


@part
def _move_in_heap(f: State, e: int) -> None:
    """Move an engine in the heap to where its next event belongs."""
    f.due_s[e], f.due_order[e] = f.next_step_s[e], f.order[e]
    if f.ended[e] >= 0:
        ticket = f.tickets[f.ended[e]]
        f.due_s[e], f.due_order[e] = ticket.ended_s, ticket.order
    n, place = f.heap.shape[0], f.place[e]
    while place > 0 and _comes_before(f, e, f.heap[(place - 1) // 2]):
        f.heap[place] = f.heap[(place - 1) // 2]
        f.place[f.heap[place]] = place
        place = (place - 1) // 2
    while 2 * place + 1 < n:
        child = 2 * place + 1
        if child + 1 < n and _comes_before(f, f.heap[child + 1], f.heap[child]):
            child += 1
        if not _comes_before(f, f.heap[child], e):
            break
        f.heap[place] = f.heap[child]
        f.place[f.heap[place]] = place
        place = child
    f.heap[place], f.place[e] = e, place


@inlined
def _comes_before(f: State, one: int, other: int) -> bool:
    """Return whether one engine's next event comes before another's; of those at once, the one that was planned first."""
    a_s, b_s = f.due_s[one], f.due_s[other]
    return bool(a_s < b_s or (a_s == b_s and f.due_order[one] < f.due_order[other]))


@kernel
def submit(f: State, limits: Limits, e: int, lengths: Ints, numbers: Ints, request_s: float, slots: Ints) -> None:
    """Queue requests at an engine, where it stands, and set their `slots`. `lengths` has a row for each:
    prompt, response, generated and cached tokens, the key of its prompt, the prompt's shared
    tokens, the key of its sample, and whether that goes on later; `numbers` the ticket of each, -1
    for one whose end calls Python."""
    first = e * limits.dp
    for i in range(numbers.shape[0]):
        rank = 0 if limits.dp == 1 else _least_loaded(f, first, limits, f.submitted[e] % limits.dp)
        r, row, number = lengths[i], first + rank, numbers[i]
        slot = enqueue(
            f.engines.requests[row],
            f.engines.totals[row : row + 1],
            r[0],
            r[1],
            r[2],
            r[3],
            r[4],
            r[5],
            r[6],
            r[7] == 1,
        )
        f.engines.requests[row, slot].ticket = number
        for k in range(first, first + limits.dp):
            f.engines.totals[k].now_s += request_s
        f.submitted[e] += 1
        slots[i] = slot * limits.dp + rank
        if number >= 0:
            f.tickets[number].slot = slots[i]
            f.tickets[number].started_s = f.engines.totals[first].now_s
            f.in_groups[e] += 1


@inlined
def _least_loaded(f: State, first: int, limits: Limits, turn: int) -> int:
    """Return the rank with the least load, as vLLM's balancer counts it; ties go round."""
    best, least = 0, np.inf
    for i in range(limits.dp):
        rank = (turn + i) % limits.dp
        t = f.engines.totals[first + rank]
        used = 1.0 - t.free_blocks / limits.kv_blocks
        load = t.n_running + t.n_waiting - t.n_going + 6.0 * t.n_waiting * max(used - 0.5, 0.0)
        if load < least:
            best, least = rank, load
    return best


@kernel
def withdraw(f: State, limits: Limits, e: int, numbers: Ints) -> int:
    """Take tickets out of their engine, where it stands. Return how many were there."""
    taken = 0
    for number in numbers:
        ticket = f.tickets[number]
        if ticket.version < 0:
            row, slot = e * limits.dp + ticket.slot % limits.dp, ticket.slot // limits.dp
            remove(f.engines.requests[row], f.engines.totals[row], slot)
            f.engines.requests[row, slot].last_token_s = f.engines.totals[row].now_s
            _reorder(f, e)
            _end_ticket(f, e, row, slot, f.order[e])
            ticket.done = 0
            taken += 1
    return taken
