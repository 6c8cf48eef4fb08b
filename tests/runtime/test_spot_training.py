"""TLT's spot trainer in a simulation. Where times are counted by hand a forward pass takes a second, and a response of n tokens
that does not wait n seconds."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simrl.engine.engine import Fleet
from simrl.result.metrics import summary
from simrl.result.result import Result
from simrl.runtime.drafting import Drafting
from simrl.runtime.spot_trainer import SpotTrainer
from simrl.show.inputs import inputs
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.speculation.drafter_training import Pace, SpotTraining
from simrl.trace.trace import Trace
from tests.conservation import assert_nothing_is_lost
from tests.helpers import counted, lanes, on_gpus, prepared, recorder, rows, scenario, trace, watch

NEVER = {
    "threshold": 1,
    "patience": 100_000,
}  # its elastic gate: no drafts, so that times can be counted
EVERY_STEP = {
    "every_updates": 1,
    "activation_s": 0.0,
    "iteration_s": 1.0,
    "recovery_iterations": 3.0,
}
UNEVEN = trace(
    [[[(4, 8)], [(4, 20)]]]
)  # worker 0 has nothing from second 8 on, worker 1 from second 20 on


def tlt(**parameters: Any) -> dict[str, Any]:
    return {"speculation": {"name": "tlt", **parameters}}


def trained_spans(result: Result) -> list[tuple[str, float, float]]:
    """(lane, from, to) of all training of the drafter, in time."""
    spans = [s for s in rows(result.spans) if s["kind"] == "train_drafter"]
    return sorted(
        ((s["lane"], s["started_s"], s["ended_s"]) for s in spans), key=lambda span: span[1:]
    )


def idling(
    training: dict[str, Any], steps: int = 2, whole: Trace = UNEVEN, workers: int = 2, **more: Any
) -> Result:
    """Rollouts that never draft, two workers, weights loaded in 10 seconds."""
    parameters = tlt(**NEVER, training={**EVERY_STEP, **training}, **more)
    return counted("verl_colocated", parameters, whole, steps, workers).result


def test_an_idle_worker_trains_until_the_rollout_ends_and_its_gpus_are_then_free():
    result = idling({}, steps=1)
    assert trained_spans(result) == [("rollout-000", 8.0, 20.0)]
    first = [(s["kind"], s["started_s"], s["ended_s"]) for s in lanes(result)["rollout-000"][:2]]
    assert first == [("rollout", 0.0, 8.0), ("train_drafter", 8.0, 20.0)]
    assert all(s["kind"] != "train_drafter" for s in lanes(result)["rollout-001"])


def test_workers_that_fall_idle_later_join_or_do_not():
    three = trace([[[(4, 8)], [(4, 14)], [(4, 20)]]])
    joined = idling({}, 1, three, 3)
    assert trained_spans(joined) == [("rollout-001", 14.0, 20.0), ("rollout-000", 8.0, 20.0)][::-1]
    assert trained_spans(idling({"join": False}, 1, three, 3)) == [("rollout-000", 8.0, 20.0)]
    together = idling({"idle_workers": 2}, 1, three, 3)
    assert trained_spans(together) == [("rollout-000", 14.0, 20.0), ("rollout-001", 14.0, 20.0)]


def test_each_update_makes_the_drafter_one_staler_and_each_iteration_recovers_some():
    result = idling({}, steps=3)  # 12 iterations a rollout
    left = np.exp(-12 / 3)
    assert result.metadata["drafter_updates_behind"] == pytest.approx(
        [0.0, 1.0, left + 1, (left + 1) * left + 1]
    )


def test_it_trains_in_every_so_many_th_rollout_only():
    result = idling({"every_updates": 2}, steps=4)
    left = np.exp(-12 / 3)
    behind = [0.0, 1.0, 2.0, 2 * left + 1, 2 * left + 2]
    assert result.metadata["drafter_updates_behind"] == pytest.approx(behind)
    assert len(trained_spans(result)) == 2


def test_a_session_begins_with_its_activation_and_ends_with_its_last_iteration():
    late = idling({"activation_s": 5.0}, steps=2)  # of 12 seconds 7 are left
    assert late.metadata["drafter_updates_behind"][2] == pytest.approx(np.exp(-7 / 3) + 1)
    assert trained_spans(late)[0] == ("rollout-000", 8.0, 20.0)
    short = idling({"activation_s": 5.0, "most_iterations": 4}, steps=2)
    assert short.metadata["drafter_updates_behind"][2] == pytest.approx(np.exp(-4 / 3) + 1)
    assert trained_spans(short)[0] == ("rollout-000", 8.0, 17.0)


def test_what_was_not_saved_when_training_stops_is_lost():
    checkpoints = {"save_at_end": False, "save_every_iterations": 5}
    behind = idling(checkpoints, steps=2).metadata["drafter_updates_behind"]
    assert behind[2] == pytest.approx(np.exp(-10 / 3) + 1)
    nothing = idling(checkpoints | {"save_every_iterations": 13}, steps=2)
    assert nothing.metadata["drafter_updates_behind"] == [0.0, 1.0, 2.0]
    assert trained_spans(nothing)


def test_training_delays_nothing_and_takes_idle_time_only():
    trained, static = (
        idling({"data_buffer": False}, steps=4, adaptive=adaptive) for adaptive in (True, False)
    )
    assert trained.steps.equals(static.steps) and trained.segments.equals(static.segments)
    assert trained_spans(trained) and not trained_spans(static)
    assert "drafter_updates_behind" not in static.metadata
    for lane, spans in lanes(static).items():
        busy = [s for s in spans if s["kind"] != "idle"]
        assert [
            s for s in lanes(trained)[lane] if s["kind"] not in ("idle", "train_drafter")
        ] == busy
    before, after = (summary(result, 1)["rollout_bubble"] for result in (static, trained))
    idle_s, rollout_s = 12.0, 2 * (20.0 + 10.0)  # of a step; nearly, as little else takes time here
    assert before - after == pytest.approx(idle_s / rollout_s, abs=0.01)


def test_hidden_states_are_copied_to_the_host_before_the_updates_ahead_of_a_rollout_that_trains():
    """§4.1: in the inference phase. Rollouts 0 and 3 train, so updates 2 and 5 of six are longer."""
    trained, kept = (
        idling({"every_updates": 3, "data_buffer": buffer}, steps=6) for buffer in (True, False)
    )
    longer_s = [
        sum(s["ended_s"] - s["started_s"] for s in rows(result.spans) if s["kind"] == "log_prob")
        for result in (trained, kept)
    ]
    figures = trained.metadata["drafter_training"]
    gpus = 2
    assert kept.metadata["drafter_training"]["collecting_s"] == 0 < figures["collecting_s"]
    assert longer_s[0] - longer_s[1] == pytest.approx(gpus * figures["collecting_s"], rel=1e-6)
    updates_s = [
        np.diff(result.steps.column("finished_s").to_numpy(), prepend=0.0)
        for result in (trained, kept)
    ]
    longer = updates_s[0] - updates_s[1] > 1e-9
    assert longer.tolist() == [False, False, True, False, False, True]


def test_the_inputs_of_a_run_name_its_largest_verification_and_the_training_of_its_drafter():
    result = idling({"every_updates": 2}, steps=4)
    shown = {entry.name: entry for entry in inputs(result.metadata)}
    assert "beyond a plain pass" in shown["memory of verification"].value
    trained = result.metadata["drafter_training"]
    assert f"{trained['iterations']} iterations" in shown["training of the drafter"].value
    assert f"{trained['padded_tokens']:,}" in shown["training of the drafter"].source


def test_the_buffer_holds_the_responses_of_two_steps_and_without_it_those_of_one():
    one, two = (idling({}, steps=n).metadata["drafter_training"] for n in (1, 4))
    assert two["buffer_bytes"] == 2 * one["buffer_bytes"] > 0
    off = idling({"data_buffer": False}, steps=4).metadata
    assert off["drafter_training"]["buffer_bytes"] == one["buffer_bytes"]
    shown = {entry.name: entry for entry in inputs(off)}
    assert "none copied there in inference phases" in shown["training of the drafter"].source


def test_a_drafter_that_is_trained_prolongs_the_loads_of_weights_with_which_it_comes():
    """§6.4: stage-transition overhead by the additional update of the drafter's weights."""
    trained, static = (
        prepare(scenario({"name": "tlt", "adaptive": adaptive})) for adaptive in (True, False)
    )
    longer_s = trained.costs.load_s - static.costs.load_s
    assert trained.drafts.weight_bytes > 0
    assert longer_s == pytest.approx(trained.drafts.weight_bytes / trained.gpu.link_bytes_per_s)
    measured = scenario({"name": "tlt"}, training={"load_s": 3.0})
    assert prepare(measured).costs.load_s == 3.0


