"""NeMo-RL's events, read as a trace and as a run: what events say, what is assumed, and lines that are no events."""

import json
from pathlib import Path
from typing import Any

import pytest

from simrl.errors import InputError
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.rollout_trace import RolloutTrace, read_events

Line = dict[str, Any]


def dispatched(at_s: float, group: str, sample: int, **fields: Any) -> Line:
    """A response of prompt `group` that was sent to generation; the run's clock starts at 1000 s."""
    ids = {"group_id": f"g-{group}", "prompt_id": group, "generation_index": sample}
    return {"t": 1000 + at_s, "run": "r1", "event": "rollout_dispatched", **ids, **fields}


def sealed(at_s: float, group: str, sample: int, tokens: int | None, **fields: Any) -> Line:
    counted = {} if tokens is None else {"response_tokens": tokens}
    return {**dispatched(at_s, group, sample, **counted, **fields), "event": "rollout_sealed"}


def of_run(at_s: float, event: str, **fields: Any) -> Line:
    return {"t": 1000 + at_s, "run": "r1", "event": event, **fields}


def two_groups(**of_updates: Any) -> list[Line]:
    """Two groups of two responses. The second is under way while the first is trained and its weights are loaded."""
    return [
        dispatched(0.0, "p", 0, weight_version=5),
        dispatched(0.5, "p", 1, weight_version=5),
        dispatched(1.0, "q", 0, weight_version=5),
        dispatched(1.0, "q", 1, weight_version=5),
        sealed(5.0, "p", 0, 40),
        sealed(7.0, "p", 1, 60),
        of_run(10.0, "train_step", step=1, group_ids=["g-p"], duration_s=2.5, **of_updates),
        of_run(12.0, "weight_sync", weight_version=6, duration_s=1.0),
        sealed(13.0, "q", 1, 120),
        sealed(23.0, "q", 0, 220),
        of_run(30.0, "train_step", step=2, group_ids=["g-q"], duration_s=2.5, **of_updates),
    ]


def without(lines: list[Line], *names: str) -> list[Line]:
    return [{name: value for name, value in line.items() if name not in names} for line in lines]


def read(folder: Path, lines: list[Line], more: str = "") -> RolloutTrace:
    path = folder / "rollout_trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + more)
    return read_events(path)


def column(run: RolloutTrace, name: str) -> list[Any]:
    return run.responses[name].tolist()


def test_events_give_lengths_groups_batches_and_instants(tmp_path):
    run = read(tmp_path, two_groups())
    trace = run.trace
    assert trace.column("response_tokens").tolist() == [40, 60, 220, 120]
    assert trace.column("step").tolist() == [0, 0, 1, 1]
    assert trace.column("prompt_id").tolist() == [0, 0, 1, 1]
    assert trace.column("policy_version").tolist() == [0, 0, 0, 0]
    assert column(run, "started_s") == [0.0, 0.5, 1.0, 1.0]
    assert column(run, "finished_s") == [5.0, 7.0, 23.0, 13.0]
    assert column(run, "trained_step") == [0, 0, 1, 1]
    assert run.updates.to_numpy().tolist() == [[0, 7.5, 10.0], [1, 27.5, 30.0]]
    assert run.syncs.to_numpy().tolist() == [[1, 11.0, 12.0]]


def test_a_response_under_way_during_a_sync_is_divided_by_its_seconds(tmp_path):
    assert column(read(tmp_path, two_groups()), "parts")[2:] == [
        [(0, 110, 1.0, 12.0), (1, 110, 12.0, 23.0)],
        [(0, 110, 1.0, 12.0), (1, 10, 12.0, 13.0)],
    ]


def test_a_group_s_tokens_by_weight_version_divide_its_responses_where_they_are_logged(tmp_path):
    counts = {"5": 255, "6": 85}
    published = of_run(23.0, "group_published", group_id="g-q", tokens_by_version=counts)
    parts = column(read(tmp_path, [*two_groups(), published]), "parts")[2:]
    assert [[part[:2] for part in of] for of in parts] == [[(0, 165), (1, 55)], [(0, 90), (1, 30)]]


def test_responses_without_a_count_share_their_group_s_by_their_seconds_and_a_note_says_so(
    tmp_path,
):
    lines = [line for line in two_groups() if line["event"] != "rollout_sealed"]
    lines += [sealed(10.0, "p", 0, None), sealed(10.5, "p", 1, None)]
    lines += [sealed(13.0, "q", 0, 7), sealed(13.0, "q", 1, 8)]
    lines += [of_run(10.5, "group_sealed", group_id="g-p", tokens_by_version={"5": 100})]
    trace = read(tmp_path, lines).trace
    assert trace.column("response_tokens").tolist() == [50, 50, 7, 8]
    assert "2 responses have no count: their group's tokens are divided" in trace.metadata.notes


@pytest.mark.parametrize(
    ("renamed", "kinds"),
    [
        (
            {"t": "timestamp", "event": "kind"},
            {"rollout_dispatched": "dispatch", "rollout_sealed": "seal"},
        ),
        (
            {"t": "time", "event": "type", "run": "run_id"},
            {"train_step": "optimizerStep", "weight_sync": "refit"},
        ),
        (
            {"event": "name", "response_tokens": "output_tokens"},
            {"rollout_sealed": "RolloutCompleted"},
        ),
    ],
)
def test_usual_names_of_fields_and_kinds_are_read_alike(tmp_path, renamed, kinds):
    lines = [
        {renamed.get(k, k): kinds.get(v, v) if k == "event" else v for k, v in line.items()}
        for line in two_groups()
    ]
    other, usual = read(tmp_path, lines), read(tmp_path, two_groups())
    assert other.trace.table.equals(usual.trace.table)
    assert other.updates.equals(usual.updates) and other.syncs.equals(usual.syncs)


