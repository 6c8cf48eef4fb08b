"""Drafting from the responses that a prompt had in earlier epochs: for running responses, and over a recorded trace at once.

Invariant: a response of epoch e drafts from responses of earlier epochs to the same prompt, and from nothing else but its own
tokens so far (not its prompt's: the paper matches the last generated tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba.typed import List
from numpy.typing import ArrayLike, NDArray

from simrl.errors import InputError
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns, Tokens
from simrl.speculation.history_index import PAPER, HistoryRule, accept_runs_of, build_index, drafts_of, remember
from simrl.speculation.history_store import HistoryStore
from simrl.trace import Trace

Ints = NDArray[np.int64]


def history_runs(
    trace: Trace,
    rule: HistoryRule = PAPER,
    epochs_back: int = 1,
    most_tokens: int = MOST_DRAFT_TOKENS,
    threads: int = 1,
) -> AcceptRuns:
    """What HistoSpec would draft at every position of a trace's responses, and how much of it is right.

    A row of epoch e drafts from all responses to its prompt in the epochs e - epochs_back … e - 1. `first` is -1 where there
    are none (so in the first epoch), and for rows without token ids. Prompts are shared among `threads`, which change nothing.

    Raises `InputError` for a trace without token ids; `ValueError` for an epochs_back below 1 or a most_tokens that is not
    from 1 to 32.
    """
    if epochs_back < 1 or not 1 <= most_tokens <= MOST_DRAFT_TOKENS:
        raise ValueError(f"epochs_back {epochs_back} must be at least 1, most_tokens {most_tokens} from 1 to 32")
    tokens, ends, known = _response_ids(trace)
    begins = ends - np.diff(ends, prepend=0)
    rewards = _rewards(trace)
    work = [
        (rows, history)
        for prompt in _by_prompt_and_epoch(trace, known)
        for rows, history in _with_history(prompt, epochs_back)
    ]
    drafts = np.zeros(len(trace), dtype=bool)
    for rows, _ in work:
        drafts[rows] = True
    lengths = np.where(drafts, ends - begins, 0)
    first = np.where(drafts, np.cumsum(lengths) - lengths, -1)
    drafted = np.zeros(int(lengths.sum()), dtype=np.uint8)
    accepted = np.zeros_like(drafted)

    def run(rows: Ints, history: Ints) -> None:
        responses = [tokens[begins[row] : ends[row]] for row in history]
        index = build_index(responses, None if rewards is None else rewards[history])
        places = np.column_stack((begins[rows], ends[rows], first[rows]))
        accept_runs_of(index, tokens, places, most_tokens, rule.compiled, drafted, accepted)

    if threads == 1:
        for rows, history in work:
            run(rows, history)
    else:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(run, *zip(*work, strict=True)) if work else ():
                pass
    return AcceptRuns(first, drafted, accepted)


class HistoryDrafter:
    """HistoSpec as a `Drafter`: drafts for running responses from a store of what their prompts had before.

    What a response drafts from is settled when it starts (or as soon as that index is built, if it is in work then), and stays
    in memory while it runs. One call of compiled code drafts for a whole batch. For one engine and one thread.
    """

    def __init__(self, store: HistoryStore, rule: HistoryRule = PAPER) -> None:
        self.store = store
        self._rule = rule.compiled
        self._nothing = build_index([])
        self._indexes = List([self._nothing])  # by slot; slot 0 is nobody's
        self._tails = np.zeros((1, rule.longest_match_tokens), dtype=np.int32)  # the last tokens, at the row's end
        self._tail_tokens = np.zeros(1, dtype=np.int64)
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._waiting: dict[int, int] = {}  # requests whose prompt's index is in work, and the prompt

    def learn(
        self, prompt_id: int, epoch: int, token_ids: Sequence[ArrayLike], rewards: Sequence[float] | None = None
    ) -> None:
        """`HistoryStore.learn`: a group is over."""
        self.store.learn(prompt_id, epoch, token_ids, rewards)

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        """A response begins, or goes on here: then tell with `observe` what it has. `ValueError` if it runs already."""
        if request in self._slots:
            raise ValueError(f"request {request} runs already")
        if not self._free:
            self._grow()
        slot = self._slots[request] = self._free.pop()
        self._tail_tokens[slot] = 0
        index = self.store.index(prompt_id)
        self._indexes[slot] = self._nothing if index is None else index
        if index is None and self.store.pending(prompt_id):
            self._waiting[request] = prompt_id

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        """Drafts of at most 32 tokens each. `ValueError` for a request that does not run."""
        for request in [r for r in self._waiting if not self.store.pending(self._waiting[r])]:
            index = self.store.index(self._waiting.pop(request))
            self._indexes[self._slots[request]] = self._nothing if index is None else index
        slots = np.array([self._slot(request) for request in requests], dtype=np.int64)
        most = np.clip(np.array(most_tokens, dtype=np.int64), 0, MOST_DRAFT_TOKENS)
        if most.shape != slots.shape:
            raise ValueError(f"{most.size} most_tokens for {slots.size} requests")
        out = np.empty((len(slots), MOST_DRAFT_TOKENS), dtype=np.int32)
        out_tokens = np.empty(len(slots), dtype=np.int64)
        drafts_of(self._indexes, self._tails, self._tail_tokens, slots, most, self._rule, out, out_tokens)
        return [row[:tokens] for row, tokens in zip(out, out_tokens.tolist(), strict=True)]

    def observe(self, request: int, token_ids: Tokens) -> None:
        """`ValueError` for a request that does not run and for ids below 0, which some engines use as fillers."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        if not remember(self._tails, self._tail_tokens, self._slot(request), ids):
            raise ValueError(f"request {request}: token id {ids.min()} is below 0")

    def stop_request(self, request: int) -> None:
        """`ValueError` for a request that does not run."""
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


