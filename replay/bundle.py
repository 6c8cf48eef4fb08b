"""Bundle of files with which a machine without a network runs vLLM: it has torch 2.11 (CUDA 13) and
one Hopper GPU.

Invariant: nothing of the machine is replaced. torch, triton, transformers, numpy and numba stay its
own; the bundle carries what it lacks, unpacked, for PYTHONPATH. Compiled libraries keep the machine
code of one GPU architecture: the code of others is overwritten with zeros in place, so that no
address changes and compression leaves nothing of it.
"""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Literal

import typer

from simrl.errors import InputError, first_line

VLLM = "vllm==0.26.0"  # the last release that pins torch 2.11
# What vLLM and simrl import and a machine with torch and transformers may lack. openai: before 3,
# which needs httpx2.
NEEDS = (
    *(
        "annotated-types==0.8.0",
        "apache-tvm-ffi==0.1.15.post2",
        "blake3==1.0.11",
        "cachetools==8.0.2",
    ),
    *("cbor2==6.3.0", "colorlog==6.12.0", "distro==1.9.0", "fastapi==0.136.3", "jiter==0.19.0"),
    *("llguidance==1.6.1", "loguru==0.7.3", "msgspec==0.22.0", "openai==2.54.0"),
    *(
        "openai-harmony==0.0.8",
        "optuna==5.0.0",
        "partial-json-parser==0.2.1.1.post7",
        "pybase64==1.5.1",
    ),
    *(
        "pydantic==2.14.4",
        "pydantic-core==2.50.5",
        "pyzmq==27.3.0",
        "setproctitle==1.3.8",
        "simpy==4.1.2",
    ),
    *("sniffio==1.3.1", "starlette==1.10.0", "typing-inspection==0.4.5", "xgrammar==0.2.8"),
)
GLIBC = (28, 27, 26, 24, 17, 5)  # pip matches the versions in wheels' names exactly
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
GPUS = {"h100": 90, "h200": 90}  # GPU: number of its architecture
# Not needed for models in bfloat16 on one Hopper GPU. FlashAttention 2 has no machine code for it,
# nor have Marlin's products of weights of 4 and 8 bits; intermediate code, which could be compiled
# for it, is overwritten, too.
LEFT_OUT = (
    *(
        "vllm/vllm-rs",
        "vllm/_rust_tool_parser*",
        "vllm/*flashmla*.so",
        "vllm/_qutlass*",
        "*/_vllm_fa2_C*",
    ),
    *(
        "vllm/third_party/*.so",
        "tvm_ffi/3rdparty/*",
        "tvm_ffi/include/*",
        "tvm_ffi/src/*",
        "tvm_ffi/share/*",
    ),
    *(
        "*.h",
        "*.hpp",
        "*.cuh",
        "*.inl",
        "*.cu",
        "*.a",
        "*.pyi",
        "*.pyx",
        "*.jpg",
        "*/static/*",
        "*/RECORD",
    ),
)
REGION, MACHINE_CODE = (
    b"\x50\xed\x55\xba",
    2,
)  # head of a region of GPU code, and the kind of an entry in it
UNPACK = """#!/usr/bin/env bash
# Unpacks the parts beside this file: bash unpack.sh TO; then PYTHONPATH=TO python3 ...
set -euo pipefail
cat "$(dirname "$0")"/part-* | python3 -c '
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="data")' "${1:?the folder to unpack to}"
"""


def keep_code_of(library: bytes, architecture: int) -> bytes:
    """Return a library whose GPU code for other architectures is zeros. Sizes and addresses
    stay."""
    kept, at = bytearray(library), 0
    while (at := library.find(REGION, at)) >= 0:
        head_bytes, region_bytes = struct.unpack_from("<HQ", library, at + 6)
        end, at = at + head_bytes + region_bytes, at + head_bytes
        while at < end:
            kind, entry_head_bytes, code_bytes = struct.unpack_from("<HxxIQ", library, at)
            (code_architecture,) = struct.unpack_from("<I", library, at + 28)
            code, at = at + entry_head_bytes, at + entry_head_bytes + code_bytes
            if (kind, code_architecture) != (MACHINE_CODE, architecture):
                kept[code:at] = bytes(code_bytes)
    return bytes(kept)


def download(folder: Path) -> list[Path]:
    """Download the wheels and return them, sorted."""
    wanted = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
    ]
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        *wanted,
        *platforms,
        "-d",
        str(folder),
        VLLM,
        *NEEDS,
    ]
    if subprocess.run(command, check=False).returncode:
        raise InputError(
            "pip found no wheel for one of the packages (above); a connection to PyPI is needed"
        )
    return sorted(folder.glob("*.whl"))


def carried(wheel: Path, architecture: int) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a wheel that the bundle carries, its largest
    first."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in sorted(
            archive.infolist(), key=lambda entry: (-entry.file_size, entry.filename)
        ):
            if not entry.is_dir() and not any(
                fnmatch(entry.filename, pattern) for pattern in LEFT_OUT
            ):
                content = archive.read(entry)
                name = entry.filename
                yield (
                    name,
                    keep_code_of(content, architecture) if fnmatch(name, "*.so*") else content,
                )


def make(out: Path, gpu: str, part_bytes: int, wheels: Sequence[Path]) -> list[Path]:
    """Make the parts and unpack.sh in a folder from wheels, and return the parts."""
    out.mkdir(parents=True, exist_ok=True)
    for before in out.glob("part-*"):
        before.unlink()
    with tempfile.TemporaryFile() as packed:
        # The highest level: kernels of a kind resemble each other across tens of MB.
        compressor = subprocess.Popen(
            ["xz", "-9e", "-T0", "-c"], stdin=subprocess.PIPE, stdout=packed
        )
        assert compressor.stdin is not None
        with compressor.stdin, tarfile.open(fileobj=compressor.stdin, mode="w|") as archive:
            for wheel in wheels:
                for name, content in carried(wheel, GPUS[gpu]):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        if compressor.wait():
            raise InputError(f"{out}: xz failed; free some disk and memory")
        packed.seek(0)
        parts: list[Path] = []
        while content := packed.read(part_bytes):
            parts.append(out / f"part-{len(parts) + 1:02}")
            parts[-1].write_bytes(content)
    (out / "unpack.sh").write_text(UNPACK, encoding="utf-8")
    return parts


def main(
    out: Annotated[Path, typer.Argument(help="folder of the parts")],
    gpu: Literal["h100", "h200"] = "h100",
    part_mb: Annotated[int, typer.Option(help="largest part, in MB")] = 38,
) -> None:
    """Make a bundle for a machine without a network, and print its parts."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in make(out, gpu, part_mb * 10**6, download(Path(folder))):
                print(f"{part}: {part.stat().st_size / 1e6:.1f} MB")
    except (InputError, OSError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    typer.run(main)
