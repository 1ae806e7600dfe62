"""Real servers and a real Dask cluster, as processes that can be killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from infra import services, settings
from infra.processes import free_port
from infra.services import Services

PATIENCE_S = 600.0


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Wait for something that must come; give up only where nothing but a hang explains that it has not."""
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what} did not come")
        time.sleep(0.1)


@dataclass
class Deck:
    """A home with servers of its own, and the processes that a test has started."""

    home: Path
    services: Services
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What children find these servers by."""
        return {
            **os.environ,
            **services.connect_environment(self.services),
            "ROLLFLOW_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start `python -m words` with its output in a file."""
        with (self.home / f"{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *words],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def output(self, name: str) -> str:
        """What a process has printed so far."""
        return (self.home / f"{name}.out").read_text()

    def clear(self) -> None:
        """Kill whatever is left, descendants too."""
        for process in self.processes.values():
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for member in family:
                if member.is_running():
                    member.send_signal(signal.SIGKILL)
            process.kill()
            process.wait()


@pytest.fixture
def deck(tmp_path: Path) -> Iterator[Deck]:
    """Servers of this test's own."""
    settings.apply_defaults()
    home = tmp_path / "home"
    found = None
    try:
        found = Deck(home, services.up(home, free_port(), free_port()))
        yield found
    finally:
        if found is not None:
            found.clear()
        services.down(home)
