"""HistoSpec's drafter for running responses: drafts from a store of what their prompts had in
earlier epochs.

Invariant: a response drafts from responses of earlier epochs to its prompt, and from nothing else
but its own tokens so far, with the prompt's tail before them if the rule says so; the store has
that tail before each response, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.typed import List
from numpy.typing import NDArray

from simrl.profile.compiled import threaded
from simrl.speculation.choices import HistoryRule
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, Tokens
from simrl.speculation.history_index import PAPER, build_index, find_draft
from simrl_replay.history_store import HistoryStore


class HistoryDrafter:
    """HistoSpec as a `Drafter`: drafts for running responses from a store of their prompts' earlier
    responses.

    The index of a response is fixed when it starts (or once its build is done, if it is being built
    then), and stays in memory while the response runs. One call of compiled code drafts for a whole
    batch. For one engine and one thread.
    """

    def __init__(self, store: HistoryStore, rule: HistoryRule = PAPER) -> None:
        self.store = store
        self._rule, self._prompt_tail = rule.compiled, rule.prompt_tail
        self._nothing = build_index([])
        self._indexes = List([self._nothing])  # by slot; slot 0 is unused
        self._tails = np.zeros(
            (1, rule.longest_match_tokens), dtype=np.int32
        )  # the last tokens, at the row's end
        self._tail_tokens = np.zeros(1, dtype=np.int64)
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._waiting: dict[int, int] = {}  # prompts whose index is being built, by request

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        """Begin a response, or continue one: then `observe` its tokens. Raise `ValueError` if it
        runs already."""
        if request in self._slots:
            raise ValueError(f"request {request} runs already")
        if not self._free:
            self._grow()
        slot = self._slots[request] = self._free.pop()
        self._tail_tokens[slot] = 0
        _remember(self._tails, self._tail_tokens, slot, self._prompt_tail)
        index = self.store.index(prompt_id)
        self._indexes[slot] = self._nothing if index is None else index
        if index is None and self.store.pending(prompt_id):
            self._waiting[request] = prompt_id

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        """Return drafts of at most 32 tokens each. Raise `ValueError` for a request that does not
        run."""
        for request in [r for r in self._waiting if not self.store.pending(self._waiting[r])]:
            index = self.store.index(self._waiting.pop(request))
            self._indexes[self._slots[request]] = self._nothing if index is None else index
        slots = np.array([self._slot(request) for request in requests], dtype=np.int64)
        most = np.clip(np.array(most_tokens, dtype=np.int64), 0, MOST_DRAFT_TOKENS)
        if most.shape != slots.shape:
            raise ValueError(f"{most.size} most_tokens for {slots.size} requests")
        out = np.empty((len(slots), MOST_DRAFT_TOKENS), dtype=np.int32)
        out_tokens = np.empty(len(slots), dtype=np.int64)
        _drafts_of(
            self._indexes, self._tails, self._tail_tokens, slots, most, self._rule, out, out_tokens
        )
        return [row[:tokens] for row, tokens in zip(out, out_tokens.tolist(), strict=True)]

    def observe(self, request: int, token_ids: Tokens) -> None:
        """Append tokens. Raise `ValueError` for a request that does not run and for ids below 0,
        fillers in some engines."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        if not _remember(self._tails, self._tail_tokens, self._slot(request), ids):
            raise ValueError(f"request {request}: token id {ids.min()} is below 0")

    def stop_request(self, request: int) -> None:
        """End a response. Raise `ValueError` for a request that does not run."""
        slot = self._slot(request)
        del self._slots[request]
        self._waiting.pop(request, None)
        self._indexes[slot] = self._nothing
        self._free.append(slot)

    def _slot(self, request: int) -> int:
        try:
            return self._slots[request]
        except KeyError:
            raise ValueError(f"request {request} does not run") from None

    def _grow(self) -> None:
        old = len(self._tails)
        self._tails = np.vstack((self._tails, np.zeros_like(self._tails)))
        self._tail_tokens = np.r_[self._tail_tokens, np.zeros_like(self._tail_tokens)]
        for _ in range(old):
            self._indexes.append(self._nothing)
        self._free += range(2 * old - 1, old - 1, -1)


@threaded
def _drafts_of(
    indexes: Any,
    tails: Tokens,
    tail_tokens: NDArray[np.int64],
    slots: NDArray[np.int64],
    most_tokens: NDArray[np.int64],
    rule: tuple[int, int, bool, float],
    out: Tokens,
    out_tokens: NDArray[np.int64],
) -> None:
    """Write a draft for each of `slots`: a slot has an index in the list `indexes` and the last
    `tail_tokens` tokens of its response at the end of a row of `tails`. Row r of `out` takes the
    draft of slots[r], of `out_tokens[r]` tokens."""
    for r in range(slots.shape[0]):
        slot = slots[r]
        width = tails.shape[1]
        index = indexes[slot]
        tail = tails[slot]
        start, size = find_draft(
            index, tail, width - tail_tokens[slot], width, most_tokens[r], rule
        )
        out_tokens[r] = size
        for k in range(size):
            out[r, k] = index[start + k]


@threaded
def _remember(tails: Tokens, tail_tokens: NDArray[np.int64], slot: int, ids: Tokens) -> bool:
    """Append tokens to a slot's row of `tails`; do nothing and return False if an id is below 0."""
    for id_ in ids:
        if id_ < 0:
            return False
    width, new = tails.shape[1], min(ids.shape[0], tails.shape[1])
    for k in range(width - new):
        tails[slot, k] = tails[slot, k + new]
    for k in range(new):
        tails[slot, width - new + k] = ids[ids.shape[0] - new + k]
    tail_tokens[slot] = min(tail_tokens[slot] + new, width)
    return True
