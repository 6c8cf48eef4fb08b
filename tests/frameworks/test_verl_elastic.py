"""verl's own rules of when its trainer's GPUs roll out, and simrl's, decide alike on the same random events."""

from collections import deque
from random import Random
from types import SimpleNamespace

import pytest

from simrl.dispatch.elastic import DynamicSchedule, StepSwitch
from tests.frameworks.stubs import driven

SEQUENCES, STEPS = 1_000, 30
PACKAGES = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1")
SCHEDULES = ("verl", "verl.experimental", "verl.experimental.fully_async_policy")
STUBBED = (
    *(
        "ray",
        "omegaconf",
        "transfer_queue",
        "torch",
        "verl.checkpoint_engine",
        "verl.utils",
        "verl.workers",
    ),
    *(
        "verl.experimental.separation",
        "verl.trainer.config",
        "verl.trainer.ppo.utils",
        "verl.trainer.ppo.v1.trainer_base",
    ),
)


class Switching:
    """verl's trainer with a buffer, a clock and switches of the test's own."""

    def __init__(self, module, clock, batch, minibatches, standalone, keys):
        trainer = self.trainer = object.__new__(module.PPOTrainerSeparateAsync)
        trainer.hybrid_rollout_config = SimpleNamespace(enable_switch=True, **keys)
        trainer.config = SimpleNamespace(data=SimpleNamespace(train_batch_size=batch), skip=None)
        trainer.parameter_sync_step, trainer.timing_raw = minibatches, {}
        trainer.replay_buffer, trainer.prev_step_profile = self, False
        trainer.standalone_checkpoint_manager = SimpleNamespace(update_weights=lambda step: {})
        trainer.add_replicas_to_balancer = trainer.clear_sticky_cache = lambda: None
        trainer.switch_to_rollout = self.take_time
        trainer.switch_to_trainer = self.take_time
        trainer._switch_threshold_ratio = keys["switch_threshold_ratio"]
        trainer._idle_steps = trainer._calm_steps = trainer._wait_samples = 0
        trainer._step_sample_wait_seconds = trainer._wait_seconds = 0.0
        trainer._step_wait_samples = trainer._step_threshold = 0
        window = keys["switch_cost_window_size"]
        trainer._to_rollout_costs, trainer._to_trainer_costs = (
            deque(maxlen=window),
            deque(maxlen=window),
        )
        trainer._scaling_factor = 1 / standalone
        self.clock, self.ready, self.seconds, self.lent, self.poll_interval = (
            clock,
            0,
            0.0,
            False,
            2.0,
        )

    def get_sampleable_count(self, step, partition):
        return self.ready

    def take_time(self, already_registered=None):
        self.lent = already_registered is not None
        self.clock.now_s += self.seconds


@pytest.fixture
def clock(monkeypatch):
    return SimpleNamespace(now_s=0.0)


def test_verl_switches_its_gpus_between_steps_when_simrl_does(clock, monkeypatch):
    module = driven("verl.trainer.ppo.v1.trainer_separate_async", PACKAGES, STUBBED)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    tried = differing = lent = 0
    for seed in range(SEQUENCES):
        rng = Random(seed)
        minibatches = rng.choice([1, 2, 4])
        batch, standalone = minibatches * rng.randint(1, 16), rng.choice([0.25, 0.5, 0.75])
        adaptive, window, release = rng.random() < 0.7, rng.randint(1, 4), rng.randint(1, 3)
        ratio = rng.choice([0.25, 0.4, 0.7, 1.0])
        keys = {
            "switch_threshold_ratio": ratio,
            "adaptive_switch_threshold": adaptive,
            "switch_threshold_step_up": 0.05,
            "switch_threshold_step_down": 0.03,
            "switch_threshold_release_steps": release,
            "switch_cost_window_size": window,
        }
        rule = StepSwitch(
            batch, minibatches, standalone, ratio, 0.05 * adaptive, 0.03 * adaptive, release, window
        )
        theirs = Switching(module, clock, batch, minibatches, standalone, keys)
        trainer = theirs.trainer
        trainer.total_training_steps, trainer.current_mode = STEPS, module.HybridEngineMode.TRAINER
        for trainer.global_steps in range(1, STEPS + 1):
            trainer._step_sample_wait_seconds, trainer._step_wait_samples = 0.0, 0
            for _ in range(minibatches):
                theirs.ready = rng.randint(0, batch)
                missing = max(0, batch // minibatches - theirs.ready)
                before_s = clock.now_s
                trainer.on_sample_begin()
                clock.now_s += rng.choice([0.0, rng.randint(0, 12) / 4])
                trainer.on_sample_end()
                rule.waited(clock.now_s - before_s, missing)
            theirs.ready, theirs.seconds, theirs.lent = (
                rng.randint(0, batch),
                rng.randint(0, 16) / 8,
                False,
            )
            before_s = clock.now_s
            trainer.on_step_end()
            lends = rule.lends(theirs.ready, trainer.global_steps == STEPS)
            tried, lent = tried + 2, lent + lends
            differing += (lends != theirs.lent) + (rule.threshold != trainer._switch_threshold())
            if theirs.lent:
                rule.switched("rollout", clock.now_s - before_s)
                before_s, theirs.seconds = clock.now_s, rng.randint(0, 16) / 8
                trainer._timed_switch_to_trainer()
                rule.switched("trainer", clock.now_s - before_s)
    print(f"verl V1's switch: {differing} of {tried} decisions differ ({lent} to lend)")
    assert (differing, lent > 1_000) == (0, True)


def test_verl_schedules_its_gpus_dynamically_when_simrl_does():
    module = driven(f"{SCHEDULES[-1]}.dynamic_schedule.fixed_ratio_policy", SCHEDULES, ("ray",))
    build_policy = module.register_policy.__globals__["build_policy"]
    tried = differing = lent = 0
    for seed in range(SEQUENCES):
        rng = Random(seed)
        required, syncs, ratio = rng.randint(1, 16), rng.randint(1, 4), rng.choice([0.1, 0.3, 0.8])
        policy = rng.choice(["default", "default", "fixed_ratio"])
        rule, theirs = (
            DynamicSchedule(required * syncs, ratio, policy == "default"),
            build_policy(policy, deactivate_ratio=ratio),
        )
        context = module.DynamicScheduleContext(required, syncs, 0, 0, 0)
        for cycle in range(STEPS):
            differing += rule.threshold != theirs.deactivate_wait_samples(context)
            waits = [
                (rng.choice([0.0, rng.uniform(0, 9)]), rng.randint(0, required))
                for _ in range(syncs)
            ]
            for wait in waits:
                rule.waited(*wait)
            context.step_wait_times, context.step_wait_samples = (
                [s for s, _ in waits],
                [n for _, n in waits],
            )
            context.last_deactivate_duration_s = rng.choice([0.0, rng.uniform(0, 9)])
            context.last_activate_duration_s = 0.0
            context.expected_samples = rule.cycle * (cycle + 1)
            surplus = rng.randint(0, rule.cycle)
            context.total_generated_samples = context.expected_samples + surplus
            lends = rule.lends(surplus)
            differing += lends != theirs.should_activate_after_step(cycle + 1, False, context)
            if lends:
                context.last_activate_duration_s = rng.uniform(0, 9)
                lent += 1
            for seconds in (context.last_deactivate_duration_s, context.last_activate_duration_s):
                rule.switched("rollout", seconds)
            theirs.update_after_step(cycle + 1, context)
            rule.over()
            tried += 2
    print(f"verl's dynamic schedule: {differing} of {tried} decisions differ ({lent} to lend)")
    assert (differing, lent > 1_000) == (0, True)
