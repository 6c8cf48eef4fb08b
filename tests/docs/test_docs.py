"""What the pages tell people to type is there: simrl has the commands and options, the repository the files they name.

`docs/outputs.py check` runs blocks marked `sh` and `python` and compares what is shown of their output; it says how blocks are
marked. tests/docs/test_outputs.py tests it.
"""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
import typer
import yaml

from docs.outputs import EXECUTED, PAGES as RUN_PAGES, PRINTED, Block, blocks as blocks_of, commands
from simrl.commands import cli

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PARSED = ("console",)
OTHERS = ("text", "yaml", "toml", "json", PRINTED)  # what is no command, and files
PAGES = [
    *RUN_PAGES,
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "experiments").glob("*.md")),
]


def blocks(page: str) -> list[Block]:
    return blocks_of((ROOT / page).read_text(encoding="utf-8"))


def of_simrl(page: str, languages: tuple[str, ...]) -> list[list[str]]:
    every = [
        words
        for block in blocks(page)
        if block.language in languages
        for words in commands(block.text)
    ]
    return [words[1:] for words in every if words[0] == "simrl"]


def parsed(words: list[str]) -> None:
    """Raises where simrl has no such command or option; runs nothing."""
    command = typer.main.get_command(cli.make_app())
    context = command.make_context("simrl", list(words), resilient_parsing=True)
    name, command, rest = command.resolve_command(context, list(words))
    while hasattr(command, "resolve_command") and rest:
        context = command.make_context(name, list(rest), parent=context, resilient_parsing=True)
        name, command, rest = command.resolve_command(context, rest)
    command.make_context(name, list(rest), parent=context)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str):
    for block in blocks(page):
        assert block.language in (*EXECUTED, *PARSED, *OTHERS), f"line {block.line}"
        if block.language == "":
            looks_like = re.match(r"\s*(simrl|python|pip|duckdb) ", block.text)
            assert not looks_like, f"line {block.line}: commands; mark them sh or console"


@pytest.mark.parametrize("page", [page for page in PAGES if of_simrl(page, PARSED)])
def test_commands_that_are_not_run_are_ones_that_simrl_has(page: str):
    for words in of_simrl(page, PARSED):
        parsed(words)


@pytest.mark.parametrize("page", PAGES)
def test_every_shipped_file_that_a_command_names_is_there(page: str):
    every = [
        words
        for block in blocks(page)
        if block.language in ("sh", "console")
        for words in commands(block.text)
    ]
    made = {words[words.index("-o") + 1] for words in every if "-o" in words}
    named = {
        word.partition("=")[2] if re.match(r"[\w.]+=", word) else word
        for words in every
        for word in words
    }
    shipped = {
        word
        for word in named
        if re.match(r"(docs|experiments|profiles|traces|replay)/[^*]+$", word)
    }
    assert [word for word in sorted(shipped - made) if not (ROOT / word).exists()] == []


BOARDS = ("scoreboard", "rhymerl_map", "specactor_map")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {
        "".join(c for c in h.lower().replace(" ", "-") if c.isalnum() or c in "-_") for h in plain
    }


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_every_link_leads_somewhere(page: str):
    text = re.sub(
        r"^```.*?^```$",
        "",
        (ROOT / page).read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = unquote(target).partition("#")
        to = (ROOT / page).parent / path if path else ROOT / page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        *(f"experiments/published/{name}.md" for name in BOARDS),
        "experiments/bench/peers.md",
    ],
)
def test_every_image_says_in_words_what_one_sees(page: str):
    said = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    for words, file in said:
        assert len(re.findall(r"\w+", words)) >= 5, file
        assert [other for other in said if other[0] == words] == [(words, file)], (
            "two images say it"
        )


def test_every_page_of_the_documentation_is_in_its_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_the_page_of_extensions_has_the_files_that_are_run():
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = [EXAMPLES / "pyproject.toml", *EXAMPLES.glob("*.py")]
    assert len(files) == 6
    for file in files:
        assert (
            f"```{'toml' if file.suffix == '.toml' else 'python'}\n{file.read_text()}```\n" in page
        ), file.name


