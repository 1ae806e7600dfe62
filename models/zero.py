"""A model that DeepSpeed's ZeRO splits over the ranks of a process group; one object in each rank.

Stage 0 keeps everything on every rank, 1 splits masters and optimizer state, 2 gradients too, 3 the parameters as
well. A checkpoint is that of the one-process optimizer, whole tensors by name, so a run can go on with another stage,
another number of ranks, or without DeepSpeed.

Nothing of DeepSpeed is compiled: AdamW is torch's, collectives are those of torch.distributed.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers.modeling_utils import PreTrainedModel

from data_contracts.config import DeepspeedBackend, TrainConfig
from data_contracts.errors import ConfigError
from models.optimizer import FORMAT, check_checkpoint, check_weights
from models.packed_attention import Packed
from models.packing import packed_logprobs
from models.policy import Dtype, named_weights, torch_dtype

KEYS = ("weights", "exp_avg", "exp_avg_sq")
"""Tensors of each parameter in a checkpoint; the first is the master."""

MAX_BUCKET = 50_000_000
"""Elements reduced at once, at most."""


def join_group(rank: int, num_ranks: int, meeting_place: str, cfg: DeepspeedBackend) -> None:
    """Enter the process group; returns when all ranks have.

    Args:
        rank: of this process.
        num_ranks: processes of the group, all on this host.
        meeting_place: path of a file that does not exist yet, the same for all ranks.
        cfg: kind of collectives and their time limit.
    """
    from datetime import timedelta

    if cfg.collectives == "gloo":
        os.environ.update(DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    else:
        torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    import deepspeed
    import deepspeed.ops

    # DeepSpeed would compile an operation of its own for collectives on CPUs, for which it needs a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    distributed.init_process_group(
        cfg.collectives,
        init_method=f"file://{meeting_place}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=cfg.timeout_s),
    )
    deepspeed.init_distributed(dist_backend=cfg.collectives, auto_mpi_discovery=False, verbose=False)


class _Scorer(nn.Module):
    """The forward pass as a module, so that ZeRO sees when which parameters are used."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: Packed, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        return packed_logprobs(self.model, packed, entropy_grad=entropy_grad)


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of a parameter's float32 tensors, as views [n] of elements `start` to `start + n`."""

    start: int
    views: Mapping[str, Tensor]
    """By name of KEYS."""


