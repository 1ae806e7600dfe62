"""The kind of value that configuration is made of."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable value that refuses unknown fields; the text under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _without_secret(url: str) -> str:
    if "://" in url and (urlsplit(url).username is not None or urlsplit(url).query):
        raise ValueError("expected an address without user, password and query, which would stand in the run's records")
    return url


Address = Annotated[str, AfterValidator(_without_secret)]
"""A URL or a path; a configuration is written into records and history, so it may hold no secret."""
