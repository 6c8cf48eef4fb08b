"""Slips of a newcomer: a command does what was meant, or says in one line what to write, and that works."""

import json
import sys
from pathlib import Path

import pytest

from simrl.commands import compare
from simrl.commands.slips import option_meant
from simrl.profile.shipped import ROOT
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.study.compare import require_possible
from simrl.validation import number_meant
from tests.command_line import SCENARIO, CommandLine

VERL = "step:1 - timing_s/gen:20.0 - timing_s/step:40.0 - response_length/mean:60.0 - response_length/max:200.0\n"


@pytest.fixture
def scenarios(simrl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """What a command would simulate."""
    found: list[Scenario] = []

    def keep(scenarios, *_):
        found.extend(scenarios)
        raise SystemExit(0)

    monkeypatch.setattr(compare, "simulate_all", keep)
    return found


def systems_of(scenarios: list[Scenario]) -> list[tuple[str, dict[str, object]]]:
    return [(each.system.name, each.system.parameters) for each in scenarios]


@pytest.mark.parametrize("written", ["system.eta=3", "eta=3"])
def test_a_parameter_goes_to_the_systems_that_have_it_with_or_without_its_section(
    simrl, scenarios, written
):
    simrl("compare", "scenario.yaml", written)
    assert systems_of(scenarios) == [("verl_colocated", {}), ("areal", {"eta": 3})]


def test_systems_that_an_override_makes_equal_are_simulated_once(simrl, scenarios):
    simrl(
        "compare",
        "scenario.yaml",
        "systems=[{name: areal, eta: 1}, {name: areal, eta: 4}]",
        "system.eta=2",
    )
    assert systems_of(scenarios) == [("areal", {"eta": 2})]


def test_one_system_that_is_named_twice_is_simulated_once(simrl, scenarios):
    simrl("compare", "scenario.yaml", "systems=[areal, areal, {name: areal}]")
    assert systems_of(scenarios) == [("areal", {})]


@pytest.mark.parametrize(
    "written",
    [
        ["systems=areal,split"],
        ["systems=areal,split,"],
        ["systems=[areal,split]"],
        ["--system", "areal,split"],
        ["--system", "areal", "--system", "split"],
    ],
)
def test_systems_are_listed_with_commas_or_as_a_list(simrl, scenarios, written):
    simrl("compare", "scenario.yaml", *written)
    assert systems_of(scenarios) == [("areal", {}), ("split", {})]


def test_systems_with_parameters_are_listed_with_commas(simrl, scenarios):
    simrl("compare", "scenario.yaml", "systems={name: areal, eta: 2},split")
    assert systems_of(scenarios) == [("areal", {"eta": 2}), ("split", {})]


def test_several_values_of_a_field_are_compared(simrl, scenarios):
    simrl("compare", "scenario.yaml", "--system", "areal", "cluster.gpus=16,32", "seed=1,2")
    assert [(each.cluster.gpus, each.seed) for each in scenarios] == [
        (16, 1),
        (16, 2),
        (32, 1),
        (32, 2),
    ]
    assert scenarios[0].variant == "cluster.gpus=16, seed=1"


def test_several_values_replace_those_that_the_file_varies(simrl, scenarios):
    (simrl.folder / "scenario.yaml").write_text(
        SCENARIO + "vary: [{cluster.gpus: 4}, {cluster.gpus: 8}]\n"
    )
    simrl("compare", "scenario.yaml", "--system", "areal", "cluster.gpus=16,32")
    assert [each.cluster.gpus for each in scenarios] == [16, 32]


def test_several_values_of_a_parameter_are_compared(simrl, scenarios):
    simrl("compare", "scenario.yaml", "--system", "areal", "eta=1,2")
    assert systems_of(scenarios) == [("areal", {"eta": 1}), ("areal", {"eta": 2})]


@pytest.mark.parametrize(
    ("written", "gpu", "model"),
    [
        ("cluster.gpu=H100", "h100", "qwen3-0.6b"),
        ("cluster.gpu=H100-80GB", "h100", "qwen3-0.6b"),
        ("model=Qwen/Qwen3-8B", "h100", "qwen3-8b"),
        ("model=meta-llama/Llama-3.1-8B-Instruct", "h100", "llama-3.1-8b"),
    ],
)
def test_hardware_and_models_have_the_names_that_vendors_and_hubs_give_them(
    simrl, scenarios, written, gpu, model
):
    simrl("compare", "scenario.yaml", written)
    assert {(each.cluster.gpu, each.model) for each in scenarios} == {(gpu, model)}


def test_a_trace_takes_the_place_of_a_length_model(simrl, scenarios):
    lengths = [
        "steps=2",
        "prompts_per_step=2",
        "group=2",
        "cap_tokens=100",
        "mean_tokens=50",
        "sigma=0.5",
    ]
    assert simrl("trace", "synth", "-o", "my.parquet", *lengths).code == 0
    simrl("compare", "scenario.yaml", "workload.trace=my.parquet")
    assert {
        (Path(each.workload.trace or "").name, each.workload.synthetic) for each in scenarios
    } == {("my.parquet", None)}


# A scenario without a profile.


def without_profile(simrl: CommandLine, more: str = "") -> None:
    lines = [line for line in SCENARIO.splitlines() if not line.startswith("profile")]
    (simrl.folder / "scenario.yaml").write_text(
        "\n".join([*lines, more, ""]).replace("qwen3-0.6b", "qwen3-8b")
    )


def test_a_scenario_without_a_profile_takes_the_shipped_one_of_each_model_and_split(
    simrl, scenarios
):
    without_profile(simrl)
    simrl("compare", "scenario.yaml", "--system", "areal", "cluster.tp=1,2")
    files = [ROOT / "profiles" / f"qwen3-8b_h100_tp{tp}.parquet" for tp in (1, 2)]
    assert [Path(each.profile.path or "") for each in scenarios] == files
    pauses = {each.profile.between_passes_s for each in scenarios}
    assert pauses == {None}, "kernels alone have no host: the usual engine's preset gives it"


def test_without_a_profile_of_the_gpu_it_is_carried_over_from_another(simrl):
    without_profile(simrl)
    settings = ("cluster.gpu=h100-pcie", "cluster.gpus=32", "cluster.tp=2")
    out = " ".join(simrl("compare", "scenario.yaml", *settings).out.split())
    assert "step times extrapolated (estimated: qwen3-8b on h100 tp2 bf16 × the ratio of" in out
    assert "estimates from another GPU" in out


def test_a_layout_that_is_not_shipped_is_carried_over_from_the_nearest_and_printed_as_extrapolated(
    simrl,
):
    without_profile(simrl, "profile: {path: shipped}")
    out = " ".join(
        simrl(
            "compare", "scenario.yaml", "cluster.gpus=32", "cluster.tp=8", "--output", "o"
        ).out.split()
    )
    assert (
        "step times extrapolated (estimated: qwen3-8b on h100 tp4 bf16 × the ratio of rooflines; "
        "estimates from another split" in out
    )
    result = json.loads(next(Path("o").rglob("result.json")).read_text(encoding="utf-8"))
    assert result["profile"]["kind"] == "extrapolated"


def test_the_advice_for_a_gpu_without_a_profile_works(simrl):
    without_profile(simrl, "profile: {path: shipped}")
    settings = ("cluster.gpu=b200", "cluster.gpus=16", "profile.path=none.parquet")
    refused = simrl.refuses("compare", "scenario.yaml", "model=qwen3-14b", *settings)
    assert "simrl profile derive qwen3-14b --gpu b200 --tp 1 -o " in refused
    assert "pip install 'aiconfigurator" in refused or "pip install" not in refused, (
        "simrl[…] needs an index that has simrl"
    )
    assert "take profile.path=shipped" in refused
    taken = ["model=qwen3-14b", "cluster.gpu=b200", "cluster.gpus=16", "profile.path=shipped"]
    require_possible(load_scenarios("scenario.yaml", taken), InputCache())


@pytest.mark.parametrize("name", ["qwen3-8b_h100_tp1", "qwen3-8b_h100_tp1.parquet"])
def test_a_shipped_profile_is_found_by_its_name(simrl, name):
    assert simrl("profile", "show", name).out.startswith("qwen3-8b on h100, tp 1")


# What is refused, and the words that say what to write.

CSV = ["trace", "import", "csv", "my.csv", "-o", "o.parquet"]
TRACE = "--model qwen3-8b --gpu h100 --gpus 64 --system verl_colocated,areal"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        # the place of the scenario
        (["compare", "model=Qwen/Qwen3-8B"], "no scenario before it; write simrl compare SCENARIO model=Qwen/Qwen3-8B, where"),
        (["compare", "cluster.gpus=8", "scenario.yaml"], "the scenario goes first: simrl compare scenario.yaml cluster.gpus=8"),
        (["run", "areal", "scenario.yaml"], "the scenario goes first: simrl run scenario.yaml --system areal"),
        (["sweep", "seed=1,2", "scenario.yaml"], "the scenario goes first: simrl sweep scenario.yaml seed=1,2"),
        (["compare", "scenario.yaml", "scenario.yaml"], "one file a command, before the others; KEY=VALUE follow it"),
        (["compare"], "name a scenario, such as experiments/math_14b.yaml (simrl examples lists some), or a trace"),
        (["compare", "scenari.yaml"], "no such file (did you mean scenario.yaml?)"),
        (["compare", "quickstart"], "no such file; simrl examples copy quickstart writes such a file"),
        (["compare", "experiments/math14b.yaml"], "no such file; simrl examples copy math_14b writes such a file"),
        (["scenario.yaml"], "no such command 'scenario.yaml'; did you mean simrl compare scenario.yaml?"),
        (["systems", "areal"], "no such command 'areal'; did you mean simrl systems show areal?"),
        (["version"], "simrl: no such command 'version'; simrl --version prints it"),
        (["reproduce", "areal-eta"], "predicted in a checkout, by python -m experiments.reproduce"),
        (["systems", "list"], "did you mean simrl systems?"),
        (["trace", "my.parquet"], "did you mean simrl trace show my.parquet?"),
        (["trace", "import", "my.csv"], "did you mean simrl trace import csv my.csv -o my_run.parquet?"),
        # files of another kind
        (["compare", "."], ".: a folder; name a file in it (scenario.yaml)"),
        (["compare", "results"], "a folder of results, which simrl explain, diff and report read; simrl compare takes"),
        (["compare", "my.csv"], "a trace needs them: add " + TRACE),
        (["compare", "run.log"], "simrl trace import verl run.log --metrics --group N -o run.parquet, then simrl compare"),
        (["compare", "my.parquet"], f"no model, gpu, gpus or systems; a trace needs them: add {TRACE}, or name a scenario"),
        (["compare", "my.parquet", *TRACE.split()[:-2]], "no systems; a trace needs one: add --system verl_colocated"),
        (["compare", "p.parquet", *TRACE.split()], "p.parquet: a profile, not a trace; look at it with `simrl profile show"),
        (["trace", "show", "my.csv"], "my.csv: no Parquet file; `simrl trace import` makes a trace of CSV, JSON Lines or logs"),
        (["trace", "show", "."], ".: no such file; make one with"),
        (["compare", "scenario.yaml", "--profile", "."], "a folder; `simrl trace import` makes a trace"),
        (["profile", "show", "qwen3-8b"], "no such profile (did you mean qwen3-8b_a100_tp1 or "),
        (["explain", "results"], "results: is a sweep's, which has a table and no runs; simrl report reads it"),
        # imports
        (["trace", "import", "verl", "run.log", "-o", "o.parquet"], "a metrics log (verl), not a dump of samples"),
        (["trace", "import", "verl", "run.log", "--metrics", "-o", "o.parquet"], "add it, such as --group 16"),
        (["trace", "import", "verl", "my.csv", "-o", "o.parquet"], "it looks like csv: run `simrl trace import csv my.csv`"),
        (["trace", "import", "csv", "my.csv"], "name the file to write, such as -o my_run.parquet"),
        (["trace", "synth", "-o", "t.parquet", "steps=10"], "key prompts_per_step is missing; write steps=10 "),
        # key=value
        (["compare", "scenario.yaml", "areal"], "a system is named with --system areal, or systems=areal,…"),
        (["compare", "scenario.yaml", "cluster.gpus", "=", "8"], "write KEY=VALUE without spaces, such as cluster.gpus=8"),
        (["compare", "scenario.yaml", "cluster.gpus:", "8"], "write KEY=VALUE without spaces, such as cluster.gpus=8"),
        (["compare", "scenario.yaml", "eta", "4"], "write KEY=VALUE without spaces, such as eta=4"),
        (["sweep", "scenario.yaml", "cluster.gpus=4", "8"], "several values are one word, cluster.gpus=64,128"),
        (["compare", "scenario.yaml", "etta=4"], "system.etta: no parameter of these systems (did you mean eta?)"),
        (["compare", "scenario.yaml", "--system", "nemo_rl_async", "max_trajectory_age_steps=3"],
         "max_trajectory_age_steps is max_age here"),
        (["compare", "scenario.yaml", "--system", "verl_v1_separate_async", "trainer.v1.separate_async.parameter_sync_step=2"],
         "parameter_sync_step is sync_step here"),
        (["compare", "scenario.yaml", "--system", "AReaL"], "(did you mean areal?)"),
        (["compare", "scenario.yaml", "--system", "areal:eta=4"], "write parameters as {'name': 'areal', 'eta': 4}"),
        # options
        (["compare", "scenario.yaml", "--eta", "4"], "; write system.eta=4, without dashes"),
        (["compare", "scenario.yaml", "--cluster.gpus=16"], "; write cluster.gpus=16, without dashes"),
        (["compare", "scenario.yaml", "--trials", "10"], "no such option: --trials; it is an option of simrl advise"),
        (["optimize", "scenario.yaml", "system.eta=1,2", "--trials", "9"],
         "it is simrl advise now: run simrl advise scenario.yaml system.eta=1,2 --trials 9 --details --robust"),
        (["compare", "scenario.yaml", "--gpus", "16,32"], "without dashes, in simrl sweep: cluster.gpus=16,32"),
        (["advise", "scenario.yaml", "--updates", "2k"], "did you mean 2000 or 2048?"),
        # units
        (["compare", "scenario.yaml", "cluster.gpu=h100x8"], "two keys: cluster.gpu=h100 cluster.gpus=8"),
        (["compare", "scenario.yaml", "cluster.gpu=8xH100"], "two keys: cluster.gpu=h100 cluster.gpus=8"),
        (["compare", "scenario.yaml", "cluster.gpus=h100x8"], "without a unit; did you mean 8?"),
        (["compare", "scenario.yaml", "workload.synthetic.cap_tokens=32k"], "did you mean 32000 or 32768?"),
        (["compare", "scenario.yaml", "training.switch_s=500ms"], "without a unit; did you mean 0.5?"),
        (["compare", "scenario.yaml", "cluster.network_bytes_per_s=400Gb"], "did you mean 50000000000?"),
        (["compare", "scenario.yaml", "engine.gpu_memory_utilization=90%"], "did you mean 0.9?"),
        (["sweep", "scenario.yaml", "cluster.gpus=[16,32]"], "several are written 16,32, without brackets"),
        (["sweep", "scenario.yaml", "cluster.gpus=16-32"], "a range is 16..32, in simrl sweep"),
        (["compare", "scenario.yaml", "cluster.gpus=16..32"], "a range is 16..32, in simrl sweep"),
        # sections
        (["compare", "scenario.yaml", "speculation=ngram"], "a section with keys of its own; write --speculation ngram"),
        (["compare", "scenario.yaml", "engine=vllm-0.19"], "a section with keys of its own; write engine.preset=vllm-0.19"),
        # columns
        ([*CSV, "--column", "out_len=response_tokens"], "out_len=response_tokens is the wrong way round; write"),
        ([*CSV, "--column", "step=iteration,prompt_id=question"], "no column 'iteration' for step"),
    ],
)  # fmt: skip
def test_a_slip_is_told_with_what_to_write(simrl, arguments, what):
    (simrl.folder / "my.csv").write_text("step,prompt_id,prompt_tokens,response_tokens\n0,0,9,26\n")
    (simrl.folder / "run.log").write_text(VERL)
    (simrl.folder / "p.parquet").write_bytes(
        (ROOT / "profiles" / "qwen3-8b_h100_tp1.parquet").read_bytes()
    )
    (simrl.folder / "results").mkdir()
    (simrl.folder / "results" / "sweep.json").write_text("{}")
    lengths = [
        "steps=2",
        "prompts_per_step=2",
        "group=2",
        "cap_tokens=100",
        "mean_tokens=50",
        "sigma=0.5",
    ]
    if "my.parquet" in arguments:
        assert simrl("trace", "synth", "-o", "my.parquet", *lengths).code == 0
    assert what in simrl.refuses(*arguments)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("", "run simrl advise SCENARIO --details --robust"),
        ("--details", "run simrl advise SCENARIO --details --robust"),
        ("--help", "see simrl advise --help"),
        ("scenario.yaml -h", "see simrl advise --help"),
        (
            "scenario.yaml --details --no-robust",
            "run simrl advise scenario.yaml --details --no-robust",
        ),
    ],
)
def test_the_command_in_place_of_optimize_has_each_word_once_and_a_scenario(simrl, words, instead):
    message = simrl.refuses("optimize", *words.split()).strip()
    assert message.endswith(f"it is simrl advise now: {instead}")


