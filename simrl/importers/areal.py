"""AReaL: the trajectories that `dump_to_file` writes under `rollout/{version}/{task_id}.jsonl`.

A file is one task: the samples of one prompt that were asked for together. Its folder is the newest weight version
that any of them was generated with. AReaL counted the tokens itself: response = seqlen - prompt_len.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.importers.rows import Row, existing, field, integer, number, read_jsonl, shown, text, trace_from_rows
from simrl.trace import Trace

VERSION = re.compile(r"[0-9]{1,9}")
ANY_INTEGER = -(2**31)  # AReaL gives version -1 to tokens that no engine generated


def import_areal(
    path: str | Path, *, cap_tokens: int | None = None, name: str | None = None, licence: str = "unknown"
) -> Trace:
    """A trace from a `rollout` folder, one `{version}` folder of it, or one `{version}/{task_id}.jsonl`.

    `step` is the version folder: which training step used a sample is not recorded, only the version that it was
    finished with. `policy_version` is `head_version`, the one that it was begun with. Prompts are told apart by their
    text. `cap_tokens` is the run's `gconfig.max_new_tokens`; None takes the largest response for it.

    Where a record has segments, those of role "context" are what an environment said: the response is what was generated
    between them, as turns; context before the first turn belongs to the prompt, context after the last is left out. How long
    the environment took is not recorded.

    Raises `InputError` for a folder without such files, and for fields that are missing, mistyped or contradictory.
    """
    path = existing(path)
    context_tokens, in_turns = 0, 0
    rows: list[Row] = []
    for file in _files(path):
        step = int(file.parent.name)
        for place, record in read_jsonl(file):
            row = _row(record, step, place)
            rows.append(row)
            context_tokens += sum(row.turn_observation_tokens or ())
            in_turns += row.turn_tokens is not None
    notes = ["A step is a weight version: the newest that a task was generated with."]
    if in_turns:
        notes.append(
            f"{in_turns} of {len(rows)} responses have several turns, with {context_tokens} tokens of context (tools, users) "
            "between them; the environment's time is not recorded."
        )
    return trace_from_rows(
        rows,
        name=name or path.name.removesuffix(".jsonl"),
        source=f"AReaL rollout dump {path.name}",
        licence=licence,
        tokenizer="the run's own (AReaL recorded seqlen and prompt_len)",
        cap_tokens=cap_tokens,
        notes=notes,
    )


def _files(path: Path) -> Iterator[Path]:
    files = [path] if path.is_file() else [*path.glob("*.jsonl"), *path.glob("*/*.jsonl")]
    files = [Path(os.path.realpath(file)) for file in files]  # a link to itself stays what it is, and cannot be read
    strangers = [file for file in files if not VERSION.fullmatch(file.parent.name)]
    if strangers or not files:
        found = f"{strangers[0].parent.name}/{strangers[0].name}" if strangers else "no .jsonl"
        raise InputError(
            f"{path}: {found} in place of {{version}}/{{task_id}}.jsonl; name AReaL's rollout folder, versions and all"
        )
    return iter(sorted(files, key=lambda file: (int(file.parent.name), len(file.name), file.name)))


def _row(record: Mapping[str, Any], step: int, place: str) -> Row:
    prompt_tokens = integer(record, "prompt_len", place, low=1)
    sequence_tokens = integer(record, "seqlen", place, low=1)
    if sequence_tokens < prompt_tokens:
        raise InputError(
            f"{place}: seqlen is {sequence_tokens}, below prompt_len {prompt_tokens}; it counts prompt and response"
        )
    head, tail = (integer(record, key, place, low=ANY_INTEGER) for key in ("head_version", "tail_version"))
    if head > tail or tail > step:
        raise InputError(
            f"{place}: head_version {head}, tail_version {tail} in folder {step}; they must not fall in this order"
        )
    turns, observations, before = _turns(record, sequence_tokens, prompt_tokens, place)
    return Row(
        place,
        step,
        text(record, "prompt", place),
        prompt_tokens + before,
        sum(turns),
        reward=number(record, "reward", place),
        policy_version=head if head >= 0 else None,
        turn_tokens=turns if len(turns) > 1 else None,
        turn_observation_tokens=observations if len(turns) > 1 else None,
    )


def _turns(
    record: Mapping[str, Any], sequence_tokens: int, prompt_tokens: int, place: str
) -> tuple[list[int], list[int], int]:
    """The tokens generated in each turn, the context after each but the last, and the context before the first. Without
    segments, all that is no prompt is one turn."""
    segments = record.get("segments") or []
    if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
        raise InputError(f"{place}: field 'segments' is {shown(segments)}; it must be a list of objects")
    parts = [(field(s, "role", place), integer(s, "len", place)) for s in segments]
    parts = [(role, tokens) for role, tokens in parts if role != "prompt" and tokens]
    if not any(role != "context" for role, _ in parts):
        return [sequence_tokens - prompt_tokens], [], 0
    total = sum(tokens for _, tokens in parts)
    if total != sequence_tokens - prompt_tokens:
        raise InputError(
            f"{place}: its segments have {total} tokens after the prompt, seqlen and prompt_len say "
            f"{sequence_tokens - prompt_tokens}; they must agree"
        )
    # Adjacent segments of a kind are one, so the kinds alternate.
    merged = [(key, sum(t for _, t in group)) for key, group in groupby(parts, key=lambda part: part[0] == "context")]
    before = merged.pop(0)[1] if merged[0][0] else 0
    if merged[-1][0]:
        merged.pop()
    return [tokens for _, tokens in merged[::2]], [tokens for _, tokens in merged[1::2]], before
