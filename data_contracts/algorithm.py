"""The algorithm of a step, as data: advantage, proximal policy, importance weight, trust region, aggregation.

Each part is a union with a `type`; the function behind a class stands in a dict of models/ under that class
(ADVANTAGES, PROXIMALS, WEIGHTS, LOSSES, FILTERS, AGGREGATIONS, REGULARIZERS). To add a method: a class in its union
here (losses: in data_contracts/losses.py), a function and a line of the dict there, and a test. Named recipes stand
in data_contracts/presets.py. Three policies appear: *behavior* (who sampled), *proximal* (anchor of the trust
region) and *current* (whose weights get the gradient); a fourth, the *reference*, is version 0.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data_contracts.losses import Loss, Part, PpoClip, PpoEwma
from data_contracts.presets import expand

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


class Gd2po(Part):
    """Components normalized within their group and summed, without samples whose components disagree (GD2PO)."""

    type: Literal["gd2po"] = "gd2po"
    drop: Literal["all", "weak"] = "weak"
    """Drop every sample with components of both signs, or those whose components nearly cancel."""
    threshold: float = Field(default=0.2, ge=0, le=1)
    """With weak: |sum| over sum of sizes below which components nearly cancel."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to each standard deviation."""
    component_weights: dict[str, float] = {}
    """Weight of a component by name; those not named have 1."""


class Ddca(Part):
    """Accuracy relative to the group, and for right answers their length relative to the other right ones (DDCA)."""

    type: Literal["ddca"] = "ddca"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Normalize by mean and deviation (n) of the group, or subtract the mean of the others."""
    beta: float = Field(default=0.2, ge=0)
    """Weight of the length."""
    right_above: float = 0.5
    """A sample with a larger reward is right."""


class Opob(Part):
    """Reward minus the group's optimal off-policy baseline, by the group's deviation (n) (VCPO).

    The baseline weighs rewards by the squared norm of each sample's gradient and its squared ratio to the behavior
    policy, which costs a forward and a backward pass for every sample.
    """

    type: Literal["opob"] = "opob"
    normalize: bool = True
    """Divide by the group's standard deviation (n)."""


Advantage = Annotated[
    Grpo | Rloo | ReinforcePlusPlus | Opo | MaxRl | McGrpo | Gdpo | Gd2po | Ddca | AsymRe | Gpg | Opob,
    Field(discriminator="type"),
]


class RewardKl(Part):
    """A divergence from the reference policy (version 0), summed over a response and taken off its reward."""

    coefficient: float = Field(default=0.001, gt=0)
    """Reward per nat."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of the behavior policy from the reference, token by token: log p - log q, its half square, or k3. No gradient
    flows through a reward, so k1 is the unbiased one."""


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
    normalize: bool = False
    """Divide by the mean weight of the update, over tokens or (for the other levels) over sequences."""

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


Importance = Annotated[NoWeights | TruncatedWeights | MaskedWeights | AdaptiveWeights, Field(discriminator="type")]


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


Filter = Annotated[OffPolicySequenceMask | Veto | FailureVeto, Field(discriminator="type")]


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


