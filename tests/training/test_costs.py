"""What a policy update costs, against counts by hand and slow rewrites of its rules."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.profile.hardware import GPUS, LINK_SHARE, Gpu
from simrl.profile.model_shape import MODELS, ModelShape
from simrl.training.config import TrainingConfig
from simrl.training.costs import TrainingCosts, deal, longest_first, pack
from simrl.training.operations import COLLECTIVE_S, LOGITS, MEMORY_SHARE
from simrl.training.stages import stages_s
from simrl.training.weight_sync import PAGEABLE_NODE_BYTES_PER_S, PINNED_SHARE
from tests.helpers import update_phases

MODEL = ModelShape(
    name="toy", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=32
)
GPU = Gpu(
    name="toy",
    memory_bytes=1e9,
    memory_bytes_per_s=1e9,
    bf16_flops=1e6,
    link_bytes_per_s=1e12,
    network_bytes_per_s=1e12,  # gathering weights takes no time, unless a test makes it slow
    host_bytes_per_s=1e12,
    source="a test",
)
DENSE = 2 * (
    2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16) + 32 * 8
)  # FLOPs a token: 2 layers and the output head
ATTENTION = 4 * 2 * 2 * 4  # FLOPs for each token attended to

lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=60).map(
    lambda n: np.array(n, dtype=np.int64)
)


def lengths_of(sequences):
    return np.array([sum(sequence) for sequence in sequences])


def costs(
    gpus=1, minibatches=1, log_probs=1, switch=False, gpu=GPU, model=MODEL, **config
) -> TrainingCosts:
    config = {"mfu": 0.35, "log_prob_mfu": 0.35, **config}
    return TrainingCosts(model, gpu, gpus, TrainingConfig(**config), minibatches, log_probs, switch)


def flops(tokens: int) -> float:
    return DENSE * tokens + ATTENTION * tokens**2 / 2


# Dealing sequences to ranks, packing them into micro-batches.


def slow_deal(lengths, ranks):
    """Longest first, each to the rank with the fewest tokens; the first of equal ones."""
    load, rank_of = [0] * ranks, [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank_of[i] = load.index(min(load))
        load[rank_of[i]] += int(lengths[i])
    return rank_of


def slow_pack(lengths, budget):
    """AReaL's Algorithm 1."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b in bins if sum(int(lengths[j]) for j in b) + lengths[i] <= budget]
        if fitting:
            min(fitting, key=lambda b: (len(b), sum(int(lengths[j]) for j in b))).append(i)
        else:
            bins.append([i])
    return bins


@given(lengths, st.integers(1, 9))
def test_dealing_is_the_slow_rule_and_no_rank_is_over_the_mean_by_more_than_one_sequence(
    lengths, ranks
):
    rank_of = deal(lengths, longest_first(lengths), ranks)
    assert rank_of.tolist() == slow_deal(lengths, ranks)
    loads = [int(lengths[rank_of == rank].sum()) for rank in range(ranks)]
    assert sum(loads) == lengths.sum()
    assert max(loads) <= lengths.sum() / ranks + lengths.max()


@given(lengths, st.integers(5000, 30000))
def test_packing_is_the_slow_rule_and_no_micro_batch_is_over_the_budget(lengths, budget):
    bins, _ = pack(lengths, longest_first(lengths), np.zeros(lengths.size, np.int64), budget)
    slow = slow_pack(lengths, budget)
    assert [sorted(np.flatnonzero(bins == b).tolist()) for b in range(len(slow))] == [
        sorted(b) for b in slow
    ]
    assert max(lengths[bins == b].sum() for b in range(len(slow))) <= budget


@given(lengths, st.integers(5000, 30000))
def test_dynamic_micro_batches_are_never_more_than_fixed_ones_and_both_hold_every_sequence(
    lengths, budget
):
    """A new dynamic bin is opened only when all others hold at least as many sequences as a fixed one."""
    bins, _ = pack(lengths, longest_first(lengths), np.zeros(lengths.size, np.int64), budget)
    dynamic = [lengths[bins == b] for b in range(bins.max() + 1)]
    fixed = costs(microbatching="fixed").fixed_microbatches(lengths, budget)
    assert len(dynamic) <= len(fixed)
    for microbatches in (dynamic, fixed):
        assert max(m.sum() for m in microbatches) <= budget
        assert sorted(np.concatenate(microbatches).tolist()) == sorted(lengths.tolist())


def test_a_rank_without_sequences_has_no_micro_batch():
    nothing = np.array([], dtype=np.int64)
    assert [each.size for each in pack(nothing, nothing, nothing, 100)] == [0, 0]
    assert costs(microbatching="fixed").fixed_microbatches(nothing, 100) == []


