"""Processes that work for simrl run simrl's functions alone: they need nothing of the script, notebook or command that starts
them, and so do not run it a second time."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def main_left_alone() -> Iterator[None]:
    """Processes that are spawned meanwhile do not import the caller's main module: a script needs no `if __name__ ==
    "__main__":` then."""
    main: Any = sys.modules["__main__"]
    before = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None  # where multiprocessing looks for a module's name, and then for its file
    vars(main).pop("__file__", None)
    try:
        yield
    finally:
        vars(main).update(before)
