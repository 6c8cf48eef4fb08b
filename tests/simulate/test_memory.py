"""Memory of a rollout GPU: KV blocks beside weights, by precision; blocks that unlike layers share."""

import numpy as np
import pytest

from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.profile.model_shape import MODELS
from simrl.scenario.model import Scenario
from simrl.simulate.memory import cache_capacity_tokens, layer_groups
from simrl.simulate.prepare import Prepared, prepare
from tests.helpers import one_second_a_pass
from tests.schedule_scenarios import (
    EnginePlayer,
    ReferencePlayer,
    different_passes,
    hybrid_scenario,
    play,
)

LENGTHS = {
    "steps": 2,
    "prompts_per_step": 4,
    "group": 4,
    "prompt_tokens": 100,
    "mean_tokens": 400,
    "sigma": 0.5,
}


def scenario(model: str, path: str, tp: int, ep: int = 1, **changes: object) -> Scenario:
    data = {
        "name": "memory",
        "steps": 2,
        "model": model,
        "cluster": {"gpu": "h100", "gpus": 64, "tp": tp, "ep": ep},
        "workload": {"synthetic": {**LENGTHS, "cap_tokens": 2000}},
        "profile": {"path": f"profiles/{path}.parquet"},
        "training": {"sharding": "fsdp"},
        "system": {"name": "areal", "eta": 1},
    }
    return Scenario.model_validate(data | changes)


def test_a_block_of_a_hybrid_grows_until_a_state_fits_it() -> None:
    # vLLM's log: "Setting attention block size to 544 tokens", Qwen3-Next on one GPU.
    assert layer_groups(MODELS["qwen3-next-80b-a3b"], 1, 16, 1.0)[:4] == (1, 0, 3, 544)
    # Two KV heads on four GPUs are copied: a quarter of the state beside half of the KV.
    assert layer_groups(MODELS["qwen3-next-80b-a3b"], 4, 16, 1.0)[:4] == (1, 0, 3, 272)
    assert layer_groups(MODELS["qwen3-next-80b-a3b"], 1, 16, 0.5).block_size == 1072
    whole = layer_groups(MODELS["qwen3.5-27b"], 1, 16, 1.0)
    assert whole.state * whole.block_bytes == pytest.approx(
        MODELS["qwen3.5-27b"].state_bytes, rel=0.002
    )


def test_layers_with_windows_have_a_group_of_their_own() -> None:
    groups = layer_groups(MODELS["gpt-oss-120b"], 1, 16, 1.0)
    assert groups == (1, 1, 0, 16, 18 * 16 * 2 * 2 * 8 * 64)


def test_a_cache_in_fp8_holds_twice_the_tokens() -> None:
    path = "qwen3-32b_h100_tp2"
    bf16 = prepare(scenario("qwen3-32b", path, 2)).limits
    fp8 = prepare(scenario("qwen3-32b", f"{path}_fp8", 2, precision={"weights": "fp8"})).limits
    freed = (MODELS["qwen3-32b"].weight_bytes - 34.32e9) / 2
    more = freed / (MODELS["qwen3-32b"].kv_bytes_per_token / 2)
    assert (fp8.kv_blocks - bf16.kv_blocks) * 16 == pytest.approx(more, rel=0.001)


def test_a_hybrid_runs_with_blocks_and_states() -> None:
    prepared = prepare(scenario("qwen3.5-35b-a3b", "qwen3.5-35b-a3b_h100_tp2_ep2", 2, 2))
    limits = prepared.limits
    assert (limits.state_blocks, limits.full_groups, limits.prefix_caching) == (3, 1, False)
    assert limits.block_size == 1056  # one KV head a GPU, half of the state


@pytest.mark.parametrize(
    ("model", "path", "tp", "ep"),
    [
        ("qwen3.5-35b-a3b", "qwen3.5-35b-a3b_h100_tp2_ep2", 2, 2),
        ("gpt-oss-20b", "gpt-oss-20b_h100_tp1_w4a16_mxfp4", 1, 1),
    ],
)
def test_a_cache_of_given_tokens_holds_them_and_as_many_sequences_as_run(
    model: str, path: str, tp: int, ep: int
) -> None:
    precision = {"weights": "w4a16_mxfp4"} if model == "gpt-oss-20b" else {}
    given = {"engine": {"kv_cache_tokens": 200_000}, "precision": precision}
    limits = prepare(scenario(model, path, tp, ep, **given)).limits
    assert 0.95 * 200_000 < limits.kv_tokens <= 200_000
    engine = one_engine(
        one_second_a_pass(), limits._replace(max_num_seqs=4096, max_num_batched_tokens=1 << 20)
    )
    for _ in range(4096):
        engine.submit(1000, 2)
    engine.settle(0.0)
    held = cache_capacity_tokens(limits._replace(max_num_batched_tokens=1 << 20), 1000) / 1000
    assert engine.running == pytest.approx(held, abs=2)


