"""The totals of the board of real runs: setups that gave constants and strangers apart, leave one out, causes, history."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from experiments.reproduce import predict, real_accuracy, real_page, real_scores
from experiments.reproduce.ledger import read_ledger
from experiments.reproduce.predict import FAMILIES
from experiments.reproduce.real_board import all_rows, training_steps
from experiments.reproduce.real_setups import left_out_tasks, read_setups, setup_of
from simrl.errors import InputError
from simrl.scenario.presets import ENGINES, FRAMEWORKS
from tests.command_line import CommandLine
from tests.experiments.test_real_runs import board, write_data

ROOT = Path(__file__).parents[2]
PRESETS = {**ENGINES, **FRAMEWORKS}
VERL = "gen_s old_log_prob_s ref_s update_actor_s step_s"
VERL_FSDP = "gen_s (old_log_prob_s) update_actor_s step_s"
RLINF = "generation_s log_prob_s train_s step_s"
PHASES = "(generation_s) (logprobs_s) (train_s) (step_s)"
LORA = "step_s trainer waits"
# The board: a row is neither dropped nor added without a change here. In brackets: unscored.
ROWS = {
    "opd-i80f2v90": VERL,
    "opd-yeu8r64c": VERL,
    "opd-f6sves9c": VERL,
    "opd-do7bl4gg": VERL,
    "verl-qwen2-7b-short": VERL_FSDP,
    "verl-qwen2-7b-long": VERL_FSDP,
    "nemo-8b-sync": "step_s",
    "nemo-8b-async": "step_s",
    "nemo-8b-async-over-sync": "samples/s ratio",
    "nemo-32b-sync": "step_s",
    "nemo-30b-a3b-sync": "step_s",
    "nemo-30b-a3b-async": "step_s",
    "nemo-30b-a3b-async-over-sync": "samples/s ratio",
    "nemo-235b-a22b-sync": "step_s",
    "nemo-phases-8b": PHASES,
    "nemo-phases-70b": PHASES,
    "nemo-deepseek-v3-sync": "(step_s)",
    "rlinf": RLINF,
    "rlinf-verl": RLINF,
    "rlinf-over-verl": "step_s ratio",
    "verl-v1-sync": "hours",
    "verl-v1-colocate-async": "hours",
    "verl-v1-separate-async": "hours",
    "verl-v1-colocate-async-over-sync": "samples/s ratio",
    "marin-sync": "core_s",
    "marin-async-c1": "core_s",
    "marin-async-c1-over-sync": "core_s ratio",
    "hf-lora-dp2": LORA,
    "hf-lora-dp2-tb16k": LORA,
}
TRAINING_STEPS = {
    "1xa6000-qwen3-0.6b": "rl-lora-16384 rl-lora-65536 rl-full-16384 rl-full-65536 sft-full-8192",
    "1xa6000-qwen3-4b": "rl-lora-16384",
    "4xa6000-qwen3-0.6b": "rl-full-65536",
    "1xh100-qwen3-0.6b": "rl-lora-offload-65536 rl-lora-16384 rl-lora-65536 rl-full-offload-65536 "
    "rl-full-16384 rl-full-65536 sft-full-16384 sft-full-8192",
    "1xh100-qwen3-4b": "rl-lora-offload-16384 rl-lora-offload-65536 rl-lora-16384 rl-lora-65536",
    "8xh100-qwen3-30b-a3b": "rl-lora-16384 rl-lora-65536 rl-full-16384",
    "8xh100-qwen3-4b": "rl-lora-16384 rl-lora-65536 rl-full-16384 rl-full-65536 sft-full-16384",
    "8xb200-intellect-3": "rl-lora-offload-65536 rl-lora-16384 rl-lora-65536",
    "8xb200-qwen3-235b-a22b": "rl-lora-offload-16384 rl-lora-16384",
    "8xb200-qwen3-30b-a3b": "rl-lora-16384 rl-lora-65536",
    "8xb200-qwen3-4b": "rl-lora-16384 rl-lora-65536 rl-full-16384 sft-full-16384 sft-full-65536",
}


def test_the_rows_of_the_board_are_these():
    found = {}
    for row, of in all_rows().items():
        unscored = of.why_not or of.why_unscored
        names = [f"({name})" if unscored or name in of.evidence else name for name in of.names]
        found[row] = " ".join(names)
    assert found == ROWS


def test_the_training_steps_of_the_board_are_these(shared_data: Path):
    named = set()
    for gpus, steps in TRAINING_STEPS.items():
        for step in steps.split():
            kind, tokens = step.rsplit("-", 1)
            kept = "" if kind.endswith("offload") else "-recompute"
            named.add(f"train-{gpus}-{kind}{kept}-{tokens}")
    assert set(training_steps(shared_data)) == named and len(named) == 39


def test_each_row_is_in_one_setup():
    setups = read_setups().setups
    steps = [f"train-{gpus}-x" for gpus in TRAINING_STEPS]
    for row in [*all_rows(), *steps]:
        assert len([name for name, setup in setups.items() if setup.layers(row)]) == 1, row
    for name, setup in setups.items():
        for row in (row for rows in setup.rows.values() for row in rows if "*" not in row):
            assert row in ROWS and all_rows()[row].family == setup.ledger, (name, row)


def constants() -> dict[str, tuple[str, str]]:
    """The constants of presets that setups gave: the words of their sources, and the setups."""
    return {
        f"{name}: {gave.constant}": (gave.constant, gave.says)
        for name, setup in read_setups().setups.items()
        for gave in setup.gave
        if setup.ledger
    }


@pytest.mark.parametrize("of", constants())
def test_a_constant_that_a_setup_gave_has_a_source_that_says_so(of: str):
    constant, says = constants()[of]
    preset, _, key = constant.rpartition(".")
    found = PRESETS[preset].constants[key]
    assert found.kind == "measured" and says in found.source, "no longer from these rows? drop it"


def test_a_measured_constant_of_a_preset_of_the_board_comes_from_a_setup_or_from_elsewhere():
    used = {
        str(value)
        for name in FAMILIES
        for entry in read_ledger(name).inputs.values()
        for value in [entry.value, *re.findall(r"engine preset (\S+?)[,;]?$", entry.source)]
        if str(value) in PRESETS
    }
    used |= {str(PRESETS[name].engine) for name in used} & set(PRESETS)
    assert {"verl-fsdp-0.5", "nemo-rl-0.6"} < used
    declared = {constant for constant, _ in constants().values()}
    for name in sorted(used):
        for key, constant in PRESETS[name].constants.items():
            elsewhere = f"{name}.{key}" in read_setups().elsewhere
            if constant.kind == "measured":
                assert (f"{name}.{key}" in declared) != elsewhere, f"{name}.{key}"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_input_of_a_preset_has_the_value_of_the_preset(name: str):
    for key, entry in read_ledger(name).inputs.items():
        if match := re.match(r"(?:engine|framework) preset ([\w.-]*\w)", entry.source):
            constant = PRESETS[match[1]].constants.get(key)
            if constant is not None and entry.used:
                assert entry.value == constant.value, key


def test_a_setup_that_gave_constants_is_also_predicted_without_them():
    tasks = left_out_tasks({"nemo-8b-sync": 1, "rlinf": 4, "nemo-deepseek-v3-sync": 1}, data="x")
    assert [(task.paper, dict(task.rows)) for task in tasks] == [
        ("real_nemo_rl", {"nemo-8b-sync": 1})
    ]
    middle, (task,) = read_ledger("real_nemo_rl").middle, tasks
    changed = {key for key in middle if task.inputs[key] != middle[key]}
    assert changed == set(read_setups().setups[setup_of("nemo-8b-sync")].left_out)


def test_a_stranger_is_predicted_once_and_a_setup_that_gave_constants_twice(
    reproduce: CommandLine, tmp_path: Path
):
    data = write_data(tmp_path / "data")
    rows = board(reproduce, data, "nemo-8b-sync", "rlinf", "--samples", "0")["rows"]
    for entry in rows:
        assert (entry["left_out"] == entry["predicted"]) == (entry["id"] == "rlinf")
        assert entry["left_out_error"] == pytest.approx(entry["left_out"] / entry["measured"] - 1)


def entry(row: str, error: float, left_out: float | None = None, **others: Any) -> dict[str, Any]:
    found = {"id": row, "quantity": "step_s", "kind": "step", "measured": 1.0, "scored": True}
    found |= {"setup": setup_of(row), "error": error, **others}
    found["left_out_error"] = error if left_out is None else left_out
    found["left_out"] = found["measured"] * (1 + found["left_out_error"])
    return found


SIX = [
    entry("nemo-8b-sync", 0.02, -0.1),
    entry("nemo-30b-a3b-sync", -0.04, -0.2),
    entry("rlinf", -0.3),
    entry("verl-v1-sync", -0.4, quantity="hours"),
    entry("verl-v1-colocate-async", 0.9, scored=False, quantity="hours"),
    entry("rlinf-over-verl", 0.1, kind="ratio", quantity="step_s ratio", measured=0.95),
]


def test_setups_that_gave_constants_and_strangers_count_apart_and_all_of_them_without_their_own():
    found = real_scores.totals(SIX)
    medians = {
        group: (found[group]["steps"]["count"], found[group]["steps"]["signed_median"])
        for group in ("gave_constants", "strangers", "leave_one_setup_out")
    }
    assert medians == {
        "gave_constants": (2, pytest.approx(-0.01)),
        "strangers": (2, pytest.approx(-0.35)),
        "leave_one_setup_out": (4, pytest.approx(-0.25)),
    }
    assert found["gave_constants"]["steps"]["median_error"] == pytest.approx(0.03)
    assert found["leave_one_setup_out"]["steps"]["worst"]["id"] == "verl-v1-sync"
    assert found["not_scored"] == 1


def test_a_ratio_on_the_other_side_of_one_is_a_reversed_order():
    assert real_scores.totals(SIX)["strangers"]["reversed"] == ["rlinf-over-verl"]
    told = "Orders reversed: rlinf-over-verl (measured 0.95, predicted 1.04)."
    assert told in real_scores.sentences(SIX)


def test_totals_are_given_by_layers_engine_and_gpu():
    found = {(name, kind): cells for name, kind, *cells in real_scores.by_class(SIX)}
    assert found["hybrid", "steps"] == ["1: 40%, -40%, worst -40%", "", "1: 40%, -40%, worst -40%"]
    assert found["SGLang", "ratios"][0] == "1: 10%, +10%, worst +10%"
    assert found["experts", "steps"][:2] == ["1: 20%, -20%, worst -20%", "1: 4%, -4%, worst -4%"]
    assert ("other GPUs", "steps") not in found


def test_totals_of_nothing_are_empty():
    sums = real_scores.totals([])["strangers"]["steps"]
    assert sums == {"count": 0, "median_error": None, "signed_median": None, "worst": None}


def test_a_quantity_more_than_30_percent_off_needs_its_cause():
    real_scores.require_causes(SIX)  # within 30 %, or with a cause
    for far in (entry("nemo-8b-sync", -0.31), entry("nemo-8b-sync", 0.0, 0.31, scored=False)):
        with pytest.raises(InputError, match=r"nemo-8b-sync step_s .* add why to causes"):
            real_scores.require_causes([*SIX, far])


def test_each_cause_is_of_a_quantity_of_the_board(shared_data: Path):
    known = {f"{row} {name}" for row, of in all_rows().items() for name in of.names}
    known |= {f"{row} step_s" for row in training_steps(shared_data)}
    named = [name for cause in read_setups().causes for name in cause.of]
    assert set(named) <= known and len(named) == len(set(named))


def lines(code: str, error: float) -> list[dict[str, str]]:
    totals = real_scores.totals([entry("rlinf", error)])
    return real_accuracy.lines_of(totals, f"commit {code}", "2026-11-27", code)


def test_the_history_has_lines_for_each_code_and_its_last_figures():
    history, alarms = real_accuracy.recorded([], lines("a", 0.25))
    assert len(history) == 2 and not alarms  # of all, and of strangers
    history, _ = real_accuracy.recorded(history, lines("b", 0.26))
    history, _ = real_accuracy.recorded(history, lines("b", 0.24))
    assert [(line["code"], line["median_error"]) for line in history] == [
        ("a", "0.2500"),
        ("a", "0.2500"),
        ("b", "0.2400"),
        ("b", "0.2400"),
    ]


def test_a_commit_that_predicts_the_same_keeps_the_lines_of_the_one_before():
    history, _ = real_accuracy.recorded([], lines("a", 0.25))
    later = [{**line, "commit": "later"} for line in lines("a", 0.25)]
    assert real_accuracy.recorded(history, later)[0] == history


def test_a_median_two_points_worse_than_the_last_code_raises_the_alarm_until_its_line_says_why():
    history, _ = real_accuracy.recorded([], lines("a", 0.25))
    assert not real_accuracy.recorded(history, lines("b", -0.265))[1]
    worse, alarms = real_accuracy.recorded(history, lines("b", -0.28))
    assert alarms[0] == "steps, leave one setup out: median error 28.0%, 25.0% at commit a"
    assert real_accuracy.recorded(worse, lines("b", -0.28))[1] == alarms  # again
    meant = [*worse[:2], *({**line, "why": "a constant left"} for line in worse[2:])]
    assert real_accuracy.recorded(meant, lines("b", -0.28)) == (meant, [])


def test_the_alarm_is_told_in_a_line_when_the_lines_are_written(tmp_path: Path):
    path = tmp_path / "accuracy.csv"
    real_accuracy.record(path, real_scores.totals([entry("rlinf", 0.25)]))
    text = path.read_text(encoding="utf-8")
    assert text.startswith("date,commit,code,quantities,group,n,median_error,")
    other = re.sub(r"(?m)^([^,]*,[^,]*),[0-9a-f]{12}", r"\1,other", text)
    path.write_text(other, encoding="utf-8")
    with pytest.raises(InputError, match=r"accuracy\.csv: more than 2% worse than before: steps"):
        real_accuracy.record(path, real_scores.totals([entry("rlinf", 0.28)]))
    with path.open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 4


def test_the_history_is_of_the_whole_board(reproduce: CommandLine):
    said = reproduce.refuses("--real", "nemo-8b-sync", "--accuracy", "accuracy.csv")
    assert "--accuracy: is of the whole board" in said
    assert "--accuracy: is of the board of real runs" in reproduce.refuses("--accuracy", "x.csv")


def test_a_prediction_that_the_left_out_constants_make_impossible_ends_in_a_line():
    task = predict.Task("real_nemo_rl", {"nemo-8b-sync": 1}, predict.LEFT_OUT, {})
    found = predict.Found(InputError("too short"), frozenset())
    with pytest.raises(predict.PaperError, match="nemo-8b-sync, its constants left out: too short"):
        predict._prediction("nemo-8b-sync", [(task, found)])


@pytest.mark.parametrize("page", real_page.COPIES)
def test_the_pages_have_the_figures_of_the_board(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    made = (ROOT / "experiments" / "real_runs.md").read_text(encoding="utf-8")
    assert real_page.COPIES[page](text, made) == text, "python -m experiments.reproduce.real_page"
