"""AReaL's table: allocations of both generations, the reference, and the way back from a launch."""

import pytest

from simrl.launch.settings import read_launch
from simrl.launch.translate import NOT_UNDERSTOOD, translate
from simrl.systems.recipes import parameters_of
from tests.launch.reading import launched

RUN = "python3 examples/math/gsm8k_rl.py --config mine.yaml actor.path=Qwen/Qwen3-8B"


def read(folder, arguments):
    script = folder / "run.sh"
    script.write_text(f"{RUN} {arguments}\n")
    return translate(read_launch(script), {})


def layout(translation):
    cluster, training = translation.data["cluster"], translation.data["training"]
    sizes = [training[f"{kind}_parallel"] for kind in ("tensor", "pipeline", "sequence", "expert")]
    share = translation.data["systems"][0].get(
        "rollout_share", parameters_of("areal")["rollout_share"]
    )
    return cluster["gpus"], cluster["tp"], share, training["sharding"], sizes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("rollout.backend=sglang:d4t2 actor.backend=fsdp:d8", (16, 2, 0.5, "fsdp", [1, 1, 1, 1])),
        ("allocation_mode=sglang:d4t2+fsdp:d8", (16, 2, 0.5, "fsdp", [1, 1, 1, 1])),
        ("allocation_mode=sglang.d4p1t2+d8p1t1", (16, 2, 0.5, "fsdp", [1, 1, 1, 1])),
        ("allocation_mode=sglang.d6m1p1+d1m1p2", (8, 1, 0.75, "fsdp", [1, 2, 1, 1])),
        ("allocation_mode=vllm:d4t2+d4c2", (16, 2, 0.5, "fsdp", [1, 1, 2, 1])),
        (
            "rollout.backend=vllm:d2t8 actor.backend='megatron:(attn:d2p2t4c2|ffn:d2p2t2e4)'",
            (48, 8, 1 / 3, "optimizer", [4, 2, 2, 8]),
        ),
    ],
)
def test_allocations_of_all_generations_give_gpus_and_layouts(tmp_path, arguments, expected):
    assert layout(read(tmp_path, arguments)) == expected


def test_a_reference_is_a_pass_only_with_a_kl_term(tmp_path):
    backends = "rollout.backend=sglang:d1 actor.backend=fsdp:d1 ref.path=Qwen/Qwen3-8B"
    passes = {
        weight: read(tmp_path, f"{backends} actor.kl_ctl={weight}").data["training"][
            "extra_log_probs"
        ]
        for weight in (0.0, 0.01)
    }
    assert passes == {0.0: 0, 0.01: 1}


def test_engines_that_share_the_trainers_gpus_are_synchronous(tmp_path):
    shared = "rollout.scheduling_strategy.type=colocation rollout.scheduling_strategy.target=actor"
    data = read(tmp_path, f"rollout.backend=sglang:d8 actor.backend=fsdp:d8 {shared}").data
    assert data["cluster"]["gpus"] == 8
    assert data["systems"][0]["name"] == "areal_sync"


@pytest.mark.parametrize(
    ("training", "model"),
    [
        ({"sequence_parallel": 2}, "qwen3-8b"),
        ({"sharding": "optimizer", "tensor_parallel": 2, "pipeline_parallel": 2}, "qwen3-8b"),
        ({"sharding": "optimizer", "tensor_parallel": 4, "expert_parallel": 8}, "qwen3-30b-a3b"),
    ],
)
def test_a_launch_that_advise_writes_is_read_as_the_settings_it_was_written_from(
    tmp_path, training, model
):
    lengths = {"group": 8, "cap_tokens": 4096, "mean_tokens": 500, "sigma": 0.5, "steps": 2}
    scenario = {
        "name": "there",
        "steps": 2,
        "model": model,
        "cluster": {"gpu": "h100", "gpus": 32, "tp": 2},
        "workload": {"synthetic": {"prompts_per_step": 96, **lengths}},
        "training": {"tokens_per_microbatch": 8192, **training},
        "systems": [{"name": "areal", "eta": 3, "rollout_share": 0.5, "minibatches": 2}],
    }
    there = launched(tmp_path, scenario)
    (tmp_path / "run.sh").write_text(" \\\n".join(there.command))
    read_back = translate(read_launch(tmp_path / "run.sh"), {"model": model})
    assert not read_back.of(NOT_UNDERSTOOD)
    back = {
        **read_back.data,
        "steps": 2,
        "warmup_steps": 0,
        "systems": read_back.data["systems"][:1],
    }
    back["workload"]["synthetic"] |= lengths
    assert launched(tmp_path, back).settings == there.settings