# Time.


def test_an_update_on_one_gpu_takes_its_flops_over_the_rate_three_times_forward():
    phases = update_phases(costs(mfu=0.5, log_prob_mfu=0.25, publish_s=7.0), np.array([10, 20]))
    work = flops(10) + flops(20)
    assert phases == [
        ("log_prob", pytest.approx(work / (0.25 * 1e6))),
        ("train", pytest.approx(3 * work / (0.5 * 1e6))),
        ("publish", pytest.approx(7.0)),
    ]


def test_a_colocated_update_switches_before_and_after_and_publishes_nothing():
    kinds = [kind for kind, _ in update_phases(costs(switch=True, switch_s=4.0), np.array([10]))]
    assert kinds == ["switch", "log_prob", "train", "switch"]


def test_switching_moves_the_states_of_a_gpu_and_publishing_the_weights():
    slow = GPU.model_copy(
        update={"host_bytes_per_s": 10.0, "network_bytes_per_s": 2.0, "link_bytes_per_s": 20.0}
    )
    switch_s = update_phases(costs(gpus=2, switch=True, switch_s=4.0, gpu=slow), np.array([10]))[0][
        1
    ]
    parameters = MODEL.parameters
    kept = 2 + 4 + 8  # weights, master weights, moments; no gradients, which the update has used up
    assert switch_s == pytest.approx(4.0 + kept * parameters / 2 / (PINNED_SHARE * 10))
    for gpus, rate in (
        (8, LINK_SHARE * 20.0),
        (16, LINK_SHARE * 20.0),
        (32, 4.0),
    ):  # one node by its link, more by the network shares of a node's eight GPUs, if these are slower
        slow = slow if gpus < 32 else slow.model_copy(update={"network_bytes_per_s": 0.5})
        publish_s = update_phases(costs(gpus=gpus, publish_s=1.0, gpu=slow), np.array([10]))[-1][1]
        assert publish_s == pytest.approx(1.0 + 2 * parameters / rate)


def test_a_sequence_longer_than_a_micro_batch_still_needs_its_memory():
    assert costs(tokens_per_microbatch=10).memory_bytes(5000) == costs(
        tokens_per_microbatch=5000
    ).memory_bytes(10)


def test_every_forward_pass_before_the_update_is_paid_and_none_if_there_is_none():
    none, one, three = (dict(update_phases(costs(log_probs=n), np.array([10]))) for n in (0, 1, 3))
    assert "log_prob" not in none
    assert three["log_prob"] == pytest.approx(3 * one["log_prob"])
    assert three["train"] == one["train"] == none["train"]


def test_a_reference_of_its_own_size_is_paid_by_its_own_shape():
    sequences, teacher = np.array([100, 10]), MODEL.model_copy(update={"layers": 8})
    own = costs(log_probs=1, log_prob_overhead_s=2.0)
    with_teacher = replace(
        own,
        log_probs=2,
        reference=teacher,
        config=own.config.model_copy(update={"reference_model": "x"}),
    )
    ((_, both_s),) = with_teacher.inference(sequences)
    teacher_s = replace(own, model=teacher).sweep_s(sequences, 1)
    assert both_s == pytest.approx(
        own.sweep_s(sequences, 1) + teacher_s + 2 * 2.0
    ) and teacher_s > own.sweep_s(sequences, 1)


def test_the_overhead_of_an_update_is_paid_once_whatever_its_mini_batches_and_epochs():
    plain, loaded = (
        dict(update_phases(costs(minibatches=3, ppo_epochs=2, **extra), np.array([10, 20, 30])))[
            "train"
        ]
        for extra in ({}, {"update_overhead_s": 7.0})
    )
    assert loaded == pytest.approx(plain + 7.0)


def test_a_phase_ends_when_its_slowest_rank_does():
    both = np.array([100, 10])
    two = costs(gpus=2).sweep_s(both, 1)
    assert two == pytest.approx(flops(100) / (0.35 * 1e6))
    assert costs(gpus=1).sweep_s(both, 1) == pytest.approx((flops(100) + flops(10)) / (0.35 * 1e6))


def test_gpus_that_share_a_sequence_are_faster_at_it_and_make_fewer_ranks():
    shared = costs(gpus=4, sequence_parallel=2)
    assert shared.ranks == 2
    assert shared.sweep_s(np.array([100]), 1) == pytest.approx(flops(100) / (2 * 0.35 * 1e6))


