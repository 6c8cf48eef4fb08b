import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from experiments import validate_profiles
from simrl.commands.profile import derive
from simrl.errors import InputError
from simrl.profile.doubt import doubted
from simrl.profile.hardware import GPUS, gpu
from simrl.profile.model_shape import MODELS, ModelShape, model_shape
from simrl.profile.profile import read_profile, write_profile
from simrl.profile.profilers import aiconfigurator, setups
from simrl.profile.profilers.products import even_products
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.profilers.setups import EngineSetup
from simrl.profile.profilers.smoothing import settled
from simrl.profile.profilers.sources import PROFILERS
from simrl.profile.roofline import LAUNCH_S, Link, Roofline, logits_gather_s, pass_all_reduces_s
from simrl.profile.shipped import file_name
from simrl.scenario.presets import ENGINES
from tests.helpers import examples

SHIPPED = sorted((Path(__file__).parents[2] / "profiles").glob("*.parquet"))
DENSE = [path for path in SHIPPED if not read_profile(path).metadata.routing]
TOY = ModelShape(
    name="toy-1b",
    layers=3,
    hidden=1024,
    heads=8,
    kv_heads=4,
    head_dim=128,
    intermediate=4096,
    vocab=32000,
)
FAST_LINK = Link(bytes_per_s=100e9, latency_s=1e-6)

# ---------------------------------------------------------------- collectives


def test_a_ring_all_reduce_sends_twice_the_bytes_but_one_share():
    link = Link(bytes_per_s=10e9, latency_s=5e-6)
    seconds = link.all_reduce_s(np.array([4e9]), ranks=4)
    assert seconds == pytest.approx(2 * 3 / 4 * 4e9 / 10e9 + 6 * 5e-6)
    assert link.all_gather_s(np.array([4e9]), ranks=4) == pytest.approx(
        3 / 4 * 4e9 / 10e9 + 3 * 5e-6
    )


def test_latency_is_paid_a_step_or_a_collective():
    once = Link(bytes_per_s=10e9, latency_s=5e-6, latency_each_step=False)
    assert once.all_reduce_s(np.array([0.0]), ranks=8) == pytest.approx(5e-6)
    assert Link(10e9, 5e-6).all_reduce_s(np.array([0.0]), ranks=8) == pytest.approx(14 * 5e-6)


def test_one_rank_needs_no_communication():
    assert pass_all_reduces_s(TOY, np.array([1.0, 4096.0]), 1, FAST_LINK).tolist() == [0.0, 0.0]
    assert logits_gather_s(TOY, np.array([64.0]), 1, FAST_LINK).tolist() == [0.0]


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1e-6), (float("nan"), 0.0)]
)
def test_a_link_without_bandwidth_is_refused(bandwidth: float, latency: float):
    with pytest.raises(InputError, match="it needs a bandwidth above zero"):
        Link(bandwidth, latency)


# ---------------------------------------------------------------- smoothing

GRIDS = arrays(np.float64, st.tuples(*(st.integers(1, 4),) * 3), elements=st.floats(0, 100))


@given(GRIDS)
@examples(100)
def test_what_is_settled_falls_nowhere_and_stays_settled(values: np.ndarray):
    even = settled(values)
    for axis in range(values.ndim):
        assert (np.diff(even, axis=axis) >= 0).all()
    assert np.array_equal(settled(even), even)
    assert values.min() <= even.min() and even.max() <= values.max()


@given(arrays(np.float64, st.integers(1, 30), elements=st.floats(0, 100)))
@examples(100)
def test_settling_a_line_moves_no_point_by_more_than_half_the_largest_fall(line: np.ndarray):
    largest_fall = (np.maximum.accumulate(line) - line).max()
    assert np.abs(settled(line) - line).max() <= largest_fall / 2 + 1e-9


# ---------------------------------------------------------------- mixtures of experts


