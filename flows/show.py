"""What `rollflow show` prints: a run's records, or a batch that a person can read."""

import re
from collections.abc import Callable, Sequence

from dashboards.show import show_batch, show_run
from data_contracts.errors import ConfigError, ObjectMissing
from infra.runs import Run, find_run

BATCH = re.compile(r"(?P<run>.+?)/(?:batch/)?(?P<name>[0-9a-f]{6,64})(?:\.arrow)?")


def show_anything(what: str, store_url: str, rows: int) -> None:
    """Show a run, or one of its batches when `what` is RUN/batch/<sha256 or its beginning>.

    Raises:
        ConfigError: neither a run nor a batch is meant by `what`.
    """
    match = BATCH.fullmatch(what)
    if match is None and "/batch/" in what:
        run, _, name = what.partition("/batch/")
        raise ConfigError(
            f"batch {name}: expected a SHA-256, or six of its first digits or more; `rollflow show {run}` names batches"
        )
    if match is None:
        show_run(find_run(what, store_url).store)
        return
    try:
        run = find_run(match["run"], store_url)
    except ConfigError:
        run, match = find_run(what, store_url), None
    if match is None:
        show_run(run.store)
    else:
        show_batch(run.store, match["name"], decoder(run), rows=rows)


def decoder(run: Run) -> Callable[[Sequence[int]], str] | None:
    """Return what turns token ids of a run into text; None when the run has no version 0 yet."""
    from tasks.model_files import read_model_files
    from tasks.prompts import tokenizer_from_files

    try:
        tokenizer = tokenizer_from_files(read_model_files(run.store))
    except ObjectMissing:
        return None
    return lambda ids: str(tokenizer.decode(list(ids)))
