"""Empty modules in place of packages that a framework's decision functions import and never use, such as torch and Ray.

A decision function that does use one gets an object that stands for nothing, so its test fails where the object is compared.
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class _Anything(type):
    """Class of `Anything`: an attribute of a stub is a class like it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __add__ = __radd__ = __or__


class Anything(metaclass=_Anything):
    """Attribute of a stub under any name: a base class, a type, a decorator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **__: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else Anything()


class _Stub(ModuleType):
    """Module with `Anything` under every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(MetaPathFinder, Loader):
    """Finder of the stubs, of the modules below them, and of bare packages."""

    def __init__(self, bare: Iterable[str], stubbed: Iterable[str]) -> None:
        self._paths = {name: [str(_folder(name))] for name in bare}
        self._stubbed = tuple(stubbed)

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name not in self._paths and not self.is_stub(name):
            return None
        return ModuleSpec(name, self, is_package=True)

    def is_stub(self, name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in self._stubbed)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name not in self._paths:
            return _Stub(spec.name)
        spec.submodule_search_locations = self._paths[spec.name]
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _folder(name: str) -> Path:
    """Return the folder of a package without importing it."""
    top, *below = name.split(".")
    spec = find_spec(top)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.joinpath(*below)


def driven(module: str, bare: Iterable[str], stubbed: Iterable[str]) -> ModuleType:
    """Return a module of an installed framework, imported from its own file. The packages `bare`
    have no `__init__` then, and `stubbed` ones are empty, installed or not. Skip the test without
    the framework."""
    top = module.partition(".")[0]
    if find_spec(top) is None:
        pytest.skip(f"{top} is not installed: .ci/frameworks")
    names, before = {top, *stubbed}, set(sys.modules)
    kept = {name: sys.modules.pop(name) for name in before if name.partition(".")[0] in names}
    sys.meta_path.insert(0, _Finder(bare, stubbed))
    try:
        return import_module(module)
    finally:
        del sys.meta_path[0]
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(kept)
