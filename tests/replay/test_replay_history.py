"""The history that a replay's drafters learn: groups, with and without dropped responses."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from simrl.runtime.rollout import Rollout
from simrl.trace.trace import Response, Sample, write_trace
from simrl_replay.link import engine_link
from simrl_replay.proposer import DraftCounts
from simrl_replay.replayed import with_workers
from simrl_replay.replayer import (
    History,
    ReplayConfig,
    ReplayEngines,
    engine_settings,
    replay,
)
from simrl_replay.vllm_worker import VllmWorker
from tests.engine_double import EngineDouble
from tests.helpers import prepared, rows, scenario
from tests.token_traces import random_groups, trace_of


class NoDrafter:
    """A drafter of an engine double, which drafts nothing."""

    def configure(self, *setup) -> None:
        pass

    def new_rollout(self, siblings: bool) -> None:
        pass

    def begins(self, *request, **more) -> None:
        pass

    def ends(self, request_id: str) -> DraftCounts:
        return DraftCounts()

    counts = ends


class DraftingDouble(EngineDouble):
    drafter = NoDrafter()


class Learner:
    """A worker, as the history sees it."""

    def __init__(self) -> None:
        self.lessons: list[tuple] = []

    def draft(self, *call) -> None:
        self.lessons.append(call)


def rollout(sample: int, *token_ids: int) -> Rollout:
    """A response of the only group; one without tokens is unfinished."""
    place = Sample(sample, 0, 0, 7, sample, 4)
    return Rollout(place, (), bool(token_ids), token_ids=token_ids or None)


def test_of_a_group_with_dropped_responses_the_finished_ones_are_learnt_and_a_late_one_alone():
    learner, again = Learner(), Learner()
    trace = trace_of({(0, 7): [[1, 2], [3], [4, 5]]})
    history = History([learner], trace, dict.fromkeys(range(3), Response(2, 0.0, ())))
    history.dropped([rollout(1)])
    history.finished(rollout(2, 4, 5))
    assert learner.lessons == []
    history.dropped([rollout(2, 4, 5)])  # it was finished before
    history.finished(rollout(0, 1, 2))
    assert learner.lessons == [("learn", 7, 0, [(1, 2), (4, 5)], None)]
    history.finished(rollout(1, 3))
    assert learner.lessons[1:] == [("learn", 7, 0, [(3,)], None)]
    history.tell_all(again)
    assert again.lessons == [("learn", 7, 0, [(1, 2), (3,), (4, 5)], None)]


def test_a_group_of_which_nothing_is_finished_is_not_learnt():
    learner = Learner()
    history = History([learner], trace_of({(0, 7): [[1], [2]]}), {})
    history.dropped([rollout(0), rollout(1)])
    assert learner.lessons == []


def test_a_replay_learns_the_finished_responses_of_a_group_from_which_over_sampling_drops_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("simrl_replay.replayer.vllm_version", lambda: "double")
    lessons: dict[tuple[int, int], int] = {}

    def draft(worker: VllmWorker, call: str, prompt_id, epoch, token_ids, rewards) -> None:
        lessons[prompt_id, epoch] = len(token_ids)

    monkeypatch.setattr(VllmWorker, "draft", draft)
    trace = random_groups(0, epochs=3, prompts=6)
    write_trace(trace, tmp_path / "trace.parquet")
    one = prepared(
        scenario(
            {"name": "rhymerl", "over_sampling": 1.5},
            workload={"trace": str(tmp_path / "trace.parquet")},
            engine={"kv_cache_tokens": 4096, "max_num_seqs": 8},
        )
    )
    one, config = with_workers(one, 1), ReplayConfig(Path("v0"))
    start = partial(DraftingDouble, step_s=0.001)
    link = partial(
        engine_link, "worker 0", engine_settings(one, config), tmp_path / "0.log", start=start
    )
    with ReplayEngines([link]) as fleet:
        measured = replay(one, fleet, config)
    assert measured.stopped is None
    lengths = {
        (row["epoch"], row["prompt_id"], row["sample"]): row["response_tokens"]
        for row in rows(trace.table)
    }
    finished, dropped = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for row in rows(measured.result.samples):
        place = row["prompt_id"], row["epoch"]
        if row["status"] in ("trained", "dropped"):
            tokens = lengths[row["epoch"] % 3, row["prompt_id"], row["sample"]]
            (finished if row["generated_tokens"] == tokens else dropped)[place] += 1
    whole = {place: count for place, count in finished.items() if count + dropped[place] == 4}
    assert {place: lessons[place] for place in whole} == whole
    assert 0 < min(whole.values()) < 4
