"""Nodes of a Ray cluster, as engines need them: with equal versions, and with the folders of weights.

Invariant: an engine gets the path of a folder only when every file in it that an engine reads has
the driver's bytes. That is the path itself on the driver's node, and on a node that sees equal files
there (a shared file system); elsewhere it is a copy. A copy travels once to each node, in chunks
through Ray's object store, and is checked by SHA-256. Code and pickles never travel.

Copies are in a temporary folder of the node. It ends with the replay, or, if the node's process is
killed, with the next one there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from typing import Any, NamedTuple

from simrl.errors import InputError, StoppedError
from simrl.files import temporary_folder
from simrl.study.code_digest import code_digest, source_digest
from simrl_replay.vllm_adapter import vllm_version

CHUNK_BYTES = 64 * 2**20  # several of them are in memory at once
KEPT = 2  # folders whose chunks stay in the object store; later requests put them there again


class Versions(NamedTuple):
    """The code of a machine: a digest of simrl and its replayer, and the version of vLLM, "" if it
    has none that the replayer knows."""

    code: str
    vllm: str


class File(NamedTuple):
    """A file of a folder."""

    name: str
    size: int  # bytes
    digest: str


class Node(NamedTuple):
    """A node of the cluster. Nodes of one machine differ in their ids alone."""

    node_id: str
    host: str
    address: str

    def __str__(self) -> str:
        return f"node {self.host} ({self.address}, {self.node_id[:6]})"


class Travel(NamedTuple):
    """The travel of a folder's bytes to a node."""

    node_id: str
    folder: str
    bytes: int
    seconds: float


@cache
def versions() -> Versions:
    """Return the versions of this machine."""
    digest = hashlib.sha256(code_digest().encode())
    here = Path(__file__).parent
    for file in sorted(here.rglob("*.py")):
        digest.update(f"{file.relative_to(here)}\0{source_digest(file.read_bytes())}\0".encode())
    try:
        return Versions(digest.hexdigest(), vllm_version())
    except InputError:
        return Versions(digest.hexdigest(), "")


def engine_files(folder: Path) -> list[Path]:
    """Return the files that an engine may read."""
    return sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])


def listed(folder: Path) -> tuple[File, ...]:
    """Return the files that an engine may read, with their digests."""
    files = []
    for path in engine_files(folder):
        with path.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        files.append(File(path.name, path.stat().st_size, digest))
    return tuple(files)


