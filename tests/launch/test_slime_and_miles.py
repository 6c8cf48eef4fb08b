"""Launches of slime and miles: what their options mean for a scenario."""

from pathlib import Path
from typing import Any

import pytest

from simrl.errors import InputError
from simrl.launch.settings import read_launch
from simrl.launch.translate import Translation, translate
from simrl.scenario.dotted import get
from simrl.scenario.model import Scenario
from simrl.study.launch import Launch, launch
from simrl.systems.recipes import parameters_of
from tests.helpers import prepared, scenario

COMMON = """
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint /root/Qwen3-4B --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --context-parallel-size 2
"""


def read(folder: Path, command: str) -> Translation:
    """Return the translation of a script of one command."""
    path = folder / "run.sh"
    path.write_text(" ".join(command.split()) + "\n", encoding="utf-8")
    return translate(read_launch(path), {})


def of_slime(folder: Path, options: str, program: str = "train.py") -> Translation:
    return read(folder, f"python3 {program} {COMMON} {options}")


def system(translation: Translation) -> dict[str, Any]:
    """Return the launch's own system with its parameters."""
    first = translation.data["systems"][0]
    return {**parameters_of(first["name"]), **first}


@pytest.mark.parametrize(
    ("program", "options", "name", "parameters"),
    [
        ("train.py", "--colocate", "verl_colocated", {}),
        ("train.py", "--colocate --over-sampling-batch-size 48", "april", {"over_sampling": 1.5}),
        (
            "train.py",
            "--colocate --dynamic-sampling-filter-path a.b",
            "april",
            {"over_sampling": 2, "dynamic_sampling": 1},
        ),
        ("train.py", "--rollout-num-gpus 24", "split", {"rollout_share": 0.75}),
        ("train_async.py", "--rollout-num-gpus 8", "slime_train_async", {"rollout_share": 0.5}),
        (
            "train_async.py",
            "--rollout-num-gpus 8 --dynamic-sampling-filter-path a.b",
            "one_step_off",
            {"dynamic_sampling": 1},
        ),
        (
            "train_async.py",
            "--rollout-num-gpus 8 --sglang-server-concurrency 8 --rollout-function-path slime.rollout.fully_async_rollout.run",
            "slime_fully_async",
            {"sglang_server_concurrency": 8},
        ),
    ],
)
def test_the_program_and_its_options_choose_the_system(
    tmp_path, program, options, name, parameters
):
    chosen = system(of_slime(tmp_path, f"--global-batch-size 256 {options}", program))
    assert chosen["name"] == name
    assert parameters.items() <= chosen.items()
    assert set(chosen) - {"name"} <= set(parameters_of(name))


def test_gpus_apart_are_added_up_and_shared_ones_are_not(tmp_path):
    apart = of_slime(tmp_path, "--rollout-num-gpus 24")
    assert get(apart.data, "cluster.gpus") == 32
    assert get(of_slime(tmp_path, "--colocate").data, "cluster.gpus") == 8


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ("--global-batch-size 256", 0),
        ("--global-batch-size 64", 1),
        ("--num-steps-per-rollout 4 --use-rollout-logprobs", 0),
        ("--global-batch-size 256 --advantage-estimator gspo", 1),
    ],
)
def test_slime_takes_old_log_probs_from_an_update_of_one_mini_batch(tmp_path, options, passes):
    assert system(of_slime(tmp_path, f"--colocate {options}"))["log_probs"] == passes


def test_miles_computes_old_log_probs_of_one_mini_batch_too(tmp_path):
    translation = read(
        tmp_path, f"python3 miles/train.py {COMMON} --colocate --global-batch-size 256"
    )
    assert translation.launch.table.name == "miles"
    assert system(translation)["log_probs"] == 1


