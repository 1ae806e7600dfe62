"""Lists the named recipes of algorithms, or shows one of them."""

import json
import textwrap

import typer

from data_contracts.errors import ConfigError
from data_contracts.presets import PRESETS, expand

BASIS = {"code": "", "notes": " (from notes)", "interpretation": " (our interpretation)"}


def list_presets() -> None:
    """Print every preset with its line and its source."""
    width = max(len(name) for name in PRESETS) + 2
    for name, preset in PRESETS.items():
        lines = textwrap.wrap(f"{preset.about}. {preset.source}{BASIS[preset.basis]}", 110 - width)
        typer.echo("\n".join(f"{name if i == 0 else '':<{width}}{line}" for i, line in enumerate(lines)))
    typer.echo('\nuse: algorithm = "gspo" in a TOML file, or --algorithm.preset gspo; further fields replace its own')


def show_preset(name: str) -> None:
    """Print a preset's fields as JSON.

    Raises:
        ConfigError: there is no such preset.
    """
    try:
        expand(name)
    except ValueError as cause:
        raise ConfigError(str(cause)) from cause
    typer.echo(json.dumps({"preset": name, **PRESETS[name].parts}, indent=2))
