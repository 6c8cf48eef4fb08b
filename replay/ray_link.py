"""Engines on a Ray cluster: each an actor that is given its GPUs, with the same child process and loop as on one machine.

Invariant: an actor only passes on what goes in and out of its engine's pipe; commands keep their order, reports theirs. When
the engine, the actor or its node dies, the line here is at its end, as a local one is. Tensor parallelism stays inside one
actor.

Clocks of nodes differ: `offset_s` is measured by asking (Cristian's algorithm), as good as half the fastest round trip.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from replay.host import Command, Failed, Report
from replay.link import CLOSE_S, Link, engine_link
from replay.replayer import Fleet, ReplayConfig
from replay.vllm_adapter import EngineSettings
from simrl.executors import connect

PINGS = 20
PLACE_S = 120.0  # that the cluster has to find GPUs


class EngineActor:
    """What runs on a node: an engine's process, and methods to speak with it. Each method has a thread of its own."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        log = Path(tempfile.mkdtemp(prefix="simrl-")) / "engine.log"
        self._link = engine_link(name, settings, log)
        self._where = f"its log is {log} on {socket.gethostname()}"

    def send(self, commands: Sequence[Command]) -> None:
        self._link.send(commands)

    def receive(self) -> Sequence[Report] | None:
        """The next reports, waited for; None when the engine is gone."""
        try:
            reports: Sequence[Report] = self._link.connection.recv()
            return [
                report._replace(message=f"{report.message}; {self._where}") if isinstance(report, Failed) else report
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

    def death(self) -> str:
        return f"{self._link.death()}; {self._where}"


class RayLink:
    """The line to an actor. A thread here waits until it is placed, then for its reports, and puts them into a pipe that the
    clock can wait on; an actor that does not come up is a `Failed` engine there. Nobody waits for the cluster here."""

    offset_s = 0.0  # measured before the first report

    def __init__(self, name: str, settings: EngineSettings) -> None:
        import ray

        self.name = name
        self._ray = ray
        needs = {"num_gpus": settings.tp} if settings.device == "cuda" else {"num_cpus": settings.threads}
        # Threads of an actor: one that waits for reports, one that sends commands in their order, one for the rest.
        actor = ray.remote(concurrency_groups={"receive": 1, "send": 1}, **needs)(EngineActor)
        self._placed = False
        self._actor: Any = actor.remote(name, settings)
        self.connection, there = multiprocessing.Pipe(duplex=False)
        threading.Thread(target=self._pass_on, args=(there,), name=f"reports of {name}", daemon=True).start()

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
        """The engine first, which no longer hears of anything once its actor is gone."""
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
                message = (
                    f"Ray found no room for it in {PLACE_S:g} s; `ray status` tells what is free; use fewer --workers"
                )
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
        """How far the node's clock is ahead of this one's."""
        self._ray.get(self._actor.monotonic_s.remote(), timeout=PLACE_S)  # placed, and its process is there
        trips = []
        for _ in range(PINGS):
            sent_s = time.monotonic()
            there_s = self._ray.get(self._actor.monotonic_s.remote())
            back_s = time.monotonic()
            trips.append((back_s - sent_s, there_s - (sent_s + back_s) / 2))
        return float(min(trips)[1])


def _not_up(error: Exception) -> str:
    """What Ray says of an actor that failed before it was up: the last line of a page, the cause."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"its actor did not start ({type(error).__name__}: {said[-1] if said else 'nothing said'}); every node of the cluster "
        "needs the same simrl and vLLM installed"
    )


def ray_fleet(workers: int, settings: EngineSettings, config: ReplayConfig, address: str) -> Fleet:
    """Engines as actors of the cluster at `address`, as `connect` takes it."""
    connect(address)

    def start(i: int) -> Callable[[], Link]:
        return lambda: RayLink(f"worker {i}", settings)

    return Fleet([start(i) for i in range(workers)], config.start_deadline_s)
