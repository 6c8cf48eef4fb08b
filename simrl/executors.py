"""Where points are simulated: in this process, in processes of this machine, or on a Ray cluster.

An executor gives the outcomes of points as they come, in any order; the caller alone keeps them. Invariant: what a point's row
is does not depend on the executor. A process or node that dies costs its points another try and no other; a point whose
process dies at every try is `Lost`, which says something of the machine and nothing of the point.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import socket
import tempfile
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from simrl.errors import InputError, StoppedError, first_line
from simrl.files import write_whole_file
from simrl.interrupts import ctrl_c_ignored
from simrl.points import Outcome, Point, SharedInputs, code_digest, in_texts, simulate_point
from simrl.processes import main_left_alone
from simrl.scenario import Scenario

TRIES = 2
RAY_TRIES = 5  # nodes may go one after the other
IN_FLIGHT = 2  # points on their way for each CPU of a cluster
ANSWER_S = 5.0
OUT_OF_MEMORY = "out of memory; try fewer --jobs"


class Lost(NamedTuple):
    """A point that this machine could not simulate."""

    message: str


Outcomes = Generator[tuple[int, Outcome | Lost], None, None]


class Executor(Protocol):
    """Simulates points."""

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        """(place among the points, outcome) of each, once, in any order."""
        ...


class Here:
    """This process, one point after the other."""

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        inputs = SharedInputs()
        for i, point in enumerate(points):
            yield i, _simulate(point, inputs)


def _simulate(point: Point, inputs: SharedInputs) -> Outcome | Lost:
    try:
        return simulate_point(point, inputs)
    except MemoryError:
        return Lost(OUT_OF_MEMORY)


class Processes:
    """So many processes of this machine, a point at a time each. They never hear Ctrl-C, and end with this one. They end with
    the points, too, unless they are to `stay`, for whoever asks again and again: those that are idle then do until `end`."""

    def __init__(self, jobs: int, stay: bool = False) -> None:
        self._jobs = jobs
        self._stay = stay
        self._idle: list[_Process] = []

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        todo = deque((i, 1) for i in range(len(points)))  # with the number of the try
        busy: dict[Connection, tuple[_Process, int, int]] = {}
        idle, self._idle = self._idle, []
        try:
            while len(idle) < min(self._jobs, len(points)):
                idle.append(_Process())
            while todo or busy:
                while todo and idle:
                    (i, attempt), process = todo.popleft(), idle.pop()
                    process.give(points[i])
                    busy[process.connection] = process, i, attempt
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    process, i, attempt = busy.pop(connection)
                    try:
                        outcome = connection.recv()
                    except (EOFError, OSError):
                        code = process.end()
                        idle.append(_Process())
                        if attempt < TRIES:
                            todo.appendleft((i, attempt + 1))
                            continue
                        outcome = Lost(
                            f"its process ended {TRIES} times (exit code {code}), perhaps for want of memory; try fewer --jobs"
                        )
                    else:
                        idle.append(process)
                    yield i, outcome
        finally:
            for process, _, _ in busy.values():
                process.end()
            self._idle = idle
            if not self._stay:
                self.end()

    def end(self) -> None:
        """Ends those that are idle."""
        while self._idle:
            self._idle.pop().end()


class _Process:
    """A process that simulates what comes through its pipe, until the pipe is at its end."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(there,), daemon=True)
        with ctrl_c_ignored(), main_left_alone():
            self._process.start()
        there.close()

    def give(self, point: Point) -> None:
        with suppress(OSError):  # it has died: whoever waits for its outcome is told
            self.connection.send(point)

    def end(self) -> int | None:
        """Its exit code."""
        with ctrl_c_ignored():
            self.connection.close()
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _serve(connection: Connection) -> None:
    inputs = SharedInputs()
    with suppress(EOFError, OSError):  # nobody asks, or listens, any more
        while True:
            connection.send(_simulate(connection.recv(), inputs))


