"""SortedRL: which responses an update trains, and what becomes of the others."""

from hypothesis import given, strategies as st

from simrl.trace.workload import Workload
from tests.helpers import ROOMY, examples, rows, trace, trained, versions, with_status
from tests.pipelines.test_pipelines import run, timed, traces, workers

# Two groups of one response a step; two batches at once.
STEPS = trace([[[(4, 10)], [(4, 40)]], [[(4, 20)], [(4, 25)]]])
GROUPS = trace([[[(4, 5), (4, 50)], [(4, 10), (4, 10)]], [[(4, 20), (4, 20)], [(4, 8), (4, 9)]]])


def test_the_shortest_train_first_and_the_others_go_on_under_the_new_weights():
    result = timed("sortedrl", 3, STEPS, batches=2, reward_s=0.0)
    # Two are done at 20. The others hear of it at 21, and have as many tokens; the update after takes both.
    assert trained(result)[:2] == [[0, 2], [1, 3]]
    assert versions(result)[1] == [(0, 21), (1, 19)]
    assert versions(result)[3] == [(0, 21), (1, 4)]
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0, 1, 0]
    # Nothing new begins before the update that trains the last of them.
    assert (
        min(s["started_s"] for s in rows(result.segments) if s["uid"] > 3)
        > rows(result.steps)[1]["finished_s"]
    )


def test_a_restart_throws_away_what_is_unfinished_and_is_on_policy():
    result = timed("sortedrl", 2, STEPS, batches=2, unfinished="restart", reward_s=0.0)
    assert trained(result) == [[0, 2], [4, 5]]
    assert versions(result)[4] == [(1, 40)]
    assert versions(result)[5] == [(1, 25)]
    dropped = {
        row["uid"]: row["generated_tokens"]
        for row in rows(result.samples)
        if row["status"] == "dropped"
    }
    assert dropped == {1: 21, 3: 21}


def test_responses_train_on_their_own_or_in_whole_groups():
    alone = timed("sortedrl", 2, GROUPS, batches=2, reward_s=0.0)
    # 5, 8, 9 and one of the two of 10 tokens; the other is done too, and waits for the second update.
    assert sorted(trained(alone)[0]) == [0, 2, 6, 7]
    assert versions(alone)[3] == [(0, 10)]
    assert rows(alone.steps)[1]["off_policyness_max"] == 1
    whole = timed("sortedrl", 2, GROUPS, batches=2, unit="group", reward_s=0.0)
    assert trained(whole) == [[2, 3, 6, 7], [0, 1, 4, 5]]
    assert versions(whole)[0] == [(0, 5)]  # waits for its sibling
    again = timed(
        "sortedrl", 2, GROUPS, batches=2, unit="group", unfinished="restart", reward_s=0.0
    )
    assert set(with_status(again, "dropped")) == {0, 1, 4, 5}
    assert {u["off_policyness_max"] for u in rows(again.steps)} == {0}


@examples(40)
@given(
    traces,
    workers,
    st.integers(1, 3),
    st.sampled_from(["response", "group"]),
    st.sampled_from(["continue", "restart"]),
)
def test_every_response_drawn_is_trained_once_before_new_prompts_are(
    trace, workers, batches, unit, unfinished
):
    parameters = {"batches": batches, "unit": unit, "unfinished": unfinished}
    result = run(("sortedrl", parameters), trace, workers, steps=2 * batches).result
    # What two large rollouts have drawn, each once.
    workload = Workload(trace)
    for first in (0, batches):
        expected = sorted(
            (s.epoch, s.step, s.prompt_id, s.sample)
            for group in workload.next_groups(batches * workload.batch_groups)
            for s in group
        )
        found = sorted(
            (r["epoch"], r["trace_step"], r["prompt_id"], r["sample"])
            for r in rows(result.samples)
            if r["status"] == "trained" and first <= r["trained_step"] < first + batches
        )
        assert found == expected
    sizes = [u["samples"] for u in rows(result.steps)]
    if unit == "response":
        assert max(sizes[:batches]) - min(sizes[:batches]) <= 1
    if unfinished == "continue":
        assert not with_status(result, "dropped")


@examples(25)
@given(traces)
def test_no_response_trains_before_a_shorter_one_of_the_same_rollout_on_one_worker(trace):
    result = run(("sortedrl", {"batches": 3}), trace, workers=1, steps=3).result
    lengths = [
        [r["generated_tokens"] for r in rows(result.samples) if r["trained_step"] == k]
        for k in range(3)
    ]
    # All begin within the passes that their prompts take, so the order in which they finish is that of their lengths.
    prompt_tokens = sum(
        r["prompt_tokens"] for r in rows(result.samples) if r["trained_step"] in range(3)
    )
    apart = -(-prompt_tokens // ROOMY.max_num_batched_tokens)
    assert max(lengths[0]) <= min(lengths[1]) + apart
    assert max(lengths[1]) <= min(lengths[2]) + apart
