"""A replay over two nodes of a Ray cluster, here on one machine and mostly with doubles of engines: where engines are, how
weights reach them, and what a lost node costs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm  # where Ray is installed
ray = pytest.importorskip("ray", reason="runs a local Ray cluster: pip install 'simrl[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from simrl.dispatch.dispatcher import Dispatcher  # noqa: E402
from simrl.dispatch.rules import DISPATCHES  # noqa: E402
from simrl.errors import InputError, StoppedError  # noqa: E402
from simrl.result.result import Lane  # noqa: E402
from simrl.runtime.events import gather  # noqa: E402
from simrl.runtime.recorder import Recorder  # noqa: E402
from simrl_replay import ray_link, ray_nodes  # noqa: E402
from simrl_replay.ahead import AheadSetup, DrafterProcess  # noqa: E402
from simrl_replay.clock import WallClock  # noqa: E402
from simrl_replay.host import DraftCall, LoadWeights, Reset  # noqa: E402
from simrl_replay.link import engine_link  # noqa: E402
from simrl_replay.proposer import DrafterSetup  # noqa: E402
from simrl_replay.ray_link import (  # noqa: E402
    EngineActor,
    RayEngines,
    RayLink,
    check_room,
    places_line,
    ray_fleet,
    with_paths,
)
from simrl_replay.ray_nodes import File, NodeFiles, Versions, listed, versions  # noqa: E402
from simrl_replay.replayer import ReplayConfig  # noqa: E402
from simrl_replay.vllm_adapter import EngineSettings  # noqa: E402
from simrl_replay.vllm_worker import VllmWorker  # noqa: E402
from tests.command_line import ROOT  # noqa: E402
from tests.engine_double import EngineDouble, double_settings  # noqa: E402
from tests.helpers import RESPONSES, ROOMY  # noqa: E402
from tests.replay.test_replay_faults import Stage, eventually, samples  # noqa: E402
from tests.replay.test_vllm_worker import prompt_ids  # noqa: E402

SHM_BYTES = 80 * 2**20  # of a node's object store: the least that Ray takes is 75 MiB


class DoubleActor(EngineActor):
    """An actor around a double; the double knows weights by their folder's name, after it has read them."""

    def start(self, settings: EngineSettings) -> None:
        self._link = engine_link(
            self._name, settings, self._log, start=partial(ReadingDouble, step_s=0.005)
        )


class ReadingDouble(EngineDouble):
    """A double whose weights are broken unless the file of weights holds the name of its folder."""

    def load_weights(self, folder: str) -> None:
        content = (Path(folder) / "model.safetensors").read_bytes()
        super().load_weights(folder if content == of(Path(folder).name) else "broken")


def of(name: str) -> bytes:
    """The weights of a version: 1 MB."""
    return name.encode() * 500_000


def version(folder: Path, content: bytes | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(of(folder.name) if content is None else content)
    (folder / "modeling.py").write_text("raise SystemExit")  # code does not travel
    return folder


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A head that only keeps the books."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'replay'}")  # nodes run this checkout
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": SHM_BYTES,
            },
        )
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def two_nodes(head: Cluster) -> tuple[Cluster, list[Any]]:
    """The cluster, and its nodes of a CPU each: as many are added as a test before has lost."""
    while len(nodes := [node for node in head.list_all_nodes() if not node.head]) < 2:
        head.add_node(num_cpus=1, object_store_memory=SHM_BYTES)
    head.wait_for_nodes()
    return head, nodes


def config_of(folder: Path, copy_weights: bool = True) -> ReplayConfig:
    """Two versions of weights, which travel though nodes of one machine see their paths."""
    weights = tuple(version(folder / name) for name in ("v0", "v1"))
    return ReplayConfig(weights[0], weights, copy_weights=copy_weights, start_deadline_s=60.0)


@contextmanager
def stage(config: ReplayConfig, fleet: RayEngines) -> Iterator[Stage]:
    with fleet:
        env = WallClock()
        record = Recorder([Lane(f"rollout-{i:03d}", 1) for i in range(len(fleet.links))])
        happened: list[dict] = []
        workers = [
            VllmWorker(
                env, i, link, partial(fleet.restart, i), RESPONSES, prompt_ids, config.folder, record,
                30.0, 60.0, happened.append,
            )
            for i, link in enumerate(fleet.links)
        ]  # fmt: skip
        dispatcher = Dispatcher(env, workers, DISPATCHES["least_requests"], record)
        for worker in workers:
            worker.dispatcher = dispatcher
        yield Stage(env, fleet, record, workers, dispatcher, happened)


