"""Records: what they promise to whoever reads them, perhaps years later and in another language."""

import json
import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from data_contracts import records
from data_contracts.records import (
    DELIVERED,
    AnyRecord,
    Audit,
    BatchRef,
    Claim,
    Commit,
    Consumed,
    Control,
    Curated,
    Evaluation,
    Frozen,
    GroupRef,
    Heartbeat,
    ObjectRef,
    PolicyRef,
    Raw,
    Record,
    Refused,
    RuleResult,
    Scored,
    Verdict,
    decode_record,
    encode_record,
)

BATCH = BatchRef(key="batch/ab.arrow", num_bytes=10, sha256="ab", num_rows=2)
GROUP = GroupRef(ticket=3, attempt=1, first_row=0, num_rows=2, oldest_version=4)
OBJECT = ObjectRef(key="policy/5-w/a.safetensors", num_bytes=3, sha256="cd")

EXAMPLES: list[BaseModel] = [
    Claim(
        writer="w",
        kind="claim",
        tickets=(3, 4),
        attempt=0,
        version=4,
        curriculum=4,
        deadline=None,
        next_ticket=5,
    ),
    Raw(writer="w", batch=BATCH, groups=(GROUP,), metrics={"tokens": 9.0}),
    Scored(writer="r", rollout="w", batch=None, groups=(), refused={"3": "torn"}),
    Curated(
        writer="c",
        verdicts=(Verdict(ticket=3, accepted=True, attempt=1, batch=BATCH, group=GROUP, reward_mean=0.1),),
        covers={"w": 1},
        late=(GROUP,),
        num_accepted=1,
        num_refused=0,
    ),
    Refused(writer="t", tickets=(3,), reason="digest", detail='ü \n "', commit=4, num_refused=1),
    Commit(
        writer="t",
        version=5,
        status="skipped",
        consumed=(Consumed(ticket=3, attempt=1, batch=BATCH, group=GROUP, deadline=6),),
        weights=PolicyRef(kind="delta", base=4, objects=(OBJECT,), digest="ef", dtype="bfloat16", num_parameters=7),
        checkpoint=(OBJECT,),
        checkpoint_version=5,
        curriculum=OBJECT,
        snapshot=OBJECT,
        snapshot_version=5,
        positions={"claim": 1},
        num_trained=10,
        num_tokens=1 << 40,
        metrics={"loss": math.nan, "ratio": math.inf, "kl": -math.inf, "tiny": 5e-324, "tenth": 0.1},
        histograms={"staleness": {"0": 3.0}},
        evidence="the loss is nan",
    ),
    Evaluation(writer="e", version=5, digest="ef", metrics={"eval/accuracy": 0.5}, examples=({"prompt": "1+1"},)),
    Audit(
        writer="a",
        stage="raw",
        num_rows=9,
        results=(RuleResult(rule="r", severity="warn", passed=False, expected="at most 1", observed="2"),),
        statistics={"reward/mean": math.nan},
        covers={"raw/w": 3},
    ),
    Control(writer="s", kind="fail", role="train", error="boom", detail={"traceback": ["a", 1, None]}),
    Heartbeat(
        role="rollout", writer="w", host="h", pid=1, process_started=0.5, beat=2, state="", held={"3": DELIVERED}
    ),
]


def same(left: object, right: object) -> bool:
    """Equality under which NaN is NaN."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def test_there_is_an_example_of_every_record():
    assert {type(example) for example in EXAMPLES} == {*get_args(AnyRecord), Heartbeat}


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_a_record_survives_its_bytes(record):
    body = encode_record(record)
    again = decode_record(type(record), body)
    assert same(again.model_dump(), record.model_dump())
    assert encode_record(again) == body


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_the_bytes_are_json_that_any_language_reads(record):
    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    value = json.loads(encode_record(record), parse_constant=no_constant)
    assert isinstance(value, dict)


@settings(max_examples=200, deadline=None)
@given(metrics=st.dictionaries(st.text(max_size=5), st.floats()))
def test_every_number_survives_exactly(metrics):
    again = decode_record(Evaluation, encode_record(Evaluation(writer="e", version=0, digest="", metrics=metrics)))
    assert same(again.metrics, metrics)
    assert all(math.copysign(1, again.metrics[k]) == math.copysign(1, v) for k, v in metrics.items() if v == v)


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_unknown_missing_and_torn_fields_are_refused(record):
    kind, value = type(record), json.loads(encode_record(record))
    with pytest.raises(ValidationError, match="mood"):
        decode_record(kind, json.dumps({**value, "mood": "good"}).encode())
    with pytest.raises(ValidationError, match="writer"):
        decode_record(kind, json.dumps({k: v for k, v in value.items() if k != "writer"}).encode())
    body = encode_record(record)
    for length in (0, 1, len(body) // 2, len(body) - 1):
        with pytest.raises(ValidationError, match="Invalid JSON"):
            decode_record(kind, body[:length])


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda r: type(r).__name__)
def test_a_record_cannot_be_changed(record):
    with pytest.raises(ValidationError, match="frozen"):
        record.writer = "another"


def test_kinds_and_reasons_are_closed():
    value = json.loads(encode_record(EXAMPLES[0]))
    with pytest.raises(ValidationError, match="kind"):
        decode_record(Claim, json.dumps({**value, "kind": "grab"}).encode())
    with pytest.raises(ValidationError, match="reason"):
        Refused.model_validate({"writer": "t", "tickets": (), "reason": "taste", "commit": 0, "num_refused": 0})


def test_two_records_that_say_the_same_differ_by_their_nonces():
    made = [Control(writer="s", kind="stop") for _ in range(100)]
    assert len({record.nonce for record in made}) == 100
    assert all(len(record.nonce) == 16 for record in made)


def test_every_log_record_names_its_writer_nonce_and_time():
    for kind in get_args(AnyRecord):
        assert issubclass(kind, Record)
        assert {"writer", "nonce", "at"} <= kind.model_fields.keys()


def test_texts_under_fields_are_their_descriptions():
    assert Claim.model_fields["next_ticket"].description == "Next free ticket after this record."
    assert Heartbeat.model_fields["beat"].description == "Grows with every heartbeat."


def test_every_class_says_what_it_is():
    kinds = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, Frozen)]
    assert len(kinds) > 12
    for kind in kinds:
        assert kind.__doc__ and kind.__doc__ != Frozen.__doc__ or kind is Frozen, kind.__name__
