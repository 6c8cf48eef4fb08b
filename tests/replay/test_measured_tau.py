"""τ measured: known engines come back as a table, an interrupted measurement goes on, plans that make no table are refused."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.profile.tau import read_tau
from simrl_replay.bench import Group, Seen
from simrl_replay.cli_measure import Wanted
from simrl_replay.measured_tau import TauPlan, check_tau, numbers_of, tau_with
from tests.command_line import CommandLine

PLAN = TauPlan([64, 128], [1, 2], [8, 32])


def seconds_of(group: Group) -> float:
    return 0.1 + 1e-3 * group.length_tokens * (1 + group.responses / group.workers / 64)


class Known:
    """Engines whose seconds are known; the n-th repeat takes n % 3 - 1 percent more."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.groups: list[Group] = []
        self.stop_after = stop_after

    def __call__(self, group: Group) -> Seen:
        if len(self.groups) == self.stop_after:
            raise KeyboardInterrupt
        repeat = self.groups.count(group)
        self.groups.append(group)
        accept = 1 + 3 * group.acceptance
        return Seen(
            group_s=(seconds_of(group) / accept * (1 + 0.01 * (repeat % 3 - 1)),),
            accept_length=(accept,),
        )


@pytest.fixture
def wanted(tmp_path) -> Wanted:
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    }
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    return Wanted(model=tmp_path / "small", device="cpu", repeats=3)


def test_known_engines_come_back_as_a_table_of_medians(wanted, tmp_path):
    output = tmp_path / "tau.csv"
    rows = tau_with(Known(), "0.32", wanted, PLAN, output, tmp_path / "journal")
    assert [row.spread for row in rows] == pytest.approx([0.02] * 8)
    tau = read_tau(output, model="small", gpu="cpu", tp=1)
    for group in PLAN.groups:
        table = tau.table([[group.length_tokens]], [group.responses], group.workers)
        assert table[0, -1] == pytest.approx(seconds_of(group), rel=1e-4)
    assert tau.source.startswith("tau.csv; simrl measure --tau: vLLM 0.32 on ")


def test_with_forced_acceptance_the_table_has_the_accept_length_that_it_came_to(wanted, tmp_path):
    output, plan = tmp_path / "tau.csv", PLAN._replace(acceptances=[0.0, 0.5])
    tau_with(Known(), "0.32", replace(wanted, draft_tokens=4), plan, output, tmp_path / "journal")
    assert read_tau(output).grids[0].tolist() == [1.0, 2.5]


def test_acceptances_that_yield_the_same_are_one_place_of_the_table(wanted, tmp_path):
    output, plan = tmp_path / "tau.csv", PLAN._replace(acceptances=[0.5, 0.500001])
    wanted = replace(wanted, draft_tokens=4)
    rows = tau_with(Known(), "0.32", wanted, plan, output, tmp_path / "journal")
    assert len(rows) == len(plan.groups) / 2
    assert read_tau(output).grids[0].tolist() == [2.5]


@pytest.mark.parametrize(
    "options, words",
    [
        (("--tau", "--preset", "mine.toml"), "--preset mine.toml: measure --tau writes a table alone"),
        (("--lengths", "8,16"), "--lengths: only measure --tau takes it; add --tau"),
        (("--acceptance", "0.5"), "--acceptance: only measure --tau takes it"),
        (("--tau", "--responses", ""), "--responses '': give numbers of 1 or more"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(simrl, wanted, options, words):
    command = ("measure", "--model", str(wanted.model), "--device", "cpu", "-o", "out.csv")
    assert words in simrl.refuses(*command, *options)


def test_an_interrupted_measurement_goes_on_where_it_was(wanted, tmp_path):
    output, journal = tmp_path / "tau.csv", tmp_path / "journal"
    first = Known(stop_after=10)
    with pytest.raises(KeyboardInterrupt):
        tau_with(first, "0.32", wanted, PLAN, output, journal)
    assert not output.exists()
    second = Known()
    tau_with(second, "0.32", wanted, PLAN, output, journal)
    assert len(first.groups) + len(second.groups) == 3 * len(PLAN.groups)
    with pytest.raises(InputError, match="points of a measurement with repeats 3"):
        second = Known(stop_after=1)
        with pytest.raises(KeyboardInterrupt):
            tau_with(second, "0.32", wanted, PLAN, output, journal)
        tau_with(second, "0.32", replace(wanted, repeats=4), PLAN, output, journal)


@pytest.mark.parametrize(
    "changes, plan, words",
    [
        ({}, PLAN._replace(lengths=[64]), "--lengths 64, --workers 1,2: τ needs two lengths"),
        ({}, PLAN._replace(lengths=[64, 2000]), "more than --max-model-len 1024; raise it"),
        ({}, PLAN._replace(responses=[1]), "--responses 1: fewer than 2 workers"),
        ({}, PLAN._replace(responses=[0, 8]), "--responses 0,8: give numbers of 1 or more"),
        ({}, PLAN._replace(responses=[]), "--responses '': give numbers of 1 or more"),
        ({}, PLAN._replace(workers=[]), "--workers '': give numbers of 1 or more"),
        ({}, PLAN._replace(lengths=[]), "--lengths '': give numbers of 1 or more"),
        ({}, PLAN._replace(workers=[0, 1]), "--workers 0,1: give numbers of 1 or more"),
        ({}, PLAN._replace(workers=[-1, 2]), "--workers -1,2: give numbers of 1 or more"),
        ({}, PLAN._replace(acceptances=[0.5]), "--draft-tokens belong together"),
        ({"draft_tokens": 3}, PLAN._replace(acceptances=[1.0]), "from 0 to below 1"),
        ({"device": "cuda"}, PLAN, "name the GPU of the table with --gpu"),
        ({"gpu": "h1000"}, PLAN, "--gpu h1000"),
    ],
)
def test_a_plan_that_makes_no_table_is_refused(wanted, changes, plan, words):
    with pytest.raises(InputError, match=words):
        check_tau(replace(wanted, **changes), plan)


def test_numbers_are_read_with_commas_between_them():
    assert numbers_of("--workers", "4,1, 2", int) == [1, 2, 4]
    with pytest.raises(InputError, match=r"--workers 1;2: give numbers with commas"):
        numbers_of("--workers", "1;2", int)


@pytest.mark.vllm
def test_real_engines_make_a_table_and_an_interrupted_measurement_leaves_nobody(
    simrl: CommandLine,
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from simrl_replay.random_model import make_model
    from tests.replay.test_measure import nobody_left

    make_model(simrl.folder / "model", vocab=256)
    command = ["measure", "--tau", "--model", "model", "--device", "cpu", "-o", "tau.csv", "--json", "--max-num-seqs", "8",
               "--max-num-batched-tokens", "64", "--max-model-len", "256", "--repeats", "2", "--lengths", "16,48",
               "--workers", "1,2", "--responses", "4", "--draft-tokens", "3", "--acceptance", "0,0.7"]  # fmt: skip
    journal = simrl.folder / "tau.points.jsonl"
    process = simrl.start(*command)
    while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 3):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert "the same command goes on from there" in err and "Traceback" not in err
    assert nobody_left(process.pid)
    code, out, err = simrl(*command)
    assert code == 0, err
    assert len(json.loads(out)["rows"]) == 8
    plain, drafted = read_tau(Path(simrl.folder) / "tau.csv").grids[0]
    assert plain == 1.0 and 1.2 < drafted < 4.0
