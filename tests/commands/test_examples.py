"""What comes with simrl: profiles, examples and their traces, in a checkout and in an installed package, and in the help."""

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from simrl.commands import cli
from simrl.commands.examples import shipped_examples
from simrl.profile import shipped
from simrl.scenario.load import load_scenarios
from tests.command_line import ROOT, environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INCLUDED: dict[str, str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]


def test_a_wheel_carries_the_profiles_and_all_that_the_examples_need_in_the_folders_of_the_checkout():
    needed = {file for example in shipped_examples().values() for file in example.files}
    assert {path: f"simrl/shipped/{path}" for path in ("profiles", *sorted(needed))} == INCLUDED


def test_an_archive_of_the_source_has_what_the_wheel_is_made_of():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for path in (*INCLUDED, *PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]):
        assert any(
            Path(f"/{path}").match(each) or f"/{path}/".startswith(f"{each}/") for each in included
        ), path


def test_a_checkout_has_its_own_profiles_and_examples():
    assert shipped.ROOT == ROOT
    assert {"quickstart", "math_14b", "own_run"} <= shipped_examples().keys()
    assert all(
        (ROOT / file).is_file() for example in shipped_examples().values() for file in example.files
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with simrl as a wheel lays it out."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "simrl", site / "simrl", ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in INCLUDED.items():
        (site / target).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
        copy(ROOT / source, site / target)
    return site


def test_an_installed_simrl_finds_its_profiles_and_writes_its_examples(installed, tmp_path):
    code = (
        "import sys; from simrl.commands import cli; from simrl.profile.shipped import ROOT, shipped_profile\n"
        "print(ROOT, shipped_profile('qwen3-8b', 'h100', 1)); sys.argv = ['simrl', 'examples', 'copy', 'quickstart']\n"
        "cli.main()"
    )
    own = {**environment(), "PYTHONPATH": str(installed), "NUMBA_DISABLE_JIT": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = installed / "simrl" / "shipped"
    assert (
        ended.stdout.splitlines()[0]
        == f"{found} {found / 'profiles' / 'qwen3-8b_h100_tp1.parquet'}"
    )
    assert ended.stdout.endswith("Next:  simrl compare experiments/quickstart.yaml\n")
    assert (tmp_path / "traces/countdown/sync/trace.parquet").is_file()


@pytest.mark.parametrize("name", sorted(shipped_examples().keys() - {"own_run"}))
def test_an_example_can_be_simulated_where_it_was_copied(simrl, name):
    assert simrl("examples", "copy", name, "mine").code == 0
    for scenario in load_scenarios(simrl.folder / "mine" / "experiments" / f"{name}.yaml"):
        nearby = shipped.layouts(
            scenario.model, scenario.cluster.gpu
        )  # what an unshipped layout is derived from
        assert Path(scenario.profile.path or "").is_file() or nearby, scenario.profile.path
        assert scenario.workload.trace is None or Path(scenario.workload.trace).is_file()


def test_the_questions_of_dapo_and_of_the_mixture_have_the_published_batches_and_every_layout():
    published = load_scenarios(ROOT / "experiments" / "dapo_32b.yaml")
    assert {
        (each.cluster.gpus, each.cluster.tp, each.training.sequence_parallel) for each in published
    } == {(128, 4, 8)}
    lengths = published[0].workload.synthetic
    assert lengths is not None
    assert (lengths.prompts_per_step, lengths.group, lengths.cap_tokens) == (512, 16, 20480)
    layouts = [
        (each.cluster.tp, each.cluster.ep, each.precision.weights)
        for each in load_scenarios(ROOT / "experiments" / "moe_235b.yaml")
    ]
    assert {(8, 8, "bf16"), (8, 8, "fp8-block")} <= set(layouts), "one layout in both precisions"


def test_an_example_is_never_written_over_another_file(simrl):
    assert simrl("examples", "copy", "math_14b").code == 0
    assert simrl("examples", "copy", "math_14b").code == 0, "equal files are left"
    (simrl.folder / "experiments" / "math_14b.yaml").write_text("name: mine\n")
    assert "exists and is not simrl's; name another folder" in simrl.refuses(
        "examples", "copy", "math_14b"
    )


def test_an_unknown_example_is_refused_with_the_one_that_is_near(simrl):
    assert "example 'math14b' is unknown (did you mean math_14b?)" in simrl.refuses(
        "examples", "copy", "math14b"
    )


def test_all_examples_are_copied_without_a_name(simrl):
    assert simrl("examples", "copy").code == 0
    assert {
        file.stem for file in (simrl.folder / "experiments").iterdir()
    } == shipped_examples().keys() - {"own_run"}


def helps() -> Iterator[str]:
    """The examples of every help."""

    def below(command: Any) -> Iterator[str]:
        yield from (
            (command.epilog or "")
            .replace("\\[", "[")
            .partition("Example")[2]
            .split(":  ", 1)[-1]
            .split("   |   ")
        )
        for inner in getattr(command, "commands", {}).values():
            yield from below(inner)

    yield from (
        each for each in below(typer.main.get_command(cli.make_app())) if each.startswith("simrl ")
    )


@pytest.mark.parametrize("example", list(dict.fromkeys(helps())))
def test_an_example_in_a_help_is_a_command_that_simrl_has_on_files_that_it_ships(example):
    words = shlex.split(example)[1:]
    command: Any = typer.main.get_command(cli.make_app())
    context = command.make_context("simrl", [], resilient_parsing=True)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    if "--help" not in words:
        command.make_context(command.name, words, parent=context)
    shipped_files = [file for one in shipped_examples().values() for file in one.files]
    for word in words:
        if word.startswith(("experiments/", "profiles/", "docs/")) and os.sep in word:
            assert word in shipped_files, f"{word} is not in an installed simrl"
