"""Files that come with simrl: in an installed package below it, in a checkout beside it."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parent
PROFILES = (PACKAGE / "shipped_profiles", PACKAGE.parent / "profiles")


def shipped_profile(model: str, gpu: str, tp: int) -> Path | None:
    """The step times that are shipped for a model on a GPU, if any are: as a path from the current folder if they are in it."""
    for folder in PROFILES:
        file = folder / f"{model}_{gpu}_tp{tp}.parquet".lower()
        if file.is_file():
            return Path(os.path.relpath(file)) if file.is_relative_to(Path.cwd()) else file
    return None
