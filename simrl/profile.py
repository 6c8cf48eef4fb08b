"""Profile: the seconds of one forward pass of one inference engine (a tensor-parallel group of GPUs).

    pass_s = dense(query tokens) + attention(prefill, decode) + sampled(sequences) + between_passes_s + straggler,
             least_pass_s + between_passes_s at the least

`dense` is everything that works token by token, all layers and the tensor-parallel all-reduces included; `attention` reads
the KV cache once a sequence, however many query tokens verify there; `sampled` is the output head and the sampler, at one
position a sequence, or at all positions of a draft that is verified. `attention` is measured with equal lengths; where they
are not, the pass waits for its longest sequence, the `straggler` (none in a profile that did not measure it).
The three are grids with linear interpolation. Invariant of a `Profile` that exists: its grids are complete, finite,
positive, and no time falls where the work grows. Beyond a grid nothing is read: `require_covers` refuses a simulation
whose limits leave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simrl.errors import InputError, first_line
from simrl.files import write_whole_file
from simrl.interpolation import interpolate, interpolate4
from simrl.parquet import decoded, read_parquet

Floats = NDArray[np.float64]
METADATA_KEY = b"simrl.profile"
AXES = ("prefill_tokens", "prefill_kv_tokens", "decode_sequences", "decode_kv_tokens")
STRAGGLERS = ("straggler", "straggler_beside_prefill")  # tables that a profile may have; seconds a token
MOST_HOLES = 100  # points of a grid for each that was measured: beyond, it is no grid
COLUMNS = ("table", "query_tokens", "sequences", *AXES, "seconds")


class DraftRounds(BaseModel):
    """What passes with drafts take beyond passes with as many plain positions, measured: `round_s` + drafted tokens × `step_s`,
    at so many `sequences` that draft. The drafts were tokens that nobody looked for, as many of each sequence: it is what an
    engine does about drafts on the host, handing them over and verifying them. The work of a drafter is no part of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sequences: tuple[float, ...]
    round_s: tuple[float, ...]
    step_s: tuple[float, ...]
    source: str


class ProfileMetadata(BaseModel):
    """Where a profile comes from: a number that a user sees leads back to this. What only a measurement knows is None else."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    gpu: str
    tp: int = Field(gt=0)
    kind: str = Field(description="measured, derived (from measured kernels) or assumed (from data sheets)")
    source: str = Field(description="what it was made from, with versions")
    created: str = ""
    licence: str = "Apache-2.0"
    notes: str = ""
    host: str | None = Field(default=None, description="the machine: its name, processor and GPU, operating system")
    versions: dict[str, str] = Field(default={}, description="of what ran: vllm, torch, python …")
    model_shape: dict[str, int | bool | str] = Field(default={}, description="layers, hidden, heads … as in ModelShape")
    settings: dict[str, int | float | str | bool | None] = Field(
        default={}, description="what the engine was started with"
    )
    repeats: int | None = Field(default=None, description="how often each point was measured")
    spread: float | None = Field(
        default=None, description="of a point's repeats: median over the points of IQR / median"
    )
    held_out_error: float | None = Field(
        default=None, description="median |predicted / measured - 1| of passes that were measured and not fitted"
    )
    request_s: float | None = Field(
        default=None,
        ge=0,
        description="seconds of an engine's work for a request that comes and ends, besides its passes",
    )
    load_weights_s: float | None = Field(
        default=None,
        ge=0,
        description="seconds in which an engine takes weights from a folder, as in a replay: no transfer from a trainer",
    )
    drafts: DraftRounds | None = None


NOT_MEASURED, NOTHING_MEASURED = np.zeros(0), np.zeros((2, 0))


class Tables(NamedTuple):
    """The grids, as the compiled engine reads them. Axes are tokens and sequences, values seconds of a whole model pass.

    `attention_s` has the shape (prefill_tokens, prefill_kv_tokens, decode_sequences, decode_kv_tokens); its prefill axes
    mean one chunk over so much cached context, its decode axes so many sequences of that mean length. Where 0 stands in
    `prefill_tokens` or `decode_sequences`, that part is absent. `straggler_s` [s a token] has the shape (2, sequences):
    without and beside prefill, at so many decoding sequences or fewer, down to the number before. `least_pass_s` is what the
    host takes to launch a pass, kernel by kernel: a GPU that would be done before waits for it.
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
    straggler_s: Floats = NOTHING_MEASURED
    least_pass_s: float = 0.0


