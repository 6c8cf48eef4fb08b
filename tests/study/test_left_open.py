"""Later commands repeat what a calibration leaves open: warnings, phases that the log lacks, ranges over fits."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from rich.console import Console

import simrl as api
from simrl.errors import InputError
from simrl.scenario.calibration import open_lines, other_fits
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.show.tables.calibration import print_calibration
from simrl.simulate.run import simulate
from simrl.study.calibration import Calibration, scenario_yaml
from simrl.study.corrections import Correction
from simrl.study.point import Point
from tests.command_line import SCENARIO

MFUS = 0.4, 0.2, 0.8  # of the fit that is used, of two that do as well
OVERHEADS_S = 1.0, 0.5, 1.5
OPEN = {
    "log": "run.log",
    "steps": "1-6",
    "at": {"model": "qwen3-0.6b", "cluster.gpu": "h100", "cluster.tp": 1},
    "lacks": ["log_prob"],
    "warnings": {"training.mfu, training.update_overhead_s": "one of two", "training.load_s": "hardly known"},
    "fits": [
        {"training.mfu": mfu, "training.update_overhead_s": overhead_s}
        for mfu, overhead_s in zip(MFUS, OVERHEADS_S, strict=True)
    ],
}  # fmt: skip
FIRST = "Calibrated on steps 1-6 of run.log, which lacks log_prob: not calibrated."
WARNING = "Warning: hardly known; one of two."


def calibrated_file(folder: Path, **changes: object) -> Path:
    data = {
        **yaml.safe_load(SCENARIO),
        "training": {"mfu": MFUS[0], "update_overhead_s": OVERHEADS_S[0]},
        "calibration": {**OPEN, **changes},
    }
    (folder / "calibrated.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return folder / "calibrated.yaml"


def loaded(folder: Path, *overrides: str, **changes: object) -> Scenario:
    return load_scenarios(calibrated_file(folder, **changes), overrides)[0]


def lines(scenario: Scenario) -> list[str]:
    return open_lines(scenario.model_dump())


def test_a_calibrated_scenario_says_its_log_what_that_lacks_and_what_is_doubtful(tmp_path):
    assert lines(loaded(tmp_path)) == [FIRST, WARNING]
    assert lines(loaded(tmp_path, "calibration=null")) == []
    bare = loaded(tmp_path, lacks=[], warnings={}, fits=[], at={})
    assert lines(bare) == ["Calibrated on steps 1-6 of run.log."] and other_fits(bare) == []


def test_another_value_of_a_correction_wins_over_all_fits_and_ends_a_warning_about_nothing_else(
    tmp_path,
):
    scenario = loaded(tmp_path, "training.mfu=0.3")
    assert [fit.training.mfu for fit in other_fits(scenario)] == [0.3, 0.3]
    assert [fit.training.update_overhead_s for fit in other_fits(scenario)] == [0.5, 1.5]
    section = loaded(tmp_path, "training={mfu: 0.3}")
    assert other_fits(section) == other_fits(scenario)
    assert lines(scenario) == [FIRST, WARNING]  # which is also about the overhead
    both = loaded(tmp_path, "training.mfu=0.3", "training.update_overhead_s=0.9")
    assert lines(both) == [FIRST, "Warning: hardly known."]
    assert other_fits(both) == [both, both]


def test_the_other_fits_change_the_corrections_and_nothing_else(tmp_path):
    scenario = loaded(tmp_path)
    assert [fit.training.mfu for fit in other_fits(scenario)] == [0.2, 0.8]
    for fit in other_fits(scenario):
        kept = {"mfu": MFUS[0], "update_overhead_s": OVERHEADS_S[0]}
        assert fit.with_fields("training", **kept) == scenario


@pytest.mark.parametrize(
    ("override", "elsewhere"),
    [
        ("cluster.tp=2", "cluster.tp 1, here 2"),
        ("cluster.gpu=a100", "cluster.gpu h100, here a100"),
        ("model=qwen3-1.7b", "model qwen3-0.6b, here qwen3-1.7b"),
    ],
)
def test_a_scenario_of_another_model_gpu_or_layout_says_at_which_one_it_was_fitted(
    tmp_path, override, elsewhere
):
    assert f"Fitted at {elsewhere}: an extrapolation." in lines(loaded(tmp_path, override))[0]


def test_nothing_that_is_simulated_depends_on_what_is_left_open(tmp_path):
    scenario, closed = loaded(tmp_path), loaded(tmp_path, "calibration=null")
    assert Point(scenario).hash == Point(closed).hash
    assert simulate(scenario).steps == simulate(closed).steps


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"fits": [{"training.mfuu": 0.3}]}, "calibration.fits: unknown key training.mfuu"),
        ({"fits": [{"training.mfu": 3.0}]}, "calibration.fits is 3.0: a share between 0 and 1"),
        ({"fits": [{}] * 4}, "at most 3 values fit"),
        ({"lacks": "log_prob"}, "calibration.lacks is 'log_prob': a list is needed"),
        ({"warning": {}}, "unknown key calibration.warning (did you mean warnings?)"),
    ],
)
def test_a_mistake_in_what_is_left_open_is_named(tmp_path, changes, what):
    with pytest.raises(InputError) as refused:
        loaded(tmp_path, **changes)
    assert what in str(refused.value)


def test_a_calibration_writes_its_warnings_by_key_what_its_log_lacks_and_its_other_fits(tmp_path):
    def fitted(name: str, key: str, value: float, error: float | None) -> Correction:
        return Correction(name, value, error, 0.0, 1.0, "", "meaning", key)

    preset = tmp_path / "own.toml"  # whose constant a fitted 0 replaces, though it is the default
    preset.write_text(
        '[own]\nabout = "own"\n'
        'update_overhead_s = {value = 2.0, kind = "measured", source = "a test"}\n'
    )
    scenario = loaded(
        tmp_path,
        "calibration=null",
        "profile.forward_correction=2.0",
        "training.update_overhead_s=0",
        f"framework={preset}",
    )
    slow, fast = (
        scenario.with_fields("training", mfu=mfu).with_fields("profile", forward_correction=factor)
        for mfu, factor in ((0.2, 2.5), (0.8, 1.8))
    )
    corrections = (
        fitted("decode_efficiency", "profile.forward_correction (1 over it)", 0.5, 0.01),
        fitted("train_mfu", "training.mfu", 0.4, 0.3),
        fitted("update_overhead_s", "training.update_overhead_s", 0.0, None),
    )
    unclear = ("the window cannot tell train_mfu, decode_efficiency apart", "few steps")
    calibration = Calibration(
        scenario, (1, 6), corrections, (), pd.DataFrame(), (), (slow, fast), unclear
    )
    calibration = replace(calibration, lacks=("update",))
    path = tmp_path / "written.yaml"
    path.write_text(scenario_yaml(calibration, "run.log"))
    (again,) = load_scenarios(path)
    assert again.training == scenario.training and again.calibration is not None
    assert again.calibration.log == "run.log" and again.calibration.steps == "1-6"
    assert again.calibration.at == OPEN["at"] and again.calibration.lacks == ("update",)
    assert again.calibration.warnings.keys() == {
        "profile.forward_correction, training.mfu",
        "log",
        "training.mfu",
    }
    assert sorted(calibration.warnings) == sorted(again.calibration.warnings.values())
    for fit, other in zip((slow, fast), other_fits(again), strict=True):
        assert (fit.training.mfu, fit.profile.forward_correction) == (
            other.training.mfu,
            other.profile.forward_correction,
        )


def test_calibrate_prints_what_its_log_lacks_and_its_warnings_before_what_is_assumed(tmp_path):
    scenario = loaded(tmp_path, "calibration=null")
    calibration = Calibration(
        scenario, (1, 6), (), (), pd.DataFrame(), ("the GPU",), (), ("few steps",), ("update",)
    )
    printed = io.StringIO()
    print_calibration(calibration, Console(file=printed, width=120))
    *_, lacks, warning, assumed = printed.getvalue().splitlines()
    assert (
        lacks == "The log lacks update: not calibrated (--column OURS=TAG names a tag of your own)."
    )
    assert (warning, assumed) == ("Warning: few steps.", "Assumed: the GPU.")


def test_a_comparison_prints_what_is_left_open_and_the_range_of_each_row(simrl):
    calibrated_file(simrl.folder)
    done = simrl("compare", "calibrated.yaml", "--jobs", "1", "-o", "out")
    assert done.code == 0, done.err
    printed = done.out.splitlines()
    assert printed.count(FIRST) == printed.count(WARNING) == 1
    ranges = [line for line in printed if line.startswith("Range of ")]
    assert [line.split(":")[0].partition("(")[0] for line in ranges] == [
        "Range of verl_colocated",
        "Range of areal",
    ]
    assert " s a step" in ranges[0] and "× over fits that do" in ranges[1]
    brief = simrl("compare", "calibrated.yaml", "--jobs", "1", "-o", "out", "--brief").out
    assert WARNING in brief.splitlines()
    rows = json.loads(simrl("compare", "calibrated.yaml", "--jobs", "1", "--json").out)
    assert [row["left_open"] for row in rows] == [[FIRST, WARNING]] * 2
    runs = [
        [simulate(fit) for fit in (scenario, *other_fits(scenario))]
        for scenario in load_scenarios("calibrated.yaml")
    ]
    seconds = [
        [float(run.steps["finished_s"][-1].as_py() - run.steps["finished_s"][0].as_py()) for run in of_row]
        for of_row in runs
    ]  # fmt: skip
    for row, of_row in zip(rows, seconds, strict=True):
        assert row["step_s_range"] == pytest.approx([min(of_row), max(of_row)])
    assert rows[0]["ranges"] == {"fits": [1.0, 1.0]}


def test_an_uncalibrated_comparison_has_nothing_open(simrl):
    done = simrl("compare", "scenario.yaml", "--jobs", "1", "--json")
    for row in json.loads(done.out):
        assert (row["left_open"], row["ranges"], row["step_s_range"]) == ([], {}, None)
    assert "Calibrated" not in simrl("compare", "scenario.yaml", "--jobs", "1").out


def test_a_sweep_says_what_is_left_open_and_the_range_of_its_fastest_point(simrl):
    calibrated_file(simrl.folder)
    arguments = ("sweep", "calibrated.yaml", "cluster.gpus=4,8", "--jobs", "1", "-o", "out")
    done = simrl(*arguments)
    assert done.code == 0, done.err
    assert FIRST in done.out and WARNING in done.out and done.out.count("Range of ") == 1
    told = json.loads(simrl(*arguments, "--json").out)
    (fastest,) = told["fastest"]
    assert fastest["left_open"] == [FIRST, WARNING]
    assert fastest["step_s_range"][0] < fastest["step_s_range"][1]
    assert told["simulated"] == 0  # the other fits are no points of the sweep


def test_advice_rests_on_what_is_left_open_and_its_hours_include_the_other_fits(tmp_path):
    arguments = {"systems": "verl_colocated", "system.speculation": "none", "cluster.tp": 1}
    kept = {"trials": 2, "best": 1, "polish": 0, "jobs": 1, "robust": False}
    sure, unsure = (
        api.advise(calibrated_file(tmp_path, **changes), arguments, **kept)
        for changes in ({"fits": []}, {})
    )
    assert unsure.data.plans[0].answer.rests_on[:2] == (FIRST[:-1], WARNING[:-1])
    assert WARNING[:-1] in json.dumps(unsure.json())
    assert sure.data.plans[0].spread < unsure.data.plans[0].spread
    low, high = sure.data.plans[0].interval_hours
    wider_low, wider_high = unsure.data.plans[0].interval_hours
    assert wider_low < low and high < wider_high


def test_a_report_and_its_inputs_repeat_what_is_left_open(tmp_path):
    compared = api.compare(calibrated_file(tmp_path), jobs=1, folder=tmp_path / "out")
    assert WARNING in str(compared) and WARNING in compared._repr_html_()
    page = compared.report(tmp_path / "page.html").read_text()
    assert page.count(WARNING) >= 2 and FIRST in page


def test_results_never_take_the_place_of_the_calibration_that_they_are_of(simrl):
    calibrated_file(simrl.folder)
    name = load_scenarios(simrl.folder / "calibrated.yaml")[0].name
    folder = simrl.folder / "results" / name
    folder.mkdir(parents=True)
    (simrl.folder / "calibrated.yaml").rename(folder / "calibrated.yaml")
    done = simrl("compare", str(folder / "calibrated.yaml"), "--jobs", "1")
    assert done.code == 0, done.err
    assert (folder / "calibrated.yaml").is_file()
    assert (folder.with_name(f"{name}-compare") / "comparison.json").is_file()
    kept = simrl("compare", str(folder / "calibrated.yaml"), "-o", f"./results/../results/{name}")
    assert kept.code == 2 and "name another folder" in kept.err
