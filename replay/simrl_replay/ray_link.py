"""Engines on a Ray cluster: each in an actor with its own GPUs, with the child process and loop of
a local engine.

Invariant: an actor only forwards its engine's pipe; commands and reports keep their order. When the
engine, the actor or its node dies, the line here is at its end, as a local one is. Tensor
parallelism stays inside one actor.

Clocks of nodes differ: `offset_s` is measured by round trips (Cristian's algorithm), accurate to
half the fastest one.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from typing import Any

from simrl.study.executors import connect
from simrl_replay.host import Command, Failed, Report
from simrl_replay.link import CLOSE_S, engine_link
from simrl_replay.replayer import ReplayConfig, ReplayEngines
from simrl_replay.vllm_adapter import EngineSettings

PINGS = 20
PLACE_S = 120.0  # time for the cluster to find GPUs


class EngineActor:
    """An engine's process on a node, and methods to exchange messages with it. Each method has a
    thread of its own."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self._log = (
            Path(tempfile.mkdtemp(prefix="simrl-")) / "engine.log"
        )  # kept, but for an end as it should be
        self._link = engine_link(name, settings, self._log)
        self._where = f"its log is {self._log} on {socket.gethostname()}"

    def send(self, commands: Sequence[Command]) -> None:
        self._link.send(commands)

    def receive(self) -> Sequence[Report] | None:
        """Wait for the next reports and return them; None when the engine is gone."""
        try:
            reports: Sequence[Report] = self._link.connection.recv()
            return [
                report._replace(message=f"{report.message}; {self._where}")
                if isinstance(report, Failed)
                else report
                for report in reports
            ]
        except (EOFError, OSError):
            return None

    def monotonic_s(self) -> float:
        return time.monotonic()

    def kill(self) -> None:
        self._link.kill()

    def close(self) -> None:
        self._link.close()
        rmtree(self._log.parent, ignore_errors=True)

    def death(self) -> str:
        return f"{self._link.death()}; {self._where}"


class RayLink:
    """The line to an actor. A thread here waits until the actor is placed, then for its reports,
    and writes them to a pipe that the clock can wait on; an actor that does not start is a `Failed`
    engine there. No caller waits for the cluster."""

    offset_s = 0.0  # measured before the first report

    def __init__(self, name: str, settings: EngineSettings) -> None:
        import ray

        self.name = name
        self._ray = ray
        needs = (
            {"num_gpus": settings.tp + settings.draft_gpus}
            if settings.device == "cuda"
            else {"num_cpus": settings.threads}
        )
        # Threads of an actor: one waits for reports, one sends commands in order, one serves other
        # calls.
        actor = ray.remote(concurrency_groups={"receive": 1, "send": 1}, **needs)(EngineActor)
        self._placed = False
        self._actor: Any = actor.remote(name, settings)
        self.connection, there = multiprocessing.Pipe(duplex=False)
        threading.Thread(
            target=self._pass_on, args=(there,), name=f"reports of {name}", daemon=True
        ).start()

    def send(self, commands: Sequence[Command]) -> None:
        self._actor.send.options(concurrency_group="send").remote(list(commands))

    def kill(self) -> None:
        self._end(self._actor.kill)

    def close(self) -> None:
        self._end(self._actor.close)
        self.connection.close()

    def death(self) -> str:
        try:
            return str(self._ray.get(self._actor.death.remote(), timeout=2 * CLOSE_S))
        except self._ray.exceptions.RayError as error:
            return f"its actor or node is gone ({type(error).__name__})"

    def _end(self, how: Any) -> None:
        """End the engine, then the actor: without its actor, the engine gets no command."""
        if self._placed:
            with suppress(self._ray.exceptions.RayError):  # it is gone already
                self._ray.get(how.remote(), timeout=2 * CLOSE_S)
        self._ray.kill(self._actor)

    def _pass_on(self, there: Connection) -> None:
        with there, suppress(OSError):  # nobody listens any more
            try:
                self.offset_s = self._measured_offset_s()
                self._placed = True
            except self._ray.exceptions.GetTimeoutError:
                message = f"Ray had no GPUs for it for {PLACE_S:g} s; `ray status` shows free ones; use fewer --workers"
                there.send([Failed(message, "")])
                return
            except self._ray.exceptions.RayError as error:
                there.send([Failed(_not_up(error), "")])
                return
            try:
                receive = self._actor.receive.options(concurrency_group="receive")
                while (reports := self._ray.get(receive.remote())) is not None:
                    there.send(reports)
            except self._ray.exceptions.RayError:
                return

    def _measured_offset_s(self) -> float:
        """Measure how far the node's clock is ahead of this one."""
        self._ray.get(
            self._actor.monotonic_s.remote(), timeout=PLACE_S
        )  # returns when it is placed and its process runs
        trips = []
        for _ in range(PINGS):
            sent_s = time.monotonic()
            there_s = self._ray.get(self._actor.monotonic_s.remote())
            back_s = time.monotonic()
            trips.append((back_s - sent_s, there_s - (sent_s + back_s) / 2))
        return float(min(trips)[1])


def _not_up(error: Exception) -> str:
    """Describe why an actor failed to start: the last line of Ray's message, the cause."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"its actor did not start ({type(error).__name__}: {said[-1] if said else 'no message'}); every node of the cluster "
        "needs the same simrl and vLLM installed"
    )


def ray_fleet(
    workers: int, settings: EngineSettings, config: ReplayConfig, address: str
) -> ReplayEngines:
    """Start engines as actors of the cluster at `address`, as `connect` takes it."""
    connect(address)
    starts = [partial(RayLink, f"worker {i}", settings) for i in range(workers)]
    return ReplayEngines(starts, config.start_deadline_s)
