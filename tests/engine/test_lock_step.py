"""Data-parallel ranks in lock step: against slow Python ranks, and what must hold of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.engine.engine import SPENT, Engine, one_engine
from simrl.engine.state import END, PAUSE, WATCH, Limits
from simrl.profile.profile import Tables
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.decoding import ELASTIC, MODEL, SIBLINGS, Rule, chains, read_only
from simrl.speculation.siblings import sibling_index
from simrl.speculation.windows import Fixed
from tests.engine.test_engine import LAUNCHED, TABLES, UNEVEN, drafting_s, draftings, requests
from tests.helpers import examples, limits_of
from tests.references.lock_step import ReferenceLockStep
from tests.token_traces import trace_of


def with_experts(tables: Tables) -> Tables:
    return tables._replace(
        expert_tokens=np.array([1.0, 8, 64, 4096]), experts_s=np.array([0.002, 0.003, 0.004, 0.09])
    )


GRIDS = [with_experts(tables) for tables in (TABLES, UNEVEN, LAUNCHED)]
ROOMY = Limits(
    max_num_seqs=64,
    max_num_batched_tokens=512,
    block_size=16,
    kv_blocks=400,
    dp=4,
    graph_tokens=128,
)
commands = st.lists(
    st.tuples(
        st.floats(0, 0.5),
        st.one_of(
            st.lists(requests, min_size=1, max_size=7).map(lambda r: ("submit", r)),
            st.integers(0, 30).map(lambda i: ("abort", i)),
            st.just(("load", None)),
            st.booleans().map(lambda on: ("admit", on)),
            st.sampled_from([0.5, 1.0, 5.3]).map(lambda factor: ("slow", factor)),
            st.tuples(st.integers(0, 30), st.integers(1, 60), st.sampled_from([PAUSE, WATCH])).map(
                lambda s: ("stop", s)
            ),
            st.tuples(st.integers(0, 30), st.integers(0, 20)).map(lambda s: ("resume", s)),
        ),
    ),
    min_size=1,
    max_size=16,
)
limits = st.builds(
    limits_of,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.sampled_from([3, 16, 50, 512]),
    block_size=st.sampled_from([1, 4, 16]),
    kv_blocks=st.integers(220, 600),
    async_scheduling=st.booleans(),
    prefix_caching=st.booleans(),
    dp=st.integers(1, 4),
    graph_tokens=st.sampled_from([0, 4, 64]),
    prefill_interval=st.sampled_from([1, 1, 3, 10]),
    watermark_blocks=st.sampled_from([0, 0, 5]),
).map(lambda x: x._replace(kv_blocks=-(-x.kv_blocks // x.block_size)))


@examples(60)
@given(
    st.sampled_from(GRIDS),
    limits,
    commands,
    st.one_of(st.none(), draftings().filter(lambda d: d.decoding.rule.gate != ELASTIC)),
)
def test_ranks_do_what_slow_ranks_do(tables, limits, commands, drafting):
    """I30: ranks do as the slow reference, with drafts and without."""
    engine, slow = one_engine(tables, limits), ReferenceLockStep(tables, limits)
    if drafting is not None:
        engine = one_engine(tables, limits, drafting.decoding, drafting.key)
        slow = ReferenceLockStep(tables, limits, drafting.rules)
    pairs, paused = [], set()

    def compare(stops):
        slots = {id(request): slot for slot, request in pairs}
        found = sorted((slot, round(s, 9), kind) for slot, s, kind in stops)
        assert found == sorted(
            (slots[id(request)], round(s, 9), kind) for request, s, kind in slow.stops
        )
        assert engine.now_s == pytest.approx(slow.now_s, rel=1e-9)
        paused.update(id(request) for request, _, kind in slow.stops if kind == PAUSE)
        for rank in slow.ranks:
            rank.stops = []
        pairs[:] = [(slot, request) for slot, request in pairs if not request.over]

    for after_s, (what, value) in commands:
        time_s = engine.now_s + after_s
        slow.settle(time_s)
        compare(engine.settle(time_s))
        some = pairs[value % len(pairs)] if what == "abort" and pairs else None
        if what == "submit":
            for lengths in value:
                named = {
                    "prompt_key": lengths[0],
                    "sample_key": slow.submitted,
                }  # equal lengths are equal prompts
                number = slow.submitted
                pairs.append((engine.submit(*lengths, **named), slow.submit(*lengths, **named)))
                if drafting is not None:
                    slot, request = pairs[-1]
                    drafting.give(engine, slot, slow.rank_of(request), request, number)
        elif some:
            pairs.remove(some)
            assert engine.abort(some[0]) == some[1].generated
            slow.rank_of(some[1]).abort(some[1])
        elif what == "load":
            engine.recompute_running()
            for rank in slow.ranks:
                rank.recompute_running()
        elif what == "admit":
            engine.admitting = value
            for rank in slow.ranks:
                rank.admitting = value
        elif what == "slow":
            engine.slowdown = slow.slowdown = value
        elif what == "stop" and pairs:
            slot, request = pairs[value[0] % len(pairs)]
            if request.generated < value[1] and id(request) not in paused:
                engine.stop_at(slot, value[1], value[2])
                slow.rank_of(request).stop_at(request, value[1], value[2])
        elif what == "resume" and paused:
            resting = [(slot, request) for slot, request in pairs if id(request) in paused]
            if resting:
                slot, request = resting[value[0] % len(resting)]
                engine.resume(slot, value[1])
                slow.rank_of(request).resume(request, value[1])
                paused.remove(id(request))
    engine.admitting = True
    for rank in slow.ranks:
        rank.admitting = True
    while engine.busy:
        slow.settle(
            engine.now_s * (1 + 1e-12)
        )  # both add alike, but not in one order: a pass may end an ulp later
        compare(engine.settle(engine.now_s))
    for rank, other in enumerate(slow.ranks):
        assert {name: of_ranks(engine, name)[rank] for name in other.totals} == other.totals


@examples(30)
@given(
    st.sampled_from(GRIDS),
    limits,
    st.lists(requests, min_size=1, max_size=30),
    st.one_of(st.none(), draftings().filter(lambda d: d.decoding.rule.gate != ELASTIC)),
)
def test_nothing_is_lost_and_the_seconds_of_a_mean_rank_sum_to_the_clock(
    tables, limits, lengths, drafting
):
    """I15: the seconds of a mean rank sum to the clock, those of drafting and of a drafter's prefill among them."""
    decoding = drafting and drafting.decoding._replace(prefill_s=1e-5)
    engine, to_the_end = (one_engine(tables, limits, decoding) for _ in range(2))
    for each in (engine, to_the_end):
        slots = [each.submit(*request) for request in lengths]
        for i, slot in enumerate(slots if drafting else ()):
            each.draft_from(slot, MODEL, i)
    to_the_end.run_until_idle()
    assert len(set(slots)) == len(slots)
    stopped = engine.settle(1e9)
    ended = [slot for slot, _, kind in stopped if kind == END]
    assert sorted(ended) == sorted(slots)
    assert engine.generated_total == sum(
        response - generated for _, response, generated, _ in lengths
    )
    if not limits.async_scheduling:  # else it does not know yet that the last ones have ended
        assert engine.free_blocks == limits.dp * limits.kv_blocks
    last_s = max(ended_s for _, ended_s, _ in stopped)
    if (
        decoding is None or not limits.async_scheduling
    ):  # else a pass may follow that is scheduled already
        assert to_the_end.now_s == last_s
    seconds = engine.spent[: SPENT.index("decodes")]
    assert (seconds >= -1e-9).all()
    assert seconds.sum() == pytest.approx(to_the_end.now_s, rel=1e-9)


