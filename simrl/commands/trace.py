"""`simrl trace …`: import a run, look at a trace, draw one from a length model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

import typer
from pydantic import ValidationError

from simrl.commands.options import Place
from simrl.commands.view import DataView, drawn
from simrl.errors import InputError, meant, refuse
from simrl.extensions import Extended, checked
from simrl.scenario.yaml_text import parse_override, read_yaml
from simrl.trace.importers.sources import known_sources
from simrl.validation import MOST_SEED, explain, validated

if TYPE_CHECKING:
    from simrl.trace.tools import Tool
    from simrl.trace.trace import Trace

Source = Annotated[
    Path, typer.Argument(metavar="PATH", help="the file or folder that the framework wrote")
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="the trace to write, such as my_run.parquet")
]
Name = Annotated[
    str | None, typer.Option(help="name of the trace (default: the name of the source)")
]


A_LENGTH_MODEL = "steps=10 prompts_per_step=64 group=8 cap_tokens=8192 mean_tokens=2000 sigma=0.8"


class Common(TypedDict, total=False):
    """The options of every importer."""

    cap_tokens: Annotated[
        int | None,
        typer.Option(
            "--cap-tokens",
            min=1,
            max=2**31 - 1,
            help="max_response_length of the run (default: the longest response)",
        ),
    ]
    name: Name
    licence: Annotated[str | None, typer.Option(help="licence of the data (default: unknown)")]


def _importer(name: str) -> Callable[..., DataView]:
    """Return the command of a source, with the options that `sources.toml` names."""
    source = known_sources()[name]

    def import_source(
        path: Source,
        output: Output,
        tokenizer: Annotated[
            Path | None, typer.Option(help="count tokens with this tokenizer.json (or its folder)")
        ] = None,
        chars_per_token: Annotated[
            float | None, typer.Option(help="or estimate tokens: characters per token, such as 3.2")
        ] = None,
        metrics: Annotated[
            bool,
            typer.Option(
                "--metrics",
                help="PATH is a metrics log of a framework (console, JSONL, CSV, MLflow): lengths are drawn from it",
            ),
        ] = False,
        group: Annotated[
            int | None, typer.Option(min=1, help="with --metrics: responses per prompt (rollout.n)")
        ] = None,
        seed: Annotated[
            int, typer.Option(min=0, max=MOST_SEED, help="with --metrics: seed of the draw")
        ] = 0,
        samples: Annotated[
            int | None,
            typer.Option(min=1, help="with --metrics: responses per step, if not logged"),
        ] = None,
        prompt_tokens: Annotated[
            float | None,
            typer.Option(min=1, help="with --metrics: mean prompt length, if not logged"),
        ] = None,
        log_format: Annotated[
            str | None,
            typer.Option(
                "--format",
                help="with --metrics: verl, trl, slime, nemo_rl … (default: from the file)",
            ),
        ] = None,
        tags: Annotated[
            list[str] | None,
            typer.Option(
                "--column",
                help="with --metrics: a tag of the log, OURS=THEIRS, or a YAML file of OURS: THEIRS; may be repeated",
            ),
        ] = None,
        reward_column: Annotated[
            list[str] | None,
            typer.Option(help="a reward column; may be repeated, their sum is the reward"),
        ] = None,
        reward_key: Annotated[
            str | None, typer.Option(help="key of the reward, if rewards are dictionaries")
        ] = None,
        column: Annotated[
            list[str] | None,
            typer.Option(
                "--column", help="OURS=THEIRS, such as response_tokens=out_len; may be repeated"
            ),
        ] = None,
        step: Annotated[
            int | None,
            typer.Option(min=0, help="the step of every row, if no column has it (default: 0)"),
        ] = None,
        epoch: Annotated[
            int | None,
            typer.Option(min=0, help="the epoch of every row, if there is no such column"),
        ] = None,
        ungrouped: Annotated[bool, typer.Option(help="every row has a prompt of its own")] = False,
        **options: Unpack[Common],
    ) -> DataView:
        from simrl.commands.workload import columns_of
        from simrl.trace.importers import dumps, logs, tabular, tokens

        labels = _given(options)
        if metrics or ("metrics" in source.options and not source.title):
            from simrl.trace.importers.verl import (
                trace_from_verl_metrics,
            )  # imports scipy, which takes 0.3 s

            if group is None:
                raise InputError(
                    f"trace import {name} --metrics: no --group; the log does not have the number of responses per prompt "
                    "(rollout.n); add it, such as --group 16"
                )
            log_format = log_format or (None if name == "verl" else name)  # verl's reads any log
            logged = logs.read_metrics(
                *(path, log_format, samples, prompt_tokens),
                columns=columns_of(tags),
                cap_tokens=labels.get("cap_tokens"),
            )
            return _written(
                trace_from_verl_metrics(logged, group, seed, **{"name": path.stem, **labels}),
                output,
            )
        counter = tokens.token_counter(tokenizer, chars_per_token)
        rewards = _given({"reward_column": reward_column, "reward_key": reward_key, "step": step})
        rows_have: dict[str, Any] = {"step": step, "epoch": epoch, "ungrouped": ungrouped}
        try:
            if source.title:
                trace = dumps.import_dump(name, path, counter, **rewards, **labels)
            else:
                importer = tabular.import_csv if name == "csv" else tabular.import_jsonl
                trace = importer(path, columns_of(column), counter, **rows_have, **labels)
        except InputError as error:
            raise InputError(dumps.nearest(path, name, error)) from error
        return _written(trace, output)

    parameters = inspect.signature(import_source, eval_str=True).parameters.items()
    names = ("path", "output", "options", *source.options)
    import_source.__doc__ = source.about
    import_source.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for key, parameter in parameters if key in names]
    )
    return import_source


def added_importer(name: str) -> Callable[..., DataView]:
    """Return the command of an importer that an installed package adds."""

    def import_added(
        path: Source,
        output: Output,
        settings: Annotated[
            list[str] | None,
            typer.Argument(metavar="[KEY=VALUE]...", help="parameters of the importer"),
        ] = None,
    ) -> DataView:
        """An importer that an installed package adds; its KEY=VALUE are the parameters of its
        function."""
        from simrl.trace.trace import Trace

        parameters = dict(parse_override(text) for text in settings or [])
        trace = checked(f"trace import {name}", importers()[name], path, **parameters)
        if not isinstance(trace, Trace):
            raise InputError(
                f"importer {name}: its function gives {type(trace).__name__}; let it give a Trace"
            )
        return _written(trace, output)

    return import_added


@cache
def importers() -> Extended[Any]:
    """Return the importers of simrl's own sources, and those of installed packages."""
    own = {name: _importer(name) for name in known_sources()}
    return Extended(own, "simrl.importers", "importer", required=1)


