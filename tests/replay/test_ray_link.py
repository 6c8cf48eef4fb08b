"""Engines on a Ray cluster: here a local one, with two CPU workers."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="runs real vLLM engines (docs/replay.md)")
ray = pytest.importorskip("ray", reason="runs a local Ray cluster: pip install 'simrl[ray]'")

import yaml  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from simrl.errors import InputError  # noqa: E402
from simrl.scenario.load import load_scenarios  # noqa: E402
from simrl.simulate.prepare import Prepared, prepare  # noqa: E402
from simrl.trace.trace import write_trace  # noqa: E402
from simrl_replay.link import start_all  # noqa: E402
from simrl_replay.random_model import make_model, nudge  # noqa: E402
from simrl_replay.ray_link import RayLink, ray_fleet  # noqa: E402
from simrl_replay.ray_nodes import Nodes  # noqa: E402
from simrl_replay.replayer import ReplayConfig, engine_settings, replay  # noqa: E402
from tests.command_line import ROOT, SCENARIO, CommandLine  # noqa: E402
from tests.helpers import trace  # noqa: E402
from tests.replay.test_replay_faults import eventually  # noqa: E402

Lengths = Sequence[Sequence[Sequence[tuple[int, int]]]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ReplayConfig:
    folder = tmp_path_factory.mktemp("models")
    first = make_model(folder / "v0")
    return ReplayConfig(first, (first, nudge(first, folder / "v1")), dtype="float32")


@pytest.fixture(scope="module")
def prepared(config: ReplayConfig, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    lengths = [
        [[(20, 12), (20, 40)], [(9, 25), (9, 8)]],
        [[(31, 30), (31, 9)], [(14, 16), (14, 50)]],
    ]
    return prepared_of(config, tmp_path_factory.mktemp("scenario"), lengths)


def prepared_of(config: ReplayConfig, folder: Path, lengths: Lengths) -> Prepared:
    """A scenario of these lengths, by steps and groups."""
    write_trace(trace(lengths), folder / "trace.parquet")
    scenario = {
        "name": "ray",
        "steps": len(lengths),
        "model": str(config.model),
        "cluster": {"gpu": "cpu", "gpus": 3, "tp": 1},
        "workload": {"trace": str(folder / "trace.parquet")},
        "profile": {"roofline": {}},
        "engine": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 32,
            "kv_cache_tokens": 8192,
        },
        "training": {"reward_s": 0.01, "publish_s": 0.01, "load_overhead_s": 0.0},
        "systems": ["split"],
    }
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    (found,) = load_scenarios(folder / "scenario.yaml")
    return prepare(found)


@pytest.fixture(scope="module", autouse=True)
def end_of_ray() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.mark.slow
def test_two_actors_of_a_local_cluster_generate_what_the_trace_asks_for(
    prepared: Prepared, config: ReplayConfig
) -> None:
    with ray_fleet(2, engine_settings(prepared, config), config, "local") as fleet:
        assert all(abs(link.offset_s) < 0.05 for link in fleet.links)  # of one host
        measured = replay(prepared, fleet, config)
    assert measured.stopped is None
    samples = measured.result.samples.to_pandas()
    trained = samples[samples.status == "trained"].sort_values("uid")
    assert trained.generated_tokens.tolist() == [12, 40, 25, 8, 30, 9, 16, 50]
    assert set(trained.worker) == {0, 1}
    assert (measured.result.spans.to_pandas()["kind"] == "load_weights").any()


def test_the_line_to_an_actor_that_is_killed_is_at_its_end(
    prepared: Prepared, config: ReplayConfig
) -> None:
    with ray_fleet(1, engine_settings(prepared, config), config, "local") as fleet:
        link = fleet.links[0]
        assert isinstance(link, RayLink)
        link.kill()
        assert link.connection.poll(30)
        with pytest.raises(EOFError):
            link.connection.recv()
        assert eventually(lambda: "gone" in link.death())  # the actor follows its engine


class _Missing:
    """What a node has not got that is sent to it: simrl, say."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return importlib.import_module, ("simrl_of_another_version",)


def test_an_actor_that_does_not_start_is_told_in_a_line(
    prepared: Prepared, config: ReplayConfig
) -> None:
    with ray_fleet(0, engine_settings(prepared, config), config, "local"):
        pass
    links: list[RayLink] = []

    def start() -> RayLink:
        links.append(RayLink(_Missing(), engine_settings(prepared, config), Nodes()))  # type: ignore[arg-type]
        links[-1].name = "worker 0"
        return links[-1]

    with pytest.raises(
        InputError, match=r"worker 0: its actor did not start \(.*simrl_of_another_version"
    ) as told:
        start_all([start], 60.0)
    assert "\n" not in str(told.value) and "every node" in str(told.value)


def test_a_cluster_that_does_not_answer_is_named(prepared: Prepared, config: ReplayConfig) -> None:
    ray.shutdown()
    with pytest.raises(InputError, match=r"--ray 127\.0\.0\.1:1: no cluster answers there"):
        ray_fleet(1, engine_settings(prepared, config), config, "127.0.0.1:1")


def test_a_replay_asks_for_the_cluster_before_it_predicts_anything(
    simrl: CommandLine, config: ReplayConfig
) -> None:
    ray.shutdown()
    scenario = SCENARIO.replace(
        "[verl_colocated, {name: areal, eta: 2}]", "[verl_colocated]"
    ).replace("h100", "cpu")
    (simrl.folder / "one.yaml").write_text(f"{scenario}engine: {{kv_cache_tokens: 4096}}\n")
    told = simrl.refuses(
        "replay",
        "one.yaml",
        f"model={config.model}/config.json",
        "training.mfu=1",
        "--device",
        "cpu",
        "--ray",
        "127.0.0.1:1",
    )  # one line, so nothing was said of a prediction
    assert "--ray 127.0.0.1:1: no cluster answers there" in told


@pytest.mark.slow
def test_a_replay_over_two_nodes_goes_on_when_one_is_lost_and_its_tokens_add_up(
    config: ReplayConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real engines: weights travel to both nodes, and a node dies after the first update."""
    ray.shutdown()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'replay'}")  # nodes run this checkout
    lengths = [[[(20, 400), (20, 700)], [(9, 600), (9, 500)]]] * 3
    prepared = prepared_of(config, tmp_path, lengths)
    config = replace(config, copy_weights=True)
    memory = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, **memory},
    )
    try:
        nodes = [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
        settings = engine_settings(prepared, config)
        with ray_fleet(2, settings, config, cluster.address) as fleet:
            before = [link.place["node_id"] for link in fleet.links]

            def kill_a_node(_: int) -> None:
                if nodes[0] in cluster.list_all_nodes():
                    cluster.remove_node(nodes[0], allow_graceful=False)

            measured = replay(prepared, fleet, config, kill_a_node)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert measured.stopped is None and sorted(before) == sorted(n.node_id for n in nodes)
    facts, samples = measured.result.metadata["replay"], measured.result.samples.to_pandas()
    trained = samples[samples.status == "trained"].sort_values("uid")
    assert trained.generated_tokens.tolist() == [400, 700, 600, 500] * 3
    lost = before.index(nodes[0].node_id)
    assert facts["happened"][0]["message"].startswith(f"worker {lost}: its actor or its node ")
    [left] = [each for each in facts["engines"] if "node_id" in each]
    assert left["node_id"] == nodes[1].node_id and left["passes"] > 500
    tokens = facts["tokens"]
    assert tokens["generated"] == sum(tokens.values()) - tokens["generated"] >= 6600
    assert measured.result.segments.to_pandas().groupby("uid").worker.nunique().max() == 2
