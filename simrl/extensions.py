"""Extensions: functions that installed packages add to simrl's own, by entry points, imported when somebody asks for them.

Invariant: what is imported is what somebody installed, never what a scenario, a trace or any other file that is read names. A
package that cannot be imported disturbs nobody who does not ask for it, and is told in one line to those who do.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call

from simrl.errors import InputError, first_line
from simrl.validation import call_error

T = TypeVar("T")
Makes = Callable[..., T]


class Extended(Mapping[str, Makes[T]]):
    """Functions by name: simrl's own, then those of the entry points of a group.

    `kind` is what messages call one, and `required` how many arguments it must be given. Looking a name up raises `InputError`
    for a function that cannot be loaded, that asks for more, or whose name is taken by another package or by simrl; an unknown
    name is a `KeyError`, as in any mapping.
    """

    def __init__(self, own: Mapping[str, Makes[T]], group: str, kind: str, required: int = 0) -> None:
        self.own = own
        self.group = group
        self.kind = kind
        self._required = required

    def __getitem__(self, name: str) -> Makes[T]:
        found = self._added().get(name, ())
        if not found:
            return self.own[name]
        if name in self.own or len(found) > 1:
            owners = ["simrl itself"] * (name in self.own) + [_package(entry) for entry in found]
            raise InputError(
                f"{self.kind} {name!r} is added by {' and by '.join(owners)}; uninstall one, or rename it there "
                f"(entry points {self.group!r})"
            )
        return self._load(found[0])

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in self._added() if name not in self.own)

    def __len__(self) -> int:
        return len(set(self.own) | set(self._added()))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.own or name in self._added())  # a list of a file is no key

    def sources(self, name: str) -> list[Path]:
        """The Python files of the package or module that adds a function: what it does may depend on them. Empty for simrl's
        own."""
        if name in self.own or name not in self:
            return []
        function = inspect.unwrap(self[name])
        file = Path(inspect.getsourcefile(function) or "")
        package = file.parent if "." in function.__module__ else None
        return sorted(package.rglob("*.py")) if package else [file]

    def added(self) -> list[str]:
        """The names that installed packages add, those that are taken too."""
        return list(self._added())

    def _added(self) -> dict[str, tuple[EntryPoint, ...]]:
        return _entries(self.group, tuple(sys.path))

    def _load(self, entry: EntryPoint) -> Makes[T]:
        said = f"{self.kind} {entry.name!r}, which {_package(entry)} adds as {entry.value}"
        try:
            function: Any = entry.load()
        except Exception as error:  # whatever a stranger's module raises as it is imported
            raise InputError(f"{said}: cannot be loaded ({_told(error)}); repair or uninstall it") from error
        if not callable(function):
            raise InputError(f"{said}: is no function but {type(function).__name__}; name a function there")
        needed = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind < p.VAR_POSITIONAL
        ]
        if len(needed) > self._required:
            extra = ", ".join(needed[self._required :])
            raise InputError(f"{said}: must be given {extra}, which simrl does not know; give each a default")
        return function  # type: ignore[no-any-return]


def checked(said: str, function: Makes[T], *arguments: Any, **settings: Any) -> T:
    """Calls a function with what a user wrote, types checked by its annotations. Raises `InputError`, which begins as `said`,
    for a parameter that it does not have and for a value that it does not take."""
    try:
        return validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)(*arguments, **settings)
    except ValidationError as error:
        raise InputError(f"{said}: {call_error(error, inspect.signature(function).parameters)}") from error


@cache
def _entries(group: str, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """By name. `path` is where packages are looked for, so that what is installed there meanwhile is found."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in sorted(entry_points(group=group)):
        same = found.get(entry.name, ())
        if entry.value not in [known.value for known in same]:  # a package that is on the path twice
            found[entry.name] = (*same, entry)
    return found


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "an unnamed package"


def _told(error: Exception) -> str:
    """What went wrong and where, in a line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if place.filename.startswith("<") else f", {place.filename}: line {place.lineno}"
    if isinstance(error, SyntaxError):
        where = f", {error.filename}: line {error.lineno}"
    return f"{type(error).__name__}: {first_line(error)}{where}"
