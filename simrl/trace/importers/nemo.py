"""NeMo-RL: the `train_data_step{N}.jsonl` that its trainers log, a padded sample a line.

Every field is a batch of one. `token_loss_mask` is 1 for the tokens that the model generated: those
before the first 1 are the prompt, the 0s between are what the environment said.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from simrl.trace.importers import rows, tabular, turns


def row(record: Mapping[str, Any], place: str, file: Path, *_: Any) -> rows.Row:
    """Return a sample as a row; a prompt is its token ids, and the ids of the response are kept."""
    fields = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in record.items()
    }
    rows.field(fields, "token_loss_mask", place)  # a distillation's data lack it
    tokens = rows.token_ids(fields, "token_ids", place)
    mask = rows.mask(fields, ("token_loss_mask",), place) or []
    length = min(rows.integer(fields, "input_lengths", place), len(tokens), len(mask))
    prompt_tokens = len([*takewhile(lambda generated: not generated, mask[:length])])
    split, generated = turns.by_mask(mask[prompt_tokens:length])
    reward = "filtered_rewards" if "filtered_rewards" in fields else "rewards"
    return rows.Row(
        place,
        tabular.step_of({}, file) or 0,
        tokens[:prompt_tokens].tobytes(),
        prompt_tokens,
        reward=rows.number({reward: None, **fields}, reward, place),
        response_ids=tokens[prompt_tokens:length][generated],
        **split.fields(),
    )
