"""What each role does: one section of the configuration for each."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from data_contracts.config_backend import TorchBackend, TrainBackend
from data_contracts.config_engine import EngineConfig, TorchEngine
from data_contracts.frozen import Address, Frozen


class SamplingConfig(Frozen):
    """The distribution responses are drawn from."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus kept; less than 1 only with an algorithm that does not compare with the behavior policy."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept; 0 keeps all, others as with top_p."""
    max_new_tokens: int = Field(default=4, gt=0)
    """Limit on a response in tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, beside the end-of-sequence token."""


class Branching(Frozen):
    """Some samples of a group go on from the middle of others' responses, which makes the group a tree."""

    trunks: int = Field(default=1, gt=0)
    """Samples of each group that begin at the prompt; the others branch off these, in turn."""
    at: Literal["evenly", "unlikely"] = "evenly"
    """Where they branch off: at equal distances along the response, or in place of its least likely tokens."""


class RolloutConfig(Frozen):
    """The rollout role."""

    workers: int = Field(default=1, ge=0)
    """Rollout processes that the run starts itself; others may join and leave (`rollflow rollout`). With 0 it waits
    for those."""
    max_workers: int | None = Field(default=None, gt=0)
    """Rollout processes at most, when workers that offer ROLLOUT join a Dask cluster while the run goes on; None stays
    at `workers`."""
    threads: int = Field(default=1, gt=0)
    """CPU threads of each."""
    engine: EngineConfig = TorchEngine()
    """What generates."""
    sampling: SamplingConfig = SamplingConfig()
    """The distribution responses are drawn from."""
    claim_block: int = Field(default=32, gt=0)
    """Tickets claimed at once, at most."""
    groups_per_batch: int = Field(default=32, gt=0)
    """Finished groups written as one batch, at most; whatever is finished is written when nothing else is ready."""
    swap_in_flight: bool = True
    """Take new weights between two tokens; otherwise only when no sequence is in flight."""
    max_errors: int = Field(default=3, ge=0)
    """Retries of one sample after an engine error before it becomes an error row."""
    guided_samples: int = Field(default=0, ge=0)
    """Samples of each group whose prompt holds the env's guidance (a hint, or the beginning of a solution); they are
    trained on the prompt without it, so an importance such as off_context should account for it."""
    greedy_sample: bool = False
    """The last sample of each group takes the likeliest token everywhere (its temperature is 0): the baseline of
    advantage `remax`, never in the loss itself."""
    branching: Branching | None = None
    """Roll groups out as trees, for advantage `tree`; None begins every sample at the prompt."""

    @field_validator("engine", mode="before")
    @classmethod
    def _torch_unless_named(cls, value: object) -> object:
        return {"type": "torch"} | value if isinstance(value, dict) else value


class OverlongPenalty(Frozen):
    """A penalty on responses that come near the length limit, as a reward component `overlong`."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Length from which the whole penalty is due; None takes rollout.sampling.max_new_tokens."""
    buffer_tokens: int = Field(gt=0)
    """The penalty grows from 0 over this many tokens below `max_tokens`."""
    factor: float = Field(default=1.0, gt=0)
    """The whole penalty, in units of reward."""


class RewardConfig(Frozen):
    """The reward role."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Limit on one verification."""
    max_retries: int = Field(default=2, ge=0)
    """Retries of a verification that failed for a reason of the infrastructure."""
    overlong: OverlongPenalty | None = None
    """Soft penalty on long responses; None has none."""


class RowRule(Frozen):
    """A rule of curation that looks at rows: what it does with those that break it."""

    then: Literal["leave_out", "refuse"] = "leave_out"
    """Leave the rows out of their group, or refuse the whole group and draw another. What rows have in common that
    are left out (long, wrong) is missing from the group's baseline too."""
    max_share: float = Field(default=0.0, ge=0, lt=1)
    """With `refuse`, the share of a group's rows that may break the rule before the group is refused."""


class DuplicateRule(RowRule):
    """Responses that say again what an earlier row of the group, or of a recent accepted group, has said."""

    type: Literal["duplicates"] = "duplicates"
    similarity: float = Field(default=1.0, gt=0, le=1)
    """1 finds equal token sequences; less finds responses that share this much of their 4-grams (MinHash, with an
    error of about 0.06)."""
    min_tokens: int = Field(default=16, ge=4)
    """Shorter responses are never duplicates: short answers agree by right."""
    window: int = Field(default=0, ge=0, le=4096)
    """Accepted groups that are looked back at, in the order of the verdicts; 0 looks at the group alone."""


class LengthRule(RowRule):
    """Responses that are too short or too long."""

    type: Literal["length"] = "length"
    min_tokens: int = Field(default=1, ge=0)
    """Shortest response kept."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest response kept; None keeps all."""


class RepetitionRule(RowRule):
    """Responses that go round in circles."""

    type: Literal["repetition"] = "repetition"
    max_repeated: float = Field(default=0.5, ge=0, lt=1)
    """Largest share of 4-grams that may have occurred earlier in the response."""
    min_tokens: int = Field(default=32, ge=4)
    """Shorter responses are not judged."""


class TruncationRule(RowRule):
    """Responses cut off by the length limit. To keep them for the baseline and take only their tokens out of the
    loss, set algorithm.truncated instead."""

    type: Literal["truncation"] = "truncation"


