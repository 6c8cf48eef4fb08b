"""The index of one prompt's responses, held against a search that anyone can follow."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.errors import InputError
from simrl.speculation.choices import LARGEST_TOKEN_ID, SORTED_TOKENS, HistoryRule
from simrl.speculation.history_index import PAPER, PUBLIC_CODE, accept_runs_of, build_index, text_of
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.trace_runs import HistoryRuns, history_runs
from tests.helpers import examples
from tests.token_traces import draft, random_groups


def reference_draft(responses, rewards, tail, most_tokens, rule):
    """Where the longest match occurs, then step by step the child that is worth most, from plain lists."""
    rewards = [0.0 if math.isnan(r) else r for r in (rewards or [0.0] * len(responses))]
    shift = min([0.0, *rewards])
    for length in range(
        min(rule.longest_match_tokens, len(tail)), rule.shortest_match_tokens - 1, -1
    ):
        suffix = tail[len(tail) - length :]
        at = [
            (r, i + length)
            for r, ids in enumerate(responses)
            for i in range(len(ids))
            if ids[i : i + length] == suffix
        ]
        if all(i == len(responses[r]) for r, i in at):
            continue
        path, probability = [], 1.0
        while len(path) < most_tokens:
            children = {}
            for r, i in at:
                if i < len(responses[r]):
                    children.setdefault(responses[r][i], []).append((r, i + 1))
            if not children:
                break

            def worth(child, children=children):
                reward = (
                    sum(rewards[r] - shift for r, _ in children[child])
                    if rule.branch == "reward"
                    else 0
                )
                return reward, len(children[child]), -child

            best = max(children, key=worth)
            probability *= len(children[best]) / len(at)
            if probability < rule.least_probability:
                break
            path.append(best)
            at = children[best]
        return path
    return []


def ids(values):
    return np.array(values, dtype=np.int32)


few = st.integers(0, 2)
responses_of_few = st.lists(st.lists(few, max_size=60), min_size=1, max_size=6)
rules = st.builds(
    lambda shortest, more, branch, least: HistoryRule(
        shortest_match_tokens=shortest,
        longest_match_tokens=shortest + more,
        branch=branch,
        least_probability=least,
    ),
    st.integers(3, 5),
    st.integers(0, 4),
    st.sampled_from(["reward", "count"]),
    st.sampled_from([0.0, 0.1, 0.5]),
)


@examples(300)
@given(responses_of_few, st.lists(few, max_size=20), rules, st.integers(1, 32), st.data())
def test_a_draft_is_what_a_plain_search_finds(responses, tail, rule, most_tokens, data):
    worths = st.sampled_from([-1.0, 0.0, 1.0])  # sums of which are exact
    rewards = data.draw(st.lists(worths, min_size=len(responses), max_size=len(responses)))
    found = draft(build_index([ids(r) for r in responses], rewards), ids(tail), most_tokens, rule)
    assert found.tolist() == reference_draft(responses, rewards, tail, most_tokens, rule)


@examples(100)
@given(responses_of_few, st.lists(few, min_size=1, max_size=80), rules)
def test_accept_runs_are_the_drafts_at_every_position_and_what_is_right_of_them(
    responses, recorded, rule
):
    index = build_index([ids(r) for r in responses])
    drafted, accepted = np.zeros((2, len(recorded) + 3), dtype=np.uint8)
    tokens = ids([1, *recorded])
    accept_runs_of(
        index, tokens, np.array([[1, len(tokens), 3]]), 32, rule.compiled, drafted, accepted
    )
    for p in range(len(recorded)):
        path = reference_draft(responses, None, recorded[:p], 32, rule)
        rest = recorded[p:]
        right = next(
            (k for k, token in enumerate(path) if k >= len(rest) or token != rest[k]), len(path)
        )
        assert (drafted[p + 3], accepted[p + 3]) == (len(path), right)


@given(responses_of_few, st.lists(few, max_size=20), rules, st.integers(1, 31))
def test_the_first_tokens_of_a_draft_do_not_depend_on_how_many_are_asked_for(
    responses, tail, rule, fewer
):
    index = build_index([ids(r) for r in responses])
    whole = draft(index, ids(tail), 32, rule).tolist()
    assert draft(index, ids(tail), fewer, rule).tolist() == whole[:fewer]


def test_large_vocabularies_long_repeats_and_loops_are_sorted_as_well():
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, LARGEST_TOKEN_ID, 120).tolist() for _ in range(5)]
    responses = [
        [t for i in rng.integers(0, 5, 6) for t in phrases[i]][: rng.integers(500, 700)]
        for _ in range(6)
    ]
    responses += [[7] * 400, [LARGEST_TOKEN_ID] * 50]
    rewards = rng.integers(0, 2, len(responses)).astype(float).tolist()
    index = build_index([ids(r) for r in responses], rewards)
    for rule in (PAPER, PUBLIC_CODE):
        for _ in range(60):
            source = responses[rng.integers(len(responses))]
            end = int(rng.integers(1, len(source) + 1))
            tail = source[max(end - 9, 0) : end]
            assert draft(index, ids(tail), 32, rule).tolist() == reference_draft(
                responses, rewards, tail, 32, rule
            )


def test_what_shares_a_prefix_lies_side_by_side_in_the_order():
    rng = np.random.default_rng(1)
    index = build_index([ids(rng.integers(0, 2, 500)) for _ in range(4)])
    text = text_of(index)
    n = len(text)
    order = index[3 + n : 3 + 2 * n]
    assert sorted(order.tolist()) == list(range(n))
    prefixes = [tuple(text[i : i + SORTED_TOKENS].tolist()) for i in order]
    assert prefixes == sorted(prefixes)


A, B = [1, 2, 3, 4, 4], [1, 2, 3, 5, 5]


@pytest.mark.parametrize(
    ("responses", "rewards", "follows"),
    [
        ([A, B, B], [1, 0, 0], 4),  # the largest sum of rewards
        ([A, B, B], [1, 1, 1], 5),  # more of them
        ([A, B, B], [0, 0, 0], 5),  # none has any: by count
        ([A, B, B], None, 5),
        ([A, B, B], [1.0, 0.5, 0.5], 5),  # a tie: by count
        ([A, B], [1, 1], 4),  # a tie in both: the smaller token
        ([A, A, A, B], [-1, -1, 1, -1], 4),  # what failed is worth nothing, not less than nothing
        (
            [A, A, A, B],
            [-1, -1, -1, -1],
            4,
        ),  # all failed: by count, where raw sums would take what was tried least
        ([A, B, B], [float("nan"), 0, 1], 5),  # unknown counts as 0
    ],
)
def test_a_branch_is_chosen_by_its_rewards_then_its_count_then_its_token(
    responses, rewards, follows
):
    index = build_index([ids(r) for r in responses], rewards)
    assert draft(index, ids([1, 2, 3]), 1).tolist() == [follows]


def test_the_public_code_stops_where_the_path_becomes_improbable_and_needs_four_tokens():
    responses = [[1, 2, 3, 4, 5, k, 9] for k in range(10, 21)]  # a branch of eleven: 1/11 each
    index = build_index([ids(r) for r in responses])
    assert draft(index, ids([1, 2, 3, 4]), 32, PUBLIC_CODE).tolist() == [5]
    assert draft(index, ids([2, 3, 4]), 32, PUBLIC_CODE).tolist() == []
    assert draft(index, ids([2, 3, 4]), 32, PAPER).tolist() == [5, 10, 9]


def test_a_match_that_nothing_follows_gives_way_to_a_shorter_one():
    index = build_index([ids([1, 2, 3, 4]), ids([9, 2, 3, 4, 8])])
    assert draft(index, ids([1, 2, 3, 4]), 32).tolist() == [8]
    assert draft(index, ids([1, 2, 3, 4]), 32, HistoryRule(shortest_match_tokens=4)).tolist() == []


def test_no_match_and_no_draft_crosses_from_one_response_into_another():
    index = build_index([ids([1, 2, 3]), ids([4, 5, 6])])
    assert draft(index, ids([1, 2, 3]), 32).tolist() == []
    assert draft(index, ids([2, 3, 4]), 32).tolist() == []
    assert draft(index, ids([3, -1, 4]), 32).tolist() == []


@pytest.mark.parametrize("responses", [[], [[]], [[], []], [[1]], [[1, 2]], [[1, 2, 3]]])
def test_nothing_follows_what_is_too_short(responses):
    index = build_index([ids(r) for r in responses], [1.0] * len(responses))
    assert draft(index, ids([1, 2, 3]), 32).tolist() == []
    assert draft(index, ids([]), 32).tolist() == []


def test_an_index_takes_twelve_bytes_a_token_and_five_a_distinct_run_of_three():
    rng = np.random.default_rng(2)
    responses = [ids(rng.integers(0, 30_000, 3000))] * 3  # the worst case but for its repeats
    index = build_index(responses, [0, 0, 1])
    assert index.nbytes / 9000 < 12 + 5.4 / 3
    with_equal_rewards = build_index(responses, [1, 1, 1])
    assert index.nbytes - with_equal_rewards.nbytes == 4 * (len(text_of(index)) + 1)


@pytest.mark.parametrize("bad", [-1, -5, LARGEST_TOKEN_ID + 1])
def test_ids_that_no_vocabulary_has_are_refused(bad):
    with pytest.raises(InputError, match="token id"):
        build_index([ids([1, 2]), ids([3, bad, 5])])


def test_rewards_must_be_as_many_as_responses():
    with pytest.raises(InputError, match="2 rewards for 1 responses"):
        build_index([ids([1, 2])], [1.0, 2.0])


def test_a_rule_must_match_fewest_tokens_last():
    with pytest.raises(ValueError, match="let it be at most that"):
        HistoryRule(longest_match_tokens=4, shortest_match_tokens=5)


def test_runs_of_an_older_epoch_stay_what_they_are_when_a_later_one_lacks_the_same_responses():
    trace = random_groups(5, epochs=4, prompts=1)
    rule, missing = HistoryRule(prompt_tail_tokens=0), frozenset({(1, 0)})
    two_back: Any = SimpleNamespace(history=rule, epochs_back=2)

    def drafted(*rows: int) -> list[list[int]]:
        """Return the drafts of the last of these rows, at each of its tokens."""
        whole = history_runs(trace, rule, 2)
        runs = HistoryRuns(whole, two_back, SpeculationInputs(), trace, 0)
        first = [runs.first("holder", row, missing) for row in rows][-1]
        return runs.packed[first : first + trace.column("response_tokens")[rows[-1]]].tolist()

    of_2, of_3 = (int(np.flatnonzero(trace.column("epoch") == epoch)[0]) for epoch in (2, 3))
    assert drafted(of_3, of_2) == drafted(of_2) != drafted(of_3)
    assert drafted(of_2, of_3) == drafted(of_3)
