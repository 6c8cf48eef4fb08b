"""simrl's drafters in a real vLLM: token for token what vLLM generates without, pass by pass what the simulated engine does."""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simrl.engine.engine import one_engine
from simrl.engine.state import Limits
from simrl.errors import InputError
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.choices import Elastic, HistoryRule
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    MODEL,
    OPEN,
    RUNS,
    Decoding,
    Rule,
    chains,
    packed,
)
from simrl.speculation.draft_times import text_drafts
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.gates import RATES
from simrl.speculation.history_index import PAPER, PUBLIC_CODE
from simrl.speculation.ngram import ngram_runs
from simrl.speculation.trace_runs import history_runs
from simrl.speculation.windows import Aimd, Fixed, Mimd, Window
from simrl.trace.trace import Trace
from simrl_replay.proposer import DraftCounts, DrafterSetup, Forced, Proposer
from simrl_replay.rank import Rank, expanded
from tests.helpers import one_second_a_pass
from tests.token_traces import trace_of

# Read when torch is loaded. More threads than cores that are free wait for one another in every operation.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.vllm

SEQUENCES, BATCHED_TOKENS, BLOCK, BLOCKS = 8, 64, 32, 400
PROMPTS, GROUP, PROMPT_TOKENS = 6, 4, 12
MOST_TOKENS = 32


@dataclass(frozen=True)
class Ask:
    """A request: its name, prompt and tokens so far, how many more it gets."""

    name: str
    prompt_id: int
    prompt_ids: tuple[int, ...]
    tokens: int
    had: tuple[int, ...] = ()
    recorded: tuple[int, ...] = ()


@dataclass
class Ran:
    """What came of requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    counts: dict[str, DraftCounts] = field(default_factory=dict)
    vllm: dict[str, tuple[list[int], list[int]]] = field(
        default_factory=dict
    )  # drafted and accepted, verification by verification
    steps: int = 0


class Live:
    """A vLLM with the drafter, driven as the replayer drives it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        import torch

        from simrl_replay.vllm_adapter import EngineSettings, VllmEngine

        torch.set_num_threads(1)  # another test may have loaded it
        speculative = {
            "method": "custom_class",
            "model": "simrl_replay.rank.NoDrafts",
            "num_speculative_tokens": MOST_TOKENS,
        }
        self.engine = VllmEngine(
            EngineSettings(
                model=str(folder),
                **{
                    "max_num_seqs": SEQUENCES,
                    "max_num_batched_tokens": BATCHED_TOKENS,
                    "block_size": BLOCK,
                    "max_model_len": 512,
                    "kv_blocks": BLOCKS,
                    "dtype": "float32",
                    "speculative": speculative,
                }
                | settings,
            )
        )
        self.scheduler = self.engine._scheduler
        self.verified: dict[
            str, list[tuple[int, int]]
        ] = {}  # drafted and accepted, by request, as vLLM counts them
        count = self.scheduler.make_spec_decoding_stats

        def counted(*arguments: Any, **named: Any) -> Any:
            drafted, accepted = named["num_draft_tokens"], named["num_accepted_tokens"]
            self.verified.setdefault(named["request_id"].rpartition("-")[0], []).append(
                (drafted, accepted)
            )
            return count(*arguments, **named)

        self.scheduler.make_spec_decoding_stats = counted

    @property
    def proposer(self) -> Proposer:
        proposer = self.engine.drafter
        assert isinstance(proposer, Proposer)
        return proposer

    def run(
        self, asks: Sequence[Ask], temperature: float = 0.0, abort_at: dict[str, int] | None = None
    ) -> Ran:
        """All at once, to the end; an aborted one to the end of so many steps."""
        ran, left = Ran(), set()
        self.verified.clear()
        self.engine.settings = replace(self.engine.settings, temperature=temperature)
        for ask in asks:
            self.proposer.begins(
                ask.name, ask.prompt_id, (), ask.had, Forced(ask.recorded, ask.prompt_id)
            )
            self.engine.add(ask.name, ask.prompt_ids + ask.had, ask.tokens)
            ran.tokens[ask.name] = []
            left.add(ask.name)
        while left:
            for progress in self.engine.step():
                name = progress.request_id
                ran.tokens[name] += progress.token_ids
                if progress.finished:
                    left.remove(name)
                    ran.counts[name] = self.proposer.ends(name)
            ran.steps += 1
            for name in [name for name in left if (abort_at or {}).get(name) == ran.steps]:
                self.engine.abort(name)
                left.remove(name)
                ran.counts[name] = self.proposer.ends(name)
        for ask in asks:
            verified = self.verified.get(ask.name, [])
            ran.vllm[ask.name] = (
                [drafted for drafted, _ in verified],
                [accepted for _, accepted in verified],
            )
        return ran


