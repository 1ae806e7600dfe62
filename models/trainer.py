"""One training step: from rewarded groups to new weights, or to the reason why there are none.

The trainer holds the model, float32 master weights and the optimizer. It knows no store and no other role,
draws no random numbers (dropout is off), and on one thread gives the same bits for the same input. A step
that would not be finite changes nothing. Legend: S samples, N sampled tokens.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from data_contracts.algorithm import AlgorithmConfig, EntropyBonus, RecomputedProximal
from data_contracts.config import TrainConfig
from data_contracts.errors import ContractError
from data_contracts.metrics import check_names
from models.aggregation import AGGREGATIONS, Totals, totals_of
from models.diagnostics import measure
from models.importance import WEIGHTS
from models.losses import LOSSES
from models.packing import Packed, microbatches, pack, packed_logprobs, verify_packing
from models.regularizers import REGULARIZERS
from models.samples import Sample
from models.step import StepData, step_data
from models.tokens import TokenBatch, select


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did and what was measured."""

    status: Literal["trained", "skipped"]
    metrics: dict[str, float]
    histograms: dict[str, dict[str, float]]
    evidence: str = ""
    """Why the step was skipped: which quantity, of which sample or parameter."""
    num_tokens: int = 0
    """Response tokens in the loss."""


@dataclass(frozen=True, slots=True)
class _Microbatch:
    members: list[int]
    """Samples, by index in the step."""
    at: Tensor
    """[n] places of their tokens in the step's flat arrays."""
    packed: Packed


@dataclass(slots=True)
class _Measured:
    """Flat per-token results [N], NaN where nothing was computed, and sums over the step."""

    logp: Tensor
    start_logp: Tensor
    proximal: Tensor
    entropy: Tensor
    sums: dict[str, float] = field(default_factory=dict)
    packed_tokens: int = 0
    norms: list[float] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


class _NotFinite(Exception):
    """Carries the evidence out of an update; never leaves this file."""


