"""Between the policy that sampled and the one that is trained, as data: proximal policy, importance weights, filters.

The function behind a class stands in models.importance: PROXIMALS, WEIGHTS, FILTERS. To add one: a class in its union
here, a function and a line of the dict there, and a test.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from data_contracts.losses import Part

# Proximal policy


class BehaviorProximal(Part):
    """The proximal policy is the behavior policy: ratios are taken against the recorded log-probabilities."""

    type: Literal["behavior"] = "behavior"


class RecomputedProximal(Part):
    """The proximal policy is that of the step's start, recomputed by the trainer (decoupled PPO)."""

    type: Literal["recomputed"] = "recomputed"


class InterpolatedProximal(Part):
    """An estimate between behavior and current policy by the age of the token, without a forward pass (A-3PO)."""

    type: Literal["interpolated"] = "interpolated"
    space: Literal["log", "probability"] = "log"
    """Interpolate log-probabilities or probabilities."""


class EwmaProximal(Part):
    """An exponentially weighted average of all weights so far (PPO-EWMA); costs a forward pass."""

    type: Literal["ewma"] = "ewma"
    decay: float = Field(default=0.9, gt=0, lt=1)
    """Weight of the past at each optimizer update; the center of mass lies 1 / (1 - decay) - 1 updates back."""


class SnapshotProximal(Part):
    """The weights of an exact earlier version, which the trainer keeps; costs a forward pass."""

    type: Literal["snapshot"] = "snapshot"
    lag: int = Field(default=1, gt=0, le=64)
    """How many versions back; every one of them is kept in memory and in checkpoints."""


Proximal = Annotated[
    BehaviorProximal | RecomputedProximal | InterpolatedProximal | EwmaProximal | SnapshotProximal,
    Field(discriminator="type"),
]


# Importance weights from the behavior to the proximal policy


class WeightPart(Part):
    """What the trainer must know of any importance weight, beside its numbers."""

    @property
    def needs_whole_update(self) -> bool:
        """Whether a token's weight depends on tokens of other microbatches."""
        return False


class NoWeights(WeightPart):
    """Every token counts once."""

    type: Literal["none"] = "none"


class TruncatedWeights(WeightPart):
    """The ratio of proximal to behavior policy, cut off from above (TIS)."""

    type: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence", "geometric"] = "token"
    """One ratio per token, or for all tokens of a sequence the product or the geometric mean of theirs."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""
    floor: float = Field(default=0.0, ge=0)
    """Smallest weight."""
    normalize: bool = False
    """Divide by the mean weight of the update, over tokens or (for the other levels) over sequences."""

    @model_validator(mode="after")
    def _is_a_band(self) -> "TruncatedWeights":
        if self.floor >= self.cap:
            raise ValueError(f"floor {self.floor} is not below cap {self.cap}: every weight would be the same")
        return self

    @property
    def needs_whole_update(self) -> bool:
        """Whether a token's weight depends on tokens of other microbatches."""
        return self.normalize


class MaskedWeights(WeightPart):
    """The ratio of proximal to behavior policy inside a band; outside it the tokens leave the loss (MIS, IcePop)."""

    type: Literal["masked"] = "masked"
    level: Literal["token", "sequence", "geometric"] = "token"
    """What must lie in the band and becomes the weight: the token's ratio, the product over the sequence, or the
    geometric mean over the sequence."""
    low: float = Field(default=0.0, ge=0)
    """Smallest ratio kept, itself included."""
    high: float = Field(default=3.0, gt=0)
    """Largest ratio kept, itself included."""
    weight: Literal["ratio", "one"] = "ratio"
    """What counts inside the band: the ratio, or 1, which only rejects (Geo-RS)."""

    @model_validator(mode="after")
    def _is_a_band(self) -> "MaskedWeights":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}: no token would be kept")
        return self


