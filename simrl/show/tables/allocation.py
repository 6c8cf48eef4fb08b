"""An allocation of workers to groups on the screen."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from simrl.show.text import framed_table, say

PLAN_NAMES = {
    "equal": "equal",
    "two_tier": "two-tier",
    "exact": "exact gradient",
    "optimum": "optimum",
}


def print_allocation(d: dict[str, Any], console: Console) -> None:
    """Print the data of `simrl.analysis.allocation.allocate_step`."""
    several, more = "s" * (len(d["groups"]) > 1), "s" * (d["workers"] > 1)
    samples = f"{d['samples']:,} samples in {len(d['groups'])} group{several} on {d['workers']} worker{more}"
    head = f", history epoch {d['history_epoch']}: {samples}; τ {d['tau']['kind']}, {d['tau']['source']}"
    console.print(Text.assemble((f"Step {d['step']}", "bold"), head))
    headings = ("group", "prompts", "mean tokens", "equal", "s", "two-tier", "s", "target s")
    cells = (
        "{group} {prompts:,} {representative_tokens:,.0f} {equal_workers} {equal_predicted_s:,.1f} {workers} "
        "{predicted_s:,.1f} {target_s:,.1f}"
    )
    groups = [cells.format(**group).split() for group in d["groups"]]
    console.print(framed_table(headings, groups, "Workers of each group"))
    searched = f"searched to {d['precision_s']:g} s; the smallest possible is {d['exact_gradient_s']:.2f} s"
    if d["tau"]["kind"] == "measured":
        say(
            console,
            f"The two-tier plan with τ computed for {d['profile']}, in seconds: "
            + " ".join(f"{group['computed_s']:,.1f}" for group in d["groups"]),
        )
    say(
        console,
        f"Target: t0 {d['t0_s']:.2f} s, gradient {d['gradient_s']:.2f} s a group ({searched})",
    )
    figures = ("plan", "longest group", "longest two steps", "a step", "a step, paired")
    cells = "{longest_group_s:,.1f} {longest_two_steps_s:,.1f} {step_s[reversed]:,.1f} {step_s[pairing]:,.1f}"
    plans = [(PLAN_NAMES[plan["plan"]], *cells.format(**plan).split()) for plan in d["plans"]]
    console.print(framed_table(figures, plans, "Predicted seconds"))
    if d["growth_factor"] is not None:
        say(
            console,
            f"Migration threshold β from the epoch before to the history: {d['growth_factor']:.2f}",
        )
    say(console, *(f"- {note}" for note in d["notes"]))
