"""Drafters that are parts of the model: heads for multi-token prediction, the model in fewer bits."""

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.derived_layouts import profile_of
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import MODELS
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.speculation.draft_times import mtp_shape, own_drafts
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.methods import eagle3, efficient_rollout, mtp
from tests.helpers import scenario

DENSE, MOE = "mimo-7b", "glm-4.5-air"


@pytest.mark.parametrize("name", [DENSE, MOE, "deepseek-v3"])
def test_a_head_is_a_layer_of_the_model_and_a_projection(name):
    model, head = MODELS[name], mtp_shape(MODELS[name])
    layer = (model.attention_parameters + model.expert_parameters * model.experts) or 0
    projection = 2 * model.hidden * model.hidden
    assert head.layers == 1 and head.full_layers == 1
    assert head.body_parameters == pytest.approx(model.layer_parameters + projection, rel=2e-3)
    assert head.body_parameters > layer


@pytest.mark.parametrize(("name", "kind", "tp"), [(DENSE, "h100", 1), (MOE, "h100", 4)])
def test_a_depth_takes_a_layers_share_of_the_profile_and_the_output_head(name, kind, tp):
    profile, model = profile_of(name, kind, tp), MODELS[name]
    times, t = own_drafts(profile, model, gpu(kind), "", 2000), profile.kernels.even
    for b in (1, 16, 128):
        head_s = np.interp(b, t.sampled_sequences, t.sampled_s)
        share_s = (profile.kernels.decode_s(b, 2000) - head_s) / model.layers
        assert times.draft_s(b, 1) == pytest.approx(head_s + share_s, rel=0.35)
        assert times.draft_s(b, 3) == pytest.approx(3 * times.draft_s(b, 1))
    assert times.kv_bytes_per_token_per_gpu == model.layer_kv_bytes / min(tp, model.kv_heads)
    assert times.weight_bytes_per_gpu == 2 * mtp_shape(model).body_parameters / tp


def test_the_policy_in_four_bits_has_no_cache_of_its_own_and_is_faster_at_small_batches():
    profile, model = profile_of("qwen2.5-7b", "a100", 1), MODELS["qwen2.5-7b"]
    times = own_drafts(profile, model, gpu("a100"), "int4", 512)
    assert times.kv_bytes_per_token_per_gpu == times.prefill_s == 0
    assert times.weight_bytes_per_gpu == pytest.approx(0.515625 * model.body_parameters)
    assert 0.3 < times.draft_s(1, 1) / profile.decode_s(1, 512) < 0.6
    assert times.draft_s(256, 1) > 0.8 * profile.kernels.decode_s(256, 512)


def test_a_profile_without_the_hosts_times_has_what_was_added_taken_off():
    profile = profile_of("qwen2.5-7b", "h100", 1)
    kernels = profile.kernels
    hosted = kernels.with_corrections(between_passes_s=1e-3, sequence_overhead_s=4e-5)
    assert hosted.decode_s(64, 1000) > kernels.decode_s(64, 1000) + 3e-3
    assert hosted.kernels.decode_s(64, 1000) == pytest.approx(kernels.decode_s(64, 1000))


def test_a_model_without_heads_is_refused_in_one_line():
    with pytest.raises(
        InputError, match=r"qwen3-0\.6b has no layers for multi-token prediction"
    ) as e:
        prepare(scenario({"name": "verl_colocated", "speculation": "mtp"}))
    assert "\n" not in str(e.value)


def run(method, **changes):
    return simulate(
        scenario({"name": "verl_colocated", "speculation": method}, model=DENSE, **changes)
    )


def test_heads_that_are_trained_cost_the_update_a_layer_and_an_output_head():
    asked = [
        scenario(
            {"name": "verl_colocated", "speculation": {"name": "mtp", "trained": t}}, model=DENSE
        )
        for t in (False, True)
    ]
    frozen, trained = (prepare(one).training_costs(4) for one in asked)
    lengths = np.full(64, 8000)
    took = [[costs.sweep_s(lengths, passes) for costs in (frozen, trained)] for passes in (1, 3)]
    assert took[0][0] == took[0][1]  # log-probs do not need the heads
    model, head = MODELS[DENSE], mtp_shape(MODELS[DENSE])
    flops = [shape.forward_flops(8000.0, 8000.0**2 / 2) for shape in (model, head)]
    assert took[1][1] / took[1][0] - 1 == pytest.approx(flops[1] / flops[0], rel=0.25)


def test_what_follows_the_policy_does_not_drift():
    inputs = SpeculationInputs()
    assert inputs.acceptance_of(mtp(trained=True)).drift_per_update == 0
    assert inputs.acceptance_of(mtp()).drift_per_update > 0
    assert inputs.acceptance_of(efficient_rollout()).drift_per_update == 0
    assert inputs.acceptance_of(eagle3()).drift_per_update > 0