def test_what_an_unknown_file_holds_is_not_printed_whole(simrl):
    (simrl.folder / "notes").write_text("step prompt " * 1000)
    assert len(simrl.refuses("compare", "notes")) < 400


@pytest.mark.parametrize(
    "words", [["--version"], ["-V"], ["help"], ["help", "compare"], ["-h"], ["compare", "-h"]]
)
def test_habits_of_other_commands_work(simrl, words):
    assert simrl(*words).code == 0


def test_a_systems_parameter_of_what_if_goes_to_the_system_that_is_tried():
    from simrl.commands.workload import without_parameters

    texts = ["eta=2", "model=qwen3-8b"]
    assert without_parameters(["areal"], texts) == (
        [{"name": "areal", "eta": 2}],
        ["model=qwen3-8b"],
    )
    mapping = {"system.eta": 2, "model": "qwen3-8b"}
    assert without_parameters(["areal"], mapping) == (
        [{"name": "areal", "eta": 2}],
        {"model": "qwen3-8b"},
    )
    assert without_parameters(["areal"], ["model=qwen3-8b"]) == (["areal"], ["model=qwen3-8b"])


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("80GB", "reserve_bytes", "; did you mean 80000000000?"),
        ("80GB", "kv_cache_tokens", ""),
        ("$2.5", "cost_per_gpu_hour", "; did you mean 2.5?"),
        ("2s", "switch_s", "; did you mean 2?"),
        ("many", "gpus", ""),
    ],
)
def test_a_number_with_a_unit_is_read_by_the_key(text, key, hint):
    assert number_meant(text, key) == hint


