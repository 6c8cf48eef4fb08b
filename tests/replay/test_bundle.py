"""The bundle for a machine without a network: one GPU's code alone, in parts that unpack to what went in."""

import os
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

import bundle
from bundle import keep_code_of, main, make

INTERMEDIATE, MACHINE = 1, 2
KEPT, OTHER = b"kept code", b"other code"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ12xI32x", kind, 257, 64, len(code), architecture)
    assert len(head) == 64
    return head + code


def region(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<4sHHQ", bundle.REGION, 1, 16, len(content)) + content


def library() -> bytes:
    first = region(
        entry(MACHINE, 80, OTHER), entry(MACHINE, 90, KEPT), entry(INTERMEDIATE, 90, OTHER)
    )
    return b"\x7fELF host code" + first + b"between" + region(entry(MACHINE, 120, OTHER)) + b"end"


def test_of_a_library_the_code_of_other_gpus_becomes_zeros_and_nothing_moves():
    before = library()
    assert keep_code_of(before, 90) == before.replace(OTHER, bytes(len(OTHER)))
    assert KEPT in keep_code_of(before, 90)


def test_a_library_without_gpu_code_stays_as_it_is():
    assert keep_code_of(b"\x7fELF host code", 90) == b"\x7fELF host code"


def test_the_parts_unpack_to_the_wheels_files_without_what_is_left_out(tmp_path: Path):
    wheel = tmp_path / "vllm-0.wheel"
    noise = os.urandom(150_000)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "version = 1\n")
        archive.writestr("vllm/noise.json", noise)
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", library())
        archive.writestr("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", library())
        archive.writestr("vllm/third_party/kernel.hpp", "left out")
    out, to = tmp_path / "bundle", tmp_path / "to"
    parts = make(out, "h100", 60_000, [wheel])
    assert [part.name for part in parts] == ["part-01", "part-02", "part-03"]
    assert all(part.stat().st_size <= 60_000 for part in parts)
    assert len(make(out, "h100", 100_000, [wheel])) == 2  # the third part of before is gone
    subprocess.run(["bash", out / "unpack.sh", to], check=True)
    files = {
        str(path.relative_to(to)): path.read_bytes() for path in to.rglob("*") if path.is_file()
    }
    assert files == {
        "vllm/__init__.py": b"version = 1\n",
        "vllm/noise.json": noise,
        "vllm/_C_stable_libtorch.abi3.so": keep_code_of(library(), 90),
    }


def test_without_a_package_index_the_bundle_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull if name == "PIP_CONFIG_FILE" else "")
    with pytest.raises(SystemExit) as stopped:
        main(tmp_path / "bundle")
    assert stopped.value.code == 2
    assert "error: pip found no wheel" in capfd.readouterr().err
    assert not (tmp_path / "bundle").exists()
