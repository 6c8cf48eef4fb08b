"""What pydantic found wrong with data that a user wrote, in the one line that an `InputError` has room for."""

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

LONGEST_VALUE = 80


def explain(error: ValidationError, model: type[BaseModel], name: str) -> tuple[str, str]:
    """The first finding: its key (dotted, within `model`, which the message calls `name`) and the message.

    The message has the key, the value found and what would be right; for an unknown key, the known ones.
    """
    first = error.errors()[0]
    keys, owner = _keys(first["loc"], model)
    key = ".".join(keys)
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return key, f"unknown key {key}; {'.'.join(keys[:-1]) or name} has {', '.join(owner.model_fields)}"
    if first["type"] == "missing":
        return key, f"key {key} is missing"
    found = f" is {_shortened(first['input'])}" if not isinstance(first["input"], dict | BaseModel) else ""
    if first["type"] == "model_type":
        return key, f"{key or name}{found}; it has the keys {', '.join(owner.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return key, f"{key}{found}: {message}" if key else message


def _keys(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The keys down to the first one that is no model, and the model they lead to. What pydantic says beyond is which
    alternative of a type it tried."""
    keys: list[str] = []
    for key in location:
        keys.append(str(key))
        field = model.model_fields.get(str(key))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            break
        model = inner[0]
    return keys, model


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
