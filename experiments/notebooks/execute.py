"""Executes the notebooks of this folder and compares their output with the committed one. `--renew` writes the output.

    python experiments/notebooks/execute.py                       all of them; exit code 1 if one raises or shows something else
    python experiments/notebooks/execute.py --renew 1_systems.ipynb

Texts and tables must be equal to the last digit; pictures must be there (their bytes are matplotlib's and the fonts'). A
notebook is written without what belongs to one execution: times, counters of the kernel, paths of the machine. Each takes
at most 120 s of a core; more is an error. Its seconds are printed, too, but other jobs prolong them.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
CELL_S = 300  # a cell that takes longer hangs
MOST_CPU_S = 120.0  # of a notebook's kernel and its processes
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--renew", action="store_true", help="write the notebooks; then read the diff"
    )
    parser.add_argument(
        "notebooks", nargs="*", type=Path, help="some of them (default: all in this folder)"
    )
    chosen = parser.parse_args()
    # tqdm, which optuna imports, misses widgets; nothing here shows its bars.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    paths = chosen.notebooks or sorted(HERE.glob("*.ipynb"))
    wrong = [path for path in paths if not execute(path, chosen.renew)]
    return 1 if wrong else 0


def execute(path: Path, renew: bool) -> bool:
    """Run a notebook; return whether it succeeds and, unless renewed, shows the committed output. Print the differences."""
    committed = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    started_s, cpu_s = time.monotonic(), kernels_cpu_s()
    try:
        NotebookClient(
            notebook, timeout=CELL_S, resources={"metadata": {"path": str(path.parent)}}
        ).execute()
    except CellExecutionError as error:
        print(f"{path.name}: {error}")
        return False
    wall_s, cpu_s = time.monotonic() - started_s, kernels_cpu_s() - cpu_s
    print(f"{path.name}: {wall_s:.0f} s, {cpu_s:.0f} s of a core")
    if cpu_s > MOST_CPU_S:
        print(f"{path.name}: it takes more than {MOST_CPU_S:.0f} s of a core; make it shorter")
        return False
    clean(notebook)
    warned = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    ]
    if warned:
        print(f"{path.name}: a cell writes to stderr:\n{warned[0]}")
        return False
    if renew:
        nbformat.write(notebook, path)
        return True
    differences = list(
        difflib.unified_diff(
            shown(committed), shown(notebook), "committed", "executed", lineterm="", n=1
        )
    )
    for line in differences:
        print(line)
    if differences:
        print(
            f"{path.name}: shows something else; if that is right, renew it and read its prose again"
        )
    return not differences


def kernels_cpu_s() -> float:
    """Return the processor time of the kernels that have ended, with their processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def clean(notebook: Any) -> None:
    """Keep the visible parts, numbered as executed, without the progress of a slow machine."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i}", nbformat.from_dict({})
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not is_progress(output)]
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


def is_progress(output: Any) -> bool:
    """Return whether an output is lines such as `points simulated: 3 of 12`, which only slow machines print."""
    return output.get("name") == "stderr" and all(
        re.search(r": \d+ of \d+$", line) for line in output.text.splitlines()
    )


def shown(notebook: Any) -> list[str]:
    """Return the output of the code cells, in lines; a picture is one line."""
    lines: list[str] = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            lines.append(f"cell {number}:")
            lines += _texts(output)
    return lines


def _texts(output: Any) -> Sequence[str]:
    if output.output_type == "stream":
        return str(output.text).splitlines()
    if output.output_type == "error":
        return [f"{output.ename}: {output.evalue}"]
    if "image/png" in output.data:
        return ["(a picture)"]
    return str(output.data.get("text/html", output.data.get("text/plain", ""))).splitlines()


if __name__ == "__main__":
    sys.exit(main())
