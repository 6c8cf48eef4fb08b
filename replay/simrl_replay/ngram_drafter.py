"""N-gram drafter for running responses, from each one's prompt and own text (rules:
`simrl.speculation.ngram`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simrl.speculation.drafter import Tokens
from simrl.speculation.matching import LONGEST, SHORTEST
from simrl_replay.sibling_drafter import Text


class NgramDrafter:
    """A `Drafter` from each response's prompt and own text."""

    def __init__(self) -> None:
        self._texts: dict[int, Text] = {}

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        self._texts[request] = Text()
        if prompt_ids is not None:
            self.observe(request, prompt_ids)

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [
            self._draft(self._texts[r], most) for r, most in zip(requests, most_tokens, strict=True)
        ]

    def observe(self, request: int, token_ids: Tokens) -> None:
        self._texts[request].extend(token_ids.tolist(), SHORTEST)

    def stop_request(self, request: int) -> None:
        del self._texts[request]

    def _draft(self, text: Text, most_tokens: int) -> Tokens:
        ids = text.ids
        best, best_length = len(ids), 0
        for place in text.places.get(tuple(ids[-SHORTEST:]), []):
            length = text.agreement(place, ids, SHORTEST, LONGEST)
            if length > best_length:
                best, best_length = place, length
            if best_length == LONGEST:
                break
        return np.array(ids[best : best + most_tokens], dtype=np.int32)
