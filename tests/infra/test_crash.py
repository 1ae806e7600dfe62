"""Crash points kill exactly where and when they are told to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOP = """
from infra import crash
for n in range(4):
    print(n, flush=True)
    crash.point("loop")
    crash.point("loop.other")
"""


@pytest.mark.parametrize(
    ("wanted", "printed"),
    [
        (None, "0 1 2 3"),
        ("", "0 1 2 3"),
        ("elsewhere", "0 1 2 3"),
        ("loop:5", "0 1 2 3"),
        ("loop", "0"),
        ("loop:1", "0"),
        ("loop:3", "0 1 2"),
        ("loop.other:2", "0 1"),
    ],
)
def test_dies_at_the_kth_passing(wanted: str | None, printed: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("ROLLFLOW_CRASH_POINT", None)
    if wanted is not None:
        environment["ROLLFLOW_CRASH_POINT"] = wanted
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == printed.split()
    assert done.returncode == (0 if printed == "0 1 2 3" else -signal.SIGKILL)
