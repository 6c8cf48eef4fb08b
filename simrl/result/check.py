"""Checks of a result that was read: columns and their types, rows that fit each other, required
metadata.

Invariant: a valid result can be explained, compared and drawn without further checks. Its truth is
not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field, create_model

from simrl.errors import InputError, refuse
from simrl.validation import Model, validated

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 1e12  # of any number: sums of such numbers stay exact
STATUSES = ("trained", "dropped", "buffered", "in_flight", "evaluation")
SAME_S = 1e-9  # relative: instants that differ only by rounding


class _Facts(Model, extra="allow", strict=True):
    """An object of a result's metadata; unknown keys are allowed and ignored."""


def _facts(*rows: tuple[Any, str]) -> type[BaseModel]:
    """Return a model of objects with these keys (their type, dotted keys). A key with `?` may be
    missing or null."""
    fields: dict[str, Any] = {}
    inner: dict[str, list[tuple[Any, str]]] = {}
    for kind, key in ((kind, key) for kind, keys in rows for key in keys.split()):
        name, _, rest = key.partition(".")
        fields[name] = kind
        if rest:
            inner.setdefault(name, []).append((kind, rest))
    fields |= {name: _facts(*parts) for name, parts in inner.items()}
    kinds: dict[str, Any] = {
        name.rstrip("?"): (kind | None, None) if "?" in name else (kind, ...)
        for name, kind in fields.items()
    }
    return create_model("_Facts", __base__=_Facts, **kinds)


_COUNT: Any = Annotated[int, Field(ge=0, le=10**7)]
_TOKENS: Any = Annotated[int, Field(ge=0, le=10**15)]  # of a whole run
_POSITIVE: Any = Annotated[int, Field(gt=0, le=10**7)]
_AMOUNT: Any = Annotated[float, Field(ge=0, le=LARGEST)]
_SOURCE: Any = _facts((str, "kind source"))
_DRAFTS = _facts((str, "method"), (str | _SOURCE, "acceptance"), (_SOURCE, "draft_times"))
_ANY_RESULT = _facts(  # the partial results of a recorded run lack most of it
    (GenericAlias(dict, (str, str)), "tables?"),
    (
        str,
        "label? system? variant? scenario?.model scenario?.system.name scenario?.cluster.gpu speculation?.method",
    ),
    (
        str,
        "links? scenario?.cluster.train?.gpu? scenario?.precision?.training? scenario?.precision?.weights?",
    ),
    (_AMOUNT, "scenario?.cluster.train?.cost_per_gpu_hour? scenario?.training.expert_imbalance?"),
    (_POSITIVE, "scenario?.training.expert_parallel?"),
    (int, "scenario?.seed"),
    (dict[str, Any], "scenario?.workload"),
    (str, "scenario?.calibration?.log scenario?.calibration?.steps"),
    (dict[str, str | int], "scenario?.calibration?.at"),
    (dict[str, str], "scenario?.calibration?.warnings"),
    (list[str], "scenario?.calibration?.lacks"),
    (list[dict[str, float]], "scenario?.calibration?.fits"),
    (dict[str, float], "extrapolated?"),
    (list[str], "not_modelled?"),
    (dict[str, str], "without_effect?"),
    (bool, "prefix_caching?"),
    (_COUNT, "rollout_workers? train_gpus? scenario?.warmup_steps scenario?.system.eta?"),
    (_POSITIVE, "gpus? full_batch?.sequences scenario?.engine.max_num_seqs"),
    (_AMOUNT, "end_s? scenario?.training.reward_s admission?.concurrency admission?.eta"),
    (_TOKENS, "prefix_cache?.lookup_tokens prefix_cache?.hit_tokens prefix_cache?.prefill_tokens"),
    (str, "agents?.kv_while_tool_runs judge?.model"),
    (_COUNT, "judge?.rollout_workers judge?.requests judge?.finished scenario?.judge?.gpus?"),
    (_TOKENS, "judge?.lookup_tokens judge?.hit_tokens judge?.generated_tokens"),
    (GenericAlias(list, (_facts((str, "round"), (_POSITIVE, "tp")),)), "planner?"),
    (_COUNT, "agents?.not_offloaded agents?.killed agents?.pauses? agents?.moves?"),
    (
        float,
        "agents?.in_tools_s agents?.waiting_for_tool_slots_s agents?.waiting_for_kv_s agents?.offloaded_bytes",
    ),
    (
        float,
        "agents?.waiting_for_room_s?",
    ),
    (Annotated[float, Field(gt=0, le=LARGEST)], "full_batch?.context_tokens full_batch?.pass_s"),
)
_REPORTED = _facts(  # of a result in a report, which also names the inputs of the run
    (
        str,
        "label paper load_weights_kind simrl_version scenario.name trace.name trace.licence trace.kind trace.source",
    ),
    (str, "profile.model profile.gpu profile.kind profile.source profile.notes?"),
    (
        int,
        "kv_cache_tokens_per_worker trace_steps trace.cap_tokens? profile.tp scenario.steps scenario.cluster.tp",
    ),
    (_POSITIVE, "scenario.cluster.dp? scenario.cluster.ep? profile.dp? profile.ep?"),
    (int | None, "scenario.engine.kv_cache_tokens"),
    (
        float,
        "load_weights_s profile.spread? profile.held_out_error? scenario.cluster.cost_per_gpu_hour?",
    ),
    (_POSITIVE, "gpus"),
    (_COUNT, "rollout_workers train_gpus"),
    (_AMOUNT, "end_s"),
    (list[str], "profile.corrections"),
    (dict[str, Any], "scenario.profile scenario.engine scenario.training"),
    (dict[str, Any] | None, "scenario.profile.roofline?"),
    (list[Any], "scenario.faults faults?"),
    (_DRAFTS, "speculation?"),
    (GenericAlias(dict, (str, _DRAFTS)), "best_of_n?.drafters"),
)


