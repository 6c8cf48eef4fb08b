"""Executors of points: this process, processes of this machine (the only pool), or a Ray cluster.

An executor yields the outcomes of points as they come, in any order; only the caller keeps them.
Invariant: a point's row does not depend on the executor. A process or node that dies costs its
points another try and no other point; a point whose process dies at every try is a `LostTask`,
which says something about the machine and nothing about the point.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import get_preparation_data, prepare
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from simrl.errors import InputError, StoppedError, first_line
from simrl.extensions import install_command
from simrl.files import temporary_folder, write_whole_file
from simrl.interrupts import ctrl_c_ignored, main_left_alone
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.run import compile_training
from simrl.study.code_digest import code_digest
from simrl.study.point import Outcome, Point, in_texts, simulate_point

A = TypeVar("A")
T = TypeVar("T")
log = logging.getLogger(__name__)
TRIES = 2
RAY_TRIES = 5  # nodes may go one after the other
IN_FLIGHT = 2  # points on their way for each CPU of a cluster
ANSWER_S = 5.0
ASKED_EVERY_S = 0.05  # whether to stop
OUT_OF_MEMORY = "out of memory; try fewer --jobs"


class LostTask(NamedTuple):
    """A task that this machine could not do."""

    message: str


Outcomes = Generator[tuple[int, Outcome | LostTask], None, None]


class Executor(Protocol):
    """Simulates points."""

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        """Yield (place among the points, outcome) of each point, once, in any order."""


class Here:
    """This process, one point after the other."""

    @cached_property
    def inputs(self) -> InputCache:
        """The traces and profiles of the points so far."""
        return InputCache()

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        for i, point in enumerate(points):
            yield i, _simulate(point, self.inputs)


def _simulate(point: Point, inputs: InputCache | None = None) -> Outcome | LostTask:
    try:
        return simulate_point(point, inputs or inputs_of_this_process())
    except MemoryError:
        return LostTask(OUT_OF_MEMORY)


class Processes:
    """Up to `jobs` processes of this machine, each with one task at a time.

    They ignore Ctrl-C and end with this process, however it ends. They also end with the tasks;
    with `stay`, idle ones wait for further tasks until `end`, which the end of a `with` block
    calls. `inputs` travel with every point; without them, each process keeps its own.
    """

    def __init__(self, jobs: int, stay: bool = False, inputs: InputCache | None = None) -> None:
        self._jobs, self._stay, self._inputs = jobs, stay, inputs
        self._idle: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, tasks: int, busy: int = 0) -> None:
        """Start as many processes as this number of tasks can use while others are busy."""
        while len(self._idle) < min(self._jobs - busy, tasks):
            self._idle.append(_Process())

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        return self.results(partial(_simulate, inputs=self._inputs), points, TRIES)

    def results(
        self,
        work: Callable[[A], T],
        tasks: Sequence[A],
        tries: int = 1,
        why_stop: Callable[[], str] | None = None,
    ) -> Generator[tuple[int, T | LostTask], None, None]:
        """Yield (place, `work(task)`) of each task, in any order; tasks begin in their order.
        Raises what `work` raises, and `StoppedError` as soon as `why_stop` gives a reason: busy
        processes end then."""
        todo = deque((i, 1) for i in range(len(tasks)))  # with the number of the try
        busy: dict[Connection, tuple[_Process, int, int]] = {}
        try:
            while todo or busy:
                self.start(len(todo), len(busy))
                while todo and self._idle:
                    (i, attempt), process = todo.popleft(), self._idle.pop()
                    busy[process.connection] = process, i, attempt
                    message = _packed(work, tasks[i])
                    with suppress(
                        OSError
                    ):  # it has died, which its pipe says when the result is awaited
                        process.connection.send(message)
                finished = wait(list(busy), ASKED_EVERY_S if why_stop else None)
                if why_stop and (reason := why_stop()):
                    raise StoppedError(reason)
                for connection in finished:
                    assert isinstance(connection, Connection)
                    process, i, attempt = busy.pop(connection)
                    try:
                        result = connection.recv()
                        self._idle.append(process)
                    except (EOFError, OSError):
                        code = process.end()
                        if attempt < tries:
                            todo.appendleft((i, attempt + 1))
                            continue
                        result = LostTask(
                            f"its process ended {tries} times (exit code {code}), perhaps for lack of memory; try fewer --jobs"
                        )
                    if isinstance(result, Exception):
                        raise result
                    yield i, result
        finally:
            for process, _, _ in busy.values():
                process.end()
            if not self._stay:
                self.end()

    def end(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().end()


class _Process:
    """A process that does the tasks from its pipe, until the pipe is at its end."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(there,), daemon=True)
        with ctrl_c_ignored(), main_left_alone():
            self._process.start()
        there.close()

    def end(self) -> int | None:
        """End the process and return its exit code."""
        with ctrl_c_ignored():
            self.connection.close()
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _serve(connection: Connection) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also where a thread has started the process
    # What simrl says of the machine, such as its cache of kernels, the parent has said.
    logging.getLogger("simrl").setLevel(logging.CRITICAL)
    compile_training()  # loaded before the first task comes
    with suppress(EOFError, OSError):  # the other end is closed
        while True:
            message = connection.recv()
            try:
                work, task = _unpacked(*message)
                result = work(task)
            except Exception as error:
                error.add_note(traceback.format_exc())  # does not travel with the exception
                result = error
            connection.send(result)


