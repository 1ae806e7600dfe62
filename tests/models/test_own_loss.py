"""A loss of one's own takes two files: a class in data_contracts/losses.py and a function in models/losses.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CLASS = '''
class Cubic(LossPart):
    """The ratio to the proximal policy to the third power."""

    type: Literal["cubic"] = "cubic"
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the loss."""


Loss = Annotated['''

FUNCTION = '''
def cubic(batch: TokenBatch, cfg: Cubic) -> TokenLoss:
    """Return -A scale r^3."""
    advantages, log = _advantages_and_log_ratio(batch)
    nowhere = torch.zeros_like(batch.mask)
    return TokenLoss(-advantages * cfg.scale * (3 * log).exp(), nowhere, nowhere)


LOSSES: dict'''

USE = """
import torch
from data_contracts.config import RunConfig
from models.losses import LOSSES
from models.tokens import TokenBatch
run = RunConfig.model_validate({"algorithm": {"preset": "gspo", "loss": {"type": "cubic", "scale": 2.0}}})
import importlib.util
spec = importlib.util.spec_from_file_location("conftest_of_models", CONFTEST)
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
from data_contracts.config import TrainConfig
from models.trainer import Trainer
groups = shared.make_groups.__wrapped__()()
trainer = Trainer(shared.make_model.__wrapped__()(), run.algorithm, TrainConfig(), total_steps=1)
result = trainer.step(groups, version=0, max_staleness=0)
assert result.status == "trained", result.evidence
one = torch.ones(1)
zero, first = 0 * one, 0 * one.long()
batch = TokenBatch(*[zero] * 6, 3 * one, one.bool(), first, 1, one, first, 1, first, 0, one)
assert LOSSES[type(run.algorithm.loss)](batch, run.algorithm.loss).loss.item() == -6.0
print(run.algorithm.loss.type, result.metrics["optimizer/grad_norm"] > 0)
"""


def test_a_loss_of_ones_own_touches_two_files_and_trains(tmp_path: Path) -> None:
    for folder in ("data_contracts", "models"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    contract, code = tmp_path / "data_contracts" / "losses.py", tmp_path / "models" / "losses.py"
    replace_once(contract, "\nLoss = Annotated[", CLASS)
    replace_once(contract, "    | Drpo,", "    | Drpo\n    | Cubic,")
    replace_once(code, "    Cispo,\n", "    Cispo,\n    Cubic,\n")
    replace_once(code, "\nLOSSES: dict", FUNCTION)
    replace_once(code, "    Drpo: drpo,\n", "    Drpo: drpo,\n    Cubic: cubic,\n")
    text = USE.replace("CONFTEST", repr(str(Path(__file__).with_name("conftest.py"))))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cubic", "True"]


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} holds {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))