def check_metadata(metadata: Any, place: str, reported: bool = False) -> None:
    """Raise `InputError` for metadata without the keys that are looked up in it, for a report if
    `reported`."""
    if not isinstance(metadata, dict):
        raise InputError(
            f"{place}: a result's metadata is an object with named fields; write the result again"
        )
    for model in (_ANY_RESULT, _REPORTED)[: 1 + reported]:
        validated(model, metadata, place, "a result", "; write the result again")


def require(metadata: Mapping[str, Any], *keys: str) -> None:
    """Raise `InputError` for a result without these keys."""
    for key in keys:
        if metadata.get(key) is None:
            raise InputError(
                f"the result's metadata has no {key}; name the folder of a run or a replay"
            )


def _overlaps(rows: pd.DataFrame, of: str) -> Any:
    """Return which rows begin before the end of the previous row with an equal `of`."""
    ended_s = rows["ended_s"].shift()
    return (rows[of] == rows[of].shift()) & (
        rows["started_s"] < ended_s - SAME_S * np.maximum(ended_s, 1.0)
    )


# Table, column, wrong rows of the table `t` of a run `r`, and the words for right ones.
_RULES: tuple[tuple[str, str, Any, str], ...] = (
    ("spans", "ended_s", lambda t, r: t.ended_s <= t.started_s, "after started_s"),
    (
        "spans",
        "started_s",
        lambda t, r: _overlaps(t, "lane"),
        "after the end of the lane's previous span",
    ),
    (
        "spans",
        "ended_s",
        lambda t, r: t.ended_s > r["latest_s"],
        "at most the run's end at {latest_s:g} s",
    ),
    ("spans", "gpus", lambda t, r: t.gpus < 1, "at least 1"),
    (
        "spans",
        "role",
        lambda t, r: ~t.role.isin(["rollout", "train", "judge"]),
        "rollout, train or judge",
    ),
    ("steps", "step", lambda t, r: t.step != np.arange(len(t)), "the row's number"),
    (
        "steps",
        "finished_s",
        lambda t, r: np.diff(t.finished_s, prepend=0.0) <= 0,
        "later than the row before",
    ),
    (
        "steps",
        "finished_s",
        lambda t, r: t.finished_s > r["latest_s"],
        "at most the run's end at {latest_s:g} s",
    ),
    ("steps", "samples", lambda t, r: t.samples < 1, "at least 1"),
    ("steps", "response_tokens", lambda t, r: t.response_tokens < 1, "at least 1"),
    (
        "samples",
        "uid",
        lambda t, r: np.diff(t.uid, prepend=-1) <= 0,
        "larger than in the row before",
    ),
    ("samples", "status", lambda t, r: ~t.status.isin(STATUSES), f"one of {', '.join(STATUSES)}"),
    (
        "samples",
        "trained_step",
        lambda t, r: t.trained_step >= r["updates"],
        "one of the {updates} updates",
    ),
    ("samples", "finished_s", lambda t, r: t.finished_s < t.started_s, "after started_s"),
    (
        "samples",
        "finished_s",
        lambda t, r: t.started_s.isna() & t.finished_s.notna(),
        "empty where started_s is",
    ),
    (
        "samples",
        "trained_step",
        lambda t, r: (t.trained_step >= 0) & t.finished_s.isna(),
        "empty if unfinished",
    ),
    (
        "samples",
        "accepted_tokens",
        lambda t, r: t.accepted_tokens > t.generated_tokens,
        "at most generated_tokens",
    ),
    (
        "samples",
        "verified_tokens",
        lambda t, r: t.verified_tokens.gt(0) & t.verifications.lt(1),
        "0 without verifications",
    ),
    ("segments", "uid", lambda t, r: ~t.uid.isin(r["uids"]), "the uid of a sample"),
    ("segments", "uid", lambda t, r: np.diff(t.uid, prepend=0) < 0, "in order"),
    ("segments", "ended_s", lambda t, r: t.ended_s < t.started_s, "after started_s"),
    (
        "segments",
        "started_s",
        lambda t, r: _overlaps(t, "uid"),
        "after the end of the sample's previous segment",
    ),
    (
        "segments",
        "worker",
        lambda t, r: t.worker >= r["workers"],
        "one of the {workers} rollout workers",
    ),
)


