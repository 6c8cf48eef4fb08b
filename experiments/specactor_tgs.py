"""SpecActor's TGS against the rate of decoupled drafting, and where its plans differ: specactor_tgs.md.

    python experiments/specactor_tgs.py

Executed means: by the two loops of tests/references/decoupled.py, the rule that the engine is held against. Seconds of the
target are those of the shipped profiles, of the drafters the estimates of simrl.speculation.draft_times. Two minutes or so.
"""

import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.shared import Small, shrink
from simrl.files import write_whole_file
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile, read_profile
from simrl.show.style import BLACK, FAINT, INDIGO, MINT, ROSE, STRAW, VIOLET, WINE
from simrl.speculation.draft_times import LAYER_S, Overheads, model_drafts
from simrl.speculation.specactor import (
    Affine,
    Objective,
    coupled_tgs,
    decoupled_tgs,
    fit_draft,
    fit_verify,
    plan_decoupled,
    renewal_rate,
)

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tests.references.decoupled import DecoupledWorker, Request  # noqa: E402

TARGET, DRAFTERS = "qwen3-32b", ("qwen2.5-0.5b", "qwen3-0.6b")
VERIFIERS = (2, 4)  # GPUs; on one, the target leaves 7 GB to the KV cache
GPUS = 256
PHASES = {
    "start": 8192,
    "late": 256,
}  # requests that are still running, on all GPUs (SpecActor's GRPO-32B-20K at first)
KV_TOKENS = 4096
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
MOST_WINDOW = 12
TOKENS = 30_000  # executed for one number
SLOWER = (1, 2, 4, 8)  # times the time of a drafter's layer
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
COLOURS = (INDIGO, STRAW, MINT, ROSE, WINE, VIOLET)

Seconds = Callable[[int], float]
Choice = tuple[int, int, int]  # drafter GPUs, verifier GPUs, window
Row = dict[str, Any]
Tables = dict[tuple[str, str], list[Row]]  # by drafter and phase


def executed(
    p: float,
    window: int,
    requests: int,
    draft_s: Seconds,
    verify_s: Seconds,
    tokens: int = 0,
    seed: int = 0,
) -> float:
    """Return the tokens/s of a request in a batch of constant size executed by two loops, without the first twenty windows.

    `verify_s` gives the seconds for a number of requests with a window each; about `tokens` (0: `TOKENS`) are generated.
    """
    batch = [
        Request(key=1_000_003 * i + seed, response=10**9, window=window) for i in range(requests)
    ]
    worker = DecoupledWorker(
        batch, np.cumsum(np.full(window, -math.log(p))), draft_s, lambda n, *_: verify_s(n)
    )
    window_s = window * draft_s(requests) + verify_s(requests)
    start_s = 20 * window_s
    rate = renewal_rate(p, window, draft_s(requests), verify_s(requests))
    # two windows at least, so that each request gains a token
    end_s = start_s + max((tokens or TOKENS) / requests / rate, 2 * window_s)
    worker.run(start_s)
    before = sum(request.generated for request in batch)
    worker.run(end_s)
    return (sum(request.generated for request in batch) - before) / requests / (end_s - start_s)


class Pair(NamedTuple):
    """A target and a drafter: the seconds that are executed, and the affine fits that the planner sees."""

    drafter: str
    profiles: dict[int, TableProfile]  # of the target, by GPUs
    one_drafter_s: Callable[[float], float]
    draft: Affine
    fits: dict[int, list[Affine]]

    def draft_s(self, draft_gpus: int, requests: int) -> float:
        return self.one_drafter_s(max(requests / draft_gpus, 1))

    def verify_s(self, verify_gpus: int, window: int, requests: int) -> float:
        return self.profiles[verify_gpus].verify_s(requests, window - 1, KV_TOKENS)

    def executed(
        self, p: float, choice: Choice, running: int, tokens: int = 0, seed: int = 0
    ) -> float:
        draft_gpus, verify_gpus, window = choice
        draft_s, verify_s = (
            partial(self.draft_s, draft_gpus),
            partial(self.verify_s, verify_gpus, window),
        )
        return executed(p, window, batch(choice, running), draft_s, verify_s, tokens, seed)

    def coupled(self, p: float, running: int) -> float:
        """Return the best rate of coupled drafting for these requests on these GPUs, the drafter on one GPU of its worker."""
        return max(
            coupled_tgs(p, w, self.draft_s(1, b), self.verify_s(g, w + 1, b))
            for g, b in ((g, math.ceil(g * running / GPUS)) for g in VERIFIERS)
            for w in range(1, MOST_WINDOW + 1)
        )

    def planned(self, running: int, p: float, objective: Objective = "tgs") -> tuple[Any, Choice]:
        plan = plan_decoupled(self.draft, self.fits, GPUS, running, p, objective)
        return plan, (plan.draft_gpus, plan.verify_gpus, plan.window)

    def decoding(self, running: int) -> float:
        return max(1 / self.verify_s(g, 1, math.ceil(g * running / GPUS)) for g in VERIFIERS)


