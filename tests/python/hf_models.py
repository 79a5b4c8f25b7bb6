"""Small random DeepSeek models of transformers, and their greedy tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers

KINDS = ("v2", "v3", "v3.2")
PROMPT, TOPK = 40, 24

_COMMON = dict(
    vocab_size=96, hidden_size=128, intermediate_size=192, moe_intermediate_size=64,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
    n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, kv_lora_rank=64,
    qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=1,
    max_position_embeddings=512, initializer_range=0.15, pad_token_id=0, bos_token_id=1,
    eos_token_id=None,
)
_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64,
    beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
)


def make_model(kind: str, dtype: torch.dtype, seed: int = 3, **changes: Any) -> Any:
    """A model whose greedy tokens follow from all of its context.

    In bf16 two ways of rounding would soon choose differently between nearly equal logits, or
    experts: there one token strongly suggests the next, and no layer has experts. What attention
    adds is then seen in the logits.
    """
    torch.manual_seed(seed)
    options = _COMMON | changes  # keys of the config, also such as the class does not know
    exact = dtype is torch.float32
    if not exact:
        options["first_k_dense_replace"] = options["num_hidden_layers"]
    if kind == "v2":
        config = transformers.DeepseekV2Config(q_lora_rank=None, topk_method="greedy", **options)
        model = transformers.DeepseekV2ForCausalLM(config)
    elif kind == "v3":
        options = dict(q_lora_rank=48, rope_parameters=_YARN) | options
        config = transformers.DeepseekV3Config(**options)
        model = transformers.DeepseekV3ForCausalLM(config)
    else:
        # Enough heads that no two keys score nothing at all: such ties are broken in any order.
        sparse = dict(q_lora_rank=48, index_topk=TOPK, index_head_dim=32, index_n_heads=32)
        config = transformers.DeepseekV32Config(**(sparse | options))
        model = transformers.DeepseekV32ForCausalLM(config)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[0].normal_(std=options["initializer_range"])  # the padding's: it may be generated
        if not exact:
            embedding *= 100
            model.lm_head.weight.copy_(embedding.roll(1, 0) / 100)
    return model.to(dtype).eval()


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "axk1": ("AXK1", {}),
    "deepseek_v2": ("DeepseekV2", dict(topk_method="greedy")),
    "deepseek_v3": ("DeepseekV3", {}),
    "deepseek_v3_neox": ("DeepseekV3", dict(rope_interleave=False, q_lora_rank=None)),
    "deepseek_v32": ("DeepseekV32", dict(index_topk=TOPK, index_head_dim=32, index_n_heads=32)),
    "glm4_moe_lite": ("Glm4MoeLite", {}),
    "glm_moe_dsa": ("GlmMoeDsa", dict(
        index_topk=TOPK, index_head_dim=32, index_n_heads=32,
        indexer_types=["full", "shared", "full"],
    )),
    "kimi_linear": ("KimiLinear", dict(
        layer_types=["full_attention", "linear_attention", "full_attention"], q_lora_rank=None,
        linear_num_heads=4, linear_head_dim=32,
    )),
    "longcat_flash": ("LongcatFlash", dict(
        num_layers=2, num_hidden_layers=4, ffn_hidden_size=192, expert_ffn_hidden_size=64,
        head_dim=16, zero_expert_num=1, moe_topk=2,
    )),
    "minicpm3": ("MiniCPM3", {}),
    "minicpm3_longrope": ("MiniCPM3", dict(rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32,
        short_factor=[1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0],
        long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 8.0, 12.0, 16.0],
    ))),
    "mistral4": ("Mistral4", dict(rope_parameters=_YARN | dict(
        original_max_position_embeddings=8, llama_4_scaling_beta=0.5,
    ))),
    "youtu": ("Youtu", dict(rope_parameters=_YARN)),
}


def make_family(name: str, **changes: Any) -> Any:
    """A small f32 model of a family, by its transformers class's own defaults where they matter."""
    torch.manual_seed(3)
    prefix, own = FAMILIES[name]
    config = getattr(transformers, prefix + "Config")(
        **(_COMMON | dict(q_lora_rank=48) | own | changes)
    )
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval()
    with torch.no_grad():  # the padding's embedding, which may be generated: its index keys are 0
        model.get_input_embeddings().weight[0].normal_(std=_COMMON["initializer_range"])
    return model


def prompts(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the second padded on its left; and their mask."""
    tokens = torch.randint(2, 96, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    tokens[1, :13] = mask[1, :13] = 0
    return tokens.to(device), mask.to(device)


def greedy(model: Any, steps: int = 64, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens [2, steps], and logits [steps, 2, vocabulary] in f32."""
    tokens, mask = prompts(str(model.device))
    done = model.generate(
        tokens, attention_mask=mask, max_new_tokens=steps, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )
    return done.sequences[:, PROMPT:].cpu(), torch.stack(done.logits).float().cpu()
