"""`simrl systems`: which systems can be compared, and what exactly each of them does here."""

from __future__ import annotations

import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from simrl.errors import InputError

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="rich",
    help="The systems that can be compared: a line each; `show NAME` for one.",
    epilog="Examples:  simrl systems   |   simrl systems show areal   |   simrl systems show rhymerl --json",
)
MEANINGS = {
    "rollout_share": "share of the GPUs that only roll out; the others train",
    "dispatch": "which worker gets which sample; `streamrl` and `seer` are those systems' rules",
    "minibatches": "PPO mini-batches of an update",
    "log_probs": "forward passes before an update: old policy, reference",
    "on_loss": "samples whose worker is lost go on elsewhere, or wait for it",
    "adapt_split_every": "move GPUs by what was idle, after so many updates; 0: never; not with lost workers",
    "speculation": "a method (`simrl speculation`), or {name: histospec, gate: open}; none",
    "gate": "when it drafts: always, while the batch is small enough to pay, or once few responses are left",
    "window": "tokens to draft; as an object, {kind: fixed, tokens: 4}, {kind: aimd} or {kind: mimd}",
    "dynamic_sampling": "drop groups with equal rewards, refill in rounds of so many times a batch",
    "filter_groups": "drop groups with equal rewards, train what is left",
}
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="print JSON on stdout; its keys are stable: name, pipeline, dispatch, speculation, paper, parameters",
    ),
]


@app.callback()
def systems(context: typer.Context, as_json: AsJson = False) -> None:
    """The systems that can be compared: a line each; `show NAME` for one."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from simrl.systems import RECIPES

    found, broken = described(RECIPES, describe)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        print_broken(broken)
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    table = Table("system", "what it does", "off-policyness", "paper", box=None, pad_edge=False, header_style="bold")
    for system in found:
        bound = system["off_policyness"]
        age = "not bounded" if bound is None else f"at most {bound}" if bound else "0"
        table.add_row(system["name"], system["summary"], age, system["paper"])
    console.print(table)
    console.print(
        "\nsimrl systems show NAME prints the rule, the parameters, and what is not modelled.\n"
        "simrl speculation lists the methods of speculation; any of them goes with any system.",
        markup=False,
    )
    print_broken(broken)


@app.command(epilog="Example:  simrl systems show areal")
def show(
    name: Annotated[str, typer.Argument(help="a system, as `simrl systems` lists it")], as_json: AsJson = False
) -> None:
    """One system: its rule, its parameters with their defaults, the paper, what is modelled and what is not."""
    from simrl.systems import RECIPES, unknown_system

    if name not in RECIPES:
        raise unknown_system(name)
    system = describe(name)
    if as_json:
        print(json.dumps(system, indent=1, ensure_ascii=False))
        return
    print_rule(system)
    bound = system["off_policyness"]
    print(f"pipeline        {system['pipeline']}")
    print(f"dispatch        {system['dispatch']}")
    print(f"speculation     {system['speculation']}")
    print(f"off-policyness  {'not bounded by the rule' if bound is None else f'at most {bound} with the defaults'}")
    print(f"paper           {system['paper']}\n")
    print_parameters(system["parameters"])
    example = next(iter(system["parameters"].items()))
    print(f"\nIn a scenario:  systems: [{{name: {name}, {example[0]}: {json.dumps(example[1]['default'])}}}]")


def described(
    functions: Iterable[str], describe: Callable[[str], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The pages of all functions, and a line for each that an installed package adds and that cannot be loaded."""
    pages, broken = [], []
    for name in functions:
        try:
            pages.append(describe(name))
        except InputError as error:
            broken.append(str(error))
    return pages, broken


def print_broken(broken: Sequence[str]) -> None:
    """On stderr, so that a list of what there is stays one."""
    for line in broken:
        print(f"simrl: left out: {line}", file=sys.stderr)


def print_rule(page: dict[str, Any]) -> None:
    """What a system or a method does, and what of it is not modelled."""
    print(f"{page['name']}: {page['summary']}\n")
    for heading, text in (("Modelled", page["modelled"]), ("Not modelled", page["not_modelled"])):
        if text:
            print(textwrap.fill(f"{heading}: {text}", 100), end="\n\n")


def print_parameters(parameters: dict[str, Any]) -> None:
    """A line each."""
    print("parameter, default, what it takes:")
    width = max(map(len, parameters))
    for key, parameter in parameters.items():
        meaning = "" if parameter["takes"] == "true | false" else MEANINGS.get(key, "")
        line = f"  {key:{width}}  {json.dumps(parameter['default']):14}  {parameter['takes']}"
        print(f"{line}: {meaning}" if meaning else line)


def documented(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a recipe or a method says: a line, the rule, and what is not modelled."""
    summary, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n")
    modelled, _, not_modelled = rest.partition("Not modelled:")
    return {
        "summary": summary,
        "modelled": " ".join(modelled.split()),
        "not_modelled": " ".join(not_modelled.split()),
    }


def describe(name: str) -> dict[str, Any]:
    """A recipe with its defaults as plain data."""
    from pydantic import TypeAdapter

    from simrl.systems import RECIPES, common_parameters, made

    recipe = RECIPES[name]
    system = made(name, recipe)
    said = documented(recipe)
    parameters = dict(inspect.signature(recipe).parameters)
    schema = recipe_schema(recipe)
    for key, parameter in common_parameters(recipe).items():
        parameters[key] = parameter
        schema["properties"][key] = TypeAdapter(parameter.annotation).json_schema()
    return {
        "name": name,
        "summary": said["summary"],
        "pipeline": system.schedule,
        "dispatch": system.dispatch.name,
        "speculation": system.speculation.label if system.speculation else "none",
        "paper": system.paper,
        "off_policyness": system.off_policyness,
        "modelled": said["modelled"],
        "not_modelled": said["not_modelled"],
        "parameters": {
            key: {"default": parameter.default, "takes": takes(schema["properties"][key])}
            for key, parameter in parameters.items()
        },
    }


def recipe_schema(recipe: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a recipe's parameters."""
    from pydantic import TypeAdapter

    return TypeAdapter(inspect.unwrap(recipe)).json_schema()


def takes(schema: dict[str, Any]) -> str:
    """The values that a parameter takes, in words."""
    if "anyOf" in schema:
        return " or ".join(takes(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(schema.get("enum", [schema.get("const")]))
    if "$ref" in schema or "oneOf" in schema:
        return "an object"
    if schema.get("type") == "array":
        return "a list"
    kind = {"integer": "whole number", "number": "number", "boolean": "true | false", "null": "null"}.get(
        schema.get("type", ""), schema.get("type", "value")
    )
    bounds = [("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")]
    said = ", ".join(f"{sign} {schema[key]:,}" for key, sign in bounds if key in schema)
    return f"{kind} {said}".strip()
