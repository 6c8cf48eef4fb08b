"""The drafter protocol, and the drafts of one over recorded responses.

Invariant: a drafter knows a prompt, finished responses that it was given, and the tokens of a
running response that it was given (`observe`); so its drafts depend on nothing that is yet to be
generated. It drafts inside an engine and teacher-forced over a trace (`AcceptRuns`), and never sees
a clock. The first w tokens of a draft do not depend on the number asked for, so windows, gates and
bandits can cut recorded drafts in a simulation without drafting again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
MOST_DRAFT_TOKENS = 32  # HistoSpec's largest window (RhymeRL §5.4); `AcceptRuns` hold 255 at most


class Drafter(Protocol):
    """Proposes the next tokens of running responses. A request is an integer that the caller chose,
    unique while it runs."""

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        """Begin a response to this prompt. `prompt_ids` are the prompt's tokens where they are
        known, shape (n,)."""

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        """Return a draft for each request, of at most `most_tokens` each; empty where there is
        nothing to propose."""

    def observe(self, request: int, token_ids: Tokens) -> None:
        """Continue a response with these tokens: the accepted ones, and the token that the pass
        itself yields."""

    def stop_request(self, request: int) -> None:
        """End a response here: it is over, or runs elsewhere from now on."""


class AcceptRuns(NamedTuple):
    """The drafts of a drafter with a fixed history at every position of recorded responses.

    `first[row]` is where the row of the trace begins in the other two, -1 where the drafter has
    nothing for it; shape (rows,). Position `first[row] + p` is the draft of a response with p of
    its tokens, p from 0 to response_tokens - 1: `drafted` tokens, of which the recorded response
    confirms the first `accepted`. Both uint8; accepted <= drafted, and accepted <= the tokens that
    are left.
    """

    first: NDArray[np.int64]
    drafted: NDArray[np.uint8]
    accepted: NDArray[np.uint8]
