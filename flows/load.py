"""Reads a run's configuration once, at the edge: defaults < TOML < environment < command line.

After this everything receives a plain frozen RunConfig. The layering class never leaves this file: a
workflow engine that validates parameters against it would read the environment a second time.
"""

import contextlib
import io
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from data_contracts.config import RunConfig
from data_contracts.errors import ConfigError
from infra import settings

SHIPPED = Path(__file__).parent / "runs"


class _Layers(BaseSettings, RunConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = SettingsConfigDict(
        env_prefix="ROLLFLOW_RUN__",
        env_nested_delimiter="__",
        cli_avoid_json=True,
        cli_parse_none_str="none",
        frozen=True,
        extra="forbid",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings  # pydantic-settings puts the command line in front


class _Overrides(_Layers):  # pyright: ignore[reportIncompatibleVariableOverride]
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # the environment of today says nothing about a run of yesterday


def load_run_config(source: str | Path, arguments: Sequence[str] = ()) -> RunConfig:
    """Resolve a run's configuration.

    Args:
        source: a TOML file, or the name of a shipped one (`tiny` for flows/runs/tiny.toml).
        arguments: command-line words such as `--staleness.max_staleness 4`.

    Raises:
        ConfigError: one sentence that names the file or field, what was expected, and what came.
    """
    path = find_config(source)
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{path}: not valid TOML: {cause}") from cause
    if isinstance(values.get("algorithm"), str):  # a preset's name; the command line may add fields to it
        values["algorithm"] = {"preset": values["algorithm"]}
    values.setdefault("store", settings.default_store())
    return _resolve(_Layers, values, arguments, str(path))


def override(config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """Return a run's frozen configuration with the fields that command-line words name replaced.

    Choosing another kind, as in `--algorithm.loss.type reinforce`, begins from that kind's defaults. The
    environment is not read.

    Raises:
        ConfigError: one sentence that names the field, what was expected, and what came.
    """
    values = config.model_dump(mode="json")
    words = [part for word in arguments for part in word.split("=", 1)]
    for word, following in zip(words, words[1:], strict=False):
        if word == "--algorithm.preset":
            values["algorithm"] = {"preset": following}
        if word.startswith("--") and word.endswith(".type"):
            _forget_other_kind(values, word.removeprefix("--").split("."), following)
    return _resolve(_Overrides, values, arguments, "command line")


def _forget_other_kind(values: dict[str, Any], path: Sequence[str], kind: str) -> None:
    *above, last, _ = path
    for part in above:
        values = values.get(part) or {}
    chosen = values.get(last)
    if isinstance(chosen, dict) and chosen.get("type") != kind:
        values[last] = {"type": kind}


def _resolve(layering: type[_Layers], values: dict[str, Any], arguments: Sequence[str], source: str) -> RunConfig:
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(complaints):
            layers = CliApp.run(layering, list(arguments), **values)
        return RunConfig.model_validate(layers.model_dump())
    except ValidationError as cause:
        raise ConfigError(f"{source}: {explain(cause)}") from cause
    except SettingsError as cause:
        raise ConfigError(f"{source}: {cause}") from cause
    except SystemExit as cause:
        last = (complaints.getvalue().strip().splitlines() or ["cannot be read"])[-1]
        raise ConfigError(f"command line: {last.removeprefix('usage: ')}") from cause


def find_config(source: str | Path) -> Path:
    """Return the TOML file that `source` names.

    Raises:
        ConfigError: neither a file nor a shipped config has this name.
    """
    path = Path(source)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{source}.toml"
    if shipped.is_file():
        return shipped
    names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.toml")))
    raise ConfigError(f"config {source}: no such file, and no shipped config has this name (shipped: {names})")


def explain(error: ValidationError) -> str:
    """Return one sentence for the first problem, and how many more there are."""
    problems = error.errors()
    first: dict[str, Any] = dict(problems[0])
    where = ".".join(str(part) for part in first["loc"]) or "the run"
    if first["type"] == "extra_forbidden":
        sentence = f"{where}: there is no such field; remove it or correct its spelling"
    elif first["type"] == "value_error":
        sentence = f"{where}: {first['msg'].removeprefix('Value error, ')}"
    else:
        sentence = f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"
    return sentence if len(problems) == 1 else f"{sentence} (and {len(problems) - 1} more)"
