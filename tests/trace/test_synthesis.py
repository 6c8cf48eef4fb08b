"""Synthesis: the statistics asked for come out, and no draw depends on how much else is drawn."""

import json
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError
from scipy.integrate import trapezoid

from experiments.reproduce.ranks import rank_stability
from simrl.errors import InputError
from simrl.trace.lognormal import mean_of_cut_lognormal
from simrl.trace.synthesis import PRESETS, LengthModel, synthesise

SMALL = {
    "steps": 8,
    "prompts_per_step": 16,
    "group": 4,
    "cap_tokens": 4096,
    "prompts": 64,
    "mean_tokens": 900.0,
    "sigma": 0.8,
}


def model(**changes):
    return LengthModel(**{**SMALL, **changes})


def rows_by_key(trace, *keys):
    """Response length and reward by the row's values in `keys`."""
    names = (*keys, "response_tokens", "reward", "prompt_tokens")
    table = list(zip(*(trace.column(name).tolist() for name in names), strict=True))
    return {row[: len(keys)]: row[len(keys) :] for row in table}


@cache
def preset(name):
    return synthesise(LengthModel(**PRESETS[f"rhymerl-{name}"]), 0, name)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    assert synthesise(model(), 5).table == synthesise(model(), 5).table
    assert synthesise(model(), 5).table != synthesise(model(), 6).table


def test_the_draws_stay_the_same_from_release_to_release():
    trace = synthesise(
        model(
            steps=1, prompts_per_step=2, group=2, prompts=None, mean_tokens=100, prompt_sigma=0.5
        ),
        7,
    )
    assert trace.column("response_tokens").tolist() == [40, 190, 51, 30]
    assert trace.column("prompt_tokens").tolist() == [415, 415, 182, 182]
    assert trace.column("reward").tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_longer_run_begins_with_the_shorter_one():
    """I23: more steps change no draw."""
    short, long = synthesise(model(steps=6), 1), synthesise(model(steps=10), 1)
    assert long.table.slice(0, len(short)).equals(short.table)


def test_a_larger_group_keeps_the_samples_of_the_smaller_one():
    """I23: a larger group changes no draw."""
    small, large = (
        rows_by_key(synthesise(model(group=g), 1), "step", "prompt_id", "sample") for g in (4, 7)
    )
    assert {key: large[key] for key in small} == small


