"""TLT's figures (arXiv 2511.16665), from its ledger's middle: the gain of trees of drafts, and the tail with them."""

from __future__ import annotations

import drawing
import numpy as np
from drawing import COLOURS, Bench, Draw, Drawn, Mark, many, single

from experiments.reproduce import tlt
from experiments.reproduce.ledger import Inputs
from simrl.show.style import INK
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.choices import Strategy
from simrl.speculation.trees import accept_length, tree_log_acceptances

NAMES = {
    "qwen2.5-7b": "Qwen2.5-7B",
    "deepseek-r1-distill-qwen-7b": "R1-Distill-7B",
    "qwen2.5-32b": "Qwen2.5-32B",
    "llama-3.3-70b": "Llama-3.3-70B",
}
VERIFIED = (16, 32, 48, 64)


def end_to_end(bench: Bench) -> Drawn:
    """Draw Fig. 11: throughput over verl's, by model."""
    inputs = bench.inputs("tlt")
    ratios = {}
    for model in inputs["models"]:
        plain, own = (
            bench.lab.run(tlt.scenario(inputs, model, system, inputs["prompts"]))
            for system in (tlt.baseline(inputs), tlt.tlt(inputs))
        )
        ratios[NAMES[model]] = own["tokens_per_s"] / plain["tokens_per_s"]
    published = bench.bound("tlt-e2e")
    series, read = single(ratios.values()), single([published] * len(ratios))
    figure = drawing.bar_picture(
        list(ratios), series, read, y="tokens/s over verl's", height_in=3.2, level=True
    )
    least, most = (end(ratios, key=lambda name: ratios[name]) for end in (min, max))
    return Drawn(
        figure,
        "Fig. 11: token throughput over verl's (64 H100)",
        f"TLT trains {many(ratios.values())} times as many tokens a second as verl, the least on {least}, the "
        f"most on {most}. Published: {published.low:g} to {published.high:g} times over the four models (lines; which is "
        "which is not in our text).",
    )


def length(inputs: Inputs, strategy: Strategy) -> float:
    """Return the tokens a pass by a tree, with the drafter of Table 1."""
    known = Strategy(inputs["table_depth"], inputs["topk"], inputs["table_verify_tokens"])
    probability = tlt.first_choice(inputs["grid_accept_length"], known)
    return accept_length(
        tree_log_acceptances(ModelAcceptance(by_position=(probability,)), strategy)
    )


def speedup(inputs: Inputs, strategy: Strategy, batch: int = 1) -> float:
    return tlt.speedup(inputs, batch, strategy, length(inputs, strategy))


def grid(bench: Bench) -> Drawn:
    """Draw Fig. 13: accept length and speed-up by draft depth and tokens to verify."""
    inputs = bench.inputs("tlt")
    depths = (2, 4, 6, 8, 10, 12, 14, 16)
    figure, panels = drawing.picture(1, 2, 3.6)
    speeds = {}
    for verified, colour in zip(VERIFIED, COLOURS, strict=False):
        trees = [Strategy(depth, inputs["topk"], verified) for depth in depths]
        lengths, speeds[verified] = (
            [of(inputs, tree) for tree in trees] for of in (length, speedup)
        )
        for axes, values in zip(panels.flat, (lengths, speeds[verified]), strict=True):
            axes.plot(depths, values, marker="o", color=colour, label=f"{verified} tokens")
    drawing.put_mark(panels[0, 0], inputs["table_depth"], inputs["grid_accept_length"])
    drawing.put_mark(panels[0, 1], inputs["table_depth"], bench.value("tlt-topk8"))
    for axes, name in zip(panels.flat, ("accept length", "speed-up at batch 1"), strict=True):
        axes.set(xlabel="draft depth", ylabel=name, ylim=(0, None))
    drawing.legend(panels[0, 0])
    speed = speeds[inputs["table_verify_tokens"]]
    return Drawn(
        figure,
        "Fig. 13: accept length and speed-up of trees (batch 1, top-k 8)",
        "Deeper trees yield longer accepts, less and less so, while each level costs a pass of the drafter: with "
        f"{inputs['table_verify_tokens']} tokens to verify the speed-up is largest at depth "
        f"{depths[int(np.argmax(speed))]}, {max(speed):.2f}. Published: "
        f"the same shape; at top-k 8 an accept length of {inputs['grid_accept_length']:g}, to which the drafter is set here, "
        f"and {bench.value('tlt-topk8'):g} times.",
    )


