"""Paused: the requests of an engine that wait for an environment.

Invariant: the blocks of a paused request are held, so that others may get them (`simrl.engine.requests`), or pinned: nobody
gets them while their cache is copied out. A pin ends by a command, so an engine looks ahead no further than to the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from simrl.engine.leaving import drop_held
from simrl.engine.requests import MOVED, Requests, Until, free, hold, queue_up, release
from simrl.profile.compiled import kernel
from simrl.speculation.decoding import Records

NEXT_STOP = Until(np.inf, True)


class Held(Protocol):
    """The state of an engine."""

    requests: Records
    totals: Records


class Paused:
    """The slots of paused requests, and until when some are pinned. `resolved` gives a compiled kernel for arguments."""

    def __init__(self, resolved: Callable[..., Callable[..., Any]]) -> None:
        self.slots: set[int] = set()
        self._resolved = resolved
        self._kernels: dict[Any, Callable[..., Any]] = {}
        self._pinned: dict[int, float] = {}

    @property
    def next_stop(self) -> Until:
        """The end of a look ahead."""
        return Until(max(self._pinned.values()), True) if self._pinned else NEXT_STOP

    def drop(self, state: Held, slot: int) -> None:
        """Drop a cache whose pause was reported at this boundary."""
        self._run(drop_held, state, slot)

    def pin(self, state: Held, slot: int, until_s: float) -> None:
        """Let nobody have the blocks of a request until `unpin`."""
        self._run(pin, state, slot)
        self._pinned[slot] = until_s

    def unpin(self, state: Held, slot: int, until_s: float) -> None:
        """Drop a cache that was pinned until `until_s`, unless its request has resumed or was aborted."""
        if self._pinned.get(slot) == until_s:
            del self._pinned[slot]
            self._run(drop_pinned, state, slot)

    def resume(self, state: Held, slot: int, prompt_tokens: int, cached_tokens: int) -> None:
        """Append a request to the queue. Raises KeyError for one that is not paused."""
        self.slots.remove(slot)
        self.hold(state, slot)
        self._run(requeue, state, slot, prompt_tokens, cached_tokens)

    def forget(self, state: Held, slot: int) -> None:
        """Forget a request that is about to be aborted."""
        self.slots.discard(slot)
        self.hold(state, slot)

    def hold_all(self, state: Held) -> None:
        """Pin nothing any more."""
        for slot in list(self._pinned):
            self.hold(state, slot)

    def hold(self, state: Held, slot: int) -> None:
        """Let others have the blocks of a request."""
        if self._pinned.pop(slot, None) is not None:
            hold(state.requests, state.totals[0], slot)

    def _run(self, kernel: Any, state: Held, slot: int, *more: Any) -> None:
        """Run a kernel; it is compiled when it is needed first."""
        if kernel not in self._kernels:
            self._kernels[kernel] = self._resolved(kernel, state.requests, state.totals, slot, *more)
        self._kernels[kernel](state.requests, state.totals, slot, *more)


@kernel
def pin(r: Requests, totals: Records, slot: int) -> None:
    """Let nobody have the blocks of a paused request."""
    release(r, totals[0], slot)


@kernel
def drop_pinned(r: Requests, totals: Records, slot: int) -> None:
    """Drop the cache of a request whose blocks nobody could have."""
    free(r, totals[0], slot, MOVED)


@kernel
def requeue(r: Requests, totals: Records, slot: int, prompt: int, cached: int) -> None:
    """Append a request to the queue again, with this context; if it has no cache, `cached` tokens need not be computed."""
    r[slot].prompt = prompt
    if r[slot].blocks == 0:
        r[slot].computed = cached
    queue_up(r, totals[0], slot)
