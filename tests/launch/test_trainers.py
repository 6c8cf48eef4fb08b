"""Launches of today's asynchronous trainers become the systems of their names, with the settings that they write."""

import pytest

from simrl.errors import InputError
from simrl.launch.settings import read_launch
from simrl.launch.translate import NOT_UNDERSTOOD, translate

VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B"
APART = "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=8"
SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
FULLY = f"{VERL.replace('trainer.main_ppo', 'experimental.fully_async_policy.fully_async_main')} {APART}"
TRL = """from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
args = AsyncGRPOConfig(max_staleness=2, weight_sync_steps=3)
AsyncGRPOTrainer(model="Qwen/Qwen3-8B", args=args)
"""
ROLL = """pretrain: Qwen/Qwen3-8B
async_generation_ratio: 2
rollout_batch_size: 64
prompt_length: 512
response_length: 4096
actor_train: {device_mapping: "list(range(0,8))", strategy_args: {strategy_name: megatron_train}}
actor_infer: {device_mapping: "list(range(8,16))", strategy_args: {strategy_name: vllm}}
"""
NEMO = """policy:
  model_name: Qwen/Qwen3-8B
  train_global_batch_size: 256
  generation: {backend: vllm, colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}}
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 8}
cluster: {num_nodes: 2, gpus_per_node: 8}
"""
RLINF = """algorithm: {n_minibatches: 2, group_size: 8}
cluster: {auto_scheduler: true, component_placement: {actor: 0-3, rollout: 4-7}}
rollout: {model: {model_path: Qwen/Qwen3-8B}, max_running_requests: 32}
data: {rollout_batch_size: 64, max_prompt_length: 512}
runner: {seq_length: 8192}
"""
PRIME = """[orchestrator]
batch_size = 256
group_size = 8
max_off_policy_steps = 4
"""


@pytest.mark.parametrize(
    ("file", "text", "system"),
    [
        ("run.sh", f"{VERL} trainer.use_v1=true", {"name": "verl_v1_sync"}),
        (
            "run.sh",
            f"{VERL} trainer.v1.trainer_mode=colocate_async trainer.v1.sampler.max_off_policy_threshold=4",
            {"name": "verl_v1_colocate_async", "max_span": 4},
        ),
        (
            "run.sh",
            f"{VERL} {APART} trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=2",
            {"name": "verl_v1_separate_async", "sync_step": 2, "rollout_share": 0.5},
        ),
        (
            "run.sh",
            f"{VERL} {APART} trainer.v1.trainer_mode=separate_async {SWITCH}=true",
            {"name": "verl_v1_separate_async", "enable_switch": True},
        ),
        (
            "run.sh",
            f"{FULLY} async_training.staleness_threshold=0.5 async_training.use_dynamic_resource_scheduling=true",
            {"name": "verl_fully_async", "staleness": 0.5, "dynamic_schedule": "default"},
        ),
        ("rl.toml", PRIME, {"name": "prime_rl", "max_off_policy_steps": 4}),
        ("train.py", TRL, {"name": "trl_async", "max_staleness": 2, "weight_sync_steps": 3}),
        ("run.yaml", ROLL, {"name": "roll_async", "async_generation_ratio": 2}),
        ("run.yaml", RLINF, {"name": "rlinf_dynamic", "max_running_requests": 32}),
        (
            "run.yaml",
            f"{NEMO}async_rl: {{sampler: {{name: weight_fifo, max_staleness_versions: 2}}}}\n",
            {"name": "nemo_rl_single_controller", "sampler": "weight_fifo", "window": 2},
        ),
        (
            "run.yaml",
            NEMO.replace("grpo: {", "grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 2}, "),
            {"name": "nemo_rl_async", "version": "main", "max_age": 2},
        ),
    ],
    ids=lambda value: value.get("name") if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_launch_becomes_the_system_of_its_trainer(tmp_path, file, text, system):
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    first = translate(read_launch(path), {}).data["systems"][0]
    assert system.items() <= first.items()


@pytest.mark.parametrize(
    ("text", "window"),
    [
        (VERL, (12, 4)),
        (f"{VERL} trainer.v1.trainer_mode=colocate_async", (12, 4)),
        (f"{VERL} {APART} trainer.v1.trainer_mode=separate_async", (96, 48)),
        (
            f"{VERL} {APART} trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=2",
            (48, 24),
        ),
        (f"{FULLY} async_training.trigger_parameter_sync_step=3", (72, 36)),
        ("uv run rl --orchestrator.batch-size 256", (24, 12)),
    ],
)
def test_a_trainer_that_begins_with_full_queues_is_simulated_for_longer(tmp_path, text, window):
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    data = translate(read_launch(path), {}).data
    assert (data["steps"], data["warmup_steps"]) == window
    shorter = translate(read_launch(path), {"steps": 3, "warmup_steps": 1}).data
    assert (shorter["steps"], shorter["warmup_steps"]) == (3, 1)


def test_an_age_that_nemo_rl_refuses_is_named_by_its_key(tmp_path):
    path = tmp_path / "run.yaml"
    zero = "grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 0}, "
    path.write_text(NEMO.replace("grpo: {", zero), encoding="utf-8")
    made = translate(read_launch(path), {})
    assert made.data["systems"][0].get("max_age", 1) == 1
    assert any("max_trajectory_age_steps is below 1" in note for note in made.notes)


def test_rlinfs_scheduler_is_no_note_where_its_system_is_simulated(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RLINF, encoding="utf-8")
    assert not any("auto_scheduler" in note for note in translate(read_launch(path), {}).notes)


def test_the_prompts_of_trls_step_follow_the_trainers_gpus_of_the_command_line(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRL, encoding="utf-8")
    for gpus in (1, 4):
        data = translate(read_launch(path), {"cluster.train.gpus": gpus}).data
        assert data["workload"]["synthetic"]["prompts_per_step"] == gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("uv run python open_instruct/grpo_fast.py --beta 0.0", r"systems: \[open_instruct\]"),
        ("accelerate launch open_instruct/grpo_fast.py", r"systems: \[open_instruct\]"),
        ("python -m pipelinerl.launch output_dir=x", r"systems: \[pipeline_rl\]"),
        (
            "trl vllm-serve --model Qwen/Qwen3-8B &\naccelerate launch --num_processes 4 trl_async.py",
            "name it \\(--from FILE.py\\)",
        ),
    ],
)
def test_a_launch_that_is_not_read_is_refused_with_what_to_do(tmp_path, text, words):
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_launch(path)


def test_prime_rls_older_keys_of_sampling_and_environments_are_understood_or_without_effect(
    tmp_path,
):
    path = tmp_path / "rl.toml"
    older = """[orchestrator.sampling]
temperature = 1.0
max_tokens = 1024
[[orchestrator.env]]
id = "math"
args = { level = 5 }
"""
    path.write_text(PRIME + older, encoding="utf-8")
    assert not translate(read_launch(path), {}).of(NOT_UNDERSTOOD)
