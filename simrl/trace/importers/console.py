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

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from simrl.trace.importers import rows
from simrl.trace.importers.exports import STEPS, Logged

OPENED = {"encoding": "utf-8", "errors": "replace"}  # other processes write into a console, too
NUMBER = r"[-+]?(?:(?:\d+(?:\.\d+|\.(?=\)))?|\.\d+)(?:e[-+]?\d+)?|inf|nan)"
WIDTH = 4096  # wandb's output.log cuts a line here, even in the middle of a number
MOST_CHARACTERS = 1_000_000  # of a record
MOST_FOREIGN = 8  # lines of other processes between two pieces of a wrapped line
UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0}

COLOUR = re.compile(r"\x1b\][^\x07]{0,500}\x07|\x1b\[[0-9;?]{0,12}[A-Za-z]|\[[0-9;]{1,8}m")
RAY = re.compile(r"\s*\([^()]{1,80}\bpid=\d+[^()]{0,60}\) ?")
REPEATED = re.compile(r"\s*\[repeated \d+x across [^\]]{1,20}\].*")
SOURCE_FILE = re.compile(r"\s{2,60}[\w/.-]{1,60}\.py:\d{1,6}\s*$")  # the last column of rich
LOGGER = re.compile(r"\s*\[?(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|(?:INFO|WARNING|ERROR|DEBUG)\b)")
PART_OF_A_NUMBER = re.compile(r"[-+.\de]+", re.IGNORECASE)
BORDERS = "│┃├╞└╘"


class Form(NamedTuple):
    """The form of a record. `separator` stands between its entries, `part` is the beginning of one,
    and `entry` a whole one, whose groups are its name and its number. Without `separator` it is a
    block, whose lines are joined by `glue`."""

    separator: str
    entry: re.Pattern[str]
    part: re.Pattern[str] = re.compile("")
    glue: str = "\n"


def _form(separator: str, entry: str, part: str = "", glue: str = "\n") -> Form:
    flags = re.IGNORECASE | re.MULTILINE
    whole = re.compile(entry.replace("NUMBER", NUMBER), flags)
    return Form(separator, whole, re.compile(part, flags), glue)


PART = r"(?::\s*(?:np\.\w*\(?)?[-+.\de]*\)?)?"
FORMS = {
    # key:value - key:value
    "entries": _form(
        " - ",
        r"\s*([^\s:][^:]*):\s*(?:np\.\w+\()?(NUMBER|true|false|none)\)?\s*",
        rf"\s*[^\s:]*{PART}",
    ),
    # Name: value unit | Name value unit; a duration without a name is the time of the step
    "named": _form(
        " | ",
        r"\s*(?:([a-z][^|:\d]*?):?\s+)?((?:\d+[dhm] ?)+(?:\d+(?:\.\d+)?)?|NUMBER)\s*(?:%|s|[a-z]+/[a-z]+)?\s*",
        rf"[^:]*{PART}",
    ),
    # a dictionary of Python or JSON
    "dictionary": _form(
        ",",
        r"[\s{]*(?:['\"]\w+['\"]\s*:\s*\{\s*)?['\"]([^'\"]+)['\"]\s*:\s*(?:[a-z][\w.]*\()?(NUMBER)\)?[\s}]*",
    ),
    "bullets": _form("", r"•\s*([^:•\n]{1,80}?)\s*:\s*(NUMBER)\s*(?:s|ms|%)?(?=\s|$)"),
    "table": _form("", r"[│┃|]\s*([^│┃|]{1,120}?)\s*[│┃|]\s*(NUMBER)\s*(?=[│┃|])", glue=""),
    "lines": _form("", r"(?:^|\s)([a-z_][\w./@-]{0,120})\s*[:=\s]\s*(NUMBER)\s*$"),
}
Found = tuple[str, float | None, str]  # the place of a record, its step, and its text


def records(
    path: Path, form: str, step: str, begins: str, counted: str, notes: list[str]
) -> Iterator[Logged]:
    """Yield the place and the numbers of each record of a console; `notes` get what is left out.

    `step` is the pattern of the text that names the step, its first group; a second one is an
    epoch, in which steps begin anew. `begins` is in each line with that text. Without `step` each
    dictionary with the tag `counted` is a step, from 1.
    """
    shape = FORMS[form]
    read = _entries if shape.separator else _blocks
    count = 0
    for place, number, text in read(path, shape, re.compile(step or r"(?=\{\s*['\"])"), begins):
        if len(text) > MOST_CHARACTERS:
            notes.append(f"{place}: more than {MOST_CHARACTERS:,} characters in one step (left out)")
            continue
        values = _numbers(text, shape)
        if number is None and counted in values and not values.keys() & {*STEPS}:
            count += 1
            number = float(count)
        if number is not None:
            yield place, {**values, STEPS[0]: number}
        elif counted in values or form == "lines":
            yield place, values


def _numbers(text: str, form: Form) -> dict[str, float]:
    """Return the numbers of a record by name, without names that it has with two values."""
    values: dict[str, float] = {}
    twice = set()
    entries = (
        filter(None, map(form.entry.fullmatch, text.split(form.separator)))
        if form.separator
        else form.entry.finditer(text)
    )
    for entry in entries:
        name, value = (entry[1] or "Time").strip(), _number(entry[2].lower())
        if value is not None and values.setdefault(name, value) != value and value == value:
            twice.add(name)
    return {name: value for name, value in values.items() if name not in twice}


