"""The general bounds of what a user may write: every number, text and list of a model has one.

Invariant: a field without a bound of its own has the general one of its kind, so that simrl can
compute with whatever it reads. A field where less makes sense has its own bound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

LARGEST_WHOLE = 10**12  # sums of a million of them fit 64 bits
LARGEST = 1e18  # more bytes, and more operations a second, than any cluster has
LONGEST_TEXT = 10_000  # characters: four pages of notes
MOST_VALUES = 1_000_000  # of a list or an object: one for each step of the longest run
MOST_OF_A_PASS = 2**24  # requests, or tokens, of a forward pass: a worker has a record of each
_GENERAL: Mapping[str, Mapping[str, Any]] = {
    "int": {"ge": -LARGEST_WHOLE, "le": LARGEST_WHOLE},
    "float": {"ge": -LARGEST, "le": LARGEST, "allow_inf_nan": False},
    "str": {"max_length": LONGEST_TEXT},
    **dict.fromkeys(("list", "tuple", "set", "frozenset", "dict"), {"max_length": MOST_VALUES}),
}
_STRICT = {"ge": "gt", "le": "lt"}
_NO_SCHEMAS = ("metadata", "default", "expected", "serialization")


def _bound(part: Any) -> None:
    """Give the general bounds to the parts of pydantic's schema that have none of their own. A
    value of any kind goes through `bounded`."""
    inner = part
    if isinstance(part, dict):
        kind = part.get("type")
        inner = [value for key, value in part.items() if key not in _NO_SCHEMAS]
        for key, value in _GENERAL.get(kind, {}).items() if isinstance(kind, str) else ():
            if _STRICT.get(key) not in part:
                part.setdefault(key, value)
        if kind == "any":
            check = {"type": "no-info", "function": bounded}
            part |= {"type": "function-after", "function": check, "schema": {"type": "any"}}
    for value in inner if isinstance(inner, list | tuple) else ():
        _bound(value)


def bounded(value: Any) -> Any:
    """Return plain data. Raise `ValueError` for a number, a text or a list in it that is beyond the
    general bounds."""
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # NaN is refused, too
        raise ValueError(f"give a finite number of at most {LARGEST:g}")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"at most {LONGEST_TEXT} characters fit")
    if isinstance(value, list | tuple | dict):
        if len(value) > MOST_VALUES:
            raise ValueError(f"at most {MOST_VALUES} values fit")
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            bounded(inner)
    return value


def no_truth(cls: type[BaseModel], value: object, info: ValidationInfo) -> object:
    """Refuse true and false where they are no values of a field, and a text such as 1_000 for a
    number, as a validator."""
    kind = str(cls.model_fields[info.field_name].annotation) if info.field_name else ""
    switches = "bool" in kind
    if has_underscores(value) and (number := re.search(r"\b(int|float)\b", kind)):
        raise PydanticCustomError(f"{number[0]}_parsing", "a number is needed")
    if isinstance(value, bool) and not switches:  # which would pass as 1 or 0
        raise ValueError("this field is no switch; give a number or a name")
    return value


def has_underscores(value: object) -> bool:
    """Return whether a value is a text such as 1_000, which pydantic takes for a number and YAML
    1.2 does not."""
    return (
        isinstance(value, str)
        and "_" in value
        and re.fullmatch(r"[-+]?\d[\d_.]*(?:[eE][-+]?[\d_]+)?", value.strip()) is not None
    )


numbers_are_no_truth: Any = field_validator("*", mode="before")(classmethod(no_truth))
"""A validator, named in the body of a model, that refuses true and false where they are no values
of a field, and 1_000 for a number."""


def in_order(low: str, high: str) -> Any:
    """Return a validator, named in the body of a model, that refuses a field `low` above the field
    `high`."""

    def check(model: Any) -> Any:
        least, most = getattr(model, low), getattr(model, high)
        if least > most:
            raise ValueError(f"{low} {least} is more than {high} {most}; let it be at most that")
        return model

    return model_validator(mode="after")(check)


class Model(BaseModel):
    """Data that a user may write: without unknown keys, bounded, and fixed once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound(handler.resolve_ref_schema(schema))
        return schema


class Section(Model):
    """A section of a scenario, or data like one: its numbers are no truth values."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    _numbers = numbers_are_no_truth
