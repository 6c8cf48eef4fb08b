"""N-gram drafter for running responses, from each one's prompt and own text (rules: `simrl.speculation.ngram`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simrl.speculation.drafter import Tokens
from simrl.speculation.ngram import DEFAULT, NgramRule

_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


class NgramDrafter:
    """A `Drafter` from each response's prompt and own text."""

    def __init__(self, rule: NgramRule = DEFAULT) -> None:
        self._rule = rule
        self._texts: dict[int, list[int]] = {}
        self._places: dict[int, dict[tuple[int, ...], list[int]]] = {}

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        self._texts[request], self._places[request] = [], {}
        if prompt_ids is not None:
            self.observe(request, prompt_ids)

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [self._draft(request, most) for request, most in zip(requests, most_tokens, strict=True)]

    def observe(self, request: int, token_ids: Tokens) -> None:
        text, places, shortest = self._texts[request], self._places[request], self._rule.shortest
        for token in token_ids.tolist():
            if len(text) >= shortest:  # they have a continuation now
                places.setdefault(tuple(text[-shortest:]), []).append(len(text))
            text.append(token)

    def stop_request(self, request: int) -> None:
        del self._texts[request], self._places[request]

    def _draft(self, request: int, most_tokens: int) -> Tokens:
        text, rule = self._texts[request], self._rule
        here = len(text)
        if here < rule.shortest:
            return _NO_TOKENS
        places = self._places[request].get(tuple(text[-rule.shortest :]), [])
        best, best_length = here, 0
        for place in places if rule.match == "earliest" else reversed(places):
            length, furthest = rule.shortest, min(rule.longest, place)
            while length < furthest and text[place - length - 1] == text[here - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            if best_length == rule.longest:
                break
        return np.array(text[best : best + most_tokens], dtype=np.int32)
