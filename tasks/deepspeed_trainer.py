"""A trainer whose model lives in a group of DeepSpeed ranks; to the training role it looks like the one in process."""

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from data_contracts.config import DeepspeedBackend, RunConfig
from infra.installed import check_backend
from infra.ranks import Message, RankGroup
from models.policy import Dtype, torch_dtype, weights_from_bytes, weights_to_bytes
from models.samples import Sample, groups_to_bytes
from models.trainer import StepResult
from tasks.weights import Weights

MODULE = "tasks.deepspeed_rank"


def start_ranks(backend: DeepspeedBackend) -> RankGroup:
    """Start the processes of a group; they do not know each other yet.

    Raises:
        ConfigError: DeepSpeed is not installed here.
    """
    check_backend(backend)
    return RankGroup(MODULE, backend.num_processes)


class DeepspeedTrainer:
    """Has the methods of models.trainer.Trainer that the training role calls. Not for use from two threads.

    All of them raise RankFailed when a rank dies; the trainer is then of no more use.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        weights: Weights,
        config: RunConfig,
        backend: DeepspeedBackend,
        group: RankGroup | None = None,
    ) -> None:
        """Build the model in every rank.

        Args:
            files: the model's small files.
            weights: of version 0.
            config: of the run.
            backend: that of config.train.
            group: from `start_ranks`; None starts one. It is closed with this trainer.
        """
        self._group = group or start_ranks(backend)
        self._scratch = tempfile.TemporaryDirectory(prefix="rollflow-ranks-")
        blobs = {**files, "weights": weights_to_bytes(weights)}
        shared = {
            "do": "build",
            "num_ranks": len(self._group.pids),
            "meeting_place": f"{self._scratch.name}/meeting",
            "algorithm": config.algorithm.model_dump(mode="json"),
            "train": config.train.model_dump(mode="json"),
            "total_steps": config.steps,
        }
        self._group.call([Message(shared | {"rank": rank}, blobs) for rank in range(shared["num_ranks"])])

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._group.pids

    def step(self, groups: Sequence[Sequence[Sample]], *, version: int, max_staleness: int | None) -> StepResult:
        """Train from `version` towards `version + 1`; see models.trainer.Trainer.step."""
        fields = {"version": version, "max_staleness": max_staleness}
        return StepResult(**self._tell("step", fields, groups=groups_to_bytes(groups)).fields)

    def weights(self, dtype: Dtype) -> dict[str, Any]:
        """Return the weights by state-dict name in the published format."""
        name = str(torch_dtype(dtype)).removeprefix("torch.")
        return weights_from_bytes(self._tell("weights", {"dtype": name}).blobs["weights"])

    def checkpoint_bytes(self) -> bytes:
        """Return a checkpoint as a file, the same as any other backend's."""
        return self._tell("checkpoint", {}).blobs["checkpoint"]

    def load_checkpoint_bytes(self, body: bytes) -> None:
        """Take over a checkpoint of any backend.

        Raises:
            ContractError: it is of another format or another model; the group has ended.
        """
        self._tell("load", {}, checkpoint=body)

    def adopt_weights(self, weights: Weights) -> None:
        """Take over published weights by name; the optimizer's moments stay.

        Raises:
            ContractError: a weight is missing or of another shape; the group has ended.
        """
        self._tell("adopt", {}, weights=weights_to_bytes(weights))

    def close(self) -> None:
        """End the ranks."""
        self._group.close()
        self._scratch.cleanup()

    def _tell(self, what: str, fields: dict[str, Any], **blobs: bytes) -> Message:
        return self._group.call([Message({"do": what} | fields, blobs)] * len(self._group.pids))
