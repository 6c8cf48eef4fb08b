"""Result: the record of a run in four Arrow tables.

Invariant of a `Result`: every GPU-second between 0 and `end_s` lies in exactly one span (idle time is a span of kind
"idle"), no segment ends after `end_s` (the end of the last update and of the passes then under way), and every sample that
was submitted has one row in `samples` with one status. The replayer writes the same tables, so predicted against measured is
a join.

spans      lane, gpus, role (use of the GPUs then: rollout, also where they train or judge in turn, train, or judge), kind,
           started_s, ended_s, policy_version (-1 of a judge), tokens (of a judge, its own) — kinds: rollout, train_drafter
           (on idle rollout workers), load_drafter (of freed ones), judge, load_weights, evaluate,
           lost, transfer, switch, log_prob, train, publish, checkpoint, idle. The columns of `Work` divide the passes of a
           rollout; they are empty for other kinds, and of real engines, which do not record them
steps      one row a policy update: step, policy_version (before it), started_s, finished_s, samples, prompt_tokens,
           response_tokens, off_policyness_mean (over tokens), off_policyness_max; of the tokens that were carried over from
           an earlier step, which these two leave out: carried_tokens, carried_off_policyness_max
samples    uid, trace_step, epoch, prompt_id, sample, prompt_tokens, generated_tokens, started_s, finished_s (empty while
           unfinished), worker (the last), status (trained, dropped, buffered, in_flight), trained_step; with speculation,
           drafted_tokens (also unverified ones, of which decoupled drafting has many), accepted_tokens of them,
           verifications (passes that verified a draft), verified_tokens (the yield of these passes); with best-of-N,
           duplicate_tokens: tokens of copies that did not finish first. All other columns are of the copy that finished
           first, or, while none has, of the copy with the most tokens
segments   uid, worker, policy_version, tokens, started_s, ended_s
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from simrl.errors import InputError, first_line, meant
from simrl.files import BROKEN_SEAL, is_broken, read_parquet, seal_of, sealed, write_table
from simrl.result.check import check_metadata, checked_tables

METADATA_FILE = "result.json"


# GPUs too few for a rollout worker; beginning of the name of a prefill worker's lane
REST_LANE, PREFILL_LANE = "rollout-rest", "rollout-prefill"


class Lane(NamedTuple):
    """A set of GPUs that work as one: a rollout worker, or the trainer."""

    name: str
    gpus: int


class Work(NamedTuple):
    """The work of the passes of a span of rollout. Its seconds, and the host's work between passes, sum to the span's length.

    decode_s               decoding, as in passes without other work
    prefill_s              added by the first prefill of tokens
    recompute_*_s          added by repeated prefill of a lost cache: the response moved or continued after a break, was
                           preempted for want of KV blocks, got new weights, or got a drafter that needs it
    drafts_stood_s         added by drafting and verifying draft tokens that were accepted
    drafts_wasted_s        added by drafting and verifying draft tokens that were rejected
    slowed_s               added by a slow worker (a fault)
    lock_step_s            waiting of data-parallel ranks for the longest pass of a rank, dummy passes included; like all
                           seconds of a worker with several ranks, a mean over them
    decodes                sequences that decoded, summed over passes
    slot_s                 the seconds of the passes, times the requests that run in each
    preemptions            of running requests, for want of KV blocks
    """

    decode_s: float = 0.0
    prefill_s: float = 0.0
    recompute_moved_s: float = 0.0
    recompute_preempted_s: float = 0.0
    recompute_reloaded_s: float = 0.0
    recompute_redrafted_s: float = 0.0
    drafts_stood_s: float = 0.0
    drafts_wasted_s: float = 0.0
    slowed_s: float = 0.0
    lock_step_s: float = 0.0
    decodes: float = 0.0
    slot_s: float = 0.0
    preemptions: float = 0.0

    def part(self, share: float) -> Work:
        """Return the work of a part of the span."""
        return Work(*(share * value for value in self))


class Span(NamedTuple):
    """An activity of a lane."""

    lane: int
    kind: str
    started_s: float
    ended_s: float
    policy_version: int
    tokens: int
    work: Work | None = None


class Step(NamedTuple):
    """One policy update."""

    step: int
    policy_version: int
    started_s: float
    finished_s: float
    samples: int
    prompt_tokens: int
    response_tokens: int
    off_policyness_mean: float
    off_policyness_max: int
    carried_tokens: int = 0
    carried_off_policyness_max: int = 0


class SampleRow(NamedTuple):
    """A row of `samples`."""

    uid: int
    trace_step: int
    epoch: int
    prompt_id: int
    sample: int
    prompt_tokens: int
    generated_tokens: int
    started_s: float | None
    finished_s: float | None
    worker: int | None
    status: str
    trained_step: int | None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0
    verified_tokens: int = 0
    duplicate_tokens: int = 0


class SegmentRow(NamedTuple):
    """A row of `segments`."""

    uid: int
    worker: int
    policy_version: int
    tokens: int
    started_s: float
    ended_s: float


def codes(column: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Return the places of the rows' texts in the list of distinct texts, and this list, in the
    order of first rows."""
    encoded = column.combine_chunks().cast(pa.string()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _schema(hints: Mapping[str, Any]) -> pa.Schema:
    """Return the Arrow types of columns (name: type, `| None` where it may be empty)."""
    kinds = {
        int: pa.int64(),
        float: pa.float64(),
        str: pa.dictionary(pa.int32(), pa.string()),
        np.int32: pa.int32(),
    }
    return pa.schema(
        pa.field(name, kinds[(get_args(hint) or (hint,))[0]], bool(get_args(hint)))
        for name, hint in hints.items()
    )


_LANE = {"lane": str, "gpus": np.int32, "role": str}
_SPAN = {name: hint for name, hint in get_type_hints(Span).items() if name not in ("lane", "work")}
TABLES = {
    "spans": _schema({**_LANE, **_SPAN, **dict.fromkeys(Work._fields, float | None)}),
    "steps": _schema(get_type_hints(Step)),
    "samples": _schema(get_type_hints(SampleRow)),
    "segments": _schema(get_type_hints(SegmentRow)),
}


@dataclass(frozen=True)
class Result:
    """The tables of one run (columns above) and its metadata: system, scenario, sources of trace
    and profile, end_s."""

    spans: pa.Table
    steps: pa.Table
    samples: pa.Table
    segments: pa.Table
    metadata: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write one Parquet file a table and the metadata as JSON into a folder that exists. The
        metadata's seal covers the tables' seals."""
        seals = {
            name: write_table(getattr(self, name), folder / f"{name}.parquet") for name in TABLES
        }
        content = sealed({**self.metadata, "tables": seals})
        (folder / METADATA_FILE).write_text(
            json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )


def read_result(folder: str | Path) -> Result:
    """Return the result that `Result.write` wrote. Raise `InputError` for a folder without a
    result, with parts of several runs, or with tables that do not hold together
    (`simrl.result.check`)."""
    folder = Path(folder)
    if not (folder / METADATA_FILE).is_file():
        if (folder / "sweep.json").exists():
            raise InputError(
                f"{folder}: is a sweep's, which has a table and no runs; simrl report reads it"
            )
        raise InputError(f"{folder}: not a result folder{_instead(folder)}")
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
        tables = {name: read_parquet(folder / f"{name}.parquet") for name in TABLES}
    except (OSError, ValueError, RecursionError, InputError) as error:
        raise InputError(
            f"{folder}: not a result folder ({first_line(error)}); `simrl run` writes one"
        ) from error
    check_metadata(metadata, f"{folder}/{METADATA_FILE}")
    if is_broken(metadata):
        raise InputError(
            f"{folder}/{METADATA_FILE}: {BROKEN_SEAL}; simulate again, or remove its sha256"
        )
    seals = metadata.pop("tables", None)
    for name in TABLES if metadata.pop("sha256", None) and seals else ():
        if seal_of(folder / f"{name}.parquet") not in (None, seals.get(name)):
            raise InputError(
                f"{folder}/{name}.parquet: belongs to another run than {METADATA_FILE}; simulate "
                "again, or bring the files of one run together"
            )
    return Result(
        metadata=metadata,
        **checked_tables(tables, TABLES, metadata.get("end_s", math.inf), str(folder)),
    )


def _instead(folder: Path) -> str:
    """Return the end of a message: the place's actual contents, and the remedy."""
    if folder.is_dir():
        return f", it has no {METADATA_FILE}; name one that `simrl run` wrote"
    if folder.exists():
        runs = sorted(f"{file.parent}" for file in folder.parent.glob(f"*/{METADATA_FILE}"))
        return f" but a file; name the folder that `simrl run` wrote{f', such as {runs[0]}' if runs else ''}"
    beside = (
        [path.name for path in folder.parent.iterdir() if path.is_dir()]
        if folder.parent.is_dir()
        else []
    )
    return f", it does not exist{meant(folder.name, beside)}; name one that `simrl run` wrote"


def find_result(folder: str | Path) -> Result:
    """Return the result of a folder, of the one result folder in it, or of a replay's measured run.
    Raise `InputError`."""
    folder = Path(folder)
    if (folder / METADATA_FILE).is_file():
        return read_result(folder)
    inside = sorted(file.parent for file in folder.glob(f"*/{METADATA_FILE}"))
    chosen = [result for result in inside if result.name == "measured"] or inside
    if len(chosen) > 1:
        names = ", ".join(result.name for result in inside)
        raise InputError(
            f"{folder}: has {len(inside)} results; name one of them, such as {inside[0]} (there are {names})"
        )
    return read_result(chosen[0] if chosen else folder)
