"""The `calibration` section of a scenario: the log that its corrections were fitted to, and what
that log leaves open.

Invariant: a correction with another value than the fitted one is the user's: no fit replaces it,
and no warning is about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from simrl.scenario.dotted import get
from simrl.validation import in_words, numbers_are_no_truth

if TYPE_CHECKING:
    from simrl.scenario.model import Scenario

Key = Annotated[str, Field(pattern=r"^(profile|training)\.\w+$")]


class CalibrationConfig(
    BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
):
    """The log to which corrections were fitted, and what it leaves open, as `simrl calibrate` writes
    it. Every command repeats it; runs are also simulated with the other fits, which gives the range
    of their results."""

    _numbers = numbers_are_no_truth

    log: str
    """log of the run"""
    steps: str = ""
    """steps that were fitted, such as 1-20"""
    at: dict[str, str | int] = {}
    """settings of the run, by dotted key: {model: qwen3-8b, cluster.tp: 4}; a scenario with other
    ones is marked as an extrapolation"""
    lacks: tuple[str, ...] = ()
    """phases that the log does not time"""
    warnings: dict[str, str] = {}
    """what is doubtful, by the dotted keys that it is about, with commas between; another value of
    such a key removes the warning"""
    fits: Annotated[tuple[dict[Key, float], ...], Field(max_length=3)] = ()
    """corrections by dotted key: first the fit that the scenario has, then up to two others that do
    as well; another value of a key replaces it in all of them"""


def other_fits(scenario: Scenario) -> list[Scenario]:
    """Return the scenario with the corrections of each other fit that does as well."""
    if scenario.calibration is None or not scenario.calibration.fits:
        return []
    used, *others = scenario.calibration.fits
    open_keys = used.keys() - set(_changed(scenario.model_dump(), used))
    fits = []
    for fit in others:
        fitted = scenario
        for key in sorted(open_keys & fit.keys()):
            section, _, field = key.partition(".")
            fitted = fitted.with_fields(section, **{field: fit[key]})
        fits.append(fitted)
    return fits


def open_lines(scenario: Mapping[str, Any]) -> list[str]:
    """Return what the calibration of a scenario, as plain data, leaves open: lines to print; none
    without a calibration."""
    calibration = scenario.get("calibration")
    if not calibration:
        return []
    at, fits = calibration.get("at") or {}, calibration.get("fits") or [{}]
    settled = set(_changed(scenario, fits[0]))
    lacks = ", ".join(calibration.get("lacks") or ())
    line = f"Calibrated on steps {calibration.get('steps')} of {calibration['log']}"
    line += f", which lacks {lacks}: not calibrated" * bool(lacks)
    if elsewhere := _changed(scenario, at):
        other = ", ".join(
            f"{key} {in_words(at[key])}, here {in_words(get(scenario, key))}" for key in elsewhere
        )
        line += f". Fitted at {other}: an extrapolation"
    doubts = [
        text
        for keys, text in (calibration.get("warnings") or {}).items()
        if not settled & {key.strip() for key in keys.split(",")}
    ]
    return [f"{line}.", *[f"Warning: {'; '.join(doubts)}."] * bool(doubts)]


def _changed(scenario: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the keys of these values that the scenario has another value for."""
    return [key for key, value in values.items() if get(scenario, key) != value]
