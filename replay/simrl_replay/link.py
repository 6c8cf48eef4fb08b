"""The line to an engine: commands go out, reports come in, and the other side may die at any time.

Invariant: a line ends once, by `kill` or with the engine's process; its connection is then at its
end (`EOFError`), and no process of the engine is left. Nothing listens on a network: the line is a
pipe between a parent and its child.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from tempfile import gettempdir
from typing import Any, NoReturn, Protocol

from simrl.errors import InputError, StoppedError
from simrl.files import temporary_folder
from simrl.interrupts import ctrl_c_waits
from simrl_replay.host import Channel, Close, Command, Failed, NoRoom, Ready, run_host, serve
from simrl_replay.vllm_adapter import EngineSettings, VllmEngine, thread_variables

Work = Callable[[VllmEngine, Channel], None]
Start = Callable[[EngineSettings], VllmEngine]
CLOSE_S = 5.0  # time for an engine to end by itself
WANT_OF_MEMORY = (
    ", perhaps for want of memory (`dmesg` tells); use fewer engines on this machine, or lower "
    "engine.kv_cache_tokens"
)


class GoneError(StoppedError):
    """An engine that has ended."""


class EngineLink(Protocol):
    """A line to one engine. `connection` yields lists of reports; `offset_s` is how far the
    engine's clock is ahead of this one. `place` is the engine's machine, as the result records it;
    empty for this one, and for an engine that has not started."""

    name: str
    connection: Connection
    offset_s: float
    place: Mapping[str, str]

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands; do nothing if the engine is gone, which the connection's end shows."""

    def kill(self) -> None:
        """End the engine at once."""

    def close(self) -> None:
        """Let the engine end by itself, for up to `CLOSE_S`."""

    def death(self) -> str:
        """Describe how the engine ended."""


def engine_link(
    name: str,
    settings: EngineSettings,
    log: Path,
    work: Work = run_host,
    start: Start = VllmEngine,
    variables: Mapping[str, str] | None = None,
) -> ProcessLink:
    """Start an engine in a child process and return the line to it; `work` is the loop it runs."""
    life = partial(serve, settings=settings, work=work, start=start)
    return ProcessLink(name, life, log, {**thread_variables(settings), **(variables or {})})


class ProcessLink:
    """A child process that runs `life` with the channel to this one. Its output goes to `log`.

    `variables` are environment variables that it gets in addition to those of this process, such as
    its GPUs. With its own children (tensor parallelism) it is a process group, which ends as a
    whole. Its temporary files are in a folder of its own, which ends with it: vLLM leaves some;
    compiled kernels are kept where torch would keep them.

    A thread writes to the pipe, so a long step or a hung engine, which reads nothing, does not
    block this process.
    """

    offset_s = 0.0  # processes of a host share `time.monotonic()`
    place: Mapping[str, str] = {}

    def __init__(
        self,
        name: str,
        life: Callable[[Channel], None],
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and locks
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_child, args=(there, str(log), life), name=name)
        self._held = ExitStack()
        try:
            kernels = os.environ.get(
                "TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}"
            )
            folders = {
                "TMPDIR": str(self._held.enter_context(temporary_folder())),
                "TORCHINDUCTOR_CACHE_DIR": kernels,
            }
            with ctrl_c_waits(), _born_deaf(), _variables({**folders, **(variables or {})}):
                self.process.start()
        except BaseException:
            if self.process.pid is not None:
                self.process.kill()
            self._held.close()
            raise
        there.close()  # then its death is an end of file here
        self._out: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"commands to {name}", daemon=True)
        self._writer.start()

    def send(self, commands: Sequence[Any]) -> None:
        self._out.put(list(commands))

    def kill(self) -> None:
        self.process.kill()
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it has ended, or was killed before it had a group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._held.close()
        self._out.put(None)

    def close(self) -> None:
        self.send([Close()])
        self._hear_it_out(time.monotonic() + CLOSE_S)
        self.kill()
        self._writer.join()
        self.connection.close()

    def death(self) -> str:
        self.process.join(CLOSE_S)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"killed by signal {-code}" + (WANT_OF_MEMORY if code == -signal.SIGKILL else "")
        return f"ended with code {code}; its last output: {_last_line(self._log)}"

    def _write(self) -> None:
        for commands in iter(self._out.get, None):
            try:
                self.connection.send(commands)
            except OSError:
                return  # it is gone: its connection is at its end

    def _hear_it_out(self, until_s: float) -> None:
        """Read and drop its last reports: it may block until they are read."""
        with suppress(EOFError, OSError):
            while self.connection.poll(max(until_s - time.monotonic(), 0.0)):
                self.connection.recv()
        self.process.join(max(until_s - time.monotonic(), 0.0))


@contextmanager
def _born_deaf() -> Iterator[None]:
    """Let processes started meanwhile ignore Ctrl-C and SIGTERM, also during their imports, until
    they set handlers: the parent closes them."""
    resource_tracker.ensure_running()  # its own start would end that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _variables(named: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def _child(connection: Connection, log: str, life: Callable[[Channel], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with open(log, "ab", buffering=0) as file:  # noqa: PTH123 (of the descriptor)
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    # A resource tracker of its own, which prints to the log, clears up when the process is killed.
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    resource_tracker.ensure_running()  # outside the group, to outlive it
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 1
    # Registered first, so called last: without it, the interpreter takes seconds to tear torch
    # down.
    atexit.register(lambda: os._exit(code))
    try:
        life(connection)
        code = 0
    finally:
        for child in multiprocessing.active_children():
            if not child.daemon:  # a drafter, whose end multiprocessing would wait for
                child.kill()


