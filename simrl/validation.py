"""Data that a user may write: the bounds of every value, and pydantic's findings as the one line of
an `InputError`.

Invariant: a field of a `Model` without a bound of its own has the general one of its kind, so that
simrl can compute with whatever it reads. A field where less makes sense has its own bound.
"""

import re
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from simrl.errors import InputError, brief, meant

M = TypeVar("M", bound=BaseModel)
LARGEST_WHOLE = 10**12  # sums of a million of them fit 64 bits
LARGEST = 1e18  # more bytes, and more operations a second, than any cluster has
LONGEST_TEXT = 10_000  # characters: four pages of notes
MOST_VALUES = 1_000_000  # of a list or an object: one for each step of the longest run
MOST_OF_A_PASS = 2**24  # requests, or tokens, of a forward pass: a worker has a record of each
# by pydantic's kind of a value: a bound's key, the key of a strict one, and the bound
_GENERAL: Mapping[str, Sequence[tuple[str, str, Any]]] = {
    "int": (("ge", "gt", -LARGEST_WHOLE), ("le", "lt", LARGEST_WHOLE)),
    "float": (("ge", "gt", -LARGEST), ("le", "lt", LARGEST)),
    "str": (("max_length", "", LONGEST_TEXT),),
    **{kind: (("max_length", "", MOST_VALUES),) for kind in ("list", "tuple", "set", "dict")},
}
LONGEST_VALUE = 80
MOST_SEED = 2**63 - 1  # kernels take it as a 64-bit integer
_SWITCHES = {"on": True, "yes": True, "off": False, "no": False}
# from here on, a number in place of a share is taken for a percentage; 1.5 is not
LEAST_PERCENTAGE = 2
# Remedies by the beginning of pydantic's kind of a finding, the first that fits; in braces, values
# of the finding.
REMEDIES = {
    "int": "a whole number is needed",
    "float": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool": "true or false is needed",
    "string_too_short": "{min_length} or more characters are needed",
    "string_too_long": "at most {max_length} characters fit",
    "string_pattern": "the text must fit {pattern}",
    "string": "a text is needed",
    "literal_error": "choose {expected}",
    "enum": "choose {expected}",
    "union_tag_invalid": "choose {expected_tags}",
    "union_tag_not_found": "give it a kind",
    "greater_than_equal": "give {ge} or more",
    "greater_than": "give more than {gt}",
    "less_than_equal": "give {le} or less",
    "less_than": "give less than {lt}",
    "multiple_of": "give a multiple of {multiple_of}",
    "too_short": "{min_length} or more values are needed, here are {actual_length}",
    "too_long": "at most {max_length} values fit",
    "list": "a list is needed, such as [1, 2]",
    "tuple": "a list is needed, such as [1, 2]",
    "named_tuple": "a list or an object with its keys is needed",
    "set": "a list is needed, such as [1, 2]",
    "none_required": "leave it out, or give null",
    "missing": "it is missing; give it",
    "json": "valid JSON is needed",
    "multiple_argument_values": "it is given twice",
    "unexpected": "no such argument; leave it out",
    "recursion": "it contains itself; write it out",
    "invalid_key": "its keys are texts",
    "": "an object with keys is needed, such as {{key: value}}",
}


def _bound(part: Any) -> None:
    """Give the general bounds to the parts of pydantic's schema that have none of their own. A
    value of any kind goes through `bounded`."""
    if isinstance(part, dict):
        kind = part.get("type")
        for key, strict, value in _GENERAL.get(kind, ()) if isinstance(kind, str) else ():
            part.setdefault(key if strict not in part else strict, value)
        for key in part.keys() - {"metadata", "default", "expected", "serialization"}:
            _bound(part[key])
        if kind == "any":
            check = {"type": "no-info", "function": bounded}
            part |= {"type": "function-after", "function": check, "schema": {"type": "any"}}
    for inner in part if isinstance(part, list | tuple) else ():
        _bound(inner)


def bounded(value: Any, least: float | None = None, most: float | None = None) -> Any:
    """Return plain data. Raise `ValueError` for a number below `least` or above `most`, and for a
    number, a text or a list in it that is beyond the general bounds."""
    if isinstance(value, int | float):
        largest = LARGEST_WHOLE if isinstance(value, int) else LARGEST
        low, high = -largest if least is None else least, largest if most is None else most
        if not low <= value <= high:  # NaN is refused, too
            bound = f"{high} or less, " if value > high else ""
            bound = f"{low} or more, " if value < low else bound
            raise ValueError(f"give {bound}a finite number")
    elif isinstance(value, str | list | tuple | dict):
        longest = LONGEST_TEXT if isinstance(value, str) else MOST_VALUES
        if len(value) > longest:
            raise ValueError(
                f"at most {longest} {'characters' if isinstance(value, str) else 'values'} fit"
            )
        if isinstance(value, dict):
            for key, inner in value.items():
                try:
                    bounded([key, inner])
                except ValueError as error:
                    raise ValueError(f"{brief(str(key))} is {brief(str(inner))}: {error}") from None
        elif not isinstance(value, str):
            for inner in value:
                bounded(inner)
    return value


