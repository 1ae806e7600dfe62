"""The chain: a group goes through the configured rules in order, and comes out accepted or refused with a reason.

    good rows ── min_samples ── rules, one by one ── min_samples ── drop_zero_variance ── accepted

A rule is a pure function from a group to the rows that break it, a selection one from rewards to the rows that stay.
To add one: a class in data_contracts/config_roles.py, a function in a file here, and a line in RULES or SELECTIONS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from data_contracts.config import (
    BalanceRule,
    ContrastRule,
    CurateConfig,
    CurateRule,
    CustomRule,
    DuplicateRule,
    LengthRule,
    RepetitionRule,
    TruncationRule,
)
from data_contracts.records import BatchRef, Verdict
from tasks.curation.custom import custom
from tasks.curation.duplicates import Recent, duplicates
from tasks.curation.group import Group
from tasks.curation.length import length, truncation
from tasks.curation.repetition import repetition
from tasks.curation.selection import balance, contrast

RULES: dict[type, Callable[..., np.ndarray]] = {
    DuplicateRule: duplicates,
    LengthRule: length,
    RepetitionRule: repetition,
    TruncationRule: truncation,
    CustomRule: custom,
}
"""Configuration to function(group, config) -> [N] bool, the rows that break the rule."""

SELECTIONS: dict[type, Callable[..., np.ndarray]] = {ContrastRule: contrast, BalanceRule: balance}
"""Configuration to function(rewards, config) -> [N] bool, the rows that stay."""

LOOKING_BACK = frozenset({duplicates})
"""Functions that take the recent accepted groups as a third argument."""


class Outcome(NamedTuple):
    """What the chain says of a group."""

    kept: Group
    why: str
    """Why the group is refused; empty when it is not."""
    left_out: dict[str, list[int]]
    """Rule to the rows it left out, counted from the group's first row."""


def judge(group: Group, config: CurateConfig, recent: Recent) -> Outcome:
    """Send a group through the chain."""
    left_out: dict[str, list[int]] = {}
    why = too_few_good_rows(group, config)
    for rule in config.rules:
        if why:
            break
        if isinstance(rule, ContrastRule | BalanceRule):
            kept = SELECTIONS[type(rule)](group.all_rewards, rule)
            gone = group.places[~kept[: group.places.size]]
            if gone.size:
                left_out.setdefault(rule.type, []).extend(gone.tolist())
            group = group.keeping(kept)
            why = too_few_good_rows(group, config, left_out)
            continue
        if group.ref.reused is not None and isinstance(rule, DuplicateRule):
            continue  # a copy says again what its source has said
        broken = _apply(rule, group, recent)
        if not broken.size:
            continue  # all that is left are rows of earlier tickets
        share = broken.mean()
        if rule.then == "refuse" and share > rule.max_share:
            why = f"{rule.type}: {broken.sum()} of {broken.size} rows, {describe(rule)}"
        elif rule.then == "leave_out" and broken.any():
            left_out.setdefault(rule.type, []).extend(group.places[broken].tolist())
            group = group.without(broken)
            why = too_few_good_rows(group, config, left_out)
    return Outcome(group, why or zero_variance(group, config), left_out)


def verdict_of(outcome: Outcome, batch: BatchRef) -> Verdict:
    """Return the chain's word as a verdict; the rows left out stand in its group, their counts in its metrics."""
    rewards = outcome.kept.all_rewards
    left_out = tuple(sorted(row for rows in outcome.left_out.values() for row in rows))
    group = outcome.kept.ref
    metrics = {f"left_out/{rule}": float(len(rows)) for rule, rows in outcome.left_out.items()}
    return Verdict(
        ticket=group.ticket,
        accepted=not outcome.why,
        reason=outcome.why,
        attempt=group.attempt,
        batch=None if outcome.why else batch,
        group=group.model_copy(update={"left_out": left_out}) if left_out else group,
        reward_mean=None if outcome.why else float(rewards.mean()),
        prompt_id=outcome.kept.prompt_id,
        metrics={"good_rows": float(rewards.size)} | metrics,
    )


def describe(rule: CurateRule) -> str:
    """Return the numbers of a rule, for a person who reads why a group was refused."""
    return ", ".join(f"{name} {value}" for name, value in rule.model_dump(exclude={"type", "then"}).items())


def too_few_good_rows(group: Group, config: CurateConfig, left_out: dict[str, list[int]] | None = None) -> str:
    """Refuse a group of which too few rows are left for a baseline to mean anything."""
    count = group.places.size + group.joined_rewards.size
    if count >= config.min_samples:
        return ""
    gone = "".join(f", {len(rows)} left out by {rule}" for rule, rows in (left_out or {}).items())
    return f"too_few_good_rows: expected at least {config.min_samples}, got {count}{gone}"


def zero_variance(group: Group, config: CurateConfig) -> str:
    """Refuse a group whose rewards are all equal, when so configured: it has no gradient."""
    rewards = group.all_rewards
    return "zero_variance" if config.drop_zero_variance and bool(np.all(rewards == rewards[0])) else ""


def _apply(rule: Any, group: Group, recent: Recent) -> np.ndarray:
    function = RULES[type(rule)]
    return function(group, rule, recent) if function in LOOKING_BACK else function(group, rule)
