"""What a sweep varies: dimensions of alternatives, and the combinations that they span.

An alternative is what is set together: one key, several that are zipped, or an entry of the file's `vary`. A combination takes
one alternative of each dimension. Invariant: what is drawn belongs to (seed, its number, the keys of the dimension), so that
more samples add combinations and change none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from simrl.errors import InputError, meant
from simrl.scenario import PARAMETER, ScenarioFile, Setting, given, override

MOST_POINTS = 1_000_000
SYSTEMS = "systems"
Alternative = tuple[Setting, ...]
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")


class Listed(NamedTuple):
    """Alternatives that set the same keys, or some of them."""

    keys: tuple[str, ...]
    alternatives: Sequence[Alternative]

    def drawn(self, share: float) -> Alternative:
        """The one at a share in [0, 1) of them."""
        return self.alternatives[int(share * len(self.alternatives))]


class Between(NamedTuple):
    """Every number from `low` to `high`: to draw from only."""

    keys: tuple[str]
    low: float
    high: float
    text: str

    def drawn(self, share: float) -> Alternative:
        """The number at a share in [0, 1) of the way, to six digits."""
        value = float(f"{self.low + share * (self.high - self.low):.6g}")
        return (Setting(self.keys[0], value, f"{value} drawn from {self.text!r}"),)


Dimension = Listed | Between


class Varied(NamedTuple):
    """A scenario file with what has one value set, and the dimensions of what has several; the systems are always one."""

    file: ScenarioFile
    dimensions: list[Dimension]

    def combinations(self, sample: int | None, seed: int) -> Iterator[tuple[Setting, ...]]:
        """The settings of each: all, the last dimension fastest, or `sample` that are drawn, each dimension on its own."""
        if sample is None:
            return self._grid()
        return self._drawn(sample, seed)

    def _grid(self) -> Iterator[tuple[Setting, ...]]:
        listed = [dimension for dimension in self.dimensions if isinstance(dimension, Listed)]
        for dimension in self.dimensions:
            if isinstance(dimension, Between):
                raise InputError(
                    f"{dimension.text!r}: there is no end of numbers in between; list them, or draw some with --sample N"
                )
        count = prod(len(dimension.alternatives) for dimension in listed)
        if count > MOST_POINTS:
            raise InputError(f"{count:,} points are more than {MOST_POINTS:,}; draw some with --sample N")
        for chosen in product(*(dimension.alternatives for dimension in listed)):
            yield tuple(setting for alternative in chosen for setting in alternative)

    def _drawn(self, sample: int, seed: int) -> Iterator[tuple[Setting, ...]]:
        for i in range(sample):
            chosen = [d.drawn(_share(f"{seed} {i} {' '.join(d.keys)}")) for d in self.dimensions]
            yield tuple(setting for alternative in chosen for setting in alternative)


def _share(drawn_for: str) -> float:
    """In [0, 1), from a text, which may hold half a character: a key that is none is refused as it is set."""
    return random.Random(drawn_for.encode("utf-8", "surrogatepass")).random()


def vary(path: Path, texts: Sequence[str], zips: Sequence[str] = ()) -> Varied:
    """What a scenario file and `key=a,b,c` say together: the file's `vary` first, then the keys in their order,
    then the systems. `zips` are keys, separated by commas, whose values go together. Raises `InputError`."""
    return cross(lambda settings: ScenarioFile(path, settings), by_key(texts), zips)


def by_key(texts: Sequence[str]) -> dict[str, Dimension]:
    """What `key=a,b,c` each say, by the key. Raises `InputError`."""
    dimensions: dict[str, Dimension] = {}
    for text in texts:
        dimension = _dimension(text)
        (key,) = dimension.keys
        if key in dimensions:
            raise InputError(f"{text!r}: {key} is given twice; give all of its values once, separated by commas")
        dimensions[key] = dimension
    return dimensions


def cross(
    open_file: Callable[[Sequence[Setting]], ScenarioFile],
    dimensions: Mapping[str, Dimension],
    zips: Sequence[str] = (),
) -> Varied:
    """The same for dimensions by their keys: what has one value is set in the file that is opened."""
    fixed: list[Setting] = []
    swept: dict[str, Dimension] = {}
    for key, dimension in dimensions.items():
        if key == SYSTEMS and isinstance(dimension, Listed):
            fixed.append(Setting(SYSTEMS, _flat(dimension), dimension.alternatives[0][0].giver))
        elif isinstance(dimension, Listed) and len(dimension.alternatives) == 1 and not key.startswith(PARAMETER):
            fixed.append(dimension.alternatives[0][0])
        else:
            swept[key] = dimension
    file = open_file(fixed)
    swept[SYSTEMS] = Listed((SYSTEMS,), [(Setting(SYSTEMS, entry, "systems"),) for entry in file.systems])
    return Varied(file, [*_of_the_file(file, swept), *_zipped(swept, zips)])


def listed(key: str, values: Any) -> Dimension:
    """The alternatives of a key: each of a list, or a single value. A text is read as on the command line: "1,2", "0..8"."""
    if isinstance(values, str):
        return _dimension(f"{key}={values}")
    several = list(values) if isinstance(values, list | tuple | range) else [values]
    if not several:
        raise InputError(f"{key}: no value; give one or several, such as {{{key!r}: [1, 2]}}")
    return Listed((key,), [(given(key, value, f"{key}={value}"),) for value in several])


def _dimension(text: str) -> Dimension:
    """What `key=a,b,c` says."""
    key, equals, written = text.partition("=")
    if not equals or not key:
        raise InputError(f"{text!r}: write key=value or key=a,b,c, such as cluster.gpus=64,128")
    parts = _split(written)
    if parts == [""]:
        raise InputError(f"{text!r}: no value; give one or several, such as {key}=a,b (null for none)")
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
        if low > high:
            raise InputError(f"{text!r}: {part} goes down; write the smaller number first")
        if not re.fullmatch(r"[+-]?\d+", ends[1]) or not re.fullmatch(r"[+-]?\d+", ends[2]):
            if len(parts) > 1:
                raise InputError(f"{text!r}: {part} is no list of whole numbers; let it stand alone, with --sample N")
            return Between((key,), low, high, text)
        if int(ends[2]) - int(ends[1]) >= MOST_POINTS:
            raise InputError(f"{text!r}: {part} has more than {MOST_POINTS:,} values; choose fewer")
        numbers = range(int(ends[1]), int(ends[2]) + 1)
        alternatives += [(Setting(key, number, f"override {text!r}"),) for number in numbers]
    return Listed((key,), alternatives)


def _split(text: str) -> list[str]:
    """At the commas that stand in no brackets and no quotes."""
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


def _flat(dimension: Listed) -> list[object]:
    """The systems of `a,b`, and of `[a,b]`, as `compare` takes them."""
    values = [setting.value for (setting,) in dimension.alternatives]
    return [entry for value in values for entry in (value if isinstance(value, list) else [value])]


def _of_the_file(file: ScenarioFile, swept: dict[str, Dimension]) -> list[Listed]:
    """The file's `vary`, without what the command line varies."""
    settings = (
        setting
        for dimension in swept.values()
        for alternative in (dimension.alternatives if isinstance(dimension, Listed) else [dimension.drawn(0.0)])
        for setting in alternative
    )
    distinct = [tuple(varied) for varied in file.variations_beside(settings)]
    keys = dict.fromkeys(setting.key for alternative in distinct for setting in alternative)
    return [Listed(tuple(keys), distinct)] if keys else []


