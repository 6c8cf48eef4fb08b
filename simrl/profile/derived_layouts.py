"""Step times of a layout that no shipped profile has: from the nearest one that has, else from data
sheets.

    time = time of the nearest layout × roofline of the layout asked for / roofline of the nearest one

part by part (dense, experts, output head, prefill's and decoding's attention) and point by point of
the grid. `OFF_BY` and `ROOFLINE_OFF_BY` are what this gives for layouts that are shipped
(`docs/profiles.md`; a test counts them again).
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2

import numpy as np

from simrl.profile.hardware import GPUS, Gpu
from simrl.profile.hardware import gpu as gpu_named
from simrl.profile.metadata import ProfileMetadata, split_words
from simrl.profile.model_shape import MODELS, ModelShape, model_shape
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.profilers.smoothing import Floats, rising
from simrl.profile.roofline import Roofline, roofline_of
from simrl.profile.shipped import PROFILES, file_name, layouts, shipped_profile

OFF_BY = {
    False: "off by 4 % at the median and 32 % at worst for 35 shipped layouts of dense models",
    True: "off by 12 % at the median and 101 % at worst for 31 shipped layouts of mixtures of experts",
}
ROOFLINE_OFF_BY = {
    False: "off by 7 % at the median and 68 % at worst for 50 shipped layouts of dense models",
    True: "off by 20 % (mostly too fast) at the median and 70 % at worst for 35 shipped layouts of mixtures of experts",
}


def nearest(wanted: ProfileMetadata, shape: ModelShape) -> ProfileMetadata | None:
    """Return the shipped layout that is nearest to another of a model of its shape on its GPU: in
    precision, then in attention ranks, GPUs and division of experts; None where there is none."""

    def distance(other: ProfileMetadata) -> tuple[float, ...]:
        gpus = abs(log2(other.tp * other.dp / (wanted.tp * wanted.dp)))
        alike = other.precision != wanted.precision, abs(log2(other.dp / wanted.dp)), gpus
        return *alike, other.kv_precision != wanted.kv_precision, (other.ep > 1) != (wanted.ep > 1)

    alike = [
        name
        for name, other in MODELS.items()
        if other.model_copy(update={"name": shape.name}) == shape
    ]
    return min(
        (layout for name in alike for layout in layouts(name, wanted.gpu)),
        key=distance,
        default=None,
    )


def profile_of(model: str, gpu: str, tp: int) -> TableProfile:
    """Return the profile that is shipped for a model and a kind of GPU, else a derived one."""
    if shipped := shipped_profile(model, gpu, tp):
        return read_profile(shipped)
    shape, kind = model_shape(model), gpu_named(gpu)
    wanted = ProfileMetadata(model=shape.name, gpu=kind.name, tp=tp, kind="", source="")
    return derived_profile(wanted, shape, kind)


def derived_profile(wanted: ProfileMetadata, shape: ModelShape, gpu: Gpu) -> TableProfile:
    """Return the step times of a layout that is not shipped. Raise `InputError` for an impossible
    one."""
    roofline_of(wanted, shape, gpu)
    if (base := nearest(wanted, shape)) is not None:
        return in_layout(read_profile(PROFILES / file_name(base)), wanted, shape, gpu)
    w = wanted
    profile = roofline_profile(
        shape, gpu, w.tp, dp=w.dp, ep=w.ep, precision=w.precision, kv_precision=w.kv_precision
    )
    source = f"{profile.metadata.source}, {ROOFLINE_OFF_BY[shape.experts > 0]}"
    return TableProfile(
        profile.tables, profile.metadata.model_copy(update={"source": source}), profile.origin
    )


def in_layout(
    base: TableProfile, wanted: ProfileMetadata, shape: ModelShape, gpu: Gpu
) -> TableProfile:
    """Return a profile's times in another layout of its model, on a GPU of its kind; `gpu` may have
    other links."""
    t, m = base.tables, base.metadata
    was, now = roofline_of(m, shape, GPUS.get(gpu.name, gpu)), roofline_of(wanted, shape, gpu)

    def carried(seconds: Floats, part: Callable[..., Floats], *ticks: Floats) -> Floats:
        before = part(was, *ticks)
        return rising(
            seconds
            * np.divide(part(now, *ticks), before, out=np.ones(before.shape), where=before > 0)
        )

    if (
        shape.experts and not t.expert_tokens.size
    ):  # one rank's experts are in its dense part: in the rooflines' shares
        experts_s = was.experts_s(t.dense_tokens)
        of_experts = t.dense_s * experts_s / (experts_s + was.dense_s(t.dense_tokens))
        t = t._replace(
            dense_s=t.dense_s - of_experts, expert_tokens=t.dense_tokens, experts_s=of_experts
        )
    tables = t._replace(
        dense_s=carried(t.dense_s, Roofline.dense_s, t.dense_tokens),
        sampled_s=carried(t.sampled_s, Roofline.sampled_s, t.sampled_sequences),
        attention_s=carried(t.attention_s, Roofline.attention_s, *t[4:8]),
        experts_s=carried(t.experts_s, Roofline.experts_s, t.expert_tokens),
    )
    words = f"{m.model} on {m.gpu} {split_words(m.model_dump(), '', ' ')} {m.precision}"
    source = f"{words} × the ratio of rooflines, {OFF_BY[shape.experts > 0]}; {m.source}"
    layout = {
        key: getattr(wanted, key)
        for key in ("model", "tp", "dp", "ep", "precision", "kv_precision")
    }
    return TableProfile(
        tables,
        m.model_copy(update={**layout, "kind": "extrapolated", "source": source}),
        base.origin,
    )
