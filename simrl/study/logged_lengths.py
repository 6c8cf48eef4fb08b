"""The lengths of a run's steps, from its metrics log or its recorded trace, for a calibration.

Invariant: the lengths of some steps are made only from these rows, and from the size of a batch,
which is the run's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.study.corrections import (
    FEWEST_STEPS,
    GENERATION,
    LOG_PROB,
    STEP,
    UPDATE,
    is_timed,
    seconds,
)
from simrl.trace.importers.verl import NEEDED, trace_from_verl_metrics
from simrl.trace.trace import Trace, read_trace, write_trace

SAME_LENGTHS = 0.05  # relative distance of a step's mean length in a trace from the logged one, up to which they are one run
RUN = "run.parquet"  # in the folder of a calibration
KEPT_SHARE = 0.98  # of a batch; more is the rounding of a log
SMALLER = tuple(
    f"timing_s/{key}"
    for key in ("ref", "reward", "adv", "values", "update_critic", "update_weights")
)
NOT_SIMULATED = "timing_s/testing", "timing_s/save_checkpoint"
# verl: over the response tokens that response_length/* describes
PER_TOKEN = "timing_per_token_ms/gen"
PER_TRAINED = "timing_per_token_ms/update_actor"  # likewise, over their prompts, too
TOKENS, BATCH_TOKENS = (
    "perf/total_num_tokens",
    "batch_tokens",
)  # verl's; of the whole batch where lengths are of kept groups


def usable_steps(
    metrics: pd.DataFrame, recorded: Trace | None, turns: bool, group: int
) -> pd.DataFrame:
    """Return the steps that have lengths and a time: of generation, or from update to update if the
    phases overlap, else of what the log times. What was changed is in `attrs["notes"]`.

    Raise `InputError` for a log without lengths, or without any seconds."""
    metrics, notes = _without_evaluations(metrics)
    if (
        turns
        and not is_timed(metrics, GENERATION)
        and all(is_timed(metrics, key) for key in (STEP, UPDATE, LOG_PROB))
    ):
        metrics = metrics.assign(**{GENERATION: _rest_s(metrics, [UPDATE, LOG_PROB])})
        notes.append(
            f"generation is what {STEP} has beside the other phases: the log does not time it"
        )
    order = (GENERATION, STEP, UPDATE, LOG_PROB) if turns else (STEP, UPDATE, LOG_PROB)
    timed = next((key for key in order if is_timed(metrics, key)), order[0])
    needed = [timed, *(NEEDED if recorded is None else ())]
    for key in needed:
        if key not in metrics:
            lacks = metrics.attrs.get("lacks", {}).get(key, f"no {key} in it")
            raise InputError(
                f"{source_of(metrics)}: {lacks}; log the metrics of training steps, not validation alone"
            )
    usable = metrics.dropna(subset=needed)
    usable = usable[usable[timed] > 0]
    if recorded is not None:
        usable = usable[usable["step"].isin([step for step, _, _ in recorded.step_slices])]
        _require_own_lengths(usable, recorded, source_of(metrics))
    if usable.empty:
        raise InputError(
            f"{source_of(metrics)}: none of its {len(metrics)} steps has {timed} and lengths; is the log cut off?"
        )
    usable = usable.sort_values("step").reset_index(drop=True)
    usable = _of_kept_groups(usable, group) if recorded is None else usable
    usable.attrs["notes"] = [*metrics.attrs.get("notes", ()), *notes]
    return usable


def _rest_s(metrics: pd.DataFrame, phases: list[str]) -> pd.Series:
    """Return what each step has beside these phases, which it needs, and beside smaller ones."""
    smaller = metrics.reindex(columns=list(SMALLER)).sum(axis=1)
    return metrics[STEP] - metrics[phases].sum(axis=1, skipna=False) - smaller


def _without_evaluations(metrics: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the metrics without the seconds of evaluations and checkpoints, which are not
    simulated, where the steps contain them; and a note. Such steps are longer, beside their phases,
    than the other ones."""
    others_s = metrics.reindex(columns=list(NOT_SIMULATED)).sum(axis=1)
    if not (others_s > 0).any() or STEP not in metrics:
        return metrics, []
    rest_s = _rest_s(metrics, [key for key in (GENERATION, LOG_PROB, UPDATE) if key in metrics])
    usual_s = rest_s[others_s == 0].median()
    contained = (others_s > 0) & (rest_s - (usual_s if usual_s == usual_s else 0.0) > others_s / 2)
    if not contained.any():
        return metrics, []
    return metrics.assign(**{STEP: metrics[STEP] - others_s.where(contained, 0.0)}), [
        f"evaluations and checkpoints were taken out of {contained.sum()} steps ({others_s[contained].mean():.3g} s each)"
    ]


