"""A run asks a cluster for its workers before it begins, on a real scheduler with real workers."""

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ConfigError
from infra.cluster import OFFERED, Offer, assign, check_cluster, connect, read_offers, resource_of

ROLES = ("train", "rollout", "start", "reward")

Make = Callable[[Mapping[str, Mapping[str, float]]], str]


@pytest.fixture(scope="module")
def make_cluster() -> Iterator[Make]:
    """Return a function that starts a scheduler and workers by name and resources, and returns its address."""
    started: list[SpecCluster] = []

    def make(workers: Mapping[str, Mapping[str, float]], nthreads: int = 1) -> str:
        options = {"nthreads": nthreads, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
        cluster = SpecCluster(
            scheduler={
                "cls": Scheduler,
                "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"},
            },
            workers={
                name: {"cls": Worker, "options": {**options, "resources": dict(resources)}}
                for name, resources in workers.items()
            },
            silence_logs=50,
        )
        started.append(cluster)
        return cluster.scheduler_address

    yield make
    for cluster in started:
        cluster.close()


@pytest.fixture(scope="module")
def whole(make_cluster: Make) -> str:
    return make_cluster({"t": {"TRAIN": 1}, "r": {"ROLLOUT": 1}, "a": {"ROLE": 1}, "b": {"ROLE": 1}})


def test_a_cluster_with_a_worker_for_every_role_passes(whole: str) -> None:
    check_cluster(whole, ROLES, patience_s=5)


@pytest.mark.parametrize(
    ("roles", "resource", "sentence"),
    [
        ((*ROLES, "train"), "TRAIN", "expected 2 free worker.* that offer TRAIN, got 1; none for train;"),
        (
            (*ROLES, "rollout", "rollout"),
            "ROLLOUT",
            "expected 3 free worker.* that offer ROLLOUT, got 1; none for rollout;",
        ),
        (
            (*ROLES, "curate", "audit"),
            "ROLE",
            "expected 4 free worker.* that offer ROLE, got 2; none for curate, audit;",
        ),
    ],
)
def test_a_lacking_worker_is_named_with_the_command_that_starts_one(
    whole: str, roles: tuple[str, ...], resource: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{sentence}.*dask worker {whole} --nthreads 1 --resources {resource}=1"):
        check_cluster(whole, roles, patience_s=0)


def test_a_worker_that_is_at_work_is_not_free(whole: str, tmp_path: Path) -> None:
    with Client(whole, set_as_default=False) as client:
        task = client.submit(work_until, str(tmp_path / "release"), resources={"ROLLOUT": 1}, pure=False)
        while not (tmp_path / "release.begun").exists():  # until then the worker is free
            assert task.status == "pending"
            time.sleep(0.02)
        with pytest.raises(ConfigError, match=r"offer ROLLOUT, got 0 \(1 more busy\); none for rollout"):
            check_cluster(whole, ROLES, patience_s=0)
        (tmp_path / "release").touch()
        task.result(30)
    check_cluster(whole, ROLES, patience_s=5)


def work_until(path: str) -> None:
    Path(f"{path}.begun").touch()
    while not Path(path).exists():
        time.sleep(0.02)


def test_a_worker_that_would_play_two_roles_in_one_process_is_refused(make_cluster: Make) -> None:
    address = make_cluster({"many": {"ROLE": 4}}, nthreads=4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match="would play 4 roles at once, but every role needs a process of its own"):
        check_cluster(address, ("reward",), patience_s=0)


def test_a_worker_that_can_play_anything_plays_one_role_at_a_time(make_cluster: Make) -> None:
    address = make_cluster({"x": dict.fromkeys(OFFERED, 1), "y": {"ROLE": 1}})
    check_cluster(address, ("reward", "train"), patience_s=0)
    with pytest.raises(ConfigError, match="offer ROLLOUT, got 0"):
        check_cluster(address, ("train", "reward", "rollout"), patience_s=0)


def test_workers_without_our_resources_are_no_offers(make_cluster: Make) -> None:
    with connect(make_cluster({"other": {"GPU": 1}, "none": {}, "ours": {"TRAIN": 1}})) as client:
        (offer,) = read_offers(client)
    assert offer.resources == {"TRAIN"}
    assert offer.is_free


def test_an_address_where_nothing_answers_is_named() -> None:
    with pytest.raises(ConfigError, match="tcp://127.0.0.1:9: no Dask scheduler answers there"):
        check_cluster("tcp://127.0.0.1:9", ROLES, patience_s=0)


OFFERS = st.lists(st.sets(st.sampled_from(OFFERED), min_size=1), max_size=4).map(
    lambda kinds: [Offer(f"w{i}", frozenset(kind), is_free=True) for i, kind in enumerate(kinds)]
)
NAMES = st.lists(st.sampled_from(["train", "rollout", "reward"]), max_size=4)


def most_placed(roles: list[str], offers: list[Offer]) -> int:
    """Try every way to give each role a worker or none."""
    workers = [None, *offers]
    best = 0
    for chosen in product(workers, repeat=len(roles)):
        taken = [offer.worker for offer in chosen if offer]
        fits = all(o is None or resource_of(r) in o.resources for r, o in zip(roles, chosen, strict=True))
        if fits and len(taken) == len(set(taken)):
            best = max(best, len(taken))
    return best


@settings(deadline=None)
@given(NAMES, OFFERS)
def test_as_many_roles_as_can_be_get_a_fitting_worker_of_their_own(roles: list[str], offers: list[Offer]) -> None:
    placed = assign(roles, offers)
    resources = {offer.worker: offer.resources for offer in offers}
    assert len(set(placed.values())) == len(placed)
    assert all(resource_of(roles[i]) in resources[worker] for i, worker in placed.items())
    assert len(placed) == most_placed(roles, offers)


@settings(deadline=None)
@given(NAMES, OFFERS, st.data())
def test_further_roles_take_no_worker_from_earlier_ones(roles: list[str], offers: list[Offer], data) -> None:
    num = data.draw(st.integers(0, len(roles)))
    assert set(assign(roles[:num], offers)) <= set(assign(roles, offers))