class ContrastRule(Frozen):
    """High-contrast pairs, as in Shuffle-R1: the best response with the worst, the second best with the second worst,
    and so on; only the pairs that differ most are trained on. The baseline is that of the rows that stay."""

    type: Literal["contrast"] = "contrast"
    keep: float = Field(default=0.5, gt=0, le=1)
    """Share of the pairs that stay; the odd response in the middle leaves with the rest."""


class BalanceRule(Frozen):
    """As AERO: where fewer than half of the responses pass, all that pass stay and as many that fail."""

    type: Literal["balance"] = "balance"
    solved_at: float = 0.5
    """A response with this reward or more has passed."""
    per_pass: float = Field(default=1.0, gt=0)
    """Failed responses that stay for each that has passed; at least one."""


class CustomRule(RowRule):
    """A rule of one's own."""

    type: Literal["custom"] = "custom"
    path: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function that takes a Group (tasks/curation/group.py) and `parameters` as keywords, and returns [N] bool:
    the rows that break the rule. A pure function: the same rows, the same answer."""
    parameters: dict[str, int | float | str | bool] = {}
    """Keyword arguments of the function."""


CurateRule = Annotated[
    DuplicateRule | LengthRule | RepetitionRule | TruncationRule | ContrastRule | BalanceRule | CustomRule,
    Field(discriminator="type"),
]


class CurateConfig(Frozen):
    """The curation role."""

    rules: tuple[CurateRule, ...] = ()
    """Rules on rows, in this order, each on what the ones before have left."""
    min_samples: int = Field(default=2, gt=0)
    """A group with fewer good rows is refused."""
    drop_zero_variance: bool = False
    """Refuse groups whose rewards are all equal, and draw others in their place."""


class TrainConfig(Frozen):
    """The training role."""

    backend: TrainBackend = TorchBackend()
    """Where the model under training lives."""
    threads: int = Field(default=1, gt=0)
    """CPU threads of each process that trains."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Commits over which the learning rate rises linearly."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the last step, as a fraction of the peak (linear and cosine)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first moment decay."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second moment decay."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator floor."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    tokens_per_microbatch: int = Field(default=8192, gt=0)
    """Packed tokens (prompts included) of one forward pass; losses add up to that of one large batch."""
    inner_updates: int = Field(default=1, gt=0)
    """Optimizer updates of one commit; its groups are split evenly over them."""
    checkpoint_every: int = Field(default=20, gt=0)
    """Commits between checkpoints of optimizer and random state."""
    full_weights_every: int = Field(default=1, gt=0)
    """Commits between full weights; in between, exact sparse differences are published."""


class EvaluateConfig(Frozen):
    """The evaluation role."""

    every: int = Field(default=20, gt=0)
    """Versions between evaluations; the first and the last version are always evaluated."""
    num_prompts: int = Field(default=256, gt=0)
    """Held-out prompts of each env."""
    threads: int = Field(default=1, gt=0)
    """CPU threads."""
    max_new_tokens: int | None = None
    """Limit on a response; None takes that of rollout."""


class AuditConfig(Frozen):
    """The audit of data in windows, by suites of expectations; nothing waits for it."""

    enabled: bool = True
    """Audit at all."""
    window_rows: int = Field(default=2048, gt=0)
    """A window is closed when it has this many rows,"""
    window_s: float = Field(default=60.0, gt=0)
    """or when it has been open this long and has at least `min_rows`."""
    min_rows: int = Field(default=64, gt=0)
    """A window of fewer rows says too little to be judged."""
    history: int = Field(default=20, gt=0)
    """Earlier windows of the run that distribution rules compare with, at most."""
    min_history: int = Field(default=4, gt=1)
    """Distribution rules begin once there are this many."""
    suites: str = ""
    """Folder with raw.toml, scored.toml or curated.toml, each in place of the shipped suite of that stage (see
    data_contracts/expectations)."""
    severity: dict[str, Literal["off", "warn", "stop"]] = {}
    """Rule name to what its violation does, in place of what the suite says."""


class TrackingConfig(Frozen):
    """The exporter into MLflow."""

    enabled: bool = True
    """Export at all; the records do not need it."""
    uri: Address | None = None
    """Tracking server; None takes the one that `rollflow up` started. User and password belong into
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD: this value is written into the run's records."""
    experiment: str = "rollflow"
    """Experiment that holds one MLflow run for each run."""
    poll_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks for new records."""
    register_every: int = Field(default=20, gt=0)
    """Versions between registered policies; evaluated and final versions are registered too."""
    drain_s: float = Field(default=60.0, ge=0)
    """How long the end of a run waits for the exporter to catch up."""


class OrchestrationConfig(Frozen):
    """How roles are run and watched."""

    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between heartbeats."""
    heartbeat_limit_s: float = Field(default=60.0, gt=0)
    """A role whose heartbeat has not moved for this long, by the observer's clock, is taken for dead."""
    role_retries: int = Field(default=2, ge=0)
    """How often a role that failed is started again before the run fails. A process that died counts as a failure when
    the run has made no step since it last died."""
    scheduler: Address | None = Field(default=None, pattern=r"^[a-z]+://.+")
    """Address of an existing Dask cluster, such as tcp://10.0.0.1:8786, with a worker process for every role (see
    infra/cluster.py); None starts local processes."""
    devices: dict[Literal["rollout", "train"], tuple[Annotated[str, Field(pattern=r"^\d+(,\d+)*$")], ...]] = {}
    """Role to the CUDA devices of each of its local processes in turn, as in CUDA_VISIBLE_DEVICES; a role that is not
    named sees all. Workers of a Dask cluster are started with their own."""