class NodeFiles:
    """An actor on a node: answers which versions it has, and keeps copies of folders."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._place = self._held.enter_context(temporary_folder())
        self._paths: dict[tuple[File, ...], str] = {}

    def versions(self) -> Versions:
        return versions()

    def path(self, folder: str, files: tuple[File, ...], shared: bool) -> str | None:
        """Return where the node has these files: a copy, or (`shared`) the folder itself; None if it
        has not."""
        if files in self._paths:
            return self._paths[files]
        there = Path(folder)
        if not shared or any(
            not (there / each.name).is_file() or (there / each.name).stat().st_size != each.size
            for each in files
        ):
            return None
        with suppress(OSError):
            if listed(there) == files:
                self._paths[files] = folder
        return self._paths.get(files)

    def copy(
        self, name: str, files: tuple[File, ...], chunks: Sequence[Sequence[Any]]
    ) -> tuple[str, bool]:
        """Write the files from their chunks, references into the object store, to a folder of that
        name, unless they were copied meanwhile. Return its path, and whether it was written now.
        Raise `StoppedError` if other bytes arrive than were sent."""
        import ray

        if is_new := files not in self._paths:
            folder = Path(mkdtemp(dir=self._place)) / name
            folder.mkdir()
            for file, references in zip(files, chunks, strict=True):
                digest = hashlib.sha256()
                with (folder / file.name).open("wb") as opened:
                    for reference in references:
                        chunk = ray.get(reference)
                        digest.update(chunk)
                        opened.write(chunk)
                if digest.hexdigest() != file.digest:
                    raise StoppedError(f"{file.name}: other bytes arrived than were sent")
            self._paths[files] = str(folder)
        return self._paths[files], is_new

    def close(self) -> None:
        self._held.close()


class Nodes:
    """The nodes that engines are on, seen by the driver. `copy_weights` lets weights travel also
    where a node sees the path. Any thread may call it."""

    def __init__(self, copy_weights: bool = False) -> None:
        import ray

        self._ray = ray
        self._copy_weights = copy_weights
        # By `ray://`, this process is on no node.
        away = ray.util.client.ray.is_connected()
        self._here = None if away else ray.get_runtime_context().get_node_id()
        self._lock = Lock()
        self._actors: dict[Node, Any] = {}
        self._listed: dict[tuple[Any, ...], tuple[File, ...]] = {}
        self._chunks: dict[tuple[File, ...], list[list[Any]]] = {}
        self.travels: list[Travel] = []

    def check(self, node: Node) -> None:
        """Raise `InputError` if the node has other versions than this machine."""
        there, here = self._ray.get(self._actor(node).versions.remote()), versions()
        if there.vllm != here.vllm:
            has = f"vLLM {there.vllm}" if there.vllm else "no vLLM that the replayer knows"
            raise InputError(
                f"{node} has {has}, this machine has {here.vllm}; install that version on every node"
            )
        if there.code != here.code:
            raise InputError(
                f"{node} has another version of simrl than this machine; install the same on every node"
            )

    def path(self, node: Node, folder: str) -> str:
        """Return where the node has a folder's files; let them travel there if it has not. Raise
        `StoppedError` if other bytes arrive, Ray's errors if the node is gone."""
        if node.node_id == self._here and not self._copy_weights:
            return folder
        files, actor = self._files(Path(folder)), self._actor(node)
        path: str | None = self._ray.get(actor.path.remote(folder, files, not self._copy_weights))
        if path is None:
            began_s = time.monotonic()
            chunks = self._sent(Path(folder), files)
            copied = actor.copy.remote(Path(folder).name, files, chunks)
            path, travelled = self._ray.get(copied)
            seconds, size = time.monotonic() - began_s, sum(each.size for each in files)
            if travelled:
                self.travels.append(Travel(node.node_id, folder, size, seconds))
        assert path is not None
        return path

    def lost(self) -> list[str]:
        """Return the nodes that had an engine and, as far as the cluster knows, are gone."""
        alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
        with self._lock:
            return [str(node) for node in self._actors if node.node_id not in alive]

    def close(self) -> None:
        """End the actors, and remove all copies."""
        for actor in self._actors.values():
            with suppress(self._ray.exceptions.RayError):  # its node is gone
                self._ray.get(actor.close.remote(), timeout=10.0)
            self._ray.kill(actor)
        self._actors, self._chunks = {}, {}

    def _actor(self, node: Node) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            if node not in self._actors:
                there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
                actor = self._ray.remote(num_cpus=0, scheduling_strategy=there)(NodeFiles)
                self._actors[node] = actor.remote()
            return self._actors[node]

    def _files(self, folder: Path) -> tuple[File, ...]:
        """Return the folder's files here; they are read again only if they have changed."""
        stats = ((path.name, path.stat()) for path in engine_files(folder))
        key = (folder, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
        if len(key) == 1:
            raise StoppedError(f"{folder}: no *.json or *.safetensors")
        with self._lock:
            if key not in self._listed:
                self._listed[key] = listed(folder)
            return self._listed[key]

    def _sent(self, folder: Path, files: tuple[File, ...]) -> list[list[Any]]:
        """Return references to the chunks of each file; keep the references of the last `KEPT` folders."""
        with self._lock:
            chunks = self._chunks.pop(files, None) or [
                [self._ray.put(chunk) for chunk in _chunks(folder / file.name)] for file in files
            ]
            self._chunks[files] = chunks
            while len(self._chunks) > KEPT:
                del self._chunks[next(iter(self._chunks))]
            return chunks


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
