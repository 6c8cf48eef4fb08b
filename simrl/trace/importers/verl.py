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
    at random by `seed`. Those of them that `metrics.attrs["origins"]` calls estimated give way.
    `cap_tokens` None takes the longest response. Steps that lack one of these metrics, contradict
    themselves or are not whole groups are left out; the notes name them.

    Raises `InputError` for metrics that are missing, and where no step is left.
    """
    refuse((group < 1, f"group is {group}; a prompt has at least 1 sample"))
    source = str(metrics.attrs.get("source", "metrics"))
    usable, wrong = _usable(metrics, source)
    estimated = {
        key for key, origin in metrics.attrs.get("origins", {}).items() if origin == "estimated"
    }
    made: list[tuple[bool, dict[str, NDArray[Any]]]] = []
    for row in usable.to_dict("records"):
        try:
            samples = _samples(row, group, seed, source, estimated)
            longest = samples["response_tokens"].max()
            refuse(
                (
                    cap_tokens is not None and longest > cap_tokens,
                    f"{source}: step {row['step']:g}: response_length/max is {longest}, over the cap of {cap_tokens}; "
                    "give the run's cap (--cap-tokens)",
                )
            )
            made.append((row["response_length/clip_ratio"] > 0, samples))
        except InputError as error:
            wrong.append(str(error))
    refuse((not made, wrong[0] if wrong else ""))
    steps = [samples for _, samples in made]
    columns = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    cap = int(columns["response_tokens"].max()) if cap_tokens is None else cap_tokens
    is_known = cap_tokens is not None or any(clipped for clipped, _ in made)
    columns["finish_reason"] = np.where(
        (columns["response_tokens"] == cap) & is_known, "length", "stop"
    )
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
        notes=" ".join(
            [
                *_metrics_notes(metrics, usable, len(made)),
                *[
                    f"No step has clipped responses: the longest, of {cap} tokens, is taken as the cap; "
                    "--cap-tokens gives the run's."
                ]
                * (not is_known),
                *[f"Left out, as they contradict themselves or the options: {rows.listed(wrong)}."]
                * bool(wrong),
            ]
        ),
    )
    return Trace.from_columns(columns, metadata, origin=f"trace from the metrics in {source}")


def _usable(metrics: pd.DataFrame, source: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the steps that have all that a trace needs, and messages on those with numbers that no
    step has."""
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
    wrong: dict[float, str] = {}
    for key in needed:
        most = 1 if key.endswith("clip_ratio") else rows.INT32_MAX
        wrong |= {
            step: f"{source}: step {step:g}: {key} is {value:g}; it must be from 0 to {most}; check the log"
            for step, value in usable.loc[~usable[key].between(0, most), ["step", key]].to_numpy()
        }
    return usable[~usable["step"].isin([*wrong])], [*wrong.values()]


def _samples(
    row: dict[Hashable, Any], group: int, seed: int, source: str, estimated: set[str]
) -> dict[str, NDArray[Any]]:
    """Return the samples of one step in columns, its prompts numbered from 0."""
    step = int(row["step"])
    place = f"{source}: step {step}"
    total, mean = (
        float(row["perf/total_num_tokens"]),
        float(row["response_length/mean"] + row["prompt_length/mean"]),
    )
    count = round(total / mean) if mean > 0 else 0
    shortest = row["response_length/min"]
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
            shortest < 1,
            f"{place}: response_length/min is {shortest:g}, aborted or empty: cannot be generated again; "
            "drop this step from the metrics",
        ),
    )
    clipped = round(float(row["response_length/clip_ratio"]) * count)
    rng = np.random.default_rng([seed, step])
    response_tokens = rng.permutation(
        _lengths(row, "response_length", count, clipped or None, place, estimated)
    )
    return {
        "step": np.full(count, step),
        "epoch": np.full(count, int(row.get("training/epoch", 0))),
        "prompt_id": np.repeat(np.arange(count // group), group),
        "sample": np.tile(np.arange(group), count // group),
        "prompt_tokens": np.repeat(
            rng.permutation(_lengths(row, "prompt_length", count // group, None, place, estimated)),
            group,
        ),
        "response_tokens": response_tokens,
    }


def _lengths(
    row: dict[Hashable, Any],
    kind: str,
    count: int,
    at_max: int | None,
    place: str,
    estimated: set[str],
) -> NDArray[np.int64]:
    mean, low, high = (float(row[f"{kind}/{key}"]) for key in ("mean", "min", "max"))
    total = round(mean * count)
    low, high = _fitting(kind, int(low), int(high), total, count, at_max, estimated)
    try:
        return lengths_with(total, count, int(low), int(high), at_max)
    except ValueError as error:
        raise InputError(
            f"{place}: {kind}: mean, min, max and clip_ratio contradict each other ({error}); check the log"
        ) from error


def _fitting(
    kind: str,
    low: int,
    high: int,
    total: int,
    count: int,
    at_max: int | None,
    estimated: set[str],
) -> tuple[int, int]:
    """Return the smallest and the largest length; an estimated one is moved as far as it must for
    such lengths to exist (`lengths_with`)."""
    tops, others = at_max or 1, count - (at_max or 1)
    moves_low, moves_high = f"{kind}/min" in estimated, f"{kind}/max" in estimated
    if others < 1:
        high = total // count if moves_high else high
        return (high if moves_low else low), high
    below = high if at_max is None else high - 1
    if moves_low:
        least = 1 if moves_high else total - tops * high - (others - 1) * below
        low = max(1, min(max(low, least), (total - tops * high) // others))
    if moves_high:
        spare = 0 if at_max is None else others - 1
        least = -(-(total - low + spare) // (count - 1))
        high = min(max(high, least), (total - others * low) // tops)
    return low, high


def _metrics_notes(metrics: pd.DataFrame, usable: pd.DataFrame, steps: int) -> list[str]:
    epochs, origins = "training/epoch" in usable.columns, metrics.attrs.get("origins", {})
    lacking = metrics[metrics[[*NEEDED]].isna().any(axis=1)]
    left_out = sorted(set(lacking["step"].astype(int)))
    logged = [key for key in (*NEEDED[:-1], "number of samples") if key not in origins]
    others = [f"{key} ({origin})" for key, origin in origins.items()]
    notes = [
        f"Synthesised from the log of {steps} steps. From the run, in each step: {', '.join(logged)}. "
        f"{'Not from the log: ' * bool(others)}{', '.join(others)}{'. ' * bool(others)}Assumed: the shape between "
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
    return notes
