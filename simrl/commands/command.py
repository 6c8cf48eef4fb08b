"""Turns a typed function into a command of the CLI and into a function of `import simrl`.

Invariant: the options of the CLI are the function's own parameters, with their names, types,
defaults and bounds. Parameters without a typer annotation exist only in Python. A message names
options; in Python it names keywords.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import textwrap
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_args, get_type_hints

import typer

from simrl.commands.completion import BY_NAME
from simrl.commands.view import View
from simrl.errors import InputError, StoppedError, refuse
from simrl.validation import bounded, shortened

P = ParamSpec("P")
R = TypeVar("R")
PLACES = (
    "folder",
    "picture",
)  # parameters that the CLI always gives: None in Python means that nothing is written
NOTHING = "; None: no file is written; True: the default"
INDENT = " " * 16
# An option, not a part of a file's name, and its value, if it has one: N, 36h, 3, or a word that
# ends the clause.
_OPTION = re.compile(
    r"(?<![\w./-])--([a-z]+(?:-[a-z]+)*)"
    r"(?: (\d[\w.]*(?:,\d+)*|[A-Z]+\b|(?!(?:or|and|without)\b)(?:[^\s:;,]|,(?=\S))+(?=[:;,]|$| --)))?"
)
_KEYWORDS = {
    "from": "source",
    "zip": "zips",
    "format": "log_format",
    "output": "folder",
    "pipeline": "pipelines",
}
_KEYWORDS |= {
    "column": "columns",
    "dispatch": "dispatches",
    "system": "systems",
    "speculation": "speculations",
}

LOST = "points that this machine could not simulate: {}; their errors are in the table, and the next run tries them again"
log = logging.getLogger(__name__)


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function callable from Python: bounds are checked, and messages and the documentation
    name keywords."""
    parameters, written = signature_of(function).parameters, inspect.signature(function)

    def keyword(match: re.Match[str]) -> str:
        name, value = match[1].replace("-", "_"), match[2]
        name = name if name in parameters else _KEYWORDS.get(name, name)
        if name == "clusters" and value is not None:
            return (
                f"{name}=[{value.replace(',', ', ')}]" if value[0].isdigit() else f"{name}={value}"
            )
        plain = value is None or value[0].isdigit() or value.isupper()
        written_value = (
            value
            if plain
            else repr(value.split(","))
            if name in ("systems", "columns")
            else repr(value)
        )
        return name if value is None else f"{name}={written_value}"

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            for name, value in signature.bind(*arguments, **keywords).arguments.items():
                _require_bounded(name, value, _option(parameters[name]))
            result = function(*arguments, **keywords)
            if isinstance(result, View):
                result.check()
                if result.lost:
                    log.warning(LOST.format(result.lost))
            return result
        except InputError as error:
            raise InputError(_OPTION.sub(keyword, str(error))) from error

    summary, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\f")
    lines = [
        textwrap.fill(
            f"{name:15} {_OPTION.sub(keyword, option.help)}{NOTHING * (name in PLACES)}",
            128,
            subsequent_indent=INDENT,
        )
        for name, parameter in parameters.items()
        if (option := _option(parameter)) is not None
    ]
    call.__doc__ = "\n\n".join(
        part for part in (summary.strip(), "\n".join(lines), examples.strip()) if part
    )
    shown = []
    for name, parameter in parameters.items():
        annotation = getattr(parameter.annotation, "__origin__", parameter.annotation)
        if name in written.parameters:  # as it is written: Python takes more types than the CLI
            annotation = (
                written.parameters[name]
                .annotation.removeprefix("Annotated[")
                .partition(", typer.")[0]
            )
        shown.append(parameter.replace(annotation=annotation))
    call.__signature__ = signature = written.replace(parameters=shown)  # type: ignore[attr-defined]
    return call


