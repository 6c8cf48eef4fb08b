"""The rules that a trace keeps: the conditions of single values as a table, the relations between
columns below it.

Invariant: every rule names the first row that breaks it and, where there are others, their number.
A missing value (None) of an optional column breaks no rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.errors import InputError

FINISH_REASONS = ("stop", "length", "abort")
LONGEST_VALUE = 60  # characters of a value in a message


def _below(low: int) -> Callable[[pa.Array], pa.Array]:
    return lambda values: pc.less(values, low)


_VALUES: tuple[
    tuple[str, Callable[[pa.Array], pa.Array], str], ...
] = (  # column, values that break the rule, message
    *(
        (name, _below(0), "it must be at least 0")
        for name in ("step", "epoch", "prompt_id", "sample")
    ),
    *((name, _below(1), "it must be at least 1") for name in ("prompt_tokens", "response_tokens")),
    ("policy_version", _below(0), "it must be at least 0, or empty"),
    (
        "environment_s",
        lambda values: pc.or_(pc.less(values, 0), pc.invert(pc.is_finite(values))),
        "it must be zero or more seconds",
    ),
    (
        "reward",
        lambda values: pc.invert(pc.is_finite(values)),
        "it must be a finite number, or empty",
    ),
    (
        "finish_reason",
        lambda values: pc.and_(
            pc.invert(pc.is_in(values, pa.array(FINISH_REASONS))), pc.is_valid(values)
        ),
        f"it must be one of {', '.join(FINISH_REASONS)}, or empty",
    ),
)
_TURNS: dict[
    str, tuple[int | None, str]
] = {  # column of lists: smallest value (None: texts), message
    "turn_tokens": (1, "it must hold at least one token a turn"),
    "turn_environment_s": (0, "it must hold zero or more seconds for each turn but the last"),
    "turn_observation_tokens": (0, "it must hold zero or more tokens for each turn but the last"),
    "turn_tool": (None, "it must hold a name for each turn but the last"),
    "turn_failures": (0, "it must hold zero or more failed tries for each turn but the last"),
}


def validate(table: pa.Table, required: tuple[str, ...], cap_tokens: int, origin: str) -> None:
    """Raise `InputError` for the first rule that a table of cast columns breaks; `required` columns
    have no empty values."""
    if table.num_rows == 0:
        raise InputError(f"{origin}: no rows; a trace needs at least one sample")
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    for name in required:
        if columns[name].null_count:
            row = int(np.flatnonzero(columns[name].is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(
                f"{origin}: row {row}, column {name!r} is empty; every sample needs one"
            )
    for name, breaks, message in _VALUES:
        if name in columns:
            values = columns[name]
            values = values.cast(pa.string()) if pa.types.is_dictionary(values.type) else values
            refuse(breaks(values), values, name, origin, message)
    response = columns["response_tokens"]
    refuse(
        pc.greater(response, cap_tokens),
        response,
        "response_tokens",
        origin,
        f"it must be at most the cap of {cap_tokens} tokens",
    )
    if "response_ids" in columns:
        _validate_ids(columns["response_ids"], response, origin)
    _validate_turns(columns, origin)


def refuse(broken: Any, values: pa.Array, name: str, origin: str, message: str) -> None:
    """Raise `InputError` for the first row where `broken` holds, an array of Arrow or numpy."""
    if isinstance(broken, pa.Array):
        broken = broken.fill_null(False).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(broken)
    if len(rows):
        value = shown(values[int(rows[0])].as_py())
        more = f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""
        raise InputError(f"{origin}: row {rows[0]}, column {name!r} is {value}{more}; {message}")


def shown(value: object) -> str:
    """Return a value as a message shows it, shortened."""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def is_present(array: pa.Array) -> NDArray[np.bool_]:
    """Return where an array has a value."""
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False))


def list_sums(lists: pa.ListArray) -> NDArray[np.float64]:
    """Return the sum of each row's list, exact for whole numbers; 0 for an empty row."""
    parents, flat = pc.list_parent_indices(lists).to_numpy(), lists.flatten().to_numpy()
    return np.bincount(parents, weights=flat, minlength=len(lists)).astype(np.float64)


def _validate_ids(ids: pa.ListArray, response: pa.Array, origin: str) -> None:
    differ = pc.not_equal(pc.list_value_length(ids), response)
    refuse(differ, response, "response_tokens", origin, "it must be the number of its response_ids")
    bad = pc.or_kleene(pc.is_null(ids.flatten()), pc.less(ids.flatten(), 0))
    if pc.any(bad).as_py():
        row = pc.list_parent_indices(ids)[pc.index(bad, True).as_py()].as_py()
        raise InputError(
            f"{origin}: row {row}, column 'response_ids' holds an empty or negative token id; ids count from 0"
        )


def _validate_turns(columns: dict[str, pa.Array], origin: str) -> None:
    names = [name for name in _TURNS if name in columns]
    if not names:
        return
    if "turn_tokens" not in names:
        raise InputError(
            f"{origin}: column {names[0]!r} without 'turn_tokens'; give the tokens of each turn, too"
        )
    turns = columns["turn_tokens"]
    for name in names:
        least, message = _TURNS[name]
        lists = columns[name]
        flat = lists.flatten()
        wrong = pc.is_null(flat)
        if least is not None:
            wrong = pc.or_kleene(pc.less(flat, least), pc.invert(pc.is_finite(flat))).fill_null(
                True
            )
        broken = np.zeros(len(lists), dtype=bool)
        broken[pc.list_parent_indices(lists).to_numpy()[wrong.to_numpy(zero_copy_only=False)]] = (
            True
        )
        refuse(broken, lists, name, origin, message)
        if name != "turn_tokens":
            misfit = pc.not_equal(
                pc.list_value_length(lists), pc.subtract(pc.list_value_length(turns), 1)
            )
            refuse(misfit, lists, name, origin, "it must have one value less than turn_tokens has")
            refuse(
                is_present(lists) & ~is_present(turns),
                lists,
                name,
                origin,
                "it must be empty where turn_tokens is",
            )
    unequal = is_present(turns) & (list_sums(turns) != columns["response_tokens"].to_numpy())
    refuse(unequal, turns, "turn_tokens", origin, "it must sum to the row's response_tokens")
    if {"environment_s", "turn_environment_s"} <= set(columns):
        parts, total = columns["turn_environment_s"], columns["environment_s"]
        equal = np.isclose(list_sums(parts), total.fill_null(0).to_numpy(), rtol=1e-3, atol=1e-3)
        unequal = is_present(parts) & is_present(total) & ~equal
        refuse(
            unequal, parts, "turn_environment_s", origin, "it must sum to the row's environment_s"
        )