def test_mini_batches_are_updates_one_after_the_other_each_waiting_for_its_slowest_rank():
    sequences = [
        (10, 90),
        (5, 5),
        (10, 90),
        (5, 5),
    ]  # on two ranks: each mini-batch waits for its 100 tokens
    one, two = (
        dict(update_phases(costs(gpus=2, minibatches=n), lengths_of(sequences))) for n in (1, 2)
    )
    assert one["train"] == pytest.approx(3 * (flops(100) + flops(10)) / (0.35 * 1e6))
    assert two["train"] == pytest.approx(3 * 2 * flops(100) / (0.35 * 1e6))
    assert two["log_prob"] == one["log_prob"]


def test_more_mini_batches_than_sequences_train_every_sequence_once():
    assert dict(update_phases(costs(minibatches=9), np.array([10, 20]))) == dict(
        update_phases(costs(minibatches=2), np.array([10, 20]))
    )


def test_a_micro_batch_never_takes_less_than_gathering_the_sharded_weights():
    slow_network = GPU.model_copy(update={"link_bytes_per_s": 100.0})  # four GPUs are in one node
    sharded = MODEL.weight_bytes * (1 - 1 / 4) / (LINK_SHARE * 100.0)
    lengths = np.array([10] * 8)
    together = costs(gpus=4, gpu=slow_network, tokens_per_microbatch=20)
    apart = costs(gpus=4, gpu=slow_network, tokens_per_microbatch=10)
    assert together.sweep_s(lengths, 3) == pytest.approx(
        4 * sharded
    )  # gathered twice; gradients are fp32
    assert apart.sweep_s(lengths, 3) == pytest.approx(2 * 4 * sharded)  # two micro-batches
    assert costs(gpus=1, gpu=slow_network).sweep_s(lengths, 3) == pytest.approx(
        3 * 8 * flops(10) / (0.35 * 1e6)
    )


def test_gathering_that_shares_a_queue_with_the_arithmetic_holds_it_up_but_for_the_backward_pass():
    slow_network = GPU.model_copy(update={"link_bytes_per_s": 100.0})
    sharded = MODEL.weight_bytes * (1 - 1 / 4) / (LINK_SHARE * 100.0)
    lengths = np.array([10] * 4)
    arithmetic_s = flops(10) / (0.35 * 1e6)
    one_queue = costs(gpus=4, gpu=slow_network, gather_overlap=False)
    assert one_queue.sweep_s(lengths, 1) == pytest.approx(sharded + arithmetic_s)
    assert one_queue.sweep_s(lengths, 3) == pytest.approx(
        3 * sharded + max(sharded, 3 * arithmetic_s)  # the forward pass's, and gradients in fp32
    )
    adapters = costs(gpus=4, gpu=slow_network, gather_overlap=False, lora=True)
    assert adapters.sweep_s(lengths, 3) >= sharded + sharded


def test_a_batch_that_is_dealt_as_a_whole_has_mini_batches_of_unequal_tokens():
    lengths = np.array([90, 10, 10, 90, 50, 50, 20, 80])
    each, whole, order = (
        costs(gpus=2, minibatches=4, balance=balance) for balance in ("minibatch", "batch", "none")
    )
    parts = whole._minibatches(lengths, 4)
    assert sorted(np.concatenate([part for part, _ in parts])) == sorted(lengths)
    per_rank = sum(np.bincount(rank_of, part, minlength=2) for part, rank_of in parts)
    assert per_rank.tolist() == [200, 200], "the batch is in balance, its mini-batches need not be"
    of_order = [rank for _, rank_of in order._minibatches(lengths, 1) for rank in rank_of]
    assert of_order == [0, 0, 0, 0, 1, 1, 1, 1], "without balance, ranks have parts of the batch"

    many = np.random.default_rng(1).integers(1, 4000, 256)
    of_minibatch, of_batch, unbalanced = (
        dict(of.update(many, 4))["train"] for of in (each, whole, order)
    )
    assert of_minibatch < of_batch < unbalanced


def test_the_controller_hands_the_batch_on_to_every_pass_and_to_the_update():
    lengths = np.array([10, 30])
    alone = costs(log_probs=2)
    through = replace(alone, controller=True)
    once_s = 2 * 30 * 64 / 6e8
    assert dict(through.transfer(lengths)) == {"transfer": pytest.approx(once_s)}
    more = {
        "log_prob": dict(through.inference(lengths))["log_prob"]
        - dict(alone.inference(lengths))["log_prob"],
        "train": dict(through.update(lengths, 1))["train"]
        - dict(alone.update(lengths, 1))["train"],
    }
    assert more == {"log_prob": pytest.approx(2 * once_s), "train": pytest.approx(once_s)}


