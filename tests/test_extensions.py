"""Functions that installed packages add: found by name, imported when asked for, told in a line when they are broken."""

import json
import logging
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from docs.outputs import install
from simrl.errors import InputError
from simrl.extensions import Extended, checked
from simrl.profile.profile import read_profile
from simrl.speculation.methods import METHODS
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.trace_runs import drafter_runs
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import read_trace
from simrl_replay.ngram_drafter import NgramDrafter
from tests.command_line import CommandLine, Ended, environment
from tests.token_traces import random_groups

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
SYSTEM = "from simrl.systems.on_policy import split\n\ndef mine(share: float = 0.5):\n    {}\n"


@pytest.fixture
def site(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder of installed packages."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield folder
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent in (folder, EXAMPLES):
            del sys.modules[name]


def in_a_process(simrl: CommandLine, site: Path, *arguments: str) -> Ended:
    """A command in a process that begins with the packages installed: importers are commands, made as it starts."""
    path = os.pathsep.join(map(str, (ROOT, site, EXAMPLES)))
    process = simrl.start(*arguments, env=environment(PYTHONPATH=path))
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


def add(site: Path, group: str, name: str, code: str, package: str = "theirs") -> None:
    """A package of one module with one function called `mine`."""
    module = f"{package}_module"
    (site / f"{module}.py").write_text(code)
    install(site, package, {group: {name: f"{module}:mine"}})


UNSAYABLE = """
class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("no words")
def mine():
    raise Unsayable
"""


def test_a_system_of_a_package_is_listed_shown_and_simulated(simrl: CommandLine, site: Path):
    add(site, "simrl.systems", "halves", SYSTEM.format("return split(rollout_share=share)"))
    assert "halves" in RECIPES and list(RECIPES)[-1] == "halves"
    assert "halves" in simrl("systems").out
    assert " share: 0.5}" in simrl("systems", "show", "halves").out
    code, out, err = simrl("run", "scenario.yaml", "--system", "halves", "share=0.25", "--json")
    assert code == 0, err
    assert json.loads(out)[0]["system"] == "halves(share=0.25)"


def test_nothing_of_a_package_is_imported_before_it_is_asked_for(simrl: CommandLine, site: Path):
    add(site, "simrl.systems", "halves", "raise RuntimeError('imported')")
    assert simrl("run", "scenario.yaml", "--system", "verl_colocated").code == 0
    assert "theirs_module" not in sys.modules


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def mine(:", "SyntaxError"),
        ("x = 1 / 0", "ZeroDivisionError"),
        ("other = 1", "AttributeError"),
        ("raise SystemExit(0)", "cannot be loaded (SystemExit: 0"),
        ("def mine(): ...\nmine.__signature__ = 3", "its parameters are unknown"),
        ("def mine(): raise ValueError('full')", "raised ValueError: full"),
        ("def mine(): raise SystemExit(0)", "raised SystemExit: 0"),
        ("def mine(): raise BaseException('b')", "raised BaseException: b"),
        ("raise BaseException('b')", "cannot be loaded (BaseException: b"),
        (UNSAYABLE, "raised Unsayable"),
        ("mine = 3", "is no function but int"),
        ("async def mine(): return 3", "is no function but async def"),
        ("import functools\nmine = functools.partial(dict)", "is no function but partial"),
        ("def mine(share: 'Nowhere' = 3): ...", "its parameters are unknown (name 'Nowhere'"),
        ("def mine(share): ...", "must be given share"),
        ("def mine(*, share): ...", "must be given share"),
        ("def mine(): return 7", "its function returns int, not a System; correct it"),
    ],
)
def test_a_broken_package_is_told_in_a_line_to_who_asks_for_it(
    simrl: CommandLine, site: Path, code: str, told: str
):
    add(site, "simrl.systems", "halves", code)
    said = simrl.refuses("run", "scenario.yaml", "--system", "halves")
    assert told in said and "halves" in said
    if "System" not in told:
        assert "package theirs" in said
    listed = simrl("systems")
    assert listed.code == 0 and "verl_colocated" in listed.out and "halves" in listed.err


def test_where_a_module_breaks_is_named(simrl: CommandLine, site: Path):
    add(site, "simrl.systems", "halves", "\n\nx = 1 / 0")
    assert f"{site / 'theirs_module.py'}: line 3" in simrl.refuses("systems", "show", "halves")


def test_two_packages_that_add_one_name_are_both_named(simrl: CommandLine, site: Path):
    add(site, "simrl.systems", "halves", SYSTEM.format("return split()"))
    add(site, "simrl.systems", "halves", SYSTEM.format("return split()"), package="others")
    said = simrl.refuses("run", "scenario.yaml", "--system", "halves")
    assert "package others" in said and "package theirs" in said


def test_a_name_that_simrl_has_itself_is_refused_and_not_replaced(simrl: CommandLine, site: Path):
    add(site, "simrl.systems", "areal", SYSTEM.format("return split()"))
    assert "simrl itself and by package theirs" in simrl.refuses(
        "run", "scenario.yaml", "--system", "areal"
    )
    assert simrl("run", "scenario.yaml", "--system", "verl_colocated").code == 0


