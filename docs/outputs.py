"""Runs the commands of the pages, and compares what they print with what the pages show. Needs no GPU and no network.

python docs/outputs.py check [--nightly] [--jobs 2] [PAGE]...
python docs/outputs.py write [--nightly] [--jobs 2] [PAGE]...

`check` names each difference and ends with exit code 1 if there is one; `write` renews the outputs in the pages: read the diff.

- A fence without a language is an output: what the fence of commands (`sh`, `console` or `python`) just above it prints, or
  what the commands print that a comment just above it names, such as `<!-- simrl explain results/first -->`. A command that
  the page has run already is not run again for a comment.
- Fences marked `sh` and `python` are run, also where nothing is shown of what they print. Those marked `console` are run only
  for an output: they take longer, or need a GPU, vLLM or a reader's files. `text` is neither a command nor printed.
- A comment may begin with `nightly`: an output that takes more than `CI_S` seconds is compared with --nightly alone. Without
  it, a page is run as far as the last output that is compared; with it, all of the page. `COLUMNS=120` comes next, where 80
  are too few.
- `…` on a line of its own stands for lines that are left out; the lines between two of them are all there, in this order.
  Within a line it stands for any words; at its end for the rest of a wrapped paragraph. `write` keeps what is left out.
- Words must be equal. Numbers may differ by `RELATIVE` or by one unit of the last digit that either has, whichever is more:
  they are equal on one machine, and other compilers may round otherwise. Numbers within words (qwen3-8b, eta=4, 50:14) are
  words.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
FOLDERS = ("docs", "experiments", "profiles", "traces", "replay")
PAGES = ("README.md", "CONTRIBUTING.md", "traces/README.md", "profiles/README.md", *sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")
))  # fmt: skip
EXECUTED, COMMANDS, PRINTED = ("sh", "python"), ("sh", "console", "python"), ""
CI_S = 30.0
RELATIVE = 0.02
COLUMNS = 80
LEFT_OUT = "…"
WRAPPED = "\u034f"  # at the end of a line that rich broke; it takes no room

# Outputs that CI cannot make: the beginning of the command, why, and where and when it ran, as the page says.
ELSEWHERE = {
    "simrl replay experiments/replay_cpu.yaml": (
        "needs vLLM and a profile of the machine, and no two replays take equal times", "vLLM 0.32 in November 2026",
    ),
    "simrl replay my_scenario.yaml": (
        "needs vLLM and a cluster", "two and three Ray nodes on one machine",
    ),
    "simrl replay experiments/replay_agents.yaml": (
        "needs vLLM and a profile of the machine, and no two replays take equal times", "vLLM 0.32 in November 2026",
    ),
    "simrl replay experiments/train_cpu.yaml": (
        "needs vLLM, torch and a profile of the machine, and no two updates take equal times", "vLLM 0.32 in November 2026",
    ),
}  # fmt: skip


class Block(NamedTuple):
    """A fence of a page: its language and text, its first line, the comment above, where in the page its text is, and whether
    nothing but comments is between it and the fence before."""

    language: str
    text: str
    line: int
    comment: str
    place: tuple[int, int]
    follows: bool


class Output(NamedTuple):
    """A shown output: the block whose commands print it (None: `commands` do), whether it is compared only at night, its width,
    and what is wrong with it."""

    block: Block
    source: Block | None
    commands: Sequence[Sequence[str]]
    nightly: bool = False
    width: int = COLUMNS
    problem: str = ""

    @property
    def elsewhere(self) -> str:
        """Return the beginning of its command in `ELSEWHERE`, empty if CI can make it."""
        every = [shlex.join(words) for words in self.commands]
        return next(
            (start for start in ELSEWHERE for command in every if command.startswith(start)), ""
        )


class Timed(NamedTuple):
    """A command that ran: its line, its words, and the seconds of all cores that it took."""

    line: int
    command: str
    seconds: float


class Report(NamedTuple):
    """The report on a page: the number of outputs compared, by line what is stale in them and what else is wrong, the commands
    that ran, the page's text with renewed outputs and by line what has no place in these."""

    page: str
    compared: int
    stale: list[tuple[int, str]]
    problems: list[tuple[int, str]]
    lost: list[tuple[int, str]]
    ran: list[Timed]
    text: str


