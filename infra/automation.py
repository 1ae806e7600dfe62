"""The automation that Prefect lacks: a flow run whose process died without a word becomes Crashed.

A flow process sends a heartbeat every 30 s (PREFECT_FLOWS_HEARTBEAT_FREQUENCY, see `infra.settings`). After one, and
after the start, which a process may not outlive until its first, the server expects another, or the end of the run,
within five times that, for servers on a busy machine are slow; otherwise it marks the run Crashed.
A heartbeat that arrives after the end does no harm: Prefect refuses to crash a run that is over.
"""

import os
from datetime import timedelta
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import PrefectHTTPStatusError

from data_contracts.errors import ServiceError

NAME = "rollflow: mark dead flow runs as crashed"
WITHIN_S = 150.0
FLOWS = ["post-training*", "study"]
"""Names of the flows that it watches: others on the same server may beat at another pace, or not at all."""

HEARTBEAT = "prefect.flow-run.heartbeat"
STARTS = {f"prefect.flow-run.{state}" for state in ("Running", "Retrying")}
ENDINGS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled")}


def ensure_automation(api_url: str | None = None, within_s: float = WITHIN_S) -> UUID:
    """Create the automation in the Prefect server, or bring it up to date; return its id.

    One that is as it should be is not touched, also when a person has switched it off. Doubles, which two
    processes can make at once, are removed.

    Args:
        api_url: for example http://127.0.0.1:4200/api; default PREFECT_API_URL.
        within_s: silence, in seconds, after which a run is taken for dead; at least twice the heartbeat.

    Raises:
        ServiceError: the server does not answer, or refuses.
    """
    url = api_url or os.environ.get("PREFECT_API_URL", "")
    if not url:
        raise ServiceError("automation: expected PREFECT_API_URL in the environment, got none: run `rollflow up`")
    wanted = crash_automation(within_s)
    try:
        with SyncPrefectClient(api=url) as client:
            client.raise_for_api_version_mismatch()
            found = sorted(client.read_automations_by_name(NAME), key=lambda automation: str(automation.id))
            if not found:
                return client.create_automation(wanted)
            for double in found[1:]:
                client.delete_automation(double.id)
            if not _is_same(found[0], wanted):
                client.update_automation(found[0].id, wanted)
            return found[0].id
    except (httpx.HTTPError, PrefectHTTPStatusError, RuntimeError) as cause:
        raise ServiceError(f"Prefect at {url} did not take the automation for dead flow runs: {cause}") from cause


def crash_automation(within_s: float = WITHIN_S) -> AutomationCore:
    """Return the automation: after a start or heartbeat, neither another nor an end within `within_s` makes Crashed."""
    crash = ChangeFlowRunState(
        name=None,
        state=StateType.CRASHED,
        message=f"no heartbeat for {within_s:.0f} s: the process of this flow run is gone",
        force=False,
    )
    return AutomationCore(
        name=NAME,
        description="Made by `rollflow up`. A killed process cannot report its own end.",
        trigger=EventTrigger(
            after={HEARTBEAT, *STARTS},
            expect={HEARTBEAT, *ENDINGS},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},  # pyright: ignore[reportArgumentType]
            match_related={"prefect.resource.role": ["flow"], "prefect.resource.name": FLOWS},  # pyright: ignore[reportArgumentType]
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=within_s),
        ),
        actions=[crash],
    )


def _is_same(found: Automation, wanted: AutomationCore) -> bool:
    def what_counts(automation: AutomationCore) -> dict[str, object]:
        return automation.model_dump(include={"description", "trigger", "actions"}, exclude={"trigger": {"id"}})

    return what_counts(found) == what_counts(wanted)
