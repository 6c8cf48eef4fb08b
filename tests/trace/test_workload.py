"""The workload: a trace as an endless run of groups, of which schedules do not see what comes out."""

from simrl.trace.trace import Response, Sample
from simrl.trace.workload import Workload
from tests.helpers import trace

TWO_STEPS = trace([[[(4, 1), (4, 2)], [(4, 3)]], [[(4, 4)]]])


def lengths(workload, batch):
    return [[workload.responses[sample.uid].tokens for sample in group] for group in batch]


def test_a_trace_that_is_too_short_is_passed_over_again_with_new_numbers_and_later_epochs():
    workload = Workload(TWO_STEPS)
    batches = [workload.next_batch() for _ in range(4)]
    assert [lengths(workload, batch) for batch in batches] == [
        [[1, 2], [3]],
        [[4]],
        [[1, 2], [3]],
        [[4]],
    ]
    samples = [sample for batch in batches for group in batch for sample in group]
    assert [sample.uid for sample in samples] == list(range(8))
    assert [sample.epoch for sample in samples] == [0] * 4 + [1] * 4


def test_a_trace_that_is_gone_through_once_ends_with_its_last_group():
    once, endless = Workload(TWO_STEPS, once=True), Workload(TWO_STEPS)
    told = [(once.ended, endless.ended)]
    for workload in (once, endless):
        for _ in range(3):
            workload.next_groups(1)
            told.append((once.ended, endless.ended))
    assert told == [(False, False)] * 3 + [(True, False)] * 4


def test_nothing_of_a_sample_tells_its_length_or_its_reward():
    [[sample, *_], *_] = Workload(TWO_STEPS).next_batch()
    assert Sample._fields == ("uid", "step", "epoch", "prompt_id", "sample", "prompt_tokens")
    longer = trace([[[(4, 9), (4, 9)], [(4, 9)]], [[(4, 9)]]])
    assert Workload(longer).next_batch()[0][0] == sample


def test_groups_are_drawn_across_steps_and_a_batch_is_what_they_leave():
    workload = Workload(TWO_STEPS)
    assert workload.batch_groups == 2
    assert lengths(workload, workload.next_groups(1)) == [[1, 2]]
    assert lengths(workload, workload.next_batch()) == [[3]]
    assert lengths(workload, workload.next_groups(3)) == [[4], [1, 2], [3]]


def test_a_sample_generated_anew_comes_out_the_same_under_another_number():
    workload = Workload(TWO_STEPS)
    [[first, _], _] = workload.next_batch()
    again = workload.again(first)
    assert again.uid not in (0, 1, 2)
    assert again._replace(uid=first.uid) == first
    assert workload.responses[again.uid] == workload.responses[first.uid]


def test_further_samples_of_a_group_come_out_as_its_own_do_in_turn():
    workload = Workload(TWO_STEPS)
    [group, _] = workload.next_batch()
    more = workload.more_of(group, 3)
    assert [sample.sample for sample in more] == [2, 3, 4]
    assert [workload.responses[sample.uid].tokens for sample in more] == [1, 2, 1]
    assert len({sample.uid for sample in [*group, *more]}) == 5
    assert {type(response) for response in workload.responses.values()} == {Response}
