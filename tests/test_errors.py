"""Names that nobody knows: the message has the one that may have been meant."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from inspect import signature
from itertools import product

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

import simrl
from simrl.errors import LONGEST_LINE, LONGEST_WORD, InputError, meant, refuse
from simrl.speculation.methods import METHODS, make_speculation
from simrl.systems.recipes import RECIPES, make_system
from simrl.validation import explain

SYSTEMS = ("verl_colocated", "verl_ngram", "one_step_off", "areal", "rhymerl")


@pytest.mark.parametrize(
    ("written", "known", "near"),
    [
        ("arael", SYSTEMS, " (did you mean areal?)"),
        ("gpsu", ("gpu", "gpus"), " (did you mean gpu?)"),
        ("One-Step-Off", SYSTEMS, " (did you mean one_step_off?)"),
        ("verl", SYSTEMS, " (did you mean verl_colocated or verl_ngram?)"),
        ("gpus", ("seed", "cluster.gpu", "cluster.gpus"), " (did you mean cluster.gpus?)"),
        ("clutser.gpus", ("cluster.gpus",), " (did you mean cluster.gpus?)"),
        (3, SYSTEMS, ""),
        ("", SYSTEMS, ""),
        ("spaceship", SYSTEMS, ""),
        ("a" * 10**6, SYSTEMS, ""),
        ("areal", (), ""),
    ],
)
def test_a_name_is_followed_by_the_one_that_is_near(written, known, near):
    assert meant(written, known) == near


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["compare", "scenario.yaml", "systems=[areall]"],
            "system 'areall' is unknown (did you mean areal?); simrl systems lists all",
        ),
        (
            ["compare", "scenario.yaml", "systems=[verl]"],
            "system 'verl' is unknown (did you mean verl_colocated or ",
        ),
        (
            ["systems", "show", "rhimerl"],
            "system 'rhimerl' is unknown (did you mean rhymerl?); simrl systems lists all",
        ),
        (
            ["compare", "scenario.yaml", "systems=[{name: areal, etta: 3}]"],
            "parameter 'etta' (did you mean eta?); it has",
        ),
        (
            ["compare", "scenario.yaml", "cluster.gpu=H-100"],
            "gpu 'H-100' is unknown (did you mean h100?): simrl has no data sheet of it",
        ),
        (
            ["compare", "scenario.yaml", "cluster.gpu=h10O"],
            "gpu 'h10O' is unknown (did you mean h100?): simrl has no data sheet of it",
        ),
        (
            ["compare", "scenario.yaml", "cluster.eq=2"],
            "unknown key cluster.eq (did you mean ep?); cluster has",
        ),
        (
            ["compare", "scenario.yaml", "model=Qwen/Qwen3_8B"],
            "model Qwen/Qwen3_8B: no known name, nor a config.json (did you mean qwen3-8b?); simrl profile names",
        ),
        (
            ["compare", "scenario.yaml", "model=./nowhere/config.json"],
            "nowhere/config.json: no such file; name a model's config.json, or one of simrl profile names",
        ),
        (
            ["compare", "scenario.yaml", "gpus=8"],
            "unknown key gpus (did you mean cluster.gpus?); a scenario has",
        ),
        (
            ["compare", "scenario.yaml", "mfu=0.3"],
            "unknown key mfu (did you mean training.mfu?); a scenario has",
        ),
        (
            ["compare", "scenario.yaml", "cluster.gups=8"],
            "unknown key cluster.gups (did you mean gpus?); cluster has",
        ),
        (
            ["compare", "scenario.yaml", "training.microbatching=dinamic"],
            "training.microbatching is 'dinamic' (did you mean dynamic?): choose",
        ),
        (
            ["compare", "scenario.yaml", "systems=[{name: areal, on_stale: dorp}]"],
            "on_stale is 'dorp' (did you mean drop?): choose",
        ),
        (
            ["compare", "scenario.yaml", "--speculation", "histo_spec"],
            "'histo_spec' (did you mean histospec?); simrl speculation lists",
        ),
        (
            ["sweep", "scenario.yaml", "system.eat=1,2"],
            "system.eat: no parameter of these systems (did you mean eta?)",
        ),
        (
            ["sweep", "scenario.yaml", "seed=1,2", "--zip", "sead,seed"],
            "or no longer (did you mean seed?); there are seed",
        ),
        (
            ["trace", "synth", "--preset", "rhymerl_math", "-o", "t.parquet"],
            "unknown (did you mean rhymerl-math?)",
        ),
    ],
)
def test_what_may_have_been_meant_is_told(simrl, arguments, what):
    assert what in simrl.refuses(*arguments)


def test_a_percentage_in_place_of_a_share_is_told_as_a_share(simrl):
    refused = simrl.refuses(
        "compare", "scenario.yaml", "systems=[{name: split, rollout_share: 75}]"
    )
    assert "rollout_share is 75: a share between 0 and 1; did you mean 0.75?" in refused
    refused = simrl.refuses("compare", "scenario.yaml", "training.mfu=35")
    assert "training.mfu is 35: a share between 0 and 1; did you mean 0.35?" in refused
    refused = simrl.refuses("compare", "scenario.yaml", "profile.sequence_overhead_s=35")
    assert "sequence_overhead_s is 35: give 1 or less (seconds)" in refused, "they are no share"


def test_a_setting_of_the_engine_that_is_said_in_another_section_is_told_with_its_place(simrl):
    assert "it is engine.max_num_seqs: 64" in simrl.refuses(
        "compare", "scenario.yaml", "engine.max_running_requests=64"
    )
    assert "it is cluster.tp" in simrl.refuses(
        "compare", "scenario.yaml", "engine.tensor_parallel_size=2"
    )


def test_a_message_is_one_line_whatever_is_in_it():
    assert str(InputError("a\nb\x1b[31m")) == "a b\\x1b[31m"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["advise", "scenario.yaml", "--max-off-policyness", "nan"],
            "invalid value for '--max-off-policyness': ",
        ),
        (["advise", "scenario.yaml", "--trials", "few"], "invalid value for '--trials': "),
        (["compare", "scenario.yaml", "--jbos", "3"], "no such option: --jbos"),
        (["compare"], "missing argument 'SCENARIO'"),
        (["advice", "scenario.yaml"], "no such command 'advice'. Did you mean 'advise'?\n"),
    ],
)
def test_a_command_that_is_written_wrongly_is_told_in_a_line(simrl, arguments, what):
    assert what in simrl.refuses(*arguments)


def test_a_group_without_a_command_shows_its_help(simrl):
    ended = simrl("trace")
    assert ended.code == 2 and "import" in ended.out + ended.err
    assert simrl("trace", "--help").code == 0


@pytest.mark.parametrize(
    "setting",
    [
        "engine.block_size=true",
        "training.mfu=true",
        "training.publish_s=false",
        "workload.synthetic.group=true",
        "agents.max_concurrent=true",
        "cluster.gpus=true",
    ],
)
def test_a_switch_is_no_number(simrl, setting):
    line = simrl.refuses("compare", "scenario.yaml", setting)
    assert "is no switch" in line


def test_switches_stay_switches(simrl):
    assert (
        simrl(
            "run", "scenario.yaml", "--system", "areal", "engine.enforce_eager=true", "-o", "out"
        ).code
        == 0
    )


def test_a_long_value_loses_its_middle_in_a_message(simrl):
    line = simrl.refuses("compare", "scenario.yaml", f"model={'m' * 5000}end")
    assert "mmm…mmm" in line and "end" in line and len(line) < LONGEST_LINE
    line = simrl.refuses("compare", "scenario.yaml", f"model={'m ' * 5000}end")
    assert len(line) < LONGEST_LINE + len("simrl: \n") + 1
    assert (
        simrl.refuses("compare", "scenario.yaml", "--gpus", "9" * 5000 + "x").count("9")
        < LONGEST_WORD
    )


def test_a_message_of_usual_words_is_told_whole():
    words = " ".join(["w" * LONGEST_WORD] * 9)
    assert str(InputError(words)) == words


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cluster.gpus=1000000", "cluster.gpus is 1000000: give 262144 or less"),
        ("steps=10000000000000000000", "steps is 10000000000000000000"),
        ("steps=1000001", "steps is 1000001: give 1000000 or less"),
    ],
)
def test_a_run_that_nobody_has_is_refused(simrl, setting, said):
    assert said in simrl.refuses("compare", "scenario.yaml", setting)


def test_more_samples_than_a_run_can_hold_are_refused(simrl):
    line = simrl.refuses(
        "compare", "scenario.yaml", "steps=1000000", "workload.synthetic.prompts_per_step=200"
    )
    assert "steps 1,000,000 of 400 samples are 400,000,000 samples; stay under 100,000,000" in line


WRONG = (
    None,
    "12k",
    "x" * 300,
    "",
    -1,
    1e30,
    10**40,
    4.5,
    float("nan"),
    True,
    [],
    [1, 2, 3],
    [{}],
    {},
    {"x": 1},
    {1: 2},
)
OBJECTS = ("dict_type", "model_type", "model_attributes_type", "dataclass_type", "mapping_type")
PYDANTIC = re.compile(
    r"[Ii]nput should|unable to parse|[Vv]alue error|[Ff]ield required|Extra inputs|Unable to extract|pydantic"
)


def models() -> list[type[BaseModel]]:
    """Every model of the package."""
    for module in pkgutil.walk_packages(simrl.__path__, "simrl."):
        importlib.import_module(module.name)
    found, left = [], [BaseModel]
    while left:
        found += (below := left.pop().__subclasses__())
        left += below
    return [each for each in found if each.__module__.startswith("simrl.")]


def refused(error: ValidationError) -> Iterator[tuple[ErrorDetails, ValidationError]]:
    """Yield each finding, and an error of it alone."""
    for each in error.errors():
        line = {key: each[key] for key in ("type", "loc", "input", "ctx") if key in each}
        yield each, ValidationError.from_exception_data("one", [line])


def test_no_sentence_of_pydantics_is_left_whatever_is_wrong_with_a_model() -> None:
    kinds = set()
    for model in models():
        for field, value in product(model.model_fields, WRONG):
            try:
                model.model_validate({field: value})
            except ValidationError as error:
                for finding, alone in refused(error):
                    kinds.add(finding["type"])
                    line = explain(alone, model, "the data")[1]
                    assert not PYDANTIC.search(line), line
                    assert "an object with keys" not in line or finding["type"] in OBJECTS, line
            except (
                InputError,
                TypeError,
            ):  # a validator's own, and a field that is none of a mapping
                continue
    assert {
        "int_parsing",
        "float_type",
        "literal_error",
        "greater_than",
        "string_type",
        "missing",
        "too_short",
    } <= kinds


def test_no_sentence_of_pydantics_is_left_whatever_is_wrong_with_a_parameter_of_a_system_or_a_method() -> (
    None
):
    for make, names in (
        (make_system, RECIPES),
        (lambda n, p: make_speculation({"name": n, **p}), METHODS),
    ):
        for name in names:
            of_function = signature(RECIPES[name] if names is RECIPES else METHODS[name]).parameters
            for key, value in product(of_function, WRONG):
                try:
                    make(name, {key: value})
                except InputError as error:
                    line = str(error)
                    assert not PYDANTIC.search(line) and "literal[" not in line, line


def test_the_first_broken_rule_is_named_and_rules_that_hold_are_not():
    refuse((False, "tp"), (None, "dp"))
    with pytest.raises(InputError, match=r"^dp$"):
        refuse((0, "tp"), (2, "dp"), (True, "ep"))
