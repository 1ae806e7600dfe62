"""The configuration of a run: frozen, closed, self-describing. Read once, written to run.json, never changed.

A choice between kinds is a union with a `type`, not a string beside optional fields.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_contracts.algorithm import AlgorithmConfig


class Frozen(BaseModel):
    """An immutable value that refuses unknown fields; the text under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TinyModel(Frozen):
    """A Llama of about 0.6 M parameters with a character tokenizer, warm-started by supervision."""

    type: Literal["tiny"] = "tiny"
    hidden_size: int = Field(default=128, gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(default=384, gt=0)
    """Width of the feed-forward layer."""
    num_layers: int = Field(default=3, gt=0)
    """Transformer blocks."""
    num_heads: int = Field(default=4, gt=0)
    """Attention heads."""
    max_positions: int = Field(default=64, gt=0)
    """Longest sequence in tokens, prompt and response together."""
    characters: str = "0123456789+-*=? "
    """The vocabulary beside pad, bos and eos."""
    warm_start_accuracy: float = Field(default=0.35, ge=0, le=1)
    """The warm start stops at the first check that reaches this greedy accuracy on held-out prompts."""
    warm_start_max_steps: int = Field(default=600, ge=0)
    """The warm start stops here at the latest."""
    warm_start_batch: int = Field(default=128, gt=0)
    """Examples of one warm-start step."""
    warm_start_lr: float = Field(default=2e-3, gt=0)
    """Learning rate of the warm start."""


class LocalModel(Frozen):
    """Any Hugging Face causal language model in a local folder."""

    type: Literal["local"] = "local"
    path: str
    """Folder with config.json, safetensors and tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Format in which weights are published and in which the rollout engine computes."""


ModelConfig = Annotated[TinyModel | LocalModel, Field(discriminator="type")]


class AdditionEnv(Frozen):
    """Two-digit sums such as 17+25=, answered with three digits; made on the fly."""

    type: Literal["addition"] = "addition"
    weight: float = Field(default=1.0, gt=0)
    """Share of prompts, relative to the other envs."""
    max_operand: int = Field(default=99, gt=0, le=9999)
    """Largest number added."""
    name: str = ""
    """Name in prompt ids; empty takes `addition`. Two envs of a run need two names."""


class ReasoningGymEnv(Frozen):
    """A data set of the reasoning-gym package, scored by its own scorer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the data set, for example chain_sum."""
    parameters: dict[str, int | float | str | bool | list[int] | list[str]] = {}
    """Arguments of the data set."""
    weight: float = Field(default=1.0, gt=0)
    """Share of prompts, relative to the other envs."""
    size: int = Field(default=100_000, gt=0)
    """Number of distinct prompts."""
    extract: Literal["whole", "last_number", "answer_tag"] = "whole"
    """Which part of the response is the answer: all of it, its last number, or what stands in <answer> tags."""
    exact: bool = False
    """Count only a score of 1 as a reward; a partial score becomes 0."""
    instruction: str = ""
    """Text put before every question."""
    few_shot: int = Field(default=0, ge=0, le=16)
    """Solved examples shown before the question, as earlier turns of the chat."""
    name: str = ""
    """Name in prompt ids; empty takes that of the data set. Two envs of a run need two names."""


class ProblemFile(Frozen):
    """Problems from a file of JSON lines, one object each; a fifth of them, chosen by their text, is held out."""

    path: str
    """The file."""
    sha256: str = ""
    """SHA-256 of the file in hexadecimal; when given, another file of that name is refused."""
    question: str = "question"
    """Name of the field that holds the question."""
    instruction: str = ""
    """Text put before every question."""
    weight: float = Field(default=1.0, gt=0)
    """Share of prompts, relative to the other envs."""
    name: str = ""
    """Name in prompt ids; empty takes the kind of env. Two envs of a run need two names."""


class MathEnv(ProblemFile):
    """Mathematical problems whose answers are compared by the math-verify package: 0.5 is \\frac{1}{2}."""

    type: Literal["math"] = "math"
    answer: str = "answer"
    """Name of the field that holds the gold answer, in LaTeX or plain."""
    answer_after: str = ""
    """The gold answer is what follows the last occurrence of this text in its field, as #### in GSM8K."""
    boxed_weight: float = Field(default=0.0, ge=0, lt=1)
    """Share of the reward that is for an answer in \\boxed{}; the rest is for a right answer."""


class CodeEnv(ProblemFile):
    """Programming problems: the response's Python program runs against tests in a sandbox.

    A problem has `tests`, each either {"stdin": text, "stdout": text} or {"call": function, "args": [...], "expect":
    JSON value}, and a gold `solution`. What is expected never enters the sandbox.
    """

    type: Literal["code"] = "code"
    partial: bool = False
    """Reward the share of tests passed; otherwise all must pass."""
    sandbox: Literal["namespaces", "limits"] = "namespaces"
    """How programs are shut in (see infra/sandbox.py). `limits` is weaker, for machines without namespaces."""
    time_s: float = Field(default=2.0, gt=0)
    """Limit on the processor time of one run of a program; it may last twice that and a second in all."""
    total_s: float = Field(default=8.0, gt=0)
    """Limit on all runs of one response; below reward.timeout_s, so that a slow program is a wrong answer and not a
    failure of the verifier."""
    memory_mb: int = Field(default=512, ge=64)
    """Limit on the address space of each process, in MiB."""
    processes: int = Field(default=4, gt=0)
    """Limit on processes and threads of a program."""
    output_kb: int = Field(default=64, gt=0)
    """Limit on each output, in KiB."""


class CustomEnv(Frozen):
    """An env of one's own."""

    type: Literal["custom"] = "custom"
    path: str
    """module:function that takes `parameters` as keywords and returns an Env (see tasks/envs/protocol.py)."""
    parameters: dict[str, int | float | str | bool | list[int] | list[str]] = {}
    """Keyword arguments of the function."""
    weight: float = Field(default=1.0, gt=0)
    """Share of prompts, relative to the other envs."""


EnvConfig = Annotated[AdditionEnv | ReasoningGymEnv | MathEnv | CodeEnv | CustomEnv, Field(discriminator="type")]


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


class TorchEngine(Frozen):
    """The engine in process: continuous batching over slots with a KV cache."""

    type: Literal["torch"] = "torch"
    slots: int = Field(default=256, gt=0)
    """Sequences decoded at once."""
    max_length: int | None = None
    """Prompt and response in tokens; None takes the model's limit."""


EngineConfig = Annotated[TorchEngine, Field()]


class StalenessConfig(Frozen):
    """How far rollouts may run ahead of training."""

    max_staleness: Annotated[int, Field(ge=0)] | Literal["unbounded"] = 1
    """Bound in versions between sampling and training (eta): 0 is synchronous, unbounded needs max_unsettled."""
    stragglers: Literal["wait", "interrupt", "drop"] = "wait"
    """What happens to a group that would miss its deadline: training waits for it, it goes on under newer weights
    with its old tokens out of the loss, or it is dropped."""
    ticket_timeout_s: float | None = Field(default=None, gt=0)
    """Drop a ticket that has been out this long, by the trainer's clock."""
    max_unsettled: int | None = Field(default=None, gt=0)
    """Limit on tickets claimed and not yet settled; needed when max_staleness is unbounded."""
    max_attempts: int = Field(default=3, gt=0)
    """A ticket whose lease was lost this often is given up."""
    lease_s: float = Field(default=30.0, gt=0)
    """A lease is lost when its counter has not moved for this long, by the observer's clock."""
    exact: bool = False
    """Roll out every ticket under exactly the version that admits it, so that from step max_staleness on each group is
    max_staleness versions old. Holds as long as no rollout process dies; results then do not depend on timing."""

    @model_validator(mode="after")
    def _bounded_somehow(self) -> "StalenessConfig":
        if self.bound is None and self.max_unsettled is None:
            raise ValueError("max_staleness unbounded needs max_unsettled: say how many groups may wait at most")
        if self.exact and (self.bound is None or self.stragglers != "wait" or self.ticket_timeout_s is not None):
            raise ValueError(
                "exact needs max_staleness as a number, stragglers 'wait' and no ticket_timeout_s: anything else would "
                "sample or drop tickets by timing"
            )
        return self

    @property
    def bound(self) -> int | None:
        """The bound in versions; None when there is none."""
        return None if self.max_staleness == "unbounded" else self.max_staleness


class RolloutConfig(Frozen):
    """The rollout role."""

    workers: int = Field(default=1, gt=0)
    """Rollout processes on this run."""
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


class CustomRule(RowRule):
    """A rule of one's own."""

    type: Literal["custom"] = "custom"
    path: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function that takes a Group (tasks/curation/group.py) and `parameters` as keywords, and returns [N] bool:
    the rows that break the rule. A pure function: the same rows, the same answer."""
    parameters: dict[str, int | float | str | bool] = {}
    """Keyword arguments of the function."""


CurateRule = Annotated[
    DuplicateRule | LengthRule | RepetitionRule | TruncationRule | CustomRule, Field(discriminator="type")
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

    threads: int = Field(default=1, gt=0)
    """CPU threads."""
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
    uri: str | None = None
    """Tracking server; None takes the one that `rollflow up` started."""
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
    """How often a role that failed is started again before the run fails."""
    scheduler: str | None = None
    """Address of an existing Dask cluster; None starts local processes."""


class RunConfig(Frozen):
    """Everything that decides a run."""

    name: str = Field(default="run", pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")
    """Short name; the run's id is this with a random suffix unless one is given."""
    seed: int = Field(default=0, ge=0)
    """Decides prompts, sampling and initial weights."""
    steps: int = Field(default=200, gt=0)
    """Commits to make."""
    groups_per_step: int = Field(default=32, gt=0)
    """Groups that one commit consumes (B)."""
    samples_per_group: int = Field(default=8, gt=0)
    """Responses to one prompt (G)."""
    deterministic: bool | None = None
    """Bit-exact runs: fixed shapes, settling in ticket order. None: on exactly when max_staleness is 0 or exact, and
    rollout and training use one thread each."""
    store: str = ".rollflow/store"
    """Folder, or s3:// URL, that holds runs."""
    model: ModelConfig = TinyModel()
    """The policy to start from."""
    envs: tuple[EnvConfig, ...] = (AdditionEnv(),)
    """Where prompts and rewards come from."""
    staleness: StalenessConfig = StalenessConfig()
    """How far rollouts may run ahead."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout role."""
    reward: RewardConfig = RewardConfig()
    """The reward role."""
    curate: CurateConfig = CurateConfig()
    """The curation role."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, importance weights, trust region, aggregation."""
    train: TrainConfig = TrainConfig()
    """The training role."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """The evaluation role."""
    audit: AuditConfig = AuditConfig()
    """The audit of data in windows."""
    tracking: TrackingConfig = TrackingConfig()
    """The exporter into MLflow."""
    orchestration: OrchestrationConfig = OrchestrationConfig()
    """How roles are run and watched."""

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        if self.train.inner_updates > self.groups_per_step:
            raise ValueError(
                f"train.inner_updates {self.train.inner_updates} exceeds groups_per_step {self.groups_per_step}: "
                "every update needs a group"
            )
        if self.curate.min_samples > self.samples_per_group:
            raise ValueError(
                f"curate.min_samples {self.curate.min_samples} exceeds samples_per_group {self.samples_per_group}: "
                "every group would be refused"
            )
        limit = self.staleness.max_unsettled
        if limit is not None and limit < self.groups_per_step:
            raise ValueError(
                f"staleness.max_unsettled {limit} is below groups_per_step {self.groups_per_step}: "
                "no step could be filled"
            )
        for env in self.envs:
            if isinstance(env, CodeEnv) and env.total_s >= self.reward.timeout_s:
                raise ValueError(
                    f"envs: total_s {env.total_s} of a code env is not below reward.timeout_s "
                    f"{self.reward.timeout_s}: raise reward.timeout_s"
                )
        if not self.envs:
            raise ValueError("envs is empty: name at least one")
        self._refuse_ratios_of_two_distributions()
        return self

    def _refuse_ratios_of_two_distributions(self) -> None:
        """Refuse ratios to a nucleus: recorded log-probabilities are those of the tokens kept, the trainer's of all."""
        sampling, part = self.rollout.sampling, self.algorithm.compared_with_behavior()
        cut = f"top_p {sampling.top_p}" if sampling.top_p < 1 else f"top_k {sampling.top_k}" if sampling.top_k else ""
        if cut and part:
            raise ValueError(
                f"rollout.sampling.{cut} with algorithm {part}: it compares log-probabilities of the kept tokens alone "
                "with the trainer's of all tokens, which is no ratio of one distribution; set top_p 1 and top_k 0, or "
                "algorithm.proximal 'recomputed' without importance weights"
            )

    @property
    def is_deterministic(self) -> bool:
        """Whether this run must be bit-exact."""
        if self.deterministic is not None:
            return self.deterministic
        fixed = self.staleness.bound == 0 or self.staleness.exact
        return fixed and self.rollout.threads == 1 and self.train.threads == 1
