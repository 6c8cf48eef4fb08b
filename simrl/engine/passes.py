"""Forward passes: what vLLM V1 schedules in each, how long it takes, what every request has gained at its end.

Invariant: `iterate` is the rule, one pass, request by request. The two stretches give the same to the last token, faster, for
passes that only decode the same batch: without drafts as a loop over one interpolated row of the profile, with drafts over the
batch laid out side by side.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simrl.engine.state import (
    ADMITTING,
    BLOCKS,
    COMPUTED,
    DECODE_S,
    DECODED,
    FIRST_TOKEN,
    FREE_BLOCKS,
    GENERATED,
    GENERATED_TOTAL,
    HARDNESS,
    HELD_BLOCKS,
    LOST_BY,
    N_LEAVING,
    N_RUNNING,
    N_STOPPED,
    N_WAITING,
    PASSES,
    PREEMPTED_S,
    PREEMPTIONS,
    PREFILL_S,
    PREFILL_TOTAL,
    PROMPT,
    REACHED,
    REDRAFTED_S,
    RUNNING,
    SCHEDULED,
    SEEN_AT,
    SLOWED_S,
    STOOD_S,
    STOP_AT,
    WAITING,
    WAITING_HEAD,
    WASTED_S,
    WATCH_AT,
    Floats,
    Ints,
    Limits,
    admissible,
    blocks_of,
    drop_caches,
    know_all,
    known_tokens,
    make_room,
    preempt_last,
    release,
    stop,
)
from simrl.interpolation import interpolate, interpolate_row, locate
from simrl.profile import Tables, pass_s, straggler_s
from simrl.speculation.bandit_kernel import BanditState, choose, observe
from simrl.speculation.decoding import (
    ACCEPTED,
    ACCEPTED_TOTAL,
    AHEAD,
    AT,
    BANDIT_KEY,
    BATCH,
    DECODES,
    DRAFTED,
    DRAFTED_TOTAL,
    DRAFTING,
    DRIFT,
    ELASTIC,
    ELASTIC_STATE,
    GATE,
    IN_VERIFICATION,
    LEFT,
    MODEL,
    NONE,
    OLD_ACCEPTED,
    OLD_TOKENS,
    OWN_TEXT,
    PATIENCE,
    PROPOSED,
    RUNS,
    SIBLINGS,
    SOURCE,
    THRESHOLD,
    TREES,
    VERIFICATIONS,
    VERIFIED_TOTAL,
    WINDOW,
    WINDOW_MOST,
    Decoding,
    draft,
    gate_opens,
    passes_to_next_try,
    remember,
    window_rule,
)
from simrl.speculation.draws import uniform
from simrl.speculation.gates import ELASTIC_ON, next_elastic
from simrl.speculation.siblings import SiblingIndex, sibling_draft
from simrl.speculation.windows import next_window


@njit(cache=True)
def iterate(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    spent: Floats,
    now_s: float,
    tables: Tables,
    limits: Limits,
    slowdown: float,
    draft_s: float,
) -> float:
    """One pass, scheduled request by request, with drafts of `drafts[DRAFTED]` tokens; where it is -1, a request waits for its
    draft and takes no part. Returns the time at the end."""
    size = limits.block_size
    budget = limits.max_num_batched_tokens
    scheduled = 0
    waits = 0  # running requests without their draft
    preempted = False
    if (
        limits.async_scheduling
        and counters[N_RUNNING] == 0
        and admissible(slots, drafts, counters, limits, budget) == 0
    ):
        know_all(slots, counters)
    while scheduled < counters[N_RUNNING] and budget > 0:
        slot = slots[RUNNING, scheduled]
        if drafts[DRAFTED, slot] < 0:
            waits += 1
            scheduled += 1
            continue
        computed = slots[COMPUTED, slot]
        new = min(known_tokens(slots, drafts, slot) - computed + drafts[DRAFTED, slot], budget)
        need = max(blocks_of(computed + new, size) - slots[BLOCKS, slot], 0)
        if need > counters[FREE_BLOCKS]:  # rare, and the call is dear in a loop over all requests
            make_room(slots, counters, need, PREEMPTED_S)
        while need > counters[FREE_BLOCKS]:
            preempted = True
            counters[PREEMPTIONS] += 1
            if preempt_last(slots, counters, PREEMPTED_S) == slot:
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
    new = 0 if preempted or budget == 0 else admissible(slots, drafts, counters, limits, budget)
    while new > 0:
        slot = slots[WAITING, counters[WAITING_HEAD]]
        counters[WAITING_HEAD] = (counters[WAITING_HEAD] + 1) % slots.shape[1]
        counters[N_WAITING] -= 1
        slots[RUNNING, counters[N_RUNNING]] = slot
        counters[N_RUNNING] += 1
        release(slots, counters, slot)
        need = max(blocks_of(slots[COMPUTED, slot] + new, size) - slots[BLOCKS, slot], 0)
        make_room(slots, counters, need, PREEMPTED_S)
        counters[FREE_BLOCKS] -= need
        slots[BLOCKS, slot] += need
        slots[SCHEDULED, slot] = new
        drafts[PROPOSED, slot] = 0
        drafts[DRAFTED, slot] = 0
        drafts[AHEAD, slot] = 0
        drafts[IN_VERIFICATION, slot] = 0
        drafts[DRAFTING, slot] = 0
        drafts[DECODES, slot] = 0
        budget -= new
        scheduled += 1
        new = admissible(slots, drafts, counters, limits, budget) if budget > 0 else 0

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
    ahead, alone = 0.0, 0.0
    if decoding > 0 and tables.straggler_sequences.shape[0] > 0:
        ahead, alone = _lead(slots, drafts, scheduled + unscheduled)
    seconds = pass_s(
        tables,
        float(query),
        float(scheduled - waits + verified),
        float(prefill),
        prefill_work,
        float(decoding),
        float(decode_kv),
        alone,
    )
    now_s += slowdown * draft_s + slowdown * seconds
    spent[DECODED] += decoding
    spent[SLOWED_S] += (slowdown - 1.0) * (seconds + draft_s)
    if query == decoding:
        spent[DECODE_S] += seconds
        spent[WASTED_S] += draft_s
    else:
        _account(slots, drafts, spent, tables, scheduled + unscheduled, seconds, draft_s, decoding, decode_kv, ahead)
    for i in range(scheduled + unscheduled):
        slot = slots[RUNNING, i]
        new = slots[SCHEDULED, slot]
        slots[COMPUTED, slot] += new
        known = known_tokens(slots, drafts, slot)
        if new > 0 and slots[COMPUTED, slot] == known + drafts[DRAFTED, slot]:
            stands = drafts[ACCEPTED, slot] if drafts[DRAFTED, slot] > 0 else drafts[OLD_ACCEPTED, slot]
            gain = min(1 + stands, slots[STOP_AT, slot] - slots[GENERATED, slot])
            if slots[GENERATED, slot] == 0:
                times[FIRST_TOKEN, slot] = now_s
            slots[GENERATED, slot] += gain
            slots[COMPUTED, slot] = slots[PROMPT, slot] + slots[GENERATED, slot] - 1
            if drafts[OLD_TOKENS, slot] > 0:
                drafts[DRAFTED_TOTAL, slot] += drafts[OLD_TOKENS, slot]
                drafts[ACCEPTED_TOTAL, slot] += min(stands, gain)
                drafts[VERIFICATIONS, slot] += 1
                drafts[VERIFIED_TOTAL, slot] += gain
            drafts[OLD_TOKENS, slot] = 0
            drafts[OLD_ACCEPTED, slot] = 0
            counters[GENERATED_TOTAL] += gain
        slots[SCHEDULED, slot] = 0
    counters[PASSES] += 1
    counters[PREFILL_TOTAL] += prefill
    return now_s


@njit(cache=True)
def _lead(slots: Ints, drafts: Ints, requests: int) -> tuple[float, float]:
    """How many tokens the longest decoding sequence of a pass is longer than their mean; and than a prefill beside it, where
    that is less. Apart from `iterate`'s loop, since most profiles have no use for it."""
    decoding, cached, longest, longest_prefill = 0, 0, 0, 0
    for i in range(requests):
        slot = slots[RUNNING, i]
        new, computed = slots[SCHEDULED, slot], slots[COMPUTED, slot]
        if _decodes(slots, drafts, slot):
            decoding += 1
            cached += computed
            longest = max(longest, computed)
        elif new > 0:
            longest_prefill = max(longest_prefill, computed + new)
    ahead = longest - cached / decoding
    return ahead, min(ahead, float(longest - longest_prefill))