def blocks(text: str) -> list[Block]:
    """Return the fences of a page, in order."""
    every, end = [], 0
    for fence in re.finditer(r"^```([a-z]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        between = text[end : fence.start()]
        comment = re.search(r"^<!--((?:(?!-->).)*)-->\s*\Z", between, re.MULTILINE | re.DOTALL)
        follows = bool(every) and not re.sub(r"<!--.*?-->", "", between, flags=re.DOTALL).strip()
        line = text[: fence.start()].count("\n") + 1
        every.append(
            Block(
                fence[1],
                fence[2],
                line,
                comment[1].strip() if comment else "",
                fence.span(2),
                follows,
            )
        )
        end = fence.end()
    return every


def commands(text: str) -> list[list[str]]:
    """Return the words of each command; a backslash ends no command, and a # begins a comment."""
    every: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        every.append([])
        for word in shlex.split(line, comments=True):
            if word == "&&":
                every.append([])
            else:
                every[-1].append(word)
    return [words for words in every if words]


def outputs(text: str) -> list[Output]:
    """Return the outputs that a page shows, in order."""
    every: list[Output] = []
    before: Block | None = None
    for block in blocks(text):
        if block.language == PRINTED:
            every.append(_output(block, before if block.follows else None))
        elif block.language == "text" and (
            re.search("[─━]{3}", block.text) or _commands_above(block, before)
        ):
            every.append(
                Output(
                    block, None, (), problem="an output is not marked text: leave the language out"
                )
            )
        before = block
    return every


def _commands_above(block: Block, before: Block | None) -> bool:
    return block.follows and before is not None and before.language in COMMANDS


def _output(block: Block, before: Block | None) -> Output:
    parts = re.match(r"(nightly\b:?)?\s*(?:COLUMNS=(\d+)\b)?\s*(.*)", block.comment, re.DOTALL)
    assert parts is not None
    nightly, width = bool(parts[1]), int(parts[2] or COLUMNS)
    named = commands(parts[3])
    if named:
        wrong = next((words[0] for words in named if words[0] not in ("simrl", "python")), "")
        return Output(
            block, None, named, nightly, width, wrong and f"neither simrl nor python: {wrong}"
        )
    if before is None or before.language not in COMMANDS:
        return Output(
            block,
            None,
            (),
            nightly,
            width,
            "an output without a command; name it in a comment above",
        )
    run = [] if before.language == "python" else commands(before.text)
    wrong = (
        "nightly, but its commands are run in CI: mark them console"
        if nightly and before.language == "sh"
        else ""
    )
    return Output(block, before, run, nightly, width, wrong)


class Unit(NamedTuple):
    """A printed line, or the lines of a wrapped paragraph: the first, the one after the last, and the words."""

    first: int
    end: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def units(text: str, printed: Sequence[Unit] | None = None, width: int = COLUMNS) -> list[Unit]:
    """Return lines without empty ones, frames and the breaks of wrapped paragraphs. In what simrl printed, `WRAPPED` is at
    these; in what a page shows, a line goes on with the one above if its first word had no room there, and nothing `printed`
    begins with it."""
    every: list[Unit] = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        words = tuple(re.sub(f"[\u2500-\u257f{WRAPPED}]", " ", line).split())
        if not words and line.strip():
            words = ("─",)  # a rule
        above = lines[i - 1].rstrip() if i and every and every[-1].end == i else ""
        if printed is None:
            goes_on = above.endswith(WRAPPED)
        else:
            prose = LEFT_OUT not in (above, line) and not re.search(
                "[\u2500-\u257f]|\\S  ", f"{above}\n{line.rstrip()}"
            )
            full = len(above) + 1 + len(words[0] if words else "") > width
            goes_on = (
                prose
                and full
                and _masked(words[:2]) not in [_masked(unit.words[:2]) for unit in printed]
            )
        if words and goes_on:
            every[-1] = Unit(every[-1].first, i + 1, every[-1].words + words)
        elif words:
            every.append(Unit(i, i + 1, words))
    return every


NUMBER = re.compile(r"([^\w.+−-]*)([+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)(\D*)")


def _close(shown: str, printed: str) -> bool:
    """Return whether two words are equal, their numbers within the tolerance."""
    if shown == printed:
        return True
    a, b = NUMBER.fullmatch(shown), NUMBER.fullmatch(printed)
    if a is None or b is None or (a[1], a[3]) != (b[1], b[3]):
        return False
    values = [float(number.replace(",", "").replace("−", "-")) for number in (a[2], b[2])]
    last = min(10.0 ** -len(number.partition(".")[2].partition("e")[0]) for number in (a[2], b[2]))
    return abs(values[0] - values[1]) <= max(RELATIVE * max(map(abs, values)), last) * (1 + 1e-9)


def _equal(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Return whether two lines are equal; `…` in the shown one stands for any words."""
    for i, word in enumerate(shown):
        if word == LEFT_OUT:
            return any(_equal(shown[i + 1 :], printed[k:]) for k in range(i, len(printed) + 1))
        if i == len(printed) or not _close(word, printed[i]):
            return False
    return len(shown) == len(printed)


def _masked(words: Sequence[str]) -> list[str]:
    """Return words with # for their numbers."""
    return [NUMBER.sub(r"\1#\3", word) for word in words]


def _likeness(shown: Unit, printed: Unit) -> float:
    """Return 1 for lines that are equal, less for those with words in common, 0 for others."""
    if _equal(shown.words, printed.words):
        return 1.0
    a, b = _masked([word for word in shown.words if word != LEFT_OUT]), _masked(printed.words)
    if shown.words[-1] == LEFT_OUT:
        b = b[: len(a)]
    common = sum(min(a.count(word), b.count(word)) for word in set(a))
    share = 2 * common / max(len(a) + len(b), 1)
    share *= 0.9 + 0.1 * sum(map(_close, shown.words, printed.words)) / len(
        shown.words
    )  # rows of numbers are alike
    return 0.9 * share if (share >= 0.4 and a[0] == b[0]) or share >= 0.7 else 0.0


class Part(NamedTuple):
    """Shown lines without a `…` between them, the first and the last printed one that they show (None: none), and the printed
    one of each."""

    shown: list[Unit]
    first: int | None
    last: int | None
    of: dict[int, int]


def _parts(shown: list[Unit], printed: list[Unit]) -> list[Part]:
    """Place the shown lines among the printed ones, in order, by what is most alike and least torn apart."""
    of = _placed(shown, printed)
    parts: list[Part] = []
    edges = [-1, *(i for i, unit in enumerate(shown) if unit.words == (LEFT_OUT,)), len(shown)]
    for a, b in pairwise(edges):
        if b - a < 2:
            continue
        at = {i - a - 1: of[i] for i in range(a + 1, b) if i in of}
        ends = list(at.values())
        whole = a == -1 and b == len(shown)
        if a == -1 and printed and (ends or whole):
            ends.append(0)
        if b == len(shown) and printed and (ends or whole):
            ends.append(len(printed) - 1)
        parts.append(Part(shown[a + 1 : b], min(ends, default=None), max(ends, default=None), at))
    return parts


def _placed(shown: list[Unit], printed: list[Unit]) -> dict[int, int]:
    """Return the printed line of each shown one that has a like: the placement in order of the greatest likeness in all."""
    n = len(printed)
    best = [0.0] * (n + 1)  # of the shown lines so far, among the first j printed ones
    chains: list[tuple[tuple[int, int], object] | None] = [None] * (n + 1)
    above: dict[int, tuple[float, object]] = {}  # the shown line above placed at j
    for i, line in enumerate(shown):
        here: dict[int, tuple[float, object]] = {}
        if line.words == (LEFT_OUT,):
            above = here
            continue
        for j, other in enumerate(printed):
            likeness = _likeness(line, other)
            if not likeness:
                continue
            total, chain = best[j], chains[j]
            if i == j == 0:
                total += 0.3
            if j - 1 in above and above[j - 1][0] + 0.3 > total:
                total, chain = above[j - 1][0] + 0.3, above[j - 1][1]
            here[j] = (total + likeness, ((i, j), chain))
        best, chains = list(best), list(chains)
        for j in range(n):
            if j in here and here[j][0] > best[j + 1]:
                best[j + 1], chains[j + 1] = here[j]
            if best[j] > best[j + 1]:
                best[j + 1], chains[j + 1] = best[j], chains[j]
        above = here
    pairs, chain = {}, chains[n]
    while chain is not None:
        (i, j), chain = chain
        pairs[i] = j
    return pairs


def differences(shown: str, printed: str, width: int = COLUMNS) -> list[str]:
    """Return the lines that are shown and not printed (-), or printed among the shown ones and not shown (+)."""
    new = units(printed)
    lines: list[str] = []
    for part in _parts(units(shown, new, width), new):
        upcoming = part.first if part.first is not None else 0
        for i, unit in enumerate(part.shown):
            j = part.of.get(i)
            if j is None:
                lines.append(f"- {unit}")
                continue
            lines += [f"+ {new[k]}" for k in range(upcoming, j)]
            if not _equal(unit.words, new[j].words):
                lines += [f"- {unit}", f"+ {new[j]}"]
            upcoming = j + 1
        if part.last is not None:
            lines += [f"+ {new[k]}" for k in range(upcoming, part.last + 1)]
    return lines


def renewed(shown: str, printed: str, width: int = COLUMNS) -> tuple[str, list[str]]:
    """Return an output with today's lines in place of the shown ones, and the shown ones that have no place in it."""
    new = units(printed)
    old = units(shown, new, width)
    old_lines, new_lines = shown.splitlines(), printed.replace(WRAPPED, "").splitlines()
    lines: list[str] = []
    lost: list[str] = []
    at = 0
    for part in _parts(old, new):
        lost += [str(unit) for i, unit in enumerate(part.shown) if i not in part.of]
        if part.first is None or part.last is None:
            lines += [
                LEFT_OUT,
                *old_lines[part.shown[0].first : part.shown[-1].end],
            ]  # `check` goes on to name them
            continue
        if part.first > at:
            lines.append(LEFT_OUT)
        elif lines:
            lines += new_lines[new[at - 1].end : new[at].first]
        back = {j: part.shown[i] for i, j in part.of.items()}
        for j in range(part.first, part.last + 1):
            gap = new_lines[new[j - 1].end : new[j].first] if j > part.first else []
            lines += gap + _line(back.get(j), old_lines, new[j], new_lines, width)
        at = part.last + 1
    if at < len(new) and old and old[-1].words == (LEFT_OUT,):
        lines.append(LEFT_OUT)
    return "".join(f"{line.rstrip()}\n" for line in lines), lost


def _line(
    old: Unit | None, old_lines: list[str], new: Unit, new_lines: list[str], width: int
) -> list[str]:
    """Return the lines of a printed unit as they are to be shown: with the `…` that its old lines have."""
    if old is not None and LEFT_OUT in old.words:
        if _equal(old.words, new.words):
            return old_lines[old.first : old.end]
        if old.words[-1] == LEFT_OUT and LEFT_OUT not in old.words[:-1]:
            words = " ".join((*new.words[: len(old.words) - 1], LEFT_OUT))
            return [line.removesuffix(WRAPPED) for line in textwrap.wrap(words, width)]
    return new_lines[new.first : new.end]


def install(folder: Path, name: str, entries: dict[str, dict[str, str]]) -> None:
    """Write what pip writes of a package's entry points, into a folder that is on Python's path."""
    place = folder / f"{name}-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, values in entries.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in values.items()))
    ]
    (place / "entry_points.txt").write_text("\n".join(lines))


@contextlib.contextmanager
def checkout() -> Iterator[None]:
    """Work in a folder where the pages' paths are this checkout's, their examples are installed, and results go elsewhere. For
    a process of its own: Python's path stays."""
    with tempfile.TemporaryDirectory() as site, tempfile.TemporaryDirectory() as folder:
        project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
        install(Path(site), project["name"], project["entry-points"])
        for name in FOLDERS:
            (Path(folder) / name).symlink_to(ROOT / name)
        paths = [str(ROOT), str(ROOT / "replay"), site, str(EXAMPLES)]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        with contextlib.chdir(folder):
            yield


class FailedError(Exception):
    """A command did not end well."""


class Runs:
    """The commands of one page that ran, and what they printed."""

    def __init__(self) -> None:
        self.ran: list[Timed] = []
        self._printed: dict[tuple[int, str], str] = {}
        self._names: dict[str, object] = {"__name__": "__main__"}

    def command(self, words: Sequence[str], line: int, width: int, again: bool = True) -> str:
        """Return what a command prints; one that ran before runs again only if asked to."""
        typed = shlex.join(words)
        if not again and (width, typed) in self._printed:
            return self._printed[width, typed]
        os.environ["COLUMNS"] = str(width)
        begin = _seconds()
        if words[:2] == ["pip", "install"]:
            return ""  # simrl is installed already, and `checkout` the examples
        if words[0] == "simrl":
            code, out, err = _simrl(list(words))
        elif words[0] == "python":
            ended = subprocess.run(
                [sys.executable, *words[1:]],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            code, out, err = ended.returncode, ended.stdout, ended.stderr
        else:
            raise FailedError(f"{typed}: neither simrl nor python; mark its block console")
        self.ran.append(Timed(line, typed, _seconds() - begin))
        if code != 0 or not out.strip():
            raise FailedError(
                f"{typed}: {f'exit code {code}' if code else 'printed nothing'}: {err.strip() or out.strip()}"
            )
        self._printed[width, typed] = out
        return out

    def block(self, block: Block, width: int) -> str:
        """Return what all commands of a block print."""
        if block.language != "python":
            return "".join(self.command(words, block.line, width) for words in commands(block.text))
        os.environ["COLUMNS"] = str(width)
        out, begin = io.StringIO(), _seconds()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, f"line {block.line}", "exec"), self._names)
        except Exception as error:
            raise FailedError("".join(traceback.format_exception(error))) from error
        self.ran.append(Timed(block.line, "python", _seconds() - begin))
        return out.getvalue()


