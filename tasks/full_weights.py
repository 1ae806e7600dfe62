"""Weights in full, on request: for a worker that cannot rebuild a version from what was published.

    worker:   full_weights v  ──►  log/control  ──►  trainer writes v in full
    worker reads it           ◄──  log/control  ◄──  weights v, where they are

A difference may be torn or gone, or a worker's memory wrong: the digest says so. The worker asks once for each version
and goes on under the weights it holds; the trainer answers between two steps and also while it waits. The commit stays
what makes a version true: what is sent must have the digest that the commit names.
"""

import secrets
from collections.abc import Callable
from typing import TypeVar

from data_contracts.errors import ContractError, DigestMismatch, ObjectMissing
from data_contracts.records import Commit, PolicyRef
from infra.crash import point
from tasks.role import Role
from tasks.weights import PolicyReader, Weights, publish_full

T = TypeVar("T")


class WeightsFinder:
    """Reads versions for a worker, and asks for those that cannot be read."""

    def __init__(self, role: Role, newest: Callable[[], Commit | None] = lambda: None) -> None:
        """Read for a role; `newest` as for PolicyReader."""
        self._role = role
        self._reader = PolicyReader(role.store, newest, role.full_weights)
        self._failed: dict[int, dict[int, PolicyRef]] = {}
        """Version that could not be read to the answers known when it was tried last."""
        self._asked: dict[int, set[int]] = {}
        """Version that was asked for to the versions that had been given by then."""

    @property
    def reader(self) -> PolicyReader:
        """What it reads with."""
        return self._reader

    def find(self, version: int) -> tuple[Weights, str] | None:
        """Return a version's weights and their digest, or None while it cannot be read: the trainer has been asked.

        Costs nothing while nothing has changed since the last try.
        """
        return self._try(version, lambda: self._reader.weights(version))

    def find_published(self, version: int, have: int) -> list[tuple[Commit, str, bytes]] | None:
        """Return what leads from version `have` to a version (see PolicyReader.published), or None as `find` does."""
        return self._try(version, lambda: self._reader.published(version, have))

    def _try(self, version: int, read: Callable[[], T]) -> T | None:
        known = dict(self._role.full_weights)
        if self._failed.get(version) == known:
            return None
        try:
            return read()
        except (ContractError, ObjectMissing) as cause:
            if version not in self._asked:
                self._asked[version] = set(known)
                self._role.tell("full_weights", version=version, error=f"{type(cause).__name__}: {cause}")
            self._failed[version] = known
            return None

    def wait_for(self, wanted: Callable[[], int]) -> tuple[int, Weights]:
        """Return a version and its weights, however long the trainer takes to publish one in full.

        Args:
            wanted: called before every try: the version that would do now.

        Raises:
            RoleFailed: the trainer shows no life.
            DigestMismatch: the version is torn for good: the trainer has given a newer one in its place.
        """
        found: list[Weights] = []

        def take(version: int) -> bool:
            found.extend(pair[0] for pair in [self.find(version)] if pair)
            return bool(found)

        return self.wait_until(wanted, take), found[0]

    def wait_until(self, wanted: Callable[[], int], take: Callable[[int], bool]) -> int:
        """Return the version that `take` could take; otherwise as `wait_for`."""
        while True:
            version = wanted()
            if take(version):
                return version
            given = self._role.full_weights.keys() - self._asked.get(version, set())
            if any(newer > version for newer in given):
                raise DigestMismatch(f"weights of version {version} are torn, and the trainer no longer has them")
            self._role.wait(f"version {version} in full", on=("train",))


def answer_requests(role: Role, version: int, weights: Weights) -> None:
    """Publish in full what workers have asked for, as far as this trainer can; others stay for later.

    Args:
        role: the trainer's.
        version: newest version that it holds.
        weights: of that version, as published.
    """
    for asked in role.take_requests(version):
        role.progressed(f"publishing version {asked} in full")
        found = weights if asked == version else _rebuilt(role, asked)
        if found is None:  # then the newest: whoever can go on from there does
            asked, found = version, weights
            if asked in role.full_weights:
                continue
        # A name of its own: the object under the usual one may be what was torn.
        reference = publish_full(role.store, asked, f"{role.writer}-{secrets.token_hex(3)}", found)
        point("train.published_full")
        role.tell("weights", version=asked, weights=reference)
        role.check(often=True)


def _rebuilt(role: Role, version: int) -> Weights | None:
    try:
        return PolicyReader(role.store, full=role.full_weights).weights(version)[0]
    except (ContractError, ObjectMissing):
        return None
