"""RhymeRL's groups (§4.2, §5.3, §7.1): over-sampling, DAPO's filter, streamed mini-batches, sub-batches of whole prompts."""

from collections import Counter, defaultdict
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st

from simrl.dispatch.histopipe import Planner
from simrl.errors import InputError
from simrl.pipelines.batch import Batch
from simrl.speculation.choices import HistoryRule
from simrl.speculation.trace_runs import history_runs
from simrl.speculation.windows import Aimd
from simrl.systems.recipes import make_system
from simrl.trace.trace import Trace
from tests.conservation import assert_nothing_is_lost
from tests.helpers import examples, rows
from tests.pipelines.test_histopipe import epochs, stays, timed
from tests.runtime.test_drafting import walked
from tests.token_traces import random_groups

GROUPED = [
    {"over_sampling": 1.5},
    {"over_sampling": 2.0, "stream": True, "minibatches": 2},
    {"dynamic_sampling": True, "over_sampling": 1.2, "migration": False},
    {"dynamic_sampling": True, "over_sampling": 1.5, "stream": True, "minibatches": 3},
    {"dynamic_sampling": True, "sub_batches": "responses", "alpha": 1.0, "least_beta": 1.0},
    {"over_sampling": 2.0, "weight_buffer": False, "alpha": 1.0, "least_beta": 1.0},
    {"filter_groups": True, "over_sampling": 2.0},
    {"histopipe": False, "dynamic_sampling": True, "over_sampling": 2.0},
]


def with_rewards(trace: Trace, rewards: list[float]) -> Trace:
    """The trace with these rewards, in turn."""
    columns = {name: trace.table.column(name) for name in trace.table.column_names}
    drawn = [rewards[row % len(rewards)] for row in range(len(trace))]
    return Trace.from_columns({**columns, "reward": drawn}, trace.metadata)


def statuses(watched) -> dict[tuple[int, int], set[str]]:
    """Return the statuses of the responses of (trace step, prompt), as long as the trace is not repeated."""
    of_prompt = defaultdict(set)
    for row in rows(watched.result.samples):
        if row["epoch"] == 0:
            of_prompt[row["trace_step"], row["prompt_id"]].add(row["status"])
    return dict(of_prompt)


def test_over_sampling_trains_the_groups_that_come_first_and_aborts_the_rest():
    # A batch is two groups; twice as many are drawn, of two steps of the trace.
    watched = timed(epochs([[[10, 10], [90, 90]], [[30, 30], [20, 20]]]), 1, over_sampling=2.0)
    assert statuses(watched) == {
        (0, 0): {"trained"},
        (0, 1): {"dropped"},
        (1, 2): {"dropped"},
        (1, 3): {"trained"},
    }
    tokens = {r["uid"]: r["generated_tokens"] for r in rows(watched.result.samples)}
    assert [tokens[uid] for uid in (2, 3)] == [21, 21]  # aborted a pass after the batch was full


def test_groups_with_equal_rewards_are_dropped_and_another_round_is_drawn():
    # Of each step, the second group has equal rewards. Worker 0 goes on to the second step at 10. What the first one
    # lacks is drawn from the third when all of it is scored, at 20; worker 1 generates its part before it goes on.
    steps = [[[10, 10], [20, 20]], [[40, 40], [40, 40]], [[5, 5], [6, 6]]]
    watched = timed(with_rewards(epochs(steps), [0, 1, 1, 1]), 1, dynamic_sampling=True)
    fates, place = statuses(watched), stays(watched)
    assert (fates[0, 0], fates[0, 1]) == ({"trained"}, {"dropped"})
    assert (fates[2, 4], fates[2, 5]) == ({"trained"}, {"dropped"})
    assert [place[uid][0][3] for uid in (4, 6, 8, 10)] == [10.0, 26.0, 21.0, 20.0]


