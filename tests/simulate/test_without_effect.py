"""A setting changes something, or the result says that it has no effect here, or it is refused."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from simrl.errors import InputError
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.systems.recipes import RECIPES
from simrl.validation import models_in
from tests.helpers import SMALL, scenario as small

# A busy cluster, so that what can matter does: KV caches are short, workers have two GPUs, an
# update has several micro-batches and moves over the network.
LENGTHS = {"cap_tokens": 6000, "mean_tokens": 1500, "sigma": 0.9, "prompt_tokens": 600}
BUSY: dict[str, Any] = {
    "name": "busy",
    "steps": 4,
    "model": "qwen3-8b",
    "cluster.gpu": "h100",
    "cluster.gpus": 32,
    "cluster.tp": 2,
    "workload.synthetic": {"steps": 4, "prompts_per_step": 16, "group": 8, "prompts": 32} | LENGTHS,
    "profile.roofline": {},
    "engine.max_num_batched_tokens": 1024,
    "engine.kv_cache_tokens": 8192,
    "cluster.host_speed": 0.2,
}
TURNS = {"turn_tokens": 400, "environment_s": 5.0, "observation_tokens": 200}
SYNTHETIC = BUSY["workload.synthetic"]
BASES: dict[str, dict[str, Any]] = {
    "busy": {},
    "turns": {"workload.synthetic": SYNTHETIC | TURNS, "engine.kv_cache_tokens": 16384},
    "broadcast": {"training.weight_sync": "broadcast"},
    "delta": {"training.weight_sync": "delta"},
    "file": {"training.weight_sync": "file"},
    "reshard": {"training.weight_sync": "reshard"},
    "fixed": {"training.microbatching": "fixed", "training.sequences_per_microbatch": 4},
    "mfu": {"training.mfu": 0.4, "training.log_prob_mfu": 0.4},
    "reference": {"training.extra_log_probs": 1, "training.offload": "phases"},
    "megatron": {"training.sharding": "optimizer", "training.tensor_parallel": 4},
    "experts": {
        "model": "qwen3-30b-a3b",
        "training.expert_parallel": 4,
        "training.sharding": "optimizer",
        "training.tensor_parallel": 4,
        "cluster.gpus": 64,
    },
    "sglang": {"engine.scheduler": "sglang", "engine.kv_cache_tokens": 32768},
    "pools": {"cluster.prefill": {"gpus": 8, "tp": 2}},
    "trains apart": {"cluster.train": {"gpus": 16}},
    "judge": {"judge": {"model": "qwen3-4b", "gpus": 4, "response_tokens": 200.0}},
    "judge by turns": {"judge": {"model": "qwen3-4b", "tp": 2, "response_tokens": 200.0}},
    "evaluation": {"evaluation": {"every": 1}},
    "ngram": {"system.speculation": "ngram"},
    "histospec": {
        "system.speculation": "histospec",
        "speculation.history_workers.memory_bytes": 3e6,
    },
    "draft_model": {"system.speculation": {"name": "draft_model", "model": "qwen3-0.6b"}},
    "eagle3": {"system.speculation": "eagle3"},
}
COLOCATED = (
    "turns",
    "fixed",
    "mfu",
    "reference",
    "megatron",
    "experts",
    "sglang",
    "judge",
    "judge by turns",
)
PARAMETERS = SMALL | {
    "specactor": {"model": "qwen2.5-0.5b", "draft_gpus": 1},
    "rlinf_dynamic": {"minibatches": 1},
}
# Not walked: keys that choose the scenario, prices, and the sections of other sections.
FREE = {
    *("name", "seed", "warmup_steps", "file", "variant", "system", "model", "framework", "faults"),
    *("calibration", "cluster.gpu", "cluster.gpus", "cluster.sheet", "cluster.cost_per_gpu_hour"),
    *("cluster.train.gpu", "cluster.train.sheet", "cluster.train.cost_per_gpu_hour"),
    *("workload.trace", "evaluation.lengths", "judge.model", "judge.gpu", "judge.sheet"),
    *("judge.cost_per_gpu_hour", "judge.profile", "judge.precision"),
}
# The only other value that is allowed here is what simrl does without one.
AS_USUAL = {"training.recompute", "speculation.verification", "evaluation.when"}
ROOMY = ("kv_cache_tokens", "gpu_memory_utilization", "reserve_bytes", "watermark")
# What could count, and does not here: there is room, or something else is slower.
HIDDEN = {
    "experts": {"training.attention"},
    "file": {"cluster.network_bytes_per_s"},
    "sglang": {f"engine.{key}" for key in (*ROOMY, "prefix_caching", "schedule_policy")}
    | {"precision.kv_cache"},
    "judge": {"judge.host_speed"} | {f"judge.engine.{key}" for key in ROOMY},
    "judge by turns": {"judge.host_speed", "judge.network_bytes_per_s"}
    | {f"judge.engine.{key}" for key in (*ROOMY, "async_scheduling")},
    "histospec": {
        f"speculation.history_workers.{key}"
        for key in ("workers", "compressed_bytes_per_token", "swap_bytes_per_s")
    },
}
OF_A_LOAD = {f"training.{key}" for key in ("publish_s", "load_overhead_s", "load_s", "weight_sync")}
FEW_UPDATES = {"cluster.network_bytes_per_s", "workload.synthetic.epoch_correlation"} | OF_A_LOAD
IN_SYSTEM: dict[str, set[str]] = {  # likewise, in the base `busy`
    **{key: {"training.attention"} for key in ("rlhfuse", "rollpacker", "dapo")},
    "verl_v1_colocate_async": {"training.attention"},
    "seer": {f"engine.{key}" for key in ("max_num_seqs", "async_scheduling", "watermark")}
    | {"engine.prefill_schedule_interval", "precision.kv_cache"},
    "rhymerl": {"cluster.network_bytes_per_s"} | HIDDEN["histospec"],
    "laminar": {"cluster.network_bytes_per_s"},
    "verl_fully_async": {"precision.training", "training.attention"} | FEW_UPDATES,
    "verl_v1_separate_async": FEW_UPDATES,
    "rlinf_dynamic": {"training.switch_s", "training.switch_transfer_s"},
}
# With kv_cache_tokens given, the memory that it would be computed from has no effect.
FROM_MEMORY = ("engine.gpu_memory_utilization", "engine.reserve_bytes")
NUMBERS = (2, 0.5, 0.01, 1, 3, 8, 64, 1000, 1e6, 1e9, 1e12, 0)


def scenario(system: str, *changes: dict[str, Any]) -> Scenario:
    data: dict[str, Any] = {"system": {"name": system, **PARAMETERS.get(system, {})}}
    for key, value in (setting for some in (BUSY, *changes) for setting in some.items()):
        *path, last = key.split(".")
        place = data
        for part in path:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        place[last] = dict(value) if isinstance(value, dict) else value
    return Scenario.model_validate(data)


def run(scenario: Scenario) -> tuple[list[pa.Table], dict[str, str]]:
    result = simulate(scenario)
    tables = [result.spans, result.steps, result.samples, result.segments]
    return [t.replace_schema_metadata(None) for t in tables], result.metadata.get(
        "without_effect", {}
    )


def keys(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key of every setting of a model, with its field."""
    for key, field in model.model_fields.items():
        if prefix + key in FREE:
            continue
        yield prefix + key, field
        for inner in models_in(field.annotation):
            yield from keys(inner, f"{prefix}{key}.")


