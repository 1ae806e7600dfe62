"""Repetition: responses that go round in circles."""

import numpy as np

from data_contracts.config import RepetitionRule
from tasks.curation.group import Group


def repetition(group: Group, config: RepetitionRule) -> np.ndarray:
    """Return [N] bool: responses of which too large a share of 4-grams had occurred before."""
    is_judged = group.of(group.rows.num_tokens) >= config.min_tokens
    return is_judged & (group.of(group.rows.repetition) > config.max_repeated)
