"""Settings of frameworks: data that name the fields of a scenario, and what is written behind a key."""

from types import SimpleNamespace

import pytest

from simrl.scenario.model import Scenario
from simrl.study.launch import Setting, _templates
from simrl.systems.recipes import RECIPES, parameters_of
from simrl.trace.synthesis import LengthModel


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