def test_a_mixture_of_experts_holds_all_experts_and_computes_with_a_few():
    shape = model_shape("qwen3-30b-a3b")
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    active = shape.active_body_parameters + 2 * shape.vocab * shape.hidden
    assert active == pytest.approx(3.3e9, rel=0.02)
    assert shape.forward_flops(1, 0) == pytest.approx(2 * (active - shape.vocab * shape.hidden))
    one, many = (roofline_profile(shape, gpu("h100")).decode_s(n, 1024) for n in (1, 64))
    assert many > 3.5 * one  # one token reads 8 of 128 experts, 64 tokens nearly all


def test_a_mixture_of_experts_is_read_from_its_config(tmp_path):
    ours = model_shape("qwen3-30b-a3b")
    config = {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(tmp_path).model_copy(update={"name": ours.name}) == ours
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [4]}))
    assert model_shape(tmp_path).expert_layers == 47  # wherever the layer without experts lies
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 200}))
    with pytest.raises(
        InputError,
        match="128 experts need a moe_intermediate above 0 and 1 to 128 experts_per_token",
    ):
        model_shape(tmp_path)


# ---------------------------------------------------------------- roofline


def test_the_roofline_is_work_over_rate_and_a_launch_a_kernel_everywhere():
    shape, h100 = model_shape("qwen3-8b"), GPUS["h100"]
    profile = roofline_profile(shape, h100, between_passes_s=0.0)
    flops, bandwidth = 0.95 * 0.8 * h100.bf16_flops, 0.8 * h100.memory_bytes_per_s
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    moved = 2 * 8 * shape.hidden + 4 * heads + 6 * shape.intermediate  # bytes of a layer, a token
    for batch, kv in ((1, 100), (37, 5000), (300, 40000), (2000, 777)):
        weights = shape.layers * shape.layer_parameters + shape.vocab * shape.hidden
        dense = max(2 * weights * batch / flops, 2 * weights / bandwidth)
        launches = shape.layers * (9 + 4) * LAUNCH_S  # beside attention, and in it
        assert profile.decode_s(batch, kv) == pytest.approx(
            launches
            + dense
            + shape.layers * moved * batch / bandwidth
            + batch * kv * shape.kv_bytes_per_token / (1.12 * bandwidth)
        )


def test_the_roofline_prefill_is_the_model_flops_over_the_rate():
    shape, h100 = model_shape("qwen3-32b"), GPUS["h100"]
    profile = roofline_profile(shape, h100, between_passes_s=0.0)
    for tokens in (1024, 3000, 16384, 50000):
        products = shape.forward_flops(tokens, 0.0) - 2 * shape.vocab * shape.hidden * tokens
        pairs = shape.forward_flops(tokens, tokens**2 / 2 + 500 * tokens) - shape.forward_flops(
            tokens, 0.0
        )
        rate = 0.95 * 0.8 * h100.bf16_flops
        assert profile.prefill_s(tokens) == pytest.approx(
            products / rate + pairs / (0.85 * rate), rel=0.12
        )


def test_a_gpu_that_multiplies_slowly_does_not_pay_for_whole_tiles_of_few_rows():
    shape, slow = model_shape("qwen3-30b-a3b"), GPUS["h20"]
    experts = Roofline(shape, slow).experts_s(np.array([64.0, 65536.0]))
    rows = 64 * shape.experts_per_token * 2 * shape.expert_layers * shape.expert_parameters
    assert experts[0] < 20 * rows / slow.bf16_flops
    assert experts[0] < experts[1] / 20


@pytest.mark.parametrize("ep", [2, 8])
def test_gpus_that_share_experts_wait_for_the_busiest(ep):
    shape, tokens = model_shape("qwen3-30b-a3b"), np.array([16384.0])
    alone, shared = (Roofline(shape, GPUS["h100"], dp=1, tp=ep, ep=n) for n in (1, ep))
    assert shared.experts_s(tokens) > 1.15 * alone.experts_s(tokens)


