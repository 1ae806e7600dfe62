"""What a run starts from and learns from: the model, and the envs that give prompts and rewards."""

from typing import Annotated, Literal

from pydantic import Field

from data_contracts.frozen import Frozen


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
    hint: str = ""
    """Name of the field that holds guidance, put behind the question where a rollout is guided; empty for none."""
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
    cross_check: bool = False
    """Compare plain numbers (12, -0.5, 3/4) exactly as well. A response on which the two verifiers differ has no
    reward, and is counted."""


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
