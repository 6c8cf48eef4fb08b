"""A claim of a paper: a figure that the simulator gives for it, and whether the figure agrees.

Invariant: a claim's function sees the lab and one set of the ledger's inputs, never a published outcome; its threshold is
written in it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.reproduce.lab import Lab, Measures
from experiments.reproduce.ledger import Inputs
from simrl.result.result import Result

TAIL = 0.05  # of the responses: the last, or the longest


class Figure(NamedTuple):
    """The simulated figure of a claim under one set of inputs, by what it is of, and whether it agrees."""

    values: Mapping[str, float]
    agrees: bool


class Undetermined(NamedTuple):
    """The reason why a paper's text does not determine a claim: a figure for it would be a figure of this reason. The claim is
    shown apart, with the verdict at each of `values` of the ledger's `input`, by which it turns or does not."""

    why: str
    input: str
    values: tuple[Any, ...]


class Claim(NamedTuple):
    """A claim. `ledger` names the paper's inputs; `setting` says what is simulated and how it is scaled. `whole` tells the
    function that its whole setting is asked for: draws from the ranges, and walks through values of an undetermined claim,
    may have fewer models. `ablations` are changes of the inputs, by name, which are simulated where a determined claim does
    not agree; `cause` is what they showed."""

    ledger: str
    figure: Callable[[Lab, Inputs, bool], Figure]
    threshold: str
    setting: str
    cause: str = ""
    ablations: Mapping[str, Mapping[str, Any]] = {}
    undetermined: Undetermined | None = None


def measured(result: Result, warmup_steps: int) -> Measures:
    """Return what claims measure beside `experiments.reproduce.lab.measures`, of the samples that train after the warm-up.

    stale_share       of their tokens; and `cut_share`, the part of it in responses of several versions
    last_end_s        seconds from a step's first start to the mean end of its last 5 %
    longest_accepted  acceptance of the longest 5 %, over the acceptance of all
    accept_lengths    tokens a verification, by update
    seconds           of each sample, by uid
    part_s            seconds by step of the trace and worker
    """
    columns = [
        "uid",
        "trace_step",
        "worker",
        "generated_tokens",
        "started_s",
        "finished_s",
        "trained_step",
    ]
    drafted = [
        name
        for name in ("drafted_tokens", "accepted_tokens")
        if name in result.samples.column_names
    ]
    samples = result.samples.select(columns + drafted).to_pandas()
    samples = samples[samples["trained_step"] >= warmup_steps]
    verified = (
        result.samples.select(["trained_step", "verified_tokens", "verifications"]).to_pandas()
        if drafted
        else None
    )
    segments = result.segments.select(["uid", "policy_version", "tokens"]).to_pandas()
    segments = segments.merge(samples[["uid", "trained_step"]], on="uid")
    stale = segments["tokens"].where(segments["policy_version"] < segments["trained_step"], 0)
    cut = stale.where(segments.groupby("uid")["policy_version"].transform("nunique") > 1, 0)
    steps = samples.groupby("trained_step")
    parts = samples.groupby(["trace_step", "worker"]).agg(
        first_s=("started_s", "min"), last_s=("finished_s", "max")
    )
    return {
        "stale_share": float(stale.sum() / segments["tokens"].sum()),
        "cut_share": float(cut.sum() / segments["tokens"].sum()),
        "last_end_s": float(np.mean([_last_end_s(step) for _, step in steps])),
        "longest_accepted": _longest_accepted(samples) if drafted else None,
        "accept_lengths": None if verified is None else _accept_lengths(verified),
        "seconds": (samples["finished_s"] - samples["started_s"]).set_axis(samples["uid"]),
        "part_s": (parts["last_s"] - parts["first_s"]).unstack(),
    }


def _accept_lengths(samples: pd.DataFrame) -> pd.Series:
    """Return tokens of a pass that verified a draft, by update."""
    sums = (
        samples[samples["trained_step"] >= 0]
        .groupby("trained_step")[["verified_tokens", "verifications"]]
        .sum()
    )
    return sums["verified_tokens"] / sums["verifications"]


def _last_end_s(step: pd.DataFrame) -> float:
    last = step["finished_s"].nlargest(max(round(TAIL * len(step)), 1))
    return float(last.mean() - step["started_s"].min())


def _longest_accepted(samples: pd.DataFrame) -> float | None:
    longest = samples.nlargest(max(round(TAIL * len(samples)), 1), "generated_tokens")
    rates = [
        float(part["accepted_tokens"].sum()) / max(float(part["drafted_tokens"].sum()), 1.0)
        for part in (longest, samples)
    ]
    return rates[0] / rates[1] if rates[1] else None


def all_above(ratios: Mapping[str, float], least: float) -> Figure:
    """Return a figure that agrees if every ratio is above `least`."""
    return Figure(ratios, all(ratio > least for ratio in ratios.values()))


def within(ratios: Mapping[str, float], least: float, most: float) -> Figure:
    """Return a figure that agrees if every value lies from `least` to `most`."""
    return Figure(ratios, all(least <= ratio <= most for ratio in ratios.values()))
