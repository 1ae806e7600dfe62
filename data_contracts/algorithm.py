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


class ReinforcePlusPlus(Part):
    """The reward, whitened over all tokens of the step."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = False
    """Subtract the group's mean before whitening (REINFORCE++-baseline)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the variance (reward squared)."""


class Opo(Part):
    """Reward minus the group's mean weighted by response length."""

    type: Literal["opo"] = "opo"


class MaxRl(Part):
    """Reward minus the group's mean, divided by the mean; 0 where the mean is not positive."""

    type: Literal["maxrl"] = "maxrl"


class McGrpo(Part):
    """Reward minus the group's lower median, divided by the median absolute deviation (MC-GRPO)."""

    type: Literal["mc_grpo"] = "mc_grpo"
    eps: float = Field(default=1e-3, gt=0)
    """Added to the deviation (reward); with binary rewards the deviation is often 0."""
    rescale: bool = False
    """Multiply by group size over the number of samples whose advantage is not 0."""


class Gdpo(Part):
    """Each reward component normalized within its group, summed, and normalized over the step (GDPO)."""

    type: Literal["gdpo"] = "gdpo"
    eps: float = Field(default=1e-4, gt=0)
    """Added to each standard deviation."""
    component_weights: dict[str, float] = {}
    """Weight of a component by name; those not named have 1."""


class AsymRe(Part):
    """Reward minus a shifted mean of the group; meant for the reinforce loss (AsymRE)."""

    type: Literal["asymre"] = "asymre"
    shift: float = -0.1
    """Added to the group's mean before it is subtracted (reward)."""


class Gpg(Part):
    """Reward minus the group's mean, times samples over samples with a reward that is not 0 (GPG)."""

    type: Literal["gpg"] = "gpg"


Advantage = Annotated[
    Grpo | Rloo | ReinforcePlusPlus | Opo | MaxRl | McGrpo | Gdpo | AsymRe | Gpg, Field(discriminator="type")
]


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


Proximal = Annotated[BehaviorProximal | RecomputedProximal | InterpolatedProximal, Field(discriminator="type")]


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
    needs_whole_update: ClassVar[bool] = False
    """Whether a token's loss depends on those of other microbatches; costs a forward pass when there are several."""


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


class Gspo(LossPart):
    """The clipped surrogate on the geometric mean of a sequence's ratios; usually with seq_mean_token_mean."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The sequence's ratio is kept above 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """The sequence's ratio is kept below 1 + clip_high."""


class Cispo(LossPart):
    """Log-probability weighted by the bounded ratio: no token loses its gradient (CISPO)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The weight is at least 1 - clip_low; 1 leaves it unbounded below."""
    clip_high: float = Field(default=0.28, gt=0)
    """The weight is at most 1 + clip_high."""


class Sapo(LossPart):
    """A smooth gate instead of a clip (SAPO)."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate for positive advantages."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate for the others."""


class Gmpo(LossPart):
    """The geometric mean of a sequence's ratios, each clipped in log space (GMPO); with seq_mean_token_mean."""

    type: Literal["gmpo"] = "gmpo"
    clip: float = Field(default=0.4, gt=0)
    """Log-ratios are kept within plus or minus this where that lowers the objective (nats)."""


class Topr(LossPart):
    """Good samples by likelihood, others weighted by the ratio cut off at 1 (TOPR, by token)."""

    type: Literal["topr"] = "topr"


class M2po(LossPart):
    """The clipped surrogate whose bounds come from the second moment of the log-ratios of harmful tokens (M2PO)."""

    type: Literal["m2po"] = "m2po"
    needs_whole_update: ClassVar[bool] = True
    budget: float = Field(default=0.04, gt=0)
    """Second moment that the harmful tokens may have before they are clipped (nats squared)."""
    floor_low: float = Field(default=0.3, gt=0, le=1)
    """The lower margin is at least this."""
    floor_high: float = Field(default=0.5, gt=0)
    """The upper margin is at least this."""