def test_a_batch_that_ten_rounds_do_not_fill_ends_the_run_with_one_line():
    trace = with_rewards(epochs([[[3, 3], [3, 3]]] * 12), [0] * 46 + [0, 1])
    with pytest.raises(InputError, match="unequal rewards after 10 rounds, an update needs 2"):
        timed(trace, 1, dynamic_sampling=True)


def test_a_prompt_with_a_dropped_response_is_ranked_by_its_finished_ones():
    # Of prompt 0, one response of two is finished when the batch is full: 4 tokens, the shortest prompt of the next epoch.
    history = [[[4, 90], [8, 8]], [[9, 9], [50, 50]]]
    now = [[[40, 40], [8, 8]], [[9, 9], [50, 50]]]
    ranked, ranking = [], Planner._ranking

    def ranks(planner, groups, workers):
        ranked.append(ranking(planner, groups, workers))
        return ranked[-1]

    with patch.object(Planner, "_ranking", ranks):
        watched = timed(epochs(history, now), 2, over_sampling=2.0, migration=False)
    assert statuses(watched)[0, 0] == {"dropped"}
    assert ranked[1][0].prompts == (0, 1)  # of prompts with 4, 8, 9 tokens, and one that is unknown
    assert ranked[1][0].lengths_tokens.tolist() == [4, 8, 8]


def test_a_prompt_with_dropped_responses_drafts_from_its_finished_ones():
    # Two steps an epoch; each draws all six prompts, trains the first twelve responses and aborts the others.
    trace = random_groups(4, epochs=2, prompts=6)
    columns = {name: trace.table.column(name) for name in trace.table.column_names}
    steps = 2 * trace.column("epoch") + (trace.column("prompt_id") >= 3)
    trace = Trace.from_columns({**columns, "step": steps}, trace.metadata)
    method = {"name": "histospec", "gate": "open", "prompt_tail_tokens": 0}
    watched = timed(trace, 2, over_sampling=2.0, migration=False, speculation=method)
    samples = [row for row in rows(watched.result.samples) if row["epoch"] < 2]
    finished = {
        (r["prompt_id"], r["sample"]) for r in samples if r["epoch"] == 0 and r["finished_s"]
    }
    now = {(r["prompt_id"], r["sample"]) for r in samples if r["epoch"] == 1 and r["finished_s"]}
    places = zip(*(trace.column(n).tolist() for n in ("epoch", "prompt_id", "sample")), strict=True)
    kept = [place[1:] in (now if place[0] else finished) for place in places]
    part = Trace(trace.table.filter(kept), trace.metadata)
    alone = walked(part, history_runs(part, HistoryRule(prompt_tail_tokens=0)), Aimd())
    drafted = [r for r in samples if r["epoch"] == 1 and r["finished_s"] and r["drafted_tokens"]]
    groups = Counter(prompt for prompt, _ in finished)
    assert {groups[r["prompt_id"]] for r in drafted} >= {3, 4}  # also of incomplete groups
    for r in drafted:
        counts = r["drafted_tokens"], r["accepted_tokens"], r["verifications"]
        assert counts == alone[1, r["prompt_id"], r["sample"]]


def test_training_takes_each_mini_batch_as_soon_as_its_groups_are_scored():
    trace = epochs([[[10, 10], [200, 200]]])
    whole, streamed = (
        timed(trace, 1, minibatches=2, stream=stream, log_probs=1) for stream in (False, True)
    )
    started = [rows(watched.result.steps)[0]["started_s"] for watched in (whole, streamed)]
    assert started == [pytest.approx(200, abs=0.1), pytest.approx(10, abs=0.1)]
    assert [len(rows(watched.result.steps)) for watched in (whole, streamed)] == [1, 1]


