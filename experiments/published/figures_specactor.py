"""SpecActor's figures (arXiv 2511.16193), from its ledger's middle: idle workers, gains of drafting, and of each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import drawing
import numpy as np
from drawing import COLOURS, Bench, Draw, Drawn, share, single

from experiments.reproduce import specactor
from experiments.reproduce.lab import Measures
from experiments.reproduce.ledger import Inputs
from experiments.reproduce.score import Bound
from simrl.show.style import INK, LOOKS, SAND
from simrl.simulate.prepare import Prepared, prepare
from simrl.speculation.deployment import typical_context_tokens
from simrl.speculation.run_model import RunModel, draw_runs
from simrl.speculation.specactor import coupled_tgs, draft_ladder

System = dict[str, Any]
TRACES = {"grpo": "GRPO-32B-20K", "dapo": "DAPO-32B-20K"}
MOST_WINDOW = 12


def systems(inputs: Inputs) -> dict[str, System]:
    return {
        "verl": specactor.VERL,
        "RLHFuse": specactor.RLHFUSE,
        "verl, 2× GPUs": specactor.TWICE,
        "draft model": specactor.vanilla(inputs),
        "n-gram": specactor.ngrams(inputs),
        "SpecActor": specactor.specactor(inputs),
    }


def run(bench: Bench, inputs: Inputs, trace: str, system: System) -> Measures:
    return bench.lab.run(specactor.scenario(inputs, trace, system))


def idle(bench: Bench) -> Drawn:
    """Draw Fig. 2: a rollout of verl, and its step with overlap or more GPUs."""
    inputs = bench.inputs("specactor")
    result = bench.result(specactor.whole(inputs, "dapo", specactor.VERL))
    start_s, end_s = drawing.rollout_window(result, specactor.WARMUP_STEPS)
    figure, panels = drawing.picture(1, 2, 3.8, width_ratios=(3, 2))
    left, right = panels[0]
    drawing.lanes(left, result, start_s, end_s)
    (wasted,), (published,) = bench.both("spec-idle")
    left.set(
        xlabel="seconds of one rollout (paler: fewer requests left)", ylabel="workers of 4 GPUs"
    )
    left.set_title(f"verl waits {share(wasted)} of its workers' time", fontsize="medium", color=INK)
    drawing.kinds_legend(figure, ("rollout", "idle"))
    names = ("verl", "RLHFuse", "verl, 2× GPUs")
    runs = {
        name: bench.lab.run(specactor.whole(inputs, "dapo", systems(inputs)[name]))
        for name in names
    }
    stacked(right, names, [runs[name] for name in names])
    step_s = {name: found["step_s"] for name, found in runs.items()}
    twice, fused = bench.bound("spec-2x"), bench.bound("spec-rlhfuse")
    drawing.put_mark(right, 1, step_s["verl"] / fused.value)
    drawing.put_mark(right, 2, Bound(step_s["verl"] / twice.high, step_s["verl"] / twice.low))
    drawing.legend(right, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return Drawn(
        figure,
        "Fig. 2: idle GPUs, and what overlap or twice the GPUs give (DAPO)",
        f"Workers wait {share(wasted)} of a rollout for the slowest one (published: {share(published)}). "
        f"RLHFuse makes verl's step {step_s['verl'] / step_s['RLHFuse']:.2f} times as fast (published: {fused.value:.2f}), "
        f"twice the GPUs {step_s['verl'] / step_s['verl, 2× GPUs']:.2f} times (published: {twice.low:g} to {twice.high:g}).",
    )


def stacked(axes: Any, names: Sequence[str], runs: Sequence[Measures]) -> None:
    """Draw the seconds of a step: its rollout, its update, and all else."""
    rollout = np.array([found["rollout_s"] for found in runs])
    update = np.array([found["phase_s"]["train"] for found in runs])
    rest = np.array([found["step_s"] for found in runs]) - rollout - update
    below = np.zeros(len(runs))
    for label, values, colour in (
        ("rollout", rollout, LOOKS["rollout"].color),
        ("update", update, LOOKS["train"].color),
        ("log-probs, weights, switching", rest, LOOKS["log_prob"].color),
    ):
        axes.bar(range(len(runs)), values, 0.7, bottom=below, color=colour, label=label)
        below = below + values
    for i, total in enumerate(below):
        drawing.at_foot(axes, i, f"{total:.0f}")
    axes.set_xticks(range(len(runs)), [name.replace(", ", ",\n") for name in names])
    axes.set_ylabel("seconds a step")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)


class Drafts:
    """The seconds of drafting and of verifying in the worker of a scenario that drafts with a model."""

    def __init__(self, inputs: Inputs, drafter: str) -> None:
        system = {**specactor.vanilla(inputs), "model": drafter}
        self.prepared: Prepared = prepare(specactor.scenario(inputs, "dapo", system))
        assert self.prepared.drafts is not None and self.prepared.drafts.acceptance is not None
        self.times, self.acceptance = self.prepared.drafts.times, self.prepared.drafts.acceptance
        self.context = typical_context_tokens(self.prepared.trace)

    def verify_s(self, requests: int, tokens: int) -> float:
        """Return the seconds to verify `tokens` query tokens of each request."""
        return self.prepared.profile.verify_s(requests, tokens - 1, self.context)

    def speedup(self, acceptance: float, window: int, requests: int) -> float:
        """Return the speed-up over plain decoding, drafter and target in turns."""
        draft_s = self.times.draft_s(requests, window) / window
        rate = coupled_tgs(acceptance, window, draft_s, self.verify_s(requests, window + 1))
        return rate * self.verify_s(requests, 1)


def batch_sizes(bench: Bench) -> Drawn:
    """Draw Fig. 6b: the gain of drafting by the batch of a worker."""
    inputs = bench.inputs("specactor")
    drafts = Drafts(inputs, specactor.SMALL)
    p = inputs["accept_0p5b"]
    batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    figure, axes = drawing.panel(3.4)
    speed = {window: [drafts.speedup(p, window, b) for b in batches] for window in (2, 4, 6)}
    for (window, values), colour in zip(speed.items(), COLOURS, strict=False):
        axes.plot(
            batches, values, marker="o", color=colour, label=f"{window} drafted tokens a pass"
        )
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set(
        xscale="log",
        xlabel="requests at a worker",
        ylabel="speed-up over plain decoding",
        ylim=(0, None),
    )
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.minorticks_off()
    drawing.legend(axes, marks=False)
    most = dict(zip(batches, map(max, zip(*speed.values(), strict=True)), strict=True))
    return Drawn(
        figure,
        f"Fig. 6b: drafting by batch size (0.5B drafts for 32B, {p:.2f} of tokens accepted)",
        f"Drafting makes a single request {most[1]:.2f} times as fast, 128 of them {most[128]:.2f} times and 256 "
        f"{most[256]:.2f} times, with the best of the windows drawn. Published: at 256, no speed-up or a slow-down.",
    )


def methods(bench: Bench) -> Drawn:
    """Draw Fig. 7: speed-ups of single requests by drafter."""
    inputs = bench.inputs("specactor")
    count, window = 48, inputs["draft_tokens"]
    lengths = np.full(count, round(inputs["mean_tokens"]))
    found: dict[str, list[float]] = {}
    for place, drafter in enumerate((specactor.SMALL, specactor.LARGER)):
        drafts = Drafts(inputs, drafter)
        p = drafts.acceptance.by_position[0]
        keys = (
            np.arange(count) + place * count
        )  # the luck of a request with one drafter says nothing of another
        hardness = [
            drafts.acceptance.hardness(int(key), int(n))
            for key, n in zip(keys, lengths, strict=True)
        ]
        found[drafter] = [drafts.speedup(p**h, window, 1) for h in hardness]
    runs = prepare(specactor.scenario(inputs, "dapo", specactor.ngrams(inputs))).drafts
    assert runs is not None
    tokens = tokens_a_pass(runs.inputs.runs_of("ngram"), lengths, window)
    verify = drafts.verify_s(1, window + 1) + runs.times.draft_s(1, window)
    found["n-gram"] = [n * drafts.verify_s(1, 1) / verify for n in tokens]
    order = np.argsort(found[specactor.SMALL])[::-1]
    figure, axes = drawing.panel(3.4)
    for (name, values), colour in zip(found.items(), COLOURS, strict=False):
        look = {"marker": "o", "markersize": 4, "linestyle": "none", "color": colour, "label": name}
        axes.plot(range(1, count + 1), np.array(values)[order], **look)
    axes.axhline(1, color=INK, linewidth=0.8)
    x = "requests, the best served by the 0.5B drafter first"
    axes.set(xlabel=x, ylabel="speed-up alone at a worker", ylim=(0, None))
    drawing.legend(axes, marks=False)
    best = np.argmax(list(found.values()), axis=0)
    shares = [float(np.mean(best == i)) for i in range(3)]
    return Drawn(
        figure,
        "Fig. 7: which drafter suits which request (alone at a worker)",
        f"The 0.5B drafter is the fastest for {share(shares[0])} of the requests, the 1.5B for {share(shares[1])}, n-grams "
        f"for {share(shares[2])}. Published: for many the 0.5B, for some the 1.5B or n-grams; that requests differ is an "
        "assumed spread here, and n-grams are assumed to serve the longest hardly.",
    )


def tokens_a_pass(model: RunModel, lengths: np.ndarray, window: int) -> list[float]:
    """Return the tokens a pass of each response, at a fixed window."""
    runs = draw_runs(model, lengths, np.arange(len(lengths)))
    found = []
    for first, length in zip(runs.first, lengths, strict=True):
        at, passes = 1, 1
        while at < length:
            at += 1 + min(int(runs.accepted[first + at]), window)
            passes += 1
        found.append(float(length / passes))
    return found


def ladder(bench: Bench) -> Drawn:
    """Draw Fig. 10a: the draft ladder."""
    inputs = bench.inputs("specactor")
    models = {drafter: Drafts(inputs, drafter) for drafter in (specactor.SMALL, specactor.LARGER)}
    small = models[specactor.SMALL]
    ngrams = prepare(specactor.scenario(inputs, "dapo", specactor.ngrams(inputs))).drafts
    assert ngrams is not None
    verify: list[Callable[[int], float]] = [
        lambda b, q=q: small.verify_s(b, q) for q in range(1, MOST_WINDOW + 2)
    ]
    times = {name: d.times for name, d in models.items()} | {"n-gram": ngrams.times}
    at = inputs["b_max"]
    found = draft_ladder({name: t.draft_s for name, t in times.items()}, verify, at)
    known = {name: d.acceptance.by_position[0] for name, d in models.items()}
    figure, axes = drawing.panel(3.4)
    for name, colour in zip(found.drafters, COLOURS, strict=False):
        axes.plot(
            found.acceptances, found.speedups[found.drafters.index(name)], color=colour, label=name
        )
        if name in known:
            axes.plot(
                [known[name]],
                [found.speedup(name, known[name])],
                marker="o",
                color=colour,
                markeredgecolor=INK,
            )
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set(
        xlabel="acceptance of a drafted token (dots: assumed of 0.5B and 1.5B)", ylabel="speed-up"
    )
    axes.set(xlim=(0, 1), ylim=(0, 5))
    drawing.legend(axes, marks=False)
    gains = {name: found.speedup(name, p) for name, p in known.items()}
    needed = float(np.interp(gains[specactor.SMALL], found.speedups[1], found.acceptances))
    return Drawn(
        figure,
        f"Fig. 10a: the draft ladder, {at} requests at a worker",
        f"At the acceptance that is assumed of each, the 0.5B drafter makes decoding {gains[specactor.SMALL]:.2f} times as "
        f"fast and the 1.5B {gains[specactor.LARGER]:.2f} times: to draw level the larger one would have to accept "
        f"{needed:.2f} of its tokens instead of {known[specactor.LARGER]:.2f}, for its 12 heads divide among the worker's "
        "four GPUs, and the 14 of the 0.5B do not. Published: 0.5B is the sweet spot for 32B.",
    )


def step_times(bench: Bench) -> Drawn:
    """Draw Fig. 11: steps over SpecActor's."""
    inputs = bench.inputs("specactor")
    named = systems(inputs)
    over = {}
    for trace in TRACES:
        step_s = {
            name: run(bench, inputs, trace, system)["step_s"] for name, system in named.items()
        }
        over[trace] = {name: s / step_s["SpecActor"] for name, s in step_s.items()}
    best, others = bench.bound("spec-e2e-best"), bench.bound("spec-e2e-others")
    of_best = {"grpo": "draft model", "dapo": "verl, 2× GPUs"}
    names = [name for name in named if name != "SpecActor"]
    series = {TRACES[trace]: [over[trace][name] for name in names] for trace in TRACES}
    read = {
        TRACES[trace]: [best if of_best[trace] == name else others for name in names]
        for trace in TRACES
    }
    figure = drawing.bar_picture(
        names, series, read, y="step time over SpecActor's", height_in=3.6, level=True
    )
    fastest = {trace: min(names, key=lambda name: over[trace][name]) for trace in TRACES}
    return Drawn(
        figure,
        "Fig. 11: mean step times",
        "The best baseline takes "
        + ", ".join(
            f"{over[trace][fastest[trace]]:.2f} times SpecActor's step on {TRACES[trace]} ({fastest[trace]})"
            for trace in TRACES
        )
        + f" (published: {best.value:g} times; a draft model on GRPO, twice the GPUs on DAPO). Marks are the "
        "published ratios: that "
        f"of the best at its system, {others.low:g} to {others.high:g} at the others.",
    )


