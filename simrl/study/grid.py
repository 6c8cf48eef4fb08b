"""The variations of a study: dimensions of alternatives, and the combinations that they span.

The one language of variation: lists, ranges, zips, samples, the file's `vary`, and the systems. An
alternative is set as a whole: one key, several keys that are zipped, or an entry of the file's
`vary`. A combination takes one alternative of each dimension. Invariant: a draw depends on (seed,
its number, the keys of the dimension), so that more samples add combinations and change none.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from simrl.errors import InputError, meant, refuse
from simrl.scenario.dotted import get
from simrl.scenario.load import (
    PARAMETER,
    ScenarioFile,
    Setting,
    given,
    override,
    require_parameter,
    with_parameters,
)
from simrl.scenario.model import Scenario
from simrl.scenario.yaml_text import split_at_commas
from simrl.systems.recipes import parameters_of

MOST_POINTS = 1_000_000
SYSTEMS = "systems"
Alternative = tuple[Setting, ...]
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_WHOLE = re.compile(r"[+-]?\d+")


class Numbers(Sequence[Alternative]):
    """The alternatives of a range of whole numbers: each is made when it is asked for."""

    def __init__(self, key: str, numbers: range, giver: str) -> None:
        self._key, self._numbers, self._giver = key, numbers, giver

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Numbers(self._key, self._numbers[place], self._giver)
        return (Setting(self._key, self._numbers[place], self._giver),)


class Listed(NamedTuple):
    """Alternatives that set equal or overlapping keys."""

    keys: tuple[str, ...]
    alternatives: Sequence[Alternative]

    def drawn(self, share: float) -> Alternative:
        """Return the alternative at a share in [0, 1) of the list."""
        return self.alternatives[int(share * len(self.alternatives))]


class Between(NamedTuple):
    """Every number from `low` to `high`: only for draws."""

    keys: tuple[str]
    low: float
    high: float
    text: str

    def drawn(self, share: float) -> Alternative:
        """Return the number at a share in [0, 1) of the way, to six digits."""
        value = float(f"{self.low + share * (self.high - self.low):.6g}")
        return (Setting(self.keys[0], value, f"{value} drawn from {self.text!r}"),)


Dimension = Listed | Between


class Varied(NamedTuple):
    """A scenario file with the keys that have one value set, and the dimensions of those with
    several; the systems always are a dimension."""

    file: ScenarioFile
    dimensions: list[Dimension]

    def combinations(self, sample: int | None, seed: int) -> Iterator[tuple[Setting, ...]]:
        """Yield the settings of each combination: all, the last dimension fastest, or `sample`
        random ones, drawn in each dimension on its own."""
        return map(
            _joined,
            self._grid() if sample is None else (self._draw(f"{seed} {i}") for i in range(sample)),
        )

    def _grid(self) -> Iterator[tuple[Alternative, ...]]:
        for dimension in self.dimensions:
            if isinstance(dimension, Between):
                raise InputError(
                    f"{dimension.text!r}: there is no end of numbers in between; list them, or draw some with --sample N"
                )
        listed = [
            dimension.alternatives for dimension in self.dimensions if isinstance(dimension, Listed)
        ]
        if (count := prod(map(len, listed))) > MOST_POINTS:
            raise InputError(
                f"{count:,} points are more than {MOST_POINTS:,}; draw some with --sample N"
            )
        return product(*listed)

    def _draw(self, name: str) -> tuple[Alternative, ...]:
        keyed = (
            (d, f"{name} {' '.join(d.keys)}".encode(errors="backslashreplace"))
            for d in self.dimensions
        )
        return tuple(dimension.drawn(random.Random(key).random()) for dimension, key in keyed)

    def settings(self, key: str) -> list[Setting]:
        """Return every setting of a key in the lists."""
        lists = [d.alternatives for d in self.dimensions if isinstance(d, Listed) and key in d.keys]
        settings = chain.from_iterable(chain.from_iterable(lists))
        return [setting for setting in settings if setting.key == key]

    def first(self) -> tuple[Setting, ...]:
        """Return the first combination."""
        return _joined(dimension.drawn(0.0) for dimension in self.dimensions)

    def require_parameters(self) -> None:
        """Raise `InputError` for a key such as `system.eta` that is a parameter of none of the
        systems."""
        names = dict.fromkeys(
            entry if isinstance(entry, str) else entry["name"]
            for _, entry, _ in self.settings(SYSTEMS)
        )
        for key in (key for dimension in self.dimensions for key in dimension.keys):
            if key.startswith(PARAMETER):
                require_parameter(key, names, parameters_of)


def _joined(alternatives: Iterable[Alternative]) -> Alternative:
    return tuple(chain.from_iterable(alternatives))


def vary(path: Path, texts: Sequence[str], zips: Sequence[str] = ()) -> Varied:
    """Return the variation by a scenario file and `key=a,b,c` together: the file's `vary` first,
    then the keys in their order, then the systems. `zips` are keys, separated by commas, whose
    values go together. Raise `InputError`."""
    return cross(lambda settings: ScenarioFile(path, settings), by_key(texts), zips)


def by_key(texts: Sequence[str]) -> dict[str, Dimension]:
    """Return the dimensions of several `key=a,b,c`, by key. Raise `InputError`."""
    dimensions: dict[str, Dimension] = {}
    for text in texts:
        dimension = _dimension(text)
        (key,) = dimension.keys
        if key in dimensions:
            raise InputError(
                f"{text!r}: {key} is given twice; give all of its values once, separated by commas"
            )
        dimensions[key] = dimension
    return dimensions


def cross(
    open_file: Callable[[Sequence[Setting]], ScenarioFile],
    dimensions: Mapping[str, Dimension],
    zips: Sequence[str] = (),
) -> Varied:
    """Return the variation of dimensions by their keys; a key with one value is set in the file
    that is opened."""
    fixed: list[Setting] = []
    swept: dict[str, Dimension] = {}
    for key, dimension in dimensions.items():
        if key == SYSTEMS and isinstance(dimension, Listed):
            systems = [
                entry
                for (setting,) in dimension.alternatives
                for entry in (setting.value if isinstance(setting.value, list) else [setting.value])
            ]  # a,b or [a,b]
            fixed.append(Setting(SYSTEMS, systems, dimension.alternatives[0][0].giver))
        elif (
            isinstance(dimension, Listed)
            and len(dimension.alternatives) == 1
            and not key.startswith(PARAMETER)
        ):
            fixed.append(dimension.alternatives[0][0])
        else:
            swept[key] = dimension
    file = open_file(fixed)
    swept[SYSTEMS] = Listed(
        (SYSTEMS,), [(Setting(SYSTEMS, entry, "systems"),) for entry in file.systems]
    )
    return Varied(file, [*_of_the_file(file, swept.values()), *_zipped(swept, zips)])


def listed(key: str, values: Any) -> Dimension:
    """Return the alternatives of a key: each entry of a list, or a single value. A text is read as
    on the command line, such as "1,2" or "0..8"."""
    if isinstance(values, str):
        return _dimension(f"{key}={values}")
    several = list(values) if isinstance(values, list | tuple | range) else [values]
    refuse((not several, f"{key}: no value; give one or several, such as {{{key!r}: [1, 2]}}"))
    return Listed((key,), [(given(key, value, f"{key}={value}"),) for value in several])


def _dimension(text: str) -> Dimension:
    """Return the dimension of `key=a,b,c`."""
    key, equals, written = text.partition("=")
    if not equals or not key:
        raise InputError(f"{text!r}: write key=value or key=a,b,c, such as cluster.gpus=64,128")
    parts = split_at_commas(written)
    if parts == [""]:
        raise InputError(
            f"{text!r}: no value; give one or several, such as {key}=a,b (null for none)"
        )
    if "" in parts:
        raise InputError(
            f"{text!r}: value {parts.index('') + 1} of {len(parts)} is empty; leave the comma out, or write null"
        )
    alternatives: list[Alternative] = []
    for part in parts:
        ends = _RANGE.fullmatch(part) if key != SYSTEMS else None
        if ends is None:
            alternatives.append((override(f"{key}={part}"),))
            continue
        low, high = float(ends[1]), float(ends[2])
        refuse((low > high, f"{text!r}: {part} goes down; write the smaller number first"))
        if not all(map(_WHOLE.fullmatch, ends.groups())):
            if len(parts) > 1:
                raise InputError(
                    f"{text!r}: {part} is no list of whole numbers; let it stand alone, with --sample N"
                )
            return Between((key,), low, high, text)
        if high - low >= MOST_POINTS:
            raise InputError(f"{text!r}: {part} has more than {MOST_POINTS:,} values; choose fewer")
        numbers = Numbers(key, range(int(ends[1]), int(ends[2]) + 1), f"override {text!r}")
        if len(parts) == 1:
            return Listed((key,), numbers)
        alternatives += numbers
    return Listed((key,), alternatives)


def _of_the_file(file: ScenarioFile, swept: Iterable[Dimension]) -> list[Listed]:
    """Return the file's `vary`, without the keys that the command line varies."""
    lists = (d.alternatives if isinstance(d, Listed) else [d.drawn(0.0)] for d in swept)
    # One number stands for all.
    alternatives = (numbers[:1] if isinstance(numbers, Numbers) else numbers for numbers in lists)
    distinct = [
        tuple(varied)
        for varied in file.variations_beside(_joined(chain.from_iterable(alternatives)))
    ]
    keys = dict.fromkeys(setting.key for setting in _joined(distinct))
    return [Listed(tuple(keys), distinct)] if keys else []


