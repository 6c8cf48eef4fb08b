"""RollPacker's tail batching: which prompts a short round trains, what it throws away, and when a long one comes."""

from collections import defaultdict

import pytest
from helpers import examples, lanes, rows, trace, trained, with_status
from hypothesis import given
from hypothesis import strategies as st
from test_pipelines import run, timed, traces, workers

from simrl.trace.workload import Workload

# Two prompts of two responses a step. Short rounds begin three of three: a third response is as long as the first.
STEPS = trace([[[(4, 10), (4, 30)], [(4, 40), (4, 40)]], [[(4, 8), (4, 20)], [(4, 5), (4, 6)]]])


def half_more(steps, **parameters):
    return timed(
        "rollpacker", steps, STEPS, **{"eta_prompts": 1.5, "eta_responses": 1.5, "reward_s": 0.0, **parameters}
    )


def lasted(result):
    spans = lanes(result)["rollout-000"]
    return [pytest.approx(s["ended_s"] - s["started_s"]) for s in spans if s["kind"] == "rollout"]


def test_a_short_round_trains_the_first_responses_of_the_first_prompts_and_throws_the_others_away():
    result = half_more(1)
    # uids: 0 to 7 from the trace, then an extra one each for the three prompts. The third prompt has two responses done at 8
    # (4 and 10), and its other stops at the next boundary; the first has two at 10 (0 and 8), which ends the round.
    assert trained(result) == [[0, 4, 8, 10]]
    tokens = {row["uid"]: row["generated_tokens"] for row in rows(result.samples)}
    assert {uid: tokens[uid] for uid in with_status(result, "dropped")} == {1: 11, 2: 11, 3: 11, 5: 9, 9: 11}
    assert lasted(result) == [11]


def test_prompts_that_were_put_off_train_together_in_a_long_round_without_surplus():
    result = half_more(4)
    # The second round begins the fourth prompt and, from a new pass, the first two: again the second is put off. It waits there
    # twice now, from two epochs: the third round runs both, two responses each, all 40 tokens. The fourth is short again.
    assert lasted(result)[:3] == [11, 11, 40]
    third = [row for row in rows(result.samples) if row["trained_step"] == 2]
    assert [(r["epoch"], r["prompt_id"], r["generated_tokens"]) for r in third] == [(0, 1, 40)] * 2 + [(1, 1, 40)] * 2
    assert len(trained(result)[3]) == 4
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0] * 4


def test_rewards_of_a_prompt_begin_when_it_is_complete_or_when_the_round_is_over():
    # The prompts of the round are complete at 8 and 10; the last sample leaves its worker at 11.
    ends = [rows(half_more(1, reward_s=50.0, async_rewards=on).steps)[0]["started_s"] for on in (True, False)]
    assert ends == [pytest.approx(60.0), pytest.approx(61.0)]


# Four prompts a step, of which two are long. A short round of twice as many puts four off; the next round is a long one.
LONG = trace([[[(4, n)] * 2 for n in (10, 10, 400, 500)], [[(4, n)] * 2 for n in (10, 10, 300, 600)]])


def test_with_the_stream_trainer_half_of_the_workers_train_what_is_scored_while_the_others_finish_a_long_round():
    def long_round(**parameters):
        result = timed("rollpacker", 2, LONG, 2, eta_prompts=2.0, eta_responses=1.0, reward_s=1.0, **parameters)
        update = rows(result.steps)[1]
        busy = [s for lane in lanes(result).values() for s in lane if s["kind"] == "train" and s["policy_version"] == 1]
        return result, update, busy

    plain, _, at_the_end = long_round()
    streamed, update, trains = long_round(stream_trainer=0.4)
    last = max(s["ended_s"] for s in rows(streamed.segments) if s["policy_version"] == 1)
    early = [s for s in trains if s["ended_s"] <= last]
    assert {s["lane"] for s in early} == {"rollout-001"}
    assert not [s for s in at_the_end if s["ended_s"] <= last - 100]
    # Nothing is trained twice or left out, and every token has the version that is trained.
    assert sorted(trained(streamed)[1]) == sorted(trained(plain)[1])
    assert update["off_policyness_max"] == 0


def test_without_long_rounds_long_prompts_are_never_trained():
    result = half_more(6, long_rounds=False)
    assert max(row["generated_tokens"] for row in rows(result.samples) if row["status"] == "trained") == 10
    assert 1 not in {
        row["prompt_id"] for row in rows(result.samples) if row["status"] == "trained" and row["trace_step"] == 0
    }


def test_without_surplus_prompts_the_responses_alone_race():
    result = half_more(1, eta_prompts=1.0)
    # Of two prompts, the second needs two of its three responses of 40.
    assert lasted(result) == [40]
    assert len(with_status(result, "dropped")) == 2
    # And without surplus responses, the prompts alone: the second and third response of 20 and 30 tokens are waited for.
    assert lasted(half_more(1, eta_responses=1.0)) == [31]


@examples(40)
@given(traces, workers, st.floats(1, 2), st.floats(1, 2), st.booleans())
def test_every_update_trains_whole_prompts_each_at_most_once(trace, workers, eta_prompts, eta_responses, long_rounds):
    parameters = {"eta_prompts": eta_prompts, "eta_responses": eta_responses, "long_rounds": long_rounds}
    watched = run(("rollpacker", parameters), trace, workers, steps=6)
    batch = Workload(trace).batch_groups
    sizes = defaultdict(int)
    for row in rows(trace.table):
        sizes[row["step"], row["prompt_id"]] += 1
    prompts = defaultdict(list)
    for row in rows(watched.result.samples):
        if row["status"] == "trained":
            prompts[row["epoch"], row["trace_step"], row["prompt_id"]].append(row["trained_step"])
    for (_, step, prompt), in_steps in prompts.items():
        assert len(set(in_steps)) == 1
        assert len(in_steps) == sizes[step, prompt]
    for step in range(6):
        assert sum(step in in_steps for in_steps in prompts.values()) == batch
    assert not with_status(watched.result, "buffered")  # no finished response is kept from one round to another