class ZeroBackend:
    """See models/backend.py for what every method does."""

    def __init__(self, model: PreTrainedModel, cfg: TrainConfig, backend: DeepspeedBackend) -> None:
        import deepspeed

        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._stage, self._max_grad_norm = backend.zero_stage, cfg.max_grad_norm
        self._named = named_weights(model)
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shapes = {name: p.shape for name, p in self._trained.items()}
        self._adamw = torch.optim.AdamW(
            list(self._trained.values()),
            lr=0.0,  # set by every update; DeepSpeed makes one of its own before the first
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            fused=True,
        )
        self._engine: Any = deepspeed.initialize(
            model=_Scorer(model),
            optimizer=self._adamw,
            config=self._settings(model.dtype, cfg, backend),
            dist_init_required=False,
        )[0]
        self._engine.eval()
        self._flat = self._flat_masters()
        for flat in self._flat:  # made here, so that a snapshot has the same tensors from the start
            self._adamw.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
        self._parts = {name: self._part_of(p) for name, p in self._trained.items()}
        self.parameters: Mapping[str, Tensor] = {name: _local(p) for name, p in self._trained.items()}
        self.masters: Mapping[str, Tensor] = self.parameters
        self._is_pending = False

    def logprobs(self, packed: Packed, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [N] of this rank's tokens; ZeRO brings each layer's weights together."""
        return self._engine(packed, entropy_grad)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of what this rank's tokens add to the loss."""
        self._is_pending = True
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self.num_ranks)  # DeepSpeed takes the mean over ranks

    def clear_gradient(self) -> None:
        """Do nothing: an update forgets the gradient, and so does `restore`."""

    def update(self, rate: float) -> float:
        """Move the weights along the clipped gradient; return its norm before."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        norm = 0.0
        if self._stage == 0:
            norm = nn.utils.clip_grad_norm_(list(self._trained.values()), self._max_grad_norm).item()
        self._engine.step()
        self._is_pending = False
        if self._stage > 0:
            norm = float(self._engine.optimizer._global_grad_norm)
            if self._engine.optimizer.overflow or norm < 0:  # which is how DeepSpeed marks infinity and NaN
                norm = float("inf")
        return norm

    def broken_gradients(self) -> list[str]:
        """Return nothing: by then DeepSpeed has let go of the gradient."""
        return []

    def broken_weights(self) -> list[str]:
        """Return the names of parameters that are not finite in some rank."""
        found = {name for name, part in self.parameters.items() if not part.detach().isfinite().all()}
        return sorted(set[str]().union(*self.gather(found)))

    def step_back(self, start: Mapping[str, Tensor], keep: float) -> None:
        """Refuse: the configuration does so before."""
        raise ConfigError("algorithm.update slow_fast is not there with DeepSpeed: set train.backend.type torch")

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Copy this rank's parts of everything an update changes."""
        return [(tensor, tensor.detach().clone()) for tensor in self._everything()]

    @torch.no_grad()
    def restore(self, before: list[tuple[Tensor, Tensor]]) -> None:
        """Go back to a snapshot, bit for bit; a gradient under way is forgotten."""
        if self._is_pending:  # the only way to have all of a gradient forgotten
            self.update(0.0)
        for tensor, copy in before:
            tensor.copy_(copy)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, scalars) of a checkpoint; on other ranks than the first without tensors."""
        tensors = {}
        for name in self._trained:
            for key in KEYS:
                whole = self._whole(name, key)
                if self.rank == 0:
                    tensors[f"{key}/{name}"] = whole.cpu()
        return tensors, {"format": FORMAT, "updates": int(self._adamw.state[self._flat[0]]["step"])}

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over a checkpoint.

        Raises:
            ContractError: it is of another format or another model.
        """
        wanted = {f"{key}/{name}": shape for key in KEYS for name, shape in self._shapes.items()}
        check_checkpoint(wanted, tensors, scalars)
        for name in self._trained:
            for key in KEYS:
                self._put(name, key, tensors[f"{key}/{name}"])
        for flat in self._flat:
            self._adamw.state[flat]["step"].fill_(int(scalars["updates"]))

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights by name.

        Raises:
            ContractError: a weight is missing or of another shape.
        """
        check_weights(self._shapes, weights)
        for name, parameter in self._trained.items():
            master = self._whole(name, "weights")
            given = weights[name].to(master.device).float()
            self._put(name, "weights", torch.where(given == master.to(parameter.dtype).float(), master, given))

    def weights(self, dtype: Dtype) -> dict[str, Tensor]:
        """Return all weights by state-dict name; on other ranks than the first nothing."""
        target, found = torch_dtype(dtype), {}
        for name, tensor in self._named.items():
            whole = self._whole(name, "weights") if name in self._trained else tensor
            if self.rank == 0:
                found[name] = whole.to("cpu", target if whole.is_floating_point() else whole.dtype, copy=True)
        return found

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        total = values.to(self._engine.device, copy=True)
        distributed.all_reduce(total)
        return total.to(values.device)

    def gather(self, value: Any) -> list[Any]:
        """Return a small value of every rank."""
        found: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(found, value)
        return found

    def _settings(self, dtype: torch.dtype, cfg: TrainConfig, backend: DeepspeedBackend) -> dict[str, Any]:
        """Return the configuration of DeepSpeed."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        zero: dict[str, Any] = {
            "stage": backend.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": max(*sizes, min(sum(sizes), MAX_BUCKET)),
            "stage3_param_persistence_threshold": 0,  # other weights stand in for parts, so no part may be kept whole
        }
        if backend.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,  # `backward` says which one is the last
            "gradient_clipping": cfg.max_grad_norm if backend.zero_stage else 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "steps_per_print": 2**31,
        }

    def _flat_masters(self) -> list[Tensor]:
        """Return the tensors that AdamW updates on this rank."""
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        for name in names:
            if hasattr(self._engine.optimizer, name):
                return list(getattr(self._engine.optimizer, name))
        return list(self._trained.values())

    def _part_of(self, parameter: Any) -> _Part:
        if hasattr(parameter, "ds_tensor"):
            optimizer = self._engine.optimizer
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = self.rank * size
            size = max(min(size, parameter.ds_numel - start), 0)  # the last part is padded
            return _Part(start, self._views(self._flat[group], offset, size))
        if self._stage == 0:
            return _Part(0, self._views(parameter, 0, parameter.numel()))
        mapping = parameter._hp_mapping
        if mapping is None:
            return _Part(0, self._views(self._flat[0], 0, 0))
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return _Part(there.start, self._views(self._flat[0], here.start, here.numel))

    def _views(self, flat: Tensor, offset: int, size: int) -> dict[str, Tensor]:
        state = self._adamw.state[flat]
        tensors = (flat.detach(), state["exp_avg"], state["exp_avg_sq"])
        return {key: t.view(-1).narrow(0, offset, size) for key, t in zip(KEYS, tensors, strict=True)}

    def _everything(self) -> Iterator[Tensor]:
        """Yield everything that an update changes on this rank."""
        for flat in self._flat:
            yield flat.detach()
            yield from self._adamw.state[flat].values()
        for part in self.parameters.values():
            yield part.detach()

    def _whole(self, name: str, key: str) -> Tensor:
        """Together: return a float32 tensor of a parameter, put together from all parts."""
        part, shape = self._parts[name], self._shapes[name]
        view = part.views[key]
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=self._engine.device)
        whole[part.start : part.start + view.numel()] = view.to(whole.device)
        if self._stage > 0:
            distributed.all_reduce(whole)
        return whole.view(shape)

    @torch.no_grad()
    def _put(self, name: str, key: str, whole: Tensor) -> None:
        """Take over a tensor of a parameter, given whole on every rank."""
        part, flat = self._parts[name], whole.reshape(-1)
        view = part.views[key]
        mine = flat[part.start : part.start + view.numel()]
        view.copy_(mine)
        if key == "weights":
            local = self.parameters[name].detach()
            if self._stage == 3:
                local.view(-1)[: mine.numel()].copy_(mine)
            else:
                local.copy_(whole)


def _local(parameter: Any) -> Tensor:
    """Return what this rank holds of a parameter in the model's format."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
