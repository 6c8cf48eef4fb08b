"""NeMo-RL's main branch, its single controller, slime, miles and ROLL do what their code says:
sequences worked out by hand. A token takes a second; what is asked takes effect at the next pass."""

import math

import pytest
from hypothesis import given, strategies as st

from simrl.errors import InputError
from tests.helpers import ROOMY, counted, examples, on_gpus, prepared, rows, trace, watch
from tests.pipelines.test_conformance_async import (
    finished_at,
    oldest,
    singles,
    stays,
    submissions,
    traces,
)

# An update takes twenty seconds, in which the engines go on.
SLOW = {"load_s": 0.0, "publish_s": 20.0, "pauses": False}
SAMPLERS = ["in_order", "ready_first", "weight_fifo", "windowed"]


def fates(run):
    """The update that trained each sample, or what became of it."""
    return [
        row["status"] if row["trained_step"] is None else row["trained_step"]
        for row in rows(run.result.samples)
    ]


# NeMo-RL.


def test_nemo_main_runs_all_batches_at_once_and_the_first_update_waits_for_two():
    """Batches of two, one version ahead. Batch 0 ends at 10, batch 1 at 15; updates of twenty seconds follow, and
    a batch starts with each version."""
    prompts = singles(2, 10, 10, 15, 15, 10, 10)
    run = counted("nemo_rl_async", {"version": "main"}, prompts, 3, **SLOW)
    assert submissions(run) == [(0, 0, 4), (35, 1, 2), (55, 2, 2)]
    assert finished_at(run) == [35, 55, 75]
    before = counted("nemo_rl_async", {}, prompts, 3, **SLOW)
    assert submissions(before)[:2] == [(0, 0, 2), (10, 0, 2)]
    assert finished_at(before)[0] == 30


CONTROLLER = {"min_groups_for_streaming_train": 1, "max_inflight_prompts": 3}


def test_in_order_waits_for_the_long_prompt_of_its_batch():
    """Batches of two, three at once. At 10, prompts 0 and 2 end and 3 starts: batch 1 is full. Prompt 0 trains at once; the
    other one of batch 0 ends at 45. The update is over at 65, and the next batch starts."""
    run = counted("nemo_rl_single_controller", CONTROLLER, singles(2, 10, 45, 10, 10), 2, **SLOW)
    assert submissions(run) == [(0, 0, 3), (10, 0, 1), (65, 1, 2)]
    assert finished_at(run) == [65, 85]
    assert fates(run)[:4] == [0, 0, 1, 1]


def test_ready_first_trains_what_is_finished_and_leaves_the_long_prompt_for_later():
    run = counted(
        "nemo_rl_single_controller",
        {**CONTROLLER, "sampler": "ready_first"},
        singles(2, 10, 45, 10, 10),
        3,
        **SLOW,
    )
    assert finished_at(run)[0] == 30
    assert fates(run)[:4] == [0, 2, 0, 1]
    assert oldest(run)[2] == 2  # beyond the window of one


def test_weight_fifo_finishes_the_groups_of_a_version_before_those_of_the_next():
    """Four prompts start with version 0; the prompts of version 1 wait until the long one has trained at 45."""
    run = counted(
        "nemo_rl_single_controller",
        {**CONTROLLER, "sampler": "weight_fifo"},
        singles(2, 10, 45, 10, 10, 10, 10),
        3,
        **SLOW,
    )
    assert finished_at(run) == [30, 65, 85]
    assert fates(run)[:6] == [0, 1, 0, 1, 2, 2]


def test_windowed_drops_what_is_older_than_its_window_finished_or_running():
    """No gate: three prompts run at all times. Version 2 comes at 51: prompt 1, which runs, and 5 and 6, which are finished,
    began with version 0."""
    run = counted(
        "nemo_rl_single_controller",
        {**CONTROLLER, "sampler": "windowed"},
        singles(2, 10, 60, 10, 10, 10, 10),
        3,
        **SLOW,
    )
    assert max(oldest(run)) <= 1
    assert fates(run)[:7] == [0, "dropped", 0, 1, 1, "dropped", "dropped"]
    aborted = stays(run, 1)
    assert sum(tokens for _, _, tokens, *_ in aborted) < 60


