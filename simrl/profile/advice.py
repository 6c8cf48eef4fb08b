"""Advice on a profile that a scenario lacks: the file that exists, or the command that makes one.

Invariant: only what works is advised: files that are there, and sources that have the model and the
GPU. A source that is not installed is advised unless it is known to refuse (`require_possible`),
and may still lack a size.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from simrl.errors import InputError
from simrl.extensions import install_command
from simrl.profile.hardware import gpu
from simrl.profile.metadata import ProfileMetadata, split_words
from simrl.profile.model_shape import MODELS, ModelShape
from simrl.profile.precision import FP8_EXPERTS
from simrl.profile.profilers.setups import PACKAGES, EngineSetup, is_measurable
from simrl.profile.roofline import roofline_of
from simrl.profile.shipped import PROFILES, file_name, layouts, shipped_profile


def advice(wanted: ProfileMetadata, shape: ModelShape, path: str, model: str = "") -> str:
    """Return how to get the profile of a model, GPU and split that `wanted` names, for a scenario
    that names `path` and `model`."""
    split = (wanted.tp, wanted.dp, wanted.ep, wanted.precision, wanted.kv_precision)
    shipped = shipped_profile(wanted.model, wanted.gpu, *split)
    if shipped is not None:
        return f"simrl has it: profile.path={shipped}"
    ways = _existing(wanted, Path(path).parent)
    if shape.experts and wanted.precision == "fp8":
        ways.insert(0, f"{FP8_EXPERTS}: precision.weights=fp8-block")
    with suppress(InputError):
        roofline_of(wanted, shape, gpu(wanted.gpu))
        ways += [
            *derived(wanted, shape, Path(path), model),
            "take profile.path=shipped, carried over from the nearest profile or the data sheet",
        ]
    ways += [
        f"{'or ' if ways else ''}measure your own engine with `simrl measure`"
    ] * is_measurable(_setup(wanted))
    lacking = f"no source has it: {wanted.model} in {wanted.precision}, {split_words(wanted.model_dump())}"
    return (
        "; ".join(ways)
        or f"{lacking}; with dp 1, ep 1 and bf16, measure your own engine with `simrl measure`"
    )


def _existing(wanted: ProfileMetadata, folder: Path) -> list[str]:
    """Return the splits that have a profile of this model on this GPU, or the GPUs that have
    one."""
    there = sorted(
        {
            file_name(layout)
            for place in (folder, PROFILES)
            for layout in layouts(wanted.model, folder=place)
        }
    )
    of_model = [name.removesuffix(".parquet").split("_")[1:] for name in there]
    splits = [" ".join(split) for gpu, *split in of_model if gpu == wanted.gpu]
    where = (
        f"{wanted.gpu} for {', '.join(splits)}"
        if splits
        else ", ".join(dict.fromkeys(gpu for gpu, *_ in of_model))
    )
    return [f"there are profiles of {wanted.model} on {where}"] if there else []


def derived(wanted: ProfileMetadata, shape: ModelShape, path: Path, model: str = "") -> list[str]:
    """Return the command that derives the profile of a model by its name, or by the folder that a
    scenario names. Kernels that no source has are estimated."""
    name = wanted.model if shape.name in MODELS else model
    if not name:
        return []
    package = _setup(wanted).package
    plain = file_name(wanted.model_copy(update={"precision": "bf16", "kv_precision": "bf16"}))
    named = (
        path if path.name != plain else path.with_name(file_name(wanted))
    )  # precisions are a part of a shipped name
    # not among the files of an installed package, which go with the next installation
    writable = path.parent.is_dir() and not path.resolve().is_relative_to(sys.prefix)
    output = named if writable and path.suffix == ".parquet" else Path(file_name(wanted))
    options: dict[str, tuple[object, object]] = {
        "dp": (wanted.dp, 1),
        "ep": (wanted.ep, 1),
        "precision": (wanted.precision, "bf16"),
        "kv-precision": (wanted.kv_precision, "bf16"),
        "source": (package, "aiconfigurator"),
    }
    more = "".join(
        f" --{key} {value}" for key, (value, default) in options.items() if value != default
    )
    command = f"simrl profile derive {name} --gpu {wanted.gpu} --tp {wanted.tp}{more} -o {output}"
    first = "" if find_spec(PACKAGES[package]) else f" (first: {install_command(package)})"
    then = "" if output == path else f", and set profile.path={output}"
    return [f"derive one with `{command}`{first}{then}"]


def _setup(wanted: ProfileMetadata) -> EngineSetup:
    package = "aisimulate" if wanted.precision == "fp8-block" else "aiconfigurator"
    return EngineSetup(
        wanted.tp, wanted.dp, wanted.ep, wanted.precision, wanted.kv_precision, package=package
    )
