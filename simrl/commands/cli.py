"""The `simrl` command: its commands with their examples, and how it ends.

Heavy modules are imported inside the commands, so that `--help` is quick. Exit codes: 0 done, 1
stopped (Ctrl-C), 2 bad input, reported in one line on stderr.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer

import simrl
from simrl.commands import (
    advise,
    allocate,
    calibrate,
    compare,
    examples,
    init,
    presets,
    profile,
    results,
    serve,
    sweep,
    systems,
    trace,
)
from simrl.commands.acceptance import acceptance
from simrl.commands.command import Command, add_command
from simrl.errors import InputError, StoppedError, brief, first_line, refuse
from simrl.interrupts import hear_again
from simrl.trace.importers.sources import known_sources
from simrl.validation import LONGEST_TEXT, number_meant, right, shortened

UsageError: Any = typer.BadParameter.__mro__[1]  # of the click that this typer has
INTERRUPTED = "interrupted; nothing was written"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(simrl.__version__)
        raise typer.Exit


@cache
def make_app() -> typer.Typer:
    """Return the command with all its commands: simrl's own, then those of other packages."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
        help="Which RL post-training system finishes first on your model, rollouts and cluster, and why?",
        epilog="Start with:  simrl examples copy reasoning   and   simrl compare experiments/reasoning.yaml",
    )
    app.callback()(_options_of_simrl)
    traces = _group(app, "trace", "Traces of rollouts: import a run, look at one, draw one.")
    imports = _group(traces, "import", "Convert what a framework wrote into a trace (Parquet).")
    for name, source in known_sources().items():
        add_command(
            imports,
            trace.importers().own[name],
            f"simrl trace import {name} {source.example}",
            name=name,
        )
    for name in trace.importers().added():
        add_command(
            imports, trace.added_importer(name), f"simrl trace import {name} --help", name=name
        )
    profiles = _group(
        app,
        "profile",
        "Profiles of step times: list the shipped ones, look at one, derive or import one.",
    )
    groups = {"trace": traces, "profile": profiles}
    for name, (listed, shown, *ends) in LISTS.items():
        groups[name] = typer.Typer(rich_markup_mode="rich")
        app.add_typer(groups[name], name=name)
        add_command(groups[name], listed, *ends, keys=JSON_KEYS[name], group=True)
        add_command(groups[name], shown, *ends[1:-1], name="copy" if name == "examples" else "show")
    for path, (function, *ends) in COMMANDS.items():
        *above, name = path.split()
        add_command(
            groups[above[0]] if above else app,
            function,
            *[f"simrl {path} {end}" for end in ends],
            name=name,
            keys=JSON_KEYS.get(path, ""),
        )
    for entry in entry_points(group="simrl.commands"):
        _add_entry(app, entry)
    return app


def _options_of_simrl(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            is_eager=True,
            callback=_print_version,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass  # the option alone


def _group(app: typer.Typer, name: str, summary: str) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, help=summary)
    app.add_typer(group, name=name)
    return group


def _add_entry(app: typer.Typer, entry: Any) -> None:
    """Add a command of another package, such as `simrl measure`: a function, and the `EXAMPLE` of
    its module. A command that cannot be loaded reports why when it is called."""
    try:
        command = entry.load()
    except (ImportError, AttributeError) as error:
        command = _missing(entry.name, error)
    example = getattr(
        sys.modules[command.__module__], "EXAMPLE", f"Example:  simrl {entry.name} --help"
    )
    app.command(entry.name, cls=Command, epilog=example)(command)


def _missing(name: str, error: Exception) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise InputError(
            f"simrl {name}: cannot be loaded ({first_line(error)}); install simrl again, with all of it"
        )

    command.__doc__ = f"Cannot be loaded: {first_line(error)}."
    return command


