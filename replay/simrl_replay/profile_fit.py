"""Fit of a profile's tables to measured passes.

    n decoding sequences           D(n)    = dense(n) + sampled(n)
    one prompt of c tokens         P(c)    = dense(c) + sampled(1) + request + mode
    m prompts of c tokens at once  W(m, c) = dense(m c) + sampled(m) + m request + mode

`request` is the engine's work for a new prompt, `mode` the extra time of a pass with prompts over
one without (on a GPU it runs outside of full graphs). They follow from W(m, c) - D(m) - P(m c) +
P(m) over m, then `sampled` from W, `dense` from D up to the largest batch, and from P beyond.
Attention is the time of a pass beyond an equal pass at the smallest context.

A pass that verifies drafts samples more positions than it has sequences. What it takes less than
`sampled` of all of them is an engine's work for each sequence: it moves into the time of decoding
sequences and into `request`, and D, P and W stay.

Invariant: a number follows from measured passes of its own kinds, by the formulas above, and from
nothing else. Every table is non-decreasing and reaches the engine's limits; beyond the measured
range it is extrapolated linearly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.profile.metadata import DraftRounds
from simrl.profile.profile import Tables, pass_s
from simrl.profile.profilers.smoothing import settled
from simrl_replay.bench import Shape

Floats = NDArray[np.float64]


class MeasuredPass(NamedTuple):
    """A pass that was measured several times."""

    shape: Shape
    repeats_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return float(np.median(self.repeats_s))

    @property
    def spread(self) -> float:
        """Relative interquartile range of the repeats."""
        low, high = np.quantile(self.repeats_s, (0.25, 0.75))
        return float((high - low) / self.seconds)


class Reach(NamedTuple):
    """Limits of the engine, which the tables have to reach."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def fit(points: Sequence[MeasuredPass], between_s: float, reach: Reach) -> tuple[Tables, float]:
    """Return the tables fitted to these passes, and `request` in seconds. Every kind of pass must
    be present: decode steps at several batch sizes and lengths, prompts of several lengths, some
    longer than a pass, several prompts at once."""
    decodes = [
        p for p in points if p.shape.sequences and not p.shape.draft_tokens and not p.shape.prompts
    ]
    alone = [p for p in points if p.shape.prompts and not p.shape.sequences]
    by_batch = _rows(decodes, "sequences", "kv_tokens")
    batches = np.array(sorted(by_batch), dtype=float)
    decode_s = settled(np.array([by_batch[int(batch)][0][1] for batch in batches]))
    prompt_tokens, prompt_s = _columns(
        [
            (p.shape.chunk_tokens, p.seconds)
            for p in alone
            if p.shape.prompts == 1 and not p.shape.context_tokens
        ]
    )
    prompt_s = settled(prompt_s)
    waves = sorted(
        (p.shape.prompts, p.shape.chunk_tokens, p.seconds) for p in alone if p.shape.prompts > 1
    )
    several, together, wave_s = (
        np.array(column, dtype=float) for column in zip(*waves, strict=True)
    )

    more_tokens_s = np.interp(together, prompt_tokens, prompt_s) - np.interp(
        several, prompt_tokens, prompt_s
    )
    new_s = wave_s - np.interp(several, batches, decode_s) - more_tokens_s
    mode_s, request_s = _line(several, new_s)
    rise_s = wave_s - np.interp(together, prompt_tokens, prompt_s) - (several - 1) * request_s
    sampled_sequences, sampled_s = _sampled(
        several, rise_s, max(reach.max_num_batched_tokens, reach.max_num_seqs)
    )

    one_s = float(np.interp(1, sampled_sequences, sampled_s))
    from_decodes = settled(
        np.maximum(decode_s - np.interp(batches, sampled_sequences, sampled_s) - between_s, 0.0)
    )
    from_prompts = prompt_s - one_s - between_s - request_s - mode_s
    beyond = prompt_tokens > batches[-1]
    dense_tokens = np.r_[batches, prompt_tokens[beyond]]
    dense_s = settled(np.maximum(np.r_[from_decodes, from_prompts[beyond]], 0.0))
    dense_tokens, dense_s = _reaching(dense_tokens, dense_s, reach.max_num_batched_tokens)

    chunk_ticks, context_ticks, prefill_s = _prefill(alone, mode_s, reach)
    decode_ticks, kv_ticks, attention_s = _decode_attention(by_batch, reach)
    tables = Tables(
        dense_tokens=dense_tokens,
        dense_s=dense_s,
        sampled_sequences=sampled_sequences,
        sampled_s=sampled_s,
        prefill_tokens=chunk_ticks,
        prefill_kv_tokens=context_ticks,
        decode_sequences=decode_ticks,
        decode_kv_tokens=kv_ticks,
        attention_s=prefill_s[:, :, None, None] + attention_s[None, None, :, :],
        between_passes_s=between_s,
    )
    sequence_s = _sequence_s(points, tables)
    return _with_sequences(tables, sequence_s), request_s + sequence_s


