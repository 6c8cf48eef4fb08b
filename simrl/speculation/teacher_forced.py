"""Any drafter over a recorded trace: what it would have drafted at every position, and how much of that was right.

Invariant: a draft for position p is made when the drafter has been told the p tokens before it, and no more. Each response has
a drafter of its own, so that what it is told of one is not known in another that runs beside it.

This is for drafters that come from elsewhere, a call a token: a million tokens take some ten seconds. simrl's own text
drafters have the same compiled (`ngram_runs`, `history_runs`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simrl.errors import InputError
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns, Drafter
from simrl.speculation.matching import token_ids
from simrl.trace import Trace


def drafter_runs(trace: Trace, make_drafter: Callable[[], Drafter], most_tokens: int = MOST_DRAFT_TOKENS) -> AcceptRuns:
    """What the drafters that `make_drafter` makes would do on a trace's responses, drafting up to `most_tokens` each time.

    Raises `InputError` for a trace without token ids, and for a draft that is longer than was asked for.
    """
    ids, first = token_ids(trace)
    drafted, accepted = np.zeros((2, len(ids)), dtype=np.uint8)
    prompts = trace.column("prompt_id").tolist()
    for row, prompt_id in enumerate(prompts):
        begin, end = int(first[row]), int(first[row + 1])
        drafter = make_drafter()
        drafter.start_request(row, prompt_id)
        for here in range(begin, end):
            (draft,) = drafter.propose([row], [most_tokens])
            if len(draft) > most_tokens:
                raise InputError(
                    f"drafter {type(drafter).__name__}: drafts {len(draft)} tokens where at most {most_tokens} are asked "
                    "for; cut them"
                )
            drafted[here] = len(draft)
            wrong = np.flatnonzero(draft[: end - here] != ids[here : here + len(draft)][: end - here])
            accepted[here] = wrong[0] if len(wrong) else min(len(draft), end - here)
            drafter.observe(row, ids[here : here + 1])
        drafter.stop_request(row)
    return AcceptRuns(first[:-1].copy(), drafted, accepted)