def test_a_method_called_none_does_not_keep_others_from_the_list(simrl: CommandLine, site: Path):
    add(site, "simrl.speculation", "none", "def mine(): return 3")
    listed = simrl("speculation")
    assert listed.code == 0 and "histospec" in listed.out
    assert "'none' means no drafts; rename it" in listed.err


def test_an_importer_with_a_name_of_simrls_own_is_refused(simrl: CommandLine, site: Path):
    add(site, "simrl.importers", "csv", "def mine(path): return 3")
    words = ("trace", "import", "csv", "scenario.yaml", "-o", "t.parquet")
    code, _, err = in_a_process(simrl, site, *words)
    assert code == 2
    assert "simrl itself and by package theirs" in err


def test_a_scenario_imports_nothing_by_naming_it(simrl: CommandLine, site: Path):
    (site / "lying_around.py").write_text("raise SystemExit('imported')")
    for name in ("lying_around", "lying_around:mine", "lying_around.mine"):
        assert "unknown" in simrl.refuses("run", "scenario.yaml", "--system", name)


def test_a_point_of_a_sweep_is_another_one_when_the_package_is_changed(
    simrl: CommandLine, site: Path
):
    add(site, "simrl.systems", "halves", SYSTEM.format("return split(rollout_share=share)"))
    sweep = ("sweep", "scenario.yaml", "systems=halves", "--jobs", "1", "-o", "points")
    assert "1 simulated now" in simrl(*sweep).out
    assert "0 simulated now" in simrl(*sweep).out
    with (site / "theirs_module.py").open("a") as file:
        file.write("\nanother = 1\n")
    assert "1 simulated now" in simrl(*sweep).out


@pytest.mark.slow
def test_what_an_importer_or_a_profiler_of_a_package_gives_is_looked_at(
    simrl: CommandLine, site: Path
):
    add(site, "simrl.importers", "mine", "def mine(path, factor: int = 1): return 7")
    add(site, "simrl.profilers", "theirs", "def mine(shape, gpu, tp): return 7", package="others")
    imports = ("trace", "import", "mine", "scenario.yaml", "-o", "t.parquet")
    for more, told in (
        ((), "let it give a Trace"),
        (("factor=x",), "factor is 'x'"),
        (("other=1",), "unknown parameter 'other'; it has path, factor"),
    ):
        code, out, err = in_a_process(simrl, site, *imports, *more)
        assert (code, out, err.count("\n")) == (2, "", 1) and told in err
    derives = ("profile", "derive", "qwen3-8b", "--gpu", "h100", "-o", "p.parquet", "--source")
    assert "let it give a TableProfile" in simrl.refuses(*derives, "theirs")
    said = simrl.refuses(*derives, "nobodys")
    assert "choose aiconfigurator or aisimulate or roofline or " in said and said.endswith(
        " or theirs\n"
    )


def test_a_drafter_of_ones_own_does_over_a_trace_what_simrls_own_does():
    """simrl's n-grams as a drafter from elsewhere, a call a token, against their compiled form."""
    trace = random_groups(seed=1)
    slow, fast = drafter_runs(trace, NgramDrafter), ngram_runs(trace)
    for mine, compiled in zip(slow, fast, strict=True):
        assert np.array_equal(mine, compiled)
    assert slow.accepted.any()


@pytest.mark.parametrize("exit_or_error", [ValueError("full"), SystemExit(0)])
def test_a_drafter_of_ones_own_that_raises_or_exits_is_told_in_a_line(exit_or_error):
    class Broken(NgramDrafter):
        def propose(self, requests, most_tokens):
            raise exit_or_error

    words = (
        f"a drafter of a package: raised {type(exit_or_error).__name__}: .*test_extensions.py: line"
    )
    with pytest.raises(InputError, match=words):
        drafter_runs(random_groups(seed=4), Broken)


def test_settings_are_checked_by_the_functions_own_annotations():
    def mine(n: int = 1) -> int:
        return n

    assert checked("mine", mine, n="4") == 4
    with pytest.raises(InputError, match="mine: n is 'x'"):
        checked("mine", mine, n="x")


# The examples of docs/extending.md, as the page uses them.


@pytest.fixture
def examples(site: Path, simrl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command line after `pip install docs/examples`."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    project: dict[str, Any] = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    install(site, project["name"], project["entry-points"])
    return simrl


def row(simrl: CommandLine, *arguments: str) -> dict[str, Any]:
    code, out, err = simrl(
        "run", "scenario.yaml", "steps=8", "warmup_steps=2", *arguments, "--json"
    )
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)[0]
    return found


def test_the_example_pipeline_with_k_1_is_split(examples: CommandLine):
    ours, split = (
        row(examples, "--system", *system)
        for system in (("barrier_every", "k=1"), ("split", "dispatch=least_requests"))
    )
    different = {key for key in ours if ours[key] != split[key]}
    assert different <= {"system", "folder"}


