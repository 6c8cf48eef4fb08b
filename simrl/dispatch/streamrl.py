"""StreamRL's dispatch (arXiv 2504.15930): prompts expected to be long have workers of their own,
which hold fewer samples.

Invariant: lengths are expected from the history alone; prompts are ranked by the median of their
last epoch (the paper trains a ranker on such lengths). Without history, as in the first epoch, and
for samples that come while others are at work, the worker with the fewest samples is taken.

The number of workers for the longest share of a batch's prompts is the one with the shortest
predicted makespan, 0 included. The paper uses a profiled latency per token; here a forward pass
over b sequences takes 1 + b / `doubling_batch` units, so that a worker takes the longest of its
responses (of the last epoch) + all of their tokens (each prompt's mean) / `doubling_batch`. Among
the workers of either kind, longest processing time first: each sample to the worker with the fewest
expected tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.dispatch.placement import Ints, least_requests
from simrl.runtime.history import LengthHistory
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SkewnessAware:
    """The placement. `dedicated_share` of the workers are for the long prompts (None: the share
    predicted to be best)."""

    long_share: float = 0.2
    dedicated_share: float | None = None
    doubling_batch: int = 64

    def __call__(
        self, samples: Sequence[Sample], unfinished: Ints, placed: int, history: LengthHistory
    ) -> list[int]:
        expected = Expected.of(samples, history)
        if expected is None or unfinished.any():
            return least_requests(samples, unfinished, placed, history)
        is_long, workers = self.long_prompts(samples, expected.median), unfinished.size
        dedicated = self.dedicated_workers(expected, is_long, workers)
        if dedicated == 0:
            return list(map(int, share_out(expected.mean, workers)))
        places = np.empty(len(samples), dtype=np.int64)
        places[~is_long] = share_out(expected.mean[~is_long], workers - dedicated)
        places[is_long] = workers - dedicated + share_out(expected.mean[is_long], dedicated)
        return list(map(int, places))

    def long_prompts(self, samples: Sequence[Sample], tokens: Floats) -> NDArray[np.bool_]:
        """Return whether each sample's prompt is one of the longest; equally long ones in the order
        of the samples."""
        of_prompt = {
            sample.prompt_id: length
            for sample, length in zip(samples, tokens.tolist(), strict=True)
        }
        ranked = sorted(of_prompt, key=lambda prompt: -of_prompt[prompt])
        longest = set(ranked[: round(self.long_share * len(ranked))])
        return np.array([sample.prompt_id in longest for sample in samples])

    def dedicated_workers(
        self, expected: Expected, is_long: NDArray[np.bool_], workers: int
    ) -> int:
        """Return the number of workers for the long prompts; of equally good numbers the smallest.
        0: all share all workers."""
        if workers == 1 or not is_long.any() or is_long.all():
            return 0
        if self.dedicated_share is not None:
            return min(max(round(self.dedicated_share * workers), 1), workers - 1)
        mixed = self.makespan(expected, np.array([workers]))
        numbers = np.arange(1, workers)
        long, short = expected.only(is_long), expected.only(~is_long)
        apart = np.maximum(self.makespan(long, numbers), self.makespan(short, workers - numbers))
        return int(np.concatenate([mixed, apart]).argmin())

    def makespan(self, expected: Expected, workers: Ints) -> Floats:
        """Predict the makespan for each number of workers, in passes over one sequence: all begin
        at once, evenly shared."""
        return float(expected.longest.max()) + float(expected.mean.sum()) / (
            workers * self.doubling_batch
        )


class Expected(NamedTuple):
    """Tokens of the last epoch's responses to the prompt of each sample; the mean over the others
    where it had none."""

    median: Floats
    mean: Floats
    longest: Floats

    @classmethod
    def of(cls, samples: Sequence[Sample], history: LengthHistory) -> Expected | None:
        """Return the expected tokens; None if no prompt had responses."""
        prompts = dict.fromkeys((sample.prompt_id, sample.epoch) for sample in samples)
        known = {
            prompt: lengths for prompt in prompts if (lengths := history.lengths(*prompt)).size
        }
        if not known:
            return None
        figures = {prompt: (np.median(n), n.mean(), n.max()) for prompt, n in known.items()}
        unknown = tuple(np.mean(list(figures.values()), axis=0))
        table = np.array(
            [figures.get((sample.prompt_id, sample.epoch), unknown) for sample in samples],
            dtype=np.float64,
        )
        return cls(*table.T)

    def only(self, which: NDArray[np.bool_]) -> Expected:
        return Expected(*(column[which] for column in self))


def share_out(tokens: Floats, workers: int) -> Ints:
    """Return a worker for each length: in falling order, the worker with the fewest tokens so
    far."""
    places = np.empty(tokens.size, dtype=np.int64)
    loads = [(0.0, worker) for worker in range(workers)]
    for i in np.argsort(-tokens, kind="stable").tolist():
        load, worker = loads[0]
        places[i] = worker
        heapq.heapreplace(loads, (load + float(tokens[i]), worker))
    return places


class LongestFirst:
    """The queue: the longest expected first, equal ones in the order of arrival. A prompt without
    history goes first: it may be long."""

    def __init__(self, history: LengthHistory) -> None:
        self._history = history
        self._heap: list[tuple[float, int, Sample]] = []
        self._pushed = 0
        self._expected: dict[tuple[int, int], float] = {}

    def push(self, sample: Sample, partial: Rollout | None) -> None:
        key = (sample.prompt_id, sample.epoch)
        if key not in self._expected:
            median = self._history.median(*key)
            self._expected[key] = math.inf if math.isnan(median) else median
        self._pushed += 1
        heapq.heappush(self._heap, (-self._expected[key], self._pushed, sample))

    def pop(self) -> Sample:
        return heapq.heappop(self._heap)[-1]

    def observe(self, rollout: Rollout) -> None:
        pass

    def __len__(self) -> int:
        return len(self._heap)