def test_a_worker_whose_sample_waits_for_its_environment_does_not_train():
    columns = {name: UNEVEN.table.column(name).to_pylist() for name in UNEVEN.table.column_names}
    waiting = Trace.from_columns(
        {**columns, "turn_tokens": [[4, 4], [20]], "turn_environment_s": [[6.0], []]},
        UNEVEN.metadata,
    )
    # Its first turn ends at second 4, the environment answers at 10; four more tokens.
    assert trained_spans(idling({}, 1, waiting)) == [("rollout-000", 14.0, 20.0)]


def spot(workers: int, colocated: bool, **training: Any) -> tuple[SpotTrainer, Any]:
    record = recorder(*(f"rollout-{i:03d}" for i in range(workers)))
    pace = Pace(token_s=1e-3, trained_bytes=1e9, frozen_bytes=3e9, host_bytes_per_s=10e9)
    return SpotTrainer(
        SpotTraining(**{**EVERY_STEP, **training}), record, workers, colocated, pace=pace
    ), record


def test_gpus_that_the_trainer_takes_are_its_own_until_their_worker_has_loaded_weights():
    trainer, record = spot(3, colocated=True)
    for worker in range(3):
        trainer.serves(worker, 0.0)
    trainer.idle(0, 4.0)
    trainer.idle(1, 5.0)
    trainer.occupied([0], 7.0)  # log-probs begin on it, while worker 2 still rolls out
    trainer.occupied([0, 3], 9.0)  # lane 3 is no worker
    trainer.idle(2, 10.0)
    assert [(s.lane, s.started_s, s.ended_s) for s in record.spans] == [
        (0, 4.0, 7.0),
        (1, 5.0, 10.0),
    ]
    trainer.idle(0, 20.0)  # nobody rolls out: the rollout is over
    trainer.stop(30.0)
    assert len(record.spans) == 2


