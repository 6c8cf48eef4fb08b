"""Commands write equal bytes anywhere: line ends, byte-order marks, seeds, locales, terminals, folders."""

import csv
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simrl.scenario.load import load_scenarios
from simrl.simulate.run import simulate
from simrl.systems.recipes import parameters_of
from simrl.trace.trace import read_trace
from tests.command_line import SCENARIO, CommandLine, contents, environment

BOM = b"\xef\xbb\xbf"
LENGTHS = "step,epoch,prompt_id,sample,prompt_tokens,response_tokens,reward\n" + "".join(
    f"{step},0,{2 * step + prompt},{i},10,{20 + i + prompt},0.5\n"
    for step in range(2)
    for prompt in range(2)
    for i in range(2)
)
WRITTEN = {
    "windows": lambda text: text.replace("\n", "\r\n").encode(),
    "windows with a mark": lambda text: BOM + text.replace("\n", "\r\n").encode(),
    "a mark": lambda text: BOM + text.encode(),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_a_scenario_with_windows_line_ends_or_a_byte_order_mark_is_the_same_scenario(
    tmp_path, write
):
    files = {name: tmp_path / f"{name}.yaml" for name in ("plain", "odd")}
    files["plain"].write_text(SCENARIO, newline="\n")
    files["odd"].write_bytes(write(SCENARIO))
    plain, odd = (load_scenarios(file, parameters_of=parameters_of) for file in files.values())
    assert [s.model_dump(exclude={"file"}) for s in odd] == [
        s.model_dump(exclude={"file"}) for s in plain
    ]


def rows_of_json(text: str) -> str:
    rows = csv.DictReader(io.StringIO(text))
    return "".join(
        json.dumps({k: float(v) if k == "reward" else int(v) for k, v in row.items()}) + "\n"
        for row in rows
    )


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize(
    ("kind", "text"), [("csv", LENGTHS), ("jsonl", rows_of_json(LENGTHS))], ids=["csv", "jsonl"]
)
def test_an_export_with_windows_line_ends_or_a_byte_order_mark_is_the_same_trace(
    simrl, kind, text, write
):
    for name, content in (("plain", text.encode()), ("odd", write(text))):
        (simrl.folder / f"{name}.{kind}").write_bytes(content)
        code, _, err = simrl(
            "trace", "import", kind, f"{name}.{kind}", "-o", f"{name}.parquet", "--name", "run"
        )
        assert code == 0, err
    plain, odd = (read_trace(simrl.folder / f"{name}.parquet") for name in ("plain", "odd"))
    assert odd.table.equals(plain.table) and odd.table.num_rows == 8


# Seeds.


@pytest.mark.parametrize("speculation", ["none", "siblings", "histospec", "das"])
def test_seeds_of_more_than_32_bits_are_seeds_like_any_other(tmp_path, speculation):
    (tmp_path / "s.yaml").write_text(SCENARIO)
    seeds, ends = (3, 2**32 + 3, 2**63 - 1), []
    for seed in seeds:
        given = [
            f"seed={seed}",
            f"systems=[{{name: areal, speculation: {speculation}}}]",
            "workload.synthetic.prompts=4",
        ]
        [scenario] = load_scenarios(tmp_path / "s.yaml", given, parameters_of=parameters_of)
        ends.append(simulate(scenario).metadata["end_s"])
    assert len(set(ends)) == len(seeds)


@pytest.mark.parametrize("seed", [2**63, 2**64, 10**40, -1])
def test_a_seed_beyond_63_bits_is_refused_in_a_line(simrl: CommandLine, seed):
    assert f"seed is {seed}" in simrl.refuses("compare", "scenario.yaml", f"seed={seed}")
    synth = (
        "steps=1",
        "prompts_per_step=1",
        "group=1",
        "cap_tokens=9",
        "mean_tokens=4",
        "sigma=1",
        "prompt_tokens=2",
    )
    assert "'--seed'" in simrl.refuses(
        "trace", "synth", "-o", "t.parquet", *synth, "--seed", str(seed)
    )


# Locales, terminals, folders: a command as a process.

COMPARE = ("compare", "scenario.yaml", "steps=2", "--output", "out")


def run(
    folder: Path, code: str = "from simrl.commands.cli import main; main()", words=COMPARE, **more
) -> tuple[int, str, str]:
    """Runs a command where nobody has run one before."""
    (folder / "scenario.yaml").write_text(SCENARIO)
    env = {**environment(), **more.pop("env", {})}
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        timeout=900,
        **more,
    )
    return (
        ended.returncode,
        ended.stdout.decode("utf-8", "replace"),
        ended.stderr.decode("utf-8", "replace"),
    )


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> tuple[str, dict[str, bytes | None]]:
    """What a comparison prints and writes."""
    folder = tmp_path_factory.mktemp("usual")
    code, out, err = run(folder)
    assert code == 0, err
    return out, contents(folder)


