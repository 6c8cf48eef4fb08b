"""Progress on stderr while many runs are simulated."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from simrl.interrupts import ctrl_c_waits
from simrl.simulate.run import compile_engine

LINE_S = 60.0


def compile_kernels(ranks: Iterable[int] = (1,)) -> None:
    """Compile what simulations run compiled, or load it where this machine has compiled it before;
    `ranks` are the data-parallel ranks of their workers."""
    with progress_bar() as progress, ctrl_c_waits():
        task = progress.add_task("compiling, once on this machine", total=1)
        for dp in {min(n, 2) for n in ranks}:
            compile_engine(dp)
        progress.advance(task)


class _Lines(Progress):
    """A bar where there is no terminal: a line on stderr every `LINE_S` seconds."""

    _said_s = 0.0

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        self.update(task_id, advance=advance)

    def update(self, task_id: TaskID, *_: Any, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._said_s = self._said_s or self._tasks[task_id].start_time or self.get_time()
        if self.get_time() - self._said_s >= LINE_S:
            self._said_s, task = self.get_time(), self._tasks[task_id]
            of = "" if task.total is None else f" of {task.total:g}"
            print(f"{task.description}: {task.completed:g}{of}", file=sys.stderr, flush=True)


def progress_bar(*more: ProgressColumn, speed_over_s: float = 30.0) -> Progress:
    """Return a bar on stderr, which disappears when it is done; without a terminal, a line now and
    then. A column of the remaining time uses the speed of the last `speed_over_s` seconds."""
    console = Console(stderr=True)
    return (Progress if console.is_terminal else _Lines)(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *more,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=speed_over_s,
    )