def _seconds() -> float:
    """Return the seconds of processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _simrl(words: list[str]) -> tuple[int, str, str]:
    """Run a command of simrl in this process; return its exit code and what it printed."""
    from simrl.commands import cli

    _mark_wrapped_lines()
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    sys.argv = words
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as ending:
            code = ending.code
        except Exception:
            traceback.print_exc()
            code = 1
    return int(code is not None and code != 0), out.getvalue(), err.getvalue()


@cache
def _mark_wrapped_lines() -> None:
    """Have `WRAPPED` put at the end of each line that is broken for want of room: by rich, and by textwrap."""
    from rich.containers import Lines
    from rich.text import Text

    of_text, of_words = Text.wrap, textwrap.TextWrapper.wrap

    def wrapped(self: Text, *arguments: Any, **options: Any) -> Lines:
        whole = Lines()
        for paragraph in self.split(allow_blank=True):
            lines = of_text(paragraph, *arguments, **options)
            for line in lines[:-1]:
                line.append(WRAPPED)
            whole.extend(lines)
        return whole

    def marked(self: textwrap.TextWrapper, text: str) -> list[str]:
        *lines, last = of_words(self, text) or [""]
        return [*(f"{line}{WRAPPED}" for line in lines), *filter(None, [last])]

    Text.wrap = wrapped  # type: ignore[method-assign]
    textwrap.TextWrapper.wrap = marked  # type: ignore[method-assign]


def examine(page: str, nightly: bool = False) -> Report:
    """Run a page's commands and compare its outputs. For a process of its own."""
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = {output.block.line: output for output in outputs(text)}
    problems = [(line, output.problem) for line, output in shown.items() if output.problem]
    for line, output in shown.items():
        where = ELSEWHERE[output.elsewhere][1] if output.elsewhere else ""
        if where not in " ".join(text.split()):
            problems.append((line, f"made elsewhere, and the page does not say so: {where}"))
    compared = {
        line: output for line, output in shown.items()
        if not output.problem and not output.elsewhere and (nightly or not output.nightly)
    }  # fmt: skip
    shown_from = {
        output.source.line: output for output in compared.values() if output.source is not None
    }
    last = max(compared, default=0)
    runs, printed = Runs(), {}
    stale: list[tuple[int, str]] = []
    no_place: list[tuple[int, str]] = []
    changed: list[tuple[tuple[int, int], str]] = []
    with checkout():
        for block in blocks(text):
            try:
                if block.line in shown_from or (
                    block.language in EXECUTED and (nightly or block.line < last)
                ):
                    width = shown_from[block.line].width if block.line in shown_from else COLUMNS
                    printed[block.line] = runs.block(block, width)
                if block.line not in compared:
                    continue
                output = compared[block.line]
                if output.source is None:
                    got = "".join(
                        runs.command(words, block.line, output.width, False)
                        for words in output.commands
                    )
                elif output.source.line in printed:
                    got = printed[output.source.line]
                else:
                    continue  # its command failed
            except FailedError as failure:
                problems.append((block.line, str(failure)))
                continue
            lines = differences(block.text, got, output.width)
            if lines:
                stale.append((block.line, "\n".join(lines)))
            new, lost = renewed(block.text, got, output.width)
            no_place += [(block.line, f"nothing printed is like: {line}") for line in lost]
            changed.append((block.place, new))
    for (begin, end), new in reversed(changed):
        text = text[:begin] + new + text[end:]
    return Report(page, len(compared), stale, problems, no_place, runs.ran, text)


