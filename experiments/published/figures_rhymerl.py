"""RhymeRL's figures (arXiv 2508.18588), from its ledger's middle: the tail, the likeness of epochs, and each part's gain."""

from __future__ import annotations

from typing import Any

import drawing
import numpy as np
from drawing import COLOURS, MARK, Bench, Draw, Drawn, Mark, Scenarios, beside, many, share, single

from experiments.reproduce import rhymerl
from experiments.reproduce.ledger import Inputs
from experiments.reproduce.ranks import rank_history
from experiments.reproduce.score import Bound
from simrl.speculation.passes import run_passes, stretches
from simrl.speculation.run_model import AcceptRuns, RunModel, draw_runs
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
        lambda lab: rhymerl.survey(
            lab, inputs, "math", rhymerl.CAPS["16k"], inputs["survey_mean_tokens"]
        )
    )
    result = bench.result(scenario)
    end_s = float(result.steps.column("finished_s")[0].as_py())
    figure, panels = drawing.picture(2, 1, 4.6, sharex=True, height_ratios=(3, 2))
    drawing.kinds_legend(figure, drawing.kinds_of(drawing.lanes(panels[0, 0], result, 0.0, end_s)))
    batch = drawing.batches(result, 0.0, end_s)
    at_s = np.linspace(0, end_s, batch.shape[1])
    panels[1, 0].plot(
        at_s, (batch > 0).mean(axis=0), color=COLOURS[0], label="workers with requests"
    )
    panels[1, 0].plot(at_s, batch.mean(axis=0), color=COLOURS[1], label="requests left")
    panels[1, 0].set(xlabel="seconds of a step", ylabel="share", ylim=(0, 1.02))
    panels[0, 0].set_ylabel("workers of 4 GPUs")
    drawing.legend(panels[1, 0], marks=False, loc="upper right")
    (idle, rollout), (idle_published, published) = bench.both(
        "rhyme-idle", "rhyme-rollout-share-math"
    )
    return Drawn(
        figure,
        "Fig. 3c: a step of verl, 32B on 64 GPUs",
        f"The worker that is done first idles {share(idle)} of the rollout (published: {share(idle_published)}), and rollout "
        f"takes {share(rollout)} of the step (published: {share(published)}). Half of the "
        f"responses are over after {share(float(np.argmax(batch.mean(axis=0) < 0.5) / batch.shape[1]))} of the step.",
    )


def hits(bench: Bench) -> Drawn:
    """Draw Fig. 8: lengths of the stretches that drafts have right."""
    inputs = bench.inputs("rhymerl")
    edges = [1, 3, 5, 9, 17, 33, 65, 129, 1_000_000]
    names = ["1–2", "3–4", "5–8", "9–16", "17–32", "33–64", "65–128", "more"]
    figure, panels = drawing.picture(1, 2, 3.4, sharey=True)
    said = []
    for axes, task in zip(panels.flat, rhymerl.TASKS, strict=True):
        hit_tokens = stretches(*drafts(inputs, task, "16k")).hit
        hit_tokens = hit_tokens[hit_tokens > 0]
        number = np.histogram(hit_tokens, edges)[0] / len(hit_tokens)
        length = np.histogram(hit_tokens, edges, weights=hit_tokens)[0] / hit_tokens.sum()
        drawing.bars(axes, names, {"of the number": number, "of the tokens": length}, values=False)
        axes.set_xlabel(f"{task}: tokens of a hit")
        axes.tick_params(axis="x", labelsize="small")
        said.append(f"{task} {share(number[0])} of the hits and {share(length[0])} of their tokens")
    panels[0, 0].set_ylabel("share")
    drawing.legend(panels[0, 0], marks=False)
    return Drawn(
        figure,
        "Fig. 8: lengths of hits",
        f"Hits of one or two tokens are {'; '.join(said)}. Published: short hits dominate in number, long ones have most of "
        "the tokens; here that is how the assumed share of short hits and the stated share of reusable tokens fit together.",
    )


