"""Engines on a Ray cluster: each in an actor with its own GPUs, with the child process and loop of
a local engine.

Invariant: an actor only forwards its engine's pipe; commands and reports keep their order. When the
engine, the actor or its node dies, the line here is at its end, as a local one is. An engine with
tensor parallelism is one actor, so all of its GPUs are on one node; actors are spread over the nodes.
Folders in commands are the driver's; the engine gets the path of equal files on its node.

Clocks of nodes differ: `offset_s` is measured by round trips (Cristian's algorithm), accurate to
half the fastest one.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from shutil import rmtree
from typing import Any

from simrl.errors import InputError, StoppedError
from simrl.study.executors import connect
from simrl_replay.ahead import DrafterProcess
from simrl_replay.host import (
    Alive,
    Command,
    DraftCall,
    Failed,
    LoadWeights,
    NoRoom,
    Report,
    Reset,
)
from simrl_replay.link import CLOSE_S, ProcessLink, engine_link
from simrl_replay.proposer import DrafterSetup
from simrl_replay.ray_nodes import Node, Nodes
from simrl_replay.replayer import ReplayConfig, ReplayEngines
from simrl_replay.vllm_adapter import EngineSettings

PINGS = 20
PLACE_S = 120.0  # time for the cluster to find room for an engine


class EngineActor:
    """An engine's process on a node, and methods to exchange messages with it. Calls of one
    concurrency group have a thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._log = (
            Path(tempfile.mkdtemp(prefix="simrl-")) / "engine.log"
        )  # kept, but for an end as it should be
        self._where = f"its log is {self._log} on {socket.gethostname()}"
        self._link: ProcessLink | None = None

    def node(self) -> Node:
        import ray

        return Node(
            ray.get_runtime_context().get_node_id(),
            socket.gethostname(),
            ray.util.get_node_ip_address(),
        )

    def monotonic_s(self) -> float:
        return time.monotonic()

    def start(self, settings: EngineSettings) -> None:
        self._link = engine_link(self._name, settings, self._log)

    def send(self, commands: Sequence[Command]) -> None:
        assert self._link is not None
        self._link.send(commands)

    def receive(self) -> Sequence[Report] | None:
        """Wait for the next reports and return them; None when the engine is gone."""
        assert self._link is not None
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

    def kill(self) -> None:
        if self._link is not None:
            self._link.kill()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        rmtree(self._log.parent, ignore_errors=True)

    def death(self) -> str:
        assert self._link is not None
        return f"{self._link.death()}; {self._where}"


