"""Many passes at once: the rule of `engine.passes.iterate`, faster, for passes that only decode an unchanged batch.

Invariant: the result equals single passes to the last token. Without drafts, only the length of the KV cache changes, so a
pass is one step along an interpolated row of the profile. With drafts, a pass is one loop over the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simrl.engine.requests import (
    NEVER,
    PREEMPTED,
    Limits,
    Requests,
    Totals,
    admissible,
    blocks_of,
    make_room,
    more_blocks,
)
from simrl.profile.compiled import inlined, part
from simrl.profile.interpolation import interpolate, interpolate_row, locate
from simrl.profile.profile import Tables, straggler_s
from simrl.speculation.bandit import BanditState, choose, observe
from simrl.speculation.decoding import (
    MODEL,
    NONE,
    RUNS,
    SIBLINGS,
    Decoding,
    Draft,
    Drafts,
    Floats,
    Ints,
    draft,
    gate_opens,
    remember,
)
from simrl.speculation.draws import uniform
from simrl.speculation.passes import next_window
from simrl.speculation.siblings import SiblingIndex, drawn_is_there, sibling_draft
from simrl.speculation.windows import WindowRule


class Memory(NamedTuple):
    """The memory of drafting beside the requests: the estimates of the bandit; of each row of the trace, who has it
    (`Engine.draft_from`); and room for how many tokens of the rows of a group may be read."""

    bandit: BanditState
    places: Ints
    readable: Ints


LARGEST_COUNTED_BLOCK = 4096  # tokens; with larger ones, passes are counted one by one where blocks are short


@part
def stretch_length(r: Requests, drafts: Drafts, t: Totals, limits: Limits) -> int:
    """Return for how many passes the batch surely decodes and nothing else happens, up to the first stop; 0 if unsure."""
    n = t.n_running
    if n == 0 or n > limits.max_num_batched_tokens or t.n_leaving + t.n_going > 0:
        return 0
    if limits.async_scheduling and t.n_waiting > 0 and r[r[t.waiting_head].waiting].seen_at > t.passes:
        return 0  # the first that waits came too late for the pass to come, but not for the one after
    if admissible(r, drafts, t, limits, limits.max_num_batched_tokens - n) > 0:
        return 0
    if limits.window_groups > 0 and t.n_waiting > 0 and t.n_running < limits.max_num_seqs:
        return 0  # what leaves the windows may let it start
    passes = NEVER
    for i in range(n):
        slot = r[i].running
        generated = r[slot].generated
        if generated == 0 or r[slot].prompt + generated - r[slot].computed != 1:
            return 0
        passes = min(passes, min(r[slot].stop_at, r[slot].watch_at) - generated)
    return min(passes, _passes_with_room(r, t, limits, passes))


@inlined
def _passes_with_room(r: Requests, t: Totals, limits: Limits, enough: int) -> int:
    """Return for how many passes of pure decoding there are blocks, at least; `enough` or more where that is clear at once."""
    n, size = t.n_running, limits.block_size
    # No request needs more than one new block in block_size passes, in any group; what leaves windows is not counted.
    room = (t.free_blocks + t.held_blocks) // (limits.full_groups + limits.window_groups)
    passes = room // n * size
    if passes >= enough or size > LARGEST_COUNTED_BLOCK:
        return passes
    room -= room // n * n
    needs = np.zeros(
        size, np.int64
    )  # how many requests need their next block in the first pass from now on, the second …
    for i in range(n):
        slot = r[i].running
        needs[-r[slot].computed % size] += 1
    for k in range(size):
        room -= needs[k]
        if room < 0:
            return passes + k
    return passes


@inlined
def decode_stretch(r: Requests, t: Totals, tables: Tables, limits: Limits, passes: int, until_s: float) -> None:
    """Run up to `passes` passes of pure decoding, no further than the first boundary after `until_s`."""
    done, now_s = end_of_stretch(r, t, tables, passes, until_s)
    go_to_end(r, t, limits, done, now_s)


@part
def end_of_stretch(r: Requests, t: Totals, tables: Tables, passes: int, until_s: float) -> tuple[int, float]:
    """Return how many passes `decode_stretch` runs, and the boundary after them. Changes nothing."""
    n, slowdown = t.n_running, t.slowdown
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
    lengths = np.empty(n)
    for i in range(n):
        lengths[i] = r[r[i].running].computed + 1
    mean_kv = lengths.sum() / n
    if tables.straggler_sequences.shape[0] > 0:
        fixed_s += slowdown * straggler_s(tables, lengths)  # all gain one token a pass
    last = grid.shape[0] - 1
    cell, _ = locate(grid, mean_kv)
    done = 0
    now_s = t.now_s
    while done < passes:
        while cell < last - 1 and mean_kv >= grid[cell + 1]:
            cell += 1
        now_s += max(fixed_s + along_row(grid, row, mean_kv, cell), least_s)
        mean_kv += 1.0
        done += 1
        if now_s > until_s:
            break
    return done, now_s


@inlined
def along_row(grid: Floats, row: Floats, mean_kv: float, cell: int) -> float:
    """Return a row of the attention's grid at a mean length, which is in that cell unless it is beyond the grid."""
    last = grid.shape[0] - 1
    if last == 0 or mean_kv <= grid[0]:
        return row[0]
    if mean_kv >= grid[last]:
        return row[last]
    slope = (row[cell + 1] - row[cell]) / (grid[cell + 1] - grid[cell])
    return row[cell] + slope * (mean_kv - grid[cell])


