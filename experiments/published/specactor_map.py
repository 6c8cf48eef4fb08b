"""Assumptions under which SpecActor gains as its paper reports: its rollouts and verl's, over open inputs.

Two cuts: for which lengths half of verl's rollout time is waiting (its Fig. 2a); and what SpecActor, and drafts in turns with
verification, gain over verl by acceptance, by the overhead of a round of drafts, and by responses a worker.

python experiments/published/specactor_map.py [--folder experiments/published]
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import pandas as pd
import typer

from experiments.reproduce import specactor
from experiments.reproduce.lab import Lab
from experiments.reproduce.ledger import Inputs, read_ledger
from experiments.reproduce.score import published_rows
from experiments.shared import Small, shrink
from simrl.show.style import INK, PALE, SERIES
from simrl.study.progress import compile_kernels, progress_bar

SIGMAS = (0.4, 0.5, 0.6, 0.8, 1.0)
MEANS_TOKENS = (2500, 4200, 6000)
PROMPT_SHARES = (0.6, 0.95)
ACCEPTED = (0.55, 0.7, 0.85)
ROUNDS_S = (0.001, 0.005, 0.02)  # of drafting, without the drafter's passes
RESPONSES = (16, 64, 256)  # of a worker
WORKERS, OF_EACH = 64, 256  # the paper's DAPO trace
FEW = 10  # workers where drafts are simulated: whole ones of 4 GPUs and, with a drafter, of 5


def of(
    inputs: Inputs, system: dict[str, object], lab: Lab, workers: int, responses: int
) -> dict[str, float]:
    """Simulate the rollout of one step."""
    scenario = specactor.scenario(inputs, "dapo", system, workers, responses)
    run = lab.run(scenario.model_copy(update={"steps": 1, "warmup_steps": 0}))
    return {key: float(run[key]) for key in ("idle_share", "rollout_s")}


def waiting(middle: Inputs, lab: Lab) -> pd.DataFrame:
    """Return the share of time that verl's 64 workers wait for the slowest, by lengths."""
    rows = []
    for share in PROMPT_SHARES:
        for mean_tokens in MEANS_TOKENS:
            for sigma in SIGMAS:
                inputs = {
                    **middle,
                    "prompt_share": share,
                    "mean_tokens": mean_tokens,
                    "sigma": sigma,
                }
                found = of(inputs, specactor.VERL, lab, WORKERS, OF_EACH)
                rows.append(
                    {"prompt_share": share, "mean_tokens": mean_tokens, "sigma": sigma, **found}
                )
    return pd.DataFrame(rows)


def gains(middle: Inputs, lab: Lab) -> pd.DataFrame:
    """Return verl's rollout over SpecActor's and over drafting in turns: by acceptance, by the overhead of a round of drafts,
    by responses a worker."""
    rows = []
    for responses in RESPONSES:
        plain_s = of(middle, specactor.VERL, lab, FEW, responses)["rollout_s"]
        for round_s in ROUNDS_S:
            for accepted in ACCEPTED:
                inputs = {**middle, "accept_0p5b": accepted, "draft_round_s": round_s}
                row = {
                    "responses_per_worker": responses,
                    "draft_round_s": round_s,
                    "accepted": accepted,
                }
                for name, system in (
                    ("in_turns", specactor.vanilla(middle)),
                    ("ahead", specactor.specactor(middle, reconfigure=False, best_of_n=False)),
                    ("specactor", specactor.specactor(middle)),
                ):
                    row[name] = plain_s / of(inputs, system, lab, FEW, responses)["rollout_s"]
                rows.append(row)
    return pd.DataFrame(rows)


def draw(idle: pd.DataFrame, gain: pd.DataFrame, path: Path) -> None:
    """Draw on the left the waiting share by lengths, on the right each part's gain by responses a worker and acceptance."""
    figure, grid = plt.subplots(1, 1 + len(RESPONSES), figsize=(14, 3.6), layout="constrained")
    axes = list(grid)
    waited = published_rows()["spec-idle"].elements[0]
    for (share, mean_tokens), lines in idle.groupby(["prompt_share", "mean_tokens"]):
        style = "-" if share == min(PROMPT_SHARES) else "--"
        colour = SERIES[MEANS_TOKENS.index(mean_tokens)]
        label = f"mean {mean_tokens:,} tokens" if style == "-" else None
        axes[0].plot(
            lines["sigma"],
            100 * lines["idle_share"],
            style,
            color=colour,
            marker="o",
            ms=3,
            label=label,
        )
    axes[0].axhline(100 * waited.value, color=INK, lw=1, ls=":")
    axes[0].text(SIGMAS[-1], 100 * waited.value + 1, "published", ha="right", fontsize=8)
    axes[0].set(
        xlabel="spread of the log length (sigma)",
        ylabel="workers wait, % of verl's rollout",
        ylim=(0, None),
    )
    axes[0].set_title("Who waits (dashed: a prompt's responses alike)", fontsize=9)
    axes[0].legend(fontsize=7, frameon=False)
    low, high = published_rows()["spec-rollout-verl"].elements[0]
    for axis, responses in zip(axes[1:], RESPONSES, strict=True):
        for number, round_s in enumerate(ROUNDS_S):
            lines = gain[
                (gain["responses_per_worker"] == responses) & (gain["draft_round_s"] == round_s)
            ]
            label = f"{1000 * round_s:g} ms a round"
            axis.plot(
                lines["accepted"],
                lines["specactor"],
                color=SERIES[number],
                marker="o",
                ms=3,
                label=label,
            )
            axis.plot(lines["accepted"], lines["in_turns"], color=SERIES[number], ls="--", lw=1)
        axis.axhspan(low, high, color=PALE, zorder=0)
        axis.axhline(1, color=INK, lw=0.8)
        axis.text(ACCEPTED[0], high, "published", fontsize=8, va="top")
        axis.set(
            xlabel="a drafted token is accepted (0.5B)",
            ylabel="verl's rollout / theirs",
            ylim=(0, 3),
        )
        axis.set_title(f"SpecActor (dashed: in turns), {responses} a worker", fontsize=9)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(
    folder: Annotated[Path, typer.Option(help="where the picture and the tables go")] = Path(
        __file__
    ).parent,
    small: Small = False,
) -> None:
    lengths = {"SIGMAS": (0.5,), "MEANS_TOKENS": (2500,), "PROMPT_SHARES": (0.6,)}
    shrink(globals(), small, ACCEPTED=(0.7,), ROUNDS_S=(0.005,), RESPONSES=(16,), **lengths)
    compile_kernels()
    middle, lab = read_ledger("specactor").middle, Lab()
    with progress_bar() as progress:
        task = progress.add_task("cuts", total=2)
        idle = waiting(middle, lab)
        progress.advance(task)
        gain = gains(middle, lab)
        progress.advance(task)
    draw(idle, gain, folder / "specactor_map.png")
    print(idle.round(3).to_string(index=False))
    print(gain.round(3).to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
