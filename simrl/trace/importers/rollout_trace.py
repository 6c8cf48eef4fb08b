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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import pandas as pd

from simrl.errors import InputError, refuse
from simrl.trace.importers import rows
from simrl.trace.trace import Trace

FIELDS = {
    "kind": ("event", "kind", "type", "event_type", "name"),
    "run": ("run", "run_id"),
    "group": ("group_id", "prompt_group_id", "group", "prompt_id"),
    "prompt": ("prompt_id", "prompt_idx", "prompt_index", "prompt", "group_id", "group"),
    "groups": ("group_ids", "groups", "prompt_group_ids", "prompt_ids"),
    "at_s": ("t", "time", "ts", "timestamp", "wall_time"),
    "sample": ("generation_index", "gen_index", "sample_index", "sibling_index", "generation"),
    "response_tokens": (
        *("response_tokens", "generated_tokens", "output_tokens", "num_tokens", "tokens"),
    ),
    "prompt_tokens": ("prompt_tokens", "input_tokens", "prompt_length"),
    "version": ("start_weight_version", "generation_weight_version", "weight_version", "version"),
    "update": ("train_step", "trained_step", "step", "target_step"),
    "lasted_s": ("duration_s", "seconds", "elapsed_s", "duration"),
    "environment_s": ("environment_s", "env_s", "tool_s"),
    "reward": ("reward", "score"),
}
# Kinds of events with a group and without one, by the beginnings of the words in their names; the first that fits.
KINDS = {
    True: {
        "": (
            *("checkpoint", "snapshot", "restor", "eval", "valid", "turn", "tool", "call", "train"),
            *("claim", "reserv", "admi", "resum", "refus", "abandon", "fail", "discard", "drop"),
        ),
        "finished_s": ("seal", "complet", "finish", "publish", "done", "end"),
        "started_s": ("dispatch", "submit", "launch", "start", "begin"),
    },
    False: {
        "": ("checkpoint", "snapshot", "restor", "eval", "valid", "start", "begin"),
        "sync": ("sync", "refit", "weight"),
        "update": ("train", "optim", "update", "step"),
    },
}


class RolloutTrace(NamedTuple):
    """The events of a run. `responses` has, for each row of the trace, trained_step (empty: none),
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
    of_run = events[events["group"].isna() & (events["at_s"] > 0)]
    updates, syncs = (of_run[of_run["kind"] == kind] for kind in ("update", "sync"))
    group = pd.factorize(responses["group"])[0]
    trained = _trained(responses, group, updates["groups"], notes)
    seals_s = responses.groupby(trained)["finished_s"].max().reindex(range(len(updates)))
    trains = _intervals(updates, range(len(updates)), seals_s, notes)
    version = np.searchsorted(trains["ended_s"], syncs["at_s"], "right")  # 0: the initial weights
    updated_s = np.r_[0.0, trains["ended_s"]][version]
    loads = _intervals(syncs, version, updated_s, notes).query("version > 0")
    sizes = responses.groupby(trained)["group"].nunique()
    step = group // int(sizes.quantile(interpolation="lower") if len(sizes) else group[-1] + 1)
    parts = _parts(responses, loads)
    recorded = responses.assign(
        step=step,
        trained_step=trained,
        parts=parts,
        policy_version=[of_response[0][0] for of_response in parts],
    )
    keys = ["step", "prompt", "sample"]
    if recorded.duplicated(keys).any():  # two groups of a prompt in a step are one
        recorded["sample"] = recorded.groupby(keys[:2]).cumcount()
    recorded = recorded.iloc[
        np.lexsort((recorded["sample"], pd.factorize(responses["prompt"])[0], step))
    ]
    trace = rows.trace_from_rows(
        [
            rows.Row(**{name: value for name, value in row.items() if value == value})
            for row in recorded.filter(rows.Row._fields).to_dict("records")
        ],
        source=f"NeMo-RL events {path.name}",
        tokenizer="the run's own (token capture)",
        notes=[f"{number} {words}" for words, number in notes.items() if number],
        default_name=path.stem,
        **labels,
    )
    return RolloutTrace(trace, recorded, trains, loads)


def _events(path: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """Return the events of the process that wrote most of them, in time, and the notes."""
    every, lines = [], 0
    for place, line in rows.numbered_lines(path, mode="rb"):
        lines += bool(line.strip())
        with suppress(InputError):
            every.append(_event(rows.json_object(line, place), place))
    events = pd.DataFrame([e for e in every if e["kind"] is not None and e["at_s"] >= 0])
    untimed = sum(e["kind"] is not None for e in every)  # where there is no other
    lacks = f"{untimed} events without a numeric time in `t`" if untimed else "no events in it"
    refuse(
        (
            events.empty,
            f"{path}: {lacks}; name the rollout_trace.jsonl of rollout_checkpointing.trace",
        )
    )
    of_run = events[events["run"] == events["run"].value_counts().index[0]]
    since_s = of_run[["at_s", "started_s", "finished_s"]] - of_run["started_s"].min()
    return _by_round(of_run.assign(**since_s).sort_values("at_s", kind="stable")), {
        "lines are no events (a kind, a time) and were left out.": lines - len(events),
        "events of other processes (restarts) were left out.": len(events) - len(of_run),
    }


def _by_round(events: Any) -> Any:
    """Return events in which a prompt that is dispatched again after its seal (in a later epoch) is
    a group of its own, where events name no group: p, p#1, p#2."""
    keys = [events["group"], events["sample"].fillna(-1)]
    marks = events[events["kind"].isin(["started_s", "finished_s"]) & ~events["names_group"]]
    before = marks["kind"].groupby([key[marks.index] for key in keys]).shift()
    again = (marks["kind"] == "started_s") & (before == "finished_s")
    rounds = again.reindex(events.index, fill_value=False).astype(int).groupby(keys).cumsum()
    rounds = rounds.where(events["sample"].notna(), rounds.groupby(events["group"]).cummax())
    later = events["group"] + "#" + rounds.fillna(0).astype(int).astype(str)
    return events.assign(group=events["group"].mask(rounds > 0, later))


