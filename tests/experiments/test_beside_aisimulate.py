"""The comparison with AISimulate (experiments/beside_aisimulate.py): what it skips, and how it prices passes as that does."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from simrl.profile.profile import read_profile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("experiments.beside_aisimulate")


def test_without_aisimulate_nothing_runs_and_a_line_says_so(beside, capsys):
    beside.main(aisimulate="no-such-program", measured=None, write=False, as_json=False)
    assert capsys.readouterr().out == (
        "beside_aisimulate: skipped, aisimulate is not installed; pip install 'simrl[aisimulate]'\n"
    )


def test_a_mixed_pass_is_priced_as_two_and_one_without_decoding_as_it_was(beside):
    tables = read_profile(ROOT / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2.parquet").tables
    there = beside.priced_as_there(tables, 0.001, mixed=True)
    row = int(np.flatnonzero(there.prefill_tokens == 512)[0])
    before = tables.attention_s[int(np.flatnonzero(tables.prefill_tokens == 512)[0])]
    column = int(np.flatnonzero(tables.decode_sequences == 256)[0])
    dense_s = [np.interp(tokens, tables.dense_tokens, tables.dense_s) for tokens in (512, 256, 768)]
    more_s = there.attention_s[row] - before
    assert np.allclose(more_s[:, 0], 0.0)
    assert np.allclose(more_s[:, column], 0.001 + dense_s[0] + dense_s[1] - dense_s[2])


def test_prices_change_no_schedule(beside):
    tables = read_profile(ROOT / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2.parquet").tables
    case = beside.CASES[1]  # KV blocks short
    totals = [
        beside.simulated(case, each)[0].totals
        for each in (tables, beside.priced_as_there(tables, 0.001, mixed=True))
    ]
    assert totals[0] == totals[1] and totals[0]["preemptions"] > 0