def ran(engine: Engine, *lengths: tuple[int, int]) -> float:
    """The seconds in which an engine runs these requests."""
    for each in lengths:
        engine.submit(*each)
    return engine.settle(1e9)[-1][1]


def of_ranks(engine: Engine, name: str) -> list[float]:
    """A total of each rank."""
    return engine.fleet.t[name].tolist()


def waited_s(engine: Engine) -> list[float]:
    return of_ranks(engine, "lock_step_s")


def test_an_idle_rank_makes_dummy_passes_as_long_as_those_of_the_others():
    engine = one_engine(GRIDS[0], ROOMY._replace(dp=2))
    seconds = ran(engine, (10, 50))
    assert of_ranks(engine, "passes") == [50, 50]
    assert of_ranks(engine, "generated_tokens") == [50, 0]
    assert waited_s(engine)[1] == pytest.approx(seconds)
    assert engine.totals["passes"] == 50
    assert engine.running == engine.waiting == 0


def test_a_request_at_an_idle_rank_waits_for_the_dummy_pass_and_with_async_scheduling_for_the_next():
    for ahead, passes in ((False, 1), (True, 2)):
        engine = one_engine(GRIDS[0], ROOMY._replace(dp=2, async_scheduling=ahead))
        engine.submit(10, 50)
        engine.settle(0.05)
        before, began_s = engine.totals["passes"], engine.now_s
        slot = engine.submit(10, 1)
        ((stopped, ended_s, _),) = [stop for stop in iter_stops(engine) if stop[0] == slot]
        assert slot % 2 == 1
        assert stopped == slot
        assert engine.totals["passes"] == before + passes
        assert ended_s > began_s


def iter_stops(engine: Engine) -> list[tuple[int, float, int]]:
    return engine.next_stops()


def test_unequal_ranks_are_slower_than_equal_ones_with_the_same_requests():
    limits = ROOMY._replace(dp=2, graph_tokens=0)
    equal, unequal = one_engine(GRIDS[0], limits), one_engine(GRIDS[0], limits)
    equal_s = ran(equal, *[(500, 300)] * 2, *[(20, 300)] * 2)
    unequal_s = ran(unequal, *[(500, 300), (20, 300)] * 2)
    assert unequal_s > equal_s
    assert sum(waited_s(equal)) == pytest.approx(0, abs=1e-9)
    long, short = waited_s(unequal)
    assert short > long + 0.01


