"""A study runs every cell once, goes on where it stopped, and its cells are exactly as stale as they say."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dashboards.study import Results, is_done, read_outcomes, write_study
from data_contracts.errors import ConfigError
from data_contracts.records import Commit
from data_contracts.study import Cell, StudyConfig
from flows.lockstep import run_in_lockstep
from flows.study import (
    EXPORTED,
    SHIPPED,
    check_cell,
    copy_version_0,
    export_cell,
    is_open,
    load_study,
    play_cell,
    warm_up,
)
from infra.log import Log
from infra.objects import get_batch
from infra.runs import Run, create_run, load_run
from infra.store import open_store
from tasks.envs.registry import build_envs
from tests.harness import TINY, Processes, tiny_config

STUDY = StudyConfig.model_validate(
    {
        "name": "smoke",
        "presets": ["grpo", "vcpo"],
        "staleness": [0, 2],
        "seeds": [3],
        "run": {k: v for k, v in TINY.items() if k not in ("name", "staleness")} | {"steps": 4},
        "overrides": {"vcpo": {"train": {"learning_rate": 5e-4}}},
    }
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("study"))
    warm_up(STUDY, url)
    for cell in STUDY.cells():
        play_cell(STUDY, cell, url)
    return url


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def commits(url: str, cell: Cell) -> list[Commit]:
    return Log(open_store(url).at(STUDY.run_id(cell)), "log/commit", Commit).read_from(0)


def test_every_cell_is_done_and_evaluated_to_its_end(played: str) -> None:
    outcomes = read_outcomes(STUDY, open_store(played))
    assert set(outcomes) == set(STUDY.cells())
    assert all(max(outcome.curve) == 4 and not outcome.failure for outcome in outcomes.values())


def test_all_cells_begin_from_one_version_0(played: str) -> None:
    assert len({commits(played, cell)[0].weights.digest for cell in STUDY.cells()}) == 1
    assert len({commits(played, cell)[-1].weights.digest for cell in STUDY.cells()}) == 4


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_group_is_exactly_as_old_as_its_cell_says(played: str, staleness: int) -> None:
    for commit in commits(played, Cell("grpo", staleness, 3))[1:]:
        assert set(commit.histograms["staleness/tokens"]) == {str(min(staleness, commit.version - 1))}


def test_no_prompt_is_handed_out_twice_when_no_group_was_refused(played: str) -> None:
    cell = Cell("grpo", 2, 3)
    store = open_store(played).at(STUDY.run_id(cell))
    envs = build_envs(STUDY.run_config(cell, played).envs, cell.seed)
    for commit in commits(played, cell)[1:]:
        for group in commit.consumed:
            row = get_batch(store, group.batch, "scored").slice(group.group.first_row, 1)
            assert row.column("prompt_id").to_pylist() == [envs.prompt_for(group.ticket).id]


def test_overrides_reach_their_preset_alone(played: str) -> None:
    rates = {p: commits(played, Cell(p, 0, 3))[1].metrics["optimizer/learning_rate"] for p in STUDY.presets}
    assert rates["grpo"] == pytest.approx(1e-3)
    assert 0 < rates["vcpo"] <= 5e-4


def test_a_cell_that_was_cut_short_is_begun_again(played: str) -> None:
    cell = Cell("grpo", 2, 3)
    store = open_store(played).at(STUDY.run_id(cell))
    digests = [commit.weights.digest for commit in commits(played, cell)]
    for key in store.list("log/control"):
        store.delete(key)
    assert not is_done(store)
    play_cell(STUDY, cell, played)
    assert [commit.weights.digest for commit in commits(played, cell)] == digests


def test_a_played_cell_stays_open_until_it_is_in_mlflow(
    played: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell("vcpo", 0, 3)
    store = open_store(played).at(STUDY.run_id(cell))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    export_cell(STUDY, cell, load_run(store.url))
    assert "is not in MLflow: MLflow at http://127.0.0.1:9 does not answer" in capsys.readouterr().err
    assert is_done(store)
    assert is_open(store)
    store.put_new(EXPORTED, b"{}")
    assert not is_open(store)


def test_a_cell_that_another_plays_is_waited_for_and_not_played_again(tmp_path: Path) -> None:
    url = str(tmp_path)
    warm_up(STUDY, url)
    cell = Cell("grpo", 0, 3)
    with ThreadPoolExecutor(2) as both:
        runs = list(both.map(lambda _: play_cell(STUDY, cell, url), range(2)))
    assert {run.id for run in runs} == {STUDY.run_id(cell)}
    assert [commit.version for commit in commits(url, cell)] == [0, 1, 2, 3, 4]
    assert len({commit.writer for commit in commits(url, cell)[1:]}) == 1


def test_weights_in_between_are_not_kept(played: str) -> None:
    store = open_store(played).at(STUDY.run_id(Cell("grpo", 0, 3)))
    assert {key.split("/")[1].split("-")[0] for key in store.list("policy")} == {"0000000000", "0000000004"}


def test_the_report_has_a_row_for_every_preset_and_says_what_is_done(played: str, tmp_path: Path) -> None:
    page = write_study(STUDY, open_store(played), tmp_path)
    table = page.with_suffix(".md").read_text()
    assert "4 of 4 runs done" in table
    score = Results(STUDY, read_outcomes(STUDY, open_store(played))).final("vcpo", 2)
    assert f"| vcpo | {Results(STUDY, read_outcomes(STUDY, open_store(played))).final('vcpo', 0)} | {score} |" in table
    html = page.read_text()
    assert html.count("<figure") >= 6
    assert "NaN" not in html


def test_processes_and_lockstep_give_the_same_bits_at_an_exact_staleness(tmp_path: Path) -> None:
    staleness = {"max_staleness": 2, "exact": True, "lease_s": 30.0}
    apart, together = (
        create_run(tiny_config(str(tmp_path), staleness=staleness, steps=5), name) for name in ("apart", "together")
    )
    assert apart.config.is_deterministic
    for _ in run_in_lockstep(together):
        pass
    copy_version_0(together.store, apart.store)
    processes = Processes()
    try:
        processes.join(processes.start_all(apart, ("train", "rollout", "reward", "curate")))
    finally:
        processes.kill_all()
    for one, other in zip(commits_of(together), commits_of(apart), strict=True):
        assert one.weights.digest == other.weights.digest, one.version
        assert one.histograms.get("staleness/tokens") == other.histograms.get("staleness/tokens")


def test_a_step_may_be_larger_than_the_engine(tmp_path: Path) -> None:
    engine = {"type": "torch", "slots": 8, "max_length": 16}
    run = create_run(tiny_config(str(tmp_path), rollout={"engine": engine}, steps=2))
    assert run.config.groups_per_step * run.config.samples_per_group > 8
    assert list(run_in_lockstep(run)) == [1, 2]


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_study_is_valid(path: Path) -> None:
    study = load_study(path.stem)
    for cell in study.cells():
        check_cell(study, cell, "memory://study")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('name = "x"\npresets = ["gspoo"]\nstaleness = [0]\nseeds = [0]', "did you mean gspo"),
        ('name = "x"\npresets = ["grpo"]\nstaleness = [0]\nseeds = [0]\n[run]\nseed = 3', "set by the grid"),
        ('name = "x"\npresets = ["grpo"]\nstaleness = [0]\nseeds = [0]\n[overrides.gspo]\nsteps = 3', "no effect"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_wrong_study_is_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_study(str(path))


def test_a_field_that_no_run_has_is_named(tmp_path: Path) -> None:
    study = STUDY.model_copy(update={"run": {"stepz": 3}})
    with pytest.raises(ConfigError, match="stepz"):
        check_cell(study, Cell("grpo", 0, 0), str(tmp_path))