@dataclass
class Recorded:
    """Two epochs: sampled under the first weights, greedy under the next; and the engine that has these."""

    live: Live
    history: dict[int, list[list[int]]]
    asks: list[Ask]
    greedy: Ran
    trace: Trace

    def learn(self) -> None:
        for prompt_id, responses in self.history.items():
            self.live.proposer.learn(prompt_id, 0, responses)
        self.live.proposer.wait_learnt()

    def row(self, name: str) -> int:
        return PROMPTS * GROUP + int(name[1:])


def asks_of(seed: int, letter: str) -> list[Ask]:
    """Prompts of a group differ in one token: greedy responses would be the same."""
    draws = np.random.default_rng(seed)
    asks = []
    for prompt_id in range(PROMPTS):
        prompt = draws.integers(0, 512, PROMPT_TOKENS)
        for sample in range(GROUP):
            ids = (*prompt.tolist(), sample)
            asks.append(Ask(f"{letter}{len(asks)}", prompt_id, ids, int(draws.integers(40, 160))))
    return asks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    from simrl_replay.random_model import make_model, nudge

    folder = tmp_path_factory.mktemp("models")
    first, second = make_model(folder / "0"), nudge(folder / "0", folder / "1")
    live = Live(first)
    live.proposer.configure(DrafterSetup())
    sampled = live.run(asks_of(0, "a"), temperature=1.0)
    live.engine.load_weights(str(second))
    asks = [replace(ask, name=f"b{i}", tokens=40 + 4 * i) for i, ask in enumerate(asks_of(0, "b"))]
    greedy = live.run(asks)
    history = {
        p: [sampled.tokens[f"a{p * GROUP + s}"] for s in range(GROUP)] for p in range(PROMPTS)
    }
    yield Recorded(live, history, asks, greedy, two_epochs(history, greedy.tokens))


def two_epochs(
    history: dict[int, list[list[int]]], tokens: dict[str, list[int]], letter: str = "b"
) -> Trace:
    second = {p: [tokens[f"{letter}{p * GROUP + s}"] for s in range(GROUP)] for p in range(PROMPTS)}
    return trace_of(
        {(0, p): ids for p, ids in history.items()} | {(1, p): ids for p, ids in second.items()}
    )


def simulated(
    decoding: Decoding,
    asks: Sequence[Ask],
    runs: AcceptRuns | None,
    rows: Sequence[int],
    abort_at: dict[str, int] | None = None,
) -> dict[str, DraftCounts]:
    """The same requests at a simulated engine."""
    engine = one_engine(
        one_second_a_pass(), Limits(SEQUENCES, BATCHED_TOKENS, BLOCK, BLOCKS), decoding
    )
    slots, counts = {}, {}
    for ask, row in zip(asks, rows, strict=True):
        slot = slots[ask.name] = engine.submit(
            len(ask.prompt_ids), len(ask.had) + ask.tokens, len(ask.had)
        )
        if runs is None:
            engine.draft_from(slot, MODEL, ask.prompt_id)
        elif runs.first[row] >= 0:
            engine.draft_from(slot, RUNS, int(runs.first[row]))
    while engine.busy:
        ended = {stop[0] for stop in engine.settle(engine.now_s)}  # one pass
        passes = engine.totals["passes"]
        for name, slot in slots.items():
            aborted = (abort_at or {}).get(name) == passes
            if name not in counts and (aborted or slot in ended):
                counts[name] = DraftCounts(*engine.drafted(slot)[:4])
                if aborted and slot not in ended:
                    engine.abort(slot)
    return counts


