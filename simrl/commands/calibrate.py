"""`simrl calibrate` and `simrl whatif`: from a real run's log, the few corrections that make the
simulator match that run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

import typer

from simrl.commands.command import command
from simrl.commands.compare import Comparison, simulate_all
from simrl.commands.options import JOBS, ByKey, File, Folder, Jobs, Systems, WindowLike
from simrl.commands.view import DataView, View, frame, place
from simrl.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from simrl.study.calibration import Calibration

RunLog = Annotated[
    File,
    typer.Argument(
        metavar="RUN_LOG",
        help="a metrics log of a framework: its console, or a table of W&B, TensorBoard, MLflow or SwanLab",
    ),
]
Settings = Annotated[
    ByKey | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="settings of the run, as in a scenario: model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1 …",
    ),
]
Window = Annotated[
    WindowLike | None,
    typer.Option(
        help="the steps to fit, FIRST-LAST; all others are held out (default: the first 20)"
    ),
]
Group = Annotated[int, typer.Option(min=1, help="responses per prompt, which no log has")]


class Logged(TypedDict, total=False):
    """The facts about a run that its log may lack. All are None where they are not given."""

    launch: Annotated[
        File | None,
        typer.Option(
            help="settings of the run as a scenario file; name, steps and workload are taken from the log"
        ),
    ]
    samples: Annotated[
        int | None, typer.Option(min=1, help="responses per step, if the log does not have them")
    ]
    prompt_tokens: Annotated[
        float | None, typer.Option(min=1, help="mean prompt length, if the log does not have it")
    ]
    cap_tokens: Annotated[
        int | None,
        typer.Option(
            "--cap-tokens",
            min=1,
            help="max_response_length of the run (default: the longest logged)",
        ),
    ]
    log_format: Annotated[
        str | None,
        typer.Option("--format", help="verl, trl, slime, nemo_rl … (default: from the file)"),
    ]
    columns: Annotated[
        ByKey | None,
        typer.Option(
            "--column",
            help="a tag of the log: OURS=THEIRS, such as timing_s/gen=timing/generate, or a YAML file of OURS: THEIRS; may be "
            "repeated",
        ),
    ]
    trace: Annotated[
        File | None,
        typer.Option(
            "--trace",
            help="the run's own lengths (simrl trace import …), in place of lengths drawn from the log",
        ),
    ]


class CalibrationView(DataView):
    """The few corrections that make simrl match a real run, and its error. `data` has all of it,
    the `scenario` too; `table` has a row per correction: its value, standard error and range, and
    its key in a scenario."""

    data: Calibration

    @property
    def errors(self) -> pd.DataFrame:
        """A row per phase: the error of simulated against logged seconds, in the window and on the
        held-out steps."""
        return frame(self.data.as_json()["errors"])

    @property
    def steps(self) -> pd.DataFrame:
        """A row per step of the log, measured and simulated seconds of its phases."""
        return self.data.steps


@dataclass(frozen=True, repr=False)
class WhatIf(View):
    """A real run and its prediction under other systems: its `calibration`, the `comparison` on its
    own steps, whose rows have the `ranges` of the speed-up by what is not known (`fits` that do as
    well on the window, the `likeness` of responses of a prompt), and `said`, remarks on the rows."""

    calibration: CalibrationView
    comparison: Comparison
    said: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<What if: {', '.join(self.comparison.names)}>"

    def _show(self, console: Console) -> None:
        from simrl.show.tables.calibration import print_calibration

        print_calibration(self.calibration.data, console, doubts=False)  # the rows have them
        console.print()
        self.comparison._show(console)
        for line in self.said:
            console.print(line)

    def json(self) -> Any:
        """Return what `--json` prints."""
        return {
            "systems": self.comparison.rows,
            **self.calibration.data.as_json(),
            "said": self.said,
        }

    @property
    def table(self) -> pd.DataFrame:
        """A row per run, the columns of a comparison; the first is the run's own system."""
        return self.comparison.table


