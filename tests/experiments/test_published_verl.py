"""The predictions of verl's documentation: what its unscored phases give, and what is left to predict."""

import math

import pytest

from experiments.reproduce import verl
from experiments.reproduce.lab import Lab
from experiments.reproduce.ledger import Asked, Inputs, read_ledger
from simrl.errors import InputError


@pytest.mark.parametrize("mfu", [0.35, 0.75])
def test_responses_are_so_long_that_the_stated_update_takes_what_is_stated(mfu: float):
    inputs = {**read_ledger("verl").middle, "mfu": mfu}
    solved = verl.update_s(inputs, gpus=16, mean_tokens=verl.mean_tokens(inputs))
    assert solved == pytest.approx(inputs["async_32_update_s"], rel=0.005)


@pytest.mark.slow
def test_the_simulated_update_takes_what_is_stated():
    class Kept(Lab):
        def run(self, scenario):
            self.measured = super().run(scenario)
            return self.measured

    lab, inputs = Kept(), read_ledger("verl").middle
    step_s, wait_s = verl.ROWS["verl-async-32"](lab, inputs)
    assert math.isnan(step_s)  # it is an input but for the wait
    assert 0 < wait_s < inputs["async_32_update_s"]
    update_s = inputs["sync_step"] * lab.measured["phase_s"]["train"]
    assert update_s == pytest.approx(inputs["async_32_update_s"], rel=0.05)


def test_a_faster_trainer_means_longer_responses_and_longer_overheads_shorter_ones():
    inputs = read_ledger("verl").middle
    middle = verl.mean_tokens(inputs)
    assert verl.mean_tokens({**inputs, "mfu": 1.2 * inputs["mfu"]}) > middle
    assert (
        verl.mean_tokens({**inputs, "minibatch_overhead_s": 1.2 * inputs["minibatch_overhead_s"]})
        < middle
    )


def test_the_budget_of_tokens_is_a_gpus_and_those_that_share_a_sequence_add_theirs_up():
    inputs = read_ledger("verl").middle
    alone, shared = (verl.training({**inputs, "sequence_parallel": gpus}) for gpus in (1, 4))
    assert alone["tokens_per_microbatch"] == inputs["tokens_per_microbatch"]
    assert shared["tokens_per_microbatch"] == 4 * alone["tokens_per_microbatch"]


SYNC = {
    "sync_bytes_30b": 10e9, "sync_tensors_30b": 100, "network_bytes_per_s": 5e9, "tensor_s": 0.01,
    "bucket_bytes": 4e9, "bucket_tensor_s": 0.001, "engine_bytes_per_s": 50e9,
}  # fmt: skip


def synchronised(**changes: float) -> tuple[float, float]:
    """Seconds tensor by tensor, and in buckets."""
    one_by_one_s, bucketed_s = verl.weight_sync("30b")(Lab(), {**SYNC, **changes})
    return one_by_one_s, bucketed_s


def test_a_synchronisation_by_hand():
    """Two seconds on the network; a hundred broadcasts of 10 ms, or three, and a hundred copies of 1 ms."""
    assert synchronised() == pytest.approx((3.0, 2.13))


def test_what_tensors_cost_by_themselves_does_not_depend_on_the_network():
    nothing_to_send = synchronised(network_bytes_per_s=math.inf, engine_bytes_per_s=math.inf)
    assert nothing_to_send == pytest.approx((1.0, 0.13))
    assert synchronised(sync_tensors_30b=200) == pytest.approx((4.0, 2.23))


def test_buckets_cannot_be_faster_than_the_network_or_the_copies_into_them():
    for engine_bytes_per_s, least_s in ((math.inf, 2.0), (50e9, 2.0), (2.5e9, 4.0)):
        free = {"tensor_s": 0.0, "bucket_tensor_s": 0.0, "engine_bytes_per_s": engine_bytes_per_s}
        assert synchronised(**free) == pytest.approx((2.0, least_s))


def test_buckets_pay_where_tensors_are_many_and_not_where_they_are_few():
    for tensors, pays in ((2, False), (20_000, True)):
        one_by_one_s, bucketed_s = synchronised(sync_tensors_30b=tensors)
        assert (bucketed_s < one_by_one_s) == pays


def test_the_mean_response_is_solved_once_for_all_rows_of_a_set(monkeypatch: pytest.MonkeyPatch):
    solved = []

    def mean_tokens(inputs: Inputs) -> float:
        solved.append(inputs["mfu"])
        return 1000 * inputs["mfu"] + 0 * inputs["async_32_update_s"]

    monkeypatch.setattr(verl, "mean_tokens", mean_tokens)
    middle, system, means = read_ledger("verl").middle, {"name": "verl_colocated"}, []
    for mfu in (0.5, 0.6):
        lab = Lab()
        for gpus in (32, 64):
            asked = Asked({**middle, "mfu": mfu}, set())
            means.append(
                verl.scenario(lab, asked, gpus, system, 3, 1).workload.synthetic.mean_tokens
            )
            assert (
                "async_32_update_s" in asked.names
            )  # what was solved before is asked for all the same
    assert means == [500, 500, 600, 600] and solved == [0.5, 0.6]


def test_a_length_that_cannot_be_is_sought_once_and_refuses_every_row_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
):
    solved = []

    def mean_tokens(inputs: Inputs) -> float:
        solved.append(inputs["mfu"])
        raise InputError("no length explains it")

    monkeypatch.setattr(verl, "mean_tokens", mean_tokens)
    lab, middle = Lab(), read_ledger("verl").middle
    for gpus in (32, 64):
        asked = Asked(middle, set())
        with pytest.raises(InputError, match="no length explains it"):
            verl.scenario(lab, asked, gpus, {"name": "verl_colocated"}, 3, 1)
        assert "mfu" in asked.names
    assert len(solved) == 1


@pytest.mark.slow
def test_the_trainer_waits_for_the_fetching_of_groups_that_are_there():
    inputs = read_ledger("verl").middle
    lab = Lab()
    quick, slow = (
        verl.ROWS["verl-async-64"](lab, {**inputs, "fetch_s": fetch_s}) for fetch_s in (0.0, 20.0)
    )
    assert 0 < quick[1] < slow[1] == 20.0
    assert slow[0] - quick[0] == pytest.approx(
        slow[1] - quick[1]
    )  # the step is longer by what it waits longer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mfu": 1.5}, "its TrainingConfig: mfu is 1.5"),
        ({"mfu": "x"}, "its TrainingConfig: mfu is 'x'"),
        (
            {"minibatch_prompts": 0},
            "minibatch_prompts is 0; a mini-batch has 1 to all 512 prompts of a batch",
        ),
        ({"minibatch_prompts": 513}, "minibatch_prompts is 513"),
    ],
)
def test_inputs_of_the_update_that_cannot_be_are_refused(change: dict[str, object], said: str):
    with pytest.raises(InputError, match=said):
        verl.mean_tokens({**read_ledger("verl").middle, **change})


def test_an_update_that_no_length_explains_is_refused():
    inputs = read_ledger("verl").middle
    with pytest.raises(InputError, match="with no mean response"):
        verl.mean_tokens({**inputs, "minibatch_overhead_s": 100.0})