def test_where_rollouts_do_not_end_idle_workers_train_whatever_others_do_and_updates_end_sessions():
    trainer, record = spot(2, colocated=False)
    trainer.serves(0, 0.0)
    trainer.serves(1, 0.0)
    trainer.idle(0, 1.0)
    trainer.idle(1, 3.0)
    trainer.serves(1, 4.0)
    trainer.policy_updated(5.0)  # the drafter was fresh: now it is one update behind
    trainer.policy_updated(8.0)  # after three iterations
    trainer.serves(0, 8.5)
    trainer.stop(9.0)
    spans = [(s.lane, s.started_s, s.ended_s, s.policy_version) for s in record.spans]
    assert spans == [(1, 3.0, 4.0, 0), (0, 1.0, 5.0, 0), (0, 5.0, 8.0, 1), (0, 8.0, 8.5, 2)]
    assert trainer.behind == pytest.approx([0.0, 1.0, np.exp(-1) + 1])
    # Weights of version 1 come with the drafter of then, whoever loads them when.


def test_iterations_go_on_while_workers_come_and_go():
    trainer, _ = spot(4, colocated=False, scaling=1.0)
    for worker in range(4):
        trainer.serves(worker, 0.0)
    trainer.policy_updated(0.0)
    trainer.idle(0, 0.5)  # iterations end at 1.5, 2.5 ...
    trainer.idle(1, 2.0)
    trainer.serves(0, 3.0)
    trainer.policy_updated(4.6)
    # At 1.5 one worker, at 2.5 two of them, at 3.5 and 4.5 the other one.
    assert trainer.behind[-1] == pytest.approx(np.exp(-(1 + 2 + 1 + 1) / 3) + 1)


