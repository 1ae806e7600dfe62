"""How rewards become advantages, as data; the function behind a class stands in models.advantages.ADVANTAGES.

To add one: a class in the union here, a function and a line of that dict, and a test.
"""

from typing import Annotated, Literal

from pydantic import Field

from data_contracts.losses import Part


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


class PassAtK(Part):
    """Only the best sample of a group counts, by how far it is above the second best (GRPO's pass@k variant)."""

    type: Literal["pass_at_k"] = "pass_at_k"
    normalize: bool = True
    """Divide by the group's standard deviation (n-1)."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation (reward)."""


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
    by_length: bool = False
    """Divide each squared norm by the response's squared length (tokens)."""


class Otb(Part):
    """The reward from a token on, minus the group's optimal baseline at that place (optimal token baseline).

    The baseline weighs what the group's samples still earn by how much their gradients have scattered up to there:
    the squared norm of each log-probability's gradient by logits, summed from the response's beginning, times the
    squared importance weights where there are any. Costs a forward pass.
    """

    type: Literal["otb"] = "otb"


class Remax(Part):
    """The reward from a token on, minus the reward of the policy's greedy response (ReMax).

    That response is the last sample of each group (rollout.greedy_sample); it is not in the loss.
    """

    type: Literal["remax"] = "remax"


class ValueHead(Part):
    """A value model: a small network on hidden states, with parameters, optimizer and clip of its own.

    The policy gets no gradient from it. It is part of checkpoints, not of published versions.
    """

    trunk: Literal["policy", "own"] = "policy"
    """Whose hidden states: the policy's last one, or that of a model of its own, which begins as version 0 and learns
    with it. That one explains rewards far better, and costs memory and passes like another policy."""
    width: int = Field(default=256, ge=0)
    """Units of its one inner layer; 0 makes it linear."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Of its AdamW."""
    updates: int = Field(default=4, gt=0)
    """Its updates for each of the policy's."""
    clip: float | None = Field(default=0.5, gt=0)
    """A value that is this far from what it was at the step's start moves no further (reward); None: no limit."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Its gradients are scaled down to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Commits at the start in which values learn and the policy stays as it is."""


class Gae(Part):
    """Generalized advantage estimation with a value model (PPO): tokens that the policy did not sample are skipped."""

    type: Literal["gae"] = "gae"
    discount: float = Field(default=1.0, gt=0, le=1)
    """Gamma, by token."""
    trace: float = Field(default=0.95, ge=0, le=1)
    """Lambda: 0 trusts the next value, 1 the rewards alone."""
    trace_by_length: float | None = Field(default=None, gt=0)
    """Lambda is 1 - 1 / (this times the response's tokens) in place of `trace` (SAO: 1.5); None keeps `trace`."""
    return_trace: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the returns that values learn (SAO: 1); None takes that of the advantages."""
    whiten: bool = True
    """Bring advantages to mean 0 and variance 1 over the tokens of the step; returns are made before."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the variance (reward squared)."""
    value: ValueHead = ValueHead()
    """The value model."""


class FrozenHead(ValueHead):
    """A value model that is fitted before the policy moves: by default a whole model, which has most to say."""

    trunk: Literal["policy", "own"] = "own"
    """Hidden states of version 0, or those of a model of its own, which begins as version 0 and learns with it."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """Of its AdamW."""
    clip: float | None = Field(default=None, gt=0)
    """A value that is this far from what it was at the step's start moves no further (reward); None: no limit."""
    warmup_steps: int = Field(default=40, gt=0)
    """Commits at the start in which values are fitted and the policy stays as it is; then values stay."""


class FrozenValue(Part):
    """The value of each sampled token by a model that was fitted first and then frozen (DVPO; formula from notes).

    It is fitted by temporal differences on what version 0 samples, for `value.warmup_steps` commits, on the hidden
    state that each token leads to (never one of a policy that has moved). The published method conditions it on sampled
    context as well, which is left out; that the target is detached and advantages are whitened is our reading.
    """

    type: Literal["frozen_value"] = "frozen_value"
    discount: float = Field(default=1.0, gt=0, le=1)
    """Gamma, by token."""
    whiten: bool = True
    """Bring advantages to mean 0 and variance 1 over the tokens of the step."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the variance (reward squared)."""
    value: FrozenHead = FrozenHead()
    """The value model."""


class Turns(Part):
    """The group-relative reward of a whole episode, spread over its turns (AsyncWebRL's constant normalizer).

    A turn is what the policy says between two messages of the env: a stretch of sampled tokens.
    """

    type: Literal["turns"] = "turns"
    eps: float = Field(default=1e-5, ge=0)
    """Added to the group's standard deviation (n)."""
    divide_by: int | None = Field(default=10, gt=0)
    """Each token gets the episode's advantage by this number; None takes the episode's own number of turns, which
    makes each token of a long failure count less."""


class TurnReturns(Part):
    """The rewards from a turn on, relative to the same turn of the group's other samples.

    Our definition. The reward of turn k is the component `turn/k`, k from 0; what of the whole reward no turn accounts
    for belongs to the last one.
    """

    type: Literal["turn_returns"] = "turn_returns"
    discount: float = Field(default=1.0, gt=0, le=1)
    """By turn."""
    normalize: bool = True
    """Divide by the deviation (n-1) of the turn over the group."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation (reward)."""


class Tree(Part):
    """The value of the branch that a token stands on, relative to the other branches of the same depth (BranchGRPO).

    A group is a tree when some of its samples go on from the middle of others (rollout.branching); the value of a
    branch is the mean reward of the samples that share it. Without branches it is grpo. A token is in the loss once,
    in the sample that sampled it.
    """

    type: Literal["tree"] = "tree"
    among: Literal["depth", "siblings"] = "depth"
    """Compare with all branches after as many branchings, or only with those that begin at the same place (TRACE)."""
    fusion: Literal["mean", "likelihood"] = "mean"
    """The value of a branch: the mean over the samples that share it, or over the branches that go on from it, weighed
    by the softmax of their mean log-probability by token (the source's is the mean over an image's dimensions)."""
    keep_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the last branches of each split that count, at least one; the others get 0 (width pruning)."""
    keep: Literal["best", "best_and_worst"] = "best"
    """Which count: those of the largest value, or half of them those of the smallest."""
    eps: float = Field(default=1e-8, ge=0)
    """Added to the standard deviation (reward)."""
    least_std: float = Field(default=1e-6, ge=0)
    """Branches whose values deviate (n-1) less than this get 0."""
    largest: float = Field(default=5.0, gt=0)
    """Advantages are cut off at plus and minus this."""


Advantage = Annotated[
    Grpo
    | Rloo
    | ReinforcePlusPlus
    | Opo
    | MaxRl
    | McGrpo
    | Gdpo
    | Gd2po
    | Ddca
    | AsymRe
    | Gpg
    | Opob
    | Otb
    | Remax
    | Gae
    | FrozenValue
    | PassAtK
    | Turns
    | TurnReturns
    | Tree,
    Field(discriminator="type"),
]


class RewardKl(Part):
    """A divergence from the reference policy (version 0), summed over a response and taken off its reward."""

    coefficient: float = Field(default=0.001, gt=0)
    """Reward per nat."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of the behavior policy from the reference, token by token: log p - log q, its half square, or k3. No gradient
    flows through a reward, so k1 is the unbiased one."""
