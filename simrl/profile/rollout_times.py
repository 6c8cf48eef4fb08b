"""RhymeRL's τ (arXiv 2508.18588, §6.4): the seconds in which workers generate responses that start
at once.

Invariant: each time is a sum of a profile's passes, as a profiling run before the training would
know them; `RolloutTimes.table` alone reads a measured τ, if there is one. A batch ends with its
longest response, and passes shorten as responses end: so τ takes lengths, not their mean (with
equal lengths, 96 responses were predicted at half of what the engine takes). The caching of prompts is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simrl.profile.compiled import kernel
from simrl.profile.drafted import Drafted
from simrl.profile.interpolation import Floats, interpolate
from simrl.profile.profile import TableProfile, Tables, pass_s, straggler_s
from simrl.profile.tau import MeasuredTau

CHUNK_PASSES = 16.0  # that a pass in their middle stands for
_SEED = 0


class DraftCosts(NamedTuple):
    """Costs of a method's drafts at a worker: seconds of a round and of a level, at numbers of
    sequences; and the largest batch that drafts at an acceptance rate of 0, 1, … 100 % of the
    drafted tokens."""

    sequences: Floats
    round_s: Floats
    step_s: Floats
    largest_batch: NDArray[np.int64]


_NO_DRAFTS = DraftCosts(np.zeros(1), np.zeros(1), np.zeros(1), np.full(1, 1 << 40))


class RolloutTimes:
    """τ of batches of responses; prompts have `prompt_tokens`.

    A worker decodes at most `max_num_seqs` responses at once, and no more than have room in
    `kv_tokens` (None: all); the others follow as these end. Lengths beyond `longest_tokens` are cut
    to it. A worker's data-parallel ranks have equal parts of a batch, which both bounds hold for.
    `costs` are of drafting (None: free, at any batch). A measured `tau` is what `table` reads.
    """

    def __init__(
        self,
        profile: TableProfile,
        longest_tokens: int,
        max_num_seqs: int | None = None,
        prompt_tokens: int = 0,
        kv_tokens: int | None = None,
        costs: DraftCosts | None = None,
        tau: MeasuredTau | None = None,
    ) -> None:
        self.tau = tau
        self._tables, self._ranks = profile.even, profile.metadata.dp
        self._longest = max(longest_tokens, 1)
        self._bounds = float(max_num_seqs or 1 << 40), float(kv_tokens or 1 << 40)
        self._prompt_tokens = float(prompt_tokens)
        self._costs = costs or _NO_DRAFTS
        self._equal_s: dict[tuple[int, int], float] = {}

    def batch_s(self, length_tokens: float, batch: int) -> float:
        """Return the seconds in which one worker generates `batch` responses of a length (rounded)
        at once, without drafts."""
        key = min(max(round(length_tokens), 1), self._longest), batch
        if key not in self._equal_s:
            self._equal_s[key] = self.responses_s(np.full(batch, key[0]))
        return self._equal_s[key]

    def responses_s(self, lengths_tokens: ArrayLike, drafted: Drafted = Drafted()) -> float:  # noqa: B008 (a constant)
        """Return the seconds in which one worker generates responses of these lengths, submitted at
        once in this order."""
        lengths = np.clip(np.rint(np.asarray(lengths_tokens, dtype=np.float64)), 1.0, self._longest)
        lengths = lengths[:: self._ranks].copy()
        costs, rate = (
            self._costs,
            (drafted.tokens - 1.0) / drafted.drafted if drafted.drafted else 1.0,
        )
        largest = int(costs.largest_batch[round(min(rate, 1.0) * (costs.largest_batch.size - 1))])
        return float(
            _responses_s(
                self._tables, lengths, self._prompt_tokens, *self._bounds, drafted, costs, largest
            )
        )

    def table(
        self,
        lengths_tokens: Sequence[ArrayLike],
        samples: Sequence[int],
        max_workers: int,
        drafted: Sequence[Drafted] | None = None,
        together: int = 1,
    ) -> Floats:
        """Return τ: the seconds in which k = 1 … `max_workers` workers generate `samples[i]` responses
        whose lengths are distributed like `lengths_tokens[i]`, with drafts that yield `drafted[i]`.
        Shape (lengths, max_workers). `together` responses, of a prompt, stay at one worker.

        The fullest worker holds m = ceil(samples / k) of them, in whole prompts; the j-th shortest of m responses
        drawn from n is expected at place j (n + 1) / (m + 1) of the n. Their order is drawn."""
        if self.tau is not None:
            return self.tau.table(lengths_tokens, samples, max_workers, drafted, together)
        table, seconds = (
            np.zeros((len(lengths_tokens), max_workers)),
            dict[tuple[int, int], float](),
        )
        for i, (lengths, held) in enumerate(zip(lengths_tokens, samples, strict=True)):
            known = np.sort(np.asarray(lengths, dtype=np.float64))
            for k in range(1, max_workers + 1):
                fullest = min(-(-held // (k * together)) * together, held)
                if (i, fullest) not in seconds:
                    places = np.arange(1, fullest + 1) * (known.size + 1) / (fullest + 1) - 1
                    drawn = np.random.default_rng(_SEED).permutation(
                        np.interp(places, np.arange(known.size), known)
                    )
                    seconds[i, fullest] = self.responses_s(
                        drawn, drafted[i] if drafted else Drafted()
                    )
                table[i, k - 1] = seconds[i, fullest]
        return table


@kernel
def _responses_s(
    tables: Tables,
    lengths: Floats,
    prompt_tokens: float,
    most: float,
    kv_tokens: float,
    drafted: Drafted,
    costs: DraftCosts,
    largest_batch: int,
) -> float:
    """Return the seconds to generate responses of `lengths`, admitted in this order while there is
    room; where it runs out, the last to come leaves, and later computes its context anew."""
    left, context = (
        lengths.copy(),
        np.full(lengths.size, prompt_tokens),
    )  # tokens to generate; tokens known
    # The running responses; the preempted ones, which begin again first.
    batch, again = np.empty(lengths.size, np.int64), np.empty(lengths.size, np.int64)
    running, waiting, preempted, held, seconds = 0, 0, 0, 0.0, 0.0
    while running or waiting < lengths.size or preempted:
        while running < most and (preempted or waiting < lengths.size):
            i = again[preempted - 1] if preempted else waiting
            if running and held + context[i] + 1.0 > kv_tokens:
                break
            preempted, waiting = (preempted - 1, waiting) if preempted else (preempted, waiting + 1)
            batch[running] = i
            held += context[i]
            running += 1
            if context[i]:  # computed next to the others' tokens, in a pass that there is anyway
                alone_s = pass_s(tables, context[i], 1.0, context[i], context[i] ** 2 / 2, 0.0, 0.0)
                seconds += max(alone_s - pass_s(tables, 1.0, 1.0, 0.0, 0.0, 1.0, context[i]), 0.0)
        while running > 1 and held + running > kv_tokens:
            running -= 1
            again[preempted] = batch[running]
            held -= context[batch[running]]
            preempted += 1
        b, yields, drafts = float(running), 1.0, 0.0
        if running <= largest_batch:
            yields, drafts = drafted.tokens, drafted.drafted
        passes = min(np.ceil(left[batch[:running]].min() / yields), CHUNK_PASSES)
        if held + b * yields * passes > kv_tokens and running > 1:
            passes = max(np.floor((kv_tokens - held) / (b * yields)), 1.0)
        kv = held + b * ((passes - 1.0) * yields / 2 + 1.0)
        straggling_s = (
            straggler_s(tables, context[batch[:running]])
            if tables.straggler_sequences.size
            else 0.0
        )
        positions = b * (1.0 + drafts)
        each_s = pass_s(tables, positions, positions, 0.0, 0.0, b, kv, straggling_s)
        if drafts:
            each_s += interpolate(costs.sequences, costs.round_s, b)
            each_s += drafts * interpolate(costs.sequences, costs.step_s, b)
        seconds += passes * each_s
        kept, held = 0, 0.0
        for i in batch[:running]:
            left[i] -= passes * yields
            context[i] += passes * yields
            if left[i] > 1e-9:
                batch[kept] = i
                held += context[i]
                kept += 1
        running = kept
    return seconds