def breakdown(bench: Bench) -> Drawn:
    """Draw Fig. 12: the parts of a step."""
    inputs = bench.inputs("specactor")
    named = systems(inputs)
    figure, panels = drawing.picture(2, 1, 5.4)
    ratios, shares = {}, []
    for axes, (trace, title) in zip(panels.flat, TRACES.items(), strict=True):
        runs = {name: run(bench, inputs, trace, system) for name, system in named.items()}
        stacked(axes, list(runs), list(runs.values()))
        axes.set_title(title, loc="right", fontsize="medium", color=INK)
        own_s = runs["SpecActor"]["rollout_s"]
        ratios[trace] = [
            runs[name]["rollout_s"] / own_s
            for name in ("verl", "verl, 2× GPUs", "draft model", "n-gram")
        ]
        shares.append(runs["verl"]["rollout_s"] / runs["verl"]["step_s"])
    drawing.legend(panels[0, 0], marks=False)
    low, high = (
        np.array(end)
        for end in zip(*[sorted(pair) for pair in zip(*ratios.values(), strict=True)], strict=True)
    )
    rows = ("spec-rollout-verl", "spec-rollout-2x", "spec-rollout-vanilla")
    said = [f"{b.low:g} to {b.high:g}" for b in map(bench.bound, rows)]
    part = bench.bound("spec-rollout-share")
    return Drawn(
        figure,
        "Fig. 12: what a step consists of",
        f"Over SpecActor's rollout, verl's takes {low[0]:.2f} to {high[0]:.2f} times as long (published: {said[0]}), with "
        f"twice the GPUs {low[1]:.2f} to {high[1]:.2f} ({said[1]}), with a draft model or n-grams {min(low[2:]):.2f} to "
        f"{max(high[2:]):.2f} ({said[2]}). Rollout is {share(min(shares))} to {share(max(shares))} of verl's step (published: "
        f"{share(part.low)} to {share(part.high)}).",
    )


