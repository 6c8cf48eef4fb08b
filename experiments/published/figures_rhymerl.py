"""RhymeRL's figures (arXiv 2508.18588), from its ledger's middle: the tail, the likeness of epochs, and each part's gain."""

from __future__ import annotations

from typing import Any

import numpy as np
from drawing import (
    COLOURS,
    MARK,
    Bench,
    Draw,
    Drawn,
    Mark,
    Scenarios,
    bar_picture,
    bars,
    batches,
    kinds_legend,
    lanes,
    legend,
    many,
    picture,
    put_mark,
    share,
)

from experiments.reproduce import rhymerl
from experiments.reproduce.ledger import Inputs
from experiments.reproduce.ranks import rank_history
from simrl.speculation.passes import run_passes, stretches
from simrl.speculation.run_model import RunModel, draw_runs
from simrl.speculation.windows import Aimd
from simrl.trace.synthesis import LengthModel, synthesise
from simrl.trace.trace import Trace

RESPONSES = 256
EPOCHS = 8  # of traces whose ranks are looked at
TITLES = {"math": "Math-14B", "code": "Code-14B"}


def survey(bench: Bench) -> Drawn:
    """Draw Fig. 3c: the workers with requests, in a step of a 32B run."""
    inputs = bench.inputs("rhymerl")
    scenario = Scenarios.of(
        lambda lab: rhymerl.survey(lab, inputs, "math", rhymerl.CAPS["16k"], inputs["survey_mean_tokens"])
    )
    result = bench.result(scenario)
    end_s = float(result.steps.column("finished_s")[0].as_py())
    figure, panels = picture(2, 1, 4.6, sharex=True, height_ratios=(3, 2))
    part = lanes(panels[0, 0], result, 0.0, end_s)
    kinds = {part.kinds[kind] for kind in np.unique(part.kind)}
    kinds_legend(figure, kinds)
    batch = batches(result, 0.0, end_s)
    at_s = np.linspace(0, end_s, batch.shape[1])
    panels[1, 0].plot(at_s, (batch > 0).mean(axis=0), color=COLOURS[0], label="workers with requests")
    panels[1, 0].plot(at_s, batch.mean(axis=0), color=COLOURS[1], label="requests left")
    panels[1, 0].set(xlabel="seconds of a step", ylabel="share", ylim=(0, 1.02))
    panels[0, 0].set_ylabel("workers of 4 GPUs")
    legend(panels[1, 0], marks=False, loc="upper right")
    found = bench.lab.run(scenario)
    idle, published = found["earliest_idle_share"], bench.values("rhyme-idle")[0]
    part_of = found["rollout_s"] / found["step_s"]
    return Drawn(
        figure,
        "Fig. 3c: a step of verl, 32B on 64 GPUs",
        f"The worker that is done first idles {share(idle)} of the rollout (published: {share(published)}), and rollout takes "
        f"{share(part_of)} of the step (published: {share(bench.values('rhyme-rollout-share-math')[0])}). Half of the "
        f"responses are over after {share(float(np.argmax(batch.mean(axis=0) < 0.5) / batch.shape[1]))} of the step.",
    )


def hits(bench: Bench) -> Drawn:
    """Draw Fig. 8: lengths of the stretches that drafts have right."""
    inputs = bench.inputs("rhymerl")
    edges = [1, 3, 5, 9, 17, 33, 65, 129, 1_000_000]
    names = ["1–2", "3–4", "5–8", "9–16", "17–32", "33–64", "65–128", "more"]
    figure, panels = picture(1, 2, 3.4, sharey=True)
    said = []
    for axes, task in zip(panels.flat, rhymerl.TASKS, strict=True):
        model = RunModel.model_validate(rhymerl.history(inputs, task))
        tokens = np.full(RESPONSES, round(rhymerl.lengths(inputs, task, "16k")["mean_tokens"]))
        found = stretches(draw_runs(model, tokens, np.arange(RESPONSES)), tokens).hit
        found = found[found > 0]
        number = np.histogram(found, edges)[0] / len(found)
        length = np.histogram(found, edges, weights=found)[0] / found.sum()
        bars(axes, names, {"of the number": number, "of the tokens": length}, values=False)
        axes.set_xlabel(f"{task}: tokens of a hit")
        axes.tick_params(axis="x", labelsize="small")
        said.append(f"{task} {share(number[0])} of the hits and {share(length[0])} of their tokens")
    panels[0, 0].set_ylabel("share")
    legend(panels[0, 0], marks=False)
    return Drawn(
        figure,
        "Fig. 8: lengths of hits",
        f"Hits of one or two tokens are {'; '.join(said)}. Published: short hits dominate in number, long ones have most of "
        "the tokens; here that is how the assumed share of short hits and the stated share of reusable tokens fit together.",
    )


