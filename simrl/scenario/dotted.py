"""Plain data by dotted keys: `cluster.gpus` is a place in it, and a text `${cluster.gpus}` stands
for the value there.

Invariant: data is never changed in place. To put a value copies only the containers on the way to
it, so the scenarios of a file share all that they have in common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simrl.errors import InputError, broken

MOST_LEVELS = 50
MOST_REFERENCES = 500  # written in a text, and followed in its data
NO_REFERENCE = (
    "${name:…} is no reference to a key of the file, such as ${cluster.gpus}; write the value"
)
_REFERENCE = re.compile(r"\$\{\s*([\w-]+(?:\.[\w-]+)*)\s*\}")
_NOTHING = object()


def get(data: Any, key: str, otherwise: Any = None) -> Any:
    """Return the value at a dotted key, in which a number is a place in a list; `otherwise` where
    there is none."""
    for part in key.split("."):
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif _is_place(data, part):
            data = data[int(part)]
        else:
            return otherwise
    return data


def put(data: Mapping[str, Any], key: str, value: Any, place: str = "") -> dict[str, Any]:
    """Return data with a value at a dotted key. A dictionary is merged into one that is there;
    dictionaries that are missing on the way are made. Raise `InputError` that begins with `place`
    for no key, or one that leads into a value without keys."""
    parts = key.split(".")
    if len(parts) > MOST_LEVELS or not all(re.fullmatch(r"\w+", part) for part in parts):
        raise InputError(f"{place}: {key!r} is no key; write one such as cluster.gpus")
    changed: Any = dict(data)
    inside = changed
    for i, part in enumerate(parts, 1):
        if isinstance(inside, list) and not _is_place(inside, part):
            raise InputError(
                f"{place}: does not fit ({'.'.join(parts[: i - 1])} has no entry {part}); correct the key"
            )
        at: Any = int(part) if isinstance(inside, list) else part
        there = inside[at] if isinstance(inside, list) else inside.get(at)
        if i == len(parts):
            inside[at] = _merged(there, value) if isinstance(value, dict) else value
        elif there is None or isinstance(there, dict | list):
            inside[at] = there = {} if there is None else there.copy()
            inside = there
        else:
            raise InputError(f"{place}: {'.'.join(parts[:i])} is {there!r}, it has no {parts[i]}")
    return changed  # type: ignore[no-any-return]


def _is_place(data: Any, part: str) -> bool:
    return isinstance(data, list) and part.isdecimal() and int(part[:9]) < len(data)


def _merged(there: Any, section: dict[Any, Any]) -> dict[Any, Any]:
    there = there if isinstance(there, dict) else {}
    values = {k: _merged(there.get(k), v) if isinstance(v, dict) else v for k, v in section.items()}
    return {**there, **values}


def refers_only_to_keys(text: str) -> bool:
    """Return whether every `${` of a text begins a reference to a key, unlike `${oc.env:HOME}`."""
    return "${" not in _REFERENCE.sub("", text)


class References:
    """The references in data, of which a value may follow `MOST_REFERENCES` and none in a circle.
    Messages begin with the place of the data."""

    def __init__(self, data: Mapping[str, Any], place: str) -> None:
        self._data, self._place = data, place
        self._followed = 0

    def resolved(
        self, value: Any, name: str = "", within: tuple[str, ...] = (), level: int = 0
    ) -> Any:
        """Return a value, called `name` in messages and inside the references `within`, with the
        values of the data in place of its references; in a longer text they are texts. Raise
        `InputError`."""
        if level > MOST_LEVELS:
            raise InputError(
                f"{self._place}: {name[:MOST_LEVELS]}: nested more than {MOST_LEVELS} levels deep; a handful will do"
            )
        if isinstance(value, Mapping):
            prefix = f"{name}." if name else ""
            return {
                k: self.resolved(v, f"{prefix}{k}", within, level + 1) for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                self.resolved(v, f"{name}[{i}]", within, level + 1) for i, v in enumerate(value)
            ]
        if value == "???":
            raise InputError(
                f"{self._place}: {name}: Missing mandatory value; give it in place of ???"
            )
        if not isinstance(value, str) or "${" not in value:
            return value
        if not refers_only_to_keys(value):
            raise InputError(f"{self._place}: {name}: {NO_REFERENCE}")
        if whole := _REFERENCE.fullmatch(value):
            return self._value(whole[1], name, within, level)
        return _REFERENCE.sub(
            lambda reference: str(self._value(reference[1], name, within, level)), value
        )

    def _value(self, key: str, name: str, within: tuple[str, ...], level: int) -> Any:
        value, self._followed = get(self._data, key, _NOTHING), self._followed + 1
        if wrong := broken(
            (value is _NOTHING, f"Interpolation key {key!r} not found"),
            (key in within, "Recursive interpolation detected"),
            (
                self._followed > MOST_REFERENCES,
                f"more than {MOST_REFERENCES} references are followed",
            ),
        ):
            raise InputError(f"{self._place}: {name}: {wrong}; correct the reference or the key")
        return self.resolved(value, name, (*within, key), level)
