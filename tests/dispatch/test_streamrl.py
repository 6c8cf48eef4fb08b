"""StreamRL's dispatch: who is expected to be long, which workers those have, in which order."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.dispatch.placement import least_requests
from simrl.dispatch.streamrl import Expected, LongestFirst, SkewnessAware, share_out
from simrl.runtime.history import LengthHistory
from simrl.simulate.length_ranker import RankedLengths
from tests.helpers import ROOMY, examples, rollout, rows, sample, trace
from tests.pipelines.test_pipelines import run, timed, updates_at, workers

IDLE = np.zeros(3, dtype=np.int64)


def of_epoch(one, epoch, prompt_id):
    return one._replace(prompt_id=prompt_id, epoch=epoch)


def history_of(tokens_by_prompt):
    history = LengthHistory()
    for prompt, lengths in tokens_by_prompt.items():
        for tokens in lengths:
            done = rollout(0, {0: tokens})
            history.observe([done._replace(sample=of_epoch(done.sample, 0, prompt))])
    return history


def to_come(prompts, group=1):
    return [
        of_epoch(sample(uid), 1, prompt)
        for uid, prompt in enumerate(p for p in prompts for _ in range(group))
    ]


def test_lengths_are_expected_to_be_the_last_epochs_and_the_others_mean_for_a_new_prompt():
    history = history_of({0: [10, 20, 90], 1: [40]})
    expected = Expected.of(to_come([0, 1, 7]), history)
    assert [column.tolist() for column in expected] == [[20, 40, 30], [40, 40, 40], [90, 40, 65]]
    assert Expected.of(to_come([7, 8]), history) is None


def dedicated(place, long, short, count):
    """With so long long ones and short ones, each a prompt."""
    tokens = np.array([*long, *short], dtype=float)
    is_long = np.arange(tokens.size) < len(long)
    return place.dedicated_workers(Expected(tokens, tokens, tokens), is_long, count)


def test_the_longest_prompts_have_workers_of_their_own_and_so_many_that_the_batch_is_done_soonest():
    history = history_of({0: [40], 1: [20], 2: [20], 3: [20], 4: [20]})
    place = SkewnessAware()
    # Two workers. Mixed: 40 + 120/(2 · 64). One for the long one: the longer of 40 + 40/64 and 20 + 80/64.
    assert place(to_come(range(5)), IDLE[:2], 0, history) == [1, 0, 0, 0, 0]
    # Where passes over two take much longer than over one, many short ones would be held up.
    crowded = SkewnessAware(doubling_batch=1)
    assert dedicated(crowded, [40], [20] * 3, 2) == 1  # 40 + 40 and 20 + 60, against 40 + 50
    assert dedicated(crowded, [40], [20] * 9, 2) == 0  # 20 + 180 against 40 + 110
    assert Counter(crowded(to_come([0, *[1] * 9]), IDLE[:2], 0, history)) == {
        0: 5,
        1: 5,
    }  # 40 + 4 · 20 and 5 · 20


def test_a_share_of_the_workers_can_be_dedicated_whatever_is_predicted():
    shares = (0.01, 0.3, 0.99)
    assert [
        dedicated(SkewnessAware(dedicated_share=x), [40] * 2, [20] * 8, 10) for x in shares
    ] == [1, 3, 9]
    assert dedicated(SkewnessAware(dedicated_share=0.5), [40], [20], 1) == 0


def test_what_counts_as_the_longest_is_the_longest_of_the_last_epoch():
    """A prompt that is short at its median may have a long response, which is not hurried by workers for the others."""
    long, short = {0: [100, 100, 100]}, {p: [20, 20, 20] for p in range(1, 5)}
    batch = to_come(range(5), group=3)
    assert set(SkewnessAware(doubling_batch=8)(batch, IDLE, 0, history_of(long | short))[3:]) == {0}
    assert set(
        SkewnessAware(doubling_batch=8)(
            batch, IDLE, 0, history_of(long | short | {4: [20, 20, 200]})
        )[3:]
    ) != {0}


def test_siblings_are_all_long_or_all_short():
    history = history_of({prompt: [10 + prompt] for prompt in range(10)})
    places = SkewnessAware(dedicated_share=0.34)(to_come(range(10), group=4), IDLE, 0, history)
    assert [set(places[i : i + 4]) <= {2} for i in range(0, 40, 4)] == [False] * 8 + [True] * 2


def test_longest_processing_time_first():
    # 7 to the first, 5 and 4 to the second, 3 to the first (10), 1 to the second (10)
    assert share_out(np.array([3.0, 7.0, 5.0, 4.0, 1.0]), 2).tolist() == [0, 0, 1, 1, 1]


def test_without_history_and_while_others_are_at_work_samples_are_shared_out_by_counts():
    history = history_of({0: [40], 1: [20]})
    batch = to_come([0, 1, 0])
    busy = np.array([2, 0, 1])
    assert SkewnessAware()(batch, busy, 0, history) == least_requests(batch, busy, 0, history)
    assert SkewnessAware()(batch, IDLE, 0, LengthHistory()) == [0, 1, 2]


@examples(50)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    st.integers(1, 3),
    st.sampled_from([0.2, 0.5]),
    st.sampled_from([1, 8, 64]),
)
def test_no_number_of_dedicated_workers_is_predicted_to_be_done_sooner(
    lengths, count, share, doubling
):
    place, tokens = SkewnessAware(share, doubling_batch=doubling), np.array(lengths, dtype=float)
    is_long = place.long_prompts(to_come(range(len(lengths))), tokens)
    assert is_long.sum() == round(share * len(lengths))
    assert not is_long.any() or tokens[is_long].min() >= tokens[~is_long].max(initial=0)

    def predicted(dedicated):
        if dedicated == 0:
            return tokens.max() + tokens.sum() / (count * doubling)
        kinds = (tokens[is_long], dedicated), (tokens[~is_long], count - dedicated)
        return max(kind.max() + kind.sum() / (n * doubling) for kind, n in kinds)

    chosen = place.dedicated_workers(Expected(tokens, tokens, tokens), is_long, count)
    numbers = range(count) if is_long.any() and not is_long.all() else [0]
    assert predicted(chosen) == pytest.approx(min(map(predicted, numbers)))


def test_the_longest_expected_waits_least_and_a_new_prompt_not_at_all():
    queue = LongestFirst(history_of({0: [10], 1: [30], 2: [20]}))
    for one in to_come([0, 1, 7, 2, 1]):
        queue.push(one, None)
    assert [(one.prompt_id, one.uid) for one in (queue.pop() for _ in range(5))] == [
        (7, 2),
        (1, 1),
        (1, 4),
        (2, 3),
        (0, 0),
    ]
    assert not len(queue)


# Times counted by hand: a pass takes a second, a load ten, a reward five, an update a hundred.


def test_from_the_second_epoch_on_the_longest_are_first_in_their_engine():
    tail_last = trace([[[(4, 10)], [(4, 10)], [(4, 30)]]])
    two_at_once = ROOMY._replace(max_num_seqs=2)
    parameters = {"limits": two_at_once, "eta": 0, "stream": False, "minibatches": 1}
    first_s = 40 + 5 + 100  # the third begins at 10
    assert updates_at(timed("streamrl", 2, tail_last, **parameters)) == [
        first_s,
        first_s + 10 + 30 + 5 + 100,
    ]
    in_order = timed("streamrl", 2, tail_last, longest_first=False, **parameters)
    assert updates_at(in_order) == [first_s, first_s + 10 + 40 + 5 + 100]


def test_the_long_one_has_a_worker_for_itself_and_is_done_sooner():
    one_long = trace([[[(4, 20)], [(4, 20)], [(4, 20)], [(4, 20)], [(4, 40)]]])
    one_at_once = ROOMY._replace(max_num_seqs=1)
    parameters = {"workers": 2, "limits": one_at_once, "eta": 0, "stream": False, "minibatches": 1}
    result = timed("streamrl", 2, one_long, **parameters)
    workers_of = [
        [s["worker"] for s in rows(result.segments) if s["policy_version"] == v] for v in (0, 1)
    ]
    assert workers_of == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert updates_at(result) == [80 + 105, 80 + 105 + 10 + 80 + 105]


EQUAL = trace([[[(4, 30)] * 2] * 3] * 2)


@examples(20)
@given(st.integers(1, 60), st.integers(1, 5), workers, st.booleans())
def test_where_all_responses_are_equally_long_it_is_asyncflow(length, groups, workers, stream):
    equal = trace([[[(4, length)] * 2] * groups] * 2)
    plain = run(("asyncflow", {"stream": stream}), equal, workers, steps=6).result
    aware = run(("streamrl", {"stream": stream}), equal, workers, steps=6).result
    assert [rows(t) for t in (aware.steps, aware.samples, aware.spans)] == [
        rows(t) for t in (plain.steps, plain.samples, plain.spans)
    ]


def test_where_all_responses_are_equally_long_and_nothing_streams_it_is_one_step_off_or_split():
    for name, eta in (("one_step_off", 1), ("split", 0)):
        plain = timed(name, 5, EQUAL, workers=2)
        assert updates_at(
            timed("streamrl", 5, EQUAL, workers=2, eta=eta, stream=False, minibatches=1)
        ) == updates_at(plain)


def test_a_ranker_knows_the_lengths_to_come_of_as_many_prompts_as_it_is_accurate():
    true = {prompt: 10 + prompt for prompt in range(40)}
    to_come = trace([[[(4, tokens)] * 2 for tokens in true.values()]])
    oracle, some, none = (RankedLengths(to_come, accuracy, 0) for accuracy in (1.0, 0.8, 0.0))
    assert {prompt: oracle.median(prompt, 0) for prompt in true} == true
    right = sum(some.median(prompt, 0) == tokens for prompt, tokens in true.items())
    assert 26 <= right <= 38
    assert sorted(none.median(prompt, 0) for prompt in true) == sorted(true.values())
    assert not any(none.median(prompt, 0) == tokens for prompt, tokens in true.items())


def test_with_an_oracle_long_prompts_have_a_worker_of_their_own_in_the_first_epoch_too():
    lengths = trace([[[(4, 20)], [(4, 20)], [(4, 90)], [(4, 20)]]])
    parameters = {"long_share": 0.25, "dedicated_share": 0.5}
    by_count, by_length = (
        {
            r["uid"]: r["worker"]
            for r in rows(timed("streamrl", 1, lengths, 2, ranker=ranker, **parameters).segments)
            if r["uid"] < 4  # of the first batch
        }
        for ranker in ("history", "oracle")
    )
    assert Counter(by_count.values()) == {0: 2, 1: 2}
    assert by_length == {0: 0, 1: 0, 2: 1, 3: 0}