def drafts(inputs: Inputs, task: str, cap: str, *reuse: float) -> tuple[AcceptRuns, Any]:
    """Return the drafts of some responses of the mean length, and their lengths."""
    model = RunModel.model_validate(rhymerl.history(inputs, task, *reuse))
    tokens = np.full(RESPONSES, round(rhymerl.lengths(inputs, task, cap)["mean_tokens"]))
    return draw_runs(model, tokens, np.arange(RESPONSES)), tokens


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
    figure, panels = drawing.picture(1, 2, 3.4, sharey=True)
    said = []
    for axes, task in zip(panels.flat, rhymerl.TASKS, strict=True):
        found = rank_history(trace(inputs, task), 8)
        epochs = [int(of["epoch"]) + 1 for of in found.by_epoch]
        same = np.array([of["accurate"] for of in found.by_epoch])
        near = np.array([of["near_boundary"] for of in found.by_epoch])
        axes.bar(epochs, same, 0.8, color=COLOURS[0], label="same group or lower")
        axes.bar(
            epochs, near, 0.8, bottom=same, color=COLOURS[1], label="next group, near the boundary"
        )
        higher, published = 1 - found.overall["accurate"], inputs[f"moved_up_{task}"][0]
        drawing.put_mark(axes, epochs[-1] + 1, 1 - published)
        axes.set_xticks(epochs)
        axes.set_xlabel(f"{task}: epoch")
        axes.set_ylim(0.5, 1)
        near_all, near_published = found.overall["near_boundary"], inputs[f"moved_up_{task}"][1]
        said.append(
            f"{task} {share(higher)} come to a higher group, {share(near_all)} of all just beyond its boundary (published: "
            f"{share(published)}, {share(near_published)})"
        )
    panels[0, 0].set_ylabel("share of responses")
    drawing.legend(panels[0, 0])
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
    series = {
        f"{groups} groups": [100 * found[groups][column] for column in columns] for groups in found
    }
    spans = {groups: inputs[f"rank_accurate_{groups}"] for groups in found}
    read: dict[str, list[Any]] = {
        f"{groups} groups": [100 * np.mean(spans[groups]), None, None, None] for groups in found
    }
    figure = drawing.bar_picture(
        named, series, read, y="percent of responses", height_in=3.2, form="{:.1f}"
    )
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
            found = (
                rhymerl.train(bench.lab, inputs, chosen, task, cap)
                if chosen
                else {"samples_per_s": np.nan}
            )
            speed[name].append(rhymerl.SCALE * found["samples_per_s"])
    groups = [f"{task}, {cap}" for task, cap in settings]
    figure = drawing.bar_picture(groups, speed, y="samples/s", form="{:.1f}", marks=False)
    said = []
    for name, row in {"verl": "verl", "AReaL, η 1": "areal1", "AReaL, η 8": "areal8"}.items():
        ratios, read = bench.both(*(f"rhyme-e2e-{cap}-{row}" for cap in rhymerl.CAPS))
        said.append(f"{name} {many(ratios)} (published: {many(read, '{:.3g}')})")
    verl = rhymerl.one_step_off(inputs)
    waits = [rhymerl.train(bench.lab, inputs, verl, *setting)["train_idle"] for setting in settings]
    waited = " to ".join(dict.fromkeys((share(min(waits)), share(max(waits)))))
    return Drawn(
        figure,
        "Fig. 13: training throughput (14B, half of the 128 GPUs, doubled)",
        f"RhymeRL's throughput, at 8K / 16K, as a multiple of the others': {'; '.join(said)}; over verl a mean of the tasks, "
        f"over AReaL on math. verl's trainer waits {waited} of the time at the middle inputs, which is all that faster "
        "rollout can win back. (The paper's means are over three models and, with DAPO, two algorithms; code under AReaL at η "
        "8 is left out for the time it takes.)",
    )


def breakdown(bench: Bench) -> Drawn:
    """Draw Fig. 14: the gain of each part."""
    names = ("verl", "+ HistoPipe", "+ two tiers", "+ HistoSpec")
    found = {
        title: bench.both(*(f"rhyme-abl-{part}-{task}" for part in ("pipe", "2tier", "spec")))
        for task, title in TITLES.items()
    }
    series, read = (
        {title: [1.0, *np.cumprod(of[i])] for title, of in found.items()} for i in (0, 1)
    )
    figure = drawing.bar_picture(names, series, read, y="throughput over verl's")
    said = "; ".join(f"{title} {beside(*of, many)}" for title, of in found.items())
    inputs = bench.inputs("rhymerl")
    waits = [
        rhymerl.train(bench.lab, inputs, system, "math", "16k")["train_idle"]
        for system in (rhymerl.one_step_off(inputs), rhymerl.rhymerl(inputs, "math"))
    ]
    return Drawn(
        figure,
        "Fig. 14: breakdown (16K)",
        f"HistoPipe, two tiers and HistoSpec multiply throughput, one after the other, by: {said}. They can bring "
        f"no more than the trainer waits for: on math {share(waits[0])} of verl's time, of which RhymeRL leaves "
        f"{share(waits[1])}. Marks are the products of the published factors.",
    )