def make_pair(drafter: str, profiles: dict[int, TableProfile], slower: float = 1.0) -> Pair:
    """Return a pair of target and drafter; `slower` multiplies the time of the drafter's layers, apart from their bytes."""
    times = model_drafts(
        model_shape(drafter),
        gpu("h100"),
        kv_tokens=KV_TOKENS,
        overheads=Overheads(layer_s=slower * LAYER_S),
    )

    def one_drafter_s(requests: float) -> float:
        return times.draft_s(requests, 1)

    fits = {
        g: fit_verify(profile, MOST_WINDOW, BATCHES, KV_TOKENS) for g, profile in profiles.items()
    }
    return Pair(drafter, profiles, one_drafter_s, fit_draft(one_drafter_s, BATCHES), fits)


def batch(choice: Choice, running: int) -> int:
    return math.ceil((choice[0] + choice[1]) * running / GPUS)


def row(pair: Pair, running: int, p: float) -> Row:
    """Return the plans of both objectives and their rates, beside the best plan (searched in shorter runs)."""
    found: dict[Choice, float] = {}
    for g_v in VERIFIERS:
        for choice in product(range(1, g_v + 1), [g_v], range(1, MOST_WINDOW + 1)):
            b = batch(choice, running)
            rate = renewal_rate(
                p, choice[2], pair.draft_s(choice[0], b), pair.verify_s(g_v, choice[2], b)
            )
            if rate > 0.6 * max(found.values(), default=0.0):  # no batch makes up for less
                found[choice] = pair.executed(p, choice, running, TOKENS // 4)
    measured: dict[Choice, float] = {}

    def yields(choice: Choice) -> float:
        if choice not in measured:
            measured[choice] = pair.executed(p, choice, running, seed=1)
        return measured[choice]

    line: Row = {"p": p, "coupled": pair.coupled(p, running), "decoding": pair.decoding(running)}
    for choice in sorted(found, key=lambda choice: -found[choice])[:3]:
        yields(choice)
    for objective in OBJECTIVES:
        plan, choice = pair.planned(running, p, objective)
        line[objective] = {
            "choice": choice,
            "tgs": plan.tgs,
            "renewal": plan.renewal,
            "executed": yields(choice),
        }
    best = max(measured, key=lambda choice: measured[choice])
    return line | {"best": {"choice": best, "executed": measured[best]}}


def draw_formulas(path: Path) -> dict[str, float]:
    """Draw TGS and a batch beside the renewal rate; return the figures for the page."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_p, by_balance, by_batch = figure.subplots(1, 3)
    said: dict[str, float] = {}
    p_axis = np.linspace(0.5, 0.95, 46)
    excesses, deviations = [], []
    for w, colour in zip(range(3, 9), COLOURS, strict=True):
        excess = [decoupled_tgs(p, w, 1, w) / renewal_rate(p, w, 1, w) for p in p_axis.tolist()]
        excesses += excess
        by_p.plot(p_axis, excess, color=colour, label=f"w = {w}")
        dots = [0.5, 0.65, 0.8, 0.95]
        alone = [
            executed(p, w, 1, lambda _: 1.0, lambda _, w=w: float(w), 2 * TOKENS) for p in dots
        ]
        formula = [renewal_rate(p, w, 1, w) for p in dots]
        deviations += [abs(a / f - 1) for a, f in zip(alone, formula, strict=True)]
        by_p.plot(dots, np.divide(alone, formula), ".", color=colour)
    said |= {"least": min(excesses) - 1, "most": max(excesses) - 1, "alone": max(deviations)}
    titled(by_p, "V = w·D, a batch of one", "acceptance p", "over the renewal rate")
    by_p.text(0.52, 0.985, "dots: executed", fontsize=8, va="top")
    balances = np.geomspace(0.25, 4, 61)
    lowest = []
    for p, colour in zip((0.5, 0.7, 0.9, 0.95), (*COLOURS[::2], BLACK), strict=True):
        ratio = [
            decoupled_tgs(p, 5, 1, 5 * x) / renewal_rate(p, 5, 1, 5 * x) for x in balances.tolist()
        ]
        lowest.append(min(ratio))
        by_balance.plot(balances, ratio, color=colour, label=f"p = {p}")
    said["below"] = 1 - min(lowest)
    by_balance.set_xscale("log", base=2)
    titled(by_balance, "TGS, w = 5", "V / (w·D)", "over the renewal rate")
    sizes = [1, 2, 4, 8, 16, 32, 64]
    for balance, colour in zip((0.5, 1.0, 2.0), (INDIGO, MINT, WINE), strict=True):
        ratio = [
            executed(0.7, 4, n, lambda _: 1.0, lambda _, x=balance: 4 * x)
            / renewal_rate(0.7, 4, 1, 4 * balance)
            for n in sizes
        ]
        said[f"wait {balance:g}"] = max(1 - ratio[-1], 0.0)
        by_batch.plot(sizes, ratio, ".-", color=colour, label=f"V = {balance:g} w·D")
    by_batch.set_xscale("log", base=2)
    by_batch.set_xticks(sizes, [str(n) for n in sizes])
    titled(
        by_batch,
        "Executed, p = 0.7, w = 4, passes of equal time",
        "requests in the batch",
        "over the renewal rate",
    )
    save(figure, path)
    return said


def draw_windows(pair: Pair, path: Path) -> None:
    """Draw TGS, the renewal rate and the executed rate against the window, on the GPUs that the planner chooses by TGS."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [("start", 0.7), ("start", 0.9), ("late", 0.7), ("late", 0.9)]
    for axes, (phase, p) in zip(figure.subplots(1, 4), panels, strict=True):
        running = PHASES[phase]
        plan, (g_d, g_v, _) = pair.planned(running, p)
        b = plan.requests
        windows = range(1, MOST_WINDOW + 1)
        seconds = [(pair.draft_s(g_d, b), pair.verify_s(g_v, w, b)) for w in windows]
        for rate, name, colour in ((decoupled_tgs, "TGS", ROSE), (renewal_rate, "renewal", INDIGO)):
            values = [rate(p, w, *s) for w, s in zip(windows, seconds, strict=True)]
            axes.plot(windows, values, color=colour, label=name)
            axes.plot(np.argmax(values) + 1, max(values), "o", color=colour)
        values = [pair.executed(p, (g_d, g_v, w), running) for w in windows]
        axes.plot(windows, values, ".--", color=BLACK, label="executed")
        axes.plot(np.argmax(values) + 1, max(values), "o", color=BLACK)
        axes.axhline(pair.decoding(running), color=FAINT, linewidth=1, label="plain decoding")
        axes.set_ylim(bottom=0)
        titled(
            axes,
            f"{phase}, p = {p}: {g_d} + {g_v} GPUs, b = {b}",
            "window",
            "tokens/s of a request",
        )
    save(figure, path)


def titled(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, frameon=False)
    if x == "window":
        axes.set_xticks(range(2, MOST_WINDOW + 1, 2))
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    with write_whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, metadata={"Software": None})


