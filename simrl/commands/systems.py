"""`simrl systems` and `simrl speculation`: the systems and methods that can be compared, and their
rules."""

from __future__ import annotations

import inspect
import json
import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simrl.commands.view import DataView, listing
from simrl.errors import InputError
from simrl.extensions import documentation
from simrl.validation import LARGEST, LARGEST_WHOLE, models_in

if TYPE_CHECKING:
    from rich.console import Console

LOG = logging.getLogger("simrl")
# mostly follow from a dozen keys each: numbers of GPUs, sizes of batches
OF_LAYOUT = {"rollout_share", "dispatch", "minibatches", "log_probs"}
MEANINGS = {
    "rollout_share": "share of the GPUs that only roll out; the others train",
    "dispatch": "the worker of each sample; `streamrl`, `seer`: those systems' rules; `programs`: ThunderAgent's",
    "minibatches": "PPO mini-batches of an update",
    "log_probs": "forward passes before an update: old policy, reference",
    "on_loss": "samples of a lost worker continue elsewhere, or wait for it",
    "adapt_split_every": "updates after which GPUs move by their idle time; 0: never; not with lost workers",
    "speculation": "a method (`simrl speculation`), or {name: histospec, gate: open}; none",
    "gate": "when it drafts: always, while the batch is small enough to pay, or once few responses are left",
    "window": "tokens to draft; as an object, {kind: fixed, tokens: 4}, {kind: aimd} or {kind: mimd}",
    "window of a sampler": "versions that batches may be ahead (in_order), or groups old (the other samplers)",
    "dynamic_sampling": "drop groups with equal rewards, refill in rounds of this multiple of a batch",
    "filter_groups": "drop groups with equal rewards (after_log_probs: their log-probs are computed), train the rest",
}
Page = dict[str, Any]


def systems() -> DataView:
    """List the systems that can be compared, a line each; `show NAME` describes one."""
    from simrl.systems.recipes import RECIPES

    return listing(
        _pages(RECIPES, _system),
        ("system", "what it does", "off-policyness", "paper"),
        lambda page: (page["name"], page["summary"], _age(page), page["paper"]),
        "simrl systems show NAME prints the rule, the parameters, and what is not modelled.\n"
        "simrl speculation lists the methods of speculation; any of them goes with any system.",
    )


def show_system(
    name: Annotated[str, typer.Argument(help="a system, as `simrl systems` lists it")],
) -> DataView:
    """Describe a system: its rule, its parameters with their defaults, the paper, what is modelled
    and what is not."""
    from simrl.launch.tables import keys_of_system

    page = _system(name)
    rows = keys_of_system(name, page["parameters"])
    number = Counter(row.parameter for row in rows)
    keys = [row for row in rows if row.parameter not in OF_LAYOUT or number[row.parameter] == 1]
    page["keys"] = [key._asdict() for key in keys]
    bound = page["off_policyness"]
    facts = {key: page[key] for key in ("pipeline", "dispatch", "speculation")}
    facts["off-policyness"] = (
        "not bounded by the rule" if bound is None else f"at most {bound} with the defaults"
    )
    facts["paper"] = page["paper"]
    key, parameter = next(iter(page["parameters"].items()))
    return _page(page, facts, f"{{name: {name}, {key}: {json.dumps(parameter['default'])}}}")


def speculation() -> DataView:
    """List the methods of speculation, a line each; `show NAME` describes one."""
    from simrl.speculation.methods import METHODS

    return listing(
        _pages(METHODS, _method),
        ("method", "what it does", "paper"),
        lambda page: (page["name"], page["summary"], page["paper"]),
        "With any system: simrl compare SCENARIO --speculation NAME, or {name: areal, speculation: NAME} in a scenario.\n"
        "simrl speculation show NAME prints the rule, the parameters, and what is not modelled.",
    )


def show_method(
    name: Annotated[str, typer.Argument(help="a method, as `simrl speculation` lists it")],
) -> DataView:
    """Describe a method: its rule, its parameters with their defaults, the paper, what is modelled
    and what is not."""
    from simrl.speculation.methods import METHODS, unknown_method

    if name not in METHODS:
        raise unknown_method(name)
    page = _method(name)
    facts = {key: page[key] for key in ("drafter", "paper")}
    return _page(page, facts, f"{{name: verl_colocated, speculation: {name}}}")


def _pages(names: Iterable[str], describe: Callable[[str], Page]) -> list[Page]:
    """Return the pages of all functions. One that an installed package adds and that cannot be
    loaded is only logged."""
    pages = []
    for name in names:
        try:
            pages.append(describe(name))
        except InputError as error:
            LOG.info("left out: %s", error)
    return pages


def _age(page: Mapping[str, Any]) -> str:
    """Return the off-policyness that a system allows, in words."""
    bound = page["off_policyness"]
    return "not bounded" if bound is None else f"at most {bound}" if bound else "0"


