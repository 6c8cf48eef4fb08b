"""The engines of all workers side by side, for requests whose ends are no events: only the end of their group is one.

Invariant: `requests` and `totals` are each engine where it stands; its next step is `stretch` passes of pure decoding, or one
pass of any kind (0). Nothing of a step is done before `next_step_s`: the boundary where it stops or, without a stop, from which
on no command can come before the end of its pass. Steps are taken in the order of time over all engines, none beyond the next
event of the schedule: no command can come before.
A ticket is a request of a group; an engine whose stops somebody watches is `loud`, and stops for them one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.engine import requests as state
from simrl.engine.engine import MEANWHILE, Engine, run
from simrl.engine.leaving import remove
from simrl.engine.prefix_cache import MANY, forget_oldest, short_of_nodes
from simrl.engine.repeat import has_work, plan, repeat
from simrl.engine.requests import REQUESTS, TOTALS, Limits, Until, enqueue, may_stop
from simrl.engine.resolved import resolved
from simrl.engine.step import step
from simrl.profile.compiled import inlined, kernel, part
from simrl.profile.profile import Tables
from simrl.speculation.bandit import bandit_states
from simrl.speculation.decoding import Decoding, Floats, Ints, Records, fields_of

# What `advance` returns: nothing is to be done before a time; a group is complete, or has ended; an engine has no ticket left;
# a loud one stops.
WAIT, GROUP, IDLE, LOUD = range(4)
NOTHING = np.int64(0)  # of a prompt is computed already


class Ticket:
    """A request of a group, and what became of it."""

    worker: int
    group: int
    slot: int
    tokens: int  # of the response, when it ends
    closed_tokens: int  # of these, before its open segment
    version: int  # of the weights at its end; -1 until then
    whole: int  # 0 if it ends before its response does
    done: int  # whether its response has ended
    turn: int  # of the stop that it ended at, among all that were planned: which is first, of those at one instant …
    noted: int  # … its place among all ends that were noted …
    order: int  # … and among those whose time has come; -1 until then
    started_s: float  # of its open segment
    first_token_s: float
    ended_s: float


TICKETS = fields_of(Ticket)


class Engines(NamedTuple):
    """The arrays of a fleet: a row an engine, a column a slot."""

    engines: state.Engines
    tried: state.Engines
    requests: NDArray[Any]
    totals: NDArray[Any]
    tried_requests: NDArray[Any]  # of one engine: to try a pass
    tried_totals: NDArray[Any]
    requests_words: Ints  # of these: records are slow to copy
    totals_words: Ints
    tried_requests_words: Ints
    tried_totals_words: Ints
    next_step_s: Floats
    stretch: Ints
    stops: Ints  # whether a loud engine stops at the end of its step
    here: Ints  # tickets in each engine
    versions: Ints  # of its weights
    loud: Ints
    unfinished: Ints  # requests at each worker, as its dispatcher counts them
    tickets: Records
    left: Ints  # responses of each group to finish before it is complete
    out: Ints  # tickets of each group that have not ended
    due: Ints  # tickets that have ended at a boundary that is still to come: a heap, the earliest end on top …
    n_due: Ints  # … and their number, shape (1,)
    planned: Ints  # turn of the stop that each engine has ahead …
    turns: Ints  # … and the turns so far, shape (1,)
    noted: Ints  # tickets so far whose end was noted, shape (1,) …
    ends: Ints  # … and whose time has come, shape (1,)


@kernel
def begin(
    f: Engines,
    tables: Tables,
    limits: Limits,
    numbers: Ints,
    workers: Ints,
    lengths: Ints,
    now_s: float,
    request_s: float,
) -> Floats:
    """Queue tickets at their engines (`workers`), at the first boundary after `now_s`, and find the next stops of all `workers`
    in turn, also of those beyond the tickets. `lengths` has prompt, response and generated tokens of each ticket, and the keys
    of its prompt and its sample. Return the boundary before at which each engine had lost its last ticket, infinity if it had
    not."""
    settled = np.zeros(f.next_step_s.shape[0], np.bool_)
    emptied_s = np.full(settled.shape[0], np.inf)
    for i in range(numbers.shape[0]):
        number, worker = numbers[i], workers[i]
        r, totals = f.requests[worker], f.totals[worker]
        if not settled[worker]:
            settled[worker] = True
            emptied_s[worker] = _settle(f, worker, tables, limits, now_s)
        prompt, response, generated = lengths[i, 0], lengths[i, 1], lengths[i, 2]
        prompt_key, sample_key, cut = lengths[i, 3], lengths[i, 4], f.tickets[number].whole == 0
        slot = enqueue(r, totals, prompt, response, generated, NOTHING, prompt_key, prompt, sample_key, cut)
        totals[0].now_s += request_s
        r[slot].ticket = number
        f.tickets[number].slot = slot
        f.tickets[number].started_s = totals[0].now_s
        f.here[worker] += 1
    _look_ahead_in_turn(f, tables, limits, workers)
    return emptied_s


@kernel
def withdraw(f: Engines, tables: Tables, limits: Limits, numbers: Ints, workers: Ints, now_s: float) -> Floats:
    """Take tickets out of their `workers`, at the first boundary after `now_s`, unless they have ended by then. Return the
    boundary at which each engine has lost its last one, infinity if it has not."""
    settled = np.zeros(f.next_step_s.shape[0], np.bool_)
    emptied_s = np.full(settled.shape[0], np.inf)
    for i in range(numbers.shape[0]):
        number, worker = numbers[i], workers[i]
        if not settled[worker]:
            settled[worker] = True
            emptied_s[worker] = _settle(f, worker, tables, limits, now_s)
        if take_out(f, number) and f.here[worker] == 0:
            emptied_s[worker] = f.totals[worker, 0].now_s
    _look_ahead_in_turn(f, tables, limits, workers)
    return emptied_s


@inlined
def _look_ahead_in_turn(f: Engines, tables: Tables, limits: Limits, workers: Ints) -> None:
    """Plan the next stops of engines from where they stand, in the order in which they come first."""
    planned = np.zeros(f.next_step_s.shape[0], np.bool_)
    for worker in workers:
        if not planned[worker]:
            planned[worker] = True
            f.planned[worker] = next_turn(f)
            _plan_step(f, worker, tables, limits)


@inlined
def take_out(f: Engines, number: int) -> bool:
    """Take a ticket out of its engine, where that stands. Return whether it was there."""
    worker, slot = f.tickets[number].worker, f.tickets[number].slot
    r, totals = f.requests[worker], f.totals[worker]
    if f.tickets[number].version >= 0:
        return False
    remove(r, totals[0], slot)
    r[slot].last_token_s = totals[0].now_s
    note(f, worker, slot, next_turn(f))
    f.tickets[number].done = 0
    return True


@inlined
def _settle(f: Engines, worker: int, tables: Tables, limits: Limits, now_s: float) -> float:
    """Do as `Engine.settle`; what stops are tickets. Return the boundary at which the last one has ended, or infinity."""
    t = f.totals[worker, 0]
    emptied_s = np.inf
    while has_work(t) and t.now_s <= now_s:
        run(f.engines, worker, tables, limits, None, Until(now_s, True))
        _note_all(f, worker, next_turn(f))
        if f.here[worker] == 0:
            emptied_s = t.now_s
    if not has_work(t):
        t.now_s = max(t.now_s, now_s)
    return emptied_s


@inlined
def _plan_step(f: Engines, worker: int, tables: Tables, limits: Limits) -> None:
    """Plan an engine's next step."""
    r, t = f.requests[worker], f.totals[worker, 0]
    f.stretch[worker], f.next_step_s[worker] = 0, np.inf
    if not has_work(t):
        return
    passes, end_s = plan(f.engines, worker, tables, limits, None)
    if passes > 0:
        f.stretch[worker], f.next_step_s[worker] = passes, end_s
        f.stops[worker] = f.loud[worker] == 1 and may_stop(r, t, passes, 0)
        return
    f.next_step_s[worker] = t.now_s
    f.stops[worker] = 0
    if may_stop(r, t, 1, limits.max_num_seqs - t.n_running):
        _copy(f.requests_words, f.tried_requests_words, worker)
        _copy(f.totals_words, f.tried_totals_words, worker)
        step(f.tried, 0, tables, limits, None)
        if f.tried_totals[0, 0].n_stopped > 0:
            f.next_step_s[worker], f.stops[worker] = f.tried_totals[0, 0].now_s, 1


