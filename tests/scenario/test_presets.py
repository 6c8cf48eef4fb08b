"""Presets of engines and frameworks: they fill what a scenario leaves open, and every constant names its source."""

import json
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.profile.metadata import SAMPLER, ProfileMetadata
from simrl.profile.model_shape import MODELS
from simrl.profile.profile import TableProfile, read_profile, write_profile
from simrl.scenario.load import ScenarioFile, load_scenarios
from simrl.scenario.model import Scenario
from simrl.scenario.presets import (
    ENGINES,
    FRAMEWORKS,
    EngineConstants,
    constants,
    read_presets,
    write_presets,
)
from simrl.show.inputs import inputs, provenance
from simrl.simulate.prepare import prepare
from simrl.study.point import Point
from simrl.training.config import TrainingConfig

SCENARIO = {
    "name": "small",
    "steps": 2,
    "model": "qwen3-8b",
    "cluster": {"gpu": "h100", "gpus": 8, "tp": 1},
    "workload": {
        "synthetic": {
            "steps": 2,
            "prompts_per_step": 4,
            "group": 2,
            "cap_tokens": 500,
            "mean_tokens": 100,
            "sigma": 0.5,
        }
    },
    "profile": {"path": "profiles/qwen3-8b_h100_tp1.parquet"},
    "system": {"name": "verl_colocated"},
}


def scenario(**changes) -> Scenario:
    return Scenario.model_validate({**SCENARIO, **changes})


def pause_s(**changes) -> float:
    return prepare(scenario(**changes)).profile.tables.between_passes_s


def test_a_framework_gives_its_fields_and_its_engine_and_the_scenario_s_own_values_stay():
    own = scenario(
        framework="nemo-rl-0.6", training={"kernels": "eager"}, engine={"max_num_seqs": 64}
    )
    assert own.training.microbatching == "padded"
    assert own.training.kernels == "eager"
    assert own.engine.preset == FRAMEWORKS["nemo-rl-0.6"].engine
    assert own.engine.max_num_seqs == 64
    assert scenario().training == TrainingConfig()


def test_a_scenario_with_presets_is_itself_again_from_its_own_dump():
    filled = scenario(framework="verl-fsdp-0.5")
    assert Scenario.model_validate(filled.model_dump()) == filled


def test_an_engine_s_preset_gives_the_host_s_times_unless_the_scenario_does():
    constant = ENGINES["vllm-0.8"].constants["between_passes_s"].value
    assert pause_s(engine={"preset": "vllm-0.8"}) == constant
    assert (
        pause_s(
            engine={"preset": "vllm-0.8"}, profile={**SCENARIO["profile"], "between_passes_s": 0.5}
        )
        == 0.5
    )


def test_a_profile_of_kernels_has_the_usual_engine_s_pause_where_none_is_named():
    prepared = prepare(scenario())
    assert (
        prepared.profile.tables.between_passes_s
        == ENGINES["vllm-0.19"].constants["between_passes_s"].value
    )
    assert "engine vllm-0.19" in " ".join(prepared.profile.corrections)


def test_without_cuda_graphs_no_pass_is_shorter_than_its_launches():
    least_s = prepare(
        scenario(engine={"preset": "vllm-0.12", "enforce_eager": True})
    ).profile.tables.least_pass_s
    assert least_s == pytest.approx(36 * ENGINES["vllm-0.12"].constants["layer_launch_s"].value)


DERIVED = ProfileMetadata(model="m", gpu="h100", tp=1, kind="derived", source="s")


def with_times_of_its_own(folder: Path, pause_s: float, **metadata) -> dict[str, str]:
    """Write a shipped profile with a pause, and return it as a section of a scenario."""
    shipped = read_profile(SCENARIO["profile"]["path"])
    changed = shipped.metadata.model_copy(update=metadata)
    tables = shipped.tables._replace(between_passes_s=pause_s)
    write_profile(TableProfile(tables, changed, ""), folder / "own.parquet")
    return {"path": str(folder / "own.parquet")}


