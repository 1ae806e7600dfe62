"""A Dask cluster as a run sees it: which worker processes would play which roles, and which of them are free.

A worker says what it would play by its resources: ROLLOUT, TRAIN, or ROLE for any other role. A role is a process, so
a worker plays one at a time:

    dask worker tcp://10.0.0.1:8786 --nthreads 1 --resources "ROLLOUT=1"
    dask worker tcp://10.0.0.1:8786 --nthreads 1 --resources "ROLE=1" --nworkers 6
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Client

from data_contracts.errors import ConfigError, ServiceError

RESOURCES = {"rollout": "ROLLOUT", "train": "TRAIN"}
"""Role to the resource it needs."""

OTHER = "ROLE"
"""What every other role needs."""

OFFERED = (*RESOURCES.values(), OTHER)

CONNECT_LIMIT_S = 5.0
JOIN_LIMIT_S = 10.0
"""How long a start waits for a scheduler that is about to answer, for workers that are about to join or be free."""

POLL_S = 0.5


@dataclass(frozen=True)
class Offer:
    """A worker process that would play roles.

    Attributes:
        worker: its address.
        resources: what it offers, of OFFERED.
        is_free: whether it would take a role now: it works on nothing, and is not paused or closing.
        num_at_once: roles that it would play at a time, in one process; none is given to it when that is not 1.
    """

    worker: str
    resources: frozenset[str]
    is_free: bool
    num_at_once: int = 1


def resource_of(role: str) -> str:
    """Return the resource that a role needs."""
    return RESOURCES.get(role, OTHER)


def read_offers(client: Client) -> list[Offer]:
    """Return the workers of a cluster that would play roles.

    Raises:
        ServiceError: the scheduler does not answer.
    """
    try:
        # Not client.scheduler_info(): another thread replaces what that returns by answers without workers.
        identity: Any = client.sync(client.scheduler.identity, n_workers=-1)  # pyright: ignore[reportOptionalMemberAccess]
        tasks: Mapping[str, Sequence[object]] = client.processing()  # pyright: ignore[reportAssignmentType]
    except (OSError, TimeoutError) as cause:
        raise ServiceError(f"the Dask scheduler does not answer any more: {cause}") from cause
    offers = []
    for address, worker in identity["workers"].items():
        amounts = {name: worker["resources"].get(name, 0) for name in OFFERED}
        resources = frozenset(name for name, amount in amounts.items() if amount >= 1)
        if resources:
            num_at_once = min(int(sum(amounts.values())), worker["nthreads"])
            is_free = worker["status"] == "running" and not tasks.get(address) and num_at_once == 1
            offers.append(Offer(address, resources, is_free, num_at_once))
    return offers


def assign(roles: Sequence[str], offers: Sequence[Offer]) -> dict[int, str]:
    """Give as many roles as can be a worker of their own, the first roles first.

    Args:
        roles: name of each.
        offers: workers, the preferred ones first.

    Returns:
        Index of a role to the address of its worker.
    """
    holder: dict[str, int] = {}

    # Augmenting paths keep every role placed that was placed before; a maximum matching of a library's does not say
    # which roles it leaves out.
    def place(role: int, tried: set[str]) -> bool:
        for offer in offers:
            if resource_of(roles[role]) not in offer.resources or offer.worker in tried:
                continue
            tried.add(offer.worker)
            if offer.worker not in holder or place(holder[offer.worker], tried):
                holder[offer.worker] = role
                return True
        return False

    for role in range(len(roles)):
        place(role, set())
    return {role: worker for worker, role in holder.items()}


def check_cluster(address: str, roles: Sequence[str], patience_s: float = JOIN_LIMIT_S) -> None:
    """Make sure that a cluster has a free worker for each role of a run.

    Raises:
        ConfigError: it has not, also after `patience_s`; or no scheduler answers at this address.
    """
    with connect(address, max(patience_s, CONNECT_LIMIT_S)) as client:
        give_up = time.monotonic() + patience_s
        while True:
            offers = read_offers(client)
            placed = assign(roles, [offer for offer in offers if offer.is_free])
            missing = [role for i, role in enumerate(roles) if i not in placed]
            if not missing:
                return
            if time.monotonic() > give_up:
                raise ConfigError(explain_missing(address, roles, missing, offers))
            time.sleep(POLL_S)


def explain_missing(address: str, roles: Sequence[str], missing: Sequence[str], offers: Sequence[Offer]) -> str:
    """Return the sentence that says which workers a cluster lacks, and how to start one."""
    resource = resource_of(missing[0])
    wanted = sum(resource_of(role) == resource for role in roles)
    lacking = [role for role in missing if resource_of(role) == resource]
    having = [offer for offer in offers if resource in offer.resources]
    crowded = [offer for offer in having if offer.num_at_once > 1]
    if crowded:
        return (
            f"Dask worker {crowded[0].worker}: would play {crowded[0].num_at_once} roles at once, but every role needs "
            "a process of its own: start it with --nthreads 1, and more of them with --nworkers"
        )
    busy = sum(not offer.is_free for offer in having)
    got = f"{wanted - len(lacking)} ({busy} more busy)" if busy else str(wanted - len(lacking))
    return (
        f"orchestration.scheduler {address}: expected {wanted} free worker(s) that offer {resource}, got {got}; none "
        f"for {', '.join(dict.fromkeys(lacking))}; start one with: dask worker {address} --nthreads 1 "
        f"--resources {resource}=1"
    )


@contextlib.contextmanager
def connect(address: str, limit_s: float = CONNECT_LIMIT_S) -> Iterator[Client]:
    """Yield a client of the scheduler at `address`, which may take `limit_s` to answer.

    Raises:
        ConfigError: nothing answers there.
    """
    try:
        client = Client(address, timeout=limit_s, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as cause:
        raise ConfigError(
            f"orchestration.scheduler {address}: no Dask scheduler answers there; start one with: dask scheduler"
        ) from cause
    with client:
        yield client
