"""`simrl trace …`: import a run, look at a trace, make one up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.errors import InputError, meant
from simrl.extensions import Extended

if TYPE_CHECKING:
    from simrl.importers.tokens import TokenCounter
    from simrl.trace import Trace

app = typer.Typer(no_args_is_help=True, help="Traces of rollouts: import a run, look at one, make one up.")
import_app = typer.Typer(no_args_is_help=True, help="Turn what a framework wrote into a trace (Parquet).")
app.add_typer(import_app, name="import")

Source = Annotated[Path, typer.Argument(metavar="PATH", help="the file or folder that the framework wrote")]
Output = Annotated[Path, typer.Option("--output", "-o", help="the trace to write, such as my_run.parquet")]
Tokenizer = Annotated[Path | None, typer.Option(help="count tokens with this tokenizer.json (or its folder)")]
CharsPerToken = Annotated[float | None, typer.Option(help="or estimate: characters a token, such as 3.2")]
Cap = Annotated[
    int | None, typer.Option("--cap-tokens", min=1, help="largest response of the run; else the longest found")
]
Name = Annotated[str | None, typer.Option(help="name of the trace; else that of the source")]
Licence = Annotated[str, typer.Option(help="licence of the data")]
Columns = Annotated[
    list[str] | None, typer.Option("--column", help="OURS=THEIRS, such as response_tokens=out_len; repeat it")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of text (its keys are stable)")]


@import_app.command(
    "verl", epilog="Example:  simrl trace import verl wandb/run-1 -o my_run.parquet --chars-per-token 3.2"
)
def import_verl_command(
    path: Source,
    output: Output,
    tokenizer: Tokenizer = None,
    chars_per_token: CharsPerToken = None,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics", help="PATH is a console log or the file logger's JSONL: lengths drawn from its statistics"
        ),
    ] = False,
    group: Annotated[int | None, typer.Option(min=1, help="with --metrics: responses a prompt (rollout.n)")] = None,
    seed: Annotated[int, typer.Option(min=0, help="with --metrics: of the draw")] = 0,
    cap_tokens: Cap = None,
    name: Name = None,
    licence: Licence = "unknown",
    as_json: AsJson = False,
) -> None:
    """verl: rollout dumps (rollout_data_dir), a wandb generations table, or with --metrics a metrics log."""
    from simrl.importers.verl import import_verl, read_verl_metrics, trace_from_verl_metrics

    if metrics:
        if group is None:
            raise InputError(
                "trace import verl --metrics: no --group; the log does not say how many responses a prompt has"
            )
        table = read_verl_metrics(path)
        trace = trace_from_verl_metrics(
            table, group, seed, cap_tokens=cap_tokens, name=name or path.stem, licence=licence
        )
    else:
        counter = _counter(tokenizer, chars_per_token)
        trace = import_verl(path, counter, cap_tokens=cap_tokens, name=name, licence=licence)
    _write(trace, output, as_json)


@import_app.command(
    "trl", epilog="Example:  simrl trace import trl out/completions -o my_run.parquet --tokenizer model/"
)
def import_trl_command(
    path: Source,
    output: Output,
    tokenizer: Tokenizer = None,
    chars_per_token: CharsPerToken = None,
    reward_column: Annotated[
        list[str] | None, typer.Option(help="a reward column; repeat it, their sum is the reward")
    ] = None,
    cap_tokens: Cap = None,
    name: Name = None,
    licence: Licence = "unknown",
    as_json: AsJson = False,
) -> None:
    """TRL: the completions Parquet files of log_completions."""
    from simrl.importers.trl import import_trl

    counter = _counter(tokenizer, chars_per_token)
    trace = import_trl(path, counter, reward_columns=reward_column, cap_tokens=cap_tokens, name=name, licence=licence)
    _write(trace, output, as_json)


@import_app.command("areal", epilog="Example:  simrl trace import areal logs/me/exp/trial/rollout -o my_run.parquet")
def import_areal_command(
    path: Source,
    output: Output,
    cap_tokens: Cap = None,
    name: Name = None,
    licence: Licence = "unknown",
    as_json: AsJson = False,
) -> None:
    """AReaL: the JSONL files of rollout.dump_to_file."""
    from simrl.importers.areal import import_areal

    _write(import_areal(path, cap_tokens=cap_tokens, name=name, licence=licence), output, as_json)


@import_app.command("slime", epilog="Example:  simrl trace import slime debug/ -o my_run.parquet")
def import_slime_command(
    path: Source,
    output: Output,
    reward_key: Annotated[str | None, typer.Option(help="which entry is the reward, where it is a dictionary")] = None,
    cap_tokens: Cap = None,
    name: Name = None,
    licence: Licence = "unknown",
    as_json: AsJson = False,
) -> None:
    """slime: the .pt files of --save-debug-rollout-data. Needs torch, and loads weights only: no code is run."""
    from simrl.importers.slime import import_slime

    trace = import_slime(path, reward_key=reward_key, cap_tokens=cap_tokens, name=name, licence=licence)
    _write(trace, output, as_json)


@import_app.command(
    "csv",
    epilog="Example:  simrl trace import csv lengths.csv -o my_run.parquet --column response_tokens=out_len",
)
def import_csv_command(
    path: Source,
    output: Output,
    column: Columns = None,
    tokenizer: Tokenizer = None,
    chars_per_token: CharsPerToken = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="the step of every row, where there is no such column")
    ] = None,
    epoch: Annotated[
        int | None, typer.Option(min=0, help="the epoch of every row, where there is no such column")
    ] = None,
    ungrouped: Annotated[bool, typer.Option(help="every row is a prompt of its own")] = False,
    cap_tokens: Cap = None,
    name: Name = None,
    licence: Licence = "unknown",
    as_json: AsJson = False,
) -> None:
    """A CSV with named columns, one row a response."""
    from simrl.importers.tabular import import_csv

    trace = import_csv(
        path,
        _mapping(column),
        _counter_if_asked(tokenizer, chars_per_token),
        step=step,
        epoch=epoch,
        ungrouped=ungrouped,
        cap_tokens=cap_tokens,
        name=name,
        licence=licence,
    )
    _write(trace, output, as_json)


@import_app.command(
    "jsonl", epilog="Example:  simrl trace import jsonl run.jsonl -o my_run.parquet --column prompt_id=question"
)
def import_jsonl_command(
    path: Source,
    output: Output,
    column: Columns = None,
    tokenizer: Tokenizer = None,
    chars_per_token: CharsPerToken = None,
    step: Annotated[int | None, typer.Option(min=0, help="the step of every row, where there is no such field")] = None,
    epoch: Annotated[
        int | None, typer.Option(min=0, help="the epoch of every row, where there is no such field")
    ] = None,
    ungrouped: Annotated[bool, typer.Option(help="every row is a prompt of its own")] = False,
    cap_tokens: Cap = None,
    name: Name = None,
    licence: Licence = "unknown",
    as_json: AsJson = False,
) -> None:
    """JSON Lines with named fields, one object a response."""
    from simrl.importers.tabular import import_jsonl

    trace = import_jsonl(
        path,
        _mapping(column),
        _counter_if_asked(tokenizer, chars_per_token),
        step=step,
        epoch=epoch,
        ungrouped=ungrouped,
        cap_tokens=cap_tokens,
        name=name,
        licence=licence,
    )
    _write(trace, output, as_json)


def _added_importer(name: str) -> Callable[..., None]:
    def command(
        path: Source,
        output: Output,
        settings: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="parameters of the importer")
        ] = None,
        as_json: AsJson = False,
    ) -> None:
        from simrl.extensions import checked
        from simrl.overrides import parse_override
        from simrl.trace import Trace

        given = dict(parse_override(text) for text in settings or [])
        trace = checked(f"trace import {name}", IMPORTERS[name], path, **given)
        if not isinstance(trace, Trace):
            raise InputError(f"importer {name}: its function gives {type(trace).__name__}; let it give a Trace")
        _write(trace, output, as_json)

    command.__doc__ = "An importer that an installed package adds; its KEY=VALUE are the parameters of its function."
    return command


IMPORTERS: Extended[Any] = Extended(
    {str(own.name): own.callback for own in import_app.registered_commands if own.callback},
    "simrl.importers",
    "importer",
    required=1,
)
for _name in IMPORTERS.added():
    import_app.command(_name)(_added_importer(_name))


@app.command(epilog="Examples:  simrl trace show my_run.parquet   |   simrl trace show my_run.parquet --history")
def show(
    file: Annotated[Path, typer.Argument(help="a trace (Parquet)")],
    plot: Annotated[
        Path | None, typer.Option(help="where to draw it (default: NAME-lengths.png or NAME-history.png, here)")
    ] = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="how well a prompt's last epoch tells its rank (RhymeRL Table 2, Fig. 9), in place of lengths",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What is in a trace: prompts, groups, length percentiles, share at the cap, epochs; and a picture of its lengths."""
    from rich.console import Console

    from simrl.trace import read_trace
    from simrl.trace_report import (
        describe,
        describe_history,
        plot_history,
        plot_lengths,
        print_description,
        print_history,
    )

    trace = read_trace(file)
    picture = plot or Path(f"{file.stem}-{'history' if history else 'lengths'}.png")
    if history:
        found = describe_history(trace)
        plot_history(found, trace.metadata.name, picture)
        if as_json:
            print(json.dumps({"rank_history": found, "picture": str(picture)}, indent=1))
        else:
            print_history(found, Console())
            Console().print(f"Ranks drawn in {picture}")
        return
    plot_lengths(trace, picture)
    description = describe(trace)
    if as_json:
        print(json.dumps({**description, "picture": str(picture)}, indent=1))
    else:
        print_description(description, Console())
        Console().print(f"Lengths drawn in {picture}")


