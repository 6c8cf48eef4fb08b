"""The page of questions: what it tells people to type is there, and the quick commands run, in the order of the page."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from command_line import CommandLine

from simrl import cli

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "questions.md"
QUICK, LONGER = (
    "sh",
    "console",
)  # the page's rule: `sh` runs in seconds on a base install, `console` takes longer or needs more


def commands(language: str) -> list[list[str]]:
    """The words of each `simrl` command in the page's blocks of a language; a backslash ends no command."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return [shlex.split(line) for line in lines]


def parsed(words: list[str]) -> None:
    """Raises where simrl has no such command or option; runs nothing."""
    command = typer.main.get_command(cli.app)
    context = command.make_context("simrl", words, resilient_parsing=True)
    name, command, rest = command.resolve_command(context, words)
    while hasattr(command, "resolve_command") and rest:
        context = command.make_context(name, list(rest), parent=context, resilient_parsing=True)
        name, command, rest = command.resolve_command(context, rest)
    command.make_context(name, list(rest), parent=context)


@pytest.fixture
def checkout(simrl: CommandLine) -> CommandLine:
    """The command line where the page's paths are those of this checkout, and results go elsewhere."""
    for name in ("experiments", "profiles", "traces"):
        (simrl.folder / name).symlink_to(ROOT / name)
    return simrl


def test_every_command_of_the_page_is_one_that_simrl_has():
    found = [*commands(QUICK), *commands(LONGER)]
    assert len(found) > 10
    for words in found:
        assert words[0] == "simrl", words
        parsed(words[1:])


def test_every_shipped_file_that_the_page_names_in_a_command_is_there():
    named = {word for words in [*commands(QUICK), *commands(LONGER)] for word in words[1:]}
    shipped = {word for word in named if re.match(r"(experiments|profiles|traces)/", word)}
    assert shipped
    assert [word for word in sorted(shipped) if not (ROOT / word).exists()] == []


def test_the_quick_commands_run_one_after_the_other(checkout: CommandLine):
    for words in commands(QUICK):
        code, out, err = checkout(*words[1:])
        assert code == 0, f"{shlex.join(words)}: {err}"
        assert out.strip(), shlex.join(words)


def test_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target
