"""Drafting from earlier epochs: for running responses, and over a trace."""

import numpy as np
import pyarrow as pa
import pytest

from simrl.errors import InputError
from simrl.speculation.choices import HistoryRule
from simrl.speculation.history_index import PAPER, PUBLIC_CODE, build_index
from simrl.speculation.trace_runs import history_runs
from simrl.trace.trace import Trace, TraceMetadata
from simrl_replay.history_drafter import HistoryDrafter
from simrl_replay.history_store import HistoryStore
from tests.token_traces import draft

METADATA = TraceMetadata(
    name="small", kind="synthetic", source="test", tokenizer="none", cap_tokens=1000
)


def trace_of(rows):
    """A trace from (step, epoch, prompt_id, sample, reward, ids) each."""
    step, epoch, prompt, sample, reward, ids = zip(*rows, strict=True)
    columns = {
        "step": step,
        "epoch": epoch,
        "prompt_id": prompt,
        "sample": sample,
        "prompt_tokens": [5] * len(rows),
    }
    columns |= {
        "reward": reward,
        "response_tokens": [len(i) for i in ids],
        "response_ids": list(ids),
    }
    return Trace.from_columns(columns, METADATA)


def some_rows(seed=0, epochs=4, prompts=3, group=4):
    """Edited copies of a prompt's phrases; a step is an epoch."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, 50, (prompts, 4, 30))
    rows = []
    for epoch in range(epochs):
        for prompt in range(prompts):
            for sample in range(group):
                ids = phrases[prompt][rng.integers(0, 4, 3)].ravel()[: rng.integers(20, 90)]
                changed = np.where(rng.random(len(ids)) < 0.05, rng.integers(0, 50, len(ids)), ids)
                rows.append(
                    (epoch, epoch, prompt, sample, float(rng.integers(0, 2)), changed.tolist())
                )
    return rows


@pytest.mark.parametrize("rule", [PAPER, PUBLIC_CODE])
@pytest.mark.parametrize("epochs_back", [1, 2])
def test_every_position_drafts_from_the_same_prompts_last_epochs(rule, epochs_back):
    rows = some_rows()
    runs = history_runs(trace_of(rows), rule, epochs_back)
    confirmed = 0
    for row, (_, epoch, prompt, _, _, ids) in enumerate(rows):
        history = [r for r in rows if r[2] == prompt and epoch - epochs_back <= r[1] < epoch]
        if not history:
            assert runs.first[row] == -1
            continue
        tail = rule.prompt_tail
        index = build_index([np.r_[tail, r[5]] for r in history], [r[4] for r in history])
        for p in range(len(ids)):
            path = draft(index, np.r_[tail, ids[:p]], 32, rule).tolist()
            right = next(
                (k for k, t in enumerate(path) if k >= len(ids) - p or t != ids[p + k]), len(path)
            )
            at = runs.first[row] + p
            assert (runs.drafted[at], runs.accepted[at]) == (len(path), right)
            confirmed += right
    assert confirmed > 1000
    assert len(runs.drafted) == len(runs.accepted) == sum(len(r[5]) for r in rows if r[1] > 0)


def test_threads_and_windows_change_no_draft():
    trace = trace_of(some_rows(seed=1))
    runs = history_runs(trace)
    for other in (history_runs(trace, threads=2), history_runs(trace, most_tokens=32)):
        assert all(np.array_equal(a, b) for a, b in zip(runs, other, strict=True))
    cut = history_runs(trace, most_tokens=5)
    assert np.array_equal(cut.drafted, np.minimum(runs.drafted, 5))
    assert np.array_equal(cut.accepted, np.minimum(runs.accepted, 5))


def test_nothing_of_this_epoch_or_a_later_one_or_of_another_prompt_is_looked_at():
    rows = some_rows(seed=2)
    poisoned = []
    for step, epoch, prompt, sample, reward, ids in rows:
        if (epoch, prompt, sample) == (1, 0, 0) or (epoch, prompt) == (0, 0):
            poisoned.append((step, epoch, prompt, sample, reward, ids))
        else:
            poisoned.append((step, epoch, prompt, sample, -reward, [99] * len(ids)))
    row = next(i for i, r in enumerate(rows) if r[1:4] == (1, 0, 0))
    before, after = (history_runs(trace_of(r)) for r in (rows, poisoned))
    size = len(rows[row][5])
    for name in ("drafted", "accepted"):
        old, new = (getattr(runs, name)[runs.first[row] :][:size] for runs in (before, after))
        assert np.array_equal(old, new) and old.any()


def test_what_is_drafted_does_not_depend_on_what_comes_after():
    rows = some_rows(seed=3, epochs=2, prompts=1)
    cut = [(*r[:5], r[5][:15]) if r[1] == 1 else r for r in rows]
    whole, short = (history_runs(trace_of(r)) for r in (rows, cut))
    for row in range(4, 8):
        assert np.array_equal(
            whole.drafted[whole.first[row] :][:15], short.drafted[short.first[row] :][:15]
        )


def test_a_prompt_that_was_absent_in_the_last_epoch_has_nothing_to_draft_from():
    ids = list(range(40))
    rows = [
        (0, 0, 1, 0, 1.0, ids),
        (1, 1, 2, 0, 1.0, ids),
        (2, 2, 1, 0, 1.0, ids),
        (3, 3, 1, 0, 1.0, ids),
    ]
    assert history_runs(trace_of(rows)).first.tolist() == [-1, -1, -1, 0]
    runs = history_runs(trace_of(rows), epochs_back=2)
    assert runs.first.tolist() == [-1, -1, 0, 40]
    assert runs.accepted[:40].tolist() == [0, 0, 0, *[32] * 6, *range(31, 0, -1)]


def test_rows_without_token_ids_neither_draft_nor_are_drafted_from():
    trace = trace_of([(e, e, 7, s, 1.0, list(range(10))) for e in range(3) for s in range(2)])
    ids = trace.column("response_ids").tolist()
    ids[0] = ids[1] = ids[2] = None
    table = trace.table.set_column(
        trace.table.column_names.index("response_ids"),
        "response_ids",
        pa.array(ids, pa.list_(pa.int32())),
    )
    runs = history_runs(
        Trace.from_columns(dict(zip(table.column_names, table.columns, strict=True)), METADATA)
    )
    assert runs.first.tolist() == [-1, -1, -1, -1, 0, 10]


def test_a_trace_without_token_ids_is_refused():
    trace = trace_of([(0, 0, 0, 0, 1.0, [1, 2])])
    with pytest.raises(InputError, match="no column 'response_ids'"):
        history_runs(Trace(trace.table.drop(["response_ids"]), METADATA))


def test_a_trace_of_one_epoch_gives_no_runs():
    runs = history_runs(trace_of([(0, 0, 0, 0, 1.0, [1, 2])]), threads=2)
    assert runs.first.tolist() == [-1] and len(runs.drafted) == 0


def test_a_draft_may_begin_from_the_prompts_tail_and_matches_across_it():
    # Nothing is generated yet, or too little for a match: without the tail there is no draft before the third token.
    rows = [(0, 0, 1, 0, 1.0, [10, 11, 12, 13, 14]), (1, 1, 1, 0, 1.0, [10, 11, 12, 13, 14])]
    alone, with_tail = (
        history_runs(trace_of(rows)),
        history_runs(trace_of(rows), HistoryRule(prompt_tail_tokens=5)),
    )
    assert alone.accepted.tolist() == [0, 0, 0, 2, 1]
    assert with_tail.accepted.tolist() == [5, 4, 3, 2, 1]


def learnt(rows, epoch, rule=PAPER, **parameters):
    """A store that has an epoch of these rows."""
    store = HistoryStore(**parameters)
    for prompt in {r[2] for r in rows}:
        group = [r for r in rows if r[1:3] == (epoch, prompt)]
        store.learn(
            prompt, epoch, [np.r_[rule.prompt_tail, r[5]] for r in group], [r[4] for r in group]
        )
    store.wait()
    return store


@pytest.mark.parametrize("rule", [PAPER, PUBLIC_CODE])
def test_running_responses_get_the_drafts_that_a_trace_says(rule):
    rows = some_rows(seed=4, epochs=2)
    trace = trace_of(rows)
    runs = history_runs(trace, rule)
    rng = np.random.default_rng(0)
    drafter = HistoryDrafter(learnt(rows, 0, rule), rule)
    running = {row: 0 for row, r in enumerate(rows) if r[1] == 1}
    for row in running:
        drafter.start_request(row, rows[row][2])
    while running:
        requests = list(running)
        most = rng.integers(0, 33, len(requests)).tolist()
        for row, asked, path in zip(requests, most, drafter.propose(requests, most), strict=True):
            ids, done = rows[row][5], running[row]
            at = runs.first[row] + done
            assert len(path) == min(asked, runs.drafted[at])
            right = min(asked, int(runs.accepted[at]))
            assert path[:right].tolist() == ids[done : done + right]
            yielded = ids[done : done + right + 1]
            drafter.observe(row, np.array(yielded, dtype=np.int32))
            running[row] += len(yielded)
            if running[row] == len(ids):
                drafter.stop_request(row)
                del running[row]


def test_requests_come_and_go_and_never_see_each_other():
    ids = list(range(100, 140))
    rows = [(0, 0, 1, 0, 1.0, ids), (0, 0, 2, 0, 1.0, ids[::-1])]
    drafter = HistoryDrafter(learnt(rows, 0))
    for round_of in range(3):
        for request in range(20):
            drafter.start_request(request, 1 + request % 2)
            drafter.observe(
                request, np.array(rows[request % 2][5][: 3 + request // 2], dtype=np.int32)
            )
        requests = list(range(20))[::-1]
        for request, path in zip(
            requests, drafter.propose(requests, [2 + round_of] * 20), strict=True
        ):
            begin = 3 + request // 2
            assert path.tolist() == rows[request % 2][5][begin : begin + 2 + round_of]
        for request in range(20):
            drafter.stop_request(request)
    drafter.start_request(0, 1)
    assert drafter.propose([0], [32])[0].size == 0  # nothing is left of who had the place before


def test_unknown_prompts_short_histories_and_empty_responses_get_no_draft():
    with HistoryStore() as store:
        store.learn(1, 0, [])
        store.learn(2, 0, [[], [5]])
        store.wait()
        drafter = HistoryDrafter(store)
        for request, prompt in enumerate((1, 2, 77)):
            drafter.start_request(request, prompt, np.array([1, 2, 3], dtype=np.int32))
            drafter.observe(request, np.array([], dtype=np.int32))
        assert [path.size for path in drafter.propose([0, 1, 2], [32] * 3)] == [0, 0, 0]
        for request in range(3):
            drafter.observe(request, np.array([5, 6, 7, 8], dtype=np.int32))
        assert [path.size for path in drafter.propose([0, 1, 2], [32, -1, 0])] == [0, 0, 0]
        assert drafter.propose([], []) == []


def test_an_index_that_comes_late_is_used_from_then_on():
    ids = list(range(50))
    rows = [(0, 0, p, 0, 1.0, ids) for p in range(4)]
    size = learnt(rows[:1], 0).memory_bytes
    with learnt(rows, 0, memory_bytes=2 * size, compress=True) as store:
        drafter = HistoryDrafter(store)
        evicted = next(p for p in range(4) if not store.ready(p, 0))
        drafter.start_request(0, evicted)
        drafter.observe(0, np.array(ids[:5], dtype=np.int32))
        store.wait()
        assert drafter.propose([0], [3])[0].tolist() == [5, 6, 7]


def test_what_a_response_drafts_from_is_settled_when_it_starts():
    rows = [(0, 0, 1, 0, 1.0, list(range(50)))]
    with learnt(rows, 0) as store:
        drafter = HistoryDrafter(store)
        drafter.start_request(0, 1)
        drafter.store.learn(1, 1, [[*range(10), *range(90, 99)]])
        store.wait()
        drafter.start_request(1, 1)
        for request in (0, 1):
            drafter.observe(request, np.arange(10, dtype=np.int32))
        assert [path.tolist() for path in drafter.propose([0, 1], [2, 2])] == [[10, 11], [90, 91]]


def test_what_a_caller_does_wrong_is_told():
    drafter = HistoryDrafter(HistoryStore())
    drafter.start_request(3, 1)
    with pytest.raises(ValueError, match="3 runs already"):
        drafter.start_request(3, 1)
    with pytest.raises(ValueError, match="4 does not run"):
        drafter.propose([3, 4], [1, 1])
    with pytest.raises(ValueError, match="2 most_tokens for 1 requests"):
        drafter.propose([3], [1, 1])
    with pytest.raises(ValueError, match="-1 is below 0"):
        drafter.observe(3, np.array([5, -1], dtype=np.int32))
