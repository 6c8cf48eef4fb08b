"""The page of validated replays: each check beside its bar, and why it fails."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.replay_page import Row, page_of


def a_replay(
    error: float, given: float = 0.0, real: int = 0, given_real: int = 0, parted: int | None = None
) -> dict[str, Any]:
    """A replay whose predicted makespan and ends of samples are this far off."""

    def errors(value: float) -> dict[str, float | None]:
        return {
            "makespan_err": value,
            "sample_mape": abs(value),
            "latency_mape": abs(value),
            "acceptance_err": None,
        }

    engine = {
        "predicted": {"passes": 100},
        "measured": {"passes": 100 if parted is None else 101},
        "parted": parted,
        "parted_given": None,
    }
    return {
        "rollout_s": 5.0,
        "errors": errors(error),
        "near_ties": 0,
        "real_differences": real,
        "decisions": ["sample 1 went elsewhere"] * real,
        "given": {
            "errors": errors(given),
            "passes_err": error,
            "core_share": 0.8,
            "near_ties": 1,
            "real_differences": given_real,
            "decisions": ["sample 2 went elsewhere"] * given_real,
            "engines": [engine],
        },
    }


def a_row(*replays: dict[str, Any], case: str = "one worker, 64 requests", **changes: Any) -> Row:
    row = Row(
        case=case,
        seed=0,
        workers=1 if case.startswith("one") else 2,
        date="2026-11-28 06:30",
        load=1.5,
        replays=list(replays),
        repeats={"makespan_err": 0.0, "sample_mape": 0.0},
        others_of_repeats=0,
        migrations=0,
        acceptance=None,
        profile_s=45.0,
    )
    return replace(row, **changes)


def held(row: Row) -> dict[str, tuple[bool, bool, bool]]:
    return {c.name: (c.holds(), c.holds(widened=True), c.holds_given) for c in row.checks}


def test_a_check_holds_as_it_is_within_the_repeats_or_given_the_speed():
    repeats = {"makespan_err": 0.3, "sample_mape": 0.1}
    row = a_row(a_replay(0.2), a_replay(-0.2), repeats=repeats)
    assert held(row) == {
        "makespan": (False, True, True),
        "samples": (False, False, True),
        "decisions": (True, True, True),
    }


def test_what_the_speed_does_not_explain_stays_open():
    slow, other = a_row(a_replay(0.2)), a_row(a_replay(0.2, given=0.2))
    causes = [row.cause(row.checks[0]) for row in (slow, other)]
    assert causes[0].startswith("speed: the passes' seconds are -17% to -17% off the profile")
    assert causes[1] == "open: it is left when the speed is given"


@pytest.mark.parametrize(("left", "cause"), [(0, "times: "), (1, "open: ")])
def test_a_decision_follows_from_times_if_none_is_left_given_the_measured_seconds(left, cause):
    row = a_row(a_replay(0.0, real=3, given_real=left), case="two workers, AReaL")
    [check] = [check for check in row.checks if not check.holds()]
    assert check.name == "decisions" and row.cause(check).startswith(cause)


def test_decisions_in_the_wake_of_a_near_tie_follow_from_times_too():
    replay = a_replay(0.0, real=3, given_real=2)
    replay["given"]["parts_at_near_tie"] = True
    row = a_row(replay, case="two workers, AReaL")
    [check] = [check for check in row.checks if not check.holds()]
    assert not check.holds_given and "part at a near-tie" in row.cause(check)


def test_the_page_counts_the_checks_and_gives_each_failing_one_its_cause():
    rows = [
        a_row(a_replay(0.2), a_replay(-0.01)),
        a_row(a_replay(0.01, real=2, parted=7), case="two workers, AReaL"),
    ]
    page = page_of(rows, [{"engine": "on one core", "replays": 3}])
    assert "Of 6 checks" in page and "**3 hold as they are**" in page
    assert "**6 given the measured speed**" in page
    assert "all passes are as predicted in 2 of 2 replays (200 passes)" in page  # not AReaL's
    assert page.count("| speed: ") == 2 and page.count("| times: ") == 1
    assert "- two workers, AReaL, seed 0: sample 1 went elsewhere" in page
    assert "| makespan, one worker | 2 | +9.5 % | +20.0 % | +0.0 % | +0.0 % |" in page
    assert "100 / 101" in page and "200, equal one by one" in page
