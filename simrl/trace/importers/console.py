"""The records of a console text: a step and its numbers by name, whatever else the text has.

Invariant: a number counts only if it is whole. It stands alone between its name and the end of its
entry, on one line or on the pieces of a wrapped one; a number with other text glued to it is left
out. Colours, Ray's prefixes and its "[repeated 7x across cluster]", progress bars, prefixes of
loggers and the lines of other processes never enter a record.

A record is of one of two kinds. *Entries* follow each other behind the text that names the step,
with a separator; a line that continues them is a piece of a wrapped one. A *block* is the lines
below a header that names the step, with one or more names and numbers each.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from simrl.trace.importers import rows
from simrl.trace.importers.exports import CARRIED, STEP, Logged

NUMBER = r"[-+]?(?:(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|\.(?=\)))?|\.\d+)(?:e[-+]?\d+)?|inf|nan)"
WIDTH = 4096  # wandb's output.log cuts a line here, even in the middle of a number
# of a record: characters, pieces of its line, and lines of other processes between two pieces
MOST_CHARACTERS, MOST_PIECES, MOST_FOREIGN = 1_000_000, 2000, 8
ALIKE = 6  # characters at the beginning of lines of one kind
UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "ms": 0.001, "": 1.0}

COLOUR = re.compile(r"\x1b\][^\x07]{0,500}\x07|\x1b\[[0-9;?]{0,12}[A-Za-z]|\[[0-9;]{1,8}m")
# what Kubernetes, Docker, torchrun, Slurm, the journal and Ray write before each line; the group is Ray's
BEFORE = re.compile(
    r"(?:\d{4}-\d\d-\d\dT[\d:.]{8,20}Z (?:std(?:out|err) [FP] )?|[\w.-]{1,60}-\d{1,4} +\| |\[(?:default|rank)\d+\]: ?"
    r"|\[pod/[^\]]{1,99}\] ?|\d{1,3}: (?!\{)|[A-Z][a-z]{2} [ \d]\d [\d:]{8} \S{1,60} \S{1,60}\[\d+\]: ){0,2}"
    r"(\s*\([^()]{1,80}\bpid=\d+[^()]{0,60}\) ?)?"
)
REPEATED = re.compile(r"\[repeated \d+x across [^\]]{1,20}\].*")
SOURCE_FILE = re.compile(r"\s{2,60}[\w/.-]{1,60}\.py:\d{1,6}\s*$")  # the last column of rich
LOGGER = re.compile(r"\s*\[?(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|(?:INFO|WARNING|ERROR|DEBUG)\b)")
ANEW = re.compile(rf"\s*(?:$|\{{)|step:\d+ - |{LOGGER.pattern}")  # no piece of the line before
PIECE = re.compile(r"[-+.\d]|.*[│─]")  # of a number, or of a box
PART_OF_A_NUMBER = re.compile(r"[-+.\de]+", re.IGNORECASE)
PART = r"(?::\s*(?:np\.\w*\(?)?[-+.\de]*\)?)?"
BEGUN = re.compile(rf"\s*[│┃├╒╞└╘╭╰]|{ANEW.pattern}")  # or of a box of lines


class Form(NamedTuple):
    """The form of a record: what separates its entries, or joins the lines of a block; a whole
    entry, whose groups are its name and its number; and the beginning of an entry."""

    separator: str
    entry: re.Pattern[str]
    part: re.Pattern[str]


FORMS = {
    name: Form(
        separator,
        re.compile(entry.replace("NUMBER", NUMBER), re.IGNORECASE | re.MULTILINE),
        re.compile(part, re.IGNORECASE),
    )
    for name, separator, entry, part in (
        (  # key:value - key:value
            "entries",
            " - ",
            r"\s*([^\s:][^:]*):\s*(?:np\.\w+\((?=\S+\)))?(NUMBER)\)?\s*",
            rf"\s*[^\s:]*{PART}",
        ),
        (  # Name: value unit | Name value unit; a duration without a name is the time of the step
            "named",
            " | ",
            r"\s*(?:([a-z][^|:\d]{0,80}?):?\s{1,80})?(NUMBER ?ms|(?:\d+(?-i:[dhm]) ?)+(?:\d+(?:\.\d+)?)?|NUMBER)"
            r"\s*(?:s|s/[a-z]+|(?:token|sample)s?/[a-z]+)?\s*",
            rf"[^:]*{PART}",
        ),
        (  # a dictionary of Python or JSON
            "dictionary",
            ",",
            r"(?:\d{1,3}: )?[\s{]*(?:['\"]\w+['\"]\s*:\s*\{\s*)?['\"]([^'\"]+)['\"]\s*:\s*"
            r"(?:[a-z][\w.]*\((?=\S+\))|'(?=\S+')|\"(?=\S+\"))?(NUMBER)['\")]?[\s}]*",
            "",
        ),
        (  # name=value, … behind a progress bar, as tqdm's
            "pairs",
            ", ",
            r"(?:.{0,40}/s\S*,? )?([\w./]+)=(?:tensor\()?(NUMBER)\)?\s*\]?\s*",
            r"[\w./]*(?:=(?:tensor\()?[-+.\de]*)?",
        ),
        (
            "panel",
            " ",
            r"(\w[\w/]{0,80}):[\s│]{1,200}(NUMBER)\s*(?=[|│]|$)",
            "",
        ),  # name: value | … in a box
        (
            "bullets",
            "\n",
            r"•\s{0,80}([^:•\n]{1,80}?)\s{0,80}:\s{0,80}(NUMBER ?ms|NUMBER)(?: ?s|[ \t]+tokens)?"
            r"(?=[ \t]*(?:[(|│]|$))(?!\s*\n\s*[\d.])",
            "",
        ),
        (
            "table",
            "",
            r"[│┃|]\s{0,80}([^│┃|\s][^│┃|]{0,120}?)\s{0,80}[│┃|]\s{0,80}(NUMBER)\s*(?=[│┃|])",
            "",
        ),
        (
            "lines",
            "\n",
            r"(?:^|\s)([a-z_][\w./@-]{0,120})\s{0,80}[:=\s]\s{0,80}(NUMBER ?ms|NUMBER)\s*$",
            "",
        ),
    )
}
Found = tuple[int, float | None, str, bool]  # the line of a record, its step, its text; is it whole


def records(path: Path, form: str, step: str, begins: str, counted: str) -> Iterator[Logged]:
    """Yield the place and the numbers of each record of a console.

    `step` is the pattern of the text that names the step, its first group; a second one is an
    epoch, in which steps begin anew. `begins` is in each line with that text. Where the text names
    none, each record with the tag `counted` is a step, from 1.
    """
    shape, count = FORMS[form], 0
    read = _entries if shape.separator.strip() else _blocks
    for place, number, text, whole in read(
        path, shape, re.compile(step or r"(?=\{\s*['\"])"), begins
    ):
        values = _numbers(text, shape, whole) if len(text) <= MOST_CHARACTERS else {}
        if (
            form == "named" and {"Time", "Loss"} <= values.keys()
        ):  # of a trainer beside its orchestrator
            values["trainer Time"] = values.pop("Time")
        if number is None and counted in values:
            number = count = count + 1
        yield f"{path}: line {place}", values | ({} if number is None else {STEP: number})


def _numbers(text: str, form: Form, whole: bool) -> dict[str, float]:
    """Return the numbers of a record by name, without names that it has with two values, and
    without its last entry if it is not whole."""
    by_name: dict[str, set[float]] = {}
    entries: Iterable[re.Match[str] | None] = form.entry.finditer(text)
    if form.separator.strip():
        commas = re.split(r",(?!\d)", text)  # one between digits is part of a number
        parts = commas if form.separator == "," else text.split(form.separator)
        cut = not whole or (form.separator == "," and text.rstrip()[-1:] != "}")
        entries = map(form.entry.fullmatch, parts[:-1] if cut else parts)
    for entry in filter(None, entries):
        by_name.setdefault((entry[1] or "Time").strip(), set()).add(_number(entry[2]))
    return {name: value for name, (value, *others) in by_name.items() if not others}


def _number(text: str) -> float:
    """Return a number, or the seconds of a duration such as 1m 13s."""
    text = text.replace(",", "").replace(" ms", "ms")
    units = re.findall(r"([\d.]+)(ms|[dhm]?)", text) if re.search(r"\d[dhm]", text) else []
    return sum(float(n) * UNITS_S[unit] for n, unit in units) if units else float(text)


def _clean(raw: str) -> tuple[str, str]:
    """Return Ray's prefix of a line, and its text."""
    text = raw.rstrip("\n")
    text = COLOUR.sub("", text) if "\x1b" in text or "[0m" in text else text
    before = BEFORE.match(text)
    assert before is not None  # it may be empty
    text = REPEATED.sub("", text[before.end() :])
    return before[1] or "", SOURCE_FILE.sub("", text) if ".py:" in text[-70:] else text


