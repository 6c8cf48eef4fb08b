"""The predictions of verl's documentation: what its unscored phases give, and what is left to predict."""

import math

import pytest

from simrl.errors import InputError
from simrl.published import verl
from simrl.published.lab import Lab
from simrl.published.ledger import read_ledger


@pytest.mark.parametrize("mfu", [0.35, 0.75])
def test_responses_are_so_long_that_the_stated_update_takes_what_is_stated(mfu: float):
    inputs = {**read_ledger("verl").middle, "mfu": mfu}
    solved = verl.update_s(inputs, gpus=16, mean_tokens=verl.mean_tokens(inputs))
    assert solved == pytest.approx(inputs["async_32_update_s"], rel=0.005)


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
    assert verl.mean_tokens({**inputs, "minibatch_overhead_s": 1.2 * inputs["minibatch_overhead_s"]}) < middle


def test_the_budget_of_tokens_is_a_gpus_and_those_that_share_a_sequence_add_theirs_up():
    inputs = read_ledger("verl").middle
    alone, shared = (verl.training({**inputs, "sequence_parallel": gpus}) for gpus in (1, 4))
    assert alone["tokens_per_microbatch"] == inputs["tokens_per_microbatch"]
    assert shared["tokens_per_microbatch"] == 4 * alone["tokens_per_microbatch"]


def test_many_small_tensors_take_longer_also_in_buckets():
    inputs = read_ledger("verl").middle
    few = verl.weight_sync("30b")(Lab(), {**inputs, "sync_tensors_30b": 400})
    many = verl.weight_sync("30b")(Lab(), inputs)
    more = inputs["sync_tensors_30b"] - 400
    gained_s = [b - a for a, b in zip(few, many, strict=True)]
    assert gained_s == pytest.approx([more * inputs["tensor_s"], more * inputs["bucket_tensor_s"]])


def test_the_trainer_waits_for_the_fetching_of_groups_that_are_there():
    inputs = read_ledger("verl").middle
    lab = Lab()
    quick, slow = (verl.ROWS["verl-async-64"](lab, {**inputs, "fetch_s": fetch_s}) for fetch_s in (0.0, 20.0))
    assert 0 < quick[1] < slow[1] == 20.0
    assert slow[0] - quick[0] == pytest.approx(slow[1] - quick[1])  # the step is longer by what it waits longer


def test_an_update_that_no_length_explains_is_refused():
    inputs = read_ledger("verl").middle
    with pytest.raises(InputError, match="with no mean response"):
        verl.mean_tokens({**inputs, "minibatch_overhead_s": 100.0})
