"""Every recipe by its name, of simrl and of installed packages, and the systems that recipes
make."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter
from typing import Any

from pydantic import ValidationError

from simrl.errors import InputError, choose, meant
from simrl.extensions import Extended
from simrl.systems import drafting, frameworks, off_policy, on_policy
from simrl.systems.system import Recipe, System, recipe_of
from simrl.validation import call_error, has_underscores, in_words, number_meant

# In the order in which `simrl systems` lists them: the order of the modules, and of definition.
_OWN: dict[str, Callable[..., System]] = {
    function.__name__: function
    for module in (on_policy, off_policy, frameworks, drafting)
    for function in vars(module).values()
    if isinstance(function, Recipe)
}
RECIPES: Extended[System] = Extended(_OWN, "simrl.systems", "system")


def make_system(name: str, parameters: dict[str, Any]) -> System:
    """Return the system of a recipe. Raise `InputError` for an unknown recipe or parameter, or a
    value out of range."""
    known = recipe_parameters(name)
    for key, value in parameters.items():
        if key not in known:
            raise InputError(
                f"system {name}: unknown parameter {key!r}{meant(key, known)}; it has {', '.join(known)}"
            )
        if isinstance(value, bool) and "bool" not in str(known[key].annotation):
            values = ", ".join(re.findall(r"(?<=[\[ ])'(\w+)'", str(known[key].annotation)))
            raise InputError(
                f"system {name}: {key} is {in_words(value)} ({str(value).lower()}); it is not a switch, "
                f"{f'choose one of {values}' if values else 'give a value'}"
            )
        if has_underscores(value):
            raise InputError(
                f"system {name}: {key} is {value!r}: a number is needed{number_meant(value)}"
            )
    try:
        system = recipe_of(name, RECIPES[name])(**parameters)
    except ValidationError as error:
        raise InputError(f"system {name}: {call_error(error, known)}") from error
    return replace(system, name=name, parameters=dict(parameters))


def recipe_parameters(name: str) -> dict[str, Parameter]:
    """Return the parameters that a recipe takes. Raise `InputError` for an unknown recipe."""
    if name not in RECIPES:
        raise unknown_system(name)
    return dict(recipe_of(name, RECIPES[name]).__signature__.parameters)


def parameters_of(name: str) -> dict[str, Any]:
    """Return the defaults of the parameters that a recipe takes. Raise `InputError` for an unknown
    recipe."""
    return {key: parameter.default for key, parameter in recipe_parameters(name).items()}


def unknown_system(name: str) -> InputError:
    """Return the error for a name that no recipe has. Tables call a system areal(eta=4): for that
    the message says how to give parameters."""
    begins = re.split(r"[(:\[ =]", name)[0]
    if begins != name and begins in RECIPES:
        return InputError(
            f"system {name!r}: write parameters as {{'name': '{begins}', 'eta': 4}}, or as system.eta=4"
        )
    return InputError(f"system {name!r} is unknown{choose(name, RECIPES, 'simrl systems')}")
