"""Data-parallel attention ranks in lock step, as vLLM runs a mixture of experts with `--data-parallel-size`: one worker.

Invariant: every rank schedules its own requests, over its own KV blocks, as an `Engine` does; all ranks make a pass together.

    pass = max over ranks (dense + attention + sampled) + experts(tokens of all ranks) + between_passes_s

A rank without work makes a dummy pass of one token while another has work. While the largest rank's pass fits a CUDA graph
(`Limits.graph_tokens`), all ranks are padded to its tokens, which also go through the experts; otherwise none is. Under async
scheduling a dummy pass is scheduled ahead like any other, so a request at an idle rank waits for it.

A request goes to the rank with the least load as vLLM's balancer counts it: its unfinished requests and, where some wait, a
penalty on these by how full the KV cache is; ties go round. It stays there until it ends or leaves, also between its turns.

Not modelled: that the balancer's counts are up to 100 ms old; the up to 16 dummy passes after the last request; that without
CUDA graphs in one rank's pass all ranks launch their kernels one by one; drafts; microbatches that hide the exchange.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.engine.leaving import know_all, stop
from simrl.engine.passes import PassWork, end_pass, schedule, work_of
from simrl.engine.requests import NEVER, Limits, Totals, Until, busy
from simrl.engine.stretches import along_row, go_to_end, stretch_length
from simrl.profile.compiled import kernel, part
from simrl.profile.interpolation import interpolate, interpolate_row, locate
from simrl.profile.profile import Tables, pass_s, straggler_s
from simrl.speculation.decoding import Ints, Records


class Ranks(NamedTuple):
    """The arrays of all ranks: a row a rank, a column a slot; `drafts`, which are none, are shared."""

    requests: NDArray[Any]
    totals: NDArray[Any]
    requests_words: Ints  # of these: records are slow to copy
    totals_words: Ints
    drafts: Records


@kernel
def run_in_step(e: Ranks, tables: Tables, limits: Limits, until: Until) -> float:
    """Do as `passes.run`, for all ranks."""
    n_ranks = e.totals.shape[0]
    for k in range(n_ranks):
        e.totals[k, 0].n_stopped = 0
    while e.totals[0, 0].now_s <= until.time_s and any_busy(e):
        passes = _stretch_length(e, limits)
        if passes > 0:
            _stretch(e, tables, limits, passes, until.time_s)
        else:
            _pass(e, tables, limits)
        stopped = 0
        for k in range(n_ranks):
            stop(e.requests[k], e.totals[k, 0])
            stopped += e.totals[k, 0].n_stopped
        if until.first_stop and stopped > 0:
            break
    return float(e.totals[0, 0].now_s)


@part
def any_busy(e: Ranks) -> bool:
    """Return whether a next pass would do something at some rank."""
    busy_ones = 0
    for k in range(e.totals.shape[0]):
        busy_ones += busy(e.totals[k, 0])
    return bool(busy_ones > 0)


@part
def _rests(t: Totals) -> bool:
    """Return whether a rank makes dummy passes, and nothing else, until somebody asks for something."""
    return bool(not busy(t) and t.n_leaving + t.n_going == 0)


@part
def _stretch_length(e: Ranks, limits: Limits) -> int:
    """Return for how many passes every rank surely decodes or rests; 0 if unsure."""
    passes = NEVER
    for k in range(e.totals.shape[0]):
        if not _rests(e.totals[k, 0]):
            passes = min(passes, stretch_length(e.requests[k], e.drafts, e.totals[k, 0], limits))
    return passes


@part
def _experts_s(tables: Tables, tokens: int) -> float:
    """Return the seconds of what sees the tokens of all ranks."""
    if tables.expert_tokens.shape[0] == 0:
        return 0.0
    return interpolate(tables.expert_tokens, tables.experts_s, float(tokens))


@part
def _padded(tokens: Ints, limits: Limits) -> int:
    """Return the tokens to which every rank is padded; 0 if none is."""
    return tokens.max() if tokens.max() <= limits.graph_tokens else 0


@part
def _pass(e: Ranks, tables: Tables, limits: Limits) -> None:
    """Run one pass of all ranks."""
    n_ranks = e.totals.shape[0]
    if _schedule(e, limits) == 0 and limits.async_scheduling:
        for k in range(n_ranks):
            know_all(e.requests[k], e.totals[k, 0])
        _schedule(e, limits)
    works = [work_of(e.requests[k], e.drafts, e.totals[k, 0], tables) for k in range(n_ranks)]
    query, decoding = np.empty(n_ranks, np.int64), 0
    for k in range(n_ranks):
        query[k] = works[k].query
        decoding += works[k].decoding
    padded = _padded(query, limits)
    own_experts_s, decoding_experts_s = _experts_s(tables, query.sum()), _experts_s(tables, decoding)
    experts_s = _experts_s(tables, n_ranks * padded if padded > 0 else np.maximum(query, 1).sum())
    seconds = 0.0
    own_s = np.zeros(n_ranks)
    for k in range(n_ranks):
        w = works[k]
        sampled, prefill, decodes, kv = float(w.sampled), float(w.prefill), float(w.decoding), float(w.decode_kv)
        beside_s = w.straggler_of_all_s + experts_s
        tokens = float(padded if padded > 0 else w.query)
        rank_s = pass_s(tables, tokens, sampled, prefill, w.prefill_work, decodes, kv, beside_s)
        seconds = max(seconds, rank_s)
        if w.query > 0:  # a rank that only decodes waits for what the others' prefill adds to the experts
            beside_s = w.straggler_of_all_s + (own_experts_s if w.prefill > 0 else decoding_experts_s)
            own_s[k] = pass_s(tables, float(w.query), sampled, prefill, w.prefill_work, decodes, kv, beside_s)
    for k in range(n_ranks):
        w = works[k]
        decoding_s = w.straggler_s + decoding_experts_s
        work = PassWork(w.query, w.sampled, w.prefill, w.prefill_work, w.decoding, w.decode_kv, decoding_s, 0.0)
        end_pass(e.requests[k], e.drafts, e.totals[k, 0], tables, work, seconds, own_s[k], 0.0)


@part
def _schedule(e: Ranks, limits: Limits) -> int:
    """Schedule a pass at each rank; an async scheduler as of when the pass before it starts. Return its tokens in all."""
    tokens = 0
    for k in range(e.totals.shape[0]):
        r, t = e.requests[k], e.totals[k, 0]
        if limits.async_scheduling:
            if t.ahead == 0:
                know_all(r, t)
            t.ahead = 1
        tokens += schedule(r, e.drafts, t, limits)
    return tokens


@part
def _stretch(e: Ranks, tables: Tables, limits: Limits, passes: int, until_s: float) -> None:
    """Run up to `passes` passes in which ranks only decode or rest, no further than the first boundary after `until_s`."""
    n_ranks, grid = e.totals.shape[0], tables.decode_kv_tokens
    t = e.totals[0, 0]
    slowdown, now_s, done = t.slowdown, t.now_s, 0
    least_s = slowdown * (tables.least_pass_s + tables.between_passes_s)
    running = np.array([e.totals[k, 0].n_running for k in range(n_ranks)])
    padded = _padded(running, limits)
    experts_s = _experts_s(tables, n_ranks * padded if padded > 0 else np.maximum(running, 1).sum())
    own_experts_s = _experts_s(tables, running.sum())
    rows, cell, mean_kv = np.zeros((n_ranks, grid.shape[0])), np.zeros(n_ranks, np.int64), np.zeros(n_ranks)
    fixed_s, own_fixed_s, own_s, waited_s = np.zeros(n_ranks), np.zeros(n_ranks), np.zeros(n_ranks), np.zeros(n_ranks)
    for k in range(n_ranks):
        if running[k] > 0:
            mean_kv[k], straggler = _lengths(e, k, tables)
            cell[k], _ = locate(grid, mean_kv[k])
            interpolate_row(tables.decode_sequences, tables.attention_s[0, 0], float(running[k]), rows[k])
            rows[k] *= slowdown
            tokens = padded if padded > 0 else running[k]
            fixed_s[k] = _fixed_s(tables, slowdown, tokens, running[k], straggler, experts_s)
            own_fixed_s[k] = _fixed_s(tables, slowdown, running[k], running[k], straggler, own_experts_s)
    last = grid.shape[0] - 1
    while done < passes:
        seconds = 0.0
        for k in range(n_ranks):
            if running[k] > 0:
                while cell[k] < last - 1 and mean_kv[k] >= grid[cell[k] + 1]:
                    cell[k] += 1
                attention_s = along_row(grid, rows[k], mean_kv[k], cell[k])
                seconds = max(seconds, fixed_s[k] + attention_s)
                own_s[k] = max(own_fixed_s[k] + attention_s, least_s)
                mean_kv[k] += 1.0
        seconds = max(seconds, least_s)
        now_s += seconds
        for k in range(n_ranks):
            waited_s[k] += seconds - own_s[k]
        done += 1
        if now_s > until_s:
            break
    for k in range(n_ranks):
        _go_to_end(e, k, limits, done, now_s, waited_s[k])


@part
def _lengths(e: Ranks, rank: int, tables: Tables) -> tuple[float, float]:
    """Return the mean length of a rank's sequences in the pass to come, and what it waits for the longest ones."""
    r, n = e.requests[rank], e.totals[rank, 0].n_running
    lengths = np.empty(n)
    for i in range(n):
        lengths[i] = r[r[i].running].computed + 1
    return lengths.sum() / n, straggler_s(tables, lengths)


@part
def _fixed_s(tables: Tables, slowdown: float, tokens: int, n: int, straggler: float, experts_s: float) -> float:
    """Return the seconds of a rank's pass that decodes, without attention."""
    own_s = (
        interpolate(tables.dense_tokens, tables.dense_s, float(tokens))
        + interpolate(tables.sampled_sequences, tables.sampled_s, float(n))
        + tables.between_passes_s
    )
    return slowdown * own_s + slowdown * (straggler + experts_s)


@part
def _go_to_end(e: Ranks, rank: int, limits: Limits, done: int, now_s: float, waited_s: float) -> None:
    """Give a rank's requests what they gain in a stretch, in which it waited for other ranks."""
    t = e.totals[rank, 0]
    decode_s, began_s, unslowed_s = t.decode_s, t.now_s, waited_s / t.slowdown
    go_to_end(e.requests[rank], t, limits, done, now_s)
    if t.n_running == 0:
        t.decode_s = decode_s
        t.lock_step_s += (now_s - began_s) / t.slowdown
    elif unslowed_s > 0.0:
        t.decode_s -= unslowed_s
        t.lock_step_s += unslowed_s