def _require_bounded(name: str, value: Any, kind: Any) -> None:
    """Raise `InputError` for an argument beyond the `min` and `max` of a kind of option, or beyond
    the general bounds."""
    try:
        bounded(value, getattr(kind, "min", None), getattr(kind, "max", None))
    except ValueError as error:
        raise InputError(f"{name}={shortened(value)}: {error}") from error


class Command(typer.core.TyperCommand):
    """A command of the CLI whose numbers are bounded, and of which each option is given once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = [argument.partition("=")[0] for argument in args]
        rest = super().parse_args(ctx, args)
        for parameter in cast(Any, self.params):
            refuse(
                (
                    sum(map(names.count, parameter.opts)) > 1
                    and not (parameter.multiple or getattr(parameter, "is_flag", True)),
                    f"{parameter.opts[0]} is given twice, and takes one value; give it once",
                )
            )
            _require_bounded(parameter.opts[0], ctx.params.get(parameter.name), parameter)
        return rest


def _option(parameter: Parameter) -> Any:
    """Return typer's description of a parameter; None for a parameter that exists only in
    Python."""
    return next(iter(getattr(parameter.annotation, "__metadata__", ())), None)


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of a command. Shared keywords, `**setup: Unpack[Setup]`, stand as single
    parameters before the command's other keywords, and are None by default."""
    signature = inspect.signature(inspect.unwrap(function), eval_str=True)
    parameters = list(signature.parameters.values())
    shared: dict[str, Any] = {}
    if parameters and parameters[-1].kind is Parameter.VAR_KEYWORD:
        shared = get_type_hints(get_args(parameters.pop().annotation)[0], include_extras=True)
        parameters += [_keyword(name, annotation, None) for name, annotation in shared.items()]
    return signature.replace(
        parameters=sorted(
            parameters, key=lambda parameter: (parameter.kind, parameter.name not in shared)
        )
    )


def options_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a command that the CLI has."""
    return [
        parameter
        for parameter in signature_of(function).parameters.values()
        if _option(parameter) is not None
    ]


def add_command(
    app: typer.Typer,
    function: Callable[..., Any],
    *examples: str,
    name: str | None = None,
    keys: str = "",
    group: bool = False,
) -> None:
    """Register a command. Its help ends with examples and names the `keys` of --json. As a `group`,
    it runs if none of the group's commands is named."""
    inner = inspect.unwrap(function)
    parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in options_of(inner)]
    for parameter in parameters:
        _option(parameter).autocompletion = BY_NAME.get(
            inner.__name__ if parameter.name == "name" else parameter.name
        )

    def run(**arguments: Any) -> None:
        context, as_json = arguments.pop("context", None), arguments.pop("as_json", False)
        if context is not None and context.invoked_subcommand is not None:
            return
        result = inner(
            **{
                key: True if key in PLACES and value is None else value
                for key, value in arguments.items()
            }
        )
        if isinstance(result, Path):
            print(
                f"Written to {result} ({result.stat().st_size / 1e6:.1f} MB); any browser opens it."
            )
            return
        if as_json:
            print(json.dumps(result.json(), indent=1, ensure_ascii=result.ascii))
        else:
            result.print()
        result.check()
        if result.lost:
            raise StoppedError(LOST.format(result.lost))

    if signature_of(inner).return_annotation is not Path:
        help_text = (
            f"print JSON on stdout instead of tables; its keys are stable{keys and f': {keys}'}"
        )
        parameters.append(
            _keyword("as_json", Annotated[bool, typer.Option("--json", help=help_text)], False)
        )
    if group:
        parameters.append(_keyword("context", typer.Context, Parameter.empty))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = (inner.__doc__ or "").partition("\f")[0]
    epilog = f"Example{'s' if len(examples) > 1 else ''}:  {'   |   '.join(examples)}"
    if group:
        app.callback(
            invoke_without_command=True, help=inspect.cleandoc(run.__doc__), epilog=epilog
        )(run)
    else:
        app.command(name or inner.__name__, cls=Command, epilog=epilog)(run)


def _keyword(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
