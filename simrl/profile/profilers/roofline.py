"""A profile from data sheets alone, for hardware that nobody measured: every time is work over an assumed rate.

    dense     = max(multiply-adds, reading the weights) + all-reduces
    attention = max(multiply-adds, reading the KV cache), prefill and decode apart and added
    sampled   = max(multiply-adds, reading the output head) + gathering the logits

Invariant: no number here is measured. Each rate is the data sheet's times a named efficiency, which the metadata names.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.profile.hardware import Gpu
from simrl.profile.model_shape import ModelShape, require_dense, require_kv_heads
from simrl.profile.profile import ProfileMetadata, TableProfile, Tables
from simrl.profile.profilers.collectives import Link, logits_gather_s, pass_all_reduces_s

Floats = NDArray[np.float64]
MOST_TOKENS, MOST_SEQUENCES, MOST_KV_TOKENS = 65536, 2048, 262144
WEIGHT_BYTES = 2  # bfloat16
MEMORY_EFFICIENCY = 0.8


def states_s(shape: ModelShape, gpu: Gpu, tp: int, memory_efficiency: float = MEMORY_EFFICIENCY) -> float:
    """Return the seconds in which the GPUs of a group read and write the fixed states of a sequence."""
    return 2.0 * shape.state_bytes / tp / (memory_efficiency * gpu.memory_bytes_per_s)


def roofline_profile(
    shape: ModelShape,
    gpu: Gpu,
    tp: int = 1,
    compute_efficiency: float = 0.7,
    memory_efficiency: float = MEMORY_EFFICIENCY,
    link_efficiency: float = 0.7,
    link_latency_s: float = 3e-6,
    between_passes_s: float = 1e-3,
) -> TableProfile:
    """Return the profile of `shape` on `tp` GPUs; its rates are those of the data sheet times the efficiencies.

    The defaults are reached by large kernels on recent data-centre GPUs, as a rule of thumb: 70 % of the dense bfloat16
    rate in matrix products, 80 % of the memory bandwidth, 70 % of the link's, 3 µs for each step of a ring, and 1 ms of
    host time between passes. Not modelled: small kernels (norms, rotary embeddings, launches), so small models at small
    batches come out too fast. A group larger than the link's domain pays
    the network. Raises `InputError` for efficiencies outside (0, 1] and a `tp` the heads do not share.
    """
    rates = {"compute": compute_efficiency, "memory": memory_efficiency, "link": link_efficiency}
    for name, efficiency in rates.items():
        if not 0 < efficiency <= 1:
            raise InputError(f"roofline: {name}_efficiency is {efficiency}; it must be above 0 and at most 1")
    require_dense(shape, "roofline")
    if tp < 1 or shape.heads % tp:
        raise InputError(f"roofline: tp is {tp}; it must divide the {shape.heads} attention heads of {shape.name}")
    require_kv_heads("roofline: tp", tp, shape)
    flops_per_s = compute_efficiency * gpu.bf16_flops
    bytes_per_s = memory_efficiency * gpu.memory_bytes_per_s
    link = Link(gpu.bytes_per_s_among(tp, link_efficiency), link_latency_s)

    def matrix_product_s(weights: float, rows: Floats) -> Floats:
        return np.maximum(2.0 * weights * rows / flops_per_s, WEIGHT_BYTES * weights / bytes_per_s)

    # One GPU's share. If there are fewer KV heads than GPUs, they are copied.
    layer_weights = shape.layers * shape.layer_parameters / tp
    head_weights = shape.vocab * shape.hidden / tp
    kv_bytes = shape.kv_bytes_per_token / min(tp, shape.kv_heads)
    attention_flops = 4.0 * shape.layers * shape.heads * shape.head_dim / tp  # of one query token on one cached token

    # Below the kink, reading the weights takes all the time; above it, multiplying does. Between ticks all is linear.
    kink = flops_per_s * WEIGHT_BYTES / (2.0 * bytes_per_s)
    tokens = _rising(1, kink, MOST_TOKENS)
    sampled = tokens  # where drafts are verified, every token of a pass needs its logits
    chunks = _rising(0, *np.round(2 ** np.arange(0, 16.25, 0.5)))
    cached = _rising(0, *2 ** np.arange(7, 19))
    decode_kv = np.array([0.0, MOST_KV_TOKENS])
    decodes = np.array([0.0, MOST_SEQUENCES])  # sequences × length is bilinear: its corners are enough

    c, k = chunks[:, None], cached[None, :]
    prefill = np.maximum(attention_flops * c * (k + c / 2) / flops_per_s, kv_bytes * (c + k) * (c > 0) / bytes_per_s)
    decode = np.multiply.outer(decodes, decode_kv) * max(attention_flops / flops_per_s, kv_bytes / bytes_per_s)
    tables = Tables(
        dense_tokens=tokens,
        dense_s=matrix_product_s(layer_weights, tokens) + pass_all_reduces_s(shape, tokens, tp, link),
        sampled_sequences=sampled,
        sampled_s=matrix_product_s(head_weights, sampled) + logits_gather_s(shape, sampled, tp, link),
        prefill_tokens=chunks,
        prefill_kv_tokens=cached,
        decode_sequences=decodes,
        decode_kv_tokens=decode_kv,
        attention_s=prefill[:, :, None, None] + decode[None, None, :, :],
        between_passes_s=between_passes_s,
    )
    metadata = ProfileMetadata(
        model=shape.name,
        gpu=gpu.name,
        tp=tp,
        kind="assumed",
        source=f"roofline of {gpu.source}",
        notes=f"efficiencies: compute {compute_efficiency}, memory {memory_efficiency}, link {link_efficiency}; "
        f"{link_latency_s * 1e6:g} µs a step of a ring, {between_passes_s * 1e3:g} ms between passes; no small kernels",
    )
    return TableProfile(tables, metadata, origin=f"roofline {shape.name} {gpu.name} tp {tp}")


def _rising(*ticks: float) -> Floats:
    return np.unique(np.array(ticks, dtype=float))
