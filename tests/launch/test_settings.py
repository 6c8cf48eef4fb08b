"""Flat keys from a launch: arguments, files that they name, YAML, TOML, JSON and Python."""

import json

import pytest

from simrl.errors import InputError
from simrl.launch.settings import read_launch
from tests.launch.reading import VERL, read, settings, write

ROLLOUT = "actor_rollout_ref: {rollout: {n: 8}}\n"  # what verl's files are known by


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("8", 8),
        ("1e-6", 1e-6),
        ("0.5", 0.5),
        ("True", True),
        ("false", False),
        ("null", None),
        ("None", None),
        ("word", "word"),
        ("a=b", "a=b"),
        ("'[1,2]'", [1, 2]),
        ("'[unclosed'", "[unclosed"),
        ("'a: b: c'", "a: b: c"),
        ("", ""),
        ("'*'", "*"),
        ("-1", -1),
    ],
)
def test_a_value_has_a_type(tmp_path, written, value):
    assert settings(tmp_path, f"{VERL} a.b={written}")["a.b"] == value


def test_a_mapping_is_keys_of_its_own(tmp_path):
    keys = settings(tmp_path, f"{VERL} '+a.b={{c: 1, d-e: {{f: 2}}}}'")
    assert (keys["a.b.c"], keys["a.b.d_e.f"]) == (1, 2)


OPTIONS = "python train.py --rollout-batch-size 8 --n-samples-per-prompt 4"


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("--a-b 8", "a_b", 8),
        ("--a-b=8", "a_b", 8),
        ("--a-b", "a_b", True),
        ("--a-b --c 1", "a_b", True),
        ("--no-a-b", "no_a_b", True),
        ("--a-b 1 2 x", "a_b", [1, 2, "x"]),
        ("--a-b -1", "a_b", -1),
        ("--a-b 4 --a-b 8", "a_b", 8),
        ("--a.b-c 8", "a.b_c", 8),
    ],
)
def test_an_option_is_a_key_with_underscores(tmp_path, written, key, value):
    assert settings(tmp_path, f"{OPTIONS} {written}")[key] == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${a.b}", 4),
        ("${.b}", 4),
        ("${..a.b}", 4),
        ("x/${a.b}/y", "x/4/y"),
        ("${a.d}", 8),
        ("${oc.env:HOME,8}", 8),
        ("${mul:2,4}", 8),
        ("${mul:${a.b},2}", 8),
        ("${div:17,2}", 8),
        ("${add:4,${a.b}}", 8),
        ("${sub:12,4}", 8),
        ("${max:4,8}", 8),
        ("${min:16,8}", 8),
        ("${mul:${mul:2,2},2}", 8),
    ],
)
def test_an_interpolation_has_the_value_it_names(tmp_path, written, value):
    text = f"{ROLLOUT}a: {{b: 4, d: '${{a.e}}', e: 8, c: '{written}'}}\n"
    assert settings(tmp_path, text, "run.yaml")["a.c"] == value


@pytest.mark.parametrize(
    "written",
    ["${oc.env:HOME}", "${oc.env:PATH}", "${no.such}", "${a.c}", "${mul:2,x}", "${eval:'2*4'}"],
)
def test_an_interpolation_that_only_a_run_resolves_keeps_its_dollar(tmp_path, written):
    text = f'{ROLLOUT}a: {{b: 4, c: "{written}"}}\n'
    assert "$" in settings(tmp_path, text, "run.yaml")["a.c"]


def test_no_environment_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SIZE", "4")
    assert settings(tmp_path, f"{VERL} x=${{SIZE:-8}} y='${{oc.env:SIZE,8}}'")["x"] == 8
    assert settings(tmp_path, f"{VERL} x=${{SIZE:-8}} y='${{oc.env:SIZE,8}}'")["y"] == 8


def test_a_chain_of_nemos_defaults_stands_beneath_the_file(tmp_path):
    write(
        tmp_path,
        {
            "base.yaml": "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}\npolicy: {model_name: a}\n",
            "middle.yaml": "defaults: base.yaml\ngrpo: {num_prompts_per_step: 64}\n",
        },
    )
    text = "defaults: ./middle.yaml\npolicy: {model_name: Qwen/Qwen3-8B}\n"
    assert settings(tmp_path, text, "run.yaml") == {
        "grpo.num_prompts_per_step": 64,
        "grpo.num_generations_per_prompt": 16,
        "policy.model_name": "Qwen/Qwen3-8B",
    }


def test_a_chain_of_defaults_leads_through_folders(tmp_path):
    write(
        tmp_path,
        {
            "grpo_math.yaml": "grpo: {num_prompts_per_step: 32}\n",
            "recipes/llm/base.yaml": "defaults: ../../grpo_math.yaml\npolicy: {a: 1}\n",
            "recipes/llm/run.yaml": "defaults: base.yaml\n",
        },
    )
    assert read_launch(tmp_path / "recipes/llm/run.yaml").settings == {
        "grpo.num_prompts_per_step": 32,
        "policy.a": 1,
    }


