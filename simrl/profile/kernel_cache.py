"""The cache of compiled kernels: one file for a kernel, the types of its arguments, a processor, a
Python and a numba.

numba's own cache loads any file of the right name: a damaged one ends the process, and an old one
answers after a change of a function that the kernel calls in another file. Here the name and the
digest of a file hold the kernel's stamp: the code and constants of the kernel and of every function
that it calls. Paths and times do not count, so a wheel can ship files. Shipped files are for
x86-64-v3, which most processors since 2013 have; others compile. Everything else is compiled for
the processor at hand.

Invariant: no byte of a file is unpickled before its owner, its mode and its SHA-256 are checked. A
file that fails is compiled anew, with a note; where no folder can be written, kernels are compiled
in memory.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property, wraps
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numba
import numpy as np
from numba import config, types
from numba.core import compiler, serialize
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

SHIPPED = Path(__file__).parents[1] / "shipped" / "kernels"
SHIPPED_CPU = "x86-64-v3"  # `.ci/wheels` compiles for it
SHIPPED_FEATURES = "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave"
VERSIONS_KEPT = 4  # of a kernel, for those who change its code or work in several checkouts
MODULES = {"math", "numpy"}  # whose functions kernels use; they come with their version
OPEN_TO_OTHERS = 0o022
log = logging.getLogger(__name__)


def cached(kernel: Any) -> Any:
    """Return a numba function that keeps what it compiles in files; a plain function, where numba
    is switched off, as it is."""
    if is_compiled(kernel):
        kernel._cache = KernelCache(kernel)
        kernel.compile = _without_collection(kernel.compile)
    return kernel


def _without_collection(compiles: Any) -> Any:
    """Return what compiles a kernel, without Python's search for garbage meanwhile, a tenth of the
    time."""

    @wraps(compiles)
    def compile_kernel(*arguments: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return compiles(*arguments)
        finally:
            if collects:
                gc.enable()

    return compile_kernel


def is_compiled(value: Any) -> bool:
    """Return whether a value is a function that numba compiles."""
    return isinstance(value, Dispatcher)


class KernelCache(NullCache):
    """The cache of a kernel, asked by numba before it compiles."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._name = f"{kernel.py_func.__module__}.{kernel.py_func.__qualname__}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what was compiled for these types of arguments, or None."""
        target_context.refresh()
        try:
            host = target_context.codegen().magic_tuple()
            places = [(own_folder(), host, os.geteuid(), OPEN_TO_OTHERS)]
            if runs_shipped(host[2]):
                code = Path(
                    __file__
                ).stat()  # files that come with the code are as safe as the code is
                target = (host[0], SHIPPED_CPU, SHIPPED_FEATURES)
                places.append((SHIPPED, target, code.st_uid, OPEN_TO_OTHERS & ~code.st_mode))
            for folder, target, owner, forbidden in places:
                key = self._key(sig, target)
                if (
                    folder
                    and key
                    and (payload := _payload(folder / self._file(key), key, owner, forbidden))
                ):
                    return compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))  # type: ignore[no-untyped-call]
        except Exception as error:  # of any kind, where numba or the packages around it are others
            _note_unusable(error, getattr(error, "filename", None))
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for these types of arguments, if a folder can be written."""
        if not (folder := own_folder()):
            return
        try:
            key = self._key(sig, data.codegen.magic_tuple())
            if key is None or data.library.has_dynamic_globals or data.lifted:
                return
            # without annotations, which have paths, and which nobody reads
            payload = serialize.dumps(data._replace(type_annotation="")._reduce())  # type: ignore[no-untyped-call]
            path = folder / self._file(key)
            with tempfile.TemporaryDirectory(prefix=".", dir=folder) as temporary:
                new = Path(temporary, path.name)
                new.write_bytes(_digest(key, payload) + payload)
                new.chmod(0o600)
                new.replace(path)
            with suppress(OSError):  # another process was faster
                for old in sorted(
                    folder.glob(f"{path.stem}*"), key=lambda file: file.stat().st_mtime
                )[:-VERSIONS_KEPT]:
                    old.unlink()
        except Exception as error:  # of any kind, as above
            _note_unusable(error, folder if isinstance(error, OSError) else None)

    def _key(self, sig: Any, target: tuple[str, ...]) -> tuple[str, str] | None:
        """Return what a file answers for: the circumstances, and the stamp. None if the code
        depends on unknown values."""
        python = f"{sys.implementation.cache_tag}{sys.abiflags}"
        options = f"{config.OPT:d} {config.BOUNDSCHECK}"  # type: ignore[attr-defined]
        circumstances = (
            f"{self._name}\n{python} {numba.__version__} {options}\n{target}\n{_text_of_type(sig)}"
        )
        if (
            self._stamp is None or not isinstance(sig, tuple) or " at 0x" in circumstances
        ):  # functions are arguments
            return None
        return circumstances, self._stamp

    def _file(self, key: tuple[str, str]) -> str:
        circumstances, stamp = key
        return (
            f"{self._name}-{hashlib.sha256(circumstances.encode()).hexdigest()[:16]}.{stamp[:16]}"
        )

    @cached_property
    def _stamp(self) -> str | None:
        return stamp_of(self._kernel)


