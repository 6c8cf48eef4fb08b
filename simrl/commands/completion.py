"""Completions of a shell behind a command: files of workloads, and the names of systems, methods,
models and GPUs.

Invariant: names are read from the text of simrl's own files. Importing their modules, and numpy,
would take as long as a completion may.
"""

import re
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FUNCTION = re.compile(r"^@(?:recipe|validate_call)\b.*?^def (\w+)", re.MULTILINE | re.DOTALL)


def _functions(group: str, *files: str) -> list[str]:
    """Return the names of systems or methods: simrl's own in these files, then those of the entry
    points of `group`."""
    shipped = [
        name
        for file in files
        for name in _FUNCTION.findall((ROOT / file).read_text(encoding="utf-8"))
    ]
    return [*shipped, *(entry.name for entry in entry_points(group=group))]


def _completed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion by names; behind a comma, of the next one."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _files(incomplete: str) -> list[str]:
    """Return the folders, and the files of workloads, that begin with a text."""
    begun, kinds = Path(f"{incomplete}*"), ("", ".yaml", ".yml", ".parquet", ".csv", ".jsonl")
    paths = sorted(path for path in begun.parent.glob("*") if path.name.startswith(begun.name[:-1]))
    return [f"{path}/" if path.is_dir() else str(path) for path in paths if path.suffix in kinds]


BY_NAME = {  # of a parameter, or of the command that describes what its argument names
    **dict.fromkeys(("workload", "scenario"), _files),
    **dict.fromkeys(
        ("systems", "system", "pipelines", "pipeline", "show_system"),
        _completed(
            lambda: _functions(
                "simrl.systems",
                *(
                    f"systems/{name}.py"
                    for name in ("on_policy", "off_policy", "frameworks", "drafting")
                ),
            )
        ),
    ),
    **dict.fromkeys(
        ("speculations", "speculation", "show_method"),
        _completed(lambda: _functions("simrl.speculation", "speculation/methods.py")),
    ),
    "model": _completed(
        lambda: tomllib.loads((ROOT / "profile" / "models.toml").read_text(encoding="utf-8"))
    ),
    "gpu": _completed(
        lambda: tomllib.loads((ROOT / "profile" / "gpus.toml").read_text(encoding="utf-8"))
    ),
}