JSON_KEYS = {
    "systems": "name, pipeline, dispatch, speculation, paper, parameters",
    "speculation": "name, drafter, paper, parameters",
    "examples": "by name: about, command, files",
    "presets": "name, kind, about, engine, constants",
    "init": "scenario, data, keys (list, key, value, field, becomes), changed, assumed, notes",
    "sweep": "table, points, simulated, failed, errors, fastest (point, left_open, ranges, step_s_range)",
    "acceptance": "drafter, history, acceptance_rate, speculation_rate, accept_length, by_epoch, hit_lengths, by_response, "
    "pays, run_model, run_model_accept_length, window, responses, responses_with_drafts, tokens_with_drafts, "
    "trace, picture",
    "allocate": "groups (group, prompts, samples, representative_tokens, workers, equal_workers, predicted_s, "
    "equal_predicted_s, target_s), t0_s, gradient_s, exact_gradient_s, needed_workers, leftover_workers, two_step_sums, plans, "
    "growth_factor, notes, and the arguments",
}
LISTS: dict[str, tuple[Any, ...]] = {
    "systems": (
        systems.systems, systems.show_system, "simrl systems", "simrl systems show areal", "simrl systems show rhymerl --json"
    ),
    "speculation": (
        systems.speculation, systems.show_method,
        "simrl speculation", "simrl speculation show histospec", "simrl speculation --json",
    ),
    "examples": (
        examples.examples, examples.copy_example,
        "simrl examples", "simrl examples copy math_14b", "simrl examples copy quickstart my_folder", "simrl examples --json",
    ),
    "presets": (
        presets.presets, presets.show_preset, "simrl presets", "simrl presets show vllm-0.19", "simrl presets --json"
    ),
}  # fmt: skip
COMMANDS: dict[str, tuple[Any, ...]] = {
    "init": (
        init.init,
        "--from run_qwen3_8b.sh --gpu h100 --mean-tokens 3000",
        "--from grpo_math_8B.yaml --lists",
        "--from run.sh --trace my_run.parquet -o my_run.yaml cluster.gpus=64",
        "",
    ),
    "compare": (
        compare.compare,
        "experiments/quickstart.yaml",
        "experiments/quickstart.yaml cluster.gpus=64,128 seed=3 systems=split,areal eta=4",
        "experiments/quickstart.yaml 'systems=\\[split,{name: areal, eta: 4}]'",
        "experiments/quickstart.yaml --pipeline areal --pipeline rhymerl --speculation none --speculation histospec",
        "my_run.parquet --model qwen3-8b --gpu h100 --gpus 64 --system verl_colocated --system areal",
        "scenario.yaml --measured results/replay",
    ),
    "run": (
        compare.run,
        "experiments/quickstart.yaml --system areal eta=8 cluster.gpus=64",
        "experiments/quickstart.yaml --pipeline one_step_off --dispatch seer --speculation siblings",
    ),
    "sweep": (
        sweep.sweep,
        "experiments/quickstart.yaml cluster.gpus=64,128,256 seed=0..4",
        "experiments/quickstart.yaml 'systems=one_step_off,{name: areal, eta: 2}' system.rollout_share=0.5,0.75",
        "experiments/quickstart.yaml cluster.gpus=64,128 cluster.tp=2,4 --zip cluster.gpus,cluster.tp",
        "experiments/quickstart.yaml systems=areal system.eta=0..8 system.rollout_share=0.5..0.95 --sample 200",
        "experiments/quickstart.yaml seed=0..99 --ray auto",
    ),
    "advise": (
        advise.advise,
        "experiments/math_14b.yaml --clusters 32,64,128 --updates 500",
        "experiments/quickstart.yaml cluster.gpus=16 systems=one_step_off,areal system.eta=1,2,4 --details",
        "experiments/math_14b.yaml --clusters 32,64,128 --updates 500 --deadline 36h",
        "my_run.csv --model qwen3-8b --gpu h100 --clusters 32,64 --price 2.5 --framework verl --max-off-policyness 4",
    ),
    "explain": (results.explain, "results/quickstart/cluster.gpus-64-areal-eta-4"),
    "diff": (
        results.diff,
        "results/quickstart/cluster.gpus-64-verl-colocated results/quickstart/cluster.gpus-64-areal-eta-4",
    ),
    "report": (
        results.report,
        "results/quickstart -o quickstart.html",
        "results/quickstart-sweep",
        "results/quickstart/cluster.gpus-64-areal-eta-4",
    ),
    "serve": (
        serve.serve,
        "experiments/math_14b.yaml",
        "experiments/moe_30b.yaml --port 0 --no-open",
    ),
    "calibrate": (
        calibrate.calibrate,
        "run.log --window 1-20 model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1",
        "run.log --launch my_launch.yaml --group 16 --preset my_framework.toml",
    ),
    "whatif": (
        calibrate.whatif,
        "run.log --group 16 --system areal eta=2 model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1",
        "run.log --launch my_launch.yaml --group 16 --system rhymerl --system areal",
    ),
    "acceptance": (
        acceptance,
        "my_run.parquet --profile qwen3-14b_h100_tp2",
        "my_run.parquet --drafter siblings --window 8 --model qwen3-8b --gpu h100",
    ),
    "allocate": (
        allocate.allocate,
        "--trace my_run.parquet --profile qwen3-14b_h100_tp2 --workers 32",
    ),
    "trace show": (trace.show, "my_run.parquet", "my_run.parquet --plot lengths.svg"),
    "trace synth": (
        trace.synth,
        "-o math.parquet --preset rhymerl-math steps=40 group=16",
        "-o t.parquet steps=10 prompts_per_step=64 group=8 cap_tokens=8192 mean_tokens=2000 sigma=0.8",
        "-o agent.parquet --agentic turns=20 context_cap_tokens=24576",
    ),
    "trace with-tools": (
        trace.with_tools,
        "areal_run.parquet -o my_run.parquet --tools tools.yaml",
    ),
    "profile list": (profile.listed, ""),
    "profile show": (profile.show, "qwen3-14b_h100_tp2", "my_profile.parquet"),
    "profile names": (profile.names, ""),
    "profile derive": (
        profile.derive,
        "qwen3-14b --gpu h100 --tp 2 -o qwen3-14b_h100_tp2.parquet",
        "path/to/config.json --gpu a100 --source roofline -o mine.parquet",
    ),
    "profile import": (
        profile.import_,
        "perf/RTXPRO6000/Qwen/Qwen3-32B/bf16 --gpu rtxpro6000 --tp 2 -o qwen3-32b.parquet",
        "perf/RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16 --gpu rtxpro6000 --dp 2 --ep 2",
    ),
}


