"""Small traces with token ids, for the tests of drafters."""

from collections.abc import Sequence

import numpy as np

from simrl.speculation.choices import HistoryRule
from simrl.speculation.drafter import Tokens
from simrl.speculation.history_index import PAPER, find_draft
from simrl.trace.trace import Trace, TraceMetadata

METADATA = TraceMetadata(
    name="ids", kind="synthetic", source="a test", tokenizer="numbers", cap_tokens=10_000
)


def trace_of(groups: dict[tuple[int, int], Sequence[Sequence[int]]]) -> Trace:
    """Responses by (epoch, prompt); an epoch is a step."""
    rows = [
        (e, p, s, list(ids))
        for (e, p), group in sorted(groups.items())
        for s, ids in enumerate(group)
    ]
    epoch, prompt, sample, ids = zip(*rows, strict=True)
    return Trace.from_columns(
        {
            "step": epoch,
            "epoch": epoch,
            "prompt_id": prompt,
            "sample": sample,
            "prompt_tokens": [4] * len(rows),
            "response_tokens": [len(i) for i in ids],
            "response_ids": ids,
        },
        METADATA,
    )


def random_groups(seed: int, epochs: int = 1, prompts: int = 3, group: int = 4) -> Trace:
    """Responses made of a few phrases, so that much of one stands in another."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 30, rng.integers(4, 20)) for _ in range(12)]

    def response() -> list[int]:
        return np.concatenate(
            [phrases[i] for i in rng.integers(0, 12, rng.integers(2, 15))]
        ).tolist()

    return trace_of(
        {(e, p): [response() for _ in range(group)] for e in range(epochs) for p in range(prompts)}
    )


def draft(index: Tokens, tail: Tokens, most_tokens: int, rule: HistoryRule = PAPER) -> Tokens:
    """What a history drafts after `tail`, a response's last tokens."""
    tail = np.ascontiguousarray(tail, dtype=np.int32)
    start, tokens = find_draft(index, tail, 0, len(tail), most_tokens, rule.compiled)
    return index[start : start + tokens]
