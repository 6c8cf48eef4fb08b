"""Profile: the seconds of one forward pass of one inference engine (a tensor-parallel group of
GPUs).

    pass_s = dense(query tokens) + attention(prefill, decode) + sampled(sequences) + between_passes_s + straggler,
             least_pass_s + least_sequence_s × sequences + between_passes_s at the least

`dense` is everything that works token by token, all layers and the tensor-parallel all-reduces
included (where attention has `dp` ranks, the routed experts and their exchange are apart, in
`experts`: they see the tokens of all ranks); `attention` reads the KV cache once a sequence,
however many query tokens verify there; `sampled` is the output head and the sampler, at one
position a sequence, or at all positions of a draft that is verified. `attention` is measured with
equal lengths; where they differ, the pass waits for its longest sequences, the `straggler` (none in
a profile that did not measure it). The three are grids with linear interpolation. Invariant of a
`TableProfile`: its grids are complete, finite, positive, and no time falls where the work grows.
Nothing is read beyond a grid: `require_covers` refuses a simulation whose limits leave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from simrl.errors import InputError, first_line, meant, refuse
from simrl.files import is_count_like, parquet_metadata, read_parquet, write_parquet
from simrl.profile.compiled import inlined, lean, lean_kernel
from simrl.profile.interpolation import Floats as Floats, interpolate, interpolate4
from simrl.profile.metadata import METADATA_KEY as METADATA_KEY, ProfileMetadata as ProfileMetadata
from simrl.profile.model_shape import known_name
from simrl.profile.shipped import PROFILES, by_name

AXES = ("prefill_tokens", "prefill_kv_tokens", "decode_sequences", "decode_kv_tokens")
# The tables of a file: the columns of their axes with the fields of `Tables` that hold the ticks,
# and the field of the seconds.
GRIDS: dict[str, tuple[dict[str, str], str]] = {
    "dense": ({"query_tokens": "dense_tokens"}, "dense_s"),
    "sampled": ({"sequences": "sampled_sequences"}, "sampled_s"),
    "attention": ({axis: axis for axis in AXES}, "attention_s"),
    "between_passes": ({}, "between_passes_s"),
    "experts": ({"query_tokens": "expert_tokens"}, "experts_s"),
    "straggler": ({"sequences": "straggler_sequences", "share": "straggler_shares"}, "straggler_s"),
    "straggler_beside_prefill": (
        {"sequences": "straggler_sequences"},
        "straggler_beside_prefill_s",
    ),
}
STRAGGLERS = ("straggler", "straggler_beside_prefill")  # seconds a token, which may fall
OPTIONAL = ("experts", *STRAGGLERS)
SHARE = pa.field("share", pa.float64())  # a column of files with stragglers
MOST_HOLES = 100  # points of a grid for each measured one: with more, the rows are no grid
NUMBERS = ("query_tokens", "sequences", *AXES, "seconds")
COLUMNS = pa.schema([("table", pa.string()), *((name, pa.float64()) for name in NUMBERS)])


NOT_MEASURED, NOTHING_MEASURED, NO_SHARES = np.zeros(0), np.zeros((0, 2)), np.array([0.0, 1.0])


class Tables(NamedTuple):
    """The grids, as the compiled engine reads them. Axes are tokens and sequences, values seconds
    of a whole model pass.

    `attention_s` has the shape (prefill_tokens, prefill_kv_tokens, decode_sequences,
    decode_kv_tokens): its prefill axes are one chunk and its cached context, its decode axes the
    number of sequences and their mean length. 0 in `prefill_tokens` or `decode_sequences` means
    that this part is absent. `straggler_s` [s a token] has the shape (sequences, shares): a token
    more in that share of the sequences, over an even batch of as many tokens;
    `straggler_beside_prefill_s` has a value by sequences. A row holds from the previous number of
    decoding sequences up to its own. `least_pass_s` is the host's time of a pass beside the kernels
    (launches one by one; with asynchronous scheduling, the next pass is prepared), and
    `least_sequence_s` of each sequence in it: a faster GPU waits for them. `experts_s` is
    what the routed experts and their exchange take at `expert_tokens` of a pass over all dp ranks,
    which `pass_s` does not add (`joined`).
    """

    dense_tokens: Floats
    dense_s: Floats
    sampled_sequences: Floats
    sampled_s: Floats
    prefill_tokens: Floats
    prefill_kv_tokens: Floats
    decode_sequences: Floats
    decode_kv_tokens: Floats
    attention_s: Floats
    between_passes_s: float
    straggler_sequences: Floats = NOT_MEASURED
    straggler_shares: Floats = NO_SHARES
    straggler_s: Floats = NOTHING_MEASURED
    straggler_beside_prefill_s: Floats = NOT_MEASURED
    least_pass_s: float = 0.0
    least_sequence_s: float = 0.0
    expert_tokens: Floats = NOT_MEASURED
    experts_s: Floats = NOT_MEASURED


def joined(tables: Tables, ranks: int = 1) -> Tables:
    """Return tables whose `dense_s` includes the experts, for `ranks` that all have as many tokens
    in a pass: exact for one."""
    if not tables.expert_tokens.size:
        return tables
    of_rank = tables.expert_tokens / ranks
    tokens = np.union1d(tables.dense_tokens, of_rank)
    tokens = tokens[
        (tokens >= tables.dense_tokens[0]) & (tokens <= min(tables.dense_tokens[-1], of_rank[-1]))
    ]
    seconds = np.interp(tokens, tables.dense_tokens, tables.dense_s) + np.interp(
        tokens, of_rank, tables.experts_s
    )
    return tables._replace(
        dense_tokens=tokens, dense_s=seconds, expert_tokens=NOT_MEASURED, experts_s=NOT_MEASURED
    )


@inlined
def _sort(values: Floats) -> None:
    """Sort a few hundred values (Shell's sort: numpy's takes two seconds to compile)."""
    gap = values.shape[0] // 2
    while gap > 0:
        for i in range(gap, values.shape[0]):
            value, at = values[i], i
            while at >= gap and values[at - gap] > value:
                values[at] = values[at - gap]
                at -= gap
            values[at] = value
        gap //= 2


@lean_kernel
def straggler_s(tables: Tables, lengths: Floats) -> float:
    """Return the seconds that a pass without prefill waits for its longest decoding sequences;
    sorts their `lengths`.

    A thread block reads one sequence's cache, on one multiprocessor. While many sequences are left,
    they share the memory's bandwidth, and only their sum counts; the few longest do not use it up.
    So each token by which the k longest exceed the next costs measured seconds in addition to its
    part in the sum. At most numbers of sequences for which kernels split a sequence over
    multiprocessors, these seconds are 0 (`_straggler_row`).
    """
    n, seconds = lengths.shape[0], 0.0
    if tables.straggler_sequences.shape[0] == 0:
        return seconds
    each_s = tables.straggler_s[_straggler_row(tables, float(n))]
    _sort(lengths)
    for k in range(1, n):
        more = lengths[n - k] - lengths[n - k - 1]
        if more > 0.0:
            seconds += more * interpolate(tables.straggler_shares, each_s, k / n)
    return seconds


@lean_kernel
def straggler_beside_prefill_s(tables: Tables, sequences: float, tokens: float) -> float:
    """Return the seconds that a pass with prefill waits for its longest decoding sequence, `tokens`
    longer than the mean, or than a prefill that lasts longer. Kernels split no sequence there."""
    if tables.straggler_sequences.shape[0] == 0 or tokens <= 0.0:
        return 0.0
    return tokens * tables.straggler_beside_prefill_s[_straggler_row(tables, sequences)]


@lean
def _straggler_row(tables: Tables, sequences: float) -> int:
    """Return the row of a number of decoding sequences: between two measured ones, the larger
    one's."""
    measured, i = tables.straggler_sequences, 0
    while i < measured.shape[0] - 1 and measured[i] < sequences:
        i += 1
    return i


