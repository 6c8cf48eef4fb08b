"""Names that nobody knows: the message has the one that may have been meant."""

import pytest

from simrl.errors import LONGEST_LINE, LONGEST_WORD, InputError, meant

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
            "system 'areall' is unknown (did you mean areal?); choose one",
        ),
        (["compare", "scenario.yaml", "systems=[verl]"], "system 'verl' is unknown (did you mean verl_colocated or "),
        (["systems", "show", "rhimerl"], "system 'rhimerl' is unknown (did you mean rhymerl?); choose one"),
        (
            ["compare", "scenario.yaml", "systems=[{name: areal, etta: 3}]"],
            "parameter 'etta' (did you mean eta?); it has",
        ),
        (["compare", "scenario.yaml", "cluster.gpu=H-100"], "gpu 'H-100' is unknown (did you mean h100?); choose"),
        (["compare", "scenario.yaml", "cluster.gpu=h220"], "gpu 'h220' is unknown (did you mean h20 or h200?); choose"),
        (["compare", "scenario.yaml", "cluster.eq=2"], "unknown key cluster.eq (did you mean ep?); cluster has"),
        (["compare", "scenario.yaml", "model=Qwen/Qwen3_8B"], "model Qwen/Qwen3_8B (did you mean qwen3-8b?): neither"),
        (
            ["compare", "scenario.yaml", "gpus=8"],
            "unknown key gpus (did you mean cluster.gpus?); a scenario has",
        ),
        (["compare", "scenario.yaml", "mfu=0.3"], "unknown key mfu (did you mean training.mfu?); a scenario has"),
        (
            ["compare", "scenario.yaml", "cluster.gups=8"],
            "unknown key cluster.gups (did you mean gpus?); cluster has",
        ),
        (
            ["compare", "scenario.yaml", "training.microbatching=dinamic"],
            "training.microbatching is 'dinamic' (did you mean dynamic?): input should be",
        ),
        (
            ["compare", "scenario.yaml", "systems=[{name: areal, on_stale: dorp}]"],
            "on_stale is 'dorp' (did you mean drop?): Input should be",
        ),
        (
            ["compare", "scenario.yaml", "--speculation", "histo_spec"],
            "'histo_spec' (did you mean histospec?); give none",
        ),
        (["sweep", "scenario.yaml", "system.eat=1,2"], "system.eat: no parameter of these systems (did you mean eta?)"),
        (
            ["sweep", "scenario.yaml", "seed=1,2", "--zip", "sead,seed"],
            "or no longer (did you mean seed?); there are seed",
        ),
        (["trace", "synth", "--preset", "rhymerl_math", "-o", "t.parquet"], "unknown (did you mean rhymerl-math?)"),
    ],
)
def test_what_may_have_been_meant_is_told(simrl, arguments, what):
    assert what in simrl.refuses(*arguments)


def test_a_percentage_in_place_of_a_share_is_told_as_a_share(simrl):
    refused = simrl.refuses("compare", "scenario.yaml", "systems=[{name: split, rollout_share: 75}]")
    assert "rollout_share is 75: a share between 0 and 1; did you mean 0.75?" in refused
    refused = simrl.refuses("compare", "scenario.yaml", "training.mfu=35")
    assert "training.mfu is 35: a share between 0 and 1; did you mean 0.35?" in refused
    refused = simrl.refuses("compare", "scenario.yaml", "profile.sequence_overhead_s=35")
    assert "sequence_overhead_s is 35: input should be less than or equal to 1 (seconds)" in refused, (
        "they are no share"
    )


def test_a_setting_of_the_engine_that_is_said_in_another_section_is_told_with_its_place(simrl):
    assert "it is cluster.tp" in simrl.refuses("compare", "scenario.yaml", "engine.tensor_parallel_size=2")


def test_a_message_is_one_line_whatever_is_in_it():
    assert str(InputError("a\nb\x1b[31m")) == "a b\\x1b[31m"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["optimize", "scenario.yaml", "--max-off-policyness", "nan"], "invalid value for '--max-off-policyness': "),
        (["optimize", "scenario.yaml", "--trials", "few"], "invalid value for '--trials': "),
        (["compare", "scenario.yaml", "--jbos", "3"], "no such option: --jbos"),
        (["compare"], "missing argument 'SCENARIO'"),
        (["optimise", "scenario.yaml"], "no such command 'optimise'. Did you mean 'optimize'?\n"),
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
    assert simrl("run", "scenario.yaml", "--system", "areal", "engine.enforce_eager=true", "-o", "out").code == 0


def test_a_long_value_loses_its_middle_in_a_message(simrl):
    line = simrl.refuses("compare", "scenario.yaml", f"model={'m' * 5000}end")
    assert "mmm…mmm" in line and "end" in line and len(line) < LONGEST_LINE
    line = simrl.refuses("compare", "scenario.yaml", f"model={'m ' * 5000}end")
    assert len(line) < LONGEST_LINE + len("simrl: \n") + 1
    assert simrl.refuses("compare", "scenario.yaml", "--gpus", "9" * 5000 + "x").count("9") < LONGEST_WORD


def test_a_message_of_usual_words_is_told_whole():
    words = " ".join(["w" * LONGEST_WORD] * 9)
    assert str(InputError(words)) == words


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cluster.gpus=1000000", "cluster.gpus is 1000000: input should be less than or equal to 262144"),
        ("steps=10000000000000000000", "steps is 10000000000000000000"),
        ("steps=1000001", "steps is 1000001: input should be less than or equal to 1000000"),
    ],
)
def test_a_run_that_nobody_has_is_refused(simrl, setting, said):
    assert said in simrl.refuses("compare", "scenario.yaml", setting)


def test_more_samples_than_a_run_can_hold_are_refused(simrl):
    line = simrl.refuses("compare", "scenario.yaml", "steps=1000000", "workload.synthetic.prompts_per_step=200")
    assert "steps 1,000,000 of 400 samples are 400,000,000 samples; stay under 100,000,000" in line