class AlgorithmConfig(Part):
    """What a step computes: the defaults are GRPO with the clipped ratio against the behavior policy.

    `preset` begins from a published recipe; every other field that is given replaces that of the recipe.
    """

    preset: str = ""
    """Name of the recipe that this began from (`rollflow presets` lists them); empty for none."""
    advantage: Advantage = Grpo()
    """How rewards become advantages."""
    reward_kl: RewardKl | None = None
    """Divergence from the reference policy taken off the rewards; None takes nothing."""
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
    step_size: StepSize = FixedStep()
    """What staleness does to the learning rate."""
    update: Update = PlainUpdate()
    """How one optimizer update is made."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether responses cut off by the length limit stay in the loss; their rewards count either way."""

    @model_validator(mode="before")
    @classmethod
    def _begins_from_its_preset(cls, values: Any) -> Any:
        return expand(values)

    @model_validator(mode="after")
    def _does_not_contradict_itself(self) -> "AlgorithmConfig":
        for complaint in self._contradictions():
            raise ValueError(complaint)
        return self

    @property
    def needs_whole_update(self) -> bool:
        """Whether a token's loss depends on tokens of other microbatches."""
        return self.loss.needs_whole_update or self.importance.needs_whole_update

    def compared_with_behavior(self) -> str:
        """Return which part compares with the recorded log-probabilities of the behavior policy; empty for none."""
        if isinstance(self.proximal, InterpolatedProximal):
            return "proximal 'interpolated'"
        if not isinstance(self.importance, NoWeights):
            return f"importance {self.importance.type!r}"
        if isinstance(self.advantage, Opob):
            return "advantage 'opob'"
        if self.loss.uses_behavior or (self.loss.uses_proximal and isinstance(self.proximal, BehaviorProximal)):
            return f"loss {self.loss.type!r}"
        if self.filters:
            return f"filter {self.filters[0].type!r}"
        if any(isinstance(r, KlPenalty) and self._is_kl_of_behavior(r) for r in self.regularizers):
            return "regularizer 'kl'"
        if self.reward_kl is not None:
            return "reward_kl"
        return "step_size 'ess'" if isinstance(self.step_size, EssStep) else ""

    def _is_kl_of_behavior(self, penalty: KlPenalty) -> bool:
        near = penalty.towards == "proximal" and isinstance(self.proximal, BehaviorProximal)
        return penalty.towards == "behavior" or penalty.reweight or near

    def _contradictions(self) -> Iterator[str]:
        yield from self._double_counts()
        yield from self._idle_parts()

    def _double_counts(self) -> Iterator[str]:
        proximal, importance, loss = self.proximal, self.importance, self.loss
        if isinstance(proximal, BehaviorProximal) and not isinstance(importance, NoWeights):
            yield (
                f"importance {importance.type!r} with proximal 'behavior': ratios are already taken against the "
                "behavior policy, so the correction would be counted twice; set importance 'none' or proximal "
                "'recomputed'"
            )
        if isinstance(loss, PpoEwma):
            if isinstance(proximal, BehaviorProximal):
                yield (
                    "loss 'ppo_ewma' with proximal 'behavior' is plain clipping; set proximal 'ewma', or loss "
                    "'ppo_clip'"
                )
            if not isinstance(importance, NoWeights):
                yield (
                    f"loss 'ppo_ewma' already divides by the behavior policy, so importance {importance.type!r} "
                    "would be counted twice; set importance 'none', or loss 'ppo_clip'"
                )
        elif loss.uses_behavior and not isinstance(proximal, BehaviorProximal):
            yield (
                f"loss {loss.type!r} takes its ratio against the behavior policy, so with proximal "
                f"{proximal.type!r} the correction would be counted twice; set proximal 'behavior'"
            )

    def _idle_parts(self) -> Iterator[str]:
        loss = self.loss
        pulled = any(isinstance(r, KlPenalty) and r.towards == "proximal" for r in self.regularizers)
        is_used = loss.uses_proximal or not isinstance(self.importance, NoWeights) or pulled
        if not isinstance(self.proximal, BehaviorProximal) and not is_used:
            yield (
                f"proximal {self.proximal.type!r} has no effect with loss {loss.type!r} and importance 'none'; "
                "set proximal 'behavior', or an importance"
            )
        if loss.aggregates_itself:
            if not isinstance(self.aggregation, TokenMean):
                yield (
                    f"loss {loss.type!r} is one number of its own, so aggregation {self.aggregation.type!r} would "
                    "scale it wrongly; set aggregation 'token_mean'"
                )
            if self.filters or not isinstance(self.importance, NoWeights):
                yield f"loss {loss.type!r} is one number of its own: remove filters and set importance 'none'"
        if isinstance(self.advantage, Opob) and self.reward_kl is not None:
            yield "advantage 'opob' weighs raw rewards, so reward_kl has no effect; use a regularizer 'kl' instead"
        if not loss.uses_advantage and not isinstance(self.advantage, Grpo):
            yield (
                f"loss {loss.type!r} reads rewards, so advantage {self.advantage.type!r} has no effect; "
                "leave advantage out"
            )
        adaptive = sum(isinstance(r, AdaptiveEntropy) for r in self.regularizers)
        if adaptive and any(isinstance(r, EntropyBonus) for r in self.regularizers) or adaptive > 1:
            yield "two entropy bonuses pull at one quantity: keep one of regularizers 'entropy' and 'adaptive_entropy'"
