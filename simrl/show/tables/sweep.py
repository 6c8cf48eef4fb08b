"""A sweep on the screen: its fastest points, how many there are, and what failed."""

from __future__ import annotations

from rich.console import Console

from simrl.show.tables.compare import GROWING
from simrl.show.text import bare_table, say
from simrl.study.sweep import SweepPlan, Swept
from simrl.validation import in_words

SHOWN = 10
MEASURES = {
    "samples/s": "{samples_per_s:.3g}",
    "speed-up": "{speedup:.2f}×",
    "rollout bubble": "{rollout_bubble:.0%}",
    "occupancy": "{occupancy:.0%}",
    "train idle": "{train_idle:.0%}",
    "off-policy": "{off_policyness_mean:.2f}{growing}",
    "GPU-h/1k": "{gpu_hours_per_1k_samples:.3g}",
}


def print_sweep(planned: SweepPlan, swept: Swept, console: Console) -> None:
    """Print the fastest points as a table, the number of points, and what failed."""
    best = sorted((row for row in swept.rows if row["error"] is None), key=lambda row: -row["samples_per_s"])[:SHOWN]
    points = len(swept.rows)
    if best:
        values = [["–" if row[key] is None else in_words(row[key]) for key in planned.keys] for row in best]
        measures = [
            [text.format(**row, growing="" if row["settled"] else " ↑") for text in MEASURES.values()] for row in best
        ]
        rows = [(row["point"], *a, *b) for row, a, b in zip(best, values, measures, strict=True)]
        say(console, f"The fastest {len(best)} of {points} points (speed-up over the first point)")
        console.print(bare_table(("point", *planned.keys, *MEASURES), rows))
        if not all(row["settled"] for row in best):
            say(console, f"↑ {GROWING}")
        console.print()
    counts = [f"{points} points", f"{swept.simulated} simulated now"]
    if swept.simulated < points:
        counts.append(f"{points - swept.simulated} were there")
    if planned.combinations > points:
        counts.append(f"{planned.combinations} combinations, some of them the same")
    say(console, f"{', '.join(counts)}.")
    failed = [row for row in swept.rows if row["error"] is not None]
    if failed:
        say(console, f"{len(failed)} failed; point {failed[0]['point']}: {failed[0]['error']}")