def test_states_that_do_not_fit_are_named() -> None:
    much = {"engine": {"reserve_bytes": 42.3e9}}
    with pytest.raises(
        InputError, match=r"GiB are left, and the states of one sequence take .* use a larger tp"
    ) as error:
        prepare(scenario("qwen3.5-35b-a3b", "qwen3.5-35b-a3b_h100_tp2_ep2", 2, 2, **much))
    assert "reserve_bytes (activations, CUDA graphs of plain decoding, buffers) 39.4 GiB" in str(
        error.value
    )


def test_graphs_of_draft_strategies_are_not_called_weights() -> None:
    system = {"name": "tlt", "bucketed_graphs": False}
    with pytest.raises(InputError) as error:
        prepare(scenario("qwen3-32b", "qwen3-32b_h100_tp2", 2, system=system))
    message = str(error.value)
    assert (
        "weights 30.5 GiB, weights of drafters 0.5 GiB, CUDA graphs of draft strategies " in message
    )
    assert "reserve_bytes (activations, CUDA graphs of plain decoding, buffers) 3.7 GiB" in message


def verified(**changes: object) -> Prepared:
    return prepare(scenario("qwen3-32b", "qwen3-32b_h100_tp4", 4, **changes))


def test_the_largest_verification_comes_out_of_the_kv_cache() -> None:
    """TLT §5.1. Up to 20 requests verify 32 tokens each, at 12 bytes of logits for each token of the vocabulary; the plain
    pass that the reserve covers computes 8,192 tokens and samples 256."""
    tail, early = (
        verified(system={"name": "tlt", "threshold": threshold}) for threshold in (32, 200)
    )
    facts = tail.drafts.facts
    assert facts["most_verified_tokens"] == 20 * 32
    logits = 640 * (12 * tail.model.vocab + 2 * tail.model.hidden)
    assert 0.5 * logits < facts["verification_bytes"] < logits
    assert early.drafts.facts["most_verified_tokens"] == 200 * 16
    more_bytes = early.drafts.verification_bytes - tail.drafts.verification_bytes
    kv_bytes = tail.model.kv_bytes_per_token / 4 + tail.drafts.kv_bytes_per_token
    assert tail.limits.kv_tokens - early.limits.kv_tokens == pytest.approx(
        more_bytes / kv_bytes, abs=16
    )


SYNTHETIC = {**LENGTHS, "cap_tokens": 2000}


@pytest.mark.parametrize(
    "later",
    [
        {"workload": {"synthetic": {**SYNTHETIC, "turns": 3, "environment_s": 8.0}}},
        {"system": {"name": "one_step_off", "speculation": "tlt"}},
        {"system": {"name": "tlt", "dynamic_sampling": 2}},
        {"system": {"name": "tlt", "dispatch": "seer"}},
        {"evaluation": {"every": 1}},
        {"faults": [{"kind": "lost", "worker": 0, "at_s": 1.0, "back_s": 5.0}]},
    ],
    ids=["turns", "overlap", "refilled", "queue", "evaluation", "lost worker"],
)
def test_where_requests_come_to_an_open_gate_all_sequences_may_be_verified(
    later: dict[str, object],
) -> None:
    """A gate stays open, however many requests come once it is."""
    drafts = verified(**{"system": {"name": "tlt"}} | later).drafts
    assert drafts is not None and drafts.facts["most_verified_tokens"] == 256 * 16


def test_drafting_always_is_refused_where_its_logits_fit_no_gpu() -> None:
    always = {"name": "tlt", "threshold": 100_000}
    with pytest.raises(
        InputError,
        match=r"logits of the largest verification .* use a smaller engine.max_num_seqs or .* threshold",
    ):
        verified(system=always, engine={"max_num_seqs": 2048})
    assert verified(system=always, engine={"max_num_seqs": 64}).limits.kv_blocks > 0


def test_methods_without_graphs_of_strategies_verify_within_the_reserve() -> None:
    drafts = verified(system={"name": "verl_colocated", "speculation": "eagle3"}).drafts
    assert drafts is not None and drafts.verification_bytes == 0.0
    assert "verification_bytes" not in drafts.facts