def trained_in_100_s(idle: int = 1, seen: int = 2, **training: Any) -> SpotTrainer:
    """The trainer after the second of two rollouts, of which each has `seen` responses of 1,000 and 3,000 tokens, and the first
    one of 8,000; `idle` of four workers train for 100 s of it, in iterations of 4 responses."""
    trainer, _ = spot(4, colocated=False, **{"iteration_s": None, "batch_sequences": 4, **training})
    for worker in range(4):
        trainer.serves(worker, 0.0)
    for tokens in [*[1000, 3000] * seen, 8000]:
        trainer.finished(tokens, 1.0)
    trainer.policy_updated(2.0)
    for tokens in [1000, 3000] * seen:
        trainer.finished(tokens, 3.0)
    for worker in range(idle):
        trainer.idle(worker, 10.0)
    for worker in range(idle):
        trainer.serves(worker, 110.0)
    trainer.policy_updated(200.0)
    return trainer


def test_more_workers_train_more_and_padding_trains_less():
    one, two, padded = (
        trained_in_100_s(**given) for given in ({}, {"idle": 2}, {"packing": False})
    )
    assert padded.iterations < one.iterations < two.iterations
    assert padded.behind[-1] > one.behind[-1] > two.behind[-1]
    # Batches of 8,000 + 3 × (1,000 or 3,000), and then of the five in turn: 16 s for five of them or 32 padded.
    assert two.iterations == pytest.approx(2 * one.iterations, abs=1)


def test_what_packing_saves_follows_from_the_lengths_of_the_responses():
    """100 s are 100,000 tokens: of responses where they are packed, else of the longest of each batch, four times."""
    packed, padded = (
        trained_in_100_s(packing=packing).facts(200.0)["drafter_training"]
        for packing in (True, False)
    )
    batch = 4 * 8000
    assert 100_000 - batch < packed["packed_tokens"] <= 100_000
    assert 100_000 - batch < padded["padded_tokens"] <= 100_000
    assert packed["padded_tokens"] > 1.5 * packed["packed_tokens"]
    equal = trained_in_100_s(seen=0).facts(200.0)["drafter_training"]
    assert equal["padded_tokens"] == equal["packed_tokens"] > 0


def test_an_iteration_may_train_on_the_last_tokens_of_each_response_alone():
    """As the public code, which takes 512: of 1,000, 3,000 and 8,000 tokens there is nothing to pack then, and longer responses
    than these are unknown without the buffer."""
    window = {"window_tokens": 512, "data_buffer": False}
    packed, padded = (trained_in_100_s(packing=packing, **window) for packing in (True, False))
    figures = packed.facts(200.0)["drafter_training"]
    assert figures["packed_tokens"] == figures["padded_tokens"] == 512 * 4 * packed.iterations
    assert packed.iterations == padded.iterations == int(100 / (4 * 0.512))
    assert packed.beyond[-1] == (512, 2.0)


def test_without_log_probs_nothing_of_the_step_before_is_trained_on():
    """§4.1, §4.2: its hidden states are collected in the inference phase, which there is not."""
    without, off = (
        counted(
            "verl_colocated",
            {"log_probs": passes} | tlt(**NEVER, training={**EVERY_STEP, "data_buffer": buffer}),
            UNEVEN,
            3,
            2,
        ).result.metadata["drafter_training"]
        for passes, buffer in ((0, True), (1, False))
    )
    assert without["collecting_s"] == 0 and without["iterations"] > 0
    assert without == off


