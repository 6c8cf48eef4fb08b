"""The first words of a page: who is fastest, by how much, and why.

Invariant: figures are those of the tables below, reasons those of `simrl diff`; where a sweep varies the seed, settings are
compared by their mean over seeds, and a setting that failed for one of them is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from simrl.errors import InputError
from simrl.explanation import diff_results
from simrl.explanation_table import sentences
from simrl.gpu_hours import PARTS, waterfall
from simrl.html_report.sources import Run, Runs, Sweep
from simrl.metrics import window

Row = Mapping[str, Any]
SEED = "seed"
MOST_SAID = 4  # keys, and systems, that the words name
LITTLE = 1.02  # a key that moves the median less is not named


class Answer(NamedTuple):
    """A paragraph: what it says first, and the rest."""

    lead: str
    text: str


def of_runs(found: Runs) -> list[Answer]:
    """A paragraph a variant: the fastest, and what it spends its GPU time on beside the first, or beside the next."""
    runs = found.runs
    if found.replayed:
        return [_of_replay(runs[0].row, runs[1].row)]
    variants = list(dict.fromkeys(run.row["variant"] for run in runs))
    groups = [_of_group([run for run in runs if run.row["variant"] == variant], variant) for variant in variants]
    return [_of_all(runs), *groups] if len(variants) > 1 else groups


def _of_all(runs: Sequence[Run]) -> Answer:
    """Of several variants: the most samples/s, and the fewest GPU-hours."""
    fastest = max((run.row for run in runs), key=lambda row: row["samples_per_s"])
    cheapest = min((run.row for run in runs), key=lambda row: row["gpu_hours_per_1k_samples"])
    said = f"{fastest['samples_per_s']:.3g} samples/s."
    if cheapest is fastest:
        said += f" It also takes the fewest GPU-hours: {fastest['gpu_hours_per_1k_samples']:.3g} for 1,000 samples."
    else:
        said += (
            f" The fewest GPU-hours takes {cheapest['system']} with {cheapest['variant']}: "
            f"{cheapest['gpu_hours_per_1k_samples']:.3g} for 1,000 samples, at {cheapest['samples_per_s']:.3g} samples/s."
        )
    return Answer(f"Fastest of all {len(runs)} runs: {fastest['system']} with {fastest['variant']},", said)


def _of_group(group: Sequence[Run], variant: str) -> Answer:
    best = max(group, key=lambda run: run.row["samples_per_s"])
    row, where = best.row, f" with {variant}" if variant else ""
    said = (
        f"{row['samples_per_s']:.3g} samples/s, {row['rollout_bubble']:.0%} rollout bubble, "
        f"{row['off_policyness_mean']:.2f} updates off-policy on average"
    )
    if len(group) == 1:
        return Answer(f"{row['system']}{where}:", " ".join([f"{said}.", _largest_losses(best)]).strip())
    other = group[0]
    if other is best:
        other = max((run for run in group if run is not best), key=lambda run: run.row["samples_per_s"])
    times = row["samples_per_s"] / other.row["samples_per_s"]
    beside = f"{times:.2f}× as fast as {other.row['system']}, {'the first' if other is group[0] else 'the next'}"
    return Answer(f"Fastest{where}: {row['system']},", " ".join([f"{beside}: {said}.", *_why(best, other)]))


def _of_replay(predicted: Row, measured: Row) -> Answer:
    off = predicted["samples_per_s"] / measured["samples_per_s"] - 1
    return Answer(
        f"{measured['system']}: {measured['samples_per_s']:.3g} samples/s; "
        f"predicted were {predicted['samples_per_s']:.3g}, {abs(off):.0%} {'more' if off >= 0 else 'less'},",
        "training and rewards included, which a replay holds for the predicted time. Errors on the rollout alone are under "
        "“Predicted against measured”.",
    )


def _why(best: Run, other: Run) -> list[str]:
    """In the words of `simrl diff`, of which the fastest is B."""
    try:
        found = [f"it{line.removeprefix('B')}" for line in sentences(diff_results(other.result, best.result))]
    except InputError:
        return []
    return [f"In GPU-seconds a trained sample, {found[0]}", *(f"I{line[1:]}" for line in found[1:])] if found else []


def _largest_losses(run: Run, most: int = 3) -> str:
    fall = waterfall(run.result, *window(run.result, run.warmup_steps))
    losses = sorted((k for k, part in PARTS.items() if not part.ideal), key=lambda k: -fall.gpu_s[k])[:most]
    said = [f"{PARTS[k].words} {fall.gpu_s[k] / fall.total_gpu_s:.0%}" for k in losses if fall.gpu_s[k] > 0]
    return f"Besides the work that an ideal run has too, its GPU time goes to: {', '.join(said)}." if said else ""


class _Setting(NamedTuple):
    """Points that differ in their seed alone."""

    name: str
    system: str
    points: Sequence[Row]

    def mean(self, metric: str) -> float:
        return float(np.mean([row[metric] for row in self.points]))

    @property
    def which(self) -> str:
        numbers = ", ".join(str(row["point"]) for row in self.points[:8])
        return f"point{'s' * (len(self.points) > 1)} {numbers}{', …' * (len(self.points) > 8)}"

    @property
    def speed(self) -> str:
        rates = [row["samples_per_s"] for row in self.points]
        seeds = f" (mean of {len(rates)} seeds, {min(rates):.3g} to {max(rates):.3g})" if len(rates) > 1 else ""
        return f"{self.mean('samples_per_s'):.3g} samples/s{seeds}"


def of_sweep(sweep: Sweep, keys: Sequence[str]) -> list[Answer]:
    """The fastest setting, the best of each other system, the cheapest, and which keys matter."""
    good = [row for row in sweep.rows if row["error"] is None]
    if not good:
        return [Answer(f"None of the {len(sweep.rows):,} points could be simulated;", "their errors are below.")]
    settings = _settings(sweep.rows, keys)
    by_speed = sorted(settings, key=lambda s: -s.mean("samples_per_s"))
    best = by_speed[0]
    cheapest = min(settings, key=lambda s: s.mean("gpu_hours_per_1k_samples"))
    answers = [
        Answer(
            f"The fastest of {len(settings):,} settings is {best.name}:",
            f"{best.speed}, {best.mean('off_policyness_mean'):.2f} updates off-policy on average, "
            f"{best.mean('gpu_hours_per_1k_samples'):.3g} GPU-hours for 1,000 samples ({best.which}).",
        )
    ]
    others: dict[str, _Setting] = {}
    for setting in by_speed:
        if setting.system != best.system:
            others.setdefault(setting.system, setting)
    if others:
        said = [
            f"{s.name} {s.mean('samples_per_s') / best.mean('samples_per_s'):.2f}×"
            for s in list(others.values())[:MOST_SAID]
        ]
        more = f" … and {len(others) - MOST_SAID} more" if len(others) > MOST_SAID else ""
        answers.append(Answer("The fastest of each other system", f"has, of that speed: {'; '.join(said)}{more}."))
    if cheapest is not best:
        answers.append(
            Answer(
                f"The fewest GPU-hours takes {cheapest.name}:",
                f"{cheapest.mean('gpu_hours_per_1k_samples'):.3g} for 1,000 samples, at {cheapest.speed}.",
            )
        )
    moves = _moves(good, keys)
    if moves:
        answers.append(
            Answer(
                "What moves speed most:",
                f"{', '.join(moves[:MOST_SAID])} (the best value's median samples/s over the worst's, of all points that have "
                "them).",
            )
        )
    return answers


def _settings(rows: Sequence[Row], keys: Sequence[str]) -> list[_Setting]:
    """Those of which no seed failed; of all points where each lost one."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[key]) for key in keys if key != SEED), []).append(row)
    whole = [group for group in groups.values() if all(row["error"] is None for row in group)]
    left = whole or [[row for row in group if row["error"] is None] for group in groups.values()]
    return [_Setting(setting_name(g[0], keys), str(g[0]["system.name"]), g) for g in left if g]


def setting_name(row: Row, keys: Sequence[str]) -> str:
    """The system with all that was varied but the seed."""
    rest = ", ".join(
        f"{key.removeprefix('system.')}={plain(row[key])}"
        for key in keys
        if key not in ("system.name", SEED) and row[key] is not None
    )
    return f"{row['system.name']} ({rest})" if rest else str(row["system.name"])


def plain(value: Any) -> Any:
    """A number without the digits that nobody gave."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _moves(good: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Keys by how far the medians of their values are apart."""
    found = []
    for key in keys:
        by_value: dict[str, list[float]] = {}
        for row in good:
            if row[key] is not None:
                by_value.setdefault(str(row[key]), []).append(row["samples_per_s"])
        medians = {value: float(np.median(rates)) for value, rates in by_value.items()}
        if len(medians) > 1:
            best, worst = max(medians, key=medians.__getitem__), min(medians, key=medians.__getitem__)
            found.append((medians[best] / medians[worst], f"{key} {medians[best] / medians[worst]:.2f}× (best {best})"))
    return [text for times, text in sorted(found, reverse=True) if times > LITTLE]