class RayCluster:
    """A Ray cluster: a task a point, on nodes that have the same simrl. What a point names travels with it; a node keeps it."""

    def __init__(self, address: str) -> None:
        connect(address)

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        import ray

        simulate = ray.remote(num_cpus=1, max_retries=RAY_TRIES - 1)(_simulate_on_node)
        stored: dict[str, Any] = {}
        pending: dict[Any, int] = {}
        todo = deque(range(len(points)))
        try:
            while todo or pending:
                most = IN_FLIGHT * max(int(ray.cluster_resources().get("CPU", 1)), 1)
                while todo and len(pending) < most:
                    i = todo.popleft()
                    files = {}
                    for path, digest in points[i].files.items():
                        if digest not in stored:
                            stored[digest] = ray.put(_file(path).read_bytes())
                        files[path] = _name(path), stored[digest]
                    pending[simulate.remote(points[i], files)] = i
                for reference in ray.wait(list(pending))[0]:
                    yield pending.pop(reference), _fetched(reference)
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)


def _fetched(reference: Any) -> Outcome | Lost:
    import ray

    try:
        outcome: Outcome | Lost = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # not of the point: its node could not even try
        raise StoppedError(
            f"--ray: a node could not simulate a point ({_last_line(error)}); every node needs the same simrl installed"
        ) from error
    except ray.exceptions.RayError as error:
        return Lost(f"its process or node was lost {RAY_TRIES} times ({type(error).__name__}: {_last_line(error)})")
    return outcome


def _last_line(error: Exception) -> str:
    """Of what Ray says on a page: the cause."""
    return [line.strip() for line in f"{error}".splitlines() if line.strip()][-1]


def _simulate_on_node(point: Point, files: Mapping[str, tuple[Path, Any]]) -> Outcome | Lost:
    """What a node of a cluster does: `files` are the name and the stored contents of what the scenario's paths name."""
    if point.document["code"] != code_digest():
        raise RuntimeError(f"{socket.gethostname()} has another version of simrl")
    copies = {path: str(_copy(name, point.files[path], stored)) for path, (name, stored) in files.items()}
    data = in_texts(point.scenario.model_dump(mode="json"), lambda text: copies.get(text, text))
    scenario = Scenario.model_validate({**data, "file": point.scenario.file})
    outcome = _simulate(replace(point, scenario=scenario), _inputs_of_this_process())
    if isinstance(outcome, dict) and "error" in outcome:  # told with the paths that the user knows
        for path, copy in copies.items():
            outcome["error"] = outcome["error"].replace(copy, path)
    return outcome


@cache
def _inputs_of_this_process() -> SharedInputs:
    return SharedInputs()


@cache
def _folder_of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="simrl-inputs-", ignore_cleanup_errors=True)


def _file(path: str) -> Path:
    """The file itself, or the config.json in a model's folder."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def _name(path: str) -> Path:
    """A file's, in its folder's: a model may be called as its folder is."""
    return Path(_file(path).resolve().parent.name or "root") / _file(path).name


def _copy(name: Path, digest: str, stored: Any) -> Path:
    """A file of whoever sweeps, on this node, once for each process."""
    import ray

    copy = Path(_folder_of_this_process().name) / hashlib.sha256(digest.encode()).hexdigest() / name
    if not copy.exists():
        with write_whole_file(copy) as temporary:
            temporary.write_bytes(ray.get(stored))
    return copy


def connect(address: str) -> None:
    """Connects this process to the Ray cluster at `address`, once; "local" starts one on this machine, for its processes alone.
    Raises `InputError` without Ray, or without an answer."""
    try:
        import ray
    except ImportError:
        raise InputError("--ray: Ray is not installed here; pip install 'simrl[ray]'") from None
    if not ray.is_initialized():
        _require_answer(address)
        try:
            if address == "local":
                ray.init(
                    include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1", logging_level="ERROR"
                )
            else:
                ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, error) from error


def _require_answer(address: str) -> None:
    """Ray itself tries for minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> InputError:
    return InputError(
        f"--ray {address}: no cluster answers there ({first_line(error)}); start one with `ray start --head`, or use "
        "--ray local"
    )
