"""The loss of a step under way, microbatch by microbatch, and what is noted of every token meanwhile.

Which proximal policy, importance weight, loss, filter, aggregation and regularizer run is for the configuration to
say. Legend: N sampled tokens of the step, n those of one microbatch.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from data_contracts.algorithm import AlgorithmConfig, NoWeights
from models.aggregation import AGGREGATIONS, Totals
from models.importance import FILTERS, PROXIMALS, WEIGHTS
from models.losses import LOSSES, TokenLoss
from models.memory import Memory
from models.regularizers import REGULARIZERS, kl_estimate
from models.step import StepData
from models.tokens import TokenBatch, log_ratio, select


@dataclass(slots=True)
class Underway:
    """A step under way: flat per-token results [N], NaN where nothing was computed yet, and sums over the step."""

    data: StepData
    logp: Tensor
    start_logp: Tensor
    proximal: Tensor
    entropy: Tensor
    anchor: Tensor
    reference: Tensor
    cut: Tensor
    """[N] bool, True where the trust region bounded the gradient."""
    own: Tensor
    """[N] bool, True where this rank computes."""
    evidence: str = ""
    """What this rank was the first to find not finite."""
    sums: dict[str, float] = field(default_factory=dict)
    packed_tokens: int = 0
    norms: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    """What each update multiplied the learning rate by."""
    is_first: bool = True
    """Whether no update of this step has been made yet."""
    found: dict[str, float] = field(default_factory=dict)
    """Metrics that are whole already."""

    @classmethod
    def begin(cls, data: StepData) -> "Underway":
        """Start a step of which nothing has been computed."""
        unknown = [torch.full_like(data.behavior, torch.nan) for _ in range(6)]
        return cls(data, *unknown, cut=torch.zeros_like(data.mask), own=torch.zeros_like(data.mask))

    def add(self, name: str, value: float) -> None:
        """Add to a sum over the step."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def penalize(self, algorithm: AlgorithmConfig) -> None:
        """Take the divergence from the reference policy off the rewards, if the configuration says so."""
        penalty, data = algorithm.reward_kl, self.data
        if penalty is None:
            return
        tokens = kl_estimate(log_ratio(data.behavior, self.reference, data.mask), penalty.estimator).double()
        self.found["reward/kl"] = select(data.mask, tokens).sum().item() / max(len(data.samples), 1)
        self.data = data.knowing(algorithm, penalty=penalty.coefficient * tokens)

    def means(self) -> dict[str, float]:
        """Return the sums as metrics: losses by update, counts by token of the loss."""
        updates, tokens = max(len(self.norms), 1), max(self.sums.get("tokens", 0.0), 1.0)
        by: dict[str, float] = {"loss/policy": updates, "loss/regularizers": updates}
        by["loss/dropped_sequences"] = max(self.sums.get("sequences", 0.0), 1.0)
        counted = ("tokens", "sequences")
        return {name: total / by.get(name, tokens) for name, total in self.sums.items() if name not in counted}


class NotFinite(Exception):
    """A quantity that is not finite: carries the evidence out of a step, and never leaves the trainer."""