def test_ranks_are_padded_to_the_largest_while_that_has_a_cuda_graph():
    lengths = [(1, 40), (1, 2)] * 20
    padded_s, plain_s = (
        ran(one_engine(GRIDS[0], ROOMY._replace(dp=2, graph_tokens=n)), *lengths) for n in (64, 0)
    )
    assert padded_s > plain_s


def test_experts_see_the_tokens_of_all_ranks():
    one, two = (one_engine(GRIDS[0], ROOMY._replace(dp=dp)) for dp in (1, 2))
    one_s, two_s = ran(one, *[(4, 100)] * 8), ran(two, *[(4, 100)] * 16)
    t = GRIDS[0]
    experts_s = [np.interp(n, t.expert_tokens, t.experts_s) for n in (8, 16)]
    assert two_s - one_s == pytest.approx(100 * (experts_s[1] - experts_s[0]), rel=0.1)


def test_new_requests_go_round_equal_ranks_and_then_where_fewest_are_unfinished():
    engine = one_engine(GRIDS[0], ROOMY)
    assert [engine.submit(10, 10 if i % 4 == 2 else 200) % 4 for i in range(8)] == [0, 1, 2, 3] * 2
    engine.settle(0.5)
    assert engine.running == 6
    assert [engine.submit(10, 200) % 4 for _ in range(4)] == [2, 2, 2, 3]


def test_slots_keep_their_numbers_when_room_grows_and_two_runs_are_equal():
    runs = []
    for _ in range(2):
        engine = one_engine(GRIDS[1], ROOMY)
        slots = [engine.submit(10 + i % 7, 5 + 3 * (i % 11)) for i in range(200)]
        assert [engine.generated_tokens(slot) for slot in slots] == [0] * 200
        runs.append((engine.settle(1e9), engine.spent.tobytes()))
    assert runs[0] == runs[1]


def drafting_ranks(prefill_s: float = 0.0, **changes: int) -> Engine:
    """An engine of two ranks whose model drafts 3 tokens in 5 ms, all of which are accepted."""
    decoding = chains(
        Rule(window=Fixed(tokens=3).rule),
        drafting_s(2e-3, 1e-3),
        ModelAcceptance(by_position=(1 - 1e-9,), spread=0.0),
    )._replace(prefill_s=prefill_s)
    return one_engine(GRIDS[0], ROOMY._replace(dp=2, **changes), decoding)


def test_all_ranks_wait_for_the_one_that_drafts():
    engine = drafting_ranks(graph_tokens=0)
    drafts, plain = engine.submit(10, 41), engine.submit(10, 41)
    engine.draft_from(drafts, MODEL, 0)
    stops = {slot: time_s for slot, time_s, _ in engine.settle(1e9)}
    assert engine.drafted(drafts)[2] == 10, "a token with the prompt, then four a pass"
    assert stops[drafts] < stops[plain]
    assert waited_s(engine)[plain % 2] > 10 * 5e-3
    assert of_ranks(engine, "passes") == [41, 41]


def test_ranks_are_padded_to_the_drafted_tokens_of_the_largest():
    ends = []
    for graph_tokens in (0, 64):
        engine = drafting_ranks(graph_tokens=graph_tokens)
        for rank in range(2):
            slot = engine.submit(10, 401)
            if rank == 0:
                engine.draft_from(slot, MODEL, 0)
        ends.append(engine.settle(1e9)[0][1])
    assert ends[1] > ends[0]


def test_a_drafter_that_prefills_lets_the_other_ranks_wait():
    with_prefill, without = drafting_ranks(prefill_s=1e-3), drafting_ranks()
    for engine in (with_prefill, without):
        engine.draft_from(engine.submit(100, 2), MODEL, 0)
        engine.draft_from(engine.submit(10, 2), MODEL, 1)
    ends = [engine.settle(1e9)[-1][1] for engine in (with_prefill, without)]
    assert ends[0] - ends[1] == pytest.approx(100 * 1e-3)
    waited = np.subtract(waited_s(with_prefill), waited_s(without))
    assert sorted(waited) == pytest.approx([0.0, 90 * 1e-3])


def test_a_rank_drafts_from_the_siblings_that_it_has():
    index = sibling_index(trace_of({(0, 0): [list(np.arange(60) % 7) for _ in range(3)]}))
    decoding = chains(
        Rule(window=Fixed(tokens=3).rule), drafting_s(0.0, 0.0), ModelAcceptance(by_position=(0.5,))
    )._replace(siblings=read_only(index))

    def accepted(dp: int) -> int:
        engine = one_engine(GRIDS[0], ROOMY._replace(dp=dp), decoding)
        slots = []
        for row in range(2):
            slots.append(engine.submit(10, 60))
            engine.draft_from(slots[-1], SIBLINGS, row)
            engine.settle(engine.now_s + 0.2 * (row == 0))
        engine.settle(1e9)
        return engine.drafted(slots[1])[1]

    assert accepted(1) > 0
    assert accepted(2) == 0, "its sibling is at the other rank"
