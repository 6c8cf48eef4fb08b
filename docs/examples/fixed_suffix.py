"""A drafter: the tokens that followed an earlier occurrence of the last n tokens in the response, for one fixed n.

Invariant: a draft is read from what the response has so far; nothing of one response is kept for another.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import Field, validate_call

from simrl.speculation.drafter import Tokens
from simrl.speculation.methods import Speculation
from simrl.speculation.windows import Fixed


class FixedSuffix:
    """A `simrl.speculation.drafter.Drafter`: four methods, each about a request, an integer its caller chose."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._text: dict[int, list[int]] = {}
        self._after: dict[
            int, dict[tuple[int, ...], int]
        ] = {}  # where the text went on after n tokens, the latest place

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        self._text[request], self._after[request] = [], {}

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [
            self._draft(request, most) for request, most in zip(requests, most_tokens, strict=True)
        ]

    def observe(self, request: int, token_ids: Tokens) -> None:
        text, after = self._text[request], self._after[request]
        for token in token_ids.tolist():
            if len(text) >= self._n:
                after[tuple(text[-self._n :])] = len(text)
            text.append(token)

    def stop_request(self, request: int) -> None:
        del self._text[request], self._after[request]

    def _draft(self, request: int, most_tokens: int) -> Tokens:
        text = self._text[request]
        place = self._after[request].get(tuple(text[-self._n :]), len(text))
        return np.array(text[place : place + most_tokens], dtype=np.int32)


@validate_call
def fixed_suffix(
    n: Annotated[int, Field(ge=1, le=64)] = 4, window_tokens: Annotated[int, Field(ge=1, le=32)] = 4
) -> Speculation:
    """Drafts up to `window_tokens` tokens that followed the last n when these stood in the response before.

    A longer suffix is found less often and is right more often. Drafting costs what simrl's look-ups in text cost.
    Not modelled: matches in the prompt, whose tokens a trace does not have.
    """
    return Speculation(
        name="fixed_suffix",
        drafter="own",
        paper="none",
        window=Fixed(tokens=window_tokens),
        make_drafter=partial(FixedSuffix, n),
    )
