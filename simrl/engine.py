"""One inference engine: continuous batching, exact to the iteration, over arrays.

Invariant: `Engine.now_s` is a boundary between two forward passes, and every pass in the past happened as vLLM V1 would
have scheduled it: running requests first, in order, then waiting ones first come first served, while `max_num_seqs`,
`max_num_batched_tokens` and the KV blocks (for all known tokens) allow; prompts in chunks. When blocks run out, the caches
of paused requests go, oldest first, then the youngest running request is preempted; what lost its cache computes it again.
What a caller asks takes effect at the boundary where the engine stands, so callers first `settle(t)`: the first boundary
strictly after t, or t itself if the engine is idle. A request ends after exactly `response_tokens` generated tokens, and
may have a pause, and a watched token, before.

With speculation, a pass verifies drafts: a request that decodes brings `drafted` tokens, of which the first `accepted` stand,
and gains one more besides (what a request has to gain is never exceeded). Which tokens it gains is never changed, only when.

Most passes decode the same batch as the pass before. Such a stretch, up to the next stop, changes only the length of the KV
cache, so it is run as a loop over one interpolated row of the profile (`_decode_stretch`; with drafts, which differ from pass
to pass, `_speculative_stretch`); everything else goes request by request (`_iterate`). `tests/reference_engine.py` is the same
rule, written slowly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from simrl.errors import InputError
from simrl.interpolation import interpolate, interpolate_row, locate
from simrl.profile import Tables, pass_s
from simrl.speculation.decoding import (
    ACCEPTED,
    ACCEPTED_TOTAL,
    AT,
    CALM_PASSES,
    DRAFTED,
    DRAFTED_TOTAL,
    DRIFT,
    ELASTIC,
    FLAGS,
    GATE,
    GAUGES,
    MODEL,
    NONE,
    OLD_ACCEPTED,
    OLD_TOKENS,
    PATIENCE,
    PROPOSED,
    ROWS,
    RUNS,
    SOURCE,
    SPECULATES,
    THRESHOLD,
    VERIFICATIONS,
    WINDOW,
    WINDOW_MOST,
    WINDOW_START,
    Decoding,
    draft,
    gate_opens,
    remember,
    window_rule,
)
from simrl.speculation.draws import uniform
from simrl.speculation.windows import next_window

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# What changes in a pass: slots, drafts, counters, gauges, flags.
_State = tuple[Ints, Ints, Ints, Floats, Ints]
# A request's slot, the time of the boundary at which it stopped, and how: END, PAUSE or WATCH.
Stop = tuple[int, float, int]

# Kinds of stops: the response ends; the request leaves the batch and keeps its cache; the caller is told, no more.
END, PAUSE, WATCH = range(3)

# Rows of `slots` (one column a request). `BLOCKS` are held, `STOP_AT` is the number of generated tokens at which it next leaves
# the batch, `WATCH_AT` the one at which the caller is told ...
PROMPT, RESPONSE, GENERATED, COMPUTED, SCHEDULED, BLOCKS, STOP_AT, STOP_KIND, WATCH_AT = range(9)
# ... and the lists kept beside them: running in order of admission, waiting (a ring), those that hold blocks without
# running (paused, or waiting again) in order of their pause, stopped in the last pass and how.
RUNNING, WAITING, HOLDING, STOPPED, STOPPED_KIND = range(9, 14)
SLOT_ROWS = 14
# Rows of `times`: when a request's first and last token came; the hardness of its acceptance (`simrl.speculation.acceptance`).
FIRST_TOKEN, LAST_TOKEN, HARDNESS = range(3)
TIME_ROWS = 3
# Entries of `counters`: the state ...
N_RUNNING, WAITING_HEAD, N_WAITING, N_HOLDING, N_STOPPED, FREE_BLOCKS, HELD_BLOCKS, ADMITTING = range(8)
# ... and totals since the engine was made.
PASSES, GENERATED_TOTAL, PREFILL_TOTAL, PREEMPTIONS = range(8, 12)
COUNTERS = 12
NEVER = 2**62


class Limits(NamedTuple):
    """What bounds a pass. Names as in vLLM; `kv_blocks` blocks of `block_size` tokens hold the KV cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks: int


