"""The table of a comparison: whole columns only, each explained, on any screen."""

import json
import re

import pytest

from simrl.commands.compare import Comparison
from simrl.scenario.load import load_scenarios
from simrl.show.tables.compare import unequal_work
from simrl.simulate.prepare import prepare
from simrl.study.compare import folder_name
from tests.command_line import SCENARIO


@pytest.fixture
def compared(tmp_path):
    """Rows of two systems on 64 and on 256 GPUs, made up, with their scenarios and the folder of their results."""
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    scenarios = load_scenarios(
        tmp_path / "scenario.yaml", ["vary=[{cluster.gpus: 64}, {cluster.gpus: 256}]"]
    )
    rows = [
        {
            "system": "areal(eta=2)" if scenario.system.parameters else scenario.system.name,
            "variant": scenario.variant,
            "gpus": scenario.cluster.gpus,
            "samples_per_s": 5.774 + i,
            "tokens_per_s": 31234.5,
            "step_s": 177.3,
            "rollout_bubble": 0.112,
            "occupancy": 0.37,
            "train_idle": 0.0,
            "off_policyness_mean": 3.504,
            "off_policyness_max": 6,
            "carried_share": 0.0,
            "carried_off_policyness_max": 0,
            "dropped_share": 0.0,
            "migrated_share": 0.0,
            "duplicate_share": 0.0,
            "settled": True,
            "gpu_hours_per_1k_samples": 3.08,
            "cost_per_1k_samples": 7.7,
            "speculation": "none",
            "acceptance_rate": None,
            "speculation_rate": 0.0,
            "accept_length": None,
            "acceptance": None,
            "prefix_caching": True,
            "speedup": 1 + i / 5.774,
            "speedup_in_variant": 1 + i % 2 / 5.774,
            "folder": folder_name(scenario),
            "samples_per_s_assumed_half": None,
            "samples_per_s_assumed_double": None,
        }
        for i, scenario in enumerate(scenarios)
    ]
    for scenario, row in zip(scenarios, rows, strict=True):
        (tmp_path / row["folder"]).mkdir()
        (tmp_path / row["folder"] / "result.json").write_text(
            json.dumps(prepare(scenario).inputs())
        )
    return scenarios, rows, tmp_path


def shown(compared, capsys, monkeypatch, columns=None, **changes):
    """The lines of the table that a screen of so many columns gets; None is a file."""
    scenarios, rows, folder = compared
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    every = Comparison(
        tuple(scenarios),
        tuple({**row, **changes} for row in rows),
        folder,
        columns=True,
        inputs=True,
    )
    every.print()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 140, 200])
def test_no_line_is_wider_than_the_screen_and_no_cell_is_cut(
    compared, capsys, monkeypatch, columns
):
    lines = shown(compared, capsys, monkeypatch, columns)
    assert all(len(line) <= columns for line in lines if not line.startswith("Written to"))
    assert "…" not in "\n".join(lines)
    for row in compared[1]:
        (line,) = [
            x for x in lines if re.search(rf"\b{row['gpus']}  {re.escape(row['system'])}\s", x)
        ]
        assert f"{row['speedup_in_variant']:.2f}×" in line


def test_a_narrow_screen_keeps_what_matters_and_says_what_is_left_out(
    compared, capsys, monkeypatch
):
    heading = " ".join(shown(compared, capsys, monkeypatch, 80)[1:3])
    for name in ("gpus", "system", "samples/s", "speed-up", "bubble", "off-policy"):
        assert name in heading
    left_out = re.search(
        "Left out for want of room, but in comparison.json: (.*)",
        "\n".join(shown(compared, capsys, monkeypatch, 80)),
    )
    assert left_out and "tokens/s" in left_out[1]
    assert "tokens/s" not in heading


@pytest.mark.parametrize("columns", [None, 200])
def test_a_wide_screen_and_a_file_get_every_column(compared, capsys, monkeypatch, columns):
    text = "\n".join(shown(compared, capsys, monkeypatch, columns))
    for name in (
        "samples/s",
        "speed-up",
        "overall",
        "step s",
        "tokens/s",
        "GPU-h/1k",
        "cost/1k",
        "mean / max",
    ):
        assert name in text
    assert "Left out" not in text


