"""One offline HTML page about a run, from its records alone: no network, no server, nothing to install."""

from collections.abc import Mapping
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from string import Template

from dashboards import accounts, sections
from dashboards.quality import data_quality
from dashboards.snapshot import Snapshot, snapshot
from infra.store import Store

TEMPLATE = Path(__file__).with_name("template.html")


def write_report(store: Store, path: Path, links: Mapping[str, str] | None = None) -> Path:
    """Write the report of a run and return its path.

    Args:
        store: view below the run's prefix.
        path: file to write; its folder exists.
        links: name to URL (absolute, or relative to the page), shown at the end.

    Raises:
        StoreError: the store does not answer. A record that cannot be read is reported on the page instead.
    """
    path.write_text(render_report(snapshot(store), links), encoding="utf-8")
    return path


def render_report(run: Snapshot, links: Mapping[str, str] | None = None) -> str:
    """Return the page."""
    parts = (
        accounts.header(run),
        sections.learning(run),
        sections.freshness(run),
        sections.throughput(run),
        sections.training(run),
        accounts.books(run),
        data_quality(run.quality),
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