class Sao(LossPart):
    """Log-probability weighted by the ratio to the behavior policy, 0 outside a band (SAO's token clip)."""

    type: Literal["sao"] = "sao"
    uses_behavior: ClassVar[bool] = True
    clip_low: float = Field(default=0.3, gt=0, le=1)
    """Tokens count whose ratio is above 1 - clip_low."""
    clip_high: float = Field(default=5.0, gt=0)
    """Tokens count whose ratio is below 1 + clip_high."""


class DppoTv(LossPart):
    """The ratio to the behavior policy, without tokens whose probability moved too far (DPPO, total variation)."""

    type: Literal["dppo_tv"] = "dppo_tv"
    uses_behavior: ClassVar[bool] = True
    limit: float = Field(default=0.2, gt=0, le=1)
    """Largest change of probability in the direction of the advantage."""
    kl_coefficient: float = Field(default=1e-3, ge=0)
    """Loss per squared log-ratio, also of tokens left out."""


class Vespo(LossPart):
    """Log-probability weighted by a smooth bump of the whole sequence's ratio to the behavior policy (VESPO)."""

    type: Literal["vespo"] = "vespo"
    uses_behavior: ClassVar[bool] = True
    power_positive: float = Field(default=2.0, gt=0)
    """Power of the ratio with advantages from 0."""
    decay_positive: float = Field(default=3.0, gt=0)
    """Decay in the ratio with advantages from 0."""
    power_negative: float = Field(default=3.0, gt=0)
    """Power of the ratio with negative advantages."""
    decay_negative: float = Field(default=2.0, gt=0)
    """Decay in the ratio with negative advantages."""


Loss = Annotated[
    PpoClip | Reinforce | Gspo | Cispo | Sapo | Gmpo | Topr | M2po | Sao | DppoTv | Vespo, Field(discriminator="type")
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


Filter = Annotated[OffPolicySequenceMask | Veto, Field(discriminator="type")]


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
    """What a step computes: the defaults are GRPO with the clipped ratio against the behavior policy.

    Kimi-1.5 is reinforce with a kl of estimator k2 towards proximal; Dr. GRPO is grpo with std none and
    constant_norm; DAPO is the default with dual_clip 10.
    """

    advantage: Advantage = Grpo()
    """How rewards become advantages."""
    proximal: Proximal = BehaviorProximal()
    """Which policy anchors the trust region."""
    importance: Importance = NoWeights()
    """Correction from the behavior to the proximal policy, multiplied onto the loss of each token."""
    loss: Loss = PpoClip()
    """The trust region and its surrogate."""
    filters: tuple[Filter, ...] = ()
    """Tokens that leave the loss."""
    aggregation: Aggregation = TokenMean()
    """How token losses become one number."""
    regularizers: tuple[Regularizer, ...] = ()
    """What else is minimized."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether responses cut off by the length limit stay in the loss; their rewards count either way."""

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> "AlgorithmConfig":
        if isinstance(self.proximal, BehaviorProximal):
            if not isinstance(self.importance, NoWeights):
                raise ValueError(
                    f"importance {self.importance.type!r} with proximal 'behavior': ratios are already taken against "
                    "the behavior policy, so the correction would be counted twice; set importance 'none' or proximal "
                    "'recomputed'"
                )
            return self
        if self.loss.uses_behavior:
            raise ValueError(
                f"loss {self.loss.type!r} takes its ratio against the behavior policy, so with proximal "
                f"{self.proximal.type!r} the correction would be counted twice; set proximal 'behavior'"
            )
        pulled = any(isinstance(r, KlPenalty) and r.towards == "proximal" for r in self.regularizers)
        if not self.loss.uses_proximal and isinstance(self.importance, NoWeights) and not pulled:
            raise ValueError(
                f"proximal {self.proximal.type!r} has no effect with loss {self.loss.type!r} and importance 'none'; "
                "set proximal 'behavior', or an importance"
            )
        return self