@pytest.mark.parametrize(
    "lines",
    [
        [
            *without(two_groups(), "group_ids"),
            of_run(0.0, "group_reserved", group_id="g-p", target_step=5),
            of_run(0.0, "group_reserved", group_id="g-q", target_step=6),
        ],
        [{**line, "group_ids": [f"{name}_g0_a1" for name in line["group_ids"]]} if "group_ids" in line else line
         for line in two_groups()],
        without(two_groups(), "group_ids"),
    ],
    ids=["the step that a group is for", "the names of responses", "in the order of dispatch"],
)  # fmt: skip
def test_the_update_that_trained_a_group_is_found_without_a_list_of_groups(tmp_path, lines):
    assert column(read(tmp_path, lines), "trained_step") == [0, 0, 1, 1]


def test_an_order_that_is_assumed_is_in_the_notes(tmp_path):
    notes = read(tmp_path, without(two_groups(), "group_ids", "duration_s")).trace.metadata.notes
    assert "groups name no update that trained them: the order of dispatch is assumed" in notes
    assert "3 updates and syncs have no length" in notes
    assert "4 responses have no prompt length: 1 token is assumed" in notes


def test_an_update_without_a_length_begins_at_its_last_seal_and_a_sync_at_the_update_s_end(
    tmp_path,
):
    run = read(tmp_path, without(two_groups(), "duration_s"))
    assert run.updates["started_s"].tolist() == [7.0, 23.0]
    assert run.syncs["started_s"].tolist() == [10.0]


def test_the_last_attempt_of_a_response_counts(tmp_path):
    lost = {**dispatched(2.0, "p", 0), "event": "rollout_abandoned", "reason": "worker died"}
    run = read(tmp_path, [*two_groups(), lost, dispatched(3.0, "p", 0, weight_version=5)])
    assert column(run, "started_s")[:2] == [3.0, 0.5]


def test_what_is_not_sealed_and_what_another_process_wrote_is_left_out_and_counted(tmp_path):
    late = dispatched(28.0, "z", 0)
    other = {**dispatched(900.0, "p", 0), "run": "r2"}
    checkpoint = of_run(20.0, "checkpoint_published")
    run = read(
        tmp_path, [*two_groups(), late, other, checkpoint], more='{"t": 1, "ev\nnot json\n\n[]\n'
    )
    assert len(run.trace) == 4
    for words in (
        "3 lines are no events (a kind, a time) and were left out.",
        "1 events of other processes (restarts) were left out.",
        "1 responses without a dispatch, a later seal or a token were left out.",
    ):
        assert words in run.trace.metadata.notes


def test_a_prompt_that_comes_again_has_an_epoch_more(tmp_path):
    again = [{**line, "group_id": "g-again", "prompt_id": "p"} if line.get("prompt_id") == "q" else line
             for line in without(two_groups(), "group_ids")]  # fmt: skip
    trace = read(tmp_path, again).trace
    assert trace.column("prompt_id").tolist() == [0, 0, 0, 0]
    assert trace.column("epoch").tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no events in it; name the rollout_trace.jsonl"),
        ([{"step": 1, "loss": 0.5}], "no events in it; name the rollout_trace.jsonl"),
        ([{"t": 10**400, "event": "rollout_dispatched", "group_id": "a"}], "1 events without a numeric time in `t`; name"),
        ([{"t": "2026-05-01T12:00:00", "event": "rollout_sealed"}] * 2, "2 events without a numeric time in `t`; name"),
        ([line for line in two_groups() if line["event"] != "rollout_sealed"], "no response with a dispatch and a later seal"),
        (without(two_groups(), "response_tokens"), "line 5: no count of tokens for a response or its group; trace a run with"),
    ],
)  # fmt: skip
def test_a_file_without_events_responses_or_tokens_is_refused_in_a_line(tmp_path, lines, words):
    with pytest.raises(InputError, match=r"^[^\n]*$") as refused:
        read(tmp_path, lines)
    assert words in str(refused.value)


def test_a_run_s_folder_is_imported_by_the_name_of_its_file(tmp_path):
    (tmp_path / "logs").mkdir()
    expected = read(tmp_path / "logs", two_groups()).trace
    trace = import_dump("nemo_rl", tmp_path, cap_tokens=300)
    assert trace.table.equals(expected.table) and trace.metadata.cap_tokens == 300
    assert trace.metadata.source == "NeMo-RL events rollout_trace.jsonl"


def test_a_prompt_of_a_second_epoch_is_a_second_group_where_events_name_none(tmp_path):
    lines = [
        dispatched(0.0, "p", 0),
        sealed(5.0, "p", 0, 40),
        of_run(6.0, "train_step", prompt_ids=["p"], duration_s=1.0),
        dispatched(7.0, "p", 0),
        sealed(9.0, "p", 0, 70),
        of_run(10.0, "train_step", prompt_ids=["p"], duration_s=1.0),
    ]
    run = read(tmp_path, without(lines, "group_id"))
    assert run.trace.column("response_tokens").tolist() == [40, 70]
    assert run.trace.column("prompt_id").tolist() == [0, 0]
    assert run.trace.column("epoch").tolist() == [0, 1]
    assert column(run, "started_s") == [0.0, 7.0] and column(run, "trained_step") == [0, 1]
    again = read(tmp_path, lines).trace  # a group that was dispatched again is one group
    assert again.column("response_tokens").tolist() == [70]
    timeless = [line for line in lines if line["event"] != "train_step"]
    both = read(tmp_path, without(timeless, "group_id")).trace
    assert both.column("sample").tolist() == [0, 1]  # no update divides them into batches
