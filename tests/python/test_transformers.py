"""mla.transformers.attach: the model's own greedy tokens, and what it does with caches."""

import gc

import pytest

torch = pytest.importorskip("torch", minversion="2.4")
pytest.importorskip("transformers", minversion="5.0")

import mla  # noqa: E402
import mla.transformers  # noqa: E402
from hf_models import KINDS, PROMPT, greedy, make_model, prompts  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_greedy_tokens(kind, dtype):
    model = make_model(kind, dtype)
    wanted, logits = greedy(model)
    attachment = mla.transformers.attach(model, page_size=16, pages=4)
    found, own = greedy(model)
    assert torch.equal(found, wanted)
    # bf16 rounds the model's own steps as coarsely; an indexer then also chooses other keys.
    bound = 1e-3 if dtype is torch.float32 else 0.5
    assert (own - logits).abs().max() < bound
    gc.collect()
    assert len(attachment.pages.free) == attachment.pages.count > 4  # all given back, after growth
    attachment.detach()
    assert torch.equal(greedy(model)[1], logits)


@pytest.mark.parametrize("kind", ["v3", "v3.2"])
def test_beams_and_continued_caches(kind):
    model = make_model(kind, torch.float32)
    wanted = greedy(model, 24, num_beams=3)[0]
    tokens, mask = prompts()
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask, use_cache=False).logits
    mla.transformers.attach(model, page_size=8)
    assert torch.equal(greedy(model, 24, num_beams=3)[0], wanted)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        model(tokens[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
        model(tokens[:, 30:], attention_mask=mask, past_key_values=cache)
        cache.crop(-15)  # into the middle of a page
        rest = model(tokens[:, 25:], attention_mask=mask, past_key_values=cache).logits
    for row, start in ((0, 0), (1, 13)):
        torch.testing.assert_close(whole[row, start:], logits[row, start:], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(rest[row], logits[row, 25:], atol=1e-3, rtol=1e-3)
    assert cache.get_seq_length() == PROMPT


def test_a_compressed_cache():
    wide = dict(kv_lora_rank=512, qk_rope_head_dim=64)
    model = make_model("v3", torch.bfloat16, **wide)
    wanted, logits = greedy(model, 16)
    attachment = mla.transformers.attach(model, "fp8_ds_mla")
    assert attachment.spec.page_bytes == 64 * 656
    found, own = greedy(model, 16)
    assert torch.equal(found, wanted) and (own - logits).abs().max() < 0.5


def test_half_precision_weights():
    model = make_model("v2", torch.float32)
    wanted = greedy(model, 8)[1]
    mla.transformers.attach(model.half())
    assert (greedy(model, 8)[1][0] - wanted[0]).abs().max() < 0.1


def test_what_cannot_be_attached_is_named():
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    ))
    with pytest.raises(mla.UnsupportedError, match="'llama', allowed: deepseek_v2"):
        mla.transformers.attach(llama)
    with pytest.raises(mla.UnsupportedError, match="bias"):
        mla.transformers.attach(make_model("v3", torch.float32, attention_bias=True))
    model = make_model("v3", torch.float32)
    with pytest.raises(mla.InputError, match="fp7"):
        mla.transformers.attach(model, "fp7")
    mla.transformers.attach(model)
    with pytest.raises(mla.InputError, match="attached already"):
        mla.transformers.attach(model)


def test_misuse_of_an_attached_model():
    model = make_model("v3", torch.float32)
    tokens, mask = prompts()
    with torch.no_grad():
        own = model(tokens, use_cache=True).past_key_values
    mla.transformers.attach(model)
    with torch.no_grad():
        with pytest.raises(mla.UnsupportedError, match="filled by another attention"):
            model(tokens[:, :1], past_key_values=own)
        with pytest.raises(mla.UnsupportedError, match="attention_mask is"):
            model(tokens, attention_mask=torch.ones(2, 1, PROMPT, PROMPT))
        with pytest.raises(mla.InputError, match="outside its model's forward"):
            model.model.layers[0].self_attn(torch.zeros(1, 1, 128))
        with pytest.raises(mla.UnsupportedError, match="StaticCache"):
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=2, cache_implementation="static"
            )
    with pytest.raises(mla.UnsupportedError, match="no_grad"):
        model(tokens, attention_mask=mask)
