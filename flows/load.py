"""Reads a run's configuration once, at the edge: defaults < TOML < environment < command line.

After this everything receives a plain frozen RunConfig. The layering class never leaves this file: a
workflow engine that validates parameters against it would read the environment a second time.
"""

import contextlib
import difflib
import io
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliApp, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from data_contracts.config import RunConfig
from data_contracts.errors import ConfigError
from infra import settings

ENVIRONMENT_PREFIX = "ROLLFLOW_RUN__"
SHIPPED = Path(__file__).parent / "runs"


class _Layers(BaseSettings, RunConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
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
    return _resolve(_Layers, values, arguments, str(path), environment=_fields_of_environment())


def _fields_of_environment() -> list[str]:
    """Return the dotted names of the fields that the environment sets.

    Raises:
        ConfigError: there is no such field.
    """
    known = set(field_names(RunConfig))
    parents = {name.rpartition(".")[0] for name in known}
    names = [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]
    fields = [name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".") for name in names]
    for name, field in zip(names, fields, strict=True):
        # Below a field that has none of its own stand the keys of a mapping.
        above = field.rpartition(".")[0]
        if field not in known and (above not in known or above in parents):
            raise ConfigError(f"environment: {name}: {_no_such_field(field)}")
    return fields


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


def _resolve(
    layering: type[_Layers],
    values: dict[str, Any],
    arguments: Sequence[str],
    source: str,
    environment: Sequence[str] = (),
) -> RunConfig:
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(complaints):
            layers = CliApp.run(layering, list(arguments), **values)
        return RunConfig.model_validate(layers.model_dump())
    except ValidationError as cause:
        words = [word.removeprefix("--").partition("=")[0] for word in arguments if word.startswith("--")]
        given = dict.fromkeys(environment, "environment") | dict.fromkeys(words, "command line")
        raise ConfigError(explain(cause, source, given)) from cause
    except SettingsError as cause:
        raise ConfigError(f"{source}: {cause}") from cause
    except SystemExit as cause:
        last = (complaints.getvalue().strip().splitlines() or ["cannot be read"])[-1]
        raise ConfigError(f"command line: {_unrecognized(last.rpartition('error: ')[2])}") from cause


def _unrecognized(complaint: str) -> str:
    """Return what is wrong with the words, with the nearest fields where one is misspelt."""
    what, _, words = complaint.partition("unrecognized arguments: ")
    if what or not words.startswith("--"):
        return complaint.removeprefix("usage: ")
    return _no_such_field(words.split()[0].removeprefix("--").partition("=")[0])


def _no_such_field(name: str) -> str:
    near = difflib.get_close_matches(name, field_names(RunConfig), n=3)
    return f"there is no field {name}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def field_names(kind: type[BaseModel]) -> list[str]:
    """Return the dotted names of all fields of a model, those of every member of a union included."""
    names: dict[str, None] = {}
    for name, field in kind.model_fields.items():
        names[name] = None
        for inner in _models_in(field.annotation):
            names |= dict.fromkeys(f"{name}.{below}" for below in field_names(inner))
    return list(names)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (tuple, list, dict):  # their members have no dotted name
        return []
    return [model for part in get_args(annotation) for model in _models_in(part)]


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


def explain(error: ValidationError, source: str = "", given: Mapping[str, str] | None = None) -> str:
    """Return one sentence for the first problem, and how many more fields have one.

    Args:
        error: of a configuration.
        source: where its values are from; empty for nothing to say of it.
        given: dotted names of fields that are set elsewhere, and where that is.
    """
    given = given or {}
    problems = error.errors()
    first: dict[str, Any] = dict(problems[0])
    place = _place(first["loc"])
    named = next((name for name in given if _is_within(name.split("."), place)), "")
    where = named or ".".join(place) or "the run"
    if first["type"] == "extra_forbidden":
        kind = ".".join(place[:-1])
        sentence = f"{where}: there is no such field in {kind or 'the config'}; remove it or correct its spelling"
    elif first["type"] == "value_error":
        sentence = f"{where}: {first['msg'].removeprefix('Value error, ')}"
    else:
        sentence = f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"
    others = len({tuple(_place(problem["loc"])) for problem in problems}) - 1
    if named:
        source = given[named]
    elif source:
        source = " and ".join([source, *dict.fromkeys(given.values())])
    origin = f"{source}: " if source else ""
    return f"{origin}{sentence}" + (f" (and {others} more)" if others else "")


def _place(loc: Sequence[int | str]) -> list[str]:
    """Return where a problem is, without the members of unions that pydantic names as it tries them."""
    return [str(part) for part in loc if str(part).isidentifier() or isinstance(part, int)]


def _is_within(name: Sequence[str], place: Sequence[str]) -> bool:
    """Whether the parts of `name` stand in `place`, in this order; kinds of a union may stand between them."""
    rest = iter(place)
    return all(part in rest for part in name)