def test_weight_fifo_that_stands_still_as_in_nemo_says_what_to_change():
    """One prompt at once: 0 and 1 train at 20, and 2 runs until 51, after the sync. So three began with version 0, and update 1
    waits for two of them."""
    parameters = {"sampler": "weight_fifo", "max_inflight_prompts": 1}
    with pytest.raises(InputError, match=r"min_groups_for_streaming_train.*lower it to 1"):
        counted("nemo_rl_single_controller", parameters, singles(2, 10, 10, 30, 10), 4, **SLOW)


def test_a_buffer_that_is_too_small_for_the_window_is_refused():
    parameters = {"window": 2, "max_buffered_rollouts": 5}
    with pytest.raises(InputError, match="max_buffered_rollouts: in_order needs 6"):
        counted("nemo_rl_single_controller", parameters, singles(2, 10, 10), 2)


@examples(40)
@given(traces, st.sampled_from(SAMPLERS), st.integers(0, 2), st.integers(1, 6))
def test_no_sampler_but_ready_first_trains_beyond_its_window(groups, sampler, window, at_once):
    parameters = CONTROLLER | {
        "sampler": sampler,
        "window": window,
        "max_inflight_prompts": at_once,
    }
    run = watch(
        prepared(on_gpus("nemo_rl_single_controller", parameters, 2, steps=5), groups, limits=ROOMY)
    )
    assert sampler == "ready_first" or max(oldest(run)) <= window
    dropped = any(row["status"] == "dropped" for row in rows(run.result.samples))
    assert not dropped or sampler == "windowed"


# slime.


def test_slime_syncs_between_rollouts_so_that_no_response_has_two_versions():
    """Batch 0 ends at 30; batch 1 starts then and ends at 40. The update is over at 50: weights are loaded, batch 2 starts."""
    run = counted("slime_train_async", {}, singles(2, 10, 30, 10, 10, 60, 10), 3, **SLOW)
    assert submissions(run)[:3] == [(0, 0, 2), (30, 0, 2), (50, 1, 2)]
    assert finished_at(run) == [50, 70, 130]  # batch 2, started at 50, ends at 110
    assert oldest(run) == [0, 1, 1]
    assert all(len(stays(run, uid)) == 1 for uid in range(6))


def test_slime_syncs_after_every_second_update():
    parameters = {"update_weights_interval": 2}
    run = counted("slime_train_async", parameters, singles(2, 10, 10), 4, **SLOW)
    assert finished_at(run) == [10, 40, 40, 70]  # every second one is published
    assert oldest(run) == [0, 1, 2, 1]


def test_slimes_pool_is_looked_at_every_second_and_aborted_groups_go_on_before_new_ones():
    """Three at once, batches of one. Group 2 ends at 7 and trains until 27. Group 1 is aborted after the pass until 28; the
    pool sends it again at once, and it goes on at 30, after the load of two seconds."""
    run = counted(
        "slime_fully_async",
        {"sglang_server_concurrency": 3},
        singles(1, 10, 40, 7, 10, 10),
        2,
        load_s=2.0,
        publish_s=20.0,
        pauses=False,
    )
    assert finished_at(run) == [27, 50]
    assert fates(run)[2] == 0 and fates(run)[0] == 1
    before, after = stays(run, 1)
    assert before == (0, 0, 28, 0.0, 28.0)
    assert after == (0, 1, 12, 30.0, 42.0)
    assert [number for _, _, number in submissions(run)[:2]] == [3, 1]


# miles.


