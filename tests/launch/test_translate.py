"""Keys of a launch: three lists, what is assumed, and models that stand in."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from simrl.launch.expression import keys_of
from simrl.launch.settings import Launch
from simrl.launch.tables import TABLES
from simrl.launch.translate import (
    NO_EFFECT,
    NOT_UNDERSTOOD,
    UNDERSTOOD,
    translate,
)
from simrl.scenario.dotted import get
from simrl.scenario.load import ScenarioFile
from tests.helpers import examples
from tests.launch.reading import COMPLETE, VERL, translation

LISTS = {UNDERSTOOD, NO_EFFECT, NOT_UNDERSTOOD}


def becomes(made, key):
    """Return the list, the field and the rest of a key."""
    (one,) = [one for one in made.keys if one.key == key]
    return one.list, one.field, one.becomes


def test_a_key_that_sets_a_field_is_understood_with_the_fields_value(tmp_path):
    made = translation(tmp_path, f"{COMPLETE}")
    assert becomes(made, "data.max_response_length") == (
        UNDERSTOOD,
        "workload.synthetic.cap_tokens",
        "1024",
    )
    assert get(made.data, "workload.synthetic.cap_tokens") == 1024
    assert made.sources["workload.synthetic.cap_tokens"] == "data.max_response_length"


def test_a_key_without_effect_has_the_reason(tmp_path):
    made = translation(tmp_path, f"{COMPLETE} trainer.project_name=x")
    assert becomes(made, "trainer.project_name") == (NO_EFFECT, "", "a name")


def test_a_key_that_no_table_has_is_not_understood(tmp_path):
    made = translation(tmp_path, f"{COMPLETE} my.own_key=8 'my.other=a b' my.empty=")
    for key in ("my.own_key", "my.other", "my.empty"):
        assert becomes(made, key) == (NOT_UNDERSTOOD, "", "")


def test_a_key_written_twice_has_its_last_value_once(tmp_path):
    made = translation(tmp_path, f"{COMPLETE} data.train_batch_size=32")
    assert becomes(made, "data.train_batch_size")[0] == UNDERSTOOD
    assert get(made.data, "workload.synthetic.prompts_per_step") == 32


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**9),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(
        ["", "a b", "$X", "$(nproc)", "auto", "fsdp", "megatron", "vllm", "1,2", "a/$Y"]
    ),
    st.lists(st.integers(0, 9), max_size=3),
)


def keys_of_table(table):
    """Return the keys that a table names, some that match a pattern, and some of nobody's."""
    named = {*table.defaults, *(key.replace("*", "x") for key in table.no_effect), *table.known_by}
    return st.one_of(
        st.sampled_from(sorted(named)),
        st.from_regex(r"[a-z_]{1,8}(\.[a-z_]{1,8}){0,3}", fullmatch=True),
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
@given(data=st.data())
@examples(200)
def test_every_key_that_is_written_is_in_exactly_one_list(table, tmp_path_factory, data):
    keys = data.draw(st.dictionaries(keys_of_table(table), VALUES, max_size=12))
    path = tmp_path_factory.getbasetemp() / "run.sh"
    made = translate(Launch(path, table, keys), {})
    assert Counter(one.key for one in made.keys) == Counter(keys.keys())
    assert {one.list for one in made.keys} <= LISTS
    assert all(one.field for one in made.of(UNDERSTOOD))
    assert all(one.becomes for one in made.of(NO_EFFECT))


def test_a_number_of_experts_that_is_none_is_no_reason_to_fail(tmp_path):
    (table,) = [table for table in TABLES if table.name == "skyrl"]
    key = "generator.inference_engine.expert_parallel_size"
    translate(Launch(tmp_path / "run.sh", table, {key: "auto"}), {})


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_value_that_only_a_run_knows_is_never_understood(table, tmp_path):
    texts = [*table.let.values(), *table.fields.values(), *(note.when for note in table.notes)]
    for rule in table.systems:
        texts += [rule.when, *rule.parameters.values()]
    names = {key for text in texts for key in keys_of(text)} - table.let.keys()
    taken = {}
    for key in (names | table.defaults.keys()) - {"program", "config_class"}:  # the reader's own
        made = translate(Launch(tmp_path / "run.sh", table, {key: "$X"}), {})
        taken |= {one.key: (one.field, one.becomes) for one in made.of(UNDERSTOOD)}
    assert not taken


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_launch_that_says_nothing_gives_a_whole_scenario_of_what_is_assumed(table, tmp_path):
    made = translate(Launch(tmp_path / "run.sh", table, {}), {})
    ScenarioFile(tmp_path / "x.yaml", (), made.data).scenarios()
    assert not made.keys
    for one in made.assumed:
        assert get(made.data, one.field) == one.value
        assert one.what and one.option


UNKNOWN = {
    "a variable": "$BS",
    "a command": "$(nproc)",
    "arithmetic": "$((BS * 2))",
    "a default with a command": "${A:-$(nproc)}",
    "an interpolation": "'${oc.env:BS}'",
}


@pytest.mark.parametrize("word", UNKNOWN.values(), ids=UNKNOWN)
def test_for_an_unknown_value_the_frameworks_own_is_taken_and_that_is_said(tmp_path, word):
    text = COMPLETE.replace("data.train_batch_size=64", f"data.train_batch_size={word}")
    made = translation(tmp_path, text)
    kind, _, why = becomes(made, "data.train_batch_size")
    assert kind == NOT_UNDERSTOOD
    assert "only a run knows its value" in why and why.endswith("1024 is taken")
    assert get(made.data, "workload.synthetic.prompts_per_step") == 1024


def test_an_unknown_value_without_a_default_is_assumed_with_its_option(tmp_path):
    made = translation(tmp_path, COMPLETE.replace("model.path=Qwen/Qwen3-0.6B", "model.path=$M"))
    assert becomes(made, "actor_rollout_ref.model.path")[0] == NOT_UNDERSTOOD
    (assumed,) = [one for one in made.assumed if one.field == "model"]
    assert assumed.option == "--model NAME, or a folder with its config.json"


@pytest.mark.parametrize("word", ["`nproc`", "$L/2", "${L}/2"])
def test_other_unknown_values_are_not_understood(tmp_path, word):
    text = COMPLETE.replace("data.train_batch_size=64", f"data.train_batch_size={word}")
    assert becomes(translation(tmp_path, text), "data.train_batch_size")[0] == NOT_UNDERSTOOD


@pytest.mark.xfail(strict=True, reason="what is computed of it is missing: it 'sets nothing'")
def test_a_text_in_the_place_of_a_number_is_not_understood(tmp_path):
    made = translation(tmp_path, f"{COMPLETE} trainer.nnodes=two")
    assert becomes(made, "trainer.nnodes")[0] == NOT_UNDERSTOOD


def test_what_a_launch_lacks_is_assumed_and_what_it_has_is_not(tmp_path):
    made = translation(tmp_path, COMPLETE)
    assert {one.field for one in made.assumed} == {
        "cluster.gpu",
        "workload.synthetic.mean_tokens",
        "workload.synthetic.sigma",
        "workload.synthetic.prompt_tokens",
    }


def test_what_is_given_is_not_assumed(tmp_path):
    given_fields = {"cluster.gpu": "b200", "workload.synthetic.mean_tokens": 300.0}
    made = translation(tmp_path, COMPLETE, **given_fields)
    assert get(made.data, "cluster.gpu") == "b200"
    assert get(made.data, "workload.synthetic.mean_tokens") == 300
    assert not {one.field for one in made.assumed} & given_fields.keys()


def test_the_assumed_mean_is_a_share_of_the_largest_response(tmp_path):
    made = translation(tmp_path, COMPLETE)
    assert get(made.data, "workload.synthetic.mean_tokens") == round(1024 * 0.35)


def test_a_trace_replaces_the_model_of_the_lengths(tmp_path):
    made = translation(
        tmp_path, COMPLETE, **{"workload.trace": "my.parquet", "cluster.gpu": "h100"}
    )
    assert made.data["workload"] == {"trace": "my.parquet"}
    assert not made.assumed


def test_with_a_trace_the_gpu_is_assumed_as_without(tmp_path):
    made = translation(tmp_path, COMPLETE, **{"workload.trace": "my.parquet"})
    assert get(made.data, "cluster.gpu") == "h100"
    assert [one.field for one in made.assumed] == ["cluster.gpu"]


def test_a_field_that_is_given_is_not_said_to_be_of_a_key(tmp_path):
    made = translation(tmp_path, COMPLETE, **{"cluster.gpus": 16})
    assert get(made.data, "cluster.gpus") == 16
    assert "trainer.nnodes" not in made.sources.get("cluster.gpus", "")


# Models.


def model_of(folder, name, more=""):
    made = translation(folder, f"{VERL} actor_rollout_ref.model.path={name} {more}")
    return made.data["model"], [one for one in made.assumed if one.what.startswith("a stand-in")]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("qwen3-8b", "qwen3-8b"),
        ("/models/Qwen3-8B/", "qwen3-8b"),
        ("$ROOT/models/Qwen3-8B", "qwen3-8b"),
        ("${M:-Qwen/Qwen3-8B}", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("someone/Qwen3-8B-SFT-v2", "qwen3-8b"),
    ],
)
def test_a_models_name_is_known_in_any_spelling(tmp_path, name, model):
    assert model_of(tmp_path, name) == (model, [])


