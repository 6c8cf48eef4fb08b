"""LengthHistory: the lengths of each prompt's responses in earlier epochs.

Invariant: it holds the lengths of finished rollouts only, so a rule that reads it cannot know a
response before it is generated. An epoch counts for a prompt once all its responses of that epoch
are finished, as short responses finish first.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample


class LengthHistory:
    """Response lengths by prompt and epoch, as responses finish."""

    def __init__(self) -> None:
        self._lengths: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._unfinished: dict[tuple[int, int], int] = defaultdict(int)  # by prompt and epoch
        # Not yet in the dictionaries, which most schedules never read: prompt and epoch of expected
        # responses; prompt, epoch and tokens of observed ones, -1 for an unfinished one.
        self._expected = array("q")
        self._observed = array("q")

    def expect(self, samples: Iterable[Sample]) -> None:
        """Expect responses."""
        self._expected.extend(
            number for sample in samples for number in (sample.prompt_id, sample.epoch)
        )

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        """Record finished responses, and stop expecting unfinished ones."""
        for rollout in rollouts:
            sample = rollout.sample
            self._observed.extend(
                (sample.prompt_id, sample.epoch, rollout.tokens if rollout.done else -1)
            )

    def _take_in(self) -> None:
        for prompt_id, epoch in zip(*[iter(self._expected)] * 2, strict=True):
            self._unfinished[prompt_id, epoch] += 1
        for prompt_id, epoch, tokens in zip(*[iter(self._observed)] * 3, strict=True):
            if tokens >= 0:
                self._lengths[prompt_id][epoch].append(tokens)
            self._unfinished[prompt_id, epoch] -= 1
        self._expected, self._observed = array("q"), array("q")

    def lengths(self, prompt_id: int, before_epoch: int) -> NDArray[np.int64]:
        """Return the lengths of the prompt's responses in its latest complete epoch before
        `before_epoch`; none without one."""
        self._take_in()
        epochs = self._lengths.get(prompt_id, {})
        earlier = [
            epoch
            for epoch in epochs
            if epoch < before_epoch and self._unfinished[prompt_id, epoch] <= 0
        ]
        return np.array(epochs[max(earlier)] if earlier else [], dtype=np.int64)

    def median(self, prompt_id: int, before_epoch: int) -> float:
        """Return the median of `lengths`; NaN if there are none."""
        lengths = self.lengths(prompt_id, before_epoch)
        return float(np.median(lengths)) if lengths.size else np.nan

    def medians(self, epoch: int) -> dict[int, float]:
        """Return the median response of each prompt for which this epoch is complete."""
        self._take_in()
        return {
            prompt: float(np.median(epochs[epoch]))
            for prompt, epochs in self._lengths.items()
            if epochs.get(epoch) and self._unfinished[prompt, epoch] <= 0
        }
