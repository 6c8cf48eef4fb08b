"""Profiles of GPUs that nobody measured, by a stated transformation of a measured one: derived, not
measured.

    a matrix product, attention of a prefill    the later of: its time × the base's memory bandwidth / the new one's, and
                                                its multiply-adds / (the new bf16 rate × the best share of the base's that
                                                was measured for this operation)
    another kernel, attention of decoding       its time × the base's memory bandwidth / the new one's
    a collective                                latency + (its time - latency) × the base's link / the new one's (beyond a
                                                node, `Gpu.bytes_per_s_among`), its latency being its time for one token

All rates come from the data sheets. It is meant for a GPU of the base's chip that is slower in some
of them. Invariants: no number enters but data sheets and the base's measurements; a GPU with the
base's data sheet gets the base's profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simrl.errors import InputError
from simrl.profile.hardware import GPUS, Gpu
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import Floats, TableProfile
from simrl.profile.profilers import aiconfigurator
from simrl.profile.profilers.aiconfigurator import PREFILL_KV_TOKENS, PREFILL_TOKENS, KernelTimes
from simrl.profile.profilers.setups import ONE_GPU, EngineSetup

BASES = {"h800": "h100", "h20": "h200"}  # all of them Hopper
COLLECTIVES = (
    *("embedding_ar", "ar_1", "ar_2", "variance_ar", "p2p"),
    *("moe_pre_dispatch", "moe_post_dispatch"),
)
MEMORY_KERNELS = (
    "embedding",
    "add_norm_1",
    "add_norm_2",
    "attention_q_norm",
    "attention_k_norm",
    "act_gate",
)


def derive(
    shape: ModelShape, gpu: str, setup: EngineSetup = ONE_GPU, between_passes_s: float = 0.0
) -> TableProfile:
    """Return the profile of `shape` on GPUs of the kind `gpu` (in `BASES`) from its base's measured
    kernels."""
    base, new = GPUS[BASES[gpu]], GPUS[gpu]
    if setup.precision != "bf16":
        raise InputError(
            f"{gpu}: precision {setup.precision} is not carried over from {base.name}; derive it in bf16"
        )
    times = aiconfigurator.times_of(shape, base.name, setup)
    measured = aiconfigurator.source_of(base.name, setup)
    notes = (
        f"transformed by data sheets: bf16 × {new.bf16_flops / base.bf16_flops:.3g}, memory bandwidth × "
        f"{new.memory_bytes_per_s / base.memory_bytes_per_s:.3g}, link × {new.link_bytes_per_s / base.link_bytes_per_s:.3g}; "
        "operations keep the efficiency that was measured, collectives their latency (simrl.profilers.transformed)",
        *aiconfigurator.expert_notes(shape, setup),
    )
    return aiconfigurator.profile_of(
        Transformation(shape, setup.tp, base, new, setup.dp).of(times),
        shape.name,
        gpu,
        setup,
        f"{measured}; derived, not measured: transformed from {base.name} to {gpu}",
        between_passes_s,
        notes,
    )


@dataclass(frozen=True)
class Transformation:
    """The transformation of the operations of `shape`, split over `tp` GPUs, from one GPU to
    another; times in any unit. Experts are split over the GPUs of all `dp` attention ranks and work
    for all of them."""

    shape: ModelShape
    tp: int
    base: Gpu
    new: Gpu
    dp: int = 1

    def of(self, times: KernelTimes) -> KernelTimes:
        """Return all times of a pass. Raises `InputError` for an operation whose work is not
        known."""
        return KernelTimes(
            tokens=times.tokens,
            dense_ms={
                name: self.dense(name, ms, times.tokens) for name, ms in times.dense_ms.items()
            },
            experts_ms={
                name: self.dense(name, ms, times.tokens) for name, ms in times.experts_ms.items()
            },
            sampled_ms=self.dense("logits_gemm", times.sampled_ms, times.tokens),
            prefill_ms=self.computed(times.prefill_ms, self.prefill_flops()),
            decode_ms=self.read(times.decode_ms),
            unmeasured=times.unmeasured,
        )

    def dense(self, name: str, times: Floats, tokens: Floats) -> Floats:
        """Return the times of an operation that works token by token, at `tokens`, the first of
        them 1."""
        if name in COLLECTIVES:
            latency = float(times[0])
            group = self.tp * self.dp if name.startswith("moe") else self.tp
            return latency + (times - latency) * self.link_ratio(group)
        if name in MEMORY_KERNELS:
            return self.read(times)
        return self.computed(times, self.product_flops(name) * tokens)

    def link_ratio(self, group: int) -> float:
        """Return the base's rate over the new one's: of the links, or where the group leaves its
        node, of the network too."""
        return self.base.bytes_per_s_among(group, 1.0) / self.new.bytes_per_s_among(group, 1.0)

    def read(self, times: Floats) -> Floats:
        """Return the times of an operation bound by memory bandwidth at any size."""
        return times * (self.base.memory_bytes_per_s / self.new.memory_bytes_per_s)

    def computed(self, times: Floats, flops: Floats) -> Floats:
        """Return the times of an operation bound by memory bandwidth when small and by its `flops`
        when large."""
        best_rate = float((flops[times > 0] / times[times > 0]).max())
        computing: Floats = flops / (best_rate * self.new.bf16_flops / self.base.bf16_flops)
        return np.maximum(self.read(times), computing)

    def product_flops(self, name: str) -> float:
        """Return the multiply-adds ×2 for a token on one GPU, all layers."""
        m = self.shape
        kv_heads = max(m.kv_heads, self.tp)  # fewer KV heads than GPUs are copied
        weights = {
            "qkv_gemm": m.layers * m.hidden * (m.heads + 2 * kv_heads) * m.head_dim,
            "proj_gemm": m.layers * m.hidden * m.heads * m.head_dim,
            "gate_ffn1_gemm": m.layers * m.hidden * 2 * m.intermediate,
            "ffn2_gemm": m.layers * m.hidden * m.intermediate,
            "logits_gemm": m.hidden * m.vocab,
            "router_gemm": m.layers * m.hidden * m.experts * self.tp,  # not split
            "moe": m.layers * 3 * m.hidden * m.moe_intermediate * m.experts_per_token,
        }
        if name not in weights:
            raise InputError(
                f"{self.new.name}: the work of {m.name}'s operation {name!r} is not known, so its time cannot be carried "
                f"over from {self.base.name}; derive a profile of {self.base.name}"
            )
        return 2.0 * weights[name] / self.tp

    def prefill_flops(self) -> Floats:
        """Return the multiply-adds ×2 of a chunk's attention after cached tokens, on one GPU, all
        layers; shaped as the prefill times."""
        m = self.shape
        chunk, cached = np.array(PREFILL_TOKENS, float)[:, None], np.array(PREFILL_KV_TOKENS, float)
        return 4.0 * m.layers * m.heads * m.head_dim / self.tp * chunk * (cached + chunk / 2)