class RayLink:
    """The line to an actor. A thread here waits until the actor is placed, starts its engine, then
    waits for its reports, and writes them to a pipe that the clock can wait on. Another sends
    commands, when the weights that they name are on the node: until then the engine goes on
    generating. No caller waits for the cluster.

    An engine that does not start is a `Failed` one in that pipe. If `again`, it takes the place of a
    lost engine: while the cluster has no room for it, that is a `NoRoom` report, and it waits.
    """

    offset_s = 0.0  # measured before the first report

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        nodes: Nodes,
        folders: Sequence[str] = (),
        again: bool = False,
        actor: type[EngineActor] = EngineActor,
    ) -> None:
        """Ask the cluster for an `actor`. `folders` of weights travel before the engine starts."""
        import ray

        self.name = name
        self.place: Mapping[str, str] = {}  # of the engine that runs, for the result
        self._ray = ray
        self._settings, self._nodes, self._folders = settings, nodes, folders
        self._again = again
        self._node: Node | None = None
        # Threads of an actor: one waits for reports, one sends commands in order, one serves other
        # calls.
        remote = ray.remote(
            concurrency_groups={"receive": 1, "send": 1},
            scheduling_strategy="SPREAD",
            **{resource(settings): each_needs(settings)},
        )
        self._actor: Any = remote(actor).remote(name)
        self._out: SimpleQueue[list[Command] | None] = SimpleQueue()
        self._writing = threading.Lock()  # to the pipe
        self.connection, self._there = multiprocessing.Pipe(duplex=False)
        threading.Thread(target=self._pass_on, name=f"reports of {name}", daemon=True).start()

    def send(self, commands: Sequence[Command]) -> None:
        self._out.put(list(commands))

    def kill(self) -> None:
        """End the engine and its actor; a thread waits for a node that does not answer."""
        threading.Thread(target=self._end, args=("kill",), daemon=True).start()

    def close(self) -> None:
        self._end("close")
        self.connection.close()

    def death(self) -> str:
        try:
            return str(self._ray.get(self._actor.death.remote(), timeout=2 * CLOSE_S))
        except self._ray.exceptions.RayError as error:
            # A cluster hears of a node's death some time after it.
            return f"its actor or its {self._node or 'node'} is gone ({type(error).__name__})"

    def _end(self, how: str) -> None:
        """End the engine, then the actor: without its actor, the engine gets no command."""
        self._out.put(None)
        if self._node is not None:
            with suppress(self._ray.exceptions.RayError):  # it is gone already
                self._ray.get(getattr(self._actor, how).remote(), timeout=2 * CLOSE_S)
        self._ray.kill(self._actor)

    def _pass_on(self) -> None:
        # Nobody listens any more, or it is gone.
        with self._there, suppress(OSError, self._ray.exceptions.RayError):
            if not self._started():
                return
            threading.Thread(
                target=self._send_on, name=f"commands to {self.name}", daemon=True
            ).start()
            receive = self._actor.receive.options(concurrency_group="receive")
            while (reports := self._ray.get(receive.remote())) is not None:
                self._report(reports)

    def _started(self) -> bool:
        """Wait for a place, and start the engine there. Report what fails, and return whether
        nothing did."""
        try:
            node = self._placed()
            if node is None:
                return False
            self._nodes.check(node)
            self.offset_s = self._measured_offset_s()
            for folder in self._folders:
                self._nodes.path(node, folder)
            self._ray.get(self._actor.start.remote(self._settings_on(node)))
        except (InputError, StoppedError, OSError) as error:
            self._report([Failed(str(error), "")])
        except self._ray.exceptions.RayError as error:
            # One that takes a lost one's place may get the dying node: the end of the line tells.
            if not (self._again and isinstance(error, self._ray.exceptions.ActorDiedError)):
                self._report([Failed(_not_up(error), "")])
        else:
            self.place = node._asdict()
            return True
        return False

    def _placed(self) -> Node | None:
        """Wait for a place and return its node; None if the cluster has had none for `PLACE_S`, when
        the engine is a first one."""
        place, waited = self._actor.node.remote(), False
        while True:
            try:
                self._node = self._ray.get(place, timeout=PLACE_S)
                if waited:
                    self._report([Alive(0.0)])
                return self._node
            except self._ray.exceptions.GetTimeoutError:
                needs = f"{each_needs(self._settings)} {WORDS[resource(self._settings)]}"
                lacks = f"Ray had no node with {needs} free for it for {PLACE_S:g} s; `ray status` shows free ones"
                if not self._again:
                    self._report([Failed(f"{lacks}; use fewer --workers", "")])
                    return None
                self._report([NoRoom(lacks)])
                waited = True

    def _settings_on(self, node: Node) -> EngineSettings:
        """Return the settings with the paths of the models on a node."""
        settings = self._settings
        speculative = settings.speculative
        if speculative is not None and Path(drafter := str(speculative.get("model"))).is_dir():
            speculative = {**speculative, "model": self._nodes.path(node, drafter)}
        model = self._nodes.path(node, settings.model)
        return replace(settings, model=model, speculative=speculative)

    def _send_on(self) -> None:
        """Send commands in their order, with the paths of weights on the engine's node."""
        send = self._actor.send.options(concurrency_group="send")
        with suppress(OSError, self._ray.exceptions.RayError):  # its line is at its end
            for commands in iter(self._out.get, None):
                try:
                    send.remote([with_paths(each, self._path) for each in commands])
                except (StoppedError, OSError) as error:
                    self._report([Failed(f"weights: {error}", "")])

    def _path(self, folder: str) -> str:
        assert self._node is not None
        return self._nodes.path(self._node, folder)

    def _report(self, reports: Sequence[Report]) -> None:
        with self._writing:
            self._there.send(reports)

    def _measured_offset_s(self) -> float:
        """Measure how far the node's clock is ahead of this one."""
        trips = []
        for _ in range(PINGS):
            sent_s = time.monotonic()
            there_s = self._ray.get(self._actor.monotonic_s.remote())
            back_s = time.monotonic()
            trips.append((back_s - sent_s, there_s - (sent_s + back_s) / 2))
        return float(min(trips)[1])


