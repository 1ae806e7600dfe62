"""The algorithm of a step, as data: advantage, proximal policy, importance weight, trust region, aggregation.

Each part is a union with a `type`; the function behind a class stands in a dict of models/ under that class
(ADVANTAGES, WEIGHTS, LOSSES, AGGREGATIONS, REGULARIZERS). To add a method: a class in its union here, a
function and a line of the dict there, and a test. Three policies appear: *behavior* (who sampled), *proximal*
(anchor of the trust region) and *current* (whose weights get the gradient).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Part(BaseModel):
    """One choice of the algorithm: frozen, closed, described by the text under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# Advantages


class Grpo(Part):
    """Reward minus the group's mean, divided by the group's standard deviation; Dr. GRPO with std none."""

    type: Literal["grpo"] = "grpo"
    std: Literal["unbiased", "biased", "batch", "none"] = "unbiased"
    """Divisor: the group's deviation with n-1 or n, that of the whole batch (n-1), or none."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation (reward)."""


class Rloo(Part):
    """Reward minus the mean of the other samples of the group."""

    type: Literal["rloo"] = "rloo"


Advantage = Annotated[Grpo | Rloo, Field(discriminator="type")]


# Proximal policy


class BehaviorProximal(Part):
    """The proximal policy is the behavior policy: ratios are taken against the recorded log-probabilities."""

    type: Literal["behavior"] = "behavior"


class RecomputedProximal(Part):
    """The proximal policy is that of the step's start, recomputed by the trainer (decoupled PPO)."""

    type: Literal["recomputed"] = "recomputed"


Proximal = Annotated[BehaviorProximal | RecomputedProximal, Field(discriminator="type")]


# Importance weights from the behavior to the proximal policy


class NoWeights(Part):
    """Every token counts once."""

    type: Literal["none"] = "none"


class TruncatedWeights(Part):
    """The ratio of proximal to behavior policy, cut off from above (TIS)."""

    type: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """One ratio per token, or the product over the sequence for all its tokens."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""


class MaskedWeights(Part):
    """The ratio of proximal to behavior policy inside a band; outside it the tokens leave the loss (MIS, IcePop)."""

    type: Literal["masked"] = "masked"
    level: Literal["token", "sequence", "geometric"] = "token"
    """What must lie in the band and becomes the weight: the token's ratio, the product over the sequence, or the
    geometric mean over the sequence."""
    low: float = Field(default=0.0, ge=0)
    """Smallest ratio kept, itself included."""
    high: float = Field(default=3.0, gt=0)
    """Largest ratio kept, itself included."""

    @model_validator(mode="after")
    def _is_a_band(self) -> "MaskedWeights":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}: no token would be kept")
        return self


Importance = Annotated[NoWeights | TruncatedWeights | MaskedWeights, Field(discriminator="type")]


# Trust region between the proximal and the current policy


class LossPart(Part):
    """What the trainer must know of any loss, beside its numbers."""

    uses_proximal: ClassVar[bool] = True
    """Whether the proximal policy enters the loss itself."""
    uses_behavior: ClassVar[bool] = False
    """Whether the loss takes its ratio against the behavior policy whatever the proximal policy is."""


class PpoClip(LossPart):
    """The clipped surrogate, with separate bounds and an optional second bound for negative advantages."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is kept above 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is kept below 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With a negative advantage the loss is at most this times its size; None leaves it unbounded."""


class Reinforce(LossPart):
    """Minus advantage times log-probability: no trust region."""

    type: Literal["reinforce"] = "reinforce"
    uses_proximal: ClassVar[bool] = False


Loss = Annotated[PpoClip | Reinforce, Field(discriminator="type")]


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


class KlPenalty(Part):
    """An estimate of the divergence of the current policy from an earlier one."""

    type: Literal["kl"] = "kl"
    towards: Literal["behavior", "proximal"] = "behavior"
    """The policy to stay near."""
    estimator: Literal["k2", "k3", "k3_plus"] = "k2"
    """k2 has the gradient of the reverse divergence; k3 that of the forward one; k3_plus has the value of k3 and
    the gradient of k2. (k1 is missing: as a loss its gradient is zero in expectation.)"""
    coefficient: float = Field(default=0.001, gt=0)
    """Loss per nat."""


Regularizer = Annotated[EntropyBonus | KlPenalty, Field(discriminator="type")]


class AlgorithmConfig(Part):
    """What a step computes: the defaults are GRPO with the clipped ratio against the behavior policy."""

    advantage: Advantage = Grpo()
    """How rewards become advantages."""
    proximal: Proximal = BehaviorProximal()
    """Which policy anchors the trust region."""
    importance: Importance = NoWeights()
    """Correction from the behavior to the proximal policy, multiplied onto the loss of each token."""
    loss: Loss = PpoClip()
    """The trust region and its surrogate."""
    aggregation: Aggregation = TokenMean()
    """How token losses become one number."""
    regularizers: tuple[Regularizer, ...] = ()
    """What else is minimized."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether responses cut off by the length limit stay in the loss; their rewards count either way."""

    @model_validator(mode="after")
    def _does_not_count_twice(self) -> "AlgorithmConfig":
        weighted = not isinstance(self.importance, NoWeights)
        behavior_anchored = isinstance(self.proximal, BehaviorProximal)
        if weighted and behavior_anchored:
            raise ValueError(
                f"importance {self.importance.type!r} with proximal 'behavior': the ratio is already taken against the behavior "
                "policy, so the correction would be counted twice; set importance 'none' or proximal 'recomputed'"
            )
        if self.loss.uses_behavior and not behavior_anchored:
            raise ValueError(
                f"loss {self.loss.type!r} takes its ratio against the behavior policy, so proximal {self.proximal.type!r} "
                "would have no effect; set proximal 'behavior'"
            )
        return self