def test_a_profile_s_own_pause_counts_unless_an_engine_is_named(tmp_path: Path):
    timed = with_times_of_its_own(tmp_path, 0.005, own_times=("between_passes_s",))
    prepared = prepare(scenario(profile=timed))
    assert prepared.profile.tables.between_passes_s == 0.005
    assert "5 ms between passes (the profile's own)" in " ".join(prepared.profile.corrections)
    used = {
        each.key
        for each in constants(scenario(profile=timed).model_dump(), prepared.profile.metadata)
    }
    assert "profile.between_passes_s" not in used and "profile.hidden_pass_s" not in used
    assert "engine.hidden_pass_s" in used
    assert pause_s(profile=timed, engine={"preset": "vllm-0.8"}) == 0.0013
    assert pause_s(profile={**timed, "between_passes_s": 0.002}) == 0.002
    assumed = with_times_of_its_own(tmp_path, 0.001, kind="assumed")
    assert pause_s(profile=assumed) == 0.0002, "a roofline's is a guess"


def test_the_sampler_of_imported_kernels_is_not_added_again(tmp_path: Path):
    timed = with_times_of_its_own(tmp_path, 0.0, own_times=SAMPLER)
    kernels = read_profile(timed["path"]).tables
    for engine in ({}, {"preset": "vllm-0.19"}):
        imported = tables(profile=timed, engine=engine)
        assert imported.between_passes_s == 0
        assert (imported.attention_s == kernels.attention_s).all()
        assert imported.least_pass_s == ENGINES["vllm-0.19"].constants["hidden_pass_s"].value
    assert pause_s(profile=timed, engine={"preset": "vllm-0.8"}) == 0.0013, "the host's"


def test_a_slow_host_has_no_slower_sampler():
    cluster = {**SCENARIO["cluster"], "host_speed": 0.5}
    slow, usual = prepare(scenario(cluster=cluster)).profile, prepare(scenario()).profile
    assert slow.tables.between_passes_s == usual.tables.between_passes_s
    assert (slow.tables.attention_s == usual.tables.attention_s).all()
    assert slow.tables.least_pass_s == 2 * usual.tables.least_pass_s
    assert slow.tables.least_sequence_s == 2 * usual.tables.least_sequence_s
    assert "speed" not in " ".join(slow.corrections)


def tables(**changes):
    return prepare(scenario(**changes)).profile.tables


def test_what_asynchronous_scheduling_hides_bounds_a_pass_from_below_with_its_sequences():
    constants = ENGINES["vllm-0.19"].constants
    hidden = tables(engine={"preset": "vllm-0.19"})
    assert hidden.least_pass_s == constants["hidden_pass_s"].value
    assert hidden.least_sequence_s == constants["hidden_sequence_s"].value
    with_log_probs = tables(engine={"preset": "vllm-0.19", "log_probs": True})
    more = constants["log_probs_s"].value
    assert with_log_probs.least_sequence_s == pytest.approx(hidden.least_sequence_s + more)
    given = {**SCENARIO["profile"], "least_pass_s": 0.0, "least_sequence_s": 1e-6}
    own = tables(engine={"preset": "vllm-0.19", "log_probs": True}, profile=given)
    assert (own.least_pass_s, own.least_sequence_s) == (0.0, 1e-6)


def test_log_probs_are_hidden_where_the_engine_s_preset_hides_sequences_also_if_none_is_named():
    usual = ENGINES["vllm-0.19"].constants
    both = usual["hidden_sequence_s"].value + usual["log_probs_s"].value
    for engine in ({}, {"preset": "vllm-0.19"}, {"preset": "vllm-0.19", "async_scheduling": False}):
        assert tables(engine={**engine, "log_probs": True}).least_sequence_s == pytest.approx(both)
    ahead = tables(engine={"preset": "vllm-0.8", "async_scheduling": True})
    assert ahead.least_sequence_s == 0, "its constants hold for its own scheduling"