def doubles(config: ReplayConfig, cluster: Cluster, workers: int = 2) -> RayEngines:
    settings = double_settings(ROOMY, str(config.model))
    return ray_fleet(workers, settings, config, cluster.address, DoubleActor)


def test_engines_are_spread_over_the_nodes_and_weights_travel_to_each(
    two_nodes: tuple[Cluster, list[Any]], tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    with stage(config, doubles(config, two_nodes[0])) as real:
        places = [link.place for link in real.fleet.links]
        assert len({place["node_id"] for place in places}) == 2
        assert places_line(places) == "2 engines on 2 nodes"
        travels = real.fleet.nodes.travels
        assert sorted((t.node_id, Path(t.folder).name) for t in travels) == sorted(
            (place["node_id"], name) for place in places for name in ("v0", "v1")
        )  # before the clock starts, each once
        assert {travel.bytes for travel in travels} == {len(of("v0")) + 2}
        real.finish(samples(6, 20))  # tokens are those of v0
        late = version(tmp_path / "v2")  # that training writes meanwhile
        real.workers[0]._weights = real.workers[1]._weights = lambda _: str(late)
        loads = real.env.run(
            until=gather(real.env, [worker.load_weights(2) for worker in real.workers])
        )
        assert [load.version for load in loads] == [2, 2] and len(travels) == 6
        later, link = version(tmp_path / "v3"), real.fleet.links[0]
        assert isinstance(link, RayLink) and link._node is not None
        with ThreadPoolExecutor(4) as pool:  # engines of one node ask for it at once
            paths = {*pool.map(real.fleet.nodes.path, [link._node] * 4, [str(later)] * 4)}
        assert len(paths) == 1 and len(travels) == 7
        assert real.happened == []


def test_a_lost_nodes_samples_go_on_elsewhere_and_its_engine_comes_back_when_there_is_room(
    two_nodes: tuple[Cluster, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, nodes = two_nodes
    config = config_of(tmp_path)
    with stage(config, doubles(config, cluster)) as real:
        monkeypatch.setattr(ray_link, "PLACE_S", 1.0)
        ids = [link.place["node_id"] for link in real.fleet.links]
        lost = ids.index(nodes[1].node_id)
        real.at(0.5, lambda: cluster.remove_node(nodes[1], allow_graceful=False))
        rollouts = real.finish(samples(8, 1000))
        moved = [r for r in rollouts if {s.worker for s in r.segments} == {0, 1}]
        assert moved  # with their tokens: `finish` counts them
        assert real.dispatcher.lost == [lost]
        messages = [event["message"] for event in real.happened]
        assert (
            messages[0].startswith(f"worker {lost}: its actor or its node ")
            and "gone" in messages[0]
        )
        until_s = real.env.now + 60.0
        while real.env.now < until_s and real.happened[-1]["kind"] != "no room":
            real.env.run(until=real.env.timeout(0.2))  # the cluster hears of the node's death late
        kinds = [event["kind"] for event in real.happened]
        # The new one may die with the node.
        assert list(dict.fromkeys(kinds)) == ["died", "no room"]
        assert "had no node with 1 CPUs free" in real.happened[-1]["message"]
        assert places_line([link.place for link in real.fleet.links]) == "1 engine on 1 node"
        third = cluster.add_node(num_cpus=1, object_store_memory=SHM_BYTES)
        back = real.dispatcher.activated(lost)  # which a schedule would not wait for alone
        real.env.run(until=real.env.any_of([back, real.env.timeout(100.0)]))
        place = real.fleet.links[lost].place
        assert place["node_id"] == third.node_id not in ids
        assert {
            Path(t.folder).name for t in real.fleet.nodes.travels if t.node_id == third.node_id
        } == {"v0", "v1"}
        rollouts = real.env.run(until=gather(real.env, real.dispatcher.submit(samples(12)[8:])))
        assert {s.worker for r in rollouts for s in r.segments} == {0, 1}
        assert eventually(lambda: gone(ids[lost], real.fleet))


def gone(node_id: str, fleet: RayEngines) -> bool:
    """Return whether the cluster has heard of a node's death, which takes it a while."""
    return any(node_id[:6] in node for node in fleet.facts()["lost_nodes"])


@pytest.mark.slow
def test_a_node_with_other_versions_is_refused_in_a_line(
    two_nodes: tuple[Cluster, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, here = config_of(tmp_path), versions()
    for other, what in (
        (Versions("another", here.vllm), "has another version of simrl than this machine"),
        (Versions(here.code, "0.26.0"), f"has vLLM {here.vllm}, this machine has 0.26.0"),
    ):
        monkeypatch.setattr(ray_nodes, "versions", lambda other=other: other)
        with pytest.raises(InputError, match=rf"worker 0: node .*{what}; install") as messages:
            doubles(config, two_nodes[0], workers=1)
        assert "\n" not in str(messages.value)


def test_a_cluster_that_is_too_small_is_refused_before_anything_starts() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 3.0}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"GPU": 8.0}},
    ]
    gpus = replace(double_settings(ROOMY), device="cuda", tp=2)
    check_room(5, gpus, nodes)
    with pytest.raises(
        InputError,
        match=r"--ray: 6 engines need 2 GPUs each, all on one node; the cluster has room for 5 \(its nodes have 8, 3, 0\); "
        r"use fewer --workers, a smaller cluster\.tp, or add nodes",
    ):
        check_room(6, gpus, nodes)
    with pytest.raises(
        InputError, match=r"1 engines need 16 GPUs each, all on one node.*room for 0"
    ):
        check_room(1, replace(gpus, tp=16), nodes)
    with pytest.raises(InputError, match=r"need 48 CPUs each.*room for 2.*fewer --threads"):
        check_room(3, replace(double_settings(ROOMY), threads=48), nodes)


def test_a_node_takes_only_files_of_equal_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "get", lambda chunk: chunk)  # of no cluster
    folder = version(tmp_path / "v0", b"weights")
    files = listed(folder)
    assert [file.name for file in files] == ["config.json", "model.safetensors"]
    node = NodeFiles()
    assert node.path(str(folder), files, shared=True) == str(folder)
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    newer = listed(folder)
    with pytest.raises(
        StoppedError, match=r"model\.safetensors: other bytes arrived than were sent"
    ):
        node.copy("v0", newer, [[b"{}"], [b"WEI", b"GHTz"]])
    path, is_new = node.copy("v0", newer, [[b"{}"], [b"WEI", b"GHTS"]])
    assert is_new and node.copy("v0", newer, [[], []]) == (path, False)
    copy = Path(path)
    assert copy != folder and listed(copy) == newer
    assert node.path(str(folder), newer, shared=False) == str(copy)
    unlike = (File("config.json", 2, "0" * 64),)
    assert node.path(str(folder), unlike, shared=True) is None
    assert node.path(str(tmp_path / "nowhere"), (*newer, *unlike), shared=True) is None
    node.close()
    assert not copy.exists()


