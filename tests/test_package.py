"""The package as it is installed: its version, its command, its Python interface."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import nereus
from nereus.errors import ConfigError

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_the_version_is_said_once() -> None:
    assert nereus.__version__ == PROJECT["version"] == importlib.metadata.version("nereus")


def test_the_command_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="nereus")
    assert script.value == "nereus.cli:main" and callable(script.load())


def test_every_offered_name_can_be_used() -> None:
    assert all(callable(getattr(nereus, name)) for name in nereus.__all__)


def test_train_in_python_refuses_as_the_command_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such recipe"):
        nereus.train(tmp_path / "none.yaml", ["trainer.steps=1"])
