"""Golden numbers: what a small run gives, written down, so that a change of what is computed does not go unseen.

Bits differ between processors, so these are numbers with a tolerance; that a run gives the same bits on one machine is
tested elsewhere (test_recovery.py, test_replay.py). Whoever changes sampling, warm start, losses or the optimizer on
purpose writes down the new numbers, and says why.
"""

from collections.abc import Callable

import pytest
import torch

from data_contracts.records import Commit
from flows.lockstep import run_in_lockstep
from infra.log import Log
from infra.runs import Run

EXPECTED = {
    "reward/mean": [0.4062, 0.4062, 0.375, 0.3438],
    "policy/entropy": [0.4734, 0.4627, 0.5202, 0.4808],
    "optimizer/grad_norm": [1.2349, 1.6254, 1.45, 2.3769],
    "train/tokens": [96.0, 98.0, 98.0, 98.0],
}


def test_a_small_run_gives_the_numbers_written_down(make_run: Callable[..., Run]) -> None:
    threads = torch.get_num_threads()
    run = make_run(steps=4, groups_per_step=8)
    try:
        assert list(run_in_lockstep(run)) == [1, 2, 3, 4]
    finally:
        torch.set_num_threads(threads)
    commits = Log(run.store, "log/commit", Commit).read_from(1)
    found = {name: [commit.metrics[name] for commit in commits] for name in EXPECTED}
    assert found["reward/mean"] == pytest.approx(EXPECTED["reward/mean"], abs=0.07)  # two of 32 samples
    assert found["policy/entropy"] == pytest.approx(EXPECTED["policy/entropy"], rel=0.02)
    assert found["optimizer/grad_norm"] == pytest.approx(EXPECTED["optimizer/grad_norm"], rel=0.1)
    assert found["train/tokens"] == pytest.approx(EXPECTED["train/tokens"], abs=4)
