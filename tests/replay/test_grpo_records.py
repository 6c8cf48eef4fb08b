"""A run's folder after a kill at any point: what was trained is there once, what was not is gone."""

from pathlib import Path

import pyarrow as pa
import pytest

from simrl.errors import InputError
from simrl.result.result import Result
from simrl.runtime.rollout import Rollout, Segment
from simrl.trace.trace import Sample, TraceMetadata
from simrl_replay.grpo.records import RunFolder, as_trace


def make_version(folder: RunFolder, number: int) -> None:
    folder.model(number).mkdir(parents=True)


def record(folder: RunFolder, number: int, part: int) -> None:
    """Two samples; uids count from the start of the part."""
    rollouts = [
        Rollout(
            Sample(uid, 0, 0, number, uid, 3),
            (Segment(0, 0, 2, 0.0, 1.0),),
            True,
            0.5,
            1.0,
            token_ids=(5, 1),
        )
        for uid in (2 * (number - part), 2 * (number - part) + 1)
    ]
    folder.record(number, part, rollouts, {"step": {}})


def write_part(folder: RunFolder, part: int, steps: int) -> None:
    tables = (pa.table({"step": list(range(rows))}) for rows in (0, steps, 0, 0))
    spans, steps_table, samples, segments = tables
    folder.write_part(
        part,
        Result(spans=spans, steps=steps_table, samples=samples, segments=segments, metadata={}),
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two updates are recorded, in the first part."""
    folder = RunFolder(tmp_path / "run")
    make_version(folder, 0)
    for number in (0, 1):
        make_version(folder, number + 1)
        record(folder, number, 0)
    return folder


def versions(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "versions").iterdir())


def test_a_version_that_was_written_and_not_told_is_made_anew(folder: RunFolder) -> None:
    make_version(folder, 3)
    assert folder.resume() == 2
    assert versions(folder) == ["0000", "0001", "0002"]


def test_parts_that_were_killed_before_they_were_written_are_not_confused(
    folder: RunFolder,
) -> None:
    for number in (2, 3):  # each start records one update, and is killed
        assert folder.resume() == number
        make_version(folder, number + 1)
        record(folder, number, number)
    samples, facts = folder.read()
    keys = list(zip(samples["part"].to_pylist(), samples["uid"].to_pylist(), strict=True))
    assert len(set(keys)) == len(keys) == 8 and len(facts) == 4
    assert [segments[0]["policy_version"] for segments in samples["segments"].to_pylist()] == [
        0
    ] * 4 + [2] * 2 + [3] * 2


def test_a_run_is_whole_if_its_first_part_made_all_updates(folder: RunFolder) -> None:
    assert not folder.whole()  # killed before its times were written
    write_part(folder, 0, 1)
    assert not folder.whole()  # or one update later
    write_part(folder, 0, 2)
    assert folder.whole()
    record(folder, 2, 2)
    write_part(folder, 2, 1)
    assert not folder.whole()  # it was stopped, and went on


def test_a_run_of_which_only_what_a_reader_needs_was_kept_is_whole_if_its_curve_says_so(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    write_part(folder, 0, 2)
    for rows, whole in ((2, True), (3, False)):
        (tmp_path / "curve.csv").write_text("step\n" + "0\n" * rows)
        assert folder.whole() is whole


def test_what_a_kill_left_half_written_is_removed_and_nothing_else(folder: RunFolder) -> None:
    (folder.path / "parts").mkdir()
    left = [
        folder.path / name
        for name in ("versions/.0003.abc", "parts/.000.abc", "parts/.000.old.abc")
    ]
    for path in left:
        (path / "files").mkdir(parents=True)
    (half := folder.path / "updates" / ".0002.parquet.abc").write_bytes(b"PAR1")
    (notes := folder.path / "versions" / "notes").write_text("of the user")
    (number := folder.path / "versions" / "9999").write_text("a file")
    assert folder.resume() == 2
    assert not any(path.exists() for path in (*left, half)) and notes.exists() and number.exists()
    folder.forget_versions(6)
    assert versions(folder) == ["0000", "9999", "notes"]


def test_a_folder_from_which_an_update_or_its_version_was_taken_is_refused(
    folder: RunFolder,
) -> None:
    folder.model(2).rmdir()
    with pytest.raises(InputError, match=r"versions/0002: missing, though 2 updates are recorded"):
        folder.resume()
    folder.update(0).rename(folder.update(5))
    with pytest.raises(InputError, match=r"updates/0000\.parquet: missing"):
        folder.resume()


def test_one_process_at_a_time_makes_a_run(folder: RunFolder) -> None:
    with (
        folder.alone(),
        pytest.raises(InputError, match=r"run: another process is making this run"),
        folder.alone(),
    ):
        pass
    with folder.alone():  # it has ended
        pass
    folder = RunFolder(folder.path / "lock")
    with pytest.raises(InputError, match=r"lock: cannot be written"), folder.alone():
        pass


def test_a_response_made_again_under_a_later_number_stays_in_its_epoch(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    make_version(folder, 0)
    for number, epochs_and_prompts in enumerate(
        ([(0, 1), (1, 1)], [(0, 0), (1, 0)])
    ):  # prompt 0 of epoch 0 was lost once
        make_version(folder, number + 1)
        rollouts = [
            Rollout(
                Sample(uid, 0, epoch, prompt, 0, 3),
                (Segment(0, 0, 2, 0.0, 1.0),),
                True,
                0.5,
                1.0,
                token_ids=(5, 1),
            )
            for uid, (epoch, prompt) in enumerate(epochs_and_prompts, 2 * number)
        ]
        folder.record(number, 0, rollouts, {"step": {}})
    about = TraceMetadata(
        name="run", kind="recorded", source="a test", tokenizer="characters", cap_tokens=2
    )
    trace = as_trace(folder.read()[0], 2, about)
    rows = trace.table.select(["step", "epoch", "prompt_id"]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]


def test_a_prompt_that_came_again_instead_of_a_slow_one_has_a_step_of_its_own(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    make_version(folder, 0)
    make_version(folder, 1)
    trained = [(0, 0), (2, 0)]  # prompt 1 of the epoch was not finished when the run was over
    rollouts = [
        Rollout(
            Sample(uid, 0, epoch, prompt, 0, 3),
            (Segment(0, 0, 2, 0.0, 1.0),),
            True,
            0.5,
            1.0,
            token_ids=(5, 1),
        )
        for uid, (epoch, prompt) in enumerate(trained)
    ]
    folder.record(0, 0, rollouts, {"step": {}})
    about = TraceMetadata(
        name="run", kind="recorded", source="a test", tokenizer="characters", cap_tokens=2
    )
    trace = as_trace(folder.read()[0], 2, about)
    rows = trace.table.select(["step", "epoch", "prompt_id"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [(0, 0, 0), (1, 2, 0)]