@pytest.mark.parametrize("over_sampling", [1.0, 1.5])
def test_a_streamed_batch_has_as_many_mini_batches_as_asked_whatever_is_carried(over_sampling):
    # Eight groups of two a step; alpha and β let responses be carried.
    before = [[10 + 4 * p, 12 + 4 * p] for p in range(8)]
    now = [[10 + 4 * p, 150 if p in (0, 5) else 12 + 4 * p] for p in range(8)]
    trace, cut, put = epochs([before], [now], [before], [now]), [], Batch._put_part

    def put_part(batch):
        cut.append((id(batch), sum(map(len, batch._part)), batch))
        put(batch)

    with patch.object(Batch, "_put_part", put_part):
        watched = timed(
            trace, 4, stream=True, minibatches=4, over_sampling=over_sampling, alpha=0.3, least_beta=1.0
        )  # fmt: skip
    assert any(step["carried_tokens"] for step in rows(watched.result.steps))
    parts = defaultdict(list)
    for batch, responses, _ in cut:
        parts[batch].append(responses)
    updates = [step["samples"] for step in rows(watched.result.steps)]
    for of_batch, responses in zip(parts.values(), updates, strict=False):
        assert sum(of_batch) == responses
        # A quarter each, as far as whole groups of up to two allow; the last has the rest.
        assert all(held <= 5 for held in of_batch[:3])
        assert len(of_batch) == 4 or responses <= 12  # where more than a quarter was carried away
    assert max(map(len, parts.values())) == 4


def test_a_sub_batch_has_whole_prompts():
    group = [[20] * 4, [21] * 4, [22] * 4, [23] * 4]
    parameters = {"ranking_groups": 1, "migration": False}
    for sub_batches, alone in (("prompts", True), ("responses", False)):
        watched = timed(epochs([group], [group]), 2, sub_batches=sub_batches, **parameters)
        place = stays(watched)
        workers = defaultdict(set)
        for row in rows(watched.result.samples):
            if row["epoch"] == 1:
                workers[row["prompt_id"]].add(place[row["uid"]][0][0])
        assert all((len(at) == 1) == alone for at in workers.values())


def test_a_switch_is_named_in_the_schedule():
    system = make_system("rhymerl", {"over_sampling": 2.0, "dynamic_sampling": True})
    assert system.schedule.endswith("on its own, over-sampled, dynamic sampling")
    assert system.needs_rewards


lengths = st.lists(st.lists(st.integers(1, 60), min_size=3, max_size=3), min_size=4, max_size=4)


@pytest.mark.parametrize("parameters", GROUPED, ids=str)
@examples(15)
@given(
    st.lists(st.tuples(lengths, lengths), min_size=2, max_size=3),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=5, max_size=11).map(
        lambda some: [0.0, 1.0, *some]
    ),
    st.integers(1, 4),
)
def test_grouped_steps_lose_nothing_and_no_token_is_more_than_a_version_old(
    parameters, drawn, rewards, workers
):
    """I8, I9, I10: also where groups are dropped, aborted and drawn again."""
    trace = with_rewards(epochs(*[[list(a), list(b)] for a, b in drawn]), rewards)
    try:
        watched = timed(trace, 2 * len(drawn), workers, **parameters)
    except InputError as error:  # rewards that fill no batch
        assert "unequal rewards after" in str(error) or "no group to train" in str(error)
        return
    assert_nothing_is_lost(watched)
    updates, samples = rows(watched.result.steps), rows(watched.result.samples)
    assert max(u["off_policyness_max"] for u in updates) <= 1
    assert (
        max(u["carried_off_policyness_max"] for u in updates)
        <= watched.prepared.system.off_policyness
    )
    # A batch has the responses of four groups of three, or the group that fills it brings up to two more.
    if "filter_groups" not in parameters:
        assert all(12 <= u["samples"] <= 14 for u in updates)
    if parameters.get("migration") is False:
        groups = Counter(
            (r["trace_step"], r["prompt_id"], r["epoch"])
            for r in samples
            if r["trained_step"] is not None
        )
        assert set(groups.values()) == {3}
    again = timed(trace, 2 * len(drawn), workers, **parameters)
    assert again.result.samples == watched.result.samples
    assert again.result.spans == watched.result.spans
