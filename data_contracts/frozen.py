"""The kind of value that configuration is made of."""

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator


class Frozen(BaseModel):
    """An immutable value that refuses unknown fields; the text under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _takes_the_usual_kind(cls, values: Any) -> Any:
        """Have a field of several kinds whose `type` is not given be of the kind that it is by default."""
        if not isinstance(values, Mapping):
            return values
        kinds = {name: getattr(field.default, "type", None) for name, field in cls.model_fields.items()}
        lacking = {
            name: {"type": kind, **values[name]}
            for name, kind in kinds.items()
            if kind and isinstance(values.get(name), Mapping) and "type" not in values[name]
        }
        return {**values, **lacking}


def _without_secret(url: str) -> str:
    if "://" in url and (urlsplit(url).username is not None or urlsplit(url).query):
        raise ValueError("expected an address without user, password and query, which would stand in the run's records")
    return url


Address = Annotated[str, AfterValidator(_without_secret)]
"""A URL or a path; a configuration is written into records and history, so it may hold no secret."""
