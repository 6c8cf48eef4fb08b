"""Fuzzing: for a file that is hardly valid, a reader gives a valid object or raises a one-line
`InputError` that names the file.

Anything else is a failure: another exception, a warning, something printed, five seconds, a
gigabyte, a dead process. Inputs are mutations of valid ones (`mutations.py`), and an input belongs
to (seed, reader, number). They are read in a separate process: if it dies or hangs in native code,
the input is kept and another process goes on with the next one. Deaths found crashes of libyaml and
Arrow, panics of tokenizers; the limits found huge grids and inflated tables; the rest tracebacks.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from tests.command_line import environment
from tests.mutations import Files, mutated

LIMIT_S = 5.0  # of computing: other processes on the machine do not count
LIMIT_MB = 1000.0
GRACE_S = 60.0  # of the wall clock: a process that waits, or is in native code, hears no signal
START_S = 300.0  # of computing, for what is compiled and imported


@dataclass(frozen=True)
class Reader:
    """A reader: some valid inputs, and a function of the folder in which the files of an input
    lie."""

    seeds: Callable[[], list[Files]]
    read: Callable[[Path], object]
    needs: str = ""  # a package that may be missing
    may_print: bool = False  # as the tokenizers package does about a panic


@dataclass
class Report:
    """The counts of a reader's inputs. `failures` are numbers of inputs and what happened."""

    reader: str
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    most_mb: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """Count an input by what the process says of it."""
        self.inputs += 1
        self.slowest_s = max(self.slowest_s, line["s"])
        self.most_mb = max(self.most_mb, line["mb"])
        if line["outcome"] == "failed":
            self.failures.append((line["input"], line["message"]))
        else:
            self.refused += line["outcome"] == "refused"
            self.accepted += line["outcome"] == "accepted"


def an_input(seeds: list[Files], reader: str, seed: int, number: int) -> Files:
    """Return input `number`; the first ones are the seeds as they are."""
    if number < len(seeds):
        return seeds[number]
    rng = Random(f"{seed} {reader} {number}")
    return mutated(rng.choice(seeds), rng)


def lay(files: Files, folder: Path) -> None:
    """Write the files of an input into an empty folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def fuzz(reader: str, inputs: int, seed: int, kept: Path, limit_s: float = LIMIT_S) -> Report:
    """Read this number of inputs. Each that fails is kept in a folder of its own."""
    report = Report(reader)
    variables = environment(ARROW_DEFAULT_MEMORY_POOL="system", OMP_NUM_THREADS="1", COLUMNS="200")
    with tempfile.TemporaryDirectory(prefix="simrl-fuzz-") as temporary:
        scratch, first = Path(temporary), 0
        while first < inputs:
            words = map(str, (reader, seed, first, inputs, scratch, limit_s))
            process = subprocess.run(
                [sys.executable, "-m", "tests.fuzzing", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
            )
            lines = [*map(json.loads, (scratch / "lines").read_text().splitlines())]
            if lines and "outcome" not in lines[-1]:  # of an input that it began
                printed = (scratch / "printed").read_bytes()
                message = (process.stdout + printed).decode(errors="replace")[-3000:].strip()
                message = f"the process died with code {process.returncode}\n{message}"
                lines[-1] |= {"outcome": "failed", "message": message, "s": limit_s, "mb": 0.0}
                (scratch / "input").rename(scratch / f"failed-{lines[-1]['input']}")
            elif process.returncode:
                raise RuntimeError(f"{reader}: died between two inputs: {process.stdout!r}")
            for line in lines:
                if "outcome" not in line:
                    continue
                report.add(line)
                first = line["input"] + 1
                if line["outcome"] == "failed":
                    place = kept / f"{reader}-{seed}-{line['input']}"
                    shutil.rmtree(place, ignore_errors=True)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(scratch / f"failed-{line['input']}", place)
                    message = f"{line['message']}\n".encode(errors="backslashreplace")
                    (place / "failure.txt").write_bytes(message)
    return report


# In the process


class Hangs(BaseException):
    """The alarm's exception, which no reader takes for an error."""


