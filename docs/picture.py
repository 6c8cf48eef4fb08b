"""Draw docs/picture.png, the 64 GPUs of experiments/reasoning.yaml under three systems over one stretch of time, and
docs/leads.png, their leads with smaller and larger batches.

python docs/picture.py [picture] [leads]
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

import simrl
from simrl.result.metrics import summary
from simrl.result.result import Result
from simrl.result.timeline import rolls_out, spans
from simrl.scenario.load import load_scenarios
from simrl.show.style import FAINT, INK, LOOKS, PAPER, SERIES, legend_below, save
from simrl.simulate.run import simulate

HERE = Path(__file__).parent
FILE = HERE.parent / "experiments" / "reasoning.yaml"
FROM_S, SHOWN_S = 1500.0, 500.0
BATCH = "workload.synthetic.prompts_per_step"
SIDES = (1, -1, 1)  # of a line, on which its numbers stand
PROMPTS = (24, 64, 128, 512)  # of a step, 16 responses each
NAMES = {
    "rollout": "generates",
    "load_weights": "loads weights",
    "switch": "switches to training or back",
    "log_prob": "computes log-probs",
    "train": "trains",
    "publish": "publishes weights",
    "idle": "idle",
}


def draw(results: list[Result]) -> Figure:
    """Draw a panel per system with a row per GPU: rollout GPUs above, GPUs that only train below."""
    figure = Figure(figsize=(11, 7.2), dpi=100, facecolor=PAPER)
    panels = figure.subplots(len(results), sharex=True, gridspec_kw={"hspace": 0.32})
    figure.subplots_adjust(left=0.03, right=0.985, top=0.94, bottom=0.12)
    for axes, result in zip(panels, results, strict=True):
        shown = spans(result).within(FROM_S, FROM_S + SHOWN_S)
        height = np.array([lane.gpus for lane in shown.lanes])
        tops = np.cumsum(height) - height
        gpus = int(height.sum())
        rollout_gpus = sum(lane.gpus for lane in shown.lanes if rolls_out(lane))
        for code, kind in enumerate(shown.kinds):
            if kind not in NAMES:
                continue
            part = shown.where(shown.kind == code)
            top, bottom = tops[part.lane], tops[part.lane] + height[part.lane]
            x = np.stack([part.started_s, part.ended_s, part.ended_s, part.started_s], axis=1)
            y = np.stack([top, top, bottom, bottom], axis=1)
            outline = Outline.make_compound_path_from_polys(np.stack([x, y], axis=2))
            axes.add_patch(PathPatch(outline, antialiased=False, **LOOKS[kind].patch))
        finished_s = result.steps.column("finished_s").to_numpy()
        updates = finished_s[(finished_s > FROM_S) & (finished_s <= FROM_S + SHOWN_S)]
        for update_s in updates:
            axes.axvline(update_s, color=INK, linewidth=1.4)
        row = summary(result, result.metadata["scenario"]["warmup_steps"])
        split = (
            f"{rollout_gpus} GPUs roll out, {gpus - rollout_gpus} train"
            if rollout_gpus < gpus
            else f"{gpus} GPUs do both"
        )
        axes.set_title(
            f"{row['system']}: {row['samples_per_s']:.2f} samples/s, an update every {row['step_s']:.0f} s; {split}",
            loc="left",
            color=INK,
            fontsize=11,
            fontweight="bold",
        )
        axes.set_xlim(FROM_S, FROM_S + SHOWN_S)
        axes.set_ylim(gpus, 0)
        axes.set_yticks([])
        axes.set_ylabel(f"{gpus} GPUs, a row each", color=INK)
        axes.tick_params(colors=INK)
        axes.spines[:].set_color(FAINT)
    panels[-1].set_xlabel(
        "seconds since the start of the run; a line is the end of a policy update", color=INK
    )
    place, _ = legend_below(
        figure, [Patch(label=name, **LOOKS[kind].patch) for kind, name in NAMES.items()]
    )
    place(0.1)
    return figure


def leads() -> Figure:
    """Draw the samples/s of each system over those of the first, by the prompts of a step, each at its best split."""
    rows = [
        simrl.compare(FILE, overrides={BATCH: prompts}, best_split=True, ranking=False).rows
        for prompts in PROMPTS
    ]
    figure = Figure(figsize=(6.4, 3.6), dpi=100, facecolor=PAPER)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.1, right=0.98, top=0.89, bottom=0.15)
    for color, side, *of_system in zip(SERIES, SIDES, *rows, strict=False):
        name, places = of_system[0]["system"].partition("(")[0], range(len(PROMPTS))
        axes.plot(places, [row["speedup"] for row in of_system], "o-", color=color, label=name)
        print(name, *(f"{row['samples_per_s']:.3g}" for row in of_system))
        for x, row in zip(places, of_system, strict=True):
            if not row["colocated"]:
                text = f"{row['speedup']:.2f}×\n{row['rollout_gpus']}:{row['train_gpus']}"
                place = {
                    "xytext": (0, 7 if side > 0 else -22),
                    "textcoords": "offset points",
                    "ha": "center",
                }
                axes.annotate(
                    text,
                    (x, row["speedup"]),
                    va="bottom" if side > 0 else "top",
                    color=INK,
                    fontsize=8,
                    **place,
                )
    axes.set_xticks(places, [f"{prompts} × 16" for prompts in PROMPTS])
    axes.set_xlim(-0.3, len(PROMPTS) - 0.7)
    axes.set_ylim(0.3, 1.15 * axes.get_ylim()[1])
    axes.set_xlabel("responses of a step: prompts × 16", color=INK)
    axes.set_ylabel("samples/s over verl_colocated's", color=INK)
    axes.set_title(
        "The lead depends on the batch: 64 GPUs, each system at its best split",
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    pictures = sys.argv[1:] or ["picture", "leads"]
    if "picture" in pictures:
        save(draw([simulate(scenario) for scenario in load_scenarios(FILE)]), HERE / "picture.png")
    if "leads" in pictures:
        save(leads(), HERE / "leads.png")
