"""What generates: the engine in the rollout role's own process, or a vLLM server."""

from typing import Annotated, Literal

from pydantic import Field

from data_contracts.frozen import Frozen


class TorchEngine(Frozen):
    """The engine in process: continuous batching over slots with a KV cache."""

    type: Literal["torch"] = "torch"
    slots: int = Field(default=256, gt=0)
    """Sequences decoded at once."""
    max_length: int | None = None
    """Prompt and response in tokens; None takes the model's limit."""


class VllmEngine(Frozen):
    """A vLLM server in an environment of its own: started, watched and stopped by the rollout role, or one that runs.

    Weights come to it as files. It says itself, by a digest, which it holds, and in every response which sampled what.
    """

    type: Literal["vllm"] = "vllm"
    slots: int = Field(default=256, gt=0)
    """Sequences decoded at once."""
    max_length: int | None = None
    """Prompt and response in tokens; None takes the model's limit."""
    url: str = ""
    """Root address of a server that runs already; empty starts one. It serves one rollout process at a time."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port on 127.0.0.1 of a server that is started; 0 takes a free one."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the vLLM of that environment is built for."""
    environment: str = ".venv-vllm"
    """Folder of the virtual environment that vLLM is installed in, which `make vllm` makes."""
    in_flight: Literal["keep", "recompute"] = "keep"
    """What happens to the keys and values of sequences in flight when weights change: they go on with those they have,
    or theirs are computed again under the new weights, prompt and response so far."""
    cache_gib: int = Field(default=2, gt=0)
    """Memory for keys and values on a CPU, in GiB; on a GPU see vLLM's --gpu-memory-utilization."""
    arguments: tuple[str, ...] = ()
    """More arguments for the server."""
    folder: str = ""
    """Where weights are put for the server, which must see it too; empty takes one in the system's temporary folder."""
    start_limit_s: float = Field(default=300.0, gt=0)
    """A server that does not answer this long after its start has failed."""
    stall_limit_s: float = Field(default=120.0, gt=0)
    """A server that has sampled nothing for this long with requests in flight is taken for dead."""
    max_restarts: int = Field(default=3, ge=0)
    """How often the rollout role starts a server again that died, or connects again to one that was away."""


EngineConfig = Annotated[TorchEngine | VllmEngine, Field(discriminator="type")]