def test_ranks_that_gather_weights_wait_for_each_other_in_every_micro_batch_and_others_at_the_end_alone():
    """Two ranks: 100 and 10 + 10 + 10 tokens, then 60 and 40: the longer of each place, or of the sums."""
    lengths = np.array(
        [100, 60, 50, 40, 40]
    )  # dealt: 100 + 40, 60 + 50 + 40; micro-batches of one sequence
    alone = {"microbatching": "fixed", "sequences_per_microbatch": 1, "remove_padding": True}
    together = costs(gpus=2, **alone).sweep_s(lengths, 1)
    apart = costs(gpus=2, sharding="optimizer", **alone).sweep_s(lengths, 1)
    assert together == pytest.approx(sum(map(flops, (100, 50, 40))) / (0.35 * 1e6))
    assert apart == pytest.approx(
        max(flops(100) + flops(40), flops(60) + flops(50) + flops(40)) / (0.35 * 1e6)
    )


def test_micro_batches_of_a_number_of_sequences_have_that_many_whatever_their_tokens():
    parts = costs(microbatching="fixed", sequences_per_microbatch=2).fixed_microbatches(
        np.array([9, 1, 500, 2, 3]), 10
    )
    assert [part.tolist() for part in parts] == [[9, 1], [500, 2], [3]]


@given(lengths.filter(lambda n: n.size > 1 and n.min() < n.max()), st.integers(1, 4))
def test_a_fixed_number_of_sequences_never_beats_a_token_budget(lengths, gpus):
    """Both have the memory of the budget. What is fixed is padded, and has at least as many micro-batches."""
    of = {"gpus": gpus, "sharding": "optimizer", "tokens_per_microbatch": 20_000}
    dynamic, packed, padded = (
        costs(**of, **how).sweep_s(lengths, 3)
        for how in (
            {},
            {"microbatching": "fixed", "remove_padding": True},
            {"microbatching": "fixed"},
        )
    )
    assert dynamic <= packed * (1 + 1e-9)
    assert packed <= padded * (1 + 1e-9)


def test_a_fixed_number_of_sequences_is_padded_to_the_longest_even_where_one_micro_batch_holds_all():
    """A rank with few sequences has one micro-batch, whatever packs them."""
    lengths = np.array([300, 100, 200, 200])
    dynamic, fixed = costs().sweep_s(lengths, 1), costs(microbatching="fixed").sweep_s(lengths, 1)
    padded = sum(map(flops, lengths)) + DENSE * (4 * 300 - 800)  # attention sees no padding
    assert dynamic == pytest.approx(sum(map(flops, lengths)) / (0.35 * 1e6))
    assert fixed == pytest.approx(padded / (0.35 * 1e6))
    assert costs(microbatching="fixed", remove_padding=True).sweep_s(lengths, 1) == pytest.approx(
        dynamic
    )


def test_log_prob_passes_have_micro_batches_of_their_own_number_of_sequences() -> None:
    config = costs(
        microbatching="fixed", sequences_per_microbatch=2, log_prob_sequences_per_microbatch=4
    )
    lengths = np.array([9, 1, 500, 2, 3])
    assert [part.size for part in config.fixed_microbatches(lengths, 10, passes=1)] == [4, 1]
    assert [part.size for part in config.fixed_microbatches(lengths, 10, passes=3)] == [2, 2, 1]


def test_micro_batches_of_a_fixed_count_have_equal_numbers_of_sequences_and_room_for_the_longest():
    config = costs(gpus=2, minibatches=3, microbatching="fixed", microbatches=4)
    parts = config.fixed_microbatches(np.array([9, 1, 500, 2, 3]), 10)
    assert [part.tolist() for part in parts] == [[9, 1], [500], [2], [3]]
    assert (
        config.most_tokens(1000, batch=48) == 2 * 1000
    )  # of 48: 3 mini-batches, 2 ranks, 4 micro-batches
    assert config.memory_bytes(1000, 480) > config.memory_bytes(1000, 48)


def test_a_pipeline_of_equal_micro_batches_has_the_known_bubble():
    equal = np.ones((5, 4))
    assert stages_s(3 * equal[:, :1], 1 / 3, True) == pytest.approx(15)
    # Each further stage adds a forward pass to fill it, and a backward one to drain it.
    assert stages_s(3 * equal, 1 / 3, True) == pytest.approx(15 + 3 * 3)
    assert stages_s(equal, 1.0, False) == 5 + 3
    # The last stage: 1-2 forward, 2-4 backward, 4-7 forward, 7-13 backward; then the first one's last backward pass.
    unequal = np.array([[1.0, 1.0], [3.0, 3.0]])
    assert stages_s(3 * unequal, 1 / 3, True) == pytest.approx(13 + 6)
    assert stages_s(unequal, 1.0, False) == 1 + 3 + 3


