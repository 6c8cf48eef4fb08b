"""The files of `simrl init`: a scenario with the source of each value beside it, and the lists of
keys.

Invariant: a file that is there is not replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.launch.translate import Translation


def write_scenario(path: Path, translation: Translation, heading: str) -> list[Path]:
    """Write the scenario and, beside it, its keys as a table. Return both paths. Raise `InputError`
    if one is there."""
    lists = path.with_suffix(".keys.csv")
    files = {
        path: "\n".join(
            [
                *(f"# {line}" for line in heading.splitlines()),
                "",
                *_lines(translation.data, comments(translation)),
            ]
        )
        + "\n",
        lists: pd.DataFrame(translation.keys).to_csv(index=False),
    }
    if not translation.keys:
        files.pop(lists)
    for file in files:
        if file.exists():
            raise InputError(f"{file}: is there already; name another with -o, or remove it")
    for file, text in files.items():
        with write_whole_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return list(files)


def comments(translation: Translation) -> dict[str, str]:
    """Return by field where its value is from."""
    assumed = {one.field: f"assumed; give {one.option}" for one in translation.assumed}
    return {**translation.comments, **assumed}


def _lines(data: Mapping[str, Any], sources: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Yield the lines of YAML data, two spaces a level."""
    indent = "  " * prefix.count(".")
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, sources, f"{name}.")
        elif isinstance(value, list):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {_scalar(entry)}" for entry in value)
        else:
            source = f"  # {sources[name]}" if name in sources else ""
            yield f"{indent}{key}: {_scalar(value)}{source}"


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()
