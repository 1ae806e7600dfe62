"""What was refused, why, and where its bytes are: one small object for each refusal, for people to look at.

The verdict itself stands in a log; nothing reads these objects to decide. The bytes stay where they are: a batch
is never altered or removed because a row of it was refused.
"""

import json
from collections.abc import Mapping, Sequence

from data_contracts.records import ObjectRef
from infra.objects import put_object
from infra.store import Store


def quarantine(
    store: Store, stage: str, tickets: Sequence[int], reason: str, evidence: Mapping[str, object], ref: ObjectRef | None
) -> None:
    """Keep the evidence of a refusal below quarantine/<stage>/.

    Args:
        store: the run's prefix.
        stage: where it was refused: reward, curate or train.
        tickets: whose groups.
        reason: one word or sentence.
        evidence: rule, values seen, rows: whatever a person needs to judge.
        ref: the object that holds the bytes, as far as there is one.
    """
    body = {
        "stage": stage,
        "tickets": list(tickets),
        "reason": reason,
        "evidence": dict(evidence),
        "object": None if ref is None else ref.model_dump(),
    }
    put_object(store, f"quarantine/{stage}", ".json", json.dumps(body, indent=1, sort_keys=True).encode())
