"""Seconds of passes: of one scheduled pass on every rank, and of many repeated ones.

Invariant: no other module of the engine knows how long a forward pass takes, without drafting.

    pass = max over ranks (dense + attention + sampled + straggler) + experts + between_passes_s,
           and no less than the host's time beside the kernels (`profile.least_s`)

Ranks make a pass together (`limits.dp`, one for most engines). While the largest rank's pass fits a
CUDA graph (`limits.graph_tokens`), all ranks are padded to its tokens, which also go through the
experts; otherwise none is. A rank without work makes a dummy pass of one token.
"""

from __future__ import annotations

import numpy as np

from simrl.engine.state import Engines, Limits, Requests, Totals
from simrl.profile.compiled import inlined, lean
from simrl.profile.interpolation import interpolate, locate
from simrl.profile.profile import (
    Tables,
    attention_alone_s,
    least_s,
    straggler_beside_prefill_s,
    straggler_s,
    with_attention_s,
    without_attention_s,
)
from simrl.speculation.decoding import Ints


@lean
def _experts_s(tables: Tables, tokens: int) -> float:
    """Return the seconds of what sees the tokens of all ranks."""
    if tables.expert_tokens.shape[0] == 0:
        return 0.0
    return interpolate(tables.expert_tokens, tables.experts_s, float(tokens))


@lean
def pass_seconds(e: Engines, first: int, tables: Tables, limits: Limits) -> float:
    """Return the seconds of the scheduled pass. Set each rank's seconds of its own work, and the
    shares of decoding and of draft tokens in them.

    A rank that only decodes waits for what the prefill of others adds to the experts; what their
    drafts add is a part of its own work, as all verify together.
    """
    query, decoding, drafted, largest, dummies = 0, 0, 0, 0, 0
    for k in range(limits.dp):
        t = e.totals[first + k]
        query += t.query
        decoding += t.decoding
        drafted += t.drafted
        largest = max(largest, t.query)
        dummies += t.query == 0
    padded = limits.dp > 1 and largest <= limits.graph_tokens
    experts_s = _experts_s(tables, limits.dp * largest if padded else query + dummies)
    decoding_experts_s = _experts_s(tables, decoding)
    verifying_experts_s = _experts_s(tables, decoding + drafted)
    seconds = 0.0
    for k in range(limits.dp):
        t = e.totals[first + k]
        prefill, kv = float(t.prefill), float(t.decode_kv)
        attention_s = attention_alone_s(tables, prefill, t.prefill_work, float(t.decoding), kv)
        tokens = largest if padded else t.query
        waiting_s = t.straggler_of_all_s + experts_s
        hosted = float(t.sampled - t.drafted)
        t.own_s = with_attention_s(
            tables, float(tokens), float(t.sampled), hosted, attention_s, waiting_s
        )
        seconds = max(seconds, t.own_s)
        if t.query == 0:
            t.own_s = 0.0 if limits.dp > 1 else t.own_s
        elif limits.dp > 1:
            waiting_s = t.straggler_of_all_s + verifying_experts_s
            if t.prefill > 0:
                waiting_s = t.straggler_of_all_s + _experts_s(tables, query)
            t.own_s = with_attention_s(
                tables, float(t.query), float(t.sampled), hosted, attention_s, waiting_s
            )
        t.decoding_s = t.own_s
        t.verifying_s = 0.0
        if t.query > t.decoding:
            waits = t.straggler_s + decoding_experts_s, t.straggler_s + verifying_experts_s
            _split(t, tables, attention_s, waits)
    return seconds


@lean
def follow_record(e: Engines, first: int, seconds: float) -> None:
    """Record the scheduled pass, which takes `seconds` as profiled, and slow it down to its recorded
    seconds."""
    t = e.totals[first]
    if t.passes < e.record.shape[1]:
        p = e.record[first, t.passes]
        p.began_s, p.prefill, p.decodes = t.now_s, t.prefill, t.decoding
        t.slowdown = p.seconds / seconds if p.seconds > 0.0 else 1.0


@inlined
def _split(t: Totals, tables: Tables, attention_s: float, waits: tuple[float, float]) -> None:
    """Set the parts of decoding and of draft tokens in a pass that does more than decode. `waits`:
    the seconds beside its own, without drafts and with."""
    n, positions = float(t.decoding), float(t.decoding + t.drafted)
    t.decoding_s = 0.0
    if n == 0.0:
        return
    if t.prefill > 0:
        attention_s = attention_alone_s(tables, 0.0, 0.0, n, float(t.decode_kv))
    t.decoding_s = with_attention_s(tables, n, n, n, attention_s, waits[0])
    if t.drafted > 0:
        verifying_s = with_attention_s(tables, positions, positions, n, attention_s, waits[1])
        t.verifying_s = verifying_s - t.decoding_s


