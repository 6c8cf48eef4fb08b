"""NeMo-RL: `rollout_trace.jsonl`, the events that `rollout_checkpointing.trace` appends, one JSON
object a line: dispatch and seal of each response, training steps, weight syncs.

Invariant: an event has a kind and a time; a line without them is left out and counted. Seconds count
from the first dispatch, versions from the oldest that generated. Responses are in the order of the
trace's rows: by batch in the order of dispatch, in which a simulation on the trace dispatches them.

NeMo-RL's documentation names `t`, `run`, `prompt_id`, `generation_index`, the kinds of events, and a
group's tokens by weight version. All other names here are assumed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import pandas as pd

from simrl.errors import InputError
from simrl.trace.importers import rows
from simrl.trace.trace import Trace

NAMES = {
    "kind": ("event", "kind", "type", "event_type", "name"),
    "run": ("run", "run_id"),
    "group": ("group_id", "prompt_group_id", "group", "prompt_id"),
    "prompt": ("prompt_id", "prompt_idx", "prompt_index", "prompt", "group_id", "group"),
    "groups": ("group_ids", "groups", "prompt_group_ids", "prompt_ids"),
}
NUMBERS = {
    "at_s": ("t", "time", "ts", "timestamp", "wall_time"),
    "sample": ("generation_index", "gen_index", "sample_index", "sibling_index", "generation"),
    "response_tokens": (
        "response_tokens",
        "generated_tokens",
        "output_tokens",
        "num_tokens",
        "tokens",
    ),
    "prompt_tokens": ("prompt_tokens", "input_tokens", "prompt_length"),
    "version": ("start_weight_version", "generation_weight_version", "weight_version", "version"),
    "step": ("train_step", "trained_step", "step", "target_step"),
    "lasted_s": ("duration_s", "seconds", "elapsed_s", "duration"),
    "environment_s": ("environment_s", "env_s", "tool_s"),
    "reward": ("reward", "score"),
}
# The kind of an event of a group or a response, and of the run, by the beginnings of its words; the first that fits.
IGNORED = ("checkpoint", "snapshot", "restor", "eval", "valid")
KINDS = {
    "group": {
        "": (*IGNORED, "train", "claim", "reserv", "resum", "admi", "abandon", "refus", "fail", "discard", "drop"),
        "finished_s": ("seal", "complet", "finish", "publish", "done", "end"),
        "started_s": ("dispatch", "submit", "launch", "start", "begin"),
    },
    "run": {
        "": (*IGNORED, "start", "begin"),
        "sync": ("sync", "refit", "weight"),
        "update": ("train", "optim", "update", "step"),
    },
}  # fmt: skip


class RolloutTrace(NamedTuple):
    """The events of a run. `responses` has, for each row of the trace, trained_step (-1: none),
    started_s, finished_s and parts (version, tokens, seconds from and to); updates and syncs have
    the version that they train or load, started_s and ended_s."""

    trace: Trace
    responses: pd.DataFrame
    updates: pd.DataFrame
    syncs: pd.DataFrame


def read_events(path: Path, **labels: Unpack[rows.Labels]) -> RolloutTrace:
    """Return the run of a file of events. The step of a response is its batch in the order of
    dispatch.

    Raises `InputError` for a file without events, sealed responses, or counts of tokens.
    """
    events, notes = _events(path)
    responses = _responses(path, events[events["group"].notna()], notes)
    origin_s, number = responses["begun_s"].iloc[0], pd.factorize(responses["group"])[0]
    of_run = events[events["group"].isna() & (events["at_s"] > origin_s)]
    updates, syncs = (of_run[of_run["kind"] == kind] for kind in ("update", "sync"))
    listed = {
        re.sub("_g[0-9]+.*", "", str(name)): k
        for k, names in enumerate(updates["groups"])
        for name in (names if isinstance(names, list) else ())
    }
    by_name = responses["group"].map(listed).fillna(responses["prompt"].map(listed)).astype(float)
    trained = by_name if listed else responses["step"].rank(method="dense") - 1
    if trained.isna().all():
        notes["groups name no update that trained them: the order of dispatch is assumed."] += 1
        trained = pd.Series(number // max((number[-1] + 1) // max(len(updates), 1), 1))
    trained = trained.where(trained < len(updates), -1).astype(int)
    sizes = responses.groupby(trained[trained >= 0])["group"].nunique()
    batch = int(sizes.quantile(interpolation="lower")) if len(sizes) else number[-1] + 1
    seals_s = responses.groupby(trained)["finished_s"].max().reindex(range(len(updates)))
    updates = _intervals(updates, range(len(updates)), seals_s - origin_s, origin_s, notes)
    loaded = np.searchsorted(updates["ended_s"], syncs["at_s"] - origin_s, "right")
    updated_s = np.r_[0.0, updates["ended_s"]][loaded]
    syncs = _intervals(syncs, loaded, updated_s, origin_s, notes).query("version > 0")
    counted = responses["counts"].dropna().map(min).min()
    first = int(np.nan_to_num(np.fmin(responses["version"].min(), counted)))
    responses = responses.assign(
        started_s=responses["started_s"] - origin_s,
        finished_s=responses["finished_s"] - origin_s,
        step=number // batch,
        trained_step=trained,
    )
    parts = [_parts(facts, syncs, first) for facts in responses.to_dict("records")]
    responses = responses.assign(parts=parts, policy_version=[each[0][0] for each in parts])
    order = np.lexsort((responses["sample"], pd.factorize(responses["prompt"])[0], number // batch))
    ordered = responses.iloc[order]
    trace = rows.trace_from_rows(
        [
            rows.Row(**{name: value for name, value in row.items() if value == value})
            for row in ordered.filter(rows.Row._fields).to_dict("records")
        ],
        source=f"NeMo-RL events {path.name}",
        tokenizer="the run's own (token capture)",
        notes=[f"{count} {words}" for words, count in notes.items() if count],
        default_name=path.stem,
        **labels,
    )
    return RolloutTrace(trace, ordered, updates, syncs)


def _events(path: Path) -> tuple[pd.DataFrame, Counter[str]]:
    """Return the events of the process that wrote most of them, in time, and the notes."""
    notes: Counter[str] = Counter()
    events = []
    for place, line in rows.numbered_lines(path, mode="rb"):
        with suppress(InputError):
            events.append(_event(rows.json_object(line, place), place) if line.strip() else None)
            continue
        events.append({"at_s": np.nan})
    kept = [
        event
        for event in events
        if event and event["at_s"] == event["at_s"] and event["kind"] is not None
    ]
    if not kept:
        raise InputError(
            f"{path}: no events in it; name the rollout_trace.jsonl of rollout_checkpointing.trace"
        )
    frame = pd.DataFrame(kept).sort_values("at_s", kind="stable")
    of_run = frame["run"] == frame["run"].value_counts().index[0]
    notes["lines are no events (a kind, a time) and were left out."] = len(
        list(filter(None, events))
    ) - len(kept)
    notes["events of other processes (restarts) were left out."] = int((~of_run).sum())
    return frame[of_run], notes


def _event(line: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return what a line says under the names of `NAMES` and `NUMBERS`; NaN for a number that a
    result cannot hold."""
    event: dict[str, Any] = {"place": place}
    for what, names in (NAMES | NUMBERS).items():
        value = next((line[name] for name in names if line.get(name) is not None), None)
        is_text = what in ("run", "group", "prompt") and value is not None
        event[what] = str(value) if is_text else value
    event |= {what: event[what] if _fits(event[what]) else np.nan for what in NUMBERS}
    counts = (
        {int(version): tokens for version, tokens in value.items() if _fits(tokens)}
        for value in line.values()
        if isinstance(value, dict) and value and all(re.fullmatch("[0-9]{1,9}", v) for v in value)
    )
    event["counts"] = next(counts, None) or None
    if event["counts"] and np.isnan(event["response_tokens"]):
        event["response_tokens"] = sum(event["counts"].values())
    words = re.findall("[A-Z]?[a-z]+", str(event["kind"])[:80])
    kinds = KINDS["run" if event["group"] is None else "group"].items()
    fits = (kind for kind, stems in kinds if any(w.lower().startswith(stems) for w in words))
    event["kind"] = None if event["kind"] is None else next(fits, "")
    times = dict.fromkeys(("started_s", "finished_s"), np.nan)
    return {**event, "run": event["run"] or "", **times, event["kind"] or "": event["at_s"]}