def test_a_batch_is_a_random_sample_of_the_buffer_without_repetition():
    trainer = trained_in_100_s()
    buffer = [1000, 3000, 1000, 3000]
    for tokens in buffer:
        trainer.finished(tokens, 201.0)
    assert sorted(trainer._batch()) == sorted(buffer)  # all that there is
    assert trainer._batch() == trainer._batch()


def test_the_papers_batches_begin_with_the_longest_responses_of_the_rollout_before():
    trainer = trained_in_100_s(sampling="longest_first")
    trainer._pool, trainer._before = None, [500, 9000, 4000]
    for tokens in (1000, 3000):
        trainer.finished(tokens, 201.0)
    trainer._drafter = replace(trainer._drafter, iterations=0)
    assert trainer._batch() == [9000, 4000, 1000, 3000]


def test_without_responses_there_is_nothing_to_train_on():
    assert trained_in_100_s(seen=0, data_buffer=False).iterations == 0
    assert trained_in_100_s(seen=0).iterations > 0  # the long one of the rollout before


def test_the_data_buffer_keeps_the_drafter_good_for_long_responses():
    assert trained_in_100_s().beyond[-1] == (np.inf, trained_in_100_s().behind[-1])
    covered, behind = trained_in_100_s(data_buffer=False).beyond[-1]
    assert (covered, behind) == (3000, 2.0)


def test_checkpoints_cost_training_time_the_more_of_them_and_the_more_they_wait():
    often, seldom = ({"save_every_iterations": n} for n in (1, 100))
    whole, synchronous = {"selective_saves": False}, {"asynchronous_saves": False}
    assert trained_in_100_s(**seldom).saving_s == 0 < trained_in_100_s(**often).saving_s
    assert trained_in_100_s(**often).iterations <= trained_in_100_s(**seldom).iterations
    naive = trained_in_100_s(**often, **whole, **synchronous)
    assert naive.saving_s / naive.iterations == pytest.approx(2.0)  # 4 GB at 2 GB/s
    ours = trained_in_100_s(**often)
    assert naive.saving_s / naive.iterations > 5 * ours.saving_s / ours.iterations
    assert naive.iterations < ours.iterations


def test_a_checkpoint_counts_once_it_is_stored():
    lost = {"save_at_end": False, "iteration_s": 10.0, "save_every_iterations": 10}
    assert trained_in_100_s(**lost).behind[-1] == 2.0  # the tenth iteration ends with the session
    assert trained_in_100_s(**lost | {"save_every_iterations": 9}).behind[-1] == pytest.approx(
        np.exp(-9 / 3) + 1
    )


DRIFTING = {
    "acceptance": {
        "eagle": {
            "by_position": [0.85],
            "drift_per_update": 0.2,
            "most_drift": 3.0,
            "source": "a test",
        }
    }
}
FEW = {"threshold": 100, "patience": 1, "bandit": False, "model_free_if_slower": False}
TEN_STEPS = {
    "steps": 10, "prompts_per_step": 4, "group": 2, "cap_tokens": 400, "mean_tokens": 80, "sigma": 1.0, "prompt_tokens": 20,
}  # fmt: skip


def drifting(**parameters: Any) -> Result:
    config = scenario(
        {"name": "verl_colocated", **tlt(**FEW, **parameters)},
        steps=10,
        workload={"synthetic": TEN_STEPS},
        speculation=DRIFTING,
    )
    return simulate_prepared(prepared(config))


def accept_lengths(result: Result) -> list[float]:
    """Of the samples of each update, the mean over passes that verified a draft."""
    accepted: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows(result.samples):
        if row["trained_step"] is not None:
            accepted[row["trained_step"]][0] += row["accepted_tokens"]
            accepted[row["trained_step"]][1] += row["verifications"]
    return [1 + tokens / passes for _, (tokens, passes) in sorted(accepted.items())]