def _end_with_parent() -> None:
    """Make this process end with its parent, which a starting or stepping engine would notice
    late."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def device_variables(
    workers: int, settings: EngineSettings, engines_per_gpu: int = 1
) -> list[dict[str, str]]:
    """Return for each engine of this machine the variable that gives it its `tp` GPUs, shared by
    `engines_per_gpu` engines, and its drafters' behind them. Raise `InputError` if there are too
    few; if their number is unknown, CUDA reports it later."""
    if settings.device != "cuda":
        return [{}] * workers
    each, known = settings.tp + settings.draft_gpus, visible_gpus()
    needed = -(-workers // engines_per_gpu) * each
    if known is None:
        known = [str(i) for i in range(needed)]
    drafters = f" and drafters on {settings.draft_gpus} GPUs" if settings.draft_gpus else ""
    if needed > len(known):
        raise InputError(
            f"{workers} engines with cluster.tp {settings.tp}{drafters} need {needed} GPUs, this machine shows {len(known)} "
            "(CUDA_VISIBLE_DEVICES, or `nvidia-smi -L`); use fewer --workers, a smaller cluster.tp, or --ray"
        )
    firsts = [i // engines_per_gpu * each for i in range(workers)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(known[first : first + each])} for first in firsts]


def spare_gpu(taken: int) -> dict[str, str]:
    """Return the variable that gives a process the first GPU after the `taken` first ones, or the
    last GPU if there is no other; {} if the number of GPUs is unknown."""
    known = visible_gpus()
    return {"CUDA_VISIBLE_DEVICES": known[min(taken, len(known) - 1)]} if known else {}


def visible_gpus() -> list[str] | None:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; None if
    unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [
        str(i)
        for i, _ in enumerate(
            line for line in listed.stdout.splitlines() if line.startswith("GPU ")
        )
    ]


def wait_until_ready(links: Sequence[EngineLink], deadline_s: float) -> list[Ready]:
    """Return the first report of each engine. Raise `InputError` with the reason if an engine
    cannot start, `StoppedError` if one dies or takes longer than `deadline_s`."""
    ready: dict[int, Ready] = {}
    until_s = time.monotonic() + deadline_s
    while len(ready) < len(links):
        left_s = until_s - time.monotonic()
        waiting: list[Any] = [link.connection for i, link in enumerate(links) if i not in ready]
        if left_s <= 0:
            slow = next(link for i, link in enumerate(links) if i not in ready)
            raise StoppedError(
                f"{slow.name}: not up after {deadline_s:g} s; a larger model takes longer: raise --start-deadline"
            )
        for connection in wait(waiting, min(left_s, 1.0)):
            i = next(i for i, link in enumerate(links) if link.connection is connection)
            ready[i] = first_report(links[i])
    return [ready[i] for i in range(len(links))]


def first_report(link: EngineLink) -> Ready:
    """Return the report of an engine that is up; raise as `wait_until_ready` does."""
    try:
        report = link.connection.recv()[0]
    except (EOFError, OSError):
        raise StoppedError(f"{link.name}: {link.death()}, before it was up") from None
    if isinstance(report, Failed):
        raise InputError(f"{link.name}: {report.message}")
    if isinstance(report, NoRoom):
        raise StoppedError(f"{link.name}: {report.message}")
    assert isinstance(report, Ready)
    return report


def received(link: EngineLink) -> Sequence[Any]:
    """Return the next reports of an engine. Raise `GoneError` if it has ended, `StoppedError` if it
    failed."""
    try:
        reports: Sequence[Any] = link.connection.recv()
    except (EOFError, OSError):
        raise GoneError(f"{link.name}: {link.death()}") from None
    for report in reports:
        if isinstance(report, Failed | NoRoom):
            raise StoppedError(f"{link.name}: {report.message}")
    return reports


def raise_death(link: EngineLink) -> NoReturn:
    """Raise `StoppedError` for a process that has ended."""
    raise StoppedError(f"{link.name}: {link.death()}")


def reports_of(link: EngineLink, silence_s: float, remedy: str = "; see its log") -> Iterator[Any]:
    """Yield the reports of an engine. Raise as `received` does, and `StoppedError` after
    `silence_s` without any."""
    while link.connection.poll(silence_s):
        yield from received(link)
    raise StoppedError(f"{link.name}: no report for {silence_s:g} s{remedy}")


def start_all(
    start: Sequence[Callable[[], EngineLink]], deadline_s: float, in_turn: bool = False
) -> list[EngineLink]:
    """Start engines in parallel, or `in_turn`, and wait until all are up; if one fails, end all.
    Start engines of one GPU in turn: vLLM takes what a neighbour allocates meanwhile for its
    own."""
    links: list[EngineLink] = []
    try:
        for each in start:
            links.append(each())
            if in_turn:
                wait_until_ready(links[-1:], deadline_s)
        if in_turn:
            return links
        wait_until_ready(links, deadline_s)
    except BaseException:
        with ctrl_c_waits():
            for link in links:
                link.kill()
        raise
    return links
