"""YAML from any author, checked before it is loaded, and `key=value` overrides with YAML values.

Invariant: a loaded text is as deep and as large as a person writes. Loaders build what they read by recursion, which in
libyaml ends in a crash and not in an error, and aliases of aliases make a small text a huge object.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from simrl.errors import InputError, first_line

MOST_BYTES = 1_000_000
MOST_LEVELS = 50
MOST_VALUES = 10_000  # with every alias written out
MOST_REFERENCES = 500  # ${…}, which OmegaConf parses and writes out slowly

NO_REFERENCE = "${name:…} is no reference to a key of the file, such as ${cluster.gpus}; write the value"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_override(text: str) -> tuple[str, Any]:
    """Return key and value; `${…}` in the value stays as it is. Raise `InputError` for a text without key, or no YAML."""
    key, equals, written = text.partition("=")
    if not equals or not key:
        raise InputError(f"override {text!r}: write key=value, such as steps=20")
    try:
        _refuse_unbounded(written)
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={written}"]))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        raise InputError(
            f"override {text!r}: the value is not YAML ({problem or first_line(error)}); quote it, or close its brackets"
        ) from error
    assert isinstance(parsed, dict)
    return key, parsed["value"]


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        begins = parts[-1].rstrip()[-1:] in ("", "[", "{", ",", ":")
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and begins:  # elsewhere it is an apostrophe
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def read_yaml(path: Traversable, place: str, kind: str, keys: Iterable[str]) -> Any:
    """Return a file's data as OmegaConf has it, which refuses duplicate keys. Raise `InputError` naming `place`, where in it,
    and what is right: `kind` ("a scenario") with its `keys`."""
    try:
        with path.open("rb") as file:
            text = file.read(4 * MOST_BYTES + 1).decode("utf-8")
        _refuse_unbounded(text)
        return OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise InputError(f"{place}: {where}: {error.problem or first_line(error)}; correct the YAML") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except AssertionError as error:  # OmegaConf's answer to a quoted number
        raise InputError(f"{place}: no keys; {kind} has {', '.join(keys)}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"{place}: cannot be read ({what}); name the YAML of {kind}") from error


def _refuse_unbounded(text: str) -> None:
    """Raise `yaml.MarkedYAMLError` for YAML that is too deep, or too large with its aliases written out, for what would read
    more than the file (`${oc.env:HOME}`), and for no YAML; `ValueError` for a text that is too long."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text):,} characters; {MOST_BYTES:,} are the most")
    if (references := text.count("${")) > MOST_REFERENCES:
        raise ValueError(f"{references:,} references, ${{…}}; {MOST_REFERENCES} are the most")
    sizes: dict[str, int] = {}  # by anchor: the values in it
    open_nodes: list[tuple[Any, int]] = []  # where it begins, values before it
    values = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            for begin, _ in open_nodes:
                if begin.anchor == event.anchor:
                    raise _at(begin, f"the alias *{event.anchor} is inside the value that it names; write it out")
            values += sizes.get(str(event.anchor), 0)
        elif isinstance(event, yaml.NodeEvent):
            if not isinstance(event, yaml.ScalarEvent):
                open_nodes.append((event, values))
            elif event.anchor:
                sizes[event.anchor] = 1
            if isinstance(event, yaml.ScalarEvent) and _calls(event.value):
                raise _at(event, NO_REFERENCE)
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            begin, before = open_nodes.pop()
            if begin.anchor:
                sizes[begin.anchor] = values - before
        if len(open_nodes) > MOST_LEVELS:
            raise _at(event, f"nested more than {MOST_LEVELS} levels deep; a handful will do")
        if values > MOST_VALUES:
            raise _at(event, f"more than {MOST_VALUES:,} values, aliases written out; a file has some hundreds")


def require_no_call(value: Any, place: str) -> None:
    """Raise `InputError` for plain data that did not come as YAML and would read more than the file."""
    if _calls(repr(value)):
        raise InputError(f"{place}: {NO_REFERENCE}")


def _calls(text: str) -> bool:
    """Return whether a text has a colon in a reference, with which OmegaConf would call a function."""
    depth = 0
    for sign in re.findall(r"\$\{|[}:]", text):
        depth = max(depth + {"${": 1, "}": -1, ":": 0}[sign], 0)
        if sign == ":" and depth:
            return True
    return False


def _at(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