def test_an_option_that_nothing_has_is_left_to_the_help():
    assert option_meant("--frobnicate", "", {"compare": ["--jobs"]}) == ""


def test_a_bound_on_staleness_has_its_option_named(simrl: CommandLine) -> None:
    said = simrl.refuses("advise", "experiments/reasoning.yaml", "--staleness", "2")
    assert "--max-off-policyness 2" in said and "\n" not in said.strip()


def test_a_number_that_is_refused_is_not_suggested_again(simrl: CommandLine) -> None:
    assert "did you mean" not in simrl.refuses(
        "advise", "experiments/quickstart.yaml", "--trials", "0"
    )


def test_the_only_column_like_a_missing_one_is_named_in_the_remedy(
    simrl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "mine.csv").write_text("train_step,problem_id,my_prompt_n,n_out\n0,1,5,9\n")
    said = simrl.refuses(
        "trace", "import", "csv", str(tmp_path / "mine.csv"), "-o", str(tmp_path / "t.parquet")
    )
    assert "--column prompt_tokens=my_prompt_n" in said


def test_a_folder_in_place_of_a_table_is_told_without_an_errno(
    simrl: CommandLine, tmp_path: Path
) -> None:
    said = simrl.refuses("trace", "import", "csv", str(tmp_path), "-o", str(tmp_path / "t.parquet"))
    assert "Is a directory" in said and "Errno" not in said