@njit(cache=True)
def straggler_s(tables: Tables, sequences: float, beside_prefill: bool, tokens: float) -> float:
    """Seconds that a pass waits for the longest of its decoding sequences, `tokens` longer than what else it computes.

    A thread block reads one sequence's cache, on one multiprocessor: what the longest has more than the mean is read when the
    others have ended. Where kernels split sequences over multiprocessors it costs nothing; they do so up to some number of
    sequences, so this is a step function of it, and of a number that was not measured the next larger one counts.
    """
    measured = tables.straggler_sequences
    if measured.shape[0] == 0 or tokens <= 0.0:
        return 0.0
    i = 0
    while i < measured.shape[0] - 1 and measured[i] < sequences:
        i += 1
    return tokens * tables.straggler_s[1 if beside_prefill else 0, i]


@njit(cache=True)
def equivalent_chunk(prefill_tokens: float, prefill_work: float) -> tuple[float, float]:
    """One chunk (tokens, cached context) with the attention work of several.

    `prefill_work` is Σ c (k + c / 2) over chunks of c tokens after k cached ones. The one chunk keeps the tokens and takes
    the context that gives the same work; where even no context is too much (several short prompts), it is the chunk
    without context that has this work.
    """
    context = prefill_work / prefill_tokens - 0.5 * prefill_tokens
    if context >= 0.0:
        return prefill_tokens, context
    return np.sqrt(2.0 * prefill_work), 0.0


@njit(cache=True)
def pass_s(
    tables: Tables,
    query_tokens: float,
    sequences: float,
    prefill_tokens: float,
    prefill_work: float,
    decode_sequences: float,
    decode_kv_tokens: float,
    straggler_tokens: float = 0.0,
) -> float:
    """Seconds of one forward pass, the pause before the next one included.

    `decode_kv_tokens` is the sum over the decoding sequences. `query_tokens` counts prefill and decode (and draft) tokens.
    `straggler_tokens` is how much longer the longest decoding sequence is than their mean, or than a prefill that lasts longer.
    """
    chunk, context = 0.0, 0.0
    if prefill_tokens > 0.0:
        chunk, context = equivalent_chunk(prefill_tokens, prefill_work)
    kv = decode_kv_tokens / decode_sequences if decode_sequences > 0.0 else 0.0
    attention = interpolate4(
        tables.prefill_tokens,
        tables.prefill_kv_tokens,
        tables.decode_sequences,
        tables.decode_kv_tokens,
        tables.attention_s,
        (chunk, context, decode_sequences, kv),
    )
    dense = interpolate(tables.dense_tokens, tables.dense_s, query_tokens)
    sampled = interpolate(tables.sampled_sequences, tables.sampled_s, sequences)
    straggler = straggler_s(tables, decode_sequences, prefill_tokens > 0.0, straggler_tokens)
    seconds = dense + attention + sampled + tables.between_passes_s + straggler
    return max(seconds, tables.least_pass_s + tables.between_passes_s)


class Profile(Protocol):
    """What the simulator asks of a profile, whatever it is made from."""

    @property
    def metadata(self) -> ProfileMetadata: ...
    @property
    def tables(self) -> Tables: ...
    def require_covers(
        self, query_tokens: int, sequences: int, kv_tokens: int, verified_positions: int = 0
    ) -> None: ...


