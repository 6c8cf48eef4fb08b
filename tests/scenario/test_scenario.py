"""Scenarios: what a file, its overrides and variations come to, and how each mistake in them is named."""

import json
import re
from pathlib import Path

import pytest
import yaml

import simrl
from simrl.errors import InputError, brief
from simrl.profile.model_shape import MODELS
from simrl.scenario.load import Choices, ScenarioFile, Setting, load_scenarios
from simrl.scenario.model import Scenario, SystemConfig
from simrl.scenario.yaml_text import parse_override
from simrl.systems.recipes import make_system
from tests.command_line import ROOT, SCENARIO

KEYS = (
    "a scenario has name, seed, steps, warmup_steps, framework, model, cluster, workload, profile, precision, engine, "
    "training, agents, speculation, evaluation, faults, judge, calibration, systems, vary"
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A scenario file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("scenario.yaml")
    path.write_text(SCENARIO)
    return path


def written(path, *changes):
    """The file, with texts in it replaced."""
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def refusal(path, *overrides, system=None):
    """The one line with which a scenario is refused; it names the file, or the override that cannot be read."""
    with pytest.raises(InputError) as refused:
        load_scenarios(path, overrides, system)
    message = str(refused.value)
    assert "\n" not in message
    assert str(path) in message or brief(f"override {overrides[0]!r}:") in f"{message}:"
    return message


# What a file comes to.


def test_every_combination_of_variations_and_systems_becomes_a_scenario_in_the_files_order(file):
    written(file, ("systems: ", "vary: [{cluster.gpus: 4}, {cluster.gpus: 8, seed: 9}]\nsystems: "))
    scenarios = load_scenarios(file)
    assert [(s.system.name, s.cluster.gpus, s.seed, s.variant) for s in scenarios] == [
        ("verl_colocated", 4, 3, "cluster.gpus=4"),
        ("areal", 4, 3, "cluster.gpus=4"),
        ("verl_colocated", 8, 9, "cluster.gpus=8, seed=9"),
        ("areal", 8, 9, "cluster.gpus=8, seed=9"),
    ]
    assert [s.system.parameters for s in scenarios] == [{}, {"eta": 2}] * 2


def test_of_two_overrides_of_a_key_the_last_holds_whether_one_value_or_several(file):
    for overrides, gpus in (
        (["cluster.gpus=16", "cluster.gpus=8,24"], [8, 24]),
        (["cluster.gpus=8,24", "cluster.gpus=16"], [16]),
        (["cluster.gpus=8", "cluster.gpus=16"], [16]),
    ):
        scenarios = load_scenarios(file, [*overrides, "systems=[split]", "vary=null"])
        assert [scenario.cluster.gpus for scenario in scenarios] == gpus


def test_an_override_wins_over_the_file_and_over_a_variation(file):
    written(file, ("systems: ", "vary: [{cluster.gpus: 4}, {cluster.gpus: 8}]\nsystems: "))
    scenarios = load_scenarios(file, ["cluster.gpus=16", "systems=[split]", "seed=1"])
    assert [(s.system.name, s.cluster.gpus, s.seed, s.variant) for s in scenarios] == [
        ("split", 16, 1, "")
    ]


@pytest.mark.parametrize(
    ("vary", "override", "key"),
    [
        ("{cluster.gpus: 4}", "cluster={gpus: 2}", "cluster.gpus"),
        ("{cluster: {gpus: 4}}", "cluster.gpus=2", "cluster"),
        ("{faults: [{kind: slow, worker: 0, factor: 2}]}", "faults.0.factor=4", "faults"),
        ("{faults.0.factor: 2}", "faults=[{kind: slow, worker: 0, factor: 4}]", "faults.0.factor"),
        ("{profile.roofline: null}", "profile.roofline.compute_efficiency=0.5", "profile.roofline"),
    ],
)
def test_an_override_of_a_part_of_what_is_varied_or_the_other_way_round_is_refused(
    file, vary, override, key
):
    written(file, ("systems: ", f"vary: [{vary}]\nsystems: "))
    assert f"vary sets {key} too, and only one of them can hold; give {key}=…" in refusal(
        file, override
    )


def test_a_section_is_merged_with_what_is_varied_beside_it(file):
    written(file, ("systems: ", "vary: [{cluster.gpus: 8}, {faults: []}]\nsystems: "))
    clusters = [s.cluster for s in load_scenarios(file, ["cluster={cost_per_gpu_hour: 2}"])]
    assert [(c.gpus, c.cost_per_gpu_hour) for c in clusters] == [(8, 2)] * 2 + [(4, 2)] * 2


def test_an_override_that_leaves_out_a_part_of_a_section_that_is_varied_is_refused(file):
    written(file, ("systems: ", "vary: [{cluster: {gpus: 8, tp: 2}}]\nsystems: "))
    message = refusal(file, "cluster={gpus: 2}")
    assert (
        "'cluster={gpus: 2}': vary has cluster.tp, which this leaves out; give it too, or remove the file's"
        in message
    )
    assert (
        load_scenarios(file, ["cluster={gpus: 2, tp: 1, cost_per_gpu_hour: 2}"])[0].cluster.gpus
        == 2
    )


def test_an_override_reaches_into_dictionaries_and_lists(file):
    scenarios = load_scenarios(
        file, ["systems.1.eta=5", "cluster={gpu: h200}", "training.mfu=0.5", "engine.block_size=32"]
    )
    assert scenarios[1].system.parameters == {"eta": 5}
    assert (scenarios[1].cluster.gpu, scenarios[1].cluster.gpus) == ("h200", 4)
    assert (scenarios[1].training.mfu, scenarios[1].engine.block_size) == (0.5, 32)


def test_a_reference_follows_overrides_and_variations(file):
    written(
        file,
        ("{roofline: {}}", "{path: 'profiles/${model}_tp${cluster.tp}.parquet'}"),
        ("systems: ", "vary: [{cluster.tp: 1}, {cluster.tp: 2}]\nsystems: "),
    )
    paths = [s.profile.path for s in load_scenarios(file, ["model=qwen3-8b", "systems=[split]"])]
    assert paths == ["profiles/qwen3-8b_tp1.parquet", "profiles/qwen3-8b_tp2.parquet"]


@pytest.mark.parametrize(
    "entries",
    [
        [{"seed": 1}, {"seed": 2}, {"seed": 3}],
        [{"cluster.gpus": 4, "model": "own"}, {"cluster.gpus": 8, "model": "qwen3-8b"}],
        [{"cluster.tp": 1}, {"cluster.tp": 2}],  # a reference follows it
        [
            {"profile.path": "a.parquet"},
            {"profile.path": "${model}.parquet"},
            {"profile.path": "b.parquet"},
        ],
        [
            {"workload.synthetic.steps": 3, "engine.block_size": 8},
            {"workload.synthetic.steps": 4, "engine.block_size": 32},
        ],
        [{"training": {"mfu": 0.2}}, {"training": {"mfu": 0.3}}],
        [{"systems_of": 1}, {"seed": -1}, {"cluster": 3}],  # each is refused
    ],
)
def test_a_scenario_is_the_same_whatever_was_made_from_its_file_before(file, entries):
    written(file, ("{roofline: {}}", "{path: 'x_${cluster.tp}.parquet'}"))
    (file.parent / "own").mkdir()

    def made(opened, entry):
        settings = [Setting(key, value, f"{key}={value}") for key, value in entry.items()]
        try:
            return opened.scenario(settings, {"name": "areal", "eta": 2})
        except InputError as error:
            return str(error)

    one = ScenarioFile(file)
    for entry in entries * 2:
        assert made(one, entry) == made(ScenarioFile(file), entry)


def test_with_a_system_the_other_overrides_are_its_parameters(file):
    (scenario,) = load_scenarios(file, ["eta=8", "on_stale=drop", "cluster.gpus=8"], system="areal")
    assert scenario.system.name == "areal"
    assert scenario.system.parameters == {"eta": 8, "on_stale": "drop"}
    assert scenario.cluster.gpus == 8


def test_paths_are_relative_to_the_file_and_in_an_override_to_the_current_folder(
    file, tmp_path, monkeypatch
):
    written(file, ("{roofline: {}}", "{path: p.parquet}"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for override in ("workload.trace=t.parquet", "workload={trace: t.parquet}"):
        scenario = load_scenarios(Path("../scenario.yaml"), ["workload.synthetic=null", override])[
            0
        ]
        assert scenario.profile.path == "../p.parquet"
        assert scenario.workload.trace == str(tmp_path / "elsewhere" / "t.parquet")


def test_a_tilde_is_the_home_folder(file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    written(file, ("{roofline: {}}", "{path: ~/p.parquet}"))
    assert load_scenarios(file)[0].profile.path == "/home/ada/p.parquet"
    assert load_scenarios(file, ["profile.path=~nobody-of-this-name/p.parquet"])[0].profile.path


def test_a_models_config_is_found_beside_the_scenario(file, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir("/")
    assert load_scenarios(tmp_path / "scenario.yaml", ["model=mine"])[0].model == str(
        tmp_path / "mine"
    )
    assert load_scenarios(tmp_path / "scenario.yaml", ["model=qwen3-8b"])[0].model == "qwen3-8b"


def test_paths_of_a_judge_are_those_of_its_file(file, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "my.toml").write_text('base = "h100"\nname = "mine"\nmemory_bytes_per_s = 3e12\n')
    judge = "judge: {model: mine, gpus: 1, gpu: my.toml, profile: {path: p.parquet}}\nsystems: "
    written(file, ("systems: ", judge))
    monkeypatch.chdir("/")
    read = load_scenarios(tmp_path / "scenario.yaml")[0].judge
    assert read is not None and read.sheet is not None
    assert [read.model, read.profile.path] == [str(tmp_path / n) for n in ("mine", "p.parquet")]
    named = load_scenarios(tmp_path / "scenario.yaml", ["judge.model=Qwen/Qwen3-8B"])[0].judge
    assert named is not None and named.model == "qwen3-8b"


@pytest.mark.parametrize("key", ["judge", "evaluation", "cluster.prefill"])
def test_a_number_for_a_section_is_refused_with_its_keys(file, key):
    assert f"{key} is 3; it has the keys" in refusal(file, f"{key}=3")


def test_what_a_message_needs_does_not_change_what_a_result_says(file):
    scenario = load_scenarios(file)[0]
    assert scenario.file == "scenario.yaml"
    assert "file" not in scenario.model_dump()
    assert Scenario.model_validate(scenario.model_dump()).model_dump() == scenario.model_dump()


def test_the_quick_start_is_a_scenario_and_names_models_and_files_that_exist():
    scenarios = load_scenarios(ROOT / "experiments" / "quickstart.yaml")
    assert len(scenarios) > 3
    assert all(s.model in MODELS and Path(str(s.profile.path)).is_file() for s in scenarios)


# Files that are no scenario.


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "no keys; a scenario has name"),
        (b"null", "no keys; a scenario has name"),
        (b"- name: a\n- name: b\n", "no keys; a scenario has name"),
        (b"just words", "no keys; a scenario has name"),
        (b"3", "no keys; a scenario has name"),
        (
            b"name: a\nsteps: [1, 2\nmodel: b\n",
            "line 3, column 6: did not find expected ',' or ']'",
        ),
        (
            b"name: a\n\tsteps: 1\n",
            "line 2, column 1: found a tab character that violates indentation",
        ),
        (b"name: a\nsteps: 1\nname: b\n", "line 3, column 1: found duplicate key name"),
        (
            b"cluster: {gpus: 8, gpu: h100, gpus: 9}\n",
            "line 1, column 31: found duplicate key gpus",
        ),
        (b"name: a\n---\nname: b\n", "line 2, column 1: but found another document"),
        (b"name: gr\xf6sse\n", "byte 8 is not UTF-8; save the file as UTF-8"),
        (bytes(range(128, 256)), "byte 0 is not UTF-8"),
        (b"name: " + b"[" * 5000 + b"]" * 5000, "nested too deeply|cannot be read|line 1"),
        (b"name: &a [*a]\n", "line 1, column 7"),
        (b"name: a\n~: 1\n", "line 2, column 1: a key is null; write a text"),
        (b"name: a\n[b]: 1\n", "line 2, column 1: a key is .*; write a text"),
        (b"name: a\nseed: !!map abc\n", "line 2, column 7: keys are needed here"),
        (b"name: a\nseed: {<<: 3}\n", "line 2, column 12: keys are needed here"),
        (b"name: a\nseed: !!bool on\n", "line 2, column 7: 'on' is no bool of YAML 1.2"),
        (b"name: a\nseed: !!int <<\n", "line 2, column 7: '<<' is no int of YAML 1.2"),
        (b"seed: " + b"1" * 5000, "line 1, column 7: a whole number of 5,000 digits; 100 are"),
        (b"seed: 0x" + b"f" * 5000, "line 1, column 7: a whole number of 5,002 digits; 100 are"),
        (b"cluster: {1: a, 01: b}\n", "line 1, column 17: found duplicate key 01; give it once"),
        (b"cluster: {<<: {}, <<: {}}\n", "line 1, column 19: found duplicate key <<"),
        (b"3: 1\n", "unknown key 3; a scenario has"),
        (b"true: 1\n", "unknown key True.*; a scenario has"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused_with_the_place(file, content, what):
    file.write_bytes(content)
    assert re.search(what, refusal(file))


def test_a_missing_file_and_a_folder_are_named(file):
    assert "none.yaml: cannot be read (No such file or directory)" in refusal(Path("none.yaml"))
    assert ".: cannot be read (Is a directory)" in refusal(Path())


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir [harm]",
        "!!python/name:os.mkdir",
        "!!python/object/new:os.mkdir [harm]",
        "!f x",
    ],
)
def test_a_tag_in_yaml_never_runs_anything(file, tmp_path, tag):
    file.write_text(f"{SCENARIO}seed2: {tag}\n")
    assert "line 11, column 8: could not determine a constructor for the tag" in refusal(file)
    file.write_text(SCENARIO)
    assert "could not determine a constructor for the tag" in refusal(file, f"seed={tag}")
    assert not (tmp_path / "harm").exists()


def test_a_few_lines_that_would_unfold_to_millions_are_refused(file):
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    file.write_text("\n".join(lines))
    assert "line" in refusal(file)


# Keys and values.


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("seed: 3", "sead: 3", f"unknown key sead (did you mean seed?); {KEYS}"),
        ("seed: 3", "system: split", f"unknown key system (did you mean systems?); {KEYS}"),
        ("seed: 3", "variant: a", f"unknown key variant; {KEYS}"),
        ("seed: 3", "file: a", f"unknown key file (did you mean profile?); {KEYS}"),
        (
            "tp: 1",
            "tp: 1, pp: 2",
            "unknown key cluster.pp (did you mean tp or dp or ep?); cluster has gpu, gpus, tp, dp",
        ),
        (
            "workload:",
            "workload:\n  trase: a",
            "unknown key workload.trase (did you mean trace?); workload has trace",
        ),
        (
            "sigma: 0.8",
            "sigma: 0.8, sd: 1",
            "unknown key workload.synthetic.sd; workload.synthetic has steps, prompts_per",
        ),
        (
            "{roofline: {}}",
            "{roofline: {}, file: a}",
            "unknown key profile.file; profile has path, roofline, forward_",
        ),
        (
            "{roofline: {}}",
            "{roofline: {mfu: 1}}",
            "unknown key profile.roofline.mfu; profile.roofline has compute_eff",
        ),
        (
            "seed: 3",
            "engine: {kv: 1}",
            "unknown key engine.kv; engine has preset, max_num_seqs, max_num_batched_tokens, block",
        ),
        (
            "seed: 3",
            "training: {MFU: 1}",
            "unknown key training.MFU (did you mean mfu?); training has mfu, log_prob_mfu, correction",
        ),
        ("seed: 3", "training: {3: 1}", "unknown key training.3; training has mfu"),
        ("model: qwen3-0.6b", "", "key model is missing"),
        ("gpu: h100, ", "", "key cluster.gpu is missing"),
        ("group: 2, ", "", "key workload.synthetic.group is missing"),
        (
            "{gpu: h100, gpus: 4, tp: 1}",
            "h100",
            "cluster is 'h100'; it has the keys gpu, gpus, tp, dp",
        ),
        (
            "{gpu: h100, gpus: 4, tp: 1}",
            "[h100, 4]",
            "cluster is ['h100', 4]; it has the keys gpu, gpus, tp",
        ),
        ("{gpu: h100, gpus: 4, tp: 1}", "", "cluster is None; it has the keys gpu, gpus, tp"),
        ("gpus: 4", "gpus: four", "cluster.gpus is 'four': a whole number is needed"),
        ("gpus: 4", "gpus: 4.5", "cluster.gpus is 4.5: a whole number is needed"),
        ("gpus: 4", "gpus: [4]", "cluster.gpus is [4]: a whole number is needed"),
        ("name: tiny", "name: 3", "name is 3: a text is needed"),
        (
            "name: tiny",
            "name: größe",
            "name is 'größe': use the letters a-z, digits, '.', '_' and '-', a letter or digit",
        ),
        ("name: tiny", "name: ..", "name is '..': use the letters a-z"),
        ("name: tiny", "name: ../../etc", "name is '../../etc': use the letters a-z"),
        ("name: tiny", 'name: "a\\nb"', r"name is 'a\nb': use the letters a-z"),
        ("model: qwen3-0.6b", "model: ???", "model: it is missing (???)"),
        (
            "model: qwen3-0.6b",
            "model: '${modell}'",
            "model: the file has no key modell; correct the reference",
        ),
        (
            "model: qwen3-0.6b",
            "model: '${model}'",
            "model: its reference leads back to itself, model → model; correct the reference",
        ),
        (
            "model: qwen3-0.6b",
            "model: '${shell:ls}'",
            "line 5, column 8: ${shell:ls} is no reference to a key of the file; write the key from the first section on, "
            "such as ${cluster.gpu}, or the value",
        ),
        ("model: qwen3-0.6b", "model: '${cluster'", "${cluster"),
        (
            "warmup_steps: 1",
            "warmup_steps: 2",
            "warmup_steps 2 leaves none of the 2 steps; lower it",
        ),
        ("steps: 2\n", "steps: 0\n", "steps is 0: give more than 0"),
        ("gpus: 4", "gpus: 0", "cluster.gpus is 0: give more than 0"),
        ("gpus: 4", "gpus: 1e12", "cluster.gpus is 1000000000000.0: give 262144 or less"),
        (
            "workload:",
            "workload:\n  trace: t.parquet",
            "give either a trace (path) or synthetic (a length model)",
        ),
        (
            "{roofline: {}}",
            "{roofline: {}, path: p.parquet}",
            "give either path (a profile file) or roofline",
        ),
        (
            "sigma: 0.8",
            "sigma: 0.8, prompts: 3",
            "workload.synthetic: prompts 3 is less than one step's prompts_per_step 4",
        ),
        (
            "{steps: 2,",
            "{steps: 1000000000,",
            "8,000,000,000 samples of 4,000,000,000 prompts; stay under 100,000,000",
        ),
        (
            "mean_tokens: 60",
            "mean_tokens: [1,2,3]",
            "workload.synthetic.mean_tokens is [1, 2, 3]: a number is needed",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named_by_key_and_value_with_what_would_be_right(
    file, old, new, what
):
    assert what in refusal(written(file, (old, new)))


def test_thousands_of_references_are_refused_before_they_are_written_out(tmp_path):
    file = tmp_path / "scenario.yaml"
    file.write_text(f"model: qwen3-0.6b\nname: {'${model}' * 5000}\n")
    with pytest.raises(InputError, match=r"5,000 references, \$\{…\}; 500 are the most"):
        load_scenarios(file)


@pytest.mark.parametrize(
    "text", ["${oc.env:SECRET}", "x${oc.env:SECRET}", "${${model}:SECRET}", "${ oc.env : SECRET }"]
)
def test_a_strangers_scenario_cannot_read_the_environment(file, text, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    for said in (
        refusal(written(file, ("name: tiny", f"name: '{text}'"))),
        refusal(file, f"model={text}"),
    ):
        assert "is no reference to a key of the file" in said and "s3cret" not in said


@pytest.mark.parametrize(
    "keywords",
    [
        {"profile": "${oc.env:SECRET}"},
        {"model": "${oc.env:SECRET}"},
        {"overrides": {"model": "${oc.env:SECRET}"}},
    ],
)
def test_no_option_reads_the_environment(file, keywords, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    with pytest.raises(InputError, match="is no reference to a key of the file") as error:
        simrl.run(str(written(file)), folder=None, **keywords)
    assert "s3cret" not in str(error.value)


def test_no_dictionary_reads_the_environment(file, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    with pytest.raises(InputError, match="is no reference to a key of the file"):
        simrl.run({"name": "${oc.env:SECRET}", "steps": 2})


def test_a_text_with_a_colon_beside_a_reference_is_no_call(file):
    written(file, ("{roofline: {}}", "{path: 'a:${model}:b.parquet'}"))
    (scenario,) = load_scenarios(file, ["systems=[areal]"])
    assert scenario.profile.path.endswith("a:qwen3-0.6b:b.parquet")


def test_a_workload_that_is_neither_recorded_nor_drawn_is_refused(file):
    assert "give either a trace (path) or synthetic" in refusal(file, "workload.synthetic=null")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(
            ("017", 17),
            ("0o17", 15),
            ("0x1F", 31),
            ("+3", 3),
            ("1e3", 1000.0),
            (".5", 0.5),
            ("3.", 3.0),
        ),
        *(
            ("1:30:00", "1:30:00"),
            ("1_000", "1_000"),
            ("0b11", "0b11"),
            ("2026-11-27", "2026-11-27"),
            ("=", "="),
        ),
        *(
            ("yes", "yes"),
            ("on", "on"),
            ("No", "No"),
            ("true", True),
            ("False", False),
            ("~", None),
            ("", None),
        ),
        *(
            ("'017'", "017"),
            ("[1, 0o7, on]", [1, 7, "on"]),
            ("{017: a}", {17: "a"}),
            ("!!str 017", "017"),
        ),
    ],
)
def test_a_scalar_is_what_yaml_1_2_says(written, value):
    key, parsed = parse_override(f"key={written}")
    assert (key, parsed, type(parsed)) == ("key", value, type(value))


@pytest.mark.parametrize(
    ("words", "switched"), [(("on", "yes", "true", "On"), True), (("off", "no", "false"), False)]
)
def test_a_switch_takes_the_words_in_which_it_is_printed(file, words, switched):
    for word in words:
        overrides = [
            f"engine.enforce_eager={word}",
            f"system.interruptible={word}",
            "systems=[areal]",
        ]
        (scenario,) = load_scenarios(file, overrides)
        assert scenario.engine.enforce_eager is switched
        assert scenario.system.parameters == {"interruptible": switched}
    assert "cluster.gpus is 'on': a whole number is needed" in refusal(file, "cluster.gpus=on")


def test_a_name_is_no_switch(file):
    for systems in ("on", "[on]", "{name: on}"):
        (scenario,) = load_scenarios(file, [f"systems={systems}"])
        assert scenario.system.name == "on"
    entry = {"name": "areal", "speculation": {"name": "on", "window": {"kind": "off"}}}
    (scenario,) = load_scenarios(file, [f"systems={json.dumps([entry])}"])
    assert scenario.system.parameters == {"speculation": entry["speculation"]}


def test_a_switchs_word_for_a_parameter_that_is_no_switch_is_refused_in_both_its_spellings():
    for word in ("on", True):
        system = SystemConfig.model_validate({"name": "areal", "on_stale": word})
        with pytest.raises(InputError, match=r"on_stale is on \(true\); it is not a switch"):
            make_system(system.name, system.parameters)


def test_digits_with_underscores_are_a_text_and_no_number(file):
    for override, number in (
        ("cluster.gpus=1_000", "a whole number is needed, without a unit; did you mean 1000?"),
        ("cluster.gpus=1__000", "a whole number is needed, without a unit; did you mean 1000?"),
        ("training.reward_s='1_0.5'", "a number is needed, without a unit; did you mean 10.5?"),
    ):
        assert number in refusal(file, override)
    assert load_scenarios(file, ["name=1_000"])[0].name == "1_000"
    with pytest.raises(
        InputError, match=r"eta is '1_000': a number is needed; did you mean 1000\?"
    ):
        make_system("areal", {"eta": "1_000"})


def test_a_reference_alone_is_the_value_and_in_a_longer_text_a_text(file):
    (scenario,) = load_scenarios(
        file, ["systems=[areal]", "steps=${cluster.gpus}", "name=a${ cluster.gpus }b"]
    )
    assert (scenario.steps, scenario.name) == (4, "a4b")
    (found,) = load_scenarios(
        file, ["systems=[areal]", "cluster.train={gpu: '${cluster.gpu}', gpus: '${cluster.tp}'}"]
    )
    assert (found.cluster.train.gpu, found.cluster.train.gpus) == ("h100", 1)


@pytest.mark.parametrize(
    "form", ["${.tp}", "${a[0]}", "${cluster.${model}}", "${}", "${tp", r"\${cluster.tp}"]
)
def test_another_form_of_reference_is_refused_with_the_form_that_is_taken(file, form):
    for message in (
        refusal(file, f"name=a{form}"),
        refusal(written(file, ("name: tiny", f"name: 'a{form}'"))),
    ):
        assert f"{form[:14]}" in message
        assert message.endswith(
            "is no reference to a key of the file; write the key from the first section on, such as "
            "${cluster.gpu}, or the value"
        )
        file.write_text(SCENARIO)


@pytest.mark.parametrize(
    ("overrides", "circle"),
    [
        (["cluster.gpus=${cluster}"], "cluster.gpus: * cluster → cluster.gpus → cluster;"),
        (["name=${model}", "model=${name}"], "model: * name → model → name;"),
        (["model=x${model}"], "model: * model → model;"),
    ],
)
def test_references_in_a_circle_are_named_in_their_order(file, overrides, circle):
    assert circle.replace("*", "its reference leads back to itself,") in refusal(file, *overrides)


def test_a_reference_to_a_place_in_a_list_that_there_is_not_is_refused(file):
    message = refusal(file, "name=s${faults.00000000005.worker}")
    assert "name: the file has no key faults.00000000005.worker" in message


def test_a_systems_parameter_on_the_command_line_may_be_a_reference(file):
    overrides = ["systems=[areal]", "cluster.tp=2", "system.eta=${cluster.tp},${cluster.gpus}"]
    assert [s.system.parameters for s in load_scenarios(file, overrides)] == [
        {"eta": 2},
        {"eta": 4},
    ]
    message = refusal(file, "system.eta=${nope}")
    assert "system.eta: the file has no key nope" in message


def test_references_that_would_unfold_to_millions_are_refused(file):
    doubled = {f"k{i}": f"${{training.k{i + 1}}}${{training.k{i + 1}}}" for i in range(40)} | {
        "k40": "x"
    }
    assert "more than 500 references are followed" in refusal(
        written(file, ("seed: 3", f"training: {json.dumps(doubled)}"))
    )


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("[&a {n: 1, k: 1}, &b {<<: *a, k: 2}, {<<: *b, m: 3}]", {"n": 1, "k": 2, "m": 3}),
        ("[{<<: {k: 1}, k: 2}, {k: 2, <<: {k: 1}}]", {"k": 2}),
        ("[{<<: [{k: 1}, {k: 2, n: 2}]}]", {"k": 1, "n": 2}),
        ("[{a: &a {k: 1}}, {b: {c: &b {<<: *a, k: 2}}}, {<<: *b}]", {"k": 2}),
        ("[{<<: {1: a}, 01: b}]", {1: "b"}),
        ("[{'<<': a}]", {"<<": "a"}),
    ],
)
def test_a_sections_own_keys_win_over_merged_ones_and_the_first_merged_over_later_ones(
    section, value
):
    assert parse_override(f"key={section}")[1][-1] == value


def test_what_a_file_shares_by_an_alias_is_changed_in_one_place(file):
    written(
        file,
        (
            "systems: ",
            "faults: [&f {kind: slow, worker: 0, factor: 2}, *f, {<<: *f, worker: 1}]\nsystems: ",
        ),
    )
    faults = load_scenarios(file, ["systems=[areal]", "faults.1.factor=3"])[0].faults
    assert [(fault.worker, fault.factor) for fault in faults] == [(0, 2), (0, 3), (1, 2)]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400"])
@pytest.mark.parametrize(
    "key",
    [
        "steps",
        "seed",
        "cluster.gpus",
        "cluster.cost_per_gpu_hour",
        "workload.synthetic.sigma",
        "workload.synthetic.mean_tokens",
        "workload.synthetic.prompt_tokens",
        "workload.synthetic.early_stop_factor",
        "profile.forward_correction",
        "profile.between_passes_s",
        "profile.roofline.compute_efficiency",
        "engine.reserve_bytes",
        "engine.gpu_memory_utilization",
        "training.mfu",
        "training.log_prob_mfu",
        "training.reward_s",
        "training.publish_s",
        "training.load_overhead_s",
        "training.switch_s",
    ],
)
def test_a_number_that_is_not_finite_is_refused_everywhere(file, key, value):
    assert re.search(
        rf"{key} is -?(nan|inf): a finite number is needed", refusal(file, f"{key}={value}")
    )


@pytest.mark.parametrize(
    "override",
    [
        "training.mfu=1e-320",
        "training.reward_s=1e300",
        "profile.forward_correction=1e-320",
        "profile.roofline.memory_efficiency=1e-320",
        "engine.kv_cache_tokens=1" + "0" * 30,
        "engine.block_size=1" + "0" * 30,
        "workload.synthetic.cap_tokens=1000000000000",
        "workload.synthetic.prompt_cap_tokens=1000000000000",
        "workload.synthetic.early_stop_factor=1e-320",
    ],
)
def test_a_number_with_which_nothing_can_be_computed_is_refused(file, override):
    key = override.partition("=")[0]
    assert re.search(
        rf"override '{override}': {key} is .*: give .* or (less|more)", refusal(file, override)
    )


# Overrides.


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("cluster.gpus", "write key=value, such as"),
        ("=3", "write key=value, such as"),
        ("", "write key=value, such as"),
        (
            "cluster.gpus=[1",
            "the value is not YAML (did not find expected ',' or ']'); quote it, or close its brackets",
        ),
        ("cluster.gpus={a: ", "the value is not YAML"),
        ("model=${cluster", "${cluster is no reference to a key of the file"),
        ("cluster.gpus=0x" + "f" * 5000, "a whole number of 5,002 digits; 100 are the most"),
        ("faults=[{<<: [3]}]", "keys are needed here; write {key: value}"),
        ("cluster.gpus=<<", "cluster.gpus is '<<': a whole number is needed"),
        ("systems.٠=split", "does not fit (systems has no entry ٠)"),
        ("systems.00000000003=split", "does not fit (systems has no entry 00000000003)"),
        ("model=" + "[" * 3000 + "]" * 3000, "the value is not YAML"),
        (
            "clustr.gpus=3",
            f"scenario.yaml, override 'clustr.gpus=3': unknown key clustr (did you mean cluster?); {KEYS}",
        ),
        (
            "cluster.gpsu=3",
            "scenario.yaml, override 'cluster.gpsu=3': unknown key cluster.gpsu (did you mean gpu?); cluster has gpu, gpus",
        ),
        ("cluster..gpus=3", "'cluster..gpus' is no key; write one such as cluster.gpus"),
        (".gpus=3", "'.gpus' is no key"),
        ("cluster.=3", "'cluster.' is no key"),
        ("cluster gpus=3", "'cluster gpus' is no key"),
        ("cluster[gpus]=3", "'cluster[gpus]' is no key"),
        ("--cluster.gpus=3", "'--cluster.gpus' is no key"),
        ("cluster=5", "override 'cluster=5': cluster is 5; it has the keys gpu, gpus, tp"),
        (
            "cluster.gpus=",
            "override 'cluster.gpus=': cluster.gpus is None: a whole number is needed",
        ),
        ("cluster.gpus.x=5", "override 'cluster.gpus.x=5': cluster.gpus is 4, it has no x"),
        ("systems.7=split", "override 'systems.7=split': does not fit"),
        ("systems.x=split", "override 'systems.x=split': does not fit"),
        (
            "system=split",
            f"override 'system=split': unknown key system (did you mean systems?); {KEYS}",
        ),
        ("model=${nope}", "model: the file has no key nope"),
        ("steps=-1", "override 'steps=-1': steps is -1: give more than 0"),
        ("name=a b", "override 'name=a b': name is 'a b': use the letters a-z"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(file, override, what):
    message = refusal(file, override)
    assert what in message
    assert brief(f"{override!r}:") in message or repr(override) in message or "${nope}" in override


# Systems and variations.


@pytest.mark.parametrize(
    ("systems", "what"),
    [
        ("", "no systems; give a list such as [verl_colocated, {name: areal, eta: 8}]"),
        ("[]", "no systems; give a list such as"),
        ("3", "systems is 3; give a list such as [verl_colocated, {name: areal, eta: 8}]"),
        ("[split, 3]", "entry 2 of systems is 3; give a name, or {name: areal, eta: 8}"),
        ("[null]", "entry 1 of systems is None; give a name"),
        ("[true]", "entry 1 of systems is True; give a name"),
        ("[[split]]", "entry 1 of systems is ['split']; give a name"),
        ("[{}]", "entry 1 of systems is {}; give a name"),
        ("[{eta: 8}]", "entry 1 of systems is {'eta': 8}; give a name"),
        ("[{areal: {eta: 8}}]", "entry 1 of systems is {'areal': {'eta': 8}}; give a name"),
        ("[{name: 3}]", "entry 1 of systems is {'name': 3}; give a name"),
        ("['${nope}']", "the file has no key nope; correct the reference"),
    ],
)
def test_systems_that_are_no_list_of_systems_are_refused(file, systems, what):
    assert what in refusal(written(file, ("[verl_colocated, {name: areal, eta: 2}]", systems)))
    if systems.startswith("["):  # a command line has split, too: systems=split
        file.write_text(SCENARIO)
        assert what in refusal(file, f"systems={systems}")


@pytest.mark.parametrize(
    ("vary", "what"),
    [
        ("3", "vary is 3; give a list such as [{cluster.gpus: 64}, {cluster.gpus: 256}]"),
        ("{cluster.gpus: 8}", "vary is {'cluster.gpus': 8}; give a list such as"),
        ("[8]", "entry 1 of vary is 8; give key: value, such as {cluster.gpus: 64}"),
        ("[{seed: 1}, cluster.gpus]", "entry 2 of vary is 'cluster.gpus'; give key: value"),
        (
            "[{clustr.gpus: 8}]",
            f"vary clustr.gpus=8: unknown key clustr (did you mean cluster?); {KEYS}",
        ),
        (
            "[{cluster.gpsu: 8}]",
            "vary cluster.gpsu=8: unknown key cluster.gpsu (did you mean gpu?); cluster has gpu, gpus",
        ),
        (
            "[{cluster.gpus: many}]",
            "vary cluster.gpus=many: cluster.gpus is 'many': a whole number is needed",
        ),
        (
            "[{cluster.gpus: 4}, {cluster.gpus: 0}]",
            "vary cluster.gpus=0: cluster.gpus is 0: give more than 0",
        ),
        ("[{cluster: 8}]", "vary cluster=8: cluster is 8; it has the keys gpu, gpus, tp"),
        ("[{cluster.gpus.x: 8}]", "vary cluster.gpus.x=8: cluster.gpus is 4, it has no x"),
        ("[{3: 8}]", f"vary 3=8: unknown key 3; {KEYS}"),
        ("[{'': 8}]", "vary =8: '' is no key"),
        (
            "[{systems: [split]}]",
            "vary has systems; it takes fields such as cluster.gpus, and systems are a list already",
        ),
        ("[{vary: []}]", "vary has vary; it takes fields such as cluster.gpus"),
        (
            "[{model: '${nope}'}]",
            "vary[0].model: the file has no key nope; correct the reference",
        ),
    ],
)
def test_a_variation_that_varies_nothing_is_refused(file, vary, what):
    assert what in refusal(file, f"vary={vary}")
    assert what in refusal(written(file, ("systems:", f"vary: {vary}\nsystems:")))


def test_a_variation_cannot_reach_into_what_is_no_dictionary(file):
    written(
        file,
        ("{gpu: h100, gpus: 4, tp: 1}", "[4]"),
        ("systems:", "vary: [{cluster.gpus: 8}]\nsystems:"),
    )
    assert "vary cluster.gpus=8: does not fit" in refusal(file)


def test_no_variation_is_one_scenario_for_each_system(file):
    for vary in ("null", "[]", "[{}]"):
        assert [s.variant for s in load_scenarios(file, [f"vary={vary}"])] == ["", ""]


def test_a_scenario_survives_the_way_through_yaml_and_json(file):
    (scenario,) = load_scenarios(file, ["systems=[split]"])
    again = yaml.safe_load(yaml.safe_dump(json.loads(scenario.model_dump_json())))
    assert Scenario.model_validate(again).model_dump() == scenario.model_dump()


# Parameters of the systems.


def has(name):
    return {"areal": {"eta": 1, "rollout_share": 0.75}, "split": {"rollout_share": 0.75}}.get(
        name, {}
    )


def test_a_systems_parameter_is_set_after_the_system_with_or_without_its_prefix(file):
    for text in ("eta=4", "system.eta=4"):
        (scenario,) = load_scenarios(file, [text, "seed=9"], system="areal", parameters_of=has)
        assert (scenario.system.parameters, scenario.seed) == ({"eta": 4}, 9)


def test_a_systems_parameter_goes_to_the_systems_that_have_it(file):
    given = [
        "systems=[verl_colocated,split,{name: areal, eta: 1}]",
        "system.eta=4",
        "system.rollout_share=0.5",
    ]
    scenarios = load_scenarios(file, given, parameters_of=has)
    assert [s.system.parameters for s in scenarios] == [
        {},
        {"rollout_share": 0.5},
        {"eta": 4, "rollout_share": 0.5},
    ]
    made = load_scenarios(
        file, ["system.eta=4"], choices=Choices(["areal"], ["seer"]), parameters_of=has
    )
    assert [s.system.parameters for s in made] == [{"dispatch": "seer", "eta": 4}]


def test_a_parameter_of_no_system_is_refused_with_those_that_there_are(file):
    with pytest.raises(
        InputError,
        match=r"system\.etaa: no parameter of these systems \(did you mean eta\?\); areal has eta",
    ):
        load_scenarios(file, ["systems=[areal]", "system.etaa=4"], parameters_of=has)


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ],
)
def test_a_models_name_on_hugging_face_and_a_gpu_in_capitals_find_the_files_of_their_own_names(
    file, written, known
):
    overrides = [
        f"model={written}",
        "cluster.gpu=H100",
        "profile={path: '${model}_${cluster.gpu}.parquet', roofline: null}",
    ]
    for scenario in load_scenarios(file, overrides):
        assert (scenario.model, scenario.cluster.gpu) == (known, "h100")
        assert scenario.profile.path.endswith(f"{known}_h100.parquet")
