"""Expressions of a framework's table, and the arithmetic of a script, evaluated without running
code.

Invariant: the names of an expression are keys of settings. A value that is missing makes what is
computed from it missing, and so does an operation that has no value. No operation makes a value
that is much longer than the text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from math import ceil
from typing import Any

import simpleeval

_ARITHMETIC = re.compile(r"[\d\s+\-*/%()<>=!&|^?:.]{1,400}")


def find(regex: str, text: Any) -> str | None:
    """Return the first group of a table's regex in a value; None if it is not there."""
    match = re.search(regex, str(text)) if text is not None else None
    return match[1] if match else None


def _of_numbers(do: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operation that texts and lists, which it would repeat or format, do not have."""
    return lambda one, other: do(one, other) if isinstance(one + other, int | float) else None


_FUNCTIONS = {
    function.__name__: function for function in (min, max, int, round, ceil, len, str, find)
}
_OPERATORS = {sign: do for sign, do in simpleeval.DEFAULT_OPERATORS.items() if sign is not ast.Pow}
_OPERATORS |= {sign: _of_numbers(_OPERATORS[sign]) for sign in (ast.Mult, ast.Mod)}


def _plain_text(node: ast.FormattedValue, evaluator: Any) -> str:
    if node.format_spec is not None:
        raise ValueError("a format may ask for any width")
    return str(evaluator._eval(node.value))


def arithmetic(text: str) -> int | None:
    """Return the value of a shell's arithmetic on whole numbers; None for any other text."""
    python = re.sub(r"(?<!/)/(?!/)", "//", text).replace("&&", " and ").replace("||", " or ")
    value = evaluated(python.strip(), lambda _: None) if _ARITHMETIC.fullmatch(text) else None
    return value if value is None else int(value)


def evaluated(text: str, settings: Callable[[str], Any], otherwise: Any = None, **more: Any) -> Any:
    """Return the value of an expression, or `otherwise` if an operation has none. `settings`
    returns the value of a key; `more` are other functions."""
    evaluator = simpleeval.EvalWithCompoundTypes(_OPERATORS, {**_FUNCTIONS, **more})
    evaluator.nodes[ast.Name] = evaluator.nodes[ast.Attribute] = lambda node: settings(
        ast.unparse(node)
    )
    evaluator.nodes[ast.FormattedValue] = lambda node: _plain_text(node, evaluator)
    try:
        value = evaluator.eval(text)
    except Exception:  # of a user's text: simpleeval, ast and the operations raise a dozen kinds
        return otherwise
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def keys_of(text: str) -> frozenset[str]:
    """Return the keys in an expression."""
    nodes = list(ast.walk(ast.parse(text, mode="eval")))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    inner |= {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = (node for node in nodes if isinstance(node, ast.Name | ast.Attribute))
    return frozenset(ast.unparse(node) for node in names if id(node) not in inner)


@cache
def conditions(text: str) -> frozenset[str]:
    """Return the keys that an expression has in conditions alone."""
    tree = ast.parse(text, mode="eval")
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.IfExp)):
        node.test = ast.Constant(True)
    return keys_of(text) - keys_of(ast.unparse(tree))
