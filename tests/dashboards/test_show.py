import io

import pytest
from rich.console import Console

from dashboards.show import find_batch, read_batch, show_batch, show_run, show_runs, show_summary
from data_contracts.errors import ConfigError, DigestMismatch, SchemaMismatch
from infra.objects import put_object
from infra.store import Store
from tests.dashboards.build_run import build_run, decode_text


def shown(show, *arguments, is_terminal: bool = False, width: int = 80, **keywords) -> str:
    """What a function prints."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=width, color_system=None)
    show(*arguments, console=console, **keywords)
    return file.getvalue()


def batch_of(store: Store, stage: str) -> str:
    """The key of a batch of a stage."""
    return next(
        key for key in store.list("batch") if ("reward" in read_batch(store, key).column_names) == (stage == "scored")
    )


def test_runs_are_listed_with_how_they_stand(root):
    for name, end in (("tiny-aaaaaa", "end"), ("tiny-bbbbbb", "fail"), ("tiny-cccccc", "")):
        build_run(root.at(name), steps=6, until=6 if end == "end" else 3, end=end)
    root.put_new("tiny-old/run.json", b'{"id": "tiny-old", "config": {"of": "another version"}}')
    lines = shown(show_runs, root).splitlines()
    assert lines[0].split() == ["run", "name", "state", "step", "reward", "eval", "made"]
    cells = {line.split()[0]: line.split() for line in lines[1:] if line}
    assert cells["tiny-aaaaaa"][1:4] == ["tiny", "finished", "6/6"]
    assert cells["tiny-bbbbbb"][1:4] == ["tiny", "failed", "3/6"]
    assert cells["tiny-cccccc"][1:4] == ["tiny", "silent", "3/6"]
    assert cells["tiny-cccccc"][5] == "0.349"
    assert "unreadable" in " ".join(cells["tiny-old"])


def test_an_empty_store_says_so(root):
    assert shown(show_runs, root) == f"no runs in {root.url}\n"


def test_a_summary_says_how_it_went_and_where_everything_is(finished):
    text = shown(show_summary, finished, {"report": "/tmp/report.html"})
    for needed in (
        "state       finished\n",
        "step        40 of 40 in ",
        "reward      0.550 at first, ",
        "evaluation  accuracy 0.349 at step 0, accuracy 0.921 at step 40",
        "max 2, bound 2",
        "tickets     177 = 160 trained + 15 refused + 2 in flight",
        "report      /tmp/report.html",
    ):
        assert needed in text
    assert "NOT SO" not in text


def test_a_summary_tells_what_is_wrong(root):
    store = root.at("failed")
    build_run(store, until=5, end="fail")
    store.put("log/curated/0000000002.json", b"{")
    text = shown(show_summary, store, {})
    assert "state       failed: train: TrainingDiverged: loss is nan" in text
    assert "NOT SO      log/curated can be read: " in text


def test_a_run_is_shown_with_roles_reasons_and_the_last_record_of_each_log(finished):
    lines = {line.split("  ")[0]: line for line in shown(show_run, finished).splitlines()}
    assert "23 %" in lines["rollout"] or "22 %" in lines["rollout"]
    assert lines["curate: all rewards are equal"].split()[5] == "9"
    assert lines["log/commit"].split()[1:5] == ["41", "version", "40", "trained,"]
    assert lines["log/eval"].split()[1] == "5"
    assert lines["log/control"].split()[1:] == ["3", "end"]
    assert (
        lines["every ticket is accounted for"].split("  ")[1].strip() == "ok"
        or "ok" in lines["every ticket is accounted for"]
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_of_any_width_shows_a_run(finished, width):
    text = shown(show_run, finished, is_terminal=True, width=width)
    assert "rollout" in text
    assert "─" in text


def test_piped_tables_are_not_cut_to_the_width_of_a_terminal(finished):
    assert "every commit consumed a full step" in shown(show_run, finished, width=20)


def test_a_scored_batch_can_be_read_by_a_person(finished):
    key = batch_of(finished, "scored")
    text = shown(show_batch, finished, key, decode_text, rows=2)
    row = read_batch(finished, key).slice(0, 1).to_pylist()[0]
    assert f"{key}: scored, 16 trajectories of 4 tickets" in text
    assert (
        f"ticket {row['ticket']}  sample 0  attempt 0  {row['prompt_id']}  version {row['used_versions'][0]}  stop"
        in text
    )
    assert f"reward {row['reward']:g}" in text
    assert f"  prompt    {decode_text(row['prompt_ids'])}\n" in text
    assert f"  response  {decode_text(row['response_ids'])}\n" in text
    assert f"{decode_text(row['response_ids'][1:2])}({row['behavior_logprobs'][1]:.2f})" in text
    assert text.endswith("14 more\n")


def test_a_raw_batch_without_a_tokenizer_shows_ids(finished):
    key = batch_of(finished, "raw")
    row = read_batch(finished, key).slice(0, 1).to_pylist()[0]
    text = shown(show_batch, finished, key, rows=1)
    assert " ".join(map(str, row["prompt_ids"])) in text
    assert "reward" not in text


def test_a_batch_is_found_by_the_beginning_of_its_digest(finished):
    key = batch_of(finished, "raw")
    digest = key.removeprefix("batch/").removesuffix(".arrow")
    for name in (key, digest, digest[:20], f"batch/{digest[:20]}"):
        assert find_batch(finished, name) == key


@pytest.mark.parametrize(
    ("name", "why"), [("zzz", "no such batch"), ("", "no such batch"), ("f" * 64, "no such batch")]
)
def test_a_batch_that_is_not_there_is_said_so(finished, name, why):
    with pytest.raises(ConfigError, match=why):
        find_batch(finished, name)


def test_a_beginning_that_fits_several_batches_is_refused(root):
    store = root.at("run")
    for i in range(20):
        put_object(store, "batch", ".arrow", bytes([i]))
    first = [key.removeprefix("batch/")[0] for key in store.list("batch")]
    twice = next(letter for letter in first if first.count(letter) > 1)
    with pytest.raises(ConfigError, match="give more digits"):
        find_batch(store, twice)


def test_altered_bytes_are_not_shown(root):
    store = root.at("run")
    build_run(store, until=2)
    key = batch_of(store, "raw")
    store.put(key, store.get(key)[:-1])
    with pytest.raises(DigestMismatch, match="expected SHA-256"):
        read_batch(store, key)


def test_an_object_that_is_no_batch_is_refused(root):
    ref = put_object(root.at("run"), "batch", ".arrow", b"not arrow")
    with pytest.raises(SchemaMismatch, match="complete Arrow IPC file"):
        read_batch(root.at("run"), ref.key)
