"""What is minimized beside the surrogate, token by token.

Legend: N tokens.
"""

from collections.abc import Callable

from torch import Tensor

from data_contracts.algorithm import EntropyBonus, KlPenalty
from models.tokens import TokenBatch, log_ratio, select


def entropy(batch: TokenBatch, cfg: EntropyBonus) -> Tensor:
    """Return -coefficient times the entropy of each token's distribution [N]."""
    return -cfg.coefficient * select(batch.mask, batch.entropy)


def kl(batch: TokenBatch, cfg: KlPenalty) -> Tensor:
    """Return coefficient times an estimate of KL(current, earlier) for each token [N]."""
    earlier = batch.behavior if cfg.towards == "behavior" else batch.proximal.detach()
    return cfg.coefficient * kl_estimate(log_ratio(batch.logp, earlier, batch.mask), cfg.estimator)


def kl_estimate(difference: Tensor, estimator: str) -> Tensor:
    """Return an estimator of KL(p, q) from log p - log q of tokens drawn from p: k1, k2, k3 or k3_plus."""
    k2 = 0.5 * difference**2
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return k2
    k3 = (-difference).exp() - 1 + difference
    # value of k3, gradient of k2
    return k3 if estimator == "k3" else k2 + (k3 - k2).detach()


REGULARIZERS: dict[type, Callable[..., Tensor]] = {
    EntropyBonus: entropy,
    KlPenalty: kl,
}