def test_commands_name_the_nodes_own_folders_of_weights_and_of_drafters() -> None:
    process = DrafterProcess(double_settings(ROOMY, "draft"), number=2)
    setup = DrafterSetup("ahead", ahead=AheadSetup(process, loads=True))
    there = [
        with_paths(command, lambda folder: f"/there/{folder}")
        for command in (
            Reset(-1, "v0"),
            LoadWeights(1, 1, "v1", "keep", 0.0),
            DraftCall("start_drafters", ([process],)),
            DraftCall("configure", (setup, 3)),
        )
    ]
    assert isinstance(there[0], Reset) and isinstance(there[1], LoadWeights)
    assert [each.folder for each in there[:2]] == ["/there/v0", "/there/v1"]
    assert isinstance(there[2], DraftCall) and isinstance(there[3], DraftCall)
    ((started,),), (configured, worker) = there[2].arguments, there[3].arguments
    assert started == configured.ahead.process and worker == 3
    assert started == replace(process, settings=double_settings(ROOMY, "/there/draft"))
    assert replace(configured, ahead=setup.ahead) == setup
    for command in (DraftCall("configure", (DrafterSetup("ngram"), 0)), DraftCall("learn", (1, 2))):
        assert with_paths(command, lambda folder: f"/there/{folder}") == command
