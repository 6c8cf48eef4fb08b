"""Profiles of GPUs that nobody measured, carried over from measured ones by their data sheets."""

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import GPUS
from simrl.profile.model_shape import MODELS
from simrl.profile.profilers import aiconfigurator, transformed
from simrl.profile.profilers.aiconfigurator import (
    DECODE_KV_TOKENS,
    DECODE_SEQUENCES,
    PREFILL_KV_TOKENS,
    PREFILL_TOKENS,
    EngineSetup,
)
from simrl.profile.profilers.transformed import BASES, Transformation

SHAPE = MODELS["qwen2.5-7b"]
TOKENS = np.array([1.0, 16, 256, 4096])


def moved(base: str, new: str, tp: int = 1) -> Transformation:
    return Transformation(SHAPE, tp, GPUS[base], GPUS[new])


def made_up_times() -> aiconfigurator.KernelTimes:
    """Rising, as kernels are: reading takes the time of few tokens, multiplying that of many."""
    rising = np.maximum(1.0, TOKENS / 200)
    names = (
        "embedding",
        "add_norm_1",
        "qkv_gemm",
        "proj_gemm",
        "gate_ffn1_gemm",
        "ffn2_gemm",
        "ar_1",
        "ar_2",
        "p2p",
    )
    chunk, cached = np.array(PREFILL_TOKENS, float)[:, None], np.array(PREFILL_KV_TOKENS, float)
    return aiconfigurator.KernelTimes(
        tokens=TOKENS,
        dense_ms={name: rising * (1 + i) for i, name in enumerate(names)},
        experts_ms={},
        sampled_ms=rising,
        prefill_ms=1e-6 * chunk * (cached + chunk / 2) + np.where(chunk > 0, 1.0, 0.0),
        decode_ms=1e-5
        * np.multiply.outer(np.array(DECODE_SEQUENCES, float), np.array(DECODE_KV_TOKENS, float)),
    )


def test_a_gpu_with_the_data_sheet_of_its_base_keeps_every_time():
    times = made_up_times()
    same = moved("h100", "h100", tp=2).of(times)
    assert all(
        np.allclose(same.dense_ms[name], times.dense_ms[name], rtol=1e-12)
        for name in times.dense_ms
    )
    for before, after in zip(times[3:], same[3:], strict=True):
        assert np.allclose(before, after, rtol=1e-12)


def test_a_slower_link_lengthens_collectives_beyond_their_latency_and_nothing_else():
    times = made_up_times()
    h800 = moved("h100", "h800", tp=2).of(times)
    for name, ms in times.dense_ms.items():
        if name in transformed.COLLECTIVES:
            assert h800.dense_ms[name] == pytest.approx(ms[0] + (ms - ms[0]) * 900 / 400)
        else:
            assert h800.dense_ms[name] == pytest.approx(ms)
    assert np.allclose(h800.decode_ms, times.decode_ms) and np.allclose(
        h800.prefill_ms, times.prefill_ms
    )


def test_few_tokens_take_longer_by_the_memory_bandwidth():
    times = made_up_times()
    h20 = moved("h200", "h20").of(times)
    assert h20.decode_ms == pytest.approx(times.decode_ms * 4.8 / 4.0)
    for name in ("embedding", "qkv_gemm", "ffn2_gemm"):
        assert h20.dense_ms[name][0] == pytest.approx(times.dense_ms[name][0] * 4.8 / 4.0)
    assert h20.dense_ms["ar_1"] == pytest.approx(
        times.dense_ms["ar_1"]
    )  # both have NVLink at 900 GB/s


def test_many_tokens_are_multiplied_at_the_share_of_the_rate_that_the_base_reached():
    times = made_up_times()
    h20 = moved("h200", "h20").of(times)
    assert h20.dense_ms["qkv_gemm"][-1] == pytest.approx(times.dense_ms["qkv_gemm"][-1] * 989 / 148)
    assert h20.prefill_ms[-1, -1] == pytest.approx(times.prefill_ms[-1, -1] * 989 / 148)