def test_a_file_of_a_comparison_leads_to_one_of_its_runs(
    simrl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    for file in ("comparison.json", "one/result.json"):
        (tmp_path / file).write_text("{}")
    assert str(tmp_path / "one") in simrl.refuses("explain", str(tmp_path / "comparison.json"))


def test_a_page_without_dash_says_what_to_install(
    simrl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("dash", "werkzeug", "werkzeug.serving"):
        monkeypatch.setitem(sys.modules, missing, None)
    said = simrl.refuses("serve", "experiments/reasoning.yaml", "--no-open", "--port", "0")
    assert "simrl serve needs Dash" in said


# Names that other programs use.


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("eagle", "an EAGLE drafter is eagle3, or tlt"),
        ("EAGLE-2", "an EAGLE drafter is eagle3, or tlt"),
        ("medusa", "such heads are not modelled; the closest is mtp"),
        ("deepseek_mtp", "a model's own layers that predict further tokens are mtp"),
        ("nextn", "a model's own layers that predict further tokens are mtp"),
        ("quant_self", "the policy in fewer bits that drafts for itself is efficient_rollout"),
        ("suffix", "suffix matching is histospec"),
        ("lookahead", "lookahead decoding is not modelled; the closest is ngram"),
        ("prompt_lookup", "a lookup in the response's own text is ngram"),
        ("spec_decode", "a small model that drafts is draft_model"),
        ("spaceship", "(closest are "),
    ],
)
def test_a_drafter_by_another_engines_name_is_answered_with_the_method_that_it_is_here(
    simrl, written, answer
):
    for arguments in (
        ["--speculation", written],
        [f"systems=[{{name: areal, speculation: {written}}}]"],
    ):
        refused = simrl.refuses("compare", "scenario.yaml", *arguments)
        assert answer in refused and "simrl speculation lists all" in refused


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("speculation.method=ngram", "--speculation ngram"),
        (
            "speculation.model=qwen3-0.6b",
            "speculation: {name: draft_model, model: qwen3-0.6b} of a system",
        ),
        (
            "speculation.num_speculative_tokens=5",
            "{name: ngram, window: {kind: fixed, tokens: 5}} of a system",
        ),
    ],
)
def test_vllms_speculative_config_is_answered_with_what_a_system_says(simrl, key, words):
    assert words in simrl.refuses("compare", "scenario.yaml", key)


