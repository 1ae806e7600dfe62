"""The engine of a run, made from its configuration; rollout and evaluation share it."""

from data_contracts.config import RunConfig
from models.engine import Engine
from models.policy import Policy, end_ids


def make_engine(config: RunConfig, policy: Policy, *, deterministic: bool = False) -> Engine:
    """Return an engine that owns the policy's model; its weights are still to be loaded."""
    return Engine(
        policy.model,
        version=0,
        slots=config.rollout.engine.slots,
        max_length=config.rollout.engine.max_length,
        eos_ids=end_ids(policy),
        run_seed=config.seed,
        deterministic=deterministic,
    )
