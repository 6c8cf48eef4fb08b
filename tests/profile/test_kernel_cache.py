"""Compiled kernels are kept in files that are checked before they are loaded."""

import gc
import importlib
import os
import pkgutil
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba.core import codegen, compiler
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError

import simrl
from simrl.profile import kernel_cache
from tests.command_line import environment

ROOT = Path(__file__).parents[2]
X86_64_V3 = kernel_cache.runs_shipped(codegen.get_host_cpu_features())
CALLEE = """
from typing import NamedTuple
from simrl.profile.compiled import part

FACTOR = 2

class Pair(NamedTuple):
    first: int
    second: int

@part
def scaled(x):
    \"\"\"Scale.\"\"\"
    return x * FACTOR
"""
CALLER = """
from simrl.profile.compiled import kernel
from toy_callee import Pair, scaled

@kernel
def total(x):
    return scaled(x) + 1

@kernel
def difference(pair):
    return pair.first - pair.second
"""


class Toys:
    """Two modules with kernels in a folder, and a folder of caches."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.cache = place / "toys", place / "cache" / "simrl" / "kernels"
        self.place.mkdir()
        self.write(CALLEE)
        monkeypatch.setattr(sys, "path", [str(self.place), *sys.path])
        monkeypatch.setattr(
            sys, "dont_write_bytecode", True
        )  # an edit within a second would not be noticed
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
        monkeypatch.setattr(kernel_cache.config, "CACHE_DIR", "")
        monkeypatch.setattr(kernel_cache, "SHIPPED", place / "shipped")
        kernel_cache._note.cache_clear()

    def write(self, callee: str) -> None:
        (self.place / "toy_callee.py").write_text(callee)
        (self.place / "toy_caller.py").write_text(CALLER)

    def load(self) -> Any:
        """Imports the modules anew, as a new process does."""
        for name in ("toy_callee", "toy_caller"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("toy_caller")

    def call(self) -> tuple[int, bool]:
        """What `total(3)` is, and whether it was compiled for that."""
        total = self.load().total
        return total(3), bool(total.stats.cache_misses)

    def files(self, name: str = "total") -> list[Path]:
        return sorted(self.cache.glob(f"toy_caller.{name}*"))

    def file(self) -> Path:
        (file,) = self.files()
        return file

    def key(self) -> tuple[str, str]:
        """What the file of `total(3)` answers for."""
        total = self.load().total
        return total._cache._key(
            (kernel_cache.types.int64,), total.targetctx.codegen().magic_tuple()
        )

    def ship(self) -> Path:
        """Compiles for the processors that wheels are for, and gives the file that a wheel would have."""
        if not X86_64_V3:
            pytest.skip(
                "wheels have kernels for x86-64-v3 on Linux, which this machine is not, or NUMBA_CPU_NAME is set"
            )
        chosen = {
            "NUMBA_CPU_NAME": kernel_cache.SHIPPED_CPU,
            "NUMBA_CPU_FEATURES": kernel_cache.SHIPPED_FEATURES,
        }
        assert self.elsewhere(**chosen) == "7 compiled"
        file = self.file()
        kernel_cache.SHIPPED.mkdir()
        return file.rename(kernel_cache.SHIPPED / file.name)

    def elsewhere(self, **variables: str) -> str:
        """What `total(3)` is in a new process, and whether it was compiled for that."""
        code = (
            "import sys; from pathlib import Path; from simrl.profile import kernel_cache\n"
            f"kernel_cache.SHIPPED = Path({str(kernel_cache.SHIPPED)!r})\n"
            f"sys.path.insert(0, {str(self.place)!r}); from toy_caller import total\n"
            "print(total(3), 'compiled' if total.stats.cache_misses else 'loaded')"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=True,
        )
        return ended.stdout.strip()


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toys:
    return Toys(tmp_path, monkeypatch)


def test_a_kernel_is_compiled_once(toys):
    assert toys.call() == (7, True)
    assert toys.call() == (7, False)


def test_files_are_the_users_own(toys):
    toys.call()
    assert toys.cache.stat().st_mode & 0o777 == 0o700
    toys.cache.chmod(0o755)
    assert toys.call() == (7, False)
    assert toys.cache.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in toys.cache.iterdir()} == {0o600}


def damages(content: bytes) -> dict[str, bytes]:
    """What may happen to a file: it ends early, a bit of it is another, it is none of simrl's."""
    size = len(content)
    ends = {f"ends after {end} bytes": content[:end] for end in (0, 1, 32, 33, size // 2, size - 1)}
    rng = np.random.default_rng(0)
    places = [0, 31, 32, size - 1, *rng.integers(0, size, 12).tolist()]
    bits = {
        f"bit {8 * at} is another": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for at in map(int, places)
    }
    others = {
        "is longer": content + b"\0",
        "is a text": b"A text\n" * 20,
        "is numba's": b"\x80\x05\x95\x0a\x00\x00\x00\x00\x00\x00\x00\x8c\x060.68.1\x94."
        + content[32:],
    }
    return {**ends, **bits, **others}


def test_a_damaged_file_is_compiled_anew_with_a_note(toys, caplog):
    toys.call()
    file = toys.file()
    whole = file.read_bytes()
    key = toys.key()
    for what, content in damages(whole).items():
        assert content != whole, what
        file.write_bytes(content)
        caplog.clear()
        kernel_cache._note.cache_clear()
        assert (
            kernel_cache._payload(file, key, os.geteuid(), kernel_cache.OPEN_TO_OTHERS) is None
        ), what
        assert caplog.messages == [f"{file} is damaged; compiled anew"], what
    file.write_bytes(whole)
    assert kernel_cache._payload(file, key, os.geteuid(), kernel_cache.OPEN_TO_OTHERS) == whole[32:]
    for content in (b"", whole[:-1], whole[:40] + b"\xff" + whole[41:]):
        file.write_bytes(content)
        assert toys.call() == (7, True)
        assert toys.call() == (7, False)  # what was compiled took its place


def test_a_file_of_another_kernel_is_not_loaded(toys):
    toys.call()
    module = toys.load()
    module.difference(module.Pair(5, 3))
    (other,) = toys.files("difference")
    toys.file().write_bytes(other.read_bytes())
    assert toys.call() == (7, True)


def test_what_is_whole_but_cannot_be_loaded_is_compiled_anew(toys, caplog):
    toys.call()
    key, payload = toys.key(), kernel_cache.serialize.dumps(("of another numba",))
    toys.file().write_bytes(kernel_cache._digest(key, payload) + payload)
    assert toys.call() == (7, True)
    assert len(caplog.messages) == 1 and "cannot be kept or loaded (TypeError" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ("x * FACTOR", "x + FACTOR", 6),
        ("FACTOR = 2", "FACTOR = 5", 16),
        ("@part", "from simrl.profile.compiled import inlined\n@inlined", 7),
    ],
)
def test_a_change_of_a_function_that_a_kernel_calls_is_noticed(toys, old, new, result):
    toys.call()
    toys.write(CALLEE.replace(old, new))
    assert toys.call() == (result, True)
    toys.write(CALLEE)
    assert toys.call() == (7, False)  # both are kept