def _fits(value: Any) -> bool:
    return rows.is_number(value) and 0 <= value <= 1e12


def _responses(path: Path, events: pd.DataFrame, notes: Counter[str]) -> pd.DataFrame:
    """Return the responses that were dispatched and then sealed, in the order of their groups'
    dispatch; what they lack is their group's, tokens in proportion to seconds."""
    whole = events[events["sample"].isna()].groupby("group").last()
    own = (
        events[events["sample"].notna()]
        if events["sample"].notna().any()
        else events.fillna({"sample": 0})
    )
    every = own.groupby(["group", "sample"], sort=False).last().reset_index()
    every = every.join(whole.add_suffix("_whole"), on="group")
    for name in ("started_s", "finished_s", "version", "step", "prompt_tokens", "counts"):
        every[name] = every[name].where(every[name].notna(), every[f"{name}_whole"])
    is_sealed = (every["started_s"] < every["finished_s"]) & (every["response_tokens"] != 0)
    sealed = every[is_sealed].copy()
    if sealed.empty:
        raise InputError(
            f"{path}: no response with a dispatch and a later seal; name the events of a run that has trained"
        )
    seconds = sealed["finished_s"] - sealed["started_s"]
    share = seconds / seconds.groupby(sealed["group"]).transform("sum")
    uncounted = sealed["response_tokens"].isna()
    tokens = sealed["response_tokens"].fillna(
        (share * sealed["response_tokens_whole"]).round().clip(1)
    )
    if tokens.isna().any():
        raise InputError(
            f"{sealed['place'][tokens.isna()].iloc[0]}: no count of tokens for a response or its group; trace a run with token "
            "capture"
        )
    notes["responses without a dispatch, a later seal or a token were left out."] = len(
        every
    ) - len(sealed)
    notes[
        "responses have no count: their group's tokens are divided by their seconds (estimated)."
    ] = int(uncounted.sum())
    notes["responses have no prompt length: 1 token is assumed."] = int(
        sealed["prompt_tokens"].isna().sum()
    )
    limited = {"lower": 1, "upper": rows.INT32_MAX}
    sealed = sealed.assign(
        response_tokens=tokens.clip(**limited).astype(int),
        prompt_tokens=sealed["prompt_tokens"].fillna(1).clip(**limited).astype(int),
        sample=sealed["sample"].clip(upper=rows.INT32_MAX).astype(int),
        begun_s=sealed.groupby("group")["started_s"].transform("min"),
        logged=pd.factorize(sealed["group"])[0],
    )
    return sealed.sort_values(["begun_s", "logged", "sample"], ignore_index=True)