def _zipped(swept: dict[str, Dimension], zips: Sequence[str]) -> list[Dimension]:
    """The dimensions, those that are zipped as one, at the place of the first of them."""
    dimensions = dict(swept)
    for text in zips:
        keys = _split(text)
        if len(keys) < 2:
            raise InputError(f"--zip {text}: give two keys or more, such as --zip cluster.gpus,cluster.tp")
        members: list[Listed] = []
        for key in keys:
            found = dimensions.get(key)
            if not isinstance(found, Listed) or found in members:
                known = [key for key, value in dimensions.items() if isinstance(value, Listed)]
                raise InputError(
                    f"--zip {text}: {key} is no list to zip, or no longer{meant(key, known)}; there are {', '.join(known)}"
                )
            members.append(found)
        counts = [len(member.alternatives) for member in members]
        if len(set(counts)) > 1:
            said = ", ".join(f"{key} has {count}" for key, count in zip(keys, counts, strict=True))
            raise InputError(f"--zip {text}: {said}; give as many values of each")
        rows = zip(*(member.alternatives for member in members), strict=True)
        together = [tuple(setting for alternative in row for setting in alternative) for row in rows]
        zipped = Listed(tuple(keys), together)
        first = next(key for key in dimensions if key in keys)
        dimensions = {key: zipped if key == first else value for key, value in dimensions.items()}
        dimensions = {key: value for key, value in dimensions.items() if key == first or key not in keys}
        dimensions = {"+".join(keys) if key == first else key: value for key, value in dimensions.items()}
    return list(dimensions.values())
