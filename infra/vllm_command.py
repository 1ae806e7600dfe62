"""The command line and the environment of a vLLM server, and where its Python is found."""

import os
from collections.abc import Mapping
from pathlib import Path

from data_contracts.config import VllmEngine
from data_contracts.errors import ConfigError
from infra.vllm_server import HOST, SupervisedServer

EXTENSION = "models.vllm_extension.WeightsExtension"
ROOT = Path(__file__).resolve().parents[1]
CPU_BATCH_TOKENS = 4096
CPU_VARIABLES = {
    # The first response would wait for a compiler, for the sake of one comparison.
    "TORCHDYNAMO_DISABLE": "1",
    # The engine's process computes itself: one process less to import everything, and none to talk to at every step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def make_server(
    config: VllmEngine, files: Mapping[str, bytes], folder: Path, *, dtype: str, threads: int, log: Path
) -> SupervisedServer:
    """Return a server that is still to be started, with the model's small files by name put into `folder`.

    Raises:
        ConfigError: there is no vLLM in the environment.
    """
    python, model = vllm_python(config.environment), folder / "model"
    model.mkdir()
    for name, body in files.items():
        (model / name).write_bytes(body)
    return SupervisedServer(
        lambda port: server_command(python, model, port, config, dtype),
        server_environment(config, threads),
        log=log,
        port=config.port,
        start_limit_s=config.start_limit_s,
    )


def vllm_python(environment: str) -> Path:
    """Return the Python of vLLM's virtual environment; a relative folder is looked for here, then beside the code.

    Raises:
        ConfigError: there is none, or no vLLM in it.
    """
    for folder in (Path(environment).expanduser(), ROOT / environment):
        if any(folder.glob("lib/python*/site-packages/vllm/__init__.py")):
            return (folder / "bin" / "python").absolute()
    raise ConfigError(
        f"rollout.engine.environment {environment}: there is no vLLM in it; `make vllm` builds it, "
        "or name the virtual environment that has one"
    )


def server_command(python: Path, model: Path, port: int, config: VllmEngine, dtype: str) -> list[str]:
    """Return the command line of a server for the model whose small files lie in a folder."""
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--host",
        HOST,
        "--port",
        str(port),
        "--dtype",
        dtype,
    ]
    command += ["--load-format", "dummy"]  # random weights: it gets those of the run before it is asked for anything
    command += ["--worker-extension-cls", EXTENSION, "--logprobs-mode", "processed_logprobs"]
    command += ["--generation-config", "vllm", "--max-num-seqs", str(config.slots), "--enable-prefix-caching"]
    command += ["--enable-scale-out"]  # tokens in, tokens out
    command += ["--disable-uvicorn-access-log", "--served-model-name", "rollflow"]
    if config.max_length is not None:
        command += ["--max-model-len", str(config.max_length)]
    if config.device == "cpu":
        # A prompt passed in parts ends the server there when a request has a seed: CPU generators have no offset.
        num_tokens = str(max(CPU_BATCH_TOKENS, config.max_length or 0))
        command += [
            "--distributed-executor-backend",
            "uni",
            "--enforce-eager",
            "--no-enable-chunked-prefill",
            "--max-num-batched-tokens",
            num_tokens,
        ]
    return command + list(config.arguments)


def server_environment(config: VllmEngine, threads: int) -> dict[str, str]:
    """Return the variables of a server; how its memory and threads are placed is left to a person who has said so."""
    placed = {"VLLM_CPU_KVCACHE_SPACE": str(config.cache_gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {
        "PYTHONPATH": str(ROOT),  # the extension
        "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc and /reset_prefix_cache, on the loopback interface alone
        "OMP_NUM_THREADS": str(threads),
        **(CPU_VARIABLES if config.device == "cpu" else {}),
        **{name: os.environ.get(name, value) for name, value in placed.items()},
    }
