"""The records of a run: small JSON objects in numbered logs. They alone say what happened.

Every record names its writer (a process, random at every start) and carries a nonce, so that a writer
whose reply was lost can tell that it had won. Wall-clock times are for people: no decision reads them.
"""

import secrets
import time
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """A closed, immutable value whose field docstrings are part of its JSON schema."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings"
    )  # a loss that is NaN must survive the way through JSON


DELIVERED = -1
"""Counter in a heartbeat of a ticket whose result is in the raw log: its lease cannot be lost."""


class ObjectRef(Frozen):
    """Names an immutable object so that a reader can prove it has the right bytes."""

    key: str
    """Key below the run's prefix."""
    num_bytes: int
    """Length of the object."""
    sha256: str
    """SHA-256 of the object's bytes, in hexadecimal."""


class BatchRef(ObjectRef):
    """Names an Arrow IPC file of trajectories."""

    num_rows: int
    """Trajectories in the file."""


class Reused(Frozen):
    """Says that the rows of a group are a copy of an earlier ticket's."""

    ticket: int
    """The ticket under which they were sampled."""
    oldest_version: int
    """Oldest version that sampled a token of them."""
    max_age: int
    """Bound in versions on the age of their tokens when they are trained."""


class Joined(Frozen):
    """Rows of an earlier ticket's batch that are trained as part of a group."""

    ticket: int
    """The ticket under which they were sampled."""
    batch: BatchRef
    rows: tuple[int, ...]
    """Rows of that batch."""
    rewards: tuple[float, ...]
    """Their rewards."""
    oldest_version: int
    """Oldest version that sampled a token of them."""
    max_age: int
    """Bound in versions on the age of their tokens when they are trained."""
    lent: bool = False
    """Whether other groups may have them too: an earlier success, not a part of this very group."""


class GroupRef(Frozen):
    """Where one ticket's group lies in a batch."""

    ticket: int
    attempt: int
    first_row: int
    num_rows: int
    oldest_version: int = -1
    """Oldest version that sampled a token for this ticket; -1 when nothing was sampled."""
    left_out: tuple[int, ...] = ()
    """Rows, counted from `first_row`, that curation left out: they are in the batch and are not trained on."""
    reused: Reused | None = None
    """Where the rows come from when none was sampled for this ticket."""
    joined: tuple[Joined, ...] = ()
    """Rows of earlier tickets that are trained with those of this one."""


class Record(Frozen):
    """What every record carries."""

    writer: str
    """Id of the process that wrote it."""
    nonce: str = Field(default_factory=lambda: secrets.token_hex(8))
    """Tells this record from any other that was meant for the same number."""
    at: float = Field(default_factory=time.time)
    """Seconds since the epoch by the writer's clock; for people only."""


class Claim(Record):
    """One entry of log/claim: who works on which tickets.

    `claim` takes the next free tickets; `reclaim` takes over tickets whose lease was lost; `rebase` moves
    unfinished tickets to newer weights (tokens sampled before `version` leave the loss); `give_up` says
    that no further attempt will be made.
    """

    kind: Literal["claim", "reclaim", "rebase", "give_up"]
    tickets: tuple[int, ...]
    """Ascending ticket numbers."""
    attempt: int
    """0 for a first claim."""
    version: int
    """Version of the weights that the worker holds; for `rebase`, the oldest version still in the loss."""
    curriculum: int
    """Commit whose curriculum state decides the prompts of these tickets."""
    deadline: int | None
    """Newest version that may be trained from (version + max_staleness); None without a bound."""
    next_ticket: int
    """Next free ticket after this record."""


class Raw(Record):
    """One entry of log/raw/<writer>: finished groups, not yet scored."""

    batch: BatchRef
    groups: tuple[GroupRef, ...]
    metrics: dict[str, float] = {}
    released_from: dict[str, str] = {}
    """Ticket (as text) to the ticket, attempt and batch of the quarantined result that a person released under it."""


class Scored(Record):
    """One entry of log/scored/<rollout writer>, at the number of the raw record it scores."""

    rollout: str
    """Writer of the raw record."""
    batch: BatchRef | None
    """None when nothing of the raw batch could be used."""
    groups: tuple[GroupRef, ...]
    refused: dict[str, str] = {}
    """Ticket (as text) to reason, for groups of the raw record that could not be scored."""
    metrics: dict[str, float] = {}


class Outcome(Frozen):
    """What a ticket's own good samples came to, whether they are trained or not; joined rows are not counted."""

    num_samples: int
    num_passed: int
    """Samples with a reward of at least curriculum.difficulty.solved_at."""
    spread: float
    """Standard deviation of the rewards (n)."""


class Verdict(Frozen):
    """Curation's word on one ticket; the first one settles it."""

    ticket: int
    accepted: bool
    reason: str = ""
    """Why it was refused; empty when accepted."""
    attempt: int = 0
    batch: BatchRef | None = None
    group: GroupRef | None = None
    reward_mean: float | None = None
    """Mean reward of the good rows."""
    prompt_id: str = ""
    outcome: Outcome | None = None
    """What the curriculum learns from; None when there was nothing to judge, or it remembers nothing."""
    metrics: dict[str, float] = {}


class Curated(Record):
    """One entry of log/curated."""

    verdicts: tuple[Verdict, ...]
    covers: dict[str, int]
    """Rollout writer to the number of its scored records that are dealt with; only those that moved."""
    late: tuple[GroupRef, ...] = ()
    """Results of older or later attempts of tickets that were settled already."""
    num_accepted: int
    """Tickets accepted so far, this record included."""
    num_refused: int
    """Tickets refused so far by curation, this record included."""
    metrics: dict[str, float] = {}