def test_a_drafter_that_is_trained_accepts_more_than_one_that_stays_as_it_was():
    adaptive = drifting(training={"every_updates": 1, "iteration_s": 0.05})
    static = drifting(adaptive=False)
    kept, fell = accept_lengths(adaptive), accept_lengths(static)
    assert kept[0] == fell[0]  # the first rollout is the same: nothing changes inside it
    assert np.mean(kept[5:]) > 1.3 * np.mean(fell[5:])
    assert all(
        k >= f - 0.5 for k, f in zip(kept, fell, strict=True)
    )  # samples differ in luck and length
    assert adaptive.metadata["end_s"] < static.metadata["end_s"]


def test_acceptance_dips_where_updates_go_untrained_and_recovers_after_a_rollout_that_trains():
    result = drifting(
        training={"every_updates": 4, "iteration_s": 0.05, "recovery_iterations": 1.0}
    )
    behind = result.metadata["drafter_updates_behind"]
    assert [round(b) for b in behind] == [
        0,
        1,
        2,
        3,
        4,
        1,
        2,
        3,
        4,
        1,
        2,
    ]  # trained in the rollouts of versions 0, 4, 8
    lengths = accept_lengths(result)
    assert lengths[4] < lengths[1] < lengths[0]
    assert lengths[5] > lengths[4] and lengths[9] > lengths[8]


def test_two_runs_are_identical():
    first, second = (drifting(training={"every_updates": 1, "iteration_s": 0.05}) for _ in range(2))
    for name in ("spans", "steps", "samples", "segments"):
        assert getattr(first, name).equals(getattr(second, name))
    assert first.metadata == second.metadata


@pytest.mark.parametrize(
    "system",
    [
        "verl_colocated",
        "verl_2x",
        "rlhfuse",
        "seer",
        "partial_rollout",
        "one_step_off",
        "areal",
        "laminar",
    ],
)
def test_with_any_system_every_gpu_second_is_in_one_span_and_nobody_trains_while_serving(
    system: str,
):
    training = {"every_updates": 1, "iteration_s": 0.05}
    # The learned drafter comes with the first update, where rollouts do not end in the middle of responses.
    watched = watch(
        prepared(on_gpus(system, tlt(**FEW, drafter_from_update=1, training=training), 3, steps=3))
    )
    assert_nothing_is_lost(watched)
    behind = watched.result.metadata["drafter_updates_behind"]
    assert len(behind) >= 4 and all(b <= v for v, b in enumerate(behind))
    assert all(s["tokens"] == 0 for s in rows(watched.result.spans) if s["kind"] == "train_drafter")


def test_nothing_trains_and_nothing_is_lost_where_a_worker_is():
    faults = [{"kind": "lost", "worker": 0, "at_s": 0.5, "back_s": 1.5}]
    config = on_gpus(
        "verl_colocated",
        tlt(training={"every_updates": 1, "iteration_s": 0.05}),
        3,
        steps=3,
        faults=faults,
    )
    assert_nothing_is_lost(watch(prepared(config)))


def with_ids(whole: Trace) -> Trace:
    """The trace with token ids: what a response says, the next of its group has said seven tokens before."""
    rng = np.random.default_rng(0)
    columns = {name: whole.table.column(name).to_pylist() for name in whole.table.column_names}
    texts: defaultdict[int, Any] = defaultdict(lambda: rng.integers(0, 1000, 4096))
    places = zip(
        *(columns[name] for name in ("prompt_id", "sample", "response_tokens")), strict=True
    )
    ids = [
        texts[prompt][7 * sample : 7 * sample + tokens].tolist()
        for prompt, sample, tokens in places
    ]
    return Trace.from_columns({**columns, "response_ids": ids}, whole.metadata)


