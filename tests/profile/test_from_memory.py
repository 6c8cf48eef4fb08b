"""Decode attention that a database timed out of the GPU's level 2 (simrl/profile/profilers/aiconfigurator.py)."""

import numpy as np
import pytest

from simrl.profile.model_shape import MODELS
from simrl.profile.profilers import aiconfigurator
from simrl.profile.profilers.aiconfigurator import DECODE_KV_TOKENS, DECODE_SEQUENCES
from simrl.profile.profilers.setups import ONE_GPU

SHAPE = MODELS["qwen3-8b"]  # 36 layers, 4 KiB a token and layer
N, LENGTH = np.ix_(DECODE_SEQUENCES, DECODE_KV_TOKENS)
READ_MB = N * LENGTH * SHAPE.layer_kv_bytes / 1e6


def derived(decode_ms, shape=SHAPE):
    times = aiconfigurator.KernelTimes(
        *(np.ones(1), {}, {}, np.ones(1), np.ones((1, 1))), decode_ms
    )
    return aiconfigurator._from_memory(times, shape, "h100", ONE_GPU).decode_ms


def timed(cached: float):
    """Launches, and 3 MB a µs and layer, or as if `cached` times as fast up to 100 MB."""
    streamed = READ_MB / 3e3 * SHAPE.layers
    return (N > 0) * 0.2 + np.where(READ_MB <= 100, streamed / cached, streamed)


def test_caches_that_fit_the_level_2_take_as_long_as_large_ones_by_the_byte():
    slow, fast = timed(cached=1.0), timed(cached=3.0)
    assert (fast <= slow).all() and (fast < slow).any()
    # The shortest sequences tell what a launch takes; their own bytes were read from level 2, too.
    short = READ_MB[:, :1] / 3e3 * SHAPE.layers * (1 - 1 / 3) * (READ_MB[:, :1] <= 100)
    np.testing.assert_allclose(derived(fast), np.maximum(slow - short, fast), rtol=2e-3)


def test_times_from_memory_stay():
    np.testing.assert_allclose(derived(timed(cached=1.0)), timed(cached=1.0), rtol=1e-3)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5-35b-a3b"])
def test_latent_and_linear_attention_stay(name: str):
    times = timed(cached=3.0)
    np.testing.assert_array_equal(derived(times, MODELS[name]), times)