def predicted_s(tables: Tables, shape: Shape, request_s: float = 0.0) -> float:
    """Return the seconds of a pass by the tables, without drafting; `request_s` is added for each
    new prompt."""
    new_s = shape.prompts * request_s if shape.context_tokens == 0 else 0.0
    positions = shape.sequences * (shape.draft_tokens + 1)
    each = shape.chunk_tokens / max(shape.prompts, 1)
    work = shape.prompts * each * (shape.context_tokens + 0.5 * each)
    return new_s + float(
        pass_s(
            tables,
            float(positions + shape.chunk_tokens),
            float(positions + shape.prompts),
            float(shape.chunk_tokens),
            float(work),
            float(shape.sequences),
            float(shape.sequences * shape.kv_tokens),
        )
    )


def draft_rounds(points: Sequence[MeasuredPass], tables: Tables, source: str) -> DraftRounds | None:
    """Return the extra time of passes with drafts: at each batch size a non-decreasing line over
    the drafted tokens. The drafter's own work is not included: these passes had none."""
    rests: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for point in points:
        if point.shape.draft_tokens:
            rest = point.seconds - predicted_s(tables, point.shape)
            rests[point.shape.sequences].append((point.shape.draft_tokens, rest))
    if not rests:
        return None
    batches = sorted(rests)
    lines = np.array([_line(*map(np.array, zip(*rests[batch], strict=True))) for batch in batches])
    round_s, step_s = settled(lines[:, 0]), settled(lines[:, 1])
    return DraftRounds(
        sequences=(0.0, *map(float, batches)),
        round_s=(0.0, *round_s.tolist()),
        step_s=(0.0, *step_s.tolist()),
        source=source,
    )


def host_seconds(
    points: Sequence[MeasuredPass], kernels: Tables
) -> dict[str, tuple[float, float, float]]:
    """Return the host's seconds of a pass and of each decoding sequence, each with the range that
    the quartiles of the repeats give: a line over the decode steps' time beyond that of their
    kernels."""
    alone = kernels._replace(between_passes_s=0.0)
    most = min(alone.decode_sequences[-1], alone.dense_tokens[-1], alone.sampled_sequences[-1])
    decodes = [p for p in points if not p.shape.draft_tokens and not p.shape.prompts]
    chosen = [
        p
        for p in decodes
        if p.shape.sequences <= most and p.shape.kv_tokens <= alone.decode_kv_tokens[-1]
    ]
    batches = np.array([p.shape.sequences for p in chosen])
    lines = [
        _line(
            batches,
            np.array([np.quantile(p.repeats_s, q) - predicted_s(alone, p.shape) for p in chosen]),
        )
        for q in (0.5, 0.25, 0.75)
    ]
    keys = ("between_passes_s", "sequence_overhead_s")
    return {
        key: (each[0], min(each), max(each))
        for key, each in zip(keys, zip(*lines, strict=True), strict=True)
    }


def _line(tokens: Floats, rest_s: Floats) -> tuple[float, float]:
    """Return intercept and slope, both at least 0, of the least-squares line."""
    from scipy.optimize import nnls

    start, slope = nnls(np.stack([np.ones(tokens.size), tokens.astype(float)], axis=1), rest_s)[0]
    return float(start), float(slope)


def _sampled(several: Floats, rise_s: Floats, most: int) -> tuple[Floats, Floats]:
    """Return the cost of sampling by position; the first position costs the mean of the further
    ones."""
    several, rise_s = _columns(list(zip(several, rise_s, strict=True)))
    rise_s = settled(np.maximum(rise_s, 0.0))
    one_s = rise_s[-1] / (several[-1] - 1)
    return _reaching(np.r_[0.0, 1.0, several], np.r_[0.0, one_s, one_s + rise_s], most)


def _sequence_s(points: Sequence[MeasuredPass], tables: Tables) -> float:
    """Return the part of `sampled` [s] that verified positions do not have: what passes with drafts
    take less than these tables say, for each drafted token, beside a round's time of a sequence."""
    from scipy.optimize import nnls

    drafted = [p for p in points if p.shape.draft_tokens]
    if not drafted:
        return 0.0
    sequences = np.array([p.shape.sequences for p in drafted], dtype=float)
    tokens = sequences * [p.shape.draft_tokens for p in drafted]
    less_s = np.array([predicted_s(tables, p.shape) - p.seconds for p in drafted])
    return float(nnls(np.stack([tokens, -sequences], axis=1), less_s)[0][0])