@lean_kernel
def equivalent_chunk(prefill_tokens: float, prefill_work: float) -> tuple[float, float]:
    """Return one chunk (tokens, cached context) with the attention work of several.

    `prefill_work` is Σ c (k + c / 2) over chunks of c tokens after k cached ones. The one chunk
    keeps the tokens and takes the context that gives this work; where even no context is too much
    (several short prompts), it is the chunk without context that has this work.
    """
    context = prefill_work / prefill_tokens - 0.5 * prefill_tokens
    if context >= 0.0:
        return prefill_tokens, context
    return np.sqrt(2.0 * prefill_work), 0.0


@inlined
def attention_alone_s(
    tables: Tables,
    prefill_tokens: float,
    prefill_work: float,
    decode_sequences: float,
    decode_kv_tokens: float,
) -> float:
    """Return the seconds of the attention of a pass; see `pass_s`."""
    chunk, context = 0.0, 0.0
    if prefill_tokens > 0.0:
        chunk, context = equivalent_chunk(prefill_tokens, prefill_work)
    kv = decode_kv_tokens / decode_sequences if decode_sequences > 0.0 else 0.0
    return interpolate4(
        tables.prefill_tokens,
        tables.prefill_kv_tokens,
        tables.decode_sequences,
        tables.decode_kv_tokens,
        tables.attention_s,
        (chunk, context, decode_sequences, kv),
    )


