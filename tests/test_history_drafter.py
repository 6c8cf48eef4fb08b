"""Drafting from earlier epochs: over a trace."""

import numpy as np
import pyarrow as pa
import pytest

from simrl.errors import InputError
from simrl.speculation.history import history_runs
from simrl.speculation.history_index import PAPER, PUBLIC_CODE, build_index, draft
from simrl.trace import Trace, TraceMetadata

METADATA = TraceMetadata(name="small", kind="synthetic", source="test", tokenizer="none", cap_tokens=1000)


def trace_of(rows):
    """A trace from (step, epoch, prompt_id, sample, reward, ids) each."""
    step, epoch, prompt, sample, reward, ids = zip(*rows, strict=True)
    columns = {"step": step, "epoch": epoch, "prompt_id": prompt, "sample": sample, "prompt_tokens": [5] * len(rows)}
    columns |= {"reward": reward, "response_tokens": [len(i) for i in ids], "response_ids": list(ids)}
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
                rows.append((epoch, epoch, prompt, sample, float(rng.integers(0, 2)), changed.tolist()))
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
        index = build_index([np.array(r[5]) for r in history], [r[4] for r in history])
        for p in range(len(ids)):
            path = draft(index, np.array(ids[:p]), 32, rule).tolist()
            right = next((k for k, t in enumerate(path) if k >= len(ids) - p or t != ids[p + k]), len(path))
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
        assert np.array_equal(whole.drafted[whole.first[row] :][:15], short.drafted[short.first[row] :][:15])


def test_a_prompt_that_was_absent_in_the_last_epoch_has_nothing_to_draft_from():
    ids = list(range(40))
    rows = [(0, 0, 1, 0, 1.0, ids), (1, 1, 2, 0, 1.0, ids), (2, 2, 1, 0, 1.0, ids), (3, 3, 1, 0, 1.0, ids)]
    assert history_runs(trace_of(rows)).first.tolist() == [-1, -1, -1, 0]
    runs = history_runs(trace_of(rows), epochs_back=2)
    assert runs.first.tolist() == [-1, -1, 0, 40]
    assert runs.accepted[:40].tolist() == [0, 0, 0, *[32] * 6, *range(31, 0, -1)]


def test_rows_without_token_ids_neither_draft_nor_are_drafted_from():
    trace = trace_of([(e, e, 7, s, 1.0, list(range(10))) for e in range(3) for s in range(2)])
    ids = trace.column("response_ids").tolist()
    ids[0] = ids[1] = ids[2] = None
    table = trace.table.set_column(
        trace.table.column_names.index("response_ids"), "response_ids", pa.array(ids, pa.list_(pa.int32()))
    )
    runs = history_runs(Trace.from_columns(dict(zip(table.column_names, table.columns, strict=True)), METADATA))
    assert runs.first.tolist() == [-1, -1, -1, -1, 0, 10]


def test_a_trace_without_token_ids_is_refused():
    trace = trace_of([(0, 0, 0, 0, 1.0, [1, 2])])
    with pytest.raises(InputError, match="no column 'response_ids'"):
        history_runs(Trace(trace.table.drop(["response_ids"]), METADATA))


def test_a_trace_of_one_epoch_gives_no_runs():
    runs = history_runs(trace_of([(0, 0, 0, 0, 1.0, [1, 2])]), threads=2)
    assert runs.first.tolist() == [-1] and len(runs.drafted) == 0
