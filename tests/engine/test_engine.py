"""The compiled engine against the slow reference, and the rules of vLLM V1 that both follow."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.engine.engine import SPENT, one_engine
from simrl.engine.state import END, PAUSE, WATCH, Limits
from simrl.errors import InputError
from simrl.profile.profile import Tables
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.choices import BegMab
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    MODEL,
    NONE,
    OPEN,
    RUNS,
    SIBLINGS,
    Decoding,
    Rule,
    chains,
    packed,
    read_only,
    trees,
)
from simrl.speculation.draft_times import DraftTimes
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.draws import uniform
from simrl.speculation.passes import next_window
from simrl.speculation.siblings import sibling_index
from simrl.speculation.windows import Aimd, Fixed, Mimd
from tests.helpers import examples, limits_of
from tests.references.bandit import BegMabSelector
from tests.references.engine import Arm, ReferenceEngine, Rules
from tests.token_traces import trace_of

SEQUENCES = np.array([0.0, 1, 2, 8, 64])
KV = np.array([0.0, 16, 64, 256, 1024])
CHUNKS = np.array([0.0, 1, 8, 64, 512])


def tables(between_passes_s: float = 1e-3) -> Tables:
    """Grids in which every argument of a pass matters, prefill and decode not merely adding up."""
    chunk, context, sequences, kv = np.meshgrid(CHUNKS, KV, SEQUENCES, KV, indexing="ij")
    attention = (
        1e-7 * chunk * (context + chunk)
        + 3e-7 * sequences * kv
        + 1e-9 * chunk * sequences * np.sqrt(kv + 1)
    )
    return Tables(
        dense_tokens=np.array([1.0, 16, 64, 512]),
        dense_s=np.array([0.005, 0.006, 0.009, 0.04]),
        sampled_sequences=np.array([1.0, 8, 64]),
        sampled_s=np.array([0.001, 0.0015, 0.004]),
        prefill_tokens=CHUNKS,
        prefill_kv_tokens=KV,
        decode_sequences=SEQUENCES,
        decode_kv_tokens=KV,
        attention_s=attention,
        between_passes_s=between_passes_s,
    )


TABLES = tables()
UNEVEN = TABLES._replace(
    straggler_sequences=np.array([2.0, 4, 9]),
    straggler_shares=np.array([0.0, 0.3, 0.6, 1.0]),
    straggler_s=np.array([[0.0, 0, 0, 0], [3e-5, 2e-5, 0, 0], [1e-5, 2e-5, 5e-6, 0]]),
    straggler_beside_prefill_s=np.array([2e-5, 4e-5, 5e-5]),
)
LAUNCHED = UNEVEN._replace(
    least_pass_s=0.0065, least_sequence_s=7e-4
)  # more than most small passes take, and less than the large ones


def request(prompt, response, generated, cached):
    generated = min(generated, response - 1)
    return prompt, response, generated, min(cached, prompt + generated - 1)


requests = st.builds(
    request,
    st.integers(1, 90),
    st.integers(1, 120),
    st.integers(0, 60),
    st.one_of(st.just(0), st.integers(0, 150)),
)
commands = st.lists(
    st.tuples(
        st.floats(0, 0.6),  # seconds since the command before
        st.one_of(
            st.lists(st.tuples(requests, st.integers(0, 40)), min_size=1, max_size=5).map(
                lambda r: ("submit", r)
            ),
            st.integers(0, 30).map(lambda i: ("abort", i)),
            st.sampled_from([0.0, 0.02, 0.3]).map(lambda s: ("load", s)),
            st.booleans().map(lambda on: ("admit", on)),
            st.sampled_from([0.5, 1.0, 2, 5.3]).map(lambda factor: ("slow", factor)),
            st.just(("forget", None)),
            st.tuples(
                st.integers(0, 30), st.integers(1, 60), st.sampled_from([PAUSE, PAUSE, WATCH])
            ).map(lambda s: ("stop", s)),
            st.tuples(st.integers(0, 30), st.integers(0, 40)).map(lambda s: ("resume", s)),
        ),
    ),
    min_size=1,
    max_size=20,
)
limits = st.builds(
    limits_of,
    max_num_seqs=st.integers(1, 12),
    max_num_batched_tokens=st.sampled_from([3, 16, 50, 512]),
    block_size=st.sampled_from([1, 4, 16]),
    kv_blocks=st.integers(210, 600),
    prefix_caching=st.booleans(),
).map(lambda x: x._replace(kv_blocks=-(-x.kv_blocks // x.block_size)))


MOST_POSITIONS = 200  # of a response in these tests


class Drafting(NamedTuple):
    """How the engine and the reference draft, and from what each request does, by its number."""

    key: int
    decoding: Decoding
    rules: Rules
    runs: list[list[tuple[int, int]]]
    sources: list[int]
    hardness: list[float]
    old: list[tuple[int, int]]

    def __repr__(self):
        return f"Drafting(rule={self.decoding.rule}, sources={self.sources}, old={self.old}, hardness={self.hardness})"

    def give(self, engine, slot, reference, request, number):
        """A request of the engine and the reference's draft from the same."""
        i = number % len(self.sources)
        source = self.sources[i]
        request.window = self.rules.start
        if request.generated == 0:
            engine.verify_old(slot, *self.old[i])
            room = reference.limits.kv_blocks * reference.limits.block_size - request.prompt - 1
            request.old_tokens, request.old_accepted = (min(tokens, room) for tokens in self.old[i])
        if source == RUNS:
            engine.draft_from(slot, RUNS, i * MOST_POSITIONS)
            request.runs = self.runs[i]
        elif source == MODEL:
            engine.draft_from(slot, MODEL, i, self.hardness[i])
            request.key, request.hardness = i, self.hardness[i]
        elif source == SIBLINGS:
            engine.draft_from(slot, SIBLINGS, i)
            reference.draft_from_siblings(request, i)