def test_hydras_defaults_stand_below_their_group(tmp_path):
    write(
        tmp_path,
        {
            "actor/fsdp.yaml": "strategy: fsdp\nsize: 1\n",
            "other.yaml": "top: 1\n",
            "model/big.yaml": "path: Qwen/Qwen3-8B\n",
            "rollout/vllm.yaml": "n: 8\n",
        },
    )
    text = (
        "defaults:\n- actor: fsdp\n- other\n- model@actor_rollout_ref.model: big\n"
        "- rollout@actor_rollout_ref.rollout: vllm\n- nowhere: gone\n- _self_\nactor: {size: 2}\n"
    )
    assert settings(tmp_path, text, "run.yaml") == {
        "actor.strategy": "fsdp",
        "actor.size": 2,
        "top": 1,
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
        "actor_rollout_ref.rollout.n": 8,
    }


def test_arguments_stand_above_the_file_that_an_option_names(tmp_path):
    beside = {"config.yaml": "grpo: {num_prompts_per_step: 32, max_num_steps: 4}\n"}
    command = "uv run examples/run_grpo_math.py --config config.yaml grpo.num_prompts_per_step=64"
    keys = settings(tmp_path, command, **beside)
    assert (keys["grpo.num_prompts_per_step"], keys["grpo.max_num_steps"]) == (64, 4)


def test_a_file_that_an_option_names_and_that_is_not_there_is_noted(tmp_path):
    launch = read(tmp_path, "uv run examples/run_grpo_math.py a.b=1 --config gone.yaml")
    assert launch.guessed == [
        "--config gone.yaml: not found beside the script, the framework's defaults are taken"
    ]


def test_a_launch_of_a_file_alone_that_is_not_there_is_refused_for_it(tmp_path):
    with pytest.raises(InputError, match=r"gone\.yaml"):
        read(tmp_path, "uv run examples/run_grpo_math.py --config gone.yaml")


@pytest.mark.parametrize("option", ["--config config.yaml", "--config=config.yaml"])
def test_arguments_behind_a_file_are_no_files(tmp_path, option):
    beside = {"config.yaml": "grpo: {num_prompts_per_step: 32}\n"}
    command = f"uv run examples/run_grpo_math.py {option} a.b=1 c.d=2"
    assert not read(tmp_path, command, **beside).guessed


@pytest.mark.parametrize(
    "options",
    [
        "--config-path=config --config-name=mine",
        "--config-path=config --config-name=mine.yaml",
        "--config-path config --config-name mine",
        "--config-name mine --config-path config",
        "--config-path config --config-name mine a.b=1",
    ],
)
def test_the_file_of_hydras_options_stands_beneath_the_arguments(tmp_path, options):
    write(tmp_path, {"config/mine.yaml": "data: {train_batch_size: 64}\ntrainer: {nnodes: 2}\n"})
    keys = settings(tmp_path, f"{VERL} trainer.nnodes=4 {options}")
    assert (keys.get("data.train_batch_size"), keys["trainer.nnodes"]) == (64, 4)


def test_a_file_of_hydras_options_that_is_not_there_is_noted(tmp_path):
    assert read(tmp_path, f"{VERL} --config-name=gone trainer.nnodes=4").guessed


def test_toml_is_keys_with_underscores(tmp_path):
    keys = settings(tmp_path, "[orchestrator]\nbatch_size = 8\n[a-b.c]\nd-e = [1, 2]\n", "run.toml")
    assert keys == {"orchestrator.batch_size": 8, "a_b.c.d_e": [1, 2]}


def test_files_of_toml_are_laid_over_one_another(tmp_path):
    write(
        tmp_path,
        {
            "base.toml": "[orchestrator]\nbatch_size = 8\ngroup_size = 4\n",
            "over.toml": "[orchestrator]\nbatch_size = 16\n",
        },
    )
    keys = settings(tmp_path, "uv run rl @ base.toml @ over.toml --orchestrator.group-size 2")
    assert (keys["orchestrator.batch_size"], keys["orchestrator.group_size"]) == (16, 2)


def test_json_is_read_as_yaml_is(tmp_path):
    text = json.dumps({"actor_rollout_ref": {"rollout": {"n": 8}}, "a": [{"b": 1}, {"c": 2}]})
    assert settings(tmp_path, text, "run.json") == {
        "actor_rollout_ref.rollout.n": 8,
        "a.0.b": 1,
        "a.1.c": 2,
    }


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.toml", "run.json"])
@pytest.mark.parametrize(
    "text", ["", "[", "- a\n- b\n", "a: b\n", '{"a": 1}', "a = 1\n", "actor_rollout_ref\n"]
)
def test_a_configuration_of_no_framework_is_refused(tmp_path, name, text):
    with pytest.raises(InputError, match=name):
        read(tmp_path, text, name)


