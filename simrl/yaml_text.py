"""YAML that somebody else may have written, looked at before it is loaded.

Invariant: what passes is as deep and as large as a person writes. Loaders build what they read by recursion, which in libyaml
ends in a crash and not in an error, and an alias of aliases of aliases is small as a text and has no end as data.
"""

from __future__ import annotations

import io
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

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def refuse_unbounded(text: str) -> None:
    """Raises `yaml.MarkedYAMLError` for YAML that is too deep, or too large with its aliases written out, and for what is none;
    `ValueError` for what is too long."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text):,} characters; {MOST_BYTES:,} are the most")
    sizes: dict[str, int] = {}  # by anchor: the values in it
    open_nodes: list[tuple[Any, int]] = []  # where it begins, values before it
    values = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            for begin, _ in open_nodes:
                if begin.anchor == event.anchor:
                    raise _at(begin, f"the alias *{event.anchor} stands in what it names; write it out")
            values += sizes.get(str(event.anchor), 0)
        elif isinstance(event, yaml.NodeEvent):
            if not isinstance(event, yaml.ScalarEvent):
                open_nodes.append((event, values))
            elif event.anchor:
                sizes[event.anchor] = 1
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            begin, before = open_nodes.pop()
            if begin.anchor:
                sizes[begin.anchor] = values - before
        if len(open_nodes) > MOST_LEVELS:
            raise _at(event, f"nested more than {MOST_LEVELS} levels deep; a handful will do")
        if values > MOST_VALUES:
            raise _at(event, f"more than {MOST_VALUES:,} values, aliases written out; a file has some hundreds")


def _at(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def read_yaml(path: Traversable, place: str, kind: str, keys: Iterable[str]) -> Any:
    """What a file holds, as OmegaConf has it, which refuses a key that is there twice. Raises `InputError` that names `place`,
    where in it, and what is right: `kind` ("a scenario") with its `keys`."""
    try:
        with path.open("rb") as file:
            text = file.read(4 * MOST_BYTES + 1).decode("utf-8")
        refuse_unbounded(text)
        return OmegaConf.load(io.StringIO(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise InputError(f"{place}: {where}: {error.problem or first_line(error)}; correct the YAML") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except RecursionError as error:
        raise InputError(f"{place}: nested too deeply; {kind} has a handful of levels") from error
    except AssertionError as error:  # OmegaConf's answer to a quoted number
        raise InputError(f"{place}: no keys; {kind} has {', '.join(keys)}") from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise InputError(f"{place}: cannot be read ({what}); name the YAML of {kind}") from error
