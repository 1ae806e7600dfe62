"""Duplicates: responses that say again what an earlier row has said, exactly or nearly."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from data_contracts.config import DuplicateRule
from data_contracts.features import resemblance
from tasks.curation.group import Group


class Seen(NamedTuple):
    """What is remembered of a group's N rows."""

    fingerprint: np.ndarray
    """[N] uint64."""
    sketch: np.ndarray | None
    """[N, K] uint64; None when no rule looks for near duplicates."""


class Recent:
    """Responses of the newest accepted groups, in the order of their verdicts.

    A fold over log/curated: what stands in it depends on committed verdicts alone.
    """

    def __init__(self, rules: Iterable[object], seen: Iterable[Seen] = ()) -> None:
        """Remember as much as the rules on duplicates among `rules` look back at."""
        self._rules = [rule for rule in rules if isinstance(rule, DuplicateRule)]
        self._sketches = any(rule.window and rule.similarity < 1.0 for rule in self._rules)
        self.num_groups = max((rule.window for rule in self._rules), default=0)
        self._seen: deque[Seen] = deque(seen, self.num_groups)

    def copy(self) -> "Recent":
        """Return a memory of its own for a decision that may not stand."""
        return Recent(self._rules, self._seen)

    def add(self, group: Group) -> None:
        """Remember an accepted group."""
        sketch = group.of(group.rows.sketch) if self._sketches else None
        self._seen.append(Seen(group.of(group.rows.fingerprint), sketch))

    def newest(self, num_groups: int) -> list[Seen]:
        """Return the last `num_groups` groups, fewer where there are fewer."""
        return list(self._seen)[max(len(self._seen) - num_groups, 0) :] if num_groups else []


def duplicates(group: Group, config: DuplicateRule, recent: Recent) -> np.ndarray:
    """Return [N] bool: rows like an earlier row of the group or like a row of a recent group; the first one stays."""
    is_judged = group.of(group.rows.num_tokens) >= config.min_tokens
    earlier = recent.newest(config.window)
    if config.similarity == 1.0:
        own = group.of(group.rows.fingerprint)
        known = [seen.fingerprint for seen in earlier]
        alike = own[:, None] == np.concatenate([*known, own])[None, :]
    else:
        own = group.of(group.rows.sketch)
        known = [seen.sketch for seen in earlier if seen.sketch is not None]
        alike = resemblance(own, np.concatenate([*known, own])) >= config.similarity
    num_known = alike.shape[1] - own.shape[0]
    broken = is_judged & alike[:, :num_known].any(axis=1)
    for row in np.flatnonzero(is_judged & ~broken):  # against those that stay, so that a chain of likes ends
        within = alike[row, num_known : num_known + row]
        broken[row] = bool((within & is_judged[:row] & ~broken[:row]).any())
    return broken
