"""Every number, text and list that a user may write has a bound: the keys of all models, the
parameters of all systems, the options of all commands."""

import importlib
import inspect
import math
import os
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from pydantic import TypeAdapter

import simrl
from simrl.commands import cli
from simrl.commands.command import Command
from simrl.errors import InputError
from simrl.files import MOST_COLUMNS, read_parquet
from simrl.profile.profile import read_profile
from simrl.profile.shipped import PROFILES
from simrl.scenario.load import ScenarioFile, Setting
from simrl.scenario.model import Scenario, SystemConfig
from simrl.speculation.methods import METHODS
from simrl.systems.recipes import RECIPES, recipe_parameters
from simrl.trace.trace import Trace, TraceMetadata
from simrl.validation import LONGEST_TEXT, Model, models_in
from tests.command_line import ROOT, SCENARIO

LONG = "x" * 200_000


def models():
    """Every model of data in simrl."""
    for module in pkgutil.walk_packages(simrl.__path__, "simrl."):
        importlib.import_module(module.name)
    kinds = list(Model.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in dict.fromkeys(kinds) if kind.__module__.startswith("simrl.")]


def numbers_and_texts(schema: Any, place: str):
    """Yield the place, the kind and the schema of every number, text and list in a JSON schema."""
    if isinstance(schema, list):
        for i, inner in enumerate(schema):
            yield from numbers_and_texts(inner, f"{place}[{i}]")
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str) and not {"enum", "const"} & schema.keys():
            yield place, schema["type"], schema
        for key in schema.keys() - {"default", "examples", "enum", "const"}:
            yield from numbers_and_texts(schema[key], f"{place}.{key}")


def unbounded(schema: Any, name: str, kinds: tuple[str, ...]) -> list[str]:
    """Return the places where a value of one of these kinds has no bound."""
    most = {"string": "maxLength", "array": "maxItems"}
    unbounded = []
    for place, kind, inner in numbers_and_texts(schema, name):
        if kind in most and kind in kinds and most[kind] not in inner:
            unbounded.append(place)
        low = inner.get("minimum", inner.get("exclusiveMinimum", -math.inf))
        high = inner.get("maximum", inner.get("exclusiveMaximum", math.inf))
        if kind in ("integer", "number") and not math.isfinite(high - low):
            unbounded.append(place)
    return unbounded


def test_every_key_of_every_model_has_a_bound():
    places = []
    for model in models():
        places += unbounded(model.model_json_schema(), model.__name__, ("string", "array"))
    assert places == []
    assert len(models()) > 70


def test_a_key_without_a_bound_of_its_own_would_be_seen():
    assert unbounded(TypeAdapter(dict[str, float]).json_schema(), "x", ()) == [
        "x.additionalProperties"
    ]
    assert unbounded(TypeAdapter(list[str]).json_schema(), "x", ("array", "string")) == [
        "x",
        "x.items",
    ]


@pytest.mark.parametrize("name", [*RECIPES.own, *METHODS.own])
def test_every_number_of_a_system_and_of_a_method_has_a_bound(name):
    """Texts and lists of them are values of a `SystemConfig`, which bounds every value."""
    parameters = (
        recipe_parameters(name)
        if name in RECIPES
        else inspect.signature(inspect.unwrap(METHODS[name]), eval_str=True).parameters
    )
    for key, parameter in parameters.items():
        schema = TypeAdapter(parameter.annotation).json_schema()
        assert unbounded(schema, f"{name}.{key}", ()) == []


@pytest.mark.parametrize("value", [10**20, 1e19, math.nan, math.inf, LONG, [10**20], {"a": LONG}])
def test_a_parameter_of_any_system_is_bounded_before_the_system_sees_it(value):
    with pytest.raises(ValueError, match=r"give|at most"):
        SystemConfig(name="of_a_package", parameter=value)


def options():
    """Every command with each of its options that takes a value."""

    def below(command, path):
        if isinstance(command, Command):
            for parameter in command.params:
                if not getattr(parameter, "is_flag", False):
                    yield path, command, parameter
        for name, inner in getattr(command, "commands", {}).items():
            yield from below(inner, (*path, name))

    return list(below(typer.main.get_command(cli.make_app()), ()))


def test_every_number_of_every_option_has_a_bound():
    """An option, alone and with the rest of its command left to its defaults, is parsed or refused."""
    numbers = 0
    for path, command, option in options():
        if not any(word in str(option.type_descriptor) for word in ("int", "float")):
            continue
        numbers += 1
        required = [
            word
            for other in command.params
            if other.required and other is not option
            for word in ([other.opts[0]] * (other.opts[0].startswith("--")) + ["1"])
        ]
        value = [option.opts[0]] * (option.opts[0].startswith("--")) + ["1" + "0" * 20]
        with pytest.raises((InputError, cli.UsageError)) as refused:
            command.make_context(" ".join(path), [*value, *required])
        assert re.search(r"or less|less than", str(refused.value)), (path, option.name)
    assert numbers > 60


def test_every_command_bounds_its_texts(simrl):
    for path, _, option in options():
        if option.opts[0].startswith("--"):
            code, _, err = simrl(*path, option.opts[0], LONG)
            assert (code, err.count("\n"), len(err) < 3000) == (2, 1, True), (path, option.name)


def keys(model, prefix=""):
    """Every dotted key of a model, and of the models in it."""
    for key, field in model.model_fields.items():
        yield prefix + key
        for inner in models_in(field.annotation):
            yield from keys(inner, f"{prefix}{key}.")


VALUES = (0, -1, 1e308, 10**20, math.nan, math.inf, "", LONG, None, [], {}, [10**20], True, 5e-324)


