"""RhymeRL's τ as a measured table: rows come back, lines in between, marked beyond; bad files are named."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.analysis.allocation import allocate_step
from simrl.analysis.explanation import explain_result
from simrl.errors import InputError
from simrl.profile.drafted import Drafted
from simrl.profile.profile import read_profile
from simrl.profile.rollout_times import RolloutTimes
from simrl.profile.tau import MeasuredTau, read_tau
from simrl.simulate.prepare import prepare
from simrl.trace.synthesis import LengthModel, synthesise
from tests.conservation import assert_nothing_is_lost
from tests.helpers import scenario, watch

HEAD = "model,gpu,tp,source,length_tokens,workers,responses,accept_length,seconds"
ENGINE = "qwen3-0.6b,h100,2,a test"


def seconds_of(length: int, workers: int, responses: int, accept: float) -> float:
    return 0.5 + 0.001 * length * (1 + responses / workers) / accept


def rows_of(
    lengths=(100, 300), workers=(1, 2, 4), responses=(8, 64), accepts=(1.0, 3.0)
) -> list[str]:
    return [
        f"{ENGINE},{','.join(map(str, place))},{seconds_of(*place)!r}"
        for place in product(lengths, workers, responses, accepts)
    ]


def written(folder: Path, rows: list[str], head: str = HEAD) -> Path:
    path = folder / "tau.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def one(tau: MeasuredTau, length: float, workers: int, responses: int, accept: float) -> float:
    table = tau.table([[length]], [responses], workers, [Drafted(accept)])
    return float(table[0, workers - 1])


def test_a_table_gives_its_rows(tmp_path):
    tau = read_tau(written(tmp_path, rows_of()))
    for place in product((100, 300), (1, 2, 4), (8, 64), (1.0, 3.0)):
        assert one(tau, *place) == pytest.approx(seconds_of(*place))
    assert tau.source == "tau.csv; a test"


def test_between_rows_tau_is_linear_in_tokens_and_responses_and_in_one_over_the_workers(tmp_path):
    tau = read_tau(written(tmp_path, rows_of(accepts=(1.0,))))
    for place in ((200, 3, 20, 1.0), (130, 1, 64, 1.0), (300, 3, 9, 1.0)):
        assert one(tau, *place) == pytest.approx(seconds_of(*place))
    assert "extrapolated" not in tau.source


def test_a_group_is_as_long_as_the_mean_of_its_lengths(tmp_path):
    tau = read_tau(written(tmp_path, rows_of()))
    table = tau.table([[100, 300], [200, 200]], [8, 8], 4)
    assert table[0].tolist() == table[1].tolist()


def test_beyond_the_rows_tau_goes_on_and_says_so(tmp_path):
    tau = read_tau(written(tmp_path, rows_of(accepts=(1.0,))))
    assert one(tau, 900, 8, 64, 1.0) == pytest.approx(seconds_of(900, 8, 64, 1.0))
    assert (
        tau.source
        == "tau.csv; a test; extrapolated: length_tokens 900 to 900, measured 100 to 300; "
        "extrapolated: workers 1 to 8, measured 1 to 4"
    )
    assert one(read_tau(tau.path), 1, 1, 8, 1.0) >= 0.0


def test_columns_that_are_missing_hold_for_any_group(tmp_path):
    rows = [f"{n},{k},{n / k}" for n in (10, 20) for k in (1, 2)]
    tau = read_tau(written(tmp_path, rows, "length_tokens,workers,seconds"))
    assert one(tau, 10, 2, 2, 1.0) == one(tau, 10, 2, 999, 7.0) == 5.0
    assert tau.source == "tau.csv" and tau.warnings() == []


def test_workers_beyond_the_prompts_of_a_group_make_it_no_shorter(tmp_path):
    tau = read_tau(written(tmp_path, rows_of()))
    whole, single = (tau.table([[100]], [8], 6, None, together)[0] for together in (4, 1))
    assert whole[:2].tolist() == single[:2].tolist() and single[5] < single[1]
    assert set(whole[2:]) == {whole[1]}
    profile = read_profile(Path(__file__).parents[2] / "profiles/qwen3-14b_h100_tp2.parquet")
    table = RolloutTimes(profile, 100, tau=tau).table([[100]], [8], 6, None, 4)
    assert table[0].tolist() == whole.tolist()
    tau = read_tau(tau.path)
    tau.table([[100]], [8], 6, None, 4)
    assert tau.source == "tau.csv; a test"


def test_far_from_the_only_value_of_a_column_tau_stays_and_warns(tmp_path):
    tau = read_tau(written(tmp_path, rows_of(responses=(64,))))
    assert one(tau, 100, 2, 100, 1.0) == seconds_of(100, 2, 64, 1.0)
    assert (
        tau.source
        == "tau.csv; a test; responses 100 to 100 taken as 64, the only value in the table"
    )
    assert tau.warnings() == []
    assert one(tau, 100, 2, 8, 1.0) == seconds_of(100, 2, 64, 1.0)
    assert tau.source.endswith(
        "responses 8 to 100 taken as 64, the only value in the table, more than 2 times off"
    )
    assert tau.warnings() == [
        "tau.csv has responses 64 in all rows, the groups have 8 to 100, and τ is as of 64: add rows of another number."
    ]


def test_a_tau_that_rises_with_workers_is_named_with_both_rows(tmp_path):
    rows = [f"{n},{k},{s}" for n, k, s in ((10, 1, 4), (10, 2, 3), (20, 1, 8), (20, 2, 9))]
    tau = read_tau(written(tmp_path, rows, "length_tokens,workers,seconds"))
    assert tau.warnings() == [
        "τ rises with workers in tau.csv: 8 s on 1, 9 s on 2, length_tokens 20; measure both again, or leave the larger "
        "number out."
    ]


def test_a_file_that_is_no_grid_takes_no_more_than_its_rows(tmp_path):
    rows = [f"{n},{n},{n},{1 + n / 1e4},1" for n in range(1, 3000)]
    with pytest.raises(
        InputError,
        match=r"no row with accept_length 1\.0001, responses 1, length_tokens 1, workers 2; rows are a full",
    ):
        read_tau(written(tmp_path, rows, "length_tokens,workers,responses,accept_length,seconds"))


@given(
    length=st.floats(1, 1e5),
    workers=st.integers(1, 64),
    responses=st.integers(1, 4096),
    accept=st.floats(1, 16),
)
def test_tau_is_finite_and_never_below_zero(tmp_path_factory, length, workers, responses, accept):
    tau = read_tau(written(tmp_path_factory.mktemp("tau"), rows_of()))
    assert 0.0 <= one(tau, length, workers, responses, accept) < np.inf


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda rows: rows[:-1], r"no row with accept_length 3, responses 64, length_tokens 300, workers 4; .*full grid"),
        (lambda rows: [*rows, rows[2]], r"row 26: .* is there twice; keep one row"),
        (lambda rows: [rows[0].replace(",100,", ",x,"), *rows[1:]], r"row 2: length_tokens is 'x'"),
        (lambda rows: [*rows, f"{ENGINE},100,1.5,8,1,2"], r"row 26: workers is 1.5; give seconds above 0"),
        (lambda rows: [*rows, f"{ENGINE},100,8,8,1,0"], r"row 26: seconds is 0; give seconds above 0"),
        (lambda rows: [*rows, f"{ENGINE},100,0,8,1,2"], r"row 26: workers is 0; give"),
        (lambda rows: rows[:12], r"length_tokens is 100 in all rows; τ needs two values"),
        (lambda rows: [*rows[:-1], rows[-1].replace("qwen3-0.6b", "qwen3-4b")], r"model differs between rows"),
        (lambda rows: [], r"no rows after the header; simrl measure --tau writes"),
        (lambda rows: [*rows, f"{ENGINE},100,8,8,1,abc"], r"row 26: seconds is 'abc'; it must be above 0: measure it"),
        (lambda rows: [*rows, f"{ENGINE},100,8,8,1,-3"], r"row 26: seconds is -3.0; it must be above 0"),
        (lambda rows: [*rows, f"{ENGINE},100,8,8,1,"], r"row 26: seconds is blank; it must be above 0"),
        (lambda rows: [rows[0].replace("a test", "a test, mine"), *rows[1:]], r"row 2 has 10 fields, .* in quotes"),
        (lambda rows: [*rows[:3], rows[3].replace("a test", "a test, mine")], r"row 5 has 10 fields, the header 9"),
        (lambda rows: [row.replace("a test", "a, test") for row in rows], r"row 2 has 10 fields, the header 9"),
        (lambda rows: [rows[0].replace("h100", ""), *rows[1:]], r"gpu is blank in some rows"),
        (lambda rows: [row.replace(",2,a", ",two,a") for row in rows], r"tp is blank in some rows, or is no number"),
    ],
)  # fmt: skip
def test_a_bad_table_is_named_with_its_row_its_value_and_the_remedy(tmp_path, change, words):
    with pytest.raises(InputError, match=rf"tau.csv: .*{words}"):
        read_tau(written(tmp_path, change(rows_of())))


def test_a_file_that_is_no_table_and_a_table_of_another_engine_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.csv: cannot be read"):
        read_tau(tmp_path / "none.csv")
    for head, row in (
        ("length_tokens,dp,seconds", "1,1,1"),
        ("length_tokens;workers;seconds", "1;1;1"),
    ):
        with pytest.raises(InputError, match=r"no column .*; found .*; simrl measure --tau writes"):
            read_tau(written(tmp_path, [row], head))
    with pytest.raises(InputError, match=r"'response' is not known \(did you mean responses\?\)"):
        read_tau(written(tmp_path, rows_of(), HEAD.replace("responses", "response")))
    path = written(tmp_path, rows_of())
    assert read_tau(path, model="Qwen3-0.6B", gpu="h100", tp=2)
    mixed = [row.replace(",2,a", ",2.0,a") for row in rows_of()]
    assert read_tau(written(tmp_path, [*mixed[:3], *rows_of()[3:]]), tp=2).facts["tp"] == "2"
    with pytest.raises(InputError, match="τ of gpu h100, not of h200; name the table"):
        read_tau(path, gpu="h200")


def test_a_scenario_reads_the_table_where_its_system_ranks_groups(tmp_path):
    path = written(tmp_path, rows_of())
    engine = {
        "model": "qwen3-0.6b",
        "cluster": {"gpu": "h100", "gpus": 8, "tp": 2},
        "profile": {"tau": str(path), "roofline": {}},
    }
    ranked, plain = (
        prepare(scenario({"name": name}, **engine)) for name in ("rhymerl", "one_step_off")
    )
    assert ranked.tau is not None and plain.tau is None
    assert "rhymerl" in plain.inputs()["without_effect"]["profile.tau"]
    assert "profile.tau" not in ranked.inputs().get("without_effect", {})
    with pytest.raises(InputError, match="τ of tp 2, not of 1"):
        prepare(
            scenario(
                {"name": "rhymerl"}, **{**engine, "cluster": {"gpu": "h100", "gpus": 8, "tp": 1}}
            )
        )


def test_a_run_plans_by_the_table_and_says_so(tmp_path):
    rows = [f"{n},{k},{n / k}" for n in (10, 200) for k in (1, 2, 4)]
    path = written(tmp_path, rows, "length_tokens,workers,seconds")
    made = {}
    for name, tau in (("measured", str(path)), ("computed", None)):
        lengths = {"steps": 6, "prompts_per_step": 4, "prompts": 8, "group": 4, "cap_tokens": 200}
        synthetic = lengths | {"mean_tokens": 60, "sigma": 0.8, "prompt_tokens": 20}
        made[name] = watch(
            prepare(
                scenario(
                    {
                        "name": "rhymerl",
                        "speculation": "none",
                        "ranking_groups": 2,
                        "sub_batches": "responses",
                    },
                    steps=6,
                    cluster={"gpu": "h100", "gpus": 8, "tp": 1},
                    profile={"tau": tau, "roofline": {"between_passes_s": 0.01}},
                    workload={"synthetic": synthetic},
                )
            )
        )
        assert_nothing_is_lost(made[name])
        facts = made[name].result.metadata["tau"]
        assert facts["kind"] == name
        assert str(explain_result(made[name].result).tau) == f"{name}, {facts['source']}"
    assert made["measured"].result.metadata["tau"]["source"].startswith("tau.csv; extrapolated: ")
    assert (
        "extrapolated: workers 1 to 6, measured 1 to 4"
        in made["measured"].result.metadata["tau"]["source"]
    )
    assert made["measured"].result.samples != made["computed"].result.samples


def test_an_allocation_is_made_with_the_table_beside_the_profiles_seconds(tmp_path):
    rows = [f"{n},{k},{n / k}" for n in (100, 2000) for k in (1, 2, 4)]
    tau = read_tau(written(tmp_path, rows, "length_tokens,workers,seconds"))
    profile = read_profile(Path(__file__).parents[2] / "profiles/qwen3-14b_h100_tp2.parquet")
    model = LengthModel(
        steps=4,
        prompts_per_step=8,
        prompts=16,
        group=4,
        cap_tokens=2000,
        mean_tokens=600,
        sigma=0.8,
    )
    trace = synthesise(model, 0)
    measured, computed = (allocate_step(trace, profile, 8, 2, tau=table) for table in (tau, None))
    assert measured["tau"]["kind"] == "measured" and computed["tau"] == {
        "kind": "computed",
        "source": "qwen3-14b on h100, tp 2",
    }
    for group in measured["groups"]:
        assert group["predicted_s"] == pytest.approx(
            group["representative_tokens"] / group["workers"], rel=0.3
        )
        assert group["computed_s"] != group["predicted_s"]
    doubtful = [f"{n},{k},4,{n * k}" for n in (100, 2000) for k in (1, 2, 4)]
    tau = read_tau(written(tmp_path, doubtful, "length_tokens,workers,responses,seconds"))
    notes = allocate_step(trace, profile, 8, 2, tau=tau)["notes"]
    assert [note for note in notes if "tau.csv" in note] == tau.warnings() and len(
        tau.warnings()
    ) == 2
    assert [g["computed_s"] for g in computed["groups"]] == [
        g["predicted_s"] for g in computed["groups"]
    ]
