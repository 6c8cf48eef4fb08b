"""The files of `simrl init`: a scenario with the source of each value beside it, and the lists of
keys.

Invariant: a file that is there is not replaced.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.launch.translate import Translation


def write_scenario(path: Path, translation: Translation, heading: str) -> list[Path]:
    """Write the scenario and, beside it, its keys as a table. Return the paths. Raise `InputError`
    if one is there."""
    assumed = {one.field: f"assumed; give {one.option}" for one in translation.assumed}
    assumed |= {one.field: f"changed; {one.what}" for one in translation.changed}
    lines = [
        *(f"# {line}" for line in heading.splitlines()),
        "",
        *_lines(translation.data, translation.sources | assumed),
    ]
    files = {path.with_suffix(".keys.csv"): pd.DataFrame(translation.keys).to_csv(index=False)}
    files = {**(files if translation.keys else {}), path: "\n".join([*lines, ""])}
    if there := [file for file in files if os.path.lexists(file)]:
        raise InputError(f"{there[0]}: is there already; name another with -o, or remove it")
    for file, text in files.items():
        with write_whole_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return list(reversed(files))


def _lines(data: Mapping[str, Any], sources: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Yield the lines of YAML data, two spaces a level."""
    indent = "  " * prefix.count(".")
    for key, value in data.items():
        source = f"  # {sources[prefix + key]}" if prefix + key in sources else ""
        yield f"{indent}{key}:{'' if isinstance(value, dict | list) else f' {_scalar(value)}'}{source}"
        if isinstance(value, dict):
            yield from _lines(value, sources, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield from (f"{indent}  - {_scalar(entry)}" for entry in value)


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()