def _page(page: Page, facts: Mapping[str, Any], example: str) -> DataView:
    """Return a page, printed with these facts by their headings, and an example."""

    def show(page: Page, console: Console) -> None:
        lines = [f"{page['name']}: {page['summary']}", ""]
        for heading, text in (
            ("Modelled", page["modelled"]),
            ("Not modelled", page["not_modelled"]),
        ):
            if text:
                lines += [textwrap.fill(f"{heading}: {text}", 100), ""]
        lines += [f"{heading:15} {fact}" for heading, fact in facts.items()]
        lines += [
            "",
            *_parameter_lines(page["parameters"]),
            "",
            *_key_lines(page.get("keys", [])),
            f"In a scenario:  systems: [{example}]",
        ]
        console.print("\n".join(lines), soft_wrap=True)

    return DataView(page, show, ascii=False)


def _system(name: str) -> Page:
    """Return a recipe with its defaults, as plain data."""
    from simrl.systems.recipes import RECIPES, make_system, recipe_parameters

    system, text = make_system(name, {}), _documented(RECIPES[name])
    parameters = recipe_parameters(name)
    return {
        "name": name,
        "summary": text["summary"],
        "pipeline": system.schedule,
        "dispatch": system.dispatch.name,
        "speculation": system.speculation.label if system.speculation else "none",
        "paper": system.paper,
        "off_policyness": system.off_policyness,
        "modelled": text["modelled"],
        "not_modelled": text["not_modelled"],
        "parameters": _parameters(parameters),
    }


def _method(name: str) -> Page:
    """Return a method with its defaults as plain data."""
    from simrl.speculation.methods import METHODS, make_speculation

    method, made = METHODS[name], make_speculation(name)
    if made is None:
        raise InputError(f"speculation {name!r} means no drafts; rename it in its package")
    return {
        "name": name,
        "drafter": made.model or made.drafter,
        "paper": made.paper,
        **_documented(method),
        "parameters": _parameters(
            inspect.signature(inspect.unwrap(method), eval_str=True).parameters
        ),
    }


def _documented(function: Callable[..., Any]) -> dict[str, str]:
    """Return the parts of a docstring: a line, the rule, and what is not modelled."""
    summary, _, rest = documentation(function).partition("\n")
    modelled, _, not_modelled = rest.partition("Not modelled:")
    return {
        "summary": summary,
        "modelled": " ".join(modelled.split()),
        "not_modelled": " ".join(not_modelled.split()),
    }


def _parameters(parameters: Mapping[str, inspect.Parameter]) -> Page:
    page: Page = {}
    for key, parameter in parameters.items():
        page[key] = {"default": parameter.default, "takes": _takes(parameter.annotation)}
        models = models_in(parameter.annotation)
        if len(models) == 1:
            page[key]["keys"] = {
                name: {"default": field.default, "description": field.description}
                for name, field in models[0].model_fields.items()
            }
    return page


@cache
def _takes(annotation: Any) -> str:
    """Return `takes` of a type; most parameters share one with others."""
    from pydantic import TypeAdapter

    return takes(TypeAdapter(annotation).json_schema())


def _parameter_lines(parameters: Page) -> list[str]:
    if not parameters:
        return []
    lines, width = ["parameter, default, what it takes:"], max(map(len, parameters))
    for key, parameter in parameters.items():
        named = f"{key} of a sampler" if key == "window" and "sampler" in parameters else key
        meaning = "" if parameter["takes"] == "true | false" else MEANINGS.get(named, "")
        line = f"  {key:{width}}  {json.dumps(parameter['default']):14}  {parameter['takes']}"
        lines.append(f"{line}: {meaning}" if meaning else line)
    for parameter, inner in (
        (key, value["keys"]) for key, value in parameters.items() if "keys" in value
    ):
        width = max(map(len, inner))
        lines += ["", f"keys of {parameter}, default:"] + [
            f"  {key:{width}}  {json.dumps(field['default']):6}  {field['description'] or ''}".rstrip()
            for key, field in inner.items()
        ]
    return lines


def _key_lines(keys: list[Page]) -> list[str]:
    """Return the keys of each framework as lines: the key, its default there, the parameter."""
    lines, width = [], max((len(row["key"]) for row in keys), default=0)
    for framework, rows in groupby(keys, itemgetter("framework")):
        lines.append(f"keys of {framework}, default there, parameter here:")
        for row in rows:
            default = "not set" if row["default"] is None else json.dumps(row["default"])
            lines.append(f"  {row['key']:{width}}  {default:14}  {row['parameter']}")
        lines.append("")
    return lines


def takes(schema: Page) -> str:
    """Return the values that a parameter takes, in words, without the general bounds."""
    if "anyOf" in schema:
        return " or ".join(takes(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(schema.get("enum", [schema.get("const")]))
    if "$ref" in schema or "oneOf" in schema:
        return "an object"
    if schema.get("type") == "array":
        return "a list"
    kind = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true | false",
        "null": "null",
    }.get(schema.get("type", ""), schema.get("type", "value"))
    shown = (
        f"{sign} {schema[key]:,}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in schema and abs(schema[key]) not in (LARGEST, LARGEST_WHOLE)
    )
    return f"{kind} {', '.join(shown)}".strip()
