"""Drafts from the other responses of a group."""

import time

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.speculation.siblings import (
    sibling_draft,
    sibling_index,
    sibling_runs,
    whole_response_runs,
)
from simrl.trace.trace import Trace
from simrl_replay.sibling_drafter import SiblingDrafter
from tests.token_traces import METADATA, random_groups, trace_of


def test_a_draft_is_what_a_sibling_went_on_with():
    index = sibling_index(trace_of({(0, 0): [[1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 5, 8]]}))
    assert sibling_draft(index, 1, 4, np.array([6, 0]), 32) == (3, 2), (
        "4 5 6 after 1 2 3; 4 5 are right"
    )
    assert sibling_draft(index, 1, 4, np.array([6, 0]), 2) == (2, 2)
    assert sibling_draft(index, 1, 3, np.array([6, 0]), 32) == (0, 0), "9 1 2 stands nowhere else"


def test_a_draft_ends_with_what_the_sibling_has_generated_so_far():
    index = sibling_index(trace_of({(0, 0): [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]}))
    for known in range(7):
        drafted = max(known - 3, 0)
        assert sibling_draft(index, 1, 3, np.array([known, 0]), 32) == (drafted, drafted)


def test_the_place_that_agrees_furthest_back_wins_over_the_latest():
    old, young = [8, 7, 1, 2, 3, 4, 9, 9, 9], [5, 5, 1, 2, 3, 6, 9, 9, 9]
    index = sibling_index(trace_of({(0, 0): [[8, 7, 1, 2, 3, 4], old, young]}))
    known = np.array([0, 9, 9])
    assert sibling_draft(index, 0, 5, known, 1) == (1, 1)


def test_a_response_drafts_from_its_own_text_only_where_it_is_told_to():
    index = sibling_index(trace_of({(0, 0): [[1, 2, 3, 4, 5, 1, 2, 3, 4, 6]]}))
    assert sibling_draft(index, 0, 8, np.array([0]), 32) == (0, 0)
    assert sibling_draft(index, 0, 8, np.array([8]), 32) == (5, 1)
    assert sibling_draft(index, 0, 8, np.array([10]), 32) == (5, 1), (
        "what is not generated yet stays unread"
    )


@pytest.mark.parametrize("own", [False, True])
def test_what_is_not_generated_yet_changes_no_draft(own: bool):
    rng = np.random.default_rng(1)
    trace = random_groups(0, prompts=1)
    responses = trace.table.column("response_ids").to_pylist()
    index = sibling_index(trace)
    for _ in range(200):
        known = np.array([rng.integers(0, len(ids) + 1) for ids in responses])
        row = int(rng.integers(len(responses)))
        generated = int(rng.integers(0, len(responses[row])))
        known[row] = generated if own else 0
        cut = [ids[:k] for ids, k in zip(responses, known, strict=True)]
        cut[row] = responses[row][:generated]
        poisoned = [
            ids + rng.integers(0, 30, len(whole) - len(ids)).tolist()
            for ids, whole in zip(cut, responses, strict=True)
        ]
        poisoned[row][generated:] = responses[row][
            generated:
        ]  # only whether it is confirmed depends on it
        other = sibling_index(trace_of({(0, 0): poisoned}))
        assert sibling_draft(other, row, generated, known, 32) == sibling_draft(
            index, row, generated, known, 32
        )


@pytest.mark.parametrize("own", [False, True])
def test_both_forms_draft_the_same(own: bool):
    rng = np.random.default_rng(2)
    trace = random_groups(3, prompts=2)
    index = sibling_index(trace)
    drafter = SiblingDrafter(own=own)
    responses = [
        np.array(ids, dtype=np.int32) for ids in trace.table.column("response_ids").to_pylist()
    ]
    for row, prompt in enumerate(trace.column("prompt_id").tolist()):
        drafter.start_request(row, prompt)
    generated = np.zeros(len(responses), dtype=np.int64)
    compared = 0
    while running := [r for r in range(len(responses)) if generated[r] < len(responses[r])]:
        rows = [r for r in running if rng.random() < 0.6]
        most = rng.integers(0, 20, len(rows)).tolist()
        for row, tokens, draft in zip(rows, most, drafter.propose(rows, most), strict=True):
            a, b = int(index.group_first[row]), int(index.group_end[row])
            known = generated[a:b].copy()
            known[row - a] *= own
            rest = responses[row][generated[row] :]
            right = np.cumprod(draft[: len(rest)] == rest[: len(draft)]).sum()
            assert sibling_draft(index, row, int(generated[row]), known, tokens) == (
                len(draft),
                right,
            )
            compared += len(draft) > 0
        for row in rows:
            tokens = int(min(rng.integers(1, 6), len(responses[row]) - generated[row]))
            drafter.observe(row, responses[row][generated[row] : generated[row] + tokens])
            generated[row] += tokens
            if generated[row] == len(responses[row]):
                drafter.stop_request(row)
    assert compared > 50


