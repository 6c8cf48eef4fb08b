"""The page of invariants and the tests that hold them name each other; the eight steps of a sample name functions."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CITED = re.compile(r"(I\d+(?:, I\d+)*): ")


def laws() -> list[tuple[str, list[str]]]:
    """Each number of the page, and the tests named with it."""
    page = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    items = re.findall(r"^- \*\*(I\d+)\.\*\* (.*(?:\n  .*)*)", page, re.MULTILINE)
    return [(number, re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)) for number, text in items]


def citations() -> set[tuple[str, str]]:
    """Each number that a test's docstring begins with, and the test."""
    cited = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and (
                numbers := CITED.match(ast.get_docstring(function) or "")
            ):
                test = f"{path.relative_to(ROOT).as_posix()}::{function.name}"
                cited |= {(number, test) for number in numbers[1].split(", ")}
    return cited


def test_laws_are_numbered_in_order_and_each_has_a_test():
    numbered = laws()
    assert [number for number, _ in numbered] == [f"I{i}" for i in range(1, len(numbered) + 1)]
    assert len(numbered) > 30 and all(tests for _, tests in numbered)


def test_a_law_names_the_tests_that_cite_it_and_no_test_cites_another_number():
    named = {(number, test) for number, tests in laws() for test in tests}
    assert named == citations()


def names_of(path: Path) -> set[str]:
    """The functions of a file, and its methods with their class."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return names


def test_the_eight_steps_of_a_sample_each_name_a_function_that_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d\. \*\*[^*]+\*\* `([\w/]+\.py)`, `([\w.]+)`", page, re.MULTILINE)
    assert len(steps) == len({file for file, _ in steps}) == 8
    assert [step for step in steps if step[1] not in names_of(ROOT / "simrl" / step[0])] == []