def turkish(folder: Path) -> dict[str, str]:
    """Variables of a Turkish locale, which is made here."""
    if shutil.which("localedef") is None:
        pytest.skip("localedef is not installed")
    place = folder / "locales"
    place.mkdir()
    made = subprocess.run(
        ["localedef", "-i", "tr_TR", "-f", "UTF-8", str(place / "tr_TR.UTF-8")], capture_output=True
    )
    if not (place / "tr_TR.UTF-8").is_dir():
        pytest.skip(f"no Turkish locale can be made here: {made.stderr.decode()[:200]}")
    return {"LOCPATH": str(place), "LC_ALL": "tr_TR.UTF-8"}


@pytest.mark.slow
def test_a_turkish_locale_changes_no_byte_also_where_a_script_has_set_it_for_the_c_library(
    tmp_path, usual
):
    """Python's own `lower` and `float` never see a locale; C's do, once a script has called `setlocale`."""
    folder = tmp_path / "work"
    folder.mkdir()
    code = (
        "import locale; print(locale.setlocale(locale.LC_ALL, ''), locale.localeconv()['decimal_point'])\n"
        "from simrl.commands.cli import main; main()"
    )
    ended, out, err = run(folder, code, env=turkish(tmp_path))
    assert ended == 0, err
    assert out == f"tr_TR.UTF-8 ,\n{usual[0]}" and contents(folder) == usual[1]


def words(printed: str) -> list[str]:
    """The words of what is printed, as a terminal shows them that has ASCII alone; without the rules of tables."""
    return re.sub(r"[─┼│|+-]+", " ", printed).encode("ascii", "backslashreplace").decode().split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=["C", "POSIX, and only ASCII"],
)
def test_a_locale_without_letters_changes_no_file_and_only_signs_on_the_screen(
    tmp_path, usual, variables
):
    code, out, err = run(tmp_path, env=variables)
    assert (code, err) == (0, ""), err
    assert contents(tmp_path) == usual[1]
    assert words(out) == words(usual[0])


@pytest.mark.slow
def test_a_home_that_cannot_be_written_changes_nothing(tmp_path, usual):
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir(mode=0o555)
    folder.mkdir()
    nowhere = {
        name: str(home / "none")
        for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR")
    }
    (home / "none").write_text("a file, so that no folder can be made here, not even by root")
    code, out, err = run(folder, env=nowhere)
    assert code == 0 and "Traceback" not in err, err
    assert (out, contents(folder)) == usual


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_of_any_width_shows_whole_lines_and_changes_no_file(tmp_path, usual, columns):
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    ours, theirs = pty.openpty()
    env = {**environment(COLUMNS=str(columns), TERM="xterm-256color"), "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "simrl.commands.cli", *COMPARE],
        cwd=tmp_path,
        env=env,
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # its other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0, shown
    assert contents(tmp_path) == usual[1]
    assert b"Traceback" not in shown and b"verl_colocated" in shown


@pytest.mark.slow
def test_a_command_that_may_not_hear_ctrl_c_ends_as_any_other(tmp_path, usual):
    code, out, err = run(
        tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        stdin=subprocess.DEVNULL,
    )
    assert (code, err) == (0, "") and (out, contents(tmp_path)) == usual
