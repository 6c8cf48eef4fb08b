"""YAML from any author, checked before it is loaded, and `key=value` overrides with YAML values.

Invariant: a loaded text is as deep and as large as a person writes. Loaders build objects by
recursion, which in libyaml ends in a crash and not in an error, and aliases of aliases make a small
text a huge object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from importlib.resources.abc import Traversable
from typing import Any

import yaml

from simrl.errors import InputError, first_line, refuse
from simrl.scenario.dotted import MOST_LEVELS, MOST_REFERENCES, wrong_reference

MOST_BYTES = 1_000_000
MOST_VALUES = 10_000  # with every alias written out
MOST_DIGITS = 100  # of a whole number; the largest field takes 19

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the second without libyaml
_TAG = "tag:yaml.org,2002:"
# Scalars of the core schema of YAML 1.2, and the merge key of 1.1: how they are written, and the
# first characters.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}


class _RefusedError(yaml.MarkedYAMLError):
    """A rule of this module that a text breaks. The problem ends with the remedy."""


class _Loader(_SafeLoader):  # type: ignore[misc]
    """A loader of YAML with the scalars of YAML 1.2: `017` is 17; `1:30:00`, `on` and `yes` are
    texts. (A field that is a switch takes on and yes for true.)"""

    yaml_implicit_resolvers: dict[str, Any] = {}
    yaml_constructors = {
        tag: construct
        for tag, construct in _SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("str", "seq", "map")
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping. Its own keys win over the keys that `<<` merges, and of several merged
        mappings the first. Raise `yaml.MarkedYAMLError` for a key that is written twice, null, a
        list or a mapping, and for no mapping."""
        if not isinstance(node, yaml.MappingNode):
            raise _at(node, "keys are needed here; write {key: value}")
        written: dict[Any, Any] = {}
        merged: dict[Any, Any] | None = None
        for key_node, value in node.value:
            merges = key_node.tag == f"{_TAG}merge"
            key = self.construct_object(key_node, deep=True)
            if key is None or not isinstance(key, Hashable):
                shown = "null" if key is None else repr(key)
                raise _at(key_node, f"a key is {shown}; write a text")
            if (merged is not None) if merges else key in written:
                raise _at(key_node, f"found duplicate key {key_node.value}; give it once")
            if merges:
                parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
                merged = {}
                for part in reversed(parts):
                    merged.update(self.construct_mapping(part, deep=True))
            else:
                written[key] = self.construct_object(value, deep)
        return {**(merged or {}), **written}


def _whole_number(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2])
    return int(text) if base is None else int(text[2:], base)


def _number(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _constructor(tag: str, written: re.Pattern[str], value: Callable[[str], Any]) -> Any:
    """Return a constructor of scalars with a tag, which an author may have written before any
    text."""

    def construct(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        if not written.match(text):
            raise _at(node, f"{text!r} is no {tag} of YAML 1.2; correct it, or leave out !!{tag}")
        if tag == "int" and len(text) > MOST_DIGITS:
            raise _at(
                node,
                f"a whole number of {len(text):,} digits; {MOST_DIGITS} are the most, lower it",
            )
        return value(text)

    return construct


_VALUES: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": _whole_number,
    "float": _number,
    "merge": str,  # `<<` as a value
}
for _tag, (_written, _first) in _SCALARS.items():
    _pattern = re.compile(rf"(?:{_written})\Z")
    _Loader.add_implicit_resolver(_TAG + _tag, _pattern, list(_first) + [""] * (_tag == "null"))
    _Loader.add_constructor(_TAG + _tag, _constructor(_tag, _pattern, _VALUES[_tag]))


def parse_override(text: str) -> tuple[str, Any]:
    """Return key and value; `${…}` in the value stays as it is. Raise `InputError` for a text
    without key, or no YAML."""
    key, equals, written = text.partition("=")
    refuse((not equals or not key, f"override {text!r}: write key=value, such as steps=20"))
    try:
        return key, yaml.load(_bounded(written), _Loader)
    except _RefusedError as error:
        raise InputError(f"override {text!r}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        raise InputError(
            f"override {text!r}: the value is not YAML ({problem or first_line(error)}); quote it, or close its brackets"
            + f"; several values of {key} are vary=[{{{key}: null}},{{{key}: {{…}}}}]"
            * ("}," in written or ",{" in written)
        ) from error


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        begins = parts[-1].rstrip()[-1:] in ("", "[", "{", ",", ":")
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and begins:  # elsewhere it is an apostrophe
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def read_yaml(
    path: Traversable, place: str, kind: str, keys: Iterable[str], *, references: bool = True
) -> dict[Any, Any]:
    """Return a file's data. Raise `InputError` with `place`, line and column, and the remedy, such
    as the `keys` of `kind` ("a scenario"). Without `references`, `${…}` is text of any form."""
    try:
        with path.open("rb") as file:
            text = file.read(4 * MOST_BYTES + 1).decode("utf-8")
        data = yaml.load(_bounded(text, references=references), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        remedy = "" if isinstance(error, _RefusedError) else "; correct the YAML"
        raise InputError(f"{place}: {where}{error.problem or first_line(error)}{remedy}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        )
        raise InputError(f"{place}: cannot be read ({reason}); name the YAML of {kind}") from error
    if not isinstance(data, dict) or not data:
        raise InputError(f"{place}: no keys; {kind} has {', '.join(keys)}")
    return data


def _bounded(text: str, *, references: bool = True) -> str:
    """Return the text. Raise `yaml.MarkedYAMLError` for a text that is too long, too deep, or too
    large with its aliases written out, for a reference to more than a key (`${oc.env:HOME}`), and
    for no YAML."""
    refuse(
        (len(text) > MOST_BYTES, f"{len(text):,} characters; {MOST_BYTES:,} are the most"),
        (
            (count := text.count("${") * references) > MOST_REFERENCES,
            f"{count:,} references, ${{…}}; {MOST_REFERENCES} are the most",
        ),
        error=lambda words: _RefusedError(problem=words),
    )
    sizes: dict[str | None, int] = {}  # by anchor: the values in it
    open_nodes: list[tuple[Any, int]] = []  # the beginning, the number of values before it
    values = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            for begin, _ in open_nodes:
                if begin.anchor == event.anchor:
                    raise _at(
                        begin,
                        f"the alias *{event.anchor} is inside the value that it names; write it out",
                    )
            values += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            if references and (wrong := wrong_reference(event.value)):
                raise _at(event, wrong)
            values += 1
            sizes[event.anchor] = 1
        elif isinstance(event, yaml.NodeEvent):
            open_nodes.append((event, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            begin, before = open_nodes.pop()
            sizes[begin.anchor] = values - before
        if len(open_nodes) > MOST_LEVELS:
            raise _at(event, f"nested more than {MOST_LEVELS} levels deep; a handful will do")
        if values > MOST_VALUES:
            raise _at(
                event,
                f"more than {MOST_VALUES:,} values, aliases written out; a file has some hundreds",
            )
    return text


def _at(node: Any, problem: str) -> _RefusedError:
    return _RefusedError(problem=problem, problem_mark=node.start_mark)
