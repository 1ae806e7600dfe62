"""What the trajectory contract lets through, and what it says about the rest."""

import math
import re
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts import trajectory
from data_contracts.errors import RowInvalid, SchemaMismatch
from data_contracts.trajectory import (
    SCHEMAS,
    SCORED_COLUMNS,
    SINCE_VERSION_2,
    add_columns,
    check,
    check_schema,
    decode,
    encode,
    find_invalid_rows,
    make_table,
)

NAN = math.nan


def make_row(**changes) -> dict[str, object]:
    """A good scored row: three sampled tokens of two versions around one token from a tool."""
    return {
        "ticket": 7,
        "attempt": 0,
        "sample": 0,
        "prompt_id": "addition/7",
        "env": "addition",
        "seed": 11,
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5, 6, 7],
        "action_mask": [True, False, True, True],
        "behavior_logprobs": [-0.5, NAN, 0.0, -30.0],
        "policy_versions": [3, -1, 3, 4],
        "used_versions": [3, 4],
        "used_digests": ["three", "four"],
        "finish_reason": "stop",
        "error": "",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": 8,
        "engine": "torch",
        "dtype": "float32",
        "queued_at": 1.0,
        "started_at": 2.0,
        "finished_at": 3.0,
        "response_text": "42",
        "reward": 1.0,
        "reward_names": ["exact"],
        "reward_values": [1.0],
        "verifier": "addition@1",
        "reward_error": "",
        **changes,
    }


ERROR_ROW = {
    "response_ids": [],
    "action_mask": [],
    "behavior_logprobs": [],
    "policy_versions": [],
    "used_versions": [],
    "used_digests": [],
    "finish_reason": "error",
    "error": "the engine is gone",
    "reward": NAN,
    "reward_names": [],
    "reward_values": [],
    "reward_error": "no response",
}


def make_rows(*changes: dict[str, object]) -> list[dict[str, object]]:
    return [make_row(sample=i, **change) for i, change in enumerate(changes)]


def scored(*changes: dict[str, object]) -> pa.Table:
    return make_table(make_rows(*changes), "scored")


def raw(*changes: dict[str, object]) -> pa.Table:
    return make_table(make_rows(*changes), "raw")


# --- what is good ---


def test_good_tables_pass_and_are_returned_as_they_are():
    for table, stage in [(raw({}, ERROR_ROW, {}), "raw"), (scored({}, ERROR_ROW, {}), "scored")]:
        assert check(table, stage, vocab_size=8, newest_version=4) is table
        assert find_invalid_rows(table, stage) == []


@pytest.mark.parametrize("stage", ["raw", "scored"])
def test_an_empty_table_passes(stage):
    assert check(SCHEMAS[stage].empty_table(), stage).num_rows == 0
    assert check(make_table([], stage), stage, vocab_size=1, newest_version=0).num_rows == 0


def test_a_table_of_error_rows_alone_passes():
    check(scored(ERROR_ROW, ERROR_ROW), "scored", vocab_size=8, newest_version=0)


def test_tables_of_several_chunks_and_slices_are_judged_like_others():
    bad = {"policy_versions": [3, -1, 3, 9], "used_versions": [3, 9]}
    chunked = pa.concat_tables([scored({}), scored({}, ERROR_ROW, bad).slice(1), scored(bad).slice(0, 0)])
    assert chunked.column("ticket").num_chunks > 1
    chunked = chunked.set_column(2, SCHEMAS["scored"].field("sample"), pa.chunked_array([[0], [1, 2]], pa.int32()))
    assert [row for row, _ in find_invalid_rows(chunked, "scored", newest_version=4)] == [2]
    assert find_invalid_rows(chunked.slice(0, 2), "scored", newest_version=4) == []
    assert [row for row, _ in find_invalid_rows(chunked.slice(2), "scored", newest_version=4)] == [0]


# --- rows that break the contract ---

