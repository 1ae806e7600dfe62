"""What `rollflow replay` does: trains a run again from its stored batches, and says how it differs.

Without a changed field every version must be the committed bits. With one, the replay becomes a run of its own
beside the first: evaluated on the same prompts, shown, reported and exported like any other.
"""

import os
import secrets
import time
from collections.abc import Iterator, Sequence

import typer
from rich.console import Console

from data_contracts.config import RunConfig
from data_contracts.records import Commit, Evaluation
from flows.load import override
from infra import services as servers
from infra import settings
from infra.log import Log
from infra.runs import Run, create_run
from tasks.evaluate import Evaluator, next_due
from tasks.replay import Recorder, Repeated, Replay, changes, check_replayable, fork
from tasks.role import Role

settings.apply_defaults()


def replay(run: Run, arguments: Sequence[str], *, keep: bool = False, evaluate: bool = True) -> int:
    """Train a run again; return the exit code: 1 when it should have given the same bits and did not.

    Args:
        run: whose batches are trained on.
        arguments: command-line words such as `--algorithm.loss.clip_high 0.3`; none: nothing is changed.
        keep: make a run of the replay although nothing is changed.
        evaluate: evaluate the replay's versions as the run's were, when it is kept.

    Raises:
        ConfigError: a field cannot be changed in a replay, or there is nothing to replay.
        GroupUnusable: a stored batch is missing or altered.
    """
    settings.keep_freed_memory()
    config = override(run.config, arguments)
    num_steps = Log(run.store, "log/commit", Commit).tail() - 1
    check_replayable(config, run.config, num_steps)
    changed = changes(config, run.config)
    if changed or keep:
        return replay_beside(run, config, changed, evaluate=evaluate)
    return report_sameness(run, _watched(Replay(run, config).steps(), min(num_steps, config.steps)))


def report_sameness(run: Run, steps: Iterator[Repeated]) -> int:
    """Train to the first difference or the end, and say which it was; return the exit code."""
    started = time.monotonic()
    num_steps = num_groups = num_tokens = 0
    for step in steps:
        if step.difference:
            typer.echo(f"rollflow: run {run.id}: {step.difference}", err=True)
            return 1
        num_steps, num_groups = num_steps + 1, num_groups + len(step.consumed)
        num_tokens += step.result.num_tokens
    seconds = time.monotonic() - started
    typer.echo(
        f"run {run.id}: {num_steps} versions trained again from {num_groups} groups ({num_tokens} tokens) "
        f"in {seconds:.1f} s: every version is the same bits as its commit"
    )
    return 0


def replay_beside(run: Run, config: RunConfig, changed: dict[str, object], *, evaluate: bool) -> int:
    """Make a new run of the replay; return the exit code."""
    root = run.store.url.removesuffix(f"/{run.id}")
    target = create_run(
        config.model_copy(update={"store": root}), f"{run.id}-replay-{secrets.token_hex(3)}", replay_of=run.id
    )
    told = ", ".join(f"{name} {value}" for name, value in changed.items() if value is not None) or "nothing changed"
    typer.echo(f"run {target.id}: replays {run.id} with {told}")
    difference = ""
    with Role("train", target.store, config) as role:
        role.tell("start")
        try:
            difference = _train(run, target, role)
            if evaluate:
                _evaluate(target, role)
        except BaseException as error:
            kind = "fail" if isinstance(error, Exception) else "stop"
            role.tell(kind, error=f"{type(error).__name__}: {error}")
            raise
        role.tell("end")
    _export(target)
    _compare(run, target)
    if difference and not changed:
        typer.echo(f"rollflow: run {run.id}: {difference}", err=True)
        return 1
    return 0


def _train(run: Run, target: Run, role: Role) -> str:
    """Commit every step of the replay; return the first difference to the replayed run."""
    first = ""
    replayed = Replay(run, target.config, rejudged=fork(run, target))
    recorder = Recorder(target, replayed, role.writer)
    num_steps = min(Log(run.store, "log/commit", Commit).tail() - 1, target.config.steps)
    for step in _watched(replayed.steps(), num_steps):
        recorder.commit(step)
        role.tokens += step.result.num_tokens
        role.progressed(f"replayed version {step.commit.version}")
        first = first or step.difference
    return first


def _evaluate(target: Run, role: Role) -> None:
    log = Log(target.store, "log/eval", Evaluation)
    newest = Log(target.store, "log/commit", Commit).tail() - 1
    due = next_due(target.config, -1, newest)
    evaluator = Evaluator(role)
    try:
        while due is not None:
            log.append(log.tail(), evaluator.evaluate(due))
            last, due = due, next_due(target.config, due, newest) if due < newest else None
            if due is None and last < newest:
                due = newest  # a run that was stopped ends between two versions that are due
    finally:
        evaluator.close()


def _watched(steps: Iterator[Repeated], num_steps: int) -> Iterator[Repeated]:
    with Console(stderr=True).status("") as status:
        for step in steps:
            status.update(f"version {step.commit.version} of {num_steps}")
            yield step


def _export(target: Run) -> None:
    """Write the replay into MLflow beside the run it replays, when the server is up."""
    if not target.config.tracking.enabled:
        return
    uri, later = target.config.tracking.uri, f"rollflow role export --run {target.store.url}"
    services = servers.find(settings.home())
    if services is not None:
        os.environ.update(servers.connect_environment(services))
    elif uri is None:
        typer.echo(f"no MLflow server is up; start one with `rollflow up`, then: {later}")
        return
    from infra.export_loop import export_loop
    from infra.tracking import Exporter

    tags = {"rollflow.replay_of": target.replay_of}
    exporter = Exporter(target.store, uri, target.config, target.id, packages=target.packages, tags=tags)
    if export_loop(exporter, lambda: True, drain_s=target.config.tracking.drain_s):
        typer.echo(f"MLflow {exporter.run_url}")
    else:
        typer.echo(f"not everything is in MLflow yet; later: {later}", err=True)


def _compare(run: Run, target: Run) -> None:
    """Print what both runs came to, with the evaluation of the newest version that both have evaluated."""
    evaluations = [
        {found.version: found for found in Log(one.store, "log/eval", Evaluation).read_from(0)} for one in (run, target)
    ]
    common = max(evaluations[0].keys() & evaluations[1].keys(), default=None)
    for one, evaluated in zip((run, target), evaluations, strict=True):
        newest = Log(one.store, "log/commit", Commit).last()
        if newest is None:
            continue
        told = f"version {newest.version}, {newest.num_trained} groups, {newest.num_tokens} tokens in the loss"
        if common is not None:
            told += f", eval/accuracy {evaluated[common].metrics.get('eval/accuracy', float('nan')):.3f}"
            told += f" at version {common}"
        typer.echo(f"{one.id}: {told}")
