"""Expressions of a framework's table, and the arithmetic of a script, evaluated without running
code.

Invariant: the names of an expression are keys of settings; which of them were needed is noted. A
value that is missing makes what is computed from it missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from math import ceil
from typing import Any

import simpleeval

_ARITHMETIC = re.compile(r"[\d\s+\-*/%()<>=!&|^?:.]{1,400}")


def _find(regex: str, text: Any) -> str | None:
    match = re.search(regex, str(text)) if text is not None else None
    return match[1] if match else None


_FUNCTIONS = {
    **{function.__name__: function for function in (min, max, int, round, ceil, len, str)},
    "find": _find,
}


def arithmetic(text: str) -> int | None:
    """Return the value of a shell's arithmetic on whole numbers; None for any other text."""
    if not _ARITHMETIC.fullmatch(text) or "**" in text:
        return None
    python = re.sub(r"(?<!/)/(?!/)", "//", text).replace("&&", " and ").replace("||", " or ")
    try:
        return int(simpleeval.simple_eval(python))
    except Exception:  # of a text that is no arithmetic: simpleeval and ast raise a dozen kinds
        return None


def evaluated(text: str, settings: Callable[[str], Any]) -> Any:
    """Return the value of a table's expression; None if it is computed from a missing value.
    `settings` returns the value of a key."""
    evaluator = simpleeval.EvalWithCompoundTypes(functions=_FUNCTIONS)
    evaluator.nodes[ast.Name] = evaluator.nodes[ast.Attribute] = lambda node: settings(
        ast.unparse(node)
    )
    try:
        value = evaluator.eval(text)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, IndexError, KeyError):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def keys_of(text: str) -> set[str]:
    """Return the keys in an expression."""
    return {
        ast.unparse(node)
        for node in ast.walk(ast.parse(text, mode="eval"))
        if isinstance(node, ast.Name | ast.Attribute)
    }
