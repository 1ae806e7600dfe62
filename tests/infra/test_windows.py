import random
from uuid import uuid4

import pytest

from data_contracts.records import BatchRef, Curated, Raw, Scored
from infra.log import Log
from infra.store import Store, open_store
from infra.windows import Windows

BATCH = BatchRef(key="batch/0.arrow", num_bytes=1, sha256="0", num_rows=1)


@pytest.fixture
def run() -> Store:
    return open_store(f"memory://{uuid4().hex}").at("run")


def write_raw_and_scored(run: Store, writer: str, number: int) -> None:
    Log(run, f"log/raw/{writer}", Raw).append(number, Raw(writer=writer, nonce=f"raw {number}", batch=BATCH, groups=()))
    scored = Scored(writer="v", nonce=f"scored {writer} {number}", rollout=writer, batch=BATCH, groups=())
    Log(run, f"log/scored/{writer}", Scored).append(number, scored)


def write_history(run: Store, num_curated: int, seed: int) -> None:
    """Curated records that each deal with a few records of some of three writers, who join one after the other."""
    chance = random.Random(seed)
    covered = {"a": 0, "b": 0, "c": 0}
    for number in range(num_curated):
        covers = {}
        for i, writer in enumerate(covered):
            count = chance.choice((0, 0, 1, 2)) if number >= 5 * i else 0
            for _ in range(count):
                write_raw_and_scored(run, writer, covered[writer])
                covered[writer] += 1
            if count:
                covers[writer] = covered[writer]
        record = Curated(
            writer="c", nonce=f"curated {number}", verdicts=(), covers=covers, num_accepted=0, num_refused=0
        )
        Log(run, "log/curated", Curated).append(number, record)


def everything(run: Store) -> list[str]:
    kinds = {"curated": Curated, "raw": Raw, "scored": Scored}
    keys = [key for key in run.list("log") if key.split("/")[1] in kinds]
    return sorted(kinds[key.split("/")[1]].model_validate_json(run.get(key)).nonce for key in keys)


@pytest.mark.parametrize("restarts", [False, True])
def test_every_record_falls_to_exactly_one_version(run: Store, make_commit, restarts: bool):
    write_history(run, num_curated=30, seed=3)
    commits = [make_commit(version, positions={"curated": min(30, 4 * version)}) for version in range(9)]
    windows = Windows(run)
    found: list[list[str]] = []
    for before, commit in zip([None, *commits], commits, strict=False):
        windows = Windows(run) if restarts else windows
        found.append([record.nonce for record in windows.read(before, commit)])
    assert sorted(nonce for window in found for nonce in window) == everything(run)
    assert len(everything(run)) > 60
    assert found[0] == [], "no one had worked before version 0"
    assert [f"curated {n}" for n in range(4, 8)] == [nonce for nonce in found[2] if nonce.startswith("curated")]


def test_a_window_read_twice_is_the_same(run: Store, make_commit):
    write_history(run, num_curated=12, seed=5)
    before, commit = make_commit(1, positions={"curated": 6}), make_commit(2, positions={"curated": 12})
    windows = Windows(run)
    first = windows.read(before, commit)
    assert windows.read(before, commit) == first
    assert len(first) > 6


def test_a_commit_that_says_nothing_has_no_window(run: Store, make_commit):
    write_history(run, num_curated=3, seed=1)
    assert Windows(run).read(make_commit(0), make_commit(1)) == []
