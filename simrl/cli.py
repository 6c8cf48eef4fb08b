"""The `simrl` command. Heavy modules are imported inside the commands, so that `--help` is quick.

Exit codes: 0 done, 1 stopped (Ctrl-C), 2 bad input, told in one line on stderr.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from simrl import (
    cli_acceptance,
    cli_agreement,
    cli_allocate,
    cli_calibrate,
    cli_explain,
    cli_optimize,
    cli_profile,
    cli_report,
    cli_reproduce,
    cli_speculation,
    cli_sweep,
    cli_systems,
    cli_trace,
)
from simrl.errors import InputError, StoppedError, first_line

UsageError: Any = typer.BadParameter.__mro__[1]  # of the click that this typer has
INTERRUPTED = "interrupted; nothing was written"

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
app.add_typer(cli_systems.app, name="systems")
app.add_typer(cli_speculation.app, name="speculation")
app.command(epilog="Example:  simrl allocate --trace my_run.parquet --profile p.parquet --workers 32")(
    cli_allocate.allocate
)
app.command(
    epilog="Examples:  simrl acceptance my_run.parquet --profile profiles/qwen3-14b_h100_tp2.parquet   |   "
    "simrl acceptance my_run.parquet --drafter siblings --window 8 --model qwen3-8b --gpu h100"
)(cli_acceptance.acceptance)
app.command(
    epilog="Examples:  simrl calibrate run.log --window 1-20 model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1"
    "   |   simrl calibrate run.log --launch experiments/verl_run_launch.yaml --group 16"
)(cli_calibrate.calibrate)
app.command(
    epilog="Example:  simrl whatif run.log --launch experiments/verl_run_launch.yaml --group 16 --system rhymerl --system areal"
)(cli_calibrate.whatif)

app.command(epilog=cli_reproduce.EXAMPLES)(cli_reproduce.reproduce)

ScenarioPath = Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="changes to the scenario, such as cluster.gpus=128 seed=3"),
]
Pipelines = Annotated[
    list[str] | None,
    typer.Option("--pipeline", help="a system whose pipeline to take (see simrl systems); may be repeated"),
]
Dispatches = Annotated[
    list[str] | None, typer.Option("--dispatch", help="least_requests, seer … under those pipelines; may be repeated")
]
Speculations = Annotated[
    list[str] | None, typer.Option("--speculation", help="none, histospec, tlt … with all of these; may be repeated")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables (its keys are stable)")]
OutputFolder = Annotated[
    Path | None, typer.Option("--output", "-o", help="where the results go (default: results/NAME)")
]


@app.command(
    epilog="Examples:  simrl compare experiments/quickstart.yaml   |   "
    "simrl compare experiments/quickstart.yaml cluster.gpus=128 seed=3 'systems=\\[split,{name: areal, eta: 4}]'   |   "
    "simrl compare experiments/quickstart.yaml --pipeline areal --pipeline rhymerl --speculation none --speculation histospec"
    "   |   simrl compare scenario.yaml --measured results/replay"
)
def compare(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    pipeline: Pipelines = None,
    dispatch: Dispatches = None,
    speculation: Speculations = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="a result folder, such as a replay's, to compare with SCENARIO: one with one system, or a result folder too"
        ),
    ] = None,
    output: OutputFolder = None,
    jobs: Annotated[int, typer.Option(min=1, help="simulations at the same time")] = os.cpu_count() or 1,
    as_json: AsJson = False,
) -> None:
    """Simulate every system of a scenario and print which is fastest; write tables, timelines and traces of all."""
    from simrl.comparison import compare_scenarios
    from simrl.scenario import Choices, ScenarioFile, override
    from simrl.systems import parameters_of
    from simrl.table import print_comparison

    choices = Choices(pipeline or (), dispatch or (), speculation or ())
    if measured is not None:
        cli_agreement.compare_with_measured(scenario, measured, overrides or [], choices, output, as_json)
        return
    settings = [override(text) for text in overrides or []]
    file = ScenarioFile(scenario, settings)
    scenarios = file.scenarios(choices, parameters_of)
    folder = output or Path("results") / scenarios[0].name
    replaced = (folder / "comparison.json").exists()
    for line in file.overruled(setting.key for setting in settings):
        print(f"simrl: {line}", file=sys.stderr)
    rows = compare_scenarios(scenarios, folder, jobs)
    if as_json:
        _print_json(rows)
    else:
        print_comparison(rows, scenarios, folder)
        if replaced:
            print("It replaced the results of an earlier run there; --output names another folder.")


@app.command(
    epilog="Examples:  simrl run experiments/quickstart.yaml --system areal eta=8 cluster.gpus=64   |   "
    "simrl run experiments/quickstart.yaml --pipeline one_step_off --dispatch seer --speculation siblings"
)
def run(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    system: Annotated[str | None, typer.Option(help="the system to run; the scenario's only one if not given")] = None,
    pipeline: Annotated[str | None, typer.Option(help="the same")] = None,
    dispatch: Annotated[str | None, typer.Option(help="with this dispatch in place of its own")] = None,
    speculation: Annotated[str | None, typer.Option(help="with this speculation in place of its own")] = None,
    output: OutputFolder = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one system of a scenario. With --system, overrides such as eta=8 are its parameters."""
    from simrl.comparison import compare_scenarios, run_names
    from simrl.scenario import Choices, load_scenarios
    from simrl.systems import make_system, parameters_of
    from simrl.table import print_comparison

    if system and pipeline:
        raise InputError(f"--system {system} and --pipeline {pipeline} are the same option; give one of them")
    choices = Choices((), [dispatch] if dispatch else (), [speculation] if speculation else ())
    scenarios = load_scenarios(scenario, overrides or [], system or pipeline, choices, parameters_of)
    if len(scenarios) > 1:
        for each in scenarios:  # what is misspelt is told first
            make_system(each.system.name, each.system.parameters)
        varied = {part.partition("=")[0]: None for each in scenarios for part in each.variant.split(", ") if part}
        choose = [*([] if system or pipeline else ["--system NAME"]), *(f"{key}=…" for key in varied)]
        raise InputError(
            f"{scenario}: {len(scenarios)} runs ({run_names(scenarios)}); choose one with {' and '.join(choose)}, or compare"
        )
    folder = output or Path("results") / f"{scenarios[0].name}-{scenarios[0].system.name}"
    rows = compare_scenarios(scenarios, folder, jobs=1)
    if as_json:
        _print_json(rows)
    else:
        print_comparison(rows, scenarios, folder)


