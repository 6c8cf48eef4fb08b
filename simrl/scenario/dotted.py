"""Plain data by dotted keys: `cluster.gpus` is a place in it, and a text `${cluster.gpus}` stands
for the value there.

Invariant: data is never changed in place. To put a value copies only the containers on the way to
it, so the scenarios of a file share all that they have in common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simrl.errors import InputError, refuse

MOST_LEVELS = 50
MOST_REFERENCES = 500  # written in a text, and followed in its data
_KEY = r"\{\s*([\w-]+(?:\.[\w-]+)*)\s*\}"
_REFERENCE = re.compile(rf"(?<!\\)\${_KEY}")
_OTHER = re.compile(rf"(?:\\\$|\$(?!{_KEY}))\{{[^}}]{{,40}}\}}?")  # escaped, or around no key
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
            inside[at] = merged(there, value) if isinstance(value, dict) else value
        elif there is None or isinstance(there, dict | list):
            inside[at] = there = {} if there is None else there.copy()
            inside = there
        else:
            raise InputError(f"{place}: {'.'.join(parts[:i])} is {there!r}, it has no {parts[i]}")
    return changed  # type: ignore[no-any-return]


def _is_place(data: Any, part: str) -> bool:
    is_number = re.fullmatch(r"[0-9]{1,9}", part)
    return isinstance(data, list) and is_number is not None and int(part) < len(data)


def merged(there: Any, section: dict[Any, Any]) -> dict[Any, Any]:
    """Return a section on what is there: mappings are joined, other values replaced."""
    there = there if isinstance(there, dict) else {}
    values = {k: merged(there.get(k), v) if isinstance(v, dict) else v for k, v in section.items()}
    return {**there, **values}


def wrong_reference(text: str) -> str:
    """Return words on the first `${` of a text that begins no reference to a key, as in
    `${oc.env:HOME}` and `\\${model}`; "" if there is none."""
    if (other := _OTHER.search(text)) is None:
        return ""
    return (
        f"{other[0]} is no reference to a key of the file; write the key from the first section on, such as "
        "${cluster.gpu}, or the value"
    )


class References:
    """The references in data, of which a value may follow `MOST_REFERENCES` and none in a circle.
    Messages begin with the place of the data."""

    def __init__(self, data: Mapping[str, Any], place: str) -> None:
        self._data, self._place = data, place
        self._followed = 0

    def resolved(
        self, value: Any, name: str = "", trail: tuple[str, ...] = (), level: int = 0
    ) -> Any:
        """Return a value, at the place `name`, with the values of the data in place of its
        references; in a longer text they are texts. The `trail` has the places and keys of the
        references that lead to it. Raise `InputError`."""
        if level > MOST_LEVELS:
            raise InputError(
                f"{self._place}: {name[:MOST_LEVELS]}: nested more than {MOST_LEVELS} levels deep; a handful will do"
            )
        if isinstance(value, Mapping):
            prefix = f"{name}." if name else ""
            return {k: self.resolved(v, f"{prefix}{k}", trail, level + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.resolved(v, f"{name}[{i}]", trail, level + 1) for i, v in enumerate(value)]
        if value == "???":
            raise InputError(f"{self._place}: {name}: it is missing (???); give it")
        if not isinstance(value, str) or "${" not in value:
            return value
        if wrong := wrong_reference(value):
            raise InputError(f"{self._place}: {name}: {wrong}")
        if whole := _REFERENCE.fullmatch(value):
            return self._value(whole[1], name, trail, level)
        return _REFERENCE.sub(
            lambda reference: str(self._value(reference[1], name, trail, level)), value
        )

    def _value(self, key: str, name: str, trail: tuple[str, ...], level: int) -> Any:
        value, self._followed = get(self._data, key, _NOTHING), self._followed + 1
        trail = trail if trail[-1:] == (name,) else (*trail, name)
        circle = (*trail[trail.index(key) :], key) if key in trail else ()
        refuse(
            (value is _NOTHING, f"the file has no key {key}"),
            (circle, f"its reference leads back to itself, {' → '.join(circle)}"),
            (
                self._followed > MOST_REFERENCES,
                f"more than {MOST_REFERENCES} references are followed",
            ),
            error=lambda words: InputError(
                f"{self._place}: {name}: {words}; correct the reference or the key"
            ),
        )
        return self.resolved(value, key, (*trail, key), level)
