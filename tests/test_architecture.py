"""Imports run one way, checked from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A folder may import from the folders before it, wherever in a file the import is written (also inside a function, where it is
# only later); what stands in one line may not import each other. The files of a folder may import each other. A new folder gets
# its place here.
LAYERS = (
    "errors",
    "interrupts validation",
    "extensions files",  # the files at simrl's top, used by all
    "profile",
    "training",
    "trace",
    "result",
    "speculation",
    "engine",
    "scenario",
    "runtime",
    "dispatch",
    "pipelines",
    "systems",
    "simulate",
    "analysis",
    "launch",
    "study",
    "show",
    "commands",
)
HEAVY = {
    "torch",
    "vllm",
    "ray",
    "transformers",
    "tokenizers",
    "aiconfigurator",
    "aiconfigurator_core",
}

LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}
SOURCES = sorted((ROOT / "simrl").rglob("*.py"))
WITHOUT_WRAPPER = {"part", "lean"}
COMPILED = {"kernel", "lean_kernel", "threaded", "inlined", "njit"} | WITHOUT_WRAPPER


def place(path: Path) -> str:
    """The module or package below simrl that a file belongs to."""
    return path.relative_to(ROOT / "simrl").parts[0].removesuffix(".py")


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Every module that is imported, as written or as `from x import y` may mean it, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{package}, line {node.lineno}: a relative import; write it out"
            )
            for alias in node.names:
                named = node.module == "simrl" and alias.name in LAYER_OF
                yield (f"simrl.{alias.name}" if named else str(node.module)), node.lineno


def decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names of a function's decorators, without arguments."""
    return {ast.unparse(each).partition("(")[0] for each in function.decorator_list}


def at_import_time(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not the bodies of functions, nor what is for type checkers."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        yield node
        todo += _statements(node)


def _statements(node: ast.stmt) -> list[ast.stmt]:
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(node, "handlers", [])]
    return [statement for block in blocks for statement in block]


def test_every_module_has_its_place():
    assert not {place(path) for path in SOURCES} - {"__init__", *LAYER_OF}, (
        "give it a line in LAYERS"
    )


def test_python_calls_no_compiled_function_without_a_wrapper_for_it():
    """Such a call ends the process (`simrl.profile.compiled`)."""
    folders = ("simrl", "replay", "experiments", "tests")
    trees = {
        path: ast.parse(path.read_text())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    functions = {
        path: [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for path, tree in trees.items()
    }
    parts = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): {
            f.name for f in found if decorators(f) & WITHOUT_WRAPPER
        }
        for path, found in functions.items()
    }
    wrong = []
    for path, tree in trees.items():
        names = set(parts[".".join(path.relative_to(ROOT).with_suffix("").parts)])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {
                    alias.asname or alias.name
                    for alias in node.names
                    if alias.name in parts.get(node.module or "", ())
                }
        compiled = {
            id(node) for f in functions[path] if decorators(f) & COMPILED for node in ast.walk(f)
        }
        used = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        ]
        wrong += [
            f"{path}:{node.lineno}"
            for node in used
            if node.id in names and id(node) not in compiled
        ]
    assert not wrong


def test_a_module_imports_only_what_stands_above_it():
    """I37: imports run one way."""
    wrong = []
    for path in SOURCES:
        own = place(path)
        for name, line in imports(ast.parse(path.read_text()), own):
            top, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if top in ("simrl_replay", "tests", "experiments"):
                wrong.append(f"{path.name}:{line} imports {name}")
            elif (
                top == "simrl"
                and own != "__init__"
                and other not in ("", own)
                and LAYER_OF[other] >= LAYER_OF[own]
            ):
                wrong.append(f"{path.name}:{line} imports {name}, which does not stand above {own}")
    assert not wrong


def test_importing_simrl_imports_no_engine_no_framework_and_no_profiler():
    eager = [
        f"{path.name}:{line} imports {name}"
        for path in SOURCES
        for statement in at_import_time(ast.parse(path.read_text()))
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name, line in imports(statement, place(path))
        if name.split(".")[0] in HEAVY
    ]
    assert not eager, "import it inside the function that needs it"


