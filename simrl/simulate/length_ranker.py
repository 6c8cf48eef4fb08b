"""A length ranker: it predicts the lengths of responses, as a trained model would, with a stated
accuracy (StreamRL).

Invariant: only a dispatch rule that asks for one (`Dispatch.ranker_accuracy`) gets it; others know
finished responses alone.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from simrl.runtime.history import LengthHistory
from simrl.speculation.draws import mixed, uniform
from simrl.trace.trace import Trace

_RANKED = -3  # index of the draw that decides whether a ranker knows a prompt


class RankedLengths(LengthHistory):
    """A ranker in place of a history: for a prompt and an epoch, it returns the lengths of this
    very epoch.

    `accuracy` is the share of prompts that it knows, drawn for each prompt and epoch; the others of
    a step are taken for one another. 1 is an oracle, 0 knows nothing but the lengths of the step.
    """

    def __init__(self, trace: Trace, accuracy: float, seed: int) -> None:
        super().__init__()
        names = ("step", "prompt_id", "epoch", "response_tokens")
        step, prompt, epoch, tokens = (trace.column(name).astype(np.int64) for name in names)
        self._epochs = int(epoch.max()) + 1
        self._ranked: dict[tuple[int, int], NDArray[np.int64]] = {}
        true: dict[int, dict[tuple[int, int], NDArray[np.int64]]] = defaultdict(dict)  # by step
        for first, lengths in zip(
            trace.group_starts.tolist(), np.split(tokens, trace.group_starts[1:]), strict=True
        ):
            true[int(step[first])][int(prompt[first]), int(epoch[first])] = lengths
        for of_step in true.values():
            draws = {key: mixed(mixed(seed, key[0]), key[1]) for key in of_step}
            wrong = sorted(
                (key for key in draws if uniform(draws[key], _RANKED) >= accuracy),
                key=lambda key: draws[key],
            )
            others = [of_step[key] for key in wrong[1:] + wrong[:1]]
            self._ranked |= of_step | dict(zip(wrong, others, strict=True))

    def lengths(self, prompt_id: int, before_epoch: int) -> NDArray[np.int64]:
        """Return the tokens that the prompt's responses in this epoch are expected to have."""
        return self._ranked.get((prompt_id, before_epoch % self._epochs), np.zeros(0, np.int64))