def fit_errors(pair: Pair) -> tuple[float, float]:
    """Return the largest relative errors of the affine draft and verification times, within 16,384 tokens a pass."""
    draft = max(abs(pair.draft(b) / pair.one_drafter_s(b) - 1) for b in BATCHES)
    verify = max(
        abs(fits[w - 1](b) / pair.verify_s(g, w, b) - 1)
        for g, fits in pair.fits.items()
        for w in range(1, MOST_WINDOW + 1)
        for b in BATCHES
        if b * w <= 16384
    )
    return draft, verify


def slower_drafters(profiles: dict[int, TableProfile]) -> list[Row]:
    """Return the rows of the first drafter at the start, p = 0.8, with slower layers."""
    rows = []
    for slower in SLOWER:
        pair, running = make_pair(DRAFTERS[0], profiles, slower), PHASES["start"]
        _, choice = pair.planned(running, 0.8, "renewal")
        rates = {
            "executed": pair.executed(0.8, choice, running),
            "coupled": pair.coupled(0.8, running),
        }
        rows.append(
            {
                "layer_s": slower * LAYER_S,
                "token_s": pair.one_drafter_s(1),
                "choice": choice,
                **rates,
            }
        )
    return rows


def page(
    said: dict[str, float], tables: Tables, pairs: list[Pair], slower: list[Row]
) -> Iterator[str]:
    draft_error, verify_error = np.max([fit_errors(pair) for pair in pairs], axis=0)
    yield filled(f"""# SpecActor's TGS, and what decoupled drafting yields

Made by `python experiments/specactor_tgs.py`; all numbers are computed. SpecActor (arXiv
2511.16193, §4.1) plans decoupled drafting by TGS = τ_w / IL. It averages tokens over an interval IL = max(w·D, V_w) in
all cases, and halves the tokens of a miss for its time. Two concurrent loops of drafting and verification have the renewal
rate: the tokens of an attempt over its time, which is IL after a fully accepted window and w·D + V_w after a miss.
*Executed* rates are of the two loops of tests/references/decoupled.py, event by event, in a batch of constant size.

## The formulas

![Over the renewal rate: TGS by acceptance and by drafting over verifying; executed batches by size](specactor_tgs_formulas.png)

Left: where drafting a window takes as long as verifying it, TGS is {said["least"]:.0%} to {said["most"]:.0%} above the
renewal rate for p = 0.5-0.95 and w = 3-8. What one request alone gets when it is executed (dots) is within
{said["alone"]:.1%}
of that rate, which is the luck of {2 * TOKENS:,} tokens.

Middle: where one of the two takes longer, TGS falls below, by up to {said["below"]:.0%}. A miss then costs
little more than IL,
and half its tokens are too few. So TGS is a bound on neither side, and it favours plans that balance.

Right: in a batch whose passes take equal time for any number of requests, 64 requests of p = 0.7 and w = 4 lose
{said["wait 0.5"]:.0%} where verification takes half of w·D, {said["wait 1"]:.0%} where it takes as long,
and {said["wait 2"]:.0%} where it takes twice as long. After a miss, the next window is drafted in w·D; if V >
w·D, the verifier is then at work on the windows of those
who did not miss, and the missed wait until it is free: their miss costs 2·V, not w·D + V. Where a pass over fewer requests is
shorter, there is a gain as well: no pass holds all requests, and the formulas charge D(b) and V(b) for all of them.

## Plans for a real pair

{TARGET} verifies on {" or ".join(map(str, VERIFIERS))} H100 (profiles/README.md: sums of measured kernels),
{KV_TOKENS:,}
tokens of context a request. Two drafters: {DRAFTERS[0]}, which is SpecActor's (here for its times), and
{DRAFTERS[1]}, on one GPU each; their times are estimates from data sheets and {LAYER_S * 1e6:.0f} µs a layer
(simrl.speculation.draft_times). {GPUS} GPUs
and, as in SpecActor's GRPO-32B-20K, {PHASES["start"]:,} requests at the start; {PHASES["late"]} late in the rollout.
Everything uses all GPUs, so tokens/s of a request compare. The planner sees affine times, as the paper's; they are off by up to
{verify_error:.0%} (verification) and {draft_error:.0%} (drafting). What is executed takes the
profile's. Acceptance is equal for all requests and positions.

In the tables, a plan is drafter + verifier GPUs and the window. *Best* is the best executed of all such plans with windows to
{MOST_WINDOW}; *coupled* the best that takes turns, the drafter on a GPU of its worker, by its formula, which
is exact; no KV
memory is charged for anything. All in tokens/s of a request; what is executed is good to a percent or two.

![Tokens a second of a request against the window: TGS, renewal rate, executed, plain decoding](specactor_tgs_windows.png)

The picture: {DRAFTERS[0]}, on the GPUs chosen by TGS; a circle is a line's best window.
""")
    for (drafter, phase), rows in tables.items():
        yield f"### {drafter}, {phase}: {PHASES[phase]:,} requests\n"
        heads = "p | plan by TGS | TGS | renewal | executed | plan by renewal | renewal | executed | best executed"
        yield f"| {heads} | coupled | plain decoding |"
        yield "|---" * 11 + "|"
        for r in rows:
            t, n = r["tgs"], r["renewal"]
            renewal_plan = "same" if n["choice"] == t["choice"] else words(n["choice"])
            yield (
                f"| {r['p']:g} | {words(t['choice'])} | {t['tgs']:.1f} | {t['renewal']:.1f} | {t['executed']:.1f} "
                f"| {renewal_plan} | {n['renewal']:.1f} | {n['executed']:.1f} | {r['best']['executed']:.1f}: "
                f"{words(r['best']['choice'])} | {r['coupled']:.1f} | {r['decoding']:.1f} |"
            )
        yield "\n" + filled(reading(rows))
    yield from slower_words(slower)
    yield from conclusion(tables)


