"""A calibration on the screen: the corrections, what they mean, the errors in and out of the window, and what is assumed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from simrl.calibration import Calibration


def print_calibration(found: Calibration, console: Console) -> None:
    """All of it, in two tables and a few lines."""
    table = Table(
        "correction", "value", "standard error", "range", "what it means", box=None, pad_edge=False, header_style="bold"
    )
    for c in found.corrections:
        error = "at the bound of its range" if c.error is None else f"± {_shown(c.error, c.unit)}"
        bounds = f"{_shown(c.low, c.unit)} to {_shown(c.high, c.unit)}"
        table.add_row(c.name, _shown(c.value, c.unit), error, bounds, c.meaning)
    console.print(table)
    first, last = found.window
    table = Table(
        "simulated against logged",
        f"in the window ({first}-{last})",
        "on the rest",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for e in found.errors:
        table.add_row(e.phase, _apart(e.steps_in, e.mape_in, e.bias_in), _apart(e.steps_out, e.mape_out, e.bias_out))
    console.print()
    console.print(table)
    console.print(
        "Mean absolute error of a step, and in brackets that of all seconds together. Nothing was fitted to the rest.\n"
    )
    for text in found.assumed:
        console.print(f"Assumed: {text}.")


def _shown(value: float, unit: str) -> str:
    if unit == "s" and 0 < abs(value) < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g}{' ' + unit if unit else ''}"


def _apart(steps: int, mape: Any, bias: Any) -> str:
    return f"{mape:.1%} ({bias:+.1%}), {steps} steps" if steps else "no steps"