def test_a_larger_data_set_keeps_each_prompts_responses():
    """The prompts come in other steps, but what a prompt gives in an epoch is the same."""
    small, large = (
        rows_by_key(
            synthesise(model(prompts=n, steps=2 * n // 16), 1), "epoch", "prompt_id", "sample"
        )
        for n in (64, 96)
    )
    assert len(small) == 2 * 64 * 4
    assert {key: large[key] for key in small} == small


def test_an_epoch_passes_over_each_prompt_once_in_a_new_order():
    trace = synthesise(model(steps=12), 2)
    prompts = trace.column("prompt_id").reshape(12, 16, 4)[:, :, 0]
    epochs = prompts.reshape(3, 64)
    assert [sorted(e) for e in epochs.tolist()] == [list(range(64))] * 3
    assert len({tuple(step) for step in prompts.tolist()}) == 12
    assert trace.column("epoch").reshape(12, -1).tolist() == [[s // 4] * 64 for s in range(12)]


def test_without_shuffle_the_data_set_comes_in_order():
    trace = synthesise(model(shuffle=False), 2)
    assert trace.column("prompt_id")[::4].tolist() == list(range(64)) * 2


def test_prompts_that_fill_no_step_are_left_out_of_an_epoch():
    trace = synthesise(model(prompts=70, steps=8), 2)
    assert trace.column("epoch").reshape(8, -1)[:, 0].tolist() == [0] * 4 + [1] * 4


def test_without_a_data_set_size_the_run_is_one_epoch():
    trace = synthesise(model(prompts=None), 2)
    assert set(trace.column("epoch").tolist()) == {0}
    assert len(np.unique(trace.column("prompt_id"))) == 8 * 16


@pytest.mark.parametrize("mean", [300.0, 1500.0, 3000.0])
@pytest.mark.parametrize("early", [0.0, 0.2])
def test_the_mean_after_the_cap_is_the_one_asked_for(mean, early):
    """40,000 independent lengths: their mean is within four standard errors."""
    trace = synthesise(
        model(
            steps=10, prompts_per_step=1000, prompts=None, mean_tokens=mean, prompt_share=0, early_stop_share=early
        ),
        3,
    )  # fmt: skip
    tokens = trace.column("response_tokens")
    assert abs(tokens.mean() - mean) < 4 * tokens.std() / math.sqrt(len(tokens))
    assert tokens.max() <= 4096


def test_the_mean_grows_from_the_first_step_to_the_last():
    trace = synthesise(
        model(
            steps=5, prompts_per_step=4000, prompts=20000, mean_tokens=(500, 2500), prompt_share=0
        ),
        4,
    )
    means = [trace.column("response_tokens")[a:b].mean() for _, a, b in trace.step_slices]
    assert means == pytest.approx([500, 1000, 1500, 2000, 2500], rel=0.02)


@given(
    location=st.floats(-2, 12), sigma=st.sampled_from([0.0, 0.1, 0.8, 2.0]), cap=st.sampled_from([16, 1000, 30000])
)  # fmt: skip
def test_the_mean_of_a_cut_lognormal_agrees_with_numerical_integration(location, sigma, cap):
    z = np.linspace(-9, 9, 200_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    cut = np.exp(np.clip(location + sigma * z, 0, math.log(cap)))
    assert mean_of_cut_lognormal(location, sigma, cap) == pytest.approx(
        trapezoid(cut * density, z), rel=1e-5
    )


def test_a_response_cut_at_the_cap_ends_by_length_and_all_others_stop():
    trace = synthesise(model(mean_tokens=2500, sigma=1.0), 0)
    tokens, reason = trace.column("response_tokens"), trace.column("finish_reason")
    cut = reason == "length"
    assert 0.1 < cut.mean() < 0.9
    assert set(tokens[cut].tolist()) == {4096}
    assert set(reason[tokens < 4096].tolist()) == {"stop"}


def test_with_sigma_zero_every_response_has_the_mean_length():
    assert set(
        synthesise(model(sigma=0, mean_tokens=777), 0).column("response_tokens").tolist()
    ) == {777}


def test_the_prompts_share_is_the_correlation_within_a_group():
    trace = synthesise(
        model(
            steps=1,
            prompts_per_step=5000,
            group=2,
            prompts=None,
            cap_tokens=10**6,
            prompt_share=0.6,
        ),
        0,
    )
    first, second = np.log(trace.column("response_tokens")).reshape(-1, 2).T
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(0.6, abs=0.03)
    assert np.std(first) == pytest.approx(0.8, rel=0.03)


def test_a_prompts_effect_decays_by_the_epoch_correlation():
    trace = synthesise(
        model(steps=3, prompts_per_step=5000, group=1, prompts=5000, cap_tokens=10**6, prompt_share=1, epoch_correlation=0.7),
        0,
    )  # fmt: skip
    e0, e1, e2 = np.log(trace.column("response_tokens")).reshape(3, 5000)
    assert np.corrcoef(e0, e1)[0, 1] == pytest.approx(0.7, abs=0.03)
    assert np.corrcoef(e0, e2)[0, 1] == pytest.approx(0.49, abs=0.04)


def test_early_stops_are_as_many_and_as_short_as_asked():
    base = model(steps=2, prompts_per_step=5000, prompts=None, sigma=0, mean_tokens=1000)
    trace = synthesise(
        base.model_copy(update={"early_stop_share": 0.1, "early_stop_factor": 0.2}), 0
    )
    lengths, counts = np.unique(trace.column("response_tokens"), return_counts=True)
    assert counts[0] / counts.sum() == pytest.approx(0.1, abs=0.01)
    assert lengths[0] / lengths[1] == pytest.approx(0.2, rel=0.01)


def test_a_prompt_is_as_long_in_every_epoch_and_within_its_cap():
    trace = synthesise(
        model(steps=8, prompt_tokens=300, prompt_sigma=1.0, prompt_cap_tokens=500), 0
    )
    lengths = {}
    for prompt, tokens in zip(
        trace.column("prompt_id").tolist(), trace.column("prompt_tokens").tolist(), strict=True
    ):
        assert lengths.setdefault(prompt, tokens) == tokens
    assert max(lengths.values()) == 500
    assert np.mean(list(lengths.values())) == pytest.approx(300, rel=0.25)


def test_rewards_have_the_mean_asked_for_and_hard_prompts_fail_as_groups():
    wide = {"steps": 1, "prompts_per_step": 4000, "group": 8, "prompts": None, "reward_mean": 0.3}
    uniform = {}
    for share in (0.0, 0.5, 1.0):
        groups = (
            synthesise(model(**wide, reward_prompt_share=share), 0)
            .column("reward")
            .reshape(-1, 8)
            .mean(axis=1)
        )
        assert groups.mean() == pytest.approx(0.3, abs=0.03)
        uniform[share] = np.mean((groups == 0) | (groups == 1))
    assert uniform[0.0] == pytest.approx(0.7**8 + 0.3**8, abs=0.01)
    assert uniform[0.0] < uniform[0.5] < uniform[1.0] == 1


def test_without_a_reward_mean_there_is_no_reward():
    assert "reward" not in synthesise(model(reward_mean=None), 0).table.column_names


def test_the_metadata_says_how_to_draw_the_trace_again():
    trace = synthesise(model(mean_tokens=(500, 900)), 11, "mine")
    assert (trace.metadata.name, trace.metadata.kind) == ("mine", "synthetic")
    assert trace.metadata.tokenizer == "none (lengths are drawn)"
    source = json.loads(trace.metadata.source)
    assert synthesise(LengthModel(**source["model"]), source["seed"], "mine").table == trace.table


def test_a_mean_that_the_cap_makes_unreachable_is_refused():
    with pytest.raises(
        InputError, match="mean_tokens 4096 cannot be reached under a cap of 4096 tokens"
    ):
        synthesise(model(mean_tokens=(900, 4096)), 0)
    with pytest.raises(
        InputError, match="prompt_tokens 3000 cannot be reached under a cap of 2048 tokens"
    ):
        synthesise(model(prompt_tokens=3000), 0)
    with pytest.raises(InputError, match="seed -1 is negative"):
        synthesise(model(), -1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"sigma": -0.1}, "sigma"),
        ({"prompt_share": 1.1}, "prompt_share"),
        ({"mean_tokens": (500, 0)}, "mean_tokens"),
        ({"mean_tokens": float("nan")}, "mean_tokens"),
        ({"prompts": 15}, "prompts 15 is less than one step's prompts_per_step 16"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(changes, field):
    with pytest.raises(ValidationError, match=field):
        model(**changes)


@pytest.mark.parametrize(
    ("name", "higher", "near_boundary", "strong"),
    [("math", 0.16, 0.13, 0.03), ("code", 0.28, 0.24, 0.04)],
)
def test_the_rhymerl_presets_have_the_rank_stability_of_figure_9(
    name, higher, near_boundary, strong
):
    stability = rank_stability(preset(name), groups=8)
    assert stability.epoch_pairs == 19
    assert stability.higher == pytest.approx(higher, abs=0.01)
    assert stability.near_boundary == pytest.approx(near_boundary, abs=0.01)
    assert stability.strong == pytest.approx(strong, abs=0.01)
    assert 0.02 <= stability.strong <= 0.04


def test_the_math_preset_predicts_sixteen_groups_as_table_2_says_though_not_fitted_to_it():
    accurate = rank_stability(preset("math"), groups=16).same_or_lower
    assert 0.716 <= accurate <= 0.797  # the range of Table 2's datasets


@pytest.mark.parametrize("name", ["math", "code"])
def test_the_rhymerl_presets_grow_from_1k_to_10k_in_320_steps(name):
    trace = preset(name)
    means = [trace.column("response_tokens")[a:b].mean() for _, a, b in trace.step_slices]
    assert len(means) == 320
    assert np.mean(means[:10]) == pytest.approx(1127, rel=0.1)
    assert np.mean(means[-10:]) == pytest.approx(9873, rel=0.05)