def _response_ids(trace: Trace) -> tuple[Tokens, Ints, NDArray[np.bool_]]:
    """All token ids, where each row's end among them, and which rows have some."""
    if "response_ids" not in trace.table.column_names:
        raise InputError(
            f"trace {trace.metadata.name}: has no column 'response_ids'; drafting needs the tokens, import them with the text"
        )
    ids = trace.table.column("response_ids").combine_chunks()
    known: NDArray[np.bool_] = ids.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.where(known, trace.column("response_tokens"), 0)
    return ids.flatten().to_numpy(), np.cumsum(lengths, dtype=np.int64), known


def _rewards(trace: Trace) -> NDArray[np.float64] | None:
    return trace.column("reward").astype(np.float64) if "reward" in trace.table.column_names else None


def _by_prompt_and_epoch(trace: Trace, known: NDArray[np.bool_]) -> list[dict[int, Ints]]:
    """For each prompt its rows by epoch, epochs rising; rows in the order of the trace."""
    prompt, epoch = trace.column("prompt_id"), trace.column("epoch")
    order = np.lexsort((epoch, prompt))
    order = order[known[order]]
    changes = (np.diff(prompt[order]) != 0) | (np.diff(epoch[order]) != 0)
    prompts: dict[int, dict[int, Ints]] = {}
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        if len(rows):
            prompts.setdefault(int(prompt[rows[0]]), {})[int(epoch[rows[0]])] = rows
    return list(prompts.values())


def _with_history(by_epoch: dict[int, Ints], epochs_back: int) -> list[tuple[Ints, Ints]]:
    """(rows, the rows they draft from) for each epoch that has such."""
    found = []
    for epoch, rows in by_epoch.items():
        earlier = [by_epoch[e] for e in range(epoch - epochs_back, epoch) if e in by_epoch]
        if earlier:
            found.append((rows, np.concatenate(earlier)))
    return found