def values(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield values that a key may have; numbers that some keys refuse."""
    for kind in schema.get("anyOf", [schema]):
        yield from kind.get("enum", [])
        yield from [kind["const"]] if "const" in kind else []
        yield from (True, False) if kind.get("type") == "boolean" else ()
        yield from NUMBERS if kind.get("type") in ("number", "integer") else ()


def wrong(system: str, base: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of which no value that is allowed changes a table, and that no line names,
    and those that a line names and that change one."""
    unchanged = scenario(system, base)
    before, _ = run(unchanged)
    absent = tuple({"judge", "evaluation", "cluster.train"} - base.keys())
    for key, field in dict(keys(Scenario)).items():
        if key.startswith(absent):
            continue
        schema = TypeAdapter(field.annotation).json_schema()
        allowed, named = 0, False
        for value in (value for value in values(schema) if value != field.default):
            freed = {"engine.kv_cache_tokens": None} if key in FROM_MEMORY else {}
            try:
                changed = scenario(system, base, freed, {key: value})
                if changed == unchanged:
                    continue
                after, unused = run(changed)
            except (ValueError, InputError):
                continue
            allowed += 1
            if key in unused:
                named = True
                if after != before:
                    yield key, f"{key}={value} is said to have no effect, and has one"
            elif after != before:
                allowed = 0
                break
        if allowed and not named:
            yield key, f"{key} changes nothing, and no line says so"


@pytest.mark.parametrize(
    ("system", "base"),
    [
        ("verl_colocated", "busy"),
        ("areal", "broadcast"),
        *(
            pytest.param(system, base, marks=pytest.mark.slow)
            for bases, system in (
                (COLOCATED, "verl_colocated"),
                (BASES.keys() - {"busy", "broadcast", *COLOCATED}, "areal"),
            )
            for base in sorted(bases)
        ),
        *(
            pytest.param(system, "busy", marks=pytest.mark.slow)
            for system in sorted(RECIPES.own.keys() - {"verl_colocated"})
        ),
    ],
)
def test_every_setting_changes_a_result_or_is_said_to_have_no_effect(system, base):
    """I45: each key, with numbers of many sizes and every value of an enumeration until one counts."""
    hidden = AS_USUAL | HIDDEN.get(base, set()) | IN_SYSTEM.get(system, set())
    assert [words for key, words in wrong(system, BASES[base]) if key not in hidden] == []


def unused(**changes: Any) -> dict[str, str]:
    return prepare(small(**changes)).inputs().get("without_effect", {})


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"agents": {"tool_slots": 3}}, "agents.tool_slots", "one turn"),
        ({"system": "areal", "training": {"switch_s": 3}}, "training.switch_s", "GPUs of its own"),
        (
            {"system": "areal", "training": {"weight_sync": "file", "weight_sync_overlap": False}},
            "training.weight_sync_overlap",
            "weight_sync is file, not broadcast",
        ),
        ({"training": {"checkpoint_every": 2}}, "training.checkpoint_every", "checkpoint_s is not"),
        (
            {"training": {"checkpoint_every": 9, "checkpoint_s": 5.0}},
            "training.checkpoint_every",
            "none is due in 3 updates",
        ),
        ({"training": {"microbatching": "padded"}}, "training.microbatching", "no pipeline stages"),
        (
            {"system": "areal", "framework": "verl-fsdp-0.5", "training": {"offload": "none"}},
            "training.offload",
            "lends none",
        ),
        (
            {"system": "rhymerl", "speculation": {"history_workers": {"prefetch": False}}},
            "speculation.history_workers.prefetch",
            "no index is out of memory",
        ),
        ({"system": {"name": "rhymerl", "stream": True}}, "system.stream", "the whole batch"),
        (
            {"system": {"name": "rhymerl", "dynamic_sampling": True, "filter_groups": True}},
            "system.filter_groups",
            "has dropped groups of equal rewards",
        ),
        (
            {"engine": {"log_probs": True}, "profile": {"roofline": {}, "least_sequence_s": 0.0}},
            "engine.log_probs",
            "no engine.preset adds it",
        ),
        (
            {
                "system": {"name": "verl_colocated", "speculation": "ngram"},
                "speculation": {"acceptance": {"qwen3-0.6b": {"by_position": [0.7]}}},
            },
            "speculation.acceptance.qwen3-0.6b.by_position",
            "the drafter is ngram",
        ),
        ({"engine": {"schedule_policy": "lpm"}}, "engine.schedule_policy", "scheduler is vllm"),
        (
            {"engine": {"scheduler": "sglang", "max_mamba_cache_size": 9}},
            "engine.max_mamba_cache_size",
            "no layers with states",
        ),
        (
            {"judge": {"model": "qwen3-0.6b", "gpus": 1, "engine": {"clip_max_new_tokens": 9}}},
            "judge.engine.clip_max_new_tokens",
            "scheduler is vllm",
        ),
    ],
)
def test_a_setting_without_effect_is_named_with_the_reason(changes, key, reason):
    assert reason in unused(**changes)[key]
    assert key not in unused()


def test_what_a_preset_gives_is_not_named():
    """Its weights are sent by a method, which a system that shares the GPUs has no use for."""
    framework = {"framework": "verl-fsdp-0.5"}
    assert small(**framework).training.weight_sync == "broadcast"
    assert not [key for key in unused(**framework) if key.startswith("training.weight_sync")]
    assert "training.weight_sync" in unused(**framework, training={"weight_sync": "file"})


@pytest.mark.parametrize("system", ["prime_rl", "slime_fully_async", "trl_async"])
def test_a_cap_on_trajectories_holds_beside_a_systems_own_limit(system):
    """Such a system sets its own limit when a run begins."""
    result = simulate(scenario(system, {"agents.max_concurrent": 3, "steps": 2}))
    times = [
        (time_s, step)
        for row in result.segments.to_pylist()
        for time_s, step in ((row["started_s"], 1), (row["ended_s"], -1))
    ]
    assert max(accumulate(step for _, step in sorted(times))) <= 3