@part
def go_to_end(r: Requests, t: Totals, limits: Limits, done: int, now_s: float) -> None:
    """Give the requests what they gain in a stretch of `done` passes up to `now_s`."""
    n, slowdown = t.n_running, t.slowdown
    grown, flying = 0, 1 if limits.async_scheduling and limits.window_groups > 0 else 0
    for i in range(n):
        slot = r[i].running
        if flying > 0 and done > 1:
            r[slot].in_flight = flying
        r[slot].computed += done - 1
        more = more_blocks(r[slot], r[slot].computed + 1, limits)
        r[slot].in_flight = flying
        r[slot].computed += 1
        r[slot].generated += done
        r[slot].gained = 1
        r[slot].rejected = 0
        grown += more
        r[slot].blocks += more
    make_room(r, t, grown, PREEMPTED)
    t.free_blocks -= grown
    t.passes += done
    t.generated_tokens += n * done
    t.decodes += n * done
    unslowed_s = (now_s - t.now_s) / slowdown
    t.decode_s += unslowed_s
    t.slowed_s += now_s - t.now_s - unslowed_s
    t.slot_s += n * (now_s - t.now_s)
    t.now_s = now_s


@part
def speculative_stretch(
    r: Requests, drafts: Drafts, t: Totals, tables: Tables, limits: Limits, d: Decoding, memory: Memory, until_s: float
) -> None:
    """Run passes that verify the drafts of the present batch and do nothing else: to the first stop, the first boundary after
    `until_s`, or while there is surely room and the gate is open. At least one; the caller has seen to the room for it."""
    n, size = t.n_running, limits.block_size
    roomy = n * (blocks_of((1 + t.async_scheduling) * most_drafted(d) + 1, size) + 1)
    proposing, modelled, kv = 0, 0, 0
    for i in range(n):
        slot = r[i].running
        proposing += drafts[slot].source != NONE
        modelled += drafts[slot].source == MODEL
        kv += r[slot].computed
    trees, uneven = d.rule.trees and modelled > 0, tables.straggler_sequences.shape[0] > 0
    chances = Chances(
        np.empty((d.log_acceptances.shape[0], n, d.log_acceptances.shape[1])),
        np.zeros(d.log_acceptances.shape[0], dtype=np.bool_),
    )
    # Arrays of the loop, by name: each use of a tuple's array counts its references.
    dense_tokens, dense_s = tables.dense_tokens, tables.dense_s
    sampled_sequences, sampled_s = tables.sampled_sequences, tables.sampled_s
    kv_tokens, attention_s = tables.decode_kv_tokens, np.empty(tables.decode_kv_tokens.shape[0])
    interpolate_row(tables.decode_sequences, tables.attention_s[0, 0], float(n), attention_s)
    undrafted_s = interpolate(dense_tokens, dense_s, float(n)) + interpolate(sampled_sequences, sampled_s, float(n))
    least_s = tables.least_pass_s + tables.between_passes_s
    round_s, step_s = np.empty(d.round_s.shape[0]), np.empty(d.step_s.shape[0])
    for arm in range(round_s.shape[0]):
        round_s[arm] = interpolate(d.draft_sequences, d.round_s[arm], float(proposing))
        step_s[arm] = interpolate(d.draft_sequences, d.step_s[arm], float(proposing))
    gains, lengths = np.empty(n, dtype=np.int64), np.empty(n)
    runs, window_rule = d.runs, d.rule.window
    dense_cell, sampled_cell, kv_cell, passes, stopped, began_s = 0, 0, 0, 0, False, t.now_s
    while not stopped and t.now_s <= until_s:
        if passes > 0 and (t.free_blocks < roomy or not gate_opens(d.rule, d.gate_batch, t, n)):
            break
        arm = choose(d.bandit, memory.bandit, t.bandit_key, modelled) if trees else 0
        if modelled > 0 and not chances.known[arm]:
            fill_chances(chances, arm, r, drafts, t, d)
        likely = chances.accepted[arm]
        levels = d.arm_levels[arm] if trees else 0
        drafted_of_pass, accepted_of_pass, accepted_of_model = 0, 0, 0
        for i in range(n):
            slot = r[i].running
            source, window = drafts[slot].source, drafts[slot].window
            if source == MODEL:
                drafted = d.arm_nodes[arm] if trees else window
                furthest = min(d.arm_levels[arm], drafted) if trees else drafted
                accepted = accepted_by(drafts[slot].at, r[slot].generated, likely, i, furthest)
                accepted_of_model += accepted
            elif source == SIBLINGS:
                drafted, accepted = draft_from_siblings(r, drafts[slot], r[slot].generated, d, memory, window)
            elif source == RUNS:
                run = int(runs[drafts[slot].at + r[slot].generated])
                drafted = min(run & 255, window)
                accepted = min(run >> 8, drafted)
            else:
                drafted, accepted = 0, 0
            if source != NONE:
                chain = not (trees and source == MODEL)
                count_draft(drafts[slot], window_rule, chain, drafted, accepted, r[slot].stop_at - r[slot].generated)
                levels = max(levels, drafted) if chain else levels
                drafted_of_pass += drafted
                accepted_of_pass += accepted
            beyond = r[slot].computed + r[slot].rejected + 1 + drafted - r[slot].blocks * size
            if beyond > 0:
                t.free_blocks -= blocks_of(beyond, size)
                r[slot].blocks += blocks_of(beyond, size)
            gains[i] = min(1 + accepted, r[slot].stop_at - r[slot].generated)
            r[slot].rejected = 1 + drafted - gains[i] if t.async_scheduling == 1 else 0
        straggler = 0.0
        if uneven:
            for i in range(n):
                lengths[i] = r[r[i].running].computed
            straggler = straggler_s(tables, lengths)
        tokens = float(n + drafted_of_pass)
        mean_kv = (kv + tokens) / n
        dense_cell = _cell(dense_tokens, tokens, dense_cell)
        sampled_cell = _cell(sampled_sequences, tokens, sampled_cell)
        kv_cell = _cell(kv_tokens, mean_kv, kv_cell)
        by_token_s = _between(dense_tokens, dense_s, tokens, dense_cell) + _between(
            sampled_sequences, sampled_s, tokens, sampled_cell
        )
        seconds = by_token_s + _between(kv_tokens, attention_s, mean_kv, kv_cell) + tables.between_passes_s + straggler
        drafts_s = by_token_s - undrafted_s
        if seconds - drafts_s < least_s:  # what the host takes anyway, drafts do not add
            seconds, drafts_s = max(seconds, least_s), max(seconds - least_s, 0.0)
        t.decode_s += seconds - drafts_s
        if proposing > 0:
            drafting_s = round_s[arm] + levels * step_s[arm]
            drafts_s += drafting_s
            seconds += drafting_s
            remember(t, drafted_of_pass, accepted_of_pass)
        share = accepted_of_pass / drafted_of_pass if drafted_of_pass > 0 else 0.0
        t.drafts_accepted_s += share * drafts_s
        t.drafts_rejected_s += (1.0 - share) * drafts_s
        t.slowed_s += (t.slowdown - 1.0) * seconds
        t.now_s += t.slowdown * seconds
        if trees:
            observe(d.bandit, memory.bandit, arm, 1.0 + accepted_of_model / modelled, modelled, t.slowdown * seconds)
        for i in range(n):  # after all drafts, which see the tokens that are there when the pass begins
            slot = r[i].running
            r[slot].computed += gains[i]
            r[slot].generated += gains[i]
            r[slot].gained = gains[i]
            kv += gains[i]
            t.generated_tokens += gains[i]
            stopped |= r[slot].generated >= min(r[slot].stop_at, r[slot].watch_at)
        passes += 1
    t.decodes += n * passes
    t.slot_s += n * (t.now_s - began_s)
    t.passes += passes


