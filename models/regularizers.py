"""What is minimized beside the surrogate, token by token.

Legend: N tokens.
"""

from collections.abc import Callable

from torch import Tensor

from data_contracts.algorithm import AdaptiveEntropy, EntropyBonus, KlPenalty
from models.tokens import TokenBatch, log_ratio, select


def entropy(batch: TokenBatch, cfg: EntropyBonus) -> Tensor:
    """Return -coefficient times the entropy of each token's distribution [N]."""
    return -cfg.coefficient * select(batch.mask, batch.entropy)


def adaptive_entropy(batch: TokenBatch, cfg: AdaptiveEntropy) -> Tensor:
    """Return minus the present coefficient times the entropy of each token's distribution [N]."""
    del cfg
    return -batch.entropy_coefficient * select(batch.mask, batch.entropy)


def kl(batch: TokenBatch, cfg: KlPenalty) -> Tensor:
    """Return coefficient times an estimate of KL(current, earlier) for each token [N]."""
    earlier = {"behavior": batch.behavior, "proximal": batch.proximal.detach(), "reference": batch.reference}
    estimate = kl_estimate(log_ratio(batch.logp, earlier[cfg.towards], batch.mask), cfg.estimator)
    if cfg.reweight:
        estimate = log_ratio(batch.logp, batch.behavior, batch.mask).exp() * estimate
    return cfg.coefficient * estimate


def kl_estimate(difference: Tensor, estimator: str) -> Tensor:
    """Return an estimator of KL(p, q) from log p - log q of tokens drawn from p: k1, k2, k3, k1_plus or k3_plus.

    Those ending in plus have the value of k1 or k3 and the gradient of k2.
    """
    k2 = 0.5 * difference**2
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return k2
    value = difference if estimator == "k1_plus" else (-difference).exp() - 1 + difference
    return value if estimator == "k3" else k2 + (value - k2).detach()


REGULARIZERS: dict[type, Callable[..., Tensor]] = {
    EntropyBonus: entropy,
    AdaptiveEntropy: adaptive_entropy,
    KlPenalty: kl,
}
