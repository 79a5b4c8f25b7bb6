"""mla.transformers.attach: the model's own greedy tokens, and what it does with caches."""

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch", minversion="2.4")
transformers = pytest.importorskip("transformers", minversion="5.0")

import mla  # noqa: E402
import mla.transformers  # noqa: E402
from hf_models import (  # noqa: E402
    FAMILIES,
    KINDS,
    PROMPT,
    greedy,
    make_family,
    make_model,
    prompts,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402


# The models are small: torch's threads would mostly wait for each other, and for libmla's.
torch.set_num_threads(1)


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
    assert repr(attachment).endswith("device='cpu')")
    attachment.detach()
    assert repr(attachment).endswith("device='cpu', detached)")
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
    with pytest.raises(mla.UnsupportedError, match="'llama', allowed: axk1 deepseek_v2"):
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
        with pytest.raises(mla.InputError, match="outside its model's forward"):
            model.model.layers[0].self_attn(torch.zeros(1, 1, 128))
        with pytest.raises(mla.UnsupportedError, match="StaticCache"):
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=2, cache_implementation="static"
            )
    with pytest.raises(mla.UnsupportedError, match="no_grad"):
        model(tokens, attention_mask=mask)
    attention = model.model.layers[1].self_attn
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is attention.o_proj.weight)
    with pytest.raises(mla.UnsupportedError, match="no_grad"):
        model(tokens, attention_mask=mask)
    with torch.no_grad():
        model.train()
        attention.config.attention_dropout = 0.25
        with pytest.raises(mla.UnsupportedError, match="attention_dropout is 0.25"):
            model(tokens)
        model.eval()
        hook = attention.q_b_proj.register_forward_hook(lambda *_: None)
        with pytest.raises(mla.UnsupportedError, match="q_b_proj has forward hooks"):
            model(tokens)
        hook.remove()
        model(tokens)


def logits_of(model, tokens, **options):
    with torch.no_grad():
        return model(tokens, **options).logits


@pytest.fixture(scope="module")
def shared():
    """A model that tests attach and detach, tokens, and its own logits of them."""
    model = make_model("v3", torch.float32, num_hidden_layers=2)
    tokens, _ = prompts()
    return model, tokens, logits_of(model, tokens)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_the_weights_stay_the_models(shared, tmp_path):
    model, tokens, wanted = shared
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    attachment = mla.transformers.attach(model)
    assert [name for name, _ in model.named_parameters()] == names
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert isinstance(model.model.layers[0].self_attn, type(attachment.layers[0]))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(again, tokens), wanted)
    assert mla.Checkpoint(tmp_path).layer(1).arrays().keys() >= {"query", "kv_up", "output"}
    attachment.detach()
    assert torch.equal(logits_of(model, tokens), wanted)


def change_by_loading(model):
    model.load_state_dict({name: 0.9 * tensor for name, tensor in model.state_dict().items()})