def test_log_probs_and_messages_cost_the_host_where_they_are_and_a_slow_host_more_of_all():
    constants = {key: one.value for key, one in ENGINES["vllm-0.8"].constants.items()}
    alone = tables(engine={"preset": "vllm-0.8", "log_probs": False})
    cluster = {**SCENARIO["cluster"], "tp": 2}
    of_two = {"path": "profiles/qwen3-8b_h100_tp2.parquet"}
    together = tables(engine={"preset": "vllm-0.8"}, cluster=cluster, profile=of_two)
    assert together.between_passes_s == pytest.approx(
        constants["between_passes_s"] + constants["messages_s"]
    )
    assert alone.between_passes_s == constants["between_passes_s"]

    def a_sequence_s(of):
        return (of.attention_s[0, 0, -1, 0] - of.attention_s[0, 0, 1, 0]) / (
            of.decode_sequences[-1] - of.decode_sequences[1]
        )

    with_log_probs = tables(engine={"preset": "vllm-0.8"})
    more = a_sequence_s(with_log_probs) - a_sequence_s(alone)
    assert more == pytest.approx(constants["log_probs_s"])
    slow = tables(engine={"preset": "vllm-0.8"}, cluster={**SCENARIO["cluster"], "host_speed": 0.5})
    assert slow.between_passes_s == 2 * with_log_probs.between_passes_s
    added = constants["sequence_overhead_s"] + constants["log_probs_s"]
    assert a_sequence_s(slow) - a_sequence_s(with_log_probs) == pytest.approx(added)


def test_every_constant_has_a_source_and_a_value_within_its_range_and_is_a_field_that_exists():
    for preset in (*ENGINES.values(), *FRAMEWORKS.values()):
        for key, constant in preset.constants.items():
            assert len(constant.source) > 10 or constant.source == "strategy: fsdp", key
            if constant.low is not None:
                assert constant.low <= constant.value <= constant.high, key
    for preset in FRAMEWORKS.values():
        assert set(preset.constants) <= set(TrainingConfig.model_fields)
        assert preset.engine in ENGINES
        TrainingConfig.model_validate(
            {key: constant.value for key, constant in preset.constants.items()}
        )
    of_engines = set(EngineConstants.model_fields)
    assert all(set(preset.constants) <= of_engines for preset in ENGINES.values())


def test_every_result_names_the_constants_it_used_their_ranges_and_whose_they_are():
    metadata = prepare(scenario(framework="verl-fsdp-0.5")).inputs()
    lines = provenance([metadata])
    assert any("training.load_overhead_s=1.6 (1.4 to 1.8)" in line for line in lines)
    assert any(
        "vllm-0.8: profile.between_passes_s=0.0013 (0.0009 to 0.0018)" in line for line in lines
    )
    assert not any("load_overhead_s=1" in line and line.startswith("Assumed") for line in lines)
    row = next(entry for entry in inputs(metadata) if entry.name == "training.load_overhead_s")
    assert (row.kind, row.source.partition(":")[0]) == ("measured", "verl-fsdp-0.5")


SPLIT = {"name": "split", "rollout_share": 0.5}


def test_a_colocated_result_names_its_offload_whose_it_is_and_what_it_takes():
    def offload(**changes):
        lines = provenance([prepare(scenario(**changes)).inputs()])
        return [line.removeprefix("Offload: ") for line in lines if line.startswith("Offload: ")]

    (preset,) = offload(framework="verl-fsdp-0.5")
    model, rate = MODELS["qwen3-8b"], 0.346 * 64e9
    copied = 2 * (4 + 4 + 12) * model.parameters / 8  # log-probs, sync, update; there and back
    states = f"{copied / 1e9:.3g} GB of states a GPU, pinned at 22.1 GB/s: {copied / rate:.2f} s"
    asleep = f"the engine's weights: {2 * model.weight_bytes / rate:.2f} s"
    assert preset == f"phases (verl-fsdp-0.5): {states}; {asleep}"
    (own,) = offload(framework="verl-fsdp-0.5", training={"offload": "none"})
    assert own == f"none (the scenario): states stay on the GPUs; {asleep}"
    assert offload()[0].startswith("switch (default): ")
    assert offload(framework="verl-fsdp-0.5", system=SPLIT) == [], (
        "GPUs of its own keep their states"
    )
    assert offload(training={"switch_transfer_s": 0.0}) == [], "it was measured"


