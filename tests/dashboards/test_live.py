import io
import re
import threading

import pytest
from rich.console import Console

from dashboards.live import fit, follow, parts
from dashboards.snapshot import RunReader, snapshot
from data_contracts.errors import StoreError
from infra.store import Store
from infra.store_memory import MemoryObjects
from tests.dashboards.build_run import build_run

LINKS = {"Prefect": "http://127.0.0.1:4200", "MLflow": "http://127.0.0.1:5000"}


class Console100:
    """A terminal, or a pipe, of 100 columns whose output can be read."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=is_terminal, width=100, height=20, color_system=None)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\", "", self.file.getvalue())


def after(looks: int):
    """Say stop at the given look."""
    left = iter([False] * (looks - 1))
    return lambda: next(left, True)


def going(root: Store, name: str = "going"):
    store = root.at(name)
    builder = build_run(store, until=27, end="")
    return RunReader(store, now=lambda: builder.clock + 1).refresh()


def test_the_line_fits_every_terminal(root):
    found = parts(going(root))
    for width in range(6, 200):
        line = fit(found, width)
        assert 0 < len(line) <= width
        assert "27/40" in line


def test_a_wide_terminal_is_told_everything(root):
    line = fit(parts(going(root)), 200)
    for needed in (
        "step 27/40",
        "reward 0.",
        "eval 0.",
        "at step 20",
        "staleness ",
        " max ",
        "rollout ",
        "train ",
        "tok/s",
    ):
        assert needed in line
    assert "groups 0 out 0 waiting 1 ready" in line
    assert re.search(r"left 0:\d\d$", line)


def test_a_hundred_columns_hold_every_part(root):
    found = parts(going(root))
    line = fit(found, 100)
    assert len(line) <= 100
    assert all(long in line or short in line for _, long, short in found)


def test_a_narrow_terminal_is_told_what_matters(root):
    line = fit(parts(going(root)), 34)
    assert line.startswith("step 27/40") or line.startswith("27/40")
    assert "reward" in line
    assert "tok/s" not in line


def test_a_run_that_ended_says_how(root):
    store = root.at("failed")
    build_run(store, until=5, end="fail")
    assert fit(parts(snapshot(store)), 100).startswith("failed  step 5/40")


def test_before_the_first_version_the_line_says_what_is_done(root):
    assert fit(parts(snapshot(root.at("nothing"))), 100) == "starting"


def test_piped_output_is_lines_without_control_characters(finished):
    seen = Console100(is_terminal=False)
    run = follow(finished, LINKS, after(3), console=seen.console, line_s=0.0)
    assert run is not None
    assert run.step == 40
    assert "\x1b" not in seen.file.getvalue()
    assert seen.text.count("\n") == 1  # nothing new, no new line
    assert seen.text.startswith("finished  step 40/40  reward ")


def test_piped_output_gets_a_line_when_something_happened(root):
    store = root.at("going")
    builder = build_run(store, until=3, end="")
    seen = Console100(is_terminal=False)

    def stop() -> bool:
        version = len(RunReader(store).refresh().versions)
        if version < 6:
            builder.step(version)
        return version >= 6

    follow(store, LINKS, stop, console=seen.console, line_s=0.0)
    assert re.findall(r"step (\d)/40", seen.text) == ["4", "5"]


def test_a_terminal_shows_one_line_the_bar_and_the_links(finished):
    seen = Console100(is_terminal=True)
    follow(finished, LINKS, after(2), console=seen.console)
    assert "finished  step 40/40" in seen.text
    assert "━" * 99 in seen.text
    assert "Prefect http://127.0.0.1:4200" in seen.text
    assert "MLflow http://127.0.0.1:5000" in seen.text
    assert max(map(len, seen.text.replace("\r", "\n").split("\n"))) <= 100


def test_the_last_look_is_after_the_stop(root):
    store = root.at("going")
    builder = build_run(store, until=3, end="")

    def stop() -> bool:
        builder.append("log/control", builder.control("end"))
        return True

    run = follow(store, LINKS, stop, console=Console100(is_terminal=False).console)
    assert run is not None
    assert run.state == "finished"


class FlakyObjects(MemoryObjects):
    """Memory that can be away."""

    is_away = False

    def get_many(self, keys):
        if self.is_away:
            raise StoreError("memory://flaky: connection refused")
        return super().get_many(keys)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_store_that_is_away_is_told_and_the_last_answer_stays(is_terminal):
    objects = FlakyObjects("flaky")
    store = Store(objects, "memory://flaky").at("run")
    build_run(store, until=3, end="end")
    seen = Console100(is_terminal=is_terminal)
    looks = iter([False, False, True])

    def stop() -> bool:
        is_last = next(looks)
        objects.is_away = is_last
        return is_last

    run = follow(store, LINKS, stop, console=seen.console, line_s=0.0)
    assert run is not None
    assert run.step == 3
    assert "store does not answer" in seen.text
    assert seen.text.count("3/40") > 1


def test_a_store_that_never_answers_does_not_end_the_watching():
    objects = FlakyObjects("never")
    objects.is_away = True
    store = Store(objects, "memory://never").at("run")
    seen = Console100(is_terminal=False)
    assert follow(store, LINKS, after(2), console=seen.console, line_s=0.0) is None
    assert "waiting for the first record" in seen.text


def test_watching_ends_when_it_is_told_to(finished):
    stopped = threading.Event()
    seen = Console100(is_terminal=False)
    watching = threading.Thread(target=follow, args=(finished, LINKS, stopped.is_set), kwargs={"console": seen.console})
    watching.start()
    stopped.set()
    watching.join(timeout=10)
    assert not watching.is_alive()
