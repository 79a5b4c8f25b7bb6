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
