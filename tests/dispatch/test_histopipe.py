"""HistoPipe's planning (RhymeRL §6): which worker gets which prompts of a step, and where an outlier goes."""

from simrl.dispatch.histopipe import HistoPipe, Plan, Planner, equal_parts
from simrl.profile.profile import ProfileMetadata, TableProfile
from simrl.profile.rollout_times import RolloutTimes
from simrl.runtime.history import LengthHistory
from simrl.runtime.rollout import Rollout, Segment
from simrl.trace.sample import Group, Sample
from tests.helpers import one_second_a_pass

RULE = HistoPipe(
    ranked=True,
    two_tier=False,
    ranking_groups=None,
    max_workers=None,
    representative="responses",
    alternation="reversed",
    weight_buffer=True,
    migration=True,
    alpha=0.5,
    least_beta=1.1,
    sub_batches="prompts",
    over_sampling=1.0,
    parts=None,
)
METADATA = ProfileMetadata(model="qwen3-0.6b", gpu="h100", tp=1, kind="assumed", source="a test")
TIMES = RolloutTimes(TableProfile(one_second_a_pass(), METADATA), 1000, 64)


def a_step(epoch: int, prompts: int = 4, group: int = 2) -> list[Group]:
    """Groups of a step: (uid, epoch, step, prompt, sample, prompt tokens)."""
    number = epoch * prompts * group
    return [
        [Sample(number + prompt * group + i, epoch, epoch, prompt, i, 4) for i in range(group)]
        for prompt in range(prompts)
    ]


def after_an_epoch(*tokens: int) -> LengthHistory:
    """A history in which every response to prompt i had `tokens[i]` tokens in epoch 0."""
    history = LengthHistory()
    for group, length in zip(a_step(0, len(tokens)), tokens, strict=True):
        history.expect(group)
        history.observe(
            [Rollout(sample, (Segment(0, 0, length, 0.0, 1.0),), True) for sample in group]
        )
    return history


def prompts(plan: Plan) -> dict[int, set[int]]:
    return {worker: {sample.prompt_id for sample in part} for worker, part in plan.parts.items()}


def test_without_history_a_step_is_cut_into_contiguous_equal_parts():
    """§6.2: it is not enabled during the first epoch."""
    plan = Planner(RULE, LengthHistory(), TIMES).plan(0, a_step(0), [0, 1], [0.0, 0.0], 0.0)
    assert prompts(plan) == prompts(equal_parts(a_step(0), [0, 1])) == {0: {0, 1}, 1: {2, 3}}
    assert not plan.groups and not plan.rank_of


def test_ranking_groups_go_up_in_even_steps_and_down_in_odd_ones():
    planner = Planner(RULE, after_an_epoch(40, 10, 30, 20), TIMES)
    up, down = (planner.plan(k, a_step(1), [0, 1], [0.0, 0.0], 0.0) for k in (2, 3))
    assert prompts(up) == {0: {1, 3}, 1: {0, 2}}
    assert prompts(down) == {0: {0, 2}, 1: {1, 3}}
    assert up.predicted_s == {0: 20.0, 1: 40.0} and up.last_worker == 1


def test_the_last_half_of_a_group_are_outliers_beyond_beta_times_its_longest_prompt():
    """§6.3, α = 50 %, β = 1.1: of groups whose longest prompts had 20 and 40 tokens."""
    plan = Planner(RULE, after_an_epoch(40, 10, 30, 20), TIMES).plan(
        2, a_step(1), [0, 1], [0.0, 0.0], 0.0
    )
    assert [(group.last, group.outlier_tokens) for group in plan.groups] == [(2, 23), (2, 45)]


def test_an_outlier_goes_to_the_emptiest_worker_of_the_longest_group_that_is_longer_than_its_own():
    plan = Plan(rank_of={0: 0, 1: 1, 2: 2, 3: 2})
    assert plan.destination(0, {0: 1, 1: 1, 2: 5, 3: 4}) == 3
    assert plan.destination(0, {0: 1, 1: 1}) == 1
    assert plan.destination(2, {0: 9, 1: 9, 2: 1, 3: 1}) is None
