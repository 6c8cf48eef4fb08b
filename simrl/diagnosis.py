"""Diagnosis: known signs of a run that goes wrong, each with its figure, the threshold and whose it is, and what to try.

Invariant: a figure is computed from the result's tables, over the updates after the warm-up unless its words say otherwise; a
finding is made where it is beyond the threshold, and nowhere else. A remedy is a command whose options simrl has (SCENARIO is
the run's scenario file). Whether it helps is for the command to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import numpy as np

from simrl.critical_path import Path
from simrl.gpu_hours import Waterfall
from simrl.result import Result
from simrl.run_view import busy_clock
from simrl.split import BUSY_ENOUGH, TARGET
from simrl.systems import RECIPES, common_parameters
from simrl.timeline import rolls_out, spans

RHYMERL = "RhymeRL's failure signatures (arXiv 2508.18588)"
OWN = "simrl's own threshold"


class Finding(NamedTuple):
    """A sign that shows: its name, what it means, its figure (a share) and the threshold, whose that is, what to try."""

    name: str
    says: str
    figure: float
    threshold: float
    source: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """What the signs are looked for in: a result, its summary, its waterfall after the warm-up, the paths of these updates."""

    result: Result
    row: Mapping[str, Any]
    parts: Waterfall
    paths: Sequence[Path]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.result.metadata

    @property
    def system(self) -> str:
        return str(self.metadata["scenario"]["system"]["name"])

    @property
    def parameters(self) -> dict[str, Any]:
        """The system's, as far as the scenario gives them."""
        return {key: value for key, value in self.metadata["scenario"]["system"].items() if key != "name"}

    def takes(self, parameter: str) -> bool:
        """Whether the system has it."""
        return self.system in RECIPES and parameter in signature(RECIPES[self.system]).parameters

    def value(self, parameter: str) -> Any:
        """As given, or the recipe's default."""
        return self.parameters.get(parameter, signature(RECIPES[self.system]).parameters[parameter].default)

    def again(self, *changes: str) -> str:
        """The run once more, with changes."""
        changed = {change.partition("=")[0] for change in changes}
        kept = [
            f"{key}={value}"
            for key, value in self.parameters.items()
            if key not in changed and isinstance(value, str | int | float)
        ]
        return " ".join(["simrl run SCENARIO", f"--system {self.system}", *kept, *changes])

    def beside(self, *others: str) -> str:
        """The run's system compared with others."""
        names = dict.fromkeys((self.system, *others))
        return " ".join(["simrl compare SCENARIO", *(f"--pipeline {name}" for name in names)])

    @property
    def adapted(self) -> str | None:
        """The run once more, with a split that follows what is idle; None for a system that has no such split."""
        taken = self.system in RECIPES and "adapt_split_every" in common_parameters(RECIPES[self.system])
        return self.again("adapt_split_every=2") if taken else None

    def share(self, *parts: str, of: str = "rollout") -> float:
        """Of the GPU time of the lanes that roll out, or of those that train."""
        total = self.rollout_gpu_s if of == "rollout" else self.parts.total_gpu_s - self.rollout_gpu_s
        return sum(self.parts.gpu_s[part] for part in parts) / total if total > 0 else 0.0

    @property
    def rollout_gpu_s(self) -> float:
        found = spans(self.result).within(self.parts.start_s, self.parts.end_s)
        here = found.where(found.rolls_out())
        return float(((here.ended_s - here.started_s) * here.gpus).sum())


def diagnose(evidence: Evidence) -> list[Finding]:
    """The signs that show, in the order of the rules below."""
    return [finding for rule in RULES for finding in rule(evidence)]


def few_drafts_accepted(e: Evidence) -> Iterator[Finding]:
    """Trees, and drafts ahead of the verifier, throw most away by design."""
    facts, rate = e.metadata.get("speculation"), e.row["acceptance_rate"]
    if facts is None or rate is None or facts.get("trees") or "plan" in facts or rate >= 0.5:
        return
    wasted = e.share("drafts_wasted")
    yield Finding(
        "few drafts accepted",
        f"{rate:.0%} of the tokens that {facts['method']} drafted were accepted, over the whole run; what was thrown away took "
        f"{wasted:.1%} of the workers' time. Responses are not like what they are drafted from: look at clipping and "
        "learning rate, or draft otherwise",
        rate,
        0.5,
        RHYMERL,
        f"{e.beside()} --speculation none --speculation siblings",
    )


