"""`simrl presets`: the shipped engines and frameworks, and the constants of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.commands.view import DataView, listing
from simrl.errors import InputError, choose

if TYPE_CHECKING:
    from rich.console import Console


def presets() -> DataView:
    """List the presets of engines and frameworks, a line each; `show NAME` prints one."""
    return listing(
        list(_pages().values()),
        ("preset", "kind", "what it is"),
        lambda page: (page["name"], page["kind"], page["about"]),
        "simrl presets show NAME prints each constant with its range, kind and source.",
    )


def show_preset(
    name: Annotated[str, typer.Argument(help="a preset, as `simrl presets` lists it")],
) -> DataView:
    """Print a preset: each constant with its value, range, kind and source."""

    def show(page: dict[str, Any], console: Console) -> None:
        from simrl.show.text import bare_table

        rows = [
            (key, one["words"], one["kind"], one["source"])
            for key, one in page["constants"].items()
        ]
        console.print(
            f"{name}: {page['about']}{page['engine'] and '; its engine is ' + page['engine']}"
        )
        console.print(bare_table(("constant", "value (range)", "kind", "source"), rows))
        where = (
            f"framework: {name}" if page["kind"] == "framework" else f"engine: {{preset: {name}}}"
        )
        console.print(f"\nIn a scenario:  {where}")

    if name not in (pages := _pages()):
        raise InputError(f"preset {name!r} is unknown{choose(name, pages, 'simrl presets')}")
    return DataView(pages[name], show, ascii=False, width=250)


def _pages() -> dict[str, dict[str, Any]]:
    """Return the shipped presets as plain data."""
    from simrl.scenario.presets import ENGINES, FRAMEWORKS

    return {
        name: {
            **preset.model_dump(include={"name", "about"}),
            "kind": "engine" if preset.is_engine else "framework",
            "engine": preset.engine or "",
            "constants": {
                key: {**one.model_dump(), "words": one.words}
                for key, one in preset.constants.items()
            },
        }
        for name, preset in {**FRAMEWORKS, **ENGINES}.items()
    }
