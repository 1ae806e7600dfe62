"""The deployment files name only what exists: commands, options, ports, addresses, variables, images and files."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import prefect.settings
import pytest
import typer
import yaml
from distributed.cli.dask_scheduler import main as dask_scheduler
from distributed.cli.dask_worker import main as dask_worker
from packaging.requirements import Requirement
from pydantic import BaseModel

from data_contracts.config import RunConfig
from flows.cli import app
from flows.placement import role_names
from flows.play import ROLES
from infra import services, settings
from infra.cluster import OFFERED, resource_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "infra" / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
MANIFESTS = [
    manifest
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for manifest in yaml.safe_load_all(path.read_text())
]
SCHEDULER_PORT = 8786
PORTS = {**services.DEFAULT_PORTS, "scheduler": SCHEDULER_PORT}
OTHERS = {"OMP_NUM_THREADS", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
"""Variables of OpenMP and of every S3 client."""


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {manifest["metadata"]["name"]: manifest for manifest in MANIFESTS if manifest["kind"] == kind}


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every container of the manifests, with its pod."""
    for deployment in of_kind("Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield container["name"], container, pod


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def image_of(path: Path) -> str:
    return f"rollflow-{path.name.removesuffix('.Dockerfile')}"


def commands() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, service in COMPOSE.items():
        found[f"compose {name}"] = service.get("entrypoint") or service["command"]
    for name, container, _ in pods():
        found[f"kubernetes {name}"] = container["command"]
    for path in DOCKERFILES:
        for word, rest in instructions(path):
            if word in ("ENTRYPOINT", "CMD") and rest.startswith('["rollflow'):
                found[f"{path.name} {word}"] = yaml.safe_load(rest)
    return found


def variables() -> dict[str, str]:
    """Every variable that is set anywhere, with one of its values."""
    found: dict[str, str] = {}
    for service in COMPOSE.values():
        found |= service.get("environment", {})
    for _, container, _ in pods():
        found |= {entry["name"]: entry["value"] for entry in container.get("env", [])}
    for manifest in (*of_kind("ConfigMap").values(), *of_kind("Secret").values()):
        found |= manifest.get("data", {}) | manifest.get("stringData", {})
    for path in DOCKERFILES:
        for word, rest in instructions(path):
            if word == "ENV":
                found |= dict(part.split("=", 1) for part in rest.split())
    for deployment in yaml.safe_load((DEPLOY / "prefect.yaml").read_text())["deployments"]:
        found |= deployment["work_pool"]["job_variables"]["env"]
    return found


def parse(command: click.Command, arguments: Sequence[str]) -> None:
    """Parse without running; click raises on what it does not know."""
    command.make_context(command.name or "command", list(arguments))


SOURCES = {"prefect server start": ("prefect", "cli/server.py"), "mlflow server": ("mlflow", "utils/cli_args.py")}
"""Command lines of servers to where their options are declared; starting them for their help takes seconds each."""


def source_of(package: str, path: str) -> str:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return (Path(spec.submodule_search_locations[0]) / path).read_text()


@pytest.mark.parametrize("where", commands())
def test_every_command_exists_with_its_options(where: str) -> None:
    program, *words = commands()[where]
    if program == "rollflow" and words != ["--help"]:
        main = typer.main.get_command(app)
        assert isinstance(main, click.Group) or hasattr(main, "commands")
        name, *arguments = words
        command = main.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        if name == "role":
            assert arguments == [resource_role(where)]
            arguments = [*arguments, "--run", "URL"]
        command.make_context(name, arguments)
    elif program == "dask":
        kind, *arguments = words
        parse({"worker": dask_worker, "scheduler": dask_scheduler}[kind], arguments)
    elif program in ("prefect", "mlflow"):
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        (server,) = [line for line in SOURCES if " ".join(commands()[where]).startswith(line)]
        text = source_of(*SOURCES[server]) + (source_of("mlflow", "cli/__init__.py") if program == "mlflow" else "")
        assert f"def {server.split()[-1]}(" in text
        assert [option for option in options if f'"{option}"' not in text] == []
    else:
        assert (program, words) == ("rollflow", ["--help"])


def resource_role(where: str) -> str:
    return where.split(".")[0]


def test_every_role_has_a_dockerfile_that_plays_it_and_there_are_no_others() -> None:
    assert {image_of(path) for path in DOCKERFILES} == {f"rollflow-{role}" for role in (*ROLES, "base")}
    for path in DOCKERFILES:
        if path.name != "base.Dockerfile":
            lines = instructions(path)
            assert lines[0] == ("FROM", "rollflow-base")
            assert ("ENTRYPOINT", f'["rollflow", "role", "{path.name.split(".")[0]}"]') in lines


def test_images_are_built_from_files_that_are_there() -> None:
    copied = [rest.split()[:-1] for word, rest in instructions(DEPLOY / "docker/base.Dockerfile") if word == "COPY"]
    sources = {source for group in copied for source in group}
    assert all((ROOT / source).exists() for source in sources)
    layers = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert layers <= sources, "every folder of the code is in the image"


def test_the_train_image_has_a_deepspeed_that_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = Requirement(project["optional-dependencies"]["deepspeed"][0])
    (pinned,) = [rest for word, rest in instructions(DEPLOY / "docker/train.Dockerfile") if word == "ARG"]
    assert pinned.removeprefix("DEEPSPEED=deepspeed==") in wanted.specifier


def test_every_image_that_is_used_has_a_dockerfile() -> None:
    known = {image_of(path) for path in DOCKERFILES}
    kustomized = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    used = {container["image"] for _, container, _ in pods()}
    assert used | {service["image"] for service in COMPOSE.values()} <= known
    assert {image["name"] for image in kustomized["images"]} == used
    for service in COMPOSE.values():
        if "build" in service:
            path = (DEPLOY / service["build"]["context"]).resolve() / service["build"]["dockerfile"]
            assert image_of(path) == service["image"]
            assert path.is_file()


def field_exists(path: Sequence[str], model: Any = RunConfig) -> bool:
    for name in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or name not in model.model_fields:
            return False
        model = model.model_fields[name].annotation
    return True


def prefect_knows(name: str) -> bool:
    folder = Path(str(prefect.settings.__file__)).parent / "models"
    return hasattr(prefect.settings, name) or any(
        f'"{name.lower()}"' in path.read_text() for path in folder.rglob("*.py")
    )


def test_every_variable_is_read_by_something() -> None:
    mlflow = source_of("mlflow", "environment_variables.py")
    for name in variables():
        if name.startswith("ROLLFLOW_RUN__"):
            assert field_exists(name.removeprefix("ROLLFLOW_RUN__").lower().split("__")), name
        elif name.startswith("ROLLFLOW_"):
            assert any(f'"{name}"' in path.read_text() for path in (*ROOT.glob("infra/*.py"), ROOT / "flows/cli.py")), (
                name
            )
        elif name.startswith("PREFECT_"):
            assert prefect_knows(name), name
        elif name.startswith("MLFLOW_"):
            assert name in settings.DEFAULTS or name in mlflow, name
        else:
            assert name in settings.DEFAULTS or name in OTHERS, name


def test_what_is_set_for_both_here_and_on_a_laptop_has_the_same_value() -> None:
    shared = {name: value for name, value in variables().items() if name in settings.DEFAULTS}
    assert shared == {name: settings.DEFAULTS[name] for name in shared}
    assert {"DO_NOT_TRACK", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "MLFLOW_DISABLE_TELEMETRY"} <= set(shared)


def test_every_address_names_a_service_and_the_port_it_listens_on() -> None:
    texts = [*variables().values(), *(word for words in commands().values() for word in words)]
    addresses = {match for text in texts for match in re.findall(r"(?:http|tcp)://([\w.-]+):(\d+)", text)}
    assert addresses >= {(name, str(port)) for name, port in PORTS.items()}
    for host, port in addresses - {("127.0.0.1", str(PORTS["prefect"]))}:
        assert PORTS[host] == int(port)
        assert host in COMPOSE
        ports = of_kind("Service")[host]["spec"]["ports"]
        assert int(port) in [entry["port"] for entry in ports]


def test_every_port_that_is_opened_is_the_one_the_command_listens_on() -> None:
    for name, service in COMPOSE.items():
        for published in service.get("ports", []):
            assert published == f"127.0.0.1:{PORTS[name]}:{PORTS[name]}", "on the loopback interface"
    for name, container, _ in pods():
        for port in container.get("ports", []):
            told = " ".join(container["command"])
            assert re.search(rf"--port[ =]{port['containerPort']}\b", told)
            assert port["containerPort"] == PORTS[name]


def test_services_of_kubernetes_select_pods_that_have_their_port() -> None:
    for service in of_kind("Service").values():
        (deployment,) = [
            found
            for found in of_kind("Deployment").values()
            if found["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        ]
        containers = deployment["spec"]["template"]["spec"]["containers"]
        named = {port["name"]: port["containerPort"] for c in containers for port in c.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]


def test_what_a_pod_refers_to_is_declared() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in (DEPLOY / "kubernetes").iterdir()}
    for deployment in of_kind("Deployment").values():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
    for _, container, pod in pods():
        assert pod["enableServiceLinks"] is False
        for source in container.get("envFrom", []):
            for reference, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                assert reference not in source or source[reference]["name"] in of_kind(kind)
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            claim = volumes[mount["name"]].get("persistentVolumeClaim")
            assert claim is None or claim["claimName"] in of_kind("PersistentVolumeClaim")


def resources_of(command: Sequence[str]) -> tuple[str, int]:
    words = dict(zip(command, command[1:], strict=False))
    return words["--resources"].removesuffix("=1"), int(words.get("--nworkers", 1))


def test_the_workers_play_every_role_of_a_default_run() -> None:
    wanted = [resource_of(role) for role in role_names(RunConfig())]
    kubernetes = of_kind("Deployment")
    offered: dict[str, dict[str, int]] = {"compose": {}, "kubernetes": {}}
    for where, command in commands().items():
        if command[:2] == ["dask", "worker"]:
            kind, name = where.split()
            resource, num = resources_of(command)
            copies = kubernetes[name]["spec"]["replicas"] if kind == "kubernetes" else 1
            offered[kind][resource] = offered[kind].get(resource, 0) + num * copies
    for offers in offered.values():
        assert set(offers) == set(OFFERED)
        assert all(offers[resource] >= wanted.count(resource) for resource in OFFERED)