def test_micro_batches_by_tokens_fill_a_pipeline_better_than_a_fixed_count():
    """AReaL §7.5: 32 micro-batches against a budget of 32,768 tokens; its gain, 30 % on average, is not an input."""
    drawn = (
        np.random.default_rng(1)
        .lognormal(np.log(6000), 0.9, 2048)
        .clip(100, 27_648)
        .astype(np.int64)
    )
    staged = {"gpus": 32, "pipeline_parallel": 2, "sharding": "optimizer"}
    fixed = costs(microbatching="fixed", microbatches=32, remove_padding=True, **staged).sweep_s(
        drawn, 3
    )
    assert 1.1 < fixed / costs(**staged).sweep_s(drawn, 3) < 1.6


def test_padded_micro_batches_cost_as_much_as_the_longest_with_pipeline_stages_alone():
    lengths = np.array([4096, 1000])
    staged = {
        "tokens_per_microbatch": 4096,
        "gpus": 2,
        "pipeline_parallel": 2,
        "mfu": None,
        "log_prob_mfu": None,
    }
    staged |= {"sharding": "optimizer", "gpu": H100, "model": LARGE}
    dynamic, padded, equal = (
        costs(microbatching=how, **staged).sweep_s(of, 3)
        for how, of in (
            ("dynamic", lengths),
            ("padded", lengths),
            ("dynamic", np.array([4096, 4096])),
        )
    )
    assert dynamic < padded
    assert padded == pytest.approx(equal, rel=0.06)  # but for attention, which sees no padding
    one_stage = {**staged, "pipeline_parallel": 1}
    assert costs(microbatching="padded", **one_stage).sweep_s(lengths, 3) == costs(
        **one_stage
    ).sweep_s(lengths, 3)


@pytest.mark.parametrize(
    ("memory", "gpus_rate"),
    [("pageable", PAGEABLE_NODE_BYTES_PER_S), ("pinned", 4 * PINNED_SHARE * 1e11)],
)
def test_offloaded_states_are_fetched_and_returned_in_each_phase_at_the_rate_of_their_memory(
    memory, gpus_rate
):
    lengths, slow = np.array([10]), GPU.model_copy(update={"host_bytes_per_s": 1e11})
    ways = {"gpus": 4, "gpu": slow, "switch": True, "offload_memory": memory}
    kept, fetched = (
        dict(update_phases(costs(offload=where, **ways), lengths)) for where in ("none", "phases")
    )
    assert update_phases(costs(gpus=4, offload="phases"), lengths) == update_phases(
        costs(gpus=4, offload="none"), lengths
    )  # no rollout
    each_s = 2 * MODEL.parameters / 4 / (gpus_rate / 4)  # there and back, a byte a parameter
    assert fetched["log_prob"] - kept["log_prob"] == pytest.approx(4 * each_s)  # fp32 weights
    assert fetched["train"] - kept["train"] == pytest.approx(
        12 * each_s
    )  # and the optimizer's two moments
    switches = [costs(switch_s=1.0, offload=where, **ways).switch_s for where in ("none", "phases")]
    assert switches == pytest.approx(
        [1.0, 1.0 + 2 * each_s]
    )  # the weights there before a rollout, back after it


@pytest.mark.parametrize("where", ["none", "phases", "switch"])
@pytest.mark.parametrize("more", [{}, {"log_probs": 2}, {"log_probs": 2, "extra_log_probs": 1}])
def test_the_bytes_that_are_told_of_offloading_are_those_that_take_the_time(where, more):
    def total_s(offload):
        each = costs(gpus=4, switch=True, offload=offload, offload_memory="pageable", **more)
        return sum(seconds for _, seconds in update_phases(each, np.array([10])))

    of_all = costs(gpus=4, switch=True, offload=where, offload_memory="pageable", **more)
    assert total_s(where) - total_s("none") == pytest.approx(
        of_all.offloaded_bytes / of_all.copied_bytes_per_s
    )