@part
def most_drafted(d: Decoding) -> int:
    """Return the most draft tokens that a request brings to a pass."""
    most = d.rule.window.most_tokens
    if d.rule.trees:
        for arm in range(d.arm_nodes.shape[0]):
            most = max(most, d.arm_nodes[arm])
    return most


@part
def read_group(index: SiblingIndex, r: Requests, places: Ints, row: int, own_text: bool, readable: Ints) -> None:
    """Set how many tokens of each row of a row's group may be read now; see `Engine.draft_from` about `places`."""
    first = index.group_first[row]
    for i in range(index.group_end[row] - first):
        place = places[first + i]
        readable[i] = r[place - 1].generated if place > 0 else -place
    if not own_text:
        readable[row - first] = 0


@part
def draft_from_siblings(
    r: Requests, own: Draft, generated: int, d: Decoding, memory: Memory, window: int
) -> tuple[int, int]:
    """Return (drafted, accepted) tokens of a request that has `generated` tokens and drafts from its siblings."""
    read_group(d.siblings, r, memory.places, own.at, d.rule.own_text, memory.readable)
    if own.runs_at < 0:
        return sibling_draft(d.siblings, own.at, generated, memory.readable, window)
    if not drawn_is_there(d.siblings, own.at, generated, memory.readable):
        return 0, 0
    return draft(RUNS, own.runs_at, generated, window, 1.0, d.runs, d.log_acceptances[0])