def test_the_example_pipeline_is_never_staler_than_it_says_and_publishes_less(
    examples: CommandLine,
):
    for k in (2, 4):
        found = row(examples, "--system", "barrier_every", f"k={k}")
        assert found["off_policyness_max"] == k - 1
        steps = pq.read_table(
            examples.folder / "results" / "tiny-barrier_every" / found["folder"] / "spans.parquet"
        )
        assert steps.to_pandas().query("kind == 'publish'").shape[0] == 8 // k


def test_the_example_stream_that_goes_as_far_ahead_as_groups_may_be_old_is_areal_that_drops(
    examples: CommandLine,
):
    plain = (
        "dispatch=least_requests",
        "minibatches=1",
        "pause=false",
        "max_concurrent=1000",
        "engine.prefix_caching=true",
    )
    ours = row(examples, "--system", "fresh_stream", "ahead=2", "max_age=2")
    areal = row(examples, "--system", "areal", "eta=2", "on_stale=drop", *plain)
    assert {key for key in ours if ours[key] != areal[key]} <= {"system", "folder"}


def test_the_example_stream_trains_no_older_token_than_it_says_and_its_row_has_what_it_dropped(
    examples: CommandLine,
):
    young = row(examples, "--system", "fresh_stream", "ahead=4", "max_age=1")
    assert young["off_policyness_max"] == 1 and young["stale_samples"] > 0
    samples = pq.read_table(
        examples.folder / "results" / "tiny-fresh_stream" / young["folder"] / "samples.parquet"
    )
    assert samples["status"].to_pylist().count("dropped") == young["stale_samples"]
    old = row(examples, "--system", "fresh_stream", "ahead=4", "max_age=100")
    assert old["off_policyness_max"] > 1 and old["stale_samples"] == 0


def test_the_example_drafter_drafts_what_followed_the_last_n_tokens(examples: CommandLine):
    drafter = METHODS["fixed_suffix"](n=2).make_drafter()
    drafter.start_request(7, prompt_id=0)
    drafter.observe(7, np.array([1, 2, 3, 4, 1, 2], dtype=np.int32))
    (draft,) = drafter.propose([7], [3])
    assert draft.tolist() == [3, 4, 1]
    drafter.observe(7, np.array([9], dtype=np.int32))
    assert drafter.propose([7], [3])[0].tolist() == []


@pytest.mark.slow
def test_the_example_importer_keeps_groups_and_names_the_line_of_what_is_wrong(
    examples: CommandLine, site: Path
):
    imports = ("trace", "import", "groups")
    done = in_a_process(
        examples,
        site,
        *imports,
        str(EXAMPLES / "groups.jsonl"),
        "-o",
        "t.parquet",
        "cap_tokens=384",
    )
    assert done.code == 0, done.err
    trace = read_trace(examples.folder / "t.parquet")
    assert len(trace) == 1024 and set(np.unique(trace.column("sample"))) == set(range(8))
    (examples.folder / "bad.jsonl").write_text(
        '{"step": 0, "prompt": "a", "prompt_tokens": 3, "responses": [{"tokens": "x"}]}\n'
    )
    refused = in_a_process(examples, site, *imports, "bad.jsonl", "-o", "t2.parquet")
    assert refused.code == 2 and refused.err.startswith(
        "simrl: bad.jsonl: line 1: field 'tokens' is 'x'"
    )


def test_the_example_profiler_gives_the_times_that_were_measured(examples: CommandLine):
    derive = (
        "profile",
        "derive",
        "qwen3-8b",
        "--gpu",
        "h100",
        "--source",
        "step_times",
        "-o",
        "p.parquet",
    )
    assert examples(*derive, f"table={EXAMPLES / 'step_times.csv'}").code == 0
    profile = read_profile(examples.folder / "p.parquet")
    for line in (EXAMPLES / "step_times.csv").read_text().splitlines()[1:]:
        phase, n, context, seconds = line.split(",")
        if phase == "decode" and int(context) >= 1024:
            assert profile.decode_s(int(n), int(context)) == pytest.approx(float(seconds), rel=1e-3)
        elif phase == "prefill" and int(n) > 256:
            assert profile.prefill_s(int(n)) == pytest.approx(float(seconds), rel=1e-3)
    assert "no full grid" in examples.refuses(*derive, f"table={_with_a_hole(examples.folder)}")


def _with_a_hole(folder: Path) -> Path:
    lines = (EXAMPLES / "step_times.csv").read_text().splitlines()
    (folder / "hole.csv").write_text("\n".join([*lines[:5], *lines[6:]]))
    return folder / "hole.csv"


def test_a_mapping_without_packages_is_simrls_own():
    own = {"a": int}
    assert dict(Extended(own, "simrl.nothing_of_that_kind", "thing")) == own


def test_a_command_logs_what_a_script_before_it_in_the_same_process_did_not(simrl: CommandLine):
    log = logging.getLogger("simrl")
    log.setLevel(logging.WARNING)
    assert not log.isEnabledFor(logging.INFO)  # which loggers remember
    assert simrl("systems").code == 0
    assert log.isEnabledFor(logging.INFO)