# Of each number of tokens to verify one, two or three strategies.
LEARNT = (
    ((2, 1, 3), (4, 2, 3)),
    ((4, 3, 12), (2, 2, 12), (3, 1, 4)),
    ((6, 2, 16), (2, 1, 4), (3, 1, 4), (5, 1, 4), (2, 2, 8), (4, 2, 8)),
)


class SameDraws:
    """What a selector asks of numpy's generator, from the draws that the kernel makes."""

    def __init__(self, key):
        self.key, self.drawn = key, 0

    def random(self):
        self.drawn += 1
        return uniform(self.key, self.drawn - 1)

    def integers(self, n):
        return int(self.random() * n)


def drafting_s(round_s, step_s):
    return DraftTimes(
        np.array([1.0, 64.0]),
        np.full(2, 1.0 * round_s),
        np.full(2, 1.0 * step_s),
        0,
        0,
        "assumed",
        "a test",
    )


def phrases(rng, tokens):
    """Token ids made of a few phrases, so that much of one response stands in another."""
    few = np.random.default_rng(0).integers(0, 30, (4, 6))
    return few[rng.integers(0, 4, -(-tokens // 6))].ravel()[:tokens]


@st.composite
def draftings(draw):
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    key = int(rng.integers(0, 99))
    n = draw(st.integers(1, 6))
    drafted = rng.integers(0, 9, (n, MOST_POSITIONS))
    accepted = np.minimum(rng.integers(0, 12, (n, MOST_POSITIONS)), drafted)
    runs = AcceptRuns(
        np.arange(n) * MOST_POSITIONS,
        drafted.ravel().astype(np.uint8),
        accepted.ravel().astype(np.uint8),
    )
    window = draw(st.sampled_from([Fixed(tokens=3), Aimd(most_tokens=8), Mimd(most_tokens=8)]))
    acceptance = ModelAcceptance(by_position=(0.8, 0.6))
    strategies = draw(st.sampled_from([(), ((3, 2, 6),), *LEARNT]))
    gate = draw(st.sampled_from([OPEN, BATCH, ELASTIC]))
    threshold, patience = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    gate_batch = np.sort(rng.integers(0, 12, 101))
    own_text = draw(st.booleans())
    groups = [rows for rows in np.split(np.arange(n), [draw(st.integers(0, n))]) if rows.size]
    trace = trace_of(
        {(0, p): [phrases(rng, rng.integers(60, 200)) for _ in g] for p, g in enumerate(groups)}
    )
    siblings = sibling_index(trace)
    round_s, step_s = draw(st.sampled_from([(0.0, 0.0), (2e-4, 0.0), (1e-4, 5e-4)]))
    rule = Rule(gate, window.rule, threshold, patience, own_text=own_text)
    if strategies:
        bandit = BegMab(
            strategies=strategies,
            batch_thresholds=(1, 3, 6)[: len({tokens for _, _, tokens in strategies})],
            epsilon=0.2,
            window=draw(st.sampled_from([3, 50])),
        )
        # Of trees, how fast the acceptance falls does not matter here. No two arms take equally long, so no reward comes twice.
        logs = [acceptance.log_acceptances(s.draft_depth) / s.topk for s in bandit.strategies]
        times = [drafting_s(round_s + 1e-5 * i, step_s) for i in range(len(strategies))]
        decoding = trees(rule, bandit, times, logs)
        selector = BegMabSelector(bandit, SameDraws(key))
        arms = [
            Arm(list(a), t.round_s[0], step_s, s)
            for a, t, s in zip(logs, times, bandit.strategies, strict=True)
        ]
    else:
        decoding = chains(rule, drafting_s(round_s, step_s), acceptance)
        selector, arms = None, [Arm(list(acceptance.log_acceptances(8)), round_s, step_s)]
    decoding = decoding._replace(
        runs=packed(runs), gate_batch=gate_batch, siblings=read_only(siblings)
    )
    rules = Rules(
        start=window.rule.start_tokens,
        window=lambda *now: next_window(window.rule, *now),
        arms=arms,
        bandit=selector,
        gate=(lambda rate, batch: batch <= gate_batch[int(rate * 100 + 0.5)])
        if gate == BATCH
        else None,
        elastic=(threshold, patience) if gate == ELASTIC else None,
        padding=0 if strategies or gate != OPEN else window.rule.most_tokens,
        siblings=siblings,
        own_text=own_text,
    )
    return Drafting(
        key,
        decoding,
        rules,
        [
            list(zip(*rows, strict=True))
            for rows in zip(drafted.tolist(), accepted.tolist(), strict=True)
        ],
        [draw(st.sampled_from([NONE, RUNS, MODEL, SIBLINGS, SIBLINGS])) for _ in range(n)],
        rng.choice([0.3, 1.0, 4.0], n).tolist(),
        [(old, int(rng.integers(0, old + 1))) for old in rng.choice([0, 0, 40], n).tolist()],
    )


@examples(300)
@given(
    limits,
    st.booleans(),
    commands,
    st.one_of(st.none(), draftings()),
    st.sampled_from([TABLES, UNEVEN, LAUNCHED]),
)
def test_every_time_agrees_with_the_reference_whatever_is_asked(
    limits, ahead, commands, drafting, tables
):
    """I25: the engine does as the slow reference."""
    limits = limits._replace(async_scheduling=ahead)
    engine, reference = one_engine(tables, limits), ReferenceEngine(tables, limits)
    if drafting is not None:
        engine, reference = (
            one_engine(tables, limits, drafting.decoding, drafting.key),
            ReferenceEngine(tables, limits),
        )
        reference.rules = drafting.rules
    slots, requests, stops, paused, aborted, clock = {}, [], [], [], [], 0.0

    def note(stopped):
        """Keeps what stopped, by number of request instead of slot."""
        by_slot = {slot: i for i, slot in slots.items()}
        for slot, time_s, kind in stopped:
            stops.append((by_slot[slot], kind, time_s))
            if kind == END:
                first_s = requests[by_slot[slot]].first_token_s
                assert engine.first_token_s(slot) == pytest.approx(first_s, rel=1e-9, nan_ok=True)
                r = requests[by_slot[slot]]
                assert engine.drafted(slot)[:3] == [
                    r.drafted_total,
                    r.accepted_total,
                    r.verifications,
                ]
                assert engine.drafted(slot)[3] == r.verified_total
                del slots[by_slot[slot]]
            elif kind == PAUSE:
                paused.append(by_slot[slot])

    def follow(until_s):
        """As a worker does: take every stop that comes before the next command."""
        while stopped := engine.next_stops(until_s):
            taken.extend(stopped)

    for wait_s, (what, argument) in commands:
        clock += wait_s
        taken = []
        follow(clock)
        taken += engine.settle(clock)
        reference.settle(clock)
        note(taken)
        if what == "submit":
            for request, turn in argument:
                i = len(requests)
                keys = {
                    "prompt_key": request[0],
                    "sample_key": i,
                }  # equal lengths are equal prompts
                slots[i] = engine.submit(*request, **keys)
                requests.append(reference.submit(*request, **keys))
                if drafting is not None:
                    drafting.give(engine, slots[i], reference, requests[i], i)
                if turn:
                    engine.stop_at(slots[i], request[2] + turn, PAUSE)
                    reference.stop_at(requests[i], request[2] + turn, PAUSE)
        elif what == "abort" and slots:
            i = sorted(slots)[argument % len(slots)]
            assert engine.abort(slots.pop(i)) == requests[i].generated
            reference.abort(requests[i])
            aborted.append(i)
            paused = [p for p in paused if p != i]
        elif what == "load":
            engine.recompute_running()
            engine.now_s += argument
            reference.recompute_running()
            reference.now_s += argument
        elif what == "admit":
            engine.admitting = reference.admitting = argument
        elif what == "slow":
            engine.slowdown = reference.slowdown = argument
            engine.drift = reference.drift = 1 / argument
        elif what == "forget":
            engine.forget_rows()
            reference.forget_rows()
        elif what == "stop" and slots:
            i = sorted(slots)[argument[0] % len(slots)]
            tokens = requests[i].generated + argument[1]
            engine.stop_at(slots[i], tokens, argument[2])
            reference.stop_at(requests[i], tokens, argument[2])
        elif what == "resume" and paused:
            i = paused.pop(argument[0] % len(paused))
            room = limits.kv_blocks * limits.block_size - requests[i].prompt - requests[i].response
            engine.resume(slots[i], min(argument[1], room))
            reference.resume(requests[i], min(argument[1], room))
        assert engine.now_s == pytest.approx(reference.now_s, rel=1e-9)
        assert (engine.running, engine.waiting) == (len(reference.running), len(reference.waiting))
        assert engine.free_blocks == reference.free_blocks
    engine.admitting = reference.admitting = True
    while engine.busy or paused:
        for i in paused:
            engine.resume(slots[i])
            reference.resume(requests[i], 0)
        taken, paused = [], []
        follow(float("inf"))
        engine.run_until_idle()  # what is under way with requests that were aborted
        while reference.busy:
            reference.iterate()
        note(taken)

    assert sorted(aborted + [i for i, kind, _ in stops if kind == END]) == list(
        range(len(requests))
    )  # nobody is lost
    assert engine.free_blocks == reference.free_blocks == limits.kv_blocks - sum(reference.leaving)
    assert [s[:2] for s in stops] == [(requests.index(r), kind) for r, _, kind in reference.stops]
    np.testing.assert_allclose(
        [s[2] for s in stops], [time_s for _, time_s, _ in reference.stops], rtol=1e-9
    )
    assert engine.totals == reference.totals


@examples(100)
@given(limits, st.lists(requests, min_size=1, max_size=40))
def test_running_to_the_end_at_once_gives_the_times_of_running_end_by_end(limits, requests):
    """I28: a run may be divided anywhere."""
    at_once, by_end = one_engine(TABLES, limits), one_engine(TABLES, limits)
    slots = [at_once.submit(*r) for r in requests]
    assert slots == [by_end.submit(*r) for r in requests]
    ended_s = {}
    while stopped := by_end.next_stops():
        ended_s.update({slot: time_s for slot, time_s, _ in stopped})
    all_s = at_once.run_until_idle()
    assert {s: all_s[s] for s in slots} == ended_s
    assert at_once.totals == by_end.totals
    assert at_once.totals["generated_tokens"] == sum(r[1] - r[2] for r in requests)


def test_a_request_whose_cache_does_not_fit_is_preempted_and_still_ends():
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, kv_blocks=30)
    engine = one_engine(TABLES, limits)
    for _ in range(3):
        engine.submit(20, 60)
    ended_s = engine.run_until_idle()
    assert np.isfinite(ended_s[np.isfinite(ended_s)]).sum() == 3
    assert engine.totals["preemptions"] > 0
    assert engine.totals["generated_tokens"] == 180
    assert engine.totals["prefill_tokens"] > 60  # what was preempted was computed again


def test_a_sample_longer_than_the_kv_cache_is_refused_with_the_sizes():
    engine = one_engine(TABLES, Limits(4, 64, 4, 30))
    with pytest.raises(InputError, match=r"20 \+ 101 tokens never fits the KV cache of 120 tokens"):
        engine.submit(20, 101)


def test_a_stop_that_is_planned_changes_nothing_before_its_time():
    """I5: to plan a stop is not to run to it."""
    limits = Limits(4, 64, 4, 100)
    planned, plain = one_engine(TABLES, limits), one_engine(TABLES, limits)
    for engine in (planned, plain):
        engine.submit(10, 50)
        engine.submit(30, 20)
    assert planned.next_stops(0.1) == planned.next_stops(0.1) == []
    assert planned.settle(0.1) == plain.settle(0.1)
    assert (planned.now_s, planned.totals) == (plain.now_s, plain.totals)


def test_a_command_reaches_a_busy_engine_strictly_after_its_time_and_an_idle_one_at_once():
    """I1: a command waits for a boundary only at a busy engine."""
    engine = one_engine(TABLES, Limits(4, 64, 4, 100))
    engine.settle(2.0)
    assert engine.now_s == 2.0
    engine.submit(10, 50)
    engine.settle(2.0)
    boundary_s = engine.now_s
    assert boundary_s > 2.0
    engine.settle(boundary_s)
    assert engine.now_s > boundary_s


def test_requests_are_admitted_first_come_first_served():
    engine = one_engine(TABLES, Limits(1, 64, 4, 100))
    first, second = engine.submit(10, 5), engine.submit(10, 1)
    ended_s = engine.run_until_idle()
    assert ended_s[first] < ended_s[second]


def test_a_request_waits_until_its_whole_known_sequence_fits_not_only_its_first_chunk():
    engine = one_engine(
        TABLES, Limits(max_num_seqs=4, max_num_batched_tokens=16, block_size=4, kv_blocks=30)
    )
    first = engine.submit(60, 40)
    engine.settle(0.0)
    second = engine.submit(
        70, 10
    )  # 18 blocks: with the first prompt's 15 never more than 15 are free; a chunk takes 4
    ended_s = engine.run_until_idle()
    assert engine.first_token_s(second) > ended_s[first]
    assert engine.totals["preemptions"] == 0


def test_a_watched_request_is_told_at_exactly_its_token_and_decodes_on():
    limits = Limits(4, 64, 4, 100)
    watched, plain = one_engine(TABLES, limits), one_engine(TABLES, limits)
    for engine in (watched, plain):
        slot, _ = engine.submit(10, 50), engine.submit(20, 60)
    for tokens in (1, 2, 25, 49):
        watched.stop_at(slot, tokens, WATCH)
        assert watched.next_stops() == [(slot, watched.now_s, WATCH)]
        assert watched.generated_tokens(slot) == tokens
    ends_s = plain.run_until_idle()
    assert watched.next_stops() == [(slot, watched.now_s, END)]
    assert watched.now_s == pytest.approx(ends_s[slot], rel=1e-12)


def test_only_the_last_stop_set_counts_and_none_comes_after_the_end():
    engine = one_engine(TABLES, Limits(4, 64, 4, 100))
    slot = engine.submit(10, 20)
    engine.stop_at(slot, 5, WATCH)
    engine.stop_at(slot, 7, WATCH)
    engine.next_stops()
    assert engine.generated_tokens(slot) == 7
    engine.stop_at(slot, 12, WATCH)
    engine.stop_at(slot, 20, WATCH)
    assert [kind for _, _, kind in engine.next_stops()] == [END]
    assert engine.generated_tokens(slot) == 20


def test_a_stop_at_a_token_that_is_there_already_is_refused():
    engine = one_engine(TABLES, Limits(4, 64, 4, 100))
    slot = engine.submit(10, 20, 5)
    with pytest.raises(ValueError, match="a stop at 5 tokens of a request that has 5"):
        engine.stop_at(slot, 5, WATCH)


def paused_at(engine, *requests):
    """Requests (prompt, response, stop), each run alone to its pause, one after the other. Returns their slots."""
    slots = []
    for prompt, response, stop in requests:
        slots.append(engine.submit(prompt, response))
        engine.stop_at(slots[-1], stop, PAUSE)
        assert [stopped[::2] for stopped in engine.next_stops()] == [(slots[-1], PAUSE)]
        assert engine.generated_tokens(slots[-1]) == stop
    return slots


def prefilled(engine, to_stop):
    """Tokens that are prefilled until the next stop."""
    before = engine.totals["prefill_tokens"]
    assert [(slot, kind) for slot, _, kind in engine.next_stops()] == [to_stop]
    return engine.totals["prefill_tokens"] - before


def test_a_paused_request_keeps_its_cache_and_frees_its_slot_in_the_batch():
    engine = one_engine(
        TABLES, Limits(max_num_seqs=1, max_num_batched_tokens=64, block_size=4, kv_blocks=100)
    )
    (slot,) = paused_at(engine, (10, 20, 5))
    assert engine.free_blocks == 100 - 4  # 14 tokens are computed, the 15th is known
    assert not engine.busy
    assert engine.next_stops() == []
    engine.settle(9.0)
    assert engine.now_s == 9.0
    other = engine.submit(8, 3)
    assert prefilled(engine, (other, END)) == 8  # the one place in the batch is free
    engine.resume(slot)
    assert prefilled(engine, (slot, END)) == 0  # nothing is computed again
    assert engine.free_blocks == 100


def test_observation_tokens_are_prefilled_and_are_no_part_of_the_response():
    engine = one_engine(TABLES, Limits(4, 64, 4, 100))
    (slot,) = paused_at(engine, (10, 20, 5))
    engine.resume(slot, 30)
    assert (
        prefilled(engine, (slot, END)) == 31
    )  # with the last token of the response, not computed so far
    assert engine.generated_tokens(slot) == 20
    assert engine.totals["generated_tokens"] == 20


def test_a_resumed_request_waits_behind_those_that_came_before():
    engine = one_engine(TABLES, Limits(1, 64, 4, 100))
    (slot,) = paused_at(engine, (10, 20, 5))
    running, waiting = engine.submit(10, 30), engine.submit(10, 5)
    engine.settle(engine.now_s)
    engine.resume(slot)
    ended_s = engine.run_until_idle()
    assert ended_s[running] < ended_s[waiting] < ended_s[slot]


def test_held_caches_are_evicted_oldest_first_and_before_a_running_request_is_preempted():
    engine = one_engine(TABLES, Limits(4, 64, 4, 30))
    oldest, younger = paused_at(engine, (21, 30, 20), (21, 30, 20))  # 10 blocks each
    running = engine.submit(30, 30)  # 15 blocks in the end
    assert prefilled(engine, (running, END)) == 30
    assert engine.free_blocks == 20  # the oldest is gone, the younger one is there
    assert engine.totals["preemptions"] == 0
    engine.resume(younger)
    assert prefilled(engine, (younger, END)) == 0
    engine.resume(oldest)
    assert prefilled(engine, (oldest, END)) == 41


def test_a_waiting_request_is_admitted_in_place_of_held_caches_but_a_cache_that_waits_is_not_evicted_for_itself():
    engine = one_engine(TABLES, Limits(4, 128, 4, 30))
    first, second = paused_at(engine, (40, 60, 20), (40, 60, 20))  # 15 blocks each: nothing is free
    assert engine.free_blocks == 0
    engine.resume(first, 20)  # the oldest cache, and it needs 5 blocks more: the other one goes
    assert prefilled(engine, (first, END)) == 21
    engine.resume(second)
    assert prefilled(engine, (second, END)) == 60


def test_nothing_is_evicted_for_a_request_that_has_to_wait_anyway():
    engine = one_engine(TABLES, Limits(4, 128, 4, 30))
    (paused,) = paused_at(engine, (12, 40, 5))  # 4 blocks
    running = engine.submit(60, 8)  # 15 blocks: 11 are free then, 15 with the held ones
    engine.submit(64, 4)  # 16 blocks at once
    assert prefilled(engine, (running, END)) == 60
    engine.resume(paused)
    assert engine.totals["preemptions"] == 0
    engine.run_until_idle()
    assert engine.totals["prefill_tokens"] == 12 + 60 + 64


def test_an_aborted_pause_frees_its_blocks():
    engine = one_engine(TABLES, Limits(4, 64, 4, 30))
    paused, waiting = paused_at(engine, (21, 30, 20), (21, 30, 20))
    engine.admitting = False
    engine.resume(waiting)
    assert engine.free_blocks == 10
    assert engine.abort(paused) == 20
    assert engine.free_blocks == 20
    assert engine.abort(waiting) == 20
    assert engine.free_blocks == 30
    assert not engine.busy


def test_a_weight_update_drops_the_caches_of_paused_requests_too():
    engine = one_engine(TABLES, Limits(4, 64, 4, 30))
    (slot,) = paused_at(engine, (21, 30, 20))
    engine.recompute_running()
    assert engine.free_blocks == 30
    engine.resume(slot)
    assert prefilled(engine, (slot, END)) == 41


@pytest.mark.parametrize("kv_blocks", [20, 23, 31, 60])
def test_many_paused_requests_in_little_memory_never_wait_for_one_another_for_ever(kv_blocks):
    """I18: held caches make room."""
    engine = one_engine(
        TABLES, Limits(max_num_seqs=6, max_num_batched_tokens=32, block_size=4, kv_blocks=kv_blocks)
    )
    turns = {}
    for _ in range(40):
        slot = engine.submit(20, 40)
        engine.stop_at(slot, 8, PAUSE)
        turns[slot] = 0
    ended, passes = set(), 0
    resuming = []
    while (stopped := engine.next_stops()) or resuming:
        for slot, _, kind in stopped:
            if kind == END:
                ended.add(slot)
            else:
                resuming.append(slot)
        if len(resuming) > 30 or not engine.busy:  # the environments answer late, and all at once
            for slot in resuming:
                turns[slot] += 1
                engine.resume(slot, 5)
                engine.stop_at(slot, 8 * (turns[slot] + 1), PAUSE)
            resuming = []
        passes += 1
        assert passes < 1000
    assert ended == set(turns)
    assert set(turns.values()) == {4}
    assert engine.totals["generated_tokens"] == 40 * 40
    assert engine.free_blocks == kv_blocks


def test_a_paused_request_that_is_aborted_is_not_resumed():
    for scheduling in (False, True):
        engine = one_engine(TABLES, Limits(4, 64, 4, 30, async_scheduling=scheduling))
        (slot,) = paused_at(engine, (20, 30, 20))
        assert engine.abort(slot) == 20
        with pytest.raises(KeyError):
            engine.resume(slot)
        engine.run_until_idle()
        assert engine.free_blocks == 30


def test_only_a_paused_request_is_resumed_and_only_if_it_still_fits():
    engine = one_engine(TABLES, Limits(4, 64, 4, 30))
    with pytest.raises(KeyError):
        engine.resume(engine.submit(10, 20))
    engine.run_until_idle()
    (slot,) = paused_at(engine, (20, 30, 20))
    with pytest.raises(InputError, match=r"91 \+ 30 tokens never fits"):
        engine.resume(slot, 71)
    engine.resume(slot, 70)
    assert prefilled(engine, (slot, END)) == 71


def test_cached_tokens_are_not_computed_but_take_up_blocks_from_admission_on():
    engine = one_engine(TABLES, Limits(4, 64, 4, 30))
    slot = engine.submit(40, 20, 10, cached_tokens=45)
    assert engine.free_blocks == 30
    engine.settle(0.0)
    assert engine.free_blocks == 30 - 13
    assert engine.totals["prefill_tokens"] == 5
    assert engine.generated_tokens(slot) == 11
    assert engine.first_token_s(slot) != engine.first_token_s(slot)  # it came elsewhere
    engine.run_until_idle()
    assert engine.free_blocks == 30


def test_a_cached_context_makes_the_pass_as_long_as_one_over_that_context():
    cached, computed = (
        one_engine(TABLES, Limits(4, 64, 4, 100)),
        one_engine(TABLES, Limits(4, 64, 4, 100)),
    )
    cached.submit(100, 2, cached_tokens=64)
    computed.submit(100, 2)
    computed.settle(0.0)
    first_chunk_s = computed.now_s
    (_, ended_s, _), (_, computed_s, _) = *cached.next_stops(), *computed.next_stops()
    assert first_chunk_s + ended_s == pytest.approx(computed_s, rel=1e-12)


def test_a_weight_update_makes_a_waiting_request_compute_what_it_has_cached():
    engine = one_engine(TABLES, Limits(4, 64, 4, 30))
    slot = engine.submit(40, 20, cached_tokens=39)
    engine.recompute_running()
    assert prefilled(engine, (slot, END)) == 40


@pytest.mark.parametrize("request_", [(10, 20, 20), (10, 20, 5, 15), (10, 0), (10, 20, 0, -1)])
def test_a_request_with_nothing_to_generate_or_to_compute_is_refused(request_):
    with pytest.raises(ValueError, match=r"a request of 10 \+"):
        one_engine(TABLES, Limits(4, 64, 4, 30)).submit(*request_)


def test_a_slow_engine_takes_so_many_times_as_long_and_does_the_same():
    slow, plain = one_engine(TABLES, Limits(4, 64, 4, 30)), one_engine(TABLES, Limits(4, 64, 4, 30))
    slow.slowdown = 2.5
    for engine in (slow, plain):
        for request_ in ((20, 60), (30, 50), (70, 20), (10, 5)):
            engine.submit(*request_)
    np.testing.assert_allclose(slow.run_until_idle(), 2.5 * plain.run_until_idle(), rtol=1e-12)
    assert slow.totals == plain.totals


def test_a_slowdown_holds_from_the_boundary_on_at_which_it_is_set():
    engine, plain = (
        one_engine(TABLES, Limits(4, 64, 4, 100)),
        one_engine(TABLES, Limits(4, 64, 4, 100)),
    )
    for each in (engine, plain):
        each.submit(10, 50)
        each.settle(0.1)
    set_s = engine.now_s
    engine.slowdown = 3
    (_, slowed_s, _), (_, plain_s, _) = *engine.next_stops(), *plain.next_stops()
    assert slowed_s - set_s == pytest.approx(3 * (plain_s - set_s), rel=1e-12)


# What a pass costs does not depend on the cache here, so speed-ups can be counted.
FLAT = TABLES._replace(attention_s=np.zeros_like(TABLES.attention_s))
ROOMY = Limits(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, kv_blocks=4000)
ROUND_S, STEP_S = 2e-4, 5e-4


def flat_pass_s(sequences, drafted):
    tokens = sequences * (1 + drafted)
    dense_s = np.interp(tokens, FLAT.dense_tokens, FLAT.dense_s)
    return (
        dense_s + np.interp(tokens, FLAT.sampled_sequences, FLAT.sampled_s) + FLAT.between_passes_s
    )


def decode_s(decoding, responses, source=RUNS, tables=FLAT):
    """Requests of 10 tokens from the first token of all to the last one; the engine afterwards."""
    engine = one_engine(tables, ROOMY, decoding)
    slots = [engine.submit(10, response) for response in responses]
    if decoding is not None:
        for slot in slots:
            engine.draft_from(slot, source, 0)
    ended_s = engine.run_until_idle()
    return max(ended_s[slots]) - engine.first_token_s(slots[0]), engine


def always(drafted, accepted, gate=OPEN, **more):
    """Runs of one response for everybody: `drafted` tokens at every place, of which so many are right."""
    runs = AcceptRuns(
        np.zeros(1), np.full(200, drafted, np.uint8), np.full(200, accepted, np.uint8)
    )
    decoding = chains(Rule(gate, Fixed(tokens=drafted).rule), drafting_s(ROUND_S, STEP_S))
    return decoding._replace(runs=packed(runs), **more)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_perfect_drafter_reaches_the_analytical_speed_up(batch):
    plain_s, _ = decode_s(None, [1 + 120] * batch)
    with_drafts_s, engine = decode_s(always(4, 4), [1 + 120] * batch)
    speed_up = 5 * flat_pass_s(batch, 0) / (flat_pass_s(batch, 4) + ROUND_S + 4 * STEP_S)
    assert plain_s / with_drafts_s == pytest.approx(speed_up, rel=1e-12)
    assert engine.drafted(0)[1:3] == [
        96,
        24,
    ]  # 120 tokens = 96 accepted + one more in each of 24 passes


@pytest.mark.parametrize("batch", [1, 5])
def test_a_hopeless_drafter_costs_exactly_its_overhead(batch):
    plain_s, _ = decode_s(None, [1 + 120] * batch)
    with_drafts_s, engine = decode_s(always(4, 0), [1 + 120] * batch)
    overhead_s = flat_pass_s(batch, 4) - flat_pass_s(batch, 0) + ROUND_S + 4 * STEP_S
    assert with_drafts_s - plain_s == pytest.approx(120 * overhead_s, rel=1e-9)
    assert engine.drafted(0)[:3] == [480, 0, 120]


def test_a_gate_turns_a_hopeless_drafter_off_after_its_first_try():
    plain_s, _ = decode_s(None, [1 + 120] * 5)
    pays_from_half = np.where(np.arange(101) >= 50, 64, 0)
    with_drafts_s, engine = decode_s(always(4, 0, BATCH, gate_batch=pays_from_half), [1 + 120] * 5)
    overhead_s = flat_pass_s(5, 4) - flat_pass_s(5, 0) + ROUND_S + 4 * STEP_S
    assert with_drafts_s - plain_s == pytest.approx(overhead_s, rel=1e-9)
    assert engine.drafted(0)[:3] == [4, 0, 1]


def tree(levels, nodes, logs=None, topk=2):
    """A fixed strategy; `logs` are its -ln P(accepted), a hopeless one's by default."""
    bandit = BegMab(strategies=((levels, topk, nodes + 1),), batch_thresholds=(1,))
    logs = np.full(levels, np.inf) if logs is None else logs
    return trees(Rule(), bandit, [drafting_s(ROUND_S, STEP_S)], [logs])


def test_drafts_cost_only_what_a_pass_takes_beyond_its_launch():
    least_s = (
        flat_pass_s(5, 0) + flat_pass_s(5, 8)
    ) / 2  # between a plain pass and one that verifies
    launched = FLAT._replace(least_pass_s=least_s - FLAT.between_passes_s)
    plain_s, _ = decode_s(None, [1 + 120] * 5, tables=launched)
    hopeless_s, engine = decode_s(tree(3, 8), [1 + 120] * 5, MODEL, tables=launched)
    overhead_s = flat_pass_s(5, 8) - least_s + ROUND_S + 3 * STEP_S
    assert hopeless_s - plain_s == pytest.approx(120 * overhead_s, rel=1e-9)
    assert engine.spent[SPENT.index("drafts_rejected_s")] == pytest.approx(
        120 * overhead_s, rel=1e-9
    )


@pytest.mark.parametrize("batch", [1, 5])
def test_a_tree_costs_its_levels_to_draft_and_its_nodes_to_verify(batch):
    plain_s, _ = decode_s(None, [1 + 120] * batch)
    hopeless_s, engine = decode_s(tree(3, 8), [1 + 120] * batch, MODEL)
    overhead_s = flat_pass_s(batch, 8) - flat_pass_s(batch, 0) + ROUND_S + 3 * STEP_S
    assert hopeless_s - plain_s == pytest.approx(120 * overhead_s, rel=1e-9)
    assert engine.drafted(0)[:3] == [120 * 8, 0, 120]


def test_of_a_tree_no_more_than_its_levels_are_accepted():
    perfect_s, engine = decode_s(tree(3, 8, np.zeros(3)), [1 + 120] * 5, MODEL)
    assert perfect_s == pytest.approx(30 * (flat_pass_s(5, 8) + ROUND_S + 3 * STEP_S), rel=1e-9)
    assert engine.drafted(0)[:3] == [30 * 8, 90, 30]


def test_a_bandit_settles_on_the_strategy_that_yields_more_tokens_a_second():
    bandit = BegMab(strategies=((2, 2, 9), (6, 2, 9)), batch_thresholds=(1,), epsilon=0.05)
    deep, shallow = np.zeros(6), np.zeros(2)
    times = [drafting_s(ROUND_S, 1e-5)] * 2
    for better, logs in ((1, [shallow, deep]), (0, [shallow, np.full(6, np.inf)])):
        learnt_s, engine = decode_s(trees(Rule(), bandit, times, logs), [2000], MODEL)
        alone = [
            decode_s(
                trees(Rule(), BegMab(strategies=(s,), batch_thresholds=(1,)), times[:1], [log]),
                [2000],
                MODEL,
            )[0]
            for s, log in zip(bandit.strategies, logs, strict=True)
        ]
        assert alone[better] < learnt_s < 1.1 * alone[better] < alone[1 - better]
        assert engine.generated_tokens(0) == 2000


@examples(50)
@given(limits, st.lists(requests, min_size=1, max_size=12), draftings())
def test_drafts_change_when_tokens_come_never_how_many(limits, requests, drafting):
    """I31: an engine generates as many tokens with drafts as without."""
    engine, reference = (
        one_engine(TABLES, limits, drafting.decoding),
        ReferenceEngine(TABLES, limits),
    )
    slots = [engine.submit(*r) for r in requests]
    for i, (slot, r) in enumerate(zip(slots, requests, strict=True)):
        drafting.give(engine, slot, reference, reference.submit(*r), i)
    ended_s = engine.run_until_idle()
    assert np.isfinite(ended_s[slots]).all()
    assert [engine.generated_tokens(slot) for slot in slots] == [r[1] for r in requests]
    assert engine.totals["generated_tokens"] == sum(r[1] - r[2] for r in requests)


def from_siblings(responses, own_text=False):
    """How an engine decodes the responses, given as token ids, of one group."""
    index = sibling_index(trace_of({(0, 0): [list(ids) for ids in responses]}))
    rule = Rule(window=Fixed(tokens=8).rule, own_text=own_text)
    return chains(rule, drafting_s(ROUND_S, 0.0))._replace(siblings=read_only(index))


def rollout(engine, row, response):
    """One row alone, to its end. Returns its (drafted, accepted, verifications)."""
    slot = engine.submit(10, response)
    engine.draft_from(slot, SIBLINGS, row)
    engine.next_stops()
    drafted, accepted, verifications, _, _ = engine.drafted(slot)
    return drafted, accepted, verifications


def test_a_response_like_its_sibling_s_is_drafted_from_it_until_it_is_forgotten():
    ids = np.arange(100)
    engine = one_engine(TABLES, ROOMY, from_siblings([ids, ids]))
    assert rollout(engine, 0, 100) == (0, 0, 0)  # nobody to draft from, and its own text is not
    # Three tokens come one by one; then nine a pass. Of 97 tokens, ten passes gain 90, the eleventh the rest.
    assert rollout(engine, 1, 100) == (87, 87, 11)
    assert rollout(engine, 1, 100) == (87, 87, 11)  # the same row again
    engine.forget_rows()
    assert rollout(engine, 1, 100) == (0, 0, 0)


def test_what_an_aborted_sibling_had_stays_known():
    ids = np.arange(100)
    engine = one_engine(TABLES, ROOMY, from_siblings([ids, ids]))
    slot = engine.submit(10, 100)
    engine.draft_from(slot, SIBLINGS, 0)
    engine.stop_at(slot, 43, WATCH)
    engine.next_stops()
    assert engine.abort(slot) == 43
    # Of the tokens from the 4th to the 43rd, every ninth comes besides.
    assert rollout(engine, 1, 100)[:2] == (36, 36)


@examples(60)
@given(
    st.integers(0, 10_000),
    st.integers(2, 6),
    st.floats(0.01, 0.8),
    st.integers(0, 1),
    st.sampled_from([16, 512]),
)
def test_what_siblings_will_generate_changes_no_draft(seed, n, until_s, own_text, budget):
    """I32: later tokens of siblings change no draft."""
    rng = np.random.default_rng(seed)
    responses = [phrases(rng, rng.integers(20, 150)) for _ in range(n)]

    def run(ids):
        engine = one_engine(
            TABLES, ROOMY._replace(max_num_batched_tokens=budget), from_siblings(ids, own_text)
        )
        slots = [engine.submit(10, response.size) for response in responses]
        for row, slot in enumerate(slots):
            engine.draft_from(slot, SIBLINGS, row)
        engine.settle(until_s)
        return engine.now_s, [
            (engine.generated_tokens(slot), engine.drafted(slot)) for slot in slots
        ]

    now_s, requests = run(responses)
    poisoned = [
        np.r_[ids[:generated], rng.integers(0, 30, ids.size - generated)]
        for ids, (generated, _) in zip(responses, requests, strict=True)
    ]
    assert run(poisoned) == (now_s, requests)


def test_a_strategy_that_verifies_nothing_is_refused():
    with pytest.raises(InputError, match=r"draft tree \(3, 2, 1\)"):
        tree(3, 0)
