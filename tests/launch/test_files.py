"""The files of `simrl init`: a scenario that says where its values are from, and its keys."""

import csv
from dataclasses import replace

import pytest
import yaml

from simrl.errors import InputError
from simrl.launch.files import write_scenario
from simrl.launch.fit import fit
from simrl.scenario.load import load_scenarios
from tests.launch.reading import COMPLETE, translation


@pytest.fixture
def made(tmp_path):
    one = translation(tmp_path, f"{COMPLETE} 'my.key=a, \"b\"' trainer.project_name=x")
    fit(one)
    return one


def test_the_scenario_is_the_data_of_the_translation(tmp_path, made):
    path, _ = write_scenario(tmp_path / "a.yaml", made, "heading")
    assert yaml.safe_load(path.read_text()) == made.data
    assert [one.system.name for one in load_scenarios(path)] == [
        one["name"] for one in made.data["systems"]
    ]


def test_the_heading_is_a_comment_of_any_text(tmp_path, made):
    path, _ = write_scenario(tmp_path / "a.yaml", made, "one\nname: other\u2028x: 1\rz: 2")
    assert yaml.safe_load(path.read_text()) == made.data
    assert path.read_text().startswith("# one\n# name: other\n")


def test_a_value_says_which_key_it_is_from_or_that_it_is_assumed(tmp_path, made):
    path, _ = write_scenario(tmp_path / "a.yaml", made, "")
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert "cap_tokens: 1024  # data.max_response_length" in lines
    assert "gpu: h100  # assumed; give --gpu NAME" in lines


def test_a_changed_value_is_said_to_be_assumed(tmp_path, made):
    changed = replace(made, sources={**made.sources, "cluster.gpu": "a.key"})
    path, _ = write_scenario(tmp_path / "a.yaml", changed, "")
    assert "gpu: h100  # assumed; give --gpu NAME" in path.read_text()


@pytest.mark.parametrize(
    "value",
    ["a: b", "# no comment", "'", '"', "null", "true", "1e3", "", "ü", "- a", "{a}", "a\tb"],
)
def test_a_text_stays_a_text(tmp_path, made, value):
    made.data = {**made.data, "cluster": {**made.data["cluster"], "gpu": value}}
    path, _ = write_scenario(tmp_path / "a.yaml", made, "")
    assert yaml.safe_load(path.read_text())["cluster"]["gpu"] == value


def test_a_text_of_lines_stays_a_text(tmp_path, made):
    made.data = {**made.data, "workload": {"synthetic": {"x": {"y": "a\n\nb: 1"}}}}
    path, _ = write_scenario(tmp_path / "a.yaml", made, "")
    assert yaml.safe_load(path.read_text()) == made.data


def test_the_keys_are_a_table_of_the_three_lists(tmp_path, made):
    _, lists = write_scenario(tmp_path / "a.yaml", made, "")
    assert lists == tmp_path / "a.keys.csv"
    with lists.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row.values()) for row in rows] == [tuple(key) for key in made.keys]
    assert {row["list"] for row in rows} == {"understood", "without effect here", "not understood"}
    assert next(row for row in rows if row["key"] == "my.key")["value"] == 'a, "b"'


def test_without_keys_there_is_no_table(tmp_path, made):
    made.keys = []
    assert write_scenario(tmp_path / "a.yaml", made, "") == [tmp_path / "a.yaml"]


@pytest.mark.parametrize("name", ["a.yaml", "a.keys.csv"])
def test_no_file_is_replaced_and_none_is_written_where_one_is_there(tmp_path, made, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"{name}: is there already; name another with -o"):
        write_scenario(tmp_path / "a.yaml", made, "")
    assert (tmp_path / name).read_text() == "mine"
    assert len(list(tmp_path.glob("a.*"))) == 1


def test_a_link_that_leads_nowhere_is_not_replaced(tmp_path, made):
    (tmp_path / "a.yaml").symlink_to("nowhere")
    with pytest.raises(InputError, match="is there already"):
        write_scenario(tmp_path / "a.yaml", made, "")
