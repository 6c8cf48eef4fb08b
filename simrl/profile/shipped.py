"""Files that come with simrl: profiles, example scenarios and their traces.

They lie in one tree, `ROOT`: the folder `shipped` of an installed package, the top of a checkout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from simrl.profile.metadata import ProfileMetadata

_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
PROFILES = ROOT / "profiles"
SHIPPED = "shipped"  # stands for a profile's path: the shipped one of the model, GPUs and precision


def file_name(of: ProfileMetadata) -> str:
    """Return the name of a profile's file: model, GPU and split, and what is not the default."""
    parts = {  # whether the name has it
        f"dp{of.dp}": of.dp > 1,
        f"ep{of.ep}": of.ep > 1,
        of.precision: of.precision != "bf16",
        f"kv-{of.kv_precision}": of.kv_precision != "bf16",
    }
    named = [of.model, of.gpu, f"tp{of.tp}", *(part for part, has in parts.items() if has)]
    return f"{'_'.join(named)}.parquet".lower()


_LAYOUT = re.compile(r"(.+)_(.+?)_tp(\d+)(?:_dp(\d+))?(?:_ep(\d+))?(?:_((?!kv-).+?))?(?:_kv-(.+))?")


def layouts(model: str = "*", gpu: str = "*", folder: Path = PROFILES) -> list[ProfileMetadata]:
    """Return the layouts of a model on a GPU that have a profile in a folder, by the names of the
    files; all without names."""
    matches = [
        _LAYOUT.fullmatch(file.stem)
        for file in sorted(folder.glob(f"{model}_{gpu}_*.parquet".lower()))
    ]
    fields = ("model", "gpu", "tp", "dp", "ep", "precision", "kv_precision")
    named = [
        {k: v for k, v in zip(fields, one.groups(), strict=True) if v} for one in matches if one
    ]
    return [
        ProfileMetadata.model_validate({**layout, "kind": "", "source": ""}) for layout in named
    ]


def by_name(path: Path) -> Path:
    """Return the file of a shipped profile for its name, `qwen3-8b_h100_tp1`; another path as it
    is."""
    named = PROFILES / f"{path.name.removesuffix('.parquet')}.parquet"
    return named if path.parent == Path() and not path.exists() and named.is_file() else path


def shipped_profile(
    model: str,
    gpu: str,
    tp: int,
    dp: int = 1,
    ep: int = 1,
    precision: str = "bf16",
    kv_precision: str = "bf16",
) -> Path | None:
    """Return the shipped profile of a model on a GPU, or None. Inside the current folder the path
    is relative to it."""
    wanted = ProfileMetadata(
        model=model,
        gpu=gpu,
        tp=tp,
        dp=dp,
        ep=ep,
        precision=precision,
        kv_precision=kv_precision,
        kind="",
        source="",
    )
    file = PROFILES / file_name(wanted)
    if not file.is_file():
        return None
    return Path(os.path.relpath(file)) if file.is_relative_to(Path.cwd()) else file
