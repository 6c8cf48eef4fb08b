"""A whole step: predicted from its scenario, measured phase by phase, and at its end the engine has the trained weights."""

import json
import multiprocessing
from pathlib import Path

import pytest

from simrl.errors import StoppedError

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from simrl_replay.grpo import whole_step as module  # noqa: E402
from simrl_replay.grpo.policy import generate, load_policy, load_weights, qwen3  # noqa: E402
from simrl_replay.grpo.whole_step import (  # noqa: E402
    make_weights,
    measure,
    predict,
    scenario_of,
    start_engine,
    whole_step,
)
from simrl_replay.link import reports_of  # noqa: E402

pytestmark = pytest.mark.vllm  # what it needs comes with it
PHASES = ["generation", "log_prob", "update", "publish", "load"]


def tiny(folder: Path) -> dict:
    """A step of a model whose embeddings are tied and whose heads are wider than its layers, as Qwen3-0.6B's."""
    qwen3(2, 64, 2, 1, 96, 300, 256, head_dim=64, tie_word_embeddings=True).save_pretrained(folder)
    lengths = {
        "steps": 1,
        "prompts_per_step": 3,
        "group": 4,
        "prompt_tokens": 8,
        "mean_tokens": 24,
        "cap_tokens": 48,
    }
    return scenario_of(
        str(folder / "config.json"),
        "cpu",
        workload={"synthetic": {**lengths, "sigma": 0.6}},
        engine={
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "block_size": 32,
            "kv_cache_tokens": 2048,
        },
        training={"tokens_per_microbatch": 128},
    )


def seconds(scenario: dict) -> dict[str, float]:
    return {name: phase["predicted_s"] for name, phase in predict(scenario).phases.items()}


def test_a_prediction_has_every_phase_and_names_what_it_rests_on():
    prediction = predict(scenario_of("qwen3-0.6b", "h100"))
    assert list(prediction.phases) == PHASES and all(
        p["predicted_s"] > 0 for p in prediction.phases.values()
    )
    rests_on = {name: phase["rests_on"] for name, phase in prediction.phases.items()}
    assert rests_on["generation"].startswith(
        "assumed: roofline of NVIDIA H100 SXM data sheet; profile.between_passes_s"
    )
    assert (
        rests_on["log_prob"] == rests_on["update"]
        and "activations recomputed" in rests_on["update"]
    )
    assert rests_on["publish"] == rests_on["load"] == "assumed: files at 2 GB/s"
    assert (
        len(prediction.requests) == 256
        and max(r.generated_tokens for r in prediction.requests) == 2048
    )
    json.dumps(prediction.phases)


def test_predicted_phases_follow_from_model_and_storage():
    small, large = (
        seconds(scenario_of("qwen3-0.6b", "h100")),
        seconds(scenario_of("qwen3-1.7b", "h100")),
    )
    assert all(small[name] < large[name] for name in PHASES)
    slow = seconds(
        scenario_of("qwen3-0.6b", "h100", training={"weight_sync_storage_bytes_per_s": 1e9})
    )
    assert (
        slow["publish"] == pytest.approx(2 * small["publish"]) and slow["update"] == small["update"]
    )


def test_weights_of_a_gpus_type_have_positions_in_float32(tmp_path, monkeypatch):
    monkeypatch.setitem(module.DTYPES, "cpu", "bfloat16")
    model = make_weights(predict(tiny(tmp_path)), "cpu", tmp_path / "0")
    assert {weights.dtype for weights in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.is_gradient_checkpointing and model.training
    assert all(
        torch.equal(model.get_parameter(name), w)
        for name, w in load_weights(tmp_path / "0").items()
    )


def test_an_engine_that_ends_stops_the_step():
    here, there = multiprocessing.Pipe()
    there.send([])
    there.close()

    class Gone:
        name, connection, offset_s = "engine", here, 0.0

        def death(self):
            return "killed by signal 9"

    with pytest.raises(StoppedError, match="engine: killed by signal 9"):
        next(reports_of(Gone(), 1.0))


@pytest.mark.xdist_group("vllm")
def test_phases_are_measured_in_order_and_reported_as_they_end(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    ended = []
    outcome = whole_step(
        predict(tiny(tmp_path)), "cpu", tmp_path / "step", lambda *phase: ended.append(phase)
    )
    phases = json.loads(json.dumps(outcome))
    assert [name for name, _, _ in ended] == list(phases) == PHASES
    assert [phases[name]["measured_s"] for name in PHASES] == [seconds for _, seconds, _ in ended]
    assert all(phase["measured_s"] > 0 and phase["predicted_s"] > 0 for phase in phases.values())
    requests = predict(tiny(tmp_path)).requests
    assert phases["generation"]["details"]["tokens"] == sum(r.generated_tokens for r in requests)
    update = phases["update"]["details"]
    assert (
        update["tokens"]
        == sum(r.generated_tokens + r.prompt_tokens for r in requests)
        <= update["padded_tokens"]
    )
    assert update["micro_batches"] > 1 and 0 < update["mfu"] < 1000


@pytest.mark.xdist_group("vllm")
def test_the_engine_ends_with_the_weights_that_were_trained(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    prediction = predict(tiny(tmp_path))
    model = make_weights(prediction, "cpu", tmp_path / "0")
    link = start_engine(prediction, "cpu", tmp_path / "0", tmp_path / "engine.log", temperature=0.0)
    try:
        with torch.no_grad():  # as if trained for long
            model.model.norm.weight.copy_(torch.linspace(-2, 2, 64))
        measure(prediction, model, link, tmp_path, "cpu", lambda *_: None)
        responses, _ = module._generate(link, prediction.requests[:1], {0: (5, 6, 7)})
    finally:
        link.close()
    [response] = responses.values()
    before, after = (
        generate(load_policy(tmp_path / version), [[5, 6, 7]], len(response), eos=-1, temperature=0)
        for version in "01"
    )
    assert [response] == after != before