def test_every_column_that_needs_it_is_explained(compared, capsys, monkeypatch):
    text = "\n".join(shown(compared, capsys, monkeypatch))
    for name in (
        "samples/s",
        "speed-up",
        "overall speed-up",
        "rollout bubble",
        "occupancy",
        "train idle",
        "off-policy mean / max",
        "step s",
    ):
        assert f"\n{name}: " in text
    assert "with the same gpus" in text


def test_a_long_label_goes_on_in_the_next_line(compared, capsys, monkeypatch):
    system = "areal(eta=8, interruptible=False, max_concurrent=4, on_stale=drop)"
    lines = shown(compared, capsys, monkeypatch, 80, system=system)
    start = next(i for i, line in enumerate(lines) if "areal(eta=8," in line)
    together = "".join(line.strip() for line in lines[start : start + 4])
    assert all(
        part in together for part in ("interruptible=False", "max_concurrent=4", "on_stale=drop")
    )
    assert all(len(line) <= 80 for line in lines if not line.startswith("Written to"))


def test_numbers_keep_three_digits_that_matter(compared, capsys, monkeypatch):
    for value, text in (
        (0.00312, "0.00312"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (1234567.8, "1,234,568"),
    ):
        lines = shown(compared, capsys, monkeypatch, samples_per_s=value)
        assert sum(f" {text} " in line for line in lines) >= 4, text


def test_the_title_says_what_all_runs_have_in_common(compared, capsys, monkeypatch):
    assert shown(compared, capsys, monkeypatch)[0] == "tiny: qwen3-0.6b, h100, tp 1, updates 2 to 2"


def test_the_table_says_once_what_the_numbers_rest_on(compared, capsys, monkeypatch):
    lines = shown(compared, capsys, monkeypatch)
    for start in (
        "Step times: qwen3-0.6b on h100 tp1, assumed (roofline",
        "Rollouts: synthetic",
        "Training: computed from the operations (eager kernels, FlashAttention 2, activations recomputed)",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start


def test_the_seconds_that_nobody_measured_are_named_until_they_are_said(
    compared, capsys, monkeypatch
):
    assumed = "training.switch_s=2 training.load_overhead_s=1 training.reward_s=0.2 training.publish_s=0.5"
    begins = "Assumed seconds (set your own if known):"
    assert f"{begins} {assumed}" in shown(compared, capsys, monkeypatch)
    _, rows, folder = compared
    for row in rows:
        path = folder / row["folder"] / "result.json"
        metadata = json.loads(path.read_text())
        metadata["scenario"]["training"] |= {"switch_s": 3.0, "load_s": 4.0, "reward_s": 0.0}
        path.write_text(json.dumps(metadata))
    said = [line for line in shown(compared, capsys, monkeypatch) if line.startswith("Assumed")]
    assert said == [f"{begins} training.publish_s=0.5"]


def test_different_sources_are_all_named(compared, capsys, monkeypatch):
    _, rows, folder = compared
    path = folder / rows[-1]["folder"] / "result.json"
    metadata = json.loads(path.read_text())
    metadata["profile"]["source"] = "my own [sic] measurements"
    path.write_text(json.dumps(metadata))
    text = "\n".join(shown(compared, capsys, monkeypatch))
    assert "assumed (roofline" in text
    assert "my own [sic] measurements" in text


def test_tokens_that_were_dropped_or_carried_and_samples_that_moved_are_told_where_there_are_some(
    compared, capsys, monkeypatch
):
    assert "tokens were dropped" not in " ".join(shown(compared, capsys, monkeypatch))
    told = " ".join(
        shown(
            compared,
            capsys,
            monkeypatch,
            dropped_share=0.125,
            carried_share=0.02,
            carried_off_policyness_max=2,
            migrated_share=0.031,
        )
    )
    assert (
        "¹ 12.5% of the generated tokens were dropped ² 2.0% of the trained tokens came from a step before, up to 2 updates "
        "old ³ 3.1% of the samples moved between workers" in told
    )
    assert told.count("areal(eta=2)¹,²,³ ") == 2


def test_carried_tokens_are_told_however_few_and_the_column_says_that_it_lacks_them(
    compared, capsys, monkeypatch
):
    few = {"carried_share": 0.004, "carried_off_policyness_max": 2}
    fewer = {"carried_share": 0.0001, "carried_off_policyness_max": 1}
    lines = short(compared, capsys, monkeypatch, few, fewer, columns=250, explain=True)
    assert "¹ 0.4% of the trained tokens came from a step before, up to 2 updates old" in lines
    assert (
        "² less than 0.1% of the trained tokens came from a step before, up to 1 updates old"
        in lines
    )
    (meaning,) = [line for line in lines if line.startswith("off-policy mean / max: ")]
    assert meaning.endswith("; without tokens that came from a step before, which have a mark")
    plain = "\n".join(short(compared, capsys, monkeypatch, {}, {}, columns=250, explain=True))
    assert "came from a step before" not in plain


def test_all_rows_with_shorter_samples_than_another_are_named(compared, capsys, monkeypatch):
    rows = [
        {
            **compared[1][0],
            "variant": "",
            "system": name,
            "samples_per_s": 10.0,
            "tokens_per_s": tokens,
        }
        for name, tokens in {"a": 1850.0, "b": 1690.0, "c": 1600.0, "d": 1840.0}.items()
    ]
    assert unequal_work(rows) == [
        "In these updates a trained on 185 tokens a sample, c on 160 and b on 169: compare tokens/s, or simulate more steps"
    ]


def test_the_row_of_a_system_that_drops_stale_samples_leads_to_their_number(
    compared, capsys, monkeypatch
):
    lines = short(
        compared, capsys, monkeypatch, {"stale_samples": 0}, {"stale_samples": 1234}, columns=200
    )
    assert "¹ 1,234 samples were too stale and dropped" in lines
    assert sum("areal(eta=2)¹" in line for line in lines) == 1


ASYNC = {
    "system": "areal(rollout_share=0.5, eta=4)",
    "colocated": False,
    "rollout_gpus": 32,
    "train_gpus": 32,
}
SYNC = {"colocated": True}


def short(compared, capsys, monkeypatch, *changes, columns=80, explain=False, **options):
    """The lines that a screen gets of two rows with these changes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    scenarios, rows, folder = compared
    changed = tuple({**row, **change} for row, change in zip(rows[:2], changes, strict=True))
    Comparison(tuple(scenarios[:2]), changed, folder, columns=explain, **options).print()
    return capsys.readouterr().out.splitlines()


def test_the_line_below_the_table_names_the_fastest_and_its_lead(compared, capsys, monkeypatch):
    lines = short(compared, capsys, monkeypatch, {"samples_per_s": 5.0}, {"samples_per_s": 10.0})
    assert "Fastest: areal(eta=2) (gpus=64), 2.00× verl_colocated" in lines


def test_a_lead_within_the_error_of_the_model_is_called_level(compared, capsys, monkeypatch):
    lines = " ".join(
        short(
            compared,
            capsys,
            monkeypatch,
            {"samples_per_s": 10.0},
            {"samples_per_s": 10.1},
            columns=140,
        )
    )
    assert "1.01× verl_colocated, level with verl_colocated (simrl's error is" in lines


def test_a_run_that_had_not_settled_is_named_beside_the_answer(compared, capsys, monkeypatch):
    lines = short(compared, capsys, monkeypatch, {}, {"settled": False}, columns=400, brief=True)
    assert ". Not settled (↑): areal(eta=2) (gpus=64): off-policyness still grew" in lines[-1]


def test_brief_prints_the_table_and_one_line(compared, capsys, monkeypatch):
    whole = short(compared, capsys, monkeypatch, {}, {"dropped_share": 0.5}, columns=200)
    lines = short(
        compared, capsys, monkeypatch, {}, {"dropped_share": 0.5}, columns=200, brief=True
    )
    assert lines == [
        line.replace("areal(eta=2)¹ ", "areal(eta=2)  ") for line in whole[: len(lines)]
    ]  # a mark needs its line
    assert lines[-1].startswith("Fastest: ") and len(lines) == 7 < len(whole)


def test_columns_and_inputs_are_explained_where_they_are_asked_for(compared, capsys, monkeypatch):
    lines = "\n".join(short(compared, capsys, monkeypatch, {}, {}))
    assert "samples/s: " not in lines and "Step times: " not in lines and "--inputs" in lines
    assert "\nsamples/s: " in "\n".join(short(compared, capsys, monkeypatch, {}, {}, explain=True))


def test_a_split_has_a_column_and_is_no_part_of_the_name_there(compared, capsys, monkeypatch):
    lines = short(compared, capsys, monkeypatch, SYNC, ASYNC)
    turned = short(
        compared, capsys, monkeypatch, SYNC, {**ASYNC, "system": "areal(eta=4, rollout_share=0.5)"}
    )
    assert turned == lines
    assert any(re.match(r"areal\(eta=4\) +32:32 ", line) for line in lines)
    assert not any("rollout_share" in line for line in lines)


def test_a_row_without_the_prefix_cache_of_the_others_is_marked(compared, capsys, monkeypatch):
    scenarios, rows, folder = compared
    mixed = [{**row, "prefix_caching": i != 1} for i, row in enumerate(rows)]
    lines = " ".join(shown((scenarios, mixed, folder), capsys, monkeypatch))
    assert "areal(eta=2)¹ " in lines and "¹ without prefix caching, which others here have" in lines


def test_a_row_whose_update_trains_a_part_of_a_batch_is_marked_beside_rows_of_whole_batches(
    compared, capsys, monkeypatch
):
    scenarios, rows, folder = compared

    def lines(*shares):
        changed = [{**row, "update_share": shares[i % len(shares)]} for i, row in enumerate(rows)]
        return " ".join(shown((scenarios, changed, folder), capsys, monkeypatch))

    mixed = lines(1.0, 0.25)
    assert "areal(eta=2)¹ " in mixed and "¹ an update of this row trains 1/4 of a batch" in mixed
    assert "of a batch" not in lines(0.25) and "of a batch" not in lines(1.0, 0.9)


def test_a_row_of_assumed_acceptance_says_so_with_the_first_epoch_and_later_ones_apart(
    compared, capsys, monkeypatch
):
    drafts = {
        "speculation": "histospec",
        "accept_length": 2.0,
        "acceptance": "assumed",
        "speculation_rate": 0.3,
    }
    rates = {"first_epoch_speculation_rate": 0.0, "later_speculation_rate": 0.45}
    lines = " ".join(short(compared, capsys, monkeypatch, {}, {**drafts, **rates}, columns=140))
    assert "areal(eta=2)¹ " in lines
    assert (
        "¹ acceptance assumed: 0% from drafts in the first epoch and 45% from drafts in later ones"
        in lines
    )


def test_a_system_slower_than_the_first_names_the_defaults_that_make_it_so(
    compared, capsys, monkeypatch
):
    slow = {"system": "verl_fully_async(sync_step=2)", "samples_per_s": 3.0}
    lines = " ".join(" ".join(short(compared, capsys, monkeypatch, {}, slow)).split())
    assert (
        "¹ slower than verl_colocated with its defaults staleness=0.1, require_batches=1, partial_rollout=on"
        in lines
    )


def test_hours_and_cost_of_the_whole_run_are_in_the_table_and_beside_the_answer(
    compared, capsys, monkeypatch
):
    slow, fast = (
        {"samples_per_s": rate, "run_hours": 100 / rate, "run_cost": 1000 / rate}
        for rate in (5.0, 10.0)
    )
    lines = short(compared, capsys, monkeypatch, slow, fast, columns=140)
    assert lines[1].split().count("run") == 2 and re.match(r"areal.* 10\.0 +100 ", lines[5])
    assert any("2.00× verl_colocated (10.0 h, cost 100)" in line for line in lines)


def test_of_many_variants_the_fastest_of_all_is_named_alone(compared, capsys, monkeypatch):
    scenarios, rows, folder = compared
    varied = [{**row, "variant": f"seed={i // 2}"} for i, row in enumerate([*rows, *rows[:2]])]
    varied[3] = {**varied[3], "samples_per_s": 30.0}
    Comparison((*scenarios, *scenarios[:2]), tuple(varied), folder, brief=True).print()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Fastest")]
    assert (
        line.startswith(f"Fastest: {varied[3]['system']} (seed=1), ")
        and "seed=0" not in line
        and "seed=2" not in line
    )


def test_of_variants_with_one_run_each_the_fastest_is_named(compared, capsys, monkeypatch):
    scenarios, rows, folder = compared
    alone = [{**row, "system": "areal"} for row in rows[::2]]
    Comparison(tuple(scenarios[::2]), tuple(alone), folder, brief=True).print()
    out = capsys.readouterr().out
    assert "Fastest: areal (gpus=256), 1.35× areal (gpus=64)" in out


def test_a_system_level_with_the_first_is_not_called_slower(compared, capsys, monkeypatch):
    first, level = {"samples_per_s": 10.0}, {"system": "verl_fully_async", "samples_per_s": 9.9}
    assert "slower than" not in " ".join(short(compared, capsys, monkeypatch, first, level))