@app.command(
    epilog="Example:  simrl trace synth -o math.parquet --preset rhymerl-math steps=40 group=16   |   "
    "simrl trace synth -o t.parquet steps=10 prompts_per_step=64 group=8 cap_tokens=8192 mean_tokens=2000 sigma=0.8"
)
def synth(
    output: Output,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="fields of the length model, such as steps=10 group=16"),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="start from rhymerl-math or rhymerl-code (RhymeRL's statistics)")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Draw a trace from a length model, for when there is no run yet."""
    from pydantic import ValidationError

    from simrl.overrides import parse_override
    from simrl.synthesis import RHYMERL_CODE, RHYMERL_MATH, LengthModel, synthesise
    from simrl.validation import explain

    presets: dict[str | None, dict[str, Any]] = {None: {}, "rhymerl-math": RHYMERL_MATH, "rhymerl-code": RHYMERL_CODE}
    if preset not in presets:
        near = meant(preset, [name for name in presets if name])
        raise InputError(f"--preset {preset}: unknown{near}; choose rhymerl-math or rhymerl-code")
    given = dict(parse_override(text) for text in settings or [])
    try:
        model = LengthModel.model_validate({**presets[preset], **given})
    except ValidationError as error:
        raise InputError(f"trace synth: {explain(error, LengthModel, 'a length model')[1]}") from error
    _write(synthesise(model, seed, name or output.stem), output, as_json)


def _counter(tokenizer: Path | None, chars_per_token: float | None) -> TokenCounter:
    from simrl.importers.tokens import token_counter

    return token_counter(tokenizer, chars_per_token)


def _counter_if_asked(tokenizer: Path | None, chars_per_token: float | None) -> TokenCounter | None:
    return None if tokenizer is None and chars_per_token is None else _counter(tokenizer, chars_per_token)


def _mapping(columns: list[str] | None) -> dict[str, str]:
    for item in columns or []:
        if "=" not in item:
            raise InputError(f"--column {item!r}: write OURS=THEIRS, such as response_tokens=out_len")
    return dict(item.split("=", 1) for item in columns or [])


def _write(trace: Trace, output: Path, as_json: bool) -> None:
    from simrl.trace import write_trace
    from simrl.trace_report import describe

    write_trace(trace, output)
    if as_json:
        print(json.dumps({**describe(trace), "file": str(output)}, indent=1))
        return
    print(
        f"{output}: {len(trace)} samples, {len(trace.step_slices)} steps, lengths counted by {trace.metadata.tokenizer}"
    )
    if trace.metadata.notes:
        print(f"Notes: {trace.metadata.notes}")
    print(f"Look at it with:  simrl trace show {output}")
