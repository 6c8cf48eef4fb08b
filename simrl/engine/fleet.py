"""A fleet: the engines of all workers side by side, one of them alone being a fleet of one.

Invariant: an engine stands at a boundary between two passes, and its next step is planned: passes
that repeat its batch (`passes`), or one pass of any kind (0). A command takes effect at the first
boundary strictly after it. So one pass is done when the clock reaches its begin, and passes that
repeat when it reaches their end: no command can still change them. Steps are taken in the order of
time over all engines, none beyond the next event of the schedule.

A stop calls Python, which finds the engine at that boundary (`stopped`). The end of a request of a
group is noted in its ticket, and only the end of the group calls Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from simrl.engine.cost import end_of_stretch
from simrl.engine.leaving import remove
from simrl.engine.repeat import busy, plan, repeat
from simrl.engine.requests import enqueue
from simrl.engine.state import Engines, Limits
from simrl.engine.step import step
from simrl.profile.compiled import inlined, lean, lean_kernel
from simrl.profile.profile import Tables
from simrl.speculation.decoding import Decoding, Ints, Records, fields_of


class News(IntEnum):
    """News of `advance`: nothing happens before a time; a group is complete, or over; an
    engine has stopped for Python."""

    WAIT = 0
    GROUP = 1
    STOP = 2


WAIT, GROUP, STOP = map(int, News)  # an enum would be made anew for each call
VOID = -1.0  # the time of a step that is to be planned anew


class Ticket:
    """A request of a group, and what became of it."""

    engine: int
    group: int
    slot: int
    tokens: int  # of the response, when it ends
    closed_tokens: int  # of these, before its open segment
    version: int  # of the weights at its end; -1 until then
    whole: int  # 0 if a cut ends it before its response
    done: int  # whether its response has ended
    over: int  # whether the clock has reached its end
    order: int  # of its end, among all ends of one instant
    started_s: float  # of its open segment
    first_token_s: float
    ended_s: float
    next_ended: int  # the ticket of its engine that ended after it; -1 if there is none


TICKETS = fields_of(Ticket)


class Member:
    """An engine in its fleet."""

    next_step_s: float  # where its next step ends, or its only pass begins; VOID: it is not planned
    passes: int  # that repeat in this step; 0: one pass of any kind
    stopped: int  # whether something stopped at this boundary, which the clock has not reached
    calls: int  # whether that calls Python
    watched: int  # whether each of its stops calls Python
    order: int  # of its next stop, among all stops of one instant
    submitted: int  # requests so far
    way: int  # how it drafts: one of `Fleet.ways`
    in_groups: int  # requests of groups in it
    version: int  # of its weights
    ended: int  # its first ticket that has ended and is not over; -1 if there is none …
    last_ended: int  # … and the last one
    due_s: float  # time of its next event: the end of a ticket, or its own step
    due_order: int  # order of that event, among all of one instant
    place: int  # in the heap

    heap: int  # no field of this engine: a heap of all engines by `due_s`


class Group:
    """A group of requests."""

    left: int  # responses to finish before it is complete
    out: int  # tickets that are not over


MEMBERS, GROUPS = fields_of(Member), fields_of(Group)


class State(NamedTuple):
    """The arrays of a fleet."""

    engines: Engines
    members: Records
    tickets: Records
    groups: Records
    unfinished: Ints  # requests at each worker, as its dispatcher counts them
    orders: Ints  # the last order given, shape (1,)


@inlined
def _reorder(f: State, e: int) -> None:
    """Put an engine's next stop behind all that are planned; this breaks ties at one instant."""
    f.orders[0] += f.engines.requests.size
    f.members[e].order = f.orders[0]