def _with_sequences(tables: Tables, sequence_s: float) -> Tables:
    """Return tables of equal decode steps, in which `sequence_s` of sampling belongs to sequences."""
    positions = tables.sampled_sequences
    sampled_s = settled(np.maximum(tables.sampled_s - sequence_s * positions, 0.0))
    moved_s = np.interp(tables.decode_sequences, positions, tables.sampled_s - sampled_s)
    return tables._replace(
        sampled_s=sampled_s, attention_s=tables.attention_s + moved_s[None, None, :, None]
    )


def _prefill(
    alone: Sequence[MeasuredPass], mode_s: float, reach: Reach
) -> tuple[Floats, Floats, Floats]:
    """Return chunk sizes, contexts and the time of a chunk beyond its tokens, (chunks, contexts):
    `mode_s`, and the rise with its context. Chunks of a prompt are compared with its first chunk
    that is not new to the engine."""
    rows = _rows(
        [p for p in alone if p.shape.prompts == 1 and p.shape.context_tokens],
        "chunk_tokens",
        "context_tokens",
    )
    long = {chunk: _columns(row) for chunk, row in rows.items() if len(row) > 1}
    contexts = np.unique(
        [0.0, reach.max_model_len, *(x for ticks, _ in long.values() for x in ticks)]
    )
    chunks = np.unique([0.0, 1.0, *long, reach.max_num_batched_tokens])
    rises = np.zeros((len(long) + 1, contexts.size))
    for i, chunk in enumerate(sorted(long), start=1):
        ticks, seconds = long[chunk]
        start, slope = _line(ticks, seconds)
        rises[i] = _along(
            contexts,
            np.r_[0.0, ticks],
            np.r_[0.0, settled(np.maximum(seconds - start, 0.0))],
            slope,
        )
    measured = np.array([0.0, *sorted(long)])
    grid = np.array([_along(chunks, measured, column) for column in rises.T]).T
    grid[1:] += mode_s
    return chunks, contexts, settled(grid)


def _decode_attention(
    by_batch: dict[int, list[tuple[float, float]]], reach: Reach
) -> tuple[Floats, Floats, Floats]:
    """Return batch sizes, lengths and the attention time (sequences, lengths): the rise over the
    smallest length."""
    long = {batch: _columns(row) for batch, row in by_batch.items() if len(row) > 1}
    first = min(ticks[0] for ticks, _ in long.values())
    lengths = np.unique(
        np.round([first, reach.max_model_len, *(kv for ticks, _ in long.values() for kv in ticks)])
    )
    rises = np.zeros((len(long) + 1, lengths.size))
    for i, batch in enumerate(sorted(long), start=1):
        ticks, seconds = long[batch]
        rises[i] = _along(lengths, ticks, settled(np.maximum(seconds - seconds[0], 0.0)))
    batches = np.array([0.0, *sorted(long)])
    ticks = np.unique(np.r_[batches, reach.max_num_seqs])
    return (
        ticks,
        lengths,
        settled(np.array([_along(ticks, batches, column) for column in rises.T]).T),
    )


def _rows(
    points: Sequence[MeasuredPass], row: str, column: str
) -> dict[int, list[tuple[float, float]]]:
    """Return (column, seconds) in rising order, by row."""
    rows: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        rows[getattr(point.shape, row)][float(getattr(point.shape, column))] += point.repeats_s
    return {
        name: [(at, float(np.median(s))) for at, s in sorted(ticks.items())]
        for name, ticks in rows.items()
    }


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    """Return unique ticks, and the mean seconds of each."""
    ticks, inverse = np.unique([tick for tick, _ in rows], return_inverse=True)
    sums = np.bincount(inverse, [seconds for _, seconds in rows])
    return ticks.astype(float), sums / np.bincount(inverse)


def _along(at: Floats, ticks: Floats, values: Floats, slope: float | None = None) -> Floats:
    """Interpolate linearly between ticks; extrapolate beyond the last with `slope`, by default the
    overall slope."""
    if slope is None:
        slope = (values[-1] - values[0]) / (ticks[-1] - ticks[0]) if ticks.size > 1 else 0.0
    return np.asarray(np.interp(at, ticks, values) + slope * np.maximum(at - ticks[-1], 0.0))


def _reaching(ticks: Floats, values: Floats, most: float) -> tuple[Floats, Floats]:
    reach = np.unique(np.r_[ticks, most])
    return reach, _along(reach, ticks, values)
