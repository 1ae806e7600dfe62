"""A tiny run in real processes that can be killed, for tests of several folders."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from data_contracts.config import RunConfig
from infra.runs import Run
from tasks.supervise import Supervisor

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROLES = ("start", "train", "rollout", "reward", "curate")
PRELOADED = ["tasks.rollout", "tasks.train", "tasks.start", "tasks.reward", "tasks.curate", "tasks.evaluate"]

TINY = {
    "name": "test",
    "steps": 6,
    "groups_per_step": 4,
    "samples_per_group": 4,
    "model": {
        "type": "tiny",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "warm_start_max_steps": 100,
        "warm_start_batch": 32,
        "warm_start_lr": 6e-3,
    },
    "envs": [{"type": "addition", "max_operand": 9}],  # right now and then: without rewards no weight would change
    "rollout": {"engine": {"type": "torch", "slots": 16, "max_length": 16}, "claim_block": 4},
    "train": {"checkpoint_every": 3, "learning_rate": 1e-3},
    "evaluate": {"every": 3, "num_prompts": 16},
    "tracking": {"enabled": False},
    "staleness": {"max_staleness": 0, "lease_s": 5.0},
    "orchestration": {"heartbeat_s": 0.2, "heartbeat_limit_s": 60.0},
}


def tiny_config(store: str, **changes: Any) -> RunConfig:
    """Return the configuration of a run of seconds; `changes` replace fields, dicts are merged."""
    values = {**TINY, "store": store}
    for name, value in changes.items():
        merged = {**values[name], **value} if isinstance(value, dict) and name in values else value
        values[name] = merged
    return RunConfig.model_validate(values)


def _play(name: str, run_url: str, environment: dict[str, str], output: str = "") -> None:
    os.environ.update(environment)
    if output:
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
    import torch

    torch.set_num_threads(1)
    from flows.play import announce_failure, play

    try:
        play(name, run_url)
    except Exception as error:
        announce_failure(name, run_url, error)
        raise


@contextlib.contextmanager
def held(process: BaseProcess) -> Iterator[None]:
    """Have a process stand still."""
    assert process.pid
    os.kill(process.pid, signal.SIGSTOP)
    yield
    os.kill(process.pid, signal.SIGCONT)


class Processes:
    """Plays the roles of a run, each in a process of its own, forked from a server that has the imports done."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._started: list[BaseProcess] = []

    def start(self, run: Run, name: str, *, output: str = "", **environment: str) -> BaseProcess:
        """Start one role; `output` names a file for what it prints."""
        process = self._context.Process(target=_play, args=(name, run.store.url, environment, output), name=name)
        process.start()
        self._started.append(process)
        return process

    def start_all(
        self, run: Run, names: tuple[str, ...] = ROLES, *, outputs: str = "", **environment: str
    ) -> list[BaseProcess]:
        """Open the run, declare dead whoever died before, and start the roles; `outputs` names a folder, see start."""
        supervisor = Supervisor(run.store)
        supervisor.bury_the_dead()
        supervisor.open()
        return [self.start(run, name, output=outputs and f"{outputs}/{name}.log", **environment) for name in names]

    def join(self, processes: list[BaseProcess], limit_s: float = 120.0) -> None:
        """Wait until all have ended; raise when they take longer than `limit_s`, which only a hang does."""
        give_up = time.monotonic() + limit_s
        for process in processes:
            process.join(max(give_up - time.monotonic(), 0.0))
            if process.exitcode is None:
                raise TimeoutError(f"role {process.name} hangs")

    def kill_all(self) -> None:
        """Send SIGKILL to everything that still runs."""
        for process in self._started:
            if process.is_alive():
                process.kill()
                process.join()
        self._started.clear()