@lean_kernel
def advance(
    f: State,
    tables: Tables,
    limits: Limits,
    d: Decoding | None,
    ways: tuple[tuple[Limits, Decoding], ...] | None,
    engines: Ints,
    settling: bool,
    heeds: bool,
    now_s: float,
    event_s: float,
) -> tuple[int, int, float]:
    """Take steps up to `now_s`, and those before the next event of the schedule (`event_s`), until
    one is an event itself. Return what it is (WAIT, GROUP or STOP), the group or engine, its time.
    `engines` are those with a step to be planned anew.

    When `settling`, take only the steps of `engines`, to the first boundary strictly after `now_s`;
    idle ones move to `now_s`. STOP is returned only if the caller `heeds` stops.

    All engines have these limits and draft as `d` says, or each has a way of its own among several.
    """
    i, void, dp = 0, -1, limits.dp
    while True:
        if settling:
            if i == engines.shape[0]:
                return WAIT, -1, np.inf
            e = engines[i]
            first, me = e * dp, f.members[e]
            if me.stopped == 1 and me.calls == 1 and heeds:
                return STOP, e, f.engines.totals[first].now_s
            me.stopped = 0
            is_busy = busy(f.engines, first, limits)
            if not is_busy or f.engines.totals[first].now_s > now_s:
                for row in range(first, first + dp):
                    if not is_busy and heeds:
                        f.engines.totals[row].now_s = max(f.engines.totals[row].now_s, now_s)
                i += 1
                continue
        else:
            while void < 0 and i < engines.shape[0]:
                if f.members[engines[i]].next_step_s == VOID:
                    void = engines[i]
                i += 1
            e = void if void >= 0 else f.members[0].heap
            first, me = e * dp, f.members[e]
            if void < 0:
                due_s, number = me.due_s, me.ended
                if due_s == np.inf or (due_s > now_s and due_s >= event_s):
                    return WAIT, -1, due_s
                if number >= 0:
                    ticket, group = f.tickets[number], f.tickets[number].group
                    left, out = f.groups[group].left - ticket.done, f.groups[group].out - 1
                    news = out == 0 or (left == 0 and ticket.done == 1)
                    if news and due_s > now_s:
                        return WAIT, -1, due_s
                    ticket.over = 1
                    me.ended = ticket.next_ended
                    f.groups[group].left, f.groups[group].out = left, out
                    f.unfinished[e] -= 1
                    _move_in_heap(f, e)
                    if news:
                        return GROUP, group, due_s
                    continue
                if me.stopped == 1 and me.calls == 1:
                    return (STOP, e, due_s) if due_s <= now_s else (WAIT, -1, due_s)
                if me.stopped == 1:
                    me.stopped = 0
                    _reorder(f, e)
                    me.next_step_s = VOID
        if ways is None:  # so that numba leaves the rest out
            bounds, decoding = limits, d
        else:
            bounds, decoding = ways[me.way]
        if settling or me.next_step_s == VOID:
            passes, end_s = 0, np.inf
            if busy(f.engines, first, bounds):
                passes, end_s = plan(f.engines, first, tables, bounds, decoding)
            if settling and passes > 0 and end_s > now_s:
                passes, end_s = end_of_stretch(f.engines, first, tables, bounds, passes, now_s)
            me.passes, me.next_step_s = passes, end_s
            if not settling:
                _move_in_heap(f, e)
                void = -1
                continue
        if me.passes > 0:
            repeat(f.engines, first, bounds, decoding, me.passes, me.next_step_s)
        else:
            step(f.engines, first, tables, bounds, decoding)
        n_stopped, t = _note(f, e, bounds), f.engines.totals[first]
        if d is not None and n_stopped == 0 and t.drafted > 0 and t.n_running > 0:
            me.passes, me.next_step_s = 0, t.now_s  # it drafts on
        if me.next_step_s == VOID:
            void = e
        else:
            _move_in_heap(f, e)


@inlined
def _note(f: State, e: int, limits: Limits) -> int:
    """Note what stopped in an engine's step: its tickets, and whether something calls Python.
    Return how much it was."""
    me, first, n_stopped, calls = f.members[e], e * limits.dp, 0, f.members[e].watched
    for row in range(first, first + limits.dp):
        for i in range(f.engines.totals[row].n_stopped):
            slot = f.engines.requests[row, i].stopped
            if f.engines.requests[row, slot].ticket >= 0:
                _end_ticket(f, e, row, slot, me.order + n_stopped)
            else:
                calls = 1
            n_stopped += 1
    me.stopped = n_stopped > 0
    me.calls = calls == 1 or me.in_groups == 0
    me.next_step_s = f.engines.totals[first].now_s if n_stopped > 0 else VOID
    return n_stopped


