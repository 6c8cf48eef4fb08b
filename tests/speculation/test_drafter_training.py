import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.draft_times import pace_of
from simrl.speculation.drafter_training import (
    Coordinator,
    DrafterStaleness,
    Pace,
    SpotTraining,
    WorkerState,
)

BUSY, IDLE, TRAINING = WorkerState.BUSY, WorkerState.IDLE, WorkerState.TRAINING


def coordinator(parameters, workers):
    """All workers busy, in the rollout of step 0."""
    return Coordinator(parameters, (BUSY,) * workers).rollout_begins(0)[0]


def after_idling(parameters, workers, order):
    """The coordinator, and who started to train, as workers fall idle in this order."""
    state, started = coordinator(parameters, workers), []
    for worker in order:
        state, now = state.fell_idle(worker)
        started.append(now)
    return state, started


def after(drafter, iterations, parameters, workers=1):
    """The drafter after this number of iterations."""
    for _ in range(iterations):
        drafter = drafter.iterated(workers, parameters)
    return drafter


def test_training_starts_once_enough_workers_are_idle_and_later_ones_join():
    state, started = after_idling(SpotTraining(idle_workers=2), 4, [3, 1, 0])
    assert started == [(), (1, 3), (0,)]
    assert state.states == (TRAINING, TRAINING, BUSY, TRAINING)


def test_as_the_code_has_it_the_first_ones_train_alone():
    state, started = after_idling(SpotTraining(idle_workers=2, join=False), 4, [3, 1, 0])
    assert started == [(), (1, 3), ()]
    assert state.idle == (0,) and state.training == (1, 3)


def test_all_training_stops_the_moment_the_rollout_ends():
    state, _ = after_idling(SpotTraining(), 3, [0, 2])
    state, stopped = state.rollout_over()
    assert stopped == (0, 2) and state.training == () and state.states == (IDLE, BUSY, IDLE)
    assert state.rollout_over()[1] == ()


def test_a_worker_that_serves_again_leaves_the_session():
    state, _ = after_idling(SpotTraining(), 3, [0, 1])
    state = state.got_busy(0)
    assert state.states == (BUSY, TRAINING, BUSY)


def test_workers_that_wait_when_a_rollout_begins_train_at_once():
    state, _ = after_idling(SpotTraining(idle_workers=2), 3, [0, 2])
    state, _ = state.rollout_over()
    assert state.rollout_begins(1)[1] == ()
    state, started = state.rollout_begins(10)
    assert started == (0, 2) and state.states == (TRAINING, BUSY, TRAINING)


def test_it_trains_every_tenth_step_and_a_static_drafter_never():
    state = coordinator(SpotTraining(), 1)
    trains = [state.rollout_begins(step)[0].fell_idle(0)[1] == (0,) for step in range(21)]
    assert [step for step, trained in enumerate(trains) if trained] == [0, 10, 20]
    static = coordinator(SpotTraining(adaptive=False, every_updates=1), 1)
    assert not any(static.rollout_begins(step)[0].fell_idle(0)[1] for step in range(21))


@given(
    st.lists(
        st.tuples(st.sampled_from(["idle", "busy", "over", "next"]), st.integers(0, 4)), max_size=60
    ),
    st.booleans(),
)
def test_nobody_trains_who_serves_or_when_the_rollout_is_over(
    events: list[tuple[str, int]], join: bool
):
    state = coordinator(SpotTraining(idle_workers=2, join=join, every_updates=2), 5)
    rolling = True
    for event, number in events:
        before = state
        if event == "idle" and state.states[number] is BUSY:
            state, started = state.fell_idle(number)
            assert set(started) == set(state.training) - set(before.training)
            assert all(before.states[i] is IDLE or i == number for i in started)
        elif event == "busy" and state.states[number] is not BUSY:
            state = state.got_busy(number)
            assert state.states[number] is BUSY
        elif event == "over":
            state, _ = state.rollout_over()
            rolling = False
        elif event == "next" and not rolling:
            (state, started), rolling = state.rollout_begins(number), True
            assert all(before.states[i] is IDLE for i in started)
        assert rolling or state.training == ()
        assert state.train or state.training == ()
        assert len(state.states) == 5


def test_each_update_makes_a_drafter_staler_and_training_makes_it_good():
    """Fig. 15: a dip at each update, recovered within a few iterations."""
    parameters = SpotTraining(recovery_iterations=3)
    acceptance = ModelAcceptance(by_position=(0.8,), drift_per_update=0.2)
    drafter = DrafterStaleness().policy_updated()
    assert drafter.staleness == 1
    curve = []
    for iterations in range(13):
        session = after(drafter.session_started(), iterations, parameters)
        curve.append(0.8 ** acceptance.drift(session.session_over(parameters).staleness))
    assert curve[0] == pytest.approx(0.8 ** math.exp(0.2))
    assert curve == sorted(curve) and curve[-1] == pytest.approx(0.8, abs=0.001)
    assert after(drafter.session_started(), 3, parameters).trained == pytest.approx(math.exp(-1))


def test_what_decodes_is_the_published_drafter_until_the_session_is_over():
    parameters = SpotTraining()
    training = after(DrafterStaleness(5.0, 5.0, 5.0).session_started(), 10, parameters)
    assert training.staleness == 5 and training.trained < 1
    assert training.session_over(parameters).staleness == training.trained


def test_a_session_that_does_not_save_at_its_end_falls_back_to_its_last_checkpoint():
    parameters = SpotTraining(save_at_end=False, recovery_iterations=5)
    drafter = after(DrafterStaleness(2.0, 2.0, 2.0).session_started(), 3, parameters)
    assert drafter.session_over(parameters).staleness == 2
    saved = replace(drafter, saved=1.5)
    assert after(saved, 3, parameters).session_over(parameters).staleness == 1.5