def test_a_response_that_is_over_still_helps_and_another_group_never():
    drafter = SiblingDrafter()
    drafter.start_request(0, 7)
    drafter.observe(0, np.array([1, 2, 3, 4], dtype=np.int32))
    drafter.stop_request(0)
    for request, group in ((1, 7), (2, 8)):
        drafter.start_request(request, group)
        drafter.observe(request, np.array([1, 2, 3], dtype=np.int32))
    assert [draft.tolist() for draft in drafter.propose([1, 2], [8, 8])] == [[4], []]


def test_finished_siblings_give_at_least_what_siblings_in_lockstep_give():
    trace = random_groups(4)
    lockstep, finished = sibling_runs(trace, "lockstep"), sibling_runs(trace, "finished")
    assert (lockstep.accepted <= lockstep.drafted).all() and (
        finished.accepted <= finished.drafted
    ).all()
    assert 0 < lockstep.accepted.sum() < finished.accepted.sum()
    left = np.concatenate([np.arange(n, 0, -1) for n in trace.column("response_tokens")])
    assert (finished.accepted <= left).all()


def test_a_response_without_siblings_has_no_drafts_of_theirs():
    trace = trace_of({(0, 0): [[1, 2, 3, 1, 2, 3]], (0, 1): [[1, 2, 3], [1, 2, 3]]})
    assert sibling_runs(trace).first.tolist() == [-1, 6, 9]


def test_a_whole_old_response_is_accepted_up_to_the_first_difference():
    trace = trace_of(
        {
            (0, 0): [[1, 2, 3, 4], [5, 6]],
            (1, 0): [[1, 2, 9, 4], [5, 6, 7]],
            (3, 0): [[1, 2, 9], [8], [1]],
            (3, 1): [[1]],
        }
    )
    runs = whole_response_runs(trace)
    assert runs.old_tokens.tolist() == [0, 0, 4, 2, 4, 3, 0, 0]
    assert runs.accepted.tolist() == [0, 0, 2, 2, 3, 0, 0, 0]


def test_a_trace_without_token_ids_is_refused():
    trace = random_groups(0)
    bare = Trace(trace.table.drop_columns(["response_ids"]), METADATA)
    for use in (sibling_index, sibling_runs, whole_response_runs):
        with pytest.raises(
            InputError, match="no column 'response_ids'; import the run with --tokenizer"
        ):
            use(bare)


def test_a_draft_takes_less_than_two_microseconds():
    trace = random_groups(5, prompts=60, group=16)
    sibling_runs(trace)
    started = time.process_time()
    sibling_runs(trace)
    seconds = time.process_time() - started
    assert seconds / trace.column("response_tokens").sum() < 2e-6


def test_beyond_the_most_groups_one_of_which_a_response_runs_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simrl_replay.sibling_drafter.MOST_GROUPS", 2)
    drafter, ids = SiblingDrafter(), np.arange(8, dtype=np.int32)
    for request, prompt_id in enumerate((0, 0, 1, 2)):  # the third prompt is one too many
        drafter.start_request(request, prompt_id)
    drafter.observe(0, ids)
    drafter.observe(1, ids[:4])
    assert drafter.propose([1], [3])[0].tolist() == [4, 5, 6]
    drafter.stop_request(2)
    drafter.start_request(4, 3)  # now the second prompt may go
    assert drafter.propose([1], [3])[0].tolist() == [4, 5, 6]
