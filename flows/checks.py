"""What is looked at before anything is started, so that a mistake costs a sentence and no minutes."""

import time
from pathlib import Path

from data_contracts.config import CustomRule, LocalModel, RunConfig
from data_contracts.errors import ConfigError
from data_contracts.suites import STAGES, check_severities, load_suite
from infra.installed import check_backend, load_function
from infra.probe import probe
from infra.runs import Run
from tasks.envs.registry import build_envs
from tasks.supervise import Supervisor, find_living, find_moving


def check_before_start(config: RunConfig) -> None:
    """Make sure that a run can start: its model, rules, store and cluster are there.

    Raises:
        ConfigError: one of them is not.
        StoreError: the store does not keep what the records rely on.
    """
    check_model(config)
    check_packages(config)
    check_rules(config)
    check_envs(config)
    probe(config.store)
    check_workers(config)


def check_workers(config: RunConfig) -> None:
    """Raise ConfigError when a cluster that the config names has no free worker for one of the roles."""
    if config.orchestration.scheduler:
        from flows.placement import role_names
        from infra.cluster import check_cluster

        check_cluster(config.orchestration.scheduler, role_names(config))


def check_before_resume(run: Run) -> None:
    """Make sure that a run can go on, and that nobody else works on it.

    On a cluster the roles outlive a flow that was killed; they are asked to stop and waited for.

    Raises:
        ConfigError: it cannot, or somebody does.
    """
    if run.replay_of:
        raise ConfigError(f"run {run.id}: is a replay of {run.replay_of} and does not go on; replay that one again")
    if run.config.orchestration.scheduler:
        stop_orphans(run)
    living = find_living(run.store)
    if living:
        pids = ", ".join(f"{beat.role} {beat.pid}" for beat in living)
        raise ConfigError(f"run {run.id}: still running here ({pids}); stop it first: rollflow stop {run.id}")
    check_model(run.config)
    check_packages(run.config)
    check_workers(run.config)


def stop_orphans(run: Run) -> None:
    """Ask roles of a run that still play on a cluster to stop, and wait until none does.

    Raises:
        ConfigError: they go on for longer than the heartbeat limit.
    """
    look_s = 3 * run.config.orchestration.heartbeat_s
    give_up = time.monotonic() + run.config.orchestration.heartbeat_limit_s
    while moving := find_moving(run.store, look_s):
        Supervisor(run.store).stop_if_open("resumed")
        if time.monotonic() > give_up:
            where = ", ".join(f"{beat.role} on {beat.host}" for beat in moving)
            raise ConfigError(f"run {run.id}: still running elsewhere ({where}) although it was asked to stop")


def check_packages(config: RunConfig) -> None:
    """Raise ConfigError when an optional package that the run needs is missing; a cluster has its own."""
    if not config.orchestration.scheduler:
        check_backend(config.train.backend)


def check_model(config: RunConfig) -> None:
    """Raise ConfigError when the model's folder is not there, before anything is started."""
    if isinstance(config.model, LocalModel):
        folder = Path(config.model.path)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path {folder}: expected a folder with config.json and safetensors; "
                "`rollflow fetch-model smollm2` makes one"
            )


def check_envs(config: RunConfig) -> None:
    """Raise ConfigError when an env cannot be made; the workers of a cluster have files and packages of their own."""
    if not config.orchestration.scheduler:
        build_envs(config.envs, config.seed)


def check_rules(config: RunConfig) -> None:
    """Raise ConfigError when a rule of curation or a suite of the audit is not there or makes no sense."""
    for rule in config.curate.rules:
        if isinstance(rule, CustomRule):
            load_function(rule.path, "rule")
    if config.audit.enabled:
        check_severities([load_suite(stage, config.audit) for stage in STAGES], config.audit)
