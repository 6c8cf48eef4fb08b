"""A console whose paper is HTML: what is printed on the screen, as a notebook or a page shows it.

Invariant: the same words and the same formatted numbers as on the screen, every text escaped. Tables keep all their columns.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

SMALL = "font-size: 85%; margin: 0.2em 0"


class Page(Console):
    """Takes what a `Console` takes of simrl: texts, tables, and lines that fold away. `html` is what was printed so far."""

    def __init__(self, markup: bool = False) -> None:
        super().__init__(file=io.StringIO(), width=10_000, markup=markup, highlight=False)
        self._takes_markup = markup
        self._parts: list[str] = []

    @property
    def html(self) -> str:
        return "<div>" + "\n".join(self._parts) + "</div>"

    def print(self, *objects: Any, **_: Any) -> None:
        """Each object as a paragraph, a table or, if it has several lines, as it is."""
        for each in objects:
            self._parts.append(self._table(each) if isinstance(each, Table) else self._paragraph(each))

    @contextmanager
    def fold(self, summary: str) -> Iterator[None]:
        """What is printed in the block stands behind a summary that opens it."""
        before, self._parts = self._parts, []
        try:
            yield
        finally:
            inside = "\n".join(self._parts)
            folded = f'<details style="{SMALL}"><summary>{escape(summary)}</summary>{inside}</details>'
            self._parts = [*before, folded] if self._parts else before

    def _paragraph(self, content: Any) -> str:
        text = self._text(content)
        if "\n" in text.plain.strip():
            return f"<pre>{escape(text.plain)}</pre>"
        return f'<p style="{SMALL}">{_inline(text)}</p>' if text.plain else ""

    def _text(self, content: Any) -> Text:
        if isinstance(content, Text):
            return content
        return Text.from_markup(str(content)) if self._takes_markup else Text(str(content))

    def _table(self, table: Table) -> str:
        columns = list(table.columns)
        aligned = [f"text-align: {'right' if column.justify == 'right' else 'left'}" for column in columns]
        lines = ["<table>"]
        if table.title:
            lines.append(f'<caption style="text-align: left">{_inline(self._text(table.title))}</caption>')
        if table.show_header:
            heads = (_inline(self._text(column.header)) for column in columns)
            cells = (f'<th style="{look}">{head}</th>' for look, head in zip(aligned, heads, strict=True))
            lines.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
        lines.append("<tbody>")
        for row, contents in zip(table.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
            look = "font-weight: bold; " if "bold" in str(row.style or "") else ""
            look += "border-bottom: 1px solid; " if row.end_section else ""
            cells = (
                f'<td style="{side}; white-space: pre">{_inline(self._text(content))}</td>'
                for side, content in zip(aligned, contents, strict=True)
            )
            lines.append(f'<tr style="{look}">{"".join(cells)}</tr>' if look else f"<tr>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</tbody></table>"])


def folded(console: Console, summary: str) -> AbstractContextManager[None]:
    """For what a page folds away behind a summary, and a screen simply has."""
    return console.fold(summary) if isinstance(console, Page) else nullcontext()


def _inline(text: Text) -> str:
    """Escaped, with what is bold in it."""
    bold = "bold" in str(text.style)
    parts, done = [], 0
    for span in sorted(text.spans):
        if "bold" in str(span.style) and span.start >= done:
            inside = text.plain[span.start : span.end]
            parts += [escape(text.plain[done : span.start]), f"<b>{escape(inside)}</b>"]
            done = span.end
    html = "".join([*parts, escape(text.plain[done:])]).replace("\n", "<br>")
    return f"<b>{html}</b>" if bold else html
