"""Length: responses that are too short, too long, or were cut off."""

import numpy as np

from data_contracts.config import LengthRule, TruncationRule
from tasks.curation.group import Group


def length(group: Group, config: LengthRule) -> np.ndarray:
    """Return [N] bool: responses outside of the limits."""
    num_tokens = group.of(group.rows.num_tokens)
    too_long = np.zeros(num_tokens.size, bool) if config.max_tokens is None else num_tokens > config.max_tokens
    return (num_tokens < config.min_tokens) | too_long


def truncation(group: Group, config: TruncationRule) -> np.ndarray:
    """Return [N] bool: responses that the length limit cut off."""
    return group.of(group.rows.is_truncated)
