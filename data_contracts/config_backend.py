"""Where the model under training lives: in the training role's own process, or split over a group of processes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from data_contracts.frozen import Frozen


class TorchBackend(Frozen):
    """The whole model in the process of the training role."""

    type: Literal["torch"] = "torch"


class DeepspeedBackend(Frozen):
    """The model split by DeepSpeed's ZeRO over a group of processes on this host, which the training role starts and
    watches. Needs the package deepspeed: pip install 'rollflow[deepspeed]'."""

    type: Literal["deepspeed"] = "deepspeed"
    zero_stage: int = Field(default=2, ge=0, le=3)
    """What is split over the processes: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    num_processes: int = Field(default=2, gt=0)
    """Ranks of the group."""
    collectives: Literal["gloo", "nccl"] = "gloo"
    """gloo computes on the CPU, nccl on one CUDA device for each process."""
    offload_optimizer: bool = False
    """Keep masters and optimizer state in host memory (zero_stage 1 to 3)."""
    timeout_s: float = Field(default=600.0, gt=0)
    """A process that waits longer than this for the others gives up, and with it the group."""

    @model_validator(mode="after")
    def _offload_splits(self) -> "DeepspeedBackend":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer with zero_stage 0: there is no optimizer state split off; set 1 to 3")
        return self


TrainBackend = Annotated[TorchBackend | DeepspeedBackend, Field(discriminator="type")]