@inlined
def without_attention_s(tables: Tables, query_tokens: float, sequences: float) -> float:
    """Return the seconds of all but the attention and the wait for the longest sequences."""
    dense = interpolate(tables.dense_tokens, tables.dense_s, query_tokens)
    sampled = interpolate(tables.sampled_sequences, tables.sampled_s, sequences)
    return dense + sampled + tables.between_passes_s


@lean
def with_attention_s(
    tables: Tables,
    query_tokens: float,
    positions: float,
    sequences: float,
    attention_s: float,
    waiting_s: float,
) -> float:
    """Return the seconds of a pass that samples at `positions` of `sequences` (more of them where
    drafts are verified); `waiting_s` is its wait for the longest sequences and for experts."""
    seconds = without_attention_s(tables, query_tokens, positions) + attention_s + waiting_s
    return max(seconds, least_s(tables, sequences))


@inlined
def least_s(tables: Tables, sequences: float) -> float:
    """Return the seconds of the shortest pass: the host's, where kernels take less."""
    return tables.least_pass_s + tables.least_sequence_s * sequences + tables.between_passes_s


@lean_kernel
def pass_s(
    tables: Tables,
    query_tokens: float,
    sequences: float,
    prefill_tokens: float,
    prefill_work: float,
    decode_sequences: float,
    decode_kv_tokens: float,
    straggler: float = 0.0,
) -> float:
    """Return the seconds of one forward pass, the pause before the next one included.

    `decode_kv_tokens` is the sum over the decoding sequences. `query_tokens` counts prefill and
    decode (and draft) tokens. `straggler` [s] is what it waits for its longest decoding sequences.
    """
    attention = attention_alone_s(
        tables, prefill_tokens, prefill_work, decode_sequences, decode_kv_tokens
    )
    hosted = decode_sequences if decode_sequences > 0.0 else sequences
    return with_attention_s(tables, query_tokens, sequences, hosted, attention, straggler)