class Objective:
    """What an update minimizes."""

    def __init__(self, algorithm: AlgorithmConfig, memory: Memory) -> None:
        self._algorithm, self._memory = algorithm, memory

    def loss(
        self,
        step: Underway,
        members: list[int],
        at: Tensor,
        logp: Tensor,
        entropy: Tensor,
        totals: Totals,
        num_groups: int,
    ) -> Tensor:
        """Return what some samples add to the update's loss; note everything that is measured by token.

        Args:
            step: what is known of the step.
            members: the samples, by index.
            at: [n] places of their tokens.
            logp: [n] under the current weights.
            entropy: [n].
            totals: denominators of the update.
            num_groups: groups of the update.

        Raises:
            NotFinite: names the quantity and the sample.
        """
        step.logp[at], step.entropy[at] = logp.detach().cpu(), entropy.detach().cpu()
        if step.is_first:
            step.start_logp[at] = logp.detach().cpu()
        batch = step.data.token_batch(
            members,
            at,
            logp,
            step.start_logp[at],
            entropy,
            anchor=step.anchor[at],
            reference=step.reference[at],
            num_groups=num_groups,
            entropy_coefficient=self._memory.entropy_coefficient,
        )
        proximal = PROXIMALS[type(self._algorithm.proximal)](batch, self._algorithm.proximal).detach()
        step.proximal[at] = proximal.cpu()
        batch = replace(batch, proximal=proximal)
        _require_finite(step.data, at, batch, with_reference=self._memory.compares_with_reference)
        loss, size = self._aggregate(batch, at, totals, step)
        if not math.isfinite(size):
            names = "; ".join(step.data.samples[i].name for i in members[:4])
            raise NotFinite(f"loss is {size} though its inputs are finite, in samples that start with {names}")
        return loss

    def weigh_scores(self, step: Underway, logp: Tensor, scores: Tensor) -> Tensor:
        """Return scores of tokens [N] times their squared importance weights at the step's start, float64.

        Args:
            step: with what is known of other policies.
            logp: [N] under the weights of the step's start.
            scores: [N].
        """
        cfg, data = self._algorithm, step.data
        if isinstance(cfg.importance, NoWeights):
            return scores.double()
        at = torch.arange(len(logp))
        batch = data.token_batch(list(range(len(data.samples))), at, logp, logp, logp, anchor=step.anchor)
        batch = replace(batch, proximal=PROXIMALS[type(cfg.proximal)](batch, cfg.proximal))
        weights, _ = WEIGHTS[type(cfg.importance)](batch, cfg.importance)
        return scores.double() * weights.double() ** 2

    def _aggregate(self, batch: TokenBatch, at: Tensor, totals: Totals, step: Underway) -> tuple[Tensor, float]:
        """Return weighted and filtered token losses and regularizers as one number, and what it is."""
        cfg = self._algorithm
        aggregate = AGGREGATIONS[type(cfg.aggregation)]
        weights, kept = WEIGHTS[type(cfg.importance)](batch, cfg.importance)
        for choice in cfg.filters:
            kept = kept & FILTERS[type(choice)](batch, choice)
        token = LOSSES[type(cfg.loss)](batch, cfg.loss)
        loss = aggregate(select(kept, token.loss * weights), batch, cfg.aggregation, totals)
        rest = [aggregate(REGULARIZERS[type(r)](batch, r), batch, cfg.aggregation, totals) for r in cfg.regularizers]
        policy, extra = loss.item(), 0.0
        if rest:
            pull = sum(rest[1:], rest[0])
            loss, extra = loss + pull, pull.item()
        step.add("loss/policy", policy)
        step.add("loss/regularizers", extra)
        _count(step, at, batch, token, kept, weights)
        return loss, policy + extra


def _count(step: Underway, at: Tensor, batch: TokenBatch, token: TokenLoss, kept: Tensor, weights: Tensor) -> None:
    """Note where the trust region cut, and how much is left after weights and filters."""
    mask, stays = batch.mask.cpu().numpy(), kept.cpu().numpy()
    low, high = token.cut_low.cpu().numpy() & stays, token.cut_high.cpu().numpy() & stays
    step.cut[at] = torch.from_numpy(low | high)
    owner = batch.sequence.cpu().numpy()
    present, left = np.zeros(batch.num_sequences, bool), np.zeros(batch.num_sequences, bool)
    present[owner[mask]], left[owner[stays]] = True, True
    step.add("tokens", float(np.count_nonzero(mask)))
    step.add("loss/clip_fraction_low", float(np.count_nonzero(low)))
    step.add("loss/clip_fraction_high", float(np.count_nonzero(high)))
    step.add("loss/weight_mean", float(weights.detach().cpu().numpy()[stays].sum(dtype=np.float64)))
    step.add("loss/dropped_fraction", float(np.count_nonzero(mask & ~stays)))
    step.add("loss/dropped_sequences", float(np.count_nonzero(present & ~left)))
    step.add("sequences", float(np.count_nonzero(present)))


def _require_finite(data: StepData, at: Tensor, batch: TokenBatch, *, with_reference: bool) -> None:
    """Raise NotFinite, naming the first sample and quantity that would spoil the loss."""
    quantities = {
        "behavior log-probability": batch.behavior,
        "advantage": batch.advantages,
        "log-probability": batch.logp.detach(),
        "proximal log-probability": batch.proximal,
        "entropy": batch.entropy.detach(),
    }
    if with_reference:
        quantities = {"reference log-probability": batch.reference} | quantities
    # a sum is finite only if every one of its terms is: nearly always there is nothing to look for
    if math.isfinite(select(batch.mask, torch.stack(list(quantities.values()))).sum().item()):
        return
    for quantity, values in quantities.items():
        broken = torch.nonzero(batch.mask & ~values.isfinite())[:, 0]
        if broken.numel():
            token = int(broken[0])
            flat = int(at[token])
            sample = int(data.sequence[flat])
            raise NotFinite(
                f"{quantity} is {values[token].item()} at sampled token {flat - int(data.offsets[sample])} of "
                f"{data.samples[sample].name} (reward {data.samples[sample].reward})"
            )