def test_fully_asynchronous_miles_keeps_its_names(tmp_path):
    options = f"{COMMON} --rollout-num-gpus 8 --fully-async --async-max-concurrent-samples 512"
    options += " --max-weight-staleness 2 --pause-generation-mode in_place"
    chosen = system(read(tmp_path, f"python3 train_async.py {options}"))
    assert chosen["name"] == "miles_async"
    assert (chosen["max_concurrent_samples"], chosen["max_weight_staleness"]) == (512, 2)
    assert chosen["pause_generation_mode"] == "in_place"


def test_a_budget_of_a_gpu_is_multiplied_by_context_parallelism(tmp_path):
    training = of_slime(tmp_path, "--colocate").data["training"]
    assert training["tokens_per_microbatch"] == 2 * 9216
    assert "sequences_per_microbatch" not in training


def test_attention_ranks_share_the_gpus_and_the_requests_of_an_engine(tmp_path):
    translation = of_slime(
        tmp_path,
        "--colocate --rollout-num-gpus-per-engine 8 --sglang-enable-dp-attention --sglang-dp-size 4 --sglang-ep-size 8",
    )
    cluster = translation.data["cluster"]
    assert (cluster["tp"], cluster["dp"], cluster["ep"]) == (2, 4, 8)
    assert get(translation.data, "engine.max_num_seqs") == 512 // 4


def test_a_reference_and_a_teacher_are_a_pass_each_whatever_their_weight_in_the_loss(tmp_path):
    options = "--use-kl-loss --kl-loss-coef 0.0 --use-opd --opd-type megatron"
    training = of_slime(tmp_path, f"--colocate {options}").data["training"]
    assert (training["extra_log_probs"], training["reference_weights"]) == (2, "swapped")


def test_drafts_of_the_models_own_head_are_a_chain(tmp_path):
    options = "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-num-draft-tokens 4"
    speculation = system(of_slime(tmp_path, f"--colocate {options}"))["speculation"]
    assert (speculation["model"], speculation["window"]["tokens"]) == ("eagle", 3)
    trees = f"{options} --sglang-speculative-eagle-topk 4"
    translation = of_slime(tmp_path, f"--colocate {trees}")
    assert system(translation)["speculation"] is None
    lacking = {key.key for key in translation.of("not understood")}
    assert {"sglang_speculative_algorithm", "sglang_speculative_num_steps"} <= lacking


def test_an_optimizer_on_the_host_is_not_understood_and_a_note_says_why(tmp_path):
    translation = of_slime(tmp_path, "--colocate --optimizer-cpu-offload")
    assert [key.key for key in translation.of("not understood")] == ["optimizer_cpu_offload"]
    assert any("optimizer's states are on the host" in note for note in translation.notes)


@pytest.mark.parametrize("options", ["--loss-type sft_loss", "--debug-train-only"])
def test_training_without_rollouts_is_refused(tmp_path, options):
    with pytest.raises(InputError, match="no RL rollouts"):
        of_slime(tmp_path, options)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("april", {"over_sampling": 1.5, "minibatches": 4}), ("split", {"rollout_share": 0.5})],
)
def test_a_launch_that_advise_prints_is_read_back(tmp_path, name, parameters):
    described = scenario({"name": name, **parameters}, cluster={"gpu": "h100", "gpus": 16, "tp": 4})
    made = launch(prepared(described))
    assert isinstance(made, Launch), made
    options = " ".join(f"{key} {value}" for key, value in made.settings.items())
    translation = read(tmp_path, f"{made.program} {options}")
    written = Scenario.model_validate(described.model_dump()).model_dump()
    for key in ("cluster.gpus", "cluster.tp", "cluster.dp", "engine.enforce_eager"):
        assert get(translation.data, key) == get(written, key), key
    for key in ("tensor_parallel", "sequence_parallel", "expert_parallel", "tokens_per_microbatch"):
        assert translation.data["training"][key] == written["training"][key], key
    assert get(translation.data, "training.recompute") is True  # as simulated
    assert system(translation)["name"] == name
    assert parameters.items() <= system(translation).items()
    assert not translation.of("not understood")