def top_k(bench: Bench) -> Drawn:
    """Draw Table 1: speed-up by top-k."""
    inputs = bench.inputs("tlt")
    widths = (4, 6, 8, 10, 12, 16)
    trees = [
        Strategy(inputs["table_depth"], width, inputs["table_verify_tokens"]) for width in widths
    ]
    speed, published = [speedup(inputs, tree) for tree in trees], bench.value("tlt-topk8")
    read = single(published if width == inputs["topk"] else None for width in widths)
    look = {"x": "top-k", "y": "speed-up at batch 1", "height_in": 3.0}
    figure = drawing.bar_picture(list(map(str, widths)), single(speed), read, **look)
    return Drawn(
        figure,
        "Table 1: top-k",
        f"Between top-k 4 and 16 the speed-up is {min(speed):.2f} to {max(speed):.2f}: it hardly depends on top-k, as "
        f"published. At top-k 8 it is {speed[2]:.2f} (published: {published:g}).",
    )


def batches(bench: Bench) -> Drawn:
    """Draw Table 2: speed-up by batch and tokens to verify."""
    inputs = bench.inputs("tlt")
    sizes = (1, 2, 4, 8, 16, 32)
    trees = {
        verified: Strategy(inputs["table_depth"], inputs["topk"], verified) for verified in VERIFIED
    }
    cells = {
        verified: [speedup(inputs, tree, batch) for batch in sizes]
        for verified, tree in trees.items()
    }
    marks: dict[str, list[Mark]] = {
        f"{verified} tokens": [
            bench.value(row) if (row := f"tlt-sd-bs{batch}-v{verified}") in tlt.ROWS else None
            for batch in sizes
        ]
        for verified in VERIFIED
    }
    series = {f"{verified} tokens": values for verified, values in cells.items()}
    groups, look = list(map(str, sizes)), {"form": "{:.1f}", "height_in": 3.6, "level": True}
    figure = drawing.bar_picture(groups, series, marks, x="batch", y="speed-up", **look)
    most = {
        batch: VERIFIED[int(np.argmax([cells[v][i] for v in VERIFIED]))]
        for i, batch in enumerate(sizes)
    }
    return Drawn(
        figure,
        "Table 2: speed-up by batch and tokens to verify",
        f"Larger batches gain less and are best with fewer tokens to verify: {most[1]} at batch 1, {most[8]} at 8, {most[32]} "
        f"at 32 (published: 64, 16, 16). At batch 32 and 16 tokens the speed-up is {cells[16][-1]:.2f} (published: "
        f"{bench.value('tlt-sd-bs32-v16'):g}).",
    )


def tail(bench: Bench) -> Drawn:
    """Draw Fig. 14: the requests that still run, of a worker with 128."""
    inputs = bench.inputs("tlt")
    prompts = inputs["gpus"] // inputs["tp_32b"] * inputs["case_requests"] // inputs["group"]
    figure, axes = drawing.panel(3.4)
    systems = {"no speculation": tlt.baseline(inputs), "TLT": tlt.tlt(inputs)}
    ends_s = {}
    for (name, system), colour in zip(systems.items(), COLOURS, strict=False):
        result = bench.result(tlt.scenario(inputs, tlt.TARGET, system, prompts))
        start_s, end_s = drawing.rollout_window(result, tlt.WARMUP_STEPS)
        at_s = np.linspace(start_s, end_s, 600)
        each = drawing.requests_at(result, at_s) / result.metadata["rollout_workers"]
        axes.plot(at_s - start_s, each, color=colour, label=name)
        ends_s[name] = end_s - start_s
    axes.axhline(inputs["threshold"], color=INK, linewidth=0.8, linestyle=":")
    begins = f"dotted: {inputs['threshold']} requests, where drafting begins"
    axes.set(xlabel=f"seconds of a rollout ({begins})", ylabel="requests a worker")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, None)
    drawing.legend(axes, marks=False)
    gain = bench.predicted("tlt-rollout-case")[0]
    longest = ends_s["no speculation"] / ends_s["TLT"]
    return Drawn(
        figure,
        "Fig. 14: a rollout of 128 requests a worker (Qwen2.5-32B, all workers' mean)",
        f"Drafting starts when {inputs['threshold']} requests are left, and makes a worker's rollout {gain:.2f} times as "
        f"fast, a mean over workers, and the slowest worker's {longest:.2f} times. Published: "
        f"{bench.value('tlt-rollout-case'):g} times, of one worker.",
    )


FIGURES: dict[str, Draw] = {
    "tlt-11": end_to_end,
    "tlt-13": grid,
    "tlt-14": tail,
    "tlt-table-1": top_k,
    "tlt-table-2": batches,
}
