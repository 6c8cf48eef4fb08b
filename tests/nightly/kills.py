"""Kills commands that start real engines at random moments, and starts them again.

    python tests/nightly/kills.py measure replay grpo --kills 20 --seed 1     # where vLLM is installed

Each command runs to its end once, to learn how long it takes. Then it is killed at random moments of that time, by SIGKILL,
SIGINT and SIGTERM in turn, started again in the same folder each time, and at last runs to its end. After each kill no process
of it, no shared memory and nothing half-written may be left, and after SIGINT and SIGTERM no temporary file either; those of a
killed command are gone at the end. Prints a row a command and every breach. Exit code 1 if there was any.
"""

import argparse
import os
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

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml
from command_line import environment
from helpers import trace

from replay.grpo.records import RunFolder
from replay.random_model import make_model
from simrl.errors import InputError
from simrl.files import LOCKED_WITHIN_S, read_parquet
from simrl.profile.profile import read_profile
from simrl.result.result import read_result
from simrl.trace.trace import write_trace

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
MOST_S = 900.0  # of a command, on a busy machine
ENDS_S = 60.0  # within which a command ends that was asked to
LEFT_S = 15.0  # within which its last process has ended
TEMPORARY = ".simrl-"  # in the name of everything that is not finished


class Command(NamedTuple):
    """The words of a command in a folder, and what may be in the folder beside its inputs."""

    words: tuple[str, ...]
    may_leave: frozenset[str]


def measure(folder: Path) -> Command:
    """Return a short measurement of a random model."""
    make_model(folder / "model", vocab=256)
    words = "-m simrl.commands.cli measure --model model --device cpu -o p.parquet --max-num-seqs 8 --max-num-batched-tokens 64"
    more = "--max-model-len 256 --repeats 2 --budget 1"
    return Command((*words.split(), *more.split()), frozenset({"p.parquet", "p.points.jsonl"}))


def replay(folder: Path) -> Command:
    """Return a short replay of one worker."""
    make_model(folder / "model", vocab=256)
    write_trace(trace([[[(20, 120), (20, 150)], [(9, 100), (9, 90)]]] * 3), folder / "trace.parquet")
    scenario = {
        "name": "killed",
        "steps": 3,
        "model": "model/config.json",
        "cluster": {"gpu": "cpu", "gpus": 2, "tp": 1},
        "workload": {"trace": "trace.parquet"},
        "profile": {"roofline": {}},
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32, "kv_cache_tokens": 2048},
        "systems": ["one_step_off"],
    }
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    words = "-m simrl.commands.cli replay scenario.yaml --device cpu -o out"
    return Command(tuple(words.split()), frozenset({"out", "out-logs"}))