def text_decoding(
    runs: AcceptRuns, window: Window, gate: tuple[int, ...] | Elastic | None = None
) -> Decoding:
    if isinstance(gate, Elastic):
        rule = Rule(ELASTIC, window.rule, gate.threshold, gate.patience)
    else:
        rule = Rule(OPEN if gate is None else BATCH, window.rule)
    decoding = chains(rule, text_drafts())._replace(runs=packed(runs))
    return decoding if not isinstance(gate, tuple) else decoding._replace(gate_batch=np.array(gate))


METHODS: dict[str, tuple[Window, HistoryRule]] = {
    "histospec": (Aimd(), PAPER),
    "histospec_code": (Mimd(), PUBLIC_CODE),
    "more than fits a pass": (Fixed(tokens=16), PAPER),
}
FALLING = tuple(
    2 + rate // 8 for rate in range(RATES)
)  # speculates in small batches, in larger ones where much is accepted


@pytest.mark.parametrize(
    ("method", "gate"),
    [
        ("histospec", None),
        ("histospec_code", None),
        ("more than fits a pass", None),
        ("histospec", FALLING),
        ("histospec_code", Elastic(threshold=6, patience=5)),
    ],
    ids=["paper", "public code", "cut drafts", "batch gate", "elastic gate"],
)
def test_live_drafts_from_history_are_those_of_the_simulated_engine(
    recorded: Recorded, method: str, gate: tuple[int, ...] | Elastic | None
) -> None:
    window, rule = METHODS[method]
    recorded.live.proposer.configure(DrafterSetup("history", window, gate, rule))
    recorded.learn()
    live = recorded.live.run(recorded.asks)
    assert live.tokens == recorded.greedy.tokens
    assert live.steps < recorded.greedy.steps
    runs = history_runs(recorded.trace, rule)
    rows = [recorded.row(ask.name) for ask in recorded.asks]
    assert live.counts == simulated(text_decoding(runs, window, gate), recorded.asks, runs, rows)
    total = DraftCounts(*np.sum(list(live.counts.values()), axis=0).tolist())
    assert total.verifications > 20 and 0.1 * total.drafted < total.accepted < 0.95 * total.drafted
    told_by_vllm(live, recorded.asks)


def told_by_vllm(live: Ran, asks: Sequence[Ask]) -> None:
    """vLLM counted the same, but for what it accepts beyond the end of a response."""
    for ask in asks:
        counts, (drafted, accepted) = live.counts[ask.name], live.vllm[ask.name]
        assert (counts.drafted, counts.verifications) == (sum(drafted), len(drafted)), ask.name
        beyond = sum(accepted) - counts.accepted
        assert 0 <= beyond <= (accepted[-1] if accepted else 0), ask.name


def test_a_draft_is_cut_to_what_fits_the_pass_and_counted_as_cut(recorded: Recorded) -> None:
    live = recorded.live
    live.proposer.configure(DrafterSetup("fixed", Fixed(tokens=32)))
    ran = live.run(recorded.asks[:8])
    told_by_vllm(ran, recorded.asks[:8])
    assert ran.tokens == {ask.name: recorded.greedy.tokens[ask.name] for ask in recorded.asks[:8]}
    lengths = {length for drafted, _ in ran.vllm.values() for length in drafted}
    assert (
        32 in lengths and min(lengths) < 32
    )  # of 64 tokens a pass, the second draft gets what the first leaves


