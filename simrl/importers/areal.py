"""AReaL: the trajectories that `dump_to_file` writes under `rollout/{version}/{task_id}.jsonl`.

A file is one task: the samples of one prompt that were asked for together. Its folder is the newest weight version
that any of them was generated with. AReaL counted the tokens itself: response = seqlen - prompt_len.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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

    Raises `InputError` for a folder without such files, and for fields that are missing, mistyped or contradictory.
    """
    path = existing(path)
    context_tokens = 0
    rows: list[Row] = []
    for file in _files(path):
        step = int(file.parent.name)
        for place, record in read_jsonl(file):
            rows.append(_row(record, step, place))
            context_tokens += _context_tokens(record, place)
    notes = ["A step is a weight version: the newest that a task was generated with."]
    if context_tokens:
        total = sum(row.response_tokens for row in rows)
        notes.append(
            f"{context_tokens} of {total} response tokens are context between turns (tools, users), not generated."
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
    files = [file.resolve() for file in files]
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
    return Row(
        place,
        step,
        text(record, "prompt", place),
        prompt_tokens,
        sequence_tokens - prompt_tokens,
        reward=number(record, "reward", place),
        policy_version=head if head >= 0 else None,
    )


def _context_tokens(record: Mapping[str, Any], place: str) -> int:
    """Tokens that the environment wrote between turns; only multi-turn records have segments."""
    segments = record.get("segments") or []
    if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
        raise InputError(f"{place}: field 'segments' is {shown(segments)}; it must be a list of objects")
    return sum(integer(s, "len", place) for s in segments if field(s, "role", place) == "context")
