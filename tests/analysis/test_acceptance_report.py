"""simrl acceptance: what drafts would give on a recorded run, and whether they pay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from simrl.analysis.acceptance import DRAFTERS, _sequences_that_fit, measure, model_yaml, report
from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile, read_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.windows import Fixed
from simrl.trace.trace import Trace, write_trace
from tests.command_line import CommandLine
from tests.token_traces import METADATA, random_groups, trace_of

ROOT = Path(__file__).parents[2]
TRACE = random_groups(11, epochs=3, prompts=10, group=8)


@pytest.fixture(scope="module")
def profile() -> TableProfile:
    return roofline_profile(model_shape("qwen3-8b"), gpu("h100"))


@pytest.fixture
def run(simrl: CommandLine) -> CommandLine:
    """The command line beside a trace with token ids."""
    write_trace(TRACE, simrl.folder / "run.parquet")
    return simrl


def test_the_memory_is_that_of_the_profiles_precision_and_layout():
    def fit(path: str) -> float:
        return _sequences_that_fit(read_profile(ROOT / "profiles" / f"{path}.parquet"), 4096)

    assert fit("qwen3-32b_h100_tp2_fp8") > 1.3 * fit("qwen3-32b_h100_tp2") > 0
    assert fit("gpt-oss-120b_h100_tp2_w4a16_mxfp4") > 100


@pytest.mark.parametrize(
    "drafter",
    [pytest.param(d, marks=pytest.mark.slow) if d == "history-paper" else d for d in DRAFTERS],
)
def test_every_drafter_is_measured_on_the_tokens(drafter: Any):
    d = report(measure(TRACE, drafter))
    assert (
        d["drafter"] == drafter and 0 < d["acceptance_rate"] < 1 and 0 < d["speculation_rate"] < 1
    )
    passes = (
        1 - d["speculation_rate"]
    )  # each pass yields a token besides, but for those that end a response
    assert d["accept_length"] == pytest.approx(1 / passes, rel=0.15)
    assert sum(row["share_of_hits"] for row in d["hit_lengths"]) == pytest.approx(1)
    assert sum(row["share_of_tokens"] for row in d["hit_lengths"]) == pytest.approx(1)
    first = d["by_epoch"][0]
    assert first["epoch"] == 0 and (first["accept_length"] is None) == drafter.startswith("history")
    assert sum(row["responses_with_drafts"] for row in d["by_epoch"]) == d["responses_with_drafts"]


def test_what_is_the_same_as_last_epoch_is_drafted_whole():
    rng = np.random.default_rng(0)
    texts = [rng.permutation(1000)[:200].tolist() for _ in range(4)]
    d = report(
        measure(
            trace_of({(e, p): [texts[p]] for e in range(2) for p in range(4)}),
            window=Fixed(tokens=32),
        )
    )
    assert d["acceptance_rate"] > 0.97 and d["speculation_rate"] > 0.94 and d["accept_length"] > 18
    assert {row["to_tokens"] for row in d["hit_lengths"] if row["share_of_tokens"]} == {256}


def test_drafts_that_are_right_pay_at_small_batches_and_say_so(profile: TableProfile):
    pays = report(measure(TRACE, "siblings", known="finished"), profile)["pays"]
    gains = {row["batch"]: row["speed_up"] for row in pays["by_batch"]}
    assert gains[1] > 1.2 > gains[max(gains)]
    assert pays["words"].startswith("Drafting from siblings pays on this workload: ")
    assert "(assumed)" in pays["profile"], "a roofline is no measurement"


def test_drafts_that_are_wrong_cost_time_and_it_says_so(profile: TableProfile):
    rng = np.random.default_rng(1)

    def response() -> list[int]:  # the key comes back, what follows it never does
        return np.concatenate(
            [[1, 2, 3, *rng.integers(10, 100_000, 2)] for _ in range(60)]
        ).tolist()

    d = report(
        measure(trace_of({(e, p): [response()] for e in range(2) for p in range(6)})), profile
    )
    assert d["speculation_rate"] < 0.35
    assert all(row["best_fixed_speed_up"] is not None for row in d["pays"]["by_batch"][:3])
    hopeless = [row["speed_up"] for row in d["pays"]["by_batch"] if row["batch"] >= 256]
    assert max(hopeless) < 1.0


def test_plain_decoding_is_the_profiles(profile: TableProfile):
    pays = report(measure(TRACE, "ngram"), profile)["pays"]
    row = pays["by_batch"][2]
    assert row["plain_s"] == profile.decode_s(row["batch"], pays["kv_tokens"])


def test_the_model_that_is_printed_is_one():
    d = report(measure(TRACE, "siblings"))
    assert d["run_model_accept_length"] == pytest.approx(d["accept_length"], rel=0.1)
    section = yaml.safe_load(model_yaml(d))["speculation"]
    model = SpeculationInputs.model_validate(section).runs_of("siblings")
    assert (
        model.kind == "measured"
        and model.first_epoch
        and model.model_dump(mode="json") == d["run_model"]
    )


def test_the_command_prints_and_draws(run: CommandLine):
    code, out, err = run("acceptance", "run.parquet", "--model", "qwen3-8b", "--gpu", "h100")
    assert (code, err) == (0, "")
    for said in (
        "history-paper from the epoch before",
        "hit length",
        "pays on this workload",
        "classes:",
    ):
        assert said in " ".join(out.split())
    assert (run.folder / "run-acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_has_its_keys(run: CommandLine):
    code, out, _ = run(
        "acceptance", "run.parquet", "--drafter", "history-code", "--json", "-o", "picture.svg"
    )
    d = json.loads(out)
    assert code == 0 and (run.folder / "picture.svg").exists() and d["picture"] == "picture.svg"
    assert set(d) == {
        *(
            "drafter",
            "history",
            "acceptance_rate",
            "speculation_rate",
            "accept_length",
            "by_epoch",
            "hit_lengths",
        ),
        *("by_response", "pays", "run_model", "window", "responses", "responses_with_drafts"),
        *("tokens_with_drafts", "run_model_accept_length", "trace", "picture"),
    }
    assert (
        d["window"]["kind"] == "mimd"
        and d["history"] == {"kind": "epochs", "epochs_back": 1}
        and d["pays"] is None
    )


def test_two_runs_say_the_same(run: CommandLine):
    assert (
        run("acceptance", "run.parquet", "--json").out
        == run("acceptance", "run.parquet", "--json").out
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--drafter", "eagle"],
            "--drafter eagle: choose one of history-paper, history-code, ngram, siblings",
        ),
        (["--window", "0"], "--window 0: choose aimd, mimd or a number of tokens from 1 to 32"),
        (
            ["--drafter", "siblings", "--siblings-known", "all"],
            "--siblings-known all: choose lockstep or finished",
        ),
        (["--siblings-known", "finished"], "only the drafter siblings has it"),
        (["--drafter", "ngram", "--epochs-back", "2"], "only history drafts from epochs"),
        (["--model", "qwen3-8b"], "--model without --gpu: step times need both, or --profile"),
        (["--gpu", "h100"], "--gpu without --model"),
        (["--model", "qwen3-8b", "--gpu", "tpu"], "gpu 'tpu' is unknown"),
        (["--profile", "none.parquet"], "none.parquet: no such profile"),
        (
            ["--profile", "none.parquet", "--model", "qwen3-8b"],
            "a profile has its own; give one of them",
        ),
        (["-o", "picture.txt"], "a picture cannot be written as '.txt'"),
    ],
)
def test_bad_options_are_told_in_a_line(run: CommandLine, options: list[str], told: str):
    assert told in run.refuses("acceptance", "run.parquet", *options)


def test_a_trace_in_which_there_is_nothing_to_draft_from_is_told_in_a_line(simrl: CommandLine):
    bare = Trace(TRACE.table.drop_columns(["response_ids"]), METADATA)
    for name, trace, drafter, told in (
        ("bare", bare, "history-paper", "no column 'response_ids'"),
        ("bare2", bare, "siblings", "no column 'response_ids'; import the run with --tokenizer"),
        (
            "once",
            random_groups(0),
            "history-paper",
            "one epoch only, and history needs an earlier one; try --drafter siblings",
        ),
        (
            "single",
            random_groups(0, group=1),
            "siblings",
            "nothing to draft from (every group has one response)",
        ),
        (
            "other",
            trace_of({(0, 0): [[1, 2, 3]], (1, 1): [[1, 2, 3]]}),
            "history-code",
            "no prompt comes twice",
        ),
    ):
        write_trace(trace, simrl.folder / f"{name}.parquet")
        assert told in simrl.refuses("acceptance", f"{name}.parquet", "--drafter", drafter)
    assert "no such file" in simrl.refuses("acceptance", "nowhere.parquet")


def test_a_profile_that_ends_before_the_responses_do_is_refused(profile: TableProfile):
    t = profile.tables
    short = t._replace(decode_kv_tokens=np.array([0.0, 10.0]))
    with pytest.raises(InputError, match="profile further"):
        report(measure(TRACE, "ngram"), TableProfile(short, profile.metadata))