class TableProfile:
    """A `Profile` of measured or derived grids. Raises `InputError` for grids that break the module's invariant."""

    def __init__(
        self, tables: Tables, metadata: ProfileMetadata, origin: str = "profile", corrections: tuple[str, ...] = ()
    ) -> None:
        self.tables = Tables._make(
            float(t) if name in ("between_passes_s", "least_pass_s") else np.ascontiguousarray(t, dtype=np.float64)
            for name, t in tables._asdict().items()
        )
        self.metadata = metadata
        self.origin = origin
        self.corrections = corrections  # what `with_corrections` changed, in words
        _validate(self.tables, origin)

    def pass_s(
        self,
        query_tokens: float,
        sequences: float,
        prefill_tokens: float = 0,
        prefill_kv_tokens: float = 0,
        decode_sequences: float = 0,
        decode_kv_tokens: float = 0,
    ) -> float:
        """Seconds of a pass with one prefill chunk and `decode_sequences` that hold `decode_kv_tokens` evenly."""
        work = prefill_tokens * (prefill_kv_tokens + 0.5 * prefill_tokens)
        arguments = (query_tokens, sequences, prefill_tokens, work, decode_sequences, decode_kv_tokens)
        return float(pass_s(self.tables, *map(float, arguments)))

    def decode_s(self, sequences: int, kv_tokens: float) -> float:
        """Seconds in which each of `sequences`, `kv_tokens` long, gains one token."""
        return self.pass_s(sequences, sequences, decode_sequences=sequences, decode_kv_tokens=sequences * kv_tokens)

    def verify_s(self, sequences: int, draft_tokens: float, kv_tokens: float) -> float:
        """Seconds in which `draft_tokens` of each of `sequences`, `kv_tokens` long, are verified; 0 is a decode step.

        The dense part runs at sequences × (draft_tokens + 1) tokens (the last token of each is computed, too), and so does the
        output head, as every verified position needs its logits. Attention reads the cache of a sequence once, whatever is
        verified there. Drafts of different lengths count with their mean: hence a float.
        """
        positions = sequences * (draft_tokens + 1)
        return self.pass_s(positions, positions, decode_sequences=sequences, decode_kv_tokens=sequences * kv_tokens)

    def prefill_s(self, tokens: int, kv_tokens: float = 0) -> float:
        """Seconds of one pass over a chunk of `tokens` after `kv_tokens` of cached context, one sequence alone."""
        return self.pass_s(tokens, 1, prefill_tokens=tokens, prefill_kv_tokens=kv_tokens)

    def with_corrections(
        self,
        forward: float = 1.0,
        between_passes_s: float | None = None,
        sequence_overhead_s: float = 0.0,
        least_pass_s: float = 0.0,
    ) -> TableProfile:
        """The same profile with every pass multiplied by `forward`, another pause between passes if one is given, so many
        seconds more in each pass for every sequence that decodes in it, however many of its tokens are verified, and no pass
        shorter than `least_pass_s`, the pause apart."""
        t = self.tables
        pause = t.between_passes_s if between_passes_s is None else between_passes_s
        scaled = t._replace(
            dense_s=t.dense_s * forward,
            sampled_s=t.sampled_s * forward,
            attention_s=t.attention_s * forward + sequence_overhead_s * t.decode_sequences[:, None],
            between_passes_s=pause,
            straggler_s=t.straggler_s * forward,
            least_pass_s=max(t.least_pass_s, least_pass_s),
        )
        said = [f"every pass × {forward:g} (forward_correction)"] if forward != 1.0 else []
        said += [f"{pause * 1e3:g} ms between passes (set by the scenario)"] if between_passes_s is not None else []
        said += [f"{sequence_overhead_s * 1e6:g} µs more a decoding sequence"] if sequence_overhead_s else []
        said += [f"no pass under {least_pass_s * 1e3:g} ms (least_pass_s)"] if least_pass_s else []
        return TableProfile(scaled, self.metadata, self.origin, (*self.corrections, *said))

    def require_covers(self, query_tokens: int, sequences: int, kv_tokens: int, verified_positions: int = 0) -> None:
        """Refuses limits that leave a grid: tokens of a pass, sequences of a pass, tokens of one sequence, and where drafts
        are verified, positions of a pass that need logits (sequences × (draft tokens + 1), at most the tokens of a pass).
        All that are too large are named, each with the grid that ends first."""
        t = self.tables
        beyond: dict[str, tuple[float, str]] = {}  # by limit: where its first grid ends, and that in words
        for asked, grid, what, limit in (
            (query_tokens, t.dense_tokens, "tokens in a pass", "max_num_batched_tokens"),
            (query_tokens, t.prefill_tokens, "prefill tokens in a pass", "max_num_batched_tokens"),
            (sequences, t.sampled_sequences, "sampled sequences", "max_num_seqs"),
            (verified_positions, t.sampled_sequences, "sampled positions", "of drafts that are verified"),
            (sequences, t.decode_sequences, "decoding sequences", "max_num_seqs"),
            (kv_tokens, t.decode_kv_tokens, "tokens of a decoding sequence", "prompt + response cap"),
            (kv_tokens, t.prefill_kv_tokens, "cached tokens before a prefill chunk", "prompt + response cap"),
        ):
            if asked > grid[-1] and (limit not in beyond or grid[-1] < beyond[limit][0]):
                beyond[limit] = grid[-1], f"{grid[-1]:.0f} {what} ({limit}), the scenario needs {asked}"
        if beyond:
            said = "; up to ".join(words for _, words in beyond.values())
            limits = "that limit" if len(beyond) == 1 else "those limits"
            raise InputError(f"{self.origin}: profiled up to {said}; lower {limits} or profile further")


