"""A pass at a time against many at once, and where the seconds of a pass go."""

import numpy as np
import pytest

from simrl.engine.engine import Engine, one_engine
from simrl.engine.repeat import busy
from simrl.engine.state import Engines, Limits
from simrl.engine.step import step
from simrl.profile.compiled import kernel
from simrl.profile.profile import Tables
from tests.engine.test_engine import TABLES

LENGTHS = [(30, 140), (17, 190), (64, 112), (5, 200)]


@kernel
def step_until_idle(e: Engines, tables: Tables, limits: Limits) -> None:
    while busy(e, 0, limits):
        step(e, 0, tables, limits, None)


def loaded(limits: Limits) -> Engine:
    engine = one_engine(TABLES, limits)
    for prompt, response in LENGTHS:
        engine.submit(prompt, response)
    return engine


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kv_blocks", [400, 20])  # with few blocks, requests are preempted
def test_passes_at_once_end_as_passes_one_by_one(asynchronous: bool, kv_blocks: int):
    """I27: `repeat` is `step`, many times."""
    limits = Limits(4, 64, 16, kv_blocks, async_scheduling=asynchronous)
    at_once, one_by_one = loaded(limits), loaded(limits)
    ends_s = at_once.run_until_idle()
    step_until_idle(one_by_one.fleet.arrays.engines, TABLES, limits)
    np.testing.assert_allclose(one_by_one.fleet.r["last_token_s"][0], ends_s, rtol=1e-12)
    np.testing.assert_allclose(one_by_one.spent, at_once.spent, rtol=1e-9, atol=1e-12)
    assert one_by_one.totals == at_once.totals
    assert (at_once.totals["preemptions"] > 0) == (kv_blocks == 20)


def test_a_slot_that_is_used_again_knows_nothing_of_its_last_drafts():
    engine = loaded(Limits(4, 64, 16, 400))
    engine.fleet.r["drafted_total"][:] = 7
    engine.run_until_idle()
    assert engine.drafted(engine.submit(8, 4)) == [0] * 5
