"""A policy under training: the model with its optimizer, and the way of its weights into the store.

What the train role and a replay have in common: both step the same object with the same groups, so they get the
same bits. Which groups, and who may commit, is not decided here.
"""

from collections.abc import Sequence

import torch

from data_contracts.config import DeepspeedBackend, RunConfig
from data_contracts.records import Commit, ObjectRef, PolicyRef
from infra.crash import point
from infra.objects import get_object, put_named
from infra.store import Store
from models.digest import weights_digest
from models.policy import build_policy
from models.samples import Sample
from models.trainer import StepResult, Trainer
from tasks.deepspeed_trainer import DeepspeedTrainer
from tasks.model_files import read_model_files
from tasks.weights import Weights, publish_delta, publish_full, published_bytes


class Training:
    """Starts at version 0 of a run, whose weights are given; not safe for use from two threads."""

    def __init__(self, store: Store, config: RunConfig, weights: Weights) -> None:
        # Here and not in a role: who trains again must have the same number of threads to get the same bits.
        torch.set_num_threads(config.train.threads)
        self._config = config
        self._dtype = next(iter(weights.values())).dtype
        files = read_model_files(store)
        backend = config.train.backend
        if isinstance(backend, DeepspeedBackend):
            self.trainer: Trainer | DeepspeedTrainer = DeepspeedTrainer(files, weights, config, backend)
        else:
            model = build_policy(files, self._dtype, weights).model
            self.trainer = Trainer(model, config.algorithm, config.train, total_steps=config.steps)
        self._published: Weights = weights
        self._digest = ""

    def load_checkpoint(self, store: Store, commit: Commit) -> bool:
        """Take over the state that a commit saved; return False when it saved none."""
        if not commit.checkpoint:
            return False
        self.trainer.load_checkpoint_bytes(get_object(store, commit.checkpoint[0]))
        return True

    def step(self, groups: Sequence[Sequence[Sample]], version: int) -> StepResult:
        """Train towards `version` on the samples of each group."""
        return self.trainer.step(groups, version=version - 1, max_staleness=self._config.staleness.bound)

    def weights(self) -> Weights:
        """Return a copy of the weights in the format in which versions are published."""
        return self.trainer.weights(self._dtype)

    def digest(self) -> str:
        """Return the digest of the weights as they would be published now."""
        return weights_digest(self.weights())

    def base_on(self, weights: Weights) -> None:
        """Say which weights the version before the next one was published with: differences are made to them."""
        self._published, self._digest = weights, ""

    @property
    def published(self) -> Weights:
        """Weights that the version before the next one was published with."""
        return self._published

    def publish(self, store: Store, version: int, writer: str) -> tuple[PolicyRef, dict[str, float]]:
        """Write the weights in full, or as the exact difference to the version before, as configured.

        Returns:
            The reference, and metrics of its size.
        """
        weights = self.weights()
        metrics: dict[str, float] = {}
        if version % self._config.train.full_weights_every == 0:
            reference = publish_full(store, version, writer, weights)
        else:
            base, base_digest = self._published, self._digest
            reference, num_changed = publish_delta(store, version, writer, weights, base, base_digest)
            metrics["weights/changed"] = num_changed / max(reference.num_parameters, 1)
        metrics["weights/bytes"] = float(published_bytes(reference))
        metrics["weights/full_bytes"] = float(sum(tensor.nbytes for tensor in weights.values()))
        self._published, self._digest = weights, reference.digest
        point("train.published")
        return reference, metrics

    def is_checkpoint_due(self, version: int) -> bool:
        """Whether optimizer and random state are saved with this version."""
        return version % self._config.train.checkpoint_every == 0 or version == self._config.steps

    def save_checkpoint(self, store: Store, version: int, writer: str) -> tuple[ObjectRef, ...]:
        """Write optimizer and random state."""
        body = self.trainer.checkpoint_bytes()
        return (put_named(store, f"checkpoint/{version:010d}-{writer}/state.safetensors", body),)

    def close(self) -> None:
        """End the processes that train, if there are any."""
        self.trainer.close()
