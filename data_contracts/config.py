"""The configuration of a run: frozen, closed, self-describing. Read once, written to run.json, never changed.

A choice between kinds is a union with a `type`, not a string beside optional fields. Models and envs stand in
config_sources.py, the sections of the roles in config_roles.py, what trains in config_backend.py; all of them can be
imported from here.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from data_contracts.algorithm import (
    AlgorithmConfig,
    EwmaProximal,
    OffContextWeights,
    Opob,
    Otb,
    Remax,
    SlowFastUpdate,
    SnapshotProximal,
    Tree,
)
from data_contracts.config_backend import DeepspeedBackend, TorchBackend, TrainBackend
from data_contracts.config_engine import EngineConfig, TorchEngine, VllmEngine
from data_contracts.config_roles import (
    AuditConfig,
    BalanceRule,
    Branching,
    ContrastRule,
    CurateConfig,
    CurateRule,
    CustomRule,
    DuplicateRule,
    EvaluateConfig,
    LengthRule,
    OrchestrationConfig,
    OverlongPenalty,
    RepetitionRule,
    RewardConfig,
    RolloutConfig,
    RowRule,
    SamplingConfig,
    TrackingConfig,
    TrainConfig,
    TruncationRule,
)
from data_contracts.config_sources import (
    AdditionEnv,
    CodeEnv,
    CustomEnv,
    EnvConfig,
    LocalModel,
    MathEnv,
    ModelConfig,
    ProblemFile,
    ReasoningGymEnv,
    TinyModel,
)
from data_contracts.curriculum_config import AeroSampler, CurriculumConfig, PilotCommitSampler
from data_contracts.frozen import Address, Frozen

__all__ = [
    "AdaptiveStaleness",
    "AdditionEnv",
    "AuditConfig",
    "BalanceRule",
    "Branching",
    "CodeEnv",
    "ContrastRule",
    "CurateConfig",
    "CurateRule",
    "CustomEnv",
    "CustomRule",
    "DeepspeedBackend",
    "DuplicateRule",
    "EngineConfig",
    "EnvConfig",
    "EvaluateConfig",
    "Frozen",
    "LengthRule",
    "LocalModel",
    "MathEnv",
    "ModelConfig",
    "OrchestrationConfig",
    "OverlongPenalty",
    "ProblemFile",
    "ReasoningGymEnv",
    "RepetitionRule",
    "RewardConfig",
    "RolloutConfig",
    "RowRule",
    "RunConfig",
    "SamplingConfig",
    "StalenessConfig",
    "TinyModel",
    "TorchBackend",
    "TorchEngine",
    "TrackingConfig",
    "TrainBackend",
    "TrainConfig",
    "TruncationRule",
    "VllmEngine",
]


class AdaptiveStaleness(Frozen):
    """Rollouts run less far ahead while what they sample is too far from the policy that trains on it.

    After a commit with a low effective sample size the limit in force is halved, after one with a high one it rises by
    a version; then it stays until tickets claimed before have been trained. It starts at max_staleness and never
    exceeds it.
    """

    metric: Literal["policy/ess_token", "policy/ess_sequence"] = "policy/ess_token"
    """Which effective sample size of a commit decides: over tokens, or over sequences, which falls with length."""
    low: float = Field(default=0.5, ge=0, le=1)
    """Below this the limit is halved."""
    high: float = Field(default=0.8, ge=0, le=1)
    """From this on the limit rises by one."""
    lowest: int = Field(default=0, ge=0)
    """The limit is at least this (versions)."""

    @model_validator(mode="after")
    def _leaves_a_middle(self) -> "AdaptiveStaleness":
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: the limit would rise and fall at once")
        return self


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
    adaptive: AdaptiveStaleness | None = None
    """Lower the bound in force while data are too far off the policy; None keeps it at max_staleness."""

    @model_validator(mode="after")
    def _bounded_somehow(self) -> "StalenessConfig":
        if self.bound is None and self.max_unsettled is None:
            raise ValueError("max_staleness unbounded needs max_unsettled: say how many groups may wait at most")
        if self.exact and (self.bound is None or self.stragglers != "wait" or self.ticket_timeout_s is not None):
            raise ValueError(
                "exact needs max_staleness as a number, stragglers 'wait' and no ticket_timeout_s: anything else would "
                "sample or drop tickets by timing"
            )
        if self.adaptive is not None:
            if self.exact:
                raise ValueError("adaptive and exact: groups cannot be of one exact age while the bound moves")
            if not self.bound or self.adaptive.lowest >= self.bound:
                raise ValueError(
                    f"adaptive has no effect with max_staleness {self.max_staleness} and adaptive.lowest "
                    f"{self.adaptive.lowest}: the bound in force moves between them"
                )
        return self

    @property
    def bound(self) -> int | None:
        """The bound in versions; None when there is none."""
        return None if self.max_staleness == "unbounded" else self.max_staleness


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
    rollout and training use one thread each, unless vLLM samples."""
    store: Address = ".rollflow/store"
    """Folder, or s3:// URL, that holds runs. The command line takes ROLLFLOW_STORE, or store/ below ROLLFLOW_HOME."""
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
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which prompts are drawn, and what is used again."""
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
        self._refuse_devices_that_do_not_fit()
        most = self.rollout.max_workers
        if most is not None and most < self.rollout.workers:
            raise ValueError(f"rollout.max_workers {most} is below rollout.workers {self.rollout.workers}")
        self._refuse_odd_curricula()
        self._refuse_rollouts_that_do_not_fit()
        if self.deterministic and self.rollout.engine.type == "vllm":
            raise ValueError(
                "deterministic with rollout.engine.type 'vllm': its samples depend on what else is in its batch; "
                "leave deterministic out or take the torch engine"
            )
        self._refuse_ratios_of_two_distributions()
        self._refuse_what_ranks_cannot_do()
        return self

    def _refuse_odd_curricula(self) -> None:
        """Refuse what the curriculum cannot keep: exact draws that depend on timing, age bounds that nothing meets."""
        curriculum, bound = self.curriculum, self.staleness.bound or 0
        if self.staleness.exact and not curriculum.is_plain:
            raise ValueError(
                "staleness.exact with a curriculum that remembers verdicts: which of them a commit has seen depends on "
                "timing; take curriculum.sampler 'order' without reuse and successes, or max_staleness 0"
            )
        parts = {"sampler": curriculum.sampler, "reuse": curriculum.reuse, "successes": curriculum.successes}
        for name, part in parts.items():
            age = getattr(part, "max_age", None)
            if age is not None and age <= bound:
                raise ValueError(
                    f"curriculum.{name}.max_age {age} is not above max_staleness {bound}: what was sampled before is "
                    f"older than that when it is trained; raise it to {2 * bound + 1} or more"
                )
        least = self.samples_per_group
        if isinstance(curriculum.sampler, PilotCommitSampler):
            least = curriculum.sampler.pilot_samples
        elif isinstance(curriculum.sampler, AeroSampler):
            least = curriculum.sampler.explore
        if least > self.samples_per_group:
            raise ValueError(
                f"curriculum.sampler asks for {least} samples, samples_per_group is {self.samples_per_group}: raise it"
            )

    def _refuse_devices_that_do_not_fit(self) -> None:
        devices = self.orchestration.devices
        for role, num in (("rollout", self.rollout.workers), ("train", 1)):
            if role in devices and len(devices[role]) != num:
                raise ValueError(
                    f"orchestration.devices.{role} is for {len(devices[role])} processes, and there are {num}"
                )
        backend = self.train.backend
        if "train" in devices and isinstance(backend, DeepspeedBackend) and backend.collectives == "nccl":
            num = devices["train"][0].count(",") + 1
            if num != backend.num_processes:
                raise ValueError(
                    f"orchestration.devices.train names {num} devices for {backend.num_processes} processes of "
                    "train.backend: every one takes a device of its own"
                )
        named = [device for entries in devices.values() for entry in entries for device in entry.split(",")]
        double = sorted({device for device in named if named.count(device) > 1})
        if double:
            raise ValueError(f"orchestration.devices: {', '.join(double)} named more than once")

    def _refuse_rollouts_that_do_not_fit(self) -> None:
        rollout, size = self.rollout, self.samples_per_group
        if rollout.guided_samples > size:
            raise ValueError(f"rollout.guided_samples {rollout.guided_samples} exceeds samples_per_group {size}")
        if rollout.branching is not None and rollout.branching.trunks >= size:
            raise ValueError(
                f"rollout.branching.trunks {rollout.branching.trunks} leaves no sample of {size} to branch off; "
                "lower it, or raise samples_per_group"
            )
        if rollout.branching is not None and rollout.guided_samples:
            raise ValueError("rollout.branching and rollout.guided_samples: a branch could not tell its guidance")
        if isinstance(self.algorithm.importance, OffContextWeights) and not rollout.guided_samples:
            raise ValueError(
                "algorithm.importance 'off_context' has no effect without guidance: set rollout.guided_samples"
            )
        is_remax, is_greedy = isinstance(self.algorithm.advantage, Remax), rollout.greedy_sample
        if is_remax and not is_greedy:
            raise ValueError("algorithm.advantage 'remax' compares with a greedy response: set rollout.greedy_sample")
        if is_greedy and not is_remax:
            raise ValueError(
                "rollout.greedy_sample is the baseline of algorithm.advantage 'remax' alone: choose it, or leave it out"
            )
        if is_greedy and (size < 2 or rollout.branching is not None or rollout.guided_samples == size):
            raise ValueError(
                f"rollout.greedy_sample is one of {size} samples, from the plain prompt: it wants samples_per_group 2 "
                "or more, no rollout.branching, and fewer rollout.guided_samples"
            )
        if is_greedy and isinstance(self.curriculum.sampler, PilotCommitSampler | AeroSampler):
            raise ValueError(
                f"rollout.greedy_sample with curriculum.sampler {self.curriculum.sampler.type!r}, which samples groups "
                "in parts: each would have one; choose another sampler"
            )
        if isinstance(self.algorithm.advantage, Tree) and rollout.branching is None:
            raise ValueError("algorithm.advantage 'tree' needs a tree: set rollout.branching, or use advantage 'grpo'")

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

    def _refuse_what_ranks_cannot_do(self) -> None:
        """Refuse algorithms that need more than their part of the weights or gradients in every rank."""
        backend, algorithm = self.train.backend, self.algorithm
        if not isinstance(backend, DeepspeedBackend):
            return
        stage, is_half = backend.zero_stage, isinstance(self.model, LocalModel) and self.model.dtype == "bfloat16"
        advantage, proximal, reason, instead = algorithm.advantage, algorithm.proximal, "", ""
        if isinstance(advantage, Opob):
            reason = "algorithm.advantage 'opob' needs each sample's own gradient, which ranks do not have"
        elif isinstance(advantage, Otb):
            reason = "algorithm.advantage 'otb' needs whole distributions from a whole policy"
        elif algorithm.value is not None:
            reason = f"algorithm.advantage {advantage.type!r} has a value model, which needs a whole policy"
        elif isinstance(algorithm.update, SlowFastUpdate):
            reason = "algorithm.update 'slow_fast' moves weights back, which split weights do not do"
        elif isinstance(proximal, EwmaProximal | SnapshotProximal) and stage == 3:
            reason, instead = f"algorithm.proximal {proximal.type!r} keeps whole weights", "zero_stage 2 or lower"
        elif isinstance(proximal, EwmaProximal) and is_half:
            reason, instead = "algorithm.proximal 'ewma' averages whole float32 weights", "model.dtype float32"
        elif stage == 0 and is_half:
            reason, instead = "zero_stage 0 has no float32 weights beside bfloat16 ones", "zero_stage 1 or higher"
        if reason:
            choices = " or ".join([*([instead] if instead else []), "train.backend.type torch"])
            raise ValueError(f"train.backend 'deepspeed': {reason}; set {choices}")

    @property
    def is_deterministic(self) -> bool:
        """Whether this run must be bit-exact."""
        if self.deterministic is not None:
            return self.deterministic
        if self.rollout.engine.type == "vllm":
            return False
        fixed = self.staleness.bound == 0 or self.staleness.exact
        return fixed and self.rollout.threads == 1 and self.train.threads == 1
