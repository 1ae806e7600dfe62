"""Reading the heartbeats of a run: who plays its roles, and what each does."""

from data_contracts.errors import ObjectMissing
from data_contracts.records import Heartbeat, decode_record
from infra.store import Store


def heartbeat_key(role: str, writer: str) -> str:
    """Return where a writer's heartbeat lies below the run's prefix."""
    return f"role/{role}-{writer}.json"


def read_heartbeats(store: Store, role: str = "") -> list[Heartbeat]:
    """Return every heartbeat of a role, or of all roles, that can be read.

    One that is being replaced, torn or of another version tells nothing, and is no error: the next look will see it.

    Raises:
        StoreError: the store does not answer.
    """
    beats = []
    for key in store.list("role"):
        if not key.startswith(f"role/{role}"):
            continue
        try:
            beats.append(decode_record(Heartbeat, store.get(key)))
        except (ObjectMissing, ValueError):
            continue
    return [beat for beat in beats if role in ("", beat.role)]