class Refused(Record):
    """One entry of log/refused: tickets that the trainer will not train, or (no tickets) a trainer's start."""

    tickets: tuple[int, ...]
    reason: Literal["start", "unreadable", "digest", "contract", "dropped", "timeout", "overbooked"]
    detail: str = ""
    commit: int
    """Newest commit when this was decided."""
    num_refused: int
    """Tickets refused so far by trainers, this record included."""


class Consumed(Frozen):
    """A group that a commit trained on."""

    ticket: int
    attempt: int
    batch: BatchRef
    group: GroupRef
    deadline: int | None = None


class PolicyRef(Frozen):
    """The weights of one version, as objects in the store."""

    kind: Literal["full", "delta"]
    base: int | None = None
    """For a delta, the version it applies to."""
    objects: tuple[ObjectRef, ...]
    digest: str
    """Digest over the published weights; see models.digest."""
    dtype: str
    num_parameters: int


class Commit(Record):
    """One entry of log/commit: optimizer step `version` is true from here on."""

    version: int
    status: Literal["initial", "trained", "skipped"]
    consumed: tuple[Consumed, ...]
    weights: PolicyRef
    checkpoint: tuple[ObjectRef, ...] | None = None
    """Optimizer and random state after this step, when one was written."""
    checkpoint_version: int
    """Newest version up to this one that has a checkpoint."""
    curriculum: ObjectRef | None = None
    """State from which prompts are drawn; None while it is empty."""
    snapshot: ObjectRef | None = None
    """Folded protocol state, when one was written: a reader may start from it."""
    snapshot_version: int = 0
    """Newest version up to this one that has a snapshot; 0 means: from the beginning of the logs."""
    positions: dict[str, int] = {}
    """Log name (claim, curated, refused, commit) to the number of its records that the trainer had applied when
    it chose the groups."""
    num_trained: int
    """Tickets trained so far."""
    num_tokens: int
    """Response tokens trained on so far."""
    metrics: dict[str, float] = {}
    histograms: dict[str, dict[str, float]] = {}
    """Name to bucket to count, for example staleness per token."""
    evidence: str = ""
    """Why the step was skipped."""


class Evaluation(Record):
    """One entry of log/eval."""

    version: int
    digest: str
    metrics: dict[str, float]
    examples: tuple[dict[str, str], ...] = ()


class RuleResult(Frozen):
    """What one rule of a suite found in one window."""

    rule: str
    severity: Literal["warn", "stop"]
    """What a violation does."""
    passed: bool
    expected: str
    """The rule in words, with the bounds it was held to."""
    observed: str
    """What the window holds instead."""
    expectation: str = ""
    """Great Expectations' name of the rule; empty for rules that it does not know."""
    arguments: dict[str, Any] = {}
    """What the expectation was called with, the column included."""
    found: dict[str, Any] = {}
    """What it answered: numbers, counts, examples; without values that are not finite."""


class Audit(Record):
    """One entry of log/audit: a window of rows of one stage, held against that stage's suite of expectations."""

    stage: Literal["raw", "scored", "curated"]
    num_rows: int
    """Rows in the window."""
    num_torn: int = 0
    """Rows that could not be looked at: missing values, columns of unequal lengths, a batch that cannot be read."""
    results: tuple[RuleResult, ...]
    unjudged: tuple[str, ...] = ()
    """Rules that there was not enough history for, or that do not apply to this run."""
    statistics: dict[str, float] = {}
    """<column>/<statistic> of this window: the history that later windows are compared with."""
    covers: dict[str, int]
    """Log to the number of its records that this and earlier windows hold; of all stages."""

    @property
    def verdict(self) -> Literal["passed", "warn", "stop"]:
        """The gravest violation."""
        grave = {result.severity for result in self.results if not result.passed}
        return "stop" if "stop" in grave else "warn" if "warn" in grave else "passed"


class Control(Record):
    """One entry of log/control: what every role must know."""

    kind: Literal["start", "stop", "end", "fail", "dead", "full_weights", "weights", "amend"]
    role: str = ""
    target: str = ""
    """Writer that is dead (`dead`)."""
    version: int | None = None
    """Version asked for in full (`full_weights`), or given (`weights`)."""
    weights: PolicyRef | None = None
    """Where that version is in full (`weights`)."""
    error: str = ""
    """The role's own error (`fail`)."""
    detail: dict[str, Any] = {}


class Heartbeat(Frozen):
    """role/<role>-<writer>.json: the only object that is overwritten."""

    role: str
    writer: str
    host: str
    machine: str = ""
    """Alike in all processes that can see each other's process ids, and in no others."""
    pid: int
    process_started: float
    """Start time of the process, so that a reused pid is not taken for it."""
    beat: int
    """Grows with every heartbeat."""
    state: str
    """What it does or waits for, for people."""
    held: dict[str, int] = {}
    """Ticket (as text) to a counter that moves only with that ticket's progress; 0 while it waits for its turn,
    DELIVERED from the moment its raw record exists until it is settled."""
    busy_s: float = 0.0
    waiting_s: float = 0.0
    processor_s: float = 0.0
    """Processor time of the process since the role began in it, all threads."""
    tokens: int = 0
    at: float = Field(default_factory=time.time)
    done: bool = False
    """Set by a role that ended as it should."""


R = TypeVar("R", bound=BaseModel)

AnyRecord = Claim | Raw | Scored | Curated | Refused | Commit | Evaluation | Audit | Control
"""One of the log records."""


def encode_record(record: BaseModel) -> bytes:
    """Return the record as compact JSON."""
    return record.model_dump_json().encode()


def decode_record(kind: type[R], body: bytes) -> R:
    """Parse a record of a known kind."""
    return kind.model_validate_json(body)
