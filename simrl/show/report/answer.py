"""The first words of a page: the fastest run or setting, its lead, and the reasons.

Invariant: figures come from the tables below, reasons from `simrl diff`. If a sweep varies the
seed, settings are compared by their means over seeds, and a setting that failed for one seed does
not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from simrl.analysis.explanation import diff_results
from simrl.analysis.gpu_hours import PARTS, waterfall
from simrl.errors import InputError
from simrl.result.metrics import window
from simrl.show.report.sources import Run, Runs, SweepRows
from simrl.show.tables.explain import sentences
from simrl.show.text import grouped
from simrl.validation import in_words

Row = Mapping[str, Any]
SEED = "seed"
MOST_NAMED = 4  # keys, and systems, that the words name
LITTLE = 1.02  # ratio of medians up to which a key is not named


class Answer(NamedTuple):
    """A paragraph: its first words, and the rest."""

    lead: str
    text: str


def of_runs(source: Runs) -> list[Answer]:
    """Return a paragraph for each variant: its fastest run, and why that beats the first or the
    next one."""
    runs = source.runs
    if source.replayed:
        return [_of_replay(runs[0].row, runs[1].row)]
    groups = grouped((str(run.row["variant"]), run) for run in runs)
    answers = [_of_group(group, variant) for variant, group in groups.items()]
    return [_of_all(runs), *answers] if len(groups) > 1 else answers


def _of_all(runs: Sequence[Run]) -> Answer:
    """Return the run with the most samples/s of all variants, and the run with the fewest
    GPU-hours."""
    fastest, cheapest = (
        max((run.row for run in runs), key=_speed),
        min((run.row for run in runs), key=_gpu_hours),
    )
    hours = f"{_gpu_hours(cheapest):.3g} for 1,000 samples"
    if cheapest is fastest:
        others = f"It also takes the fewest GPU-hours: {hours}."
    else:
        name = f"{cheapest['system']} with {cheapest['variant']}"
        others = f"The fewest GPU-hours takes {name}: {hours}, at {_speed(cheapest):.3g} samples/s."
    lead = f"Fastest of all {len(runs)} runs: {fastest['system']} with {fastest['variant']},"
    return Answer(lead, f"{_speed(fastest):.3g} samples/s. {others}")


def _of_group(group: Sequence[Run], variant: str) -> Answer:
    """Return the fastest run of a variant, and why it beats the first run, or the next if it is the
    first."""
    ranked = sorted(group, key=lambda run: -_speed(run.row))
    best, row, where = ranked[0], ranked[0].row, f" with {variant}" if variant else ""
    filled = "" if row["occupancy"] is None else f"{row['occupancy']:.0%} occupancy, "
    figures = (
        f"{_speed(row):.3g} samples/s, {row['rollout_bubble']:.0%} rollout bubble, {filled}{row['off_policyness_mean']:.2f} "
        "updates off-policy on average."
    )
    if len(group) == 1:
        return Answer(f"{row['system']}{where}:", f"{figures} {_largest_losses(best)}".strip())
    other, place = (ranked[1], "the next") if group[0] is best else (group[0], "the first")
    times = f"{_speed(row) / _speed(other.row):.2f}× as fast as {other.row['system']}, {place}"
    return Answer(
        f"Fastest{where}: {row['system']},", " ".join([f"{times}: {figures}", *_why(best, other)])
    )


def _of_replay(predicted: Row, measured: Row) -> Answer:
    off = _speed(predicted) / _speed(measured) - 1
    return Answer(
        f"{measured['system']}: {_speed(measured):.3g} samples/s; predicted were {_speed(predicted):.3g}, {abs(off):.0%} "
        f"{'more' if off >= 0 else 'less'},",
        "training and rewards included, which a replay without --train holds for the predicted time. Errors on the rollout "
        "alone are under “Predicted against measured”.",
    )


def _speed(row: Row) -> float:
    return float(row["samples_per_s"])


def _gpu_hours(row: Row) -> float:
    return float(row["gpu_hours_per_1k_samples"])


def _why(best: Run, other: Run) -> list[str]:
    """Return the sentences of `simrl diff`, in which the fastest is B."""
    try:
        reasons = [
            line.removeprefix("B") for line in sentences(diff_results(other.result, best.result))
        ]
    except InputError:
        return []
    return [
        f"{'It' if i else 'In GPU-seconds a trained sample, it'}{reason}"
        for i, reason in enumerate(reasons)
    ]


def _largest_losses(run: Run) -> str:
    fall = waterfall(run.result, *window(run.result, run.warmup_steps))
    losses = sorted(
        (k for k, part in PARTS.items() if not part.ideal), key=lambda k: -fall.gpu_s[k]
    )[:3]
    shares = [
        f"{PARTS[k].words} {fall.gpu_s[k] / fall.total_gpu_s:.0%}"
        for k in losses
        if fall.gpu_s[k] > 0
    ]
    return (
        f"Apart from the work of an ideal run, its GPU time goes to: {', '.join(shares)}."
        if shares
        else ""
    )


class _Setting(NamedTuple):
    """Points that differ in their seed alone."""

    name: str
    points: Sequence[Row]

    def mean(self, metric: str) -> float:
        return float(np.mean([row[metric] for row in self.points]))

    @property
    def rate(self) -> float:
        return self.mean("samples_per_s")

    @property
    def gpu_hours(self) -> float:
        return self.mean("gpu_hours_per_1k_samples")

    @property
    def which(self) -> str:
        numbers = ", ".join(str(row["point"]) for row in self.points[:8])
        return f"point{'s' * (len(self.points) > 1)} {numbers}{', …' * (len(self.points) > 8)}"

    @property
    def speed(self) -> str:
        rates = list(map(_speed, self.points))
        seeds = (
            f" (mean of {len(rates)} seeds, {min(rates):.3g} to {max(rates):.3g})"
            if len(rates) > 1
            else ""
        )
        return f"{self.rate:.3g} samples/s{seeds}"


def of_sweep(sweep: SweepRows, keys: Sequence[str]) -> list[Answer]:
    """Return the fastest setting, the best of each other system, the cheapest, and which keys
    matter."""
    good = [row for row in sweep.rows if row["error"] is None]
    if not good:
        return [
            Answer(
                f"None of the {len(sweep.rows):,} points could be simulated;",
                "their errors are below.",
            )
        ]
    settings = _settings(sweep.rows, keys)
    best, cheapest = max(settings, key=lambda s: s.rate), min(settings, key=lambda s: s.gpu_hours)
    per_1k = f"{best.gpu_hours:.3g} GPU-hours for 1,000 samples ({best.which})"
    figures = f"{best.speed}, {best.mean('off_policyness_mean'):.2f} updates off-policy on average, {per_1k}."
    answers = [Answer(f"The fastest of {len(settings):,} settings is {best.name}:", figures)]
    of_systems: dict[Any, _Setting] = {}
    for setting in sorted(settings, key=lambda s: -s.rate):
        of_systems.setdefault(setting.points[0]["system.name"], setting)
    others = [f"{s.name} {s.rate / best.rate:.2f}×" for s in of_systems.values()][1:]
    if others:
        more = f" … and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        speeds = f"has, of that speed: {'; '.join(others[:MOST_NAMED])}{more}."
        answers.append(Answer("The fastest of each other system", speeds))
    if cheapest is not best:
        hours = f"{cheapest.gpu_hours:.3g} for 1,000 samples, at {cheapest.speed}."
        answers.append(Answer(f"The fewest GPU-hours takes {cheapest.name}:", hours))
    moves = _moves(good, keys)[:MOST_NAMED]
    if moves:
        how = "(the best value's median samples/s over the worst's, of all points that have them)"
        answers.append(Answer("What moves speed most:", f"{', '.join(moves)} {how}."))
    return answers


def _settings(rows: Sequence[Row], keys: Sequence[str]) -> list[_Setting]:
    """Return the settings without a failed seed; if there is none, all settings with their other
    seeds."""
    groups = grouped((tuple(str(row[key]) for key in keys if key != SEED), row) for row in rows)
    whole = [group for group in groups.values() if all(row["error"] is None for row in group)]
    left = whole or [[row for row in group if row["error"] is None] for group in groups.values()]
    return [_Setting(setting_name(group[0], keys), group) for group in left if group]


def setting_name(row: Row, keys: Sequence[str]) -> str:
    """Return the system with all varied keys except the seed."""
    varied = [key for key in keys if key not in ("system.name", SEED) and row[key] is not None]
    rest = ", ".join(f"{key.removeprefix('system.')}={plain(row[key])}" for key in varied)
    return f"{row['system.name']} ({rest})" if rest else str(row["system.name"])


def plain(value: Any) -> Any:
    """Return a number without spurious digits, and a truth value in words."""
    return (
        in_words(value)
        if isinstance(value, bool)
        else float(f"{value:.6g}")
        if isinstance(value, float)
        else value
    )


def _moves(good: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return the keys except the seed, which is no choice, by the ratio of the best to the worst
    median of their values."""
    moves = []
    for key in keys:
        by_value = grouped(
            (in_words(row[key]), _speed(row))
            for row in good
            if key != SEED and row[key] is not None
        )
        medians = {value: float(np.median(rates)) for value, rates in by_value.items()}
        if len(medians) > 1:
            best, times = (
                max(medians, key=medians.__getitem__),
                max(medians.values()) / min(medians.values()),
            )
            moves.append((times, f"{key} {times:.2f}× (best {best})"))
    return [text for times, text in sorted(moves, reverse=True) if times > LITTLE]