@pytest.mark.parametrize(
    "key",
    [
        "rollout_n",
        "n",
        "num_generations",
        "n_samples_per_prompt",
        "rollout.n",
        "actor_rollout_ref.rollout.n",
    ],
)
def test_responses_per_prompt_by_another_frameworks_name_are_the_group(simrl, key):
    for call in (
        ["compare", "scenario.yaml"],
        ["run", "scenario.yaml", "--system", "areal"],
        ["sweep", "scenario.yaml"],
    ):
        assert "responses per prompt are workload.synthetic.group=8; " in simrl.refuses(
            *call, f"{key}=8"
        )
    name = key.rpartition(".")[2]
    assert "it is group=8" in simrl.refuses(
        "compare", "scenario.yaml", f"workload.synthetic.{name}=8"
    )
    assert "it is group=8" in simrl.refuses("trace", "synth", "-o", "t.parquet", f"{name}=8")
    assert "--group 8 of a log" in simrl.refuses(
        "compare", "scenario.yaml", f"--{name.replace('_', '-')}", "8"
    )


@pytest.mark.parametrize(
    "arguments", [["cluster.gpu=32"], ["--gpu", "32"], ["cluster.train={gpu: 32, gpus: 8}"]]
)
def test_a_number_in_place_of_a_gpus_name_is_told_where_it_goes(simrl, arguments):
    assert "their number is gpus: cluster.gpus=32" in simrl.refuses(
        "compare", "scenario.yaml", *arguments
    )


