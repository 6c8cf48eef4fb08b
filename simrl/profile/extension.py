"""Profiles beyond their grids, by the roofline.

    dense, sampled, experts    last time of the grid × roofline / roofline at the grid's edge
    attention                  last time of the grid + its rise along the grid × roofline's rise beyond / along the grid

Invariant: nothing changes inside a grid, the times are continuous at its edge and do not fall beyond it, and
`TableProfile.corrections` says what was extended.
"""

from __future__ import annotations

from math import log2

import numpy as np

from simrl.profile.hardware import GPUS, Gpu
from simrl.profile.model_shape import MODELS, ModelShape
from simrl.profile.profile import AXES, TableProfile, Tables
from simrl.profile.profilers.smoothing import Floats, rising
from simrl.profile.roofline import Roofline, roofline_of

OFF_BY = "shipped grids cut in half were off by 1 % at the median, 10 % at worst"

WORDS = {
    "decode_kv_tokens": "tokens of a sequence",
    "prefill_kv_tokens": "tokens of a sequence",
    "dense_tokens": "tokens of a pass",
}


def covering(
    profile: TableProfile,
    query_tokens: int,
    sequences: int,
    kv_tokens: int,
    verified_positions: int = 0,
    shape: ModelShape | None = None,
    gpu: Gpu | None = None,
) -> TableProfile:
    """Return the profile with grids that reach the limits of a simulation (as in
    `TableProfile.require_covers`): itself where they do. Raise `InputError` where they do not and
    the model or GPU is unknown."""
    t, m, beyond = profile.tables, profile.metadata, dict[str, None]()
    shape, gpu = shape or MODELS.get(m.model), gpu or GPUS.get(m.gpu)
    if shape is None or gpu is None:
        profile.require_covers(query_tokens, sequences, kv_tokens, verified_positions)
        return profile
    roofline, of_axes = roofline_of(m, shape, gpu), (query_tokens, kv_tokens, sequences, kv_tokens)

    def dense_s(tokens: Floats) -> Floats:
        return roofline.dense_s(tokens) + (
            0 if t.expert_tokens.size else roofline.experts_s(tokens * m.dp)
        )

    for axis, values, most, part in (
        ("dense_tokens", "dense_s", query_tokens, dense_s),
        ("sampled_sequences", "sampled_s", max(sequences, verified_positions), roofline.sampled_s),
        ("expert_tokens", "experts_s", query_tokens * m.dp, roofline.experts_s),
        *((axis, "attention_s", most, None) for axis, most in zip(AXES, of_axes, strict=True)),
    ):
        grid, seconds = getattr(t, axis), getattr(t, values)
        if not grid.size or most <= grid[-1]:
            continue
        edge = max(grid[-1], 1.0)
        more = np.geomspace(edge, most, 2 + int(2 * log2(most / edge)))[1:]
        if part is None:
            seconds = _attention_s(t, AXES.index(axis), more, roofline)
        else:
            seconds = np.append(seconds, seconds[-1] * part(more) / part(np.array([edge])))
        t = t._replace(**{axis: np.append(grid, more), values: seconds})
        beyond[f"{edge:,.0f} {WORDS.get(axis, axis.replace('_', ' '))}"] = None
    words = f"extrapolated by the roofline beyond {', '.join(beyond)} ({OFF_BY})"
    corrections = (*profile.corrections, words)
    return (
        TableProfile(t, m, profile.origin, corrections, profile.sequence_s) if beyond else profile
    )


def _attention_s(t: Tables, axis: int, more: Floats, roofline: Roofline) -> Floats:
    """Return the times of attention with `more` ticks of one of its axes."""
    grids = t[4:8]

    def at(ticks: Floats) -> Floats:
        chunks, cached, sequences, kv_tokens = (
            ticks if i == axis else grid for i, grid in enumerate(grids)
        )
        return roofline.attention_s(chunks, cached, sequences, kv_tokens)

    first, edge, new = at(grids[axis][:1]), at(grids[axis][-1:]), at(more)
    last = np.take(t.attention_s, [-1], axis)
    along = last - np.take(t.attention_s, [0], axis)
    rises = np.divide(new - edge, edge - first, out=np.zeros(new.shape), where=edge > first)
    return np.concatenate([t.attention_s, last + rising(along * rises)], axis)
