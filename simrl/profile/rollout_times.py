"""RhymeRL's τ (arXiv 2508.18588, §6.4): the seconds in which workers generate responses of equal length, started at once.

Invariant: no time here is measured; each is the sum of a profile's decode passes, as a profiling run before the training
would know them. Prefill, drafts of different lengths and stragglers are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simrl.profile.interpolation import interpolate4
from simrl.profile.profile import TableProfile

Floats = NDArray[np.float64]


class RolloutTimes:
    """τ of many lengths: the running sum of a batch's passes is kept, so that a length costs a look-up.

    A pass yields `accept_length` tokens of each response; prompts have `prompt_tokens`. More than `max_num_seqs` equal
    responses at a worker run one full batch after another: they end together. Lengths beyond `longest_tokens` are cut to it.
    A worker's data-parallel ranks have equal parts of a batch, which `max_num_seqs` bounds at each.
    """

    def __init__(
        self,
        profile: TableProfile,
        longest_tokens: int,
        max_num_seqs: int | None = None,
        prompt_tokens: int = 0,
        accept_length: float = 1.0,
    ) -> None:
        self._profile = profile
        self._positions = np.arange(0.0, max(longest_tokens, 1), accept_length)
        self._ranks = profile.metadata.dp
        self._max_num_seqs = max_num_seqs and max_num_seqs * self._ranks
        self._prompt_tokens = prompt_tokens
        self._sums: dict[int, Floats] = {}

    def batch_s(self, length_tokens: float, batch: int) -> float:
        """Return the seconds in which one worker generates `batch` responses of a length (rounded) at once."""
        if batch not in self._sums:
            t, own = self._profile.even, -(-batch // self._ranks)
            row = np.array([interpolate4(*t[4:9], (0.0, 0.0, float(own), kv)) for kv in t.decode_kv_tokens])
            attention = np.interp(self._prompt_tokens + self._positions + 1, t.decode_kv_tokens, row)
            fixed = np.interp(own, t.dense_tokens, t.dense_s) + np.interp(own, t.sampled_sequences, t.sampled_s)
            self._sums[batch] = np.cumsum(np.maximum(attention + fixed, t.least_pass_s) + t.between_passes_s)
        passes = int(np.searchsorted(self._positions, max(round(length_tokens), 1)))
        return float(self._sums[batch][passes - 1])

    def table(self, lengths_tokens: Sequence[float], samples: Sequence[int], max_workers: int) -> Floats:
        """Return the seconds in which k = 1 … `max_workers` workers generate `samples[i]` responses of `lengths_tokens[i]`; the
        fullest worker holds ceil(samples / k) of them. Shape (lengths, max_workers)."""
        table = np.zeros((len(lengths_tokens), max_workers))
        for i, (tokens, held) in enumerate(zip(lengths_tokens, samples, strict=True)):
            for k in range(1, max_workers + 1):
                fullest = -(-held // k)
                most = self._max_num_seqs or fullest
                for batch, times in ((most, fullest // most), (fullest % most, 1)):
                    table[i, k - 1] += times * self.batch_s(tokens, batch) if batch and times else 0.0
        return table
