import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra import settings


def run_python(code: str, **environment: str) -> str:
    inherited = {
        key: value for key, value in os.environ.items() if key not in settings.DEFAULTS and key != "PREFECT_HOME"
    }
    return subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **environment}, check=True, capture_output=True, text=True
    ).stdout


def test_home_is_rollflow_home_or_a_folder_below_the_working_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLFLOW_HOME", raising=False)
    assert settings.home() == tmp_path / ".rollflow"
    monkeypatch.setenv("ROLLFLOW_HOME", "elsewhere")
    assert settings.home() == tmp_path / "elsewhere"
    assert not list(tmp_path.iterdir()), "asking creates nothing"


def test_make_home_creates_the_subfolders_and_may_be_repeated(tmp_path: Path):
    made = settings.make_home(tmp_path / "a" / "b")
    assert made == settings.make_home(made)
    assert sorted(path.name for path in made.iterdir()) == ["logs", "mlflow", "prefect", "store"]


def test_defaults_never_change_what_a_person_has_set(tmp_path: Path):
    code = (
        "import os; from infra import settings; settings.apply_defaults();"
        "names = ('MLFLOW_HTTP_REQUEST_TIMEOUT', 'MLFLOW_DISABLE_TELEMETRY', 'PREFECT_HOME');"
        "print(*(os.environ[name] for name in names))"
    )
    printed = run_python(code, ROLLFLOW_HOME=str(tmp_path), MLFLOW_HTTP_REQUEST_TIMEOUT="77").split()
    assert printed == ["77", "true", str(tmp_path / "prefect")]


def test_importing_settings_loads_none_of_the_libraries_that_read_the_environment():
    code = (
        "import sys; import infra.settings, infra.services;"
        "print({'prefect', 'mlflow', 'torch', 'obstore', 'great_expectations'} & sys.modules.keys())"
    )
    assert run_python(code).strip() == "set()"


def test_the_libraries_themselves_agree_that_telemetry_is_off(tmp_path: Path):
    code = (
        "from infra import settings; settings.apply_defaults();"
        "from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY as off;"
        "from prefect.settings import get_current_settings as current;"
        "print(off.get(), current().server.analytics_enabled, current().flows.heartbeat_frequency,"
        "current().home)"
    )
    printed = run_python(code, ROLLFLOW_HOME=str(tmp_path)).split()
    assert printed == ["True", "False", "30", str(tmp_path / "prefect")]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no mallopt")
def test_a_process_that_keeps_freed_memory_does_not_ask_for_it_again():
    code = (
        "import resource, numpy as np; from infra import settings; {}\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def use(): return [np.ones(2**18) for _ in range(16)]\n"
        "use(); before = faults()\n"
        "for _ in range(10): use()\n"
        "print(faults() - before)"
    )
    assert int(run_python(code.format("pass"))) > 20_000, "10 times 32 MB, in pages of 4 kB"
    assert int(run_python(code.format("settings.keep_freed_memory()"))) < 1_000