def ablation(bench: Bench) -> Drawn:
    """Draw Fig. 13: rollout times as parts are added, in a late step."""
    names = (
        "verl",
        "draft model",
        "in turns, on\nseparate GPUs",
        "+ decoupled",
        "+ reconfigured",
        "+ best-of-N",
    )
    both = bench.both(
        *(f"spec-abl-{part}" for part in ("vanilla", "disagg", "decoupled", "reconf", "bon"))
    )
    (simulated, marks), (gains, published) = (ablated(*of) for of in both), (of[2:] for of in both)
    figure = drawing.bar_picture(
        names, single(simulated), single(marks), y="rollout time over verl's"
    )
    return Drawn(
        figure,
        "Fig. 13: ablation (DAPO)",
        f"A draft model alone takes {simulated[1]:.3f} times as long as verl (published: {marks[1]:.3f}); decoupling "
        "then makes it "
        + ", reconfiguration ".join(
            f"{g:.2f} times as fast (published: {p:g})"
            for g, p in zip(gains[:2], published[:2], strict=True)
        )
        + f" and best-of-N {gains[2]:.2f} times ({published[2]:g}). What the paper compares decoupling with is not "
        "named: the marks take it to be the draft model. On separate GPUs, in turns, drafting takes "
        f"{simulated[2]:.2f} times as long as verl (published: {marks[2]:.2f}).",
    )


