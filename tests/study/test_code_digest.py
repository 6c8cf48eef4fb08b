"""The digest of the code moves with everything that may move a point's row, and with nothing else."""

import ast
import shutil
from pathlib import Path

import pytest

import simrl
from simrl.study.code_digest import code_digest, digest_of, imported

INSTALLED = Path(simrl.__file__).parent
MODULES = sorted(imported(INSTALLED))
# A row rests on these, whatever else it rests on.
ROOMS = {
    "dispatch",
    "engine",
    "pipelines",
    "profile",
    "result",
    "runtime",
    "scenario",
    "simulate",
    "speculation",
    "systems",
    "trace",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("code") / "simrl"
    shutil.copytree(INSTALLED, root, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def digest_with(copy):
    """The digest of the copy with other contents of one file, which is put back."""

    def digest(path, content):
        file, before = copy / path, (copy / path).read_bytes() if (copy / path).exists() else None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            return digest_of(copy)
        finally:
            file.unlink() if before is None else file.write_bytes(before)

    return digest


def source(path):
    return (INSTALLED / path).read_text()


def with_other_words(text):
    """Every docstring of a source edited, with a comment more."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            last = node.body[0].end_lineno - 1
            head, quotes, tail = lines[last].rpartition('"""')
            lines[last] = f"{head} Edited.{quotes}{tail}"
    return "".join([*lines, "# Edited.\n"])


def with_another_constant(text):
    """The last number of a source (or text that is no docstring) changed; None if it has none."""
    tree = ast.parse(text)
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and n.value is not None and id(n) not in loose
    ]
    if not constants:
        return None
    constants[-1].value = "changed"
    return ast.unparse(tree)


def test_the_rooms_that_simulate_count_and_those_that_show_do_not():
    rooms = {path.split("/")[0] for path in MODULES if "/" in path}
    assert rooms >= ROOMS
    assert not rooms & {"analysis", "show", "commands"}
    assert not [
        path
        for path in MODULES
        if path.startswith("study/")
        and path.split("/")[1] not in {"__init__.py", "point.py", "code_digest.py"}
    ]


def test_a_copy_elsewhere_has_the_digest_of_the_original(copy):
    assert digest_of(copy) == code_digest()


@pytest.mark.parametrize(
    "path",
    [p if i % 9 == 0 else pytest.param(p, marks=pytest.mark.slow) for i, p in enumerate(MODULES)],
)
def test_a_docstring_keeps_the_digest_and_code_changes_it(digest_with, path):
    text = source(path)
    assert digest_with(path, with_other_words(text)) == code_digest()
    assert digest_with(path, text + "\nmutated = 1\n") != code_digest()
    constant = with_another_constant(text)
    assert constant is None or digest_with(path, constant) != code_digest()


def test_each_data_file_of_a_room_that_simulates_changes_the_digest(copy, digest_with):
    files = [
        path.relative_to(copy)
        for path in copy.rglob("*")
        if path.is_file() and path.suffix != ".py"
    ]
    for path in files:
        changed = digest_with(path, (copy / path).read_bytes() + b"\n") != code_digest()
        simulates = (
            path.parts[0] in ROOMS and path.parts[1] != "importers"
        )  # whose modules no simulation imports
        assert changed == (simulates or len(path.parts) == 1), path


def test_a_data_file_that_is_added_counts_in_a_room_that_simulates_alone(digest_with):
    assert digest_with("profile/gpus.toml", "[h100]") != code_digest()
    assert digest_with("profile/tables/gpus.toml", "[h100]") != digest_with(
        "profile/gpus.toml", "[h100]"
    )
    assert digest_with("show/report/more.css", "a {}") == code_digest()
    assert digest_with("shipped/profiles/qwen.parquet", "") == code_digest()
    assert digest_with("profile/__pycache__/x.pyc", "") == code_digest()


@pytest.mark.slow
def test_modules_that_nothing_simulated_imports_keep_the_digest(digest_with):
    others = {path.relative_to(INSTALLED).as_posix() for path in INSTALLED.rglob("*.py")} - set(
        MODULES
    )
    for path in others:
        assert digest_with(path, source(path) + "\nmutated = 1\n") == code_digest(), path
    assert {path.split("/")[0] for path in others} >= {"analysis", "show", "commands", "study"}


def test_a_module_is_found_through_a_function_and_not_through_what_type_checkers_see(copy):
    file = copy / "result/metrics.py"
    before = file.read_text()
    (copy / "result/added.py").write_text("A = 1\n")
    try:
        file.write_text(before + "\ndef f():\n    from simrl.result import added\n")
        assert imported(copy) == {*MODULES, "result/added.py"}
        file.write_text(before + "\nif TYPE_CHECKING:\n    from simrl.result import added\n")
        assert imported(copy) == set(MODULES)
    finally:
        file.write_text(before)
        (copy / "result/added.py").unlink()
