"""`simrl presets`: the shipped engines and frameworks, and the constants of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.commands.view import DataView
from simrl.errors import InputError, meant

if TYPE_CHECKING:
    from rich.console import Console

FOOTER = (
    "\nIn a scenario:  framework: NAME   or   engine: {preset: NAME}   (values beside it replace its own)\n"
    "simrl presets show NAME prints each constant with its range, kind and source."
)


def presets() -> DataView:
    """List the presets of engines and frameworks, a line each; `show NAME` prints one."""
    pages = _pages()

    def show(pages: list[dict[str, Any]], console: Console) -> None:
        from rich.table import Table

        table = Table("preset", "kind", "what it is", "constants", box=None, pad_edge=False, header_style="bold")
        for page in pages:
            table.add_row(page["name"], page["kind"], page["about"], str(len(page["constants"])))
        console.print(table)
        console.print(FOOTER)

    return DataView(list(pages.values()), show, ascii=False, width=200)


def show_preset(name: Annotated[str, typer.Argument(help="a preset, as `simrl presets` lists it")]) -> DataView:
    """Print a preset: each constant with its value, range, kind and source."""
    pages = _pages()
    if name not in pages:
        raise InputError(f"preset {name!r} is unknown{meant(name, pages)}; choose one of {', '.join(pages)}")

    def show(page: dict[str, Any], console: Console) -> None:
        from rich.table import Table

        console.print(f"{page['name']}: {page['about']}{page['engine'] and '; its engine is ' + page['engine']}")
        table = Table("constant", "value (range)", "kind", "source", box=None, pad_edge=False, header_style="bold")
        for key, constant in page["constants"].items():
            table.add_row(key, constant["words"], constant["kind"], constant["source"])
        console.print(table)
        where = "framework: {}" if page["kind"] == "framework" else "engine: {{preset: {}}}"
        console.print(f"\nIn a scenario:  {where.format(page['name'])}")

    return DataView(pages[name], show, ascii=False, width=250)


def _pages() -> dict[str, dict[str, Any]]:
    """Return the shipped presets as plain data."""
    from simrl.scenario.presets import ENGINES, FRAMEWORKS

    return {
        name: {
            "name": name,
            "kind": "engine" if preset.is_engine else "framework",
            "about": preset.about,
            "engine": preset.engine or "",
            "constants": {key: {**one.model_dump(), "words": one.words} for key, one in preset.constants.items()},
        }
        for name, preset in {**FRAMEWORKS, **ENGINES}.items()
    }