def no_truth(cls: type[BaseModel], value: object, info: ValidationInfo) -> object:
    """Refuse true and false where they are no values of a field, and a text such as 1_000 for a
    number, as a validator."""
    kind = str(cls.model_fields[info.field_name].annotation) if info.field_name else ""
    if has_underscores(value) and (number := re.search(r"\b(int|float)\b", kind)):
        raise PydanticCustomError(f"{number[0]}_parsing", "a number is needed")
    if isinstance(value, bool) and "bool" not in kind:  # which would pass as 1 or 0
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
    _numbers: Any = field_validator("*", mode="before")(classmethod(no_truth))


def explain(error: ValidationError, model: type[BaseModel], name: str) -> tuple[str, str]:
    """Return the key of a finding (dotted, within `model`, which the message calls `name`), and the
    message. Unknown keys come before other findings.

    The message has the key, its value and the remedy; for an unknown key, the known ones, or the
    entry of its model's `ELSEWHERE`.
    """
    findings = error.errors()
    first = next(
        (finding for finding in findings if finding["type"] == "extra_forbidden"), findings[0]
    )
    keys, owner = _keys(first["loc"], model)
    key = ".".join(keys)
    if first["type"] == "extra_forbidden" and first["loc"][-1] != keys[-1]:  # of no model
        return key, f"{key}: unknown key {first['loc'][-1]}"
    if first["type"] in ("extra_forbidden", "invalid_key"):
        known = owner.model_fields
        if elsewhere := getattr(owner, "ELSEWHERE", {}).get(keys[-1]):
            return key, f"unknown key {key}; {elsewhere.replace('{}', in_words(first['input']))}"
        return (
            key,
            f"unknown key {key}{meant(keys[-1], known)}; {'.'.join(keys[:-1]) or name} has {', '.join(known)}",
        )
    if first["type"] == "missing":
        return key, f"key {key} is missing"
    value = (
        ""
        if isinstance(first["input"], dict | BaseModel)
        else f" is {shortened(first['input'])}{_near(first)}"
    )
    if first["type"] == "model_type":
        return key, f"{key or name}{value}; it has the keys {', '.join(owner.model_fields)}"
    return key, f"{key}{value}: {right(first)}" if key else right(first)