def test_an_engine_that_sleeps_copies_its_weights_out_and_back_unless_its_load_was_measured():
    stays, sleeps = (
        prepare(scenario(training={"rollout_offload": asleep})).costs.load_s
        for asleep in (False, True)
    )
    assert sleeps - stays == pytest.approx(2 * MODELS["qwen3-8b"].weight_bytes / (0.346 * 64e9))
    assert prepare(scenario(training={"rollout_offload": True, "load_s": 0.5})).costs.load_s == 0.5
    split = scenario(system=SPLIT, training={"rollout_offload": True})
    assert prepare(split).costs.load_s == prepare(scenario(system=SPLIT)).costs.load_s, (
        "it does not sleep"
    )


def test_a_value_of_the_scenario_s_own_is_no_constant_of_a_preset():
    dump = scenario(framework="verl-fsdp-0.5", training={"switch_s": 3.0}).model_dump()
    assert "training.switch_s" not in {used.key for used in constants(dump, DERIVED)}


def test_varied_frameworks_each_give_their_own_fields(tmp_path):
    data = {key: value for key, value in SCENARIO.items() if key != "system"}
    names = list(FRAMEWORKS)
    file = {**data, "systems": ["verl_colocated"], "vary": [{"framework": name} for name in names]}
    found = ScenarioFile(tmp_path / "scenario.yaml", data=file).scenarios()
    assert [one.training.kernels for one in found] == [
        FRAMEWORKS[n].constants["kernels"].value for n in names
    ]


@pytest.mark.parametrize("key", ["framework", "engine.preset"])
def test_an_unknown_preset_is_refused_in_a_line_that_names_those_there_are(tmp_path, key):
    path = tmp_path / "scenario.yaml"
    path.write_text("name: x\nsteps: 1\nsystems: [split]\n")
    with pytest.raises(InputError, match=rf"{key} is 'vlm-0.19'.*; there are"):
        load_scenarios(path, [f"{key}=vlm-0.19", "model=qwen3-8b"])


OWN = """
[mine]
about = "the engine of my cluster"
between_passes_s = { value = 0.003, low = 0.002, high = 0.004, kind = "measured", source = "my machine" }
async_scheduling = { value = true, kind = "stated", source = "its launch" }

[run]
about = "my framework"
engine = "mine"
switch_s = { value = 1, low = 0.5, high = 2, kind = "measured", source = "my log" }
"""


def written(folder: Path, text: str = OWN, **fields: object) -> Path:
    """A scenario beside a file of presets."""
    data = {key: value for key, value in SCENARIO.items() if key != "system"}
    profile = {"path": str(Path("profiles/qwen3-8b_h100_tp1.parquet").resolve())}
    file = folder / "scenario.yaml"
    (folder / "my.toml").write_text(text)
    file.write_text(
        json.dumps({**data, "profile": profile, "systems": ["verl_colocated"], **fields})
    )
    return file


def test_a_file_beside_the_scenario_is_a_preset_and_results_name_its_constants(tmp_path):
    for fields in ({"framework": "my.toml"}, {"framework": "my.toml#run"}):
        (found,) = load_scenarios(written(tmp_path, **fields))
        assert found.training.switch_s == 1.0 and found.engine.async_scheduling
        lines = provenance([prepare(found).inputs()])
        assert "Constants of mine: profile.between_passes_s=0.003 (0.002 to 0.004)" in lines
        assert "Constants of run: training.switch_s=1 (0.5 to 2)" in lines
        assert not any("switch_s" in line for line in lines if line.startswith("Assumed"))
    (found,) = load_scenarios(written(tmp_path, engine={"preset": "my.toml"}))
    assert prepare(found).profile.tables.between_passes_s == 0.003
    assert found.training == TrainingConfig()


def test_a_file_in_an_override_lies_in_the_current_folder(tmp_path, monkeypatch):
    file = written(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "here.toml").write_text(OWN)
    monkeypatch.chdir(tmp_path / "other")
    for setting in ("framework=here.toml", "engine.preset=here.toml", "engine={preset: here.toml}"):
        assert prepare(load_scenarios(file, [setting])[0]).profile.tables.between_passes_s == 0.003