class Trainer:
    """Trains `model` in place. Not safe for use from two threads."""

    def __init__(
        self, model: PreTrainedModel, algorithm: AlgorithmConfig, train: TrainConfig, *, total_steps: int
    ) -> None:
        """Take over the model.

        Args:
            model: any decoder-only causal LM of transformers; its format (float32 or bfloat16) is what forward
                passes compute in, while master weights and optimizer state are float32.
            algorithm: what a step computes.
            train: optimizer, schedule and microbatch size.
            total_steps: commits of the run, for schedules that decay.

        Raises:
            ConfigError: the architecture cannot be packed.
        """
        verify_packing(model)
        self.model = model.eval()
        self.algorithm, self.train, self.total_steps = algorithm, train, total_steps
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self._parameters.items()
        }
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
        for master in self._masters.values():  # from the start, so that a snapshot always has the same tensors
            self._optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, groups: Sequence[Sequence[Sample]], *, version: int, max_staleness: int | None) -> StepResult:
        """Train from `version` towards `version + 1`.

        Args:
            groups: the samples of each group; error rows are not among them.
            version: number of commits so far.
            max_staleness: a token sampled more versions ago stays as context and leaves the loss; None keeps all.

        Returns:
            What was measured. With status `skipped`, weights and optimizer have the bits they had before.
        """
        began = time.perf_counter()
        data = step_data(groups, self.algorithm, version=version, max_staleness=max_staleness)
        rate = self.learning_rate(version)
        for setting in self._optimizer.param_groups:
            setting["lr"] = rate
        nowhere = torch.full_like(data.behavior, torch.nan)
        measured = _Measured(nowhere.clone(), nowhere.clone(), nowhere.clone(), nowhere.clone())
        before = self._snapshot()
        evidence = ""
        try:
            self._updates(data, measured)
        except _NotFinite as cause:
            self._restore(before)
            evidence = str(cause)
        metrics, histograms = measure(data, measured.logp, measured.start_logp, measured.proximal, measured.entropy)
        metrics |= self._own_metrics(data, measured, rate, time.perf_counter() - began)
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        check_names(metrics)
        return StepResult(
            status="skipped" if evidence else "trained",
            metrics=metrics,
            histograms=histograms,
            evidence=evidence,
            num_tokens=int(data.mask.sum()),
        )

    def learning_rate(self, version: int) -> float:
        """Return the learning rate of the step from `version` to `version + 1`."""
        cfg = self.train
        if version < cfg.warmup_steps:
            return cfg.learning_rate * (version + 1) / cfg.warmup_steps
        if cfg.schedule == "constant":
            return cfg.learning_rate
        span = max(self.total_steps - 1 - cfg.warmup_steps, 1)
        done = min((version - cfg.warmup_steps) / span, 1.0)
        shape = 1 - done if cfg.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return cfg.learning_rate * (cfg.final_fraction + (1 - cfg.final_fraction) * shape)

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON-able scalars) from which `load_checkpoint` continues bit for bit."""
        tensors = {}
        for name, master in self._masters.items():
            state = self._optimizer.state[master]
            tensors[f"weights/{name}"] = master.detach()
            tensors[f"exp_avg/{name}"] = state["exp_avg"]
            tensors[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
        first = next(iter(self._masters.values()))
        return tensors, {"format": "trainer/1", "updates": int(self._optimizer.state[first]["step"])}

    def load_checkpoint(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over the state of `checkpoint_state`, weights included.

        Raises:
            ContractError: the state is of another format or another model.
        """
        if scalars.get("format") != "trainer/1":
            raise ContractError(f"checkpoint: expected format trainer/1, got {scalars.get('format')!r}")
        own, _ = self.checkpoint_state()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise ContractError(
                f"checkpoint: expected the {len(own)} tensors of this model, but these differ: {odd[:4]}"
            )
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape or tensors[name].dtype != torch.float32:
                got = f"{tensors[name].dtype} {list(tensors[name].shape)}"
                raise ContractError(f"checkpoint: {name}: expected float32 {list(tensor.shape)}, got {got}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
            for master in self._masters.values():
                self._optimizer.state[master]["step"].fill_(float(scalars["updates"]))
            self._publish()

    def _updates(self, data: StepData, measured: _Measured) -> None:
        plan = self._plan(data)
        measured.packed_tokens = sum(mb.packed.num_rows for update in plan for mb in update)
        if isinstance(self.algorithm.proximal, RecomputedProximal):
            # the first update starts at the proximal weights, so its own forward pass gives the same numbers
            self._recompute([mb for update in plan[1:] for mb in update], measured)
        for number, update in enumerate(plan):
            self._update(data, update, measured, is_first=number == 0)

    def _plan(self, data: StepData) -> list[list[_Microbatch]]:
        """Split the step's groups over the updates, and each update into microbatches; empty updates drop out."""
        bounds = np.linspace(0, data.num_groups, self.train.inner_updates + 1).round().astype(int)
        in_loss = torch.zeros(len(data.samples), dtype=torch.bool)
        in_loss[data.sequence[data.mask]] = True
        plan = []
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            chosen = torch.nonzero((data.group >= int(start)) & (data.group < int(stop)) & in_loss)[:, 0].tolist()
            parts = microbatches([data.samples[i] for i in chosen], self.train.tokens_per_microbatch)
            members = [[chosen[i] for i in part] for part in parts]
            update = [_Microbatch(m, data.tokens_of(m), pack([data.samples[i] for i in m])) for m in members]
            plan += [update] if update else []
        return plan

    @torch.no_grad()
    def _recompute(self, parts: list[_Microbatch], measured: _Measured) -> None:
        for part in parts:
            logp, _ = packed_logprobs(self.model, part.packed)
            measured.start_logp[part.at] = measured.proximal[part.at] = logp.cpu()

    def _update(self, data: StepData, parts: list[_Microbatch], measured: _Measured, *, is_first: bool) -> None:
        """Do one optimizer update.

        Raises:
            _NotFinite: log-probabilities, loss, gradient or the new weights are not finite.
        """
        at = torch.cat([part.at for part in parts])
        members = [i for part in parts for i in part.members]
        totals = totals_of(data.mask[at], data.sequence[at], len(members))
        for parameter in {**self._parameters, **self._masters}.values():
            parameter.grad = None
        for part in parts:
            self._microbatch(data, part, totals, measured, is_first=is_first)
        norm = self._clip_gradient()
        measured.norms.append(norm)
        self._optimizer.step()
        with torch.no_grad():
            self._publish()
        broken = [name for name, p in self._parameters.items() if not p.isfinite().all()]
        if broken:
            raise _NotFinite(
                f"weights of {broken[0]} are not finite after the update ({len(broken)} parameters in all)"
            )

    def _microbatch(
        self, data: StepData, part: _Microbatch, totals: Totals, measured: _Measured, *, is_first: bool
    ) -> None:
        logp, entropy = packed_logprobs(self.model, part.packed, entropy_grad=self._needs_entropy)
        measured.logp[part.at] = logp.detach().cpu()
        measured.entropy[part.at] = entropy.detach().cpu()
        if is_first:
            measured.start_logp[part.at] = logp.detach().cpu()
        if not isinstance(self.algorithm.proximal, RecomputedProximal):
            measured.proximal[part.at] = data.behavior[part.at]
        elif is_first:
            measured.proximal[part.at] = logp.detach().cpu()
        batch = data.token_batch(part.members, part.at, logp, measured.proximal[part.at], entropy)
        loss = self._loss(batch, totals, measured)
        _require_finite(data, part, batch, loss)
        loss.backward()
        self._collect_gradient()

    @property
    def _needs_entropy(self) -> bool:
        return any(isinstance(r, EntropyBonus) for r in self.algorithm.regularizers)

    def _loss(self, batch: TokenBatch, totals: Totals, measured: _Measured) -> Tensor:
        """Return this microbatch's part of the update's loss."""
        cfg = self.algorithm
        aggregate = AGGREGATIONS[type(cfg.aggregation)]
        weights, kept = WEIGHTS[type(cfg.importance)](batch, cfg.importance)
        token = LOSSES[type(cfg.loss)](batch, cfg.loss)
        policy = aggregate(select(kept, token.loss * weights), batch, cfg.aggregation, totals)
        rest = [aggregate(REGULARIZERS[type(r)](batch, r), batch, cfg.aggregation, totals) for r in cfg.regularizers]
        extra = sum(rest, torch.zeros((), device=policy.device))
        measured.add("loss/policy", policy.item())
        measured.add("loss/regularizers", extra.item())
        measured.add("tokens", float(batch.mask.sum()))
        measured.add("loss/clip_fraction_low", float((token.cut_low & kept).sum()))
        measured.add("loss/clip_fraction_high", float((token.cut_high & kept).sum()))
        measured.add("loss/weight_mean", float(select(kept, weights).sum()))
        measured.add("loss/weight_dropped_fraction", float((batch.mask & ~kept).sum()))
        return policy + extra

    def _collect_gradient(self) -> None:
        """Add the model's gradients to the masters' in float32, where these are not the same."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
            parameter.grad = None

    def _clip_gradient(self) -> float:
        """Scale the gradient down to max_grad_norm and return its norm before.

        Raises:
            _NotFinite: the norm is not finite.
        """
        norm = torch.nn.utils.clip_grad_norm_(list(self._masters.values()), self.train.max_grad_norm).item()
        if not math.isfinite(norm):
            grads = {name: m.grad for name, m in self._masters.items() if m.grad is not None}
            broken = [name for name, grad in grads.items() if not grad.isfinite().all()]
            where = broken[0] if broken else "all parameters together"
            raise _NotFinite(f"gradient norm is {norm}: gradient of {where} is not finite")
        return norm

    def _publish(self) -> None:
        """Round the masters into the model, where these are not the same."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def _snapshot(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        tensors, _ = self.checkpoint_state()
        steps = [self._optimizer.state[m]["step"].clone() for m in self._masters.values()]
        return {name: tensor.clone() for name, tensor in tensors.items()}, steps

    @torch.no_grad()
    def _restore(self, before: tuple[dict[str, Tensor], list[Tensor]]) -> None:
        tensors, steps = before
        for name, tensor in self.checkpoint_state()[0].items():
            tensor.copy_(tensors[name])
        for master, step in zip(self._masters.values(), steps, strict=True):
            self._optimizer.state[master]["step"].copy_(step)
        self._publish()

    def _own_metrics(self, data: StepData, measured: _Measured, rate: float, seconds: float) -> dict[str, float]:
        updates = len(measured.norms)
        tokens = max(measured.sums.get("tokens", 0.0), 1.0)
        metrics = {"optimizer/learning_rate": rate, "optimizer/updates": float(updates)}
        for name, total in measured.sums.items():
            if name in ("loss/policy", "loss/regularizers"):
                metrics[name] = total / max(updates, 1)
            elif name != "tokens":
                metrics[name] = total / tokens
        if updates:
            metrics["loss/total"] = metrics["loss/policy"] + metrics["loss/regularizers"]
            metrics["optimizer/grad_norm"] = sum(measured.norms) / updates
        longest = max((len(s.prompt_ids) + len(s.response_ids) for s in data.samples), default=0)
        return metrics | {
            "train/packed_tokens": float(measured.packed_tokens),
            "train/padded_tokens": float(longest * len(data.samples)),
            "train/step_s": seconds,
            "train/tokens_per_s": int(data.mask.sum()) / seconds,
        }


def _require_finite(data: StepData, part: _Microbatch, batch: TokenBatch, loss: Tensor) -> None:
    """Raise _NotFinite, naming the first sample and quantity that spoil the loss."""
    for quantity, values in (
        ("behavior log-probability", batch.behavior),
        ("advantage", batch.advantages),
        ("log-probability", batch.logp),
        ("entropy", batch.entropy),
    ):
        broken = torch.nonzero(batch.mask & ~values.isfinite())[:, 0]
        if broken.numel():
            token = int(broken[0])
            flat = int(part.at[token])
            sample = int(data.sequence[flat])
            raise _NotFinite(
                f"{quantity} is {values[token].item()} at sampled token {flat - int(data.offsets[sample])} of "
                f"{data.samples[sample].name} (reward {data.samples[sample].reward})"
            )
    if not loss.isfinite():
        names = "; ".join(data.samples[i].name for i in part.members[:4])
        raise _NotFinite(
            f"loss is {loss.item()} though its inputs are finite, in a microbatch that starts with {names}"
        )


def checkpoint_to_bytes(tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> bytes:
    """Return a checkpoint as a safetensors file, its scalars as JSON in the header."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save_safetensors(contiguous, metadata={"scalars": json.dumps(dict(scalars), sort_keys=True)})


def checkpoint_from_bytes(body: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, scalars) of `checkpoint_to_bytes`.

    Raises:
        ContractError: the bytes are not such a file.
    """
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        return load_safetensors(body), json.loads(header["__metadata__"]["scalars"])
    except (ValueError, KeyError, TypeError) as cause:
        raise ContractError(
            f"checkpoint: expected a safetensors file with scalars, got {len(body)} bytes: {cause}"
        ) from cause
