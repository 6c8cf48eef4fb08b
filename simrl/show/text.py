"""Shared parts of all tables: lines, numbers, columns that fit the console, and `Page`, a console
that prints HTML.

Invariant: no printed text acts as markup. A page has the words and formatted numbers of the screen,
all escaped. On the screen a column is shown whole or left out, the least important first; a page
keeps all columns.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from typing import Any, NamedTuple, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from simrl.errors import printable
from simrl.validation import in_words

SMALL = "font-size: 85%; margin: 0.2em 0"
WIDE = 10_000  # characters of a line on a page, in a file or a pipe
K = TypeVar("K")
V = TypeVar("V")
DASH = "–"  # in place of a missing value
TABLE = """
<table>
{% if title %}
<caption style="text-align: left">{{ title }}</caption>
{% endif %}
{% if headings %}
<thead><tr>{% for side, cell in headings %}<th style="text-align: {{ side }}">{{ cell }}</th>{% endfor %}</tr></thead>
{% endif %}
<tbody>
{% for look, cells in rows %}
<tr{% if look %} style="{{ look }}"{% endif %}>
{%- for side, cell in cells %}<td style="text-align: {{ side }}; white-space: pre">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table>
"""


class Column(NamedTuple):
    """A heading (with line breaks), the cell of a row, the meaning, and the turn in which it is
    left out (0: never)."""

    heading: str
    cell: Callable[[Any], str]
    meaning: str = ""
    turn: int = 0

    @property
    def name(self) -> str:
        """Return the heading in one line."""
        return self.heading.replace("\n", " ")


class Line(NamedTuple):
    """The cells of a row, its style, and a flag for a rule below it."""

    cells: Sequence[object]
    style: str = ""
    end_section: bool = False


Rows = Iterable[Line | Sequence[object]]


def say(console: Console, *lines: str, style: str = "", **options: Any) -> None:
    """Print lines as plain text, without markup."""
    for line in lines:
        console.print(Text(line, style=style), **options)


def plain_table(
    headings: Sequence[str], rows: Rows, left: Sequence[int] = (0,), **options: Any
) -> Table:
    """Return a table without a frame; columns are right-aligned, except those in `left`, and have
    these options."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    return filled(table, headings, rows, left, **{"no_wrap": True, **options})


def framed_table(
    headings: Sequence[str], rows: Rows, title: str | None = None, left: Sequence[int] = (0,)
) -> Table:
    """Return a table with a frame; columns are right-aligned, except those in `left`."""
    return filled(Table(title=title, title_justify="left"), headings, rows, left)


def bare_table(headings: Sequence[str], rows: Rows) -> Table:
    """Return a table of left-aligned columns without rules."""
    return filled(
        Table(box=None, pad_edge=False, header_style="bold"), headings, rows, range(len(headings))
    )


def aligned(rows: Rows, sides: str) -> Table:
    """Return rows without headings; `sides` has an l (left) or an r (right) for each column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    return filled(
        table, [""] * len(sides), rows, [i for i, side in enumerate(sides) if side == "l"]
    )


def filled(
    table: Table, headings: Sequence[str], rows: Rows, left: Sequence[int], **options: Any
) -> Table:
    """Add columns and rows to a table, and return it; columns are right-aligned, except those in
    `left`."""
    for i, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if i in left else "right", **options)
    for row in rows:
        line = row if isinstance(row, Line) else Line(row)
        cells = (cell if isinstance(cell, Text) else Text(str(cell)) for cell in line.cells)
        table.add_row(*cells, style=line.style, end_section=line.end_section)
    return table


def fitting(
    console: Console, columns: Sequence[Column], table_of: Callable[[Sequence[Column]], Table]
) -> tuple[Table, list[str]]:
    """Return the table with all columns that fit, and the names of the others."""
    shown, left_out = list(columns), []
    unlimited = console.options.update(max_width=WIDE)
    while console.measure(table := table_of(shown), options=unlimited).maximum > console.width:
        first = min(
            (column for column in shown if column.turn),
            key=lambda column: column.turn,
            default=None,
        )
        if first is None:
            break
        shown.remove(first)
        left_out.append(first.name)
    return table, left_out


def shown_value(value: Any) -> str:
    """Return the value of a scenario's field in words; a dash for None."""
    return DASH if value is None else in_words(value)


