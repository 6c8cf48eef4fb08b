"""Whether a result that was read holds together: its columns with their types, times and numbers that can be, a metadata that
has what is looked up in it.

Invariant: what passes can be explained, compared and drawn without another look. It is not checked whether it is true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simrl.errors import InputError
from simrl.parquet import decoded
from simrl.validation import explain

LARGEST = 1e12  # of any number: sums of them stay exact
STATUSES = ("trained", "dropped", "buffered", "in_flight")
SAME_S = 1e-9  # of instants that rounding kept apart, times their size
WORK: tuple[str, ...] = ("prefill_s", "recompute_moved_s", "recompute_preempted_s", "recompute_reloaded_s")
WORK += ("recompute_redrafted_s",)
WORK += ("drafts_stood_s", "drafts_wasted_s", "slowed_s", "decodes", "preemptions")
OF_LANES: Mapping[str, Any] = {"lane": str, "gpus": int, "role": str}
SIGNED = ("policy_version",)  # -1: of no policy


class _Facts(BaseModel):
    """Others are there too, and nobody computes with them."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)


class _Named(_Facts):
    name: str
    eta: int | None = Field(default=None, ge=0, le=10**6)


class _Cluster(_Facts):
    gpu: str


class _Engine(_Facts):
    max_num_seqs: int = Field(gt=0)


class _Training(_Facts):
    reward_s: float = Field(ge=0, le=LARGEST)


class _Scenario(_Facts):
    system: _Named
    model: str
    seed: int
    warmup_steps: int = Field(ge=0)
    cluster: _Cluster
    workload: dict[str, Any]
    engine: _Engine
    training: _Training


class _FullBatch(_Facts):
    sequences: int = Field(gt=0, le=10**9)
    context_tokens: float = Field(gt=0, le=LARGEST)
    pass_s: float = Field(gt=0, le=LARGEST)


class _Speculation(_Facts):
    method: str


class _Metadata(_Facts):
    """None: a part of a recorded run does not have it."""

    label: str | None = None
    system: str | None = None
    variant: str = ""
    gpus: int | None = Field(default=None, gt=0, le=10**7)
    rollout_workers: int = Field(default=0, ge=0, le=10**7)
    train_gpus: int | None = Field(default=None, ge=0, le=10**7)
    end_s: float | None = Field(default=None, ge=0, le=LARGEST)
    scenario: _Scenario | None = None
    full_batch: _FullBatch | None = None
    speculation: _Speculation | None = None


class _Source(_Facts):
    kind: str
    source: str


class _Trace(_Source):
    name: str
    licence: str
    cap_tokens: int | None = None


class _Profile(_Source):
    model: str
    gpu: str
    tp: int
    corrections: list[str]
    notes: str | None = None
    spread: float | None = None
    held_out_error: float | None = None


class _Drafts(_Speculation):
    acceptance: str | _Source
    draft_times: _Source


class _Tail(_Facts):
    drafters: dict[str, _Drafts]


class _ReportedCluster(_Cluster):
    tp: int
    cost_per_gpu_hour: float | None = None


class _ReportedEngine(_Engine):
    kv_cache_tokens: int | None


class _ReportedScenario(_Scenario):
    name: str
    steps: int
    cluster: _ReportedCluster
    engine: _ReportedEngine
    faults: list[Any]


class _Reported(_Metadata):
    """What a report names besides as what a run rests on."""

    label: str
    paper: str
    gpus: int = Field(gt=0, le=10**7)
    rollout_workers: int = Field(ge=0, le=10**7)
    train_gpus: int = Field(ge=0, le=10**7)
    end_s: float = Field(ge=0, le=LARGEST)
    kv_cache_tokens_per_worker: int
    load_weights_s: float
    load_weights_kind: str
    simrl_version: str
    trace: _Trace
    trace_steps: int
    profile: _Profile
    scenario: _ReportedScenario
    speculation: _Drafts | None = None
    best_of_n: _Tail | None = None
    faults: list[Any] = []  # a part of a recorded run that was killed does not have them


