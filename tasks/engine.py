"""The engine of a run, made from its configuration: one protocol, whatever generates.

Evaluation always generates in process; rollout does as `rollout.engine.type` says.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol

from data_contracts.config import RunConfig
from models.engine import Engine
from models.policy import Policy, build_policy, end_ids
from models.requests import Finished, Request
from tasks.full_weights import WeightsFinder
from tasks.model_files import read_model_files
from tasks.role import Role
from tasks.vllm_engine import VllmEngine


class RolloutEngine(Protocol):
    """What the rollout role asks of an engine. One thread steps it; nothing else happens between two steps."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled under."""
        ...

    @property
    def max_length(self) -> int:
        """Limit on prompt and response together, in tokens."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Sequences being sampled."""
        ...

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        ...

    @property
    def num_free(self) -> int:
        """Further sequences that could be sampled at once."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        ...

    def progress(self) -> Mapping[Hashable, int]:
        """Return how far each sequence in flight has come, as a number that grows with it."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[Finished]:
        """Sample on, and return what ended."""
        ...

    def take(self, version: int) -> bool:
        """Put a committed version of the weights in; sequences in flight go on under it.

        Returns False while it cannot be read, and nothing is changed then: the trainer has been asked for it in full.
        """
        ...

    def abort(self, keys: Iterable[Hashable]) -> list[Finished]:
        """Take requests out, queued or in flight, and return what they have so far; unknown keys are ignored."""
        ...

    def close(self) -> None:
        """Let go of whatever the engine holds."""
        ...


class StoredEngine(Engine):
    """The engine in process, which takes its weights from the store."""

    def __init__(self, weights: WeightsFinder, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._weights = weights

    def take(self, version: int) -> bool:
        """Load a committed version; it is proven by its digest on the way. See RolloutEngine."""
        found = self._weights.find(version)
        if found is not None:
            self.load_weights(found[0], version)
        return found is not None

    def close(self) -> None:
        """Do nothing: there is nothing outside of this process."""


def make_rollout_engine(role: Role, weights: WeightsFinder, wanted: Callable[[], int]) -> tuple[RolloutEngine, Any]:
    """Return an engine that holds a version of the weights, and the policy's tokenizer.

    Args:
        role: whose engine it is.
        weights: where versions come from.
        wanted: the version that would do now; called again while one cannot be read.
    """
    config, files = role.config, read_model_files(role.store)
    dtype: Any = weights.reader.dtype(0)
    engine: RolloutEngine
    if config.rollout.engine.type == "vllm":
        policy = build_policy(files, dtype, device="meta")
        engine = VllmEngine(role, config.rollout.engine, policy, files, weights)
    else:
        policy, fixed = build_policy(files, dtype), config.is_deterministic
        engine = StoredEngine(weights, policy.model, **engine_settings(config, policy), deterministic=fixed)
    try:
        weights.wait_until(wanted, engine.take)
    except BaseException:
        engine.close()
        raise
    return engine, policy.tokenizer


def make_engine(config: RunConfig, policy: Policy, *, deterministic: bool = False) -> Engine:
    """Return an engine in process that owns the policy's model; its weights are still to be loaded."""
    return Engine(policy.model, **engine_settings(config, policy), deterministic=deterministic)


def engine_settings(config: RunConfig, policy: Policy) -> dict[str, Any]:
    """Return what every engine in process of a run is made with."""
    return {
        "version": 0,
        "slots": config.rollout.engine.slots,
        "max_length": config.rollout.engine.max_length,
        "eos_ids": end_ids(policy),
        "run_seed": config.seed,
    }
