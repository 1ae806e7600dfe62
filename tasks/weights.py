"""Policy versions in the store: publishing them, and getting one back, proven by its digest."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from data_contracts.errors import ContractError, DigestMismatch, ObjectMissing, ProtocolError
from data_contracts.records import Commit, ObjectRef, PolicyRef
from infra.log import Log
from infra.objects import get_object, put_named
from infra.store import Store
from models.delta import apply_delta, delta_from_bytes, delta_to_bytes, make_delta
from models.digest import weights_digest
from models.policy import weights_from_bytes, weights_to_bytes

Weights = Mapping[str, torch.Tensor]

FULL = "model.safetensors"
DELTA = "delta.safetensors"


def publish_full(
    store: Store, version: int, writer: str, weights: Weights, *, files: Mapping[str, bytes] | None = None
) -> PolicyRef:
    """Write weights (and, for version 0, the model's small files) under names no record refers to yet."""
    folder = f"policy/{version:010d}-{writer}"
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(weights_digest, weights)
        objects = [put_named(store, f"{folder}/{FULL}", weights_to_bytes(weights))]
        objects += [put_named(store, f"{folder}/{name}", body) for name, body in sorted((files or {}).items())]
        return _describe("full", weights, objects, digest.result())


def publish_delta(
    store: Store, version: int, writer: str, weights: Weights, base: Weights, base_digest: str = ""
) -> tuple[PolicyRef, int]:
    """Write the exact sparse difference to version - 1; the digest is that of the full weights.

    Args:
        base: weights of version - 1.
        base_digest: their digest, if it is known; computed otherwise.

    Returns:
        The reference, and how many elements changed.
    """
    delta = make_delta(base, weights, base_digest=base_digest)
    reference = put_named(store, f"policy/{version:010d}-{writer}/{DELTA}", delta_to_bytes(delta))
    return _describe("delta", weights, [reference], delta.digest, base=version - 1), delta.num_changed


def _describe(kind: str, weights: Weights, objects: list[ObjectRef], digest: str, base: int | None = None) -> PolicyRef:
    return PolicyRef.model_validate(
        {
            "kind": kind,
            "base": base,
            "objects": objects,
            "digest": digest,
            "dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
            "num_parameters": sum(tensor.numel() for tensor in weights.values()),
        }
    )


def published_bytes(reference: PolicyRef) -> int:
    """Return the bytes of a version's weights as they were published."""
    return sum(ref.num_bytes for ref in reference.objects if ref.key.endswith(".safetensors"))


class PolicyReader:
    """Reads versions through their commits, keeping the last one so that a difference is enough for the next."""

    def __init__(
        self,
        store: Store,
        newest: Callable[[], Commit | None] = lambda: None,
        full: Mapping[int, PolicyRef] | None = None,
    ) -> None:
        """Read from a run's store.

        Args:
            store: the run's prefix.
            newest: the newest commit that the caller has read anyhow, so that it is not read and parsed twice.
            full: versions that somebody asked for in full and where they are; looked at, never changed.
        """
        self._store = store
        self._newest = newest
        self._full = {} if full is None else full
        self._commits = Log(store, "log/commit", Commit)
        self._forget()

    def weights(self, version: int) -> tuple[Weights, str]:
        """Return the weights of a version and their digest, which is that of the commit.

        Weights in full are proven by the SHA-256 of their object, others by the digest over what a difference gave.
        What an engine or a trainer holds after loading them is for it to say: it computes a digest of its own.

        Raises:
            ObjectMissing: the version does not exist, or an object of it.
            ContractError: an object or the weights are not those that were committed.
        """
        if self._version >= 0:
            try:
                return self._read(version)
            except (ContractError, ObjectMissing):
                self._forget()  # what is in memory may be at fault
        return self._read(version)

    def _forget(self) -> None:
        self._version = -1
        self._weights: Weights = {}
        self._digest = ""

    def _read(self, version: int) -> tuple[Weights, str]:
        weights, digest = self._weights, self._digest
        for commit, reference in self._chain(version, self._version):
            weights, digest = self._step(commit, reference, weights, digest), commit.weights.digest
        self._version, self._weights, self._digest = version, weights, digest
        return weights, digest

    def published(self, version: int, have: int) -> list[tuple[Commit, str, bytes]]:
        """Return what leads to a version from version `have`, or from one in full, as it was published.

        Returns:
            (commit, "full" or "delta", verified bytes) in order; nothing when `have` is the version.

        Raises:
            ObjectMissing: the version does not exist, or an object of it.
            ContractError: an object is not the one that was committed.
        """
        return [(commit, reference.kind, self._body(reference)) for commit, reference in self._chain(version, have)]

    def dtype(self, version: int) -> str:
        """Return the numeric format that a version was published in."""
        return self._commit(version).weights.dtype

    def _chain(self, version: int, have: int) -> list[tuple[Commit, PolicyRef]]:
        """Return the commits that lead to a version, in order, and where their weights are."""
        chain: list[tuple[Commit, PolicyRef]] = []
        at = version
        while at != have:
            commit = self._commit(at)
            reference = self._full.get(at, commit.weights)
            chain.append((commit, reference))
            if reference.kind == "full":
                break
            if reference.base is None:
                raise ProtocolError(f"commit {at}: weights are a difference without a base")
            at = reference.base
        return chain[::-1]

    def _body(self, reference: PolicyRef) -> bytes:
        return get_object(self._store, next(o for o in reference.objects if o.key.endswith(".safetensors")))

    def _step(self, commit: Commit, reference: PolicyRef, base: Weights, base_digest: str) -> Weights:
        body = self._body(reference)
        delta = None if reference.kind == "full" else delta_from_bytes(body)
        digest = delta.digest if delta else reference.digest
        if digest != commit.weights.digest:
            raise DigestMismatch(
                f"weights of version {commit.version}: expected digest {commit.weights.digest}, the {reference.kind}"
                f" weights give {digest}"
            )
        if delta is None:
            return weights_from_bytes(body)
        return apply_delta(base, delta, base_digest=base_digest)  # which proves its result

    def _commit(self, version: int) -> Commit:
        known = self._newest()
        commit = known if known is not None and known.version == version else self._commits.read(version)
        if commit is None:
            raise ObjectMissing(f"version {version} does not exist in {self._store.url}")
        return commit