def test_a_scenario_with_any_value_for_any_key_is_read_or_refused_in_a_line(tmp_path):
    """A sample of the pairs of a key and a value, each key with two values."""
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    known = dict.fromkeys(key for key in keys(Scenario) if key not in ("file", "system", "variant"))
    assert len(known) > 400
    for i, key in enumerate(known):
        for value in (VALUES[i % len(VALUES)], VALUES[(5 * i + 3) % len(VALUES)]):
            try:
                ScenarioFile(path, [Setting(key, value, "test")]).scenarios()
            except InputError as error:
                assert "\n" not in str(error)
                assert len(str(error)) <= 2000


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("engine.max_num_seqs=100000000000000000000", "engine.max_num_seqs is 10+: give 16777216"),
        ("training.extra_log_probs=9000000000000000000", "extra_log_probs is 90+: give 1000000000"),
        ("cluster.sheet=7", "cluster.sheet is 7"),
    ],
)
def test_a_value_beyond_its_bound_is_refused_with_the_bound(simrl, setting, message):
    code, _, err = simrl("run", "scenario.yaml", "--system", "areal", setting)
    assert code == 2
    assert re.search(message, err)


def test_a_cap_beyond_its_bound_is_refused_in_a_line(simrl):
    code, _, err = simrl(
        "trace", "import", "verl", "x.csv", "-o", "x.parquet", "--cap-tokens", "9" * 14
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "--cap-tokens" in err
    assert "2147483647 or less" in err


def test_a_table_with_thousands_of_columns_is_refused_before_it_is_read(tmp_path):
    columns = {f"c{i}": [i] for i in range(MOST_COLUMNS + 1)}
    pq.write_table(pa.table(columns), tmp_path / "wide.parquet")
    with pytest.raises(InputError, match="1,001 columns; at most 1000 are read"):
        read_parquet(tmp_path / "wide.parquet")


def trace(**metadata):
    columns = {
        "step": [0, 0],
        "epoch": [0, 0],
        "prompt_id": [0, 1],
        "sample": [0, 0],
        "prompt_tokens": [9, 5],
        "response_tokens": [3, 4],
    }
    facts = {"name": "t", "kind": "recorded", "source": "test", "tokenizer": "none"}
    return Trace.from_columns(columns, TraceMetadata(**facts, cap_tokens=10, **metadata))


@pytest.mark.parametrize(
    ("key", "value", "row"),
    [
        ("shared_prefix_tokens", 10**9, 0),
        ("shared_prefix_tokens", 6, 1),
        ("context_cap_tokens", 9, 0),
    ],
)
def test_the_metadata_of_a_trace_agree_with_its_rows(key, value, row):
    with pytest.raises(
        InputError, match=f"row {row}, column 'prompt_tokens' is .* {key} is {value}"
    ):
        trace(**{key: value})


def test_metadata_that_fit_the_shortest_and_the_longest_prompt_are_read():
    assert len(trace(shared_prefix_tokens=5, context_cap_tokens=10)) == 2


def test_a_text_of_metadata_is_bounded():
    with pytest.raises(ValueError, match=f"at most {LONGEST_TEXT} characters"):
        trace(notes=LONG)


@pytest.mark.parametrize("name", [None, ""])
def test_a_row_of_a_profile_without_a_table_is_refused(tmp_path, name):
    table = pq.read_table(next(PROFILES.glob("qwen3-0.6b*")))
    names = table.column("table").to_pylist()
    column = pa.array([*names[:3], name, *names[4:]], pa.string())
    changed = table.set_column(table.column_names.index("table"), "table", column)
    pq.write_table(changed, tmp_path / "profile.parquet")
    with pytest.raises(InputError, match=f"row 3 has the unknown table {name!r}"):
        read_profile(tmp_path / "profile.parquet")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "scenario.yaml", "--system", "areal", "systems=[split]"),
        ("run", "scenario.yaml", "--system", "areal", "--system", "split"),
        ("run", "scenario.yaml", "--system", "areal", "--dispatch", "seer", "dispatch=even_split"),
        ("compare", "scenario.yaml", "--dispatch", "seer", "dispatch=even_split"),
        ("compare", "scenario.yaml", "--pipeline", "areal", "systems=[split]"),
        ("compare", "scenario.yaml", "--speculation", "none", "system.speculation=histospec"),
        ("compare", "scenario.yaml", "--seed", "3", "seed=4"),
        ("compare", "scenario.yaml", "--seed=3", "--seed=4"),
    ],
)
def test_two_values_for_one_choice_are_refused(simrl, arguments):
    code, _, err = simrl(*arguments)
    assert code == 2
    assert re.search("give one of them|give it once", err)


def test_limits_of_agents_are_said_to_be_without_effect_for_single_responses(simrl):
    settings = ("agents.tool_slots=3", "agents.max_concurrent=4")
    _, out, _ = simrl("run", "scenario.yaml", "--system", "areal", *settings, "--inputs")
    words = "Without effect: agents.tool_slots (responses have one turn)"
    assert words in " ".join(out.split())


def test_a_run_has_equal_bytes_without_docstrings(tmp_path):
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    runs = {}
    for flags in ((), ("-OO",)):
        folder = tmp_path / f"run{len(flags)}"
        words = ["run", "scenario.yaml", "--system", "areal", "--output", str(folder)]
        subprocess.run(
            [sys.executable, *flags, "-m", "simrl.commands.cli", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            timeout=120,
        )
        runs[flags] = {
            file.name: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
        }
    assert len(runs[()]) > 3
    assert runs[()] == runs["-OO",]
