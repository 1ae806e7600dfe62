"""Data Docs of a run: a folder of pages about the windows that the audit has judged, in the store and on disk.

The site is made from log/audit alone, so it can be made again at any time. That takes seconds, most of them the import
of Great Expectations. So the audit, which has it at hand, leaves the site in the store when it ends, and whoever writes
the report only copies it, unless log/audit has grown since.
"""

import json
from pathlib import Path

from data_contracts.records import Audit
from infra.log import Log
from infra.store import Store

FOLDER = "data_docs"
MADE_FROM = f"{FOLDER}/made_from.json"
MOST_PAGES = 300
"""Windows with a page of their own: the newest, and the newest of those with a violation. The index has all of them."""


def publish(store: Store) -> bool:
    """Make the site of a run and put it into its store, unless it is there; return whether the run has one.

    Args:
        store: view below the run's prefix.
    """
    log = Log(store, "log/audit", Audit)
    number = log.tail()
    if not number:
        return False
    told = json.dumps({"records": number}).encode()
    if store.get_many([MADE_FROM]) == [told]:
        return True
    for name, page in make_site(store.url.rstrip("/").rsplit("/", 1)[1], log.read_from(0, limit=number)).items():
        store.put(f"{FOLDER}/{name}", page.encode())
    store.put(MADE_FROM, told)  # last: a site that is not whole is made again
    return True


def copy_site(store: Store, folder: Path) -> None:
    """Write the site that `publish` has put into the store to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = [key for key in store.list(FOLDER) if key.endswith(".html")]
    for key, page in zip(keys, store.get_many(keys), strict=True):
        if page is not None:
            (folder / key.rsplit("/", 1)[1]).write_bytes(page)


def make_site(run: str, records: list[Audit]) -> dict[str, str]:
    """Return the pages of a site by their names.

    Args:
        run: id that the pages show.
        records: log/audit from its first record on.
    """
    from infra.data_docs_pages import INDEX, Pages  # seconds to import

    newest = range(len(records))[-MOST_PAGES:]
    violated = [number for number, record in enumerate(records) if record.verdict != "passed"][-MOST_PAGES:]
    names = {number: f"window-{number:06}.html" for number in sorted({*newest, *violated})}
    pages = Pages(run)
    site = {name: pages.window(number, records[number]) for number, name in names.items()}
    return site | {INDEX: pages.index(records, names)}
