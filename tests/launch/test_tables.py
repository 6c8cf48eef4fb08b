"""The tables of frameworks: every key that a table reads changes a scenario, and every field that a
table sets changes the seconds of a run. Exceptions are in launches.toml, with the reason."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simrl.launch.expression import evaluated
from simrl.launch.settings import Launch
from simrl.launch.tables import TABLES, Table
from simrl.launch.translate import _Reader, translate
from simrl.scenario.dotted import put
from simrl.scenario.load import NAMES, ScenarioFile
from simrl.scenario.yaml_text import parse_override
from simrl.simulate.run import simulate
from simrl.systems.recipes import parameters_of
from simrl.trace.synthesis import LengthModel

DATA = tomllib.loads(Path(__file__).with_name("launches.toml").read_text(encoding="utf-8"))
KINDS = {table.name: table for table in TABLES}
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
FIELDS = sorted({field for table in TABLES for field in table.fields})


def expressions(table: Table) -> Iterator[str]:
    """Yield what sets a field, chooses a system or sets one of its parameters."""
    yield from table.fields.values()
    for rule in table.systems:
        yield from (rule.when, *rule.parameters.values())


def names_in(expression: str) -> set[str]:
    """Return the whole names in an expression, without functions and parts of names."""
    names, rest = set(), [ast.parse(expression.strip(), mode="eval").body]
    while rest:
        match rest.pop():
            case ast.Call(args=arguments):
                rest += arguments
            case ast.Name() | ast.Attribute() as name:
                names.add(ast.unparse(name))
            case node:
                rest += ast.iter_child_nodes(node)
    return names


def parts(table: Table, expression: str) -> Iterator[str]:
    """Yield an expression, and the ones that its names stand for in the table."""
    yield expression
    for name in names_in(expression) & table.let.keys():
        yield from parts(table, table.let[name])


@cache
def readers(name: str) -> dict[str, list[str]]:
    """Return by key the expressions that read it."""
    table = KINDS[name]
    by_key: dict[str, list[str]] = {}
    for expression in dict.fromkeys(expressions(table)):
        keys = {key for part in parts(table, expression) for key in names_in(part)}
        for key in keys - table.let.keys():
            by_key.setdefault(key, []).append(expression)
    return by_key


@cache
def compared(name: str, key: str) -> list[Any]:
    """Return what the expressions that read a key compare with; of a regex its words."""
    table, values = KINDS[name], []
    for text in {part for one in readers(name)[key] for part in parts(table, one)}:
        for node in ast.walk(ast.parse(text.strip(), mode="eval")):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                values += re.findall(r"[\w.-]+", node.value)
            elif isinstance(node, ast.Constant) and node.value is not None:
                values.append(node.value)
    return sorted(set(values), key=str)


def other_values(table: Table, key: str, value: Any) -> list[Any]:
    """Return sensible values of a key beside one: the other switch, more and less of a number, what
    the table compares with."""
    if (by_hand := DATA[table.name].get("values", {}).get(key)) is not None:
        return [None if one == "null" else one for one in by_hand]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 or 8, value // 2 if isinstance(value, int) else value / 2, 0]
    if isinstance(value, str):
        return [
            *(one for one in compared(table.name, key) if isinstance(one, str)),
            "other-32b",
            None,
        ]
    return [2, 4096, 0.5, True, False, *compared(table.name, key)]


@cache
def settings(name: str, launch: int) -> dict[str, Any]:
    return dict(parse_override(word) for word in DATA[name]["launches"][launch].split())


def data(table: Table, values: dict[str, Any]) -> dict[str, Any]:
    return translate(Launch(Path("run"), table, values), {}).data


@cache
def plain_data(name: str, launch: int) -> dict[str, Any]:
    return data(KINDS[name], settings(name, launch))


def reader(table: Table, values: dict[str, Any]) -> _Reader:
    return _Reader(Launch(Path("run"), table, values), table.version, {})


def moves(table: Table, key: str) -> bool:
    """Return whether, in a launch of the framework, another value of a key makes another
    scenario."""
    for launch in range(len(DATA[table.name]["launches"])):
        plain = settings(table.name, launch)
        now = reader(table, plain)
        before = [evaluated(text, now) for text in readers(table.name)[key]]
        for value in other_values(table, key, plain.get(key, now.default(key))):
            changed = {**plain, key: value}
            then = reader(table, changed)
            after = [evaluated(text, then) for text in readers(table.name)[key]]
            if before != after and plain_data(table.name, launch) != data(table, changed):
                return True
    return False


@every_table
def test_every_key_that_a_table_reads_changes_a_scenario_or_is_said_not_to(table):
    still = DATA[table.name].get("still", {})
    unmoved = {key for key in readers(table.name) if not moves(table, key)}
    assert unmoved == still.keys()  # these alone
    assert all(still.values())


RUN = DATA["run"]


def seconds(changes: dict[str, Any]) -> float:
    """Return the seconds of a tiny run."""
    scenario: dict[str, Any] = {"name": "run"}
    for key, value in {**RUN["scenario"], **changes}.items():
        value = None if value == "null" else value
        if key.startswith("system."):
            scenario["systems"] = [{**scenario["systems"][0], key.removeprefix("system."): value}]
        else:
            scenario = put(scenario, key, value)
    result = simulate(ScenarioFile(Path("run"), (), scenario).scenarios()[0])
    return float(result.steps["finished_s"][-1].as_py())


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in RUN["still"]])
def test_every_field_that_a_table_sets_changes_the_seconds_of_a_run(field):
    about = RUN["fields"][field]
    first, second = (seconds({**about.get("with", {}), field: one}) for one in about["values"])
    assert first != second


def test_the_fields_that_change_no_second_are_said_to_and_only_they():
    assert RUN["still"].keys() | RUN["fields"].keys() == set(FIELDS)
    assert all(RUN["still"].values())


POOL_NAMES = {"cluster.train.gpus", "cluster.prefill.gpus", "cluster.prefill.tp"}
FIELD_NAMES = {*NAMES, *(f"workload.synthetic.{name}" for name in LengthModel.model_fields)}


@every_table
def test_every_field_of_a_table_is_a_field_of_a_scenario_or_a_parameter_of_its_systems(table):
    of_systems = {f"system.{key}" for rule in table.systems for key in parameters_of(rule.name)}
    assert table.fields.keys() <= FIELD_NAMES | POOL_NAMES | of_systems
    for rule in table.systems:
        assert rule.parameters.keys() <= parameters_of(rule.name).keys(), rule.name


@every_table
def test_every_expression_of_a_table_parses_and_gives_a_value_or_none(table):
    nothing = reader(table, {})
    for text in (*expressions(table), *table.let.values(), *(note.when for note in table.notes)):
        evaluated(text, nothing)


@every_table
def test_a_default_is_of_one_kind_whatever_the_release_and_a_reason_is_given(table):
    for key, default in table.defaults.items():
        by_release = default if isinstance(default, dict) else {table.version: default}
        assert all(re.fullmatch(r"[\d.]+", release) for release in by_release) or not isinstance(
            default, dict
        )
        assert len({type(value) for value in by_release.values()}) == 1, key
        assert isinstance(next(iter(by_release.values())), bool | int | float | str | list), key
    assert all(why.strip() for why in table.no_effect.values())
    assert all(note.note.strip() for note in table.notes)


@every_table
def test_the_defaults_of_a_framework_make_a_scenario(table):
    assert ScenarioFile(Path("run"), (), data(table, {})).scenarios()