@command
def calibrate(
    log: RunLog,
    overrides: Settings = None,
    *,
    window: Window = None,
    group: Group = 1,
    folder: Folder = None,
    preset: Annotated[
        File | None,
        typer.Option(
            "--preset", help="also write the run's framework and engine as a preset (TOML)"
        ),
    ] = None,
    **logged: Unpack[Logged],
) -> CalibrationView:
    """Fit a few named corrections to some steps of a real run's log, and report the error on the others.
    \f
    `overrides` may be a dictionary: {"model": "qwen2.5-3b", "cluster.gpu": "a100", "cluster.gpus": 4, "cluster.tp": 1};
    `window` may be (1, 20). Raises `InputError` for a log without the data to fit, and without a description of the launch.
    """
    from simrl.commands.workload import folder_or_temporary
    from simrl.scenario.presets import write_presets
    from simrl.study.calibration import CALIBRATED, presets_of, run_name

    output = place(folder, Path("results") / f"{run_name(Path(log))}-calibrated")
    with folder_or_temporary(output) as written:
        view = _calibrated(log, overrides, window, group, written, logged)
    if preset is not None:
        made = f"Written by simrl calibrate from {Path(log).name}"
        write_presets(Path(preset), presets_of(view.data, Path(log).name), made)
        view = replace(
            view, more={"preset": str(preset)}, notes=[f"\nPreset: {preset} (framework={preset})"]
        )
    if output is None:
        return view
    note = (
        f"\nWritten to {output}: calibrated.yaml, the run as a scenario (simrl compare {output / CALIBRATED}), its lengths, "
        "calibration.json"
    )
    return replace(
        view, more={**view.more, "scenario": str(output / CALIBRATED)}, notes=[*view.notes, note]
    )


@command
def whatif(
    log: RunLog,
    systems: Systems = None,
    overrides: Settings = None,
    *,
    window: Window = None,
    group: Group = 1,
    folder: Folder = None,
    jobs: Jobs = JOBS,
    **logged: Unpack[Logged],
) -> WhatIf:
    """Predict a real run under other systems: calibrate on its log, then simulate its own steps under each system.
    \f
    `systems` are as for `compare`, all other arguments as for `calibrate`; the run's own system comes first. Every row trains
    as many samples as the run did; a system without a `rollout_share` gets the best of a few.
    """
    from simrl.commands.workload import folder_or_temporary, listed_systems, without_parameters
    from simrl.files import temporary_folder
    from simrl.study.calibration import CALIBRATED, run_name
    from simrl.study.compare import ALONE
    from simrl.study.logged_lengths import write_alike
    from simrl.study.whatif import alternatives, check_system

    if not systems:
        raise InputError(
            "whatif: no --system; name one to try, such as --system rhymerl (simrl systems lists them)"
        )
    others, overrides = without_parameters(listed_systems("whatif", systems), overrides)
    for system in others:  # before minutes are spent on a calibration
        check_system(system)
    output = place(folder, Path("results") / f"{run_name(Path(log))}-whatif")
    run_place = output and output.with_name(f"{output.name}-run")
    with folder_or_temporary(run_place) as run_folder, temporary_folder() as temporary:
        calibration = _calibrated(log, overrides, window, group, run_folder, logged)
        alike = None if logged.get("trace") else write_alike(run_folder, temporary)
        scenarios, remarks = alternatives(run_folder / CALIBRATED, others, jobs)
        compared = simulate_all(scenarios, None, jobs, output, replace(ALONE, alike=alike))
    return WhatIf(calibration, compared, remarks, notes=compared.notes, width=200)


def _calibrated(
    log: Any, overrides: Any, window: Any, group: int, folder: Path, logged: Mapping[str, Any]
) -> CalibrationView:
    """Calibrate on a log, with the files in `folder`."""
    from simrl.commands.workload import columns_of, settings_of
    from simrl.show.tables.calibration import print_calibration
    from simrl.study.calibration import calibrated

    settings_of(overrides)  # a wrong type is refused
    texts = overrides or []
    if isinstance(overrides, Mapping):
        texts = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    steps = None
    if window is not None:
        text = window if isinstance(window, str) else "-".join(map(str, window))
        first, _, last = text.partition("-")
        if not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
            raise InputError(f"--window {text}: write FIRST-LAST, steps of the log, such as 1-20")
        steps = int(first), int(last)
    facts: dict[str, Any] = {**dict.fromkeys(Logged.__annotations__), **logged}
    facts |= {key: Path(facts[key]) for key in ("launch", "trace") if facts[key] is not None}
    facts["columns"] = columns_of(facts["columns"])
    calibration = calibrated(Path(log), texts, window=steps, group=group, folder=folder, **facts)
    name = "Calibration of {} on steps {} to {}".format(
        calibration.scenario.name, *calibration.window
    )
    return CalibrationView(
        calibration, print_calibration, name, calibration.as_json()["corrections"], width=200
    )