def trace(inputs: Inputs, task: str) -> Trace:
    """Return the lengths of some epochs of a task, as the rows of its runs have them."""
    model = LengthModel.model_validate(
        {
            "steps": EPOCHS * rhymerl.EPOCH_STEPS,
            "prompts_per_step": inputs["prompts"] // rhymerl.SCALE,
            "prompts": rhymerl.EPOCH_STEPS * inputs["prompts"] // rhymerl.SCALE,
            "group": inputs["group"],
            "sigma": inputs["sigma"],
            "prompt_tokens": inputs["prompt_tokens"],
            **rhymerl.lengths(inputs, task, "16k"),
        }
    )
    return synthesise(model, 0)


def ranks(bench: Bench) -> Drawn:
    """Draw Fig. 9: the responses that come to a higher group than their prompt's last epoch says, by epoch."""
    inputs = bench.inputs("rhymerl")
    figure, panels = picture(1, 2, 3.4, sharey=True)
    said = []
    for axes, task in zip(panels.flat, rhymerl.TASKS, strict=True):
        found = rank_history(trace(inputs, task), 8)
        epochs = [int(of["epoch"]) + 1 for of in found.by_epoch]
        same = np.array([of["accurate"] for of in found.by_epoch])
        near = np.array([of["near_boundary"] for of in found.by_epoch])
        axes.bar(epochs, same, 0.8, color=COLOURS[0], label="same group or lower")
        axes.bar(epochs, near, 0.8, bottom=same, color=COLOURS[1], label="next group, near the boundary")
        higher, published = 1 - found.overall["accurate"], inputs[f"moved_up_{task}"][0]
        put_mark(axes, epochs[-1] + 1, 1 - published)
        axes.set_xticks(epochs)
        axes.set_xlabel(f"{task}: epoch")
        axes.set_ylim(0.5, 1)
        near_all, near_published = found.overall["near_boundary"], inputs[f"moved_up_{task}"][1]
        said.append(
            f"{task} {share(higher)} come to a higher group, {share(near_all)} of all just beyond its boundary (published: "
            f"{share(published)}, {share(near_published)})"
        )
    panels[0, 0].set_ylabel("share of responses")
    legend(panels[0, 0])
    return Drawn(
        figure,
        "Fig. 9: groups of responses from epoch to epoch (8 groups)",
        f"Of the responses of {'; of '.join(said)}. These shares are stated inputs that the lengths were set to, so the "
        "figure shows how well a length model of two parameters gives both.",
    )