def many_migrate(e: Evidence) -> Iterator[Finding]:
    """Where a rule migrates what its history did not tell; elsewhere responses move by design."""
    share = e.row["migrated_share"]
    if e.system != "rhymerl" or share <= 0.1:
        return
    yield Finding(
        "many samples migrate",
        f"{share:.1%} of the samples were at more than one worker, over the whole run: lengths do not keep to their history. "
        f"Computing their caches again took {e.share('recompute_moved'):.1%} of the workers' time",
        share,
        0.1,
        RHYMERL,
        e.again("migration=false"),
    )


def early_workers_idle(e: Evidence) -> Iterator[Finding]:
    """Of each update, the half of the workers that idles most beside busy ones: they had least to do."""
    found = spans(e.result)
    workers = [i for i, lane in enumerate(found.lanes) if rolls_out(lane) and lane.name[-1].isdecimal()]
    if len(workers) < 2 or not e.paths:
        return
    kinds = np.array(found.kinds)[found.kind]
    rolling = busy_clock(found.started_s[kinds == "rollout"], found.ended_s[kinds == "rollout"])
    shares = []
    for path in e.paths:
        rolled_s = float(rolling(path.ended_s) - rolling(path.started_s))
        if rolled_s <= 0:
            continue
        a_s, b_s = (np.clip(at_s, path.started_s, path.ended_s) for at_s in (found.started_s, found.ended_s))
        beside_s = np.where(kinds == "idle", rolling(b_s) - rolling(a_s), 0.0)
        of_each = np.sort(np.bincount(found.lane, beside_s, len(found.lanes))[workers] / rolled_s)[::-1]
        shares.append(float(of_each[: len(workers) // 2].mean()))
    share = float(np.mean(shares)) if shares else 0.0
    if share <= 0.5:
        return
    if e.system == "rhymerl":
        remedy = f"simrl allocate --trace TRACE --profile PROFILE --workers {len(workers)}"
    else:
        remedy = e.beside("areal", "rhymerl")
    yield Finding(
        "early workers idle",
        f"the half of the workers that is done first idles for {share:.0%} of the time in which some worker rolls out: the "
        "work is divided unevenly, or a few long responses hold up all",
        share,
        0.5,
        RHYMERL,
        remedy,
    )


def caches_preempted(e: Evidence) -> Iterator[Finding]:
    """Counted, not timed: the prefill that follows is cheap beside the smaller batch until then."""
    spans_of, samples = e.result.spans, e.result.samples.num_rows
    if "preemptions" not in spans_of.column_names or not samples:
        return
    count = sum(value or 0 for value in spans_of.column("preemptions").to_pylist())
    share = count / samples
    if share <= 0.1:
        return
    running = int(e.metadata["scenario"]["engine"]["max_num_seqs"])
    full = e.metadata.get("full_batch")
    fits = min(int(full["sequences"]) if full else running, running)
    wanted = max(fits // 2 if fits == running else fits * 3 // 4, 1)
    yield Finding(
        "KV cache preempted",
        f"{count:,.0f} preemptions for want of KV blocks in the whole run, {share:.0%} of its samples; computing their caches "
        f"again took {e.share('recompute_preempted'):.1%} of the workers' time, and {running} sequences may run at a time",
        share,
        0.1,
        f"{OWN}; vLLM's documentation on preemption has the remedies",
        e.again(f"engine.max_num_seqs={wanted}"),
    )


def staleness_binds(e: Evidence) -> Iterator[Finding]:
    """Where a number bounds what is submitted: workers that idle while it is reached. Elsewhere: all wait for the trainer."""
    eta = e.value("eta") if e.system == "areal" else None
    share = e.share("trainer_wait") if eta is None else _idle_at_bound(e, eta)
    separate = any(lane.name == "train" for lane in spans(e.result).lanes)
    if share <= 0.1 or not separate:
        return
    if eta is not None:
        says = f"workers idle for {share:.0%} of their time while no more may be submitted under η = {eta}"
        waits = e.row["train_idle"] > 1 - BUSY_ENOUGH[0]  # else a looser bound only fills a buffer
        says += (
            ""
            if waits
            else f"; the trainer idles for {e.row['train_idle']:.0%} of its own: a looser bound fills a buffer"
        )
        remedy = e.again(f"eta={max(2 * eta, 1)}" if waits else "adapt_split_every=2")
    else:
        says = f"all workers wait for {share:.0%} of their time while the trainer works: nothing newer may be rolled out yet"
        remedy = e.adapted or e.beside("areal")
    yield Finding("staleness bound binds", says, share, 0.1, OWN, remedy)


def _idle_at_bound(e: Evidence, eta: int) -> float:
    """Share of the workers' time that is idle while the samples that were begun are those of `eta` + 1 batches more than were
    trained, but for a group (AReaL's inequality)."""
    steps, samples, parts = e.result.steps, e.result.samples, e.parts
    batch = float(np.mean(steps.column("samples").to_numpy()))
    started_s = np.sort(np.array([at for at in samples.column("started_s").to_pylist() if at is not None], np.float64))
    trained_s = steps.column("finished_s").to_numpy()
    group = _group_size(e.result)
    found = spans(e.result).within(parts.start_s, parts.end_s)
    idle = found.where(np.array([kind == "idle" for kind in found.kinds], bool)[found.kind] & found.rolls_out())
    # Nothing begins and nothing is trained between two of these instants.
    times = np.unique(np.concatenate([started_s, trained_s, [parts.start_s, parts.end_s]]))
    begun = np.searchsorted(started_s, times, side="right")
    allowed = (np.searchsorted(trained_s, times, side="right") + eta + 1) * batch
    reached = (begun > allowed - group)[:-1]
    clock = np.concatenate([[0.0], np.cumsum(np.diff(times) * reached)])
    at_bound_s = np.interp(idle.ended_s, times, clock) - np.interp(idle.started_s, times, clock)
    return float((at_bound_s * idle.gpus).sum()) / e.rollout_gpu_s if e.rollout_gpu_s else 0.0


def _group_size(result: Result) -> int:
    """Samples of a prompt in an epoch."""
    keys = np.stack([result.samples.column(name).to_numpy() for name in ("trace_step", "epoch", "prompt_id")])
    return int(np.unique(keys, axis=1, return_counts=True)[1].max(initial=1))


def trainer_starves(e: Evidence) -> Iterator[Finding]:
    """GPUs that only train, and wait."""
    share, most = e.row["train_idle"], 1 - BUSY_ENOUGH[0]
    if share <= most:
        return
    unit = max(int(e.metadata["gpus"] - e.metadata["train_gpus"]) // max(int(e.metadata["rollout_workers"]), 1), 1)
    gpus, train = int(e.metadata["gpus"]), int(e.metadata["train_gpus"])
    wanted = min(max(-(-int(np.ceil(train * (1 - share) / TARGET)) // unit) * unit, unit), train)
    remedy = e.adapted or e.beside("verl_colocated")
    if e.takes("rollout_share") and wanted < train:
        remedy = e.again(f"rollout_share={(gpus - wanted) / gpus:.4g}")
    busy = min(train * (1 - share) / wanted, 1)
    fewer = f"; {wanted} would be busy for about {busy:.0%} with the same work, if they hold the model"
    yield Finding(
        "trainer starves",
        f"the trainer's {train} GPUs idle for {share:.0%} of the time{fewer if wanted < train else ''}",
        share,
        most,
        "where simrl's adaptive split moves GPUs",
        remedy,
    )


def sync_holds_up(e: Evidence) -> Iterator[Finding]:
    """On the paths alone: what is hidden behind other work holds nothing up."""
    length_s = sum(path.ended_s - path.started_s for path in e.paths)
    sync_s = sum(path.sync_s for path in e.paths)
    if not length_s or sync_s <= 0.1 * length_s:
        return
    by_kind: dict[str, float] = {}
    for path in e.paths:
        for kind, seconds in path.seconds().items():
            by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    largest = max(("load_weights", "publish", "switch", "transfer"), key=lambda kind: by_kind.get(kind, 0.0))
    words = {"load_weights": "loading weights", "publish": "publishing them"}
    words |= {"switch": "switching between rollout and training", "transfer": "handing on batches"}
    yield Finding(
        "sync on the critical path",
        f"{sync_s / length_s:.0%} of the updates' critical paths is weights and batches on their way, most of it "
        f"{words[largest]} ({by_kind[largest] / len(e.paths):.1f} s an update)",
        sync_s / length_s,
        0.1,
        OWN,
        e.beside("laminar", "rhymerl"),
    )


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    few_drafts_accepted,
    many_migrate,
    early_workers_idle,
    caches_preempted,
    staleness_binds,
    trainer_starves,
    sync_holds_up,
)