def test_live_n_grams_are_those_of_the_simulated_engine(recorded: Recorded) -> None:
    recorded.live.proposer.configure(DrafterSetup("ngram", Fixed(tokens=6)))
    live = recorded.live.run(recorded.asks)
    assert live.tokens == recorded.greedy.tokens
    runs = ngram_runs(recorded.trace)
    rows = [recorded.row(ask.name) for ask in recorded.asks]
    assert live.counts == simulated(text_decoding(runs, Fixed(tokens=6)), recorded.asks, runs, rows)
    assert sum(counts.accepted for counts in live.counts.values()) > 50


def test_an_oracle_accepts_what_the_simulated_engine_draws_for_a_model_drafter(
    recorded: Recorded,
) -> None:
    acceptance = ModelAcceptance(by_position=(0.8, 0.6, 0.5))
    window = Fixed(tokens=4)
    recorded.live.proposer.configure(DrafterSetup("oracle", window, acceptance=acceptance))
    asks = [replace(ask, recorded=tuple(recorded.greedy.tokens[ask.name])) for ask in recorded.asks]
    live = recorded.live.run(asks)
    assert live.tokens == recorded.greedy.tokens
    decoding = chains(Rule(OPEN, window.rule), text_drafts(), acceptance)
    assert live.counts == simulated(decoding, asks, None, range(len(asks)))
    total = DraftCounts(*np.sum(list(live.counts.values()), axis=0).tolist())
    expected = np.cumprod([0.8, 0.6, 0.5, 0.5]).sum() / 4  # of the drafted tokens
    assert total.accepted / total.drafted == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("gate", [None, (SEQUENCES - 1,) * RATES], ids=["open", "batch gate"])
def test_a_response_that_is_aborted_goes_on_elsewhere_and_both_stays_count_as_simulated(
    recorded: Recorded, gate: tuple[int, ...] | None
) -> None:
    """With a gate, an abort changes whether the very next pass speculates: vLLM has drafted for it by then."""
    window, names = Aimd(), [ask.name for ask in recorded.asks]
    abort_at = {name: 14 + 5 * i for i, name in enumerate(names[::2])}
    recorded.live.proposer.configure(DrafterSetup("history", window, gate))
    recorded.learn()
    runs = history_runs(recorded.trace)
    rows = [recorded.row(name) for name in names]
    first = recorded.live.run(recorded.asks, abort_at=abort_at)
    decoding = text_decoding(runs, window, gate)
    assert first.counts == simulated(decoding, recorded.asks, runs, rows, abort_at)
    rest = [
        replace(
            ask, had=tuple(first.tokens[ask.name]), tokens=ask.tokens - len(first.tokens[ask.name])
        )
        for ask in recorded.asks[::2]
        if len(first.tokens[ask.name]) < ask.tokens
    ]
    assert len(rest) > 8 and any(ask.had for ask in rest)
    recorded.live.proposer.configure(
        DrafterSetup("history", window, gate)
    )  # another engine remembers nothing
    recorded.learn()
    second = recorded.live.run(rest)
    for ask in rest:
        assert first.tokens[ask.name] + second.tokens[ask.name] == recorded.greedy.tokens[ask.name]
    assert second.counts == simulated(
        decoding, rest, runs, [recorded.row(ask.name) for ask in rest]
    )


def test_an_engine_that_slept_goes_on_as_before(recorded: Recorded) -> None:
    engine, asks = recorded.live.engine, recorded.asks[:2]
    recorded.live.proposer.configure(DrafterSetup())
    before = recorded.live.run(asks).tokens
    for level in (1, 2):
        engine.sleep(level)
        engine.wake()
        assert recorded.live.run(asks).tokens == before


