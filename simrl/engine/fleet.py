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
from simrl.profile.compiled import inlined, lean, lean_kernel
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
    due: Ints  # tickets that have ended at a boundary that is still to come: a heap, the first on top …
    n_due: Ints  # … and their number, shape (1,)


@inlined
def _reorder(f: State, e: int) -> None:
    """Let the next stop of an engine come behind all that are planned, where it comes at one instant with them."""
    f.orders[0] += f.engines.requests.size
    f.order[e] = f.orders[0]


@lean_kernel
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
    settling, i = settled.shape[0] > 0, 0
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
            e = _first_to_step(f)
            first = e * limits.dp
            step_s = f.next_step_s[e]
            if step_s != VOID:
                due_s = f.tickets[f.due[0]].ended_s if f.n_due[0] > 0 else np.inf
                next_s = min(due_s, step_s)
                if next_s == np.inf or (next_s > now_s and next_s >= event_s):
                    return WAIT, -1, next_s
                if due_s < step_s or (due_s == step_s and f.tickets[f.due[0]].order < f.order[e]):
                    ticket = f.tickets[f.due[0]]
                    group = ticket.group
                    left, out = f.left[group] - ticket.done, f.out[group] - 1
                    news = out == 0 or (left == 0 and ticket.done == 1)
                    if news and due_s > now_s:
                        return WAIT, -1, due_s
                    _pop_due(f)
                    ticket.over = 1
                    f.left[group], f.out[group] = left, out
                    f.unfinished[ticket.engine] -= 1
                    if news:
                        return GROUP, group, due_s
                    continue
                if f.stopped[e] == 1 and f.calls[e] == 1:
                    return (STOP, e, step_s) if step_s <= now_s else (WAIT, -1, step_s)
                if f.stopped[e] == 1:
                    f.stopped[e] = 0
                    _reorder(f, e)
                    f.next_step_s[e] = VOID
                    continue
        if settling or f.next_step_s[e] == VOID:
            passes, end_s = 0, np.inf
            if busy(f.engines, first, limits):
                passes, end_s = plan(f.engines, first, tables, limits, d)
            if settling and passes > 0 and end_s > now_s:
                passes, end_s = end_of_stretch(f.engines, first, tables, limits, passes, now_s)
            f.passes[e], f.next_step_s[e] = passes, end_s
            if not settling:
                continue
        if f.passes[e] > 0:
            repeat(f.engines, first, limits, d, f.passes[e], f.next_step_s[e])
        else:
            step(f.engines, first, tables, limits, d)
        _note(f, e, limits)


@inlined
def _note(f: State, e: int, limits: Limits) -> None:
    """Note what stopped in an engine's step: its tickets, and whether something calls Python."""
    first, n_stopped, calls = e * limits.dp, 0, f.watched[e]
    for row in range(first, first + limits.dp):
        for i in range(f.engines.totals[row].n_stopped):
            slot = f.engines.requests[row, i].stopped
            if f.engines.requests[row, slot].ticket >= 0:
                note_end(f, e, row, slot, f.order[e] + n_stopped)
            else:
                calls = 1
            n_stopped += 1
    f.stopped[e] = n_stopped > 0
    f.calls[e] = calls == 1 or f.in_groups[e] == 0
    f.next_step_s[e] = f.engines.totals[first].now_s if n_stopped > 0 else VOID


@lean_kernel
def note_end(f: State, e: int, row: int, slot: int, order: int) -> None:
    """Note the end of a ticket: it is due at that boundary."""
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
    f.in_groups[e] -= 1
    place = f.n_due[0]
    f.n_due[0] += 1
    while place > 0 and _earlier(f, number, f.due[(place - 1) // 2]):
        f.due[place] = f.due[(place - 1) // 2]
        place = (place - 1) // 2
    f.due[place] = number


@inlined
def _pop_due(f: State) -> None:
    """Take the first ticket off the heap."""
    f.n_due[0] -= 1
    n, number, place = f.n_due[0], f.due[f.n_due[0]], 0
    while 2 * place + 1 < n:
        child = 2 * place + 1
        if child + 1 < n and _earlier(f, f.due[child + 1], f.due[child]):
            child += 1
        if not _earlier(f, f.due[child], number):
            break
        f.due[place] = f.due[child]
        place = child
    f.due[place] = number


@lean
def _earlier(f: State, one: int, other: int) -> bool:
    """Return whether one ticket ends before another."""
    a, b = f.tickets[one], f.tickets[other]
    return bool(a.ended_s < b.ended_s or (a.ended_s == b.ended_s and a.order < b.order))


@lean
def _first_to_step(f: State) -> int:
    """Return the engine whose step comes first; of those at once, the one whose stop was planned first."""
    first = 0
    for e in range(1, f.next_step_s.shape[0]):
        step_s, first_s = f.next_step_s[e], f.next_step_s[first]
        if step_s < first_s or (step_s == first_s and f.order[e] < f.order[first]):
            first = e
    return first


@lean_kernel
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


@lean_kernel
def withdraw(f: State, limits: Limits, number: int) -> bool:
    """Take a ticket out of its engine, where that stands. Return whether it was there."""
    ticket = f.tickets[number]
    if ticket.version >= 0:
        return False
    e, row, slot = ticket.engine, ticket.engine * limits.dp + ticket.slot % limits.dp, ticket.slot // limits.dp
    remove(f.engines.requests[row], f.engines.totals[row], slot)
    f.engines.requests[row, slot].last_token_s = f.engines.totals[row].now_s
    _reorder(f, e)
    note_end(f, e, row, slot, f.order[e])
    ticket.done = 0
    return True
