"""SPEC-RL's old responses, verified by the trainer or by the engine."""

from itertools import pairwise

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.siblings import whole_response_runs
from tests.conservation import assert_nothing_is_lost
from tests.helpers import lanes, rows, scenario, watch

TWO_EPOCHS = {
    "synthetic": {
        "steps": 4,
        "prompts": 8,
        "prompts_per_step": 4,
        "group": 4,
        "cap_tokens": 400,
        "mean_tokens": 150,
        "sigma": 0.6,
        "prompt_tokens": 20,
    }
}
KEPT = {"acceptance": {"old_response": {"by_position": [0.995], "kind": "measured"}}}


def run(system="verl_colocated", steps=4, **method):
    speculation = {"name": "spec_rl", **method} if method else "none"
    return simulate(
        scenario(
            {"name": system, "speculation": speculation},
            steps=steps,
            workload=TWO_EPOCHS,
            speculation=KEPT,
        )
    )


def test_the_trainer_verifies_between_update_and_rollout_from_the_second_epoch_on():
    trainer, engine = run(verify="trainer"), run(verify="engine")
    kinds = [[span["kind"] for span in lanes(x)["rollout-000"]] for x in (trainer, engine)]
    assert kinds[0].count("log_prob") - kinds[1].count("log_prob") == 2
    after = [b for a, b in pairwise(kinds[0]) if a == "train"]
    assert after == ["switch", "log_prob", "log_prob", "switch"]  # before the third and the fourth
    shorter = [span["kind"] for span in lanes(run(steps=3, verify="trainer"))["rollout-000"]]
    assert [b for a, b in pairwise(shorter) if a == "train"] == ["switch", "log_prob", "switch"]
    asked = {"name": "verl_colocated", "speculation": {"name": "spec_rl", "verify": "trainer"}}
    made = scenario(asked, steps=4, workload=TWO_EPOCHS, speculation=KEPT)
    assert_nothing_is_lost(watch(prepare(made)))


def test_tokens_do_not_change_and_the_engine_prefills_what_is_kept():
    plain, trainer, engine = run(), run(verify="trainer"), run(verify="engine")
    tokens = [
        {r["uid"]: r["generated_tokens"] for r in rows(x.samples)} for x in (plain, trainer, engine)
    ]
    assert tokens[0] == tokens[1] == tokens[2]
    kept = [[r["accepted_tokens"] for r in rows(x.samples)] for x in (trainer, engine)]
    assert kept[0] == kept[1] and sum(kept[0]) > 0
    drafted = [sum(r["drafted_tokens"] for r in rows(x.samples)) for x in (trainer, engine)]
    assert drafted[0] < drafted[1]


def test_the_number_kept_is_as_the_rate_says():
    made = prepare(
        scenario(
            workload={
                "synthetic": TWO_EPOCHS["synthetic"]
                | {"group": 200, "cap_tokens": 4000, "mean_tokens": 2000}
            }
        )
    )
    rate = ModelAcceptance(by_position=(0.98,))
    runs = whole_response_runs(made.trace, rate, seed=3)
    old = runs.old_tokens > 300
    assert runs.accepted[old].mean() == pytest.approx(0.98 / 0.02, rel=0.05)
    assert (
        runs.accepted <= np.minimum(runs.old_tokens, made.trace.column("response_tokens"))
    ).all()


def test_a_bias_needs_rates_and_an_overlapping_system_the_engine():
    asked = {"name": "verl_colocated", "speculation": {"name": "spec_rl", "bias": -0.5}}
    with pytest.raises(InputError, match="give the rate at which tokens are kept under it"):
        prepare(scenario(asked, workload=TWO_EPOCHS))
    with pytest.raises(InputError, match="use verify=engine"):
        run("areal", verify="trainer")


@pytest.mark.parametrize("system", ["dapo", "rollpacker", "verl_v1_sync"])
def test_a_system_whose_next_prompts_are_no_step_of_the_trace_needs_the_engine(system):
    with pytest.raises(InputError, match="draws others to fill its batches; use verify=engine"):
        run(system, verify="trainer")