def test_a_configuration_of_fine_tuning_is_refused_with_the_reason(tmp_path):
    text = "sft: {max_num_epochs: 1}\npolicy: {dtensor_cfg: {enabled: true}}\n"
    with pytest.raises(InputError, match="supervised fine-tuning, no RL rollouts"):
        read(tmp_path, text, "run.yaml")


# Python.

GRPO = "from trl import GRPOConfig, GRPOTrainer\n{}\nargs = GRPOConfig(num_generations=8, x={})\n"


@pytest.mark.parametrize(
    ("before", "word", "value"),
    [
        ("", "8", 8),
        ("", "-1", -1),
        ("", "'text'", "text"),
        ("", "None", None),
        ("", "True", True),
        ("", "[1, 2]", [1, 2]),
        ("", "{'a': 1}", {"a": 1}),
        ("a = 8", "a", 8),
        ("a = 2", "a * 4", 8),
        ("a = 2\nb = a * 2", "b * 2", 8),
        ("a = 17", "a // 2", 8),
    ],
)
def test_a_literal_of_python_is_a_value(tmp_path, before, word, value):
    assert settings(tmp_path, GRPO.format(before, word), "run.py")["x"] == value


@pytest.mark.parametrize(
    "word",
    [
        "size",
        "f()",
        "int(os.environ['N'])",
        "8 if a else 4",
        "f'{a}'",
        "(a := 8)",
        "2 ** 3",
        "args.size",
    ],
)
def test_other_code_of_python_keeps_a_dollar(tmp_path, word):
    assert settings(tmp_path, GRPO.format("", word), "run.py")["x"].startswith("$[")


def test_a_name_has_the_value_that_is_assigned_before(tmp_path):
    assert settings(tmp_path, f"a = 8\n{GRPO.format('', 'a')}a = 4\n", "run.py")["x"] == 8


@pytest.mark.xfail(strict=True, reason="another assignment of the file wins")
@pytest.mark.parametrize(
    "frame",
    [
        "a = 8\ndef f():\n    a = 4\n{}",
        "def f():\n    a = 4\n{}",
        "a = 4\nfor a in sizes:\n    pass\n{}",
        "a = 4\na += 4\n{}",
    ],
)
def test_a_name_that_has_several_values_is_the_one_before_or_unknown(tmp_path, frame):
    value = settings(tmp_path, frame.format(GRPO.format("", "a")), "run.py")["x"]
    assert value == 8 or "$" in str(value)


def test_the_model_of_the_trainer_is_read(tmp_path):
    text = GRPO.format("", "1") + "t = GRPOTrainer(model='Qwen/Qwen3-8B', args=args)\n"
    keys = settings(tmp_path, text, "run.py")
    assert keys["model_name_or_path"] == "Qwen/Qwen3-8B"
    assert keys["config_class"] == "GRPOConfig"


@pytest.mark.xfail(strict=True, reason="**settings are lost without a word")
def test_keywords_that_are_unpacked_are_noted(tmp_path):
    launch = read(
        tmp_path, "from trl import GRPOConfig\nGRPOConfig(num_generations=8, **more)\n", "run.py"
    )
    assert launch.guessed or any("$" in str(value) for value in launch.settings.values())


@pytest.mark.xfail(strict=True, reason="the first in breadth is taken without a word")
def test_a_second_configuration_is_noted(tmp_path):
    text = GRPO.format("", "1") + "other = GRPOConfig(num_generations=4)\n"
    assert read(tmp_path, text, "run.py").guessed


@pytest.mark.parametrize("text", ["x = 1\n", "def (", "", "SFTConfig(a=1)\n"])
def test_python_without_a_configuration_is_refused(tmp_path, text):
    with pytest.raises(InputError, match=r"run\.py"):
        read(tmp_path, text, "run.py")


def test_files_of_accelerate_and_deepspeed_stand_below_their_names(tmp_path):
    write(
        tmp_path,
        {
            "zero3.yaml": "num_processes: 8\ndeepspeed_config: {zero_stage: 3}\n",
            "ds.json": json.dumps({"zero_optimization": {"stage": 3}}),
            "grpo.yaml": "num_generations: 4\nbeta: 0.1\n",
        },
    )
    keys = settings(
        tmp_path,
        "accelerate launch --config_file zero3.yaml examples/scripts/grpo.py"
        " --config grpo.yaml --deepspeed ds.json --num_generations 8",
    )
    assert keys["accelerate.num_processes"] == 8
    assert keys["accelerate.deepspeed_config.zero_stage"] == 3
    assert keys["deepspeed.zero_optimization.stage"] == 3
    assert (keys["num_generations"], keys["beta"]) == (8, 0.1)
