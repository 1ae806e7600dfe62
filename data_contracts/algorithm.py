"""The algorithm of a step, as data: advantage, importance weight, trust region, aggregation, regularizers."""

from pydantic import BaseModel, ConfigDict


class AlgorithmConfig(BaseModel):
    """What a step computes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