def checked_tables(
    tables: Mapping[str, pa.Table], schemas: Mapping[str, pa.Schema], end_s: float, place: str
) -> dict[str, pa.Table]:
    """Return the tables cast to these schemas. Of spans, all columns that may be empty may be
    missing. Raise `InputError` that names table and column, and the first row that is wrong or does
    not fit the others."""
    work = [field.name for field in schemas["spans"] if field.nullable]
    typed = {
        name: _typed(table, schemas[name], work, f"{place}/{name}.parquet")
        for name, table in tables.items()
    }
    frames = {name: table.to_pandas() for name, table in typed.items()}
    spans = frames["spans"]
    refuse((spans.empty, f"{place}/spans.parquet: no rows; write the result again"))
    workers = spans["lane"].drop_duplicates().str.fullmatch(r"rollout-(prefill-)?\d+").sum()
    run = {"latest_s": end_s * (1 + SAME_S), "updates": len(frames["steps"]), "workers": workers}
    run["uids"] = frames["samples"]["uid"]
    together = f"empty where {work[0]} is, and only there"
    filled = [
        ("spans", n, lambda t, r, n=n: t[n].isna() != t[work[0]].isna(), together)
        for n in work
        if n in spans
    ]
    for name, column, wrong, right in (*filled, *_RULES):
        bad = wrong(frames[name], run)
        _refuse(
            typed[name].column(column), column, bad, right.format(**run), f"{place}/{name}.parquet"
        )
    return typed


def _typed(table: pa.Table, schema: pa.Schema, work: list[str], place: str) -> pa.Table:
    missing = [name for name in schema.names if name not in table.column_names]
    if missing not in (
        [],
        ["lock_step_s"],
        ["lock_step_s", "slot_s"],
        work,
    ):  # earlier versions wrote none
        raise InputError(f"{place}: no column {missing[0]!r}; write the result again")
    return pa.table(
        {f.name: _column(table.column(f.name), f, place) for f in schema if f.name not in missing}
    )


def _column(column: pa.ChunkedArray, field: pa.Field, place: str) -> pa.ChunkedArray:
    name, kind, is_text = field.name, column.type, pa.types.is_dictionary(field.type)
    try:
        if not (
            is_text
            or pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_null(kind)
        ):
            raise pa.ArrowInvalid(f"a column of {kind}")
        column = column.cast(
            pa.string() if is_text else pa.int64() if name == "gpus" else field.type
        )
    except (pa.ArrowException, ValueError) as error:
        raise InputError(
            f"{place}: column {name!r} is {kind}, not {field.type}; write the result again"
        ) from error
    if column.null_count and not field.nullable:
        raise InputError(f"{place}: column {name!r} is empty in places; write the result again")
    if is_text:
        return column.combine_chunks().dictionary_encode()
    low = (
        -1
        if name == "policy_version"
        else -LARGEST
        if name.endswith("_s") and "started" not in name
        else 0
    )
    values = column.fill_null(0).to_numpy()
    bad = ~((values >= low) & (values <= (1e7 if name == "gpus" else LARGEST)))
    _refuse(column, name, bad, f"from {low:g} to {LARGEST:g}", place)
    return column.cast(field.type)


def _refuse(column: pa.ChunkedArray, name: str, bad: Any, right: str, place: str) -> None:
    """Raise `InputError` for the first of the bad rows."""
    for row in np.flatnonzero(bad)[:1].tolist():
        value = column[row].as_py()
        raise InputError(
            f"{place}: row {row}, column {name!r} is {value!r:.60}; it must be {right}"
        )