SCHEDULES = ("dispatch", "pipelines", "systems")
COMPILING = ("numba", "simrl.engine", "simrl.profile.compiled")


def test_schedules_name_no_engine_and_no_compiler_anywhere():
    """I38: schedules know workers by their protocol."""
    paths = [path for path in SOURCES if place(path) in SCHEDULES]
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in paths
        for name, line in imports(ast.parse(path.read_text()), place(path))
        if name.startswith(COMPILING)
    ]
    assert len(paths) > 30 and not wrong, (
        "ask the worker's protocol; the engine is built in `simulate`"
    )


def test_schedules_the_trainer_and_methods_are_imported_without_engine_and_compiler():
    """I38: schedules load no engine and no compiler."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if place(path) in SCHEDULES
    ]
    modules += ["simrl.runtime.trainer", "simrl.runtime.worker", "simrl.speculation.methods"]
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)".replace(".__init__", "")
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "simrl.dispatch.dispatcher" in loaded
    assert not [name for name in loaded if name.startswith(COMPILING)]


def test_listing_systems_and_methods_loads_no_compiler_and_no_tables():
    program = "import sys; from simrl.commands.systems import *; systems(); speculation(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"numba", "pyarrow", "pandas", "scipy", "matplotlib"} & set(loaded)


def test_the_check_itself_sees_imports_wherever_they_stand():
    tree = ast.parse(
        "import torch\n"
        "try:\n    import ray.util\nexcept ImportError:\n    import vllm\n"
        "class A:\n    from transformers import B\n    def f(self):\n        import aiconfigurator\n"
        "if TYPE_CHECKING:\n    import tokenizers\n"
        "from simrl import commands, __version__\n"
    )
    eager = {
        n
        for s in at_import_time(tree)
        if isinstance(s, ast.Import | ast.ImportFrom)
        for n, _ in imports(s, "")
    }
    assert eager == {"torch", "ray.util", "vllm", "transformers", "simrl.commands", "simrl"}
    assert {name for name, _ in imports(tree, "")} == eager | {"aiconfigurator", "tokenizers"}


def test_no_rule_of_a_schedule_looks_up_what_a_sample_will_turn_out_to_be():
    """I35: samples do not carry their lengths (`Sample._fields`); the look-up of workers and rewarders is not for rules."""
    rules = [
        *(ROOT / "simrl" / "pipelines").glob("*.py"),
        *(ROOT / "simrl" / "dispatch").glob("*.py"),
    ]
    rules += [ROOT / "simrl" / "runtime" / name for name in ("history.py", "faults.py")]
    assert len(rules) > 20
    for path in rules:
        for node in ast.walk(ast.parse(path.read_text())):
            looked_up = isinstance(node, ast.Attribute) and node.attr in (
                "responses",
                "_responses",
                "_trace",
            )
            named = isinstance(node, ast.ImportFrom) and any(
                alias.name in ("Response", "Turn", "Trace") for alias in node.names
            )
            assert not looked_up and not named, f"{path.name}, line {node.lineno}"


def test_the_learning_side_of_an_rl_run_knows_nothing_of_schedules():
    """Tasks, policy, loss and update import of this project each other, in this order, errors, files and validation."""
    order = ["tasks", "policy", "evaluate", "warm_up", "loss", "update"]
    for i, name in enumerate(order):
        path = ROOT / "replay" / "simrl_replay" / "grpo" / f"{name}.py"
        allowed = {
            "simrl.errors",
            "simrl.files",
            "simrl.validation",
            *(f"simrl_replay.grpo.{above}" for above in order[:i]),
        }
        for imported, line in imports(ast.parse(path.read_text()), name):
            own = imported.split(".")[0] in ("simrl", "simrl_replay")
            assert not own or imported in allowed, f"{path.name}:{line} imports {imported}"
