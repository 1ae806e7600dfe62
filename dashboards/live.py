"""The live line: how a run goes, on one line of a terminal, redrawn as records arrive.

Not a terminal: a new line every few seconds, so that logs of a scheduler stay readable. The run does not notice
whether anybody looks.
"""

import time
from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dashboards.plots import format_number
from dashboards.snapshot import RunReader, Snapshot, headline
from data_contracts.errors import StoreError
from infra.store import Store

LOOK_S = 0.25
"""Seconds between two looks at the records on a terminal."""

LINE_S = 5.0
"""Seconds between two lines where the output is not a terminal."""

GAP = "  "

Part = tuple[int, str, str]
"""(rank, long form, short form): on a narrow terminal the parts of high rank get short first, then they go."""


def follow(
    store: Store,
    links: Mapping[str, str],
    stop: Callable[[], bool],
    *,
    console: Console | None = None,
    line_s: float = LINE_S,
) -> Snapshot | None:
    """Show how a run goes until `stop` says True; return how it stands then.

    Args:
        store: view below the run's prefix.
        links: name to URL, shown under the line on a terminal.
        stop: asked about four times a second.
        line_s: seconds between lines where the output is not a terminal.

    A store that does not answer is shown, not raised: the last answer stays on the line. None when it never did.
    """
    console = console or Console()
    watcher = _Watcher(RunReader(store))
    if console.is_terminal:
        return _follow_redrawing(watcher, links, stop, console)
    return _follow_in_lines(watcher, stop, console, line_s)


class _Watcher:
    """Looks at a run, and keeps the last answer while the store gives none."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self.run: Snapshot | None = None
        self.trouble = ""

    def look(self) -> Snapshot | None:
        try:
            self.run, self.trouble = self._reader.refresh(), ""
        except StoreError as error:
            self.trouble = f"store does not answer: {error}"
        return self.run

    def line(self, width: int) -> str:
        found = parts(self.run) if self.run else [(0, "waiting for the first record", "waiting")]
        if self.trouble:
            found = [(0, self.trouble, "store does not answer"), *found]
        return fit(found, width)


def _follow_redrawing(
    watcher: _Watcher, links: Mapping[str, str], stop: Callable[[], bool], console: Console
) -> Snapshot | None:
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            is_last = stop()  # asked before the look, so that the last look sees the end
            run = watcher.look()
            line = Text(watcher.line(console.width - 1), no_wrap=True, overflow="ellipsis")
            below = [] if is_last else [_links(links)] if links else []
            live.update(Group(_bar(run, console.width), line, *below), refresh=True)
            if is_last:
                return run
            time.sleep(LOOK_S)


def _follow_in_lines(watcher: _Watcher, stop: Callable[[], bool], console: Console, line_s: float) -> Snapshot | None:
    shown, shown_at = "", float("-inf")
    while True:
        is_last = stop()
        if is_last or time.monotonic() - shown_at >= line_s:
            watcher.look()
            line = watcher.line(10_000)
            if line != shown:
                console.print(line, soft_wrap=True, markup=False, highlight=False)
            shown, shown_at = line, time.monotonic()
        if is_last:
            return watcher.run
        time.sleep(min(LOOK_S, line_s))


def parts(run: Snapshot) -> list[Part]:
    """Return what the line says, in reading order."""
    if run.step < 0:
        doing = next((use.state for use in reversed(run.roles.values()) if use.alive), "")
        return [(0, f"starting: {doing}" if doing else "starting", "starting")]
    found: list[Part] = []
    if run.state != "running":
        found.append((0, run.state, run.state))
    steps = f"/{run.steps}" if run.steps else ""
    found.append((0, f"step {run.step}{steps}", f"{run.step}{steps}"))
    if run.reward is not None:
        found.append((1, f"reward {run.reward:.3f}", f"reward {run.reward:.2f}"))
    top = headline(run.evaluations[-1]) if run.evaluations else None
    if top:
        version = run.evaluations[-1].version
        found.append((3, f"eval {top[1]:.3f} at step {version}", f"eval {top[1]:.2f}@{version}"))
    found += _staleness(run) + _rates(run)
    queues = run.queues
    waiting = queues.raw + queues.scored
    found.append(
        (
            6,
            f"groups {queues.claimed} out {waiting} waiting {queues.accepted} ready",
            f"queue {queues.claimed}>{waiting}>{queues.accepted}",
        )
    )
    if run.eta_s is not None:
        found.append((2, f"left {format_clock(run.eta_s)}", f"left {format_clock(run.eta_s)}"))
    return found


def fit(found: list[Part], width: int) -> str:
    """Return the parts as one line of at most `width` columns: as many as fit, the important ones in their long form.

    >>> fit([(0, "step 3/40", "3/40"), (1, "reward 0.512", "reward 0.51")], 22)
    'step 3/40  reward 0.51'
    """
    kept = list(found)
    while len(kept) > 1 and len(GAP.join(short for _, _, short in kept)) > width:
        kept.remove(max(kept, key=lambda part: part[0]))
    texts = [short for _, _, short in kept]
    for i in sorted(range(len(kept)), key=lambda i: kept[i][0]):
        longer = [*texts[:i], kept[i][1], *texts[i + 1 :]]
        if len(GAP.join(longer)) <= width:
            texts = longer
    return GAP.join(texts)[:width]


def format_clock(seconds: float) -> str:
    """Return minutes and seconds, or hours too.

    >>> [format_clock(s) for s in (8, 95, 4000)]
    ['0:08', '1:35', '1:06:40']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _staleness(run: Snapshot) -> list[Part]:
    """Mean and largest age of the newest step's tokens."""
    last = next((v for v in reversed(run.versions) if v.staleness), None)
    if last is None:
        return []
    mean = last.metrics.get("staleness/mean")
    if mean is None:
        mean = sum(age * n for age, n in last.staleness.items()) / sum(last.staleness.values())
    largest = last.max_staleness or 0
    return [(4, f"staleness {mean:.1f} max {largest:.0f}", f"stale {mean:.1f}/{largest:.0f}")]


def _rates(run: Snapshot) -> list[Part]:
    rates = [(role, run.roles[role].tokens_per_s) for role in ("rollout", "train") if role in run.roles]
    told = [(role, rate) for role, rate in rates if rate is not None]
    if not told:
        return []
    long = " ".join(f"{role} {format_number(round(rate))}" for role, rate in told)
    return [(5, f"{long} tok/s", "/".join(format_number(round(rate)) for _, rate in told) + " tok/s")]


def _bar(run: Snapshot | None, width: int) -> Text:
    """A thin bar of what is done."""
    share = max(run.step, 0) / run.steps if run and run.steps else 0.0
    done = round(min(share, 1.0) * (width - 1))
    colour = {"failed": "red", "stopped": "yellow", "silent": "yellow"}.get(run.state if run else "", "green")
    return Text.assemble(
        ("━" * done, colour), ("━" * (width - 1 - done), "bright_black"), no_wrap=True, overflow="crop"
    )


def _links(links: Mapping[str, str]) -> Text:
    text = Text(style="bright_black", no_wrap=True, overflow="ellipsis")
    for name, url in links.items():
        text.append(f"{name} ").append(url, style=f"link {url}").append(GAP)
    return text
