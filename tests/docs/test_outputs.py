"""docs/outputs.py compares what pages show with what their commands print: what it takes for equal, and what it finds."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs.outputs import ELSEWHERE, PAGES, WRAPPED, blocks, commands, differences, outputs, renewed

ROOT = Path(__file__).parents[2]
TABLE = """\
quickstart: 16 h100
system          samples/s  speed-up
───────────────────────────────────
verl_colocated       14.1     1.00×
one_step_off         29.6     2.09×
Written to results/which
"""


def check(page: Path, text: str, *more: str, do: str = "check") -> tuple[int, str]:
    page.write_text(text)
    arguments = [sys.executable, str(ROOT / "docs" / "outputs.py"), do, str(page), *more]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_what_is_printed_is_equal_whatever_the_width_of_the_rules():
    assert differences(TABLE, TABLE.replace("───", "─")) == []


def test_a_changed_word_is_a_difference():
    assert differences(TABLE, TABLE.replace("one_step_off", "one_step_on ")) == [
        "- one_step_off 29.6 2.09×", "+ one_step_on 29.6 2.09×",
    ]  # fmt: skip


@pytest.mark.parametrize("shown, printed, equal", [
    ("29.6", "30.1", True),  # 2 %
    ("29.6", "30.3", False),
    ("0.02", "0.03", True),  # a unit of the last digit
    ("0.02", "0.04", False),
    ("9.99", "10.0", True),
    ("0", "0.0033", False),
    ("+0.30", "-0.30", False),
    ("1,000", "1,010", True),
    ("2.09×", "2.10×", True),
    ("2.09×", "2.10%", False),
    ("qwen3-8b", "qwen4-8b", False),
    ("eta=4", "eta=5", False),
    ("50:14", "51:13", False),
])  # fmt: skip
def test_a_number_may_differ_by_two_percent_or_a_unit_and_none_within_a_word(
    shown: str, printed: str, equal: bool
):
    assert (differences(f"areal runs at {shown}\n", f"areal runs at {printed}\n") == []) is equal


def test_a_missing_line_is_a_difference_unless_an_ellipsis_stands_for_it():
    lines = TABLE.splitlines(keepends=True)
    assert differences("".join(lines[:3] + lines[4:]), TABLE) == ["+ verl_colocated 14.1 1.00×"]
    assert differences("".join([*lines[:3], "…\n", *lines[4:]]), TABLE) == []
    assert differences("".join(lines[:5]), TABLE) == ["+ Written to results/which"]
    assert differences("".join([*lines[:5], "…\n"]), TABLE) == []


def test_a_line_that_is_no_longer_printed_is_a_difference():
    assert differences(TABLE, TABLE.replace("Written to results/which\n", "")) == [
        "- Written to results/which"
    ]


def test_shown_lines_appear_in_their_order():
    assert (
        differences("…\nWritten to results/which\n…\nverl_colocated 14.1 1.00×\n…\n", TABLE) != []
    )


def test_an_ellipsis_in_a_line_stands_for_any_words():
    assert differences("took … s of 2 cores\n", "took 12 s of 2 cores\n") == []
    assert differences("took … s of 2 cores\n", "took 12 s of 2 nodes\n") != []


def test_the_breaks_of_a_paragraph_do_not_count_and_its_end_may_be_left_out():
    printed = f"Not modelled: what stale tokens do {WRAPPED}\nto learning\nRanking: unchanged\n"
    assert (
        differences(
            "Not modelled: what stale tokens do to\nlearning\nRanking: unchanged\n", printed, 40
        )
        == []
    )
    assert differences("Not modelled: what stale …\nRanking: unchanged\n", printed, 40) == []
    assert (
        differences("Not modelled: what stale tokens do\nRanking: unchanged\n", printed, 40) != []
    )


def test_renewing_takes_the_numbers_and_keeps_what_is_left_out():
    shown = "system  samples/s\n…\none_step_off  20.0  1.50×\n…\n"
    new, lost = renewed(shown, TABLE.partition("\n")[2])
    assert lost == []
    assert new == "system          samples/s  speed-up\n…\none_step_off         29.6     2.09×\n…\n"
    assert differences(new, TABLE.partition("\n")[2]) == []


def test_renewing_shows_a_line_that_is_new_among_the_shown_ones_and_names_one_without_a_place():
    lines = TABLE.splitlines(keepends=True)
    new, lost = renewed("".join([*lines[:3], *lines[4:], "…\n", "Cost at 2.5 a GPU-hour\n"]), TABLE)
    assert "verl_colocated       14.1" in new and lost == ["Cost at 2.5 a GPU-hour"]


def test_a_page_is_run_in_order_and_its_stale_output_found_and_renewed(tmp_path: Path):
    page = tmp_path / "page.md"
    fences = '```sh\npython -c \'print("seven", 7.00, file=open("a", "w")); print("made")\'\n```\n\nThen:\n\n{}\n'
    text = fences.format("<!-- python -c 'print(open(\"a\").read())' -->\n\n```\nseven {}\n```")
    assert check(page, text.format("7.05"))[0] == 0
    code, said = check(page, text.format("9"))
    assert code == 1 and "page.md:9:\n    - seven 9\n    + seven 7.0" in said
    assert check(page, text.format("9"), do="write")[0] == 0
    assert page.read_text() == text.format("7.0")


def test_a_command_of_simrl_and_a_block_of_python_are_run(tmp_path: Path):
    python = "```python\nx = 41\n```\n\n```python\nprint(x + 1)\n```\n\n```\n42\n```\n"
    assert (
        check(tmp_path / "page.md", "```sh\nsimrl --version\n```\n\n```\n0.1.0\n```\n" + python)[0]
        == 0
    )


@pytest.mark.parametrize("text, said", [
    ("```sh\nsimrl compare none.yaml\n```\n\n```\n1\n```\n", "exit code 1: simrl: none.yaml"),
    ("```python\nraise OSError('lost')\n```\n\n```\n1\n```\n", "OSError: lost"),
    ("```\nsamples/s 3\n```\n", "an output without a command"),
    ("```sh\nsimrl --version\n```\n\nSo:\n\n```\n0.1.0\n```\n", "an output without a command"),
    ("```sh\nsimrl --version\n```\n\n```text\n0.1.0\n```\n", "an output is not marked text"),
    ("```sh\nsimrl --version\n```\n\n<!-- nightly -->\n\n```\n0.1.0\n```\n", "mark them console"),
    ("<!-- rm -r results -->\n\n```\n0.1.0\n```\n", "neither simrl nor python: rm"),
])  # fmt: skip
def test_a_command_that_fails_and_an_output_without_one_end_the_check(
    tmp_path: Path, text: str, said: str
):
    code, report = check(tmp_path / "page.md", text)
    assert code == 1 and said in report, report


def test_what_takes_long_is_compared_at_night(tmp_path: Path):
    text = "```console\nsimrl --version\n```\n\n<!-- nightly -->\n\n```\nanother\n```\n"
    assert check(tmp_path / "page.md", text)[0] == 0
    assert check(tmp_path / "page.md", text, "--nightly")[0] == 1


@pytest.mark.parametrize("page", PAGES)
def test_every_output_of_a_page_has_a_command(page: str):
    assert [
        output.problem
        for output in outputs((ROOT / page).read_text(encoding="utf-8"))
        if output.problem
    ] == []


def test_what_ci_cannot_make_is_shown_somewhere_and_says_where_it_was_made():
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    for start, (_, where) in ELSEWHERE.items():
        assert [
            text
            for text in texts
            for output in outputs(text)
            if output.elsewhere == start and where in text
        ], start


def test_commands_end_at_lines_and_at_ands():
    (block,) = blocks("```sh\na \\\n  b  # c\nd && e\n```\n")
    assert commands(block.text) == [["a", "b"], ["d"], ["e"]]
