"""Length history: what was observed, an epoch of a prompt once it is complete."""

from simrl.runtime.history import LengthHistory
from tests.helpers import rollout


def finished(uid: int, prompt: int, epoch: int, tokens: int):
    one = rollout(uid, {0: tokens})
    return one._replace(sample=one.sample._replace(prompt_id=prompt, epoch=epoch))


def test_an_epoch_counts_for_a_prompt_once_all_its_responses_are_finished():
    """I35: a history knows whole epochs alone."""
    history = LengthHistory()
    first = [finished(uid, 7, 0, tokens) for uid, tokens in enumerate([10, 30])]
    second = [finished(uid, 7, 1, tokens) for uid, tokens in enumerate([5, 500], start=2)]
    for one in [*first, *second]:
        history.expect([one.sample])
    assert history.lengths(7, before_epoch=2).size == 0
    for one in [*first, second[0]]:
        history.observe([one])
    assert history.lengths(7, before_epoch=2).tolist() == [
        10,
        30,
    ]  # of epoch 1, only the short one is known
    assert history.medians(1) == {}
    history.observe([second[1]])
    assert history.lengths(7, before_epoch=2).tolist() == [5, 500]
    assert history.lengths(7, before_epoch=1).tolist() == [10, 30]
    assert history.medians(1) == {7: 252.5}
