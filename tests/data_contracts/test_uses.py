"""Earlier samples are used no more often than allowed, in whatever records their uses stand."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from data_contracts.records import BatchRef, Curated, GroupRef, Joined, Reused, Verdict
from data_contracts.uses import Uses, uses_of

BATCH = BatchRef(key="batch/x.arrow", num_bytes=1, sha256="x", num_rows=8)


def joined(ticket: int, *, lent: bool) -> Joined:
    return Joined(ticket=ticket, batch=BATCH, rows=(0,), rewards=(0.0,), oldest_version=1, max_age=9, lent=lent)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """A verdict on a group of its own samples, a copy, or one with parts and a success of others; tickets collide."""
    source = st.integers(0, 3)
    copied = draw(st.none() | source)
    reused = None if copied is None else Reused(ticket=copied, oldest_version=1, max_age=9)
    parts = () if reused else tuple(joined(ticket, lent=False) for ticket in draw(st.sets(source, max_size=2)))
    success = () if reused else tuple(joined(ticket, lent=True) for ticket in draw(st.sets(source, max_size=1)))
    number = draw(st.integers(10, 99))
    group = GroupRef(ticket=number, attempt=0, first_row=0, num_rows=8, reused=reused, joined=(*parts, *success))
    return Verdict(ticket=number, accepted=draw(st.booleans()), batch=BATCH, group=group)


def record(some: list[Verdict]) -> Curated:
    accepted = sum(verdict.accepted for verdict in some)
    return Curated(
        writer="c", verdicts=tuple(some), covers={}, num_accepted=accepted, num_refused=len(some) - accepted
    )  # fmt: skip


def settle(limit: int, records: list[list[Verdict]]) -> list[Verdict]:
    """Let every record be written by a curator that has just started and reads those before it."""
    log: list[Curated] = []
    for some in records:
        uses = Uses(limit)
        for before in log:
            uses.add(before)
        checked = uses.check(record(some))
        assert checked.num_accepted == sum(verdict.accepted for verdict in checked.verdicts)
        assert checked.num_accepted + checked.num_refused == len(some)
        log.append(checked)
    return [verdict for one in log for verdict in one.verdicts]


@given(st.lists(verdicts(), max_size=12), st.integers(1, 3), st.data())
def test_no_source_is_used_too_often_however_verdicts_are_split_into_records(
    some: list[Verdict], limit: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(some)), max_size=4)))
    settled = settle(limit, [some[a:b] for a, b in zip([0, *cuts], [*cuts, len(some)], strict=True)])
    assert settled == settle(limit, [some]) == settle(limit, [[verdict] for verdict in some])
    assert [verdict.ticket for verdict in settled] == [verdict.ticket for verdict in some]
    counts = Counter(use[:2] for verdict in settled if verdict.accepted for use in uses_of(verdict.group))
    allowed = {"copied": limit, "joined": 1}
    assert all(count <= allowed[kind] for (kind, _), count in counts.items())
    for before, after in zip(some, settled, strict=True):
        if before != after:
            assert before.accepted
            assert not after.accepted
            assert any(counts[use[:2]] == allowed[use.kind] for use in uses_of(before.group))
            assert after.reason.startswith("used_before: the samples of ticket")


def test_what_is_lent_and_what_is_refused_does_not_count() -> None:
    lent = GroupRef(ticket=9, attempt=0, first_row=0, num_rows=8, joined=(joined(1, lent=True),))
    part = GroupRef(ticket=9, attempt=0, first_row=0, num_rows=8, joined=(joined(1, lent=False),))
    taken = [Verdict(ticket=9, accepted=True, batch=BATCH, group=lent)] * 3
    refused = [Verdict(ticket=9, accepted=False, reason="explored", batch=BATCH, group=part)] * 3
    last = [Verdict(ticket=9, accepted=True, batch=BATCH, group=part)] * 2
    assert [v.accepted for v in settle(1, [[*taken, *refused, *last]])] == [True] * 3 + [False] * 3 + [True, False]
