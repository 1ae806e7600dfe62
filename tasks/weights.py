"""Policy versions in the store: publishing them, and getting one back, proven by its digest."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from data_contracts.errors import DigestMismatch, ObjectMissing, ProtocolError
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
    """Write weights (and, for version 0, the model's small files) under names no commit refers to yet."""
    folder = f"policy/{version:010d}-{writer}"
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(weights_digest, weights)
        objects = [put_named(store, f"{folder}/{FULL}", weights_to_bytes(weights))]
        objects += [put_named(store, f"{folder}/{name}", body) for name, body in sorted((files or {}).items())]
        return _describe("full", weights, objects, digest.result())


def publish_delta(
    store: Store, version: int, writer: str, weights: Weights, base: Weights, base_digest: str = ""
) -> PolicyRef:
    """Write the exact sparse difference to version - 1; the digest is that of the full weights.

    Args:
        base: weights of version - 1.
        base_digest: their digest, if it is known; computed otherwise.
    """
    delta = make_delta(base, weights, base_digest=base_digest)
    reference = put_named(store, f"policy/{version:010d}-{writer}/{DELTA}", delta_to_bytes(delta))
    return _describe("delta", weights, [reference], delta.digest, base=version - 1)


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


class PolicyReader:
    """Reads versions through their commits, keeping the last one so that a difference is enough for the next."""

    def __init__(self, store: Store, newest: Callable[[], Commit | None] = lambda: None) -> None:
        """Read from a run's store.

        Args:
            store: the run's prefix.
            newest: the newest commit that the caller has read anyhow, so that it is not read and parsed twice.
        """
        self._store = store
        self._newest = newest
        self._commits = Log(store, "log/commit", Commit)
        self._version = -1
        self._weights: Weights = {}
        self._digest = ""

    def weights(self, version: int) -> tuple[Weights, str]:
        """Return the weights of a version and their digest, which is that of the commit.

        Weights in full are proven by the SHA-256 of their object, others by the digest over what a difference gave.
        What an engine or a trainer holds after loading them is for it to say: it computes a digest of its own.

        Raises:
            ObjectMissing: the version does not exist.
            DigestMismatch: an object or the weights are not those that were committed.
        """
        chain: list[Commit] = []
        at = version
        while at != self._version:
            commit = self._commit(at)
            chain.append(commit)
            if commit.weights.kind == "full":
                break
            if commit.weights.base is None:
                raise ProtocolError(f"commit {at}: weights are a difference without a base")
            at = commit.weights.base
        weights, digest = self._weights, self._digest
        for commit in reversed(chain):
            weights, digest = self._step(commit, weights, digest), commit.weights.digest
        self._version, self._weights, self._digest = version, weights, digest
        return weights, digest

    def _step(self, commit: Commit, base: Weights, base_digest: str) -> Weights:
        body = get_object(self._store, next(o for o in commit.weights.objects if o.key.endswith(".safetensors")))
        if commit.weights.kind == "full":
            return weights_from_bytes(body)
        delta = delta_from_bytes(body)
        if delta.digest != commit.weights.digest:
            raise DigestMismatch(
                f"weights of version {commit.version}: expected digest {commit.weights.digest}, the difference gives"
                f" {delta.digest}"
            )
        return apply_delta(base, delta, base_digest=base_digest)  # which proves its result

    def _commit(self, version: int) -> Commit:
        known = self._newest()
        commit = known if known is not None and known.version == version else self._commits.read(version)
        if commit is None:
            raise ObjectMissing(f"version {version} does not exist in {self._store.url}")
        return commit