def test_a_docstring_a_comment_and_the_place_of_a_file_do_not_count(toys):
    toys.call()
    toys.write(
        CALLEE.replace("Scale.", "Return what is scaled.").replace(
            "FACTOR = 2", "# Two\n\n\nFACTOR = 2"
        )
    )
    toys.place = toys.place.rename(toys.place.parent / "moved")
    sys.path[0] = str(toys.place)
    assert toys.call() == (7, False)


def test_fields_of_an_argument_that_change_places_are_noticed(toys):
    def difference() -> int:
        module = toys.load()
        return int(module.difference(module.Pair(first=5, second=3)))

    assert difference() == 2
    toys.write(CALLEE.replace("first: int\n    second: int", "second: int\n    first: int"))
    assert difference() == 2


def test_a_few_versions_of_a_kernel_are_kept(toys):
    for factor in range(2, 10):
        toys.write(CALLEE.replace("FACTOR = 2", f"FACTOR = {factor}"))
        assert toys.call() == (3 * factor + 1, True)
    assert len(toys.files()) == kernel_cache.VERSIONS_KEPT
    assert toys.call() == (28, False)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_not_read(toys, caplog, mode):
    toys.call()
    toys.cache.chmod(mode)
    before = {file: file.stat().st_mtime_ns for file in toys.cache.iterdir()}
    assert toys.call() == (7, True)
    assert caplog.messages[0].startswith(f"{toys.cache} is not yours alone to write")
    assert {file: file.stat().st_mtime_ns for file in toys.cache.iterdir()} == before


def test_a_file_that_others_can_write_is_not_read(toys, caplog):
    toys.call()
    toys.file().chmod(0o606)
    assert toys.call() == (7, True)
    assert len(caplog.messages) == 1 and "is not yours alone to write" in caplog.text
    assert toys.call() == (7, False)  # a file of one's own took its place


def test_files_of_another_user_are_not_read(toys, monkeypatch):
    toys.call()
    monkeypatch.setattr(os, "geteuid", lambda: toys.place.stat().st_uid + 1)
    assert toys.call() == (7, True)


def test_where_no_folder_can_be_made_kernels_are_compiled_in_memory(toys, caplog, monkeypatch):
    (toys.place / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(toys.place / "file" / "none"))
    assert toys.call() == (7, True)
    assert toys.call() == (7, True)
    assert (
        len(caplog.messages) == 1
        and "compiled kernels cannot be kept or loaded (Not a directory)" in caplog.text
    )


