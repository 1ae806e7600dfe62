"""Conducts a run from the command line: checks, servers, the flow's process, the live line, the summary.

The flow runs in a child process of its own, so that the terminal shows one live line while its log goes to a
file. Ctrl-C asks the run to stop cleanly; a second one kills it. Either way `resume` goes on.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import typer

from data_contracts.config import CustomRule, LocalModel, RunConfig
from data_contracts.errors import ConfigError, StoreError
from data_contracts.suites import STAGES, check_severities, load_suite
from infra import services as servers
from infra import settings
from infra.installed import check_backend
from infra.probe import probe
from infra.runs import Run, check_run_id, create_run
from tasks.curation.custom import load as load_rule
from tasks.envs.registry import build_envs
from tasks.supervise import Supervisor, find_living, find_moving

settings.apply_defaults()


def start(config: RunConfig, run_id: str | None) -> int:
    """Make a run and conduct it to its end; return the exit code."""
    if run_id is not None:
        check_run_id(run_id)
    check_before_start(config)
    services = ensure_services()
    return conduct(create_run(config, run_id), services)


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


def resume(run: Run) -> int:
    """Go on with a run; return the exit code.

    Raises:
        ConfigError: processes of the run are still alive on this host.
    """
    check_before_resume(run)
    return conduct(run, ensure_services())


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
            load_rule(rule.path)
    if config.audit.enabled:
        check_severities([load_suite(stage, config.audit) for stage in STAGES], config.audit)


def ensure_services(prefect_port: int | None = None, mlflow_port: int | None = None) -> servers.Services:
    """Start the servers unless they run, and the automation that marks dead flow runs as crashed.

    Where PREFECT_API_URL and MLFLOW_TRACKING_URI are both set and no port is given, those servers are used.

    Args:
        prefect_port: None takes the port where it runs, or the usual one.
        mlflow_port: likewise.
    """
    named = servers.named_in_environment() if prefect_port is None and mlflow_port is None else None
    if named is None and servers.find() is None:
        typer.echo("waiting for the Prefect and MLflow servers; starting them takes up to a minute", err=True)
    services = named or servers.up(settings.home(), prefect_port=prefect_port, mlflow_port=mlflow_port)
    os.environ.update(servers.connect_environment(services))
    from infra.automation import ensure_automation

    ensure_automation()
    return services


def conduct(run: Run, services: servers.Services) -> int:
    """Run the flow in a child process, follow its records, and sum up; return the exit code."""
    from dashboards.live import follow

    supervisor = Supervisor(run.store)
    supervisor.bury_the_dead()
    supervisor.open()
    log_path = settings.home() / "logs" / f"{run.id}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    links = {"Prefect": services.prefect_ui_url, "MLflow": services.mlflow_url}
    typer.echo(f"run {run.id}\nPrefect  {services.prefect_ui_url}\nMLflow   {services.mlflow_url}\nlog      {log_path}")
    with log_path.open("ab") as log:
        flow = subprocess.Popen(
            [sys.executable, "-m", "flows.post_training", run.store.url],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | servers.connect_environment(services),
            preexec_fn=_ignore_interrupt,
        )
    stopper = _Stopper(supervisor, flow)
    signal.signal(signal.SIGINT, stopper.on_signal)
    signal.signal(signal.SIGTERM, stopper.on_signal)
    follow(run.store, links, lambda: flow.poll() is not None)
    code = flow.wait()
    return summarize(run, code, links, log_path)


def _ignore_interrupt() -> None:
    # The terminal sends Ctrl-C to every process of its group; only the conductor is to hear it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Stopper:
    """First signal: stop cleanly. Second: kill the flow."""

    def __init__(self, supervisor: Supervisor, flow: subprocess.Popen[bytes]) -> None:
        self._supervisor = supervisor
        self._flow = flow
        self._asked = False

    def on_signal(self, *_: object) -> None:
        if self._asked:
            self._flow.kill()
            return
        self._asked = True
        typer.echo("\nstopping cleanly; once more to kill", err=True)
        self._supervisor.stop_if_open("interrupted")


def summarize(run: Run, code: int, links: dict[str, str], log_path: Path) -> int:
    """Print how the run ended and where everything is; return the exit code."""
    from dashboards.show import show_summary

    supervisor = Supervisor(run.store)
    report = make_report(run, None, links)
    show_summary(run.store, links | {"report": str(report), "store": run.store.url, "log": str(log_path)})
    failure = supervisor.failure()
    if failure:
        typer.echo(f"rollflow: run {run.id} failed: {failure}", err=True)
        return 1
    if supervisor.was_stopped():
        typer.echo(f"stopped; go on with: rollflow resume {run.id}")
        return 0
    if code != 0:
        typer.echo(f"rollflow: the flow of run {run.id} ended with code {code}; see {log_path}", err=True)
        return 1
    return 0


def make_report(run: Run, path: Path | None, links: dict[str, str] | None = None) -> Path:
    """Write the run's report and Data Docs to a file and a folder, and beside its records."""
    from dashboards.report import write_report

    path = path or settings.home() / "reports" / f"{run.id}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return write_report(run.store, path, links)
    except OSError as cause:
        if isinstance(cause, StoreError):
            raise
        raise StoreError(f"report {path}: cannot be written: {cause.strerror or cause}") from cause
