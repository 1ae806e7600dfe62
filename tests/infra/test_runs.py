import pytest

from data_contracts.errors import ConfigError
from infra.runs import create_run, find_run, list_run_ids, load_run
from infra.store import open_store
from tests.harness import tiny_config


def test_a_run_is_found_again_by_its_id_and_made_only_once(tmp_path):
    config = tiny_config(str(tmp_path))
    made = create_run(config, "a-run_1.5")
    assert load_run(made.store.url).config == config
    assert list_run_ids(open_store(str(tmp_path))) == ["a-run_1.5"]
    with pytest.raises(ConfigError, match="run a-run_1.5: exists already"):
        create_run(config, "a-run_1.5")


@pytest.mark.parametrize("run_id", ["Bad ID", "../up", "a/b", ".hidden", "x" * 101])
def test_an_id_that_is_no_name_of_a_folder_is_refused_before_anything_is_written(tmp_path, run_id):
    config = tiny_config(str(tmp_path / "store"))
    with pytest.raises(ConfigError, match="run id .*: expected letters"):
        create_run(config, run_id)
    assert not list(tmp_path.rglob("run.json"))


def test_the_beginning_of_an_id_means_the_run_and_not_its_replays(tmp_path):
    config = tiny_config(str(tmp_path))
    for run_id in ("tiny-59aa", "tiny-59aa-replay-1b", "tiny-70bb"):
        create_run(config, run_id)
    assert find_run("tiny-5", str(tmp_path)).id == "tiny-59aa"
    assert find_run("tiny-59aa-r", str(tmp_path)).id == "tiny-59aa-replay-1b"
    with pytest.raises(ConfigError, match="several runs begin so"):
        find_run("tiny", str(tmp_path))
    with pytest.raises(ConfigError, match="no such run"):
        find_run("huge", str(tmp_path))
