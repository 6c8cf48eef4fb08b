"""The sources of rows that `simrl trace import` knows, as `sources.toml` describes them; read
without anything heavy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

COUNTED = ("tokenizer", "chars_per_token")


class Source(BaseModel, frozen=True, extra="forbid"):
    """The files of a framework and the names that it gives to a trace's columns; `sources.toml`
    explains the keys."""

    about: str
    example: str
    title: str = ""
    files: tuple[str, ...] = ()
    without: str = ""
    nothing: str = ""
    step: str = ""
    rows_of: str = ""
    columns: Mapping[str, str | tuple[str, ...]] = {}
    options: tuple[str, ...] = COUNTED
    tokenizer: str = ""
    repeats: bool = False
    rewards: tuple[str, ...] | None = None
    form: str = ""
    turns_by: str = ""
    notes: tuple[str, ...] = ()


SOURCES = {
    name: Source.model_validate(table)
    for name, table in tomllib.loads(
        Path(__file__).with_name("sources.toml").read_text(encoding="utf-8")
    ).items()
}