@pytest.mark.parametrize(
    ("name", "model"),
    [("someone/else-13b", "qwen3-14b"), ("someone/moe-30b-a3b", "qwen3-30b-a3b")],
)
def test_the_nearest_model_by_size_stands_in_and_it_is_said(tmp_path, name, model):
    nearest, (stand_in,) = model_of(tmp_path, name)
    assert nearest == model
    assert stand_in.what == f"a stand-in for {name}"
    assert stand_in.option == "--model NAME, or a folder with its config.json"


def test_a_model_with_experts_stands_in_where_the_launch_has_some(tmp_path):
    dense, _ = model_of(tmp_path, "someone/else-30b")
    sparse, _ = model_of(
        tmp_path,
        "someone/else-30b",
        "model_engine=megatron actor_rollout_ref.actor.megatron.expert_model_parallel_size=8",
    )
    assert (dense, sparse) == ("qwen3-32b", "qwen3-30b-a3b")


def test_a_folder_with_its_config_is_the_model(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert model_of(tmp_path, "mine") == (str(tmp_path / "mine"), [])


def test_a_model_that_only_a_run_knows_is_assumed(tmp_path):
    made = translation(tmp_path, f"{VERL} actor_rollout_ref.model.path=$MODEL")
    assert becomes(made, "actor_rollout_ref.model.path")[0] == NOT_UNDERSTOOD
    assert "model" in {one.field for one in made.assumed}


# Releases and systems.


def test_defaults_are_of_the_release(tmp_path):
    (table,) = [table for table in TABLES if table.name == "trl"]
    launch = Launch(tmp_path / "run.py", table, {"num_generations": 8})
    lengths = [
        get(translate(launch, {}, release).data, "workload.synthetic.cap_tokens")
        for release in ("0.16", "0.20", "1.10", None)
    ]
    assert lengths == [256, 256, 512, 512]


def test_a_launchs_own_system_stands_before_those_that_it_is_compared_with(tmp_path):
    names = [one["name"] for one in translation(tmp_path, COMPLETE).data["systems"]]
    assert names[0] == "verl_colocated"
    assert set(names[1:]) == {"one_step_off", "areal"}


def test_what_the_launch_updates_with_is_shared_by_the_systems_beside_it(tmp_path):
    text = COMPLETE + " actor_rollout_ref.actor.ppo_mini_batch_size=16"
    systems = translation(tmp_path, text).data["systems"]
    assert {one["minibatches"] for one in systems} == {4}


def test_a_table_is_a_whole(tmp_path):
    for table in TABLES:
        assert table.systems[-1].when == "True", table.name
        assert table.title and table.version, table.name