@njit(cache=True)
def _account(
    slots: Ints,
    drafts: Ints,
    spent: Floats,
    tables: Tables,
    requests: int,
    seconds: float,
    draft_s: float,
    decoding: int,
    decode_kv: int,
    straggler_tokens: float,
) -> None:
    """Adds a pass that did more than decode to `spent`, while its requests are as it found them."""
    drafted, stood, prefill = 0, 0, 0
    for i in range(requests):
        slot = slots[RUNNING, i]
        new = slots[SCHEDULED, slot]
        if _decodes(slots, drafts, slot):
            drafted += new - 1
            stood += drafts[ACCEPTED, slot]
        else:
            prefill += new
    decode_s, drafts_s = 0.0, draft_s
    if decoding > 0:
        n = float(decoding)
        decode_s = pass_s(tables, n, n, 0.0, 0.0, n, float(decode_kv), straggler_tokens)
        if drafted > 0:
            positions = n + drafted
            drafts_s += pass_s(tables, positions, positions, 0.0, 0.0, n, float(decode_kv), straggler_tokens) - decode_s
    spent[DECODE_S] += decode_s
    share = stood / drafted if drafted > 0 else 0.0
    spent[STOOD_S] += share * drafts_s
    spent[WASTED_S] += (1.0 - share) * drafts_s
    if prefill == 0:
        return
    token_s = (seconds + draft_s - decode_s - drafts_s) / prefill
    for i in range(requests):
        slot = slots[RUNNING, i]
        new, computed, reached = slots[SCHEDULED, slot], slots[COMPUTED, slot], slots[REACHED, slot]
        if new == 0 or _decodes(slots, drafts, slot):
            continue
        old, stands = 0, 0.0
        if drafts[OLD_TOKENS, slot] > 0:
            old = max(computed + new - max(computed, slots[PROMPT, slot]), 0)
            stands = old * drafts[OLD_ACCEPTED, slot] / drafts[OLD_TOKENS, slot]
        again = min(reached + 1 - computed, new - old) if reached > computed else 0  # with the token that was to decode
        spent[slots[LOST_BY, slot]] += again * token_s
        spent[PREFILL_S] += (new - again - old) * token_s
        spent[STOOD_S] += stands * token_s
        spent[WASTED_S] += (old - stands) * token_s