def test_iterations_of_more_workers_count_as_much_as_is_said():
    drafter = DrafterStaleness(1.0, 1.0, 1.0).session_started()
    alone, useless, full = (
        after(drafter, 3, SpotTraining(scaling=scaling, iteration_s=1.0), workers).trained
        for workers, scaling in ((1, 0.0), (4, 0.0), (4, 1.0))
    )
    assert alone == useless > full == pytest.approx(alone**4)


PACE = Pace(token_s=1e-4, trained_bytes=1e9, frozen_bytes=3e9, host_bytes_per_s=25e9)


def test_an_iteration_takes_as_long_as_its_tokens_and_workers_share_it():
    packed, padded = SpotTraining(), SpotTraining(packing=False)
    tokens = [1000, 2000, 9000]
    assert PACE.iteration_s(tokens, 1, packed) == pytest.approx(1.2)
    assert PACE.iteration_s(tokens, 4, packed) == pytest.approx(0.3)
    assert PACE.iteration_s(tokens, 1, padded) == pytest.approx(2.7)
    assert PACE.iteration_s(tokens, 4, SpotTraining(iteration_s=0.5)) == 0.5


def test_the_pace_follows_from_the_drafter_and_its_gpus():
    alone, four = (pace_of(MODELS["qwen2.5-32b"], GPUS["h100"], tp, 0.4) for tp in (1, 4))
    assert alone.token_s == pytest.approx(4 * four.token_s)
    assert 1 / four.token_s == pytest.approx(200_000, rel=0.01)  # 7.9 GFLOP a token
    # A pair of tokens costs 6 × 40 heads × 128: at 32K tokens, attention is an eighth of the work.
    assert 32768 * alone.pair_s / alone.token_s == pytest.approx(0.127, abs=0.001)


def test_hidden_states_come_back_from_the_host_at_the_rate_of_its_node():
    """Qwen2.5-32B: 10 kB a token; eight GPUs of a node share 17.6 GB/s of pageable memory."""
    alone, four = (pace_of(MODELS["qwen2.5-32b"], GPUS["h100"], tp, 0.4) for tp in (1, 4))
    assert alone.states_s == pytest.approx(4 * four.states_s) == pytest.approx(10240 / 2.2e9)
    assert alone.buffered_bytes == 10240 + 12


def test_attention_is_of_each_response_also_where_they_are_packed():
    pace = Pace(token_s=1e-4, pair_s=1e-8)
    one, two = (pace.iteration_s(tokens, 1, SpotTraining()) for tokens in ([8000], [4000, 4000]))
    assert one - two == pytest.approx(1e-8 * (8000**2 - 2 * 4000**2))


def test_hidden_states_are_loaded_for_tokens_not_for_padding():
    pace, tokens = Pace(token_s=1e-4, states_s=1e-5), [1000, 9000]
    packed, padded = (
        pace.iteration_s(tokens, 1, SpotTraining(packing=packing)) for packing in (True, False)
    )
    assert packed == pytest.approx(1.0 + 0.1) and padded == pytest.approx(1.8 + 0.1)


@given(st.lists(st.integers(1, 32768), min_size=1, max_size=16), st.integers(1, 16))
def test_packing_never_takes_longer_and_as_long_where_responses_are_equal(tokens, workers):
    pace = Pace(token_s=1e-4, pair_s=1e-9, states_s=1e-6)
    packed, padded = (
        pace.iteration_s(tokens, workers, SpotTraining(packing=packing))
        for packing in (True, False)
    )
    assert packed <= padded * (1 + 1e-12)
    assert (packed == pytest.approx(padded, rel=1e-12)) == (len(set(tokens)) == 1)


def test_a_checkpoint_has_adams_moments_and_without_selection_the_frozen_head_and_embedding():
    pace = pace_of(MODELS["qwen2.5-32b"], GPUS["h100"], 4, 0.4)
    assert pace.trained_bytes == pytest.approx(12 * 0.54e9, rel=0.01)
    assert pace.frozen_bytes == 4 * 2 * 152064 * 5120


def test_a_selective_asynchronous_checkpoint_keeps_training_waiting_least():
    waits = {
        (asynchronous, selective): PACE.save_s(
            SpotTraining(asynchronous_saves=asynchronous, selective_saves=selective)
        )[0]
        for asynchronous in (True, False)
        for selective in (True, False)
    }
    assert waits[False, False] == 4 * waits[False, True] > 5 * waits[True, True]
    assert waits[True, False] == 4 * waits[True, True]


def test_without_a_data_buffer_long_responses_are_not_learnt():
    drafter = DrafterStaleness().policy_updated().session_started()
    with_buffer, without = SpotTraining(), SpotTraining(data_buffer=False)
    covered = after(drafter, 5, with_buffer).session_over(with_buffer, 500)
    short = after(drafter, 5, without).session_over(without, 500)
    assert covered.staleness == covered.beyond == short.staleness < 1
    assert (short.covered_tokens, short.beyond) == (500, 1)


def test_a_static_drafter_drifts_until_drift_is_full():
    acceptance = ModelAcceptance(by_position=(0.8,), drift_per_update=0.1, most_drift=0.5)
    drafter, drifts = DrafterStaleness(), []
    for _ in range(10):
        drafter = drafter.policy_updated()
        drifts.append(acceptance.drift(drafter.staleness))
    assert drifts == sorted(drifts) and drifts[-1] == drifts[5] == math.exp(0.5)
