"""Every command of a script in experiments/ that a page documents, on its smallest input: it ends well and writes what it is
for.

Options that make an input large, or need what a checkout lacks (measurements, a program, a tokenizer), are left out or
replaced: `Small.changes` has them, and nothing here runs them. All others are given as documented.

The commands run in a copy of the folder, whose pages they may write. What needs the measurements beside this checkout
(../shared/data), or an optional package, is skipped without it.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

TIMEOUT_S = 300
ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PAGES = sorted(
    page
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "experiments").rglob("*.md"),
    ]
    if page.name != "CHANGELOG.md"
)
COMMAND = re.compile(r"python (?:-m )?experiments[/.](?:[^`#|\n\\]|\\\n)*")


class Small(NamedTuple):
    """The smallest input of a documented command: `changes` are replaced in it, `more` follows; `writes` is a file that it
    writes, None if it only prints. `needs` is an optional package; `before` is a command that makes an input."""

    more: str = ""
    writes: str | None = None
    needs: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    before: str = ""


SHARED = "../shared/data"
FAST = "--samples 0 --jobs 1"
BOARD = "python -m experiments.reproduce areal-hours-1p5b --samples 1 --jobs 1 -o board.json"
COMMANDS = {
    "python -m experiments.reproduce": Small(f"weight-sync-7b {FAST}"),
    "python -m experiments.reproduce weight-sync-7b --samples 0": Small("--jobs 1"),
    "python -m experiments.reproduce weight-sync-7b spec-decode-latency --samples 4": Small(
        "--jobs 1", changes=(("spec-decode-latency --samples 4", "--samples 1"),)
    ),
    "python -m experiments.reproduce -o board.json": Small(
        f"areal-hours-1p5b {FAST}", "board.json"
    ),
    "python -m experiments.reproduce --real --data ../shared/data": Small(f"nemo-8b-sync {FAST}"),
    "python -m experiments.reproduce --real nemo-8b-sync --data ../shared/data": Small(FAST),
    "python -m experiments.reproduce --real --accuracy experiments/accuracy.csv --samples 0 "
    "--data ../shared/data": Small("--jobs 1", "experiments/accuracy.csv"),
    "python -m experiments.reproduce --real --page experiments/real_runs.md --data ../shared/data": Small(
        f"nemo-8b-sync {FAST}", "experiments/real_runs.md"
    ),
    "python experiments/acceptance.py ../shared/data --tiktoken qwen.tiktoken": Small(
        changes=((" --tiktoken qwen.tiktoken", ""),)
    ),
    "python experiments/agents.py --page": Small("--small --jobs 1", "docs/agents.md"),
    "python experiments/bench/growth.py --write": Small("--small", "experiments/bench/peers.md"),
    "python experiments/bench/history_index.py --data ../shared/data": Small(
        "--small", changes=((" --data ../shared/data", ""),)
    ),
    "python experiments/bench/peers.py --aisimulate peers/bin/aisimulate --write": Small(
        "--small --repeats 1",
        "experiments/bench/peers.md",
        changes=((" --aisimulate peers/bin/aisimulate", ""),),
    ),
    "python experiments/bench/sweep_scale.py": Small(
        "--systems areal --gpus 16,64 --lengths 500 --jobs 1"
    ),
    "python experiments/beside_aisimulate.py --measured ../shared/data --write": Small(
        writes="experiments/beside_aisimulate.md", needs="aisimulate"
    ),
    "python experiments/derive_rtx.py ../shared/data": Small(needs="aiconfigurator"),
    "python experiments/estimates.py": Small(),
    "python -m experiments.eagle3 ../shared/data": Small(needs="aiconfigurator"),
    "python -m experiments.frameworks": Small("--redraw", "experiments/frameworks.md"),
    "python experiments/decoupled_bound.py": Small(),
    "python experiments/history_memory.py --data ../shared/data": Small(
        "--small", "experiments/history_memory.png", changes=((" --data ../shared/data", ""),)
    ),
    "python experiments/notebooks/execute.py --renew": Small(
        "experiments/notebooks/4_predicted_and_measured.ipynb",
        "experiments/notebooks/4_predicted_and_measured.ipynb",
        needs="nbclient",
    ),
    "python experiments/published/conditioned.py": Small(
        writes="experiments/published/conditioned.md"
    ),
    "python experiments/published/given.py": Small(writes="experiments/published/given.md"),
    "python experiments/published/rhymerl_map.py": Small(
        "--redraw", "experiments/published/rhymerl_map_schedules.png"
    ),
    "python experiments/published/scoreboard.py board.json --figures": Small(
        writes="experiments/published/scoreboard.md", changes=((" --figures", ""),), before=BOARD
    ),
    "python experiments/published/specactor_map.py": Small(
        "--small", "experiments/published/specactor_map.png"
    ),
    "python experiments/pools_aisimulate.py --write": Small(needs="aisimulate"),
    "python experiments/share.py A B": Small(
        changes=((" A B", " experiments/share/a.yaml experiments/share/b.yaml"),)
    ),
    "python experiments/share.py experiments/share/a.yaml experiments/share/b.yaml": Small(),
    "python -m experiments.what_to_run": Small("--page-only", "experiments/what_to_run.md"),
    "python experiments/seeds.py": Small("tl-3 --samples 1 --jobs 2"),
    "python experiments/seeds.py --page experiments/seeds.md": Small(
        "tl-3 --samples 0 --jobs 2", "experiments/seeds.md"
    ),
    "python experiments/seeds.py rh-8 sp-6 --samples 12": Small(
        "--jobs 2", changes=(("rh-8 sp-6 --samples 12", "tl-3"),)
    ),
    "python experiments/specactor_tgs.py": Small("--small", "experiments/specactor_tgs.md"),
    "python experiments/systems.py ../shared/data": Small(
        "--small --jobs 1", "experiments/systems.md", changes=((" ../shared/data", ""),)
    ),
    "python experiments/validate_engine.py ../shared/data": Small(),
    "python experiments/short_of_kv.py": Small("--small"),
    "python experiments/validate_profiles.py ../shared/data": Small(needs="aiconfigurator"),
    "python experiments/validate_verification.py ../shared/data": Small(),
    "python experiments/validate_replay.py --page experiments/replay.md": Small(
        "--only 64 --seeds 0 --repeats 1 --profile-s 15", "experiments/replay.md", needs="vllm"
    ),
    "python experiments/validate_stragglers.py ../shared/data": Small(),
    "python experiments/validate_training.py ../shared/data": Small(),
    "python experiments/verl_run.py ../shared/data": Small(writes="experiments/verl_run_times.png"),
    "python experiments/verl_run.py ../shared/data --later": Small(),
    "python experiments/weight_sync.py ../shared/data": Small(),
}


def documented() -> dict[str, str]:
    """Every documented command, with a page that has it."""
    found = {}
    for page in PAGES:
        for match in COMMAND.finditer(page.read_text(encoding="utf-8")):
            command = " ".join(match[0].replace("\\\n", " ").split()).rstrip(".,;:)")
            found[command] = str(page.relative_to(ROOT))
    return found


def test_every_documented_command_of_experiments_has_its_smallest_input():
    pages = documented()
    assert len(pages) > 20
    lacking = {command: page for command, page in pages.items() if command not in COMMANDS}
    assert not lacking, "give it a line in COMMANDS"
    assert not set(COMMANDS) - set(pages), "no page documents it any more"
    assert not [command for command in COMMANDS if not (ROOT / script(command)).is_file()]


def script(command: str) -> str:
    """Return the script of a command."""
    if " -m " not in command:
        return command.split()[1]
    name = command.split()[2].replace(".", "/")
    main = f"{name}/__main__.py"  # a folder may also hold what a script of its name writes
    return main if (ROOT / main).is_file() else f"{name}.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of experiments/ and docs/, with everything else that scripts read beside it."""
    folder = tmp_path_factory.mktemp("commands") / "checkout"
    for name in ("experiments", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name not in ("experiments", "docs", "results") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    if DATA.is_dir():
        (folder.parent / "shared").symlink_to(DATA.parent)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command.split()[1:]]
    environment = {**os.environ, "PYTHONPATH": str(folder), "MPLBACKEND": "agg", "COLUMNS": "150"}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_runs_on_its_smallest_input(command: str, checkout: Path):
    small = COMMANDS[command]
    shorter = command
    for old, new in small.changes:
        assert old in shorter
        shorter = shorter.replace(old, new)
    if SHARED in f"{shorter} {small.more}" and not DATA.is_dir():
        pytest.skip("the measurements are not beside this checkout (../shared/data)")
    if small.needs and importlib.util.find_spec(small.needs) is None:
        pytest.skip(f"{small.needs} is not installed")
    if small.before:
        made = run(small.before, checkout)
        assert made.returncode == 0, made.stderr
    written = checkout / (small.writes or ".")
    before_s = written.stat().st_mtime_ns if written.exists() else 0
    done = run(f"{shorter} {small.more}", checkout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    if small.writes is None:
        assert len(done.stdout.split()) > 10
    else:
        assert written.stat().st_mtime_ns > before_s and written.stat().st_size > 500
