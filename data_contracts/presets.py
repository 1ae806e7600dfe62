"""Named algorithms: `algorithm = "gspo"` in a run's TOML, or `--algorithm.preset gspo`, begins from a recipe.

Further fields replace its own. The recipes stand in recipes.py.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from data_contracts.recipes import PRESETS, Preset

__all__ = ["PRESETS", "Preset", "expand"]


def expand(values: Any) -> Any:
    """Return the fields of an algorithm with those of its preset filled in.

    Args:
        values: a preset's name, or fields by name, among them perhaps `preset`; anything else comes back as it is.

    Raises:
        ValueError: no preset has this name; names those that come near.
    """
    if isinstance(values, str):
        values = {"preset": values}
    if not isinstance(values, Mapping) or not values.get("preset"):
        return values
    name = values["preset"]
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise ValueError(
            f"there is no preset {name!r}; did you mean {' or '.join(near[:3])}? rollflow presets lists all"
        )
    return _merged(PRESETS[name].parts, values)


def _merged(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `recipe` with what is given replaced; a part of another type replaces the recipe's part whole."""
    merged = dict(recipe)
    for name, value in given.items():
        own = merged.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            same = value.get("type", own.get("type")) == own.get("type")
            value = _merged(own, value) if same else value
        merged[name] = value
    return merged