def rank_table(bench: Bench) -> Drawn:
    """Draw Table 2: accuracy of predicted ranks, for math; the ledger has the published column of accuracy."""
    inputs = bench.inputs("rhymerl")
    lengths = trace(inputs, "math")
    columns = ("accurate", "not_last", "within", "migrated")
    named = ("accurate", "not last 10 %", "within β", "migrated")
    found = {groups: rank_history(lengths, groups).overall for groups in (8, 16)}
    series = {f"{groups} groups": [100 * found[groups][column] for column in columns] for groups in found}
    spans = {groups: inputs[f"rank_accurate_{groups}"] for groups in found}
    read: dict[str, list[Any]] = {
        f"{groups} groups": [100 * np.mean(spans[groups]), None, None, None] for groups in found
    }
    figure = bar_picture(named, series, read, y="percent of responses", height_in=3.2, form="{:.1f}")
    said = "; ".join(
        f"{groups} groups {share(found[groups]['accurate'])} (published, three data sets: {share(min(spans[groups]))} to "
        f"{share(max(spans[groups]))}), migrated {100 * found[groups]['migrated']:.1f} %"
        for groups in found
    )
    return Drawn(
        figure,
        "Table 2: accuracy of ranks and migration (math)",
        f"Responses in the predicted group or a lower one: {said}. Published of migrated: 1.5 to 3.6 % of math with 8 groups, "
        "more with 16; here a median of 16 alike responses tells their group so well that hardly one is an outlier.",
    )


def throughputs(bench: Bench) -> Drawn:
    """Draw Fig. 13: training throughput of the systems, 14B."""
    inputs = bench.inputs("rhymerl")
    systems = {
        "verl": lambda task: rhymerl.one_step_off(inputs),
        "AReaL, η 1": lambda task: rhymerl.areal(inputs, 1),
        "AReaL, η 8": lambda task: rhymerl.areal(inputs, 8) if task == "math" else None,
        "RhymeRL": lambda task: rhymerl.rhymerl(inputs, task),
    }
    settings = [(task, cap) for task in rhymerl.TASKS for cap in rhymerl.CAPS]
    speed: dict[str, list[float]] = {}
    for name, system in systems.items():
        speed[name] = []
        for task, cap in settings:
            chosen = system(task)
            found = rhymerl.train(bench.lab, inputs, chosen, task, cap) if chosen else {"samples_per_s": np.nan}
            speed[name].append(rhymerl.SCALE * found["samples_per_s"])
    groups = [f"{task}, {cap}" for task, cap in settings]
    figure = bar_picture(groups, speed, y="samples/s", form="{:.1f}", marks=False)
    rows = {"verl": "verl", "AReaL, η 1": "areal1", "AReaL, η 8": "areal8"}
    said = []
    for name, row in rows.items():
        ratios = {
            cap: np.nanmean(
                [
                    speed["RhymeRL"][i] / speed[name][i]
                    for i, (task, other) in enumerate(settings)
                    if other == cap and (name == "verl" or task == "math")  # as its rows are predicted
                ]
            )
            for cap in rhymerl.CAPS
        }
        read = [bench.values(f"rhyme-e2e-{cap}-{row}")[0] for cap in rhymerl.CAPS]
        said.append(f"{name} {many(list(ratios.values()), '{:.2f}')} (published: {many(read)})")
    waits = [
        rhymerl.train(bench.lab, inputs, rhymerl.one_step_off(inputs), *setting)["train_idle"] for setting in settings
    ]
    waited = " to ".join(dict.fromkeys((share(min(waits)), share(max(waits)))))
    return Drawn(
        figure,
        "Fig. 13: training throughput (14B, half of the 128 GPUs, doubled)",
        f"RhymeRL's throughput, at 8K / 16K, as a multiple of the others': {'; '.join(said)}; over verl a mean of the tasks, "
        f"over AReaL on math. verl's trainer waits {waited} of the time at the middle inputs, which is all that faster "
        "rollout can win back. (The paper's means are over three models and, with DAPO, two algorithms; code under AReaL at η "
        "8 is left out for the time it takes.)",
    )


def parts(bench: Bench, task: str, growth: float = 1.0) -> list[float]:
    """Return the throughput over verl's as HistoPipe, its tiers and HistoSpec are added, 16K."""
    inputs = bench.inputs("rhymerl")
    none = rhymerl.NO_DRAFTS
    added = (
        rhymerl.one_step_off(inputs),
        rhymerl.rhymerl(inputs, task, two_tier=False, speculation=none),
        rhymerl.rhymerl(inputs, task, speculation=none),
        rhymerl.rhymerl(inputs, task),
    )
    speed = [rhymerl.train(bench.lab, inputs, system, task, "16k", growth)["samples_per_s"] for system in added]
    return [each / speed[0] for each in speed]


