"""Progress on stderr while many runs are simulated."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from simrl.interrupts import ctrl_c_waits
from simrl.simulate.run import compile_engine


def compile_kernels(ranks: Iterable[int] = (1,)) -> None:
    """Compile what simulations run compiled, or load it where this machine has compiled it before; `ranks` are the
    data-parallel ranks of their workers."""
    with progress_bar() as progress, ctrl_c_waits():
        task = progress.add_task("compiling, once on this machine", total=1)
        for dp in {min(each, 2) for each in ranks}:
            compile_engine(dp)
        progress.advance(task)


def progress_bar(*more: ProgressColumn, speed_over_s: float = 30.0) -> Progress:
    """Return a bar on stderr, which is shown only on a terminal and disappears when it is done. A column of the remaining time
    uses the speed of the last `speed_over_s` seconds."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(
        *columns,
        *more,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=speed_over_s,
    )