TORN = [
    ({"action_mask": [True]}, "action_mask: expected as many entries as response_ids, got 1 beside 4"),
    ({"behavior_logprobs": [-0.5] * 5}, "behavior_logprobs: expected as many entries as response_ids, got 5 beside 4"),
    ({"policy_versions": []}, "policy_versions: expected as many entries as response_ids, got 0 beside 4"),
    ({"response_ids": []}, "action_mask: expected as many entries as response_ids, got 4 beside 0"),
]
WRONG = [
    ({"behavior_logprobs": [NAN, NAN, 0.0, -1.0]}, "behavior_logprobs: expected finite and at most 0 .*, got nan"),
    ({"behavior_logprobs": [0.25, NAN, 0.0, -1.0]}, "behavior_logprobs: expected finite and at most 0 .*, got 0.25"),
    ({"behavior_logprobs": [-math.inf, NAN, 0.0, -1.0]}, "behavior_logprobs: expected finite .*, got -inf"),
    ({"behavior_logprobs": [math.inf, NAN, 0.0, -1.0]}, "behavior_logprobs: expected finite .*, got inf"),
    ({"behavior_logprobs": [-0.5, 0.0, 0.0, -1.0]}, "behavior_logprobs: expected NaN where nothing .*, got 0.0"),
    ({"policy_versions": [3, 3, 3, 4]}, "policy_versions: expected -1 where nothing was sampled, got 3"),
    ({"policy_versions": [-1, -1, 3, 4]}, "policy_versions: expected a version from 0 where sampled, got -1"),
    ({"policy_versions": [3, -1, 3, 5], "used_versions": [3, 5]}, "expected at most 4, the newest commit, got 5"),
    ({"response_ids": [4, 5, 6, 8]}, "response_ids: expected token ids from 0 and below 8, got 8"),
    ({"response_ids": [4, 5, 6, -1]}, "response_ids: expected token ids from 0 and below 8, got -1"),
    ({"prompt_ids": [1, 99]}, "prompt_ids: expected token ids from 0 and below 8, got 99"),
    ({"prompt_ids": []}, "prompt_ids: expected at least one token"),
    ({"used_versions": [4, 3]}, r"used_versions: expected the distinct versions .*, got \[4, 3\] for \[3, 4\]"),
    ({"used_versions": [3], "used_digests": ["x"]}, r"used_versions: .*, got \[3\] for \[3, 4\]"),
    ({"used_versions": [3, 3, 4], "used_digests": ["a", "b", "c"]}, r"used_versions: .*, got \[3, 3, 4\]"),
    ({"used_digests": ["three"]}, "used_digests: expected one digest for each of used_versions, got 1 for 2"),
    ({"finish_reason": "bored"}, "finish_reason: expected one of .*, got bored"),
    ({"error": "a text without a failure"}, "error: expected a text exactly when finish_reason is error"),
    ({**ERROR_ROW, "error": ""}, "error: expected a text exactly when finish_reason is error, got ''"),
    ({**ERROR_ROW, "finish_reason": "stop", "error": ""}, "response_ids: expected at least one token"),
    ({"ticket": -1}, "ticket: expected a number from 0, got -1"),
    ({"attempt": -1}, "attempt: expected a number from 0, got -1"),
    ({"sample": 0}, "sample: expected each .* once in a batch, got a second row"),
]
WRONG_REWARDS = [
    ({"reward": NAN}, "reward: expected finite when reward_error is empty, got nan"),
    ({"reward": math.inf}, "reward: expected finite when reward_error is empty, got inf"),
    ({"reward_error": "the verifier is gone"}, "reward: expected NaN when reward_error says why, got 1.0"),
    ({"reward_names": []}, "reward_values: expected one value for each of reward_names, got 1 for 0"),
    ({**ERROR_ROW, "reward": 0.0, "reward_error": ""}, "reward_error: expected a text where finish_reason is error"),
    ({**ERROR_ROW, "reward": 0.0}, "reward: expected NaN when reward_error says why, got 0.0"),
]
NULLS = [
    ({name: None}, f"{name}: expected a value, got null")
    for name in ("ticket", "finish_reason", "reward", "response_ids", "used_digests", "temperature")
] + [
    ({"action_mask": [True, None, True, True]}, "action_mask: expected a value, got null"),
    ({"behavior_logprobs": [-0.5, None, 0.0, -1.0]}, "behavior_logprobs: expected a value, got null"),
    ({"used_digests": ["three", None]}, "used_digests: expected a value, got null"),
]