def change_by_assigning(model):
    state = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def change_one_value(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_b_proj.weight[3, 5] += 20


def change_uncounted(model):
    model.model.layers[1].self_attn.o_proj.weight.data.mul_(3)


def change_through_numpy(model):
    model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.detach().numpy()[:] *= 2


def change_a_parameter(model):
    layer = model.model.layers[0].self_attn.q_a_layernorm
    layer.weight = torch.nn.Parameter(2 * layer.weight.detach())


def change_by_training(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for parameter in model.parameters():
        parameter.grad = 0.02 * torch.ones_like(parameter)
    optimizer.step()


def change_there_and_back(model):
    model.model.layers.bfloat16().float()


@pytest.mark.parametrize("change", [
    change_by_loading, change_by_assigning, change_one_value, change_uncounted,
    change_through_numpy, change_a_parameter, change_by_training, change_there_and_back,
])
def test_changed_weights_are_taken_over(shared, change):
    _, tokens, before = shared
    model, own = (make_model("v3", torch.float32, num_hidden_layers=2) for _ in range(2))
    mla.transformers.attach(model)
    close(logits_of(model, tokens), before)
    change(model)
    change(own)
    wanted = logits_of(own, tokens)
    assert (wanted - before).abs().max() > 1e-2
    close(logits_of(model, tokens), wanted)


def test_what_cannot_be_taken_over_is_named(shared):
    _, tokens, _ = shared
    model = make_model("v3", torch.float32, num_hidden_layers=2)
    mla.transformers.attach(model)
    projection = model.model.layers[1].self_attn.o_proj
    projection.bfloat16()
    with pytest.raises(mla.UnsupportedError, match="o_proj.weight of layer 1 was torch.float32"):
        logits_of(model, tokens)
    projection.float().bias = torch.nn.Parameter(torch.zeros(128))
    with pytest.raises(mla.UnsupportedError, match="a bias that libmla does not read: o_proj.bias"):
        logits_of(model, tokens)
    projection.bias = None
    logits_of(model, tokens)
    projection.to("meta")
    with pytest.raises(mla.UnsupportedError, match="is torch.float32 on meta; detach"):
        logits_of(model, tokens)
    with pytest.raises(mla.UnsupportedError, match="o_proj.weight is on the meta device"):
        model.model.layers[1].self_attn.forward._attachment.detach()
        mla.transformers.attach(model)
    with torch.inference_mode():
        uncounted = make_model("v3", torch.float32, num_hidden_layers=1)
    with pytest.raises(mla.UnsupportedError, match=r"made under torch.inference_mode\(\)"):
        mla.transformers.attach(uncounted)
    with pytest.raises(mla.UnsupportedError, match="a tensor .* q_a_proj.weight_scale_inv"):
        model = make_model("v3", torch.float32, num_hidden_layers=2)
        scale = torch.nn.Parameter(torch.ones(1, 1))
        model.model.layers[1].self_attn.q_a_proj.weight_scale_inv = scale
        mla.transformers.attach(model)


def test_copies_of_an_attached_model(shared):
    model, tokens, wanted = shared
    attachment = mla.transformers.attach(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for layer in twin.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    without = logits_of(twin, tokens)
    close(logits_of(model, tokens), wanted)
    with pytest.raises(mla.UnsupportedError, match=r"pickled; detach\(\) first"):
        pickle.dumps(model)
    attachment.detach()
    close(logits_of(twin, tokens), without)  # attached still
    again = copy.deepcopy(twin)
    with pytest.raises(mla.InputError, match="attached already"):
        mla.transformers.attach(again)
    assert torch.equal(logits_of(pickle.loads(pickle.dumps(model)), tokens), wanted)


def test_positions_that_follow_one_another_are_right(shared):
    model, tokens, _ = shared
    shifted = torch.arange(100, 100 + PROMPT)
    each = torch.stack([torch.arange(PROMPT), shifted])
    cases = [
        dict(position_ids=shifted[None]),
        dict(position_ids=each),
        dict(position_ids=each, attention_mask=torch.ones_like(tokens)),
    ]
    wanted = [logits_of(model, tokens, **case) for case in cases]
    attachment = mla.transformers.attach(model, page_size=8)
    for case, own in zip(cases, wanted, strict=True):
        close(logits_of(model, tokens, **case), own)
    # Padding wherever it is, as long as the positions leave it out.
    attachment.detach()
    mask = torch.ones_like(tokens)
    mask[0, 5:9] = mask[1, :3] = mask[1, -4:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    later = dict(
        attention_mask=torch.cat([mask, torch.ones(2, 2, dtype=mask.dtype)], 1),
        position_ids=positions.max(1, keepdim=True).values + torch.tensor([1, 2]),
    )

    def steps():
        cache = DynamicCache(config=model.config)
        first = logits_of(
            model, tokens, attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        return first[mask.bool()], logits_of(model, tokens[:, :2], past_key_values=cache, **later)

    wanted = steps()
    attachment = mla.transformers.attach(model, page_size=8)
    for found, own in zip(steps(), wanted, strict=True):
        close(found, own)
    attachment.detach()


GAP = torch.cat([torch.arange(10), torch.arange(30, 30 + PROMPT - 10)])[None]
REVERSED = torch.arange(PROMPT).flip(0)[None]
PACKED = torch.arange(PROMPT // 2).repeat(2)[None]
HOLE = torch.ones(2, PROMPT, dtype=torch.int64)
HOLE[1, 7:9] = 0
LEFT = torch.ones(2, PROMPT, dtype=torch.int64)
LEFT[1, :13] = 0
SQUARE = torch.ones(2, 1, PROMPT, PROMPT, dtype=torch.bool).tril()


@pytest.mark.parametrize(("options", "words"), [
    (dict(position_ids=GAP), "position_ids of row 0: token 10 is at 30 and the .* at 9"),
    (dict(position_ids=REVERSED), "position_ids of row 0: token 1 is at 38 and the .* at 39"),
    (dict(position_ids=PACKED), "position_ids of row 0: token 20 is at 0 and the .* at 19"),
    (dict(position_ids=GAP.float()), r"position_ids is torch.float32 \[1, 40\], integers"),
    (dict(position_ids=GAP[:, 1:]), r"position_ids is torch.int64 \[1, 39\], integers \[2, 40\]"),
    (dict(attention_mask=HOLE), "positions, without position_ids, of row 1: token 9 is at 9"),
    (dict(attention_mask=LEFT, position_ids=GAP), "position_ids of row 0: token 10 is at 30"),
    (dict(attention_mask=SQUARE), r"attention_mask is \[2, 1, 40, 40\], one of tokens \[2, 40\]"),
    (dict(attention_mask={"full_attention": SQUARE}), "attention_mask is dict"),
    (dict(output_attentions=True), "output_attentions is set"),
    (dict(is_causal=False), "is_causal is False"),
])
def test_other_calls_are_refused(shared, options, words):
    model, tokens, wanted = shared
    attachment = mla.transformers.attach(model)
    with pytest.raises(mla.UnsupportedError, match=words):
        logits_of(model, tokens, **options)
    close(logits_of(model, tokens), wanted)
    gc.collect()
    assert len(attachment.pages.free) == attachment.pages.count
    attachment.detach()


def test_what_a_cache_holds_stays_as_it_was(shared):
    model, tokens, wanted = shared
    attachment = mla.transformers.attach(model)
    cache = DynamicCache(config=model.config)
    logits_of(model, tokens[:, :30], attention_mask=LEFT[:, :30], past_key_values=cache)

    def refused(words, **options):
        with pytest.raises(mla.UnsupportedError, match=words):
            logits_of(model, tokens[:, 30:], past_key_values=cache, **options)

    refused("row 1: token 0 was padding when it was cached, and is shown now")
    hidden = LEFT.clone()
    hidden[0, 4] = 0
    refused("row 0: token 4 was a token when it was cached, and is hidden", attention_mask=hidden)
    refused(
        "position_ids of row 0: token 30 is at 31 and the token before it at 29",
        attention_mask=LEFT, position_ids=torch.arange(31, 41)[None],
    )
    rest = logits_of(model, tokens[:, 30:], attention_mask=LEFT, past_key_values=cache)
    close(rest[0], wanted[0, 30:])
    attachment.detach()


def test_output_attentions_by_the_config(shared):
    model, tokens, _ = shared
    attachment = mla.transformers.attach(model)
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    with pytest.raises(mla.UnsupportedError, match="output_attentions is set"):
        logits_of(model, tokens)
    model.config.output_attentions = False
    model.config._attn_implementation = "sdpa"
    attachment.detach()


def in_pieces(model, steps=8):
    """Logits of two prompts, one padded on its left, in two pieces, and of greedy tokens after."""
    tokens, mask = prompts()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    logits = []
    for piece in (slice(0, 25), slice(25, PROMPT)):
        found = logits_of(
            model, tokens[:, piece], attention_mask=mask[:, : piece.stop],
            position_ids=positions[:, piece], past_key_values=cache,
        )
        logits.append(found[mask[:, piece].bool()])
    next_tokens = found[:, -1:].argmax(-1)
    for _ in range(steps):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        found = logits_of(
            model, next_tokens, attention_mask=mask, past_key_values=cache,
            position_ids=mask.sum(1, keepdim=True) - 1,
        )
        next_tokens = found.argmax(-1)
        logits.append(found[:, 0])
    return torch.cat(logits), next_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    if not hasattr(transformers, FAMILIES[family][0] + "ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = make_family(family)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits, last = in_pieces(model)
    attachment = mla.transformers.attach(model, page_size=8, pages=2)
    found, own = in_pieces(model)
    close(found, logits)
    assert torch.equal(own, last)
    gc.collect()
    assert len(attachment.pages.free) == attachment.pages.count > 2
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    attachment.detach()
    assert torch.equal(in_pieces(model)[0], logits)


def test_a_decoder_within_a_larger_model():
    if not hasattr(transformers, "Kimi_K25Config"):
        pytest.skip(f"transformers {transformers.__version__} has no Kimi_K25")
    vision = transformers.Kimi_K25VisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config = transformers.Kimi_K25Config(
        text_config=make_family("deepseek_v3").config, vision_config=vision
    )
    torch.manual_seed(4)
    model = transformers.Kimi_K25ForConditionalGeneration(config).eval()
    tokens, _ = prompts()
    wanted = logits_of(model, tokens)
    mla.transformers.attach(model)
    close(logits_of(model, tokens), wanted)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "longcat_flash", "kimi_linear", "mistral4"])
def test_beams_of_families(family):
    if not hasattr(transformers, FAMILIES[family][0] + "ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = make_family(family)
    wanted = greedy(model, 6, num_beams=2)[0]
    mla.transformers.attach(model, page_size=8)
    assert torch.equal(greedy(model, 6, num_beams=2)[0], wanted)


def test_positions_that_change_what_is_computed():
    """Mistral's queries grow with the position; longrope's frequencies follow a call's longest."""
    model = make_family("mistral4")
    tokens, mask = prompts()
    own = (mask.cumsum(1) - 1).clamp(min=0)
    shifted = torch.arange(PROMPT)[None] + 8
    model_of = {name: make_family(name) for name in ("mistral4", "minicpm3_longrope")}
    wanted = logits_of(model, tokens, attention_mask=mask, position_ids=own)
    mla.transformers.attach(model)
    found = logits_of(model, tokens, attention_mask=mask, position_ids=own)
    close(found[mask.bool()], wanted[mask.bool()])
    for options, words in (
        (dict(attention_mask=mask), "row 1: new token 13 is at position 13 and is .* token 0"),
        (dict(position_ids=shifted), "row 0: new token 0 is at position 8 and is .* token 0"),
    ):
        with pytest.raises(mla.UnsupportedError, match=words):
            logits_of(model, tokens, **options)
    model = model_of["minicpm3_longrope"]
    calls = [
        dict(position_ids=torch.arange(20)[None]),
        dict(position_ids=torch.arange(20)[None] + 13),
        dict(position_ids=torch.arange(20)[None] + 12),
    ]
    wanted = [logits_of(model, tokens[:, :20], **call) for call in calls]
    assert (wanted[1] - wanted[2]).abs().max() > 1e-2  # the long divisors, and the short ones
    mla.transformers.attach(model)
    for call, own in zip(calls, wanted, strict=True):
        close(logits_of(model, tokens[:, :20], **call), own)


@pytest.mark.parametrize("prefix", ["AXK2", "HYV4", "BailingHybrid"])
def test_families_that_are_not_right_are_refused(prefix):
    if not hasattr(transformers, prefix + "ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {prefix}")
    model = make_family("deepseek_v3")
    model.config = getattr(transformers, prefix + "Config")()
    with pytest.raises(mla.UnsupportedError, match=f"'{model.config.model_type}', allowed: axk1"):
        mla.transformers.attach(model)


YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64,
    beta_fast=32.0, beta_slow=1.0,
)


@pytest.mark.parametrize("rope", [
    YARN,
    YARN | dict(mscale=0.707),
    YARN | dict(mscale_all_dim=0.707),
    YARN | dict(mscale=0.707, mscale_all_dim=0.707),
    YARN | dict(mscale=1.0, mscale_all_dim=0.707),
    YARN | dict(attention_factor=1.3),
    YARN | dict(truncate=False),
    dict(rope_type="default", rope_theta=500.0),
], ids=["plain", "mscale", "all_dim", "equal", "both", "factor", "whole", "default"])
def test_rotary_numbers(rope):
    model = make_model("v3", torch.float32, num_hidden_layers=2, rope_parameters=rope)
    tokens, _ = prompts()
    wanted = logits_of(model, tokens)
    mla.transformers.attach(model)
    close(logits_of(model, tokens), wanted)


@pytest.mark.parametrize("rope", [
    dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
    dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
    dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
         high_freq_factor=4.0, original_max_position_embeddings=64),
], ids=lambda rope: rope["rope_type"])
def test_other_rotary_embeddings_are_refused(rope):
    model = make_model("v3", torch.float32, num_hidden_layers=1, rope_parameters=rope)
    with pytest.raises(mla.UnsupportedError, match="config: .*(linear|dynamic|freq_factor)"):
        mla.transformers.attach(model)


def test_keys_that_are_not_understood():
    model = make_family("deepseek_v3")
    model.config.attention_gate_of_tomorrow = True
    with pytest.raises(mla.UnsupportedError, match="attention_gate_of_tomorrow"):
        mla.transformers.attach(model)
    mla.transformers.attach(model, allow_unknown=True)


def test_numbers_of_the_modules_are_compared():
    def refused(words):
        with pytest.raises(mla.UnsupportedError, match=words):
            mla.transformers.attach(model)

    model = make_model("v3.2", torch.float32, num_hidden_layers=2)
    layer, rotary = model.model.layers[1].self_attn, model.model.rotary_emb
    scaling = layer.scaling
    layer.scaling = 0.5
    refused("the softmax scale of layer 1 is 0.5 in the model, 0.14")
    layer.scaling = scaling
    layer.q_a_layernorm.variance_epsilon = 1e-5
    refused("eps of layer 1 is 1e-05 in the model, 1e-06")
    layer.q_a_layernorm.variance_epsilon = 1e-6
    rotary.attention_scaling = 2.0
    refused("the magnitude of cos and sin is 2.0 in the model, 1.0")
    rotary.attention_scaling = 1.0
    rotary.inv_freq[3] *= 1.001
    refused("inverse frequency 3 is 0.03165")
    rotary.inv_freq[3] /= 1.001
    layer.indexer.k_norm.eps = 1e-3
    refused("the index key norm's eps of layer 1 is 0.001")
    layer.indexer.k_norm.eps = 1e-6
    layer.indexer.softmax_scale = 1.0
    refused("the index scale of layer 1 is 1.0")
    layer.indexer.softmax_scale = 32**-0.5
    mla.transformers.attach(model)
    rotary.inv_freq[3] *= 1.001
    with pytest.raises(mla.UnsupportedError, match="inverse frequency 3 is 0.03165"):
        logits_of(model, prompts()[0])


def test_eps_of_the_latents_is_the_modules():
    """transformers' norms of latents have 1e-6, whatever rms_norm_eps says."""
    model = make_model("v3", torch.float32, num_hidden_layers=2, rms_norm_eps=0.1)
    tokens, _ = prompts()
    wanted = logits_of(model, tokens)
    mla.transformers.attach(model)
    close(logits_of(model, tokens), wanted)


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_a_class_without_an_indexer_has_none(kind):
    index = dict(index_topk=8, index_head_dim=32, index_n_heads=4)
    model = make_model(kind, torch.float32, num_hidden_layers=2, **index)
    tokens, _ = prompts()
    wanted = logits_of(model, tokens)
    mla.transformers.attach(model)
    close(logits_of(model, tokens), wanted)


def test_what_no_step_could_do_is_refused_at_once():
    model = make_model("v3.2", torch.float32, num_hidden_layers=1, index_topk=9000)
    with pytest.raises(mla.ShapeError, match="9000, at most 8192"):
        mla.transformers.attach(model)
