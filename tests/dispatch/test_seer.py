"""Seer: which group goes first, what chunks and the pool of KV caches do, and that without them it is verl colocated."""

import math

import pytest
from hypothesis import given, strategies as st

from simrl.dispatch.seer import ContextAware
from simrl.runtime.history import LengthHistory
from tests.helpers import ROOMY, examples, rollout, rows, sample, trace
from tests.pipelines.test_pipelines import run, timed, traces, updates_at, workers


def of_group(uid, group):
    return sample(uid)._replace(prompt_id=group)


def finished(one, tokens):
    return rollout(one.uid, {0: tokens})._replace(sample=one)


def so_far(one, tokens):
    return rollout(one.uid, {0: tokens}, done=False)._replace(sample=one)


def test_one_of_each_group_goes_first_then_the_group_whose_finished_are_longest_and_unknown_is_longer_than_any():
    queue = ContextAware(LengthHistory())
    groups = [[of_group(3 * g + i, g) for i in range(3)] for g in range(3)]
    for group in groups:
        for one in group:
            queue.push(one, None)
    assert [queue.pop().uid for _ in range(3)] == [0, 3, 6]  # the probes
    queue.observe(finished(groups[0][0], 10))
    queue.observe(finished(groups[1][0], 20))
    assert queue.pop().uid == 7  # nobody knows how long the last group is
    queue.observe(finished(groups[2][0], 5))
    assert queue.pop().uid == 4
    queue.observe(finished(groups[2][1], 30))  # longer than was thought
    assert [queue.pop().uid for _ in range(4)] == [8, 5, 1, 2]
    assert not len(queue)


def test_of_the_probes_the_one_with_the_fewest_tokens_goes_first_also_when_it_queues_up_anew():
    queue = ContextAware(LengthHistory())
    first, second, sibling = of_group(0, 0), of_group(1, 1), of_group(2, 1)
    for one in (first, second, sibling):
        queue.push(one, None)
    assert queue.pop() == first
    queue.push(first, so_far(first, 8))
    assert [queue.pop(), queue.pop(), queue.pop()] == [second, first, sibling]
    queue.observe(finished(sibling, 9))
    queue.push(second, so_far(second, 16))  # its group is known now
    queue.push(first, so_far(first, 16))
    assert [queue.pop(), queue.pop()] == [first, second]


class Naive:
    """The same order, looked for among all that wait."""

    def __init__(self):
        self.probe, self.order, self.longest, self.waiting, self.pushed = {}, {}, {}, [], 0

    def push(self, one, partial):
        self.pushed += 1
        self.probe.setdefault(one.prompt_id, one.uid)
        self.order.setdefault(one.prompt_id, len(self.order))
        probes = self.probe[one.prompt_id] == one.uid and one.prompt_id not in self.longest
        self.waiting.append((one, partial.tokens if partial else 0, self.pushed, probes))

    def observe(self, done):
        group = done.sample.prompt_id
        self.longest[group] = max(self.longest.get(group, 0), done.tokens)

    def pop(self):
        def key(entry):
            one, tokens, pushed, probes = entry
            group = one.prompt_id
            return (
                (0, tokens, pushed)
                if probes
                else (1, -self.longest.get(group, math.inf), self.order[group], pushed)
            )

        first = min(self.waiting, key=key)
        self.waiting.remove(first)
        return first[0]


@examples(200)
@given(st.data())
def test_the_queue_is_in_the_order_that_a_search_of_all_that_wait_finds(data):
    queue, naive, out, uids = ContextAware(LengthHistory()), Naive(), [], 0
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["push", "push", "pop", "cut", "finish"]))
        if what == "push":
            one = of_group(uids, data.draw(st.integers(0, 3)))
            uids += 1
            queue.push(one, None)
            naive.push(one, None)
        elif what == "pop" and len(queue):
            out.append(queue.pop())
            assert out[-1] == naive.pop()
        elif what in ("cut", "finish") and out:
            one = out.pop(data.draw(st.integers(0, len(out) - 1)))
            tokens = data.draw(st.integers(1, 20))
            for either in (queue, naive):
                either.push(one, so_far(one, tokens)) if what == "cut" else either.observe(
                    finished(one, tokens)
                )
        assert len(queue) == len(naive.waiting)
    while len(queue):
        assert queue.pop() == naive.pop()


