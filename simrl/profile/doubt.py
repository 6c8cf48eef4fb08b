"""Doubts about a profile: times that its GPU's memory does not allow, and times far from a second source's.

Invariant: a time is lifted only to what reading the weights or the KV cache once takes at the data sheet's bandwidth. A
kernel that was timed alone finds in its cache what a pass has to read.
"""

from __future__ import annotations

import numpy as np

from simrl.errors import refuse
from simrl.profile.hardware import Gpu
from simrl.profile.interpolation import Floats
from simrl.profile.metadata import ProfileMetadata
from simrl.profile.model_shape import ModelShape
from simrl.profile.precision import EXPERTS_ALONE, KV_SHARE, WEIGHT_BYTES
from simrl.profile.profile import GRIDS, TableProfile, Tables
from simrl.profile.roofline import roofline_of

NOISE = 0.02  # of a time: a bandwidth is a rounded figure, and a clock runs up to it
LONG = 1024  # tokens of chunks and of sequences whose attention is compared with the roofline
OTHER_UNIT = 0.02  # of what is possible, of most times: milliseconds in place of microseconds
SMALL_S = 3e-5  # of a layer: below, launches and latencies decide
FAR = 3.0  # times the roofline; short prefill chunks of large models are 2 to 2.9 times above it


def doubted(profile: TableProfile, shape: ModelShape, gpu: Gpu) -> tuple[TableProfile, list[str]]:
    """Return the profile with impossible times lifted to the least possible ones, and its doubts in words: table, point, and
    by how much. The notes of the profile have them, too."""
    t, layout, words = profile.tables, profile.metadata, list[str]()
    for name, (least_s, roofline_s) in _bounds(t, layout, shape, gpu).items():
        field, large = GRIDS[name][1], roofline_s > shape.layers * SMALL_S
        seconds = getattr(t, field)
        if (
            name == "attention"
        ):  # many short sequences are bound by their number, mixed passes are sums
            chunk, _, n, kv = np.ix_(*t[4:8])
            large &= (chunk == 0) & (kv >= LONG) | (n == 0) & (chunk >= LONG)
        short = np.divide(seconds, least_s, out=np.ones_like(seconds), where=np.greater(least_s, 0))
        if short.min() < 1 - NOISE:
            words.append(
                f"{_place(t, name, short.argmin())}: {1 - short.min():.0%} less than reading it once takes at "
                f"{gpu.memory_bytes_per_s / 1e12:.4g} TB/s, {(short < 1 - NOISE).mean():.1%} of the points; lifted"
            )
            seconds = np.maximum(seconds, least_s)
            t = t._replace(**{field: seconds})
        apart = np.divide(seconds, roofline_s, out=np.ones_like(seconds), where=large)
        typical = np.median(apart[large]) if large.any() else 1.0
        refuse(
            (
                np.median(short) < OTHER_UNIT or typical > 1 / OTHER_UNIT,
                f"{profile.origin}: most times of {name} are not within 1/50 and 50 of what {gpu.name} needs by data sheet; "
                "give them in the unit of their column, and the GPU that was profiled",
            )
        )
        words += [
            f"{_place(t, name, i)}: {apart.flat[i]:.2g} times the roofline"
            for i in (apart.argmax(), apart.argmin())
            if not 1 / FAR <= apart.flat[i] <= FAR
        ]
    notes = "; ".join([layout.notes, *(f"in doubt: {line}" for line in words)])
    doubtful = TableProfile(t, layout.model_copy(update={"notes": notes}), profile.origin)
    return (doubtful if words else profile), words


def _bounds(
    t: Tables, layout: ProfileMetadata, shape: ModelShape, gpu: Gpu
) -> dict[str, tuple[Floats | float, Floats]]:
    """Return, for each table that is checked, the seconds in which a GPU reads the weights or the
    KV cache once at its data sheet's bandwidth, and the roofline's, on the grids of a profile.

    0 for reading routed experts, of which passes meet an unknown part. Of models with latent or
    linear attention or shared experts the output head alone: projections of latent attention were
    measured with it, projections of linear layers with their states; shared experts stand where an engine
    has them.
    """
    parts, bytes_per_s = roofline_of(layout, shape, gpu), gpu.memory_bytes_per_s
    sampled: dict[str, tuple[Floats | float, Floats]] = {
        "sampled": (
            2 * shape.vocab * shape.hidden / layout.tp / bytes_per_s,
            parts.sampled_s(t.sampled_sequences),
        )
    }
    if shape.kv_lora_rank or shape.linear_layers or shape.shared_intermediate:
        return sampled
    bits = "bf16" if layout.precision in EXPERTS_ALONE else layout.precision
    weights = WEIGHT_BYTES[bits] * (shape.body_parameters - shape.routed_parameters) / layout.tp
    kept = shape.layer_kv_bytes * KV_SHARE[layout.kv_precision] / min(layout.tp, shape.kv_heads)
    chunk, cached, sequences, kv = np.ix_(*t[4:8])
    read = shape.read_tokens(chunk + cached) * (chunk > 0) + sequences * shape.read_tokens(kv)
    here = not t.expert_tokens.size  # experts are in the dense part
    apart = {} if here else {"experts": (0.0, parts.experts_s(t.expert_tokens))}
    return {
        **sampled,
        "attention": (kept * read / bytes_per_s, parts.attention_s(*t[4:8])),
        "dense": (
            weights / bytes_per_s,
            parts.dense_s(t.dense_tokens) + here * parts.experts_s(t.dense_tokens),
        ),
        **apart,
    }


def _place(t: Tables, name: str, index: np.intp) -> str:
    axes = GRIDS[name][0]
    ticks = [getattr(t, field) for field in axes.values()]
    at = np.unravel_index(index, [grid.size for grid in ticks])
    named = zip(axes, ticks, at, strict=True)
    return f"{name} at {', '.join(f'{axis} {grid[i]:.0f}' for axis, grid, i in named)}"