class KlMaskedWeights(WeightPart):
    """Tokens or sequences leave the loss where proximal and behavior policy diverge too far (verl, AReaL).

    With d = log behavior - log proximal of a token, k1 is d, k2 half its square, k3 exp(-d) - 1 + d. The sign of k1 is
    verl's; AReaL's is the opposite one. Denominators stay, where verl counts after the masking.
    """

    type: Literal["kl_masked"] = "kl_masked"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """What is measured of each token (nats, or nats squared)."""
    over: Literal["token", "sum", "mean", "max"] = "mean"
    """What must lie in the band: a token's own, or the sum, mean or maximum over its sequence."""
    low: float | None = None
    """Smallest value kept, itself included; None keeps all below `high`. Only k1 has values below 0."""
    high: float = 0.01
    """Largest value kept, itself included (our choice)."""
    weight: Literal["ratio", "one"] = "one"
    """What counts for a token that stays: its ratio, or 1, which only rejects."""

    @model_validator(mode="after")
    def _is_a_band(self) -> "KlMaskedWeights":
        low = self.low if self.estimator == "k1" else max(self.low or 0.0, 0.0)
        if low is not None and low >= self.high:
            raise ValueError(f"low {low} is not below high {self.high}: no token would be kept")
        return self


class AdaptiveWeights(WeightPart):
    """Between no weights and the token's ratio, by how bad the mismatch and how good the weights are.

    An interpretation of adaptive importance sampling (AIS) from its abstract, not the authors' definition.
    """

    type: Literal["adaptive"] = "adaptive"
    kl_full: float = Field(default=0.01, gt=0)
    """Mismatch (k3, nats per token) from which the correction has its full strength."""

    @property
    def needs_whole_update(self) -> bool:
        """Whether a token's weight depends on tokens of other microbatches."""
        return True


class MomentMaskedWeights(WeightPart):
    """The largest log-ratios of proximal to behavior policy leave the loss until the rest is near enough (M2PO, AReaL).

    Near enough is a mean square strictly below the limit; one token at least stays. Denominators stay too, where AReaL
    counts after the masking.
    """

    type: Literal["moment_masked"] = "moment_masked"
    limit: float = Field(default=0.04, gt=0)
    """Second moment (nats squared)."""
    weight: Literal["ratio", "one"] = "one"
    """What counts for a token that stays: its ratio, or 1, which only rejects."""

    @property
    def needs_whole_update(self) -> bool:
        """Whether a token's weight depends on tokens of other microbatches."""
        return True


class OffContextWeights(WeightPart):
    """Where a prompt held guidance: how likely the response is without it, by how likely it was with it (OC-GRPO).

    Responses without guidance have weight 1, whatever the mismatch or staleness. The policy with guidance is the one
    that sampled, as recorded, so where it was older its age is in the weight as well.
    """

    type: Literal["off_context"] = "off_context"
    low: float = Field(default=0.01, ge=0)
    """Smallest weight."""
    high: float = Field(default=1.0, gt=0)
    """Largest weight."""
    level: Literal["token", "geometric"] = "token"
    """One weight per token, or for all tokens of a sequence the geometric mean of theirs."""

    @model_validator(mode="after")
    def _is_a_band(self) -> "OffContextWeights":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: no weight would fit")
        return self


Importance = Annotated[
    NoWeights
    | TruncatedWeights
    | MaskedWeights
    | KlMaskedWeights
    | MomentMaskedWeights
    | AdaptiveWeights
    | OffContextWeights,
    Field(discriminator="type"),
]


# Filters: tokens that leave the loss for what the current weights make of them; denominators stay


class OffPolicySequenceMask(Part):
    """Drops sequences with a negative advantage that have become too unlikely (OPSM)."""

    type: Literal["off_policy_sequence"] = "off_policy_sequence"
    delta: float = Field(default=0.5, gt=0)
    """Limit on the mean of log behavior - log current over the sequence (nats)."""


class Veto(Part):
    """Drops sequences of which any token has become nearly impossible."""

    type: Literal["veto"] = "veto"
    threshold: float = Field(default=1e-4, gt=0, lt=1)
    """Smallest ratio of current to behavior probability."""


class FailureVeto(Part):
    """In a sequence with a negative advantage, drops what follows the first token that has become too likely.

    An interpretation of Mu-GRPO's veto from its abstract: the token itself stays, and so do the denominators.
    """

    type: Literal["failure_veto"] = "failure_veto"
    threshold: float = Field(default=1.5, gt=1)
    """Largest ratio of current to behavior probability (our choice)."""


class TopEntropy(Part):
    """Keeps the tokens at which the policy was least sure."""

    type: Literal["top_entropy"] = "top_entropy"
    share: float = Field(default=0.2, gt=0, le=1)
    """Share of the update's tokens that stay: those with the largest entropy."""


Filter = Annotated[OffPolicySequenceMask | Veto | FailureVeto | TopEntropy, Field(discriminator="type")]