class EngineConfig(BaseModel):
    """Settings of an inference engine, named as in vLLM. vLLM's own defaults depend on the GPU and on how it is started; these
    are usual for rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_num_seqs: int = Field(default=256, gt=0)
    max_num_batched_tokens: int = Field(default=8192, gt=0)
    block_size: int = Field(default=16, gt=0, le=10**6)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    reserve_bytes: float = Field(
        default=4e9,
        ge=0,
        description="activations, CUDA graphs and communication buffers of a GPU, not available to KV",
    )
    kv_cache_tokens: int | None = Field(
        default=None, gt=0, le=10**12, description="size of the KV cache where it is known"
    )


@njit(cache=True)
def _blocks(tokens: int, block_size: int) -> int:
    return (tokens + block_size - 1) // block_size


@njit(cache=True)
def _known(slots: Ints, drafts: Ints, slot: int) -> int:
    """Tokens whose KV a request needs before it decodes: what it has, and the old response that is yet to be verified."""
    return slots[PROMPT, slot] + slots[GENERATED, slot] + drafts[OLD_TOKENS, slot]


@njit(cache=True)
def queue_up(slots: Ints, counters: Ints, slot: int) -> None:
    """A request joins the end of the queue."""
    slots[WAITING, (counters[WAITING_HEAD] + counters[N_WAITING]) % slots.shape[1]] = slot
    counters[N_WAITING] += 1


@njit(cache=True)
def enqueue(
    slots: Ints, times: Floats, counters: Ints, slot: int, prompt: int, response: int, generated: int, cached: int
) -> None:
    """A new request joins the end of the queue. It holds no blocks, but `cached` tokens will not have to be computed."""
    slots[PROMPT, slot] = prompt
    slots[RESPONSE, slot] = response
    slots[GENERATED, slot] = generated
    slots[COMPUTED, slot] = cached
    slots[SCHEDULED, slot] = 0
    slots[BLOCKS, slot] = 0
    slots[STOP_AT, slot] = response
    slots[STOP_KIND, slot] = END
    slots[WATCH_AT, slot] = NEVER
    times[FIRST_TOKEN, slot] = np.nan
    times[LAST_TOKEN, slot] = np.nan
    queue_up(slots, counters, slot)


@njit(cache=True)
def _free(slots: Ints, counters: Ints, slot: int) -> None:
    """A request gives its blocks back; what it had computed is lost."""
    counters[FREE_BLOCKS] += slots[BLOCKS, slot]
    slots[BLOCKS, slot] = 0
    slots[COMPUTED, slot] = 0


@njit(cache=True)
def _hold(slots: Ints, counters: Ints, slot: int) -> None:
    """A request keeps its blocks without running."""
    slots[HOLDING, counters[N_HOLDING]] = slot
    counters[N_HOLDING] += 1
    counters[HELD_BLOCKS] += slots[BLOCKS, slot]


@njit(cache=True)
def _release(slots: Ints, counters: Ints, slot: int) -> None:
    """The opposite, if it holds any: its blocks are now those of a running request, or about to be freed."""
    if slots[BLOCKS, slot] == 0:
        return
    kept = 0
    for i in range(counters[N_HOLDING]):
        other = slots[HOLDING, i]
        if other != slot:
            slots[HOLDING, kept] = other
            kept += 1
    counters[N_HOLDING] = kept
    counters[HELD_BLOCKS] -= slots[BLOCKS, slot]


@njit(cache=True)
def _make_room(slots: Ints, counters: Ints, blocks: int) -> None:
    """Held caches go, oldest first, until so many blocks are free or none is held."""
    while blocks > counters[FREE_BLOCKS] and counters[N_HOLDING] > 0:
        slot = slots[HOLDING, 0]
        _release(slots, counters, slot)
        _free(slots, counters, slot)


@njit(cache=True)
def _preempt_last(slots: Ints, counters: Ints) -> int:
    """The youngest running request gives its blocks back and waits, first in line, to recompute its cache."""
    counters[N_RUNNING] -= 1
    slot = slots[RUNNING, counters[N_RUNNING]]
    _free(slots, counters, slot)
    capacity = slots.shape[1]
    counters[WAITING_HEAD] = (counters[WAITING_HEAD] - 1) % capacity
    counters[N_WAITING] += 1
    slots[WAITING, counters[WAITING_HEAD]] = slot
    return slot


@njit(cache=True)
def _remove(slots: Ints, counters: Ints, slot: int) -> None:
    """Takes a request out, wherever it is."""
    n = counters[N_RUNNING]
    for i in range(n):
        if slots[RUNNING, i] == slot:
            for j in range(i, n - 1):
                slots[RUNNING, j] = slots[RUNNING, j + 1]
            counters[N_RUNNING] = n - 1
            _free(slots, counters, slot)
            return
    _release(slots, counters, slot)
    _free(slots, counters, slot)
    capacity = slots.shape[1]
    kept = 0
    for i in range(counters[N_WAITING]):
        other = slots[WAITING, (counters[WAITING_HEAD] + i) % capacity]
        if other != slot:
            slots[WAITING, (counters[WAITING_HEAD] + kept) % capacity] = other
            kept += 1
    counters[N_WAITING] = kept


@njit(cache=True)
def drop_caches(slots: Ints, counters: Ints) -> None:
    """Every request loses its cache, those too that wait to bring one; running ones wait before all others, in order."""
    while counters[N_RUNNING] > 0:
        _preempt_last(slots, counters)
    _make_room(slots, counters, counters[FREE_BLOCKS] + counters[HELD_BLOCKS])
    for i in range(counters[N_WAITING]):
        slots[COMPUTED, slots[WAITING, (counters[WAITING_HEAD] + i) % slots.shape[1]]] = 0


@njit(cache=True)
def _admissible(slots: Ints, drafts: Ints, counters: Ints, limits: Limits, budget: int) -> int:
    """Tokens of the first waiting request that may start now; 0 if it has to wait on.

    All its known tokens must fit the blocks that are free or held (its own among them), though only a chunk may start
    (vLLM's `scheduler_reserve_full_isl`, on by default): else requests that come back with long prefixes evict one another.
    """
    if counters[N_WAITING] == 0 or counters[ADMITTING] == 0 or counters[N_RUNNING] >= limits.max_num_seqs:
        return 0
    slot = slots[WAITING, counters[WAITING_HEAD]]
    known = _known(slots, drafts, slot)
    if _blocks(known, limits.block_size) > counters[FREE_BLOCKS] + counters[HELD_BLOCKS]:
        return 0
    return min(known - slots[COMPUTED, slot], budget)


@njit(cache=True)
def _stop(slots: Ints, times: Floats, counters: Ints, now_s: float) -> None:
    """Lists the running requests that reached a stop; after a pause the next one is the end. Only watched ones run on."""
    kept = 0
    stopped = 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        generated = slots[GENERATED, slot]
        runs_on = True
        if generated >= slots[STOP_AT, slot]:
            kind = slots[STOP_KIND, slot]
            slots[STOPPED, stopped] = slot
            slots[STOPPED_KIND, stopped] = kind
            stopped += 1
            slots[STOP_AT, slot] = slots[RESPONSE, slot]
            slots[STOP_KIND, slot] = END
            runs_on = False
            if kind == PAUSE:
                _hold(slots, counters, slot)
            else:
                times[LAST_TOKEN, slot] = now_s
                _free(slots, counters, slot)
        elif generated >= slots[WATCH_AT, slot]:
            slots[STOPPED, stopped] = slot
            slots[STOPPED_KIND, stopped] = WATCH
            stopped += 1
        if generated >= slots[WATCH_AT, slot]:
            slots[WATCH_AT, slot] = NEVER
        if runs_on:
            slots[RUNNING, kept] = slot
            kept += 1
    counters[N_RUNNING] = kept
    counters[N_STOPPED] = stopped


@njit(cache=True)
def _iterate(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    now_s: float,
    tables: Tables,
    limits: Limits,
    slowdown: float,
    draft_s: float,
) -> float:
    """One pass, scheduled request by request, drafts as in `drafts[DRAFTED]`. Returns the time at its end."""
    size = limits.block_size
    budget = limits.max_num_batched_tokens
    scheduled = 0
    preempted = False
    while scheduled < counters[N_RUNNING] and budget > 0:
        slot = slots[RUNNING, scheduled]
        computed = slots[COMPUTED, slot]
        new = min(_known(slots, drafts, slot) - computed + drafts[DRAFTED, slot], budget)
        need = max(_blocks(computed + new, size) - slots[BLOCKS, slot], 0)
        if need > counters[FREE_BLOCKS]:  # rare, and the call is dear in a loop over all requests
            _make_room(slots, counters, need)
        while need > counters[FREE_BLOCKS]:
            preempted = True
            counters[PREEMPTIONS] += 1
            if _preempt_last(slots, counters) == slot:
                break
        if scheduled == counters[N_RUNNING]:  # it had to preempt itself
            break
        counters[FREE_BLOCKS] -= need
        slots[BLOCKS, slot] += need
        slots[SCHEDULED, slot] = new
        if drafts[DRAFTED, slot] > 0:
            drafts[DRAFTED, slot] = min(drafts[DRAFTED, slot], new - 1)
            drafts[ACCEPTED, slot] = min(drafts[ACCEPTED, slot], new - 1)
        budget -= new
        scheduled += 1
    unscheduled = counters[N_RUNNING] - scheduled  # running requests that the token budget left out
    new = 0 if preempted or budget == 0 else _admissible(slots, drafts, counters, limits, budget)
    while new > 0:
        slot = slots[WAITING, counters[WAITING_HEAD]]
        counters[WAITING_HEAD] = (counters[WAITING_HEAD] + 1) % slots.shape[1]
        counters[N_WAITING] -= 1
        slots[RUNNING, counters[N_RUNNING]] = slot
        counters[N_RUNNING] += 1
        _release(slots, counters, slot)
        need = max(_blocks(slots[COMPUTED, slot] + new, size) - slots[BLOCKS, slot], 0)
        _make_room(slots, counters, need)
        counters[FREE_BLOCKS] -= need
        slots[BLOCKS, slot] += need
        slots[SCHEDULED, slot] = new
        drafts[PROPOSED, slot] = 0
        drafts[DRAFTED, slot] = 0
        budget -= new
        scheduled += 1
        new = _admissible(slots, drafts, counters, limits, budget) if budget > 0 else 0

    query, prefill, prefill_work = 0, 0, 0.0
    decoding, decode_kv, verified = 0, 0, 0
    for i in range(scheduled + unscheduled):
        slot = slots[RUNNING, i]
        new = slots[SCHEDULED, slot]
        computed = slots[COMPUTED, slot]
        query += new
        drafts[PROPOSED, slot] *= new > 0
        if new > 0 and computed > 0 and new == 1 + drafts[DRAFTED, slot]:
            decoding += 1
            decode_kv += computed + new
            verified += new - 1
        elif new > 0:
            prefill += new
            prefill_work += new * (computed + 0.5 * new)
            if drafts[OLD_TOKENS, slot] > 0:  # logits of the old response's tokens in this chunk
                verified += max(computed + new - max(computed, slots[PROMPT, slot]), 0)
    now_s += slowdown * draft_s + slowdown * pass_s(
        tables,
        float(query),
        float(scheduled + verified),
        float(prefill),
        prefill_work,
        float(decoding),
        float(decode_kv),
    )
    for i in range(scheduled + unscheduled):
        slot = slots[RUNNING, i]
        new = slots[SCHEDULED, slot]
        slots[COMPUTED, slot] += new
        known = _known(slots, drafts, slot)
        if new > 0 and slots[COMPUTED, slot] == known + drafts[DRAFTED, slot]:
            stands = drafts[ACCEPTED, slot] if drafts[DRAFTED, slot] > 0 else drafts[OLD_ACCEPTED, slot]
            gain = min(1 + stands, slots[STOP_AT, slot] - slots[GENERATED, slot])
            if slots[GENERATED, slot] == 0:
                times[FIRST_TOKEN, slot] = now_s
            slots[GENERATED, slot] += gain
            slots[COMPUTED, slot] = slots[PROMPT, slot] + slots[GENERATED, slot] - 1
            drafts[OLD_TOKENS, slot] = 0
            drafts[OLD_ACCEPTED, slot] = 0
            counters[GENERATED_TOTAL] += gain
        slots[SCHEDULED, slot] = 0
    counters[PASSES] += 1
    counters[PREFILL_TOTAL] += prefill
    return now_s


@njit(cache=True)
def _propose(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    gauges: Floats,
    limits: Limits,
    d: Decoding,
    speculates: bool,
) -> float:
    """Every running request that decodes drafts, if the engine speculates. Returns the seconds that the round takes."""
    proposing, levels = 0, 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        drafts[PROPOSED, slot] = 0
        drafts[DRAFTED, slot] = 0
        drafts[ACCEPTED, slot] = 0
        generated = slots[GENERATED, slot]
        computed = slots[COMPUTED, slot]
        if not speculates or drafts[SOURCE, slot] == NONE or generated == 0:
            continue
        if _known(slots, drafts, slot) - computed != 1:
            continue
        most = limits.kv_blocks * limits.block_size - computed - 1  # else it could not even run alone
        drafted, accepted = draft(
            drafts[SOURCE, slot],
            drafts[AT, slot],
            generated,
            min(drafts[WINDOW, slot], most),
            times[HARDNESS, slot] * gauges[DRIFT],
            d.runs,
            d.log_acceptances,
        )
        drafts[PROPOSED, slot] = 1
        drafts[DRAFTED, slot] = drafted
        drafts[ACCEPTED, slot] = accepted
        proposing += 1
        levels = max(levels, drafted)
    return _draft_s(d, proposing, levels)


@njit(cache=True)
def _draft_s(d: Decoding, proposing: int, levels: int) -> float:
    """Seconds of a round of drafting: so many requests, at most so many tokens each."""
    if proposing == 0:
        return 0.0
    round_s = interpolate(d.draft_sequences, d.round_s, float(proposing))
    return round_s + levels * interpolate(d.draft_sequences, d.step_s, float(proposing))


@njit(cache=True)
def _learn(slots: Ints, drafts: Ints, counters: Ints, gauges: Floats, d: Decoding) -> None:
    """What the pass that is over did to windows, totals and the acceptance of late."""
    rule = window_rule(d.rule)
    proposed, drafted_of_pass, accepted_of_pass = 0, 0, 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        if drafts[PROPOSED, slot] == 0:
            continue
        proposed += 1
        drafted, accepted = drafts[DRAFTED, slot], drafts[ACCEPTED, slot]
        drafts[WINDOW, slot] = next_window(rule, drafts[WINDOW, slot], drafted, accepted)
        drafts[DRAFTED_TOTAL, slot] += drafted
        drafts[ACCEPTED_TOTAL, slot] += accepted
        drafts[VERIFICATIONS, slot] += drafted > 0
        drafted_of_pass += drafted
        accepted_of_pass += accepted
    if proposed > 0:
        remember(gauges, drafted_of_pass, accepted_of_pass)


@njit(cache=True)
def _stretch_length(slots: Ints, drafts: Ints, counters: Ints, limits: Limits) -> int:
    """Passes that surely decode the present batch and nothing else, up to the first stop; 0 if unsure."""
    n = counters[N_RUNNING]
    if n == 0 or n > limits.max_num_batched_tokens:
        return 0
    if (
        n < limits.max_num_batched_tokens
        and _admissible(slots, drafts, counters, limits, limits.max_num_batched_tokens - n) > 0
    ):
        return 0
    # No request needs more than one new block in block_size passes.
    passes = (counters[FREE_BLOCKS] + counters[HELD_BLOCKS]) // n * limits.block_size
    for i in range(n):
        slot = slots[RUNNING, i]
        generated = slots[GENERATED, slot]
        if generated == 0 or slots[PROMPT, slot] + generated - slots[COMPUTED, slot] != 1:
            return 0
        passes = min(passes, min(slots[STOP_AT, slot], slots[WATCH_AT, slot]) - generated)
    return passes


@njit(cache=True)
def _decode_stretch(
    slots: Ints,
    counters: Ints,
    now_s: float,
    tables: Tables,
    limits: Limits,
    slowdown: float,
    passes: int,
    until_s: float,
) -> float:
    """Up to `passes` passes of pure decoding, no further than the first boundary after `until_s`."""
    n = counters[N_RUNNING]
    grid = tables.decode_kv_tokens
    row = np.empty(grid.shape[0])
    interpolate_row(tables.decode_sequences, tables.attention_s[0, 0], float(n), row)
    for j in range(row.shape[0]):
        row[j] *= slowdown
    fixed_s = slowdown * (
        interpolate(tables.dense_tokens, tables.dense_s, float(n))
        + interpolate(tables.sampled_sequences, tables.sampled_s, float(n))
        + tables.between_passes_s
    )
    kv = 0
    for i in range(n):
        kv += slots[COMPUTED, slots[RUNNING, i]] + 1
    mean_kv = kv / n
    last = grid.shape[0] - 1
    cell, _ = locate(grid, mean_kv)
    done = 0
    while done < passes:
        while cell < last - 1 and mean_kv >= grid[cell + 1]:
            cell += 1
        if last == 0 or mean_kv <= grid[0]:
            attention_s = row[0]
        elif mean_kv >= grid[last]:
            attention_s = row[last]
        else:
            slope = (row[cell + 1] - row[cell]) / (grid[cell + 1] - grid[cell])
            attention_s = row[cell] + slope * (mean_kv - grid[cell])
        now_s += fixed_s + attention_s
        mean_kv += 1.0
        done += 1
        if now_s > until_s:
            break
    grown = 0
    for i in range(n):
        slot = slots[RUNNING, i]
        slots[COMPUTED, slot] += done
        slots[GENERATED, slot] += done
        blocks = max(_blocks(slots[COMPUTED, slot], limits.block_size), slots[BLOCKS, slot])
        grown += blocks - slots[BLOCKS, slot]
        slots[BLOCKS, slot] = blocks
    _make_room(slots, counters, grown)
    counters[FREE_BLOCKS] -= grown
    counters[PASSES] += done
    counters[GENERATED_TOTAL] += n * done
    return now_s


@njit(cache=True)
def _speculative_stretch(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    gauges: Floats,
    flags: Ints,
    now_s: float,
    tables: Tables,
    limits: Limits,
    slowdown: float,
    d: Decoding,
    until_s: float,
) -> float:
    """Passes that verify the drafts of the present batch and do nothing else: to the first stop, the first boundary after
    `until_s`, or while there is surely room and the gate is open. At least one; the caller has seen to the room for it.

    What a pass changes is laid out side by side for the batch, and put back at the end.
    """
    n = counters[N_RUNNING]
    size = limits.block_size
    rule = window_rule(d.rule)
    most = rule.most_tokens
    batch = slots[RUNNING, :n].copy()
    source, at, window, generated = (
        drafts[SOURCE][batch],
        drafts[AT][batch],
        drafts[WINDOW][batch],
        slots[GENERATED][batch],
    )
    stop_at = np.minimum(slots[STOP_AT][batch], slots[WATCH_AT][batch])
    end_at = slots[STOP_AT][batch]
    room = slots[BLOCKS][batch] * size - slots[COMPUTED][batch] + generated  # generated tokens that its blocks hold
    before = generated.copy()
    totals = np.zeros((3, n), dtype=np.int64)
    likely = np.empty((n, most))  # P(the first j + 1 tokens of a draft are accepted)
    proposing = 0
    for i in range(n):
        proposing += source[i] != NONE
        if source[i] == MODEL:
            hardness = times[HARDNESS, batch[i]] * gauges[DRIFT]
            for j in range(most):
                likely[i, j] = np.exp(-hardness * d.log_acceptances[j])

    grid = tables.decode_kv_tokens
    row = np.empty(grid.shape[0])
    interpolate_row(tables.decode_sequences, tables.attention_s[0, 0], float(n), row)
    round_s = interpolate(d.draft_sequences, d.round_s, float(proposing))
    step_s = interpolate(d.draft_sequences, d.step_s, float(proposing))
    dense_cell, sampled_cell, kv_cell = 0, 0, 0
    kv = slots[COMPUTED][batch].sum()
    free, roomy = counters[FREE_BLOCKS], n * (_blocks(most + 1, size) + 1)
    done, gained = 0, 0
    stopped = False
    while not stopped and now_s <= until_s:
        if done > 0 and (free < roomy or not gate_opens(d.rule, d.gate_batch, flags, gauges, n)):
            break
        levels, drafted_of_pass, accepted_of_pass, gain_of_pass = 0, 0, 0, 0
        for i in range(n):
            has = generated[i]
            drafted, accepted = 0, 0
            if source[i] == RUNS:
                run = int(d.runs[at[i] + has])
                drafted = min(run & 255, window[i])
                accepted = min(run >> 8, drafted)
            elif source[i] == MODEL:
                drafted = window[i]
                draw = uniform(at[i], has)
                while accepted < drafted and draw < likely[i, accepted]:
                    accepted += 1
            if source[i] != NONE:
                window[i] = next_window(rule, window[i], drafted, accepted)
                if drafted > 0:
                    totals[0, i] += drafted
                    totals[1, i] += accepted
                    totals[2, i] += 1
                    levels = max(levels, drafted)
                    drafted_of_pass += drafted
                    accepted_of_pass += accepted
            if has + 1 + drafted > room[i]:
                blocks = _blocks(has + 1 + drafted - room[i], size)
                free -= blocks
                room[i] += blocks * size
            gain = min(1 + accepted, end_at[i] - has)
            generated[i] = has + gain
            gain_of_pass += gain
            stopped |= has + gain >= stop_at[i]
        tokens = float(n + drafted_of_pass)
        mean_kv = (kv + tokens) / n
        dense_cell = _cell(tables.dense_tokens, tokens, dense_cell)
        sampled_cell = _cell(tables.sampled_sequences, tokens, sampled_cell)
        kv_cell = _cell(grid, mean_kv, kv_cell)
        pass_seconds = (
            _between(tables.dense_tokens, tables.dense_s, tokens, dense_cell)
            + _between(tables.sampled_sequences, tables.sampled_s, tokens, sampled_cell)
            + _between(grid, row, mean_kv, kv_cell)
            + tables.between_passes_s
        )
        if proposing > 0:
            pass_seconds += round_s + levels * step_s
            remember(gauges, drafted_of_pass, accepted_of_pass)
        now_s += slowdown * pass_seconds
        kv += gain_of_pass
        gained += gain_of_pass
        done += 1
    for i in range(n):
        slot = batch[i]
        slots[COMPUTED, slot] += generated[i] - before[i]
        slots[GENERATED, slot] = generated[i]
        slots[BLOCKS, slot] = (room[i] + slots[COMPUTED, slot] - generated[i]) // size
        drafts[WINDOW, slot] = window[i]
        for j in range(3):
            drafts[DRAFTED_TOTAL + j, slot] += totals[j, i]
    counters[FREE_BLOCKS] = free
    counters[PASSES] += done
    counters[GENERATED_TOTAL] += gained
    return now_s


@njit(cache=True)
def _cell(grid: Floats, x: float, cell: int) -> int:
    """The cell of a grid that holds x, found from one nearby."""
    while cell < grid.shape[0] - 2 and x >= grid[cell + 1]:
        cell += 1
    while cell > 0 and x < grid[cell]:
        cell -= 1
    return cell


@njit(cache=True)
def _between(grid: Floats, values: Floats, x: float, cell: int) -> float:
    """`interpolate`, in a cell that is known."""
    last = grid.shape[0] - 1
    if last == 0 or x <= grid[0]:
        return values[0]
    if x >= grid[last]:
        return values[last]
    return values[cell] + (values[cell + 1] - values[cell]) * (x - grid[cell]) / (grid[cell + 1] - grid[cell])


@njit(cache=True)
def run(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    now_s: float,
    dense_tokens: Floats,
    dense_s: Floats,
    sampled_sequences: Floats,
    sampled_s: Floats,
    prefill_tokens: Floats,
    prefill_kv_tokens: Floats,
    decode_sequences: Floats,
    decode_kv_tokens: Floats,
    attention_s: Floats,
    between_passes_s: float,
    bounds: Ints,
    slowdown: float,
    until_s: float,
    to_first_stop: bool,
) -> float:
    """Passes without drafts until the first boundary after `until_s`, a stop (if `to_first_stop`) or nothing to do.

    Returns the boundary reached. What stopped in the last pass is in `slots[STOPPED]`, how in `slots[STOPPED_KIND]`;
    `times` has when each request ended, so a run without `to_first_stop` loses no end. `Tables` and `Limits` come in
    parts: tuples cost more a call.
    """
    tables = Tables(
        dense_tokens,
        dense_s,
        sampled_sequences,
        sampled_s,
        prefill_tokens,
        prefill_kv_tokens,
        decode_sequences,
        decode_kv_tokens,
        attention_s,
        between_passes_s,
    )
    limits = Limits(bounds[0], bounds[1], bounds[2], bounds[3])
    counters[N_STOPPED] = 0
    while now_s <= until_s and (counters[N_RUNNING] > 0 or (counters[N_WAITING] > 0 and counters[ADMITTING] == 1)):
        passes = _stretch_length(slots, drafts, counters, limits)
        if passes > 0:
            now_s = _decode_stretch(slots, counters, now_s, tables, limits, slowdown, passes, until_s)
        else:
            now_s = _iterate(slots, drafts, times, counters, now_s, tables, limits, slowdown, 0.0)
        _stop(slots, times, counters, now_s)
        if to_first_stop and counters[N_STOPPED] > 0:
            break
    return now_s


@njit(cache=True)
def run_speculative(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    gauges: Floats,
    flags: Ints,
    now_s: float,
    dense_tokens: Floats,
    dense_s: Floats,
    sampled_sequences: Floats,
    sampled_s: Floats,
    prefill_tokens: Floats,
    prefill_kv_tokens: Floats,
    decode_sequences: Floats,
    decode_kv_tokens: Floats,
    attention_s: Floats,
    between_passes_s: float,
    bounds: Ints,
    slowdown: float,
    until_s: float,
    to_first_stop: bool,
    rule: Ints,
    runs: NDArray[np.uint16],
    log_acceptances: Floats,
    draft_sequences: Floats,
    round_s: Floats,
    step_s: Floats,
    gate_batch: Ints,
) -> float:
    """The same with drafts."""
    tables = Tables(
        dense_tokens,
        dense_s,
        sampled_sequences,
        sampled_s,
        prefill_tokens,
        prefill_kv_tokens,
        decode_sequences,
        decode_kv_tokens,
        attention_s,
        between_passes_s,
    )
    limits = Limits(bounds[0], bounds[1], bounds[2], bounds[3])
    d = Decoding(rule, runs, log_acceptances, draft_sequences, round_s, step_s, gate_batch)
    most = rule[WINDOW_MOST]
    counters[N_STOPPED] = 0
    while now_s <= until_s and (counters[N_RUNNING] > 0 or (counters[N_WAITING] > 0 and counters[ADMITTING] == 1)):
        n = counters[N_RUNNING]
        speculates = gate_opens(rule, gate_batch, flags, gauges, n)
        passes = _stretch_length(slots, drafts, counters, limits)
        before = counters[PASSES]
        if passes > 0 and not (speculates and _any_source(slots, drafts, counters)):
            if rule[GATE] == ELASTIC and n <= rule[THRESHOLD]:
                passes = min(passes, max(rule[PATIENCE] - flags[CALM_PASSES], 1))
            now_s = _decode_stretch(slots, counters, now_s, tables, limits, slowdown, passes, until_s)
        elif (
            passes > 0
            and n * (1 + most) <= limits.max_num_batched_tokens
            and counters[FREE_BLOCKS] >= n * (_blocks(most + 1, limits.block_size) + 1)
        ):
            now_s = _speculative_stretch(
                slots, drafts, times, counters, gauges, flags, now_s, tables, limits, slowdown, d, until_s
            )
        else:
            draft_s = _propose(slots, drafts, times, counters, gauges, limits, d, speculates)
            now_s = _iterate(slots, drafts, times, counters, now_s, tables, limits, slowdown, draft_s)
            _learn(slots, drafts, counters, gauges, d)
        batch = counters[N_RUNNING]
        _stop(slots, times, counters, now_s)
        if rule[GATE] == ELASTIC:
            _watch_batch(slots, counters, flags, rule, batch, counters[PASSES] - before)
        if to_first_stop and counters[N_STOPPED] > 0:
            break
    return now_s


@njit(cache=True)
def _any_source(slots: Ints, drafts: Ints, counters: Ints) -> bool:
    for i in range(counters[N_RUNNING]):  # noqa: SIM110 (numba)
        if drafts[SOURCE, slots[RUNNING, i]] != NONE:
            return True
    return False


@njit(cache=True)
def _watch_batch(slots: Ints, counters: Ints, flags: Ints, rule: Ints, batch: int, passes: int) -> None:
    """TLT's elastic gate: after enough passes in a row with a small batch, speculation begins with a prefill of the batch."""
    if batch > rule[THRESHOLD]:
        flags[CALM_PASSES] = 0
        flags[SPECULATES] = 0
        return
    flags[CALM_PASSES] += passes
    if flags[SPECULATES] == 0 and flags[CALM_PASSES] >= rule[PATIENCE]:
        flags[SPECULATES] = 1
        drop_caches(slots, counters)


class Engine:
    """The state of one engine in simulated time. A request is known by its slot, an integer that is reused after its end.

    `slowdown` multiplies the duration of every pass from the boundary on at which it is set. With a `decoding` (how it
    drafts), requests that were given a source (`draft_from`) decode with drafts.

    Raises `InputError` for a request that could never fit the KV cache.
    """

    def __init__(self, tables: Tables, limits: Limits, decoding: Decoding | None = None) -> None:
        self._tables = tables
        self._decoding = decoding
        self._bounds = np.array(limits, dtype=np.int64)
        self.limits = limits
        self._capacity_tokens = limits.kv_blocks * limits.block_size
        self.now_s = 0.0
        self.slowdown = 1.0
        self._free_slots: list[int] = []
        self._paused: set[int] = set()
        self._slots = np.zeros((SLOT_ROWS, 0), dtype=np.int64)
        self._drafts = np.zeros((ROWS, 0), dtype=np.int64)
        self._times = np.zeros((TIME_ROWS, 0))
        self._gauges = np.zeros(GAUGES)
        self._gauges[DRIFT] = 1.0
        self._flags = np.zeros(FLAGS, dtype=np.int64)
        self._counters = np.zeros(COUNTERS, dtype=np.int64)
        self._counters[FREE_BLOCKS] = limits.kv_blocks
        self._counters[ADMITTING] = 1
        self._grow(16)

    @property
    def running(self) -> int:
        return self._counters.item(N_RUNNING)

    @property
    def waiting(self) -> int:
        return self._counters.item(N_WAITING)

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that no request holds."""
        return self._counters.item(FREE_BLOCKS)

    @property
    def busy(self) -> bool:
        """Whether a next pass would do something now."""
        return self.running > 0 or (self.waiting > 0 and self.admitting)

    @property
    def admitting(self) -> bool:
        return self._counters.item(ADMITTING) == 1

    @admitting.setter
    def admitting(self, value: bool) -> None:
        self._counters[ADMITTING] = int(value)

    @property
    def generated_total(self) -> int:
        return self._counters.item(GENERATED_TOTAL)

    @property
    def totals(self) -> dict[str, int]:
        """Passes, generated tokens, prefilled tokens (recomputed ones included) and preemptions since the start."""
        names = ("passes", "generated_tokens", "prefill_tokens", "preemptions")
        return dict(zip(names, self._counters[PASSES:COUNTERS].tolist(), strict=True))

    def submit(
        self, prompt_tokens: int, response_tokens: int, generated_tokens: int = 0, cached_tokens: int = 0
    ) -> int:
        """A request joins the queue at this boundary; `generated_tokens` of its response exist and are prefilled.

        The first `cached_tokens` of all these are not computed: their KV came from elsewhere. They take up blocks from the
        request's admission on. Raises ValueError if there is nothing left to generate or nothing to compute.
        """
        if not 0 <= generated_tokens < response_tokens or not 0 <= cached_tokens < prompt_tokens + generated_tokens:
            raise ValueError(
                f"a request of {prompt_tokens} + {response_tokens} tokens with {generated_tokens} generated, "
                f"{cached_tokens} cached"
            )
        if prompt_tokens + response_tokens > self._capacity_tokens:
            raise self._never_fits(prompt_tokens, response_tokens)
        if not self._free_slots:
            self._grow(2 * self._slots.shape[1])
        slot = self._free_slots.pop()
        enqueue(
            self._slots,
            self._times,
            self._counters,
            slot,
            prompt_tokens,
            response_tokens,
            generated_tokens,
            cached_tokens,
        )
        self._drafts[:, slot] = 0
        return slot

    def draft_from(self, slot: int, source: int, at: int, hardness: float = 1.0, window: int | None = None) -> None:
        """From the next pass on, a request drafts from a source (see `simrl.speculation.decoding`), its window as at first."""
        assert self._decoding is not None
        self._drafts[SOURCE, slot] = source
        self._drafts[AT, slot] = at
        self._drafts[WINDOW, slot] = self._decoding.rule[WINDOW_START] if window is None else window
        self._times[HARDNESS, slot] = hardness

    def verify_old(self, slot: int, old_tokens: int, accepted: int) -> None:
        """A request that has nothing yet verifies an old response with its prompt, of which the first tokens stand."""
        room = self._capacity_tokens - self._slots.item(PROMPT, slot) - 1
        self._drafts[OLD_TOKENS, slot] = min(old_tokens, room)
        self._drafts[OLD_ACCEPTED, slot] = min(accepted, room)

    @property
    def drift(self) -> float:
        """What multiplies the hardness of every response: how far the policy is from the drafter."""
        return self._gauges.item(DRIFT)

    @drift.setter
    def drift(self, value: float) -> None:
        self._gauges[DRIFT] = value

    def drafted(self, slot: int) -> tuple[int, int, int]:
        """Of a request, also an ended one until its slot is used again: tokens drafted, accepted, and passes that verified."""
        total: list[int] = self._drafts[DRAFTED_TOTAL : VERIFICATIONS + 1, slot].tolist()
        return total[0], total[1], total[2]

    def stop_at(self, slot: int, tokens: int, kind: int) -> None:
        """Sets the next stop of a request, in place of the one before: the boundary at which it has `tokens` of its response.

        `kind` is PAUSE or WATCH; a request may have one of each. A pause comes at these tokens exactly, a watched token may be
        passed by a draft; where both come at once, the pause is reported. The end comes first: a stop at `response_tokens` or
        later never is. A stop that was reported is over. Raises ValueError for tokens that the request has already.
        """
        generated, response = self._slots.item(GENERATED, slot), self._slots.item(RESPONSE, slot)
        if tokens <= generated:
            raise ValueError(f"a stop at {tokens} tokens of a request that has {generated}")
        if kind == WATCH:
            self._slots[WATCH_AT, slot] = tokens if tokens < response else NEVER
            return
        self._slots[STOP_AT, slot] = min(tokens, response)
        self._slots[STOP_KIND, slot] = kind if tokens < response else END

    def resume(self, slot: int, observation_tokens: int = 0) -> None:
        """A paused request joins the end of the queue, with what is left of its cache; what it was told meanwhile, so many
        tokens, is prefilled. Raises KeyError for a request that is not paused (here: whose pause was not reported)."""
        prompt_tokens = self._slots.item(PROMPT, slot) + observation_tokens
        response_tokens = self._slots.item(RESPONSE, slot)
        if prompt_tokens + response_tokens > self._capacity_tokens:
            raise self._never_fits(prompt_tokens, response_tokens)
        self._paused.remove(slot)
        self._slots[PROMPT, slot] = prompt_tokens
        queue_up(self._slots, self._counters, slot)

    def abort(self, slot: int) -> int:
        """Takes a request out at this boundary. Returns the response tokens it has."""
        _remove(self._slots, self._counters, slot)
        self._paused.discard(slot)
        self._free_slots.append(slot)
        return self.generated_tokens(slot)

    def recompute_running(self) -> None:
        """Every request loses its KV cache, those that are paused or wait too. Running ones recompute it before anything that
        waits, in their order."""
        drop_caches(self._slots, self._counters)

    def generated_tokens(self, slot: int) -> int:
        return self._slots.item(GENERATED, slot)

    def first_token_s(self, slot: int) -> float:
        """When the first token of a request came; of an ended one until its slot is used again."""
        return self._times.item(FIRST_TOKEN, slot)

    def settle(self, time_s: float) -> list[Stop]:
        """Runs to the first boundary strictly after `time_s`; an idle engine is moved to `time_s`.

        Returns what stopped on the way, in order.
        """
        stops: list[Stop] = []
        while self.busy and self.now_s <= time_s:
            self.now_s = self._run(self._state(), time_s, True)
            stops += self._stops()
        if not self.busy:
            self.now_s = max(self.now_s, time_s)
        return stops

    def next_stop_s(self) -> float:
        """When the next request stops if nobody asks for anything before; infinity if none does.

        Changes nothing, but that times of tokens to come may stand in `_times` already; what comes overwrites them.
        """
        if not self.busy:
            return np.inf
        slots, drafts, counters, gauges, flags = self._state()
        self._ahead = (slots.copy(), drafts.copy(), counters.copy(), gauges.copy(), flags.copy())
        self._ahead_s = self._run(self._ahead, np.inf, True)
        return self._ahead_s if self._ahead[2].item(N_STOPPED) else np.inf

    def take_next_stop(self) -> list[Stop]:
        """Moves to the boundary that `next_stop_s` found, and returns what stopped there."""
        self._slots, self._drafts, self._counters, self._gauges, self._flags = self._ahead
        self.now_s = self._ahead_s
        return self._stops()

    def run_until_idle(self) -> Floats:
        """Runs everything that was submitted. Returns when each slot ended, NaN for unused ones, shape (capacity,)."""
        self.now_s = self._run(self._state(), np.inf, False)
        return self._times[LAST_TOKEN].copy()

    def _never_fits(self, prompt_tokens: int, response_tokens: int) -> InputError:
        return InputError(
            f"a sample of {prompt_tokens} + {response_tokens} tokens never fits the KV cache of {self._capacity_tokens} "
            "tokens; use more memory for the cache, a larger tp or a lower cap"
        )

    def _state(self) -> _State:
        return self._slots, self._drafts, self._counters, self._gauges, self._flags

    def _run(self, state: _State, until_s: float, to_first_stop: bool) -> float:
        slots, drafts, counters, gauges, flags = state
        rest = (*self._tables, self._bounds, float(self.slowdown), until_s, to_first_stop)
        now_s: float
        if self._decoding is None:
            now_s = run(slots, drafts, self._times, counters, self.now_s, *rest)  # type: ignore[arg-type]
        else:
            parts = (slots, drafts, self._times, counters, gauges, flags, self.now_s)
            now_s = run_speculative(*parts, *rest, *self._decoding)
        return now_s

    def _stops(self) -> list[Stop]:
        """What stopped in the last pass, now. The slots of ended requests are free again."""
        stops: list[Stop] = []
        for i in range(self._counters.item(N_STOPPED)):  # most often one: plain Python is fastest
            slot, kind = self._slots.item(STOPPED, i), self._slots.item(STOPPED_KIND, i)
            stops.append((slot, self.now_s, kind))
            if kind == END:
                self._free_slots.append(slot)
            elif kind == PAUSE:
                self._paused.add(slot)
        return stops

    def _grow(self, capacity: int) -> None:
        """More slots; the ring of waiting requests is laid out anew from its head."""
        old = self._slots.shape[1]
        slots = np.zeros((SLOT_ROWS, capacity), dtype=np.int64)
        slots[:, :old] = self._slots
        if old:
            slots[WAITING, :old] = np.roll(self._slots[WAITING], -int(self._counters[WAITING_HEAD]))
        self._counters[WAITING_HEAD] = 0
        drafts = np.zeros((ROWS, capacity), dtype=np.int64)
        drafts[:, :old] = self._drafts
        times = np.full((TIME_ROWS, capacity), np.nan)
        times[:, :old] = self._times
        self._slots, self._drafts, self._times = slots, drafts, times
        self._free_slots.extend(range(capacity - 1, old - 1, -1))