@inlined
def count_draft(draft: Draft, window_rule: WindowRule, chain: bool, drafted: int, accepted: int, left: int) -> None:
    """Count a verified draft of a request that had `left` tokens to gain; a chain's draft moves the window."""
    if chain:
        draft.window = next_window(window_rule, draft.window, drafted, accepted)
    if drafted > 0:
        draft.drafted_total += drafted
        draft.accepted_total += min(accepted, left)
        draft.verifications += 1
        draft.verified_total += min(1 + accepted, left)


class Chances(NamedTuple):
    """P(the first j + 1 levels of a draft are accepted), shape (arms, batch, levels), of each arm from the pass on that first
    needs it (`known`)."""

    accepted: Floats
    known: Ints


@part
def fill_chances(chances: Chances, arm: int, r: Requests, drafts: Drafts, t: Totals, d: Decoding) -> None:
    """Compute the chances of an arm."""
    chances.known[arm] = True
    for i in range(t.n_running):
        slot = r[i].running
        if drafts[slot].source == MODEL:
            hardness = drafts[slot].hardness * t.drift
            for j in range(d.log_acceptances.shape[1]):
                chances.accepted[arm, i, j] = np.exp(-hardness * d.log_acceptances[arm, j])


@inlined
def accepted_by(key: int, generated: int, chances: Floats, i: int, furthest: int) -> int:
    """Do as `accepted_tokens`, with chances that are known."""
    draw = uniform(key, generated)
    accepted = 0
    while accepted < furthest and draw < chances[i, accepted]:
        accepted += 1
    return accepted


@part
def _between(grid: Floats, values: Floats, x: float, cell: int) -> float:
    """Do as `interpolate`, in a cell that is known."""
    last = grid.shape[0] - 1
    if last == 0 or x <= grid[0]:
        return values[0]
    if x >= grid[last]:
        return values[last]
    return values[cell] + (values[cell + 1] - values[cell]) * (x - grid[cell]) / (grid[cell + 1] - grid[cell])


@part
def _cell(grid: Floats, x: float, cell: int) -> int:
    """Return the cell of a grid that holds x, found from one nearby."""
    while cell < grid.shape[0] - 2 and x >= grid[cell + 1]:
        cell += 1
    while cell > 0 and x < grid[cell]:
        cell -= 1
    return cell
