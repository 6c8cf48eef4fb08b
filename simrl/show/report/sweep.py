"""The page of a sweep: its answer, the columns of pictures and table, failed points, sources.

Invariant: every number is from the sweep's table; the page's script filters, sorts and draws them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import yaml
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError, create_model

from simrl.errors import InputError
from simrl.show.report.answer import Row, of_sweep, plain, setting_name
from simrl.show.report.sources import SweepRows
from simrl.show.style import SERIES
from simrl.validation import in_words, shortened

# Key of a column, its name on the page, its format in the page's script, its meaning, and the unit
# that its name lacks.
METRICS = (
    ("samples_per_s", "samples/s", "g3", "trained samples a second"),
    ("speedup", "speed-up", "x2", "samples/s over the first point's", "×"),
    (
        "speedup_in_variant",
        "speed-up in its variant",
        "x2",
        "over the first point with all else the same",
        "×",
    ),
    ("rollout_bubble", "rollout bubble", "p0", "share of time that rollout GPUs idle"),
    (
        "occupancy",
        "occupancy",
        "p0",
        "share of the slots of its batch that a rollout worker fills while it runs",
    ),
    ("train_idle", "train idle", "p0", "share of time that GPUs which only train idle"),
    (
        "off_policyness_mean",
        "off-policyness",
        "f2",
        "updates between generating a token and training on it, mean",
        "updates",
    ),
    ("off_policyness_max", "largest", "n0", "the largest off-policyness of a token", "updates"),
    ("accept_length", "tokens a draft", "f2", "what a pass with a draft yields of a response"),
    ("step_s", "step s", "g3", "seconds a policy update"),
    ("tokens_per_s", "tokens/s", "g3", "trained tokens a second, prompts and responses"),
    ("gpu_hours_per_1k_samples", "GPU-h/1k", "g3", "hours of all GPUs for 1,000 trained samples"),
    ("cost_per_1k_samples", "cost/1k", "g3", "their cost at cluster.cost_per_gpu_hour"),
)
Measure = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
# The columns of a point, and those of a simulated one.
MEASURES: dict[str, Any] = {key: (Measure | None, None) for key, *_ in METRICS}
POINT = TypeAdapter(create_model("Point", hash=str, variant=str, **MEASURES))
MEASURES |= {key: Measure for key in ("gpu_hours_per_1k_samples", "off_policyness_mean")}
MEASURES["samples_per_s"] = Annotated[Measure, Field(gt=0)]
SIMULATED = TypeAdapter(create_model("SimulatedPoint", hash=str, variant=str, **MEASURES))
KEYS = TypeAdapter(dict[str, str | bool | int | FiniteFloat | None])
PROVENANCE = {
    "trace_kind": "rollouts (trace)",
    "profile_kind": "step times (profile)",
    "speculation": "speculation",
}
MOST_ERRORS = 200


def sweep_context(sweep: SweepRows) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the context of the template, and the data of the page's script. Raise `InputError` for
    impossible rows."""
    rows = sweep.rows
    for row in rows:
        if column := _wrong(row, sweep.keys):
            raise InputError(
                f"{sweep.folder}: the table's point {row['point']} has {column}={shortened(row.get(column))}, which cannot "
                "be; run the sweep's command again, it goes on"
            )
    good = [row for row in rows if row["error"] is None]
    metrics = [m for m in METRICS if any(row.get(m[0]) is not None for row in good)]
    keys = [key for key in sweep.keys if len({str(row[key]) for row in rows}) > 1] or [
        "system.name"
    ]
    data = {
        "series": SERIES,
        "keys": keys,
        "metrics": [
            dict(zip(("key", "name", "format", "meaning", "unit"), metric, strict=False))
            for metric in metrics
        ],
        "columns": {
            "point": [row["point"] for row in good],
            **{key: [plain(row[key]) for row in good] for key in keys},
            **{key: [_number(row[key]) for row in good] for key, *_ in metrics},
            "settled": [row.get("settled") is not False for row in good],
        },
    }
    failed = [row for row in rows if row["error"] is not None]
    context = {
        "answer": of_sweep(sweep, keys),
        "points": len(rows),
        "good": len(good),
        "keys": keys,
        "failed": [
            (row["point"], setting_name(row, keys), row["error"]) for row in failed[:MOST_ERRORS]
        ],
        "failed_count": len(failed),
        "reasons": len(Counter(str(row["error"]) for row in failed)),
        "fixed": [(key, in_words(rows[0][key])) for key in sweep.keys if key not in keys],
        "provenance": _provenance(good),
        "asked": yaml.safe_dump(sweep.arguments, sort_keys=False, allow_unicode=True),
        "scenario": _scenario(sweep, good),
    }
    return context, data


def _wrong(row: Row, keys: Sequence[str]) -> str | None:
    """Return the first column with an impossible value."""
    try:
        KEYS.validate_python({key: row[key] for key in keys})
        (SIMULATED if row["error"] is None else POINT).validate_python(row)
    except ValidationError as error:
        return str(error.errors()[0]["loc"][0])
    return None


def _number(value: float | None) -> float | None:
    """Return five significant digits: a picture shows no more, and the file holds no more."""
    return None if value is None else float(f"{value:.5g}")


def _provenance(good: Sequence[Row]) -> list[tuple[str, str]]:
    lines = []
    for key, name in PROVENANCE.items():
        kinds = Counter(str(row[key]) for row in good if row.get(key) is not None)
        points = (f"{kind} ({n:,} points)" if len(kinds) > 1 else kind for kind, n in kinds.items())
        if kinds:
            lines.append((name, ", ".join(points)))
    return lines


def _scenario(sweep: SweepRows, good: Sequence[Row]) -> str:
    """Return the fastest point's scenario as it was simulated; files are named by the hash of their
    content."""
    best = max(good or sweep.rows, key=lambda row: row.get("samples_per_s") or 0.0)
    place = sweep.folder / "points" / best["hash"][:2] / f"{best['hash']}.json"
    try:
        document = json.loads(place.read_text(encoding="utf-8"))["inputs"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
