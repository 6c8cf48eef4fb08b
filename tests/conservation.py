"""What no schedule may break, whatever goes wrong or waits meanwhile: nothing is lost, nothing happens twice."""

from collections import defaultdict
from itertools import pairwise

from tests.helpers import Watched, lanes, rows


def may_generate_twice(watched):
    """Return whether tokens may be generated that no response keeps: duplicates, or requests that start over."""
    starts_over = watched.prepared.system.on_update.running == "start_over"
    return watched.prepared.tail is not None or starts_over


def assert_nothing_is_lost(watched: Watched) -> None:
    """Every sample has one row and one fate, every generated token is in one segment, every GPU-second in one span, every
    update trained finished samples only."""
    result, samples = watched.result, rows(watched.result.samples)
    submitted = {sample.uid for submission in watched.submissions for sample in submission.samples}
    assert [row["uid"] for row in samples] == sorted(submitted)
    segments = defaultdict(list)
    for segment in rows(result.segments):
        segments[segment["uid"]].append(segment)
    for row in samples:
        length, parts = watched.responses[row["uid"]].tokens, segments[row["uid"]]
        assert sum(part["tokens"] for part in parts) == row["generated_tokens"] <= length
        whole, finished = row["generated_tokens"] == length, row["finished_s"] is not None
        assert whole == finished or (
            finished and watched.prepared.scenario.agents.deadline_s
        )  # else it was killed
        assert all(part["tokens"] > 0 and part["started_s"] < part["ended_s"] for part in parts)
        assert all(a["ended_s"] <= b["started_s"] for a, b in pairwise(parts))
        assert all(part["ended_s"] <= result.metadata["end_s"] for part in parts)
        assert not finished or row["finished_s"] == parts[-1]["ended_s"]
        assert (row["status"] == "trained") == (row["trained_step"] is not None)
        assert row["status"] != "trained" or row["finished_s"] is not None
    generated = sum(worker.generated_total for worker in watched.workers)
    assert generated == sum(row["generated_tokens"] + row["duplicate_tokens"] for row in samples)
    assert may_generate_twice(watched) or not any(row["duplicate_tokens"] for row in samples)
    for spans in lanes(result).values():
        assert (spans[0]["started_s"], spans[-1]["ended_s"]) == (0.0, result.metadata["end_s"])
        assert all(a["ended_s"] == b["started_s"] for a, b in pairwise(spans))
        assert all(span["started_s"] < span["ended_s"] for span in spans)
    updates = rows(result.steps)
    assert [u["step"] for u in updates] == list(range(watched.prepared.scenario.steps))
    for update in updates:
        batch = [row for row in samples if row["trained_step"] == update["step"]]
        assert update["samples"] == len(batch) > 0
        assert update["response_tokens"] == sum(row["generated_tokens"] for row in batch)
        ages = [
            update["policy_version"] - part["policy_version"]
            for row in batch
            for part in segments[row["uid"]]
        ]
        assert min(ages) >= 0
