"""One offline HTML page about a run, from its records alone: no network, no server, nothing to install."""

from collections.abc import Mapping
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template

from dashboards import accounts, sections
from dashboards.quality import data_quality
from dashboards.snapshot import Snapshot, snapshot
from infra import data_docs
from infra.store import Store

TEMPLATE = Path(__file__).with_name("template.html")


def write_report(store: Store, path: Path, links: Mapping[str, str] | None = None) -> Path:
    """Write the report of a run and its Data Docs to disk, and into the store; return the page's path.

    Args:
        store: view below the run's prefix.
        path: file to write; its folder exists. Data Docs go into a folder beside it.
        links: name to URL (absolute, or relative to the page), shown at the end.

    Raises:
        StoreError: the store does not answer. A record that cannot be read is reported on the page instead.
        OSError: a file cannot be written.
    """
    run = snapshot(store)
    has_docs = bool(run.quality.rules) and data_docs.publish(store)
    folder = path.with_name(f"{path.stem}-data-docs")
    if has_docs:
        data_docs.copy_site(store, folder)
    page = render_report(run, links, f"{folder.name}/index.html" if has_docs else "")
    path.write_text(page, encoding="utf-8")
    beside_records = render_report(run, links, f"{data_docs.FOLDER}/index.html" if has_docs else "")
    store.put("report.html", beside_records.encode())
    return path


def render_report(run: Snapshot, links: Mapping[str, str] | None = None, docs: str = "") -> str:
    """Return the page; `docs` is the URL of its Data Docs, relative to it."""
    parts = (
        accounts.header(run),
        sections.learning(run),
        sections.freshness(run),
        sections.throughput(run),
        sections.training(run),
        accounts.books(run),
        data_quality(run.quality, docs),
        accounts.examples(run),
        accounts.version_table(run),
        accounts.history(run),
        accounts.configuration(run),
        accounts.going_on(run, links or {}),
        f"<footer>Written by Rollflow {_own_version()} from the records of the run alone.</footer>",
    )
    title = escape(f"{run.run}: {run.state}")
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(title=title, body="\n".join(filter(None, parts)))


def _own_version() -> str:
    try:
        return version("rollflow")
    except PackageNotFoundError:
        return ""
