"""Dynamic sampling (DAPO): which groups make a batch, how many rounds it takes, and what a trace has to have for it."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given, strategies as st

from simrl.errors import InputError
from simrl.pipelines.batchwise import batchwise
from simrl.pipelines.context import DynamicSampling
from simrl.pipelines.full_batch import full_batch
from simrl.pipelines.rollpacker import tail_batching
from simrl.pipelines.unfinished import first_complete, token_budget
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.systems.recipes import make_system
from simrl.trace.trace import write_trace
from tests.helpers import (
    examples,
    lanes,
    on_gpus,
    prepared,
    rows,
    scenario,
    trace,
    trained,
    watch,
    with_status,
)
from tests.pipelines.test_pipelines import run, timed, workers

# Two groups a step, of two responses of ten tokens; of the first, both have the same reward.
HALF = trace([[[(4, 10)] * 2] * 2], [[[1, 1], [0, 1]]])


def rollouts(result):
    return [
        (s["started_s"], s["ended_s"])
        for s in lanes(result)["rollout-000"]
        if s["kind"] == "rollout"
    ]


def test_groups_with_equal_rewards_are_dropped_and_further_rounds_fill_the_batch():
    result = timed("dapo", 1, HALF, over_sampling=1.0)
    # A reward comes five seconds after the response; the second round begins then.
    assert rollouts(result) == [(0, 10), (15, 25)]
    assert trained(result) == [[2, 3, 6, 7]]
    assert with_status(result, "dropped") == [0, 1, 4, 5]
    assert rows(result.steps)[0]["started_s"] == 30


def test_a_larger_round_needs_no_second_and_drops_what_is_too_much():
    twice = timed("dapo", 1, HALF, over_sampling=2.0)
    assert rollouts(twice) == [(0, 10)]
    assert trained(twice) == [[2, 3, 6, 7]]
    thrice = timed("dapo", 1, HALF, over_sampling=3.0)
    assert trained(thrice) == [[2, 3, 6, 7]]  # those drawn first
    assert with_status(thrice, "dropped") == [0, 1, 4, 5, 8, 9, 10, 11]


def test_surplus_goes_by_the_order_of_drawing_not_of_finishing():
    late = trace([[[(4, 30)] * 2, [(4, 5)] * 2]])
    result = timed("dapo", 1, late, over_sampling=2.0)
    assert trained(result) == [[0, 1, 2, 3]]
    assert rollouts(result) == [(0, 30)]  # and a round is over with its last response


def test_without_dynamic_sampling_every_group_trains():
    assert trained(timed("dapo", 2, HALF, dynamic_sampling=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("name", ["verl_colocated", "rlhfuse", "verl_2x"])
def test_filtered_groups_do_not_train_and_nothing_comes_in_their_place(name: str):
    result = timed(name, 2, HALF, filter_groups=True)
    assert trained(result) == [[2, 3], [6, 7]]
    assert with_status(result, "dropped") == [0, 1, 4, 5]


def test_an_update_of_which_every_group_is_filtered_stops_the_run():
    half_the_steps = trace([[[(4, 10)] * 2], [[(4, 10)] * 2]], [[[0, 1]], [[1, 1]]])
    assert trained(timed("verl_colocated", 1, half_the_steps, filter_groups=True)) == [[0, 1]]
    with pytest.raises(InputError, match="no group to train"):
        timed("verl_colocated", 2, half_the_steps, filter_groups=True)


def test_a_single_response_has_nothing_to_be_equal_to():
    assert trained(timed("dapo", 1, trace([[[(4, 3)]]], [[[0]]]), over_sampling=1.0)) == [[0]]


def test_too_many_rounds_end_the_run_with_one_line():
    rare = trace([[[(4, 10)] * 2]] * 3, [[[1, 1]], [[0, 0]], [[0, 1]]])
    assert trained(timed("dapo", 1, rare, over_sampling=1.0, max_rounds=3)) == [[4, 5]]
    with pytest.raises(
        InputError,
        match=r"^dynamic sampling: 0 of 2 groups have unequal rewards after 2 rounds, an update needs 1",
    ):
        timed("dapo", 1, rare, over_sampling=1.0, max_rounds=2)


def test_a_trace_without_rewards_or_without_unequal_ones_is_refused(tmp_path):
    def with_workload(system, workload):
        return prepare(scenario(system, workload=workload))

    synthetic = scenario().workload.synthetic.model_dump() | {"reward_mean": None}
    with pytest.raises(
        InputError, match="24 of 24 samples have no reward, and dapo drops groups by their rewards"
    ):
        with_workload("dapo", {"synthetic": synthetic})
    with_workload({"name": "dapo", "dynamic_sampling": False}, {"synthetic": synthetic})
    equal = tmp_path / "equal.parquet"
    write_trace(trace([[[(4, 3)] * 2]], [[[1, 1]]]), equal)
    with pytest.raises(
        InputError, match="all rewards of every group are equal, and dapo drops such groups"
    ):
        with_workload("dapo", {"trace": str(equal)})


reward = st.sampled_from([0.0, 1.0])
scored = st.lists(
    st.lists(st.lists(reward, min_size=1, max_size=3), min_size=1, max_size=3),
    min_size=1,
    max_size=3,
)


@examples(40)
@given(scored, st.floats(1, 3), workers, st.randoms(use_true_random=False))
def test_a_batch_is_full_of_groups_with_unequal_rewards(rewards, over_sampling, workers, random):
    differ = [[len(group) == 1 or len(set(group)) > 1 for group in step] for step in rewards]
    assume(any(map(any, differ)))
    lengths = [[[(4, random.randint(1, 40)) for _ in group] for group in step] for step in rewards]
    parameters = {"over_sampling": over_sampling, "max_rounds": None}
    result = run(("dapo", parameters), trace(lengths, rewards), workers, steps=3).result
    for step in range(3):
        batch = [r for r in rows(result.samples) if r["trained_step"] == step]
        groups = {(r["epoch"], r["trace_step"], r["prompt_id"]) for r in batch}
        assert len(groups) == len(rewards[0])
        assert all(differ[step][prompt] for _, step, prompt in groups)
        assert len(batch) == sum(len(rewards[step][prompt]) for _, step, prompt in groups)
    # Synchronous: nothing is left over from a round.
    assert not with_status(result, "buffered")


@pytest.mark.parametrize("eta", [0, 1])
@pytest.mark.parametrize(
    "collector",
    [
        full_batch,
        partial(first_complete, over_sampling=2.0),
        partial(token_budget, budget_tokens=7),
        partial(tail_batching, eta_prompts=1.25, eta_responses=1.0, long_rounds=True),
    ],
    ids=["full_batch", "first_complete", "token_budget", "tail_batching"],
)
@examples(15)
@given(scored, st.randoms(use_true_random=False))
def test_it_wraps_every_collector_that_works_in_groups(collector, eta, rewards, random):
    differ = [[len(group) == 1 or len(set(group)) > 1 for group in step] for step in rewards]
    assume(any(map(any, differ)))
    lengths = [[[(4, random.randint(1, 40)) for _ in group] for group in step] for step in rewards]
    ready = prepared(on_gpus("split" if eta else "dapo", {}, 2, steps=3), trace(lengths, rewards))
    pipeline, refill = partial(batchwise, eta=eta, collector=collector), DynamicSampling(1.5, None)
    system = replace(ready.system, pipeline=pipeline, dynamic_sampling=refill)
    result = simulate_prepared(replace(ready, system=system))
    for step in range(3):
        found = {}
        for r in rows(result.samples):
            if r["trained_step"] == step:
                found.setdefault((r["epoch"], r["trace_step"], r["prompt_id"]), []).append(
                    r["sample"]
                )
        assert len(found) == len(rewards[0])
        assert [len(samples) for samples in found.values()] == [
            len(rewards[s][p]) for _, s, p in found
        ]
        assert all(differ[s][p] for _, s, p in found)


# As a parameter of other systems.


def test_whole_batches_of_any_system_can_be_refilled_and_areal_drops_as_groups_are_scored():
    lengths, rewards = [[[(4, 10), (4, 20)]] * 2] * 3, [[[1, 1], [0, 1]]] * 3
    for name, parameters in (
        ("one_step_off", {"dynamic_sampling": 2.0}),
        ("april", {"dynamic_sampling": 1.0}),
        ("areal", {"dynamic_sampling": True, "eta": 1}),
    ):
        ready = prepared(on_gpus(name, parameters, 2, steps=3), trace(lengths, rewards))
        samples = rows(watch(ready).result.samples)
        assert {row["prompt_id"] for row in samples if row["status"] == "trained"} == {1}, name
        assert {row["prompt_id"] for row in samples if row["status"] == "dropped"} == {0}, name


def test_a_system_that_trains_parts_of_a_batch_before_all_of_it_is_scored_does_not_take_dynamic_sampling():
    with pytest.raises(InputError, match="unknown parameter 'dynamic_sampling'"):
        make_system("asyncflow", {"dynamic_sampling": 2.0})
    with pytest.raises(InputError, match="unknown parameter 'filter_groups'"):
        make_system("asyncflow", {"filter_groups": True})
    assert make_system("one_step_off", {"dynamic_sampling": 2.0}).needs_rewards
    assert make_system("one_step_off", {"filter_groups": True}).needs_rewards
    with pytest.raises(InputError, match=r"dynamic_sampling is 0\.5"):
        make_system("one_step_off", {"dynamic_sampling": 0.5})


@pytest.mark.parametrize("name", ["verl_colocated", "verl_2x"])
def test_groups_that_are_dropped_after_their_log_probs_cost_these_and_no_gradients(name: str):
    never, before, after = (
        timed(name, 2, HALF, filter_groups=when) for when in (False, True, "after_log_probs")
    )

    def seconds(result, kind):
        spans = result.spans.to_pandas()
        spans = spans[(spans["kind"] == kind) & (spans["policy_version"] == 0)]
        return (spans["ended_s"] - spans["started_s"]).iloc[0]

    assert trained(after) == [[2, 3], [6, 7]]
    assert with_status(after, "dropped") == [0, 1, 4, 5]
    assert seconds(after, "log_prob") == pytest.approx(seconds(never, "log_prob"))
    assert seconds(after, "log_prob") > seconds(before, "log_prob")
    assert seconds(after, "train") == pytest.approx(seconds(before, "train"))


def test_an_update_whose_groups_are_all_dropped_after_their_log_probs_stops_the_run():
    equal = trace([[[(4, 10)] * 2]], [[[1, 1]]])
    with pytest.raises(InputError, match="no group to train"):
        timed("verl_colocated", 1, equal, filter_groups="after_log_probs")