def _of_kept_groups(rows: pd.DataFrame, group: int) -> pd.DataFrame:
    """Return the rows with the tokens of the samples that their lengths describe, if the log counts
    all tokens of the batch."""
    mean = rows["response_length/mean"] + rows["prompt_length/mean"]
    count = rows[TOKENS] / mean
    described = pd.Series(
        seconds(rows, GENERATION) * 1000 / seconds(rows, PER_TOKEN) / rows["response_length/mean"]
    ).fillna(pd.Series(seconds(rows, UPDATE) * 1000 / seconds(rows, PER_TRAINED) / mean))
    kept = (described / group).round() * group
    fewer = kept.notna() & (kept > 0) & (kept < KEPT_SHARE * count)
    if not fewer.any():
        return rows
    if group == 1:
        described, all_of = kept[fewer].iloc[0], count[fewer].iloc[0]
        raise InputError(
            f"{source_of(rows)}: its lengths describe {described:.0f} of {all_of:.0f} responses, as where groups are filtered; "
            "give the responses of a prompt with --group"
        )
    return rows.assign(
        **{BATCH_TOKENS: rows[TOKENS], TOKENS: rows[TOKENS].where(~fewer, kept * mean)}
    )


def batch_size(
    rows: pd.DataFrame, group: int, samples: int | None, recorded: Trace | None
) -> int | None:
    """Return the samples that a step generates, if its lengths are of the kept groups alone; None
    if they are of all."""
    if recorded is not None:
        return None
    mean = rows["response_length/mean"] + rows["prompt_length/mean"]
    kept = rows[TOKENS] / mean
    of_all = (
        samples
        or round(float((rows.get(BATCH_TOKENS, rows[TOKENS]) / mean).median()) / group) * group
    )
    batch = max(of_all, round(float(kept.max())))
    return batch if (kept < KEPT_SHARE * batch).any() else None


def _require_own_lengths(usable: pd.DataFrame, recorded: Trace, source: str) -> None:
    """Raise `InputError` for the trace of another run. The mean length of each step is compared
    with the log, with and without the tokens of tools; if the lengths differ, also one step earlier
    and later."""
    logged = (
        usable.set_index("step")["response_length/mean"].dropna()
        if "response_length/mean" in usable
        else pd.Series()
    )
    written = recorded.column("response_tokens").astype(np.float64)
    with_tools = written + recorded.observation_tokens()
    steps = recorded.column("step")

    def apart(later: int) -> float:
        """Return the median distance from the logged means if step k of the trace is step k +
        `later` of the log."""
        distances = []
        for tokens in (written, with_tools):
            means = pd.Series(tokens).groupby(steps + later).mean()
            both = means.index.intersection(logged.index)
            distances.append(
                float((means[both] / logged[both] - 1).abs().median())
                if len(both) >= FEWEST_STEPS
                else np.inf
            )
        return min(distances)

    here = apart(0)
    if not np.isfinite(here) or here <= SAME_LENGTHS:
        return
    shifted = min((1, -1), key=apart)
    remedy = "give the trace of this run, or leave it out"
    if apart(shifted) <= SAME_LENGTHS:
        remedy = f"its step k is the log's step k{shifted:+d}: number its steps as the log does"
    raise InputError(
        f"{source}: the responses of trace {recorded.metadata.name} are {here:.0%} longer or shorter than the logged ones, at "
        f"the median step; {remedy}"
    )


def source_of(metrics: pd.DataFrame) -> str:
    """Return the name of the log in messages."""
    return str(metrics.attrs.get("source", "the log"))