def grpo(folder: Path) -> Command:
    """Return a short recorded run."""
    config = {
        "name": "small",
        "task": {"counts": [2], "most_tokens": 48},
        "policy": {"layers": 1, "hidden": 32, "heads": 1, "kv_heads": 1, "intermediate": 64},
        "warm_up": {"steps": 3, "evaluate_every": 3, "evaluation_prompts": 4},
        "prompts": 4,
        "prompts_per_step": 2,
        "group": 3,
        "epochs": 6,
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_tokens": 2048},
        "system": {"name": "areal", "eta": 2},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    return Command(("-m", "replay.grpo", "small.yaml", "-o", "runs"), frozenset({"runs"}))


COMMANDS = {"measure": measure, "replay": replay, "grpo": grpo}


def whole(folder: Path) -> None:
    """Raise `InputError` for a file with a final name that is not whole."""
    finished = [file for file in folder.rglob("*") if TEMPORARY not in str(file.relative_to(folder))]
    for file in finished:
        if file.name == "p.parquet":
            read_profile(file)
        elif file.suffix == ".parquet":
            read_parquet(file)
        elif file.name == "spans.parquet":
            read_result(file.parent)
    if (folder / "runs/small/updates").exists():
        run = RunFolder(folder / "runs/small")
        samples, _ = run.read() if run.updates else (None, None)
        if samples is not None:
            names = ("epoch", "prompt_id", "sample")
            rows = Counter(zip(*(samples[name].to_pylist() for name in names), strict=True))
            if max(rows.values()) > 1:
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


class Breaches:
    """What a command did that it must not, as sentences."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def add(self, sentence: str) -> None:
        """Print a breach."""
        self.count += 1
        print(f"{self.name}: {sentence}", flush=True)


def attack(name: str, kills: int, seed: int) -> tuple[Breaches, Counter[str], float]:
    """Return the breaches of a command, how its processes ended, and the seconds of a whole run."""
    rng, breaches, ends = Random(f"kills {seed} {name}"), Breaches(name), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="kills-") as root:
        folder, temporary = Path(root) / "work", Path(root) / "tmp"
        folder.mkdir()
        temporary.mkdir()
        command = COMMANDS[name](folder)
        inputs = {path.name for path in folder.iterdir()}
        variables = environment(TMPDIR=str(temporary), HF_HUB_OFFLINE="1")

        def temporaries() -> list[str]:
            """Return the temporary files that nobody may find, torch's cache apart; those of killed commands stay a minute."""
            old_s = time.time() - LOCKED_WITHIN_S
            left = (each for each in temporary.iterdir() if not each.name.startswith("torchinductor_"))
            return sorted(each.name for each in left if not killed or each.stat().st_mtime < old_s)

        killed = False

        def run(after_s: float | None, number: int = 0) -> float:
            """Run the command, to its end or to a signal after some seconds; return how long it took."""
            nonlocal killed
            before, began_s = shared(), time.monotonic()
            process = subprocess.Popen(
                [sys.executable, *command.words],
                cwd=folder,
                env=variables,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            what = "a run to the end" if after_s is None else f"{signal.Signals(number).name} after {after_s:.1f} s"
            err = ""
            try:
                _, err = process.communicate(timeout=after_s or MOST_S)
                what, number = f"{what} (it had ended)" if after_s else what, 0
            except subprocess.TimeoutExpired:
                process.send_signal(number or signal.SIGKILL)
                try:
                    _, err = process.communicate(timeout=ENDS_S)
                except subprocess.TimeoutExpired:
                    breaches.add(f"{what}: still runs {ENDS_S:g} s later")
                    process.kill()
                    process.communicate()
            code, took_s = process.returncode, time.monotonic() - began_s
            ends[f"{signal.Signals(number).name if number else 'ended'} -> {code}"] += 1
            right = {0: (0,), signal.SIGKILL: (-signal.SIGKILL,)}.get(number, (1, -number))
            if code not in right or "Traceback" in err:
                breaches.add(f"{what}: ended with {code}: {err.strip()[-600:]}")
            until_s = time.monotonic() + LEFT_S
            while session(process.pid) and time.monotonic() < until_s:
                time.sleep(0.1)
            for left in session(process.pid):
                words = Path(f"/proc/{left}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
                breaches.add(f"{what}: process {left} is left: {words}")
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            while shared() - before and time.monotonic() < until_s:
                time.sleep(0.5)
            if left_memory := shared() - before:
                breaches.add(f"{what}: shared memory is left: {sorted(left_memory)[:4]}")
            names = {path.name for path in folder.iterdir()} - inputs - command.may_leave
            if number == signal.SIGKILL:
                killed = True
                names = {path for path in names if TEMPORARY not in path}
            elif left_files := temporaries():
                breaches.add(f"{what}: temporary files are left: {left_files[:4]}")
            print(f"{name}: {what} -> {code}, {took_s:.0f} s", flush=True)
            if names:
                breaches.add(f"{what}: beside its output are {sorted(names)[:4]}")
            try:
                whole(folder)
            except InputError as error:
                breaches.add(f"{what}: {error}")
            return took_s

        whole_s = run(None)
        for i in range(kills):
            run(rng.uniform(0.2, whole_s), SIGNALS[i % len(SIGNALS)])
        time.sleep(LOCKED_WITHIN_S)
        run(None)
        killed = False
        if left_files := temporaries():
            breaches.add(f"at the end: temporary files are left: {left_files[:4]}")
    return breaches, ends, whole_s


def main() -> None:
    """Reads the arguments, kills, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", choices=list(COMMANDS))
    parser.add_argument("--kills", type=int, default=20, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failed = 0
    for name in asked.commands:
        breaches, ends, whole_s = attack(name, asked.kills, asked.seed)
        failed += breaches.count
        how = ", ".join(f"{end}: {times}" for end, times in sorted(ends.items()))
        print(f"{name:8} {whole_s:5.0f} s a run; {breaches.count} breaches; {how}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
