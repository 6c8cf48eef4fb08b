"""An importer: JSON Lines with an object a group, the responses of a prompt in a list.

{"step": 0, "prompt": "3 5 2?24:", "prompt_tokens": 10, "responses": [{"tokens": 212, "reward": 1.0}, …]}
"""

from collections.abc import Iterator
from pathlib import Path

from simrl.errors import InputError
from simrl.trace.importers.rows import (
    Row,
    existing,
    field,
    integer,
    number,
    read_jsonl,
    text,
    trace_from_rows,
)
from simrl.trace.trace import Trace


def import_groups(path: Path, cap_tokens: int | None = None, licence: str = "unknown") -> Trace:
    """The groups of a file as a trace. Raises `InputError` that names the line where something is wrong."""
    return trace_from_rows(
        _rows(existing(path)),
        name=path.stem,
        source=f"groups in {path.name}",
        licence=licence,
        tokenizer="the source's own",
        cap_tokens=cap_tokens,
    )


def _rows(path: Path) -> Iterator[Row]:
    for place, group in read_jsonl(path):
        responses = field(group, "responses", place)
        if not isinstance(responses, list) or not all(
            isinstance(response, dict) for response in responses
        ):
            raise InputError(
                f"{place}: field 'responses' is no list of objects; give {{tokens, reward}} for each response"
            )
        for response in responses:
            yield Row(
                place,
                step=integer(group, "step", place),
                prompt=text(group, "prompt", place),
                prompt_tokens=integer(group, "prompt_tokens", place, low=1),
                response_tokens=integer(response, "tokens", place),
                reward=number(response, "reward", place),
            )