def _event(line: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the values of a line by the names of `FIELDS`; NaN for all but numbers that a result
    can hold, where numbers belong."""
    event: dict[str, Any] = {
        what: next((line[name] for name in names if line.get(name) is not None), None)
        for what, names in FIELDS.items()
    }
    words = re.findall("[A-Z]?[a-z]+", str(event["kind"])[:80])
    kinds = KINDS[event["group"] is not None].items()
    fits = (kind for kind, stems in kinds if any(w.lower().startswith(stems) for w in words))
    kind = next(fits, "") if isinstance(event["kind"], str) else None
    event |= {w: event[w] if _fits(event[w]) else np.nan for w in [*FIELDS][5:]}
    counts = (
        {int(version): tokens for version, tokens in value.items() if _fits(tokens) and tokens}
        for value in line.values()
        if isinstance(value, dict) and value and all(re.fullmatch("[0-9]{1,9}", v) for v in value)
    )
    event |= {"counts": next(counts, None) or None, "started_s": np.nan, "finished_s": np.nan}
    if event["counts"] and np.isnan(event["response_tokens"]):
        event["response_tokens"] = sum(event["counts"].values())
    texts = {
        w: str(event[w]) for w in ("run", "group", "prompt") if w == "run" or event[w] is not None
    }
    named = any(line.get(name) is not None for name in FIELDS["group"][:3])
    at = {kind or "": event["at_s"], "kind": kind, "place": place, "names_group": named}
    return {**event, **texts, **at}


def _fits(value: Any) -> bool:
    return rows.is_number(value) and 0 <= value <= 1e12  # the most that a result can hold


def _responses(path: Path, events: Any, notes: dict[str, int]) -> Any:
    """Return the responses that were dispatched and then sealed, in the order of their groups'
    dispatch; what they lack is their group's, tokens in proportion to seconds."""
    is_whole = events["sample"].isna() & bool(events["sample"].notna().any())
    by_response = events[~is_whole].fillna({"sample": 0}).groupby(["group", "sample"], sort=False)
    members = by_response.last().assign(version=by_response["version"].first()).reset_index()
    every = members.join(events[is_whole].groupby("group").last().add_suffix("_whole"), on="group")
    for name in ("started_s", "finished_s", "version", "update", "prompt_tokens", "counts"):
        every[name] = every[name].where(every[name].notna(), every[f"{name}_whole"])
    sealed = every[(every["started_s"] < every["finished_s"]) & (every["response_tokens"] != 0)]
    seconds = sealed["finished_s"] - sealed["started_s"]
    share = seconds / seconds.groupby(sealed["group"]).transform("sum")
    tokens = sealed["response_tokens"].fillna(share * sealed["response_tokens_whole"])
    refuse(
        (
            sealed.empty,
            f"{path}: no response with a dispatch and a later seal; name the events of a run that has trained",
        ),
        (
            tokens.isna().any(),
            f"{next(iter(sealed['place'][tokens.isna()]), path)}: no count of tokens for a response or its group; trace a run "
            "with token capture",
        ),
    )
    uncounted, without_prompt = sealed[["response_tokens", "prompt_tokens"]].isna().sum()
    notes |= {
        "responses without a dispatch, a later seal or a token were left out.": len(every)
        - len(sealed),
        "responses have no count: their group's tokens are divided by their seconds (estimated).": uncounted,
        "responses have no prompt length: 1 token is assumed.": without_prompt,
    }
    counted = sealed.assign(response_tokens=tokens.round())[["prompt_tokens", "response_tokens"]]
    return sealed.assign(
        **counted.fillna(1).clip(1, rows.INT32_MAX).astype(int),
        sample=sealed["sample"].clip(upper=rows.INT32_MAX).astype(int),
        begun_s=sealed.groupby("group")["started_s"].transform("min"),
        logged=pd.factorize(sealed["group"])[0],
    ).sort_values(["begun_s", "logged", "sample"], ignore_index=True)


def _trained(responses: Any, group: Any, groups: Any, notes: dict[str, int]) -> Any:
    """Return the update that trained each response: the one whose list has its group or prompt, or
    by the order of the steps that groups state, or of dispatch."""
    listed: dict[str, int] = {}
    times: Counter[str] = Counter()
    for k, names in enumerate(groups):
        every = {
            re.sub("_g[0-9]+.*", "", str(n)) for n in (names if isinstance(names, list) else ())
        }
        listed |= {f"{name}#{times[name]}" if times[name] else name: k for name in every}
        times.update(every)
    trained = responses["update"].rank(method="dense") - 1
    if listed:
        trained = responses["group"].map(listed).fillna(responses["prompt"].map(listed))
    if trained.isna().all():
        notes["groups name no update that trained them: the order of dispatch is assumed."] = 1
        trained = pd.Series(group // max((group[-1] + 1) // max(len(groups), 1), 1))
    return trained.where(trained < len(groups)).astype(float)


def _intervals(events: Any, versions: Any, assumed_s: Any, notes: dict[str, int]) -> pd.DataFrame:
    """Return updates or syncs, one after the other; where the seconds that one lasted are not
    stated, from an assumed start."""
    ended_s, lasted_s = events["at_s"].to_numpy(), events["lasted_s"].to_numpy()
    words = "updates and syncs have no length: the last seal, and the end of the update, begin them (assumed)."
    notes[words] = notes.get(words, 0) + int(np.isnan(lasted_s).sum())
    started_s = np.where(np.isnan(lasted_s), assumed_s, ended_s - lasted_s)
    started_s = np.minimum(np.fmax(started_s, np.r_[0.0, ended_s][:-1]), ended_s)
    return pd.DataFrame({"version": versions, "started_s": started_s, "ended_s": ended_s})


def _parts(responses: Any, loads: pd.DataFrame) -> list[list[tuple[int, int, float, float]]]:
    """Return version, tokens and seconds of the parts of each response: by the counts of its or its
    group's tokens, else by the seconds between syncs."""
    oldest = responses["counts"].dropna().map(min).min(), responses["version"].min()
    first = np.nan_to_num(np.fmin(*oldest))
    loaded_s, versions = loads["ended_s"].to_numpy(), loads["version"].to_numpy()
    names = ("started_s", "finished_s", "response_tokens", "version", "counts")
    parts = []
    for started_s, ended_s, tokens, stated, counts in responses[[*names]].itertuples(index=False):
        if isinstance(counts, dict):
            made_by = np.array(sorted(counts)) - first
            edges = np.cumsum([0.0, *(counts[version] for version in sorted(counts))])
            edges_s = edges / edges[-1] * (ended_s - started_s) + started_s
        else:
            inside = slice(*np.searchsorted(loaded_s, [started_s, ended_s], "right"))
            begun = np.r_[0, versions][inside.start] if np.isnan(stated) else stated - first
            made_by = np.r_[begun, versions[inside]]
            edges_s = np.r_[started_s, loaded_s[inside], ended_s]
        counted = np.diff(np.rint(tokens * (edges_s - started_s) / (ended_s - started_s)))
        pieces = np.maximum(made_by, 0).astype(int), counted.astype(int), edges_s[:-1], edges_s[1:]
        parts.append([p for p in zip(*(column.tolist() for column in pieces), strict=True) if p[1]])
    return parts
