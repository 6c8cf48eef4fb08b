"""From what samples draft in a simulation: real tokens, histories that are built in time, and nothing that is yet to come."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from simrl.result.metrics import summary
from simrl.result.result import Result
from simrl.runtime.drafting import Drafting, IndexBuilders
from simrl.simulate.run import simulate
from simrl.speculation.decoding import Draft
from simrl.speculation.inputs import HistoryWorkers
from simrl.speculation.methods import METHODS
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.passes import run_passes
from simrl.speculation.siblings import whole_response_runs
from simrl.speculation.trace_runs import history_runs
from simrl.speculation.windows import Aimd, Fixed
from simrl.trace.trace import Sample, Trace, write_trace
from tests.helpers import rows, scenario
from tests.token_traces import random_groups, trace_of

OPEN: dict[str, Any] = {"name": "histospec", "gate": "open", "prompt_tail_tokens": 0}


def simulated(
    trace: Trace,
    method: Any,
    system: str = "verl_colocated",
    steps: int | None = None,
    inputs: Any = None,
    **changes: Any,
) -> Result:
    with TemporaryDirectory() as folder:
        write_trace(trace, Path(folder) / "trace.parquet")
        asked = scenario(
            {"name": system, "speculation": method},
            steps=steps or len(trace.step_slices),
            workload={"trace": str(Path(folder) / "trace.parquet")},
            speculation=inputs or {},
            **changes,
        )
        return simulate(asked)


def drafts(result: Result) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """(drafted, accepted, verifications) by (epoch, prompt, sample)."""
    return {
        (r["epoch"], r["prompt_id"], r["sample"]): (
            r["drafted_tokens"],
            r["accepted_tokens"],
            r["verifications"],
        )
        for r in rows(result.samples)
    }


def walked(
    trace: Trace, runs: Any, window: Any
) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """The same for each response decoded alone, over its tokens."""
    passes = run_passes(runs, trace.column("response_tokens"), window.rule)
    places = zip(
        *(trace.column(name).tolist() for name in ("epoch", "prompt_id", "sample")), strict=True
    )
    counts = zip(
        passes.drafted.tolist(),
        passes.accepted.tolist(),
        passes.verifications.tolist(),
        strict=True,
    )
    return dict(zip(places, counts, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_history_drafts_what_it_drafts_over_the_tokens_alone(seed):
    trace = random_groups(seed, epochs=3)
    assert drafts(simulated(trace, OPEN)) == walked(trace, history_runs(trace), Aimd())
    # Where rollouts follow each other at once, the indexes that are built last come too late.
    found, expected = (
        drafts(simulated(trace, OPEN, "one_step_off")),
        walked(trace, history_runs(trace), Aimd()),
    )
    drafted = {place for place, counts in found.items() if counts[0]}
    assert drafted
    assert all(found[place] == expected[place] for place in drafted)


def test_so_do_ngrams():
    trace = random_groups(1)
    assert drafts(simulated(trace, "ngram")) == walked(trace, ngram_runs(trace), Fixed(tokens=4))


@pytest.mark.parametrize("name", METHODS)
def test_speculation_changes_when_tokens_come_and_never_which(name):
    """I31: no method of speculation changes what a run generates."""
    trace = random_groups(5, epochs=3)
    model = {
        "model": "mimo-7b" if name == "mtp" else "qwen3-0.6b"
    }  # the former has heads that draft
    plain, other = simulated(trace, "none", **model), simulated(trace, name, **model)
    assert {r["uid"]: r["generated_tokens"] for r in rows(plain.samples)} == {
        r["uid"]: r["generated_tokens"] for r in rows(other.samples)
    }
    assert plain.steps.column("response_tokens") == other.steps.column("response_tokens")
    for row in rows(other.samples):
        assert 0 <= row["accepted_tokens"] <= row["drafted_tokens"]
        assert row["accepted_tokens"] < max(row["generated_tokens"], 1)
        assert (
            row["accepted_tokens"]
            <= row["verified_tokens"]
            <= row["accepted_tokens"] + row["verifications"]
        )
        assert row["verifications"] <= row["verified_tokens"] <= row["generated_tokens"]
        if (
            name != "specactor"
        ):  # decoupled, a window that is right to its end has no bonus token; else the last pass at most
            assert row["verified_tokens"] >= row["accepted_tokens"] + row["verifications"] - 1


def test_the_whole_old_response_is_verified_once_and_the_rest_decoded():
    trace = trace_of({(0, 0): [list(range(40))], (1, 0): [[*range(30), *range(90, 100)]]})
    old = whole_response_runs(trace)
    assert old.accepted.tolist() == [0, 30]
    result = simulated(trace, "spec_rl", steps=2)
    plain = simulated(trace, "none", steps=2)
    took, alone = (
        [r["finished_s"] - r["started_s"] for r in rows(x.samples)] for x in (result, plain)
    )
    assert took[0] == pytest.approx(alone[0])
    assert took[1] < 0.4 * alone[1]  # 10 tokens of 40 are decoded
    assert drafts(result)[1, 0, 0] == (40, 30, 1)
    assert summary(result, 0)["speculation_rate"] == 30 / 80


def poisoned(trace: Trace, epoch: int) -> Trace:
    """The same trace, but with other tokens in the responses from an epoch on; lengths and all else are the same."""
    ids = [
        [9_000 + i for i in range(len(row))] if e >= epoch else row
        for e, row in zip(
            trace.column("epoch").tolist(),
            trace.table.column("response_ids").to_pylist(),
            strict=True,
        )
    ]
    columns = {name: trace.table.column(name) for name in trace.table.column_names}
    return Trace.from_columns({**columns, "response_ids": ids}, trace.metadata)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name]().drafter != "model"])
def test_nobody_drafts_from_a_later_epoch(name):
    """I32: later epochs change no draft."""
    trace = random_groups(2, epochs=3)
    one = {"cluster": {"gpu": "h100", "gpus": 1, "tp": 1}}  # siblings are at one worker
    before, after = (simulated(t, name, **one) for t in (trace, poisoned(trace, 2)))
    earlier, same = (
        [
            (r["uid"], r["drafted_tokens"], r["accepted_tokens"], r["finished_s"])
            for r in rows(x.samples)
            if r["epoch"] < 2
        ]
        for x in (before, after)
    )
    assert earlier == same
    assert sum(drafted for _, drafted, _, _ in earlier) > 0
    if name != "spec_rl":  # whose old responses agree in nothing here, poisoned or not
        assert drafts(before) != drafts(after)


@pytest.mark.parametrize(
    "system", ["areal", "april", "sortedrl", "rollpacker", "rhymerl", "verl_colocated"]
)
@pytest.mark.parametrize("name", ["spec_rl", "histospec"])
def test_nobody_drafts_from_what_is_not_finished(system, name, monkeypatch):
    """I32: whatever a sample is given to draft from was generated, to its end, before."""
    finished, given = set(), []

    def ends(self, engine, slot, rollout, now_s):
        if rollout.done:
            finished.add((rollout.sample.prompt_id, rollout.sample.epoch, rollout.sample.sample))
        real_ends(self, engine, slot, rollout, now_s)

    def give(self, engine, slot, sample, response, now_s, worker):
        drafts = list(
            Draft.__annotations__
        )  # a request has more, also times that are not known yet
        before = engine.fleet.arrays.engines.requests[drafts][engine.index, slot].copy()
        later_s = real_give(self, engine, slot, sample, response, now_s, worker)
        if before != engine.fleet.arrays.engines.requests[drafts][engine.index, slot]:
            needed = {sample.sample}
            if name == "histospec":  # all, but those that were dropped unfinished
                dropped = self._builders.missing(
                    sample.prompt_id, range(sample.epoch - 1, sample.epoch)
                )
                needed = set(range(4)) - {number for _, number in dropped}
                assert needed
            given.append(all((sample.prompt_id, sample.epoch - 1, i) in finished for i in needed))
        return later_s

    real_ends, real_give = Drafting.ends, Drafting.give
    monkeypatch.setattr(Drafting, "ends", ends)
    monkeypatch.setattr(Drafting, "give", give)
    simulated(random_groups(8, epochs=6), {"name": name}, system, steps=12)
    assert all(given)
    # RollPacker drops responses of every group, and has no earlier response of a sample that it began anew.
    assert given or (system, name) == ("rollpacker", "spec_rl")


def test_an_index_too_large_for_the_memory_evicts_none():
    builders = IndexBuilders(
        HistoryWorkers(memory_bytes=160), trace_of({(0, p): [[0]] for p in range(9)})
    )
    for prompt, tokens in ((0, 4), (1, 4), (2, 100)):
        builders.finished(Sample(prompt, 0, 0, prompt, 0, 4), tokens, 0.0)
    there = [builders.there_s(0, prompt, range(1), 1e9) < np.inf for prompt in range(3)]
    assert there == [True, True, False]


def test_an_index_has_the_finished_responses_of_a_group_and_is_made_anew_if_a_dropped_one_ends():
    builders = IndexBuilders(
        HistoryWorkers(tokens_per_s=1e9, bytes_per_token=1.0, link_bytes_per_s=100.0),
        trace_of({(0, 0): [[0]] * 3, (0, 1): [[0]]}),
    )
    one, two, three = (Sample(i, 0, 0, 0, i, 4) for i in range(3))
    builders.finished(one, 300, 0.0)
    builders.finished(two, None, 0.0)
    assert builders.there_s(0, 0, range(1), 1.0) == np.inf  # the third still runs
    builders.finished(three, 100, 0.0)
    assert builders.there_s(0, 0, range(1), 1.0) == pytest.approx(5.0)  # 400 bytes
    assert builders.missing(0, range(1)) == {(0, 1)}
    builders.finished(one, None, 1.0)  # finished before: it stays
    assert builders.missing(0, range(1)) == {(0, 1)}
    builders.finished(two, 200, 2.0)
    assert builders.there_s(1, 0, range(1), 10.0) == pytest.approx(16.0)  # another host
    assert builders.missing(0, range(1)) == frozenset()
    builders.finished(Sample(3, 0, 0, 1, 0, 4), None, 0.0)
    assert builders.there_s(0, 1, range(1), 10.0) == np.inf  # of nothing there is no index


def test_an_index_follows_its_prompt_to_each_host_once_over_its_link_one_after_another():
    sizes = HistoryWorkers(tokens_per_s=1e9, bytes_per_token=10.0, link_bytes_per_s=100.0)
    builders = IndexBuilders(sizes, trace_of({(0, p): [[0]] for p in range(2)}), workers_per_host=2)
    for prompt, tokens in ((0, 20), (1, 50)):
        builders.finished(Sample(prompt, 0, 0, prompt, 0, 4), tokens, 0.0)
    assert builders.there_s(0, 0, range(1), 10.0) == pytest.approx(12.0)  # 200 bytes
    assert builders.there_s(1, 1, range(1), 10.0) == pytest.approx(
        17.0
    )  # then 500 bytes, on the same host
    assert builders.there_s(1, 0, range(1), 11.0) == pytest.approx(12.0)  # on its way already
    assert builders.there_s(2, 0, range(1), 11.0) == pytest.approx(13.0)  # another host


def test_a_response_drafts_from_when_its_index_has_arrived():
    trace = random_groups(3, epochs=2)

    def drafted(**history_workers):
        result = simulated(trace, OPEN, inputs={"history_workers": history_workers})
        return int(result.samples.column("drafted_tokens").to_numpy().sum())

    at_once, slow, never = (
        drafted(),
        drafted(link_bytes_per_s=16.0 * 200),
        drafted(link_bytes_per_s=1e-3),
    )
    assert at_once > slow > never == 0


def test_a_prompt_whose_index_is_not_built_yet_decodes_without_drafts():
    trace = random_groups(3, epochs=2)
    slow = {"history_workers": {"workers": 1, "tokens_per_s": 0.001}}
    assert simulated(trace, OPEN).samples.column("drafted_tokens").to_numpy().sum() > 0
    assert (
        simulated(trace, OPEN, inputs=slow).samples.column("drafted_tokens").to_numpy().sum() == 0
    )


def test_memory_for_some_of_the_histories_serves_some_of_the_prompts():
    trace = random_groups(4, epochs=3, prompts=6)
    tokens = trace.column("response_tokens")[trace.column("epoch") == 0].sum()

    def prompts_with_drafts(share: float) -> int:
        result = simulated(
            trace, OPEN, inputs={"history_workers": {"memory_bytes": share * 16.0 * tokens}}
        )
        return len(
            {(r["epoch"], r["prompt_id"]) for r in rows(result.samples) if r["drafted_tokens"]}
        )

    assert prompts_with_drafts(2.0) == 12
    assert 0 < prompts_with_drafts(0.5) < 12
    assert prompts_with_drafts(0.01) == 0


def test_a_trace_that_is_passed_over_again_is_no_history_of_itself():
    trace = random_groups(6, epochs=1)
    result = simulated(trace, OPEN, steps=3)
    assert {r["epoch"] for r in rows(result.samples)} == {0, 1, 2}
    assert result.samples.column("drafted_tokens").to_numpy().sum() == 0


def test_budgets_follow_what_a_prompts_responses_were():
    lengths = {0: 20, 1: 40, 2: 60, 3: 80, 4: 400}
    trace = trace_of({(e, p): [[p] * n] for e in range(2) for p, n in lengths.items()})
    budgets = {"name": "das", "budgets": [1, 2, 30], "quantiles": [0.5, 0.8]}
    result = drafts(simulated(trace, budgets))
    longest = {p: result[1, p, 0] for p in lengths}
    assert all(
        drafted == passes for drafted, _, passes in (longest[0], longest[1])
    )  # one token a draft
    assert longest[4][0] > 10 * longest[4][2]


def test_the_gate_keeps_large_batches_plain_and_small_ones_fast():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 300).tolist()
    trace = trace_of({(e, p): [text] * 8 for e in range(2) for p in range(8)})
    limits = {"engine": {"max_num_seqs": 64}}
    gated, opened, plain = (
        simulated(trace, method, **limits)
        for method in ({"name": "histospec", "gate": "batch"}, OPEN, "none")
    )
    fastest = min(summary(r, 1)["step_s"] for r in (opened, plain))
    assert summary(gated, 1)["step_s"] <= 1.1 * fastest


def test_results_say_where_acceptance_is_from():
    trace = random_groups(0, epochs=2)
    facts = simulated(trace, "histospec").metadata["speculation"]
    assert facts["acceptance"] == "measured from the trace's tokens"
    assert (
        simulated(trace, "draft_model").metadata["speculation"]["acceptance"]["kind"] == "assumed"
    )


@pytest.mark.parametrize("method", ["siblings", "srt"])
def test_who_is_alone_in_a_group_has_no_siblings(method):
    one = {"gpu": "h100", "gpus": 1, "tp": 1}
    asked = scenario({"name": "verl_colocated", "speculation": method}, cluster=one)
    workload = asked.workload.model_dump()
    workload["synthetic"]["group"] = 1
    alone = simulate(scenario(method_of(asked), workload=workload, cluster=one))
    assert simulate(asked).samples.column("drafted_tokens").to_numpy().sum() > 0
    assert alone.samples.column("drafted_tokens").to_numpy().sum() == 0


def without_ids(trace: Trace) -> Trace:
    columns = {
        name: trace.table.column(name)
        for name in trace.table.column_names
        if name != "response_ids"
    }
    return Trace.from_columns(columns, trace.metadata)


@pytest.mark.parametrize(
    "method",
    ["siblings", {"name": "tlt", "drafter_from_update": 9, "threshold": 99, "patience": 1}],
)
@pytest.mark.parametrize("known", [lambda trace: trace, without_ids], ids=["ids", "drawn"])
def test_who_has_no_sibling_at_its_worker_drafts_nothing(known, method):
    trace = known(random_groups(2, epochs=2, prompts=2))
    spread, together = ({"gpu": "h100", "gpus": gpus, "tp": 1} for gpus in (8, 1))
    assert (
        sum(drafted for drafted, _, _ in drafts(simulated(trace, method, cluster=spread)).values())
        == 0
    )
    assert (
        sum(
            drafted for drafted, _, _ in drafts(simulated(trace, method, cluster=together)).values()
        )
        > 0
    )


def test_half_a_group_drafts_less_than_all_of_it():
    trace = without_ids(random_groups(3, prompts=1, group=16))
    one, two, four = (
        sum(
            drafted
            for drafted, _, _ in drafts(simulated(trace, "siblings", cluster=cluster)).values()
        )
        for cluster in ({"gpu": "h100", "gpus": gpus, "tp": 1} for gpus in (1, 2, 4))
    )
    assert one > two > four > 0


def method_of(asked):
    return {"name": asked.system.name, **asked.system.parameters}