def _intervals(
    events: pd.DataFrame, versions: Any, assumed_s: Any, origin_s: float, notes: Counter[str]
) -> pd.DataFrame:
    """Return updates or syncs, one after the other; where the seconds that one lasted are not
    stated, from an assumed start."""
    ended_s = events["at_s"].to_numpy() - origin_s
    started_s = ended_s - events["lasted_s"].to_numpy()
    notes[
        "updates and syncs have no length: the last seal before an update, and its end, begin them (assumed)."
    ] += int(np.isnan(started_s).sum())
    started_s = np.where(np.isnan(started_s), assumed_s, started_s)
    started_s = np.minimum(np.fmax(started_s, np.r_[0.0, ended_s][:-1]), ended_s)
    return pd.DataFrame({"version": versions, "started_s": started_s, "ended_s": ended_s})


def _parts(
    facts: Mapping[str, Any], syncs: pd.DataFrame, first: int
) -> list[tuple[int, int, float, float]]:
    """Return version, tokens and seconds of a response's parts: by the counts of its or its group's
    tokens, else by the seconds between syncs."""
    started_s, ended_s = facts["started_s"], facts["finished_s"]
    if isinstance(facts["counts"], dict):
        versions = sorted(facts["counts"])
        shares = np.cumsum([0.0, *(facts["counts"][v] for v in versions)])
        edges = started_s + (ended_s - started_s) * shares / shares[-1]
        versions = [max(v - first, 0) for v in versions]
    else:
        inside = syncs[(syncs["ended_s"] > started_s) & (syncs["ended_s"] < ended_s)]
        loaded = syncs["version"][syncs["ended_s"] <= started_s].max()
        stated = facts["version"] - first
        versions = [int(np.nan_to_num(loaded if np.isnan(stated) else stated)), *inside["version"]]
        edges = np.array([started_s, *inside["ended_s"], ended_s])
    tokens = np.diff(
        np.rint(facts["response_tokens"] * (edges - started_s) / (ended_s - started_s))
    )
    pieces = zip(
        versions, tokens.astype(int).tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True
    )
    return [piece for piece in pieces if piece[1]]