class TableProfile:
    """The step times of an engine. Raises `InputError` for grids that break the module's invariant.

    `tables` has the experts apart only where attention has several ranks; `even` has them in
    `dense_s`, for ranks that all have as many tokens, and all methods that return seconds mean such
    passes; their arguments are of one rank. `sequence_s`: the host's part of each decoding sequence
    in the times of attention (`with_corrections`).
    """

    def __init__(
        self,
        tables: Tables,
        metadata: ProfileMetadata,
        origin: str = "profile",
        corrections: tuple[str, ...] = (),
        sequence_s: float = 0.0,
    ) -> None:
        self.tables = Tables._make(
            float(t)
            if name in ("between_passes_s", "least_pass_s", "least_sequence_s")
            else np.ascontiguousarray(t, dtype=np.float64)
            for name, t in tables._asdict().items()
        )
        self.metadata = metadata
        self.origin = origin
        self.corrections = corrections  # what `with_corrections` changed, in words
        self.sequence_s = sequence_s
        _validate(self.tables, origin)
        self.even = joined(self.tables, metadata.dp)
        self.tables = self.tables if metadata.dp > 1 else self.even

    def pass_s(
        self,
        query_tokens: float,
        sequences: float,
        prefill_tokens: float = 0,
        prefill_kv_tokens: float = 0,
        decode_sequences: float = 0,
        decode_kv_tokens: float = 0,
    ) -> float:
        """Return the seconds of a pass with one prefill chunk and `decode_sequences` that hold
        `decode_kv_tokens` evenly."""
        work = prefill_tokens * (prefill_kv_tokens + 0.5 * prefill_tokens)
        arguments = (
            query_tokens,
            sequences,
            prefill_tokens,
            work,
            decode_sequences,
            decode_kv_tokens,
        )
        return float(pass_s(self.even, *map(float, arguments), 0.0))

    def decode_s(self, sequences: int, kv_tokens: float) -> float:
        """Return the seconds in which each of `sequences`, `kv_tokens` long, gains one token."""
        return self.pass_s(
            sequences, sequences, decode_sequences=sequences, decode_kv_tokens=sequences * kv_tokens
        )

    def verify_s(self, sequences: int, draft_tokens: float, kv_tokens: float) -> float:
        """Return the seconds that verify `draft_tokens` of each of `sequences`, `kv_tokens` long;
        with 0, a decode step.

        The dense part runs at sequences × (draft_tokens + 1) tokens (the last token of each is
        computed, too), and so does the output head, as every verified position needs its logits.
        Attention reads the cache of a sequence once, however many tokens are verified. Drafts of
        different lengths count with their mean: hence a float.
        """
        positions = sequences * (draft_tokens + 1)
        return self.pass_s(
            positions, positions, decode_sequences=sequences, decode_kv_tokens=sequences * kv_tokens
        )

    def prefill_s(self, tokens: int, kv_tokens: float = 0) -> float:
        """Return the seconds of one pass over a chunk of `tokens` after `kv_tokens` of cached
        context, one sequence alone."""
        return self.pass_s(tokens, 1, prefill_tokens=tokens, prefill_kv_tokens=kv_tokens)

    def with_corrections(
        self,
        forward: float = 1.0,
        between_passes_s: float | None = None,
        sequence_overhead_s: float = 0.0,
        least_pass_s: float = 0.0,
        giver: str = "set by the scenario",
        least_sequence_s: float = 0.0,
    ) -> TableProfile:
        """Return this profile with every pass multiplied by `forward`, the pause replaced by
        `between_passes_s` if `giver` has one, `sequence_overhead_s` added to each pass for every
        decoding sequence, however many of its tokens are verified, and no pass shorter than
        `least_pass_s` and `least_sequence_s` a sequence, pause excluded."""
        t = self.tables
        pause = t.between_passes_s if between_passes_s is None else between_passes_s
        scaled = t._replace(
            dense_s=t.dense_s * forward,
            sampled_s=t.sampled_s * forward,
            attention_s=t.attention_s * forward + sequence_overhead_s * t.decode_sequences[:, None],
            between_passes_s=pause,
            straggler_s=t.straggler_s * forward,
            straggler_beside_prefill_s=t.straggler_beside_prefill_s * forward,
            least_pass_s=max(t.least_pass_s, least_pass_s),
            least_sequence_s=max(t.least_sequence_s, least_sequence_s),
            experts_s=t.experts_s * forward,
        )
        changes = [f"every pass × {forward:g} (forward_correction)"] if forward != 1.0 else []
        if between_passes_s is not None:
            changes.append(
                f"{pause * 1e3:.3g} ms between passes ({giver}){self._shorter_than(pause, forward)}"
            )
        changes += (
            [f"{sequence_overhead_s * 1e6:.3g} µs more a decoding sequence"]
            if sequence_overhead_s
            else []
        )
        if least_pass_s or least_sequence_s:
            each = f" and {least_sequence_s * 1e6:.3g} µs a sequence" if least_sequence_s else ""
            changes.append(f"no pass under {least_pass_s * 1e3:.3g} ms{each} (least_pass_s)")
        words, host_s = (*self.corrections, *changes), self.sequence_s + sequence_overhead_s
        return TableProfile(scaled, self.metadata, self.origin, words, host_s)

    @property
    def kernels(self) -> TableProfile:
        """The profile without the host's times: no pause between passes, nothing a sequence, no
        shortest pass. As passes follow each other that the host need not wait for."""
        t = self.tables._replace(between_passes_s=0.0, least_pass_s=0.0, least_sequence_s=0.0)
        attention_s = t.attention_s - self.sequence_s * t.decode_sequences[:, None]
        return TableProfile(t._replace(attention_s=attention_s), self.metadata, self.origin)

    def _shorter_than(self, pause_s: float, forward: float) -> str:
        """Return which passes take less than a pause between them, in words: up to how many
        sequences of 1,024 tokens."""
        t, numbers = (
            self.tables,
            [2**power for power in range(int(self.tables.decode_sequences[-1]).bit_length())],
        )
        shorter = (
            n for n in numbers if forward * (self.decode_s(n, 1024) - t.between_passes_s) < pause_s
        )
        most = max(shorter, default=0)
        return f", longer than the kernels of a pass of up to {most:,} sequences" if most else ""

    def require_covers(
        self, query_tokens: int, sequences: int, kv_tokens: int, verified_positions: int = 0
    ) -> None:
        """Raise `InputError` for limits that leave a grid: tokens of a pass, sequences of a pass,
        tokens of one sequence, and with drafts, positions of a pass that need logits (sequences ×
        (draft tokens + 1), at most the tokens of a pass). Every limit that is too large is named,
        with its smallest grid."""
        t = self.even
        beyond: dict[
            str, tuple[float, str]
        ] = {}  # by limit: where its first grid ends, and that in words
        for needed, grid, what, limit in (
            (query_tokens, t.dense_tokens, "tokens in a pass", "max_num_batched_tokens"),
            (query_tokens, t.prefill_tokens, "prefill tokens in a pass", "max_num_batched_tokens"),
            (sequences, t.sampled_sequences, "sampled sequences", "max_num_seqs"),
            (
                verified_positions,
                t.sampled_sequences,
                "sampled positions",
                "of drafts that are verified",
            ),
            (sequences, t.decode_sequences, "decoding sequences", "max_num_seqs"),
            (
                kv_tokens,
                t.decode_kv_tokens,
                "tokens of a decoding sequence",
                "prompt + response cap",
            ),
            (
                kv_tokens,
                t.prefill_kv_tokens,
                "cached tokens before a prefill chunk",
                "prompt + response cap",
            ),
        ):
            if needed > grid[-1] and (limit not in beyond or grid[-1] < beyond[limit][0]):
                beyond[limit] = (
                    grid[-1],
                    f"{grid[-1]:.0f} {what} ({limit}), the scenario needs {needed}",
                )
        if beyond:
            words = "; up to ".join(words for _, words in beyond.values())
            limits = "that limit" if len(beyond) == 1 else "those limits"
            raise InputError(
                f"{self.origin}: profiled up to {words}; lower {limits} or profile further"
            )


