"""`simrl speculation`: the methods of speculation, and what exactly each of them does here."""

from __future__ import annotations

import inspect
import json
import os
from typing import Annotated, Any

import typer

from simrl.cli_systems import described, documented, print_broken, print_parameters, print_rule, recipe_schema, takes
from simrl.errors import InputError, meant

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="rich",
    help="The methods of speculation: a line each; `show NAME` for one.",
    epilog="Examples:  simrl speculation   |   simrl speculation show histospec   |   simrl speculation --json",
)
AsJson = Annotated[
    bool,
    typer.Option("--json", help="print JSON on stdout; its keys are stable: name, drafter, paper, parameters"),
]


@app.callback()
def speculation(context: typer.Context, as_json: AsJson = False) -> None:
    """The methods of speculation: a line each; `show NAME` for one."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from simrl.speculation.methods import METHODS

    found, broken = described(METHODS, describe)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        print_broken(broken)
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    table = Table("method", "what it does", "paper", box=None, pad_edge=False, header_style="bold")
    for method in found:
        table.add_row(method["name"], method["summary"], method["paper"])
    console.print(table)
    console.print(
        "\nWith any system: simrl compare SCENARIO --speculation NAME, or {name: areal, speculation: NAME} in a scenario.\n"
        "simrl speculation show NAME prints the rule, the parameters, and what is not modelled.",
        markup=False,
    )
    print_broken(broken)


@app.command(epilog="Example:  simrl speculation show histospec")
def show(
    name: Annotated[str, typer.Argument(help="a method, as `simrl speculation` lists it")], as_json: AsJson = False
) -> None:
    """One method: its rule, its parameters with their defaults, the paper, what is modelled and what is not."""
    from simrl.speculation.methods import METHODS

    if name not in METHODS:
        raise InputError(f"method {name!r} is unknown{meant(name, METHODS)}; choose one of {', '.join(METHODS)}")
    method = describe(name)
    if as_json:
        print(json.dumps(method, indent=1, ensure_ascii=False))
        return
    print_rule(method)
    print(f"drafter         {method['drafter']}")
    print(f"paper           {method['paper']}\n")
    if method["parameters"]:
        print_parameters(method["parameters"])
    print(f"\nIn a scenario:  systems: [{{name: verl_colocated, speculation: {name}}}]")


def describe(name: str) -> dict[str, Any]:
    """A method with its defaults as plain data."""
    from simrl.speculation.methods import METHODS, make_speculation

    method = METHODS[name]
    made, schema = make_speculation(name), recipe_schema(method)
    assert made is not None
    return {
        "name": name,
        "drafter": made.model or made.drafter,
        "paper": made.paper,
        **documented(method),
        "parameters": {
            key: {"default": parameter.default, "takes": takes(schema["properties"][key])}
            for key, parameter in inspect.signature(method).parameters.items()
        },
    }
