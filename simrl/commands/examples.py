"""`simrl examples`: the scenarios that come with simrl, and how to get them into a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from simrl.commands.view import DataView
from simrl.errors import InputError, choose

if TYPE_CHECKING:
    from rich.console import Console


class Example(NamedTuple):
    """A shipped example: its question, the command that answers it, and the files that the command
    needs, by their paths below `ROOT`."""

    about: str
    command: str
    files: tuple[str, ...]


OWN_RUN = Example(
    "A run's lengths as a framework's CSV has them, with columns of its own names.",
    "simrl trace import csv docs/examples/own_run.csv -o my_run.parquet --column step=iteration --column prompt_id=question "
    "--column prompt_tokens=in_len --column response_tokens=out_len",
    ("docs/examples/own_run.csv",),
)


def shipped_examples() -> dict[str, Example]:
    """Return the examples by name: every scenario of `experiments/` whose comment is a question and
    `simrl compare` on it."""
    from simrl.profile.shipped import ROOT

    by_name = {}
    for file in sorted((ROOT / "experiments").glob("*.yaml")):
        text, path = file.read_text(encoding="utf-8"), f"experiments/{file.name}"
        comment = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines())
        about, command, _ = comment.partition(f"simrl compare {path}")
        if command and about.rstrip().endswith("?"):
            traces = re.findall(r"^ *trace: *(?:\.\./)?(traces/\S+)", text, re.MULTILINE)
            by_name[file.stem] = Example(about.strip(), command, (path, *traces))
    return {**by_name, "own_run": OWN_RUN}


def examples() -> DataView:
    """List the examples that come with simrl; `copy NAME` writes one into a folder."""
    pages = {name: example._asdict() for name, example in shipped_examples().items()}

    def show(pages: Any, console: Console) -> None:
        for name, page in pages.items():
            console.print(f"{name:16} {page['about']}", soft_wrap=True, highlight=False)
        console.print(
            "\nsimrl examples copy NAME writes one into the current folder, with what it needs; without NAME, all."
        )

    return DataView(pages, show, ascii=False, width=200)


def copy_example(
    name: Annotated[
        str | None, typer.Argument(help="an example, as `simrl examples` lists it (default: all)")
    ] = None,
    folder: Annotated[Path, typer.Argument(help="where to write it (default: here)")] = Path(),
) -> DataView:
    """Copy an example, its scenario and its trace, into a folder. A file that differs is never
    replaced."""
    from simrl.files import write_whole_file
    from simrl.profile.shipped import ROOT
    from simrl.show.text import say

    known = shipped_examples()
    if name is not None and name not in known:
        raise InputError(f"example {name!r} is unknown{choose(name, known, 'simrl examples')}")
    chosen = [known[name]] if name is not None else list(known.values())
    files = dict.fromkeys(file for example in chosen for file in example.files)
    for file in files:
        target = folder / file
        if target.exists() and (
            not target.is_file() or target.read_bytes() != (ROOT / file).read_bytes()
        ):
            raise InputError(
                f"{target}: exists and is not simrl's; name another folder, or move it away"
            )
    for file in files:
        if not (folder / file).exists():
            with write_whole_file(folder / file) as temporary:
                temporary.write_bytes((ROOT / file).read_bytes())

    written, command = [str(folder / file) for file in files], chosen[0].command
    here = "" if folder == Path() else f"cd {folder}; "
    lines = [*(f"Written: {path}" for path in written), f"Next:  {here}{command}"]
    return DataView(
        {"files": written, "command": command},
        lambda _, console: say(console, *lines, soft_wrap=True),
    )
