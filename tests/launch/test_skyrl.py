"""SkyRL's table: the system that its settings choose, its GPUs, and names of older releases."""

import pytest

from simrl.launch.settings import read_launch
from simrl.launch.translate import translate

BASE = "uv run -m skyrl.train.entrypoints.main_base"
APART = (
    "trainer.placement.colocate_all=false trainer.placement.policy_num_gpus_per_node=4"
    " generator.inference_engine.num_engines=6 generator.inference_engine.tensor_parallel_size=2"
)


def read(folder, arguments, program=BASE):
    script = folder / "run.sh"
    script.write_text(f"{program} trainer.policy.model.path=Qwen/Qwen3-8B {arguments}\n")
    return translate(read_launch(script), {}).data


@pytest.mark.parametrize(
    ("program", "arguments", "system"),
    [
        (BASE, "trainer.placement.colocate_all=true", "verl_colocated"),
        (BASE, "trainer.algorithm.dynamic_sampling.type=filter", "dapo"),
        (BASE, APART, "split"),
        ("uv run -m examples.train.async.main_async", APART, "one_step_off"),
        (BASE, f"{APART} trainer.fully_async.enabled=true", "skyrl_async"),
    ],
)
def test_placement_program_and_sampling_choose_the_system(tmp_path, program, arguments, system):
    assert read(tmp_path, arguments, program)["systems"][0]["name"] == system


def test_gpus_apart_are_counted_once_for_each_role_that_runs(tmp_path):
    assert read(tmp_path, APART)["cluster"]["gpus"] == 4 + 6 * 2
    apart = f"{APART} trainer.placement.colocate_policy_ref=false trainer.placement.ref_num_gpus_per_node=2"
    assert read(tmp_path, apart)["cluster"]["gpus"] == 4 + 6 * 2 + 2
    no_reference = f"{apart} trainer.algorithm.use_kl_loss=false"
    assert read(tmp_path, no_reference)["cluster"]["gpus"] == 4 + 6 * 2


def test_micro_batches_are_sequences_unless_they_have_a_token_budget(tmp_path):
    training = read(tmp_path, "trainer.micro_train_batch_size_per_gpu=8")["training"]
    assert (training["microbatching"], training["sequences_per_microbatch"]) == ("fixed", 8)
    training = read(tmp_path, "trainer.max_tokens_per_microbatch=32768")["training"]
    assert (training["microbatching"], training["tokens_per_microbatch"]) == ("dynamic", 32768)


def test_names_of_releases_before_0_3_mean_the_same(tmp_path):
    old = "generator.num_inference_engines=2 generator.inference_engine_tensor_parallel_size=4"
    data = read(
        tmp_path,
        f"{old} trainer.placement.policy_num_gpus_per_node=8 generator.gpu_memory_utilization=0.6",
        "uv run -m skyrl_train.entrypoints.main_base",
    )
    assert (data["cluster"]["gpus"], data["cluster"]["tp"]) == (8, 4)
    assert data["engine"]["gpu_memory_utilization"] == 0.6
    assert data["engine"]["preset"] == "vllm-0.8-async"


def test_a_loss_on_the_engines_log_probs_needs_no_pass_of_the_policy(tmp_path):
    passes = {
        loss: read(tmp_path, f"trainer.algorithm.policy_loss_type={loss}")["systems"][0].get(
            "log_probs", 1
        )
        for loss in ("dual_clip", "rollout_is")
    }
    assert passes == {"dual_clip": 1, "rollout_is": 0}
