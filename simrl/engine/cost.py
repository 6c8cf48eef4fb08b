"""The seconds of passes: of a scheduled one at every rank of an engine, and of many that repeat.

Invariant: no other module of the engine knows how long a pass takes.

    pass = max over ranks (dense + attention + sampled + straggler) + experts + between_passes_s

Ranks make a pass together (`limits.dp`, one for most engines). While the largest rank's pass fits a
CUDA graph (`limits.graph_tokens`), all ranks are padded to its tokens, which also go through the
experts; otherwise none is. A rank without work makes a dummy pass of one token.
"""

from __future__ import annotations

import numpy as np

from simrl.engine.requests import Engines, Limits, Requests, Totals
from simrl.profile.compiled import inlined, lean, part
from simrl.profile.interpolation import interpolate, interpolate_row, locate
from simrl.profile.profile import (
    Tables,
    attention_alone_s,
    straggler_beside_prefill_s,
    straggler_s,
    with_attention_s,
    without_attention_s,
)
from simrl.speculation.decoding import Floats


@inlined
def _experts_s(tables: Tables, tokens: int) -> float:
    """Return the seconds of what sees the tokens of all ranks."""
    if tables.expert_tokens.shape[0] == 0:
        return 0.0
    return interpolate(tables.expert_tokens, tables.experts_s, float(tokens))


@lean
def pass_seconds(e: Engines, first: int, tables: Tables, limits: Limits) -> float:
    """Return the seconds of the scheduled pass. Set those of each rank's own work, and the parts
    of decoding and of draft tokens in them.

    A rank that only decodes waits for what the prefill of others adds to the experts.
    """
    query, decoding, largest, dummies = 0, 0, 0, 0
    for k in range(limits.dp):
        t = e.totals[first + k]
        query += t.query
        decoding += t.decoding
        largest = max(largest, t.query)
        dummies += t.query == 0
    padded = limits.dp > 1 and largest <= limits.graph_tokens
    experts_s = _experts_s(tables, limits.dp * largest if padded else query + dummies)
    decoding_experts_s = _experts_s(tables, decoding)
    seconds = 0.0
    for k in range(limits.dp):
        t = e.totals[first + k]
        prefill, kv = float(t.prefill), float(t.decode_kv)
        attention_s = attention_alone_s(tables, prefill, t.prefill_work, float(t.decoding), kv)
        tokens = largest if padded else t.query
        waiting_s = t.straggler_of_all_s + experts_s
        t.own_s = with_attention_s(tables, float(tokens), float(t.sampled), attention_s, waiting_s)
        seconds = max(seconds, t.own_s)
        if t.query == 0:
            t.own_s = 0.0 if limits.dp > 1 else t.own_s
        elif limits.dp > 1:
            waiting_s = t.straggler_of_all_s + decoding_experts_s
            if t.prefill > 0:
                waiting_s = t.straggler_of_all_s + _experts_s(tables, query)
            t.own_s = with_attention_s(tables, float(t.query), float(t.sampled), attention_s, waiting_s)
        t.decoding_s = t.own_s
        t.verifying_s = 0.0
        if t.query > t.decoding:
            _split(t, tables, attention_s, t.straggler_s + decoding_experts_s)
    return seconds


@inlined
def _split(t: Totals, tables: Tables, attention_s: float, waiting_s: float) -> None:
    """Set the parts of decoding and of draft tokens in a pass that does more than decode."""
    n, positions = float(t.decoding), float(t.decoding + t.drafted)
    t.decoding_s = 0.0
    if n == 0.0:
        return
    if t.prefill > 0:
        attention_s = attention_alone_s(tables, 0.0, 0.0, n, float(t.decode_kv))
    t.decoding_s = with_attention_s(tables, n, n, attention_s, waiting_s)
    if t.drafted > 0:
        verifying_s = with_attention_s(tables, positions, positions, attention_s, waiting_s)
        t.verifying_s = verifying_s - t.decoding_s


