"""A calibration on the screen: the corrections and their meaning, the errors in and out of the
window, what the log lacks and leaves open, the assumptions."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from simrl.show.text import bare_table, listed, say
from simrl.study.calibration import Calibration


def print_calibration(calibration: Calibration, console: Console, doubts: bool = True) -> None:
    """Print the corrections, the errors in and out of the window, and the assumptions; with
    `doubts`, also what the log lacks and leaves open."""
    console.print(
        bare_table(
            ("correction", "value", "standard error", "expected", "what it means"),
            [
                (
                    c.name,
                    _with_unit(c.value, c.unit),
                    "at its bound" if c.error is None else f"± {_with_unit(c.error, c.unit)}",
                    "" if c.expected is None else _with_unit(c.expected, c.unit),
                    c.meaning,
                )
                for c in calibration.corrections
            ],
        )
    )
    errors = [
        (
            e.phase,
            _errors_of(e.steps_in, e.mape_in, e.bias_in),
            _errors_of(e.steps_out, e.mape_out, e.bias_out),
            f"{e.predicted_s:.4g} s ({e.low_s:.4g} to {e.high_s:.4g})",
        )
        for e in calibration.errors
    ]
    window = "in the window ({}-{})".format(*calibration.window)
    console.print()
    console.print(
        bare_table(("simulated against logged", window, "on the rest", "predicted a step"), errors)
    )
    say(
        console,
        "Mean absolute error of a step (error of the total); predictions with the range of fits that do as well.\n",
    )
    lacks = f"The log lacks {listed(calibration.lacks)}: not calibrated (--column OURS=TAG names a tag of your own)."
    lines = [
        *[lacks] * bool(calibration.lacks),
        *(f"Warning: {text}." for text in calibration.warnings),
    ]
    say(console, *lines * doubts, style="bold")
    say(console, *(f"Note: {text}." for text in calibration.notes))
    say(console, *(f"Assumed: {text}." for text in calibration.assumed))


def _with_unit(value: float, unit: str) -> str:
    if unit == "s" and 0 < abs(value) < 9.995e-4:
        return f"{value * 1e6:.3g} µs"
    if unit == "s" and 0 < abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g}{' ' + unit if unit else ''}"


def _errors_of(steps: int, mape: Any, bias: Any) -> str:
    return f"{mape:.1%} ({bias:+.1%}), {steps} steps" if steps else "no steps"
