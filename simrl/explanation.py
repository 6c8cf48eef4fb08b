"""An explanation of one result, and of the difference between two: data, for the screen and for scripts.

Invariant: computed from the tables of results alone. Rates (GPU-seconds a trained sample, findings, critical paths) are of the
window of `simrl.metrics`, the updates after the warm-up, as a comparison has them; GPU-hours are of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simrl.critical_path import HeldUp, Path, Paths
from simrl.diagnosis import Evidence, Finding, diagnose
from simrl.errors import InputError
from simrl.gpu_hours import PARTS, Waterfall, undivided, waterfall
from simrl.metrics import summary, window
from simrl.result import Result
from simrl.result_check import require


@dataclass(frozen=True)
class Explanation:
    """Of one result.

    `whole` is the waterfall of the run, `steady` that of the updates after the first `warmup_steps`; `path` is the critical
    path of one update, `paths_s` the seconds by kind of those of all updates after the warm-up; `held_up` the samples that came
    last in the update, and `held_up_s` the seconds by which its batch had been complete without them.
    """

    label: str
    variant: str
    measured: bool
    warmup_steps: int
    updates: int
    full_batch: Mapping[str, Any] | None
    whole: Waterfall
    steady: Waterfall
    path: Path
    paths_s: Mapping[str, float]
    held_up: tuple[HeldUp, ...]
    held_up_s: float
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`; parts are those that the run has."""
        parts = [
            {
                "part": key,
                "words": PARTS[key].words,
                "ideal": PARTS[key].ideal,
                "gpu_s": value,
                "gpu_s_per_sample": self.steady.per_sample.get(key),
            }
            for key, value in self.whole.gpu_s.items()
            if value
        ]
        return {
            "label": self.label,
            "variant": self.variant,
            "measured": self.measured,
            "gpus": self.whole.gpus,
            "end_s": self.whole.end_s,
            "updates": self.updates,
            "warmup_steps": self.warmup_steps,
            "gpu_s": self.whole.total_gpu_s,
            "gpu_s_per_sample": self.steady.total_gpu_s / self.steady.samples,
            "full_batch": self.full_batch,
            "parts": parts,
            "critical_path": {
                "step": self.path.step,
                "started_s": self.path.started_s,
                "ended_s": self.path.ended_s,
                "seconds_by_kind": self.path.seconds(),
                "links": [link._asdict() for link in self.path.links],
            },
            "critical_paths_s": dict(self.paths_s),
            "held_up": [sample._asdict() for sample in self.held_up],
            "held_up_s": self.held_up_s,
            "findings": [finding._asdict() for finding in self.findings],
        }


@dataclass(frozen=True)
class Change:
    """A part of the waterfall, in GPU-seconds a trained sample of both runs, and by how much B has less."""

    part: str
    words: str
    a_gpu_s: float
    b_gpu_s: float
    saved_gpu_s: float


@dataclass(frozen=True)
class Difference:
    """Run B against run A: GPU-seconds and seconds a trained sample, and what the first are made of, the largest change first.
    `cautions` say why the two may not be comparable."""

    a: str
    b: str
    a_gpus: int
    b_gpus: int
    a_gpu_s: float
    b_gpu_s: float
    a_s: float
    b_s: float
    changes: tuple[Change, ...]
    cautions: tuple[str, ...]