def filled(text: str) -> str:
    """Return a text with each paragraph wrapped at 120 characters."""
    parts = (
        textwrap.fill(" ".join(part.split()), 120, break_long_words=False)
        for part in text.split("\n\n")
    )
    return "\n\n".join(parts).strip() + "\n"


def words(choice: Choice) -> str:
    return f"{choice[0]} + {choice[1]}, w {choice[2]}"


def reading(rows: list[Row]) -> str:
    other = [r for r in rows if r["tgs"]["choice"] != r["renewal"]["choice"]]
    if other:
        changes = [
            f"{r['p']:g} ({r['renewal']['executed'] / r['tgs']['executed'] - 1:+.0%})"
            for r in other
        ]
        changes = [change.replace("(-0%)", "(0%)").replace("(+0%)", "(0%)") for change in changes]
        first = (
            f"The two choose differently at p = {', '.join(changes)}; in brackets, what choosing by the renewal rate "
            "changes when executed."
        )
    else:
        first = "The two agree everywhere."
    gaps = [r["tgs"]["tgs"] / r["tgs"]["executed"] - 1 for r in rows]
    pays = [r["p"] for r in rows if r["best"]["executed"] > r["decoding"]]
    beats = [r["p"] for r in rows if r["best"]["executed"] > r["coupled"]]
    return (
        f"{first} TGS is {min(gaps):+.0%} to {max(gaps):+.0%} off what its plan yields. The best decoupled drafting beats "
        f"plain decoding {at(pays)}, and coupled drafting {at(beats)}."
    )