def main() -> int:
    """Check or write the pages, some at a time; print a line a page and what is wrong with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("check", "write"))
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE")
    parser.add_argument(
        "--nightly", action="store_true", help="also what takes more than half a minute"
    )
    parser.add_argument("--jobs", type=int, default=1, help="pages at a time")
    options = parser.parse_intermixed_args()
    wrong = 0
    pages = [Path(page).resolve() if Path(page).exists() else ROOT / page for page in options.pages]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = [
            pool.submit(examine, os.path.relpath(page, ROOT), options.nightly) for page in pages
        ]
        for done in as_completed(waiting):
            report = done.result()
            wrongs = report.problems + (report.lost if options.do == "write" else report.stale)
            if report.ran or wrongs:
                _say(report, wrongs)
            wrong += len(wrongs)
            if options.do == "write":
                (ROOT / report.page).write_text(report.text, encoding="utf-8")
    return int(wrong > 0)


def _say(report: Report, wrongs: list[tuple[int, str]]) -> None:
    took = sum(timed.seconds for timed in report.ran)
    print(
        f"{report.page}: {report.compared} outputs, {len(report.stale)} stale, {took:.0f} s of one core",
        flush=True,
    )
    for timed in report.ran:
        if timed.seconds > CI_S:
            print(f"  {report.page}:{timed.line}: {timed.seconds:.0f} s: {timed.command}")
    for line, problem in sorted(wrongs):
        print(f"  {report.page}:{line}:\n{textwrap.indent(problem, '    ')}")


if __name__ == "__main__":
    started = time.perf_counter()
    failed = main()
    print(f"{time.perf_counter() - started:.0f} s")
    sys.exit(failed)