@pytest.mark.parametrize("systems", ["areal, split", "{name: areal, eta: 2}", "[areal]"])
def test_systems_of_a_file_are_a_list_a_text_with_commas_or_one_object(simrl, scenarios, systems):
    text = SCENARIO.partition("systems:")[0] + f"systems: {systems}\n"
    (simrl.folder / "own.yaml").write_text(text, encoding="utf-8")
    simrl("compare", "own.yaml")
    expected = {"areal, split": ["areal", "split"]}.get(systems, ["areal"])
    assert [each.system.name for each in scenarios] == expected


def test_a_history_of_a_trace_is_pointed_to_the_command_that_counts_it(simrl):
    assert "simrl acceptance my_run.parquet counts" in simrl.refuses(
        "trace", "show", "t.parquet", "--history"
    )


# Columns of a table.

TABLE = "it,q,plen,olen,reward,score\n" + "".join(
    f"{i // 4},{i // 2},10,{20 + i},{i % 2},0.{i + 1}\n" for i in range(8)
)
NAMED = ["--column", "step=it", "--column", "prompt_id=q,prompt_tokens=plen"]
SETUP = ["--model", "qwen3-8b", "--gpu", "h100", "--gpus", "4", "--system", "areal"]


@pytest.fixture
def table(simrl: CommandLine) -> Path:
    (simrl.folder / "mine.csv").write_text(TABLE, encoding="utf-8")
    return simrl.folder / "mine.csv"