@pytest.mark.parametrize("ids", [False, True])
def test_while_there_is_no_learned_drafter_siblings_take_its_place(ids: bool):
    whole = trace([[[(4, 60), (4, 80)], [(4, 40), (4, 90)]]] * 4)
    whole = with_ids(whole) if ids else whole
    gate = {"threshold": 100, "patience": 1}

    def run(**method: Any) -> Result:
        config = on_gpus(
            "verl_colocated", {"speculation": method}, 1, steps=4
        )  # with two, siblings may be apart
        return simulate_prepared(prepared(config, whole))

    tree = {"name": "tlt", **FEW}
    late, learned = run(**tree, drafter_from_update=2, adaptive=False), run(**tree, adaptive=False)
    siblings = run(name="siblings", gate=gate)
    drafted: dict[int, list[float]] = {0: [], 1: [], 2: [], 3: []}
    for row in (row for row in rows(late.samples) if row["verifications"]):
        drafted[row["trained_step"]].append(row["drafted_tokens"] / row["verifications"])
    # Chains of at most 8 tokens, then trees of which 47 nodes are verified.
    assert max(drafted[0] + drafted[1]) <= 8 and min(drafted[2] + drafted[3]) > 40
    # Before that, it is the method siblings, to the instant.
    ended = [
        [row["finished_s"] for row in rows(r.samples) if row["trained_step"] < 2]
        for r in (late, siblings)
    ]
    assert ended[0] == pytest.approx(ended[1])

    def accepted(result: Result, step: int) -> list[int]:
        return [
            row["accepted_tokens"] for row in rows(result.samples) if row["trained_step"] == step
        ]

    assert accepted(late, 2) == accepted(
        learned, 0
    )  # as fresh as at first; the draws of a sample are the same


def test_siblings_take_its_place_where_it_is_predicted_to_be_slower():
    poor = {"acceptance": {"eagle": {"by_position": [0.02], "source": "a test"}}}

    def run(**parameters: Any) -> Result:
        given = {**FEW, **parameters, "adaptive": False}
        together = {**tlt(**given), "dispatch": "even_split"}  # a group at one worker
        return simulate_prepared(
            prepared(on_gpus("verl_colocated", together, 2, steps=2, speculation=poor))
        )

    falls_back, stays = run(model_free_if_slower=True), run(model_free_if_slower=False)
    assert falls_back.metadata["end_s"] < stays.metadata["end_s"]
    assert summary(falls_back, 1)["accept_length"] > 1.5 > summary(stays, 1)["accept_length"]


def test_a_drafter_falls_back_when_it_has_drifted_too_far_and_returns_with_training():
    steep = {
        "acceptance": {
            "eagle": {
                "by_position": [0.85],
                "drift_per_update": 3.0,
                "most_drift": 10.0,
                "source": "a test",
            }
        }
    }
    parameters = {
        **FEW,
        "model_free_if_slower": True,
        "training": {**EVERY_STEP, "every_updates": 2, "iteration_s": 0.02},
    }
    together = {**tlt(**parameters), "dispatch": "even_split"}
    config = on_gpus("verl_colocated", together, 2, steps=4, speculation=steep)
    result = simulate_prepared(prepared(config))
    drafted: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows(result.samples):
        if row["trained_step"] is not None and row["verifications"]:
            drafted[row["trained_step"]].append(row["drafted_tokens"] / row["verifications"])
    assert min(drafted[0]) > 30 and max(drafted[1]) <= 8  # fresh; an update behind


def test_graphs_of_the_strategies_come_out_of_the_kv_cache_and_buckets_leave_more():
    tokens = {}
    for name, system in (
        ("plain", {}),
        ("bucketed", tlt()),
        ("vanilla", tlt(bucketed_graphs=False)),
        ("one", tlt(bandit=False)),
    ):
        ready = prepare(on_gpus("verl_colocated", system, 2))
        tokens[name] = ready.inputs()["kv_cache_tokens_per_worker"]
        if name == "bucketed":
            kv_bytes = ready.model.kv_bytes_per_token + ready.drafts.kv_bytes_per_token
            graph_bytes = ready.drafts.facts["graph_bytes"]
        elif name == "vanilla":
            more_bytes = ready.drafts.facts["graph_bytes"] - graph_bytes
    assert tokens["vanilla"] < tokens["bucketed"] < tokens["one"] < tokens["plain"]
    assert (tokens["bucketed"] - tokens["vanilla"]) * kv_bytes == pytest.approx(
        more_bytes, rel=1e-3
    )


