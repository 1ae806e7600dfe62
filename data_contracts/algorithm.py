"""The algorithm of a step, as data: advantage, proximal policy, importance weight, trust region, aggregation.

Each part is a union with a `type`: advantages.py, corrections.py (proximal policies, importance weights, filters),
losses.py and objective.py (aggregation, regularizers, step size, update). All of them can be imported from here; what
follows from their combination is decided here. The function behind a class stands in a dict of models/ under that
class. Named recipes stand in recipes.py. Three policies appear: *behavior* (who sampled), *proximal* (anchor of the
trust region) and *current* (whose weights get the gradient); a fourth, the *reference*, is version 0.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from data_contracts.advantages import (
    Advantage,
    AsymRe,
    Ddca,
    FrozenValue,
    Gae,
    Gd2po,
    Gdpo,
    Gpg,
    Grpo,
    MaxRl,
    McGrpo,
    Opo,
    Opob,
    Otb,
    PassAtK,
    ReinforcePlusPlus,
    Remax,
    RewardKl,
    Rloo,
    Tree,
    TurnReturns,
    Turns,
    ValueHead,
)
from data_contracts.corrections import (
    AdaptiveWeights,
    BehaviorProximal,
    EwmaProximal,
    FailureVeto,
    Filter,
    Importance,
    InterpolatedProximal,
    KlMaskedWeights,
    MaskedWeights,
    MomentMaskedWeights,
    NoWeights,
    OffContextWeights,
    OffPolicySequenceMask,
    Proximal,
    RecomputedProximal,
    SnapshotProximal,
    TopEntropy,
    TruncatedWeights,
    Veto,
    WeightPart,
)
from data_contracts.losses import Loss, M2po, Part, PpoClip, PpoEwma
from data_contracts.objective import (
    AdaptiveEntropy,
    Aggregation,
    ConstantNorm,
    EntropyBonus,
    EssStep,
    FixedStep,
    KlPenalty,
    PlainUpdate,
    Regularizer,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    SlowFastUpdate,
    StepSize,
    TokenMean,
    Update,
)
from data_contracts.presets import expand

__all__ = [
    "AdaptiveEntropy",
    "AdaptiveWeights",
    "Advantage",
    "Aggregation",
    "AlgorithmConfig",
    "AsymRe",
    "BehaviorProximal",
    "ConstantNorm",
    "Ddca",
    "EntropyBonus",
    "EssStep",
    "EwmaProximal",
    "FailureVeto",
    "Filter",
    "FixedStep",
    "FrozenValue",
    "Gae",
    "Gd2po",
    "Gdpo",
    "Gpg",
    "Grpo",
    "Importance",
    "InterpolatedProximal",
    "KlMaskedWeights",
    "KlPenalty",
    "Loss",
    "MaskedWeights",
    "MomentMaskedWeights",
    "MaxRl",
    "McGrpo",
    "NoWeights",
    "OffContextWeights",
    "OffPolicySequenceMask",
    "Opo",
    "Opob",
    "Otb",
    "PassAtK",
    "PlainUpdate",
    "Proximal",
    "RecomputedProximal",
    "Regularizer",
    "ReinforcePlusPlus",
    "Remax",
    "RewardKl",
    "Rloo",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "SlowFastUpdate",
    "SnapshotProximal",
    "StepSize",
    "TokenMean",
    "TopEntropy",
    "TruncatedWeights",
    "Tree",
    "TurnReturns",
    "Turns",
    "Update",
    "ValueHead",
    "Veto",
    "WeightPart",
]


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
    def value(self) -> ValueHead | None:
        """The value model, where there is one."""
        return self.advantage.value if isinstance(self.advantage, Gae | FrozenValue) else None

    @property
    def needs_whole_update(self) -> bool:
        """Whether a token's loss depends on tokens of other microbatches."""
        is_ranked = any(isinstance(choice, TopEntropy) for choice in self.filters)
        return is_ranked or self.loss.needs_whole_update or self.importance.needs_whole_update

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
        for choice in self.filters:
            if not isinstance(choice, TopEntropy):
                return f"filter {choice.type!r}"
        if any(isinstance(r, KlPenalty) and self._is_kl_of_behavior(r) for r in self.regularizers):
            return "regularizer 'kl'"
        if self.reward_kl is not None:
            return "reward_kl"
        return "step_size 'ess'" if isinstance(self.step_size, EssStep) else ""

    def _is_kl_of_behavior(self, penalty: KlPenalty) -> bool:
        near = penalty.towards == "proximal" and isinstance(self.proximal, BehaviorProximal)
        return penalty.towards == "behavior" or penalty.reweight or near

    def _is_kl_of_reference(self, penalty: object) -> bool:
        return isinstance(penalty, KlPenalty) and penalty.towards == "reference"

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
        if isinstance(importance, OffContextWeights) and not isinstance(
            proximal, RecomputedProximal | BehaviorProximal
        ):
            yield (
                f"importance 'off_context' weighs by the policy of the step's start, so with proximal "
                f"{proximal.type!r} another correction would be mixed into it; set proximal 'recomputed'"
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
        if isinstance(self.advantage, FrozenValue) and self.reward_kl is not None:
            yield (
                "advantage 'frozen_value' is fitted while the policy is still version 0, so reward_kl has no effect; "
                "use a regularizer 'kl' instead"
            )
        if not loss.uses_advantage and not isinstance(self.advantage, Grpo):
            yield (
                f"loss {loss.type!r} reads rewards, so advantage {self.advantage.type!r} has no effect; "
                "leave advantage out"
            )
        if loss.uses_reference and (self.reward_kl or any(self._is_kl_of_reference(r) for r in self.regularizers)):
            yield (
                f"loss {loss.type!r} is itself a pull towards the reference policy, so another divergence from it "
                "would be counted twice; leave reward_kl and regularizer 'kl' towards 'reference' out"
            )
        if isinstance(self.importance, MomentMaskedWeights) and isinstance(loss, M2po):
            yield "importance 'moment_masked' and loss 'm2po' are two forms of one bound: keep one of them"
        if isinstance(self.step_size, EssStep) and isinstance(self.update, SlowFastUpdate):
            yield (
                "step_size 'ess' with update 'slow_fast': the fast steps would be shrunk for a distance that they make "
                "themselves; set step_size 'fixed' or update 'plain'"
            )
        if not loss.uses_advantage and self.value is not None:
            yield f"loss {loss.type!r} reads rewards, so a value model has no effect; leave advantage out"
        towards = [r.towards for r in self.regularizers if isinstance(r, KlPenalty)]
        if self.reward_kl is not None and "reference" in towards:
            yield "reward_kl and regularizer 'kl' towards 'reference' are one pull, counted twice: keep one of them"
        if len(set(towards)) < len(towards):
            yield f"two regularizers 'kl' pull towards the same policy ({', '.join(towards)}): keep one of them"
        adaptive = sum(isinstance(r, AdaptiveEntropy) for r in self.regularizers)
        if adaptive and any(isinstance(r, EntropyBonus) for r in self.regularizers) or adaptive > 1:
            yield "two entropy bonuses pull at one quantity: keep one of regularizers 'entropy' and 'adaptive_entropy'"