def validated(model: type[M], data: object, place: str, name: str, remedy: str = "") -> M:
    """Return data as a model, which messages call `name`. Raise `InputError` with the place, what
    `explain` says, and the remedy."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{place}: {explain(error, model, name)[1]}{remedy}") from error


def call_error(error: ValidationError, known: Mapping[str, Parameter]) -> str:
    """Return the first finding among the arguments of a call to a function with the `known`
    parameters: the argument, its value and the remedy."""
    first = error.errors()[0]
    # pydantic's names of the alternatives that a type has are no keys: literal['open','batch'],
    # Elastic
    place = ".".join(str(part) for part in first["loc"] if re.fullmatch(r"[a-z_0-9]+", str(part)))
    if first["type"] == "unexpected_keyword_argument":
        names = list(known)
        return (
            f"unknown parameter {place!r}{meant(place, names)}; it has {', '.join(names) or 'none'}"
        )
    if first["type"] == "extra_forbidden":
        models = models_in(getattr(known.get(str(first["loc"][0])), "annotation", None))
        tried = [m for m in models if {m.__name__, m.__name__.lower()} & {*first["loc"]}]
        keys = [key for model in (tried or models)[:1] for key in model.model_fields]
        listed = f"; {first['loc'][0]} has {', '.join(keys)}" if keys else ""
        return f"unknown key {place}{meant(first['loc'][-1], keys)}{listed}"
    if first["type"].startswith("missing"):
        return f"{place} is missing; give it"
    return f"{place} is {shortened(first['input'])}{_near(first)}: {right(first)}"


def right(finding: ErrorDetails) -> str:
    """Return the remedy for a value in words of simrl. They name seconds, and the share for a
    percentage in place of one."""
    value, bounds, kind = finding["input"], finding.get("ctx", {}), finding["type"]
    key = str(finding["loc"][-1]) if finding["loc"] else ""
    shown = {
        k: f"{v:g}" if isinstance(v, float) else str(v).replace("'", "") for k, v in bounds.items()
    }
    words = finding["msg"].partition(" error, ")[2]  # a validator's own sentence
    words = words or next(
        text for begin, text in REMEDIES.items() if kind.startswith(begin)
    ).format(**shown)
    if (
        kind.startswith(("int_", "float_"))
        and isinstance(value, str)
        and (hint := number_meant(value, key))
    ):
        return f"{words}, without a unit{hint}"
    if kind.startswith(("int_", "float_")) and isinstance(value, list | tuple) and len(value) > 1:
        return f"{words}; several are written {','.join(map(str, value))}, without brackets"
    if re.search(r"(?<!_per)_s$", key):
        return f"{words} (seconds)" if {"gt", "ge", "lt", "le"} & set(bounds) else words
    if (
        1 in (bounds.get("lt"), bounds.get("le"))
        and isinstance(value, int | float)
        and LEAST_PERCENTAGE <= value <= 100
    ):
        return f"a share between 0 and 1; did you mean {value / 100:.6g}?"
    return words[:1].lower() + words[1:]


_FACTORS = {
    "": 1.0,
    "%": 0.01,
    "k": 1e3,
    "m": 1e6,
    "b": 1e9,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "min": 60.0,
    "h": 3600.0,
}
_BYTES = {
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
}
_BITS = {"gbit": 1.25e8, "gbps": 1.25e8, "gbit/s": 1.25e8, "gb/s": 1e9}


def number_meant(text: str, key: str = "") -> str:
    """Suggest the number that a text with a unit, a currency or a kind of GPU may mean for a key,
    or a range for a text like one; "" for another text."""
    text = text.strip()
    if ends := re.fullmatch(r"(\d+) *(?:-|:|to|\.\.) *(\d+)", text):
        return f"; a range is {ends[1]}..{ends[2]}, in simrl sweep"
    if counts := re.fullmatch(r"(\d+) *[x×*] *[a-z]\w+|[a-z]\w+ *[x×*:] *(\d+)", text.lower()):
        return f"; did you mean {counts[1] or counts[2]}?"
    measure = re.fullmatch(r"[$€£~]? *(\d[\d_]*\.?\d*) *([a-zA-Z/%$€£]*)", text)
    if measure is None:
        return ""
    number, unit = float(measure[1].replace("_", "")), measure[2].lower()
    if unit == "k" and number % 1 == 0:
        return f"; did you mean {number * 1000:.0f} or {number * 1024:.0f}?"
    of_bytes = (
        {**_BYTES, **_BITS, **({"gb": 1.25e8} if measure[2] == "Gb" else {})}
        if "bytes" in key
        else dict.fromkeys(_BYTES)
    )
    factor = {**_FACTORS, **of_bytes}.get(unit, 1.0)
    if factor is None:  # bytes for a key that is no size
        return ""
    return (
        f"; did you mean {number * factor:.0f}?"
        if number * factor >= 1e5
        else f"; did you mean {number * factor:.9g}?"
    )


def _near(finding: ErrorDetails) -> str:
    """Suggest the closest allowed value, if only a few words are allowed."""
    if finding["type"] != "literal_error":
        return ""
    digits = re.sub(r"\D", "", str(finding["input"]))  # int8 is no slip for int4
    allowed = re.findall(r"'([^']*)'", finding["ctx"]["expected"])
    return meant(finding["input"], [word for word in allowed if re.sub(r"\D", "", word) == digits])


def _keys(
    location: tuple[int | str, ...], model: type[BaseModel]
) -> tuple[list[str], type[BaseModel]]:
    """Return the keys down to the first one that is no model, and the model they lead to. Further
    parts of pydantic's location name the alternative of a type that it tried."""
    keys: list[str] = []
    by_kind: dict[str, type[BaseModel]] = {}
    names = False  # true if the next key is a name in a dictionary
    for key in location:
        if key in by_kind:  # pydantic's name for an alternative, no key
            model, by_kind = by_kind[str(key)], {}
            continue
        keys.append(str(key))
        if isinstance(key, int) or names:
            names = False
            continue  # a place in a list, or a name in a dictionary
        field = model.model_fields.get(key)
        inner = [] if field is None else models_in(field.annotation)
        if not inner:
            break
        by_kind = {
            kind: model
            for model in inner
            if "kind" in model.model_fields
            for kind in get_args(model.model_fields["kind"].annotation)
        }
        names = get_origin(field.annotation) is dict if field is not None else False
        model = inner[0]
    return keys, model


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def shortened(value: Any) -> str:
    """Return the value as Python writes it, cut to `LONGEST_VALUE` characters."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def in_words(value: Any) -> str:
    """Return a value as people write it, also in YAML and on the command line: on and off for true
    and false, null for none."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {in_words(inner)}' for key, inner in value.items())}}}"
    spelt = isinstance(value, bool) or value is None
    return {True: "on", False: "off", None: "null"}[value] if spelt else str(value)


def switched(value: Any) -> Any:
    """Return data with true and false for the words of a switch, on and yes, off and no, which
    names stay."""
    if isinstance(value, dict):
        return {
            key: inner if key in ("name", "kind") else switched(inner)
            for key, inner in value.items()
        }
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def with_parameters(name: str, parameters: Mapping[str, Any]) -> str:
    """Return a name with its parameters, such as `areal(eta=4)`."""
    values = ", ".join(f"{key}={in_words(value)}" for key, value in parameters.items())
    return f"{name}({values})" if values else name
