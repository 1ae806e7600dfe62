"""The small files of a run's model (config, tokenizer), as commit 0 names them. Nothing here needs torch."""

from data_contracts.errors import ObjectMissing
from data_contracts.records import Commit
from infra.log import Log
from infra.objects import get_object
from infra.store import Store


def read_model_files(store: Store) -> dict[str, bytes]:
    """Return the files by name.

    Raises:
        ObjectMissing: there is no commit 0 yet.
    """
    commit = Log(store, "log/commit", Commit).read(0)
    if commit is None:
        raise ObjectMissing(f"version 0 does not exist in {store.url}")
    small = [reference for reference in commit.weights.objects if not reference.key.endswith(".safetensors")]
    return {reference.key.rsplit("/", 1)[1]: get_object(store, reference) for reference in small}
