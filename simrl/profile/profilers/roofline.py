"""A profile from data sheets alone, for hardware that nobody measured: the parts of
`simrl.profile.roofline` on a grid.

Each rate is the data sheet's times an efficiency that the metadata names; the constants of kernels
are set on six measured profiles, as `simrl.profile.roofline` says.
"""

from __future__ import annotations

import numpy as np

from simrl.profile.hardware import Gpu
from simrl.profile.metadata import split_words
from simrl.profile.model_shape import ModelShape
from simrl.profile.precision import WEIGHT_BYTES
from simrl.profile.profile import NOT_MEASURED, Floats, ProfileMetadata, TableProfile, Tables
from simrl.profile.roofline import LAUNCH_S, MEMORY_EFFICIENCY, POWER, Roofline

MOST_TOKENS, MOST_SEQUENCES, MOST_KV_TOKENS = 65536, 2048, 262144


def roofline_profile(
    shape: ModelShape,
    gpu: Gpu,
    tp: int = 1,
    compute_efficiency: float = 0.0,
    memory_efficiency: float = MEMORY_EFFICIENCY,
    link_efficiency: float = 0.7,
    link_latency_s: float = 3e-6,
    between_passes_s: float = 1e-3,
    dp: int = 1,
    ep: int = 1,
    precision: str = "bf16",
    kv_precision: str = "bf16",
) -> TableProfile:
    """Return the profile of `shape` on `tp` × `dp` GPUs; its rates are the data sheet's times the
    efficiencies.

    The defaults: 95 % of what the GPU's large matrix products reach (`Gpu.matmul_share`; a
    `compute_efficiency` of 0 stands for it), 80 % of the memory bandwidth, 70 % of the link's, 3 µs
    for each step of a ring, and 1 ms of host time between passes. Every kernel takes 3 µs beside
    its bytes. A group larger than the link's domain pays the network. Raises `InputError` for
    efficiencies outside (0, 1] and a `tp` the heads do not share.
    """
    parts = Roofline(
        shape,
        gpu,
        tp,
        dp,
        precision,
        kv_precision,
        compute_efficiency,
        memory_efficiency,
        link_efficiency,
        link_latency_s,
        ep,
    )
    layout = ProfileMetadata(
        model=shape.name,
        gpu=gpu.name,
        tp=tp,
        dp=dp,
        ep=ep,
        precision=precision,
        kv_precision=kv_precision,
        routing=f"power law {POWER}" if shape.experts else "",
        kind="assumed",
        source=f"roofline of {gpu.source}",
        notes=f"efficiencies: compute {parts.compute_efficiency:.3g}, memory {memory_efficiency}, link {link_efficiency}; "
        f"{link_latency_s * 1e6:g} µs a step of a ring, {between_passes_s * 1e3:g} ms between passes; "
        f"{LAUNCH_S * 1e6:g} µs a kernel beside its bytes",
    )

    # Below the kink, reading the weights takes all the time; above it, multiplying does. Between
    # ticks all is linear, but for the experts that are met.
    kink = parts.flops_per_s(precision) * WEIGHT_BYTES[precision] / (2.0 * parts.bytes_per_s)
    met = 2.0 ** np.arange(17) if shape.experts else ()
    tokens = _rising(1, kink, MOST_TOKENS, *met)
    # All tokens of a pass are sampled where drafts are verified.
    sampled = _rising(1, parts.flops_per_s() / parts.bytes_per_s, MOST_TOKENS)
    chunks = _rising(0, *np.round(2 ** np.arange(0, 16.25, 0.5)))
    cached = _rising(0, *2 ** np.arange(7, 19))
    decode_kv = _rising(0, shape.window_tokens, MOST_KV_TOKENS)
    # Sequences × length is bilinear but for the launches of the first sequence, and for the
    # projections of latents.
    decodes = (
        _rising(0, *2.0 ** np.arange(12)) if shape.kv_lora_rank else _rising(0, 1, MOST_SEQUENCES)
    )

    ranks = tokens * dp if shape.experts else NOT_MEASURED
    tables = Tables(
        dense_tokens=tokens,
        dense_s=parts.dense_s(tokens),
        sampled_sequences=sampled,
        sampled_s=parts.sampled_s(sampled),
        prefill_tokens=chunks,
        prefill_kv_tokens=cached,
        decode_sequences=decodes,
        decode_kv_tokens=decode_kv,
        attention_s=parts.attention_s(chunks, cached, decodes, decode_kv),
        between_passes_s=between_passes_s,
        expert_tokens=ranks,
        experts_s=parts.experts_s(ranks),
    )
    return TableProfile(
        tables,
        layout,
        origin=f"roofline {shape.name} {gpu.name} {split_words(layout.model_dump())}",
    )


def _rising(*ticks: float) -> Floats:
    return np.unique(np.array(ticks, dtype=float))
