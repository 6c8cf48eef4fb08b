"""Overrides: `key=value` from the command line, the value as YAML."""

from __future__ import annotations

from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from simrl.errors import InputError, first_line
from simrl.yaml_text import refuse_unbounded


def parse_override(text: str) -> tuple[str, Any]:
    """Key and value; `${…}` in the value stays as it is. Raises `InputError` for what has no key or is no YAML."""
    key, equals, written = text.partition("=")
    if not equals or not key:
        raise InputError(f"override {text!r}: write key=value, such as steps=20")
    try:
        refuse_unbounded(written)
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={written}"]))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        raise InputError(
            f"override {text!r}: the value is not YAML ({problem or first_line(error)}); quote it, or close its brackets"
        ) from error
    assert isinstance(parsed, dict)
    return key, parsed["value"]
