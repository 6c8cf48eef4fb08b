"""What a drafter is, and what one did on recorded responses.

Invariant: a drafter knows a prompt, what it was told of responses that are over, and the tokens of a running response that it
was told of (`observe`); so what it proposes depends on nothing that is yet to be generated. The same object drafts inside an
engine and teacher-forced over a trace. It never sees a clock.

`AcceptRuns` is the second use: for every position of a recorded response, how long the draft from there is, and how much of it
the recorded tokens confirm. A window cuts both (the first w tokens of a draft do not depend on how many more were asked for),
so windows, gates and bandits can act on it in a simulation without drafting again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
MOST_DRAFT_TOKENS = 32  # HistoSpec's largest window (RhymeRL §5.4); what `AcceptRuns` hold at most is 255


class Drafter(Protocol):
    """Proposes what comes next in running responses. A request is any integer its caller chose, unique while it runs."""

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        """A response to this prompt begins. `prompt_ids` are the prompt's tokens where they are known, shape (n,)."""
        ...

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        """A draft for each request, of at most so many tokens each; an empty one where there is nothing to propose."""
        ...

    def observe(self, request: int, token_ids: Tokens) -> None:
        """The response goes on with these tokens: what was accepted, and the token that the pass yields besides."""
        ...

    def stop_request(self, request: int) -> None:
        """The response is over, or runs elsewhere from now on."""
        ...


class AcceptRuns(NamedTuple):
    """What a drafter with a fixed history would do at every position of recorded responses.

    `first[row]` is where the row of the trace begins in the other two, -1 where the drafter has nothing for it; shape (rows,).
    At `first[row] + p` stands what is drafted when the response has p of its tokens, p from 0 to response_tokens - 1:
    `drafted` tokens, of which the recorded response confirms the first `accepted`. Both uint8, accepted <= drafted, and
    accepted <= the tokens that are left.
    """

    first: NDArray[np.int64]
    drafted: NDArray[np.uint8]
    accepted: NDArray[np.uint8]
