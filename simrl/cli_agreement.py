"""`simrl compare … --measured RESULT`: predicted against measured."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simrl.errors import InputError

if TYPE_CHECKING:
    from simrl.scenario import Choices, Scenario


def compare_with_measured(
    predicted: Path, measured: Path, overrides: Sequence[str], choices: Choices, output: Path | None, as_json: bool
) -> None:
    """Reads `predicted`, or simulates it if it is a scenario; prints how far `measured` is from it, and writes that down."""
    from rich.console import Console

    from simrl.agreement import agree
    from simrl.agreement_plot import plot_agreement
    from simrl.agreement_table import print_agreement
    from simrl.comparison import MANIFEST, compare_scenarios
    from simrl.files import write_whole_folder
    from simrl.result import read_result

    happened = read_result(_result_in(measured, "measured"))  # before anything is simulated
    scenario = None if predicted.is_dir() else _only_scenario(predicted, overrides, choices)
    if scenario is None and (overrides or any(choices)):
        raise InputError(f"{predicted}: is the result of a run, which overrides cannot change; name a scenario instead")
    folder = output or Path("results") / f"{_name(scenario, predicted)}-agreement"
    replaced = (folder / "agreement.json").exists()
    with write_whole_folder(folder, MANIFEST) as temporary:
        source = _result_in(predicted, "predicted")
        if scenario is not None:
            (row,) = compare_scenarios([scenario], temporary / "predicted", jobs=1)
            source = temporary / "predicted" / row["folder"]
        expected = read_result(source)
        try:
            agreement = agree(expected, happened)
        except InputError as error:
            raise InputError(f"{predicted}, measured {measured}: {error}") from error
        text = json.dumps(agreement.as_json(), indent=1)
        (temporary / "agreement.json").write_text(text + "\n", encoding="utf-8")
        plot_agreement(expected, happened, agreement, temporary / "agreement.png")
    if as_json:
        print(text)
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000  # a file or a pipe: nothing has to be left out or broken
    print_agreement(agreement, console)
    console.print(f"Written to {folder}: agreement.json, agreement.png", soft_wrap=True)
    if scenario is not None:
        console.print(f"and what was predicted: {folder / 'predicted'}", soft_wrap=True)
    if replaced:
        console.print("It replaced an earlier comparison there; --output names another folder.")


def _result_in(folder: Path, name: str) -> Path:
    """A replay's folder holds both its results."""
    from simrl.result import METADATA_FILE

    return folder / name if (folder / name).is_dir() and not (folder / METADATA_FILE).exists() else folder


def _name(scenario: Scenario | None, predicted: Path) -> str:
    """Of what is compared: a replay calls the folders of both its results the same, whatever it is of."""
    from simrl.comparison import folder_name

    if scenario is not None:
        return f"{scenario.name}-{folder_name(scenario)}"
    folder = predicted.resolve()
    return folder.parent.name if folder.name in ("predicted", "measured") else folder.name


def _only_scenario(file: Path, overrides: Sequence[str], choices: Choices) -> Scenario:
    from simrl.comparison import run_names
    from simrl.scenario import load_scenarios
    from simrl.systems import parameters_of

    scenarios = load_scenarios(file, overrides, choices=choices, parameters_of=parameters_of)
    if len(scenarios) > 1:
        raise InputError(
            f"{file}: {len(scenarios)} runs ({run_names(scenarios)}), but one was measured; choose it with systems=[NAME] and "
            "cluster.gpus=…, or name its result folder"
        )
    return scenarios[0]