def lengths_of(
    rows: pd.DataFrame,
    group: int,
    cap_tokens: int | None,
    recorded: Trace | None,
    batch: int | None = None,
) -> Trace:
    """Return the lengths of these steps, made only from these rows. Of a `batch` larger than what a
    step's lengths describe, the rest are groups that are generated and not trained (equal rewards);
    their lengths are drawn from the others'."""
    if recorded is not None:
        kept = pc.is_in(recorded.table["step"], pa.array(rows["step"].to_numpy(), pa.int32()))
        return Trace(recorded.table.filter(kept), recorded.metadata)
    cap = int(rows["response_length/max"].max()) if cap_tokens is None else cap_tokens
    trace = trace_from_verl_metrics(rows, group, 0, cap_tokens=cap, name="run")
    return trace if batch is None else _with_dropped_groups(trace, rows, group, batch)


def _with_dropped_groups(trace: Trace, rows: pd.DataFrame, group: int, batch: int) -> Trace:
    kept = trace.table.to_pandas().assign(reward=lambda t: (t["sample"] == 0).astype(np.float32))
    tokens = dict(
        zip(rows["step"], rows.get(BATCH_TOKENS, pd.Series(np.nan, rows.index)), strict=True)
    )
    parts = []
    for step, trained in kept.groupby("step", sort=False):
        rng, missing = (
            np.random.default_rng([0, int(step)]),
            max((batch - len(trained)) // group, 0),
        )
        drawn = trained.iloc[rng.integers(len(trained), size=missing * group)].assign(
            reward=np.float32(0)
        )
        drawn["prompt_id"] = kept["prompt_id"].max() + 1 + np.repeat(np.arange(missing), group)
        drawn["sample"] = np.tile(np.arange(group), missing)
        drawn["prompt_tokens"] = np.repeat(drawn["prompt_tokens"].to_numpy()[::group], group)
        rest = (
            tokens[step]
            - trained[["prompt_tokens", "response_tokens"]].to_numpy().sum()
            - drawn["prompt_tokens"].sum()
        )
        if missing and np.isfinite(rest) and rest > 0:
            scaled = drawn["response_tokens"] * (rest / drawn["response_tokens"].sum())
            drawn["response_tokens"] = (
                scaled.round().clip(1, trace.metadata.cap_tokens).astype(np.int32)
            )
            drawn["finish_reason"] = np.where(
                drawn["response_tokens"] == trace.metadata.cap_tokens, "length", "stop"
            )
        parts += [trained, drawn]
    table = pd.concat(parts, ignore_index=True)
    return Trace.from_columns({key: table[key].to_numpy() for key in table}, trace.metadata)


def step_tokens(trace: Trace, kept: bool) -> list[NDArray[np.int64]]:
    """Return the tokens of each sequence that a step trains: all, or the tokens of groups whose
    rewards differ."""
    table = trace.table.select(["step", "prompt_id"]).to_pandas()
    table["tokens"] = (
        trace.column("prompt_tokens").astype(np.int64)
        + trace.column("response_tokens")
        + trace.observation_tokens()
    )
    if kept:
        rewards = table.assign(reward=trace.column("reward")).groupby(["step", "prompt_id"])[
            "reward"
        ]
        table = table[rewards.transform("max") > rewards.transform("min")]
    return [tokens.to_numpy() for _, tokens in table.groupby("step", sort=False)["tokens"]]


def write_alike(folder: Path, into: Path) -> Path | None:
    """Write the trace of a calibration's folder with the responses of each step sorted by length:
    responses of a prompt are as alike as they can be. None if it has rewards, which say which
    groups are kept."""
    trace = read_trace(folder / RUN)
    if "reward" in trace.table.column_names:
        return None
    table = trace.table.to_pandas()
    order = np.lexsort(
        (table["response_tokens"], table["step"])
    )  # a trace is in the order of its steps
    columns = {key: table[key].to_numpy() for key in table}
    columns |= {key: columns[key][order] for key in ("response_tokens", "finish_reason")}
    write_trace(Trace.from_columns(columns, trace.metadata), into / "alike.parquet")
    return into / "alike.parquet"
