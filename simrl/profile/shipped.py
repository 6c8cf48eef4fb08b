"""Profiles that come with simrl: inside an installed package, beside the package in a checkout."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
PROFILES = (PACKAGE / "shipped_profiles", PACKAGE.parent / "profiles")


def shipped_profile(model: str, gpu: str, tp: int) -> Path | None:
    """Return the shipped profile of a model on a GPU, or None. Inside the current folder the path is relative to it."""
    for folder in PROFILES:
        file = folder / f"{model}_{gpu}_tp{tp}.parquet".lower()
        if file.is_file():
            return Path(os.path.relpath(file)) if file.is_relative_to(Path.cwd()) else file
    return None