def test_a_prefix_cache_of_windows_is_refused_where_it_is_asked_for() -> None:
    given = "gpt-oss-20b", "gpt-oss-20b_h100_tp1_w4a16_mxfp4", 1
    precision = {"weights": "w4a16_mxfp4"}
    with pytest.raises(
        InputError,
        match=r"a prefix cache of layers with windows \(gpt-oss-20b\) is not modelled; leave",
    ):
        prepare(scenario(*given, precision=precision, engine={"prefix_caching": True}))
    assert not prepare(scenario(*given, precision=precision)).limits.prefix_caching


def test_as_many_sequences_run_as_states_and_tokens_have_blocks() -> None:
    """Six blocks: two states a sequence and one block of tokens, so two sequences run and the third waits."""
    engine = one_engine(one_second_a_pass(), Limits(8, 64, 16, 6, state_blocks=2))
    for _ in range(3):
        engine.submit(8, 8)
    ended = engine.run_until_idle()
    assert ended[:3].tolist() == [8.0, 8.0, 16.0]


def test_a_window_gives_back_what_it_has_left() -> None:
    limits = Limits(8, 64, 16, 100, full_groups=1, window_groups=1, window_tokens=32)
    engine = one_engine(one_second_a_pass(), limits)
    engine.submit(16, 400)
    free = []
    while engine.busy:
        engine.settle(engine.now_s)
        free.append(engine.free_blocks)
    used = 100 - np.array(free[:-1])
    tokens = 16 + np.arange(used.size)
    assert (
        used == -(-tokens // 16) + (-(-tokens // 16) - np.maximum(tokens - 1 - 31, 0) // 16)
    ).all()
    assert free[-1] == 100


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_windows_and_states_take_blocks_as_in_the_slow_reference(async_scheduling: bool) -> None:
    preempted = 0
    for seed in range(30):
        scenario = hybrid_scenario(seed, async_scheduling)
        theirs = play(ReferencePlayer(scenario), scenario)
        preempted += sum(done.preempted for done in theirs)
        assert different_passes(play(EnginePlayer(scenario), scenario), theirs) == 0, (
            f"scenario {seed}"
        )
    assert preempted > 30, "the scenarios are scarce in blocks"


def test_under_sglang_a_hybrid_runs_as_many_sequences_as_have_slots_for_states() -> None:
    def limits(**engine: object) -> Limits:
        given = {"scheduler": "sglang", "max_num_seqs": 4096, **engine}
        hybrid = "qwen3.5-35b-a3b", "qwen3.5-35b-a3b_h100_tp2_ep2", 2, 2
        return prepare(scenario(*hybrid, engine=given, system={"name": "one_step_off"})).limits

    model, usual = MODELS["qwen3.5-35b-a3b"], limits()
    kv_bytes = usual.kv_tokens * model.kv_bytes_per_token / 2
    slots = 0.9 * kv_bytes / (model.state_bytes / 2)
    assert usual.max_num_seqs == pytest.approx(slots / 5, abs=1)
    assert (usual.block_size, usual.state_blocks, usual.prefix_caching) == (1, 0, False)
    assert limits(prefix_caching=False).max_num_seqs == pytest.approx(slots, abs=3)
    assert limits(max_mamba_cache_size=50).max_num_seqs == 10
    assert limits(mamba_full_memory_ratio=0.1).max_num_seqs < usual.max_num_seqs / 4


def test_too_few_states_of_sglang_are_named() -> None:
    few = {"scheduler": "sglang", "mamba_full_memory_ratio": 1e-3}
    with pytest.raises(InputError, match=r"raise engine\.mamba_full_memory_ratio"):
        prepare(scenario("qwen3.5-35b-a3b", "qwen3.5-35b-a3b_h100_tp2_ep2", 2, 2, engine=few))


def test_sglang_schedules_with_pages_of_a_token_and_the_cap_of_the_responses() -> None:
    given = {"preset": "sglang-0.5", "schedule_conservativeness": 0.5, "schedule_policy": "lpm"}
    limits = prepare(scenario("qwen3-32b", "qwen3-32b_h100_tp2", 2, engine=given)).limits
    assert limits.sglang
    assert (limits.block_size, limits.max_new_tokens, limits.start_ratio) == (1, 2000, 0.35)
    paged = prepare(
        scenario("qwen3-32b", "qwen3-32b_h100_tp2", 2, engine=given | {"block_size": 64})
    )
    assert paged.limits.block_size == 64
