"""The plain data in a file of `torch.save`, read without torch and without unpickling.

Invariant: no code of the file is run and no name in it is imported. Such a file is a zip with a
pickle, whose operations are interpreted here: they make texts, numbers, lists, objects and tensors
of one dimension. Other tensors, arrays and pictures stay unread; every other class or function that
the pickle names is refused.
"""

from __future__ import annotations

import pickletools
import struct
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from simrl.errors import InputError, first_line, refuse

DAMAGE = (OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, RuntimeError)
UNREAD = ("torch", "numpy", "PIL", "_codecs", "collections", "slime", "miles")  # modules
STORAGES = {
    **{"LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1"},
    **{"ByteStorage": "u1", "BoolStorage": "?", "FloatStorage": "<f4", "DoubleStorage": "<f8"},
}


VALUES = (  # operations whose argument is the value
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
)
CONSTANTS: dict[str, Any] = {
    **{"NONE": None, "NEWTRUE": True, "NEWFALSE": False},
    **{"EMPTY_LIST": [], "EMPTY_DICT": {}, "EMPTY_TUPLE": ()},
}


class Unread(NamedTuple):
    """A name in a pickle, or an object made of it, that is not read."""

    name: str


def read_torch(path: Path) -> Any:
    """Return the value in a file of `torch.save`. Raises `InputError` for any other file, and for a
    value that holds more than plain data."""
    try:
        with ZipFile(path) as archive:
            compressed = any(part.compress_type != ZIP_STORED for part in archive.infolist())
            (pickle,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            root = "" if compressed else pickle.removesuffix("data.pkl")
            return _value(archive.read(f"{root}data.pkl"), archive, f"{root}data/", path)
    except (BadZipFile, struct.error, *DAMAGE) as error:
        raise InputError(
            f"{path}: no whole file of torch.save ({first_line(error)[:99]}); name a .pt with rollout_id and samples, "
            "written by torch 1.6 or later"
        ) from error


def _value(raw: bytes, archive: ZipFile, root: str, path: Path) -> Any:
    """Return the value that a pickle makes; tensors are in the archive, below `root`."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for operation, argument, _ in pickletools.genops(raw):
        match operation.name:
            case name if name in VALUES:
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[int(len(memo) if argument is None else argument)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(argument or 0)])
            case "MARK":
                marks.append(len(stack))
            case name if name in CONSTANTS:
                stack.append(copy(CONSTANTS[name]))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(stack.pop() for _ in range(int(name[-1])))[::-1])
            case "TUPLE":
                stack.append(tuple(_taken(stack, marks.pop())))
            case "APPEND" | "APPENDS" as name:
                items = _taken(stack, marks.pop() if name[-1] == "S" else len(stack) - 1)
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = _taken(stack, marks.pop() if name[-1] == "S" else len(stack) - 2)
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                stack.append(_name(argument or " ".join(_taken(stack, len(stack) - 2)), path))
            case "REDUCE" | "NEWOBJ":
                stack.append(_made(*_taken(stack, len(stack) - 2)))
            case "BINPERSID":
                _, storage, key, *_ = stack.pop()
                stack.append((storage.name.partition(" ")[2], archive.read(f"{root}{key}")))
            case "BUILD":
                stack.pop()
            case name if name not in ("PROTO", "FRAME", "STOP"):
                raise ValueError(f"its pickle has {name}, which plain data does not need")
    return stack.pop()


def _taken(stack: list[Any], at: int) -> list[Any]:
    """Return what lies on the stack from `at` on, and take it off."""
    items, stack[at:] = stack[at:], []
    return items


def _name(name: str, path: Path) -> Unread:
    """Return a name that stays unread. Raises `InputError` for a name that no sample needs."""
    refuse(
        (
            name.partition(" ")[0].partition(".")[0] not in UNREAD,
            f"{path}: holds {name.replace(' ', '.')[:99]}, more than plain data, and loading that could run code: "
            "refused; save it again with lists and numbers alone",
        )
    )
    return Unread(name)


def _made(called: Unread, arguments: tuple[Any, ...]) -> Any:
    """Return the object that a call stands for, as far as it is read: an empty object, a number of
    numpy, a tensor of one dimension."""
    match called.name.replace("._core.", ".core."), arguments:
        case "collections OrderedDict", _:
            return {}
        case "_codecs encode", (str(text), "latin1"):
            return text.encode("latin1")
        case "numpy dtype", ("f8" | "f4" | "i8" | "i4" | "b1" as form, *_):
            return np.dtype(form)
        case "numpy.core.multiarray scalar", (np.dtype() as form, bytes(raw)):
            return np.frombuffer(raw, form)[0].item()
        case "torch._utils _rebuild_tensor_v2", ((kind, raw), start, (size,), (stride,), *_):
            values = np.frombuffer(raw, STORAGES.get(kind, "u1"))[start : start + size * stride]
            return values[:: max(stride, 1)].tolist()
    return called
