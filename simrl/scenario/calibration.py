"""The `calibration` section of a scenario: the log that its corrections were fitted to, and what
that log leaves open.

Invariant: a correction with another value than the fitted one is the user's: no fit replaces it,
and a warning about such corrections alone is settled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from simrl.scenario.dotted import get
from simrl.training.config import Seconds, Share
from simrl.validation import Section, in_words

if TYPE_CHECKING:
    from simrl.scenario.model import Scenario

Fit = TypedDict(  # the corrections that `simrl.study.corrections` fits
    "Fit",
    {
        "profile.forward_correction": Annotated[float, Field(ge=0.01, le=100)],
        "profile.between_passes_s": Seconds,
        "profile.sequence_overhead_s": Annotated[float, Field(ge=0, le=1)],
        "training.load_s": Seconds,
        "training.mfu": Share,
        "training.update_overhead_s": Seconds,
        "training.log_prob_mfu": Share,
        "training.log_prob_overhead_s": Seconds,
    },
    total=False,
)


class CalibrationConfig(Section):
    """The log to which corrections were fitted, and what it leaves open, as `simrl calibrate` writes
    it. Commands that simulate the scenario repeat it, and simulate it with the other fits, too, which
    gives the range of their results."""

    log: str
    """log of the run"""
    steps: str
    """steps that were fitted: 1-20"""
    at: dict[str, str | int] = {}
    """settings of the run, by dotted key: {model: qwen3-8b, cluster.tp: 4}; a scenario with other
    ones is marked as an extrapolation"""
    lacks: tuple[str, ...] = ()
    """phases that the log does not time"""
    warnings: dict[str, str] = {}
    """what is doubtful, by the dotted keys that it is about, with commas between; other values of
    all of them remove the warning"""
    fits: Annotated[tuple[Fit, ...], Field(max_length=3)] = ()
    """corrections by dotted key: first the fit that the scenario has, then up to two others that do
    as well; another value of a key replaces it in all of them"""


def other_fits(scenario: Scenario) -> list[Scenario]:
    """Return the scenario with the corrections of each other fit that does as well."""
    if scenario.calibration is None or not scenario.calibration.fits:
        return []
    used, *others = scenario.calibration.fits
    settled = _changed(scenario.model_dump(), used)

    def part(section: str, fit: Any) -> dict[str, float]:
        keys = (key for key in fit if key.startswith(f"{section}.") and key not in settled)
        return {key.removeprefix(f"{section}."): fit[key] for key in keys}

    return [
        scenario.with_fields("profile", **part("profile", fit)).with_fields(
            "training", **part("training", fit)
        )
        for fit in others
    ]


def open_lines(scenario: Mapping[str, Any]) -> list[str]:
    """Return what the calibration of a scenario, as plain data, leaves open: lines to print; none
    without a calibration."""
    if not (calibration := scenario.get("calibration")):
        return []
    at, lacks = calibration.get("at") or {}, ", ".join(calibration.get("lacks") or ())
    settled = _changed(scenario, (calibration.get("fits") or [{}])[0])
    elsewhere = ", ".join(
        f"{key} {in_words(at[key])}, here {in_words(get(scenario, key))}"
        for key in sorted(_changed(scenario, at))
    )
    doubts = [
        " ".join(text.split())  # one line, also of a section written by hand
        for keys, text in sorted((calibration.get("warnings") or {}).items())
        if not settled >= {*re.split(r",\s*", keys)}
    ]
    return [
        f"Calibrated on steps {calibration['steps']} of {calibration['log']}"
        + f", which lacks {lacks}: not calibrated" * bool(lacks)
        + f". Fitted at {elsewhere}: an extrapolation" * bool(elsewhere)
        + ".",
        *[f"Warning: {'; '.join(doubts)}."] * bool(doubts),
    ]


def _changed(scenario: Mapping[str, Any], values: Mapping[str, Any]) -> set[str]:
    """Return the keys of these values that the scenario has another value for."""
    return {key for key, value in values.items() if get(scenario, key) != value}