def _zipped(dimensions: dict[str, Dimension], zips: Sequence[str]) -> Iterable[Dimension]:
    """Return the dimensions; zipped ones are one, at the place of the first of them."""
    for text in zips:
        keys = split_at_commas(text)
        if len(keys) < 2:
            raise InputError(
                f"--zip {text}: give two keys or more, such as --zip cluster.gpus,cluster.tp"
            )
        members: list[Listed] = []
        for key in keys:
            member = dimensions.get(key)
            if not isinstance(member, Listed) or member in members:
                known = [key for key, value in dimensions.items() if isinstance(value, Listed)]
                raise InputError(
                    f"--zip {text}: {key} is no list to zip, or no longer{meant(key, known)}; there are {', '.join(known)}"
                )
            members.append(member)
        counts = [len(member.alternatives) for member in members]
        if len(set(counts)) > 1:
            has = ", ".join(f"{key} has {count}" for key, count in zip(keys, counts, strict=True))
            raise InputError(f"--zip {text}: {has}; give as many values of each")
        rows = zip(*(member.alternatives for member in members), strict=True)
        together = {"+".join(keys): Listed(tuple(keys), [_joined(row) for row in rows])}
        in_place = (together if key in keys else {key: value} for key, value in dimensions.items())
        dimensions = dict(chain.from_iterable(dimension.items() for dimension in in_place))
    return dimensions.values()


def resolved(file: ScenarioFile, settings: Sequence[Setting]) -> Scenario:
    """Return the scenario of a combination. A parameter of the systems (`system.eta`) goes to a
    system that has it; another system stays unchanged. Raise `InputError`."""
    (entry,) = [setting.value for setting in settings if setting.key == SYSTEMS]
    varied = [
        setting
        for setting in settings
        if setting.key != SYSTEMS and not setting.key.startswith(PARAMETER)
    ]
    return file.scenario(varied, with_parameters(entry, settings, parameters_of))


def value_of(scenario: Scenario, key: str) -> Any:
    """Return a scenario's value for a key, as plain data: `cluster.gpus`, `system.name`,
    `system.eta` (a default, too). None where it has none."""
    first, _, rest = key.partition(".")
    if first == "system" and rest != "name":
        default = parameters_of(scenario.system.name).get(rest)
        return scenario.system.parameters.get(
            rest, None if default is inspect.Parameter.empty else default
        )
    return get(scenario.model_dump(mode="json", include={first}), key)
