"""The losses as data: trust regions between the proximal and the current policy, one class each.

The function behind a class stands under it in models.losses.LOSSES. To add a loss: a class in the union at the end
of this file, a function and a line of that dict, and a test.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from data_contracts.frozen import Frozen


class Part(Frozen):
    """One choice of the algorithm."""


class LossPart(Part):
    """What the trainer must know of any loss, beside its numbers."""

    uses_proximal: ClassVar[bool] = True
    """Whether the proximal policy enters the loss itself."""
    uses_behavior: ClassVar[bool] = False
    """Whether the loss takes a ratio against the behavior policy whatever the proximal policy is."""
    needs_whole_update: ClassVar[bool] = False
    """Whether a token's loss depends on those of other microbatches; costs a forward pass when there are several."""
    aggregates_itself: ClassVar[bool] = False
    """Whether the loss is one number of its own, which only token_mean leaves as it is."""
    uses_reference: ClassVar[bool] = False
    """Whether the loss takes a ratio against the reference policy, which costs a forward pass."""
    uses_advantage: ClassVar[bool] = True
    """Whether advantages enter the loss; a loss without them reads the rewards."""


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
    cut: Literal["wrong", "all"] = "wrong"
    """Which samples are weighted by the ratio: those without a positive reward, or all."""


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
    """Largest change of probability."""
    sides: Literal["along", "both"] = "along"
    """Leave out tokens whose probability moved too far in the direction of the advantage, or in any (IPO)."""
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


class PpoEwma(LossPart):
    """The clipped surrogate around the proximal policy, both terms over the behavior policy (PPO-EWMA).

    The correction from the behavior to the proximal policy is part of it. A token that has become more than `cap`
    times as likely counts against a raised denominator, so that it keeps a gradient.
    """

    type: Literal["ppo_ewma"] = "ppo_ewma"
    uses_behavior: ClassVar[bool] = True
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio to the proximal policy is kept within 1 - clip and 1 + clip."""
    cap: float = Field(default=100.0, gt=1)
    """Largest ratio to the behavior policy."""


class Mhpo(LossPart):
    """A smooth bound on the log-ratio, damped by how far it has gone (MHPO; formula from notes, not from code).

    The factor of the gradient at ratio 1 is 0.265, not 1.
    """

    type: Literal["mhpo"] = "mhpo"
    bound: float = Field(default=1.5, gt=0)
    """Log-ratios saturate at plus or minus this (nats)."""
    power_high: float = Field(default=1.5, gt=0)
    """Power of the damping above ratio 1."""
    scale_high: float = Field(default=1.0, gt=0)
    """Scale of the damping above ratio 1 (nats)."""
    power_low: float = Field(default=2.0, gt=0)
    """Power of the damping below ratio 1."""
    scale_low: float = Field(default=0.8, gt=0)
    """Scale of the damping below ratio 1 (nats)."""


class Tbpo(LossPart):
    """A sequence's mean ratio, clipped above for good samples, in a band for bad ones (TBPO; from notes).

    Bad samples outside the band are dropped. Their upper bound was not published to us; the default is ours.
    """

    type: Literal["tbpo"] = "tbpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """Good samples count up to 1 + clip, bad ones from 1 - clip."""
    clip_bad: float = Field(default=0.3, gt=0)
    """Bad samples count up to 1 + clip_bad."""


class MinPro(LossPart):
    """The token's ratio times the smallest ratio before it (MinPRO; our interpretation of an abstract)."""

    type: Literal["minpro"] = "minpro"
    clip: float | None = Field(default=None, gt=0, lt=1)
    """Clip the token's ratio within 1 - clip and 1 + clip as PPO does; None does not clip."""


class Drpo(LossPart):
    """Per question: likely short right answers against the likeliest wrong ones, with a hinge on divergence (DRPO).

    Reads rewards, not advantages: a sample is right above `right_above`. It is one number for the whole update.
    """

    type: Literal["drpo"] = "drpo"
    needs_whole_update: ClassVar[bool] = True
    aggregates_itself: ClassVar[bool] = True
    uses_advantage: ClassVar[bool] = False
    max_length: int = Field(default=1024, gt=0)
    """Length by which lengths are measured (tokens); usually the limit on a response."""
    length_scale: float = Field(default=0.1, gt=0)
    """Right answers weigh exp((1 - length / max_length) / length_scale)."""
    tau: float = Field(default=10.0, gt=0)
    """Temperature of the maximum over wrong answers (nats per token)."""
    kl_limit: float = Field(default=1e-4, ge=0)
    """Divergence from the proximal policy that costs nothing (nats)."""
    kl_strength: float = Field(default=1e3, ge=0)
    """Loss per nat of divergence, per nat above the limit."""
    right_above: float = 0.5
    """A sample with a larger reward is right."""


class AStarPo(LossPart):
    """The squared difference of a sequence's log-ratio to the reference from its reward above a best value (A*-PO).

    The best value of a prompt is a smooth maximum of its group's rewards; published, it comes from samples of the
    reference policy, as these are in the first step. Reads rewards, not advantages, and is one number.
    """

    type: Literal["a_star_po"] = "a_star_po"
    uses_proximal: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = True
    aggregates_itself: ClassVar[bool] = True
    uses_advantage: ClassVar[bool] = False
    needs_whole_update: ClassVar[bool] = True
    value_temperature: float = Field(default=0.5, gt=0)
    """Of the smooth maximum (reward)."""
    policy_temperature: float = Field(default=1e-3, gt=0)
    """Reward per nat of log-ratio."""


Loss = Annotated[
    PpoClip
    | Reinforce
    | Gspo
    | Cispo
    | Sapo
    | Gmpo
    | Topr
    | M2po
    | Sao
    | DppoTv
    | Vespo
    | PpoEwma
    | Mhpo
    | Tbpo
    | MinPro
    | AStarPo
    | Drpo,
    Field(discriminator="type"),
]
