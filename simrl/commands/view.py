"""The result of a command: frozen data that prints itself, shows itself in a notebook, and is JSON.

Invariant: a view holds results and computes none; its `table` has the columns of `--json`.
"""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import Console

V = TypeVar("V", bound="DataView")
WIDE = 10_000  # characters of a line in a file or a pipe, where no column has to be left out or wrapped


@dataclass(frozen=True, repr=False, kw_only=True)
class View:
    """The result of a command.

    `notes` are lines about files that the command wrote. If `lost` points could not be simulated on
    this machine, the command ends with exit code 1. `width` is the width of the output where this
    is no terminal. With `ascii`, --json escapes all other characters.
    """

    notes: Sequence[str] = ()
    lost: int = 0
    width: int = WIDE
    ascii: bool = True

    def _show(self, console: "Console") -> None:
        raise NotImplementedError

    def json(self) -> Any:
        """Return what `--json` prints."""
        raise NotImplementedError

    def print(self, console: "Console | None" = None) -> None:
        """Print the tables, then the notes."""
        from simrl.show.text import Screen

        if console is None:
            console = Screen()
            if not console.is_terminal and "COLUMNS" not in os.environ:
                console.width = self.width
        self._show(console)
        for note in self.notes:
            console.print(note, overflow="ignore", crop=False, markup=False)

    def check(self) -> None:
        """Raise `InputError` for a result without a single success, once it has been printed."""

    def _repr_html_(self) -> str:
        from simrl.show.text import Page

        page = Page()
        self._show(page)
        return page.html

    def __str__(self) -> str:
        from simrl.show.text import Screen

        text = io.StringIO()
        self._show(Screen(file=text, width=WIDE))
        return text.getvalue().rstrip()


@dataclass(frozen=True, repr=False)
class DataView(View):
    """`data`, which `show` prints. `--json` prints it with the entries of `more`; `table` has its
    `rows`."""

    data: Any
    show: Callable[[Any, Any], None]
    name: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def _show(self, console: "Console") -> None:
        self.show(self.data, console)

    def json(self) -> Any:
        """Return what `--json` prints."""
        data = self.data
        if hasattr(data, "as_json"):
            data = data.as_json()
        elif is_dataclass(data) and not isinstance(data, type):
            data = asdict(data)
        return {**data, **self.more} if self.more else data

    @property
    def table(self) -> "pd.DataFrame":
        """The rows as a data frame."""
        return frame(self.rows)


def listing(
    pages: Sequence[Mapping[str, Any]],
    headings: Sequence[str],
    cells: Callable[[Mapping[str, Any]], Sequence[str]],
    footer: str,
) -> DataView:
    """Return pages, printed as a line each, with a footer that says how to see one."""

    def show(pages: Any, console: "Console") -> None:
        from simrl.show.text import bare_table

        table = bare_table(headings, map(cells, pages))
        table.columns[0].no_wrap = True  # names are copied
        console.print(table)
        console.print(f"\n{footer}")

    return DataView(pages, show, ascii=False, width=200)


def drawn(
    view: V, picture: Any, default: str, draw: Callable[[], "Figure"], verb: str = "Drawn"
) -> V:
    """Draw a picture of the view, where one is wanted (`place`), and return the view that names its
    file."""
    from simrl.show.style import save

    file = place(picture, default)
    if file is None:
        return view
    save(draw(), file)
    return replace(view, notes=[f"{verb} in {file}"], more={"picture": str(file)})


def place(wanted: Any, default: str | Path) -> Path | None:
    """Return the place of files: none (None, False), the default (True), or the place that was
    named."""
    return (
        None
        if wanted is None or wanted is False
        else Path(default)
        if wanted is True
        else Path(wanted)
    )


def frame(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return rows as a data frame."""
    import pandas as pd

    return pd.DataFrame(list(rows))