def main(commands: typer.Typer | None = None) -> None:
    """Run a command of `commands` (None: of simrl); end with a line and an exit code for bad input,
    an error that stops a run, and Ctrl-C."""
    _report_on_stderr()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as Ctrl-C: what is half-written is removed
    warnings.filterwarnings(
        "ignore", "Glyph .* missing from", UserWarning
    )  # a picture has boxes in place of them
    sys.unraisablehook = hear_again
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # names and signs that the terminal cannot show
    try:
        try:
            _check_arguments(sys.argv[1:])
            if commands is None and sys.argv[1:2] == [
                "help"
            ]:  # as other commands have it: help compare
                sys.argv[1:] = [*sys.argv[2:], "--help"]
            code = (commands or make_app())(
                standalone_mode=False, prog_name=None if commands else "simrl"
            )
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a failure can still be reported
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
        _end(
            "out of memory; nothing was written; simulate fewer samples, or fewer --jobs at a time",
            1,
        )
    except OSError as error:
        if error.filename is not None:  # a file that may not be read, a name that is too long
            _end(f"{error.filename}: {error.strerror}; name another", 2)
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EIO):
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python flushes it once more at its end
        if error.errno == errno.EPIPE:
            sys.exit(1)  # the reader has gone, and needs no message
        _end(f"stdout cannot be written ({error.strerror}); send it where there is room", 2)