def test_more_gpus_are_faster_but_not_by_their_number():
    shape, h100 = model_shape("qwen3-32b"), GPUS["h100"]
    one, four = (roofline_profile(shape, h100, tp) for tp in (1, 4))
    for seconds in (lambda p: p.decode_s(64, 4096), lambda p: p.prefill_s(8192)):
        assert seconds(one) / 4 < seconds(four) < seconds(one)


def test_the_roofline_covers_long_contexts_and_says_what_it_assumes():
    profile = roofline_profile(model_shape("qwen3-8b"), GPUS["h200"], compute_efficiency=0.55)
    profile.require_covers(65536, 2048, 262144, verified_positions=65536)
    assert profile.metadata.kind == "assumed"
    assert "compute 0.55" in profile.metadata.notes and "H200" in profile.metadata.source


@pytest.mark.parametrize("efficiency", [0.0, 1.5, float("nan")])
def test_efficiencies_must_be_shares(efficiency: float):
    with pytest.raises(
        InputError, match=r"memory_efficiency is .*; it must be above 0 and at most 1"
    ):
        roofline_profile(TOY, GPUS["h100"], memory_efficiency=efficiency)
    with pytest.raises(InputError, match="tp is 3; it must divide the 8 attention heads"):
        roofline_profile(TOY, GPUS["h100"], tp=3)


# ---------------------------------------------------------------- aiconfigurator and the shipped files


def test_the_shipped_profiles_are_all_there():
    names = {
        f"qwen3-{size}_{g}_tp{tp}"
        for size in ("8b", "14b", "32b")
        for g in ("h100", "h200")
        for tp in (1, 2, 4)
    }
    names |= {f"qwen3-0.6b_{g}_tp1" for g in ("h100", "h200")}
    names |= {f"qwen3-{size}_a100_tp{tp}" for size in ("8b", "14b") for tp in (1, 2)}
    names |= {f"qwen3-{size}_h800_tp2" for size in ("8b", "14b")}
    names |= {f"qwen2.5-7b_{g}_tp{tp}" for g in ("h100", "h800", "h20") for tp in (1, 2)} | {
        "qwen2.5-7b_h20_tp4"
    }
    names |= {f"qwen2.5-{size}_{g}_tp1" for size in ("0.5b", "1.5b") for g in ("h100", "h800")}
    names |= {f"qwen2.5-32b_{g}_tp4" for g in ("h100", "h800")}
    names |= {
        f"deepseek-r1-distill-qwen-{size}_h800_tp{tp}"
        for size, tp in (("1.5b", 1), ("7b", 1), ("7b", 2))
    }
    names |= {f"llama-3.3-70b_h100_tp{tp}" for tp in (4, 8)}
    names |= {"llama-3.1-8b_h100_tp1", "deepseek-r1-distill-qwen-1.5b_h100_tp2"}
    names |= {
        "qwen3-8b_h100_tp1_fp8",
        "qwen3-32b_h100_tp2_fp8",
        "qwen3-8b_b200_tp1",
        "qwen3-32b_b200_tp2",
    }
    assert {path.stem for path in DENSE} == names