def checked_tables(tables: Mapping[str, pa.Table], rows: Mapping[str, type], place: str) -> dict[str, pa.Table]:
    """The tables with the columns of their `rows` (NamedTuples), cast to their types. Raises `InputError` that names table and
    column."""
    return {name: _typed(tables[name], rows[name], f"{place}/{name}.parquet") for name in tables}


def check_metadata(metadata: Any, place: str, reported: bool = False) -> None:
    """Raises `InputError` for a metadata without what is looked up in it, for a report if it is `reported`."""
    model = _Reported if reported else _Metadata
    if not isinstance(metadata, dict):
        raise InputError(f"{place}: a result's metadata is an object with named fields; write the result again")
    try:
        model.model_validate(metadata)
    except ValidationError as error:
        raise InputError(f"{place}: {explain(error, model, 'a result')[1]}; write the result again") from error


def require(metadata: Mapping[str, Any], *keys: str) -> None:
    """Raises `InputError` for a result without them."""
    for key in keys:
        if metadata.get(key) is None:
            raise InputError(f"the result's metadata has no {key}; name the folder of a run or a replay")


def check_times(tables: Mapping[str, pa.Table], end_s: float, place: str) -> None:
    """Raises `InputError` for rows that do not fit each other."""
    spans, steps, samples, segments = (_Columns(tables[name], f"{place}/{name}.parquet") for name in tables)
    if not tables["spans"].num_rows:
        raise InputError(f"{place}/spans.parquet: no rows; write the result again")
    spans.refuse(spans["ended_s"] <= spans["started_s"], "ended_s", "after started_s")
    spans.refuse(_before(spans, spans.texts("lane")), "started_s", "after the lane's span before has ended")
    work = [name for name in ("decode_s", *WORK) if name in tables["spans"].column_names]
    for name in work:
        told = np.isnan(spans[name]) == np.isnan(spans[work[0]])
        spans.refuse(~told, name, f"empty where {work[0]} is, and only there")
    spans.refuse(spans["ended_s"] > end_s * (1 + 1e-9), "ended_s", f"at most the run's end at {end_s:g} s")
    spans.refuse(spans["gpus"] < 1, "gpus", "at least 1")
    spans.refuse(~np.isin(spans.texts("role"), ("rollout", "train")), "role", "rollout or train")
    steps.refuse(steps["step"] != np.arange(len(steps["step"])), "step", "the row's number")
    steps.refuse(np.diff(steps["finished_s"], prepend=0.0) <= 0, "finished_s", "later than that of the update before")
    steps.refuse(steps["finished_s"] > end_s * (1 + 1e-9), "finished_s", f"at most the run's end at {end_s:g} s")
    for name in ("samples", "response_tokens"):
        steps.refuse(steps[name] < 1, name, "at least 1")
    samples.refuse(np.diff(samples["uid"], prepend=-1) <= 0, "uid", "larger than that of the row before")
    samples.refuse(~np.isin(samples.texts("status"), STATUSES), "status", f"one of {', '.join(STATUSES)}")
    trained = samples["trained_step"]
    samples.refuse(trained >= len(steps["step"]), "trained_step", f"one of the {len(steps['step'])} updates")
    samples.refuse(samples["finished_s"] < samples["started_s"], "finished_s", "after started_s")
    begun = ~np.isnan(samples["started_s"])
    samples.refuse(~begun & ~np.isnan(samples["finished_s"]), "finished_s", "empty where started_s is")
    samples.refuse((trained >= 0) & np.isnan(samples["finished_s"]), "trained_step", "empty for what is unfinished")
    samples.refuse(
        samples["accepted_tokens"] > samples["generated_tokens"], "accepted_tokens", "at most generated_tokens"
    )
    segments.refuse(~np.isin(segments["uid"], samples["uid"]), "uid", "that of a sample")
    segments.refuse(np.diff(segments["uid"], prepend=0) < 0, "uid", "in order")
    segments.refuse(segments["ended_s"] < segments["started_s"], "ended_s", "after started_s")
    segments.refuse(_before(segments, segments["uid"]), "started_s", "after the sample's segment before has ended")
    workers = len({lane for lane in spans.texts("lane") if re.fullmatch(r"rollout-\d+", lane)})
    segments.refuse(segments["worker"] >= workers, "worker", f"that of one of the {workers} lanes of rollout workers")


