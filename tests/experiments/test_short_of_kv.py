"""The loss of an engine with more requests than its KV cache holds; the sizes are a quarter of the experiment's."""

import pytest

from experiments import short_of_kv


@pytest.fixture(autouse=True)
def quarter(monkeypatch):
    monkeypatch.setattr(short_of_kv, "FIT", 17)
    monkeypatch.setattr(short_of_kv, "TRAJECTORIES", 128)


def test_turns_of_agents_that_wait_lose_their_blocks_to_others():
    few, many = (short_of_kv.run(short_of_kv.AGENTS, n, prefix_caching=True) for n in (17, 64))
    assert few["found"] > 0.8
    assert many["found"] < 0.3
    assert many["recomputed"] > 10 * few["recomputed"]


def test_long_responses_are_preempted_and_a_watermark_lets_fewer_start():
    plain = short_of_kv.run(short_of_kv.LONG, 64, prefix_caching=True)
    blocks = short_of_kv.FIT * short_of_kv.CONTEXT_TOKENS // short_of_kv.BLOCK // 5
    spared = short_of_kv.run(short_of_kv.LONG, 64, prefix_caching=True, watermark_blocks=blocks)
    assert plain["preemptions"] > spared["preemptions"] > 0
    assert plain["recomputed"] > spared["recomputed"]