def test_the_page_of_scenarios_is_what_the_models_say():
    assert (ROOT / "docs" / "scenario.md").read_text(encoding="utf-8") == script(
        "scenario_page"
    ).page(), "run python docs/scenario_page.py"


def test_the_page_of_systems_and_that_of_methods_have_all_of_them():
    from simrl.speculation.methods import METHODS
    from simrl.systems.recipes import RECIPES

    for page, names in (("systems.md", RECIPES.own), ("speculation.md", METHODS.own)):
        rows = re.findall(
            r"^\|(.*)\|$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE
        )
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert set(names) <= named, page


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    table = re.search(r"^\|[^\n]*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, heading
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table[1].splitlines()]


def test_the_page_of_launches_has_every_framework_with_its_release_and_its_systems():
    from simrl.launch.tables import TABLES

    rows = {cells[0]: cells for cells in rows_of("launch.md", "What is read")}
    assert rows.keys() == {table.title for table in TABLES}
    for table in TABLES:
        _, _, release, systems = rows[table.title]
        assert release.split(" (")[0] == table.version, table.title
        named = {name for name in re.findall(r"`([a-z_0-9]+)`", systems)}
        assert named == {rule.name for rule in table.systems}, table.title


def test_the_page_of_launches_has_the_questions_and_what_is_assumed():
    from simrl.launch.translate import QUESTIONS

    rows = [cells[:2] for cells in rows_of("launch.md", "Without a file")]
    every = [[one["question"], one["answer"]] for one in QUESTIONS.values() if "question" in one]
    assert rows == every and len(rows) == 6
    page = " ".join(cells[2] for cells in rows_of("launch.md", "What is missing"))
    for one in QUESTIONS.values():
        for option in re.findall(r"--[a-z-]+", one.get("option", "")):
            assert option in page, option


def test_the_table_of_a_framework_on_the_page_of_extensions_reads_a_launch(tmp_path, monkeypatch):
    from simrl.launch import settings, tables
    from simrl.launch.translate import translate

    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    table = page.partition("## The launch of a framework")[2].partition("```toml\n")[2]
    (tmp_path / "tiny.toml").write_text(table.partition("```\n")[0], encoding="utf-8")
    monkeypatch.setattr(tables, "FRAMEWORK_FILES", [tmp_path / "tiny.toml"])
    monkeypatch.setattr(settings, "TABLES", tables._tables())
    (tmp_path / "run.sh").write_text(
        "python -m tinyrl.train model.path=Qwen/Qwen3-8B tiny.batch_samples=512 tiny.nodes=2"
        " tiny.offload=true optim.lr=1e-6 tiny.unheard_of=1",
        encoding="utf-8",
    )
    translation = translate(settings.read_launch(tmp_path / "run.sh"), {})
    data = translation.data
    assert (data["model"], data["cluster"]["gpus"]) == ("qwen3-8b", 16)
    assert data["workload"]["synthetic"]["prompts_per_step"] == 64
    assert data["engine"]["max_num_seqs"] == 512 and data["training"]["offload"] == "phases"
    assert data["systems"][0]["name"] == "verl_colocated"
    assert [key.key for key in translation.of("not understood")] == ["tiny.unheard_of"]


def test_the_citation_has_what_its_format_requires_and_the_version_and_licence_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited[
        "cff-version"
    ] == "1.2.0"
    assert all("name" in author or "family-names" in author for author in cited["authors"])
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])


def test_the_glossary_has_the_columns_of_a_comparison_and_the_words_of_its_fields():
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = {
        word.strip(" `")
        for row in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
        for word in re.split(r"[,(]", row)
    }
    asked = "rollout group policy version off-policyness staleness tail bubble occupancy settled dispatch weight sync tp dp ep"
    assert {
        word.strip(" )`") for word in ("off-policyness", "occupancy", "settled", "bubble")
    } <= words
    assert [word for word in asked.split() if word not in page] == []
    for page in ("README.md", "docs/getting_started.md"):
        assert "glossary.md)" in (ROOT / page).read_text(encoding="utf-8"), page


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