def test_the_share_is_of_the_data_sheet_whatever_the_base():
    flops = moved("h200", "h20").product_flops("ffn2_gemm") * TOKENS
    half = 1e3 * flops / (0.5 * GPUS["h200"].bf16_flops)
    assert moved("h200", "h20").computed(half, flops) == pytest.approx(
        1e3 * flops / (0.5 * GPUS["h20"].bf16_flops)
    )


def test_rising_times_stay_rising():
    h20 = moved("h200", "h20").of(made_up_times())
    for ms in (*h20.dense_ms.values(), h20.sampled_ms):
        assert (np.diff(ms) >= 0).all()
    for axis in (0, 1):
        assert (np.diff(h20.prefill_ms, axis=axis) >= 0).all() and (
            np.diff(h20.decode_ms, axis=axis) >= 0
        ).all()


def test_the_work_of_a_layer_is_that_of_its_weights():
    names = ("qkv_gemm", "proj_gemm", "gate_ffn1_gemm", "ffn2_gemm")
    assert (
        sum(map(moved("h200", "h20").product_flops, names))
        == 2 * SHAPE.layers * SHAPE.layer_parameters
    )
    copied = (
        moved("h200", "h20", tp=8).product_flops("qkv_gemm") * 8
    )  # 4 KV heads on 8 GPUs: each is held twice
    assert copied == 2 * SHAPE.layers * SHAPE.hidden * (28 + 2 * 8) * 128


def test_an_operation_of_unknown_work_is_refused():
    times = made_up_times()
    times.dense_ms["mamba_gemm"] = times.sampled_ms
    with pytest.raises(
        InputError, match=r"h20: the work of qwen2\.5-7b's operation 'mamba_gemm' is not known"
    ):
        moved("h200", "h20").of(times)


def test_bases_are_measured_gpus_that_are_hardly_slower():
    for new, base in BASES.items():
        assert base in aiconfigurator.SYSTEMS and new not in aiconfigurator.SYSTEMS
        for rate in ("bf16_flops", "memory_bytes_per_s", "link_bytes_per_s"):
            assert getattr(GPUS[new], rate) <= 1.03 * getattr(GPUS[base], rate)


def test_the_distilled_models_have_embeddings_of_their_own():
    head = 151936 * 1536
    assert (
        MODELS["deepseek-r1-distill-qwen-1.5b"].parameters
        == MODELS["qwen2.5-1.5b"].parameters + head
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_an_h800_alone_is_an_h100_and_two_are_slower(tp: int):
    pytest.importorskip("aiconfigurator_core.sdk.engine", reason="the extra is not installed")
    h100, h800 = (
        aiconfigurator.derive(SHAPE, "h100", EngineSetup(tp)),
        transformed.derive(SHAPE, "h800", EngineSetup(tp)),
    )
    if tp == 1:
        assert all(np.array_equal(a, b) for a, b in zip(h100.tables, h800.tables, strict=True))
    else:
        assert 1.05 * h100.prefill_s(8192) < h800.prefill_s(8192) < 1.5 * h100.prefill_s(8192)
        assert h100.decode_s(1, 1024) <= h800.decode_s(1, 1024) < 1.01 * h100.decode_s(1, 1024)


def test_an_h20_decodes_like_an_h200_with_slower_memory_and_prefills_within_its_data_sheet():
    pytest.importorskip("aiconfigurator_core.sdk.engine", reason="the extra is not installed")
    h200, h20 = aiconfigurator.derive(SHAPE, "h200"), transformed.derive(SHAPE, "h20")
    for sequences, kv_tokens in ((1, 1024), (8, 4096), (16, 16384)):
        assert h20.decode_s(sequences, kv_tokens) == pytest.approx(
            1.2 * h200.decode_s(sequences, kv_tokens), rel=0.01
        )
    least_s = SHAPE.forward_flops(8192, 8192**2 / 2) / GPUS["h20"].bf16_flops
    assert least_s < h20.prefill_s(8192) < 1.3 * least_s
    assert h20.metadata.kind == "derived"
    assert "derived, not measured: transformed from h200 to h20" in h20.metadata.source
