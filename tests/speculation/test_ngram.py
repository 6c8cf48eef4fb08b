"""N-gram drafting from a response's own text."""

import time

import numpy as np

from simrl.speculation.ngram import ngram_runs
from simrl_replay.ngram_drafter import NgramDrafter
from tests.token_traces import random_groups, trace_of


def drafts(ids: list[int], at: int) -> list[int]:
    drafter = NgramDrafter()
    drafter.start_request(1, 0)
    drafter.observe(1, np.array(ids[:at], dtype=np.int32))
    return drafter.propose([1], [32])[0].tolist()


def test_what_followed_the_last_tokens_before_is_drafted():
    assert drafts([1, 2, 3, 4, 5, 1, 2, 3], 8) == [4, 5, 1, 2, 3]
    assert drafts([1, 2, 3, 4, 5, 1, 2, 9], 8) == []


def test_the_earliest_of_the_longest_matches_is_followed():
    assert drafts([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 11)[0] == 4
    assert drafts([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], 13)[0] == 5, (
        "9 1 2 3 is longer than 1 2 3"
    )


def test_a_prompt_that_is_known_is_looked_up_too():
    drafter = NgramDrafter()
    drafter.start_request(1, 0, prompt_ids=np.array([1, 2, 3, 7, 8], dtype=np.int32))
    drafter.observe(1, np.array([1, 2, 3], dtype=np.int32))
    assert drafter.propose([1], [1])[0].tolist() == [7]
    drafter.stop_request(1)


def test_the_runs_are_what_the_drafter_proposes_as_it_observes_the_response():
    trace = random_groups(7, prompts=2)
    runs, some = ngram_runs(trace, most_tokens=9), 0
    for row, ids in enumerate(trace.table.column("response_ids").to_pylist()):
        drafter = NgramDrafter()
        drafter.start_request(row, 0)
        for p, token in enumerate(ids):
            draft = drafter.propose([row], [9])[0].tolist()
            equal = np.array(draft[: len(ids) - p]) == ids[p : p + len(draft)]
            right = np.cumprod(equal).sum()
            assert (runs.drafted[runs.first[row] + p], runs.accepted[runs.first[row] + p]) == (
                len(draft),
                right,
            )
            some += right > 0
            drafter.observe(row, np.array([token], dtype=np.int32))
    assert some > 20


def test_what_is_not_generated_yet_changes_no_draft():
    ids = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    runs, other = (ngram_runs(trace_of({(0, 0): [ids[:7] + end]})) for end in (ids[7:], [8, 8, 8]))
    assert runs.drafted[:8].tolist() == other.drafted[:8].tolist()
    assert runs.accepted[7] == 3 and other.accepted[7] == 0


def test_a_response_that_repeats_itself_for_long_takes_no_longer():
    trace = trace_of({(0, 0): [[5] * 9000], (0, 1): [[1, 2] * 4500]})
    ngram_runs(trace)
    started = time.process_time()
    runs = ngram_runs(trace)
    assert time.process_time() - started < 0.1
    assert runs.accepted[100] == 32 and runs.accepted[9100] == 32
