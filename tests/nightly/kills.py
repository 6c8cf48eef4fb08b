"""Kills commands that start real engines at random moments, and starts them again.

    python tests/nightly/kills.py measure replay prove grpo --kills 20 --seed 1     # where vLLM is installed

Each command runs to its end twice, to learn how long it takes. Then it is killed at random moments of that time, by SIGKILL,
SIGINT and SIGTERM in turn, started again in the same folder each time, and at last runs to its end. After each kill no process
of it, no shared memory and nothing half-written may be left, and after SIGINT and SIGTERM no temporary file either; those of a
killed command are gone at the end. Prints a row a command and every breach. Exit code 1 if there was any.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import yaml

from simrl.errors import InputError
from simrl.files import LOCKED_WITHIN_S, read_parquet
from simrl.profile.profile import read_profile
from simrl.result.result import read_result
from simrl.trace.trace import write_trace
from simrl_replay.grpo.records import RunFolder
from simrl_replay.random_model import make_model
from tests.command_line import environment
from tests.helpers import SMALL_RECORDED_RUN, times_trained, trace

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
MOST_S = 900.0  # of a command, on a busy machine
ENDS_S = 60.0  # within which a command ends that was asked to
LEFT_S = 15.0  # within which its last process has ended
TEMPORARY = ".simrl-"  # in the name of everything that is not finished


class Command(NamedTuple):
    """The words of a command in a folder, what may be in the folder beside its inputs, and the
    output that must be new."""

    words: tuple[str, ...]
    may_leave: frozenset[str]
    new: str = ""


def measure(folder: Path) -> Command:
    """Return a short measurement of a random model."""
    make_model(folder / "model", vocab=256)
    words = "-m simrl.commands.cli measure --model model --device cpu -o p.parquet --max-num-seqs 8 --max-num-batched-tokens 64"
    more = "--max-model-len 256 --repeats 2 --budget 1"
    return Command((*words.split(), *more.split()), frozenset({"p.parquet", "p.points.jsonl"}))


def replay(folder: Path) -> Command:
    """Return a short replay of one worker."""
    make_model(folder / "model", vocab=256)
    write_trace(
        trace([[[(20, 120), (20, 150)], [(9, 100), (9, 90)]]] * 3), folder / "trace.parquet"
    )
    scenario = {
        "name": "killed",
        "steps": 3,
        "model": "model/config.json",
        "cluster": {"gpu": "cpu", "gpus": 2, "tp": 1},
        "workload": {"trace": "trace.parquet"},
        "profile": {"roofline": {}},
        "engine": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 32,
            "kv_cache_tokens": 2048,
        },
        "systems": ["one_step_off"],
    }
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    words = "-m simrl.commands.cli replay scenario.yaml --device cpu -o out"
    return Command(tuple(words.split()), frozenset({"out", "out-logs"}))


def grpo(folder: Path) -> Command:
    """Return a short recorded run."""
    config = {
        "name": "small",
        **SMALL_RECORDED_RUN,
        "epochs": 4,
        "system": {"name": "areal", "eta": 2},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    return Command(("-m", "simrl_replay.grpo", "small.yaml", "-o", "runs"), frozenset({"runs"}))


def prove(_: Path) -> Command:
    """Return a rehearsal of the proof, a few minutes long."""
    words = "-m simrl.commands.cli prove --device cpu --minutes 4 -o out"
    return Command(tuple(words.split()), frozenset({"out", "out-logs"}), new="out")


COMMANDS = {"measure": measure, "replay": replay, "prove": prove, "grpo": grpo}


def whole(folder: Path) -> None:
    """Raise `InputError` for a file with a final name that is not whole."""
    finished = [
        file for file in folder.rglob("*") if TEMPORARY not in str(file.relative_to(folder))
    ]
    for file in finished:
        if file.name == "p.parquet":
            read_profile(file)
        elif file.suffix == ".parquet":
            read_parquet(file)
        elif file.name == "spans.parquet":
            read_result(file.parent)
    if (folder / "runs/small/updates").exists():
        run = RunFolder(folder / "runs/small")
        if run.updates and max(times_trained(run.read()[0]).values()) > 1:
            raise InputError(f"{run.path}: a response was trained twice")


def session(leader: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == leader:
                found.append(int(stat.parent.name))
    return found


def shared() -> set[str]:
    """Return the names of shared memory that no process holds open or maps."""
    names = {path.name for path in Path("/dev/shm").glob("*")}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            held = (process / "maps").read_text() if names else ""
            names -= {name for name in names if f"/dev/shm/{name}" in held}
    return names


class Attack:
    """A command in a folder of its own, and what it did that it must not."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.breaches, self.ends = name, 0, Counter[str]()
        self._folder, self._temporary = root / "work", root / "tmp"
        self._folder.mkdir()
        self._temporary.mkdir()
        self._command = COMMANDS[name](self._folder)
        self._inputs = {path.name for path in self._folder.iterdir()}

    def run(self, after_s: float | None = None, number: int = 0) -> float:
        """Run the command, to its end or to a signal after some seconds; return how long it took."""
        if self._command.new:
            shutil.rmtree(self._folder / self._command.new, ignore_errors=True)
        before, began_s = shared(), time.monotonic()
        # What killed commands left is removed by the next one a minute later, if it comes so far.
        old = self._temporaries() | self._unfinished()
        process = subprocess.Popen(
            [sys.executable, *self._command.words],
            cwd=self._folder,
            env=environment(TMPDIR=str(self._temporary), HF_HUB_OFFLINE="1"),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        what, err = "a run to the end", ""
        try:
            _, err = process.communicate(timeout=after_s or MOST_S)
            if after_s:
                what, number = f"a run that ended before {after_s:.1f} s", 0
        except subprocess.TimeoutExpired:
            what = (
                f"{signal.Signals(number or signal.SIGKILL).name} after {after_s or MOST_S:.1f} s"
            )
            process.send_signal(number or signal.SIGKILL)
            try:
                _, err = process.communicate(timeout=ENDS_S)
            except subprocess.TimeoutExpired:
                self._breach(f"{what}: still runs {ENDS_S:g} s later")
                process.kill()
                process.communicate()
        code, took_s = process.returncode, time.monotonic() - began_s
        self.ends[f"{signal.Signals(number).name if number else 'ended'} -> {code}"] += 1
        print(f"{self.name}: {what} -> {code}, {took_s:.0f} s", flush=True)
        right = {0: (0,), signal.SIGKILL: (-signal.SIGKILL,)}.get(number, (1, -number))
        # A Ctrl-C that comes while Python starts, before any of simrl runs, ends in Python's own words and by the signal.
        if code not in right or ("Traceback" in err and code != -number):
            self._breach(f"{what}: ended with {code}: {err.strip()[-600:]}")
        self._check_what_is_left(
            what, process.pid, before, None if number == signal.SIGKILL else old
        )
        if number == 0:
            shutil.rmtree(
                self._folder / "runs", ignore_errors=True
            )  # one that is finished would not begin again
        return took_s

    def _check_what_is_left(
        self, what: str, leader: int, memory: set[str], old: set[str] | None
    ) -> None:
        """Look for processes, shared memory and files; `old` are the temporary files that may be there, None for any."""
        until_s = time.monotonic() + LEFT_S
        while (session(leader) or shared() - memory) and time.monotonic() < until_s:
            time.sleep(0.2)
        for left in session(leader):
            words = Path(f"/proc/{left}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
            self._breach(f"{what}: process {left} is left: {words}")
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        if left_memory := shared() - memory:
            self._breach(f"{what}: shared memory is left: {sorted(left_memory)[:4]}")
        names = (
            {path.name for path in self._folder.iterdir()} - self._inputs - self._command.may_leave
        )
        names -= self._unfinished() if old is None else old
        if old is not None and (left_files := self._temporaries() - old):
            self._breach(f"{what}: temporary files are left: {sorted(left_files)[:4]}")
        if names:
            self._breach(f"{what}: beside its output are {sorted(names)[:4]}")
        try:
            whole(self._folder)
        except InputError as error:
            self._breach(f"{what}: {error}")

    def check_temporary_files(self) -> None:
        """Look for temporary files at the end."""
        if left := self._temporaries() | self._unfinished():
            self._breach(f"at the end: temporary files are left: {sorted(left)[:4]}")

    def _temporaries(self) -> set[str]:
        """Return the names of temporary files, torch's cache of kernels apart."""
        return {
            each.name
            for each in self._temporary.iterdir()
            if not each.name.startswith("torchinductor_")
        }

    def _unfinished(self) -> set[str]:
        """Return the names of what is not finished beside the output."""
        return {each.name for each in self._folder.iterdir() if TEMPORARY in each.name}

    def _breach(self, sentence: str) -> None:
        self.breaches += 1
        print(f"{self.name}: {sentence}", flush=True)


def main() -> None:
    """Reads the arguments, kills, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+", choices=list(COMMANDS))
    parser.add_argument("--kills", type=int, default=20, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failed = 0
    for name in asked.commands:
        with tempfile.TemporaryDirectory(prefix="kills-") as root:
            attack, rng = Attack(name, Path(root)), Random(f"kills {asked.seed} {name}")
            attack.run()  # compiles
            whole_s = attack.run()
            for i in range(asked.kills):
                attack.run(rng.uniform(0.2, whole_s), SIGNALS[i % len(SIGNALS)])
            time.sleep(LOCKED_WITHIN_S)
            attack.run()
            attack.check_temporary_files()
        failed += attack.breaches
        how = ", ".join(f"{end}: {times}" for end, times in sorted(attack.ends.items()))
        print(f"{name:8} {whole_s:5.0f} s a run; {attack.breaches} breaches; {how}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