def test_a_swapped_reference_costs_three_copies_of_the_weights_and_a_streamed_one_a_copy_a_micro_batch():
    lengths, slow = np.array([10, 10]), GPU.model_copy(update={"host_bytes_per_s": 10.0})
    of = {"gpus": 1, "gpu": slow, "extra_log_probs": 1, "log_probs": 2, "tokens_per_microbatch": 10}
    resident, swapped, streamed = (
        dict(update_phases(costs(**of, reference_weights=where), lengths))["log_prob"]
        for where in ("resident", "swapped", "streamed")
    )
    assert swapped - resident == pytest.approx(3 * MODEL.weight_bytes / 10.0)
    pass_s = costs(**of).sweep_s(lengths, 1)
    assert streamed - resident == pytest.approx(
        2 * MODEL.weight_bytes / 10.0 - pass_s
    )  # hides what it computes


def test_the_host_s_time_of_a_sequence_is_paid_by_the_rank_that_has_it():
    lengths = np.array([10, 10, 10, 10])
    plain, slow = costs(gpus=2), costs(gpus=2, update_sequence_s=0.5, log_prob_sequence_s=0.25)
    assert slow.sweep_s(lengths, 3) - plain.sweep_s(lengths, 3) == pytest.approx(2 * 0.5)
    assert slow.sweep_s(lengths, 1) - plain.sweep_s(lengths, 1) == pytest.approx(2 * 0.25)


def test_a_sequence_longer_than_the_budget_is_a_micro_batch_of_its_own():
    slow_network = GPU.model_copy(update={"link_bytes_per_s": 100.0})  # four GPUs are in one node
    alone = costs(gpus=2, gpu=slow_network, tokens_per_microbatch=8)
    assert alone.sweep_s(np.array([10, 10, 10, 10]), 1) == pytest.approx(
        2 * MODEL.weight_bytes / 2 / (LINK_SHARE * 100.0)
    )


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 4000)), min_size=1, max_size=30),
    st.data(),
    st.integers(1, 4),
)
def test_an_update_takes_longer_when_a_response_is_longer(sequences, data, minibatches):
    """On one GPU, where it must; on several the greedy deal may happen to fit better."""
    i = data.draw(st.integers(0, len(sequences) - 1))
    longer = [(p, r + 50 * (j == i)) for j, (p, r) in enumerate(sequences)]
    before, after = (
        dict(update_phases(costs(minibatches=minibatches), lengths_of(batch)))
        for batch in (sequences, longer)
    )
    assert after["train"] > before["train"]
    assert after["log_prob"] > before["log_prob"]


def trained_s(**config) -> float:
    return dict(update_phases(costs(mfu=0.5, **config), np.array([10])))["train"]


def test_recomputed_activations_are_one_more_forward_pass_of_the_matrix_products_in_training_alone():
    assert trained_s(recompute=True) == pytest.approx((3 * flops(10) + DENSE * 10) / (0.5 * 1e6))
    assert dict(update_phases(costs(recompute=True), np.array([10])))["log_prob"] == pytest.approx(
        flops(10) / (0.35 * 1e6)
    )


def test_adapters_need_no_gradients_and_no_states_of_the_weights():
    assert trained_s(lora=True) == pytest.approx((3 * flops(10) - DENSE * 10) / (0.5 * 1e6))
    assert costs(lora=True, gpus=2).state_bytes == 2 * MODEL.parameters / 2


# Time computed from the operations.

LARGE = ModelShape(
    name="7b",
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18944,
    vocab=152064,
)
EXPERTS = MODELS["qwen3-30b-a3b"]
H100 = GPUS["h100"]
WITHOUT_MEMORY = H100.model_copy(update={"memory_bytes_per_s": 1e30})


def computed(gpus=1, model=LARGE, gpu=H100, **config) -> TrainingCosts:
    return costs(
        gpus,
        gpu=gpu,
        model=model,
        **{"mfu": None, "log_prob_mfu": None, "sharding": "optimizer", **config},
    )


def test_a_forward_pass_is_the_sum_of_its_matrix_products_and_its_attention_counted_by_hand():
    tokens, launches_s = 8192, 28 * 56 * 3e-6
    seconds = 0.0
    matrices = [
        (3584, 3584),
        (3584, 512),
        (3584, 512),
        (3584, 3584),
        (3584, 18944),
        (3584, 18944),
        (18944, 3584),
    ]
    for inner, outer in [*matrices * 28, (3584, 152064)]:
        seconds += 2 * tokens * inner * outer / (989e12 * 0.8 * inner / (inner + 130))
    attention_s = 28 * 4 * 3584 * tokens**2 / 2 / (560e12 * 0.66 * tokens / (tokens + 500))
    forward_s = computed(gpu=WITHOUT_MEMORY).sweep_s(np.array([tokens]), 1)
    assert forward_s == pytest.approx(seconds + attention_s + launches_s)


