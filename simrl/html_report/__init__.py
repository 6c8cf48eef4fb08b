"""The report: results as one HTML file that needs no network and no server.

Invariant: the file holds all that it shows, plotly included, and its content security policy forbids it to fetch anything; the
same results give the same bytes. What comes from data is escaped, in the page by jinja and in pictures by `pictures.escaped`.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import simrl
from simrl.comparison import MANIFEST
from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.html_report.runs_page import runs_context
from simrl.html_report.sources import Runs, Sweep, find
from simrl.html_report.sweep_page import sweep_context

PLOTLY = (
    "plotly.min.js"  # plotly.js-cartesian-dist-min 4.1.1 of npm, MIT: a third of the whole plotly, opens as much faster
)
MOST_BYTES = 6_000_000
MOST_SPANS = 400_000  # of all timelines; fewer where the file would get too large
SECTIONS = {
    "runs": (("table", "Numbers"), ("pictures", "Pictures"), ("closely", "One run"), ("inputs", "What it rests on")),
    "sweep": (("pictures", "Pictures"), ("table", "Table"), ("inputs", "What it rests on")),
}

__all__ = ["beside", "find", "report_html", "write_page", "write_report"]


def write_report(folder: Path, path: Path) -> None:
    """Writes the report of a folder of results. Raises `InputError` for a folder of anything else, and for a path that
    cannot be written or lies among results, which their own command would then refuse to replace."""
    _require_page(path)
    written = _written_as_one(folder)
    if Path(os.path.realpath(path)).is_relative_to(written):
        raise InputError(
            f"{path}: lies in {written.name}, which holds only what its command wrote; name a place outside it"
        )
    write_page(find(folder), path)


def write_page(found: Runs | Sweep, path: Path) -> None:
    """The same of results that are in no folder. Raises `InputError` for a path that is no page or cannot be written."""
    _require_page(path)
    text = report_html(found)
    with write_whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _require_page(path: Path) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{path}: a report is a page; name it .html")


def beside(folder: Path) -> Path:
    """The page's place where none is named: beside what was written with the folder, under its name."""
    written, place = _written_as_one(folder), folder.resolve()
    return written.with_name(f"{'-'.join([written.name, *place.relative_to(written).parts])}.html")


def _written_as_one(folder: Path) -> Path:
    """The folder, or of a run in a comparison the whole comparison."""
    place = folder.resolve()
    return place.parent if (place.parent / MANIFEST).is_file() else place


def report_html(found: Runs | Sweep) -> str:
    """The page. Its timelines are made coarser until it is small enough."""
    most_spans = MOST_SPANS
    text = _page(found, most_spans)
    while len(text.encode()) > MOST_BYTES and isinstance(found, Runs) and most_spans > 10:
        most_spans //= 2
        text = _page(found, most_spans)
    return text


def _page(found: Runs | Sweep, most_spans: int) -> str:
    environment = Environment(
        loader=PackageLoader("simrl.html_report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    kind = "sweep" if isinstance(found, Sweep) else "runs"
    environment.filters["first_word"] = lambda text: text.partition(" ")[0]
    context, data = sweep_context(found) if isinstance(found, Sweep) else runs_context(found, most_spans)
    return environment.get_template("page.html").render(
        kind=kind,
        sections=SECTIONS[kind],
        title=found.title,
        version=simrl.__version__,
        data=_packed(data),
        plotly=(Path(__file__).parent / PLOTLY).read_text(encoding="utf-8"),
        **context,
    )


def _packed(data: Any) -> str:
    """As the page's code unpacks it. JSON that holds no number that is none."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")
