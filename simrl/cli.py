"""The `simrl` command. Heavy modules are imported inside the commands, so that `--help` is quick.

Exit codes: 0 done, 1 stopped (Ctrl-C), 2 bad input, told in one line on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from simrl import cli_profile, cli_trace
from simrl.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Which RL post-training system finishes first on your model, rollouts and cluster, and why?",
    epilog="Start with:  simrl compare experiments/quickstart.yaml",
)
app.add_typer(cli_trace.app, name="trace")
app.add_typer(cli_profile.app, name="profile")

ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="changes to the scenario, such as cluster.gpus=128 seed=3"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables (its keys are stable)")]
OutputFolder = Annotated[
    Path | None, typer.Option("--output", "-o", help="where the results go (default: results/NAME)")
]


@app.command(
    epilog="Examples:  simrl compare experiments/quickstart.yaml   |   "
    "simrl compare experiments/quickstart.yaml cluster.gpus=128 seed=3 'systems=[split,{name: areal, eta: 4}]'"
)
def compare(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    output: OutputFolder = None,
    jobs: Annotated[int, typer.Option(min=1, help="simulations at the same time")] = os.cpu_count() or 1,
    as_json: AsJson = False,
) -> None:
    """Simulate every system of a scenario and print which is fastest; write tables, timelines and traces of all."""
    from simrl.compare import compare_scenarios, print_comparison
    from simrl.scenario import load_scenarios

    scenarios = load_scenarios(scenario, overrides or [])
    folder = output or Path("results") / scenarios[0].name
    rows = compare_scenarios(scenarios, folder, jobs)
    if as_json:
        _print_json(rows)
    else:
        print_comparison(rows, scenarios, folder)


@app.command(epilog="Example:  simrl run experiments/quickstart.yaml --system areal eta=8 cluster.gpus=64")
def run(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    system: Annotated[str | None, typer.Option(help="the system to run; the scenario's only one if not given")] = None,
    output: OutputFolder = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one system of a scenario. With --system, overrides such as eta=8 are its parameters."""
    from simrl.compare import compare_scenarios, print_comparison
    from simrl.scenario import load_scenarios

    scenarios = load_scenarios(scenario, overrides or [], system=system)
    if len(scenarios) > 1:
        names = ", ".join(dict.fromkeys(s.system.name for s in scenarios))
        raise InputError(
            f"{scenario}: {len(scenarios)} runs ({names}); choose one with --system NAME and cluster.gpus=…, or compare"
        )
    folder = output or Path("results") / f"{scenarios[0].name}-{scenarios[0].system.name}"
    rows = compare_scenarios(scenarios, folder, jobs=1)
    if as_json:
        _print_json(rows)
    else:
        print_comparison(rows, scenarios, folder)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    from simrl import __version__

    if as_json:
        _print_json({"version": __version__})
    else:
        print(__version__)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, ensure_ascii=False))


def main() -> None:
    """Entry point: turns bad input and Ctrl-C into one line and an exit code."""
    try:
        app()
    except InputError as error:
        print(f"simrl: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("simrl: interrupted; nothing was written", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
