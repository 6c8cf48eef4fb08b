"""Diagnosis: known signs of a run that goes wrong, with their figures, thresholds, the sources of
these, and remedies.

Invariant: a figure is computed from the result's tables, over the updates after the warm-up unless
its words say otherwise; a finding is made where it is beyond the threshold, and nowhere else. A
remedy is a command with existing options (SCENARIO is the run's scenario file), and only the
command can tell if it helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from simrl.analysis.critical_path import CriticalPath, seconds_of
from simrl.analysis.gpu_hours import PARTS, SYNC, Waterfall
from simrl.analysis.run_view import busy_clock
from simrl.dispatch.elastic import BUSY_ENOUGH, TARGET
from simrl.result.result import Result
from simrl.result.timeline import rolls_out, spans
from simrl.systems.recipes import RECIPES, make_system, parameters_of
from simrl.validation import in_words

RHYMERL = "RhymeRL's failure signatures (arXiv 2508.18588)"
OWN = "simrl's own threshold"
SYNC_HOLDS_UP = "sync on the critical path"


class Finding(NamedTuple):
    """A sign in a run: its name and meaning, its figure (a share) and threshold, the source of the
    threshold, a remedy."""

    name: str
    says: str
    figure: float
    threshold: float
    source: str
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """The evidence of a run: its result, its summary, its waterfall after the warm-up, the paths of
    these updates."""

    result: Result
    row: Mapping[str, Any]
    parts: Waterfall
    paths: Sequence[CriticalPath]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.result.metadata

    @property
    def system(self) -> str:
        return str(self.metadata["scenario"]["system"]["name"])

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the system in the scenario."""
        return {
            key: value
            for key, value in self.metadata["scenario"]["system"].items()
            if key != "name"
        }

    def takes(self, parameter: str) -> bool:
        """Return whether the system has the parameter."""
        return self.system in RECIPES and parameter in parameters_of(self.system)

    def again(self, *changes: str) -> str:
        """Return the command of the run with changes."""
        changed = [change.partition("=")[0] for change in changes]
        plain = [
            (key, value)
            for key, value in self.parameters.items()
            if isinstance(value, str | int | float)
        ]
        kept = [f"{key}={in_words(value)}" for key, value in plain if key not in changed]
        return " ".join(["simrl run SCENARIO", f"--system {self.system}", *kept, *changes])

    def beside(self, *others: str) -> str:
        """Return the command that compares the run's system with others."""
        possible = [name for name in others if self.is_plain or make_system(name, {}).evaluates]
        names = dict.fromkeys((self.system, *(possible or ["areal", "verl_colocated"])))
        return " ".join(["simrl compare SCENARIO", *(f"--pipeline {name}" for name in names)])

    @property
    def is_plain(self) -> bool:
        """Return whether the scenario has no part that needs weights in all workers at one time:
        evaluations, prefill workers."""
        scenario = self.metadata["scenario"]
        return not (
            scenario.get("evaluation") or (scenario["cluster"].get("prefill") or {}).get("gpus")
        )

    @property
    def adapted(self) -> str | None:
        """Return the command of the run with a split that follows idle time; None for a system
        without such a split, or whose own rule moves GPUs."""
        if not (self.takes("adapt_split_every") and self.is_plain):
            return None
        moves = make_system(self.system, self.parameters).elastic
        return None if moves else self.again("adapt_split_every=2")

    def share(self, part: str) -> float:
        """Return a part's share of the GPU time of the lanes that roll out."""
        return self.parts.gpu_s[part] / self.rollout_gpu_s if self.rollout_gpu_s > 0 else 0.0

    @property
    def separate(self) -> bool:
        """Return whether the trainer has GPUs of its own."""
        return any(lane.name == "train" for lane in spans(self.result).lanes)

    @property
    def rollout_gpu_s(self) -> float:
        timeline = spans(self.result).within(self.parts.start_s, self.parts.end_s)
        rollout = timeline.where(timeline.rolls_out())
        return float(((rollout.ended_s - rollout.started_s) * rollout.gpus).sum())

    @property
    def loses_most_to_sync(self) -> bool:
        """Return whether loading and publishing weights takes more GPU time than any other part
        that an ideal run lacks."""
        lost = {part: gpu_s for part, gpu_s in self.parts.gpu_s.items() if not PARTS[part].ideal}
        return lost.pop("load_weights") + lost.pop("publish") > max(lost.values())


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return the findings in the order of `RULES`; the weight sync first where it is the largest
    loss."""
    return sorted(
        [finding for rule in RULES for finding in rule(evidence)],
        key=lambda finding: finding.name != SYNC_HOLDS_UP or not evidence.loses_most_to_sync,
    )


def few_drafts_accepted(e: Evidence) -> Iterator[Finding]:
    """Find low acceptance, except of trees and of drafts ahead of the verifier, most of which are
    rejected by design."""
    facts, rate = e.metadata.get("speculation"), e.row["acceptance_rate"]
    if facts is None or rate is None or facts.get("trees") or "plan" in facts or rate >= 0.5:
        return
    wasted = e.share("drafts_wasted")
    yield Finding(
        "few drafts accepted",
        f"{rate:.0%} of the tokens that {facts['method']} drafted were accepted, over the whole run; rejected drafts took "
        f"{wasted:.1%} of the workers' time. Responses are unlike the texts that drafts are taken from: look at clipping and "
        "learning rate, or draft otherwise",
        rate,
        0.5,
        RHYMERL,
        f"{e.beside()} --speculation none --speculation siblings",
    )


def indexes_lost(e: Evidence) -> Iterator[Finding]:
    """Find indexes of a history for which the history workers have no room."""
    facts = e.metadata.get("history") or {}
    share = facts.get("lost", 0.0) / max(facts.get("made", 0.0), 1.0)
    if share > 0.01:
        workers = e.metadata["scenario"]["speculation"]["history_workers"]
        yield Finding(
            "indexes without room",
            f"{facts['lost']:,.0f} of {facts['made']:,.0f} indexes of the history, over the whole run, were evicted or not "
            "kept: their prompts' responses decode without drafts, and a step waits for its slowest responses",
            share,
            0.01,
            f"{OWN}; experiments/history_memory.md",
            e.again(
                f"speculation.history_workers.memory_bytes="
                f"{1.1 * workers['bytes_per_token'] * sum(e.result.samples.column('generated_tokens').to_numpy()):.2g}"
            ),
        )


def many_migrate(e: Evidence) -> Iterator[Finding]:
    """Find many migrations that the history did not predict; in other systems responses move by
    design."""
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
    """Find idle time of the half of the workers that idles most beside busy ones in an update,
    having least to do."""
    timeline = spans(e.result)
    workers = [
        i for i, lane in enumerate(timeline.lanes) if rolls_out(lane) and lane.name[-1].isdecimal()
    ]
    if len(workers) < 2 or not e.paths:
        return
    rolls, idle = timeline.of_kind("rollout"), timeline.of_kind("idle")
    rolling = busy_clock(timeline.started_s[rolls], timeline.ended_s[rolls])
    shares = []
    for path in e.paths:
        rolled_s = float(rolling(path.ended_s) - rolling(path.started_s))
        if rolled_s <= 0:
            continue
        a_s, b_s = (
            np.clip(at_s, path.started_s, path.ended_s)
            for at_s in (timeline.started_s, timeline.ended_s)
        )
        beside_s = np.where(idle, rolling(b_s) - rolling(a_s), 0.0)
        idle_shares = np.sort(
            np.bincount(timeline.lane, beside_s, len(timeline.lanes))[workers] / rolled_s
        )[::-1]
        shares.append(float(idle_shares[: len(workers) // 2].mean()))
    share = float(np.mean(shares)) if shares else 0.0
    if share <= 0.5:
        return
    allocate = f"simrl allocate --trace TRACE --profile PROFILE --workers {len(workers)}"
    yield Finding(
        "early workers idle",
        f"the half of the workers that is done first idles for {share:.0%} of the time in which some worker rolls out: the "
        "work is divided unevenly, or a few long responses hold up all",
        share,
        0.5,
        RHYMERL,
        allocate if e.system == "rhymerl" else e.beside("areal", "rhymerl"),
    )


def caches_preempted(e: Evidence) -> Iterator[Finding]:
    """Find preemptions by their number, not their seconds: the repeated prefill costs less than the
    smaller batch before it."""
    work, samples = e.result.spans, e.result.samples.num_rows
    if "preemptions" not in work.column_names or not samples:
        return
    count = sum(filter(None, work.column("preemptions").to_pylist()))
    share = count / samples
    if share <= 0.1:
        return
    running = int(e.metadata["scenario"]["engine"]["max_num_seqs"])
    full = e.metadata.get("full_batch")
    fits = min(int(full["sequences"]) if full else running, running)
    wanted = max(fits // 2 if fits == running else fits * 3 // 4, 1)
    yield Finding(
        "KV cache preempted",
        f"{count:,.0f} preemptions for want of KV blocks in the whole run, {share:.2g} a sample; computing their caches "
        f"again took {e.share('recompute_preempted'):.1%} of the workers' time, and {running} sequences may run at a time",
        share,
        0.1,
        f"{OWN}; vLLM's documentation on preemption has the remedies",
        e.again(f"engine.max_num_seqs={wanted}"),
    )


def staleness_binds(e: Evidence) -> Iterator[Finding]:
    """Find idle workers while the staleness bound is reached; without a numeric bound, while all
    wait for the trainer."""
    eta = {**parameters_of("areal"), **e.parameters}["eta"] if e.system == "areal" else None
    share = e.share("trainer_wait") if eta is None else _idle_at_bound(e, eta)
    if share <= 0.1 or not e.separate:
        return
    if eta is None:
        says = f"all workers wait for {share:.0%} of their time while the trainer works: nothing newer may be rolled out yet"
        remedy = e.adapted or e.beside("areal")
    else:
        says = f"workers idle for {share:.0%} of their time while no more may be submitted under η = {eta}"
        remedy = e.again(f"eta={max(2 * eta, 1)}")
        if e.row["train_idle"] <= 1 - BUSY_ENOUGH[0]:
            says += f"; the trainer idles for {e.row['train_idle']:.0%} of its own: a looser bound fills a buffer"
            remedy = e.adapted or remedy
    yield Finding("staleness bound binds", says, share, 0.1, OWN, remedy)


def _idle_at_bound(e: Evidence, eta: int) -> float:
    """Return the share of the workers' time that is idle while the begun samples exceed the trained
    ones by `eta` + 1 batches, less a group (AReaL's inequality)."""
    steps, samples, parts = e.result.steps, e.result.samples, e.parts
    batch = float(np.mean(steps.column("samples").to_numpy()))
    started_s = np.sort(pc.drop_null(samples.column("started_s")).to_numpy())
    trained_s = steps.column("finished_s").to_numpy()
    keys = np.stack(
        [samples.column(name).to_numpy() for name in ("trace_step", "epoch", "prompt_id")]
    )
    group = int(np.unique(keys, axis=1, return_counts=True)[1].max(initial=1))
    timeline = spans(e.result).within(parts.start_s, parts.end_s)
    idle = timeline.where(timeline.of_kind("idle") & timeline.rolls_out())
    # Nothing begins and nothing is trained between two of these instants.
    times = np.unique(np.concatenate([started_s, trained_s, [parts.start_s, parts.end_s]]))
    begun = np.searchsorted(started_s, times, side="right")
    allowed = (np.searchsorted(trained_s, times, side="right") + eta + 1) * batch
    reached = (begun > allowed - group)[:-1]
    clock = np.concatenate([[0.0], np.cumsum(np.diff(times) * reached)])
    at_bound_s = np.interp(idle.ended_s, times, clock) - np.interp(idle.started_s, times, clock)
    return float((at_bound_s * idle.gpus).sum()) / e.rollout_gpu_s if e.rollout_gpu_s else 0.0


def trainer_starves(e: Evidence) -> Iterator[Finding]:
    """Find waiting train GPUs."""
    share, most = e.row["train_idle"], 1 - BUSY_ENOUGH[0]
    if share <= most:
        return
    gpus, train, workers = (
        int(e.metadata[key]) for key in ("gpus", "train_gpus", "rollout_workers")
    )
    unit = max((gpus - train) // max(workers, 1), 1)
    wanted = min(max(-(-int(np.ceil(train * (1 - share) / TARGET)) // unit) * unit, unit), train)
    remedy = e.adapted or e.beside("verl_colocated")
    if e.metadata["scenario"]["cluster"].get("train"):
        remedy = (
            e.again(f"cluster.train.gpus={wanted}") if wanted < train else e.again("cluster.gpus=…")
        )
    elif e.takes("rollout_share") and wanted < train:
        remedy = e.again(f"rollout_share={(gpus - wanted) / gpus:.4g}")
    busy = min(train * (1 - share) / wanted, 1)
    fewer = (
        f"; {wanted} would be busy for about {busy:.0%} with the same work, if they hold the model"
    )
    says = f"the trainer's {train} GPUs idle for {share:.0%} of the time{fewer if wanted < train else ''}"
    yield Finding(
        "trainer starves", says, share, most, "where simrl's adaptive split moves GPUs", remedy
    )


def sync_holds_up(e: Evidence) -> Iterator[Finding]:
    """Find weight sync on the critical paths, where it is not hidden by other work. Where rollout
    and training have GPUs of their own, the first remedy is another method of the sync."""
    length_s = sum(path.ended_s - path.started_s for path in e.paths)
    sync_s = sum(path.sync_s for path in e.paths)
    if not length_s or sync_s <= 0.1 * length_s:
        return
    by_kind = seconds_of(e.paths)
    largest = max(SYNC, key=lambda kind: by_kind.get(kind, 0.0))
    words = {
        "load_weights": "loading weights",
        "publish": "publishing them",
        "switch": "switching between rollout and training",
        "transfer": "handing on batches",
    }
    training, remedy, method = (
        e.metadata["scenario"]["training"],
        e.beside("laminar", "rhymerl"),
        "",
    )
    if largest in ("load_weights", "publish") and e.separate and training.get("load_s") is None:
        method = f"; training.weight_sync is {training.get('weight_sync') or 'not given, so that its seconds are assumed'}"
        if training.get("weight_sync") != "reshard":
            remedy = e.again("training.weight_sync=reshard")
    yield Finding(
        SYNC_HOLDS_UP,
        f"{sync_s / length_s:.0%} of the updates' critical paths is weights and batches on their way, most of it "
        f"{words[largest]} ({by_kind[largest] / len(e.paths):.1f} s an update){method}",
        sync_s / length_s,
        0.1,
        OWN,
        remedy,
    )


def judge_holds_up(e: Evidence) -> Iterator[Finding]:
    """Find a judge on the critical paths: updates that wait for scores."""
    by_kind, gpus = seconds_of(e.paths), (e.metadata["scenario"].get("judge") or {}).get("gpus")
    share = by_kind.get("judge", 0.0) / max(sum(by_kind.values()), 1e-300)
    if share > 0.1:
        yield Finding(
            "the reward model is the bottleneck",
            f"{share:.0%} of the updates' critical paths wait for the scores of {e.metadata['judge']['model']}",
            share,
            0.1,
            OWN,
            e.again(f"judge.gpus={2 * gpus if gpus else e.metadata['rollout_workers']}"),
        )


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    few_drafts_accepted,
    indexes_lost,
    many_migrate,
    early_workers_idle,
    caches_preempted,
    staleness_binds,
    trainer_starves,
    sync_holds_up,
    judge_holds_up,
)