def test_without_variables_kernels_are_kept_in_the_users_home(toys, caplog, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(
        pwd, "getpwuid", lambda number: SimpleNamespace(pw_dir=str(toys.place / "home"))
    )
    assert toys.call() == (7, True)
    assert toys.call() == (7, False)
    assert list((toys.place / "home" / ".cache" / "simrl" / "kernels").iterdir())
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a user without an entry
    assert toys.call() == (7, True)
    assert toys.call() == (7, True)
    assert len(caplog.messages) == 1 and "cannot be kept or loaded (RuntimeError" in caplog.text


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (compiler.CompileResult, "_rebuild"),
        (compiler.CompileResult, "_reduce"),
        (codegen.CPUCodegen, "magic_tuple"),
    ],
)
def test_another_numba_goes_on_without_a_cache(toys, caplog, monkeypatch, part, name):
    toys.call()
    for file in toys.files() if name == "_reduce" else ():
        file.unlink()
    monkeypatch.delattr(part, name)
    assert toys.call() == (7, True)
    assert toys.call() == (7, True)
    assert len(caplog.messages) == 1 and f"has no attribute '{name}'" in caplog.text


def test_numbas_own_variable_names_the_folder(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.config, "CACHE_DIR", str(tmp_path / "chosen"))
    toys.call()
    assert list((tmp_path / "chosen" / "simrl" / "kernels").glob("toy_caller.total*"))


def test_a_shipped_file_answers_where_the_processor_can_run_it(toys):
    toys.ship()
    assert toys.elsewhere() == "7 loaded"
    assert toys.elsewhere(NUMBA_ENABLE_AVX="0") == "7 compiled"  # as without AVX2


def test_a_processor_that_the_user_chose_is_compiled_for(toys):
    toys.ship()
    assert toys.elsewhere(NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES="") == "7 compiled"
    assert toys.elsewhere(NUMBA_CPU_FEATURES="+avx2") == "7 compiled"


def test_a_shipped_file_is_for_one_version_of_numba(toys, monkeypatch):
    toys.ship()
    monkeypatch.setattr(kernel_cache.numba, "__version__", "0.0")
    assert toys.call() == (7, True)


def test_new_kernels_of_an_installation_go_to_the_users_folder(toys):
    shipped = toys.ship()
    total = toys.load().total
    assert (total(3), total(0.5)) == (7, 2.0)
    assert (sum(total.stats.cache_hits.values()), sum(total.stats.cache_misses.values())) == (1, 1)
    assert len(toys.files()) == 1
    assert list(shipped.parent.iterdir()) == [shipped]


def test_a_damaged_shipped_file_is_compiled_anew_once(toys, caplog):
    shipped = toys.ship()
    shipped.write_bytes(shipped.read_bytes()[:-1])
    assert toys.call() == (7, True)
    assert caplog.messages == [f"{shipped} is damaged; compiled anew"]
    kernel_cache._note.cache_clear()
    assert toys.call() == (7, False)
    assert len(caplog.messages) == 1


def test_a_shipped_file_that_is_less_safe_than_the_code_is_not_read(toys, caplog, monkeypatch):
    shipped, code = toys.ship(), Path(kernel_cache.__file__)
    shipped.chmod(0o666 if not code.stat().st_mode & 0o002 else 0o644)
    assert toys.call() == (7, True)
    assert "is not yours alone to write" in caplog.text
    shipped.chmod(code.stat().st_mode & 0o777)
    (toys.file()).unlink()
    assert toys.call() == (7, False)


def test_processes_that_compile_at_once_leave_whole_files(toys):
    code = (
        f"import sys; sys.path.insert(0, {str(toys.place)!r}); from toy_caller import total\n"
        "input(); assert total(3) == 7"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment(), stdin=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert [process.wait() for process in processes] == [0, 0]
    toys.file()
    assert toys.call() == (7, False)


def test_a_part_is_kept_in_the_kernel_that_calls_it_and_nowhere_else(toys):
    """So it is optimized and translated once, whatever lies between them."""
    assert toys.call() == (7, True)
    assert [file.name.split("-")[0] for file in toys.cache.iterdir()] == ["toy_caller.total"]
    assert toys.call() == (7, False)


def test_garbage_is_collected_again_once_a_kernel_is_compiled(toys):
    caller = toys.load()
    assert gc.isenabled() and caller.total(3) == 7 and gc.isenabled()
    with pytest.raises(TypingError):
        caller.total("three")
    assert gc.isenabled()


def test_every_kernel_of_simrl_has_a_stamp_and_this_cache():
    """numba's own cache is for nobody: its damaged files end the process."""
    for path in [*(ROOT / "simrl").rglob("*.py"), *(ROOT / "replay").rglob("*.py")]:
        assert path.name == "compiled.py" or "njit" not in path.read_text(), path
    stamps = {}
    for module in pkgutil.walk_packages(simrl.__path__, "simrl."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Dispatcher):
                is_part = value.targetoptions.get(
                    "no_cpython_wrapper", False
                )  # kept in the kernels that call it
                assert type(value._cache) is (NullCache if is_part else kernel_cache.KernelCache)
                stamps[value] = kernel_cache.stamp_of(value)
    assert (
        len(stamps) > 150
        and None not in stamps.values()
        and len(set(stamps.values())) == len(stamps)
    )


@pytest.mark.parametrize("value", [Path("x"), int, np, SimpleNamespace(), [1], (1, {2: 3}), os])
def test_only_values_with_a_known_content_are_stamped(value):
    assert (kernel_cache._text_of_value(value) is None) == (value is not np)