def _before(rows: _Columns, of: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a row begins before the one above it, of the same thing, has ended."""
    started_s, ended_s = rows["started_s"], rows["ended_s"]
    early = started_s[1:] < ended_s[:-1] - SAME_S * np.maximum(ended_s[:-1], 1.0)
    found: NDArray[np.bool_] = np.r_[np.zeros(min(len(of), 1), bool), early & (of[1:] == of[:-1])]
    return found


class _Columns:
    """Columns of a table as arrays; NaN where one is empty."""

    def __init__(self, table: pa.Table, place: str) -> None:
        self._table, self._place = table, place

    def __getitem__(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._table.column(name).to_numpy()
        return values

    def texts(self, name: str) -> NDArray[Any]:
        return np.array(self._table.column(name).to_pylist(), dtype=object).astype(str)

    def refuse(self, bad: NDArray[np.bool_], name: str, right: str) -> None:
        rows = np.flatnonzero(bad)
        if len(rows):
            value = self._table.column(name)[int(rows[0])].as_py()
            raise InputError(f"{self._place}: row {rows[0]}, column {name!r} is {value!r:.60}; it must be {right}")


def _typed(table: pa.Table, row: type, place: str) -> pa.Table:
    hints = get_type_hints(row)
    if "lane" in hints:
        hints = {**OF_LANES, **{name: hint for name, hint in hints.items() if name != "lane"}}
    columns = {}
    for name, hint in hints.items():
        kind, optional = (get_args(hint) or (hint,))[0], bool(get_args(hint))
        if name not in table.column_names:
            if name in ("decode_s", *WORK) and not {"decode_s", *WORK} & set(table.column_names):
                continue  # a result of before they were recorded
            raise InputError(f"{place}: no column {name!r}; write the result again")
        columns[name] = _column(table.column(name), kind, optional, name, place)
    return pa.table(columns)


def _column(column: pa.ChunkedArray, kind: type, optional: bool, name: str, place: str) -> pa.ChunkedArray:
    wanted = {int: pa.int64(), float: pa.float64(), str: pa.string()}[kind]
    try:
        if kind is not str and not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise pa.ArrowInvalid(f"a column of {column.type}")
        column = decoded(column, f"{place}: column {name!r}").cast(wanted)
    except (pa.ArrowException, ValueError) as error:
        if not pa.types.is_null(column.type) or not optional:
            raise InputError(
                f"{place}: column {name!r} is {column.type}, not {wanted}; write the result again"
            ) from error
        column = pa.chunked_array([pa.nulls(len(column), wanted)])
    if column.null_count and not optional:
        raise InputError(f"{place}: column {name!r} is empty in places; write the result again")
    if kind is str:
        return column.combine_chunks().dictionary_encode()
    low = -1 if name in SIGNED else -LARGEST if name.endswith("_s") and "started" not in name else 0
    ends = (pa.scalar(end, pa.float64()).cast(wanted) for end in (low, 1e7 if name == "gpus" else LARGEST))
    within = pc.and_(pc.greater_equal(column, next(ends)), pc.less_equal(column, next(ends)))
    bad = pc.invert(within).fill_null(False).to_numpy()
    _Columns(pa.table({name: column}), place).refuse(bad, name, f"from {low:g} to {LARGEST:g}")
    return column.cast(pa.int32()) if name == "gpus" else column
