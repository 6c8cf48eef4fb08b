"""Draw docs/picture.png: the 64 GPUs of experiments/reasoning.yaml under three systems, over one stretch of time.

python docs/picture.py
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from simrl.result.metrics import summary
from simrl.result.result import Result
from simrl.result.timeline import rolls_out, spans
from simrl.scenario.load import load_scenarios
from simrl.show.style import FAINT, INK, LOOKS, PAPER, legend_below, save
from simrl.simulate.run import simulate

HERE = Path(__file__).parent
FROM_S, SHOWN_S = 500.0, 330.0
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
    panels[-1].set_xlabel("seconds since the start of the run; a line is the end of a policy update", color=INK)
    place, _ = legend_below(figure, [Patch(label=name, **LOOKS[kind].patch) for kind, name in NAMES.items()])
    place(0.1)
    return figure


if __name__ == "__main__":
    scenarios = load_scenarios(HERE.parent / "experiments" / "reasoning.yaml", ["vary=null"])
    save(draw([simulate(scenario) for scenario in scenarios]), HERE / "picture.png")
