"""From token losses to a step of the optimizer, as data: aggregation, regularizers, step size, update.

The function behind a class stands in models.aggregation.AGGREGATIONS or models.regularizers.REGULARIZERS; step sizes
and updates are the trainer's own.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from data_contracts.losses import Part

# Aggregation of token losses


class TokenMean(Part):
    """Sum over tokens, divided by the number of tokens of the update."""

    type: Literal["token_mean"] = "token_mean"


class SequenceMeanTokenMean(Part):
    """Mean over sequences of the mean over their tokens."""

    type: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"
    count_empty: bool = False
    """Count sequences without a token in the loss, as zeros."""


class SequenceMeanTokenSum(Part):
    """Mean over sequences of the sum over their tokens."""

    type: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"
    count_empty: bool = False
    """Count sequences without a token in the loss, as zeros."""


class ConstantNorm(Part):
    """Sum over tokens, divided by the number of sequences times a constant length (Dr. GRPO)."""

    type: Literal["constant_norm"] = "constant_norm"
    length: int = Field(gt=0)
    """The constant, in tokens; usually the limit on a response."""


Aggregation = Annotated[
    TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | ConstantNorm, Field(discriminator="type")
]


# Regularizers, added to the loss with the same aggregation


class EntropyBonus(Part):
    """Minus the entropy of the next-token distribution, at the sampling temperature."""

    type: Literal["entropy"] = "entropy"
    coefficient: float = Field(default=0.001, gt=0)
    """Loss per nat."""


class AdaptiveEntropy(Part):
    """An entropy bonus whose coefficient rises while the entropy is at most a target, and falls else.

    The bonus is applied in steps that follow one whose entropy was at most the target.
    """

    type: Literal["adaptive_entropy"] = "adaptive_entropy"
    target: float = Field(default=0.3, gt=0)
    """Entropy to keep (nats per token)."""
    change: float = Field(default=0.005, gt=0)
    """Change of the coefficient per step."""
    largest: float = Field(default=1.0, gt=0)
    """Largest coefficient; the smallest is 0, where it starts."""


class KlPenalty(Part):
    """An estimate of the divergence of the current policy from an earlier one."""

    type: Literal["kl"] = "kl"
    towards: Literal["behavior", "proximal", "reference"] = "behavior"
    """The policy to stay near; the reference is version 0 and costs a forward pass."""
    estimator: Literal["k1", "k2", "k3", "k1_plus", "k3_plus"] = "k2"
    """k2 has the gradient of the reverse divergence; k3 that of the forward one; k1_plus and k3_plus have the value
    of k1 and k3 and the gradient of k2. The gradient of k1 is zero in expectation, so it needs `reweight`."""
    coefficient: float = Field(default=0.001, gt=0)
    """Loss per nat."""
    reweight: bool = False
    """Multiply by the ratio of current to behavior probability, with its gradient: right for stale tokens too."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> "KlPenalty":
        if self.estimator == "k1" and not self.reweight:
            raise ValueError(
                "estimator 'k1' as a loss has a gradient that is zero in expectation, so it regularizes nothing; "
                "choose 'k2' or 'k1_plus', or set reweight"
            )
        return self


Regularizer = Annotated[EntropyBonus | AdaptiveEntropy | KlPenalty, Field(discriminator="type")]


# What staleness does to the step's size


class FixedStep(Part):
    """The learning rate of the schedule."""

    type: Literal["fixed"] = "fixed"


class EssStep(Part):
    """The learning rate shrinks with the effective sample size over sequences (VCPO)."""

    type: Literal["ess"] = "ess"
    rule: Literal["sqrt", "linear"] = "sqrt"
    """How the rate falls with the effective sample size per sequence."""
    full_at: float = Field(default=1.0, gt=0, le=1)
    """Effective sample size per sequence from which the rate is whole."""


StepSize = Annotated[FixedStep | EssStep, Field(discriminator="type")]


# How one optimizer update is made


class PlainUpdate(Part):
    """One step along the gradient."""

    type: Literal["plain"] = "plain"


class SlowFastUpdate(Part):
    """Some steps on the same tokens, a step back towards the start, and one more (SFPO; from notes, numbers ours)."""

    type: Literal["slow_fast"] = "slow_fast"
    fast_steps: int = Field(default=3, gt=0)
    """Steps on the same tokens before the step back."""
    keep: float = Field(default=0.5, ge=0, le=1)
    """How much of their way is kept: start + keep (end - start)."""
    window: int = Field(default=16, gt=1)
    """Steps whose entropies say what is usual."""
    limit: float = Field(default=2.0, gt=0)
    """When the entropy is this many deviations from usual, nothing of the way is kept."""


Update = Annotated[PlainUpdate | SlowFastUpdate, Field(discriminator="type")]
