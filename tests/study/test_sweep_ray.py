"""A sweep on a Ray cluster of two nodes, here on one machine: the same table as from this process, also when a node dies."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm  # where Ray is installed
ray = pytest.importorskip("ray", reason="runs a local Ray cluster: pip install 'simrl[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from simrl.errors import StoppedError  # noqa: E402
from simrl.study.executors import Here, RayCluster  # noqa: E402
from simrl.study.grid import vary  # noqa: E402
from simrl.study.point import Point  # noqa: E402
from simrl.study.sweep import SweepPlan, plan, run  # noqa: E402
from simrl.trace.trace import write_trace  # noqa: E402
from tests.command_line import ROOT, SCENARIO, CommandLine, contents  # noqa: E402
from tests.helpers import trace  # noqa: E402
from tests.replay.test_replay_faults import eventually  # noqa: E402


@contextmanager
def two_nodes() -> Iterator[tuple[Cluster, Any]]:
    """A head that only keeps the books, and two nodes of a CPU each; gives the cluster and the second node."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepPlan:
    """Points that name a trace, and some that cannot be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # nodes run this checkout
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    write_trace(trace([[[(20, 90), (20, 40)], [(9, 25), (9, 80)]]] * 2), "trace.parquet")
    texts = [
        "workload={trace: trace.parquet, synthetic: null}",
        "cluster.gpus=4,8,3",
        "cluster.tp=1,2",
        "seed=0..7",
    ]
    return plan(
        vary(tmp_path / "scenario.yaml", [*texts, "steps=200", "systems=verl_colocated"]), None, 0
    )


@pytest.mark.slow
def test_a_node_that_is_killed_in_mid_sweep_changes_no_byte_and_is_told_in_a_line(
    planned: SweepPlan, caplog: pytest.LogCaptureFixture
) -> None:
    rows = run(planned, {}, Path("here"), Here(), {}).rows
    assert 0 < sum("does not divide" in (row["error"] or "") for row in rows) < len(rows)
    with two_nodes() as (cluster, second):
        executor, nodes = RayCluster(cluster.address), len(ray.nodes())
        done: list[int] = []

        def kill() -> None:
            done.append(len(done))
            if len(done) == len(planned.points) // 3:
                cluster.remove_node(second, allow_graceful=False)

        run(planned, {}, Path("there"), executor, {}, kill)
        # a cluster hears of a death some time after it
        assert eventually(lambda: sum(node["Alive"] for node in ray.nodes()) == nodes - 1, 60.0)
    assert len(done) == len(planned.points) == 48
    assert contents(Path("there")) == contents(Path("here"))
    told = [record.getMessage() for record in caplog.records if "--ray" in record.getMessage()]
    assert len(told) == 1
    assert re.fullmatch(r"--ray: a worker was lost; \d+ points? of it ran again elsewhere", told[0])


class Foreign(Point):
    """A point that a node has not the code for."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return importlib.import_module, ("simrl_of_another_version",)


def test_a_node_without_the_same_simrl_stops_the_sweep_with_a_line(
    planned: SweepPlan, tmp_path: Path
) -> None:
    point = planned.points[0]
    other, foreign = replace(point), Foreign(point.scenario, point.digests)
    vars(other)["code"] = {**point.code, "code": "another"}
    with two_nodes() as (cluster, _):
        executor = RayCluster(cluster.address)
        for one, what in (
            (other, "has another version of simrl"),
            (foreign, "simrl_of_another_version"),
        ):
            with pytest.raises(
                StoppedError,
                match=f"--ray: a node could not simulate a point .*{what}.*this version of simrl",
            ) as told:
                list(executor.outcomes([one]))
            assert "\n" not in str(told.value)


@pytest.mark.slow
def test_a_sweep_whose_cluster_loses_its_head_ends_in_a_line_and_another_goes_on_from_its_points(
    simrl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sweep = ("sweep", "scenario.yaml", "seed=0..59", "steps=200", "systems=verl_colocated")
    with two_nodes() as (cluster, _):
        process = simrl.start(*sweep, "-o", "there", "--ray", cluster.address)
        assert eventually(lambda: kept(simrl.folder / "there") > 3, 60.0)
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        _, err = process.communicate(timeout=90.0)
    lines = [line for line in err.splitlines() if line.startswith("simrl: ")]
    assert process.returncode == 2, err
    assert len(lines) == 1 and "the head of the cluster at" in lines[0] and "are kept" in lines[0]
    before = kept(simrl.folder / "there")
    assert 3 < before < 60 and not (simrl.folder / "there" / "table").exists()
    assert simrl(*sweep, "-o", "there", "--jobs", "1").code == 0
    assert simrl(*sweep, "-o", "here", "--jobs", "1").code == 0
    assert contents(simrl.folder / "there" / "table") == contents(simrl.folder / "here" / "table")


def kept(folder: Path) -> int:
    """Return the number of points that a sweep has kept."""
    return len(list((folder / "points").rglob("*.json")))