def _number(text: str) -> float | None:
    """Return a number, or the seconds of a duration such as 1m 13s; None for true, false, none."""
    if text in ("true", "false", "none"):
        return None
    if text[-1:] in UNITS_S or " " in text or re.search(r"\d[dhm]", text):
        return sum(float(n) * UNITS_S[unit] for n, unit in re.findall(r"([\d.]+)([dhm]?)", text))
    return float(text)


def _clean(raw: str) -> tuple[str, str]:
    """Return Ray's prefix of a line, and its text."""
    text = raw.rstrip("\n")
    if "\x1b" in text or "[0m" in text:
        text = COLOUR.sub("", text)
    prefix = RAY.match(text) if "pid=" in text else None
    text = text[prefix.end() :] if prefix else text
    text = REPEATED.sub("", text) if "[repeated " in text else text
    return prefix[0] if prefix else "", SOURCE_FILE.sub("", text) if ".py:" in text[-70:] else text


def _entries(path: Path, form: Form, start: re.Pattern[str], begins: str) -> Iterator[Found]:
    """Yield the records of entries, with the pieces of wrapped ones put together."""
    opened: Found | None = None
    source, length, foreign, whole = "", 0, 0, True
    widths: set[int] = set()  # of lines that went on in the next one

    def closed() -> Iterator[Found]:
        if opened is not None:
            place, number, text = opened
            if not whole or length in widths or (form.separator == "," and text.rstrip()[-1:] != "}"):
                text = text.rpartition(form.separator)[0]  # the last entry was cut
            yield place, number, text

    for place, raw in rows.numbered_lines(path, **OPENED):
        begun = begins in raw and (opened is None or start.groups > 0)
        if opened is None and not begun:
            continue
        prefix, text = _clean(raw)
        matches = list(start.finditer(text))[: None if start.groups else 1] if begun else []
        if matches:
            yield from closed()
            ends = [match.start() for match in matches[1:]] + [len(text)]
            for match, end in zip(matches, ends, strict=True):
                number = float(match[1]) if start.groups else None
                opened = (place, number, text[match.end() : end])
                source, length, foreign = prefix, 0, 0
                whole = end < len(text) or _is_whole(raw)
                if end < len(text):
                    yield from closed()
            length = len(raw)
        elif opened is not None:
            is_other = prefix not in ("", source) or LOGGER.match(text)
            joined = None if is_other else _joined(opened[2], text, form, length in widths)
            if joined is None:
                foreign += 1
            else:
                if form.separator == "," or opened[2] + text == joined:
                    widths.add(length)
                opened = (*opened[:2], joined)
                length, foreign, whole = len(raw), 0, _is_whole(raw)
        if opened is not None and (
            foreign > MOST_FOREIGN
            or len(opened[2]) > MOST_CHARACTERS
            or (form.separator == "," and opened[2].count("{") <= opened[2].count("}"))
        ):
            yield from closed()
            opened = None
    yield from closed()


def _is_whole(raw: str) -> bool:
    return raw.endswith("\n") and len(raw) != WIDTH + 1


def _joined(text: str, line: str, form: Form, is_full: bool) -> str | None:
    """Return a record's text with a line that continues it; None for a line that does not.

    Where the number before and a number alone on the line may be one or two, the first is spoilt
    unless the line before `is_full`, as long as others that went on.
    """
    if form.separator == ",":
        return text + (line.lstrip() if line.startswith("  ") else line)
    head, separator, tail = text.rpartition(form.separator)
    if PART_OF_A_NUMBER.fullmatch(line.strip()) and form.entry.fullmatch(tail) and not is_full:
        return f"{text}?"
    for glue, piece in (("", line), (" ", line.strip()), (form.separator, line.strip())):
        joint = (tail if glue == "" else tail.rstrip()) + glue + piece
        parts = joint.split(form.separator)
        good = [form.entry.fullmatch(part) is not None for part in parts]
        last = good.pop() or form.part.fullmatch(parts[-1]) is not None
        if (all(good[:1]) and last) if good else (last and piece.strip() and glue != " "):
            return head + separator + joint
    parts = line.split(form.separator)
    good = [form.entry.fullmatch(part) is not None for part in parts]
    return text + line if sum(good) > len(good) / 2 else None


def _blocks(path: Path, form: Form, start: re.Pattern[str], begins: str) -> Iterator[Found]:
    """Yield the lines with names and numbers below each header. Steps are counted on over epochs,
    each of which prints its own from 1."""
    place, before, epoch = "", 0.0, 0.0
    step: float | None = None
    lines: list[str] = []
    for here, raw in rows.numbered_lines(path, **OPENED):
        if begins in raw and (header := start.search(_clean(raw)[1])):
            if lines:
                yield place, step, form.glue.join(lines)
            lines = []
            if header[1] is not None:
                place, step = here, before + float(header[1]) if header[1] else None
            elif float(header[2]) > epoch:
                epoch, before = float(header[2]), step or 0.0
        elif place and (any(map(raw.__contains__, BORDERS)) if form.glue == "" else form.entry.search(raw)):
            lines.append(_clean(raw)[1])
    if lines:
        yield place, step, form.glue.join(lines)