@pytest.mark.parametrize(("change", "message"), TORN + WRONG + WRONG_REWARDS + NULLS)
def test_a_row_that_breaks_the_contract_is_named(change, message):
    table = make_table([make_row(), {**make_row(sample=1), **change}, make_row(sample=2)], "scored")
    with pytest.raises(RowInvalid, match=message) as caught:
        check(table, "scored", vocab_size=8, newest_version=4)
    assert str(caught.value).startswith("row 1 (ticket ")
    assert [row for row, _ in find_invalid_rows(table, "scored", vocab_size=8, newest_version=4)] == [1]


@pytest.mark.parametrize(("change", "message"), TORN + WRONG)
def test_raw_rows_are_held_to_the_same(change, message):
    table = make_table([make_row(), {**make_row(sample=1), **change}], "raw")
    with pytest.raises(RowInvalid, match=message):
        check(table, "raw", vocab_size=8, newest_version=4)


def test_limits_that_are_not_given_are_not_checked():
    check(raw({"response_ids": [10**6] * 4}, {"policy_versions": [3, -1, 3, 99], "used_versions": [3, 99]}), "raw")


def test_every_bad_row_is_found_under_its_own_number_and_told_once():
    changes: list[dict[str, object]] = [{} for _ in range(12)]
    bad = {
        0: TORN[0],
        2: WRONG[1],
        3: TORN[1],
        5: NULLS[0],
        7: WRONG[2],
        8: TORN[2],
        10: WRONG_REWARDS[0],
        11: NULLS[6],
    }
    for row, (change, _) in bad.items():
        changes[row] = change
    table = scored(*changes)
    problems = find_invalid_rows(table, "scored", vocab_size=8, newest_version=4)
    assert [row for row, _ in problems] == list(bad)
    for row, message in problems:
        assert message.startswith(f"row {row} (ticket ")
        column = bad[row][1].split(":")[0]
        assert f": {column}: expected" in message


def test_the_first_bad_token_of_a_row_is_shown():
    table = raw({"response_ids": [4, 20, 30, 7]}, {"response_ids": [40, 5, 6, 7]})
    found = find_invalid_rows(table, "raw", vocab_size=8)
    assert [message.rsplit(" ", 1)[1] for _, message in found] == ["20", "40"]


def test_tokens_that_move_between_rows_are_noticed():
    """The flat columns are the same as those of a good table; only the borders of the rows are not."""
    table = raw(
        {"used_versions": [3], "used_digests": ["three"]},
        {"used_versions": [4, 3, 4], "used_digests": ["four", "three", "four"]},
    )
    assert [row for row, _ in find_invalid_rows(table, "raw")] == [0, 1]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flags_exactly_the_rows_that_were_broken(data):
    num_rows = data.draw(st.integers(1, 8))
    kinds = data.draw(st.lists(st.integers(-1, len(TORN + WRONG) - 1), min_size=num_rows, max_size=num_rows))
    doubled = next(i for i, (change, _) in enumerate(TORN + WRONG) if "sample" in change)
    rows = []
    for i, kind in enumerate(kinds):
        change = {} if kind in (-1, doubled) else (TORN + WRONG)[kind][0]
        rows.append({**make_row(sample=i), **change})
    table = make_table(rows, "raw")
    found = [row for row, _ in find_invalid_rows(table, "raw", vocab_size=8, newest_version=4)]
    assert found == [i for i, kind in enumerate(kinds) if kind not in (-1, doubled)]


# --- schemas ---


