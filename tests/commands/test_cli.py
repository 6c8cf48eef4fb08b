"""The command line: help that is quick and shows an example, one line for whatever is wrong, JSON that is only JSON."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from simrl import __version__
from simrl.commands import cli
from simrl.errors import StoppedError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import write_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.trace.trace import METADATA_KEY, Trace, TraceMetadata, read_trace, write_trace
from tests.command_line import contents, environment

HEAVY = ("numpy", "numba", "pandas", "pyarrow", "matplotlib", "scipy", "simpy")
LENGTHS = (
    "steps=2",
    "prompts_per_step=2",
    "group=2",
    "cap_tokens=100",
    "mean_tokens=30",
    "sigma=0.5",
)
COLUMNS = "step,epoch,prompt_id,sample,prompt_tokens,response_tokens\n"


def commands(command=None, path=()):
    """Every command and group of commands, as typed after `simrl`."""
    command = command or typer.main.get_command(cli.make_app())
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


COMMANDS = list(commands())


@pytest.fixture
def trace(simrl):
    """A small trace, trace.parquet."""
    columns = {
        "step": [0, 0, 1, 1],
        "epoch": [0] * 4,
        "prompt_id": [0, 0, 1, 1],
        "sample": [0, 1, 0, 1],
        "prompt_tokens": [5] * 4,
        "response_tokens": [10, 20, 30, 40],
    }
    metadata = TraceMetadata(
        name="run", kind="recorded", source="a test", tokenizer="none", cap_tokens=100
    )
    write_trace(Trace.from_columns(columns, metadata), "trace.parquet")
    return Path("trace.parquet")


@pytest.fixture
def profile(simrl):
    """A profile of what the scenario runs, profile.parquet."""
    write_profile(roofline_profile(model_shape("qwen3-0.6b"), gpu("h100"), 1), "profile.parquet")
    return Path("profile.parquet")


def changed(path, change):
    """The Parquet file again, after a change of its pandas table; its metadata stay."""
    table = pq.read_table(path)
    new = pa.Table.from_pandas(change(table.to_pandas()), preserve_index=False)
    pq.write_table(new.replace_schema_metadata(table.schema.metadata), path)


def with_metadata(path, **changes):
    table = pq.read_table(path)
    ((key, raw),) = [(k, v) for k, v in table.schema.metadata.items() if k.startswith(b"simrl")]
    pq.write_table(
        table.replace_schema_metadata({key: json.dumps({**json.loads(raw), **changes}).encode()}),
        path,
    )


# Help and usage.


def test_an_override_of_what_the_file_varies_is_told_and_keeps_json_whole(simrl):
    with (simrl.folder / "scenario.yaml").open("a") as file:
        file.write("vary: [{cluster.gpus: 4}, {cluster.gpus: 8}]\n")
    said = "simrl: scenario.yaml: vary has cluster.gpus [4, 8]; the command line replaces them\n"
    twice = ("cluster.gpus=4", "cluster.gpus=2")
    _, out, err = simrl("compare", "scenario.yaml", *twice, "seed=4", "--jobs", "1", "--json")
    assert (len(json.loads(out)), err) == (2, said)
    assert simrl("sweep", "scenario.yaml", "cluster.gpus=2,4", "--jobs", "1").err == said
    assert simrl("sweep", "scenario.yaml", "seed=4", "--jobs", "1").err == ""


def test_a_system_of_the_file_that_its_name_alone_replaces_is_told(simrl):
    scenario = (simrl.folder / "scenario.yaml").read_text()
    systems = "systems: [{name: areal, eta: 4}, verl_colocated]\n"
    with (simrl.folder / "scenario.yaml").open("w") as file:
        file.writelines(line for line in scenario.splitlines(True) if "systems" not in line)
        file.write(systems)
    line = "simrl: scenario.yaml: systems has {name: areal, eta: 4}; areal runs with its defaults\n"
    for command in ("run", "compare"):
        assert simrl(command, "scenario.yaml", "--system", "areal").err == line
        assert simrl(command, "scenario.yaml", "--system", "verl_colocated").err == ""


def test_a_sweep_counts_the_points_at_which_a_setting_has_no_effect(simrl):
    values = ("training.switch_s=1,3", "systems=verl_colocated,areal")
    _, out, err = simrl("sweep", "scenario.yaml", *values, "--jobs", "1")
    assert out, err
    line = "Without effect at 2 of 4 points: training.switch_s (training has GPUs of its own"
    assert line in " ".join(out.split())


def test_what_replaces_a_variation_is_told_before_anything_is_simulated(simrl, monkeypatch):
    with (simrl.folder / "scenario.yaml").open("a") as file:
        file.write(
            f"vary: [{{faults: [{', '.join(['{kind: slow, worker: 0, factor: 2}'] * 9)}]}}]\n"
        )
    stop = Mock(side_effect=StoppedError("nothing was simulated"))
    for command, simulates in (
        ("compare", "simrl.show.comparison.compare_scenarios"),
        ("sweep", "simrl.study.sweep.run"),
        ("advise", "simrl.study.advice.advise"),
    ):
        monkeypatch.setattr(simulates, stop)
        said, *_, stopped = simrl(
            command, "scenario.yaml", "faults=[]", "--jobs", "1"
        ).err.splitlines()
        assert (
            said.startswith("simrl: scenario.yaml: vary has faults [[{'kind': 'slow'")
            and len(said) < 200
        )
        assert stopped == "simrl: nothing was simulated"


def test_the_commands_are_all_tested():
    assert {" ".join(path) for path in COMMANDS} >= {
        "",
        "compare",
        "run",
        "trace show",
        "trace import csv",
        "profile derive",
    }


def test_a_reader_of_help_chooses_among_22_commands_at_most():
    assert len([path for path in COMMANDS if len(path) == 1]) <= 22


def test_the_version_is_an_option(simrl):
    assert simrl("--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_of_every_command_shows_an_example(simrl, path):
    code, out, err = simrl(*path, "--help")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    command = re.escape(" ".join(["simrl", *path]))
    is_group = any(other[:-1] == path for other in COMMANDS)
    assert is_group or re.search(rf"Examples?: {command}", text), text


def test_brackets_in_an_example_are_shown(simrl):
    assert "'systems=[split,{name: areal, eta: 4}]'" in " ".join(
        simrl("compare", "--help").out.split()
    )


@pytest.mark.parametrize("arguments", [["--help"], ["trace", "import", "verl", "--help"]])
def test_help_imports_nothing_heavy(tmp_path, arguments):
    code = (
        "import sys; from simrl.commands import cli; sys.argv = ['simrl', *sys.argv[1:]]\n"
        "try: cli.main()\n"
        f"finally: print('HEAVY', sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stderr == "HEAVY []\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["compare"],
        ["compare", "scenario.yaml", "--frobnicate"],
        ["compare", "scenario.yaml", "--jobs", "0"],
        ["compare", "scenario.yaml", "--jobs", "many"],
        ["trace", "synth", *LENGTHS],
        ["trace", "synth", "-o", "t.parquet", "--seed", "-1"],
        ["trace", "import", "verl", "x"],
        ["profile", "derive", "qwen3-8b", "-o", "p.parquet"],
        ["profile", "derive", "qwen3-8b", "--gpu", "h100", "--tp", "0", "-o", "p.parquet"],
    ],
)
def test_a_command_that_is_typed_wrong_ends_with_2_and_writes_nothing(simrl, arguments):
    before = contents(simrl.folder)
    code, _, err = simrl(*arguments)
    assert code == 2
    assert "Traceback" not in err
    assert contents(simrl.folder) == before


# Traces.


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda t: t.drop(columns="response_tokens"),
            "no column 'response_tokens' \\(it has step, epoch, prompt_id",
        ),
        (
            lambda t: t.rename(columns={"step": "Step"}),
            "unknown column 'Step' .did you mean step.*; a trace has the columns step",
        ),
        (
            lambda t: t.assign(prompt_tokens="many"),
            "row 0, column 'prompt_tokens': 'many' is not int32",
        ),
        (
            lambda t: t.assign(prompt_tokens=1.5),
            "row 0, column 'prompt_tokens' is 1.5 .*whole number",
        ),
        (
            lambda t: t.assign(response_tokens=[1, 2, np.nan, 3]),
            "row 2, column 'response_tokens' is (empty|nan)",
        ),
        (
            lambda t: t.assign(response_tokens=[1, -2, 3, 4]),
            "row 1, column 'response_tokens' is -2.*at least 1",
        ),
        (
            lambda t: t.assign(response_tokens=[1, 2, 3, 101]),
            "row 3, column 'response_tokens' is 101.*cap of 100",
        ),
        (
            lambda t: t.assign(prompt_tokens=2**40),
            "row 0, column 'prompt_tokens': 1099511627776 is not int32",
        ),
        (
            lambda t: t.assign(sample=0),
            "row 1 repeats \\(step, prompt_id, sample\\) = \\(0, 0, 0\\)",
        ),
        (lambda t: t.head(0), "no rows; a trace needs at least one sample"),
    ],
)
def test_a_trace_with_a_mistake_is_refused_by_row_and_column(simrl, trace, change, what):
    changed(trace, change)
    assert re.search(f"trace.parquet: {what}", simrl.refuses("trace", "show", str(trace)))
    compared = simrl.refuses(
        "compare",
        "scenario.yaml",
        "workload.synthetic=null",
        "workload.trace=trace.parquet",
        "-o",
        "out",
    )
    assert re.search(rf"scenario.yaml \(verl_colocated\): .*trace.parquet: {what}", compared)


@pytest.mark.parametrize(
    "command",
    [
        ("profile", "show", "/dev/full"),
        ("run", "scenario.yaml", "--system", "areal", "profile.path=/dev/full"),
        ("trace", "import", "csv", "/dev/full", "-o", "out.parquet"),
        ("trace", "import", "jsonl", "/dev/full", "-o", "out.parquet"),
        ("calibrate", "/dev/full", "--group", "4"),
    ],
)
def test_a_device_without_end_is_not_read(simrl, command):
    assert "/dev/full: is a device; name a file" in simrl.refuses(*command)


@pytest.mark.parametrize("command", [("trace", "show"), ("profile", "show")])
@pytest.mark.parametrize("cut", [0, 5, 300, -50])
def test_a_file_that_is_cut_off_is_refused(simrl, trace, profile, command, cut):
    name = f"{command[0]}.parquet"
    Path(name).write_bytes(Path(name).read_bytes()[:cut])
    assert f"{name}: cannot be read as Parquet" in simrl.refuses(*command, name)


@pytest.mark.parametrize(
    ("command", "column"),
    [(("trace", "show"), b"prompt_tokens"), (("profile", "show"), b"seconds")],
)
def test_a_file_whose_column_names_are_damaged_is_refused(simrl, trace, profile, command, column):
    name = f"{command[0]}.parquet"
    Path(name).write_bytes(Path(name).read_bytes().replace(column, b"\xff" + column[1:]))
    assert f"{name}: is damaged, or was changed after simrl wrote it" in simrl.refuses(
        *command, name
    )
    Path(name).write_bytes(Path(name).read_bytes().replace(b"simrl.sha256", b"somebody.own"))
    assert f"{name}: cannot be read as Parquet ('utf-8' codec can't decode" in simrl.refuses(
        *command, name
    )


@pytest.mark.parametrize("command", [("trace", "show"), ("profile", "show")])
def test_a_file_that_is_none_of_ours_is_refused(simrl, command):
    pq.write_table(pa.table({"step": [1]}), "other.parquet")
    assert "scenario.yaml: no Parquet file; `simrl trace import` makes a trace" in simrl.refuses(
        *command, "scenario.yaml"
    )
    assert re.search(
        "none.parquet: no such (file|profile).*(make|derive) one",
        simrl.refuses(*command, "none.parquet"),
    )
    assert "other.parquet: " in simrl.refuses(*command, "other.parquet")
    assert simrl.refuses(*command, ".")


def test_a_trace_whose_metadata_are_broken_is_refused(simrl, trace):
    with_metadata(trace, schema_version=9)
    assert "trace.parquet: trace schema 9, this simrl reads 1" in simrl.refuses(
        "trace", "show", str(trace)
    )
    pq.write_table(pq.read_table(trace).replace_schema_metadata({METADATA_KEY: b"{"}), trace)
    assert "trace.parquet: metadata field" in simrl.refuses("trace", "show", str(trace))


@pytest.mark.parametrize("plot", [".", os.devnull, "scenario.yaml", "scenario.yaml/a.png", "a.doc"])
def test_a_picture_that_cannot_be_written_is_refused(simrl, trace, plot):
    assert plot in simrl.refuses("trace", "show", str(trace), "--plot", plot)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ((), "key steps is missing; write steps=10 prompts_per_step=64 group=8 "),
        (("steps",), "override 'steps': write key=value"),
        (
            ("stepz=3", *LENGTHS),
            "unknown key stepz (did you mean steps?); a length model has steps, prompts_per_step",
        ),
        (("a.b=3", *LENGTHS), "unknown key a.b; a length model has steps"),
        ((*LENGTHS, "group=[1"), "override 'group=[1': the value is not YAML"),
        ((*LENGTHS, "group=some"), "group is 'some': a whole number is needed"),
        ((*LENGTHS, "group=${nope}"), "group is '${nope}': a whole number is needed"),
        ((*LENGTHS, "sigma=.nan"), "sigma is nan: a finite number is needed"),
        ((*LENGTHS, "mean_tokens=.inf"), "mean_tokens is inf: a finite number is needed"),
        (
            (*LENGTHS, "mean_tokens=1000"),
            "mean_tokens 1000 cannot be reached under a cap of 100 tokens; ask for less",
        ),
        (
            (*LENGTHS, "steps=1000000000"),
            "4,000,000,000 samples of 2,000,000,000 prompts; stay under 100,000,000",
        ),
        ((*LENGTHS, "prompts=1000000000000"), "1,000,000,000,000 prompts; stay under 100,000,000"),
        (
            ("--preset", "physics"),
            "--preset physics: unknown; choose rhymerl-math, rhymerl-code, coding-agent, search-agent",
        ),
    ],
)
def test_a_length_model_with_a_mistake_is_refused(simrl, settings, what):
    assert what in simrl.refuses("trace", "synth", "-o", "new/t.parquet", *settings)


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (".", ".: is no file; name one to write"),
        (os.devnull, f"{os.devnull}: is no file; name one to write"),
        ("scenario.yaml", "scenario.yaml: is another kind of file"),
        ("scenario.yaml/t.parquet", "scenario.yaml/t.parquet: scenario.yaml is no folder"),
        ("t" * 300, "File name too long"),
    ],
)
def test_where_a_trace_or_profile_cannot_be_written_it_says_why(simrl, output, what):
    assert what in simrl.refuses("trace", "synth", "-o", output, *LENGTHS)
    assert what in simrl.refuses(
        "profile", "derive", "qwen3-8b", "--gpu", "h100", "--source", "roofline", "-o", output
    )


def test_the_source_of_an_import_is_not_overwritten(simrl):
    Path("lengths.csv").write_text(f"{COLUMNS}0,0,0,0,5,10\n")
    message = simrl.refuses("trace", "import", "csv", "lengths.csv", "-o", "lengths.csv")
    assert (
        "lengths.csv: is another kind of file, not one that simrl would write here; name another"
        in message
    )


@pytest.mark.parametrize(
    ("content", "options", "what"),
    [
        ("", (), "lengths.csv: the file is empty"),
        (COLUMNS, (), "lengths.csv: no rows"),
        (f"{COLUMNS}0,0,0\n", (), "lengths.csv: row 2: 3 cells, the header has 6"),
        (f"{COLUMNS}0,0,0,0,5,many\n", (), "lengths.csv: .*response_tokens.*many"),
        (f"{COLUMNS}0,0,0,0,5,-1\n", (), "lengths.csv: .*response_tokens.*-1"),
        (
            f"{COLUMNS}0,0,0,0,5,9\n",
            ("--cap-tokens", "3"),
            "lengths.csv: row 2.* 9 tokens, over the cap of 3",
        ),
        ("step,length\n0,5\n", (), "lengths.csv: no column for"),
        ("step,length\n0,5\n", ("--column", "length"), "--column length: write OURS=THEIRS"),
        (
            "step,length\n0,5\n",
            ("--column", "size=length"),
            "lengths.csv: 'size' is not a column of a trace",
        ),
        (
            "step,length\n0,5\n",
            ("--chars-per-token", "nan"),
            "--chars-per-token=nan: give a finite number",
        ),
        (
            "step,length\n0,5\n",
            ("--chars-per-token", "3", "--tokenizer", "t"),
            "both given; choose one",
        ),
        ("step,length\n0,5\n", ("--tokenizer", "none.json"), "none.json"),
    ],
)
def test_an_import_with_a_mistake_is_refused(simrl, content, options, what):
    Path("lengths.csv").write_text(content)
    assert re.search(
        what,
        simrl.refuses("trace", "import", "csv", "lengths.csv", "-o", "new/t.parquet", *options),
    )


@pytest.mark.parametrize("framework", ["verl", "trl", "areal", "slime", "csv", "jsonl"])
def test_an_import_of_what_is_not_there_is_refused(simrl, framework):
    (simrl.folder / "empty").mkdir()
    for source in ("none", "empty", "scenario.yaml"):
        assert simrl.refuses("trace", "import", framework, source, "-o", "new/t.parquet")


def test_an_import_of_a_metrics_log_needs_a_group(simrl):
    message = simrl.refuses(
        "trace", "import", "verl", "scenario.yaml", "--metrics", "-o", "t.parquet"
    )
    assert "no --group; the log does not have the number of responses per prompt" in message


# Profiles.


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda t: t.drop(index=100),
            "table 'attention' has a hole at prefill_tokens 1, .*; measure that point",
        ),
        (
            lambda t: t.assign(seconds=np.where(t.index == 3, np.nan, t.seconds)),
            "table 'sampled' has a hole at sequences 1; ",
        ),
        (
            lambda t: t.assign(seconds=np.where(t.table == "dense", 1 / (1 + t.index), t.seconds)),
            "table 'dense' falls",
        ),
        (lambda t: t.assign(seconds=-1.0), "table 'dense' has -1.0 s at query_tokens 1"),
        (lambda t: t.assign(seconds=np.inf), "table 'dense' has inf s at query_tokens 1"),
        (
            lambda t: t.assign(seconds="quick"),
            "a column is not numeric .*; derive the profile again",
        ),
        (
            lambda t: t.drop(columns="seconds"),
            "no column 'seconds'; a profile is a file that `simrl profile derive` wrote",
        ),
        (lambda t: t.head(0), "no rows of the table 'dense'; derive the profile again"),
        (
            lambda t: t.iloc[[0, *range(len(t))]],
            "table 'dense' has two rows for one point of its grid; keep one",
        ),
    ],
)
def test_a_profile_with_a_mistake_is_refused_by_table_and_place(simrl, profile, change, what):
    changed(profile, change)
    assert re.search(
        f"profile.parquet: {what}", simrl.refuses("profile", "show", "profile.parquet")
    )
    compared = simrl.refuses(
        "compare",
        "scenario.yaml",
        "profile.roofline=null",
        "profile.path=profile.parquet",
        "-o",
        "out",
    )
    assert re.search(rf"scenario.yaml \(verl_colocated\): .*profile.parquet: {what}", compared)


@pytest.mark.parametrize(("field", "value"), [("model", "qwen3-8b"), ("gpu", "h200"), ("tp", 2)])
def test_a_profile_of_something_else_is_refused(simrl, profile, field, value):
    with_metadata(profile, **{field: value})
    message = simrl.refuses(
        "compare", "scenario.yaml", "profile={path: profile.parquet, roofline: null}", "-o", "out"
    )
    assert re.search(
        "a profile of .* the scenario has qwen3-0.6b on h100 tp1; name the profile that belongs to it",
        message,
    )


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("gpt-5", "--gpu", "h100"), "model gpt-5: no known name, nor a config.json"),
        (("qwen3-8b", "--gpu", "b9"), "gpu 'b9' is unknown: simrl has no data sheet of it"),
        (
            ("qwen3-8b", "--gpu", "h100", "--tp", "3"),
            "tp is 3; it must divide the 32 attention heads of qwen3-8b",
        ),
        (
            ("qwen3-8b", "--gpu", "h100", "--source", "guess"),
            "--source guess: choose aiconfigurator or aisimulate or roofline",
        ),
        (("scenario.yaml", "--gpu", "h100"), "scenario.yaml: not a JSON config"),
    ],
)
def test_a_profile_that_cannot_be_derived_is_refused(simrl, arguments, what):
    source = () if "--source" in arguments else ("--source", "roofline")
    assert what in simrl.refuses("profile", "derive", "-o", "new/p.parquet", *arguments, *source)


@pytest.mark.parametrize("key", ["cluster.ep", "cluster.gpus", "steps"])
def test_a_switch_is_no_number(simrl, key):
    message = simrl.refuses("run", "scenario.yaml", "--system", "split", f"{key}=true")
    assert re.search(rf"{key}.* is True: this field is no switch", message)


def test_only_the_experts_of_gpt_oss_are_read_in_four_bits(simrl):
    file = Path(__file__).parents[2] / "profiles" / "gpt-oss-20b_h100_tp1_w4a16_mxfp4.parquet"
    _, out, _ = simrl("profile", "show", str(file), "--json")
    shape, found = model_shape("gpt-oss-20b"), json.loads(out)
    experts = shape.expert_layers * shape.experts_per_token * shape.expert_parameters
    read = (0.5 + 1 / 32) * experts + 2 * (shape.active_parameters - experts)
    assert found["weights_s"] == pytest.approx(read / gpu("h100").memory_bytes_per_s)


def test_of_a_model_of_its_own_config_derive_and_run_say_what_was_understood(simrl):
    config = {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    config |= {
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "num_nextn_predict_layers": 1,
    }
    Path("own").mkdir()
    Path("own/config.json").write_text(json.dumps(config))
    words = "understood: 28 layers of full attention; not read: num_nextn_predict_layers"
    _, out, _ = simrl(
        "profile", "derive", "own", "--gpu", "h100", "--source", "roofline", "-o", "p.parquet"
    )
    assert f"Model's config: {words}" in " ".join(out.split())
    for command in (("run", "--system", "split"), ("compare", "--system", "split", "--jobs", "1")):
        code, out, err = simrl(
            command[0], "scenario.yaml", "model=own", *command[1:], "-o", command[0]
        )
        assert (code, err) == (0, "") and f"Model: own, {words}" in " ".join(out.split())


# What goes out, and where.


def test_json_is_all_that_stdout_gets(simrl, trace, profile):
    for arguments in (
        ("trace", "show", "trace.parquet"),
        ("trace", "synth", "-o", "t.parquet", *LENGTHS),
        ("profile", "show", "profile.parquet"),
        (
            "profile",
            "derive",
            "qwen3-8b",
            "--gpu",
            "h100",
            "--source",
            "roofline",
            "-o",
            "p.parquet",
        ),
        ("run", "scenario.yaml", "--system", "split", "-o", "out"),
    ):
        code, out, err = simrl(*arguments, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)


def test_a_run_of_several_systems_asks_which(simrl):
    message = simrl.refuses("run", "scenario.yaml")
    assert "scenario.yaml: 2 runs (verl_colocated, areal); choose one with --system NAME" in message


def test_a_run_takes_a_systems_parameters_and_says_which_it_has(simrl):
    code, out, _ = simrl("run", "scenario.yaml", "--system", "areal", "eta=4", "seed=9", "--json")
    assert code == 0
    assert [row["system"] for row in json.loads(out)] == ["areal(eta=4)"]
    _, out, _ = simrl(
        "run", "scenario.yaml", "--system", "areal", "system.eta=5", "--json", "-o", "prefixed"
    )
    assert [row["system"] for row in json.loads(out)] == ["areal(eta=5)"]
    assert (simrl.folder / "results" / "tiny-areal" / "areal-eta-4" / "result.json").is_file()
    message = simrl.refuses("run", "scenario.yaml", "--system", "areal", "etta=4", "-o", "out")
    assert "system areal: unknown parameter 'etta' (did you mean eta?)" in message
    assert "system 'nope' is unknown (closest are " in simrl.refuses(
        "run", "scenario.yaml", "--system", "nope"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyboardInterrupt(), "interrupted; nothing was written"),
        (StoppedError("a process was killed"), "a process was killed"),
        (
            MemoryError(),
            "out of memory; nothing was written; simulate fewer samples, or fewer --jobs at a time",
        ),
    ],
)
def test_what_stops_a_run_is_told_in_one_line_and_ends_with_1(simrl, monkeypatch, error, message):
    def stop(*arguments):
        raise error

    monkeypatch.setattr("simrl.show.comparison.compare_scenarios", stop)
    assert simrl("compare", "scenario.yaml") == (1, "", f"simrl: {message}\n")


def test_a_batch_systems_signal_stops_a_run_as_ctrl_c_does(simrl, monkeypatch):
    monkeypatch.setattr(
        "simrl.show.comparison.compare_scenarios", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    assert simrl("compare", "scenario.yaml") == (1, "", "simrl: interrupted; nothing was written\n")


def test_a_bug_keeps_its_traceback(simrl, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("simrl.show.comparison.compare_scenarios", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        simrl("compare", "scenario.yaml")


def test_a_message_is_one_line_whatever_the_file_is_called(simrl):
    assert "two lines.yaml: no such file" in simrl.refuses("compare", "two\nlines.yaml")


def test_a_name_that_no_file_can_have_is_refused(simrl):
    long = "n" * 300
    for arguments in (
        ("compare", long),
        ("compare", "scenario.yaml", f"model={long}", "-o", "out"),
        (
            "compare",
            "scenario.yaml",
            "workload.synthetic=null",
            f"workload.trace={long}",
            "-o",
            "out",
        ),
        ("trace", "show", long),
        ("trace", "import", "csv", long, "-o", "t.parquet"),
        ("profile", "show", long),
        ("profile", "derive", long, "--gpu", "h100", "--source", "roofline", "-o", "p.parquet"),
    ):
        assert re.search(
            "n{90}.*(File name too long|nor a config.json)|no such file", simrl.refuses(*arguments)
        )


def test_names_in_any_script_go_through(simrl):
    assert (
        simrl("trace", "synth", "-o", "größe 模型.parquet", "--name", "größe 模型", *LENGTHS).code
        == 0
    )
    assert read_trace("größe 模型.parquet").metadata.name == "größe 模型"
    code, out, err = simrl("trace", "show", "größe 模型.parquet", "--json")
    assert (code, err, json.loads(out)["metadata"]["name"]) == (0, "", "größe 模型")
    code, out, _ = simrl("run", "scenario.yaml", "--system", "split", "-o", "größe [bold]模型")
    assert code == 0
    assert "Written to größe [bold]模型" in out


def test_a_name_that_is_no_text_is_refused(simrl):
    for arguments in (
        ("trace", "show", "\udcff.parquet"),
        ("compare", "scenario.yaml", "-o", "\udcff"),
    ):
        assert r"argument '\udcff" in simrl.refuses(*arguments)


def test_a_terminal_that_knows_only_ascii_gets_something_readable(simrl):
    process = simrl.start(
        "--version", b"gr\xc3\xb6\xc3\x9fe\xff", env=environment(PYTHONIOENCODING="ascii:strict")
    )
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == r"simrl: argument 'gr\xf6\xdfe\udcff' is not UTF-8; rename the file" + "\n"


def test_a_reader_that_leaves_early_is_no_error_to_talk_about(simrl):
    reading, writing = os.pipe()
    os.close(reading)
    process = simrl.start("--version", stdout=writing)
    os.close(writing)
    assert process.communicate()[1] == ""
    assert process.returncode == 1


def test_a_full_disk_behind_stdout_is_told(simrl):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as stdout:
        process = simrl.start("--version", stdout=stdout)
        err = process.communicate()[1]
    assert (
        err
        == "simrl: stdout cannot be written (No space left on device); send it where there is room\n"
    )
    assert process.returncode == 2


def test_the_tests_leave_ctrl_c_as_it_was():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_debuggers_python_kernels_are_refused_in_a_line(simrl):
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "simrl.commands.cli",
            "run",
            "scenario.yaml",
            "--system",
            "areal",
            "-o",
            "out",
        ],
        cwd=simrl.folder,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    *_, last = (
        process.stderr.splitlines()
    )  # Matplotlib says first where its cache is, if no home can be written
    assert last == "simrl: NUMBA_DISABLE_JIT is set, and engines run only compiled; unset it"


def test_what_a_strangers_trace_says_cannot_move_the_cursor(simrl, trace):
    evil = "calm\x1b[2J\x1b]0;title\x07\rgone\x9b1m"
    data = read_trace(trace)
    changed_metadata = data.metadata.model_copy(
        update={"name": evil, "source": evil, "notes": evil, "licence": evil}
    )
    write_trace(Trace(data.table, changed_metadata), trace)
    for command in (
        ("trace", "show", str(trace)),
        (
            "run",
            "scenario.yaml",
            "--system",
            "areal",
            "workload={trace: trace.parquet, synthetic: null}",
            "-o",
            "out",
        ),
        ("explain", "out"),
    ):
        code, out, said = simrl(*command)
        assert code == 0 and not set("\x1b\r\x07\x9b") & set(out + said)