def _packed(work: Callable[[A], T], task: A) -> tuple[str, Mapping[str, str], bytes]:
    """Return what a process is sent: the function's name, where the caller's main module is, and
    function and task."""
    function = getattr(work, "func", work)  # of a partial
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    main = {
        key: place.removesuffix(
            ".__main__"
        )  # of `python -m package`, which multiprocessing would leave out
        for key, place in get_preparation_data("").items()
        if key.startswith("init_main")
    }
    try:
        return name, main, bytes(ForkingPickler.dumps((work, task)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_loaded(name, error) from error


def _unpacked(
    name: str, main: Mapping[str, str], packed: bytes
) -> tuple[Callable[[Any], Any], Any]:
    """Return a function and its task. Where they need the caller's main module, it is imported, as
    multiprocessing does."""
    with suppress(AttributeError, ImportError):
        return pickle.loads(packed)  # type: ignore[no-any-return]
    try:
        prepare(dict(main))
        return pickle.loads(packed)  # type: ignore[no-any-return]
    except BaseException as error:  # a script without a main guard may also exit
        raise _not_loaded(name, error) from error


def _not_loaded(name: str, error: BaseException) -> InputError:
    return InputError(
        f"{name} cannot be loaded in a process of its own ({first_line(error)}); define it at the top of a module that can be "
        "imported, or simulate in one process (--jobs 1)"
    )


def _end_with_parent() -> None:
    """End this process when its parent has ended, also in the middle of a task: a killed parent
    cannot end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def each(
    work: Callable[[A], T],
    tasks: Sequence[A],
    pool: Processes | None,
    why_stop: Callable[[], str] | None = None,
) -> Generator[tuple[int, T], None, None]:
    """Yield (place, `work(task)`) of each task, from a pool in any order, or here. Raises
    `StoppedError` if a process dies, or for a reason (`Processes.results`)."""
    if pool is None:
        yield from ((i, work(task)) for i, task in enumerate(tasks))
        return
    with closing(pool.results(work, tasks, why_stop=why_stop)) as results:
        for i, result in results:
            if isinstance(result, LostTask):
                raise StoppedError(
                    "a process that simulates was killed, perhaps for lack of memory; nothing was written; try fewer --jobs"
                )
            yield i, result


class RayCluster:
    """A Ray cluster: a task for each point, on nodes with this version of simrl. Files that a point
    names travel with it; a node keeps them."""

    def __init__(self, address: str) -> None:
        connect(address)

    def outcomes(self, points: Sequence[Point]) -> Outcomes:
        import ray

        # A lost task comes back here, to be counted, and goes out again.
        simulate = ray.remote(num_cpus=1, max_retries=0)(_simulate_on_node)
        stored: dict[str, Any] = {}
        pending: dict[Any, int] = {}
        todo = deque(range(len(points)))
        losses = Counter[int]()  # by place
        try:
            while todo or pending:
                _require_head()
                most = IN_FLIGHT * max(int(ray.cluster_resources().get("CPU", 1)), 1)
                while todo and len(pending) < most:
                    i = todo.popleft()
                    files = {}
                    for path, digest in points[i].files.items():
                        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
                        if digest not in stored:
                            stored[digest] = ray.put(file.read_bytes())
                        # With its folder: a model without a name is called after that.
                        files[path] = (
                            Path(file.resolve().parent.name or "root") / file.name,
                            stored[digest],
                        )
                    pending[simulate.remote(points[i], points[i].code["code"], files)] = i
                for reference in ray.wait(list(pending), timeout=ANSWER_S)[0]:
                    i, outcome = pending.pop(reference), _fetched(reference)
                    if isinstance(outcome, str):
                        losses[i] += 1
                        if losses[i] < RAY_TRIES:
                            todo.appendleft(i)
                            continue
                        outcome = LostTask(
                            f"its process or node was lost {RAY_TRIES} times ({outcome})"
                        )
                    yield i, outcome
            if losses:
                points_again = "1 point" if len(losses) == 1 else f"{len(losses)} points"
                log.warning(f"--ray: a worker was lost; {points_again} of it ran again elsewhere")
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)


def _require_head() -> None:
    """Raise `InputError` if the cluster's head does not answer: Ray itself ends this process a
    minute later, without a word on what is kept."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise InputError(
            f"--ray: the head of the cluster at {host}:{port} does not answer any more ({first_line(error)}); the points so "
            "far are kept: give the command again, with another cluster or without --ray"
        ) from error


def _fetched(reference: Any) -> Outcome | LostTask | str:
    """Return the outcome of a task; the cause in words if its process or node was lost."""
    import ray

    try:
        outcome: Outcome | LostTask = ray.get(reference)
    except ray.exceptions.RayError as error:
        # Ray's message is a page long.
        cause = [line.strip() for line in f"{error}".splitlines() if line.strip()][-1]
        if isinstance(error, ray.exceptions.RayTaskError):  # the node could not even try
            raise StoppedError(
                f"--ray: a node could not simulate a point ({cause}); every node needs this version of simrl"
            ) from error
        return f"{type(error).__name__}: {cause}"
    return outcome


def _simulate_on_node(
    point: Point, code: str, files: Mapping[str, tuple[Path, Any]]
) -> Outcome | LostTask:
    """Simulate a point on a node; `code` is the digest of the sender's simrl, and `files` are the
    name and the stored contents of each path in the scenario."""
    if code != code_digest():
        raise RuntimeError(f"{socket.gethostname()} has another version of simrl")
    copies = {
        path: _copy(name, point.files[path], stored) for path, (name, stored) in files.items()
    }
    data = in_texts(point.scenario.model_dump(mode="json"), lambda text: copies.get(text, text))
    outcome = _simulate(
        replace(point, scenario=Scenario.model_validate({**data, "file": point.scenario.file}))
    )
    if isinstance(outcome, dict) and "error" in outcome:  # with the paths that the user knows
        for path, copy in copies.items():
            outcome = {key: words.replace(copy, path) for key, words in outcome.items()}
    return outcome


inputs_of_this_process = cache(InputCache)


@cache
def _folder_of_this_process() -> Path:
    held = ExitStack()
    atexit.register(held.close)
    return held.enter_context(temporary_folder())


def _copy(name: Path, digest: str, stored: Any) -> str:
    """Return the path of a copy of the user's file on this node, made once for each process."""
    import ray

    copy = _folder_of_this_process() / hashlib.sha256(digest.encode()).hexdigest() / name
    if not copy.exists():
        with write_whole_file(copy) as temporary:
            temporary.write_bytes(ray.get(stored))
    return str(copy)


def connect(address: str) -> None:
    """Connect this process to the Ray cluster at `address`, once; "local" starts one on this
    machine, for its processes alone. Raise `InputError` without Ray, or without an answer."""
    try:
        import ray
    except ImportError:
        raise InputError(f"--ray: Ray is not installed here; {install_command('ray')}") from None
    if ray.is_initialized():
        return
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit() and "://" not in address:
            # Ray itself tries for minutes, and then ends the process.
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        # By the address "local", Ray starts a cluster even where another process's is alive.
        local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(
            address,
            **(local if address == "local" else {}),
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--ray {address}: no cluster answers there ({first_line(error)}); start one with `ray start --head`, or use "
            "--ray local"
        ) from error
