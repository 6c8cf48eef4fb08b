"""AReaL: the trajectories that `dump_to_file` writes under `rollout/{version}/{task_id}.jsonl`.

A file is one task: the samples of one prompt, requested together. Its folder is the newest weight
version that generated any of them. AReaL counted the tokens itself: response = seqlen - prompt_len.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simrl.errors import refuse
from simrl.trace.importers import rows
from simrl.trace.importers.turns import Turns, turns_of

ANY_INTEGER = -(2**31)  # AReaL gives version -1 to tokens that no engine generated


def files(path: Path) -> list[Path]:
    """Return the files of a `rollout` folder, of one `{version}` folder of it, or one file,
    versions and tasks as numbers."""
    below = [path] if path.is_file() else [*path.glob("*.jsonl"), *path.glob("*/*.jsonl")]
    unique = {
        Path(os.path.realpath(file)) for file in below
    }  # a link to itself cannot be read, later
    strangers = sorted(file for file in unique if not rows.VERSION.fullmatch(file.parent.name))
    strange = f"{strangers[0].parent.name}/{strangers[0].name}" if strangers else "no .jsonl"
    refuse(
        (
            strangers or not unique,
            f"{path}: {strange} in place of {{version}}/{{task_id}}.jsonl; name AReaL's rollout folder, versions and all",
        )
    )
    return sorted(unique, key=lambda file: (int(file.parent.name), len(file.name), file.name))


def row(record: Mapping[str, Any], place: str, file: Path, *_: Any) -> rows.Row:
    """Return a sample as a row. `step` is the version folder: the training step that used a sample
    is not recorded, only the version that finished it. `policy_version` is `head_version`, the
    version that began it.

    Segments of role "context" come from an environment; the generated ones between them are the
    turns of the response. Context before the first turn belongs to the prompt, context after the
    last is left out. The environment's time is not recorded.
    """
    step = int(file.parent.name)
    prompt_tokens = rows.integer(record, "prompt_len", place, low=1)
    response_tokens = rows.integer(record, "seqlen", place, low=1) - prompt_tokens
    head, tail = (
        rows.integer(record, key, place, low=ANY_INTEGER)
        for key in ("head_version", "tail_version")
    )
    refuse(
        (
            response_tokens < 0,
            f"{place}: seqlen is {prompt_tokens + response_tokens}, below prompt_len {prompt_tokens}; "
            "it counts prompt and response",
        ),
        (
            not head <= tail <= step,
            f"{place}: head_version {head}, tail_version {tail} in folder {step}; they must not fall in this order",
        ),
    )
    turns = _turns(record, response_tokens, place)
    return rows.Row(
        place,
        step,
        rows.text(record, "prompt", place),
        prompt_tokens + turns.before,
        reward=rows.number(record, "reward", place),
        policy_version=head if head >= 0 else None,
        **turns.fields(),
    )


def _turns(record: Mapping[str, Any], response_tokens: int, place: str) -> Turns:
    """Return the turns of a record. Without segments, everything after the prompt is one turn."""
    segments = rows.items(
        record, "segments", place, lambda segment: isinstance(segment, dict), "a list of objects"
    )
    parts = [(rows.field(s, "role", place), rows.integer(s, "len", place)) for s in segments]
    parts = [(role, tokens) for role, tokens in parts if role != "prompt" and tokens]
    if not any(role != "context" for role, _ in parts):
        return Turns([response_tokens], [], 0)
    total = sum(tokens for _, tokens in parts)
    refuse(
        (
            total != response_tokens,
            f"{place}: its segments have {total} tokens after the prompt, seqlen and prompt_len say {response_tokens}; "
            "they must agree",
        )
    )
    return turns_of((role != "context", tokens) for role, tokens in parts)