def breakdown(bench: Bench) -> Drawn:
    """Draw Fig. 14: the gain of each part."""
    names = ("verl", "+ HistoPipe", "+ two tiers", "+ HistoSpec")
    found = {TITLES[task]: parts(bench, task) for task in rhymerl.TASKS}
    gains = {
        task: [bench.values(f"rhyme-abl-{part}-{task}")[0] for part in ("pipe", "2tier", "spec")] for task in TITLES
    }
    read = {TITLES[task]: [1.0, *np.cumprod(gains[task])] for task in TITLES}
    figure = bar_picture(names, found, read, y="throughput over verl's")
    said = [
        f"{TITLES[task]} "
        f"{many([b / a for a, b in zip(found[TITLES[task]], found[TITLES[task]][1:], strict=False)], '{:.2f}')} "
        f"(published: {many(gains[task], '{:.2f}')})"
        for task in TITLES
    ]
    inputs = bench.inputs("rhymerl")
    waits = [
        rhymerl.train(bench.lab, inputs, system, "math", "16k")["train_idle"]
        for system in (rhymerl.one_step_off(inputs), rhymerl.rhymerl(inputs, "math"))
    ]
    return Drawn(
        figure,
        "Fig. 14: breakdown (16K)",
        f"HistoPipe, two tiers and HistoSpec multiply throughput, one after the other, by: {'; '.join(said)}. They can bring "
        f"no more than the trainer waits for: on math {share(waits[0])} of verl's time, of which RhymeRL leaves "
        f"{share(waits[1])}. Marks are the products of the published factors.",
    )


def across_steps(bench: Bench) -> Drawn:
    """Draw Fig. 15: HistoPipe as responses grow."""
    inputs = bench.inputs("rhymerl")
    growths = {"mean length of the steps measured": 1.0, "of the last steps": rhymerl.late(inputs)}
    found = {name: parts(bench, "math", growth)[1:3] for name, growth in growths.items()}
    pipe, tier = (bench.values(f"rhyme-{part}-peak")[0] for part in ("pipe", "2tier"))
    values = {
        "HistoPipe over verl": [of[0] for of in found.values()],
        "two tiers over HistoPipe": [of[1] / of[0] for of in found.values()],
    }
    names = list(values)
    read: dict[str, list[Mark]] = {names[0]: [None, pipe], names[1]: [None, tier]}
    figure = bar_picture(list(found), values, read, y="ratio of throughput", height_in=3.2, level=True)
    return Drawn(
        figure,
        "Fig. 15: HistoPipe as training goes on (Math-14B, 16K)",
        f"HistoPipe trains {many(values[names[0]], '{:.2f}')} times as much as verl at the mean length and at that of the "
        f"last steps, and two tiers {many(values[names[1]], '{:.2f}')} times as much again. Published, the best ten steps: "
        f"{pipe:g} and {tier:g}.",
    )


def rollout_gains(bench: Bench) -> Drawn:
    """Draw Fig. 16: the speed-up of a rollout by HistoSpec, by model, 8K, last steps."""
    inputs = bench.inputs("rhymerl")
    gains = []
    for model, tp in zip(inputs["models"], inputs["tps"], strict=True):
        one = {**inputs, "models": [model], "tps": [tp]}
        gains.append(rhymerl.best_step(bench.lab, one)[0])
    peak = bench.values("rhyme-spec-peak")[0]
    figure, panels = picture(1, 1, 3.0)
    bars(panels[0, 0], inputs["models"], {"simulated": gains}, {"simulated": [None] * len(gains)}, form="{:.2f}")
    panels[0, 0].axhline(peak, **{**MARK, "linestyle": "--", "marker": ""}, label="published, best step of all")
    panels[0, 0].set_ylabel("rollout throughput over none's")
    legend(panels[0, 0], marks=False)
    return Drawn(
        figure,
        "Fig. 16: HistoSpec's rollout (8K, the last steps)",
        f"With full histories a rollout is {many(gains, '{:.2f}')} times as fast at 8B / 14B / 32B. Published: up to {peak:g} "
        "times, growing through training.",
    )


