"""The plain data in a file of `torch.save`, read without torch and without unpickling.

Invariant: no code of the file is run, no name in it is imported, and no more memory is taken than
the file's own size allows. Such a file is a zip of stored (not compressed) parts with a pickle,
whose operations are interpreted here. They make null, booleans, numbers, texts, bytes, lists,
tuples and dictionaries with plain keys; numbers of numpy; tensors of one dimension, as lists, and
of none, as numbers, of the types in `STORAGES`. Other tensors (of more dimensions, other types, or
expanded) and all else of torch, numpy, PIL, collections, slime and miles stay unread, as a name;
every other class or function that the pickle names is refused.
"""

from __future__ import annotations

import pickletools
import struct
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np

from simrl.errors import InputError, first_line, refuse

DAMAGE = (
    *(OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, RuntimeError),
    MemoryError,
)
MOST_OPERATIONS = 100_000_000  # about 30 million tokens with masks and log-probabilities
MOST_VALUES_A_BYTE = 2  # of the file: tensors may share a storage, but not many times
UNREAD = ("torch", "numpy", "PIL", "_codecs", "collections", "slime", "miles")  # modules
STORAGES = {
    **{"LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1"},
    **{"ByteStorage": "u1", "BoolStorage": "?", "FloatStorage": "<f4", "DoubleStorage": "<f8"},
    "HalfStorage": "<f2",
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
            parts, size = archive.infolist(), path.stat().st_size
            stored = all(part.compress_type == ZIP_STORED for part in parts)
            if not stored or sum(part.file_size for part in parts) > size:
                raise ValueError("its parts are compressed or overlap, as torch.save's never do")
            (pickle,) = [part.filename for part in parts if part.filename.endswith("data.pkl")]
            root = pickle.removesuffix("data.pkl")
            return _value(archive.read(pickle), archive, f"{root}data/", path, size)
    except (BadZipFile, struct.error, *DAMAGE) as error:
        raise InputError(
            f"{path}: no whole file of torch.save ({first_line(error)[:99]}); name a .pt with rollout_id and samples, "
            "written by torch 1.6 or later"
        ) from error


def _value(raw: bytes, archive: ZipFile, root: str, path: Path, size: int) -> Any:
    """Return the value that a pickle makes; tensors are in the archive, below `root`. `size` is the
    file's, in bytes, which bounds the values of tensors."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    read = cache(lambda key: archive.read(f"{root}{key}"))
    values = 0
    for done, (operation, argument, _) in enumerate(pickletools.genops(raw)):
        if done > MOST_OPERATIONS or values > MOST_VALUES_A_BYTE * size:
            raise ValueError("its pickle makes far more values than such a file holds")
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
                if any(isinstance(key, tuple) for key in items[::2]):  # nested, a hash never ends
                    raise ValueError("a key is no text or number")
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                stack.append(_name(argument or " ".join(_taken(stack, len(stack) - 2)), path))
            case "REDUCE" | "NEWOBJ":
                stack.append(_made(*_taken(stack, len(stack) - 2)))
                values += len(stack[-1]) if isinstance(stack[-1], list | bytes) else 0
            case "BINPERSID":
                _, storage, key, *_ = stack.pop()
                raw_values = read(key) if isinstance(key, str) else None
                stack.append((storage.name.partition(" ")[2], raw_values))
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
        case "torch._utils _rebuild_tensor_v2", ((kind, bytes(raw)), start, sizes, strides, *_) if (
            kind in STORAGES
            and (len(sizes), strides) in ((0, ()), (1, strides))
            and 0 not in strides
        ):
            values = np.frombuffer(raw, STORAGES[kind])
            size, stride = (*sizes, 1)[0], (*strides, 1)[0]
            if min(start, size, stride) < 0 or start + (size - 1) * stride >= max(len(values), 1):
                raise ValueError("a tensor is larger than its storage")
            of_tensor = values[start : start + size * stride : stride].tolist()
            return of_tensor if sizes else of_tensor[0]
    return called
