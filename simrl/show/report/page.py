"""The report: results as one HTML file that needs no network and no server.

Invariant: the file has all that it shows, plotly included, and its content security policy forbids
it to fetch anything. Equal results give equal bytes. Data is escaped, in the page by jinja;
pictures are images, in which no markup acts.
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
from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.show.comparison import MANIFEST
from simrl.show.report.lanes import timeline
from simrl.show.report.runs import runs_context
from simrl.show.report.sources import Runs, SweepRows, find
from simrl.show.report.sweep import sweep_context

PLOTLY = "plotly.min.js"  # plotly.js-cartesian-dist-min 4.1.1 of npm, MIT: a third of plotly, and as much faster to open
MOST_BYTES = 6_000_000
MOST_SPANS = 400_000  # of all timelines; fewer if the file would be too large
SECTIONS = {
    "runs": (
        ("table", "Numbers"),
        ("pictures", "Pictures"),
        ("closely", "One run"),
        ("inputs", "What it rests on"),
    ),
    "sweep": (("pictures", "Pictures"), ("table", "Table"), ("inputs", "What it rests on")),
}


def write_report(folder: Path, path: Path) -> None:
    """Write the report of a folder of results. Raise `InputError` for any other folder, and for a
    path that cannot be written or lies among results, which their command would then refuse to
    replace."""
    _require_page(path)
    written = _written_as_one(folder)
    if Path(os.path.realpath(path)).is_relative_to(written):
        raise InputError(
            f"{path}: lies in {written.name}, which holds only what its command wrote; name a place outside it"
        )
    write_page(find(folder), path)


def write_page(source: Runs | SweepRows, path: Path) -> None:
    """Write the report of results. Raise `InputError` for a path that is no page or cannot be
    written."""
    _require_page(path)
    text = report_html(source)
    with write_whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _require_page(path: Path) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{path}: a report is a page; name it .html")


def beside(folder: Path) -> Path:
    """Return the page's default path: next to the results' folder, under its name."""
    written, place = _written_as_one(folder), folder.resolve()
    return written.with_name(f"{'-'.join([written.name, *place.relative_to(written).parts])}.html")


def _written_as_one(folder: Path) -> Path:
    """Return the folder that one command wrote: for a run of a comparison, the whole comparison."""
    place = folder.resolve()
    return place.parent if (place.parent / MANIFEST).is_file() else place


def report_html(source: Runs | SweepRows) -> str:
    """Return the page, with timelines that are coarse enough for its size."""
    environment = Environment(
        loader=PackageLoader("simrl.show.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["first_word"] = lambda text: text.partition(" ")[0]
    template = environment.get_template("page.html")
    shared = {
        "title": source.title,
        "version": simrl.__version__,
        "plotly": (Path(__file__).parent / PLOTLY).read_text(encoding="utf-8"),
    }
    if isinstance(source, SweepRows):
        context, data = sweep_context(source)
        return template.render(
            kind="sweep", sections=SECTIONS["sweep"], data=_packed(data), **shared, **context
        )
    context, data = runs_context(source)
    most_spans = MOST_SPANS
    while True:
        for run, shown in zip(source.runs, data["runs"], strict=True):
            shown["timeline"] = timeline(run.result, most_spans // len(source.runs))
        text = template.render(
            kind="runs", sections=SECTIONS["runs"], data=_packed(data), **shared, **context
        )
        if len(text.encode()) <= MOST_BYTES or most_spans <= 10:
            return text
        most_spans //= 2


def _packed(data: Any) -> str:
    """Return the data for the page's script: gzipped JSON without NaN."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")