def ablated(vanilla: float, apart: float, *gains: float) -> list[float]:
    """Return the rollout times of Fig. 13 over verl's, from its rows."""
    kept = 2 - vanilla  # a reduction, of which 1 + it is kept
    return [1.0, kept, apart, *(kept / np.cumprod(gains))]


def in_action(bench: Bench) -> Drawn:
    """Draw Fig. 14: one rollout of a late step, worker by worker."""
    inputs = specactor.late(bench.inputs("specactor"))
    shown = {
        "draft model": specactor.vanilla(inputs),
        "decoupled": specactor.specactor(inputs, reconfigure=False, best_of_n=False),
        "decoupled, reconfigured, best-of-N": specactor.specactor(inputs),
    }
    figure, panels = drawing.picture(3, 1, 5.6)
    lengths_s = {}
    results = {
        name: bench.result(specactor.scenario(inputs, "dapo", system))
        for name, system in shown.items()
    }
    windows = {
        name: drawing.rollout_window(result, specactor.WARMUP_STEPS)
        for name, result in results.items()
    }
    most_s = max(end_s - start_s for start_s, end_s in windows.values())
    for axes, (name, result) in zip(panels.flat, results.items(), strict=True):
        start_s, end_s = windows[name]
        lengths_s[name] = end_s - start_s
        drawing.lanes(axes, result, start_s, end_s, copies=SAND)
        axes.set_xlim(0, most_s)
        axes.set_title(f"{name}: {lengths_s[name]:.0f} s", loc="left", fontsize="medium", color=INK)
        axes.set_ylabel("workers")
    panels[-1, 0].set_xlabel("seconds of one rollout (paler: fewer requests left)")
    drawing.kinds_legend(
        figure, ("rollout", "idle"), {"copies of others' requests, other drafters": SAND}
    )
    first, second, third = lengths_s.values()
    return Drawn(
        figure,
        "Fig. 14: one rollout of DAPO, worker by worker (a sixth of the GPUs)",
        f"Drafting in turns takes {first:.0f} s, decoupled {second:.0f} s, and with freed workers drafting for the slowest "
        f"requests {third:.0f} s. Published, of some requests: decoupling speeds them up 1.1 to 1.5 times, best-of-N the "
        "slowest ones 1.5 times.",
    )


FIGURES: dict[str, Draw] = {
    "specactor-2": idle,
    "specactor-6b": batch_sizes,
    "specactor-7": methods,
    "specactor-10a": ladder,
    "specactor-11": step_times,
    "specactor-12": breakdown,
    "specactor-13": ablation,
    "specactor-14": in_action,
}
