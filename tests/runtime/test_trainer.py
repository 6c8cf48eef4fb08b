"""The trainer and the rewarder as schedules see them."""

import pytest
import simpy

from simrl.runtime.simulated_trainer import SimulatedRewarder, SimulatedTrainer
from simrl.trace.trace import Response
from tests.helpers import recorder, rollout
from tests.training.test_costs import costs, flops


def a_trainer(lanes=(0,), **more):
    env = simpy.Environment()
    record = recorder(*(f"rollout-{lane:03d}" for lane in lanes))
    return env, SimulatedTrainer(env, costs(**more), lanes, record), record


def test_an_update_takes_its_phases_one_after_the_other_and_makes_one_version():
    env, trainer, record = a_trainer(mfu=0.5, log_prob_mfu=0.25, publish_s=7.0)
    step = env.run(trainer.train([rollout(0, {0: 16})]))
    forward_s, update_s = flops(20) / (0.25 * 1e6), 3 * flops(20) / (0.5 * 1e6)
    assert env.now == pytest.approx(forward_s + update_s + 7.0)
    assert [(s.kind, s.policy_version) for s in record.spans] == [
        ("log_prob", 0),
        ("train", 0),
        ("publish", 0),
    ]
    assert [s.ended_s for s in record.spans] == pytest.approx(
        [forward_s, forward_s + update_s, env.now]
    )
    assert (step.step, step.started_s, step.finished_s) == (0, 0.0, env.now)
    assert trainer.version == 1


def test_new_weights_have_their_version_only_when_they_are_published():
    env, trainer, _ = a_trainer(publish_s=7.0)
    done = trainer.train([rollout(0, {0: 16})])
    env.run(until=6.9)
    assert trainer.version == 0
    env.run(done)
    assert trainer.version == 1


def test_an_update_that_is_not_published_is_a_version_that_goes_to_the_workers_with_the_next():
    env, trainer, record = a_trainer(publish_s=7.0, checkpoint_every=1, checkpoint_s=3.0)
    told = trainer.published(1)
    env.run(trainer.train([rollout(0, {0: 16})], publish=False))
    assert (trainer.version, told.triggered, trainer.published(1).triggered) == (1, False, False)
    assert [s.kind for s in record.spans] == ["log_prob", "train", "checkpoint"]
    env.run(trainer.train([rollout(1, {0: 16})]))
    assert (trainer.version, told.triggered, trainer.published(2).triggered) == (2, True, True)
    assert [s.kind for s in record.spans].count("publish") == 1


def test_a_colocated_trainer_occupies_every_lane_in_every_phase():
    env, trainer, record = a_trainer(lanes=(0, 1), gpus=2, switch=True)
    env.run(trainer.train([rollout(0, {0: 16})]))
    kinds = ["switch", "log_prob", "train", "switch"]
    for lane in (0, 1):
        spans = [s for s in record.spans if s.lane == lane]
        assert [s.kind for s in spans] == kinds
        assert [s.started_s for s in spans[1:]] == [s.ended_s for s in spans[:-1]]


def test_the_off_policyness_of_an_update_counts_tokens_by_the_version_that_generated_them():
    """I34: off-policyness is as counted by hand."""
    env, trainer, _ = a_trainer()
    env.run(trainer.train([rollout(0, {0: 1})]))
    env.run(trainer.train([rollout(1, {0: 1})]))
    step = env.run(trainer.train([rollout(2, {0: 6, 2: 10}), rollout(3, {1: 4}, prompt_tokens=9)]))
    assert (step.step, step.policy_version) == (2, 2)
    assert step.off_policyness_mean == (2 * 6 + 0 * 10 + 1 * 4) / 20
    assert step.off_policyness_max == 2
    assert (step.samples, step.prompt_tokens, step.response_tokens) == (2, 4 + 9, 20)


def test_what_was_trained_is_recorded_with_its_step():
    env, trainer, record = a_trainer()
    for uid in (0, 1):
        record.request_ended(rollout(uid, {0: 5}))
        env.run(trainer.train([rollout(uid, {0: 5})]))
    rows = record.result(env.now, {}).samples.to_pylist()
    assert [(r["uid"], r["status"], r["trained_step"]) for r in rows] == [
        (0, "trained", 0),
        (1, "trained", 1),
    ]


def test_a_sample_cannot_be_trained_twice_after_it_was_dropped_or_before_it_is_done():
    """I13: what may not be trained ends the run."""
    for spoil in ("trained", "dropped", "unfinished"):
        env, trainer, record = a_trainer()
        batch = [rollout(0, {0: 5}, done=spoil != "unfinished")]
        if spoil == "trained":
            env.run(trainer.train(batch))
        elif spoil == "dropped":
            record.dropped(batch)
        with pytest.raises(RuntimeError, match="sample 0"):
            env.run(trainer.train(batch))


def test_rewards_come_all_at_once_after_their_time_in_the_same_rollouts():
    env = simpy.Environment()
    batch = [rollout(0, {0: 5}), rollout(1, {0: 50})]
    rewards = {0: Response(5, 0.0), 1: Response(50, 1.0)}
    scored = env.run(SimulatedRewarder(env, 0.2, rewards).score(batch))
    assert scored == [batch[0]._replace(reward=0.0), batch[1]._replace(reward=1.0)]
    assert env.now == 0.2
