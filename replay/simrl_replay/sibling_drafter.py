"""The sibling drafter for running responses, over tokens as they come: what
`simrl.speculation.siblings` has compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from simrl.speculation.drafter import Tokens
from simrl.speculation.matching import LONGEST, SHORTEST
from simrl.speculation.siblings import LOOKS_BACK

MOST_GROUPS = 1024  # then the oldest of which nothing runs is forgotten


@dataclass
class Text:
    """A text as far as it is known, and the places that follow each run of its tokens, by the
    run."""

    ids: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def extend(self, ids: Sequence[int], shortest: int) -> None:
        for token in ids:
            if len(self.ids) >= shortest:  # something stands after them now
                self.places.setdefault(tuple(self.ids[-shortest:]), []).append(len(self.ids))
            self.ids.append(token)

    def agreement(self, place: int, ids: Sequence[int], shortest: int, longest: int) -> int:
        """Return how many tokens before `place` are the last ones of `ids`: at least `shortest`,
        which are known to be."""
        length, furthest = shortest, min(longest, place, len(ids))
        while length < furthest and self.ids[place - length - 1] == ids[-length - 1]:
            length += 1
        return length


class SiblingDrafter:
    """A `Drafter` from the group's other responses, as far as they are known.

    The requests of a `prompt_id` are its group, in the order in which they started; finished
    responses stay in it. `own` drafts from the response's own text too.
    """

    def __init__(self, own: bool = False, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        self._own, self._shortest, self._longest = own, shortest, longest
        self._texts: dict[int, list[Text]] = {}  # by prompt
        self._running: dict[int, tuple[int, Text]] = {}

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        text = Text()
        self._running[request] = prompt_id, text
        self._texts.setdefault(prompt_id, []).append(text)
        if len(self._texts) > MOST_GROUPS:
            running = {each for each, _ in self._running.values()}
            oldest = next((each for each in self._texts if each not in running), None)
            if oldest is not None:
                del self._texts[oldest]

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [
            self._draft(*self._running[r], most)
            for r, most in zip(requests, most_tokens, strict=True)
        ]

    def observe(self, request: int, token_ids: Tokens) -> None:
        self._running[request][1].extend(token_ids.tolist(), self._shortest)

    def stop_request(self, request: int) -> None:
        del self._running[request]

    def _draft(self, prompt_id: int, text: Text, most_tokens: int) -> Tokens:
        ids = text.ids
        key = tuple(ids[-self._shortest :])
        best, best_length, source = 0, 0, ids
        for sibling in self._texts.get(prompt_id, ()):
            if sibling is text and not self._own:
                continue
            for place in reversed(sibling.places.get(key, ())[-LOOKS_BACK:]):
                length = sibling.agreement(place, ids, self._shortest, self._longest)
                if length > best_length:
                    best, best_length, source = place, length, sibling.ids
        return np.array(source[best : best + most_tokens] if best_length else [], dtype=np.int32)
