"""GPU-hours: the use of every GPU-second of a run, from the work of an ideal run to everything on
top of it.

Invariant: the parts of a window sum to GPUs × seconds. Every span goes to parts as a whole; finer
records (the work of its passes, the fate of its tokens) divide it and add nothing.

Ideal is decoding in full batches: a decoding sequence takes its share of a pass with as many
sequences as a worker can hold (`full_batch` in the metadata). The time of generating dropped
samples is not known by sample: it is their share of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from simrl.analysis.run_view import busy_clock
from simrl.result.metrics import totals
from simrl.result.result import REST_LANE, Result, Work
from simrl.result.timeline import Floats, Spans, spans


class Part(NamedTuple):
    """A part of the GPU time: its name in the table, its words in a difference; `ideal` if an ideal
    run has it too."""

    words: str
    clause: str
    ideal: bool = False


PARTS: Mapping[str, Part] = {
    "decode": Part("decoding, in full batches", "decoding as such", True),
    "prefill": Part("prefill of prompts", "prefill of prompts", True),
    "log_prob": Part("log-probs", "log-probs", True),
    "train": Part("training", "training", True),
    "small_batches": Part("decoding: batches not full", "decoding in batches that are not full"),
    "tail_idle": Part(
        "workers idle beside busy ones", "rollout workers that idle while others still roll out"
    ),
    "trainer_wait": Part(
        "workers wait for the trainer", "rollout workers that all wait while the trainer works"
    ),
    "other_wait": Part(
        "workers wait otherwise",
        "rollout workers that all wait, for rewards, weights or environments",
    ),
    "rest_idle": Part("GPUs too few for a worker", "GPUs that are too few for a rollout worker"),
    "train_idle": Part("trainer idle", "a trainer that waits for rollouts"),
    "judge": Part("judging", "the judge's engines", True),
    "judge_idle": Part("judge idle", "a judge that waits for responses"),
    "recompute_reloaded": Part("prefill again: new weights", "prefill again after weight updates"),
    "recompute_preempted": Part("prefill again: preempted", "prefill again after preemptions"),
    "recompute_moved": Part(
        "prefill again: moved, resumed", "prefill again of responses that moved or went on later"
    ),
    "recompute_redrafted": Part(
        "prefill again: drafter starts", "prefill again because a drafter starts"
    ),
    "drafts_stood": Part("drafts: accepted", "drafting and verifying accepted tokens"),
    "drafts_wasted": Part("drafts: rejected", "drafting and verifying rejected tokens"),
    "train_drafter": Part("training the drafter", "training the drafter on idle workers"),
    "load_drafter": Part("loading drafters", "loading drafters at freed workers"),
    "load_weights": Part("sync: workers load weights", "loading weights at the workers"),
    "publish": Part("sync: trainer publishes", "publishing weights"),
    "switch": Part("sync: switch of phases", "switching GPUs between rollout and training"),
    "transfer": Part("sync: batch to the trainer", "handing batches to the trainer"),
    "dropped": Part("generated, then dropped", "generating what a rule then drops"),
    "duplicates": Part("generated twice", "duplicates of best-of-N, or requests that started over"),
    "ahead": Part("generated for after the end", "generating what no update in the window trained"),
    "evaluate": Part("evaluation", "evaluation"),
    "checkpoint": Part("checkpoints", "checkpoints"),
    "lost": Part("lost workers (faults)", "workers that are lost"),
    "lock_step": Part(
        "ranks wait for each other", "data-parallel ranks that wait for the longest pass of a rank"
    ),
    "slowed": Part("slow workers (faults)", "workers that are slow"),
    "host": Part("host work between passes", "the host's work between passes"),
    "undivided": Part(
        "rollout, not divided", "rollout beyond full batches, which a real engine does not divide"
    ),
    "other": Part("other", "phases of other kinds"),
}
_OF_WORK = {
    name: name.removesuffix("_s")
    for name in Work._fields
    if name.removesuffix("_s") in PARTS and name != "decode_s"
}
_GENERATES = (
    "decode",
    "small_batches",
    "host",
    "undivided",
    *_OF_WORK.values(),
)  # the work of rollouts
SYNC = ("load_weights", "publish", "switch", "transfer")
TRAINS = (
    "transfer",
    "switch",
    "log_prob",
    "train",
    "publish",
    "checkpoint",
)  # kinds of spans of a trainer


@dataclass(frozen=True)
class Waterfall:
    """GPU-seconds of a window by part, in the order of `PARTS`; the samples that the updates of the
    window trained."""

    start_s: float
    end_s: float
    gpus: int
    samples: int
    gpu_s: Mapping[str, float]

    @property
    def total_gpu_s(self) -> float:
        return self.gpus * (self.end_s - self.start_s)

    @property
    def per_sample(self) -> dict[str, float]:
        """Return GPU-seconds a trained sample by part; empty if none was trained."""
        return (
            {key: value / self.samples for key, value in self.gpu_s.items()} if self.samples else {}
        )


def comparable(falls: Sequence[Waterfall]) -> list[Waterfall]:
    """Return waterfalls with parts that all of them have: a real engine does not divide its work
    beyond decoding."""
    return [_undivided(f) for f in falls] if any(f.gpu_s["undivided"] for f in falls) else [*falls]


def _undivided(fall: Waterfall) -> Waterfall:
    """Return the waterfall as a real engine shows it: rollout beyond full batches in one part."""
    beyond = [part for part in _GENERATES if part not in ("decode", "undivided")]
    rollout = sum((fall.gpu_s[part] for part in beyond), fall.gpu_s["undivided"])
    return replace(fall, gpu_s={**fall.gpu_s, **dict.fromkeys(beyond, 0.0), "undivided": rollout})


def waterfall(result: Result, start_s: float = 0.0, end_s: float | None = None) -> Waterfall:
    """Return the parts of a window of the run, by default all of it."""
    end_s = float(result.metadata["end_s"]) if end_s is None else end_s
    timeline = spans(result)
    gpu_s = dict.fromkeys(PARTS, 0.0)
    a_s, b_s = (
        np.clip(timeline.started_s, start_s, end_s),
        np.clip(timeline.ended_s, start_s, end_s),
    )
    for kind in timeline.kinds:
        if kind not in ("rollout", "idle"):
            gpu_s[kind if kind in PARTS else "other"] += float(
                ((b_s - a_s) * timeline.gpus)[timeline.of_kind(kind)].sum()
            )
    _add_idle(gpu_s, result, timeline, a_s, b_s)
    _add_rollout(gpu_s, result, timeline, b_s - a_s)
    tokens = timeline.tokens * (b_s - a_s) / (timeline.ended_s - timeline.started_s)
    evaluated = float(tokens[timeline.of_kind("evaluate")].sum())
    _set_apart(gpu_s, _fates(result, start_s, end_s, evaluated))
    finished_s = result.steps.column("finished_s").to_numpy()
    trained = result.steps.column("samples").to_numpy()[
        (finished_s > start_s) & (finished_s <= end_s)
    ]
    return Waterfall(
        start_s, end_s, sum(lane.gpus for lane in timeline.lanes), int(trained.sum()), gpu_s
    )


def _add_idle(
    gpu_s: dict[str, float], result: Result, timeline: Spans, a_s: Floats, b_s: Floats
) -> None:
    """Add the idle time of rollout workers: beside others that roll out, else while a trainer
    works, else otherwise."""
    idle, rolls, works = (
        timeline.of_kind(*kinds) for kinds in (("idle",), ("rollout",), ("rollout", *TRAINS))
    )
    evaluates = timeline.of_kind("evaluate") & (timeline.tokens > 0)
    rolls, works = rolls | evaluates, works | evaluates
    rolling, working = (
        busy_clock(timeline.started_s[where], timeline.ended_s[where]) for where in (rolls, works)
    )
    beside_s: Floats = rolling(b_s) - rolling(a_s)
    training_s: Floats = working(b_s) - working(a_s) - beside_s
    is_rollout, trains, judges = (
        np.array(result.spans.column("role").to_pylist()) == role
        for role in ("rollout", "train", "judge")
    )
    rest = np.array([lane.name == REST_LANE for lane in timeline.lanes])[timeline.lane]
    for part, where, seconds in (
        ("tail_idle", is_rollout & ~rest, beside_s),
        ("trainer_wait", is_rollout & ~rest, training_s),
        ("other_wait", is_rollout & ~rest, b_s - a_s - beside_s - training_s),
        ("rest_idle", rest, b_s - a_s),
        ("train_idle", trains & ~rest, b_s - a_s),
        ("judge_idle", judges, b_s - a_s),
    ):
        gpu_s[part] += float((seconds * timeline.gpus)[idle & where].sum())


def _add_rollout(
    gpu_s: dict[str, float], result: Result, timeline: Spans, inside_s: Floats
) -> None:
    """Add spans of rollout by the work of their passes. Real engines record only tokens, from which
    the decoding follows."""
    rolls = timeline.of_kind("rollout")
    share = inside_s[rolls] / (timeline.ended_s - timeline.started_s)[rolls]
    gpus, inside = timeline.gpus[rolls], inside_s[rolls]
    work = {name: _column(result, name)[rolls] * share for name in Work._fields}
    known = ~np.isnan(work["decode_s"])
    for name, part in _OF_WORK.items():
        gpu_s[part] += float((work[name] * gpus)[known].sum())
    decode_gpu_s = float((work["decode_s"] * gpus)[known].sum())
    recorded = sum((work[name] for name in (*_OF_WORK, "decode_s")), np.zeros(len(inside)))
    gpu_s["host"] += float(((inside - recorded) * gpus)[known].sum())

    full = result.metadata.get("full_batch")
    sequence_s = full["pass_s"] / full["sequences"] if full else np.inf
    ideal_gpu_s = (
        min(sequence_s * float((work["decodes"] * gpus)[known].sum()), decode_gpu_s)
        if decode_gpu_s
        else 0.0
    )
    gpu_s["decode"] += ideal_gpu_s
    gpu_s["small_batches"] += decode_gpu_s - ideal_gpu_s

    unrecorded_gpu_s = float((inside * gpus)[~known].sum())
    if unrecorded_gpu_s:
        generated, accepted = totals(result.samples, "generated_tokens", "accepted_tokens")
        alone = 1.0 - accepted / max(
            generated, 1
        )  # the share of tokens that were decoded one by one
        tokens_gpus = float((timeline.tokens[rolls] * share * gpus)[~known].sum())
        ideal_gpu_s = min(alone * tokens_gpus * sequence_s, unrecorded_gpu_s) if full else 0.0
        gpu_s["decode"] += ideal_gpu_s
        gpu_s["undivided"] += unrecorded_gpu_s - ideal_gpu_s


def _column(result: Result, name: str) -> Floats:
    """Return a column of spans: NaN where it is empty, and in older results without it."""
    if name not in result.spans.column_names:
        return np.full(result.spans.num_rows, np.nan)
    return np.asarray(pc.fill_null(result.spans.column(name), np.nan).to_numpy(), np.float64)


def _fates(result: Result, start_s: float, end_s: float, evaluated: float) -> dict[str, float]:
    """Return shares of the tokens generated in a window, without `evaluated` tokens of spans that
    only evaluate: dropped by a rule, of evaluations, duplicates, and ahead: for updates after the
    window, less the tokens that the updates of the window took from before it."""
    samples, segments = result.samples, result.segments
    generated, duplicate = totals(samples, "generated_tokens", "duplicate_tokens")
    twice = duplicate / max(generated + duplicate, 1.0)
    a_s, b_s = segments.column("started_s").to_numpy(), segments.column("ended_s").to_numpy()
    inside = np.clip(np.minimum(b_s, end_s) - np.maximum(a_s, start_s), 0.0, None) / np.maximum(
        b_s - a_s, 1e-300
    )
    tokens = segments.column("tokens").to_numpy()
    within = tokens * np.where(b_s > a_s, inside, (a_s >= start_s) & (a_s < end_s))
    row = np.searchsorted(
        samples.column("uid").to_numpy(), segments.column("uid").to_numpy()
    )  # in the order of uids
    dropped = pc.equal(samples.column("status"), "dropped").to_numpy()[row]
    steps = pc.fill_null(samples.column("trained_step"), -1).to_numpy()[row]
    finished_s = np.append(
        result.steps.column("finished_s").to_numpy(), np.inf
    )  # place -1: trained in no update
    trained_s = finished_s[steps]
    trained = (trained_s > start_s) & (trained_s <= end_s)
    evaluation = pc.equal(samples.column("status"), "evaluation").to_numpy()[row]
    total = float(within.sum()) - evaluated
    if total <= 0:
        return {"duplicates": twice}
    lost = float(within[dropped].sum())
    left = float(within[~dropped & ~trained & ~evaluation].sum())
    brought = float((tokens - within)[trained].sum())
    counted = {
        "dropped": lost / total,
        "ahead": max(left - brought, 0.0) / total,
        "evaluate": max(float(within[evaluation].sum()) - evaluated, 0.0) / total,
    }
    return {**{key: share * (1 - twice) for key, share in counted.items()}, "duplicates": twice}


def _set_apart(gpu_s: dict[str, float], fates: Mapping[str, float]) -> None:
    """Move the GPU time of generating these shares of the tokens to their own parts."""
    generated = sum(gpu_s[part] for part in _GENERATES)
    for part, share in fates.items():
        gpu_s[part] += share * generated
    kept = 1.0 - sum(fates.values())
    for part in _GENERATES:
        gpu_s[part] *= kept
