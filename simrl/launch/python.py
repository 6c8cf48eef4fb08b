"""The calls of a Python file with the values of their keywords, read as text.

Invariant: nothing is run. Assignments, attributes by their last name, f-strings, arithmetic, `if`
and `match` on known values are followed, function by function in the order of the file; a value
that only a run knows is its code as `$[…]`, and a condition on it is read as false.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simrl.errors import InputError, first_line
from simrl.launch.expression import evaluated

Calls = list[tuple[str, dict[str, Any]]]  # the last part of the name, and the keywords
MOST_NODES = 30_000
MOST_LONG = 20_000  # characters, bits or parts of a value


def calls_of(path: Path, text: str) -> Calls:
    """Return the calls of a Python file. Raise `InputError` for a text that is no Python."""
    calls: Calls = []
    try:
        tree = ast.parse(text)
        if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
            raise InputError(f"{path}: too long for a launch script; name one")
        _follow(tree.body, {}, calls)
    except (SyntaxError, ValueError, MemoryError) as error:
        raise InputError(
            f"{path}: no Python that can be read ({first_line(error)}); name a launch script"
        ) from error
    return calls


def _follow(statements: Iterable[ast.stmt], names: dict[str, Any], calls: Calls) -> None:
    for node in statements:
        match node:
            case ast.If():
                holds = _value(node.test, names)
                is_true = bool(holds) and not str(holds).startswith("$[")
                _follow(node.body if is_true else node.orelse, names, calls)
            case ast.Match():
                subject = _value(node.subject, names)
                cases = (case for case in node.cases if _matches(case.pattern, subject, names))
                _follow(next((case.body for case in cases), []), names, calls)
            case ast.FunctionDef() | ast.ClassDef() | ast.With() | ast.Try():
                _follow(node.body, names, calls)
            case _:
                _assign(node, names)
                for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
                    keywords = {
                        word.arg: _value(word.value, names) for word in call.keywords if word.arg
                    }
                    calls.append((_last(call.func), keywords))


def _assign(node: ast.stmt, names: dict[str, Any]) -> None:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
        name = _last(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        value = _value(node.value, names)
        adds = isinstance(node, ast.AugAssign) and isinstance(names.get(name), str)
        names[name] = f"{names[name]}{value}" if adds else value


def _last(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _matches(pattern: ast.pattern, value: Any, names: dict[str, Any]) -> bool:
    match pattern:
        case ast.MatchValue():
            return bool(_value(pattern.value, names) == value)
        case ast.MatchSequence() if isinstance(value, list | tuple) and len(value) == len(
            pattern.patterns
        ):
            return all(
                _matches(one, part, names)
                for one, part in zip(pattern.patterns, value, strict=True)
            )
        case ast.MatchOr():
            return any(_matches(one, value, names) for one in pattern.patterns)
    return isinstance(pattern, ast.MatchAs) and pattern.pattern is None


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an expression; its code as `$[…]` if only a run knows it."""
    if isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.FormattedValue) else one for one in node.values]
        return "".join(str(_value(part, names)) for part in parts)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        text = ast.unparse(node)[:400]
    kept = re.sub(r"\s", "\u00a0", f"$[{text}]")  # one word, wherever it is put
    value = evaluated(text, lambda key: _known(names[key.rpartition(".")[2]]), find=None)
    return kept if value is None else value


def _known(value: Any) -> Any:
    """Return a value. Raise ValueError for one that only a run knows, and one without end."""
    parts = value if isinstance(value, list | tuple) else ()
    nested = any(isinstance(part, list | tuple | dict) for part in parts)
    long = value.bit_length() if isinstance(value, int) else len(str(value)) if not nested else 0
    if nested or long > MOST_LONG or str(value).startswith("$["):
        raise ValueError
    return value
