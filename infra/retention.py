"""What a run's store can do without: objects that no record names and, if so wished, weights nobody comes back to.

Removed is only what no commit, no replay, no recovery and no promotion needs:

- orphans: batches, weights, checkpoints, snapshots and curriculum states that a process wrote before it died, and
  whose record was never appended;
- with `weights`: published weights of versions that are neither the first nor the last, have no checkpoint, were or
  will be neither evaluated nor registered, are not after the last checkpoint, and are no base of a version that stays.

Records (the log of the audit among them), batches that records name (so those that later tickets use again),
curriculum states that commits name, checkpoints and quarantine always stay: a replay gives the same bits afterwards.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_contracts.config import RunConfig
from data_contracts.records import Commit, Control, Curated, Evaluation, ObjectRef, Raw, Scored
from infra.history import is_registered
from infra.log import Log
from infra.store import Store

FOLDERS = ("batch", "policy", "checkpoint", "snapshot", "curriculum")
"""Where objects lie that only a record makes part of the run."""


@dataclass(frozen=True)
class Removable:
    """An object that can go.

    Attributes:
        key: below the run's prefix.
        num_bytes: its length.
        why: in words.
    """

    key: str
    num_bytes: int
    why: str


def find_removable(store: Store, config: RunConfig, *, weights: bool = False) -> list[Removable]:
    """Return what can be removed from a run on which nobody works, by key.

    Args:
        store: view below the run's prefix.
        config: of the run.
        weights: also find weights of versions that nobody comes back to.
    """
    commits = Log(store, "log/commit", Commit).read_from(0)
    named = set(_named(store, commits))
    there = [key for folder in FOLDERS for key in store.list(folder)]
    found = [Removable(key, _size(store, key), "no record names it") for key in there if key not in named]
    if weights:
        exists = set(there)
        kept = versions_to_keep(commits, Log(store, "log/eval", Evaluation).read_from(0), config)
        for commit in commits:
            if commit.version not in kept:
                why = f"weights of version {commit.version}"
                found += [Removable(o.key, o.num_bytes, why) for o in commit.weights.objects if o.key in exists]
    return sorted(found, key=lambda removable: removable.key)


def versions_to_keep(commits: list[Commit], evaluations: Iterable[Evaluation], config: RunConfig) -> set[int]:
    """Return the versions whose published weights somebody may come back to, bases of differences included."""
    if not commits:
        return set()
    newest = commits[-1]
    kept = {0, *range(newest.checkpoint_version, newest.version + 1)}
    kept |= {commit.version for commit in commits if commit.checkpoint}
    kept |= {evaluation.version for evaluation in evaluations}
    kept |= {c.version for c in commits if is_registered(c.version, config) or c.version % config.evaluate.every == 0}
    for commit in reversed(commits):
        if commit.version in kept and commit.weights.base is not None:
            kept.add(commit.weights.base)
    return kept


def remove(store: Store, removables: Iterable[Removable]) -> int:
    """Remove objects; return how many bytes they had. Repeating it after a crash is harmless."""
    num_bytes = 0
    for removable in removables:
        store.delete(removable.key)
        num_bytes += removable.num_bytes
    return num_bytes


def _named(store: Store, commits: Iterable[Commit]) -> Iterable[str]:
    """Yield the key of every object that any record names."""
    for commit in commits:
        for consumed in commit.consumed:
            yield consumed.batch.key
            yield from (joined.batch.key for joined in consumed.group.joined)
        for reference in (*commit.weights.objects, *(commit.checkpoint or ()), commit.curriculum, commit.snapshot):
            if isinstance(reference, ObjectRef):
                yield reference.key
    for record in Log(store, "log/control", Control).read_from(0):
        yield from (ref.key for ref in (record.weights.objects if record.weights else ()))
    for record in Log(store, "log/curated", Curated).read_from(0):
        yield from (verdict.batch.key for verdict in record.verdicts if verdict.batch is not None)
    kinds: dict[str, type[Any]] = {"raw": Raw, "scored": Scored}
    for name, kind in kinds.items():
        for writer in store.at(f"log/{name}").list_folders():
            for record in Log(store, f"log/{name}/{writer}", kind).read_from(0):
                if record.batch is not None:
                    yield record.batch.key


def _size(store: Store, key: str) -> int:
    path = Path(store.url) / key
    return path.stat().st_size if path.is_file() else len(store.get(key))
