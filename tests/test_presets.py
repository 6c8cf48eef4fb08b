"""Presets of engines and frameworks: they fill what a scenario leaves open, and every constant names its source."""

import pytest

from simrl.errors import InputError
from simrl.scenario.load import ScenarioFile, load_scenarios
from simrl.scenario.model import Scenario
from simrl.scenario.presets import ENGINES, FRAMEWORKS, OF_ENGINE, constants
from simrl.scenario.training import TrainingConfig
from simrl.show.inputs import inputs, provenance
from simrl.simulate.prepare import prepare

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
    own = scenario(framework="nemo-rl-0.5", training={"kernels": "eager"}, engine={"max_num_seqs": 64})
    assert own.training.microbatching == "padded"
    assert own.training.kernels == "eager"
    assert own.engine.preset == FRAMEWORKS["nemo-rl-0.5"].engine
    assert own.engine.max_num_seqs == 64
    assert scenario().training == TrainingConfig()


def test_a_scenario_with_presets_is_itself_again_from_its_own_dump():
    filled = scenario(framework="verl-fsdp-0.5")
    assert Scenario.model_validate(filled.model_dump()) == filled


def test_an_engine_s_preset_gives_the_host_s_times_unless_the_scenario_does():
    constant = ENGINES["vllm-2025-rl"].constants["between_passes_s"].value
    assert pause_s(engine={"preset": "vllm-2025-rl"}) == constant
    assert pause_s(engine={"preset": "vllm-2025-rl"}, profile={**SCENARIO["profile"], "between_passes_s": 0.5}) == 0.5


def test_a_profile_of_kernels_has_the_usual_engine_s_pause_where_none_is_named():
    prepared = prepare(scenario())
    assert prepared.profile.tables.between_passes_s == ENGINES["vllm-0.19"].constants["between_passes_s"].value
    assert "engine vllm-0.19" in " ".join(prepared.profile.corrections)


def test_without_cuda_graphs_no_pass_is_shorter_than_its_launches():
    least_s = prepare(scenario(engine={"preset": "vllm-0.19", "enforce_eager": True})).profile.tables.least_pass_s
    assert least_s == pytest.approx(36 * ENGINES["vllm-0.19"].constants["layer_launch_s"].value)


def test_every_constant_has_a_source_and_a_value_within_its_range_and_is_a_field_that_exists():
    for preset in (*ENGINES.values(), *FRAMEWORKS.values()):
        for key, constant in preset.constants.items():
            assert len(constant.source) > 10 or constant.source == "strategy: fsdp", key
            if constant.low is not None:
                assert constant.low <= constant.value <= constant.high, key
    for preset in FRAMEWORKS.values():
        assert set(preset.constants) <= set(TrainingConfig.model_fields)
        assert preset.engine in ENGINES
        TrainingConfig.model_validate({key: constant.value for key, constant in preset.constants.items()})
    of_passes = {"between_passes_s", "sequence_overhead_s", "layer_launch_s"}
    assert all(set(preset.constants) <= of_passes | set(OF_ENGINE) for preset in ENGINES.values())


def test_every_result_names_the_constants_it_used_their_ranges_and_whose_they_are():
    metadata = prepare(scenario(framework="verl-fsdp-0.5")).inputs()
    lines = provenance([metadata])
    assert any("verl-fsdp-0.5: training.switch_s=0.5 (0.4 to 0.6)" in line for line in lines)
    assert any("vllm-2025-rl: profile.between_passes_s=0.005 (0.001 to 0.006)" in line for line in lines)
    assert not any("switch_s=2" in line for line in lines)
    row = next(entry for entry in inputs(metadata) if entry.name == "training.switch_s")
    assert (row.kind, row.source.partition(":")[0]) == ("measured", "verl-fsdp-0.5")


def test_a_value_of_the_scenario_s_own_is_no_constant_of_a_preset():
    dump = scenario(framework="verl-fsdp-0.5", training={"switch_s": 3.0}).model_dump()
    assert "training.switch_s" not in {used.key for used in constants(dump, "derived")}


def test_varied_frameworks_each_give_their_own_fields(tmp_path):
    data = {key: value for key, value in SCENARIO.items() if key != "system"}
    names = list(FRAMEWORKS)
    file = {**data, "systems": ["verl_colocated"], "vary": [{"framework": name} for name in names]}
    found = ScenarioFile(tmp_path / "scenario.yaml", data=file).scenarios()
    assert [one.training.kernels for one in found] == [FRAMEWORKS[n].constants["kernels"].value for n in names]


@pytest.mark.parametrize("key", ["framework", "engine.preset"])
def test_an_unknown_preset_is_refused_in_a_line_that_names_those_there_are(tmp_path, key):
    path = tmp_path / "scenario.yaml"
    path.write_text("name: x\nsteps: 1\nsystems: [split]\n")
    with pytest.raises(InputError, match=rf"{key} is 'vlm-0.19'.*; there are"):
        load_scenarios(path, [f"{key}=vlm-0.19", "model=qwen3-8b"])
