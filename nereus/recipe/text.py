"""Recipes as text: YAML files, `a.b=c` overrides, and the words for what a validation refused.

It knows no key: the sections of a config are given as pydantic models.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from nereus.errors import ConfigError

__all__ = ["config_error", "merge_override", "read_recipe"]

KINDS = {
    "model_type": "it must be a section of keys",
    "tuple_type": "it must be a list",
    "dict_type": "it must be a mapping of keys to values",
    "path_type": "it must be a path",
    "invalid_key": "keys are text",
}
"""What is accepted, in the words of a recipe, for the types of pydantic's errors whose own words are Python's."""


def read_recipe(path: Path) -> dict[str, Any]:
    """The nested keys of a YAML file; raises ConfigError naming the file and, where YAML is broken, the line."""
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(str(path), "no such recipe; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "not a text file; give the path of a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(_place(path, error), f"not valid YAML: {_problem(error)}") from None
    if not isinstance(recipe, dict):
        raise ConfigError(str(path), f"holds {type(recipe).__name__}; a recipe is a mapping of keys to values")
    return recipe


def _place(path: Path, error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f"{path}:{mark.line + 1}" if mark is not None else str(path)


def _problem(error: yaml.YAMLError) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    return problem or str(error)


def merge_override(recipe: dict[str, Any], override: str) -> None:
    """Set one `a.b=c` in nested keys; a mapping as value is merged into the section that is there."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(override, "an override is written key=value with dotted keys, such as trainer.steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(key, f"got {text!r}, which is not valid YAML: {_problem(error)}") from None
    *sections, leaf = key.strip().split(".")
    target = recipe
    for depth, name in enumerate(sections):
        below = target.get(name)
        if below is None:
            below = target[name] = {}
        if not isinstance(below, dict):
            raise ConfigError(".".join(sections[: depth + 1]), f"is {below!r}, not a section; {key} cannot be set")
        target = below
    old = target.get(leaf)
    target[leaf] = _deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value


def _deep_merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for name, value in new.items():
        below = merged.get(name)
        merged[name] = _deep_merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def config_error(root: type[pydantic.BaseModel], error: pydantic.ValidationError) -> ConfigError:
    """The first problem of a validation of `root`, by its dotted key."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        return ConfigError(key, f"unknown key; {_suggestion(root, path)}")
    if first["type"] == "missing":
        return ConfigError(key, "missing; every recipe needs it")
    what = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    what = KINDS.get(first["type"], what)
    return ConfigError(key, f"got {first['input']!r}; {what}")


def _suggestion(root: type[pydantic.BaseModel], path: Sequence[str]) -> str:
    """The nearest known key: among the section's own first, then by last name among all."""
    section = ".".join(part for part in path[:-1] if not part.isdigit())
    keys = list(_keys(root))
    if path[-1] in keys:
        return f"write it nested: {': {'.join(path[-1].split('.'))}: ...{'}' * path[-1].count('.')}"
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(path[-1], siblings, n=1)
    if near:
        return f"did you mean {siblings[near[0]]}?"
    leaves = [key.rpartition(".")[2] for key in keys]
    near = difflib.get_close_matches(path[-1], leaves, n=1, cutoff=0.8)
    if near:
        return f"did you mean {' or '.join(k for k in keys if k.rpartition('.')[2] == near[0])}?"
    return f"known in {section or 'a recipe'}: {', '.join(siblings)}"


def _keys(section: type[pydantic.BaseModel], prefix: str = "") -> Iterable[str]:
    """Every dotted key below a section, sections included."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for kind in _section_types(field.annotation):
            yield from _keys(kind, f"{prefix}{name}.")


def _section_types(annotation: Any) -> tuple[type[pydantic.BaseModel], ...]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return (annotation,)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple):
        return tuple(kind for part in typing.get_args(annotation) for kind in _section_types(part))
    return ()