def _raw_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file; where each is an object of JSON, as of Docker, the text in it."""
    with path.open(encoding=rows.encoding(path), errors="replace") as lines:  # others write, too
        for number, raw in enumerate(lines, start=1):
            if raw == "\n":
                continue
            line = raw[:MOST_CHARACTERS]  # the rest is cut, with the last entry
            carried = CARRIED.match(line) if line.startswith("{") and "}" in line[-4:] else None
            yield number, f"{json.loads(carried[1], strict=False).rstrip()}\n" if carried else line


@lru_cache(maxsize=8)
def _width(path: Path, changed_ns: int) -> int:
    """Return the width at which all long lines of a file are wrapped; 0 if they are not: many are
    as long as the longest, more than a little shorter ones, and the next ones seldom begin anew."""
    lengths, before = Counter[int](), ""
    widest = length = anew = 0
    for _, raw in _raw_lines(path):
        if length == widest > 0:
            text = _clean(raw)[1]
            anew += BEGUN.match(text) is not None or text[:ALIKE] == _clean(before)[1][:ALIKE]
        before = raw
        length = len(COLOUR.sub("", raw) if "\x1b" in raw else raw)
        lengths[length] += 1
        widest, anew = (length, 0) if length > widest else (widest, anew)
    shorter = sum(lengths[length] for length in range(widest - 10, widest))
    return widest if lengths[widest] > max(1, shorter, 4 * anew) else 0


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the place and the text of each line of a file, put together where all are wrapped."""
    lines = _raw_lines(path)
    if not (width := _width(path, path.stat().st_mtime_ns)):
        yield from lines
        return
    pieces, first, before = list[str](), 0, ""
    for place, raw in lines:
        prefix, text = _clean(raw)
        if pieces and (prefix not in ("", before) or ANEW.match(text)):
            yield first, "".join(pieces)  # cut: its last piece is as long as others that go on
            pieces = []
        first, before = (first, before) if pieces else (place, prefix)
        pieces.append(text if pieces else raw.rstrip("\n"))
        if len(pieces) > MOST_PIECES or width not in (len(raw), len(COLOUR.sub("", raw))):
            yield first, "".join(pieces) + raw[len(raw.rstrip("\n")) :]
            pieces = []
    if pieces:
        yield first, "".join(pieces)


