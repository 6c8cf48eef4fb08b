"""Launches of verl: what its releases do with the settings that a script writes."""

from pathlib import Path
from typing import Any

import pytest

from simrl.launch.settings import read_launch
from simrl.launch.translate import NOT_UNDERSTOOD, translate
from simrl.scenario.dotted import get
from simrl.scenario.load import load_scenarios
from tests.launch.reading import COMPLETE, launched, read

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
OFFLOADED = f"{ACTOR}.strategy=fsdp2 {ACTOR}.fsdp_config.param_offload=True"
KL = f"{ACTOR}.use_kl_loss=True"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_max_token_len_per_gpu=8192"


def field(folder: Path, name: str, settings: str, release: str = "0.9") -> Any:
    """Return a field of the scenario of verl's synchronous trainer with settings beside the
    common ones."""
    return get(translate(read(folder, f"{COMPLETE} {settings}"), {}, release).data, name)


@pytest.mark.parametrize(
    ("settings", "release", "kept"),
    [
        (f"{ROLLOUT}.name=vllm", "0.5", True),
        (f"{ROLLOUT}.name=vllm", "0.9", False),
        (f"{ROLLOUT}.name=vllm actor_rollout_ref.model.lora_rank=32", "0.9", True),
        (f"{ROLLOUT}.name=sglang", "0.5", False),
        (f"{ROLLOUT}.name=sglang", "0.9", True),
        (f"{ROLLOUT}.name=vllm {ROLLOUT}.free_cache_engine=False", "0.5", False),
    ],
)
def test_an_engine_copies_its_weights_to_the_host_where_its_release_does(
    tmp_path, settings, release, kept
):
    assert field(tmp_path, "training.rollout_offload", settings, release) is kept


@pytest.mark.parametrize(("release", "memory"), [("0.5", "pinned"), ("0.9", "pageable")])
def test_fsdp_2_offloads_weights_to_the_memory_of_its_release(tmp_path, release, memory):
    assert field(tmp_path, "training.offload_memory", OFFLOADED, release) == memory


@pytest.mark.parametrize(("release", "beside"), [("0.5", False), ("0.9", True)])
def test_fsdp_gathers_beside_the_arithmetic_from_release_0_9_on(tmp_path, release, beside):
    assert field(tmp_path, "training.gather_overlap", "", release) is beside


def test_sglang_is_told_of_eager_passes_from_release_0_6_on(tmp_path):
    eager = f"{ROLLOUT}.name=sglang {ROLLOUT}.enforce_eager=True"
    assert field(tmp_path, "engine.enforce_eager", eager, "0.5") is False
    assert field(tmp_path, "engine.enforce_eager", eager, "0.6") is True


def test_sglangs_share_of_memory_has_no_reserve(tmp_path):
    assert field(tmp_path, "engine.reserve_bytes", f"{ROLLOUT}.name=sglang") == 0
    assert field(tmp_path, "engine.reserve_bytes", f"{ROLLOUT}.name=vllm") is None


def test_log_prob_passes_have_the_updates_budget_unless_theirs_is_written(tmp_path):
    name = "training.log_prob_tokens_per_microbatch"
    of_reference = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=40000"
    assert field(tmp_path, name, f"{DYNAMIC} {KL} {of_reference}") is None
    written = f"{ROLLOUT}.log_prob_max_token_len_per_gpu=16384"
    assert field(tmp_path, name, f"{DYNAMIC} {KL} {of_reference} {written}") == 16384


def test_the_reference_may_be_another_model(tmp_path):
    other = "actor_rollout_ref.ref.model.path=Qwen/Qwen3-8B"
    assert field(tmp_path, "training.reference_model", f"{KL} {other}") == "qwen3-8b"
    assert field(tmp_path, "training.reference_model", other) is None


def test_sync_mode_cuts_the_batch_into_a_part_for_each_worker(tmp_path):
    launch = read(tmp_path, f"{COMPLETE} {ROLLOUT}.name=vllm {ROLLOUT}.mode=sync")
    data = translate(launch, {}, "0.5").data
    assert data["systems"][0]["version"] == "0.4"
    assert get(data, "engine.preset") == "vllm-0.8"


