from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, MistralConfig, Qwen3Config

from data_contracts.errors import ConfigError
from models.packing import microbatches, pack, packed_logprobs, verify_packing

SMALL: dict[str, Any] = dict(
    vocab_size=23,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def flat(groups):
    return [sample for group in groups for sample in group]


def padded_logprobs(model, samples):
    """The plain way: right-padded rows, logits everywhere, log-probability and entropy of sampled tokens."""
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, s in enumerate(samples):
        tokens = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64))
        ids[row, : len(tokens)], attention[row, : len(tokens)] = tokens, 1
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits.float()
    logprobs, entropies = [], []
    for row, s in enumerate(samples):
        at = torch.from_numpy(np.flatnonzero(s.action_mask)) + len(s.prompt_ids)
        normal = (logits[row, at - 1] / s.temperature).log_softmax(-1)
        logprobs.append(normal.gather(1, ids[row, at, None])[:, 0])
        entropies.append(-(normal.exp() * normal).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_padded_with_gradients(make_model, make_groups, share_prompts, temperature):
    model = make_model()
    samples = [replace(s, temperature=temperature) for s in flat(make_groups(6, 3, longest=20))]
    packed = pack(samples, share_prompts=share_prompts)
    weight = torch.randn(len(packed.targets), generator=torch.Generator().manual_seed(1))
    want, want_entropy = padded_logprobs(model, samples)
    want_gradients = gradients(model, (want * weight + 0.3 * want_entropy * weight).sum())
    got, got_entropy = packed_logprobs(model, packed, entropy_grad=True)
    got_gradients = gradients(model, (got * weight + 0.3 * got_entropy * weight).sum())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_entropy, want_entropy, rtol=0, atol=1e-5)
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_entropy_has_no_gradient_unless_asked(make_model, make_groups):
    logprobs, entropy = packed_logprobs(make_model(), pack(flat(make_groups())))
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_only_needed_tokens_go_through_the_model(make_groups):
    samples = flat(make_groups(2, 3, tools=False))
    prompts = sum({s.ticket: len(s.prompt_ids) for s in samples}.values())
    responses = sum(len(s.response_ids) - 1 for s in samples)
    assert pack(samples).num_rows == prompts + responses
    assert pack(samples, share_prompts=False).num_rows == sum(len(s.prompt_ids) for s in samples) + responses


def test_tokens_behind_the_last_sampled_one_are_left_out(make_groups):
    sample = make_groups(1, 1, tools=False)[0][0]
    acted = np.zeros(12, bool)
    acted[3] = True
    long = replace(sample, response_ids=np.arange(1, 13), action_mask=acted)
    assert pack([long]).num_rows == len(sample.prompt_ids) + 3


def test_order_of_samples_changes_nothing_but_the_order(make_model, make_groups):
    model, samples = make_model(), flat(make_groups(3, 4))
    sizes = [int(s.action_mask.sum()) for s in samples]
    with torch.no_grad():
        straight = packed_logprobs(model, pack(samples))[0].split(sizes)
        back = packed_logprobs(model, pack(samples[::-1]))[0].split(sizes[::-1])
    for one, other in zip(straight, back[::-1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_model_still_works_with_padding_after_packing(make_model, make_groups):
    model = make_model()
    ids = torch.randint(1, 23, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    call = dict(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    with torch.no_grad():
        before = model(**call).logits[mask.bool()]
        packed_logprobs(model, pack(flat(make_groups())))
        after = model(**call).logits[mask.bool()]
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(head_dim=8, **SMALL),
        GPT2Config(vocab_size=23, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
        MistralConfig(sliding_window=5, **SMALL),
        Gemma3TextConfig(head_dim=8, sliding_window=6, **SMALL),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_pack(make_groups, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
        verify_packing(model)
        samples = flat(make_groups(3, 3, longest=20))
        want = padded_logprobs(model, samples)[0]
        torch.testing.assert_close(packed_logprobs(model, pack(samples))[0], want, rtol=0, atol=2e-5)


def test_an_architecture_with_other_attention_is_refused():
    model = AutoModelForCausalLM.from_config(Gemma2Config(head_dim=8, **SMALL)).eval()
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM.*softcap"):
        verify_packing(model)


@pytest.mark.parametrize("tokens", [10, 40, 1000])
def test_microbatches_hold_every_sample_once_within_the_budget(make_groups, tokens):
    samples = flat(make_groups(8, 4, longest=15))
    parts = microbatches(samples, tokens)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    for part in parts:
        assert len(part) == 1 or pack([samples[i] for i in part]).num_rows <= tokens
    assert len(parts) == 1 or tokens < 1000
    assert parts == microbatches(samples, tokens)


def test_microbatches_keep_the_samples_of_a_prompt_together(make_groups):
    samples = flat(make_groups(6, 3))
    for part in microbatches(samples, 60):
        tickets = {samples[i].ticket for i in part}
        assert all(sum(samples[i].ticket == t for i in part) == 3 for t in tickets)


def test_bfloat16_is_close_to_float32(make_model, make_groups):
    samples = flat(make_groups())
    with torch.no_grad():
        exact = packed_logprobs(make_model(), pack(samples))[0]
        rounded = packed_logprobs(make_model(dtype=torch.bfloat16), pack(samples))[0]
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.1