def test_the_kernels_of_a_gpu_are_warmed_up_without_torchvision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from simrl_replay.vllm_adapter import leave_out_torchvision

    name = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
    monkeypatch.setitem(sys.modules, name, sys)  # restored after the test
    leave_out_torchvision()
    assert importlib.import_module(name).minimax_m3_msa_warmup(None) is None


@pytest.mark.parametrize("graphs", ["decode", "full"])
def test_cuda_graphs_without_the_compiler_are_whole_passes(graphs: Any) -> None:
    from vllm.config import CompilationConfig, CompilationMode

    from simrl_replay.vllm_adapter import EngineSettings, gpu_arguments

    settings = EngineSettings("model", 8, 64, 32, 512, device="cuda", graphs=graphs)
    config = CompilationConfig(**gpu_arguments(settings)["compilation_config"])
    assert (
        config.mode == CompilationMode.NONE and not config.cudagraph_mode.has_piecewise_cudagraphs()
    )
    assert config.cudagraph_mode.decode_mode().name == "FULL"
    assert config.cudagraph_mode.mixed_mode().name == {"decode": "NONE", "full": "FULL"}[graphs]
    assert "compilation_config" not in gpu_arguments(replace(settings, graphs="compiled"))


def test_a_request_it_was_not_told_of_drafts_nothing(recorded: Recorded) -> None:
    live, ask = recorded.live, recorded.asks[0]
    live.proposer.configure(DrafterSetup("fixed", Fixed(tokens=3)))
    told = live.run([ask])  # beside a warm-up
    live.engine.add("warm-up", (1, 2, 3), 20)
    steps = 0
    while live.engine.unfinished:
        live.engine.step()
        steps += 1
    assert steps == 20
    assert told.counts[ask.name].verifications > 0


def test_drafts_that_the_engine_was_not_started_for_are_refused(recorded: Recorded) -> None:
    proposer = recorded.live.proposer
    with pytest.raises(InputError, match="start it with 64"):
        proposer.configure(DrafterSetup("history", Fixed(tokens=64)))


@pytest.mark.parametrize("window", [Aimd(), Mimd()], ids=["histospec", "histospec_code"])
def test_the_acceptance_predicted_from_a_recorded_epoch_is_that_of_live_sampling(
    recorded: Recorded, window: Window
) -> None:
    live = recorded.live
    live.proposer.configure(DrafterSetup())
    asks = [replace(ask, tokens=300) for ask in recorded.asks]
    plain = live.run([replace(ask, name=f"c{i}") for i, ask in enumerate(asks)], temperature=1.0)
    live.proposer.configure(DrafterSetup("history", window))
    recorded.learn()
    drafted = live.run(asks, temperature=1.0)
    of_itself = two_epochs(recorded.history, drafted.tokens)
    runs = history_runs(of_itself)
    expected = simulated(
        text_decoding(runs, window), asks, runs, [recorded.row(ask.name) for ask in asks]
    )
    assert drafted.counts == expected  # given the tokens, exactly
    predicted = two_epochs(recorded.history, plain.tokens, "c")
    runs = history_runs(predicted)
    before = simulated(
        text_decoding(runs, window), asks, runs, [recorded.row(ask.name) for ask in asks]
    )
    rates = [
        sum(counts.accepted for counts in each.values())
        / sum(counts.drafted for counts in each.values())
        for each in (before, drafted.counts)
    ]
    assert rates[0] == pytest.approx(rates[1], abs=0.03)


def test_temperatures_reach_every_draft_token() -> None:
    import torch
    from vllm.v1.sample import rejection_sampler

    Rank().mend_cpu_sampling()  # as every rank of an engine does
    assert rejection_sampler.expand_batch_to_tokens is expanded
    ends = torch.tensor([2, 3, 3, 5], dtype=torch.int32)
    spread = expanded(torch.tensor([0.5, 0.0, 3.0, 2.0]), ends, 5, replace_from=0, replace_to=1)
    assert spread.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0]
