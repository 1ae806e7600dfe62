import pytest
import torch

from data_contracts.errors import ConfigError
from models.logprobs import Head, head_of, target_logprobs


def plain(hidden, head, targets, temperature):
    logits = hidden @ head.weight.T * head.scale
    logits = logits if head.bias is None else logits + head.bias * head.scale
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    normal = (logits / temperature[:, None]).log_softmax(-1)
    return normal.gather(1, targets[:, None])[:, 0], -(normal.exp() * normal).sum(-1)


@pytest.mark.parametrize("at_once", [1, 50, 1 << 22])
@pytest.mark.parametrize(("scale", "softcap", "with_bias"), [(1.0, None, False), (0.5, None, True), (2.0, 3.0, True)])
def test_values_and_gradients_equal_the_plain_way(at_once, scale, softcap, with_bias):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 11, (9,), generator=generator)
    temperature = torch.rand(9, generator=generator) + 0.5
    head = Head(weight, bias, scale, softcap)
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    upstream = torch.randn(2, 9, generator=generator)

    want = plain(hidden, head, targets, temperature)
    want_grads = torch.autograd.grad((want[0] * upstream[0] + want[1] * upstream[1]).sum(), leaves)
    got = target_logprobs(hidden, head, targets, temperature, entropy_grad=True, max_logits=at_once)
    got_grads = torch.autograd.grad((got[0] * upstream[0] + got[1] * upstream[1]).sum(), leaves)
    for g, w in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_an_impossible_token_gives_no_nan_entropy():
    weight = torch.tensor([[0.0], [-1e30], [0.0]])
    logp, entropy = target_logprobs(torch.ones(1, 1), Head(weight, None), torch.tensor([0]))
    assert logp.item() == pytest.approx(-0.6931, abs=1e-4)
    assert entropy.item() == pytest.approx(0.6931, abs=1e-4)


def test_a_head_that_is_no_linear_layer_is_refused(make_model):
    model = make_model(tie_word_embeddings=False)
    model.set_output_embeddings(torch.nn.Sequential())
    with pytest.raises(ConfigError, match="Sequential"):
        head_of(model)
