"""Passes without prefill in the real vLLM runs: how long they take, beside even kernel times and the cost of uneven lengths.

    python experiments/validate_stragglers.py ../shared/data

Nothing is simulated: the batch of each second is read from the recorded requests. A second counts if no prompt is computed in
it or the second before, and no request seems to be resumed in it or the next (more run, or fewer wait): a resumed request is
computed again, which the recorded counters do not show. `validate_engine.md` reads the table.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from experiments.shared import errors_in_a_line
from experiments.validate_engine import Run, read_run, run_folders, run_profile
from simrl.profile.profile import TableProfile, straggler_s

SAMPLES = 50  # instants of a second at which the running requests are counted
BINS = (0.0, 0.2e-3, 1e-3, 2e-3, np.inf)  # seconds: the rows of the table


def pure_seconds(run: Run, profile: TableProfile) -> pd.DataFrame:
    """Return a row for each second without prefill: passes, decoding sequences, longest and mean KV length, and the seconds
    of a pass: as measured, of even lengths, and of the straggler."""
    ticks = pd.read_csv(run.folder / "timeseries.csv")
    running, waiting = ticks["running"].to_numpy(), ticks["waiting"].to_numpy()
    instants = (np.arange(len(ticks))[:, None] + (np.arange(SAMPLES) + 0.5) / SAMPLES)[..., None]
    started = ((run.first_s <= instants) & (run.last_s > instants)).sum(axis=2)
    held = np.linspace(
        np.append(0, running[:-1]), running, SAMPLES, axis=1
    )  # fewer than started where some are preempted
    batch = np.where(waiting[:, None] > 0, np.minimum(started, held), started).mean(axis=1)
    passes = ticks["gen_throughput"].to_numpy() / np.maximum(batch, 0.5)
    passed = np.append(0.0, passes.cumsum())
    at_end = np.interp(run.last_s, np.arange(passed.size), passed)
    pure = ticks["prompt_throughput"].to_numpy() == 0
    rising = np.append(
        False, (np.diff(running) > 0) | (np.diff(waiting) < 0)
    )  # a request began or was resumed
    pure &= ~rising & ~np.append(rising[1:], False) & np.append(False, pure[:-1])
    rows = []
    for second in np.flatnonzero(pure & (running >= 3)):
        middle = second + 0.5
        there = np.flatnonzero((run.first_s <= middle) & (run.last_s > middle))
        if waiting[second] > 0:  # the youngest are preempted first
            there = there[np.argsort(run.first_s[there], kind="stable")][: round(batch[second])]
        left = at_end[there] - np.interp(middle, np.arange(passed.size), passed)
        lengths = np.maximum(run.prompt_tokens[there] + run.response_tokens[there] - left, 1.0)
        n, mean = lengths.size, float(lengths.mean())
        even_s, waits_s = profile.decode_s(n, mean), straggler_s(profile.tables, lengths)
        rows.append((passes[second], n, lengths.max(), mean, 1 / passes[second], even_s, waits_s))
    return pd.DataFrame(
        rows,
        columns=["passes", "sequences", "longest", "mean", "measured_s", "even_s", "straggler_s"],
    )


def main(
    data: Annotated[Path, typer.Argument(help="the folder with vllm_runs/ and kernel_profiles/")],
) -> None:
    console = Console()
    with errors_in_a_line("validate_stragglers"):
        for folder in run_folders(data):
            run = read_run(folder)
            rows = pure_seconds(run, run_profile(data, run))
            title = f"{run.name} TP{run.tp}, {run.gpu}: passes without prefill (ms)"
            table = Table(
                "passes",
                "sequences",
                "longest",
                "mean",
                "measured",
                "even",
                "over even",
                "straggler",
                title=title,
            )
            for _, some in rows.groupby(
                pd.cut(rows["straggler_s"], BINS, right=False), observed=True
            ):
                of = (some.mul(some["passes"], axis=0).sum() / some["passes"].sum()).to_dict()
                ms = [1e3 * of[name] for name in ("measured_s", "even_s")]
                whole = [f"{of[name]:.0f}" for name in ("sequences", "longest", "mean")]
                cells = [f"{x:.2f}" for x in (*ms, ms[0] - ms[1], 1e3 * of["straggler_s"])]
                table.add_row(f"{some['passes'].sum():.0f}", *whole, *cells)
            console.print(table)


if __name__ == "__main__":
    typer.run(main)