def write_profile(profile: TableProfile, path: str | Path) -> None:
    """Write one Parquet file: a row a grid point (`COLUMNS`; those that a table does not use are
    empty), metadata inside.

    Raises `ValueError` for a `least_pass_s` or a `least_sequence_s`, which belong to a scenario and
    have no place in the file.
    """
    import pandas as pd  # takes 0.1 s to import

    t = profile.tables
    if t.least_pass_s or t.least_sequence_s:
        raise ValueError(
            "least_pass_s and least_sequence_s are a scenario's corrections; write the profile without them"
        )
    schema = COLUMNS.append(SHARE) if t.straggler_sequences.size else COLUMNS
    rows = []
    for name, (axes, field) in GRIDS.items():
        seconds = np.ravel(getattr(t, field))
        if seconds.size:
            places = np.meshgrid(*(getattr(t, ticks) for ticks in axes.values()), indexing="ij")
            points = {column: place.ravel() for column, place in zip(axes, places, strict=True)}
            rows.append(pd.DataFrame({"table": name, **points, "seconds": seconds}))
    every = pd.concat(rows).reindex(columns=schema.names)
    write_parquet(
        pa.Table.from_pandas(every, schema, preserve_index=False),
        Path(path),
        METADATA_KEY,
        profile.metadata,
    )