def explain_result(result: Result, step: int | None = None) -> Explanation:
    """Raises `InputError` for a result without updates after its warm-up, and for a step that it has not."""
    _require_facts(result)
    warmup_steps, updates = counted_warmup(result), result.steps.num_rows
    if step is not None and not 0 <= step < updates:
        raise InputError(f"--step {step}: the run has updates 0 to {updates - 1}; choose one of them")
    paths = Paths(result)
    chosen = paths.typical_step(warmup_steps) if step is None else step
    steady = waterfall(result, *window(result, warmup_steps))
    of_updates = [paths.of(k) for k in range(warmup_steps, updates)]
    seconds: dict[str, float] = {}
    for path in of_updates:
        for kind, s in path.seconds().items():
            seconds[kind] = seconds.get(kind, 0.0) + s
    held_up, held_up_s = paths.held_up(chosen)
    return Explanation(
        label=_name(result),
        variant=str(result.metadata.get("variant", "")),
        measured=_measured(result),
        warmup_steps=warmup_steps,
        updates=updates,
        full_batch=result.metadata.get("full_batch"),
        whole=waterfall(result),
        steady=steady,
        path=paths.of(chosen),
        paths_s=dict(sorted(seconds.items(), key=lambda item: -item[1])),
        held_up=tuple(held_up),
        held_up_s=held_up_s,
        findings=tuple(diagnose(Evidence(result, summary(result, warmup_steps), steady, of_updates))),
    )


def diff_results(a: Result, b: Result) -> Difference:
    """Raises `InputError` for a result without updates after its warm-up."""
    for each in (a, b):
        _require_facts(each)
    falls = [waterfall(each, *window(each, counted_warmup(each))) for each in (a, b)]
    if any(fall.gpu_s["undivided"] for fall in falls):
        falls = [undivided(fall) for fall in falls]
    of_a, of_b = falls[0].per_sample, falls[1].per_sample
    changes = [
        Change(key, part.clause, of_a[key], of_b[key], of_a[key] - of_b[key])
        for key, part in PARTS.items()
        if of_a[key] or of_b[key]
    ]
    gpu_s = [fall.total_gpu_s / fall.samples for fall in falls]
    return Difference(
        a=_name(a),
        b=_name(b),
        a_gpus=falls[0].gpus,
        b_gpus=falls[1].gpus,
        a_gpu_s=gpu_s[0],
        b_gpu_s=gpu_s[1],
        a_s=gpu_s[0] / falls[0].gpus,
        b_s=gpu_s[1] / falls[1].gpus,
        changes=tuple(sorted(changes, key=lambda change: -abs(change.saved_gpu_s))),
        cautions=tuple(_cautions(a, b, falls)),
    )


def _require_facts(result: Result) -> None:
    require(result.metadata, "label", "gpus", "train_gpus", "rollout_workers", "end_s", "scenario")


def counted_warmup(result: Result) -> int:
    """Of a run that was stopped early, what leaves it half of its updates at least."""
    updates: int = result.steps.num_rows
    if not updates:
        raise InputError("the run made no policy update; explain one that made some")
    return min(int(result.metadata["scenario"]["warmup_steps"]), updates // 2)


def _measured(result: Result) -> bool:
    return "replay" in result.metadata


def _name(result: Result) -> str:
    label = str(result.metadata["label"])
    return f"{label}, measured" if _measured(result) else label


def _cautions(a: Result, b: Result, falls: list[Waterfall]) -> list[str]:
    """What else differs than the system."""
    said = []
    scenarios = [each.metadata["scenario"] for each in (a, b)]
    for what, values in {
        "model": [s["model"] for s in scenarios],
        "GPU": [s["cluster"]["gpu"] for s in scenarios],
        "workload": [s["workload"] for s in scenarios],
        "seed": [s["seed"] for s in scenarios],
        "warm-up": [counted_warmup(each) for each in (a, b)],
        "updates": [each.steps.num_rows for each in (a, b)],
    }.items():
        if values[0] != values[1]:
            shown = f": {values[0]} and {values[1]}" if isinstance(values[0], str | int) else ""
            said.append(f"the two differ in {what}{shown}")
    tokens = []
    for each, fall in zip((a, b), falls, strict=True):
        steps = each.steps.slice(counted_warmup(each))
        tokens.append(sum(steps.column("response_tokens").to_pylist()) / fall.samples)
    if abs(tokens[0] / tokens[1] - 1) > 0.03:
        said.append(
            f"A trained on {tokens[0]:,.0f} response tokens a sample, B on {tokens[1]:,.0f}: part of the difference is other "
            "samples; simulate more steps"
        )
    return said
