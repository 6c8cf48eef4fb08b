"""Step times that no shipped profile has: estimated from the nearest one, else from data sheets.

    time = time of the nearest profile × roofline of the layout asked for / roofline of the nearest one

part by part (dense, experts, output head, prefill's and decoding's attention) and point by point of
the grid. The nearest profile is, in this order, of the same model on that GPU (in another layout or
precision), of the same model on the most similar GPU, or of the most similar model of its kind on
that GPU. `estimates.toml` has what this gives for layouts of the databases, which answers name, and
for those that are shipped (`docs/profiles.md`; a test counts the latter again).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from math import log2
from pathlib import Path

import numpy as np

from simrl.profile.hardware import GPUS, Gpu, gpu as gpu_named
from simrl.profile.metadata import ProfileMetadata, split_words
from simrl.profile.model_shape import MODELS, ModelShape, model_shape
from simrl.profile.profile import TableProfile, joined, read_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.profilers.setups import SYSTEMS
from simrl.profile.profilers.smoothing import Floats, rising
from simrl.profile.roofline import Roofline, roofline_of
from simrl.profile.shipped import PROFILES, file_name, layouts, shipped_profile

# Errors by what differs from the nearest profile, of dense models and of mixtures of experts.
ERRORS = tomllib.loads((Path(__file__).parent / "estimates.toml").read_text(encoding="utf-8"))
ROOFLINE = "roofline"
LAYOUT = ("tp", "dp", "ep", "precision", "kv_precision")


def off_by(difference: str, shape: ModelShape) -> str:
    """Return how far estimates of a kind were off over the layouts of the databases, in words."""
    kind = "mixtures of experts" if shape.experts else "dense models"
    error = ERRORS[difference]["experts" if shape.experts else "dense"]
    unlike = not shape.experts and shape.full_layers < shape.layers
    return (
        f"estimates from {difference} were off by {error['median']} % at the median ({error['sign']:+} % signed), "
        f"90 % within {error['ninety']} %, for {error['layouts']} layouts of {kind}"
        f"{', not compared for models with windows or states' * unlike}"
    )


def nearest(
    wanted: ProfileMetadata, shape: ModelShape, gpu: Gpu, there: Iterable[ProfileMetadata]
) -> ProfileMetadata | None:
    """Return the layout among those `there` that is nearest to another; None where there is none of
    its model, and none of its kind of models on its GPU."""

    def distance(other: ProfileMetadata) -> tuple[float, ...]:
        model, kind = MODELS[other.model], GPUS[other.gpu]
        sizes = (
            model.active_parameters / shape.active_parameters,
            model.parameters / shape.parameters,
        )
        return (
            not _alike(model, shape),
            other.gpu != gpu.name,
            apart(kind, gpu),
            other.precision != wanted.precision,
            0.0 if _alike(model, shape) else sum(abs(log2(ratio)) for ratio in sizes),
            abs(log2(other.dp / wanted.dp)),
            abs(log2(other.tp * other.dp / (wanted.tp * wanted.dp))),
            other.kv_precision != wanted.kv_precision,
            (other.ep > 1) != (wanted.ep > 1),
        )

    near = [
        layout
        for layout in there
        if layout.model in MODELS
        and layout.gpu
        in (gpu.name, *SYSTEMS)  # a GPU that is itself carried over stands for no other
        and (
            _alike(MODELS[layout.model], shape)
            or (layout.gpu == gpu.name and _kind(MODELS[layout.model]) == _kind(shape))
        )
    ]
    return min(near, key=distance, default=None)


def apart(one: Gpu, other: Gpu) -> float:
    """Return the octaves between the data sheets of two GPUs, summed over multiplying and reading;
    0 if one is the base of the other."""
    if one.name in (other.name, other.base):
        return 0.0
    flops = log2(one.bf16_flops / other.bf16_flops)
    return abs(flops) + abs(log2(one.memory_bytes_per_s / other.memory_bytes_per_s))


def _alike(model: ModelShape, other: ModelShape) -> bool:
    """Return whether two models have one shape."""
    beside = {key: getattr(other, key) for key in ("name", "without", "mtp_layers")}
    return model.model_copy(update=beside) == other


def _kind(shape: ModelShape) -> tuple[bool, ...]:
    """Return the kind of a model: whether it has experts, latents and states."""
    return shape.experts > 0, shape.kv_lora_rank > 0, shape.linear_layers > 0


def difference(base: ProfileMetadata, wanted: ProfileMetadata, shape: ModelShape) -> str:
    """Return what differs most between a profile and the layout that is estimated from it; "" for
    nothing."""
    split = ("tp", "dp", "ep", "kv_precision")
    differs = {
        "another model": not _alike(MODELS.get(base.model, shape), shape),
        "another GPU": base.gpu != wanted.gpu,
        "another precision": base.precision != wanted.precision,
        "another split": any(getattr(base, key) != getattr(wanted, key) for key in split),
    }
    return next((kind for kind, does in differs.items() if does), "")


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
    if (base := nearest(wanted, shape, gpu, layouts())) is not None:
        return in_layout(read_profile(PROFILES / file_name(base)), wanted, shape, gpu)
    profile = roofline_profile(shape, gpu, **{key: getattr(wanted, key) for key in LAYOUT})
    source = f"{profile.metadata.source}; {off_by(ROOFLINE, shape)}"
    return TableProfile(
        profile.tables, profile.metadata.model_copy(update={"source": source}), profile.origin
    )


def in_layout(
    base: TableProfile,
    wanted: ProfileMetadata,
    shape: ModelShape,
    gpu: Gpu,
    kind: str = "",
    measured: ModelShape | None = None,
) -> TableProfile:
    """Return a profile's times for another layout, GPU or model: `shape` on `gpu`, which may have
    other figures than the data sheet of its name. `kind`: what differs, where `difference` cannot
    know. `measured`: the profile's own model, which may be in no list."""
    m, t = base.metadata, base.tables
    if m.dp == 1:  # its exchange is all-reduces, which rooflines have in the dense part
        t = joined(t)
    was = roofline_of(m, measured or MODELS.get(m.model, shape), GPUS.get(m.gpu, gpu))
    now = roofline_of(wanted, shape, gpu)

    def carried(seconds: Floats, part: Callable[..., Floats], *ticks: Floats) -> Floats:
        before = part(was, *ticks)
        return rising(
            seconds
            * np.divide(part(now, *ticks), before, out=np.ones(before.shape), where=before > 0)
        )

    if (
        was.shape.experts and not t.expert_tokens.size
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
    differs = kind or difference(m, wanted, shape)
    how = (
        f" × the ratio of rooflines; {off_by(differs, shape)}" if differs else ", of the same shape"
    )
    source = f"estimated: {words}{how}; {m.source}"
    layout = {key: getattr(wanted, key) for key in ("model", "gpu", *LAYOUT)}
    return TableProfile(
        tables,
        m.model_copy(update={**layout, "kind": "extrapolated", "source": source}),
        base.origin,
    )