def tau(
    profile: TableProfile,
    length_tokens: int,
    dp: int,
    accept_length: float = 1.0,
    samples: int = 1,
    prompt_tokens: int = 0,
) -> float:
    """Seconds in which `dp` workers generate `samples` responses of `length_tokens` each, all started at once.

    RhymeRL §6.4's τ(l, dp): the slowest worker holds ceil(samples / dp) of them; a pass yields `accept_length` tokens.
    """
    if dp < 1 or length_tokens < 1 or accept_length < 1.0 or samples < 1:
        raise InputError(
            f"tau: length {length_tokens}, dp {dp}, accept_length {accept_length}, samples {samples} must all be ≥ 1"
        )
    batch = -(-samples // dp)
    profile.require_covers(batch, batch, prompt_tokens + length_tokens)
    positions = np.arange(0.0, length_tokens, accept_length)
    t = profile.tables
    row = np.array([interpolate4(*t[4:9], (0.0, 0.0, float(batch), kv)) for kv in t.decode_kv_tokens])
    attention = np.interp(prompt_tokens + positions + 1, t.decode_kv_tokens, row)
    fixed = np.interp(batch, t.dense_tokens, t.dense_s) + np.interp(batch, t.sampled_sequences, t.sampled_s)
    return float(np.maximum(attention + fixed, t.least_pass_s).sum() + positions.size * t.between_passes_s)


class RolloutTimes:
    """τ of many lengths: what `tau` adds up for a batch is kept, so that a length costs a look-up.

    A pass yields `accept_length` tokens of each response; prompts have `prompt_tokens`. More than `max_num_seqs` equal
    responses at a worker run one full batch after another: they end together. Lengths beyond `longest_tokens` count as that.
    """

    def __init__(
        self,
        profile: TableProfile,
        longest_tokens: int,
        max_num_seqs: int | None = None,
        prompt_tokens: int = 0,
        accept_length: float = 1.0,
    ) -> None:
        self._profile = profile
        self._positions = np.arange(0.0, max(longest_tokens, 1), accept_length)
        self._max_num_seqs = max_num_seqs
        self._prompt_tokens = prompt_tokens
        self._sums: dict[int, Floats] = {}

    def batch_s(self, length_tokens: float, batch: int) -> float:
        """Seconds in which one worker generates so many responses of a length (rounded) at once."""
        if batch not in self._sums:
            t = self._profile.tables
            row = np.array([interpolate4(*t[4:9], (0.0, 0.0, float(batch), kv)) for kv in t.decode_kv_tokens])
            attention = np.interp(self._prompt_tokens + self._positions + 1, t.decode_kv_tokens, row)
            fixed = np.interp(batch, t.dense_tokens, t.dense_s) + np.interp(batch, t.sampled_sequences, t.sampled_s)
            self._sums[batch] = np.cumsum(np.maximum(attention + fixed, t.least_pass_s) + t.between_passes_s)
        passes = int(np.searchsorted(self._positions, max(round(length_tokens), 1)))
        return float(self._sums[batch][passes - 1])

    def table(self, lengths_tokens: Sequence[float], samples: Sequence[int], max_workers: int) -> Floats:
        """Seconds in which k = 1 … `max_workers` workers generate `samples[i]` responses of `lengths_tokens[i]`; the fullest
        holds ceil(samples / k) of them. Shape (lengths, max_workers)."""
        table = np.zeros((len(lengths_tokens), max_workers))
        for i, (tokens, held) in enumerate(zip(lengths_tokens, samples, strict=True)):
            for k in range(1, max_workers + 1):
                fullest = -(-held // k)
                most = self._max_num_seqs or fullest
                for batch, times in ((most, fullest // most), (fullest % most, 1)):
                    table[i, k - 1] += times * self.batch_s(tokens, batch) if batch and times else 0.0
        return table


def setting_differences(metadata: ProfileMetadata, settings: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting of an engine that is not as it was when the profile was measured, of those that both say."""
    return [
        f"profile was measured with {name} {metadata.settings[name]}, the engine has {value}; "
        f"simrl measure --{name.replace('_', '-')} {value} makes one for it"
        for name, value in settings.items()
        if name in metadata.settings and metadata.settings[name] != value
    ]


def write_profile(profile: TableProfile, path: str | Path) -> None:
    """One Parquet file: a row a grid point (`COLUMNS`; what a table does not use is empty), metadata inside. Raises
    `ValueError` for a `least_pass_s`, which a scenario says and no file."""
    t = profile.tables
    if t.least_pass_s:
        raise ValueError("least_pass_s is a scenario's correction; write the profile without it")
    grid = np.meshgrid(t.prefill_tokens, t.prefill_kv_tokens, t.decode_sequences, t.decode_kv_tokens, indexing="ij")
    straggler = np.tile(t.straggler_sequences, 2)
    sizes = (t.dense_s.size, t.sampled_s.size, t.attention_s.size, 1, straggler.size // 2, straggler.size // 2)
    nothing = [np.full(n, np.nan) for n in sizes]
    columns: dict[str, list[Floats]] = {
        "query_tokens": [t.dense_tokens, *nothing[1:]],
        "sequences": [nothing[0], t.sampled_sequences, *nothing[2:4], straggler],
        **{axis: [*nothing[:2], g.ravel(), *nothing[3:]] for axis, g in zip(AXES, grid, strict=True)},
        "seconds": [
            t.dense_s,
            t.sampled_s,
            t.attention_s.ravel(),
            np.array([t.between_passes_s]),
            t.straggler_s.ravel(),
        ],
    }
    table = pa.table(
        {
            "table": np.repeat(["dense", "sampled", "attention", "between_passes", *STRAGGLERS], sizes),
            **{name: pa.array(np.concatenate(parts), from_pandas=True) for name, parts in columns.items()},
        }
    ).replace_schema_metadata({METADATA_KEY: profile.metadata.model_dump_json().encode()})
    with write_whole_file(Path(path)) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_profile(path: str | Path) -> TableProfile:
    """Reads what `write_profile` wrote. Raises `InputError` for holes, falling times and files that are no profile."""
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"{path}: no such profile; name one that exists, such as those in the project's profiles folder (paths in "
            "a scenario are relative to its file), derive one with `simrl profile derive`, or measure your own engine with "
            "`simrl measure`"
        )
    table = read_parquet(path)
    names = table.column_names
    raw = (table.schema.metadata or {}).get(METADATA_KEY)
    missing = [name for name in COLUMNS if name not in names]
    if raw is None or missing:
        what = f"no column {missing[0]!r}" if missing else "no profile metadata"
        raise InputError(f"{path}: {what}; a profile is a file that `simrl profile derive` wrote")
    try:
        metadata = ProfileMetadata.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "(all)"
        raise InputError(f"{path}: metadata field {field}: {first['msg']}; derive the profile again") from error
    try:
        columns = {name: decoded(table.column(name), f"{path}: column {name!r}") for name in COLUMNS}
        data = {
            name: column.cast(pa.string() if name == "table" else pa.float64()).to_numpy()
            for name, column in columns.items()
        }
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"{path}: a column is not numeric ({first_line(error)}); derive the profile again") from error
    return TableProfile(_tables_from_rows(data, str(path)), metadata, origin=str(path))


def _tables_from_rows(data: dict[str, NDArray[np.generic]], origin: str) -> Tables:
    grids: list[Floats] = []
    for name, axes in (("dense", ("query_tokens",)), ("sampled", ("sequences",)), ("attention", AXES)):
        rows = data["table"] == name
        points = [data[axis][rows].astype(np.float64) for axis in axes]
        seconds = data["seconds"][rows].astype(np.float64)
        if not rows.any():
            raise InputError(f"{origin}: no rows of the table {name!r}; derive the profile again")
        ticks = [np.unique(p) for p in points]
        if any(np.isnan(t).any() for t in ticks):
            raise InputError(
                f"{origin}: table {name!r} has rows without {' and '.join(axes)}; fill them or drop the rows"
            )
        shape = [len(t) for t in ticks]
        if math.prod(shape) > MOST_HOLES * len(seconds):
            raise InputError(
                f"{origin}: table {name!r} has {len(seconds):,} rows for a grid of {' × '.join(map(str, shape))} points; "
                "measure all of them, or fewer ticks"
            )
        place = np.ravel_multi_index([np.searchsorted(t, p) for t, p in zip(ticks, points, strict=True)], shape)
        if len(np.unique(place)) != len(seconds):
            raise InputError(f"{origin}: table {name!r} has two rows for one point of its grid; keep one")
        values = np.full(math.prod(shape), np.nan)
        values[place] = seconds
        values = values.reshape(shape)
        grids += [*ticks, values]
    pause = data["seconds"][data["table"] == "between_passes"].astype(np.float64)
    if pause.size != 1:
        raise InputError(
            f"{origin}: {pause.size} rows of the table 'between_passes', one is needed (the pause in seconds)"
        )
    stragglers = [data["table"] == name for name in STRAGGLERS]
    sequences, beside = (data["sequences"][rows].astype(np.float64) for rows in stragglers)
    if not np.array_equal(sequences, beside):
        raise InputError(
            f"{origin}: the tables {' and '.join(STRAGGLERS)} have other sequences; derive the profile again"
        )
    seconds = np.array([data["seconds"][rows] for rows in stragglers], dtype=np.float64)
    return Tables._make([*grids, float(pause[0]), sequences, seconds, 0.0])


def _validate(tables: Tables, origin: str) -> None:
    for name, axes, values in (
        ("dense", {"query_tokens": tables.dense_tokens}, tables.dense_s),
        ("sampled", {"sequences": tables.sampled_sequences}, tables.sampled_s),
        ("attention", dict(zip(AXES, tables[4:8], strict=True)), tables.attention_s),
    ):
        for axis, grid in axes.items():
            if grid.size == 0 or not np.isfinite(grid).all() or (np.diff(grid) <= 0).any() or grid[0] < 0:
                raise InputError(
                    f"{origin}: table {name!r}: the ticks of {axis} must be finite, rising and not negative"
                )
        if values.shape != tuple(g.size for g in axes.values()):
            raise InputError(f"{origin}: table {name!r} has the shape {values.shape}, its axes give another")

        def place(index: NDArray[np.intp], axes: dict[str, Floats] = axes) -> str:
            return ", ".join(f"{axis} {grid[i]:.0f}" for (axis, grid), i in zip(axes.items(), index, strict=True))

        bad = ~np.isfinite(values) | (values < 0)
        if bad.any():
            index = np.argwhere(bad)[0]
            found = values[tuple(index)]
            what = "a hole" if np.isnan(found) else f"{found} s"
            raise InputError(
                f"{origin}: table {name!r} has {what} at {place(index)}; measure that point or drop its tick"
            )
        for i, axis in enumerate(axes):
            falls = np.diff(values, axis=i) < -1e-12
            if falls.any():
                index = np.argwhere(falls)[0]
                index[i] += 1
                raise InputError(
                    f"{origin}: table {name!r} falls along {axis} at {place(index)}; more work cannot take less time: "
                    "repeat the measurement or smooth it (simrl.profile.not_falling)"
                )
    ticks, straggler = tables.straggler_sequences, tables.straggler_s
    if straggler.shape != (2, ticks.size) or (np.diff(ticks) <= 0).any() or not (straggler >= 0).all():
        raise InputError(
            f"{origin}: the straggler table needs rising sequences and, twice, seconds of zero or more at each"
        )
    if not np.isfinite(tables.between_passes_s) or tables.between_passes_s < 0:
        raise InputError(f"{origin}: between_passes is {tables.between_passes_s} s; it must be zero or more")


def not_falling(values: Floats) -> Floats:
    """The smallest grid at or above `values` in which no time falls along any axis: noise is lifted."""
    for axis in range(values.ndim):
        values = np.maximum.accumulate(values, axis=axis)
    return values
