"""Extensions: functions that installed packages add to simrl's own, by entry points, imported when
first asked for.

Invariant: only installed packages are imported, never a name from a scenario, a trace or any other
file that is read. A package that cannot be imported matters to its users alone, who get one line
about it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points, requires
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call

from simrl.errors import InputError, StoppedError, first_line
from simrl.validation import call_error

T = TypeVar("T")
USERS = (
    InputError,
    StoppedError,
    ValidationError,
    KeyboardInterrupt,
)  # which say themselves what is wrong


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of simrl needs, from any folder: by the names
    of the packages."""
    needs = [need.partition(";") for need in requires("simrl") or ()]
    named = [
        need.strip() for need, _, marker in needs if re.search(rf"extra == .{extra}\b", marker)
    ]
    return f"pip install {' '.join(map(repr, named or [extra]))}"


class Extended(Mapping[str, Callable[..., T]]):
    """Functions by name: simrl's `own`, then those of the entry points of `group`.

    `kind` names one in messages, `required` is the number of arguments that simrl gives it. Looking
    a name up raises `InputError` for a function that cannot be loaded, that needs more arguments,
    or whose name another package or simrl has; an unknown name is a `KeyError`.
    """

    def __init__(
        self, own: Mapping[str, Callable[..., T]], group: str, kind: str, required: int = 0
    ) -> None:
        self.own = own
        self._group, self._kind, self._required = group, kind, required

    def __getitem__(self, name: str) -> Callable[..., T]:
        entries = self.added().get(name, [])
        if not entries:
            return self.own[name]
        if name in self.own or len(entries) > 1:
            owners = ["simrl itself"] * (name in self.own) + [_package(entry) for entry in entries]
            raise InputError(
                f"{self._kind} {name!r} is added by {' and by '.join(owners)}; uninstall one, or rename it there "
                f"(entry points {self._group!r})"
            )
        return self._load(entries[0])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.own, *self.added()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            name in self.own or name in self.added()
        )  # a scenario may give a list

    def added(self) -> dict[str, list[EntryPoint]]:
        """Return the entry points of installed packages by name, names that are taken included."""
        return _entries(self._group, tuple(sys.path))

    def sources(self, name: str) -> list[Path]:
        """Return the Python files of the package that adds a function: its results may depend on
        them. None for simrl's own."""
        if name in self.own or name not in self:
            return []
        function = inspect.unwrap(self[name])
        file = Path(inspect.getsourcefile(function) or "")
        return sorted(file.parent.rglob("*.py")) if "." in function.__module__ else [file]

    def _load(self, entry: EntryPoint) -> Callable[..., T]:
        place = f"{self._kind} {entry.name!r}, which {_package(entry)} adds as {entry.value}"
        try:
            function: Any = entry.load()
        except USERS:
            raise
        except BaseException as error:  # a package may raise anything as it is imported
            raise InputError(
                f"{place}: cannot be loaded ({_summary(error)}); repair or uninstall it"
            ) from error
        if not inspect.isroutine(function) or inspect.iscoroutinefunction(function):
            kind = "async def" if inspect.isroutine(function) else type(function).__name__
            raise InputError(f"{place}: is no function but {kind}; name a function there")
        try:
            parameters = inspect.signature(function, eval_str=True).parameters.values()
        except Exception as error:  # an annotation may be any code
            raise InputError(
                f"{place}: its parameters are unknown ({first_line(error)}); name a function there"
            ) from error
        needed = [p for p in parameters if p.default is p.empty]
        by_place = [p.name for p in needed if p.kind < p.VAR_POSITIONAL]
        by_name = [p.name for p in needed if p.kind == p.KEYWORD_ONLY]
        if extra := ", ".join(by_place[self._required :] + by_name):
            raise InputError(
                f"{place}: must be given {extra}, which simrl does not know; give each a default"
            )
        return _guarded(place, function)


def _guarded(place: str, function: Callable[..., T]) -> Callable[..., T]:
    """Return a function of a package that raises `InputError` for what its code raises or how it
    exits."""

    @wraps(function)
    def guarded(*arguments: Any, **settings: Any) -> T:
        with raised_in(place):
            return function(*arguments, **settings)

    return guarded


@contextmanager
def raised_in(place: str) -> Iterator[None]:
    """Raise `InputError` for what a package's code raises within the block, or how it exits."""
    try:
        yield
    except USERS:
        raise
    except BaseException as error:
        raise InputError(f"{place}: raised {_summary(error)}; repair or uninstall it") from error


def documentation(function: Callable[..., object]) -> str:
    """Return the docstring of a function from its source: `python -OO` drops the function's."""
    with suppress(OSError, TypeError, SyntaxError):  # a function may have no source of its own
        source: Any = ast.parse(inspect.getsource(inspect.unwrap(function)))
        return ast.get_docstring(source.body[0]) or ""
    return inspect.getdoc(function) or ""


def checked(place: str, function: Callable[..., T], *arguments: Any, **settings: Any) -> T:
    """Call a function with a user's settings, types checked by its annotations. Raises an
    `InputError` that begins with `place` for an unknown parameter or a value that it does not
    take."""
    try:
        return validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)(
            *arguments, **settings
        )
    except ValidationError as error:
        raise InputError(
            f"{place}: {call_error(error, inspect.signature(function).parameters)}"
        ) from error


@cache
def _entries(group: str, _path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name, found again whenever Python's path changes."""
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=group)):
        known = by_name.setdefault(entry.name, [])
        if entry.value not in [
            other.value for other in known
        ]:  # a package may be on the path twice
            known.append(entry)
    return by_name


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "an unnamed package"


def _summary(error: BaseException) -> str:
    """Return the error and its place in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (
        (error.filename, error.lineno)
        if isinstance(error, SyntaxError)
        else (frame.filename, frame.lineno)
    )
    where = "" if str(file).startswith("<") else f", {file}: line {line}"
    return f"{type(error).__name__}: {first_line(error)}{where}"