def test_every_column_says_its_unit_and_meaning():
    for schema in SCHEMAS.values():
        for field in schema:
            assert field.metadata[b"unit"] and field.metadata[b"doc"], field.name
            assert not field.nullable
            assert bool(field.metadata[b"shape"]) == pa.types.is_list(field.type), field.name


def test_stages_are_not_taken_for_each_other():
    with pytest.raises(SchemaMismatch, match="expected contract trajectory/scored version 2, got trajectory/raw"):
        check(raw({}), "scored")
    with pytest.raises(SchemaMismatch, match="expected contract trajectory/raw version 2, got trajectory/scored"):
        check(scored({}), "raw")


def test_a_table_of_another_version_or_of_none_is_refused():
    table = raw({})
    future = table.replace_schema_metadata({"contract": "trajectory/raw", "version": "3"})
    with pytest.raises(SchemaMismatch, match="version 2, got trajectory/raw version 3"):
        check(future, "raw")
    with pytest.raises(SchemaMismatch, match="got none version none"):
        check(table.replace_schema_metadata(None), "raw")


def test_a_missing_an_extra_a_moved_and_a_retyped_column_are_named():
    table = raw({})
    with pytest.raises(SchemaMismatch, match=r"columns missing \['policy_versions'\], unexpected \[\]"):
        check(table.drop_columns(["policy_versions"]), "raw")
    with pytest.raises(SchemaMismatch, match=r"columns missing \[\], unexpected \['mood'\]"):
        check(table.append_column("mood", pa.array(["good"])), "raw")
    moved = table.select([*table.column_names[1:], "ticket"])
    with pytest.raises(SchemaMismatch, match="column order"):
        check(moved, "raw")
    at = table.schema.get_field_index("ticket")
    field = table.schema.field(at).with_type(pa.int32())
    with pytest.raises(SchemaMismatch, match="column ticket expected int64 .* got int32"):
        check(table.set_column(at, field, table.column(at).cast(pa.int32())), "raw")


def test_a_column_that_lost_its_unit_or_may_be_null_is_refused():
    table = raw({})
    at = table.schema.get_field_index("behavior_logprobs")
    bare = table.schema.field(at).remove_metadata()
    with pytest.raises(SchemaMismatch, match="column behavior_logprobs expected .*nats"):
        check(table.set_column(at, bare, table.column(at)), "raw")
    nullable = table.schema.field(at).with_nullable(True)
    with pytest.raises(SchemaMismatch, match="column behavior_logprobs"):
        check_schema(table.set_column(at, nullable, table.column(at)).schema, "raw")


@pytest.mark.parametrize("stage", ["raw", "scored"])
def test_a_batch_of_version_1_is_read_with_what_its_missing_columns_stood_for(stage):
    table = make_table(make_rows({}, {}), stage)
    old = table.drop_columns(list(SINCE_VERSION_2))
    old = old.replace_schema_metadata({"contract": f"trajectory/{stage}", "version": "1"})
    got = decode(encode(old), name="batch")
    assert str(check(got, stage).to_pylist()) == str(table.to_pylist())  # NaN is not equal to itself
    assert got.schema.equals(table.schema, check_metadata=True)
    torn = old.drop_columns(["seed"])
    with pytest.raises(SchemaMismatch, match="version 1"):
        check(decode(encode(torn), name="batch"), stage)


SHARED = {
    "action_mask": [False, False, True, True],
    "behavior_logprobs": [NAN, NAN, 0.0, -30.0],
    "policy_versions": [-1, -1, 3, 4],
    "branch_of": 0,
    "branch_at": 2,
}