@njit(cache=True)
def _decodes(slots: Ints, drafts: Ints, slot: int) -> bool:
    """Whether a request decodes in the pass that is scheduled, with drafts or without."""
    new = slots[SCHEDULED, slot]
    return bool(new > 0 and slots[COMPUTED, slot] > 0 and new == 1 + drafts[DRAFTED, slot])


@njit(cache=True)
def _propose(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    gauges: Floats,
    flags: Ints,
    bandit: BanditState,
    limits: Limits,
    d: Decoding,
    places: Ints,
    known: Ints,
    speculates: bool,
) -> tuple[float, int]:
    """Every running request that decodes drafts, if the engine speculates. Returns the seconds that the round takes, and the
    arm of its trees (0 where there are none)."""
    proposing, modelled, levels = 0, 0, 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        drafts[DRAFTED, slot] = 0
        drafts[ACCEPTED, slot] = 0
        decodes = slots[GENERATED, slot] > 0 and known_tokens(slots, drafts, slot) - slots[COMPUTED, slot] == 1
        drafts[PROPOSED, slot] = speculates and decodes and drafts[SOURCE, slot] != NONE
        drafts[LEFT, slot] = slots[STOP_AT, slot] - slots[GENERATED, slot]
        proposing += drafts[PROPOSED, slot]
        modelled += drafts[PROPOSED, slot] == 1 and drafts[SOURCE, slot] == MODEL
    trees = d.rule[TREES] == 1 and modelled > 0
    arm = choose(d.bandit, bandit, flags[BANDIT_KEY], modelled) if trees else 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        if drafts[PROPOSED, slot] == 0:
            continue
        generated = slots[GENERATED, slot]
        most = limits.kv_blocks * limits.block_size - slots[COMPUTED, slot] - 1  # else it could not even run alone
        source, at, window = drafts[SOURCE, slot], drafts[AT, slot], min(drafts[WINDOW, slot], most)
        hardness = times[HARDNESS, slot] * gauges[DRIFT]
        if source == SIBLINGS:
            _read_group(d.siblings, slots, places, at, d.rule[OWN_TEXT] == 1, known)
            drafted, accepted = sibling_draft(d.siblings, at, generated, known, window)
            levels = max(levels, drafted)
        elif source == MODEL and trees:
            depth = d.arm_levels[arm]
            _, reached = draft(source, at, generated, depth, hardness, d.runs, d.log_acceptances[arm])
            drafted = min(d.arm_nodes[arm], most)
            accepted = min(reached, drafted)
            levels = max(levels, depth)
        else:
            drafted, accepted = draft(source, at, generated, window, hardness, d.runs, d.log_acceptances[arm])
            levels = max(levels, drafted)
        drafts[DRAFTED, slot] = drafted
        drafts[ACCEPTED, slot] = accepted
    if proposing == 0:
        return 0.0, arm
    round_s = interpolate(d.draft_sequences, d.round_s[arm], float(proposing))
    return round_s + levels * interpolate(d.draft_sequences, d.step_s[arm], float(proposing)), arm


