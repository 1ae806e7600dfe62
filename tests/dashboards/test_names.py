import ast
import re
from pathlib import Path

import pytest

from data_contracts.metrics import HISTOGRAMS, METRICS, declared

FOLDER = Path(__file__).parents[2] / "dashboards"
GROUPS = {name.split("/")[0] for name in METRICS}


def texts_of(path: Path) -> list[str]:
    """Every string literal of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_dashboards_use_no_metric_that_is_not_declared(path):
    names = [t for t in texts_of(path) if re.fullmatch(r"[a-z]+/[a-z0-9_/]+", t) and t.split("/")[0] in GROUPS]
    assert [n for n in names if declared(n) is None and declared(n, HISTOGRAMS) is None] == []


def test_dashboards_use_metrics_at_all():
    names = {t for path in FOLDER.glob("*.py") for t in texts_of(path)}
    assert len(names & set(METRICS)) > 15
    assert names & set(HISTOGRAMS) == {"staleness/tokens"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_dashboards_read_records_and_run_nothing(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    tops = {name.split(".")[0] for name in imported}
    assert not tops & {"tasks", "flows", "models", "torch", "prefect", "mlflow", "transformers"}