def with_paths(command: Command, path: Callable[[str], str]) -> Command:
    """Return a command with the `path` of each folder of weights, and of each drafter's model."""

    def moved(process: DrafterProcess) -> DrafterProcess:
        model = path(process.settings.model)
        return replace(process, settings=replace(process.settings, model=model))

    match command:
        case LoadWeights() | Reset():
            return command._replace(folder=path(command.folder))
        case DraftCall("start_drafters", (processes,)):
            return DraftCall("start_drafters", ([moved(each) for each in processes],))
        case DraftCall("configure", (DrafterSetup(ahead=ahead) as setup, worker)) if ahead:
            ahead = ahead._replace(process=moved(ahead.process))
            return DraftCall("configure", (replace(setup, ahead=ahead), worker))
        case _:
            return command


def _not_up(error: Exception) -> str:
    """Describe why an actor failed to start: the last line of Ray's message, the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"its actor did not start ({type(error).__name__}: {lines[-1] if lines else 'no message'}); every node of the cluster "
        "needs the same simrl and vLLM installed"
    )


WORDS = {"num_gpus": "GPUs", "num_cpus": "CPUs"}


def resource(settings: EngineSettings) -> str:
    """Return the argument of Ray that says how many GPUs, or CPUs, an engine gets."""
    return "num_gpus" if settings.device == "cuda" else "num_cpus"


def each_needs(settings: EngineSettings) -> int:
    """Return the number of GPUs, or CPUs, of an engine and its drafters."""
    processes = settings.tp + settings.draft_gpus
    return processes * (1 if settings.device == "cuda" else settings.threads)


def check_room(workers: int, settings: EngineSettings, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InputError` if the nodes, as `ray.nodes` lists them, have too few GPUs or CPUs even
    when nothing else runs there. All of an engine's are on one node."""
    word, needs = WORDS[resource(settings)], each_needs(settings)
    alive = [int(each["Resources"].get(word[:-1], 0)) for each in nodes if each["Alive"]]
    if (room := sum(there // needs for there in alive)) < workers:
        raise InputError(
            f"--ray: {workers} engines need {needs} {word} each, all on one node; the cluster has room for {room} (its "
            f"nodes have {', '.join(map(str, alive))}); use fewer --workers"
            + (", a smaller cluster.tp" if word == "GPUs" else ", fewer --threads")
            + ", or add nodes (`ray status`)"
        )


class RayEngines(ReplayEngines):
    """Engines of a replay on the nodes of a cluster."""

    def __init__(self, nodes: Nodes, *arguments: Any) -> None:
        self.nodes = nodes
        try:
            super().__init__(*arguments)
        except BaseException:
            nodes.close()
            raise

    def facts(self) -> dict[str, Any]:
        travels = [travel._asdict() for travel in self.nodes.travels]
        return {"lost_nodes": self.nodes.lost(), "travels": travels}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.nodes.close()


def ray_fleet(
    workers: int,
    settings: EngineSettings,
    config: ReplayConfig,
    address: str,
    actor: type[EngineActor] = EngineActor,
) -> RayEngines:
    """Start engines as actors of the cluster at `address`, as `connect` takes it."""
    import ray

    connect(address)
    check_room(workers, settings, ray.nodes())
    nodes = Nodes(config.copy_weights)
    folders = [str(folder) for folder in config.weights]

    def start(i: int, earlier: Iterator[int]) -> RayLink:
        return RayLink(f"worker {i}", settings, nodes, folders, next(earlier) > 0, actor)

    starts = [partial(start, i, count()) for i in range(workers)]
    return RayEngines(nodes, starts, config.start_deadline_s)


def places_line(engines: Sequence[Mapping[str, Any]]) -> str:
    """Return a line on how the engines of a result are spread over nodes."""
    placed = Counter(each["node_id"] for each in engines if "node_id" in each)
    one, alone = placed.total() == 1, len(placed) == 1
    return (
        f"{placed.total()} engine{'' if one else 's'} on {len(placed)} node{'' if alone else 's'}"
    )
