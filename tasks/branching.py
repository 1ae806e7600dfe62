"""Where samples of a group begin: at the prompt, or in the middle of another sample's response.

Pure functions of the configuration and of what the others said, so that whoever rolls a ticket out gets one tree.
"""

from typing import NamedTuple

import numpy as np

from data_contracts.config import Branching


class Start(NamedTuple):
    """Where a sample begins."""

    branch_of: int
    """Sample whose response it goes on from; -1 for the prompt."""
    prefix: np.ndarray
    """int32, the response tokens that it shares with that sample; empty at the prompt."""


FROM_PROMPT = Start(-1, np.zeros(0, np.int32))


def trunk_of(sample: int, cfg: Branching | None) -> int:
    """Return the sample that `sample` branches off; -1 for those that begin at the prompt."""
    return -1 if cfg is None or sample < cfg.trunks else (sample - cfg.trunks) % cfg.trunks


def starts_from(
    trunk: int, response_ids: np.ndarray, logprobs: np.ndarray, cfg: Branching, num_samples: int
) -> dict[int, Start]:
    """Return where the samples begin that branch off a finished one, by sample.

    A response of fewer than two tokens cannot be branched off: they begin at the prompt.

    Args:
        trunk: the finished sample.
        response_ids: [T] of it.
        logprobs: [T] nats of it.
        cfg: says where.
        num_samples: of the group.
    """
    members = [sample for sample in range(cfg.trunks, num_samples) if trunk_of(sample, cfg) == trunk]
    length = len(response_ids)
    if length < 2:
        return dict.fromkeys(members, FROM_PROMPT)
    if cfg.at == "evenly":
        places = [min(max(round(length * (i + 1) / (len(members) + 1)), 1), length - 1) for i in range(len(members))]
    else:
        unlikely = 1 + np.argsort(logprobs[1:], kind="stable")
        places = [int(unlikely[i % len(unlikely)]) for i in range(len(members))]
    return {
        sample: Start(trunk, np.asarray(response_ids[:place], np.int32))
        for sample, place in zip(members, places, strict=True)
    }
