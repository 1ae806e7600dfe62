"""One role in this process, of a run that goes on elsewhere: what another machine adds to a run, and takes away again.

The machine shares the store with the run and nothing else: no Prefect, no MLflow, no folder, no clock. Any number of
rollout processes may join a run and leave it. One that is killed loses its leases, one that fails says so and loses
them at once; the run goes on with the others.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import typer

from data_contracts.errors import ProtocolError, StoreError
from flows.play import announce_failure, check_role, play
from infra import settings
from infra.runs import load_run
from tasks.role import Role, append_control

LEAVES = (signal.SIGINT, signal.SIGTERM)


def play_alone(name: str, run_url: str, tell: Callable[[str], None] = typer.echo) -> str:
    """Play one role in this process until the run is over, or until this process is asked to leave.

    The first SIGINT or SIGTERM asks a rollout process to finish and deliver the groups it holds and go; the second
    ends it. Other roles end at the first.

    Args:
        name: the role.
        run_url: the run's prefix in the store.
        tell: takes a line for the person who started it.

    Raises:
        RollflowError: the role failed. Except for rollout, that ends the run.
    """
    settings.apply_defaults()
    check_role(name)
    load_run(run_url)  # a wrong URL is the caller's mistake and no failure of the run
    roles: list[Role] = []

    def watched(role: Role) -> AbstractContextManager[object]:
        roles.append(role)
        tell(f"{name} {role.writer} joins {run_url}")
        return _leaves_when_asked(role) if name == "rollout" else contextlib.nullcontext()

    try:
        return play(name, run_url, watched=watched)
    except Exception as error:
        with contextlib.suppress(StoreError):  # where nothing can be told, leases and heartbeats run out
            if name == "rollout" and roles and not isinstance(error, ProtocolError):
                told = f"{type(error).__name__}: {error}"
                append_control(roles[0].store, roles[0].writer, "dead", role=name, target=roles[0].writer, error=told)
            else:
                announce_failure(name, run_url, error)
        raise


@contextlib.contextmanager
def _leaves_when_asked(role: Role) -> Iterator[None]:
    """Have the first signal set a flag, which the role's loop sees between two steps, and the next ones do as usual."""
    usual = {number: signal.getsignal(number) for number in LEAVES}

    def leave(*_: object) -> None:
        role.is_finishing = True
        for number, handler in usual.items():
            signal.signal(number, handler)
        os.write(2, b"leaving: finishes the groups it holds and claims no more; once more to end at once\n")

    for number in LEAVES:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
