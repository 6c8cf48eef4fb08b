"""The yield of drafts for a response, as the times of rollouts count it."""

from typing import NamedTuple


class Drafted(NamedTuple):
    """Yield of drafts for some responses: tokens of each that a pass yielded, and tokens drafted
    for it."""

    tokens: float = 1.0
    drafted: float = 0.0