@part
def wait_for_stragglers(r: Requests, t: Totals, tables: Tables) -> None:
    """Set how long the scheduled pass waits for its longest decoding sequences."""
    decoding, lengths, longest_prefill = 0, np.empty(t.n_running), 0
    longest, summed = 0, 0
    for i in range(t.n_running):
        q = r[r[i].running]
        if q.scheduled > 0 and q.computed > 0 and q.scheduled == 1 + q.drafted:
            lengths[decoding] = q.computed
            longest = max(longest, q.computed)
            summed += q.computed
            decoding += 1
        elif q.scheduled > 0:
            longest_prefill = max(longest_prefill, q.computed + q.scheduled)
    t.straggler_s = straggler_s(tables, lengths[:decoding])
    t.straggler_of_all_s = t.straggler_s
    if longest_prefill > 0:
        ahead = longest - max(summed / decoding, float(longest_prefill))
        t.straggler_of_all_s = straggler_beside_prefill_s(tables, float(decoding), ahead)


@part
def end_of_stretch(
    e: Engines, first: int, tables: Tables, limits: Limits, passes: int, until_s: float
) -> tuple[int, float]:
    """Return how many of `passes`, in which the batch only decodes, begin up to `until_s`, and the
    boundary after them. Changes nothing but `own_s`: what these passes take each rank alone.

    Only the lengths grow, so a pass is one step along a row of the attention's grid.
    """
    grid, dp, slowdown = tables.decode_kv_tokens, limits.dp, e.totals[first].slowdown
    rows, cells, mean_kv = np.zeros((dp, grid.shape[0])), np.zeros(dp, np.int64), np.zeros(dp)
    fixed_s, own_fixed_s = np.zeros(dp), np.zeros(dp)
    decoding, largest, dummies = 0, 0, 0
    for k in range(dp):
        n = e.totals[first + k].n_running
        decoding += n
        largest = max(largest, n)
        dummies += n == 0
    padded = dp > 1 and largest <= limits.graph_tokens
    experts_s = _experts_s(tables, dp * largest if padded else decoding + dummies)
    own_experts_s = _experts_s(tables, decoding)
    for k in range(dp):
        r, t = e.requests[first + k], e.totals[first + k]
        t.own_s = 0.0
        n = t.n_running
        if n > 0:
            lengths = np.empty(n)
            for i in range(n):
                lengths[i] = r[r[i].running].computed + 1
            mean_kv[k] = lengths.sum() / n
            cells[k], _ = locate(grid, mean_kv[k])
            interpolate_row(tables.decode_sequences, tables.attention_s[0, 0], float(n), rows[k])
            for j in range(grid.shape[0]):
                rows[k, j] *= slowdown
            straggler = straggler_s(tables, lengths)  # all gain one token a pass
            tokens = float(largest if padded else n)
            rank_s = without_attention_s(tables, tokens, float(n)) + straggler
            own_rank_s = without_attention_s(tables, float(n), float(n)) + straggler
            fixed_s[k] = slowdown * (rank_s + experts_s)
            own_fixed_s[k] = slowdown * (own_rank_s + own_experts_s)
    least_s = slowdown * (tables.least_pass_s + tables.between_passes_s)
    now_s, done = e.totals[first].now_s, 0
    while done < passes and now_s <= until_s:
        seconds = least_s
        for k in range(dp):
            cells[k] = _next_cell(grid, mean_kv[k], cells[k])
            attention_s = _along_row(grid, rows, k, mean_kv[k], cells[k])
            seconds = max(seconds, fixed_s[k] + attention_s)
            if dp > 1 and own_fixed_s[k] > 0.0:
                e.totals[first + k].own_s += max(own_fixed_s[k] + attention_s, least_s)
            mean_kv[k] += 1.0
        now_s += seconds
        done += 1
    return done, now_s


@inlined
def _next_cell(grid: Floats, mean_kv: float, cell: int) -> int:
    """Return the cell of a length that has grown, at most the last one."""
    while cell < grid.shape[0] - 2 and mean_kv >= grid[cell + 1]:
        cell += 1
    return cell


@inlined
def _along_row(grid: Floats, rows: Floats, k: int, mean_kv: float, cell: int) -> float:
    """Return a row of the attention's grid at a mean length, which is in that cell, or beyond."""
    last = grid.shape[0] - 1
    if last == 0 or mean_kv <= grid[0]:
        return rows[k, 0]
    if mean_kv >= grid[last]:
        return rows[k, last]
    slope = (rows[k, cell + 1] - rows[k, cell]) / (grid[cell + 1] - grid[cell])
    return rows[k, cell] + slope * (mean_kv - grid[cell])