def test_a_scenario_needs_the_file_no_more_once_it_is_loaded(tmp_path):
    (found,) = load_scenarios(written(tmp_path, framework="my.toml"))
    (tmp_path / "my.toml").unlink()
    again = Scenario.model_validate_json(found.model_dump_json())
    assert again == found.model_copy(update={"file": again.file})
    assert prepare(again).profile.tables.between_passes_s == 0.003


def test_another_constant_in_the_file_is_another_point_and_another_place_is_none(tmp_path):
    hashes = []
    for i, value in enumerate(("0.003", "0.003", "0.0035")):
        (tmp_path / str(i)).mkdir()
        file = written(
            tmp_path / str(i), OWN.replace("value = 0.003", f"value = {value}"), framework="my.toml"
        )
        hashes.append(Point(load_scenarios(file)[0]).hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_varied_files_each_give_their_own_constants(tmp_path):
    file = written(tmp_path, vary=[{"engine.preset": "my.toml"}, {"engine.preset": "vllm-0.12"}])
    assert [prepare(one).profile.tables.between_passes_s for one in load_scenarios(file)] == [
        0.003,
        ENGINES["vllm-0.12"].constants["between_passes_s"].value,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run", r"my.toml: cannot be read as presets"),
        ("about = 'x'", r"my.toml: about is in no table; write it below a \[name\]"),
        (
            "[run]\nabout = 'x'\nswitch_s = 3",
            r"my.toml, \[run\]: switch_s is 3; it has the keys value, kind",
        ),
        (
            OWN.replace("switch_s", "swich_s"),
            r"\[run\]: unknown key swich_s \(did you mean switch_s\?\)",
        ),
        (
            OWN.replace("value = 1,", "value = -1, "),
            r"\[run\]: switch_s: value -1.0, low 0.5, high 2.0: give low ≤ value",
        ),
        (
            OWN.replace("value = 1, low = 0.5, high = 2", "value = -1"),
            r"\[run\]: switch_s is -1.0: give 0 or more",
        ),
        (
            OWN.replace("stated", "guessed"),
            r"\[mine\]: async_scheduling.kind is 'guessed'.*; a constant is \{value",
        ),
        (
            OWN.replace(', source = "my log"', ""),
            r"\[run\]: key switch_s.source is missing; a constant is",
        ),
        (
            OWN.replace('"mine"', '"mime"'),
            r"\[run\]: engine is 'mime' \(did you mean mine\?\); name one of mine",
        ),
        (
            OWN.replace("[run]", "[a]").replace('engine = "mine"', "") + OWN[OWN.index("[run]") :],
            r"write framework=.*my.toml#a",
        ),
        (OWN[: OWN.index("[run]")], r"my.toml: has no table of framework constants"),
    ],
)
def test_a_malformed_file_is_refused_in_a_line_with_table_key_and_remedy(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_scenarios(written(tmp_path, text, framework="my.toml"))


def test_presets_that_are_written_come_back(tmp_path):
    presets = {
        **ENGINES,
        "a b": ENGINES["vllm-0.19"].model_copy(update={"name": "a b", "about": 'q" \\ é'}),
    }
    write_presets(tmp_path / "all.toml", presets, "Written by a test")
    assert read_presets(tmp_path / "all.toml") == presets


def test_every_preset_has_a_line_and_a_page_with_its_sources(simrl):
    listed, pages = simrl("presets").out, json.loads(simrl("presets", "--json").out)
    assert [page["name"] for page in pages] == [*FRAMEWORKS, *ENGINES]
    for page in pages:
        assert page["name"] in listed
        assert page == json.loads(simrl("presets", "show", page["name"], "--json").out)
        shown = simrl("presets", "show", page["name"]).out
        assert all(key in shown and one["kind"] in shown for key, one in page["constants"].items())
    assert "0.0002 (0 to 0.0004)" in simrl("presets", "show", "vllm-0.19").out
    unknown = simrl("presets", "show", "vlm-0.19")
    assert unknown.code == 2 and "did you mean vllm-0.19?" in unknown.err