@pytest.mark.parametrize(
    ("system", "training", "engine"),
    [
        ({"name": "verl_colocated", "minibatches": 2}, {}, {"max_num_seqs": 200}),
        (
            {"name": "verl_colocated"},
            {"sharding": "optimizer", "tensor_parallel": 2, "pipeline_parallel": 2},
            {"gpu_memory_utilization": 0.83, "max_num_batched_tokens": 4096},
        ),
        ({"name": "dapo", "over_sampling": 2.0, "minibatches": 2}, {"sequence_parallel": 2}, {}),
        ({"name": "one_step_off", "rollout_share": 0.5, "log_probs": 0}, {"ppo_epochs": 2}, {}),
        ({"name": "one_step_off", "rollout_share": 0.5}, {}, {"enforce_eager": True}),
        (
            {
                "name": "verl_fully_async",
                "rollout_share": 0.5,
                "staleness": 0.5,
                "sync_step": 2,
                "partial_rollout": False,
            },
            {},
            {},
        ),
        ({"name": "verl_ngram"}, {}, {}),
    ],
    ids=["fsdp", "megatron", "dapo", "bypass", "one step off", "fully async", "ngram"],
)
def test_a_launch_that_advise_writes_is_read_as_the_settings_it_was_written_from(
    tmp_path, system, training, engine
):
    lengths = {"group": 8, "cap_tokens": 4096, "mean_tokens": 500, "sigma": 0.5, "steps": 2}
    lengths |= {"prompt_tokens": 256, "prompt_cap_tokens": 2048}
    scenario = {
        "name": "there",
        "steps": 2,
        "model": "qwen3-8b",
        "cluster": {"gpu": "h100", "gpus": 32, "tp": 2},
        "workload": {"synthetic": {"prompts_per_step": 96, **lengths}},
        "engine": {"max_num_seqs": 128, **engine},
        "training": {"tokens_per_microbatch": 8192, **training},
        "systems": [system],
    }
    there = launched(tmp_path, scenario)
    (tmp_path / "run.sh").write_text(" \\\n".join(there.command))
    read_back = translate(read_launch(tmp_path / "run.sh"), {"model": "qwen3-8b"})
    assert not read_back.of(NOT_UNDERSTOOD)
    back = {**read_back.data, "steps": 2, "warmup_steps": 0}
    back["systems"] = read_back.data["systems"][:1]
    back["workload"]["synthetic"] |= lengths
    assert launched(tmp_path, back).settings == there.settings
    (again,) = load_scenarios(tmp_path / "scenario.yaml")
    for section in ("engine", "training"):
        found = getattr(again, section).model_dump()
        assert found.items() >= scenario[section].items()


MODE = "trainer.v1.trainer_mode"
APART = f"{ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=8"


def keys_of(folder: Path, settings: str) -> dict[str, tuple[str, str]]:
    """Return the list of each key, and what became of it."""
    keys = translate(read(folder, f"{COMPLETE} {settings}"), {}).keys
    return {key.key: (key.list, key.becomes) for key in keys}


def test_a_misspelt_mode_is_not_understood_and_the_modes_are_named(tmp_path):
    kind, becomes = keys_of(tmp_path, f"{MODE}=seperate_async")[MODE]
    assert kind == NOT_UNDERSTOOD
    assert "did you mean separate_async?" in becomes
    assert "sync, colocate_async, separate_async; sync is taken" in becomes


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("sampler.max_offpolicy_threshold", "max_off_policy_threshold"),
        ("sampler.max_off_policy_stategy", "max_off_policy_strategy"),
        ("separate_async.parameter_sync_steps", "parameter_sync_step"),
    ],
)
def test_a_misspelt_key_of_v1_is_not_understood(tmp_path, written, meant):
    key = f"trainer.v1.{written}"
    assert keys_of(tmp_path, f"{key}=3")[key] == (NOT_UNDERSTOOD, f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (f"{MODE}=sync", "verl_v1_sync"),
        ("trainer.use_v1=True", "verl_v1_sync"),
        ("trainer.v1.sampler.max_off_policy_threshold=4", "verl_v1_sync"),
        ("", "verl_colocated"),
        (f"trainer.use_v1=False {MODE}=sync", "verl_colocated"),
        (f"trainer.use_v1=False {MODE}=colocate_async", "verl_colocated"),
        (f"trainer.use_v1=True {APART} {MODE}=separate_async", "verl_v1_separate_async"),
    ],
)
def test_a_script_that_names_v1_has_its_trainer(tmp_path, settings, name):
    data = translate(read(tmp_path, f"{COMPLETE} {settings}"), {}).data
    assert data["systems"][0]["name"] == name


def test_use_v1_beside_a_mode_is_not_called_the_synchronous_one(tmp_path):
    kind, becomes = keys_of(tmp_path, f"trainer.use_v1=True {APART} {MODE}=separate_async")[
        "trainer.use_v1"
    ]
    assert "sync mode" not in becomes
    assert kind == "understood"


@pytest.mark.parametrize(
    ("settings", "passes"), [("bypass_mode=True", 0), ("bypass_mode=False", None)]
)
def test_what_an_asynchronous_script_writes_of_log_prob_passes_holds_beside_it(
    tmp_path, settings, passes
):
    text = f"{COMPLETE} {APART} {MODE}=separate_async algorithm.rollout_correction.{settings}"
    _, *others = translate(read(tmp_path, text), {}).data["systems"]
    assert [one.get("log_probs") for one in others] == [passes] * 3
