"""Step times that no profile has: beyond a grid, and of layouts that are not shipped."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.profile.derived_layouts import (
    ERRORS,
    ROOFLINE,
    derived_profile,
    difference,
    in_layout,
    nearest,
    off_by,
)
from simrl.profile.extension import OFF_BY as HALF_OFF_BY, covering
from simrl.profile.hardware import GPUS
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import MODELS
from simrl.profile.precision import require_precision
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.shipped import PROFILES, file_name, layouts

LIMITS = {"query_tokens": 16384, "sequences": 1024, "kv_tokens": 40960, "verified_positions": 16384}
FAR = {"query_tokens": 65536, "sequences": 4096, "kv_tokens": 262144, "verified_positions": 65536}
SOME = [
    "qwen3-14b_h100_tp2",
    "gpt-oss-20b_h100_tp1_w4a16_mxfp4",
    "qwen3-30b-a3b_h200_tp1_dp8_ep8",
    "qwen3.5-35b-a3b_h100_tp4",
]


@cache
def shipped(name: str) -> TableProfile:
    return read_profile(PROFILES / name)


@cache
def far(name: str) -> TableProfile:
    return covering(shipped(f"{name}.parquet"), **FAR)


def wanted(model: str, gpu: str, **layout: int | str) -> ProfileMetadata:
    return ProfileMetadata.model_validate(
        {"model": model, "gpu": gpu, "kind": "", "source": "", "tp": 1, **layout}
    )


# Beyond a grid.


@pytest.mark.parametrize("name", SOME)
def test_a_profile_that_reaches_the_limits_is_the_profile_itself(name):
    profile = shipped(f"{name}.parquet")
    assert covering(profile, **LIMITS) is profile


@given(st.sampled_from(SOME), st.integers(1, 1023), st.floats(1, 40959), st.integers(1, 16383))
def test_inside_the_grid_no_bit_changes(name: str, sequences: int, kv_tokens: float, chunk: int):
    inside, extended = shipped(f"{name}.parquet"), far(name)
    assert extended.decode_s(sequences, kv_tokens) == inside.decode_s(sequences, kv_tokens)
    ranked = chunk // inside.metadata.dp  # the experts' grid is of the tokens of all ranks
    assert extended.prefill_s(ranked + 1, kv_tokens) == inside.prefill_s(ranked + 1, kv_tokens)


@given(st.sampled_from(SOME), st.integers(1, 4096), st.floats(1, 262144), st.floats(1, 262144))
def test_more_tokens_of_a_sequence_never_take_less_time(
    name: str, sequences: int, first: float, second: float
):
    less, more = sorted((first, second))
    assert far(name).decode_s(sequences, less) <= far(name).decode_s(sequences, more)
    assert far(name).prefill_s(2048, less) <= far(name).prefill_s(2048, more)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("sequences", [1, 64, 1024])
def test_the_times_are_continuous_at_the_edge_of_the_grid(name, sequences):
    edge = shipped(f"{name}.parquet").decode_s(sequences, 40960)
    assert far(name).decode_s(sequences, 40960) == pytest.approx(edge, rel=1e-12)
    assert far(name).decode_s(sequences, 40961) == pytest.approx(edge, rel=1e-3)


def test_what_is_extended_is_said_in_the_profiles_corrections():
    extended = covering(shipped("qwen3-14b_h100_tp2.parquet"), 8192, 256, 65536)
    assert extended.corrections == (
        f"extrapolated by the roofline beyond 40,960 tokens of a sequence ({HALF_OFF_BY})",
    )


def test_a_profile_of_an_unknown_model_is_not_extended():
    profile = shipped("qwen3-14b_h100_tp2.parquet")
    unknown = TableProfile(profile.tables, profile.metadata.model_copy(update={"model": "mine"}))
    with pytest.raises(InputError, match="profiled up to 40960 tokens of a decoding sequence"):
        covering(unknown, 8192, 256, 65536)


def half(profile: TableProfile, tokens: int, sequences: int, kv_tokens: int) -> TableProfile:
    """Return a profile cut at these limits."""
    t = profile.tables
    kept = {
        "dense_tokens": tokens,
        "sampled_sequences": tokens,
        "expert_tokens": tokens * profile.metadata.dp,
        "prefill_tokens": tokens,
        "prefill_kv_tokens": kv_tokens,
        "decode_sequences": sequences,
        "decode_kv_tokens": kv_tokens,
    }
    ticks = {axis: int((getattr(t, axis) <= most).sum()) for axis, most in kept.items()}
    cut = t.attention_s[tuple(slice(n) for n in [*ticks.values()][3:])]
    axes = {axis: getattr(t, axis)[:n] for axis, n in ticks.items()}
    values = zip(("dense_s", "sampled_s", "experts_s"), ticks.values(), strict=False)
    seconds = {name: getattr(t, name)[:n] for name, n in values}
    return TableProfile(t._replace(**axes, **seconds, attention_s=cut), profile.metadata)


def test_half_of_a_grid_predicts_the_rest_as_well_as_is_said():
    errors = []
    for layout in layouts():
        profile = shipped(file_name(layout))
        for limits, points in (
            (
                (16384, 1024, 20480),
                [("decode_s", 1, 40960), ("decode_s", 64, 40960), ("prefill_s", 2048, 32768)],
            ),
            ((16384, 512, 40960), [("decode_s", 1024, 1024), ("decode_s", 1024, 4096)]),
            ((8192, 1024, 40960), [("prefill_s", 16384, 0), ("prefill_s", 16384, 8192)]),
        ):
            extended = covering(half(profile, *limits), **LIMITS)
            errors += [
                getattr(extended, of)(n, kv) / getattr(profile, of)(n, kv) - 1
                for of, n, kv in points
            ]
    size = np.abs(errors)
    worst = f"{np.median(size):.0%} at the median, {size.max():.0%} at worst".replace("%", " %")
    assert f"shipped grids cut in half were off by {worst}" == HALF_OFF_BY


# Layouts that are not shipped.


def seconds(profile: TableProfile) -> NDArray[np.float64]:
    decoded = [profile.decode_s(n, kv) for n, kv in ((1, 1024), (64, 1024), (256, 4096))]
    return np.array([*decoded, profile.prefill_s(2048)])


EXPERIMENT = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "estimates.py"))


def test_shipped_layouts_are_estimated_from_others_and_from_data_sheets_as_well_as_is_said():
    assert EXPERIMENT["counted"]() == ERRORS


@pytest.mark.parametrize("models", ["dense", "experts"])
def test_over_the_layouts_of_the_databases_estimates_are_within_a_fifth_at_the_median(models):
    recorded = EXPERIMENT["recorded"]()
    assert {*recorded} == {*ERRORS}
    for kind, errors in recorded.items():
        assert errors[models]["median"] <= 20, kind
        assert abs(errors[models]["sign"]) <= 10, kind


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("models", ["dense", "experts"])
def test_no_kind_of_estimate_is_off_by_more_than_a_fifth_at_the_median(kind, models):
    assert ERRORS[kind][models]["median"] <= 20


def test_the_nearest_layout_has_the_precision_before_the_number_of_gpus():
    layout = wanted("qwen3-30b-a3b", "h100", tp=4, ep=4, precision="fp8-block")
    near = nearest(layout, MODELS["qwen3-30b-a3b"], GPUS["h100"], layouts())
    assert near is not None
    assert (near.tp, near.ep, near.precision) == (2, 2, "fp8-block")


def test_a_shipped_layout_carried_over_to_itself_keeps_its_times():
    base, model = shipped("qwen2.5-32b_h100_tp4.parquet"), MODELS["qwen2.5-32b"]
    same = in_layout(base, base.metadata, model, GPUS["h100"])
    assert seconds(same) == pytest.approx(seconds(base), rel=1e-12)


@pytest.mark.parametrize("tp", [2, 8])
def test_a_layout_that_is_not_shipped_says_where_it_is_from_and_how_far_such_were_off(tp):
    profile = derived_profile(
        wanted("qwen2.5-32b", "h100", tp=tp), MODELS["qwen2.5-32b"], GPUS["h100"]
    )
    assert (profile.metadata.tp, profile.metadata.kind) == (tp, "extrapolated")
    assert profile.metadata.source.startswith(
        "estimated: qwen2.5-32b on h100 tp4 bf16 × the ratio of rooflines; "
        + off_by("another split", MODELS["qwen2.5-32b"])
    )
    base = shipped("qwen2.5-32b_h100_tp4.parquet")
    assert (profile.decode_s(256, 4096) > base.decode_s(256, 4096)) == (tp < 4)


def test_a_model_of_the_shape_of_a_shipped_one_has_its_times():
    profile = derived_profile(
        wanted("llama-3.1-70b", "h100", tp=4), MODELS["llama-3.1-70b"], GPUS["h100"]
    )
    assert seconds(profile) == pytest.approx(
        seconds(shipped("llama-3.3-70b_h100_tp4.parquet")), rel=1e-12
    )
    assert profile.metadata.source.startswith(
        "estimated: llama-3.3-70b on h100 tp4 bf16, of the same shape; "
    )
    assert "estimates from" not in profile.metadata.source


@pytest.mark.parametrize(
    ("model", "gpu", "layout", "base", "kind"),
    [
        ("qwen3-235b-a22b", "gb200", {"tp": 8, "ep": 8}, "qwen3-235b-a22b on b200", "another GPU"),
        ("deepseek-v3", "h200", {"tp": 8, "ep": 8}, "deepseek-v3 on h200", "another precision"),
        ("glm-4.5-air", "h200", {"tp": 8, "ep": 8}, "qwen3-235b-a22b on h200", "another model"),
    ],
)
def test_the_nearest_profile_is_of_the_model_then_of_its_kind(model, gpu, layout, base, kind):
    shape = MODELS[model]
    profile = derived_profile(wanted(model, gpu, **layout), shape, GPUS[gpu])
    assert profile.metadata.source.startswith(f"estimated: {base}")
    assert off_by(kind, shape) in profile.metadata.source
    assert (profile.metadata.model, profile.metadata.gpu) == (model, gpu)


def test_a_gpu_and_kind_of_model_without_profiles_has_a_roofline_that_says_how_far_such_were_off():
    profile = derived_profile(
        wanted("glm-4.5-air", "a100", tp=8, ep=8), MODELS["glm-4.5-air"], GPUS["a100"]
    )
    assert profile.metadata.kind == "assumed"
    assert profile.metadata.source.endswith(off_by(ROOFLINE, MODELS["glm-4.5-air"]))


def test_an_error_of_dense_models_says_that_none_with_windows_or_states_was_compared():
    for model, unlike in (("gemma-3-4b", True), ("qwen3.5-9b", True), ("qwen3-8b", False)):
        words = off_by("another split", MODELS[model])
        assert ("not compared for models with windows or states" in words) == unlike
        assert "5 % at the median (+0 % signed), 90 % within 16 %, for 660 layouts" in words


def test_what_differs_most_names_the_kind_of_estimate():
    shape = MODELS["qwen3-8b"]
    here = wanted("qwen3-8b", "h100")
    for layout, kind in (
        ({}, ""),
        ({"tp": 2}, "another split"),
        ({"precision": "fp8", "tp": 2}, "another precision"),
    ):
        assert difference(here, wanted("qwen3-8b", "h100", **layout), shape) == kind
    assert difference(here, wanted("qwen3-8b", "h200", precision="fp8"), shape) == "another GPU"


def test_a_precision_that_the_gpu_does_not_multiply_in_is_refused_with_those_it_has():
    with pytest.raises(InputError, match="is fp8: qwen3-14b on a100 has bf16; use one of these"):
        derived_profile(
            wanted("qwen3-14b", "a100", precision="fp8"), MODELS["qwen3-14b"], GPUS["a100"]
        )
    with pytest.raises(
        InputError, match=r"is int8: qwen3-14b on h100 has bf16, fp8, fp8-block; use one"
    ):
        require_precision("int8", GPUS["h100"], MODELS["qwen3-14b"])


# The list of what is shipped.


def test_every_shipped_file_is_one_of_the_layouts():
    assert sorted(map(file_name, layouts())) == sorted(
        file.name for file in PROFILES.glob("*.parquet")
    )