def show(
    file: Annotated[Path, typer.Argument(help="a trace (Parquet)")],
    picture: Annotated[
        Place | None,
        typer.Option("--plot", help="the picture to draw (default: NAME-lengths.png, here)"),
    ] = None,
) -> DataView:
    """Describe a trace: prompts, groups, length percentiles, share at the cap, epochs; and draw its
    lengths."""
    from simrl.analysis.trace_description import describe
    from simrl.show.figures.trace import lengths_figure
    from simrl.show.tables.trace import print_description
    from simrl.trace.trace import read_trace

    trace = read_trace(file)
    view = DataView(describe(trace), print_description, width=80)
    return drawn(
        view, picture, f"{file.stem}-lengths.png", lambda: lengths_figure(trace), "Lengths drawn"
    )


def synth(
    output: Output,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="fields of the length model, such as steps=10 group=16"
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="start from rhymerl-math, rhymerl-code (RhymeRL's statistics), coding-agent or search-agent"
        ),
    ] = None,
    agentic: Annotated[
        bool,
        typer.Option("--agentic", help="draw turns of an agent: short for --preset coding-agent"),
    ] = False,
    tools: Annotated[
        Path | None, typer.Option(help="take the agent's tools from this YAML file")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="seed of the draw")] = 0,
    name: Name = None,
) -> DataView:
    """Draw a trace from a length model, if there is no run yet."""
    from simrl.trace.synthesis import PRESETS, LengthModel, synthesise

    preset = preset or ("coding-agent" if agentic else None)
    of_preset = PRESETS.get(preset or "", {})
    refuse(
        (
            preset not in (None, *PRESETS),
            f"--preset {preset}: unknown{meant(preset, PRESETS)}; choose {', '.join(PRESETS)}",
        ),
        (
            agentic and "tools" not in of_preset,
            f"--agentic beside --preset {preset}, which has no tools; leave one of them out",
        ),
    )
    fields = dict(parse_override(text) for text in settings or [])
    if tools is not None:
        fields["tools"] = _tools(tools)
    try:
        model = LengthModel.model_validate({**of_preset, **fields})
    except ValidationError as error:
        key, message = explain(error, LengthModel, "a length model")
        more = (
            f"; write {A_LENGTH_MODEL}, or --preset rhymerl-math"
            if message == f"key {key} is missing"
            else ""
        )
        raise InputError(f"trace synth: {message}{more}") from error
    return _written(synthesise(model, seed, name or output.stem), output)


def with_tools(
    file: Annotated[Path, typer.Argument(help="a trace (Parquet) whose responses have turns")],
    output: Output,
    tools: Annotated[Path, typer.Option(help="YAML file with the agent's tools")],
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="seed of the draw")] = 0,
) -> DataView:
    """Draw tool times for an agent's trace whose turns have no times (AReaL, slime); recorded times
    stay."""
    from simrl.trace.tools import with_tools
    from simrl.trace.trace import read_trace

    return _written(with_tools(read_trace(file), _tools(tools), seed, tools.name), output)


def _tools(path: Path) -> dict[str, Tool]:
    """Return the tools of a YAML file."""
    from simrl.trace.tools import ToolFile

    data = read_yaml(path, str(path), "a file of tools", ToolFile.model_fields)
    return validated(ToolFile, data, str(path), "a file of tools").tools


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _written(trace: Trace, output: Path) -> DataView:
    """Write a trace and return its description."""
    from simrl.analysis.trace_description import describe
    from simrl.show.text import say
    from simrl.trace.trace import write_trace

    write_trace(trace, output)
    steps, metadata = len(trace.step_slices), trace.metadata
    lines = [
        f"{output}: {len(trace)} samples, {steps} steps, lengths counted by {metadata.tokenizer}"
    ]
    lines += [f"Notes: {metadata.notes}"] if metadata.notes else []
    lines += [f"Look at it with:  simrl trace show {output}"]

    return DataView(
        describe(trace),
        lambda _, console: say(console, *lines, soft_wrap=True),
        more={"file": str(output)},
    )