def own_folder() -> Path | None:
    """Return the user's folder of kernels; None if it cannot be made, or if others can write in
    it."""
    chosen = config.CACHE_DIR  # type: ignore[attr-defined]  # NUMBA_CACHE_DIR
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = Path(chosen or (base if base.is_absolute() else "~/.cache"), "simrl", "kernels")
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        _note_unusable(error, folder)
        return None
    if not _is_safe(folder, status, os.geteuid(), OPEN_TO_OTHERS):
        return None
    with suppress(OSError):  # of a disk that cannot be written
        folder.chmod(0o700)
    return folder


def runs_shipped(features: str) -> bool:
    """Return whether shipped kernels run on a processor with these features, and the user chose no
    other processor."""
    chosen = config.CPU_NAME, config.CPU_FEATURES  # type: ignore[attr-defined]
    return chosen == (None, None) and set(SHIPPED_FEATURES.split(",")) <= set(features.split(","))


def stamp_of(kernel: Any) -> str | None:
    """Return the digest of the code and the constants of a kernel and of every function that it
    calls. None if it uses a value whose content is unknown here, such as a class."""
    digest, known, todo = hashlib.sha256(), set[int](), [kernel]
    while todo:
        function = todo.pop()
        if id(function) in known:
            continue
        known.add(id(function))
        python = function.py_func
        digest.update(f"{python.__module__}.{python.__qualname__}{function.targetoptions}".encode())
        for value in _values(python):
            if is_compiled(value):
                todo.append(value)
            text = _text_of_value(value)
            if text is None:
                return None
            digest.update(f"{text}\0".encode())
    return digest.hexdigest()


def _values(python: Any) -> Iterator[Any]:
    """Yield what a function is made of: its code without docstring, and the defaults, closure and
    globals that it uses."""
    yield from (
        python.__defaults__ or (),
        *(cell.cell_contents for cell in python.__closure__ or ()),
    )
    codes = [python.__code__]
    for code in codes:
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
        constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
        yield from (code.co_code, code.co_varnames, code.co_names)
        yield from (
            value for value in constants if not isinstance(value, str) or value != python.__doc__
        )
        yield from (
            python.__globals__[name] for name in code.co_names if name in python.__globals__
        )


def _text_of_value(value: Any) -> str | None:
    """Return a text that differs for values that differ; None for a value that is not known to have
    one."""
    if isinstance(value, tuple):
        texts = [_text_of_value(part) for part in value]
        return None if None in texts else f"{type(value).__name__}{texts}"
    if is_compiled(value):
        return str(value.py_func.__qualname__)
    fields = getattr(value, "_fields", None)
    if isinstance(value, type) and issubclass(value, tuple) and fields:
        return f"{value.__qualname__}{fields}{getattr(value, '_field_defaults', None)}"
    if isinstance(value, ModuleType):
        return value.__name__ if value.__name__ in MODULES else None
    plain = isinstance(value, int | float | str | bytes | np.number | np.bool_ | None)
    return f"{type(value).__name__} {value!r}" if plain else None


def _text_of_type(kind: Any) -> str:
    """Return the text of a numba type, with the fields of named tuples, which its own leaves
    out."""
    if not issubclass(type(kind), tuple | types.BaseTuple):
        return str(kind)
    fields = getattr(kind, "instance_class", None), getattr(kind, "fields", None)
    return f"{type(kind).__name__}{fields}({', '.join(map(_text_of_type, kind))})"


def _payload(path: Path, key: tuple[str, str], owner: int, forbidden: int) -> bytes | None:
    """Return the content of a file that is safe, whole and this kernel's; None for any other, with
    a note if there is one."""
    try:
        with path.open("rb") as file:
            if not _is_safe(path, os.fstat(file.fileno()), owner, forbidden):
                return None
            content = file.read()
    except FileNotFoundError:
        return None
    payload = content[hashlib.sha256().digest_size :]
    if content != _digest(key, payload) + payload:
        _note(f"{path} is damaged; compiled anew")
        return None
    return payload


def _digest(key: tuple[str, str], payload: bytes) -> bytes:
    return hashlib.sha256("\n".join(key).encode() + payload).digest()


def _is_safe(path: Path, status: os.stat_result, owner: int, forbidden: int) -> bool:
    """Return whether a file or folder is its owner's, and nobody else's to write."""
    if not (safe := status.st_uid == owner and not status.st_mode & forbidden):
        what = "is not yours alone to write; it is not read, and its kernels are compiled"
        _note(f"{path} {what}{' (chmod 700 mends it)' if status.st_uid == os.geteuid() else ''}")
    return safe


def _note_unusable(error: Exception, place: Path | str | None) -> None:
    reason = getattr(error, "strerror", None) or repr(error)
    _note(
        f"{place or 'numba ' + numba.__version__}: compiled kernels cannot be kept or loaded ({reason}); compiled anew"
    )


@cache
def _note(message: str) -> None:
    """Log a message, once a process."""
    with suppress(OSError):  # of a screen that has gone
        log.warning(message)