def _report_on_stderr() -> None:
    """Show what the commands log on stderr, in the form of messages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("simrl: %(message)s"))
    log = logging.getLogger("simrl")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)  # not `level`: loggers remember what they were not enabled for


def _check_arguments(arguments: list[str]) -> None:
    for argument in arguments:
        refuse(
            (
                len(argument) > LONGEST_TEXT,
                f"argument {shortened(argument)} is longer than {LONGEST_TEXT:,} characters; shorten it",
            )
        )
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"argument {argument!r} is not UTF-8; rename the file") from error


def _end_of_usage(error: Any) -> NoReturn:
    """End with the mistake in the words of a command; without a line if the help was printed
    instead."""
    message = str(error.format_message()).rstrip(".")
    if not message:
        sys.exit(2)
    if findings := getattr(error.__cause__, "errors", None):  # of pydantic, which typer asks
        message = f"{message.partition(': ')[0]}: {right(findings()[0])}"
    command = error.ctx.command_path if error.ctx else "simrl"
    slip = _slip(error, message)
    if slip.endswith("?"):
        message = message.partition(". Did you mean")[0]
    more = slip or ("" if message.endswith("?") else f"; {command} --help tells what it takes")
    _end(f"{message[0].lower()}{message[1:]}{more}", 2)


def _slip(error: Any, message: str) -> str:
    """Return what to write in place of an unknown option or command, or of a value with a unit."""
    from simrl.commands.slips import misplaced, option_meant

    if (
        message.startswith("No such option")
        and (option := getattr(error, "option_name", None)) is not None
    ):
        words = [argument for argument in sys.argv[1:] if argument.partition("=")[0] == option] or [
            option
        ]
        behind = sys.argv[sys.argv.index(words[0]) + 1 :] if words[0] in sys.argv else []
        value = behind[0] if behind and not behind[0].startswith("-") else ""
        return option_meant(words[0], value, dict(_options(typer.main.get_command(make_app()))))
    if message.startswith("No such command"):
        return misplaced(
            message.partition("'")[2].partition("'")[0],
            error.ctx.command_path if error.ctx else "simrl",
        )
    if message.startswith("Missing argument 'SCENARIO'"):
        return "; name a scenario, such as experiments/math_14b.yaml (simrl examples lists some), or a trace"
    if message.startswith("Missing option '--output'"):
        return "; name the file to write, such as -o my_run.parquet"
    if (
        message.startswith("Invalid value")
        and (parameter := getattr(error, "param", None)) is not None
    ):
        after = (
            b for a, b in zip(sys.argv, [*sys.argv[1:], ""], strict=True) if a in parameter.opts
        )
        values = [
            *after,
            *(a.partition("=")[2] for a in sys.argv if a.partition("=")[0] in parameter.opts),
        ]
        if several := next((value for value in values if "," in value or ".." in value), None):
            key = (
                f"cluster.{parameter.name}"
                if parameter.name in ("gpu", "gpus", "tp")
                else parameter.name
            )
            return (
                f"; several values are KEY=VALUES without dashes, in simrl sweep: {key}={several}"
            )
        if "did you mean" not in message:
            return next(
                (hint for value in values if not value.isdigit() and (hint := number_meant(value))),
                "",
            )
    return "; write its value behind it" if message.endswith("requires an argument") else ""


def _options(command: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the options of every command below a command, by its path."""
    for name, inner in getattr(command, "commands", {}).items():
        yield f"{path}{name}", [option for parameter in inner.params for option in parameter.opts]
        yield from _options(inner, f"{path}{name} ")


def _end(message: object, code: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C prints no traceback
    with suppress(OSError):  # stderr is closed
        print(
            f"simrl: {brief(' '.join(str(message).split()))}",
            file=sys.stderr or io.StringIO(),
            flush=True,
        )
    sys.exit(code)


if __name__ == "__main__":
    main()