def formatted(value: float | None, form: str, missing: str = DASH) -> str:
    """Return a number in this format; `missing` for None."""
    return missing if value is None else form.format(value)


def listed(words: Sequence[Any]) -> str:
    """Return "a, b and c"; an empty text without words."""
    return " and ".join(filter(None, (", ".join(map(str, words[:-1])), *map(str, words[-1:]))))


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, keys in the order in which they come first."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def number(value: float, decimals: int = 4) -> str:
    """Return three significant digits, and all digits before the point, but at most `decimals`
    behind it."""
    if abs(value) < 5 * 10**-decimals:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(0, digits), decimals)}f}"


def signed(value: float) -> str:
    """Return the `number` with its sign."""
    text = number(value)
    return text if text.startswith("-") or text == "0" else f"+{text}"


class Screen(Console):
    """A console that prints plain text and escapes control characters: names and notes of an
    unknown file cannot move the cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the printed segments; of control characters, only ends of lines stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)


class Page(Console):
    """A console that turns texts and tables into HTML; `html` has all that was printed."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=WIDE, markup=False, highlight=False)
        self._parts: list[str] = []

    @property
    def html(self) -> str:
        return "<div>" + "\n".join(self._parts) + "</div>"

    def print(self, *objects: Any, **_: Any) -> None:
        """Add each object as a paragraph, a table or, if it has several lines, preformatted
        text."""
        for content in objects:
            if isinstance(content, Table):
                self._parts.append(self._table(content))
            elif "\n" in str(content).strip():
                self._parts.append(f"<pre>{escape(str(content))}</pre>")
            else:
                self._parts.append(
                    f'<p style="{SMALL}">{self._inline(content)}</p>' if str(content) else ""
                )

    @contextmanager
    def fold(self, summary: str) -> Iterator[None]:
        """Fold the lines that the block prints behind a summary that opens them."""
        before, self._parts = self._parts, []
        try:
            yield
        finally:
            inside = "\n".join(self._parts)
            folded = (
                f'<details style="{SMALL}"><summary>{escape(summary)}</summary>{inside}</details>'
            )
            self._parts = [*before, folded] if self._parts else before

    def _table(self, table: Table) -> str:
        from jinja2 import Environment  # pages alone need it

        sides = ["right" if column.justify == "right" else "left" for column in table.columns]
        headings = (
            [self._inline(column.header) for column in table.columns] if table.show_header else []
        )
        cells = zip(*(map(self._inline, column.cells) for column in table.columns), strict=True)
        looks = [
            "font-weight: bold; " * ("bold" in str(row.style or ""))
            + "border-bottom: 1px solid; " * row.end_section
            for row in table.rows
        ]
        return (
            Environment(trim_blocks=True)
            .from_string(TABLE.strip())
            .render(
                title=self._inline(table.title or ""),
                headings=list(zip(sides, headings, strict=False)),
                rows=[
                    (look, list(zip(sides, row, strict=True)))
                    for look, row in zip(looks, cells, strict=True)
                ],
            )
        )

    def _inline(self, content: Any) -> str:
        """Return a text as escaped HTML with its bold parts."""
        text = Text.assemble(content if isinstance(content, Text) else str(content))
        parts = [(escape(part.text), part.style) for part in text.render(self)]
        return "".join(
            f"<b>{words}</b>" if style and style.bold else words for words, style in parts
        ).replace("\n", "<br>")


def folded(console: Console, summary: str) -> AbstractContextManager[None]:
    """Fold the lines that the block prints behind a summary on a page; show them on a screen."""
    return console.fold(summary) if isinstance(console, Page) else nullcontext()
