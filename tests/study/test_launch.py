"""Settings of frameworks: data that name the fields of a scenario, and what is written behind a key."""

from types import SimpleNamespace

import pytest

from simrl.launch.settings import read_launch
from simrl.launch.translate import translate
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import prepare
from simrl.study.launch import Launch, Setting, _templates, launch
from simrl.systems.recipes import RECIPES, parameters_of
from simrl.trace.synthesis import LengthModel
from tests.helpers import on_gpus


def test_every_setting_of_a_framework_that_names_a_field_names_one_that_a_scenario_has():
    parameters = {key for name in RECIPES for key in parameters_of(name)}
    fields = {
        field
        for _, settings in _templates().values()
        for setting in settings.values()
        if (field := setting.field)
    }
    assert {"cluster.tp", "system.eta", "workload.synthetic.group"} <= fields
    for field in fields:
        section, _, key = field.rpartition(".")
        if section == "system":
            assert key in parameters, field
        elif section == "workload.synthetic":
            assert key in LengthModel.model_fields, field
        else:
            assert key in Scenario.model_fields[section].annotation.model_fields, field


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (Setting(field="cluster.tp"), "2"),
        (Setting(field="cluster.dp", unless=1), None),
        (Setting(field="training.microbatching", values={"dynamic": "True"}), "True"),
        (Setting(field="training.sharding", values={"none": "off"}), None),
        (Setting(value="d{workers}"), "d7"),
        (Setting(value="{nothing}"), None),
    ],
)
def test_a_setting_is_its_field_or_its_template_and_left_out_where_there_is_nothing_to_say(
    setting, text
):
    scenario = SimpleNamespace(
        cluster=SimpleNamespace(tp=2, dp=1),
        training=SimpleNamespace(microbatching="dynamic", sharding="fsdp"),
    )
    assert setting.text({"scenario": scenario, "workers": 7, "nothing": None}) == text


@pytest.mark.parametrize(
    "name",
    [
        "verl_v1_sync",
        "verl_v1_colocate_async",
        "verl_v1_separate_async",
        "slime_train_async",
        "slime_fully_async",
    ],
)
def test_the_settings_of_todays_trainers_are_read_back_as_their_system(name, tmp_path):
    made = launch(prepare(on_gpus(name, {}, 8, train_gpus=8)))
    assert isinstance(made, Launch)
    script = tmp_path / "run.sh"
    script.write_text(" \\\n  ".join(made.command) + "\n", encoding="utf-8")
    [first, *_] = translate(read_launch(script), {}).data["systems"]
    assert first["name"] == name