def rates(bench: Bench) -> Drawn:
    """Draw Fig. 17: acceptance, as histories get closer."""
    inputs = bench.inputs("rhymerl")
    reuse = np.linspace(inputs["early_reuse"], 1.0, 7)
    figure, panels = picture(1, 1, 3.4)
    axes = panels[0, 0]
    said = {}
    for task, colour in zip(rhymerl.TASKS, COLOURS, strict=False):
        tokens = np.full(RESPONSES, round(rhymerl.lengths(inputs, task, "8k")["mean_tokens"]))
        accepted, drafted = [], []
        for each in reuse:
            model = RunModel.model_validate(rhymerl.history(inputs, task, float(each)))
            found = run_passes(draw_runs(model, tokens, np.arange(RESPONSES)), tokens, Aimd().rule)
            accepted.append(found.acceptance_rate)
            drafted.append(found.speculation_rate)
        axes.plot(reuse, accepted, marker="o", color=colour, label=f"{task}: accepted of drafted")
        axes.plot(reuse, drafted, marker="s", linestyle="--", color=colour, label=f"{task}: tokens that were drafted")
        said[task] = (accepted[0], accepted[-1], drafted[0], drafted[-1])
    low, high = bench.values("rhyme-accept-low")[0], bench.values("rhyme-accept-high")[0]
    put_mark(axes, float(reuse[0]), low)
    put_mark(axes, float(reuse[-1]), high)
    axes.set(
        xlabel="reusable tokens over those of late epochs (training goes from left to right)",
        ylabel="share",
        ylim=(0, 1),
    )
    legend(axes, ncols=2, loc="lower right")
    a = said["math"]
    return Drawn(
        figure,
        "Fig. 17: speculation rate and acceptance rate (8K)",
        f"On math, the share of drafted tokens that is accepted rises from {share(a[0])} to {share(a[1])} (published: "
        f"{share(low)} to {share(high)}), and the share of tokens that come from drafts from {share(a[2])} to {share(a[3])} "
        "(published: rising). Both follow from the stated share of reusable tokens, in hits whose lengths are assumed.",
    )


def migrations(bench: Bench) -> Drawn:
    """Draw Fig. 18: samples that migrate."""
    inputs = bench.inputs("rhymerl")
    found = [rhymerl.migrated(task)(bench.lab, inputs)[0] for task in rhymerl.TASKS]
    read = [bench.published(f"rhyme-migr-{task}")[0] for task in rhymerl.TASKS]
    scaled = [type(bound)(100 * bound.low, 100 * bound.high) for bound in read]
    groups = [f"{task}, {inputs[f'ranking_groups_{task}']} groups" for task in rhymerl.TASKS]
    series = {"simulated": [100 * each for each in found]}
    figure = bar_picture(groups, series, {"simulated": scaled}, y="percent of samples", height_in=3.0, form="{:.1f}")
    said = "; ".join(
        f"{task} {100 * value:.1f} % (published: {100 * bound.low:.1f} to {100 * bound.high:.1f} %)"
        for task, value, bound in zip(rhymerl.TASKS, found, read, strict=True)
    )
    return Drawn(
        figure,
        "Fig. 18: samples that migrate (14B, 16K)",
        f"Samples that go on at another worker or in the next step: {said}. The published ranges are over the steps "
        "of a run, falling.",
    )


FIGURES: dict[str, Draw] = {
    "rhymerl-3c": survey,
    "rhymerl-8": hits,
    "rhymerl-9": ranks,
    "rhymerl-table-2": rank_table,
    "rhymerl-13": throughputs,
    "rhymerl-14": breakdown,
    "rhymerl-15": across_steps,
    "rhymerl-16": rollout_gains,
    "rhymerl-17": rates,
    "rhymerl-18": migrations,
}
