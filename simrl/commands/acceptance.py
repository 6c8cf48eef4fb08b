"""`simrl acceptance`: the drafts from texts on a recorded run, counted, and whether they pay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.commands.command import command
from simrl.commands.options import GpuName, Picture
from simrl.commands.view import DataView, drawn, frame
from simrl.errors import InputError, meant, refuse

if TYPE_CHECKING:
    import pandas as pd

    from simrl.profile.profile import TableProfile
    from simrl.show.style import Picture as Drawn
    from simrl.speculation.siblings import Known
    from simrl.speculation.windows import Window
    from simrl.trace.trace import Trace

    TraceLike = str | os.PathLike[str] | Trace
    ProfileLike = str | os.PathLike[str] | TableProfile
    WindowSize = str | int
else:
    TraceLike = ProfileLike = Path
    WindowSize = str


class AcceptanceView(DataView):
    """The drafts from texts on a recorded run, counted on its tokens. `data` is what `--json`
    prints, but for `picture`; `table` has a row per epoch: responses, those with drafts, and their
    rates."""

    data: dict[str, Any]

    @property
    def batches(self) -> pd.DataFrame:
        """A row per batch size: seconds per token without and with drafts, and the speed-up of
        decoding. Raises `InputError` without step times."""
        if self.data["pays"] is None:
            raise InputError(
                "no step times: give acceptance profile=, or model= and gpu=, to know at which batches drafts pay"
            )
        return frame(self.data["pays"]["by_batch"])

    @property
    def speculation(self) -> dict[str, Any]:
        """The model fitted to these drafts, as a scenario has it for traces without tokens:
        `overrides={"speculation": found.speculation}`."""
        import yaml

        from simrl.analysis.acceptance import model_yaml

        return dict(yaml.safe_load(model_yaml(self.data))["speculation"])

    def figure(self) -> Drawn:
        """Draw hit lengths, epochs, responses and, with step times, the speed-up by batch."""
        from simrl.show.figures.acceptance import report_figure

        return report_figure(self.data)


@command
def acceptance(
    trace: Annotated[
        TraceLike, typer.Argument(metavar="TRACE", help="a trace with token ids (Parquet)")
    ],
    *,
    drafter: Annotated[
        str,
        typer.Option(
            help="history-paper, history-code (HistoSpec's two variants), siblings (of the same group) or ngram (own text)"
        ),
    ] = "history-paper",
    window: Annotated[
        WindowSize | None,
        typer.Option(
            help="aimd, mimd or a number of tokens (default: aimd, the paper's; for history-code mimd)"
        ),
    ] = None,
    epochs_back: Annotated[
        int | None,
        typer.Option(min=1, help="history: number of earlier epochs to draft from (default: 1)"),
    ] = None,
    siblings_known: Annotated[
        str | None,
        typer.Option(
            help="siblings: lockstep (all run side by side, the default) or finished (all others are finished)"
        ),
    ] = None,
    profile: Annotated[
        ProfileLike | None,
        typer.Option(help="step times (Parquet), to find the batch sizes at which drafts pay"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="a model, in place of --profile: its shipped profile for GPU and tp, or else a roofline"
        ),
    ] = None,
    gpu: GpuName = None,
    tp: Annotated[
        int, typer.Option(min=1, help="with --model: GPUs of a tensor-parallel group")
    ] = 1,
    picture: Picture = None,
) -> AcceptanceView:
    """Count accepted drafts from history, siblings or a response's own text on a recorded run, and say whether they pay.

    A drafted token is accepted if it equals the recorded token. Also prints hit lengths, RhymeRL's Fig. 6 and a fitted model.
    \f
    `trace` may also be a `Trace`, `profile` a `TableProfile`. Raises `InputError` for a trace without token ids, or without
    anything to draft from.

    >>> import simrl
    >>> found = simrl.acceptance("traces/countdown/sync/trace.parquet", model="qwen3-8b", gpu="h100")
    >>> round(found.data["accept_length"], 1)
    3.3
    """
    from simrl.analysis.acceptance import DRAFTERS, measure, report
    from simrl.show.tables.acceptance import print_report
    from simrl.trace.trace import Trace, read_trace

    chosen = next((name for name in DRAFTERS if name == drafter), None)
    if chosen is None:
        raise InputError(
            f"--drafter {drafter}{meant(drafter, DRAFTERS)}: choose one of {', '.join(DRAFTERS)}"
        )
    refuse(
        (
            epochs_back is not None and not chosen.startswith("history"),
            f"--epochs-back {epochs_back}: only history drafts from epochs; {drafter} does not",
        ),
        (
            siblings_known is not None and chosen != "siblings",
            f"--siblings-known {siblings_known}: only the drafter siblings has it",
        ),
        (
            siblings_known not in (None, "lockstep", "finished"),
            f"--siblings-known {siblings_known}: choose lockstep or finished",
        ),
    )
    rule, times = _window(window), _step_times(profile, model, gpu, tp)
    recorded = trace if isinstance(trace, Trace) else read_trace(Path(trace))
    known: Known = "finished" if siblings_known == "finished" else "lockstep"
    data = report(
        measure(recorded, chosen, rule, epochs_back or 1, known, threads=os.cpu_count() or 1), times
    )
    name = f"Acceptance of {data['drafter']} on {data['trace']['name']}"
    view = AcceptanceView(data, print_report, name, data["by_epoch"], width=80)
    file = Path(trace).stem if isinstance(trace, str | os.PathLike) else recorded.metadata.name
    return drawn(view, picture, f"{file}-acceptance.png", view.figure)


def _window(window: Any) -> Window | None:
    from simrl.speculation.drafter import MOST_DRAFT_TOKENS
    from simrl.speculation.windows import Aimd, Fixed, Mimd

    if window is None:
        return None
    if window in ("aimd", "mimd"):
        return Aimd() if window == "aimd" else Mimd()
    if not str(window).isdecimal() or not 1 <= int(window) <= MOST_DRAFT_TOKENS:
        raise InputError(
            f"--window {window}: choose aimd, mimd or a number of tokens from 1 to {MOST_DRAFT_TOKENS}"
        )
    return Fixed(tokens=int(window))


def _step_times(profile: Any, model: str | None, gpu: str | None, tp: int) -> TableProfile | None:
    from simrl.profile.derived_layouts import profile_of
    from simrl.profile.profile import TableProfile, read_profile

    if profile is not None:
        if model or gpu:
            raise InputError(
                "--profile and --model or --gpu: a profile has its own; give one of them"
            )
        return profile if isinstance(profile, TableProfile) else read_profile(profile)
    if model is None and gpu is None:
        return None
    if model is None or gpu is None:
        lacking = "--gpu without --model" if model is None else "--model without --gpu"
        raise InputError(f"{lacking}: step times need both, or --profile")
    return profile_of(model, gpu, tp)