# Times counted by hand: a pass takes a second.


def segments_of(result, uid):
    return [
        (s["worker"], s["tokens"], s["started_s"], s["ended_s"])
        for s in rows(result.segments)
        if s["uid"] == uid
    ]


def test_a_response_is_cut_into_chunks_and_any_worker_takes_the_next():
    lengths = trace([[[(4, 25)], [(4, 10)], [(4, 10)]]])
    result = timed("seer", 1, lengths, workers=2, chunk_tokens=10, per_worker=1)
    # At 10 the third, which has no token yet, goes before the first; the other worker takes that.
    assert segments_of(result, 2) == [(0, 10, 10, 20)]
    assert segments_of(result, 0) == [(0, 10, 0, 10), (1, 10, 10, 20), (0, 5, 20, 25)]


def test_from_the_pool_a_chunk_goes_on_at_once_and_without_it_it_is_prefilled_anew():
    narrow = ROOMY._replace(max_num_batched_tokens=8)
    one = trace([[[(4, 12)]]])
    pooled = timed("seer", 1, one, limits=narrow, chunk_tokens=5)
    assert segments_of(pooled, 0) == [(0, 5, 0, 5), (0, 5, 5, 10), (0, 2, 10, 12)]
    anew = timed("seer", 1, one, limits=narrow, chunk_tokens=5, kv_pool=False)
    # 4 + 5 tokens and 4 + 10 take two passes each, of which the second gives a token.
    assert segments_of(anew, 0) == [(0, 5, 0, 5), (0, 5, 5, 11), (0, 2, 11, 14)]


def test_a_group_that_turns_out_long_goes_before_those_that_came_earlier():
    lengths = trace([[[(4, 10)] * 3, [(4, 20)] * 3]])
    parameters = {"per_worker": 2, "chunk_tokens": None}
    result = timed("seer", 1, lengths, **parameters)
    # The probes begin, 0 and 3. At 10, the second group is not known yet: its samples begin at the next boundary, 11. At 20 it
    # is known to be the longer one; then come the two of the first.
    began = {s["uid"]: s["started_s"] for s in rows(result.segments)}
    assert began == {0: 0, 3: 0, 4: 11, 5: 21, 1: 32, 2: 42}
    in_order = timed("seer", 1, lengths, context_aware=False, **parameters)
    assert {s["uid"]: s["started_s"] for s in rows(in_order.segments)} == {
        0: 0,
        1: 0,
        2: 10,
        3: 10,
        4: 21,
        5: 31,
    }


def tables(result):
    return [rows(table) for table in (result.steps, result.samples, result.segments, result.spans)]


@examples(30)
@given(traces, workers)
def test_without_chunks_limit_and_order_it_is_verl_colocated(trace, workers):
    plain = run(("verl_colocated", {}), trace, workers).result
    parameters = {"chunk_tokens": None, "context_aware": False, "per_worker": None}
    assert tables(run(("seer", parameters), trace, workers).result) == tables(plain)


@pytest.mark.parametrize("chunk_tokens", [7, None])
def test_where_all_responses_are_equally_long_and_fit_it_takes_as_long_as_verl_colocated(
    chunk_tokens,
):
    equal = trace([[[(4, 30)] * 2] * 3])
    plain = timed("verl_colocated", 3, equal, workers=2)
    assert updates_at(timed("seer", 3, equal, workers=2, chunk_tokens=chunk_tokens)) == updates_at(
        plain
    )


@examples(30)
@given(traces, workers, st.integers(1, 20), st.integers(1, 4), st.booleans())
def test_no_stay_is_longer_than_a_chunk_and_no_worker_has_more_than_it_may(
    trace, workers, chunk, most, pool
):
    parameters = {"chunk_tokens": chunk, "per_worker": most, "kv_pool": pool}
    result = run(("seer", parameters), trace, workers).result
    segments = rows(result.segments)
    assert max(s["tokens"] for s in segments) <= chunk
    for one in segments:
        at_once = [
            s
            for s in segments
            if s["worker"] == one["worker"] and s["started_s"] <= one["started_s"] < s["ended_s"]
        ]
        assert len(at_once) <= most