def test_a_shipped_profile_of_a_gpu_that_nobody_measured_says_so():
    estimated = {p.metadata.gpu for p in map(read_profile, SHIPPED) if p.metadata.kind != "derived"}
    assert estimated == {"h800", "h20"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_profile_is_whole_and_small(path: Path):
    profile = read_profile(path)
    metadata = profile.metadata
    assert path.name == file_name(metadata)
    assert "aiconfigurator 0.12" in metadata.source or "aisimulate 0.13" in metadata.source
    assert metadata.source.startswith("estimated: ") == (metadata.kind == "extrapolated")
    assert metadata.created == ""
    assert ("norms of queries and keys" in metadata.notes) == model_shape(metadata.model).qk_norm
    profile.require_covers(
        query_tokens=16384, sequences=1024, kv_tokens=2048 + 32768, verified_positions=16384
    )
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize("path", [p for p in DENSE if "fp8" not in p.stem], ids=lambda p: p.stem)
def test_a_shipped_profile_stays_within_the_data_sheet(path: Path):
    """No kernel is faster than its bytes or its flops allow, nor absurdly slower."""
    profile = read_profile(path)
    shape, card, tp = (
        model_shape(profile.metadata.model),
        GPUS[profile.metadata.gpu],
        profile.metadata.tp,
    )
    looked_up = (
        0 if shape.tied_embeddings else 2 * shape.vocab * shape.hidden
    )  # read for the output head, if tied
    reading = (shape.weight_bytes - looked_up) / tp / card.memory_bytes_per_s
    # Small models: starting kernels. Of Qwen3-0.6B on H100 they were confirmed, as what decode steps take less the host's line.
    assert reading < profile.decode_s(1, 512) < 3.5 * reading + max(0.5e-3, 30e-6 * shape.layers)
    kv_reading = 256 * 16384 * shape.kv_bytes_per_token / tp / card.memory_bytes_per_s
    assert kv_reading < profile.decode_s(256, 16384) < 2 * (kv_reading + reading)
    computing = shape.forward_flops(8192, 8192**2 / 2) / tp / card.bf16_flops
    assert computing < profile.prefill_s(8192) < 3 * computing


def test_more_gpus_and_faster_memory_pay_in_the_shipped_profiles():
    by_name = {path.stem: read_profile(path) for path in SHIPPED}
    for size, g in itertools.product(("8b", "14b", "32b"), ("h100", "h200")):
        one, two, four = (by_name[f"qwen3-{size}_{g}_tp{tp}"] for tp in (1, 2, 4))
        assert one.decode_s(64, 4096) > two.decode_s(64, 4096) > four.decode_s(64, 4096)
    for size, tp in itertools.product(("8b", "14b", "32b"), (1, 2, 4)):
        h100, h200 = (by_name[f"qwen3-{size}_{g}_tp{tp}"] for g in ("h100", "h200"))
        assert h200.decode_s(128, 8192) < 0.85 * h100.decode_s(128, 8192)


def test_the_shipped_profiles_say_by_how_much_they_miss_measured_serving(shared_data):
    """Steady state at concurrency c: while one request makes its osl tokens, each of the c - 1 others is prefilled."""
    rows = pd.read_csv(shared_data / "serving_measurements" / "h100_sxm_agg.csv")
    rows = rows[
        (rows.backend == "vllm") & (rows.model_path == "Qwen/Qwen3-32B") & rows.precision.isna()
    ]
    shape, errors, gaps_s = model_shape("qwen3-32b"), [], []
    for row in rows[rows.tp_size.isin([2, 4])].itertuples():
        free_bytes = (
            0.9 * row.tp_size * 80e9 - shape.weight_bytes
        )  # less than the driver reports: for buffers
        if row.batch_size * (row.isl + row.osl) * shape.kv_bytes_per_token > free_bytes:
            continue  # the KV cache did not hold that concurrency
        profile = read_profile(SHIPPED[0].parent / f"qwen3-32b_h100_tp{row.tp_size}.parquet")
        kv, others = row.isl + row.osl / 2, row.batch_size - 1
        decode = profile.decode_s(row.batch_size, kv)
        mixed = profile.pass_s(others + row.isl, row.batch_size, row.isl, 0, others, others * kv)
        predicted = decode + others / (row.osl - 1) * (mixed - decode)
        errors.append(predicted / (1e-3 * row.silicon_tpot_ms) - 1)
        if row.batch_size == 8:
            gaps_s.append(1e-3 * row.silicon_tpot_ms - predicted)
    assert len(errors) == 56 and "56 measured" in aiconfigurator.ACCURACY
    assert statistics.median(errors) == pytest.approx(-0.116, abs=0.01)
    assert statistics.median(gaps_s) == pytest.approx(1.5e-3, abs=0.2e-3)


def test_without_aiconfigurator_the_error_names_the_package_and_its_versions(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(InputError, match=r"pip install 'aiconfigurator.*0\.12'"):
        aiconfigurator.derive(model_shape("qwen3-8b"), "h100")


def test_every_gpu_with_measured_kernels_is_named_by_the_command():
    names = {*setups.SYSTEMS}
    (gpu_option,) = [
        each for each in get_type_hints(derive, include_extras=True)["gpu"].__metadata__
    ]
    assert {word.strip(",;") for word in gpu_option.help.split()} >= names


def test_a_profile_of_experts_in_fp8_says_that_bf16_is_faster():
    shape = model_shape("qwen3-30b-a3b")
    notes = aiconfigurator.expert_notes(shape, EngineSetup(2, 1, 2, "fp8"))
    assert any("slower than in bf16" in note for note in notes)
    assert not any(
        "slower" in note
        for note in aiconfigurator.expert_notes(shape, EngineSetup(2, 1, 2, "fp8-block"))
    )


def test_experts_that_nobody_measured_are_estimated_and_the_notes_say_why(engine_handle):
    own = model_shape("qwen3-30b-a3b").model_copy(update={"name": "mine", "experts": 64})
    with pytest.raises(setups.MissingKernelsError, match="no mine on 2 h100 under vllm in bf16"):
        aiconfigurator.engine_of(own, "h100", EngineSetup(2, 1, 2))
    profile = PROFILERS["aiconfigurator"](own, GPUS["h100"], 2, ep=2)
    assert profile.metadata.kind == "extrapolated"
    assert "estimated, as aiconfigurator: no mine on 2 h100" in profile.metadata.notes


@pytest.mark.parametrize(
    ("model", "gpu", "layout", "source"),
    [
        ("glm-4.5-air", "h100", {"tp": 8, "ep": 8}, "estimated: qwen3-235b-a22b on h100"),
        ("qwen3-8b", "a40", {}, "estimated: qwen3-8b on "),
        ("qwen3-235b-a22b", "h800", {"tp": 8, "ep": 8}, "estimated: qwen3-235b-a22b on "),
    ],
)
def test_kernels_that_nobody_measured_are_estimated_with_and_without_the_package(
    model: str, gpu: str, layout: dict[str, int], source: str
):
    profile = PROFILERS["aiconfigurator"](model_shape(model), GPUS[gpu], **layout)
    assert profile.metadata.source.startswith(source)
    assert "at the median" in profile.metadata.source
    assert profile.metadata.notes.startswith("estimated, as aiconfigurator: no kernels")


@pytest.mark.parametrize(
    ("model", "gpu", "layout", "message"),
    [
        (
            "deepseek-v3",
            "h800",
            {"tp": 8, "ep": 8},
            "its weights take .* GiB of a GPU, which has 80",
        ),
        (
            "qwen3-8b",
            "a40",
            {"precision": "fp8"},
            "precision.weights is fp8: qwen3-8b on a40 has bf16",
        ),
        ("qwen3-8b", "h800", {"tp": 3}, "--tp 3 does not divide the 32 attention heads"),
    ],
)
def test_only_the_impossible_is_refused(
    model: str, gpu: str, layout: dict[str, object], message: str
):
    with pytest.raises(InputError, match=message):
        PROFILERS["aiconfigurator"](model_shape(model), GPUS[gpu], **layout)


@pytest.fixture(scope="module")
def engine_handle():
    return pytest.importorskip(
        "aiconfigurator_core.sdk.engine", reason="the extra is not installed"
    ).EngineHandle


@pytest.mark.slow
@pytest.mark.parametrize("backend", validate_profiles.SETS)
def test_presets_have_the_host_times_that_the_comparison_with_serving_sets(
    engine_handle, shared_data, backend: str
):
    points, left_out = validate_profiles.read_points(shared_data)
    used = [point for point in points if point.backend == backend and point.calibrates]
    assert {(MODELS[p.served.name].experts, p.precision) for p in used} == {(0, "bf16")}
    _, constants = validate_profiles.predict_all(used, left_out)
    preset = ENGINES[validate_profiles.SETS[backend]].constants
    for found, key in zip(
        constants[backend], ("between_passes_s", "sequence_overhead_s"), strict=True
    ):
        assert preset[key].value == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("name", ["qwen3-8b_h200_tp2", "qwen3-14b_h100_tp4"])
def test_a_shipped_profile_is_remade_byte_for_byte(engine_handle, tmp_path, name: str):
    model, gpu_name, tp = name.split("_")
    write_profile(
        doubted(
            aiconfigurator.derive(model_shape(model), gpu_name, EngineSetup(int(tp[2:]))),
            model_shape(model),
            GPUS[gpu_name],
        )[0],
        tmp_path / "again.parquet",
    )
    assert (tmp_path / "again.parquet").read_bytes() == (
        SHIPPED[0].parent / f"{name}.parquet"
    ).read_bytes()


@pytest.mark.parametrize(
    ("model", "bundled"), [("qwen3-8b", "Qwen/Qwen3-8B"), ("qwen3-32b", "Qwen/Qwen3-32B")]
)
def test_a_config_from_the_shape_gives_what_the_bundled_model_gives(
    engine_handle, model: str, bundled: str
):
    ours = aiconfigurator._compiled(model_shape(model), "h200", EngineSetup(2)).handle
    theirs = engine_handle.compile(bundled, "h200_sxm", "vllm", tp_size=2, nextn=0)

    def norms_ms(tokens: int) -> float:
        return sum(
            ms
            for name, ms, *_ in ours.decode_step_per_op(tokens, 2, 2)
            if name.endswith(("_q_norm", "_k_norm"))
        )

    for batch, context in (
        (1, 1024),
        (64, 5000),
    ):  # theirs has no norms in decoding, and 8 × 3 µs × 1.1 a layer in prefill
        found_ms = ours.predict_decode_latency(batch, context, 2) - norms_ms(batch)
        assert found_ms == pytest.approx(theirs.predict_decode_latency(batch, context, 2))
    found_ms = ours.predict_prefill_latency(1, 3000) - norms_ms(3000)
    theirs_ms = theirs.predict_prefill_latency(1, 3000) - 1e-3 * 26.4 * model_shape(model).layers
    assert found_ms == pytest.approx(theirs_ms, rel=1e-4)


def test_norms_of_queries_and_keys_are_counted_once_a_pass_for_all_its_tokens(engine_handle):
    """Two kernels a layer by the source's rule for elementwise kernels: 3 µs each, and the bytes read and written."""
    shape, layers = model_shape("qwen3-32b"), 64
    times = aiconfigurator.times_of(shape, "h100", EngineSetup(2))
    norms_us = (
        1e3 * (times.dense_ms["attention_q_norm"] + times.dense_ms["attention_k_norm"]) / layers
    )
    token_us = 1e6 * 2 * 2 * (32 + 4) * 128 / (0.8 * 3350e9)
    assert norms_us == pytest.approx(2 * 3 + token_us * times.tokens, rel=1e-6)
    shorter = aiconfigurator.times_of(
        shape.model_copy(update={"qk_norm": False}), "h100", EngineSetup(2)
    )
    assert np.allclose(times.prefill_ms, shorter.prefill_ms) and np.allclose(
        times.decode_ms, shorter.decode_ms
    )
    assert not [name for name in shorter.dense_ms if name.endswith(("_q_norm", "_k_norm"))]


def test_norms_over_all_heads_reduce_their_variances_over_the_gpus_that_share_them(engine_handle):
    times = [
        aiconfigurator.times_of(MODELS["minimax-m2.5"], "h200", EngineSetup(tp, dp, 8, "fp8-block", package="aisimulate"))
        for tp, dp in ((8, 1), (1, 8))
    ]  # fmt: skip
    split, whole = (each.dense_ms for each in times)
    assert 62 * 3e-3 < split["variance_ar"][0] < 62 * 10e-3 and "variance_ar" not in whole
    kernels_ms = split["attention_q_norm"][0], whole["attention_q_norm"][0]
    assert kernels_ms[0] == pytest.approx(2 * kernels_ms[1], rel=0.01)


def test_no_matrix_product_takes_longer_than_one_of_more_rows(tmp_path):
    """Rows of two levels, in any order; another system's folder is left out, and the database's own files stay."""
    table = tmp_path / "systems" / "data" / "a_gpu" / "gemm" / "vllm" / "1.0" / "gemm_perf.parquet"
    for folder in (table.parent, tmp_path / "systems" / "data" / "another_gpu"):
        folder.mkdir(parents=True)
    rows = pd.DataFrame(
        [("bf16", m, n, 64, s) for n, m, s in (
            (32, 4, 6.0), (32, 1, 5.5), (32, 2, 5.0), (32, 8, 6.5),
            (16, 1, 3.0), (16, 2, 2.5), (16, 8, 7.0),
        )],
        columns=["gemm_dtype", "m", "n", "k", "latency"],
    )  # fmt: skip
    rows.to_parquet(table)
    before = table.read_bytes()
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    copy = even_products(package, "a_gpu", "vllm", tmp_path)
    even = pd.read_parquet(copy / table.relative_to(tmp_path / "systems"))
    assert even[even.n == 32].latency.to_list() == [5.0, 5.0, 6.0, 6.5]
    assert even[even.n == 16].latency.to_list() == [2.5, 2.5, 7.0]
    assert table.read_bytes() == before and not (copy / "data" / "another_gpu").exists()


def test_tensorrt_llm_has_its_norms_in_the_kernel_of_rotations(engine_handle):
    compiled = aiconfigurator.engine_of(
        model_shape("qwen3-32b"), "h100", EngineSetup(2, backend="trtllm")
    )
    assert not [name for _, name in compiled.decoding if name.endswith(("_q_norm", "_k_norm"))]


@pytest.mark.parametrize(
    ("model", "gpu_name", "tp"), [("qwen3-32b", "h200", 4), ("qwen3-14b", "h100", 2)]
)
def test_the_profile_agrees_with_aiconfigurator_on_and_between_its_points(
    engine_handle, model, gpu_name, tp
):
    profile = aiconfigurator.derive(model_shape(model), gpu_name, EngineSetup(tp))
    engine = aiconfigurator.engine_of(model_shape(model), gpu_name, EngineSetup(tp)).handle
    for batch, context in itertools.product(
        (1, 8, 16, 45, 64, 91, 128, 181, 256), (1024, 1448, 4096, 8192, 16384)
    ):
        expected = 1e-3 * engine.predict_decode_latency(batch, context, 2)
        assert profile.decode_s(batch, context + 1) == pytest.approx(expected, rel=0.02)
    for tokens in (256, 362, 1024, 1448, 4096, 6900, 16384):
        assert profile.prefill_s(tokens) == pytest.approx(
            1e-3 * engine.predict_prefill_latency(1, tokens), rel=0.02
        )


def test_combinations_without_data_are_refused(engine_handle):
    with pytest.raises(InputError, match="gpu 'tpu' is unknown"):
        aiconfigurator.derive(model_shape("qwen3-8b"), "tpu")
    with pytest.raises(InputError, match="no qwen3-8b on 3 h100 under vllm"):
        aiconfigurator.derive(model_shape("qwen3-8b"), "h100", EngineSetup(3))
