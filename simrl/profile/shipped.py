"""Profiles that come with simrl: inside an installed package, beside the package in a checkout."""

from __future__ import annotations

import os
from pathlib import Path

from simrl.profile.metadata import ProfileMetadata

PACKAGE = Path(__file__).parents[1]
PROFILES = (PACKAGE / "shipped_profiles", PACKAGE.parent / "profiles")


def file_name(of: ProfileMetadata) -> str:
    """Return the name of a profile's file: model, GPU and split, and what is not the default."""
    parts = [of.model, of.gpu, f"tp{of.tp}"]
    parts += [f"dp{of.dp}"] if of.dp > 1 else []
    parts += [f"ep{of.ep}"] if of.ep > 1 else []
    parts += [of.precision] if of.precision != "bf16" else []
    parts += [f"kv-{of.kv_precision}"] if of.kv_precision != "bf16" else []
    return f"{'_'.join(parts)}.parquet".lower()


def shipped_profile(
    model: str, gpu: str, tp: int, dp: int = 1, ep: int = 1, precision: str = "bf16", kv_precision: str = "bf16"
) -> Path | None:
    """Return the shipped profile of a model on a GPU, or None. Inside the current folder the path is relative to it."""
    wanted = ProfileMetadata(
        model=model, gpu=gpu, tp=tp, dp=dp, ep=ep, precision=precision, kv_precision=kv_precision, kind="", source=""
    )
    for folder in PROFILES:
        file = folder / file_name(wanted)
        if file.is_file():
            return Path(os.path.relpath(file)) if file.is_relative_to(Path.cwd()) else file
    return None
