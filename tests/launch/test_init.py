"""`simrl init`: a scenario from a launch or from six answers, and one line for what is wrong."""

import csv
import io
import json
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from simrl.commands import cli
from simrl.launch.tables import TABLES
from simrl.scenario.load import load_scenarios
from tests.command_line import contents
from tests.launch.reading import COMPLETE, VERL

SMALL = ("workload.synthetic.prompts_per_step=4", "steps=2", "warmup_steps=1")


@pytest.fixture
def script(simrl):
    (simrl.folder / "run.sh").write_text(f"{COMPLETE} my.key=8 trainer.project_name=x\n")
    return simrl


@pytest.fixture
def asked(simrl, monkeypatch):
    """`simrl init` with answers on stdin, a line each."""

    def call(*arguments, answers=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
        return simrl("init", *arguments)

    return call


def written(path):
    return yaml.safe_load(path.read_text())


# From a file.


def test_a_launch_gives_a_scenario_that_can_be_compared(script):
    code, out, err = script("init", "--from", "run.sh", "--gpu", "h100")
    assert (code, err) == (0, "")
    assert "Written: run.yaml, run.keys.csv" in out
    assert "Next:  simrl compare run.yaml" in out
    names = [one.system.name for one in load_scenarios(script.folder / "run.yaml")]
    assert names == ["verl_colocated", "one_step_off", "areal"]


def test_a_data_sheet_is_read_from_where_the_user_stands(script):
    sheet = {"memory_bytes": 80e9, "memory_bytes_per_s": 2e12, "bf16_flops": 300e12}
    (script.folder / "t").mkdir()
    (script.folder / "t" / "card.toml").write_text(
        "".join(f"{key} = {value}\n" for key, value in sheet.items())
    )
    inline = f"{{name: card, {', '.join(f'{key}: {value}' for key, value in sheet.items())}}}"
    for number, gpu in enumerate(("t/card.toml", inline)):
        output = f"t/{number}.yaml"
        code, _, err = script("init", "--from", "run.sh", "--gpu", gpu, "-o", output)
        assert (code, err) == (0, "")
        assert load_scenarios(script.folder / output)
    assert written(script.folder / "t" / "0.yaml")["cluster"]["gpu"].endswith("t/card.toml")
    code, _, err = script("init", "--from", "run.sh", "--gpu", "t/none.toml", "-o", "t/2.yaml")
    assert code == 2
    assert "run.sh" not in err


def test_compare_takes_what_init_writes(script):
    assert script("init", "--from", "run.sh", "--gpu", "h100").code == 0
    code, out, _ = script("compare", "run.yaml", *SMALL, "--jobs", "1", "--json")
    assert code == 0
    assert len(json.loads(out)) == 3


def test_the_lists_are_counted_and_what_is_not_understood_is_named(script):
    out = script("init", "--from", "run.sh").out
    assert "8 keys understood\n1 key without effect here\n1 key not understood" in out
    assert "  my.key" in out
    assert "trainer.project_name" not in out


def test_what_is_missing_is_named_with_the_option_that_gives_it(script):
    out = script("init", "--from", "run.sh").out
    assert "  the kind of GPU: h100; give --gpu NAME\n" in out
    assert "  the mean length of responses: 358; give --mean-tokens N, or --trace FILE\n" in out


def test_an_option_gives_what_is_missing(script):
    out = script("init", "--from", "run.sh", "--gpu", "b200", "--mean-tokens", "300").out
    assert "the kind of GPU" not in out and "the mean length of responses" not in out
    data = written(script.folder / "run.yaml")
    assert data["cluster"]["gpu"] == "b200"
    assert data["workload"]["synthetic"]["mean_tokens"] == 300


def test_lists_prints_every_key_with_what_became_of_it(script):
    out = script("init", "--from", "run.sh", "--lists").out
    lines = [line.strip() for line in out.splitlines()]
    for heading in ("8 keys understood:", "1 key without effect here:", "1 key not understood:"):
        assert heading in lines
    for key, what in (
        ("data.max_response_length", "workload.synthetic.cap_tokens"),
        ("trainer.project_name", "a name"),
        ("my.key", "8"),
    ):
        (line,) = [line for line in lines if line.startswith(key)]
        assert what in line


def test_the_table_of_keys_has_each_of_them_once(script):
    script("init", "--from", "run.sh")
    with (script.folder / "run.keys.csv").open() as file:
        keys = [row["key"] for row in csv.DictReader(file)]
    assert len(keys) == len(set(keys)) == 10


def test_json_is_the_scenario_and_all_of_stdout(script):
    code, out, err = script("init", "--from", "run.sh", "--json")
    shown = json.loads(out)
    assert (code, err, shown["scenario"]) == (0, "", "run.yaml")
    assert shown["data"] == written(script.folder / "run.yaml")


def test_json_has_the_lists_too(script):
    assert "my.key" in script("init", "--from", "run.sh", "--json").out


def test_an_override_is_a_field_of_the_scenario(script):
    script("init", "--from", "run.sh", "cluster.gpus=16", "workload.synthetic.sigma=1")
    data = written(script.folder / "run.yaml")
    assert (data["cluster"]["gpus"], data["workload"]["synthetic"]["sigma"]) == (16, 1)


def test_systems_are_refused_since_the_launch_decides_the_first(script):
    message = script.refuses("init", "--from", "run.sh", "systems=[split]")
    assert "systems: the launch decides the first" in message


def test_o_names_the_scenario(script):
    assert script("init", "--from", "run.sh", "-o", "sub/mine.yaml").code == 0
    assert (script.folder / "sub/mine.yaml").exists()
    assert (script.folder / "sub/mine.keys.csv").exists()


def test_a_second_call_replaces_nothing(script):
    script("init", "--from", "run.sh")
    assert "is there already" in script.refuses("init", "--from", "run.sh")


def test_a_scenario_is_named_after_its_file(script):
    (script.folder / "run.sh").rename(script.folder / "Run GRPO-8b (2).sh")
    script("init", "--from", "Run GRPO-8b (2).sh")
    assert written(script.folder / "run_grpo_8b_2.yaml")["name"] == "run_grpo_8b_2"


REFUSED = {
    "no such file": (("--from", "nowhere.sh"), "nowhere.sh: cannot be read"),
    "a folder": (("--from", "."), ".: no text file"),
    "no launch": (("--from", "empty.sh"), "no command starts RL training"),
    "no framework": (("--from", "scenario.yaml"), "scenario.yaml: no configuration of verl"),
    "an unknown field": (("--from", "run.sh", "foo=1"), "unknown key foo"),
    "no override": (("--from", "run.sh", "foo"), "a launch script is --from foo"),
    "a parameter of no system": (("--from", "run.sh", "system.eta=2"), "unknown key system"),
    "no GPUs": (("--from", "run.sh", "--gpus", "0"), "give 1 or more"),
    "a text for GPUs": (("--from", "run.sh", "--gpus", "many"), "--gpus"),
    "a negative mean": (("--from", "run.sh", "--mean-tokens", "-5"), "mean_tokens is -5"),
    "no number": (("--from", "run.sh", "--mean-tokens", "nan"), "a finite number"),
    "an unknown GPU": (("--from", "run.sh", "--gpu", "banana"), "'banana'"),
    "a mean above the largest": (("--from", "run.sh", "--mean-tokens", "9999"), "mean_tokens"),
    "the script itself": (("--from", "run.sh", "-o", "run.sh"), "is there already"),
    "a text in the script": (("--from", "two.sh"), "prompts_per_step is 'two': a whole number"),
    "that text, by its key": (("--from", "two.sh"), "two.sh, data.train_batch_size"),
    "a negative number": (("--from", "negative.sh"), "give more than 0"),
    "very many GPUs": (("--from", "many.sh"), "give 262144 or less"),
    "a very large batch": (("--from", "batch.sh"), "stay under"),
    "a folder to write": (("--from", "run.sh", "-o", "."), "is a folder; name a file"),
    "an unknown release": (("--from", "run.sh", "--release", "banana"), "give one such as"),
}


@pytest.mark.parametrize(("arguments", "what"), REFUSED.values(), ids=REFUSED)
def test_bad_input_ends_with_2_and_one_line_and_writes_nothing(script, arguments, what):
    for name, more in {
        "two": "data.train_batch_size=two",
        "negative": "trainer.nnodes=-1",
        "many": "trainer.nnodes=1000000000",
        "batch": "data.train_batch_size=1000000000000",
    }.items():
        (script.folder / f"{name}.sh").write_text(f"{COMPLETE} {more}\n")
    (script.folder / "empty.sh").write_text("")
    assert what in script.refuses("init", *arguments)


def test_a_trace_that_is_not_there_is_named(script):
    assert "gone.parquet" in script.refuses("init", "--from", "run.sh", "--trace", "gone.parquet")


def test_nothing_is_run_and_nothing_else_is_written(script):
    (script.folder / "run.sh").write_text(
        f"touch MARK\nA=$(touch MARK)\n{COMPLETE} x=`touch MARK`\n"
    )
    before = contents(script.folder).keys()
    assert script("init", "--from", "run.sh").code == 0
    assert contents(script.folder).keys() - before == {"run.yaml", "run.keys.csv"}


# Six questions.


def test_six_questions_are_asked_and_their_proposals_are_a_scenario(asked, simrl):
    code, out, err = asked(answers="\n" * 6)
    assert code == 0
    assert err.count("]:") == 6
    assert "Next:  simrl compare my_run.yaml" in out
    data = written(simrl.folder / "my_run.yaml")
    assert (data["model"], data["cluster"]["gpus"], data["cluster"]["gpu"]) == (
        "qwen3-8b",
        64,
        "h100",
    )
    lengths = data["workload"]["synthetic"]
    assert (lengths["prompts_per_step"], lengths["group"]) == (128, 16)
    assert (lengths["mean_tokens"], lengths["cap_tokens"]) == (3000, 16384)
    assert len(load_scenarios(simrl.folder / "my_run.yaml")) >= 2


def test_answers_are_taken(asked, simrl):
    answers = "AReaL\nqwen3-0.6b\n16 h200\n64 x 4\n500, 4096\nsweep\n"
    code, out, _ = asked(answers=answers)
    assert code == 0
    assert "AReaL" in out and "Next:  simrl sweep my_run.yaml cluster.gpus=" in out
    data = written(simrl.folder / "my_run.yaml")
    assert (data["model"], data["cluster"]["gpus"], data["cluster"]["gpu"]) == (
        "qwen3-0.6b",
        16,
        "h200",
    )
    lengths = data["workload"]["synthetic"]
    assert [lengths[key] for key in ("prompts_per_step", "group", "mean_tokens", "cap_tokens")] == [
        64,
        4,
        500,
        4096,
    ]


@pytest.mark.parametrize("framework", [table.name for table in TABLES])
def test_every_framework_can_be_answered(asked, simrl, framework):
    answers = f"{framework}\nqwen3-0.6b\n16 h100\n16 4\n500 2048\n\n"
    assert asked(answers=answers).code == 0
    assert written(simrl.folder / "my_run.yaml")["workload"]["synthetic"]["group"] == 4


def test_an_option_takes_the_place_of_its_question(asked, simrl):
    arguments = ("--model", "qwen3-0.6b", "--gpus", "8", "--gpu", "h100")
    code, _, err = asked(*arguments, answers="\n" * 4)
    assert (code, err.count("]:")) == (0, 4)
    data = written(simrl.folder / "my_run.yaml")
    assert (data["model"], data["cluster"]["gpus"]) == ("qwen3-0.6b", 8)


@pytest.mark.parametrize(
    ("option", "value", "of"),
    [
        ("--gpu", "b200", ("cluster", "gpu")),
        ("--gpus", "8", ("cluster", "gpus")),
        ("--mean-tokens", "500", ("workload", "synthetic", "mean_tokens")),
    ],
)
def test_an_option_of_half_a_question_is_kept(asked, simrl, option, value, of):
    assert asked(option, value, answers="\n" * 6).code == 0
    data = written(simrl.folder / "my_run.yaml")
    for key in of:
        data = data[key]
    assert str(data) in (value, f"{value}.0")


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ("banana\n" + "\n" * 5, "Framework: 'banana'"),
        ("ver\n" + "\n" * 5, "did you mean verl?"),
        ("\n" * 5 + "nothing\n", "'nothing'; choose one of compare, advise, sweep"),
        ("\n\n64\n" + "\n" * 3, "'64'; answer such as 64 h100"),
        ("\n\n64 h100 x\n" + "\n" * 3, "answer such as 64 h100"),
        ("\n\nmany h100\n" + "\n" * 3, "cluster.gpus is 'many': a whole number is needed"),
        ("\n\n-8 h100\n" + "\n" * 3, "cluster.gpus is -8"),
        ("\n\n\n128\n" + "\n" * 2, "answer such as 128 16"),
        ("\n\n\n0 4\n" + "\n" * 2, "prompts_per_step is 0"),
        ("\n\n\n\n[ 4\n" + "\n", "not YAML"),
        ("", "no answer; name what starts your run with --from FILE"),
        ("verl\nqwen3-8b\n", "no answer"),
    ],
)
def test_a_bad_answer_ends_with_2_and_one_line_and_writes_nothing(asked, simrl, answers, what):
    before = contents(simrl.folder)
    code, out, err = asked(answers=answers)
    assert code == 2
    assert out.strip() == ""
    (line,) = [line for line in err.splitlines() if "simrl: " in line]
    assert what in line
    assert contents(simrl.folder) == before


def test_typer_asks_the_same(simrl):
    result = CliRunner().invoke(cli.make_app(), ["init", "--json"], input="\n" * 6)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout[result.stdout.index("{") :])["scenario"] == "my_run.yaml"


# As a command, and from Python.


def test_a_process_ends_with_2_and_one_line(simrl):
    (simrl.folder / "run.sh").write_text(f'{VERL} x="8\n')
    process = simrl.start("init", "--from", "run.sh")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("simrl: run.sh: no shell script (")


def test_without_a_terminal_and_without_answers_it_ends(simrl):
    process = simrl.start("init", stdin=subprocess.DEVNULL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no answer" in err


def test_python_has_it_too(tmp_path, monkeypatch):
    import simrl

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(COMPLETE)
    made = simrl.init(source="run.sh", gpu="h100")
    assert made.data["scenario"] == "run.yaml"
    assert set(made.table["list"]) == {"understood"}
    assert (tmp_path / "run.yaml").exists()