@lean
def wait_for_stragglers(r: Requests, t: Totals, tables: Tables, scratch: Ints) -> None:
    """Set how long the scheduled pass waits for its longest decoding sequences."""
    decoding, longest_prefill, longest, summed = 0, 0, 0, 0
    for i in range(t.n_running):
        q = r[r[i].running]
        if q.scheduled > 0 and q.computed > 0 and q.scheduled == 1 + q.drafted:
            scratch[decoding] = q.computed
            longest = max(longest, q.computed)
            summed += q.computed
            decoding += 1
        elif q.scheduled > 0:
            longest_prefill = max(longest_prefill, q.computed + q.scheduled)
    t.straggler_s = straggler_s(tables, scratch[:decoding])
    t.straggler_of_all_s = t.straggler_s
    if longest_prefill > 0:
        ahead = longest - max(summed / decoding, float(longest_prefill))
        t.straggler_of_all_s = straggler_beside_prefill_s(tables, float(decoding), ahead)


@lean
def end_of_stretch(
    e: Engines, first: int, tables: Tables, limits: Limits, passes: int, until_s: float
) -> tuple[int, float]:
    """Return how many of `passes`, in which the batch only decodes and has `lengths` in the first,
    begin up to `until_s`, and the boundary after them. Changes nothing but the work of passes.

    Only the lengths grow, so a pass is one step along a row of the attention's grid.
    """
    dp, slowdown = limits.dp, e.totals[first].slowdown
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
        n, t.own_s, t.fixed_s, t.own_fixed_s = t.n_running, 0.0, 0.0, 0.0
        t.mean_kv, t.cell_kv, t.cell_s, t.slope_s, t.cell_end_kv = 0.0, 0.0, 0.0, 0.0, np.inf
        if n > 0:
            straggler = 0.0
            if tables.straggler_sequences.shape[0] > 0:
                for i in range(n):
                    e.scratch[i] = r[r[i].running].computed + 1
                straggler = straggler_s(tables, e.scratch[:n])  # all gain one token a pass
            t.mean_kv = t.lengths / n
            t.cell, _ = locate(tables.decode_kv_tokens, t.mean_kv)
            _enter_cell(t, tables)
            own_s = without_attention_s(tables, float(n), float(n)) + straggler
            t.own_fixed_s = slowdown * (own_s + own_experts_s)
            rank_s = (
                without_attention_s(tables, float(largest), float(n)) + straggler
                if padded
                else own_s
            )
            t.fixed_s = slowdown * (rank_s + experts_s)
    shortest_s = slowdown * least_s(tables, float(largest))
    now_s, done = e.totals[first].now_s, 0
    while done < passes and now_s <= until_s:
        seconds = shortest_s
        for k in range(dp):
            t = e.totals[first + k]
            if t.mean_kv >= t.cell_end_kv:
                _enter_cell(t, tables)
            attention_s = t.cell_s + t.slope_s * (t.mean_kv - t.cell_kv)
            seconds = max(seconds, t.fixed_s + attention_s)
            if dp > 1 and t.own_fixed_s > 0.0:
                t.own_s += max(t.own_fixed_s + attention_s, shortest_s)
            t.mean_kv += 1.0
        now_s += seconds
        done += 1
    return done, now_s


@lean
def _enter_cell(t: Totals, tables: Tables) -> None:
    """Set the cell of the attention's grid in which a mean length that only grows is now."""
    grid, last = tables.decode_kv_tokens, tables.decode_kv_tokens.shape[0] - 1
    while t.cell < last - 1 and t.mean_kv >= grid[t.cell + 1]:
        t.cell += 1
    t.cell_kv, t.slope_s, t.cell_end_kv = t.mean_kv, 0.0, np.inf  # at an edge of the grid
    if last == 0 or t.mean_kv >= grid[last]:
        t.cell_s = _decode_attention_s(t, tables, last)
        return
    t.cell_s = _decode_attention_s(t, tables, t.cell)
    if t.mean_kv <= grid[0]:
        t.cell_end_kv = grid[0]
        return
    t.cell_kv, t.cell_end_kv = grid[t.cell], grid[t.cell + 1]
    t.slope_s = (_decode_attention_s(t, tables, t.cell + 1) - t.cell_s) / (
        t.cell_end_kv - t.cell_kv
    )


@lean
def _decode_attention_s(t: Totals, tables: Tables, cell: int) -> float:
    """Return the seconds of the attention of the running requests, all of a length of the grid."""
    return t.slowdown * interpolate(
        tables.decode_sequences, tables.attention_s[0, 0, :, cell], float(t.n_running)
    )
