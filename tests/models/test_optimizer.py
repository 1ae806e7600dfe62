import pytest
import torch

from data_contracts.config import TrainConfig
from data_contracts.errors import ContractError
from models.optimizer import Optimizer, checkpoint_from_bytes, checkpoint_to_bytes, learning_rate


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"schedule": "linear", "final_fraction": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5, 0.0]),
        ({"schedule": "cosine"}, [1.0, 0.8535534, 0.5, 0.1464466, 0.0]),
    ],
)
def test_schedules_by_hand(changes, want):
    cfg = TrainConfig(learning_rate=1.0, **changes)
    assert [learning_rate(cfg, version, 5) for version in range(5)] == pytest.approx(want)
    assert learning_rate(cfg, 7, 5) == pytest.approx(want[-1])


@pytest.fixture
def trained(make_model):
    def build(dtype=torch.float32, rate=1e-3, updates=2):
        model = make_model(dtype=dtype)
        optimizer = Optimizer(model, TrainConfig())
        for _ in range(updates):
            push(model, optimizer, rate)
        return model, optimizer

    return build


def push(model, optimizer, rate=1e-3):
    optimizer.clear_gradient()
    ids = torch.arange(1, 9)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.collect_gradient()
    optimizer.clip_gradient()
    optimizer.update(rate)


def bits(optimizer):
    return checkpoint_to_bytes(*optimizer.state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restoring_a_snapshot_brings_back_every_bit(trained, dtype):
    model, optimizer = trained(dtype)
    before, published = bits(optimizer), {n: p.clone() for n, p in model.named_parameters()}
    snapshot = optimizer.snapshot()
    push(model, optimizer)
    assert bits(optimizer) != before
    optimizer.restore(snapshot)
    assert bits(optimizer) == before
    assert all(torch.equal(p, published[n]) for n, p in model.named_parameters())


def test_bfloat16_keeps_what_rounding_would_lose(trained):
    model, optimizer = trained(torch.bfloat16, rate=1e-6, updates=1)
    name, master = next(iter(optimizer.masters.items()))
    parameter = dict(model.named_parameters())[name]
    assert parameter.dtype == torch.bfloat16
    assert master.dtype == torch.float32
    assert not torch.equal(master, parameter.float())
    assert torch.equal(parameter, master.bfloat16())


def test_gradients_of_several_passes_add_up_in_float32(make_model):
    model = make_model(dtype=torch.bfloat16)
    optimizer = Optimizer(model, TrainConfig())
    name, parameter = next(iter(optimizer.parameters.items()))
    for size in (1.0, 2.0**-9):
        parameter.grad = torch.full_like(parameter, size)
        optimizer.collect_gradient()
    assert (optimizer.masters[name].grad == 1 + 2.0**-9).all()  # in bfloat16 the second one would vanish
    assert parameter.grad is None


def test_adopted_weights_reach_model_and_masters(trained):
    model, optimizer = trained(torch.bfloat16)
    kept = {n: m.detach().clone() for n, m in optimizer.masters.items()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    name = next(iter(weights))
    weights[name] = weights[name] + 1
    optimizer.adopt(weights)
    assert torch.equal(optimizer.masters[name], weights[name].float())
    assert torch.equal(dict(model.named_parameters())[name], weights[name])
    assert all(torch.equal(m, kept[n]) for n, m in optimizer.masters.items() if n != name)
    with pytest.raises(ContractError, match=name):
        optimizer.adopt({n: w for n, w in weights.items() if n != name})


def test_checkpoints_survive_bytes(trained):
    _, optimizer = trained()
    tensors, scalars = checkpoint_from_bytes(bits(optimizer))
    own, own_scalars = optimizer.state()
    assert scalars == own_scalars == {"format": "trainer/1", "updates": 2}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("body", [b"", b"12345678", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_bytes_that_are_no_checkpoint_are_refused(body):
    with pytest.raises(ContractError, match=f"got {len(body)} bytes"):
        checkpoint_from_bytes(body)


def test_a_checkpoint_of_another_model_is_refused(trained, make_model):
    tensors, scalars = trained()[1].state()
    with pytest.raises(ContractError, match="layers.1"):
        Optimizer(make_model(num_hidden_layers=1), TrainConfig()).load(tensors, scalars)
    with pytest.raises(ContractError, match=r"expected float32 \[64, 32\]"):
        Optimizer(make_model(intermediate_size=64), TrainConfig()).load(tensors, scalars)
    with pytest.raises(ContractError, match="trainer/9"):
        Optimizer(make_model(), TrainConfig()).load(tensors, scalars | {"format": "trainer/9"})
