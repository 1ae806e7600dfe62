"""The run of `make run` with everything on, beside TRL's GRPOTrainer: seconds a step, and seconds to 0.85.

Rollflow is the whole command: Prefect with its UI, MLflow, audit, evaluation, export, all on the same two cores as the
training. TRL has the two cores for itself, two threads, and no tracking. Both begin with the same warm start, see
prompts of the same task, 32 groups of 8 a step, and are measured by the same greedy answers to the same held-out
prompts, which cost neither of them time: Rollflow's versions are evaluated afterwards, out of the store. The time of
Rollflow counts from version 0 to the commit of a version, that of TRL from its first step.

    python -m tests.benchmarks.bench_peer PYTHON [--steps 400] [--every 20]

PYTHON: the interpreter of an environment with `torch==2.13.0 trl==1.16.0 "transformers<5.20"`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from data_contracts.records import Commit
from infra.log import Log
from infra.processes import free_port
from infra.runs import Run, load_run
from models.policy import build_policy, save_policy
from tasks.envs.registry import build_envs
from tasks.model_files import read_model_files
from tasks.weights import PolicyReader
from tests.benchmarks.peer_accuracy import accuracy

GOAL = 0.85
SKIPPED = 3
"""First steps, in which processes still warm up."""


def play(folder: Path, steps: int) -> Run:
    """Play the tiny run by the command line, its servers up; return it."""
    environment = os.environ | {"ROLLFLOW_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "flows.cli"]
    ports = ("--prefect-port", str(free_port()), "--mlflow-port", str(free_port()))
    subprocess.run([*command, "up", *ports], env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        run = ("run", "tiny", "--id", "bench", "--store", str(folder / "store"), "--steps", str(steps))
        subprocess.run([*command, *run], env=environment, check=True, stdout=subprocess.DEVNULL)
    finally:
        subprocess.run([*command, "down"], env=environment, check=True, stdout=subprocess.DEVNULL)
    return load_run(str(folder / "store" / "bench"))


def seconds_of_versions(run: Run) -> np.ndarray:
    """Return when each version was committed, in seconds since version 0."""
    times = np.array([commit.at for commit in Log(run.store, "log/commit", Commit).read_from(0)])
    return times - times[0]


def accuracies(run: Run, rows: list[dict[str, str]], every: int) -> dict[int, float]:
    """Return the accuracy of every `every`-th version."""
    reader, files = PolicyReader(run.store), read_model_files(run.store)
    found = {}
    for version in range(0, run.config.steps + 1, every):
        policy = build_policy(files, "float32", reader.weights(version)[0])
        found[version] = accuracy(policy.model.eval(), policy.tokenizer, rows)
    return found


def write_peer_inputs(run: Run, folder: Path, steps: int) -> list[dict[str, str]]:
    """Write what TRL begins with; return the held-out prompts."""
    weights, _ = PolicyReader(run.store).weights(0)
    save_policy(*build_policy(read_model_files(run.store), "float32", weights), str(folder / "model"))
    envs = build_envs(run.config.envs, run.config.seed)
    held_out = envs.eval_prompts(512)
    for name, prompts in (("train", [envs.prompt_for(i) for i in range(32 * (steps + 2))]), ("held_out", held_out)):
        rows = [{"prompt": prompt.content, "answer": prompt.answer} for prompt in prompts]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return json.loads((folder / "held_out.json").read_text())


def time_to_goal(accuracy_of: dict[int, float], seconds: np.ndarray) -> str:
    """Return, as text, after how many seconds the goal was reached for the first time."""
    reached = [step for step, found in sorted(accuracy_of.items()) if found >= GOAL]
    if not reached:
        return f"{GOAL} not reached, {max(accuracy_of.values()):.3f} at best"
    return f"{GOAL} at step {reached[0]}, after {seconds[reached[0]]:.1f} s"


def processor_times(run: Run) -> str:
    """Return, as text, the processor time of every role."""
    from infra.heartbeats import read_heartbeats

    return ", ".join(f"{beat.role} {beat.processor_s:.0f}" for beat in read_heartbeats(run.store))


def main() -> None:
    """Print both, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between two measurements of the accuracy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = play(folder, options.steps)
        rows = write_peer_inputs(run, folder, options.steps)
        seconds = seconds_of_versions(run)
        ours = statistics.median(np.diff(seconds)[SKIPPED:])
        print(f"Rollflow, everything on: {ours:.3f} s a step (median), {seconds[-1]:.1f} s in all, ", end="")
        print(time_to_goal(accuracies(run, rows, options.every), seconds))
        print(f"  processor seconds of its roles: {processor_times(run)}", flush=True)
        script = str(Path(__file__).with_name("peer_trl.py"))
        command = [options.python, script, str(folder), str(options.steps), str(options.every)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        told = json.loads(printed.strip().splitlines()[-1])
        theirs = statistics.median(told["steps"][SKIPPED:])
        passed = np.concatenate([[0.0], np.cumsum(told["steps"])])
        print(f"TRL alone: {theirs:.3f} s a step (median), {passed[-1]:.1f} s in all, ", end="")
        print(time_to_goal({int(step): found for step, found in told["accuracy"].items()}, passed))
        print(f"ratio of a step: {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