@lean
def _end_ticket(f: State, e: int, row: int, slot: int, order: int) -> None:
    """Note the end of a ticket, whose time has not come."""
    request = f.engines.requests[row, slot]
    number = request.ticket
    request.ticket = -1
    ticket, me = f.tickets[number], f.members[e]
    ticket.tokens = request.generated
    ticket.version = me.version
    ticket.done = ticket.whole
    ticket.first_token_s = request.first_token_s
    ticket.ended_s = request.last_token_s
    ticket.order = order
    ticket.next_ended = -1
    me.in_groups -= 1
    if me.ended < 0:
        me.ended = number
    else:
        f.tickets[me.last_ended].next_ended = number
    me.last_ended = number


@lean
def _move_in_heap(f: State, e: int) -> None:
    """Move an engine in the heap to where its next event belongs."""
    m, me = f.members, f.members[e]
    me.due_s, me.due_order = me.next_step_s, me.order
    if me.ended >= 0:
        ticket = f.tickets[me.ended]
        me.due_s, me.due_order = ticket.ended_s, ticket.order
    n, place = m.shape[0], me.place
    while place > 0 and _comes_before(m, e, m[(place - 1) // 2].heap):
        m[place].heap = m[(place - 1) // 2].heap
        m[m[place].heap].place = place
        place = (place - 1) // 2
    while 2 * place + 1 < n:
        child = 2 * place + 1
        if child + 1 < n and _comes_before(m, m[child + 1].heap, m[child].heap):
            child += 1
        if not _comes_before(m, m[child].heap, e):
            break
        m[place].heap = m[child].heap
        m[m[place].heap].place = place
        place = child
    m[place].heap, me.place = e, place


@inlined
def _comes_before(m: Sequence[Member], one: int, other: int) -> bool:
    """Return whether one engine's next event comes before another's; of those at once, the one that
    was planned first."""
    a, b = m[one], m[other]
    return bool(a.due_s < b.due_s or (a.due_s == b.due_s and a.due_order < b.due_order))


@lean_kernel
def submit(
    f: State, limits: Limits, e: int, lengths: Ints, numbers: Ints, request_s: float, slots: Ints
) -> None:
    """Queue requests at an engine, where it stands, and set their `slots`. `lengths` has a row for
    each: prompt, response, generated and cached tokens, the key of its prompt, the prompt's shared
    tokens, the key of its sample, and whether that goes on later; `numbers` the ticket of each, -1
    for one whose end calls Python."""
    first = e * limits.dp
    for i in range(numbers.shape[0]):
        rank = (
            0
            if limits.dp == 1
            else _least_loaded(f, first, limits, f.members[e].submitted % limits.dp)
        )
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
        f.members[e].submitted += 1
        slots[i] = slot * limits.dp + rank
        if number >= 0:
            f.tickets[number].slot = slots[i]
            f.tickets[number].started_s = f.engines.totals[first].now_s
            f.members[e].in_groups += 1


@inlined
def _least_loaded(f: State, first: int, limits: Limits, turn: int) -> int:
    """Return the rank with the least load, as vLLM's balancer counts it; ties go round."""
    best, least = 0, np.inf
    for i in range(limits.dp):
        rank = (turn + i) % limits.dp
        t = f.engines.totals[first + rank]
        used = 1.0 - t.free_blocks / limits.kv_blocks
        load = t.n_running + t.n_waiting - t.n_once_more + 6.0 * t.n_waiting * max(used - 0.5, 0.0)
        if load < least:
            best, least = rank, load
    return best


@lean_kernel
def withdraw(f: State, limits: Limits, e: int, numbers: Ints) -> int:
    """Take tickets out of their engine, where it stands. Return how many were there."""
    taken = 0
    for number in numbers:
        ticket = f.tickets[number]
        row, slot = e * limits.dp + ticket.slot % limits.dp, ticket.slot // limits.dp
        is_here = ticket.engine == e and f.engines.requests[row, slot].ticket == number
        if is_here and ticket.version < 0:
            remove(f.engines.requests[row], f.engines.totals[row], slot)
            f.engines.requests[row, slot].last_token_s = f.engines.totals[row].now_s
            _reorder(f, e)
            _end_ticket(f, e, row, slot, f.members[e].order)
            ticket.done = 0
            taken += 1
    return taken
