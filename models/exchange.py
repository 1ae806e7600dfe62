"""What ranks tell each other of a step, so that each knows all of it. Legend: N sampled tokens."""

import torch
from torch import Tensor

from models.backend import Backend
from models.objective import NotFinite, Underway
from models.tokens import select


def whole(backend: Backend, values: Tensor, own: Tensor) -> Tensor:
    """Return values [N] of all ranks, each from the rank whose own it is; NaN where it is nobody's."""
    if backend.num_ranks == 1:
        return values
    total = backend.sum(select(own, values))
    return torch.where(backend.sum(own.float()) > 0, total, torch.nan)


def bring_together(backend: Backend, step: Underway) -> None:
    """Have every rank know what all have measured."""
    if backend.num_ranks == 1:
        return
    for name in ("logp", "start_logp", "proximal", "entropy"):
        setattr(step, name, whole(backend, getattr(step, name), step.own))
    step.cut = backend.sum(select(step.own, step.cut.float())) > 0
    told: list[tuple[dict[str, float], int]] = backend.gather((step.sums, step.packed_tokens))
    step.packed_tokens = sum(count for _, count in told)
    names = sorted({name for sums, _ in told for name in sums})
    step.sums = {name: sum(sums.get(name, 0.0) for sums, _ in told) for name in names}


def agree(backend: Backend, step: Underway) -> None:
    """Raise NotFinite in every rank when one has found something that is not finite."""
    found = [evidence for evidence in backend.gather(step.evidence) if evidence]
    if found:
        raise NotFinite(found[0])
