"""The sources of rows that `simrl trace import` knows, as `sources.toml` describes them; read
without anything heavy.

Invariant: a source that is read can be imported: its columns, options, files and patterns fit each
other, and what does not fit is refused by table and key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import model_validator

from simrl.errors import InputError, broken, first_line, meant
from simrl.validation import Model, validated

FILE = Path(__file__).with_name("sources.toml")
COUNTED = ("tokenizer", "chars_per_token")
OF_TABLES = ("column", "step", "epoch", "ungrouped")  # whose columns the user names
OF_METRICS = ("metrics", "group", "seed", "samples", "prompt_tokens", "log_format", "tags")
OPTIONS = (*COUNTED, *OF_TABLES, *OF_METRICS, "reward_column", "reward_key")
COLUMNS = (
    *("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens", "reward"),
    *("finish_reason", "policy_version", "environment_s", "response_ids", "turn_tokens"),
    *("turn_environment_s", "turn_observation_tokens", "turn_tool", "turn_failures"),
    *("prompt", "response", "mask"),
)


class Source(Model):
    """The files of a framework and the names that it gives to a trace's columns; `sources.toml`
    explains the keys."""

    about: str
    example: str
    title: str = ""
    signs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    without: str = ""
    nothing: str = ""
    rows_of: str = "file"
    columns: Mapping[str, str | tuple[str, ...]] = {}
    options: tuple[str, ...] = COUNTED
    tokenizer: str = ""
    repeats: bool = False
    rewards: tuple[str, ...] | None = None
    form: str = ""
    turns_by: str = ""
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Source:
        column = next((ours for ours in self.columns if ours not in COLUMNS), "")
        option = next((option for option in self.options if option not in OPTIONS), "")
        misfits = (n for n, it in self.columns.items() if isinstance(it, str) == (n == "mask"))
        misfit = next(misfits, "")
        theirs = self.columns.get(misfit)
        form = f'a list, such as ["{theirs}"]' if misfit == "mask" else "one name, a text"
        is_table = "column" in self.options or (not self.title and "metrics" in self.options)
        unused = min(self.model_fields_set - {"about", "example", "options", "signs"}, default="")
        words = broken(
            (
                column,
                f"columns.{column}: no column of a trace{meant(column, COLUMNS)}; name one of {', '.join(COLUMNS)}",
            ),
            (misfit, f"columns.{misfit} is {theirs!r}; give {form}"),
            (
                option,
                f"options: unknown option {option!r}{meant(option, OPTIONS)}; name some of {', '.join(OPTIONS)}",
            ),
            (
                is_table and unused,
                f"{unused}: the user names the columns (option column); leave it out",
            ),
        )
        words = words or ("" if is_table else self._of_files())
        if words:
            raise ValueError(words)
        return self

    def _of_files(self) -> str:
        """Return the words on the first key that is missing, or does not fit the others."""
        above = [pattern for pattern in self.files if pattern.startswith("/")]
        return (
            broken(
                (not self.title, "title is missing; give what the metadata of a trace calls it"),
                (not self.files and not self.form, "files is missing; give patterns, or a form"),
                (above, f"files: {above} are no patterns below a folder; correct them"),
                (self.files and not self.nothing, "nothing is missing; give the remedy"),
                (
                    self.form and not FILE.with_name(f"{self.form}.py").is_file(),
                    f"form is {self.form!r}; name a module beside sources.toml, without .py",
                ),
                (
                    not set(self.options).isdisjoint(OF_TABLES) and self.form != "messages",
                    f"options: {', '.join(OF_TABLES)} need column",
                ),
            )
            or ("" if self.form else self._of_columns())
            or self._of_lengths()
            or self._of_rewards()
        )

    def _of_columns(self) -> str:
        """Return the words on a column that flat rows lack, or have twice."""
        has = set(self.columns)
        return broken(
            ("step" not in has, "columns.step is missing; name the column of the step"),
            (not has & {"prompt", "prompt_id"}, "columns.prompt is missing; or give prompt_id"),
            (
                not has & {"response", "response_tokens", "response_ids"},
                "columns.response is missing; or give response_tokens, its length",
            ),
            (
                "response" in has and has & {"response_tokens", "response_ids"},
                "columns.response: text beside lengths or token ids; choose one",
            ),
            (
                "prompt_tokens" not in has and not has >= {"prompt", "response"},
                "columns.prompt_tokens is missing; or give prompt and response, text to count",
            ),
            ("mask" in has and "response" not in has, "columns.mask: it needs response, a text"),
            (
                self.repeats and not has >= {"prompt", "response"},
                "repeats: it compares texts; give the columns prompt and response, or leave it out",
            ),
        )

    def _of_lengths(self) -> str:
        """Return the words on what counts the tokens: options for text, else the source."""
        is_text = "response" in self.columns
        counts = set(self.options) & {*COUNTED}
        return broken(
            (is_text and not counts, "options: text is counted; add tokenizer and chars_per_token"),
            (is_text and self.tokenizer, "tokenizer: text is counted by options; leave it out"),
            (
                not is_text and not self.tokenizer,
                "tokenizer is missing; give what counted the lengths, such as the run's own",
            ),
            (
                not is_text and counts,
                "options: lengths are not counted again; leave out tokenizer and chars_per_token, "
                "such as options = []",
            ),
        )

    def _of_rewards(self) -> str:
        """Return the words on rewards that do not fit the columns and options."""
        summed = self.rewards is not None
        return broken(
            (
                summed and self.columns.get("reward") != "reward",
                'rewards: their sum is the field reward; write reward = "reward" in columns',
            ),
            (
                summed != ("reward_column" in self.options),
                "rewards: it goes with the option reward_column; give both or none",
            ),
            ("reward_key" in self.options and not self.form, "options: reward_key needs a form"),
        )


def read_sources(file: Path) -> dict[str, Source]:
    """Return the sources of a file by name. Raises `InputError` that names the table and the
    key."""
    try:
        tables: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: broken TOML ({first_line(error)}); repair it") from error
    return {
        name: validated(Source, table, f"{file}: [{name}]", "a source")
        for name, table in tables.items()
    }


@cache
def known_sources() -> dict[str, Source]:
    """Return the sources of `sources.toml`, read when first asked for."""
    return read_sources(FILE)