def test_what_a_gpu_reaches_follows_from_the_shapes():
    """Model FLOPs utilisations that runs of these kinds log: 0.35 to 0.6 of 7B on H100, less of a small model."""

    def utilisation(model: ModelShape, passes: int) -> float:
        lengths = np.full(16, 8192)
        seconds = computed(model=model).sweep_s(lengths, passes)
        return (
            passes * 16 * model.forward_flops(8192.0, 8192.0**2 / 2) / (H100.bf16_flops * seconds)
        )

    assert 0.35 < utilisation(LARGE, 3) < utilisation(LARGE, 1) < 0.6
    assert utilisation(MODELS["qwen3-0.6b"], 3) < 0.7 * utilisation(LARGE, 3)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"kernels": "eager"}, {"kernels": "fused"}),
        ({"attention": "fa2"}, {"attention": "fa3"}),
        ({"recompute": True}, {"recompute": False}),
        ({"correction": 1.1}, {}),
        ({"model": EXPERTS, "grouped_experts": False}, {"model": EXPERTS}),
        ({"model": EXPERTS}, {"model": EXPERTS.model_copy(update={"experts_per_token": 4})}),
        ({"gpu": GPUS["a100"]}, {}),
    ],
)
def test_an_update_is_slower_with_what_makes_it_slower(slower, faster):
    lengths = np.array([16384, 4096])
    assert computed(**slower).sweep_s(lengths, 3) > 1.01 * computed(**faster).sweep_s(lengths, 3)


def test_recomputed_activations_are_one_more_forward_pass_of_the_layers():
    lengths, head = np.array([8192]), LARGE.model_copy(update={"layers": 1})
    whole, kept = computed(), computed(recompute=False)
    again_s = whole.sweep_s(lengths, 3) - kept.sweep_s(lengths, 3)
    layer_s = (whole.sweep_s(lengths, 1) - computed(model=head).sweep_s(lengths, 1)) / 27
    assert again_s == pytest.approx(28 * layer_s)


def test_gpus_that_share_layers_are_faster_but_talk():
    lengths = np.array([8192])
    alone, shared = (
        computed().sweep_s(lengths, 3),
        computed(4, tensor_parallel=4).sweep_s(lengths, 3),
    )
    silent = computed(
        4, tensor_parallel=4, gpu=H100.model_copy(update={"link_bytes_per_s": 1e30})
    ).sweep_s(lengths, 3)
    assert alone / 4 < silent < shared < alone / 2
    talk_s = (
        28 * 3 * 2 * 2 * 2 * 8192 * 3584 * 3 / 4 / (LINK_SHARE * 450e9)
    )  # forward, backward and again: two all-reduces a layer
    assert shared - silent == pytest.approx(talk_s)
    assert silent > alone / 4 + 28 * 3 * 4 * COLLECTIVE_S  # each collective has a start and an end


def test_pipeline_stages_pay_off_with_many_micro_batches_and_not_with_one():
    one, many = np.array([8192]), np.full(64, 8192)
    budget = {"tokens_per_microbatch": 8192}
    alone, staged = computed(**budget), computed(4, pipeline_parallel=4, **budget)
    assert staged.sweep_s(one, 3) == pytest.approx(alone.sweep_s(one, 3))
    assert alone.sweep_s(many, 3) / 4 < staged.sweep_s(many, 3) < alone.sweep_s(many, 3) / 3


def test_a_micro_batch_of_few_tokens_takes_as_long_as_the_host_launches_its_layers():
    small, few, many = MODELS["qwen2.5-0.5b"], np.array([64]), np.array([16384] * 2)
    forward_s, train_s = (computed(model=small).sweep_s(few, passes) for passes in (1, 3))
    launched_s = (42 * 24 + 30) * 24e-6
    assert forward_s == pytest.approx(launched_s, rel=0.02), "the output head comes last"
    assert train_s == pytest.approx((159 * 24 + 56) * 45e-6, rel=0.02)
    wrapped = computed(model=small, sharding="fsdp")
    assert wrapped.sweep_s(few, 3) == pytest.approx(train_s + 24 * 7.5e-4)
    slow = replace(computed(model=small), gpu=GPUS["h100"].model_copy(update={"host_speed": 0.5}))
    assert slow.sweep_s(few, 1) == pytest.approx(2 * launched_s, rel=0.02)
    assert slow.sweep_s(many, 1) == computed(model=small).sweep_s(many, 1), "the GPU takes longer"
    assert computed(model=small, lora=True).sweep_s(few, 3) > 1.5 * train_s
    assert computed(model=small, mfu=0.3).sweep_s(few, 3) < 0.1 * train_s, "a measurement has it"


