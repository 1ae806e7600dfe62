"""One training step: from rewarded groups to new weights, or to the reason why there are none.

The trainer knows no store and no other role, draws no random numbers (dropout is off), and on one thread gives
the same bits for the same input. A step that would not be finite changes nothing. Which advantage, proximal
policy, importance weight, loss, filter, aggregation and regularizer run is for the configuration to say.

A trainer may be one of several ranks (models/backend.py), each in a process of its own and all given the same steps.
Every rank computes its own microbatches, as many as every other one, and knows all of the step in the end.
Legend: S samples, N sampled tokens, n those of one microbatch.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from data_contracts.algorithm import (
    AdaptiveEntropy,
    AlgorithmConfig,
    EntropyBonus,
    EssStep,
    Opob,
    Otb,
    RecomputedProximal,
    SlowFastUpdate,
)
from data_contracts.config import TrainConfig
from data_contracts.metrics import check_names
from models.aggregation import Totals, totals_of
from models.backend import Backend, TorchBackend
from models.critic import PREFIX as OF_CRITIC
from models.critic import Critic
from models.diagnostics import measure, sequence_sample_size
from models.exchange import agree, bring_together, whole
from models.memory import PREFIX as OF_MEMORY
from models.memory import Memory
from models.objective import NotFinite, Objective, Underway
from models.optimizer import checkpoint_from_bytes, checkpoint_to_bytes, learning_rate
from models.packing import hidden_logprobs, packed_hidden, verify_packing
from models.plan import Microbatch, Update, plan_updates
from models.policy import Dtype
from models.samples import Sample
from models.scores import score_weights, token_scores
from models.step import step_data
from models.tokens import log_ratio

__all__ = ["StepResult", "Trainer", "checkpoint_from_bytes", "checkpoint_to_bytes"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did and what was step."""

    status: Literal["trained", "skipped"]
    metrics: dict[str, float]
    histograms: dict[str, dict[str, float]]
    evidence: str = ""
    """Why the step was skipped: which quantity, of which sample or parameter."""
    num_tokens: int = 0
    """Response tokens in the loss."""