@njit(cache=True)
def _read_group(index: SiblingIndex, slots: Ints, places: Ints, row: int, own_text: bool, known: Ints) -> None:
    """How many tokens of each row of a row's group may be read now, into `known`; see `Engine.draft_from` about `places`."""
    first = index.group_first[row]
    for i in range(index.group_end[row] - first):
        place = places[first + i]
        known[i] = slots[GENERATED, place - 1] if place > 0 else -place
    if not own_text:
        known[row - first] = 0


@njit(cache=True)
def _learn(
    slots: Ints,
    drafts: Ints,
    counters: Ints,
    gauges: Floats,
    bandit: BanditState,
    d: Decoding,
    arm: int,
    seconds: float,
) -> None:
    """What the pass that is over, in so many seconds, did to windows, totals, the acceptance of late and the bandit."""
    rule = window_rule(d.rule)
    trees = d.rule[TREES] == 1
    proposed, drafted_of_pass, accepted_of_pass, modelled, accepted_of_model = 0, 0, 0, 0, 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        if drafts[PROPOSED, slot] == 0:
            continue
        proposed += 1
        drafted, accepted = drafts[DRAFTED, slot], drafts[ACCEPTED, slot]
        if trees and drafts[SOURCE, slot] == MODEL:
            modelled += 1
            accepted_of_model += accepted
        else:
            drafts[WINDOW, slot] = next_window(rule, drafts[WINDOW, slot], drafted, accepted)
        drafts[DRAFTED_TOTAL, slot] += drafted
        drafts[ACCEPTED_TOTAL, slot] += min(accepted, drafts[LEFT, slot])
        if drafted > 0:
            drafts[VERIFICATIONS, slot] += 1
            drafts[VERIFIED_TOTAL, slot] += min(1 + accepted, drafts[LEFT, slot])
        drafted_of_pass += drafted
        accepted_of_pass += accepted
    if proposed > 0:
        remember(gauges, drafted_of_pass, accepted_of_pass)
    if modelled > 0:
        observe(d.bandit, bandit, arm, 1.0 + accepted_of_model / modelled, modelled, seconds)


