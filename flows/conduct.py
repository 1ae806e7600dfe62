"""Conducts a run from the command line: checks, servers, the flow's process, the live line, the summary.

The flow runs in a child process of its own, so that the terminal shows one live line while its log goes to a
file. Ctrl-C asks the run to stop cleanly; a second one kills it. Either way `resume` goes on.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import typer

from data_contracts.config import RunConfig
from data_contracts.errors import StoreError
from flows.checks import check_before_resume, check_before_start
from infra import services as servers
from infra import settings
from infra.pages import find_pages
from infra.runs import Run, check_run_id, create_run
from tasks.supervise import Supervisor

settings.apply_defaults()


def start(config: RunConfig, run_id: str | None) -> int:
    """Make a run and conduct it to its end; return the exit code."""
    if run_id is not None:
        check_run_id(run_id)
    check_before_start(config)
    services = ensure_services()
    return conduct(create_run(config, run_id), services)


def resume(run: Run) -> int:
    """Go on with a run; return the exit code.

    Raises:
        ConfigError: processes of the run are still alive on this host.
    """
    check_before_resume(run)
    return conduct(run, ensure_services())


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
    return summarize(run, code, find_pages(services, run.id, run.config.tracking.experiment), log_path)


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
    if code != 0:
        typer.echo(
            f"rollflow: the flow of run {run.id} ended with code {code}; see {log_path}, and go on with: "
            f"rollflow resume {run.id}",
            err=True,
        )
        return 1
    if supervisor.was_stopped():
        typer.echo(f"stopped; go on with: rollflow resume {run.id}")
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