class Trainer:
    """Trains a model in place. Not safe for use from two threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        train: TrainConfig,
        *,
        total_steps: int,
        make_backend: Callable[[PreTrainedModel, TrainConfig], Backend] = TorchBackend,
    ) -> None:
        """Take over the model.

        Args:
            model: any decoder-only causal LM of transformers; its format (float32 or bfloat16) is what forward
                passes compute in, while master weights and optimizer state are float32.
            algorithm: what a step computes.
            train: optimizer, schedule and microbatch size.
            total_steps: commits of the run, for schedules that decay.
            make_backend: takes the model; where it lives from then on.

        Raises:
            ConfigError: the architecture cannot be packed.
        """
        verify_packing(model)
        self.model = model.eval()
        self.algorithm, self.train, self.total_steps = algorithm, train, total_steps
        self._backend = make_backend(model, train)
        self._memory = Memory(self._backend.parameters, self._backend.masters, algorithm)
        self._objective = Objective(algorithm, self._memory)
        self._critic = Critic(algorithm, model) if algorithm.value is not None else None
        self._entropy_grad = any(isinstance(r, EntropyBonus | AdaptiveEntropy) for r in algorithm.regularizers)

    def step(self, groups: Sequence[Sequence[Sample]], *, version: int, max_staleness: int | None) -> StepResult:
        """Train from `version` towards `version + 1`.

        An update none of whose tokens is in the loss is left out.

        Args:
            groups: the samples of each group; error rows are not among them.
            version: number of commits so far.
            max_staleness: a token sampled more versions ago stays as context and leaves the loss; None keeps all.

        Returns:
            What was step. With status `skipped`, weights and optimizer have the bits they had before.
        """
        began = time.perf_counter()
        data = step_data(groups, self.algorithm, version=version, max_staleness=max_staleness)
        step = Underway.begin(data)
        self._memory.begin_step(version)
        before, remembered = self._backend.snapshot(), self._memory.state
        valued = self._critic.snapshot() if self._critic is not None else None
        evidence = ""
        try:
            self._updates(step)
        except NotFinite as cause:
            self._backend.restore(before)
            self._memory.state = remembered
            if self._critic is not None and valued is not None:
                self._critic.restore(valued)
            evidence = str(cause)
        self._backend.clear_gradient()
        bring_together(self._backend, step)
        metrics, histograms = measure(data, step.logp, step.start_logp, step.proximal, step.entropy, step.cut)
        if not evidence and "policy/entropy" in metrics:
            self._memory.after_step(metrics["policy/entropy"])
        metrics |= self._own_metrics(step, time.perf_counter() - began)
        check_names(metrics, histograms)
        return StepResult(
            status="skipped" if evidence else "trained",
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            histograms=histograms,
            evidence=evidence,
            num_tokens=int(data.mask.sum()),
        )

    def learning_rate(self, version: int) -> float:
        """Return the learning rate of the step from `version` to `version + 1`."""
        return learning_rate(self.train, version, self.total_steps)

    def weights(self, dtype: Dtype) -> dict[str, Tensor]:
        """Return a copy of the weights by state-dict name, cast to a published format; on other ranks nothing."""
        return self._backend.weights(dtype)

    def checkpoint_bytes(self) -> bytes:
        """Return the state as a file."""
        return checkpoint_to_bytes(*self.checkpoint_state())

    def load_checkpoint_bytes(self, body: bytes) -> None:
        """Take over the state of a file.

        Raises:
            ContractError: it is no such file, or of another format or another model.
        """
        self.load_checkpoint(*checkpoint_from_bytes(body))

    def close(self) -> None:
        """Do nothing: what this trainer holds goes with it."""

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON-able scalars) from which `load_checkpoint` continues bit for bit.

        The tensors are the trainer's own: write them out before the next step. Of several ranks, the first returns all
        of them.
        """
        tensors, scalars = self._backend.state()
        tensors = tensors | self._memory.tensors()
        if remembered := self._memory.scalars():
            scalars = scalars | {"memory": remembered}
        if self._critic is not None:
            tensors, scalars = tensors | self._critic.tensors(), scalars | {"critic": self._critic.scalars()}
        return tensors, scalars

    def load_checkpoint(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over the state of `checkpoint_state`, weights included.

        Raises:
            ContractError: the state is of another format or another model.
        """
        parts: dict[str, dict[str, Tensor]] = {OF_MEMORY: {}, OF_CRITIC: {}, "": {}}
        for name, tensor in tensors.items():
            parts[next(prefix for prefix in parts if name.startswith(prefix))][name] = tensor
        self._backend.load(parts[""], scalars)
        self._memory.load(parts[OF_MEMORY], scalars.get("memory", {}))
        if self._critic is not None:
            self._critic.load(parts[OF_CRITIC], scalars.get("critic", {}))

    def adopt_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over published weights by name; the optimizer's moments stay.

        In bfloat16, master weights that round to the published value keep their precision.

        Raises:
            ContractError: a weight is missing or of another shape.
        """
        self._backend.adopt(weights)

    def _updates(self, step: Underway) -> None:
        plan = plan_updates(
            step.data,
            inner_updates=self.train.inner_updates,
            tokens_per_microbatch=self.train.tokens_per_microbatch,
            rank=self._backend.rank,
            num_ranks=self._backend.num_ranks,
        )
        every = [part for update in plan for part in update.parts]
        for part in every:
            if part.counts:
                step.own[part.at] = True
                step.packed_tokens += part.packed.num_rows
        self._look_ahead(step, plan, every)
        if self._critic is None or not self._critic.is_alone(step.data.version):
            for update in plan:
                if isinstance(self.algorithm.update, SlowFastUpdate):
                    self._slow_fast(step, update, self.algorithm.update)
                else:
                    self._update(step, update)
        if self._critic is not None:
            step.found |= self._critic.learn_step(step.data, plan)

    def _look_ahead(self, step: Underway, plan: Sequence[Update], every: Sequence[Microbatch]) -> None:
        """Compute what must be known before the first update: log-probabilities under other weights, advantages."""
        critic = self._critic
        if critic is not None:
            critic.begin_step(step.data, self.model)
        if critic is not None and (critic.sees_policy or critic.is_alone(step.data.version)):
            self._forward_with_features(step, every, show=critic.sees_policy)
            step.logp.copy_(step.start_logp)
        elif isinstance(self.algorithm.proximal, RecomputedProximal):
            # the first update starts at the proximal weights: its own forward pass gives the same numbers
            step.start_logp = self._forward(step, [part for update in plan[1:] for part in update.parts])
        if (weights := self._memory.proximal) is not None:
            with self._memory.standing_in(weights):
                step.anchor = self._forward(step, every)
        if self._memory.reference is not None:
            with self._memory.standing_in(self._memory.reference):
                if critic is not None and critic.sees_version_0:
                    critic.look(self.model, every)
                if self._memory.compares_with_reference:
                    step.reference = self._forward(step, every)
            step.penalize(self.algorithm)
        if isinstance(self.algorithm.advantage, Opob):
            step.data = step.data.knowing(self.algorithm, score_weights=score_weights(self.model, step.data))
        if isinstance(self.algorithm.advantage, Otb):
            scores = self._objective.weigh_scores(step, *token_scores(self.model, every, len(step.data.mask)))
            step.data = step.data.knowing(self.algorithm, token_scores=scores)
        if critic is not None:
            step.data = step.data.knowing(self.algorithm, values=critic.values(every, len(step.data.mask)))

    @torch.no_grad()
    def _forward(self, step: Underway, parts: Sequence[Microbatch]) -> Tensor:
        """Return the log-probabilities [N] under the model's present weights, NaN for tokens of no part."""
        found = torch.full_like(step.data.behavior, torch.nan)
        for part in parts:
            logp = self._backend.logprobs(part.packed)[0].cpu()
            if part.counts:
                found[part.at] = logp
        return whole(self._backend, found, step.own)

    @torch.no_grad()
    def _forward_with_features(self, step: Underway, parts: Sequence[Microbatch], *, show: bool) -> None:
        """Note log-probabilities and entropies under the model's present weights, all in one process.

        With `show` the value model sees the hidden states that they come from.
        """
        for part in parts:
            packed = part.packed.to(self.model.device)
            hidden = packed_hidden(self.model, packed)
            logp, entropy = hidden_logprobs(self.model, hidden, packed)
            step.start_logp[part.at], step.entropy[part.at] = logp.cpu(), entropy.cpu()
            if show and self._critic is not None:
                self._critic.see(part.at, hidden)

    def _slow_fast(self, step: Underway, update: Update, cfg: SlowFastUpdate) -> None:
        """Do some updates on the same tokens, go back towards the start, and do one more."""
        start = {name: master.detach().clone() for name, master in self._backend.masters.items()}
        for _ in range(cfg.fast_steps):
            self._update(step, update)
        self._backend.step_back(start, 0.0 if self._memory.entropy_is_unusual else cfg.keep)
        self._update(step, update)

    def _update(self, step: Underway, update: Update) -> None:
        """Do one optimizer update.

        Raises:
            NotFinite: a log-probability, the loss, the gradient or a new weight is not finite.
        """
        at = update.at
        totals = totals_of(step.data.mask[at], step.data.sequence[at], update.num_samples)
        self._backend.clear_gradient()
        if self.algorithm.needs_whole_update and not update.is_one_part:
            self._backward_whole(step, update, totals)
        else:
            self._backward(step, update, totals)
        agree(self._backend, step)
        step.factors.append(self._rate_factor(step, at))
        norm = self._backend.update(self.learning_rate(step.data.version) * step.factors[-1])
        step.norms.append(norm)
        if not math.isfinite(norm):
            broken = self._backend.broken_gradients() or ["all parameters together"]
            raise NotFinite(f"gradient norm is {norm}: the gradient of {broken[0]} is not finite")
        if broken := self._backend.broken_weights():
            raise NotFinite(f"weights are not finite after the update: {broken[0]} and {len(broken) - 1} others")
        self._memory.after_update()
        step.is_first = False

    def _backward(self, step: Underway, update: Update, totals: Totals) -> None:
        """Take the gradient of the update's loss, one microbatch after the other."""
        for number, part in enumerate(update.parts, 1):
            logp, entropy = self._backend.logprobs(part.packed, entropy_grad=self._entropy_grad)
            loss = logp.sum() * 0  # the other ranks wait for this one's gradient, be it worth nothing
            if part.counts and not step.evidence:
                try:
                    loss = self._objective.loss(step, part.members, part.at, logp, entropy, totals, update.num_groups)
                except NotFinite as cause:
                    step.evidence = str(cause)
            self._backend.backward(loss, is_last=number == len(update.parts))

    def _rate_factor(self, step: Underway, at: Tensor) -> float:
        """Return what staleness multiplies the learning rate by, from the ratios of the update's tokens [n]."""
        cfg, data = self.algorithm.step_size, step.data
        if not isinstance(cfg, EssStep):
            return 1.0
        logp = whole(self._backend, step.logp, step.own)
        log = log_ratio(logp[at], data.behavior[at], data.mask[at]).double()
        ess = sequence_sample_size(log, data.mask[at], data.sequence[at], len(data.samples))
        share = min(ess / cfg.full_at, 1.0)
        return share**0.5 if cfg.rule == "sqrt" else share

    def _backward_whole(self, step: Underway, update: Update, totals: Totals) -> None:
        """Take the gradient of a loss that must see all tokens of the update at once.

        A first forward pass gives the loss's gradient by log-probability, a second one carries it to the weights.
        Every rank computes the whole loss, and takes the gradient of its own tokens from it.
        """
        pull = self._pull(step, update, totals)
        for number, part in enumerate(update.parts, 1):
            outputs = self._backend.logprobs(part.packed, entropy_grad=self._entropy_grad)
            pairs = [(o, row[part.at].to(o.device)) for o, row in zip(outputs, pull, strict=True) if o.requires_grad]
            loss = torch.stack([(output * gradient).sum() for output, gradient in pairs]).sum() * part.counts
            self._backend.backward(loss, is_last=number == len(update.parts))

    def _pull(self, step: Underway, update: Update, totals: Totals) -> Tensor:
        """Return the gradient [2, N] of the update's loss by log-probability and entropy."""
        found = torch.full((2, len(step.own)), torch.nan)
        with torch.no_grad():
            for part in update.parts:
                values = self._backend.logprobs(part.packed)
                if part.counts:
                    found[:, part.at] = torch.stack(values).cpu()
        logp, entropy = (whole(self._backend, row, step.own)[update.at].requires_grad_() for row in found)
        sums = dict(step.sums)
        try:
            self._objective.loss(step, update.members, update.at, logp, entropy, totals, update.num_groups).backward()
        except NotFinite as cause:
            step.evidence = str(cause)
        if self._backend.rank > 0:  # the first rank has counted the same
            step.sums = sums
        pull = torch.zeros_like(found)
        for row, leaf in zip(pull, (logp, entropy), strict=True):
            if leaf.grad is not None:
                row[update.at] = leaf.grad
        return pull

    def _own_metrics(self, step: Underway, seconds: float) -> dict[str, float]:
        data, updates = step.data, len(step.norms)
        metrics = {"optimizer/learning_rate": self.learning_rate(data.version), "optimizer/updates": float(updates)}
        metrics |= step.means() | step.found
        if updates:
            metrics["loss/total"] = metrics["loss/policy"] + metrics["loss/regularizers"]
            metrics["optimizer/grad_norm"] = sum(step.norms) / updates
        if step.factors:
            metrics["optimizer/rate_factor"] = sum(step.factors) / len(step.factors)
            metrics["optimizer/learning_rate"] *= metrics["optimizer/rate_factor"]
        if any(isinstance(r, AdaptiveEntropy) for r in self.algorithm.regularizers):
            metrics["optimizer/entropy_coefficient"] = self._memory.state.coefficient
        longest = max((len(s.prompt_ids) + len(s.response_ids) for s in data.samples), default=0)
        return metrics | {
            "train/packed_tokens": float(step.packed_tokens),
            "train/padded_tokens": float(longest * len(data.samples)),
            "train/step_s": seconds,
            "train/tokens_per_s": int(data.mask.sum()) / seconds,
        }