def read_profile(path: str | Path) -> TableProfile:
    """Read a file of `write_profile`. Raises `InputError` for holes, falling times and files that
    are no profile."""
    path = by_name(Path(path))
    if not path.exists():
        shipped = sorted(file.stem for file in PROFILES.glob(f"{known_name(path.stem)}*.parquet"))
        near = shipped[:3] or get_close_matches(
            path.stem, [file.stem for file in PROFILES.glob("*.parquet")], n=1
        )
        suggestion = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise InputError(
            f"{path}: no such profile{suggestion}; name a file (paths in a scenario are relative to its file) or one that "
            "simrl ships, derive one with `simrl profile derive`, or measure your own engine with `simrl measure`"
        )
    table = read_parquet(path)
    metadata = parquet_metadata(
        table, path, METADATA_KEY, ProfileMetadata, "derive the profile again"
    )
    missing = [name for name in COLUMNS.names if name not in table.column_names]
    if metadata is None or missing:
        lacking = f"no column {missing[0]!r}" if missing else "no profile metadata"
        raise InputError(
            f"{path}: {lacking}; a profile is a file that `simrl profile derive` wrote"
        )
    try:
        schema = COLUMNS.append(SHARE) if SHARE.name in table.column_names else COLUMNS
        for name in schema.names:
            if not is_count_like(table.column(name).type):
                raise ValueError(f"{name} is {table.column(name).type}")
        columns = table.select(schema.names).cast(schema)
        rows = {name: columns[name].to_numpy() for name in schema.names}
    except (pa.ArrowException, ValueError) as error:
        raise InputError(
            f"{path}: a column is not numeric ({first_line(error)}); derive the profile again"
        ) from error
    return TableProfile(_tables_from_rows(rows, str(path)), metadata, origin=str(path))


