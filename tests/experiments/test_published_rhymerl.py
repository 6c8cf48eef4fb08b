"""Published results of RhymeRL: what its inputs become, and that its rows follow from them."""

import numpy as np
import pytest

from experiments.reproduce import rhymerl
from experiments.reproduce.lab import Lab, continued_share
from experiments.reproduce.ledger import read_ledger
from simrl.errors import InputError
from simrl.scenario.model import Scenario
from simrl.simulate.run import simulate
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.passes import stretches
from simrl.speculation.run_model import RunModel, draw_runs

INPUTS = read_ledger("rhymerl").middle
SMALL = {
    "prompts": 32,
    "mean_tokens_8k": 300.0,
    "mean_tokens_16k": 400.0,
    "mfu": 1.0,
    "log_prob_mfu": 1.0,
    "rollout_shares": [0.75],
}


def drawn(model: RunModel, tokens: int = 4000) -> tuple[AcceptRuns, np.ndarray]:
    lengths = np.full(100, tokens)
    return draw_runs(model, lengths, np.arange(100)), lengths


@pytest.mark.parametrize(
    ("task", "reuse"), [("math", 1.0), ("math", 0.8), ("code", 1.0), ("code", 0.6)]
)
def test_drafts_are_right_for_the_share_of_the_tokens_that_is_reusable(task: str, reuse: float):
    parts = stretches(*drawn(RunModel.model_validate(rhymerl.history(INPUTS, task, reuse))))
    share = parts.hit.sum() / (parts.hit.sum() + parts.gap.sum())
    assert share == pytest.approx(
        INPUTS[f"reusable_{task}"] * INPUTS["draft_efficiency"] * reuse, rel=0.05
    )


def test_most_hits_are_short_and_most_tokens_of_hits_are_in_long_ones():
    hits = stretches(*drawn(RunModel.model_validate(rhymerl.history(INPUTS, "math")))).hit
    hits = hits[hits > 0]
    assert (hits <= 2).mean() == pytest.approx(INPUTS["short_hits"], abs=0.03)
    assert hits[hits > 2].sum() > 0.8 * hits.sum()


def test_acceptance_rises_with_the_tokens_that_are_reusable():
    lab = Lab()
    (first,), (last,) = (
        rhymerl.ROWS[f"rhyme-accept-{end}"](lab, INPUTS) for end in ("low", "high")
    )
    assert 0 < first < last < 1


def test_drafts_that_cannot_be_are_refused():
    with pytest.raises(InputError, match=r"its RunModel: .*wrong_drafts is 1.5"):
        rhymerl.acceptance("last")(Lab(), {**INPUTS, "wrong_drafts": 1.5})


def test_indexes_take_their_bytes_for_each_token_of_an_epoch():
    (twice,) = rhymerl.store(Lab(), {**INPUTS, "store_nodes": 4})
    (gigabytes,) = rhymerl.store(Lab(), INPUTS)
    assert twice == 2 * gigabytes
    assert gigabytes == pytest.approx(230e3 * 16 * 5500 * 14 / 8 / 1e9)


def test_an_ablation_compares_runs_of_the_same_batches():
    lab, inputs = Lab(), {**INPUTS, **SMALL}
    systems = (rhymerl.one_step_off(inputs), rhymerl.rhymerl(inputs, "math", speculation="none"))
    with_it, without = (rhymerl.train(lab, inputs, each, "math", "8k") for each in systems[::-1])
    found = rhymerl.gain(lab, inputs, *systems[::-1], "math", "8k")
    assert found == pytest.approx(without["step_s"] / with_it["step_s"], rel=0.02)
    assert len(lab._found) == 2


class Recording(Lab):
    """A lab that keeps what it is asked, and whose trainer and rollout share their work over the GPUs that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Scenario] = []

    def run(self, scenario: Scenario) -> dict[str, object]:
        self.asked.append(scenario)
        share = scenario.system.rollout_share
        return {
            "phase_s": {
                "rollout": 12.0 / share,
                "train": 3.0 / (1 - share),
                "log_prob": 1.0 / (1 - share),
            }
        }


@pytest.mark.parametrize(
    ("shares", "slack", "found"),
    [
        ([0.25, 0.5, 0.75, 0.875], 1.0, 0.75),
        ([0.25, 0.5, 0.75, 0.875], 0.5, 0.5),
        ([0.8, 0.9], 1.0, 0.8),
        ([0.1, 0.2], 1.0, 0.2),
    ],
)
def test_the_split_is_the_largest_share_at_which_training_is_so_much_shorter_than_rollout(
    shares, slack, found
):
    inputs = {**INPUTS, "rollout_shares": shares, "trainer_over_rollout": slack}
    assert rhymerl.split(Recording(), inputs, "16k") == found


def test_what_runs_on_verl_has_no_cuda_graphs_unless_asked_and_areal_has_them():
    engines = {}
    for eager in (True, False):
        lab, inputs = Recording(), {**INPUTS, "enforce_eager": eager}
        for system in (rhymerl.one_step_off(inputs), rhymerl.areal(inputs, 1)):
            rhymerl.train(lab, inputs, system, "math", "16k", rollout_share=0.5)
            engines[eager, system["name"]] = lab.asked[-1].engine
    assert [key for key, engine in engines.items() if engine.enforce_eager] == [
        (True, "one_step_off")
    ]
    assert engines[True, "one_step_off"].preset == INPUTS["engine_preset"] == "vllm-0.8"
    assert engines[True, "areal"].preset == INPUTS["areal_engine_preset"] == "sglang-0.4"


def test_samples_that_go_on_under_newer_weights_are_counted_once_each():
    def run(**system):
        return simulate(
            Scenario.model_validate(
                {
                    "name": "run",
                    "steps": 3,
                    "warmup_steps": 1,
                    "model": "qwen3-8b",
                    "cluster": {"gpu": "h100", "gpus": 16, "tp": 2},
                    "workload": {
                        "synthetic": {
                            "steps": 3,
                            "prompts_per_step": 8,
                            "group": 4,
                            "cap_tokens": 2048,
                            "mean_tokens": 600,
                            "sigma": 1.0,
                        }
                    },
                    "profile": {"roofline": {}},
                    "training": {"sequence_parallel": 1},
                    "system": {"rollout_share": 0.5, **system},
                }
            )
        )

    assert continued_share(run(name="one_step_off"), 1) == 0
    result = run(name="areal", eta=1)
    trained = result.samples.filter(result.samples.column("trained_step").to_numpy() >= 1).num_rows
    segments = result.segments.to_pandas()
    versions = segments.groupby("uid")["policy_version"].nunique()
    uids = result.samples.to_pandas().query("trained_step >= 1")["uid"]
    assert continued_share(result, 1) == (versions[uids] > 1).sum() / trained > 0
