"""What the fold keeps: the rules of a run, and the facts about one ticket."""

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from data_contracts.protocol_limit import Adaptive
from data_contracts.records import Verdict

if TYPE_CHECKING:
    from data_contracts.config import RunConfig


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers that decide who may do what; the same in every process of a run."""

    groups_per_step: int
    steps: int
    max_staleness: int | None
    max_unsettled: int | None = None
    max_attempts: int = 3
    claim_block: int = 32
    deterministic: bool = False
    stragglers: Literal["wait", "interrupt", "drop"] = "wait"
    adaptive: Adaptive | None = None

    @classmethod
    def of(cls, config: "RunConfig") -> "Rules":
        """Return the rules that a resolved config contains."""
        return cls(
            groups_per_step=config.groups_per_step,
            steps=config.steps,
            max_staleness=config.staleness.bound,
            max_unsettled=config.staleness.max_unsettled,
            max_attempts=config.staleness.max_attempts,
            claim_block=config.rollout.claim_block,
            deterministic=config.is_deterministic,
            stragglers=config.staleness.stragglers,
            adaptive=Adaptive(**response.model_dump()) if (response := config.staleness.adaptive) else None,
        )

    def deadline(self, version: int) -> int | None:
        """Return the newest version from which a token sampled by `version` may be trained; None: any."""
        return None if self.max_staleness is None else version + self.max_staleness

    def to_json(self) -> dict[str, Any]:
        """Return the rules as a JSON value; one that was not made use of is left out."""
        return {name: value for name, value in asdict(self).items() if name != "adaptive" or value is not None}


@dataclass(slots=True)
class Ticket:
    """What is known of one ticket. Facts are added, never taken back."""

    number: int
    attempt: int = -1
    """Newest attempt; -1 while the claim itself has not been applied."""
    writers: list[str] = field(default_factory=list)
    """Who owned attempt 0, 1, ..."""
    floor: int = -1
    """Oldest version whose tokens may stand in the loss: that of the oldest attempt, or of the last rebase."""
    floor_attempt: int = 0
    """Attempt that set the floor; results of earlier attempts come too late."""
    curriculum: int = 0
    """Commit whose curriculum state decides the prompt."""
    given_up: bool = False
    verdict: Verdict | None = None
    """Curation's first word."""
    verdict_at: int = -1
    """Number of the curated record that holds it."""
    refused_at: int | None = None
    """Number of the refused record that names the ticket first."""
    refused_reason: str = ""
    trained_by: int | None = None
    """Version of the commit that consumed the ticket."""

    @property
    def is_claimed(self) -> bool:
        """Whether the claim is known; a lagging view may learn of the rest before."""
        return self.attempt >= 0

    @property
    def is_trained(self) -> bool:
        """Whether a commit consumed it; this outweighs a refusal by a trainer that came too late."""
        return self.trained_by is not None

    @property
    def is_refused(self) -> bool:
        """Whether it was settled without training, by curation or by a trainer."""
        by_curation = self.verdict is not None and not self.verdict.accepted
        return not self.is_trained and (by_curation or self.refused_at is not None)

    @property
    def is_in_flight(self) -> bool:
        """Whether it was issued and is neither trained nor refused."""
        return self.is_claimed and not self.is_trained and not self.is_refused

    @property
    def is_accepted(self) -> bool:
        """Whether it waits to be trained."""
        return self.is_in_flight and self.verdict is not None

    @property
    def is_pending(self) -> bool:
        """Whether it waits for its first verdict."""
        return self.is_in_flight and self.verdict is None

    @property
    def owner(self) -> str:
        """Writer of the newest attempt."""
        return self.writers[-1]


class ClaimRange(NamedTuple):
    """Tickets issued by one claim record."""

    number: int
    first: int
    end: int
    curriculum: int


class Account(NamedTuple):
    """Where the issued tickets are: issued = trained + refused + in_flight, in every view."""

    issued: int
    trained: int
    refused: int
    in_flight: int


def ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    """Return a ticket as a JSON value, for a snapshot."""
    fields = {name: getattr(ticket, name) for name in Ticket.__slots__}
    fields["writers"] = list(ticket.writers)
    fields["verdict"] = None if ticket.verdict is None else json.loads(ticket.verdict.model_dump_json())
    return fields


def ticket_from_json(value: dict[str, Any]) -> Ticket:
    """Return the ticket that `ticket_to_json` wrote."""
    verdict = None if value["verdict"] is None else Verdict.model_validate(value["verdict"])
    return Ticket(**{**value, "writers": list(value["writers"]), "verdict": verdict})
