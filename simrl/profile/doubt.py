"""Doubts about a profile: times that its GPU's memory does not allow, and times far from those of a second source.

Invariant: a time is lifted only to what reading the weights or the KV cache once takes at the data sheet's bandwidth. A
kernel that was timed alone finds in its cache what a pass has to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from simrl.profile.hardware import Gpu
from simrl.profile.interpolation import Floats
from simrl.profile.model_shape import ModelShape
from simrl.profile.profile import GRIDS, TableProfile, Tables
from simrl.profile.roofline import LAYER_S, Roofline, roofline_of

NOISE = 0.02  # of a time: a bandwidth is a rounded figure, and a clock runs up to it
LONG = 1024  # tokens
FAR = (
    3.0  # times a second source; short prefill chunks and MoE prefill differ by 2 to 3 on most GPUs
)


def doubted(profile: TableProfile, shape: ModelShape, gpu: Gpu) -> tuple[TableProfile, list[str]]:
    """Return the profile with impossible times lifted to the least possible ones, and its doubts in words: table, point, and
    by how much. The notes of the profile have them, too."""
    t, layout = profile.tables, profile.metadata
    endless = dict.fromkeys(("bf16_flops", "fp8_flops", "link_bytes_per_s"), np.inf)
    ideal = replace(
        roofline_of(
            layout, shape, gpu.model_copy(update=endless | {"network_bytes_per_s": np.inf})
        ),
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        link_latency_s=0.0,
    )
    least = _seconds(ideal, t, shape, shape.layers * LAYER_S)
    second = _seconds(roofline_of(layout, shape, gpu), t, shape, 0.0)
    if layout.routing not in ("", "balanced"):  # uneven tokens meet fewer experts, unknown how many
        for field in least.keys() & {"experts_s"} or {"dense_s"}:
            least.pop(field, None)
    words = []
    for field, least_s in least.items():
        seconds = getattr(t, field)
        short = np.where(least_s > 0, seconds / np.maximum(least_s, 1e-12), 1.0)
        if short.min() < 1 - NOISE:
            words.append(
                f"{_place(t, field, short, np.argmin)}: {1 - short.min():.0%} less than reading it once takes at "
                f"{gpu.memory_bytes_per_s / 1e12:.4g} TB/s, {(short < 1 - NOISE).mean():.0%} of the points; lifted"
            )
            t = t._replace(**{field: np.maximum(seconds, least_s)})
    for field, second_s in second.items():
        large = second_s > shape.layers * LAYER_S  # below, launches and latencies decide
        if (
            field == "attention_s"
        ):  # many short sequences are bound by their number, mixed passes are sums
            chunk, _, n, kv = np.ix_(*t[4:8])
            large &= (chunk == 0) & (kv >= LONG) | (n == 0) & (chunk >= LONG)
        apart = np.where(large, getattr(t, field) / np.maximum(second_s, 1e-12), 1.0)
        for ratio, at in ((apart.max(), np.argmax), (1 / apart.min(), np.argmin)):
            if ratio > FAR:
                words.append(
                    f"{_place(t, field, apart, at)}: {ratio:.1f} times {'above' if at is np.argmax else 'below'} the roofline"
                )
    if not words:
        return profile, words
    notes = "; ".join([layout.notes, *(f"in doubt: {line}" for line in words)])
    return TableProfile(t, layout.model_copy(update={"notes": notes}), profile.origin), words


def _seconds(parts: Roofline, t: Tables, shape: ModelShape, less_s: float) -> dict[str, Floats]:
    """Return the roofline's seconds on the grids of a profile, by field."""
    seconds = {"sampled_s": parts.sampled_s(t.sampled_sequences)}
    # Projections of latent attention are measured with it, those of linear layers with their states; shared experts stand
    # where an engine has them.
    if shape.kv_lora_rank or shape.linear_layers or shape.shared_intermediate:
        return seconds
    seconds["attention_s"] = parts.attention_s(*t[4:8])
    seconds["dense_s"] = parts.dense_s(t.dense_tokens) - less_s
    if t.expert_tokens.size:
        seconds["experts_s"] = parts.experts_s(t.expert_tokens)
    elif shape.experts:
        seconds["dense_s"] += parts.experts_s(t.dense_tokens)
    return seconds


def _place(t: Tables, field: str, ratios: Floats, at: Callable[[Floats], Any]) -> str:
    name, axes = next((name, axes) for name, (axes, values) in GRIDS.items() if values == field)
    index = np.unravel_index(at(ratios), ratios.shape)
    ticks = (
        f"{axis} {getattr(t, grid)[i]:.0f}"
        for (axis, grid), i in zip(axes.items(), index, strict=True)
    )
    return f"{name} at {', '.join(ticks)}"