def test_with_the_bandit_a_worker_tries_more_than_one_tree():
    config = on_gpus("verl_colocated", tlt(threshold=100, patience=1), 1, steps=3)
    watched = watch(prepared(config))
    bandit = watched.workers[0].engine.fleet.arrays.engines.drafting.bandits
    per_verification = {
        row["drafted_tokens"] / row["verifications"]
        for row in rows(watched.result.samples)
        if row["verifications"]
    }
    assert len(per_verification) > 1 and 15 <= min(per_verification) <= max(per_verification) <= 63
    assert watched.prepared.drafts.tree_times and bandit is not None


def test_running_samples_change_over_to_a_drafter_that_comes_with_new_weights():
    whole = trace([[[(4, 30), (4, 300)], [(4, 40), (4, 260)]]] * 6)
    config = on_gpus("areal", tlt(**FEW, adaptive=False, drafter_from_update=2), 1, steps=5)
    result = simulate_prepared(prepared(config, whole))
    segments: defaultdict[int, set[int]] = defaultdict(set)
    for segment in rows(result.segments):
        segments[segment["uid"]].add(segment["policy_version"])
    per_verification = {
        row["uid"]: row["drafted_tokens"] / row["verifications"]
        for row in rows(result.samples)
        if row["verifications"]
    }
    before = [drafted for uid, drafted in per_verification.items() if max(segments[uid]) < 2]
    across = [
        drafted
        for uid, drafted in per_verification.items()
        if min(segments[uid]) < 2 <= max(segments[uid])
    ]
    after = [drafted for uid, drafted in per_verification.items() if min(segments[uid]) >= 2]
    assert max(before) <= 8 and min(after) > 40
    assert max(across) > 8 and all(8 <= drafted < max(after) for drafted in across)


def test_an_engine_with_older_weights_keeps_the_drafter_that_comes_with_them():
    config = on_gpus("areal", tlt(**FEW, adaptive=False, drafter_from_update=2), 1, steps=2)
    ready = prepared(config)
    drafting = Drafting(ready.drafts, ready, 8, 0)
    fleet = Fleet(ready.profile.tables, ready.limits, (drafting.decoding, [0, 1]))
    new, old = fleet.engines
    assert drafting.weights_loaded(new, 2) and not drafting.weights_loaded(old, 1)
    assert new.decoding is not old.decoding
    for engine in fleet.engines:
        engine.submit(4, 20)
        assert len(engine.settle(1e9)) == 1
    assert drafting.weights_loaded(old, 2) and old.decoding is new.decoding


def test_host_time_of_a_round_makes_drafting_slower():
    ends = [
        drifting(adaptive=False, round_s=seconds).metadata["end_s"]
        for seconds in (0.0, 2e-3, 20e-3)
    ]
    assert ends[0] < ends[1] < ends[2]


def test_the_host_time_of_levels_is_that_of_the_tree_in_use():
    """One response is one tree, the one of 48 tokens: what others would take, for batches that there are not, costs nothing."""
    alone = trace([[[(4, 300)]]])

    def end_s(depth: int, **host: float) -> float:
        trees = [[depth, 4, 48], [8, 4, 32], [8, 4, 16], [8, 4, 8]]
        method = tlt(**{**FEW, "bandit": True}, adaptive=False, strategies=trees, **host)
        return simulate_prepared(prepared(on_gpus("verl_colocated", method, 1), alone)).metadata[
            "end_s"
        ]

    for depth in (4, 12):
        levels_s, round_s = (
            end_s(depth, round_s=0.0, level_s=1e-3),
            end_s(depth, round_s=depth * 1e-3, level_s=0.0),
        )
        assert levels_s == pytest.approx(round_s, rel=1e-9)
        assert levels_s > end_s(depth, round_s=0.0, level_s=0.0) + 0.05
