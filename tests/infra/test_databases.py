"""Databases by URL: each server gets the driver it needs, and nobody is shown a password."""

from pathlib import Path

import pytest

from data_contracts.errors import ConfigError, ServiceError
from infra.databases import VARIABLES, database_url, described, without_secrets
from infra.server_processes import Server
from infra.services import _check_database

URL = "postgresql://user:pa%40ss@db.example:5433/prefect?sslmode=require"


def test_without_a_variable_each_server_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    assert database_url("prefect", Path("/h")) == "sqlite+aiosqlite:////h/prefect/prefect.db"
    assert database_url("mlflow", Path("/h")) == "sqlite:////h/mlflow/mlflow.db"


@pytest.mark.parametrize(("name", "driver"), [("prefect", "asyncpg"), ("mlflow", "psycopg")])
def test_one_way_of_writing_a_url_serves_both(name: str, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(driver)
    for scheme in ("postgresql", "postgres"):
        monkeypatch.setenv(VARIABLES[name], URL.replace("postgresql", scheme))
        assert database_url(name, Path("/h")) == URL.replace("postgresql", f"postgresql+{driver}")


@pytest.mark.parametrize("value", ["mysql://user:hunter2@host/x", "postgresql://user:hunter2@host", "hunter2"])
def test_another_value_is_one_sentence_that_does_not_repeat_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES["mlflow"], value)
    with pytest.raises(ConfigError, match="ROLLFLOW_MLFLOW_DATABASE: expected postgresql://") as refused:
        database_url("mlflow", Path("/h"))
    assert "hunter2" not in str(refused.value)


def test_what_is_shown_has_neither_user_nor_password() -> None:
    assert described(URL) == "postgresql://db.example:5433/prefect"
    assert described("sqlite:////h/mlflow.db") == "sqlite:////h/mlflow.db"
    line = f"(psycopg.OperationalError) cannot connect to {URL} or http://a:b@c"
    assert "pa%40ss" not in without_secrets(line)
    assert without_secrets(line).endswith("http://a:***@c")
    assert without_secrets("at 10:20:30 see http://127.0.0.1:5000/x") == "at 10:20:30 see http://127.0.0.1:5000/x"


def test_a_server_that_runs_on_another_database_is_refused() -> None:
    server = Server("prefect", 1, 0.0, 4200, "t", "log", "sqlite:////h/prefect.db")
    with pytest.raises(ServiceError, match="prefect already runs on sqlite.*rollflow down.*ROLLFLOW_PREFECT_DATABASE"):
        _check_database(server, URL)
    _check_database(server, "sqlite:////h/prefect.db")
