"""A synthetic trace from the step metrics of a run that dumped no samples."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from simrl.errors import InputError, refuse
from simrl.trace.importers import rows
from simrl.trace.importers.lengths import lengths_with
from simrl.trace.trace import UNSEPARATED, Trace, TraceMetadata

# tokens that both means may be off together: some versions of verl log three decimals
ROUNDED = 1e-3
MOST_SAMPLES = 1_000_000  # of a step
NEEDED = (
    *(f"response_length/{name}" for name in ("mean", "max", "min", "clip_ratio")),
    *(f"prompt_length/{name}" for name in ("mean", "max", "min")),
    "perf/total_num_tokens",
)


def trace_from_verl_metrics(
    metrics: pd.DataFrame,
    group: int,
    seed: int,
    *,
    cap_tokens: int | None = None,
    name: str = "verl-metrics",
    licence: str = "unknown",
) -> Trace:
    """Return a synthetic trace with the length statistics of a run that dumped no samples, step by
    step.

    `metrics` is a table of `simrl.trace.importers.logs`; `group` the samples a prompt
    (`rollout.n`). Of each step the number of samples, the response lengths' sum, min, max and share
    at the max (verl's clipped ones), and the prompt lengths' sum, min and max are the log's,
    exactly; the shape between is the lognormal of `simrl.trace.importers.lengths`, dealt to prompts
    at random by `seed`. `cap_tokens` None takes the largest `response_length/max` of a step with
    clipped responses. Steps that lack one of these metrics are left out; the notes name them.

    Raises `InputError` for metrics that are missing or contradict each other, and samples that are
    not whole groups.
    """
    refuse((group < 1, f"group is {group}; a prompt has at least 1 sample"))
    source = str(metrics.attrs.get("source", "metrics"))
    usable = _usable(metrics, source)
    clipped = usable.loc[usable["response_length/clip_ratio"] > 0, "response_length/max"]
    refuse(
        (
            cap_tokens is None and clipped.empty,
            f"{source}: no step has clipped responses, so the cap is unknown; give cap_tokens",
        )
    )
    cap = int(clipped.max()) if cap_tokens is None else cap_tokens
    steps = [_samples(row, group, seed, cap, source) for row in usable.to_dict("records")]
    columns = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    # The j-th prompt of a step is distinguished from other steps' by the step's place in the epoch:
    # the next one repeats it.
    epochs, epoch = np.unique(columns["epoch"], return_inverse=True)
    first_steps = np.full(epochs.size, rows.INT32_MAX)
    np.minimum.at(first_steps, epoch, columns["step"])
    columns["prompt_id"] += (columns["step"] - first_steps[epoch]) * (
        columns["prompt_id"].max() + 1
    )
    metadata = TraceMetadata(
        name=name,
        kind="synthetic",
        source=f"step metrics in {source}, group {group}, seed {seed}",
        licence=licence,
        tokenizer="the run's own (lengths are from its log)",
        cap_tokens=cap,
        notes=_metrics_notes(metrics, usable),
    )
    return Trace.from_columns(columns, metadata, origin=f"trace from the metrics in {source}")


def _usable(metrics: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return the steps that have all that a trace needs."""
    absent = next((key for key in ("step", *NEEDED) if key not in metrics.columns), None)
    refuse(
        (
            absent,
            f"{source}: no column {absent!r}; verl's trainer logs it, a validation-only log does not",
        )
    )
    needed = [*(key for key in ("step", "training/epoch") if key in metrics.columns), *NEEDED]
    usable = metrics.dropna(subset=needed)
    refuse(
        (
            usable.empty,
            f"{source}: none of the {len(metrics)} steps has all of {', '.join(NEEDED)}; is the log cut off?",
        )
    )
    for key in needed:
        most = 1 if key.endswith("clip_ratio") else rows.INT32_MAX
        for step, value in usable.loc[~usable[key].between(0, most), ["step", key]].to_numpy():
            raise InputError(
                f"{source}: step {step:g}: {key} is {value:g}; it must be from 0 to {most}; check the log"
            )
    return usable


def _samples(
    row: dict[Hashable, Any], group: int, seed: int, cap: int, source: str
) -> dict[str, NDArray[Any]]:
    """Return the samples of one step in columns, its prompts numbered from 0."""
    step = int(row["step"])
    place = f"{source}: step {step}"
    total, mean = (
        float(row["perf/total_num_tokens"]),
        float(row["response_length/mean"] + row["prompt_length/mean"]),
    )
    count = round(total / mean) if mean > 0 else 0
    longest, shortest = row["response_length/max"], row["response_length/min"]
    refuse(
        (
            count < 1 or abs(total / mean - count) > 0.01 + count * ROUNDED / mean,
            f"{place}: {total:g} tokens over a mean of {mean:g} are no whole number of samples; check the log",
        ),
        (
            count > MOST_SAMPLES,
            f"{place}: {count:,} samples; no step has more than {MOST_SAMPLES:,}; check the log",
        ),
        (
            count % group,
            f"{place}: {count} samples are not whole groups of {group}; give the run's samples a prompt",
        ),
        (
            longest > cap,
            f"{place}: response_length/max is {longest:g}, over the cap of {cap}; give the run's cap",
        ),
        (
            shortest < 1,
            f"{place}: response_length/min is {shortest:g}, aborted or empty: cannot be generated again; "
            "drop this step from the metrics",
        ),
    )
    clipped = round(float(row["response_length/clip_ratio"]) * count)
    rng = np.random.default_rng([seed, step])
    response_tokens = rng.permutation(
        _lengths(row, "response_length", count, clipped or None, place)
    )
    prompt_tokens = rng.permutation(_lengths(row, "prompt_length", count // group, None, place))
    return {
        "step": np.full(count, step),
        "epoch": np.full(count, int(row.get("training/epoch", 0))),
        "prompt_id": np.repeat(np.arange(count // group), group),
        "sample": np.tile(np.arange(group), count // group),
        "prompt_tokens": np.repeat(prompt_tokens, group),
        "response_tokens": response_tokens,
        "finish_reason": np.where(response_tokens == cap, "length", "stop"),
    }


def _lengths(
    row: dict[Hashable, Any], kind: str, count: int, at_max: int | None, place: str
) -> NDArray[np.int64]:
    mean, low, high = (float(row[f"{kind}/{key}"]) for key in ("mean", "min", "max"))
    try:
        return lengths_with(round(mean * count), count, int(low), int(high), at_max)
    except ValueError as error:
        raise InputError(
            f"{place}: {kind}: mean, min, max and clip_ratio contradict each other ({error}); check the log"
        ) from error


def _metrics_notes(metrics: pd.DataFrame, usable: pd.DataFrame) -> str:
    epochs = "training/epoch" in usable.columns
    left_out = sorted(set(metrics["step"].astype(int)) - set(usable["step"].astype(int)))
    notes = [
        f"Synthesised from the log of {len(usable)} steps. From the run, in each step: the number of samples, "
        "response_length mean, min, max and clip_ratio, prompt_length mean, min and max. Assumed: the shape between "
        "(a truncated lognormal), lengths independent of the prompt and of other steps, and that the j-th prompt of "
        "every epoch is the same one. Rewards and tool times are not in it.",
        "The epoch is the run's."
        if epochs
        else "The run logged no epoch: all steps are taken for the first.",
    ]
    if "num_turns/mean" in usable.columns and (usable["num_turns/mean"] > 2).any():
        messages = usable["num_turns/mean"].mean()
        notes.append(
            f"{UNSEPARATED}: a response has {messages:.1f} messages, whose tokens the log counts together."
        )
    notes += metrics.attrs.get("notes", ())
    if left_out:
        notes.append(
            f"Left out, as their lines lack lengths (validation only, or cut off): steps {left_out}."
        )
    return " ".join(notes)
