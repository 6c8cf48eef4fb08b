"""Fuzzing: what a reader may do with files that are hardly valid is to give a valid object or to raise a one-line `InputError`.

Anything else is a failure: another exception, a warning, something printed, five seconds, a gigabyte, a dead process. Inputs
are mutations of valid ones (`mutations.py`), and an input belongs to (seed, reader, number). They are read in a process of its
own, which may die: the input is then kept, and another process goes on with the next one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any

from tests.command_line import environment
from tests.mutations import Files, mutated

LIMIT_S = 5.0  # of computing: other processes on the machine do not count
LIMIT_MB = 1000.0
GRACE_S = 60.0  # of the clock on the wall: a process that waits, or is in native code, hears of no signal and is killed


@dataclass(frozen=True)
class Reader:
    """What is read: some valid inputs, and how. `read` is given the folder in which the files of an input lie. Whoever
    calls a reader that does not `name_the_file` does so."""

    seeds: Callable[[], list[Files]]
    read: Callable[[Path], object]
    names_the_file: bool = True
    needs: str = ""  # a package that may be missing
    # as the tokenizers package does about a panic, which then is an `InputError`
    may_print: bool = False


@dataclass
class Report:
    """What became of the inputs of a reader. `failures` are the numbers of inputs and what happened."""

    reader: str
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    most_mb: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        self.inputs += 1
        self.slowest_s = max(self.slowest_s, line["s"])
        self.most_mb = max(self.most_mb, line["mb"])
        if line["outcome"] == "failed":
            self.failures.append((line["input"], line["said"]))
        else:
            self.refused += line["outcome"] == "refused"
            self.accepted += line["outcome"] == "accepted"


def an_input(seeds: list[Files], reader: str, seed: int, number: int) -> Files:
    """Input `number`; the first ones are the seeds as they are."""
    if number < len(seeds):
        return seeds[number]
    rng = Random(f"{seed} {reader} {number}")
    return mutated(rng.choice(seeds), rng)


def lay(files: Files, folder: Path) -> None:
    """Writes the files of an input into an empty folder."""
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
    """Reads so many inputs. Those that fail are kept in a folder each."""
    from tests.readers import EVERY

    seeds = EVERY[reader].seeds()
    report = Report(reader)
    with tempfile.TemporaryDirectory(prefix="simrl-fuzz-") as temporary:
        scratch = Path(temporary)
        (scratch / "seeds").write_bytes(pickle.dumps(seeds))
        first = 0
        while first < inputs:
            for line in _process(reader, seed, first, inputs, scratch, limit_s):
                report.add(line)
                first = line["input"] + 1
                if line["outcome"] == "failed":
                    place = kept / f"{reader}-{seed}-{line['input']}"
                    shutil.rmtree(place, ignore_errors=True)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.move(scratch / "failed", place)
                    (place / "failure.txt").write_text(
                        line["said"] + "\n", encoding="utf-8", errors="backslashreplace"
                    )
    return report


def _process(
    reader: str, seed: int, first: int, end: int, scratch: Path, limit_s: float
) -> Iterator[dict[str, Any]]:
    """What a process says of the inputs from `first` on, as far as it comes."""
    log = scratch / "log"
    command = [
        sys.executable,
        "-m",
        "tests.fuzzing",
        reader,
        str(seed),
        str(first),
        str(end),
        str(scratch),
        str(limit_s),
    ]
    variables = environment(ARROW_DEFAULT_MEMORY_POOL="system", OMP_NUM_THREADS="1", COLUMNS="200")
    with (
        log.open("wb") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, env=variables) as process,
    ):
        assert process.stdout is not None
        under_way, wait_s, rest = None, 300.0, b""  # it has to start first
        while True:
            ready, _, _ = select.select([process.stdout], [], [], wait_s)
            chunk = os.read(process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in map(json.loads, lines):
                if "begins" in line:
                    under_way, wait_s = line["begins"], limit_s + GRACE_S
                else:
                    under_way, wait_s = (
                        None,
                        300.0,
                    )  # the next one is made first, perhaps on a machine with much to do
                    yield line
        hangs = not ready
        if hangs:
            process.kill()
        code = process.wait()
        tail = "\n".join(
            path.read_text(errors="replace").strip()[-3000:]
            for path in (log, scratch / "printed")
            if path.exists()
        )
        if under_way is not None:
            what = "hangs, in native code" if hangs else f"the process died with code {code}"
            (scratch / "input").rename(scratch / "failed")
            yield {
                "input": under_way,
                "outcome": "failed",
                "said": f"{what}\n{tail}",
                "s": limit_s,
                "mb": 0.0,
            }
        elif code != 0 or hangs:
            raise RuntimeError(
                f"{reader}: the process that reads ended with code {code} between two inputs: {tail}"
            )


# In the process


class Hangs(BaseException):
    """Raised by the alarm."""


def _alarm(*_: object) -> None:
    raise Hangs


def main() -> None:
    """Reads inputs `first` to `end` and says of each what happened, a line of JSON each."""
    name, seed, first, end, scratch, limit_s = sys.argv[1:]
    folder = Path(scratch)
    tell = os.fdopen(os.dup(1), "w", buffering=1)
    printed = os.open(folder / "printed", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    import pyarrow as pa

    from tests.readers import EVERY

    reader = EVERY[name]
    seeds = pickle.loads((folder / "seeds").read_bytes())
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    faulthandler.enable(os.dup(2))
    for files in seeds:  # compiles and imports what is needed: no input is slow for that
        if not name.startswith("self"):
            _try(reader, files, folder, 300.0, printed)
            shutil.rmtree(
                folder / "failed", ignore_errors=True
            )  # it fails again, as one of the first inputs
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, _alarm)
    most = (
        _memory("VmSize") * 2**20 + 2 * 2**30
    )  # an allocation that is far too large fails, and not the machine
    resource.setrlimit(resource.RLIMIT_AS, (int(most), int(most)))
    for number in range(int(first), int(end)):
        files = an_input(seeds, name, int(seed), number)
        print(json.dumps({"begins": number}), file=tell)
        said = _try(reader, files, folder, float(limit_s), printed)
        print(json.dumps({"input": number, **said}), file=tell)
        while said["outcome"] == "failed" and (folder / "failed").exists():
            time.sleep(0.001)  # until it is kept


def _try(
    reader: Reader, files: Files, scratch: Path, limit_s: float, printed: int
) -> dict[str, Any]:
    from simrl.errors import InputError

    place = scratch / "input"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    with suppress(OSError, ValueError):  # a name that no file can have
        lay(files, place)
    os.chdir(place)
    os.ftruncate(printed, 0)
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = _memory("VmRSS")
    outcome, said = "accepted", ""
    began_s = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            reader.read(place)
        except InputError as error:
            outcome, said = "refused", str(error)
        except Hangs:
            raise
        except BaseException:
            outcome, said = "failed", traceback.format_exc()
        signal.setitimer(signal.ITIMER_PROF, 0)
    except Hangs:
        outcome, said = "failed", f"more than {limit_s} s\n{traceback.format_exc()}"
    seconds, grown_mb = time.process_time() - began_s, _memory("VmHWM") - before_mb
    if outcome == "refused" and (len(said.splitlines()) != 1 or not said.isprintable()):
        outcome, said = "failed", f"the message is not one line: {said!r}"
    if outcome == "refused" and reader.names_the_file and not _named(said, files, place):
        outcome, said = "failed", f"the message names no file: {said!r}"
    if outcome != "failed" and grown_mb > LIMIT_MB:
        outcome, said = "failed", f"{grown_mb:.0f} MB"
    if outcome != "failed" and os.fstat(printed).st_size and not reader.may_print:
        outcome, said = "failed", f"printed {os.pread(printed, 2000, 0)!r}"
    if outcome != "failed" and any(path.name == "PWNED" for path in place.rglob("PWNED")):
        outcome, said = "failed", "ran what it read"
    os.chdir(scratch)
    if outcome == "failed":
        place.rename(scratch / "failed")
    return {
        "outcome": outcome,
        "said": said if outcome == "failed" else "",
        "s": seconds,
        "mb": grown_mb,
    }


def _named(message: str, files: Files, place: Path) -> bool:
    from simrl.errors import printable

    names = {PurePosixPath(name).name for name in files} | {place.name, "override", "argument"}
    return any(printable(name)[:40] in message for name in names)


def _memory(what: str) -> float:
    """Of this process, MiB."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)
    )
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
