import numpy as np
import pytest
import simpy

from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.simulate.prepare import prepare
from simrl.simulate.run import Schedule, simulate, simulated_workers
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.choices import Toggle
from simrl.speculation.decoding import MODEL, TOGGLE, Decoding, Rule, chains
from simrl.speculation.draft_times import DraftTimes
from simrl.speculation.gates import ELASTIC_OFF, ELASTIC_ON
from simrl.speculation.methods import make_speculation
from simrl.speculation.toggle import Ladder, first_accept_length, next_toggle
from simrl.speculation.windows import Fixed
from tests.conservation import assert_nothing_is_lost
from tests.helpers import one_second_a_pass, rows, scenario, watch
from tests.references.efficient_rollout import draft_tokens, drafts_begin


@pytest.mark.parametrize("seed", range(200))
def test_the_ladder_moves_as_its_reference_says(seed):
    rng = np.random.default_rng(seed)
    rule = Toggle(
        ladder=[(5, 7, 9, 11), (3, 5), (7,)][seed % 3], persistence=int(rng.integers(1, 4))
    )
    rates = rng.choice([0.8, 0.85, 0.9, 0.94, 0.99], 12, p=[0.2, 0.1, 0.2, 0.1, 0.4]).tolist()
    ladder, chosen = Ladder(rule.ladder[0]), [rule.ladder[0]]
    for rate in rates:
        ladder = ladder.after(rate, rule)
        chosen.append(ladder.draft_tokens)
    assert chosen == draft_tokens(rates, rule)


@pytest.mark.parametrize("seed", range(200))
def test_drafts_begin_at_the_pass_that_the_reference_says(seed):
    rng = np.random.default_rng(seed)
    running = np.abs(np.r_[np.arange(0, 40, 8), np.linspace(40, 0, 20).astype(int)]).tolist()
    gains = rng.uniform(0.6, 1.2, len(running)).tolist()
    ramp, state, begun = int(rng.integers(1, 45)), ELASTIC_OFF, len(running)
    for i, (n, gain) in enumerate(zip(running, gains, strict=True)):
        state = next_toggle(state, n, ramp, gain, 0.05)
        if state == ELASTIC_ON:
            begun = min(begun, i)
    assert begun == drafts_begin(running, gains, ramp, 0.05)


def test_a_first_rollout_is_taken_to_accept_what_the_code_starts_with():
    fixed = {3: 3.0, 5: 4.5, 7: 6.0, 9: 7.0, 11: 8.0, 13: 9.0, 15: 10.0}
    assert {n: first_accept_length(Toggle(ladder=(n,))) for n in fixed} == fixed
    assert first_accept_length(Toggle()) == 5.0


def engine_with(ramp: int, margin: float, decoding: Decoding | None = None):
    """An engine of one-second passes, a draft token in a tenth of it."""
    times = DraftTimes(
        np.array([1.0, 64.0]), np.zeros(2), np.full(2, 0.1), 0.0, 0.0, "assumed", "test"
    )
    rule = Rule(TOGGLE, Fixed(tokens=4).rule, threshold=ramp, margin=margin)
    made = decoding or chains(rule, times, ModelAcceptance(by_position=(0.9,)))
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=512, block_size=4, kv_blocks=2000)
    return one_engine(one_second_a_pass(), limits, made._replace(accept_length=4.0))


def ends(engine, lengths):
    for i, tokens in enumerate(lengths):
        slot = engine.submit(8, tokens)
        engine.draft_from(slot, MODEL, 77 + i)
    engine.settle(0.0)
    engine.run_until_idle()
    return engine.now_s


def test_a_toggle_that_is_never_armed_or_never_pays_leaves_the_times_of_plain_decoding():
    lengths = [40, 60, 90]
    plain = ends(engine_with(8, 0.05), lengths)
    assert plain == ends(engine_with(1, 9.0), lengths)
    assert plain == pytest.approx(90, abs=1)


def test_a_toggle_that_pays_drafts_from_the_third_look_to_the_end():
    engine = engine_with(1, 0.05)
    took = ends(engine, [90, 90])
    assert took < 60
    assert engine.fleet.t["rollout_drafts"][0] > 0
    engine.new_rollout()
    assert engine.fleet.t["elastic_state"][0] == ELASTIC_OFF


@pytest.mark.parametrize("system", ["efficient_rollout", "areal"])
def test_a_run_generates_the_same_tokens_and_conserves_them(system):
    method = {
        "name": "efficient_rollout",
        "gate": {"ramp": 1, "ladder": [3, 5], "raise_at": 0.5, "lower_at": 0.1},
    }
    asked = scenario({"name": system, "speculation": method}, steps=6)
    drafted = simulate(asked)
    plain = simulate(scenario({"name": system, "speculation": "none"}, steps=6))
    assert_nothing_is_lost(watch(prepare(asked)))
    assert sum(r["drafted_tokens"] for r in rows(drafted.samples)) > 0
    if system == "efficient_rollout":
        tokens = [
            {r["uid"]: r["generated_tokens"] for r in rows(x.samples)} for x in (drafted, plain)
        ]
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"name": "efficient_rollout", "draft_tokens": 5}, "give gate=open"),
        ({"name": "efficient_rollout", "gate": {"ladder": [5, 3]}}, "draft tokens that rise"),
        ({"name": "efficient_rollout", "gate": {"ladder": [5, 5]}}, "draft tokens that rise"),
        ({"name": "eagle3", "tokens": 9}, "tokens is 9: with topk=1"),
    ],
)
def test_a_parameter_that_would_change_nothing_is_refused_in_a_line(parameters, words):
    with pytest.raises(InputError, match=words) as refused:
        make_speculation(parameters)
    assert "\n" not in str(refused.value)
    assert make_speculation({"name": "eagle3", "tokens": 4}) is not None  # steps + 1


def test_of_a_new_rung_workers_with_drafts_keep_what_they_had_and_the_others_take_its_tokens():
    method = {"name": "efficient_rollout", "gate": {"ladder": [3, 5], "persistence": 1}}
    ready = prepare(scenario({"name": "verl_colocated", "speculation": method}))
    first = Schedule(ready, simpy.Environment(), simulated_workers)
    drafting, engines = first.workers[0]._drafting, [w.engine for w in first.workers]
    totals = engines[0].fleet.t
    totals["rollout_drafts"][0], totals["rollout_accepted"][0] = 100, 290
    for engine in engines:
        drafting.weights_loaded(engine, 1)
    assert totals["accept_length"].tolist() == [3.9, *[5.0] * (len(engines) - 1)]


def test_the_method_has_the_scripts_defaults():
    method = make_speculation("efficient_rollout")
    assert method is not None and method.gate == Toggle(ramp=32, margin=0.05, ladder=(5, 7, 9, 11))
    assert method.follows and method.model == "int4"