@inlined
def _copy(here: Ints, there: Ints, row: int) -> None:
    """Copy a row; an assignment to it takes a second to compile."""
    for i in range(here.shape[1]):
        there[0, i] = here[row, i]


@inlined
def take_step(f: Engines, worker: int, tables: Tables, limits: Limits) -> None:
    """Let an engine do its next step."""
    if f.stretch[worker] > 0:
        repeat(f.engines, worker, limits, None, f.stretch[worker], f.next_step_s[worker])
    else:
        step(f.engines, worker, tables, limits, None)
    f.next_step_s[worker] = np.inf


@kernel
def next_turn(f: Engines) -> int:
    """Return the next turn."""
    f.turns[0] += 1
    return int(f.turns[0])


@inlined
def _note_all(f: Engines, worker: int, turn: int) -> None:
    """Note what has stopped in an engine's last pass, at a stop planned at that turn."""
    r = f.requests[worker]
    for i in range(f.totals[worker, 0].n_stopped):
        note(f, worker, r[i].stopped, turn)


@kernel
def note(f: Engines, worker: int, slot: int, turn: int) -> None:
    """Note the end of a ticket: it is due at that boundary."""
    r = f.requests[worker]
    number = r[slot].ticket
    r[slot].ticket = -1
    ticket = f.tickets[number]
    ticket.tokens = r[slot].generated
    ticket.version = f.versions[worker]
    ticket.done = ticket.whole
    ticket.first_token_s = r[slot].first_token_s
    ticket.ended_s = r[slot].last_token_s
    f.here[worker] -= 1
    ticket.turn = turn
    ticket.noted = f.noted[0]
    f.noted[0] += 1
    place = f.n_due[0]
    f.n_due[0] += 1
    while place > 0 and _earlier(f, number, f.due[(place - 1) // 2]):
        f.due[place] = f.due[(place - 1) // 2]
        place = (place - 1) // 2
    f.due[place] = number


@inlined
def _pop_due(f: Engines) -> None:
    """Take the earliest ticket off the heap."""
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


@part
def _earlier(f: Engines, one: int, other: int) -> bool:
    """Return whether one ticket ended before another; of those that ended at once, the one whose stop was planned first."""
    a, b = f.tickets[one], f.tickets[other]
    if a.ended_s != b.ended_s:
        return bool(a.ended_s < b.ended_s)
    return bool(a.turn < b.turn or (a.turn == b.turn and a.noted < b.noted))


@part
def _next_to_step(f: Engines) -> int:
    """Return the engine whose step comes first; of those at once, the one whose stop was planned first."""
    first = 0
    for worker in range(1, f.next_step_s.shape[0]):
        step_s, first_s = f.next_step_s[worker], f.next_step_s[first]
        if step_s < first_s or (step_s == first_s and f.planned[worker] < f.planned[first]):
            first = worker
    return first


@kernel
def advance(f: Engines, tables: Tables, limits: Limits, now_s: float, event_s: float) -> tuple[int, int, float]:
    """Take steps up to `now_s`, and those before the next event of the schedule (`event_s`), up to one that is an event itself.
    Return it: WAIT, GROUP, IDLE or LOUD, the group or the engine, and the time of the stop."""
    worker = _next_to_step(f)
    while True:
        stop_s = f.next_step_s[worker]
        due_s = f.tickets[f.due[0]].ended_s if f.n_due[0] > 0 else np.inf
        next_s = min(due_s, stop_s)
        if next_s == np.inf or (next_s > now_s and next_s >= event_s):
            return WAIT, -1, next_s
        if due_s < stop_s or (due_s == stop_s and f.tickets[f.due[0]].turn <= f.planned[worker]):
            ticket = f.tickets[f.due[0]]
            left, out = f.left[ticket.group] - ticket.done, f.out[ticket.group] - 1
            news = out == 0 or (left == 0 and ticket.done == 1)
            if news and due_s > now_s:
                return WAIT, -1, due_s
            _pop_due(f)
            f.left[ticket.group], f.out[ticket.group] = left, out
            f.unfinished[ticket.worker] -= 1
            ticket.order = f.ends[0]
            f.ends[0] += 1
            if news:
                return GROUP, ticket.group, due_s
        elif f.loud[worker] == 0 or f.stops[worker] == 0:
            take_step(f, worker, tables, limits)
            stopped = f.totals[worker, 0].n_stopped > 0
            if stopped:
                _note_all(f, worker, f.planned[worker])
                f.planned[worker] = next_turn(f)
            _plan_step(f, worker, tables, limits)
            if stopped and f.here[worker] == 0:
                return IDLE, worker, stop_s
            worker = _next_to_step(f)
        elif stop_s <= now_s:
            return LOUD, worker, stop_s
        else:
            return WAIT, -1, stop_s


class Fleet:
    """Engines without drafts, and their tickets."""

    def __init__(self, engines: list[Engine], tables: Tables, limits: Limits, unfinished: Ints) -> None:
        n = len(engines)
        self.engines = engines
        self._shared = tables, limits
        no_words = np.zeros((n, 0), np.int64)
        self.arrays = Engines(
            engines=_rows(np.zeros((n, 0), REQUESTS), np.zeros((n, 1), TOTALS)),
            tried=_rows(np.zeros((1, 0), REQUESTS), np.zeros((1, 1), TOTALS)),
            requests=np.zeros((n, 0), REQUESTS),
            totals=np.zeros((n, 0), TOTALS),
            tried_requests=np.zeros((1, 0), REQUESTS),
            tried_totals=np.zeros((1, 0), TOTALS),
            requests_words=no_words,
            totals_words=no_words,
            tried_requests_words=no_words,
            tried_totals_words=no_words,
            next_step_s=np.full(n, np.inf),
            stretch=np.zeros(n, np.int64),
            stops=np.zeros(n, np.int64),
            here=np.zeros(n, np.int64),
            versions=np.zeros(n, np.int64),
            loud=np.zeros(n, np.int64),
            unfinished=unfinished,
            tickets=np.zeros(0, TICKETS),
            left=np.zeros(0, np.int64),
            out=np.zeros(0, np.int64),
            due=np.zeros(0, np.int64),
            n_due=np.zeros(1, np.int64),
            planned=np.zeros(n, np.int64),
            turns=np.zeros(1, np.int64),
            noted=np.zeros(1, np.int64),
            ends=np.zeros(1, np.int64),
        )
        self._groups = 0
        self._free_groups: list[int] = []
        self._numbers = 0
        self._free_numbers: dict[int, list[int]] = {}  # first ones, by the size of their group
        f, self._no_numbers, self._no_lengths = self.arrays, np.zeros(0, np.int64), np.zeros((0, 5), np.int64)
        self._begin = resolved(begin, f, *self._shared, self._no_numbers, self._no_numbers, self._no_lengths, 0.0, 0.0)
        self._advance = resolved(advance, f, *self._shared, 0.0, 0.0)
        self._make_slots(max(16, *(engine.slots() for engine in engines)))

    def open_group(self, workers: list[int], needed: int) -> tuple[int, int]:
        """Return the number of a new group, complete with `needed` responses, and of the first of its tickets, which are for
        `workers`."""
        group, size = self._free_groups.pop() if self._free_groups else self._groups, len(workers)
        free = self._free_numbers.setdefault(size, [])
        first = free.pop() if free else self._numbers
        self._groups, self._numbers = max(self._groups, group + 1), max(self._numbers, first + size)
        f = self.arrays
        if self._numbers > f.tickets.size or self._groups > f.left.size:
            tickets, groups = 2 * self._numbers, 2 * self._groups
            f = self.arrays = f._replace(
                tickets=_longer(f.tickets, tickets),
                due=_longer(f.due, tickets),
                left=_longer(f.left, groups),
                out=_longer(f.out, groups),
            )
        opened = f.tickets[first : first + size]
        opened["worker"], opened["group"] = workers, group
        opened["closed_tokens"], opened["version"], opened["order"] = 0, -1, -1
        opened["whole"], opened["done"] = 1, 0
        f.left[group], f.out[group] = needed, size
        return group, first

    def close_group(self, group: int, first: int, size: int) -> None:
        """Let the numbers of a group and its tickets be used again."""
        self._free_groups.append(group)
        self._free_numbers[size].append(first)

    def begin(self, numbers: Ints, lengths: Ints, now_s: float, request_s: float) -> Floats:
        """See the function `begin`. Raises `InputError` for a request that never fits the KV cache."""
        f = self.arrays
        lengths_of_longest = lengths[int(lengths[:, :2].sum(axis=1).argmax())].tolist()
        self.engines[0].require_fits(*lengths_of_longest[:2])
        workers = f.tickets["worker"][numbers]
        more = np.bincount(workers, minlength=len(self.engines))
        free, spare = f.totals["n_free"][:, 0], f.totals["n_spare"][:, 0]
        lacking = int((more - free).max())
        if f.totals["prefix_caching"].any():
            if f.requests.shape[1] >= MANY:
                for worker in np.flatnonzero(short_of_nodes(f.requests.shape[1], spare, free, more) > 0):
                    forget_oldest(f.requests[worker], f.totals[worker], f.requests.shape[1])
            lacking = max(lacking, int(short_of_nodes(f.requests.shape[1], spare, free, more).max()))
        if lacking > 0:
            self._make_slots(max(2 * f.requests.shape[1], f.requests.shape[1] + lacking))
        emptied_s: Floats = self._begin(self.arrays, *self._shared, numbers, workers, lengths, now_s, request_s)
        return emptied_s

    def withdraw(self, numbers: Ints, now_s: float) -> Floats:
        """See the function `withdraw`."""
        workers = self.arrays.tickets["worker"][numbers]
        emptied_s: Floats = withdraw(self.arrays, *self._shared, numbers, workers, now_s)
        return emptied_s

    def take_out(self, number: int) -> bool:
        """See the function `take_out`."""
        there: bool = take_out(self.arrays, number)
        return there

    def advance(self, now_s: float, event_s: float) -> tuple[int, int, float]:
        """See the function `advance`."""
        found: tuple[int, int, float] = self._advance(self.arrays, *self._shared, now_s, event_s)
        return found

    @property
    def next_s(self) -> float:
        """When something stops next."""
        f = self.arrays
        due_s = f.tickets["ended_s"].item(f.due.item(0)) if f.n_due.item(0) else np.inf
        return min(float(f.next_step_s.min()), due_s)

    def look_ahead(self, worker: int) -> None:
        """Find when an engine stops next."""
        self._begin(self.arrays, *self._shared, self._no_numbers, np.array([worker]), self._no_lengths, 0.0, 0.0)

    def move_to_next_stop(self, worker: int) -> None:
        """Move a loud engine, which stops next, to that stop."""
        take_step(self.arrays, worker, *self._shared)

    def note(self, worker: int, slot: int) -> None:
        note(self.arrays, worker, slot, next_turn(self.arrays))

    def enter(self, worker: int, slot: int, number: int) -> None:
        """Let a request of a loud engine be a ticket."""
        f = self.arrays
        f.requests["ticket"][worker, slot], f.tickets["slot"][number] = number, slot
        f.tickets["started_s"][number] = self.engines[worker].now_s
        f.here[worker] += 1

    def running(self, worker: int) -> list[tuple[int, int, float]]:
        """Return the tickets in an engine: the number of each, its tokens, and when it had the first."""
        r = self.arrays.requests[worker]
        r = r[np.flatnonzero(r["ticket"] >= 0)]
        return list(zip(*(r[name].tolist() for name in ("ticket", "generated", "first_token_s")), strict=True))

    def _make_slots(self, slots: int) -> None:
        """Give every engine so many slots."""
        n = len(self.engines)
        requests, tried_requests = np.zeros((n, slots), REQUESTS), np.zeros((1, slots), REQUESTS)
        totals, tried_totals = np.zeros((n, 1), TOTALS), np.zeros((1, 1), TOTALS)
        self.arrays = self.arrays._replace(
            requests=requests,
            totals=totals,
            tried_requests=tried_requests,
            tried_totals=tried_totals,
            requests_words=requests.view(np.int64),
            totals_words=totals.view(np.int64),
            tried_requests_words=tried_requests.view(np.int64),
            tried_totals_words=tried_totals.view(np.int64),
            engines=_rows(requests, totals),
            tried=_rows(tried_requests, tried_totals),
        )
        for worker, engine in enumerate(self.engines):
            engine.live_in(requests[worker], totals[worker], self._make_slots)
            self.look_ahead(worker)


def _rows(requests: NDArray[Any], totals: NDArray[Any]) -> state.Engines:
    """Return the rows of engines without drafts."""
    none = np.zeros((len(requests), 0), np.int64)
    bandits = bandit_states(Decoding().bandit, 0, len(requests))
    return state.Engines(requests, totals[:, 0], bandits, none, none[0], MEANWHILE)


def _longer(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Return an array with its entries, and more behind them."""
    longer = np.zeros(size, array.dtype)
    longer[: array.size] = array
    return longer