def across_steps(bench: Bench) -> Drawn:
    """Draw Fig. 15: HistoPipe as responses grow."""
    inputs = bench.inputs("rhymerl")
    growths = {"mean length of the steps measured": 1.0, "of the last steps": rhymerl.late(inputs)}
    tiers = rhymerl.rhymerl(inputs, "math", speculation=rhymerl.NO_DRAFTS)
    piped = {**tiers, "two_tier": False}
    pipe, tier = (bench.value(f"rhyme-{part}-peak") for part in ("pipe", "2tier"))
    compared = {
        "HistoPipe over verl": (piped, rhymerl.one_step_off(inputs), pipe),
        "two tiers over HistoPipe": (tiers, piped, tier),
    }
    values = {
        name: [
            rhymerl.gain(bench.lab, inputs, system, over, "math", "16k", growth)
            for growth in growths.values()
        ]
        for name, (system, over, _) in compared.items()
    }
    read: dict[str, list[Mark]] = {name: [None, peak] for name, (_, _, peak) in compared.items()}
    figure = drawing.bar_picture(
        list(growths), values, read, y="ratio of throughput", height_in=3.2, level=True
    )
    of_pipe, of_tiers = map(many, values.values())
    return Drawn(
        figure,
        "Fig. 15: HistoPipe as training goes on (Math-14B, 16K)",
        f"HistoPipe trains {of_pipe} times as much as verl at the mean length and at the length of the "
        f"last steps, and two tiers {of_tiers} times as much again. Published, the best ten steps: "
        f"{pipe:g} and {tier:g}.",
    )


def rollout_gains(bench: Bench) -> Drawn:
    """Draw Fig. 16: the speed-up of a rollout by HistoSpec, by model, 8K, last steps."""
    inputs = bench.inputs("rhymerl")
    gains = rhymerl.last_steps(bench.lab, inputs)
    peak = bench.value("rhyme-spec-peak")
    figure, axes = drawing.panel(3.0)
    drawing.bars(axes, inputs["models"], single(gains), form="{:.2f}")
    axes.axhline(
        peak, **{**MARK, "linestyle": "--", "marker": ""}, label="published, best step of all"
    )
    axes.set_ylabel("rollout throughput over none's")
    drawing.legend(axes, marks=False)
    return Drawn(
        figure,
        "Fig. 16: HistoSpec's rollout (8K, the last steps)",
        f"With full histories a rollout is {many(gains)} times as fast at 8B / 14B / 32B. Published: up to {peak:g} "
        "times, growing through training.",
    )


def rates(bench: Bench) -> Drawn:
    """Draw Fig. 17: acceptance, as histories get closer."""
    inputs = bench.inputs("rhymerl")
    reuse = np.linspace(inputs["early_reuse"], 1.0, 7)
    figure, axes = drawing.panel(3.4)
    said = {}
    for task, colour in zip(rhymerl.TASKS, COLOURS, strict=False):
        passes = [
            run_passes(*drafts(inputs, task, "8k", float(each)), Aimd().rule) for each in reuse
        ]
        accepted, drafted = (
            [each.acceptance_rate for each in passes],
            [each.speculation_rate for each in passes],
        )
        axes.plot(reuse, accepted, marker="o", color=colour, label=f"{task}: accepted of drafted")
        axes.plot(
            reuse,
            drafted,
            marker="s",
            linestyle="--",
            color=colour,
            label=f"{task}: tokens that were drafted",
        )
        said[task] = (accepted[0], accepted[-1], drafted[0], drafted[-1])
    low, high = bench.value("rhyme-accept-low"), bench.value("rhyme-accept-high")
    drawing.put_mark(axes, float(reuse[0]), low)
    drawing.put_mark(axes, float(reuse[-1]), high)
    axes.set(
        xlabel="reusable tokens over those of late epochs (training goes from left to right)",
        ylabel="share",
        ylim=(0, 1),
    )
    drawing.legend(axes, ncols=2, loc="lower right")
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
    found = [100 * bench.predicted(f"rhyme-migr-{task}")[0] for task in rhymerl.TASKS]
    read = [
        Bound(*(100 * end for end in bench.bound(f"rhyme-migr-{task}"))) for task in rhymerl.TASKS
    ]
    groups = [f"{task}, {inputs[f'ranking_groups_{task}']} groups" for task in rhymerl.TASKS]
    figure = drawing.bar_picture(
        groups, single(found), single(read), y="percent of samples", height_in=3.0, form="{:.1f}"
    )
    said = "; ".join(
        f"{task} {value:.1f} % (published: {bound.low:.1f} to {bound.high:.1f} %)"
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