def test_a_branch_shares_the_beginning_of_an_earlier_sample():
    assert find_invalid_rows(scored({}, SHARED, {}), "scored") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"branch_of": -2}, "branch_of: expected -1 or an earlier sample of the group, got -2"),
        ({**SHARED, "branch_of": 1}, "branch_of: expected -1 or an earlier sample of the group, got 1"),
        ({"branch_at": 2}, "branch_at: expected 0 without branch_of, .* got 2"),
        ({**SHARED, "branch_at": 4}, "branch_at: expected .* fewer tokens than the response has, got 4"),
        ({**SHARED, "branch_at": 0}, "branch_at"),
        ({**SHARED, "branch_at": 3}, "action_mask: expected false for tokens of another sample"),
        ({"guided_prompt_ids": [-1]}, "guided_prompt_ids: expected token ids from 0"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(change, problem):
    [(row, message)] = find_invalid_rows(scored({}, change, {}), "scored")
    assert row == 1
    assert re.search(problem, message), message


def test_a_row_must_name_every_column():
    row = make_row()
    del row["seed"]
    with pytest.raises(KeyError, match="seed"):
        make_table([row], "raw")


# --- the reward stage ---


def test_the_reward_stage_adds_columns_and_changes_none():
    before = raw({}, ERROR_ROW)
    columns = {f.name: [row[f.name] for row in make_rows({}, ERROR_ROW)] for f in SCORED_COLUMNS}
    after = add_columns(before, columns)
    same = after.select(before.column_names).replace_schema_metadata(before.schema.metadata)
    assert encode(same) == encode(before)
    assert encode(after) == encode(scored({}, ERROR_ROW))
    check(after, "scored")
    with pytest.raises(pa.ArrowInvalid):
        add_columns(before, {name: values[:1] for name, values in columns.items()})
    with pytest.raises(KeyError, match="verifier"):
        add_columns(before, {name: values for name, values in columns.items() if name != "verifier"})


# --- bytes ---


def test_a_table_survives_its_bytes_with_units_and_every_bit():
    table = scored({}, ERROR_ROW, {"behavior_logprobs": [-1e-45, NAN, -0.0, -3.4e38]})
    again = decode(encode(table), name="batch")
    check(again, "scored")
    assert again.schema.equals(table.schema, check_metadata=True)
    bits = [
        np.asarray(t.column("behavior_logprobs").combine_chunks().flatten()).view(np.uint32) for t in (table, again)
    ]
    np.testing.assert_array_equal(*bits)
    assert encode(again) == encode(table)


def test_the_same_rows_give_the_same_bytes_however_they_are_chunked():
    table = scored({}, {}, {}, {})
    chunks = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert encode(chunks) == encode(table)
    assert encode(table.slice(1, 2)) != encode(table)
    part = decode(encode(table.slice(1, 2)), name="batch")
    assert part.column("sample").to_pylist() == [1, 2]
    assert encode(part) == encode(table.slice(1, 2))


def test_an_empty_table_survives_its_bytes():
    again = decode(encode(SCHEMAS["raw"].empty_table()), name="batch")
    assert again.num_rows == 0
    check(again, "raw")


def test_torn_bytes_are_refused_at_whatever_length():
    body = encode(raw({}, {}))
    for length in [*range(0, len(body), 97), len(body) - 1]:
        with pytest.raises(SchemaMismatch, match=f"batch/x: expected a complete Arrow IPC file, got {length} bytes"):
            decode(body[:length], name="batch/x")


def test_bytes_of_something_else_are_refused():
    for body in (b"", b"{}", b"PAR1" * 100, bytes(5000)):
        with pytest.raises(SchemaMismatch, match="batch/x: expected a complete Arrow IPC file"):
            decode(body, name="batch/x")


# --- cost ---


def test_the_work_does_not_explode_with_the_rows():
    def seconds(num_rows: int) -> float:
        table = make_table([make_row(sample=i) for i in range(num_rows)], "scored")
        start = time.process_time()
        assert find_invalid_rows(table, "scored", vocab_size=8, newest_version=4) == []
        return time.process_time() - start

    seconds(10)
    assert seconds(4000) < 100 * max(seconds(400), 1e-3), "quadratic work would take a hundred times as long"


def test_the_module_declares_the_stages_it_knows():
    assert set(SCHEMAS) == {"raw", "scored"}
    assert trajectory.PER_TOKEN[0] == "response_ids"