def _alarm(*_: object) -> None:
    raise Hangs


def main() -> None:
    """Read inputs `first` to `end`, and say of each what happened, a line of JSON each."""
    name, seed, first, end, scratch, limit_s = sys.argv[1:]
    folder = Path(scratch)
    tell = (folder / "lines").open("w", buffering=1)
    printed = os.open(folder / "printed", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    import pyarrow as pa

    from tests.readers import EVERY

    reader = EVERY[name]
    seeds = reader.seeds()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    log = os.dup(2)
    faulthandler.enable(log)
    for files in seeds:  # compiles and imports what is needed: no input is slow for that
        if not name.startswith("self"):
            _try(reader, files, folder, START_S, printed)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    warnings.simplefilter("error")
    logging.getLogger("simrl").addHandler(logging.NullHandler())  # lines of commands
    signal.signal(signal.SIGPROF, _alarm)
    # an allocation that is far too large fails, and not the machine
    most = int(_memory("VmSize") * 2**20 + 2 * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number in range(int(first), int(end)):
        files = an_input(seeds, name, int(seed), number)
        print(json.dumps({"input": number}), file=tell)
        faulthandler.dump_traceback_later(float(limit_s) + GRACE_S, exit=True, file=log)
        line = _try(reader, files, folder, float(limit_s), printed)
        faulthandler.cancel_dump_traceback_later()
        if line["outcome"] == "failed":
            (folder / "input").rename(folder / f"failed-{number}")
        print(json.dumps({"input": number, **line}), file=tell)


def _try(
    reader: Reader, files: Files, scratch: Path, limit_s: float, printed: int
) -> dict[str, Any]:
    """Read an input, and say what happened, in how many seconds and with how much memory."""
    place = scratch / "input"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    with suppress(OSError, ValueError):  # a name that no file can have
        lay(files, place)
    os.chdir(place)
    os.ftruncate(printed, 0)
    Path("/proc/self/clear_refs").write_text("5")
    before_mb, began_s = _memory("VmRSS"), time.process_time()
    outcome, message = _read(reader, place, limit_s)
    seconds, grown_mb = time.process_time() - began_s, _memory("VmHWM") - before_mb
    breaches = {
        f"the message is not one line: {message!r}": outcome == "refused"
        and (len(message.splitlines()) != 1 or not message.isprintable()),
        f"the message names no file: {message!r}": outcome == "refused"
        and not _named(message, files, place),
        f"{grown_mb:.0f} MB": grown_mb > LIMIT_MB,
        f"printed {os.pread(printed, 2000, 0)!r}": os.fstat(printed).st_size
        and not reader.may_print,
        "ran what it read": any(place.rglob("PWNED")),
    }
    os.chdir(scratch)
    if outcome != "failed":
        message = next((words for words, breached in breaches.items() if breached), "")
        outcome = "failed" if message else outcome
    return {"outcome": outcome, "message": message, "s": seconds, "mb": grown_mb}


def _read(reader: Reader, place: Path, limit_s: float) -> tuple[str, str]:
    """Return accepted, refused or failed, and the message."""
    from simrl.errors import InputError

    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            reader.read(place)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except InputError as error:
        return "refused", str(error)
    except Hangs:
        return "failed", f"more than {limit_s} s\n{traceback.format_exc()}"
    except BaseException:
        return "failed", traceback.format_exc()
    return "accepted", ""


def _named(message: str, files: Files, place: Path) -> bool:
    from simrl.errors import printable

    names = {part for name in files for part in PurePosixPath(name).parts}
    names |= {place.name, "override", "argument"}
    return any(printable(name)[:40] in message for name in names)


def _memory(what: str) -> float:
    """Return a size of this process in MiB."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    )
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
