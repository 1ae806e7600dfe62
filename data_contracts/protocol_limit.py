"""The effective bound: how far rollouts may run ahead at present, as a fold over commits.

`max_staleness` is what the protocol promises. Below it, an adaptive limit lets rollouts run less far ahead while the
data are too far from the policy that trains on them: half as far when the effective sample size of a commit was low,
one version further when it was high. It changes admission alone and never exceeds the promise, so whatever follows
from the promise holds. A function of the commits up to a version, it is the same for whoever has applied them.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Adaptive:
    """When the limit moves."""

    metric: str
    """Name of a commit's metric; the larger the better."""
    low: float
    high: float
    lowest: int


class Limit(NamedTuple):
    """The limit in force, and since which commit."""

    versions: int
    since: int


def following_limit(limit: Limit, rule: Adaptive, *, maximum: int, version: int, metrics: dict[str, float]) -> Limit:
    """Return the limit after commit `version`.

    A change is given time to show: until the tickets that were claimed under the limit before it have been trained,
    the limit stays. A commit without the metric says nothing.

    >>> rule = Adaptive("policy/ess_token", low=0.5, high=0.8, lowest=0)
    >>> following_limit(Limit(4, 0), rule, maximum=4, version=9, metrics={"policy/ess_token": 0.3})
    Limit(versions=2, since=9)
    """
    found = metrics.get(rule.metric)
    if found is None or version - limit.since <= limit.versions:
        return limit
    versions = limit.versions
    if found < rule.low:
        versions //= 2
    elif found >= rule.high:
        versions += 1
    versions = min(max(versions, rule.lowest), maximum)
    return limit if versions == limit.versions else Limit(versions, version)