def test_miles_keeps_a_batch_in_flight_and_trains_the_first_to_finish():
    """Two at once. Prompt 0 ends at 10, and prompt 2 starts, ends at 21 and completes the batch, before the long prompt 1."""
    run = counted("miles_async", {}, singles(2, 10, 30, 10, 10), 2, **SLOW)
    assert submissions(run)[:3] == [(0, 0, 2), (10, 0, 1), (21, 0, 1)]
    assert fates(run)[:3] == [0, 1, 0]
    assert finished_at(run)[0] == 41


def test_a_full_buffer_stops_miles():
    """Batches of one, a buffer of two: with one batch in training and one collected, four finished groups stop it."""
    run = counted("miles_async", {}, singles(1, *[5] * 12), 1, **{**SLOW, "publish_s": 200.0})
    assert len(run.submissions) == 5  # the one in training, and four that nothing takes


def test_miles_starts_a_group_when_as_many_samples_have_finished_of_whatever_groups():
    """Two groups of two in flight. At 10 a sample of each ends, and a third group starts; counted by groups it starts at 30."""
    groups = trace([[[(4, 10), (4, 30)], [(4, 10), (4, 30)]]])
    by_sample = counted("miles_async", {}, groups, 1, **SLOW)
    assert submissions(by_sample)[:2] == [(0, 0, 2), (10, 0, 1)]
    by_group = counted("miles_async", {"submission_granularity": "group"}, groups, 1, **SLOW)
    assert submissions(by_group)[0] == (0, 0, 2)
    assert submissions(by_group)[1][0] == 30


@pytest.mark.parametrize("handler", ["drop", "retry"])
def test_miles_drops_what_ended_too_long_before_its_batch_was_asked_for(handler):
    """The batch of update k is asked for as the update before begins, under version k - 1; with no staleness allowed, what
    ended under version k - 2 is dropped, and with retry its prompt starts again."""
    run = counted(
        "miles_async",
        {"max_weight_staleness": 0, "unused_samples_handler": handler},
        singles(1, *[10] * 6),
        4,
        **SLOW,
    )
    assert fates(run)[:4] == [0, 1, "dropped", 2]
    assert max(oldest(run)) <= 2


# ROLL.


def test_roll_waits_for_the_oldest_step_and_starts_a_batch_with_each_step():
    """Two batches at first. Prompts 0 and 2 train at 10; step 1 waits until prompt 1 of the first step ends, at 45."""
    run = counted("roll_async", {}, singles(2, 10, 45, 10, 10, 10, 10), 3, **SLOW)
    assert submissions(run) == [(0, 0, 4), (31, 1, 2), (65, 2, 2)]
    assert finished_at(run) == [30, 65, 85]
    assert fates(run)[:6] == [0, 1, 0, 1, 2, 2]
    assert [version for _, version, *_ in stays(run, 1)] == [0, 1]


def test_roll_with_half_a_batch_ahead_takes_half_a_batch_of_the_step_before():
    """Six prompts at first, four of which train. Step 1 takes the two others, one of which ends at 100, and two of its
    own four, which end at 41."""
    run = counted(
        "roll_async",
        {"async_generation_ratio": 0.5},
        singles(4, 10, 10, 10, 10, 10, 100, 10, 10),
        3,
        **SLOW,
    )
    assert submissions(run)[0] == (0, 0, 6)
    assert submissions(run)[1] == (31, 1, 4)
    assert fates(run)[:10] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert finished_at(run)[:2] == [30, 120]


def test_a_ratio_that_fails_in_roll_is_refused():
    with pytest.raises(InputError, match=r"async_generation_ratio: with 0.5, 3 prompts"):
        counted("roll_async", {"async_generation_ratio": 0.5}, singles(3, *[10] * 3), 3)


@examples(40)
@given(traces, st.integers(1, 3), st.sampled_from([0.0, 1.0, 2.0, 3.0]))
def test_roll_trains_no_token_older_than_its_ratio(groups, workers, ratio):
    parameters = {"async_generation_ratio": ratio}
    run = watch(prepared(on_gpus("roll_async", parameters, workers, steps=5), groups, limits=ROOMY))
    assert max(oldest(run)) <= math.ceil(ratio)