@pytest.mark.parametrize("command", ["compare", "run", "advise", "sweep"])
def test_a_command_takes_the_columns_of_a_table_as_its_importer_does(simrl, table, command):
    refused = simrl.refuses(command, "mine.csv", *SETUP, *NAMED)
    assert (
        "no column for response_tokens" in refused and "--column response_tokens=THEIRS" in refused
    )
    for name, doubt in (
        ("nope", "no column 'nope' for response_tokens"),
        ("score", "is this column a reward?"),
    ):
        assert doubt in simrl.refuses(
            command, "mine.csv", *SETUP, *NAMED, "--column", f"response_tokens={name}"
        )


def test_the_named_columns_of_a_table_are_simulated(simrl, scenarios, table):
    simrl("compare", "mine.csv", *SETUP, *NAMED, "--column", "response_tokens=olen")
    assert [(each.name, each.steps) for each in scenarios] == [("mine", 2)]


def test_columns_are_refused_where_there_is_no_table(simrl, table):
    assert "no table whose columns" in simrl.refuses(
        "compare", "scenario.yaml", "--column", "step=it"
    )
    assert "--column olen: write OURS=THEIRS" in simrl.refuses(
        "compare", "mine.csv", *SETUP, "--column", "olen"
    )


def test_lengths_of_zeros_and_ones_are_doubted(simrl, table):
    ended = simrl(
        "trace",
        "import",
        "csv",
        "mine.csv",
        "-o",
        "t.parquet",
        *NAMED,
        "--column",
        "response_tokens=reward",
    )
    assert (
        ended.code == 0
        and "all of 'reward' are 0 or 1 tokens; is this column a reward?" in ended.err
    )


def test_a_remedy_for_a_table_names_options_of_the_command_that_has_them(simrl, table):
    refused = simrl.refuses("compare", "mine.csv", *SETUP)
    assert "--column prompt_id=THEIRS, or give --ungrouped to simrl trace import" in refused


def test_a_value_of_an_option_is_refused_in_words_of_simrl(simrl):
    assert "'--jobs': a whole number is needed" in simrl.refuses(
        "compare", "scenario.yaml", "--jobs", "many"
    )
    assert "'--jobs': give 1 or more" in simrl.refuses("compare", "scenario.yaml", "--jobs", "0")
    assert "requires an argument; write its value behind it" in simrl.refuses(
        "compare", "scenario.yaml", "--measured"
    )