def test_the_host_launches_a_pipeline_stage_s_layers_alone():
    small, few = MODELS["qwen2.5-0.5b"], np.array([64])
    one, two = (
        computed(n, model=small, sharding="optimizer", pipeline_parallel=n).sweep_s(few, 1)
        for n in (1, 2)
    )
    assert two == pytest.approx(one, rel=0.05), "one micro-batch goes through both stages"


@pytest.mark.parametrize(
    "logits", ["cross_entropy", "log_softmax", "vocab_parallel", "by_sequence"]
)
def test_logits_cost_the_bytes_of_their_kernels(logits):
    lengths, vocab = np.array([8192] * 2), MODELS["qwen2.5-7b"].vocab
    of, none = LOGITS[logits], computed(logits="cross_entropy")
    bytes_per_s = MEMORY_SHARE * H100.memory_bytes_per_s
    for passes in (1, 3):
        more = of.forward - LOGITS["cross_entropy"].forward
        gradient = of.backward + of.of_sequence * 2  # sequences of a micro-batch
        more += (gradient - LOGITS["cross_entropy"].backward) * (passes > 1)
        moved_s = more * vocab * 2 * 8192 / bytes_per_s
        assert computed(logits=logits).sweep_s(lengths, passes) - none.sweep_s(
            lengths, passes
        ) == pytest.approx(moved_s, abs=1e-9)


def test_a_chunked_output_head_computes_its_logits_again_and_its_gradients_without_tensor_cores():
    lengths, model = np.array([8192]), MODELS["qwen2.5-7b"]
    chunked, plain = (computed(logits=name) for name in ("chunked", "log_softmax"))
    assert chunked.sweep_s(lengths, 1) < 1.2 * plain.sweep_s(lengths, 1)
    gradients_s = 2 * 2 * 8192 * model.hidden * model.vocab / (H100.bf16_flops / 15)
    more_s = chunked.sweep_s(lengths, 3) - plain.sweep_s(lengths, 3)
    assert gradients_s < more_s < 1.5 * gradients_s


def test_adapters_spare_gradients_and_cost_memory_traffic():
    lengths = np.array([8192])
    full, adapted = (
        computed(lora=lora, gpu=WITHOUT_MEMORY).sweep_s(lengths, 3) for lora in (False, True)
    )
    assert adapted < 0.9 * full
    small = MODELS["qwen3-0.6b"]
    assert computed(model=small, lora=True).sweep_s(lengths, 3) > computed(model=small).sweep_s(
        lengths, 3
    )


def test_an_optimizer_step_reads_and_writes_the_states_of_a_gpu():
    assert computed(sharding="fsdp", gpus=8).optimizer_s == pytest.approx(
        42 * LARGE.parameters / 8 / (0.8 * 3.35e12)
    )
    moved_s = 6 * LARGE.parameters * 7 / 8 / (LINK_SHARE * 450e9)
    assert computed(gpus=8).optimizer_s - computed(
        sharding="fsdp", gpus=8
    ).optimizer_s == pytest.approx(moved_s)
    assert computed(lora=True).optimizer_s == costs().optimizer_s == 0.0


# Memory.


def test_memory_is_the_sum_counted_by_hand():
    tokens = 1000 / 2
    parameters = 2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16) + 2 * 32 * 8
    states = (
        18 * parameters / 4
    )  # bf16 weights 2, fp32 gradients 4, master weights 4, Adam's moments 8; over 4 GPUs
    layer = 2 * 2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16)
    checkpoints = 2 * 2 * 8 * tokens
    working = 2 * tokens * (6 * 8 + 3 * 16)
    logits = 6 * 32 * tokens
    expected = states + layer + checkpoints + working + logits
    assert (
        costs(gpus=4, sequence_parallel=2, tokens_per_microbatch=1000).memory_bytes(10) == expected
    )


def test_logits_are_kept_for_4096_tokens_at_most():
    less, more = (costs(tokens_per_microbatch=n).memory_bytes(10) for n in (4096, 8192))
    assert more - less == (2 * 2 * 8 + 2 * (6 * 8 + 3 * 16)) * 4096


def test_without_sharding_the_weights_and_gradients_lie_on_every_gpu_of_a_rank_alone():
    whole = computed(8, sharding="optimizer").state_bytes
    assert whole == pytest.approx(6 * LARGE.parameters + 12 * LARGE.parameters / 8)
    assert computed(8, tensor_parallel=2, pipeline_parallel=2).state_bytes < whole / 2
    assert computed(8, sharding="fsdp").state_bytes == pytest.approx(18 * LARGE.parameters / 8)
