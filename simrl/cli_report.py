"""`simrl report RESULTS`: results as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = (
    "Examples:  simrl report results/quickstart -o quickstart.html   |   simrl report results/quickstart-sweep   |   "
    "simrl report results/quickstart/cluster.gpus-64-areal-eta-4"
)


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="a folder of simrl compare, run, replay or sweep, of one run in it, or of a recorded run",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the page (default: beside the folder, under its name)")
    ] = None,
) -> None:
    """Write results as one HTML page: who is fastest and why, timelines to zoom into, what it all rests on. It needs no
    network."""
    from simrl.html_report import beside, write_report

    path = output or beside(results)
    write_report(results, path)
    print(f"Written to {path} ({path.stat().st_size / 1e6:.1f} MB); any browser opens it.")
