"""History workers with too little memory: indexes are compressed or swapped, and brought back."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from simrl.analysis.explanation import explain_result
from simrl.result.result import Result
from simrl.runtime.drafting import IndexBuilders
from simrl.simulate.prepare import prepare
from simrl.speculation.inputs import HistoryWorkers
from simrl.trace.trace import Sample, write_trace
from tests.conservation import assert_nothing_is_lost
from tests.helpers import scenario, watch
from tests.runtime.test_drafting import OPEN, drafts, simulated
from tests.token_traces import random_groups, trace_of

TRACE = random_groups(3, epochs=3)
TIGHT = 16.0 * 520  # bytes: one index of an epoch with what is compressed of the others


def drafted(system: str = "verl_colocated", **history_workers: object) -> Result:
    return simulated(TRACE, OPEN, system, inputs={"history_workers": history_workers})


def tokens(result: Result) -> int:
    return int(result.samples.column("drafted_tokens").to_numpy().sum())


def test_with_room_for_all_indexes_compression_and_swap_change_nothing():
    plain = drafted()
    for moved in ({"compressed_bytes_per_token": 0.9}, {"swap_bytes_per_s": 1e9}):
        other = drafted(**moved)
        for name in ("samples", "segments", "spans", "steps"):
            assert getattr(other, name) == getattr(plain, name)
        assert other.metadata["history"]["out"] == 0


@pytest.mark.parametrize(
    "moved",
    [
        {"compressed_bytes_per_token": 0.9},
        {"swap_bytes_per_s": 1e9},
        {"compressed_bytes_per_token": 0.9, "swap_bytes_per_s": 1e9},
    ],
)
def test_indexes_that_are_out_are_back_in_time_and_draft_as_with_all_the_memory(moved):
    plain, evicted, back = (
        drafted(),
        drafted(memory_bytes=TIGHT),
        drafted(memory_bytes=TIGHT, **moved),
    )
    assert tokens(evicted) < tokens(plain)
    assert drafts(back) == drafts(plain)
    facts = back.metadata["history"]
    assert facts["out"] >= facts["brought_back"] > 0
    assert facts["lost"] == 0
    assert "were put out of the history workers' memory" in str(explain_result(back).history)
    # Without compression and swap, each index that is evicted or not kept is counted, where it shows.
    assert set(evicted.metadata["history"]) == {"lost", "made"}
    assert "history" not in plain.metadata
    explained = explain_result(evicted)
    assert "of 9 were evicted or not kept, as speculation.history_workers.memory_bytes" in str(
        explained.history
    )
    (finding,) = [f for f in explained.findings if f.name == "indexes without room"]
    room = float(finding.remedy.rpartition("memory_bytes=")[2])
    assert drafts(drafted(memory_bytes=room)) == drafts(plain)


def test_slow_ssds_let_responses_wait_and_a_fetch_ahead_hides_some_of_it():
    waits = {}
    for seconds in (0.0, 0.02, 1e9):
        for prefetch in (True, False):
            rate = TIGHT / seconds if seconds else 1e12
            result = drafted(memory_bytes=TIGHT, swap_bytes_per_s=rate, prefetch=prefetch)
            waits[seconds, prefetch] = tokens(result), result.metadata["history"]["waited_s"]
    assert waits[0.0, True][0] == waits[0.0, False][0] == tokens(drafted())
    assert waits[0.02, True][1] < waits[0.02, False][1]
    assert waits[0.02, True][0] >= waits[0.02, False][0] > waits[1e9, False][0]


@settings(max_examples=8, deadline=None)
@given(
    memory=st.floats(200, 2e4),
    compressed=st.none() | st.floats(0.1, 8),
    swap=st.none() | st.floats(1e3, 1e9),
    prefetch=st.booleans(),
    system=st.sampled_from(["verl_colocated", "one_step_off", "rhymerl", "areal"]),
)
def test_whatever_is_out_a_run_is_whole_repeatable_and_generates_the_same_tokens(
    memory, compressed, swap, prefetch, system
):
    inputs = {
        "memory_bytes": memory,
        "compressed_bytes_per_token": compressed,
        "swap_bytes_per_s": swap,
        "prefetch": prefetch,
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        write_trace(TRACE, path)
        one, two = (
            watch(
                prepare(
                    scenario(
                        {"name": system, "speculation": OPEN},
                        steps=len(TRACE.step_slices),
                        workload={"trace": str(path)},
                        speculation={"history_workers": inputs},
                    )
                )
            )
            for _ in range(2)
        )
    assert_nothing_is_lost(one)
    assert one.result.samples == two.result.samples and one.result.spans == two.result.spans


def finished(builders: IndexBuilders, prompt: int, epoch: int, tokens: int, now_s: float) -> None:
    builders.finished(Sample(100 * epoch + prompt, epoch, epoch, prompt, 0, 4), tokens, now_s)


def test_a_fetch_takes_the_reading_the_decompressing_and_the_indexing():
    sizes = HistoryWorkers(
        workers=1,
        tokens_per_s=100.0,
        bytes_per_token=10.0,
        memory_bytes=1500.0,
        compressed_bytes_per_token=2.0,
        codec_tokens_per_s=1000.0,
        swap_bytes_per_s=50.0,
        link_bytes_per_s=1e12,
        prefetch=False,
    )
    builders = IndexBuilders(sizes, trace_of({(e, p): [[0]] for e in range(2) for p in range(2)}))
    finished(builders, 0, 0, 100, 0.0)  # built at 1 s
    finished(builders, 1, 0, 100, 10.0)  # 0 goes out: compressed at 10.1 s, written until 14.1 s
    assert builders.facts["out"] == 1
    # Read until 104 s, then decompressed and indexed.
    back_s = builders.there_s(0, 0, range(1), 100.0, waiter="long")
    assert back_s == pytest.approx(100 + 4 + 0.1 + 1)
    assert builders.there_s(0, 0, range(1), 102.0, waiter="short") == back_s
    builders.ended("short", 103.0)  # before its index is back
    assert builders.there_s(0, 0, range(1), back_s, waiter="long") == pytest.approx(back_s)
    assert builders.there_s(0, 1, range(1), 105.2) == pytest.approx(105.2)  # was never out
    builders.ended("long", 110.0)
    assert builders.facts == {
        "made": 2,
        "out": 1,
        "brought_back": 1,
        "lost": 0,
        "waited": 2,
        "waited_s": pytest.approx(5.1 + 1.0),
        "waiters_s": pytest.approx(10.0 + 1.0),
    }
    finished(builders, 0, 1, 100, 200.0)  # replaces the index that was out; 1 goes out
    assert builders.facts["out"] == 2


def test_a_fetch_ahead_begins_with_the_step_before():
    sizes = HistoryWorkers(
        workers=1, tokens_per_s=1e9, bytes_per_token=10.0, memory_bytes=1500.0, swap_bytes_per_s=100.0, link_bytes_per_s=1e12
    )  # fmt: skip
    trace = trace_of({(e, p): [[0]] for e in range(2) for p in range(2)})
    builders = IndexBuilders(sizes, trace)
    finished(builders, 0, 0, 100, 0.0)
    finished(builders, 1, 0, 100, 0.0)  # 0 is written until 10 s
    builders.there_s(0, 1, range(1), 50.0, (1, 2))
    assert builders.there_s(0, 0, range(1), 57.0, (1, 3)) == pytest.approx(
        60.0
    )  # read from 50 s on
    assert builders.there_s(0, 0, range(1), 61.0, (1, 3)) == pytest.approx(61.0)


def test_an_index_that_finds_no_room_beside_all_that_is_compressed_goes_out_too_if_its_tokens_fit():
    sizes = HistoryWorkers(
        bytes_per_token=10.0, memory_bytes=1000.0, compressed_bytes_per_token=1.0
    )
    builders = IndexBuilders(sizes, trace_of({(0, p): [[0]] for p in range(4)}))
    for prompt, tokens in ((0, 50), (1, 50), (2, 99), (3, 900)):
        finished(builders, prompt, 0, tokens, 0.0)
    assert (builders.facts["out"], builders.facts["lost"]) == (3, 1)
    there = [builders.there_s(0, prompt, range(1), 1e9) for prompt in range(4)]
    there = [builders.there_s(0, prompt, range(1), 2e9) < np.inf for prompt in range(4)]
    assert there == [True, True, True, False]


def test_an_index_that_is_made_anew_is_sent_again_and_one_that_is_out_is_not():
    sizes = HistoryWorkers(
        tokens_per_s=1e9, bytes_per_token=10.0, memory_bytes=1500.0, swap_bytes_per_s=1e9, link_bytes_per_s=100.0
    )  # fmt: skip
    builders = IndexBuilders(sizes, trace_of({(0, 0): [[0]] * 2, (0, 1): [[0]]}))
    one, two = (Sample(i, 0, 0, 0, i, 4) for i in range(2))
    builders.finished(one, 50, 0.0)
    builders.finished(two, None, 0.0)
    assert builders.there_s(0, 0, range(1), 1.0) == pytest.approx(6.0)  # 500 bytes
    finished(builders, 1, 0, 120, 2.0)  # the index of 0 goes out; the host has it
    assert builders.facts["out"] == 1
    assert builders.there_s(0, 0, range(1), 7.0) == pytest.approx(6.0)
    builders.finished(two, 10, 20.0)
    assert builders.there_s(0, 0, range(1), 30.0) == pytest.approx(36.0)  # 600 bytes


def test_a_compressed_token_that_is_larger_than_an_indexed_one_is_refused_in_a_line():
    message = "compressed_bytes_per_token 20 is more than bytes_per_token 16: compressing would"
    with pytest.raises(ValueError, match=message):
        HistoryWorkers(compressed_bytes_per_token=20.0)