def at(ps: list[float]) -> str:
    return f"at p = {', '.join(f'{p:g}' for p in ps)}" if ps else "nowhere"


def slower_words(rows: list[Row]) -> Iterator[str]:
    yield filled(f"""### What a drafter's time decides

Decoupling hides drafting, at the price of GPUs that do not verify: the less drafting takes, the less there is to hide.
{DRAFTERS[0]}, {PHASES["start"]:,} requests, p = 0.8, with layers that take longer (the first line is an
estimate for CUDA
graphs, with no host time beside them). SpecActor reports that decoupling made its whole rollout 1.3× faster (§5.4).
""")
    yield "| a layer | a token, one request | plan by renewal | executed | coupled | decoupled over coupled |"
    yield "|---" * 6 + "|"
    for r in rows:
        yield (
            f"| {r['layer_s'] * 1e6:.0f} µs | {r['token_s'] * 1e3:.1f} ms | {words(r['choice'])} | {r['executed']:.1f} "
            f"| {r['coupled']:.1f} | {r['executed'] / r['coupled']:.2f}× |"
        )
    yield ""


def conclusion(tables: Tables) -> Iterator[str]:
    rows = [r for rows in tables.values() for r in rows]
    different = [r for r in rows if r["tgs"]["choice"] != r["renewal"]["choice"]]
    better = sum(r["renewal"]["executed"] > r["tgs"]["executed"] for r in different)
    lost = {o: [1 - r[o]["executed"] / r["best"]["executed"] for r in rows] for o in OBJECTIVES}
    yield filled(f"""## In sum

In {len(different)} of {len(rows)} cases the two objectives choose differently; the renewal rate's plan is the
faster one, executed, in {better} of them. Against the best plan there is, TGS loses
{np.mean(lost["tgs"]):.0%} on average
and {max(lost["tgs"]):.0%} at most, the renewal rate {np.mean(lost["renewal"]):.0%} and {max(lost["renewal"]):.0%}. What
is left is the affine fit and the batch: neither formula knows that passes hold fewer than b requests, nor that the
missed wait. simrl plans by
TGS, as published, by default, and executes the loops. `python experiments/decoupled_bound.py` prints what the
loops can gain over drafting in turns at most, and which time of the host would make it the published 1.3 (docs/speculation.md).
""")


def main(small: Small = False) -> None:
    shrink(globals(), small, TOKENS=100, ACCEPTANCES=(0.5, 0.9), MOST_WINDOW=4)
    profiles = {
        g: read_profile(HERE.parent / "profiles" / f"{TARGET}_h100_tp{g}.parquet")
        for g in VERIFIERS
    }
    pairs = [make_pair(drafter, profiles) for drafter in DRAFTERS]
    said = draw_formulas(HERE / "specactor_tgs_formulas.png")
    draw_windows(pairs[0], HERE / "specactor_tgs_windows.png")
    slower = slower_drafters(profiles)
    tables = {
        (pair.drafter, phase): [row(pair, running, p) for p in ACCEPTANCES]
        for pair in pairs
        for phase, running in PHASES.items()
    }
    text = "\n".join(page(said, tables, pairs, slower))
    with write_whole_file(HERE / "specactor_tgs.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"Written: {HERE / 'specactor_tgs.md'} and two pictures beside it")


if __name__ == "__main__":
    typer.run(main)