@njit(cache=True)
def _unseen(slots: Ints, counters: Ints) -> bool:
    """Whether the first request that waits came too late for the pass to come, but not for the one after."""
    return bool(slots[SEEN_AT, slots[WAITING, counters[WAITING_HEAD]]] > counters[PASSES])


@njit(cache=True)
def stretch_length(slots: Ints, drafts: Ints, counters: Ints, limits: Limits) -> int:
    """Passes that surely decode the present batch and nothing else, up to the first stop; 0 if unsure."""
    n = counters[N_RUNNING]
    if n == 0 or n > limits.max_num_batched_tokens:
        return 0
    if counters[N_LEAVING] > 0 or (limits.async_scheduling and counters[N_WAITING] > 0 and _unseen(slots, counters)):
        return 0
    if (
        n < limits.max_num_batched_tokens
        and admissible(slots, drafts, counters, limits, limits.max_num_batched_tokens - n) > 0
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
    spent: Floats,
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
    least_s = slowdown * (tables.least_pass_s + tables.between_passes_s)
    kv = 0
    for i in range(n):
        kv += slots[COMPUTED, slots[RUNNING, i]] + 1
    mean_kv = kv / n
    if tables.straggler_sequences.shape[0] > 0:
        longest = 0
        for i in range(n):
            longest = max(longest, slots[COMPUTED, slots[RUNNING, i]] + 1)
        fixed_s += slowdown * straggler_s(tables, float(n), False, longest - mean_kv)  # all gain one token a pass
    last = grid.shape[0] - 1
    cell, _ = locate(grid, mean_kv)
    done = 0
    before_s = now_s
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
        now_s += max(fixed_s + attention_s, least_s)
        mean_kv += 1.0
        done += 1
        if now_s > until_s:
            break
    grown = 0
    for i in range(n):
        slot = slots[RUNNING, i]
        slots[COMPUTED, slot] += done
        slots[GENERATED, slot] += done
        blocks = max(blocks_of(slots[COMPUTED, slot], limits.block_size), slots[BLOCKS, slot])
        grown += blocks - slots[BLOCKS, slot]
        slots[BLOCKS, slot] = blocks
    make_room(slots, counters, grown, PREEMPTED_S)
    counters[FREE_BLOCKS] -= grown
    counters[PASSES] += done
    counters[GENERATED_TOTAL] += n * done
    plain_s = (now_s - before_s) / slowdown
    spent[DECODE_S] += plain_s
    spent[SLOWED_S] += now_s - before_s - plain_s
    spent[DECODED] += n * done
    return now_s


@njit(cache=True)
def _speculative_stretch(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    spent: Floats,
    gauges: Floats,
    flags: Ints,
    bandit: BanditState,
    now_s: float,
    tables: Tables,
    limits: Limits,
    slowdown: float,
    d: Decoding,
    places: Ints,
    known: Ints,
    until_s: float,
) -> float:
    """Passes that verify the drafts of the present batch and do nothing else: to the first stop, the first boundary after
    `until_s`, or while there is surely room and the gate is open. At least one; the caller has seen to the room for it.

    What a pass changes is laid out side by side for the batch, and put back at the end.
    """
    n = counters[N_RUNNING]
    size = limits.block_size
    rule = window_rule(d.rule)
    most = most_drafted(d)
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
    totals = np.zeros((4, n), dtype=np.int64)
    proposing, modelled, from_siblings = 0, 0, False
    for i in range(n):
        proposing += source[i] != NONE
        modelled += source[i] == MODEL
        from_siblings |= source[i] == SIBLINGS
    trees = d.rule[TREES] == 1 and modelled > 0
    # P(the first j + 1 levels of a draft are accepted), of each arm from the pass on that first needs it.
    likely = np.empty((d.log_acceptances.shape[0], n, d.log_acceptances.shape[1]))
    is_known = np.zeros(likely.shape[0], dtype=np.bool_)
    round_s, step_s = np.empty(likely.shape[0]), np.empty(likely.shape[0])
    for arm in range(likely.shape[0]):
        round_s[arm] = interpolate(d.draft_sequences, d.round_s[arm], float(proposing))
        step_s[arm] = interpolate(d.draft_sequences, d.step_s[arm], float(proposing))

    uneven = tables.straggler_sequences.shape[0] > 0
    ahead = slots[COMPUTED][batch] - generated  # of a request's generated tokens, its cached ones
    grid = tables.decode_kv_tokens
    row = np.empty(grid.shape[0])
    interpolate_row(tables.decode_sequences, tables.attention_s[0, 0], float(n), row)
    dense_cell, sampled_cell, kv_cell = 0, 0, 0
    kv = slots[COMPUTED][batch].sum()
    plain_s = interpolate(tables.dense_tokens, tables.dense_s, float(n)) + interpolate(
        tables.sampled_sequences, tables.sampled_s, float(n)
    )  # verification makes it longer
    least_s = tables.least_pass_s + tables.between_passes_s
    free, roomy = counters[FREE_BLOCKS], n * (blocks_of(most + 1, size) + 1)
    done, gained = 0, 0
    stopped = False
    while not stopped and now_s <= until_s:
        if done > 0 and (free < roomy or not gate_opens(d.rule, d.gate_batch, flags, gauges, n)):
            break
        if from_siblings:  # all drafts of a pass see the tokens that are there when it begins
            for i in range(n):
                slots[GENERATED, batch[i]] = generated[i]
        arm = choose(d.bandit, bandit, flags[BANDIT_KEY], modelled) if trees else 0
        if modelled > 0 and not is_known[arm]:
            is_known[arm] = True
            for i in range(n):
                if source[i] == MODEL:
                    hardness = times[HARDNESS, batch[i]] * gauges[DRIFT]
                    for j in range(likely.shape[2]):
                        likely[arm, i, j] = np.exp(-hardness * d.log_acceptances[arm, j])
        straggler = 0.0
        if uneven:
            straggler = straggler_s(tables, float(n), False, (ahead + generated).max() - kv / n)
        chances = likely[arm]
        nodes, reach = d.arm_nodes[arm], min(d.arm_levels[arm], d.arm_nodes[arm])
        levels = d.arm_levels[arm] if trees else 0
        drafted_of_pass, accepted_of_pass, accepted_of_model, gain_of_pass = 0, 0, 0, 0
        for i in range(n):
            has = generated[i]
            drafted, accepted = 0, 0
            if source[i] == RUNS:
                run = int(d.runs[at[i] + has])
                drafted = min(run & 255, window[i])
                accepted = min(run >> 8, drafted)
            elif source[i] == MODEL:
                drafted = nodes if trees else window[i]
                draw = uniform(at[i], has)
                furthest = reach if trees else drafted
                while accepted < furthest and draw < chances[i, accepted]:
                    accepted += 1
                accepted_of_model += accepted
            elif source[i] == SIBLINGS:
                _read_group(d.siblings, slots, places, at[i], d.rule[OWN_TEXT] == 1, known)
                drafted, accepted = sibling_draft(d.siblings, at[i], has, known, window[i])
            if source[i] != NONE:
                if not (trees and source[i] == MODEL):
                    window[i] = next_window(rule, window[i], drafted, accepted)
                    levels = max(levels, drafted)
                if drafted > 0:
                    totals[0, i] += drafted
                    totals[1, i] += min(accepted, end_at[i] - has)
                    totals[2, i] += 1
                    totals[3, i] += min(1 + accepted, end_at[i] - has)
                    drafted_of_pass += drafted
                    accepted_of_pass += accepted
            if has + 1 + drafted > room[i]:
                blocks = blocks_of(has + 1 + drafted - room[i], size)
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
        dense_s = _between(tables.dense_tokens, tables.dense_s, tokens, dense_cell)
        sampled_s = _between(tables.sampled_sequences, tables.sampled_s, tokens, sampled_cell)
        pass_seconds = dense_s + sampled_s + _between(grid, row, mean_kv, kv_cell) + tables.between_passes_s + straggler
        drafts_s = dense_s + sampled_s - plain_s
        if pass_seconds - drafts_s < least_s:  # what the host takes anyway, drafts do not add
            pass_seconds, drafts_s = max(pass_seconds, least_s), max(pass_seconds - least_s, 0.0)
        spent[DECODE_S] += pass_seconds - drafts_s
        if proposing > 0:
            drafting_s = round_s[arm] + levels * step_s[arm]
            drafts_s += drafting_s
            pass_seconds += drafting_s
            remember(gauges, drafted_of_pass, accepted_of_pass)
        share = accepted_of_pass / drafted_of_pass if drafted_of_pass > 0 else 0.0
        spent[STOOD_S] += share * drafts_s
        spent[WASTED_S] += (1.0 - share) * drafts_s
        spent[SLOWED_S] += (slowdown - 1.0) * pass_seconds
        now_s += slowdown * pass_seconds
        if trees:
            observe(d.bandit, bandit, arm, 1.0 + accepted_of_model / modelled, modelled, slowdown * pass_seconds)
        kv += gain_of_pass
        gained += gain_of_pass
        done += 1
    for i in range(n):
        slot = batch[i]
        slots[COMPUTED, slot] += generated[i] - before[i]
        slots[GENERATED, slot] = generated[i]
        slots[BLOCKS, slot] = (room[i] + slots[COMPUTED, slot] - generated[i]) // size
        drafts[WINDOW, slot] = window[i]
        for j in range(4):
            drafts[DRAFTED_TOTAL + j, slot] += totals[j, i]
    counters[FREE_BLOCKS] = free
    spent[DECODED] += n * done
    counters[PASSES] += done
    counters[GENERATED_TOTAL] += gained
    return now_s


@njit(cache=True)
def most_drafted(d: Decoding) -> int:
    """Tokens that a request brings to a pass at most, besides the last one."""
    most = d.rule[WINDOW_MOST]
    if d.rule[TREES] == 1:
        for arm in range(d.arm_nodes.shape[0]):
            most = max(most, d.arm_nodes[arm])
    return most


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
    spent: Floats,
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
    straggler_sequences: Floats,
    straggler_seconds: Floats,
    least_pass_s: float,
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
        straggler_sequences,
        straggler_seconds,
        least_pass_s,
    )
    limits = Limits(bounds[0], bounds[1], bounds[2], bounds[3], bounds[4] == 1)
    counters[N_STOPPED] = 0
    while now_s <= until_s and (counters[N_RUNNING] > 0 or (counters[N_WAITING] > 0 and counters[ADMITTING] == 1)):
        passes = stretch_length(slots, drafts, counters, limits)
        if passes > 0:
            now_s = _decode_stretch(slots, counters, spent, now_s, tables, limits, slowdown, passes, until_s)
        else:
            now_s = iterate(slots, drafts, times, counters, spent, now_s, tables, limits, slowdown, 0.0)
        stop(slots, times, counters, limits, now_s)
        if to_first_stop and counters[N_STOPPED] > 0:
            break
    return now_s


