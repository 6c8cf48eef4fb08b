"""The traces that are shipped: whole, as their task says, and what the simulator makes of them."""

from pathlib import Path

import numpy as np
import pytest

from experiments.reproduce.ranks import rank_history
from experiments.reproduce.similarity import similarities
from simrl.analysis.acceptance import measure, report
from simrl.analysis.agreement import agree
from simrl.analysis.explanation import explain_result
from simrl.result.result import read_result
from simrl.scenario.load import load_scenarios
from simrl.simulate.run import simulate
from simrl.trace.trace import Trace, read_trace
from simrl_replay.grpo.tasks import Countdown

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "traces"
SCHEDULES = ("sync", "one_step_off", "areal")
PROMPTS, GROUP, EPOCHS, STEP = 32, 8, 20, 128


@pytest.fixture(scope="module", params=SCHEDULES)
def trace(request: pytest.FixtureRequest) -> Trace:
    return read_trace(TRACES / "countdown" / request.param / "trace.parquet")


def test_what_is_shipped_is_small():
    assert sum(file.stat().st_size for file in TRACES.rglob("*") if file.is_file()) < 30e6


def test_every_prompt_has_its_group_in_every_epoch(trace: Trace):
    keys = np.stack([trace.column(name) for name in ("epoch", "prompt_id", "sample")], axis=1)
    assert len(np.unique(keys, axis=0)) == len(keys) == PROMPTS * GROUP * EPOCHS
    assert keys.max(axis=0).tolist() == [EPOCHS - 1, PROMPTS - 1, GROUP - 1]
    assert {end - start for _, start, end in trace.step_slices} == {STEP}


def test_recorded_rewards_are_those_that_the_task_gives_the_recorded_tokens(trace: Trace):
    task = Countdown()
    problems = task.make_prompts(0, PROMPTS)
    responses = trace.table["response_ids"].to_pylist()
    rewards = [
        task.reward(problems[p], ids)
        for p, ids in zip(trace.column("prompt_id"), responses, strict=True)
    ]
    assert rewards == trace.column("reward").tolist()
    assert max(map(len, responses)) == task.most_tokens


def test_the_policies_learned_from_their_first_epochs_to_their_last(trace: Trace):
    reward, epoch = trace.column("reward"), trace.column("epoch")
    assert reward[epoch >= EPOCHS - 3].mean() > reward[epoch < 3].mean() + 0.08


def test_their_history_drafts_far_better_than_another_prompts(trace: Trace):
    found = report(measure(trace, "history-paper", epochs_back=1))
    before = similarities(trace)[0]
    assert found["acceptance_rate"] > 0.5
    assert before["best_match"] > 3 * before["another_prompt"]


def test_their_lengths_have_a_tail_that_ranks_tell_in_part(trace: Trace):
    tokens = trace.column("response_tokens")
    assert np.quantile(tokens, 0.99) > 2.5 * np.median(tokens)
    shares = rank_history(trace, 8).overall
    assert 0.5 < shares["accurate"] < 1 and 0 < shares["migrated"] < 0.2


@pytest.mark.parametrize("name", SCHEDULES)
def test_measured_times_are_of_the_same_responses_as_the_tokens(name: str):
    folder = TRACES / "countdown" / name
    samples = read_result(folder / "parts" / "000").samples.to_pandas()
    trained = samples[samples["status"] == "trained"]
    trace = read_trace(folder / "trace.parquet")
    assert len(trained) == trace.table.num_rows
    assert trained["generated_tokens"].sum() == trace.column("response_tokens").sum()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recorded_run_is_explained_as_a_simulated_one_is(name: str):
    whole = explain_result(read_result(TRACES / "countdown" / name / "parts" / "000")).whole
    assert sum(whole.gpu_s.values()) == pytest.approx(whole.total_gpu_s)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recorded_run_is_compared_with_its_prediction(name: str):
    """Also where it ends with responses under way that its trace has no more."""
    folder = TRACES / "countdown" / name
    (scenario,) = load_scenarios(folder / "scenario.yaml")
    agreement = agree(simulate(scenario), read_result(folder / "parts" / "000"))
    assert agreement.samples == PROMPTS * GROUP * EPOCHS
    wall_s = agreement.figures.wall_s
    assert abs(wall_s.predicted / wall_s.measured - 1) < 0.2


def test_no_shipped_file_names_a_place_on_the_machine_that_made_it():
    for file in TRACES.rglob("*"):
        if file.is_file():
            assert not any(
                place in file.read_bytes() for place in (b"/work/", b"/tmp/", b"/home/", b"/root/")
            ), file