def _entries(path: Path, form: Form, start: re.Pattern[str], begins: str) -> Iterator[Found]:
    """Yield the records of entries, with the pieces of wrapped ones put together."""
    opened: Found | None = None
    source, foreign, before, pieces = "", 0, "", 0
    for place, raw in _lines(path):
        line_before, before, pieces = before, raw, pieces + 1
        if not opened and begins not in raw:
            continue
        prefix, text = _clean(raw)
        begun = begins in raw and (not opened or start.groups > 0 or text.startswith("{"))
        is_whole = raw.endswith("\n") and len(raw) != WIDTH + 1
        matches = list(start.finditer(text))[: None if start.groups else 1] if begun else []
        if begun and not matches:  # the step may be named on two lines
            tail = _clean(line_before)[1][-40:]
            for head, rest in ((tail, text), (f"{tail.rstrip()} ", text.lstrip())):
                again = [m for m in start.finditer(head + rest) if m.end() >= len(head)]
                matches, text = (again, head + rest) if again and start.groups else (matches, text)
        for match, end in zip_longest(matches, [match.start() for match in matches[1:]]):
            if opened:
                yield opened
            number, here = float(match[1]) if start.groups else None, text[match.end() : end]
            opened = (place, number, here, end is not None or is_whole)
            source, foreign, pieces = prefix, 0, 0
        if opened and not matches:
            is_other = prefix not in ("", source) or LOGGER.match(text)
            joined = None if is_other else _joined(opened[2], text, form)
            foreign = foreign + 1 if joined is None else 0
            opened = opened if joined is None else (*opened[:2], joined, is_whole)
        if opened and (
            foreign > MOST_FOREIGN
            or pieces > MOST_PIECES
            or len(opened[2]) > MOST_CHARACTERS
            or (
                "}" in raw
                and form.separator == ","
                and opened[2].count("{") <= opened[2].count("}") > 0
            )
        ):
            yield opened
            opened = None
    if opened:
        yield opened


def _joined(text: str, line: str, form: Form) -> str | None:
    """Return a record's text with a line that continues it; None for a line that does not. A number
    at the end is spoilt by a number alone on the line: they may be one number or two."""
    separator = form.separator
    if separator == ",":
        return text + (line.lstrip() if line.startswith("  ") else line)
    tail = text.rpartition(separator)[2]
    is_number, parts = PART_OF_A_NUMBER.match(line.strip()), line.split(separator)
    if is_number and is_number.end() == len(line.strip()) and form.entry.fullmatch(tail):
        return f"{text}?"
    line = f"{line.rstrip()} " if line.rstrip().endswith(separator.rstrip()) else line
    for glue, piece in (("", line), (" ", line.strip()), (separator, line.lstrip())):
        joint = (tail if glue == "" else tail.rstrip()) + glue + piece
        *whole, last = joint.split(separator)
        if (
            all(map(form.entry.fullmatch, whole[:2]))
            and (form.entry.fullmatch(last) or form.part.fullmatch(last))
            and (whole or glue == "")
        ):
            return text[: len(text) - len(tail)] + joint
    if sum(map(bool, map(form.entry.fullmatch, parts))) > len(parts) / 2:
        return text + line
    return f"{text}?" if is_number else None


def _blocks(path: Path, form: Form, start: re.Pattern[str], begins: str) -> Iterator[Found]:
    """Yield the lines with names and numbers below each header. Steps are counted on over epochs,
    each of which prints its own from 1."""
    place, before, epoch, lines = 0, 0.0, 0.0, list[str]()
    step: float | None = None
    for here, raw in _lines(path):
        if begins in raw and (header := start.search(_clean(raw)[1])):
            yield place, step, form.separator.join(lines), True
            lines = []
            if header[1] is not None:
                place, step = here, before + float(header[1]) if header[1] else None
            elif float(header[2]) > epoch:
                epoch, before = float(header[2]), step or 0.0
        elif place and raw.endswith("\n") and (form.entry.search(raw) or PIECE.match(raw)):
            lines.append(_clean(raw)[1])
    yield place, step, form.separator.join(lines), True