app.command(epilog=cli_sweep.EXAMPLES)(cli_sweep.sweep)
app.command(epilog=cli_optimize.EXAMPLES)(cli_optimize.optimize)


app.command(epilog="Example:  simrl explain results/quickstart/cluster.gpus-64-areal-eta-4")(cli_explain.explain)
app.command(
    epilog="Example:  simrl diff results/quickstart/cluster.gpus-64-verl-colocated "
    "results/quickstart/cluster.gpus-64-areal-eta-4"
)(cli_explain.diff)
app.command(epilog=cli_report.EXAMPLES)(cli_report.report)


def _add_commands() -> None:
    """Commands of other packages, such as `simrl measure`, through entry points: functions, beside them a module's `EXAMPLE`.
    One that cannot be loaded says so when it is asked."""
    for entry in entry_points(group="simrl.commands"):
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:
            command = _missing(entry.name, error)
        example = getattr(sys.modules[command.__module__], "EXAMPLE", f"Example:  simrl {entry.name} --help")
        app.command(entry.name, epilog=example)(command)


def _missing(name: str, error: Exception) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise InputError(f"simrl {name}: cannot be loaded ({first_line(error)}); install simrl again, with all of it")

    command.__doc__ = f"Cannot be loaded: {first_line(error)}."
    return command


_add_commands()


@app.command(epilog="Example:  simrl version")
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    from simrl import __version__

    if as_json:
        _print_json({"version": __version__})
    else:
        print(__version__)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def main() -> None:
    """Entry point: one line and an exit code for bad input, for what stops a run, and for whoever stops it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is half-written is removed
    warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a picture has boxes in place of them
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names and signs that the terminal cannot show
    try:
        try:
            _check_arguments(sys.argv[1:])
            code = app(standalone_mode=False)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a failure can still be told
        if code == 130:  # what typer makes of Ctrl-C
            _end(INTERRUPTED, 1)
        if isinstance(code, int):
            sys.exit(code)
    except InputError as error:
        _end(error, 2)
    except UsageError as error:
        _end_of_usage(error)
    except StoppedError as error:
        _end(error, 1)
    except KeyboardInterrupt:
        _end(INTERRUPTED, 1)
    except MemoryError:
        _end("out of memory; nothing was written; simulate fewer samples, or fewer --jobs at a time", 1)
    except OSError as error:
        if error.filename is not None:  # a file that may not be read, a name that is too long
            _end(f"{error.filename}: {error.strerror}; name another", 2)
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        if error.errno == errno.EPIPE:
            sys.exit(1)  # whoever read it has gone, and needs no message
        _end(f"stdout cannot be written ({error.strerror}); send it where there is room", 2)


def _check_arguments(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"argument {argument!r} is not UTF-8; rename the file") from error


def _end_of_usage(error: Any) -> NoReturn:
    """What is wrong with the words of a command, in a line; nothing more where its help was shown."""
    said = str(error.format_message()).rstrip(".")
    if not said:
        sys.exit(2)
    command = error.ctx.command_path if error.ctx else "simrl"
    more = "" if said.endswith("?") else f"; {command} --help tells what it takes"
    _end(f"{said[0].lower()}{said[1:]}{more}", 2)


def _end(message: object, code: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who presses Ctrl-C again gets no traceback
    with suppress(OSError):  # nowhere left to tell it
        print(f"simrl: {' '.join(str(message).split())}", file=sys.stderr or io.StringIO(), flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