def _tables_from_rows(every: Mapping[str, NDArray[Any]], origin: str) -> Tables:
    """Return the tables of a file's columns, a missing number being NaN. Stragglers of a file
    without shares have a value by sequences: it falls to 0 where all are long, so the longest
    sequence's lead over the mean counts."""
    for row, name in ((i, n) for i, n in enumerate(every["table"]) if n not in GRIDS):
        raise InputError(
            f"{origin}: row {row} has the unknown table {name!r}{meant(name, GRIDS)}; correct its name or drop it"
        )
    fields: dict[str, Any] = {}
    for name, (axes, field) in GRIDS.items():
        rows, columns = every["table"] == name, [column for column in axes if column in every]
        seconds, places = (
            every["seconds"][rows],
            np.array([every[column][rows] for column in columns]),
        )
        if not axes:
            if seconds.size != 1:
                raise InputError(
                    f"{origin}: {seconds.size} rows of the table {name!r}, one is needed (the pause in seconds)"
                )
            fields[field] = float(seconds[0])
            continue
        if not seconds.size:
            if name in OPTIONAL:
                continue
            raise InputError(f"{origin}: no rows of the table {name!r}; derive the profile again")
        if np.isnan(places).any():
            raise InputError(
                f"{origin}: table {name!r} has rows without {' and '.join(columns)}; fill them or drop the rows"
            )
        ticks = [np.unique(place) for place in places]
        shape = [len(t) for t in ticks]
        refuse(
            (
                math.prod(shape) > MOST_HOLES * seconds.size,
                f"{origin}: table {name!r} has {seconds.size:,} rows for a grid of {' × '.join(map(str, shape))} points; "
                "measure all of them, or fewer ticks",
            ),
            (
                np.unique(places, axis=1).shape[1] < seconds.size,
                f"{origin}: table {name!r} has two rows for one point of its grid; keep one",
            ),
        )
        values = np.full(shape, np.nan)
        values[tuple(np.searchsorted(t, place) for t, place in zip(ticks, places, strict=True))] = (
            seconds
        )
        if len(columns) < len(axes):
            ticks, values = [*ticks, NO_SHARES], np.outer(values, 1 - NO_SHARES)
        if name in STRAGGLERS and not np.array_equal(
            fields.setdefault("straggler_sequences", ticks[0]), ticks[0]
        ):
            raise InputError(
                f"{origin}: the tables {' and '.join(STRAGGLERS)} have different sequences; derive the profile again"
            )
        fields |= dict(zip(axes.values(), ticks, strict=True)) | {field: values}
    return Tables(**fields)


def _validate(tables: Tables, origin: str) -> None:
    """Raise `InputError` for the first place that breaks the module's invariant."""
    for name, (columns, field) in GRIDS.items():
        axes: dict[str, Floats] = {
            column: getattr(tables, ticks) for column, ticks in columns.items()
        }
        values = np.asarray(getattr(tables, field))
        for axis, grid in axes.items():
            missing = grid.size == 0 and name not in OPTIONAL
            refuse(
                (
                    missing
                    or not np.isfinite(grid).all()
                    or (np.diff(grid) <= 0).any()
                    or (grid < 0).any(),
                    f"{origin}: table {name!r}: the ticks of {axis} must be finite, rising and not negative",
                )
            )
        if values.shape != tuple(g.size for g in axes.values()):
            raise InputError(
                f"{origin}: table {name!r} has the shape {values.shape}, its axes give another"
            )

        def place(index: NDArray[np.intp], axes: dict[str, Floats] = axes) -> str:
            return ", ".join(
                f"{axis} {grid[i]:.10g}"
                for (axis, grid), i in zip(axes.items(), index, strict=True)
            )

        bad = ~np.isfinite(values) | (values < 0)
        if bad.any():
            refuse((not axes, f"{origin}: {name} is {values} s; it must be zero or more"))
            index = np.argwhere(bad)[0]
            seconds = values[tuple(index)]
            value = "a hole" if np.isnan(seconds) else f"{seconds} s"
            raise InputError(
                f"{origin}: table {name!r} has {value} at {place(index)}; measure that point or drop its tick"
            )
        for i, axis in enumerate(() if name in STRAGGLERS else axes):
            falls = np.diff(values, axis=i) < -1e-12
            if falls.any():
                index = np.argwhere(falls)[0]
                index[i] += 1
                raise InputError(
                    f"{origin}: table {name!r} falls along {axis} at {place(index)}; more work cannot take less time: "
                    "repeat the measurement or smooth it (simrl.profile.profilers.smoothing.settled)"
                )