@njit(cache=True)
def run_speculative(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    spent: Floats,
    gauges: Floats,
    flags: Ints,
    bandit: BanditState,
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
    straggler_sequences: Floats,
    straggler_seconds: Floats,
    least_pass_s: float,
    bounds: Ints,
    slowdown: float,
    until_s: float,
    to_first_stop: bool,
    d: Decoding,
    places: Ints,
    known: Ints,
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
        straggler_sequences,
        straggler_seconds,
        least_pass_s,
    )
    limits = Limits(bounds[0], bounds[1], bounds[2], bounds[3], bounds[4] == 1)
    rule = d.rule
    most = most_drafted(d)
    counters[N_STOPPED] = 0
    while now_s <= until_s and (counters[N_RUNNING] > 0 or (counters[N_WAITING] > 0 and counters[ADMITTING] == 1)):
        n = counters[N_RUNNING]
        speculates = gate_opens(rule, d.gate_batch, flags, gauges, n)
        passes = stretch_length(slots, drafts, counters, limits)
        passes_before, prefill_before = counters[PASSES], counters[PREFILL_TOTAL]
        if passes > 0 and not (speculates and _any_source(slots, drafts, counters, NONE)):
            if rule[GATE] == ELASTIC and n <= rule[THRESHOLD]:
                passes = min(passes, max(rule[PATIENCE] - flags[ELASTIC_STATE], 1))
            elif rule[GATE] == BATCH and not speculates:
                passes = passes_to_next_try(gauges, passes)
            now_s = _decode_stretch(slots, counters, spent, now_s, tables, limits, slowdown, passes, until_s)
        elif (
            passes > 0
            and n * (1 + most) <= limits.max_num_batched_tokens
            and counters[FREE_BLOCKS] >= n * (blocks_of(most + 1, limits.block_size) + 1)
        ):
            now_s = _speculative_stretch(
                slots,
                drafts,
                times,
                counters,
                spent,
                gauges,
                flags,
                bandit,
                now_s,
                tables,
                limits,
                slowdown,
                d,
                places,
                known,
                until_s,
            )
        else:
            draft_s, arm = _propose(
                slots, drafts, times, counters, gauges, flags, bandit, limits, d, places, known, speculates
            )
            before_s = now_s
            now_s = iterate(slots, drafts, times, counters, spent, now_s, tables, limits, slowdown, draft_s)
            _learn(slots, drafts, counters, gauges, bandit, d, arm, now_s - before_s)
        batch = counters[N_RUNNING]
        stop(slots, times, counters, limits, now_s)
        if rule[GATE] == BATCH and not speculates:
            for _ in range(counters[PASSES] - passes_before):
                remember(gauges, 0, 0)
        if rule[GATE] == ELASTIC and flags[ELASTIC_STATE] != ELASTIC_ON and counters[PREFILL_TOTAL] == prefill_before:
            for _ in range(counters[PASSES] - passes_before):
                flags[ELASTIC_STATE] = next_elastic(flags[ELASTIC_STATE], batch, rule[THRESHOLD], rule[PATIENCE])
            if flags[ELASTIC_STATE] == ELASTIC_ON and _any_source(slots, drafts, counters, MODEL):
                drop_caches(
                    slots, counters, REDRAFTED_S
                )  # a drafter that is a model needs the hidden states of all that runs
        if to_first_stop and counters[N_STOPPED] > 0:
            break
    return now_s


@njit(cache=True)
def _any_source(slots: Ints, drafts: Ints, counters: Ints, source: int) -> bool:
    """Whether a running request drafts from this source (`NONE`: from any)."""
    for i in range(counters[N_RUNNING]):
        own = drafts[SOURCE, slots[RUNNING, i]]
        if own != NONE and (own == source or source == NONE):
            return True
    return False
