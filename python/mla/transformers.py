"""libmla's attention in Hugging Face's DeepSeek V2, V3 and V3.2 models.

    attachment = mla.transformers.attach(model, cache="fp8_ds_mla")
    model.generate(...)
    attachment.detach()

Every layer's attention is then libmla's layer over a paged latent cache: 576 elements a token and
layer instead of keys and values of every head. Steps of the model's forward are planned once, for
all layers. Padding tokens take no cache and no attention; a row's positions count its own tokens.
Beam search, assisted generation and continued caches work: transformers' DynamicCache holds, in the
place of keys, the slot of every token. Inference alone, without attention weights.
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from . import _mla
from ._arrays import empty, stream_for
from ._mla import InputError, UnsupportedError

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")

# What a layer's tensors are called here, and in transformers.
_TENSORS = {
    "query_down": "q_a_proj.weight",
    "query_norm": "q_a_layernorm.weight",
    "kv_down": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "kv_up": "kv_b_proj.weight",
    "output": "o_proj.weight",
    "indexer.query": "indexer.wq_b.weight",
    "indexer.key": "indexer.wk.weight",
    "indexer.key_norm": "indexer.k_norm.weight",
    "indexer.key_norm_bias": "indexer.k_norm.bias",
    "indexer.head_weights": "indexer.weights_proj.weight",
}


def _tensors(attention: torch.nn.Module) -> _mla.LayerTensors:
    state = attention.state_dict()
    biases = [name for name in state if name.endswith("proj.bias") or "proj_with_mqa.bias" in name]
    if biases:
        raise UnsupportedError(f"{biases[0]}: biases in attention's projections")
    arrays = {role: state[name] for role, name in _TENSORS.items() if name in state}
    query = "q_b_proj.weight" if "q_b_proj.weight" in state else "q_proj.weight"
    arrays["query"] = state[query]
    return _mla.LayerTensors({k: v.detach().cpu().contiguous() for k, v in arrays.items()})


class _Pages:
    """Pages of all layers' caches: a number is the same page in each. Grows when none is free."""

    def __init__(self, attachment: Attachment, page_size: int, count: int) -> None:
        self.size, self.count = page_size, 0
        self.free: list[int] = []
        self._attachment = attachment
        self._memory: list[torch.Tensor] = []
        self._index_memory: list[torch.Tensor] = []
        self.caches: list[_mla.Cache] = []
        self.index_caches: list[_mla.IndexCache | None] = []
        self.grow(count)

    def grow(self, count: int) -> None:
        a = self._attachment
        layers = len(a.layers)

        def grown(memory: list[torch.Tensor], page_bytes: int) -> list[torch.Tensor]:
            new = []
            for i in range(layers):
                fresh = torch.zeros((count, page_bytes), dtype=torch.uint8, device=a.device)
                if memory:
                    fresh[: self.count].copy_(memory[i])
                new.append(fresh)
            return new

        self._memory = grown(self._memory, a.spec.page_bytes)
        self.caches = [_mla.Cache(a.spec, memory=m) for m in self._memory]
        self.index_caches = [None] * layers
        if a.model.indexer is not None:
            if not self._index_memory:
                one = _mla.IndexCache(a.model, _mla.Cache(a.spec, 1), a.index_format)
                memory: Any = one.memory
                self._index_page = memory.shape[1]
            self._index_memory = grown(self._index_memory, self._index_page)
            self.index_caches = [
                _mla.IndexCache(a.model, cache, a.index_format, memory=m)
                for cache, m in zip(self.caches, self._index_memory, strict=True)
            ]
        self.free.extend(range(count - 1, self.count - 1, -1))
        self.count = count

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            self.grow(max(2 * self.count, self.count + count))
        return [self.free.pop() for _ in range(count)]

    def copy(self, page: int, to: int) -> None:
        for memory in (*self._memory, *self._index_memory):
            memory[to].copy_(memory[page])


@dataclass
class _Sequences:
    """What a DynamicCache holds of the pages: those that its slots name."""

    pages: set[int]


@dataclass
class _Step:
    plan: _mla.Plan
    batch: int
    new: int
    rows: torch.Tensor | None  # flat rows that are tokens; None: all are
    slots: torch.Tensor  # [batch, 1, new, 1] int32, -1: padding
    rotary: _mla.RotaryTable
    index_rotary: _mla.RotaryTable | None
    temporary: list[int]  # pages to be given back once the step is done


class MlaAttention(torch.nn.Module):
    """Stands for a layer's attention: the planned layer, from hidden states to hidden states."""

    def __init__(self, attachment: Attachment, number: int, weights: _mla.LayerWeights) -> None:
        super().__init__()
        self._attachment = weakref.ref(attachment)
        self._number = number
        self._weights = weights
        self.layer_idx = attachment.layers[number].layer_idx

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        past_key_values: Any = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        attachment = self._attachment()
        step = attachment.step if attachment is not None else None
        if attachment is None or step is None:
            raise InputError("mla: a layer's attention is called outside its model's forward")
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError("mla: gradients; call the model under torch.no_grad()")
        batch, new, width = hidden_states.shape
        x = hidden_states.detach().reshape(batch * new, width).to(attachment.device)
        if step.rows is not None:
            x = x.index_select(0, step.rows)
        if x.dtype is torch.float16:
            x = x.float()
        out = empty(x, tuple(x.shape))
        _mla.forward(
            stream_for(x), step.plan, self._weights, step.rotary,
            attachment.pages.caches[self._number], x, out,
            index_cache=attachment.pages.index_caches[self._number],
            index_rotary=step.index_rotary,
        )
        if past_key_values is not None:
            past_key_values.update(step.slots, step.slots[..., :0], self.layer_idx)
        out = out.to(hidden_states.device, hidden_states.dtype)
        if step.rows is not None:
            full = torch.zeros_like(hidden_states).view(batch * new, width)
            out = full.index_copy_(0, step.rows.to(full.device), out)
        return out.view(batch, new, width), None


class Attachment:
    """A model whose attention is libmla's, until detach()."""

    def __init__(
        self,
        model: Any,
        cache: str | None = None,
        device: str | torch.device | None = None,
        *,
        page_size: int = 64,
        pages: int = 64,
        index_cache: str | None = None,
        options: _mla.PlanOptions | None = None,
    ) -> None:
        config = model.config.get_text_config()
        if config.model_type not in MODEL_TYPES:
            raise UnsupportedError(
                f"mla.transformers: model_type is {config.model_type!r}, allowed: "
                + " ".join(MODEL_TYPES)
            )
        self._base = getattr(model, model.base_model_prefix, model)
        self._decoders = list(self._base.layers)
        self.layers = [decoder.self_attn for decoder in self._decoders]
        if any(isinstance(layer, MlaAttention) for layer in self.layers):
            raise InputError("mla.transformers: the model is attached already")
        first = self.layers[0].o_proj.weight
        self.device = torch.device(first.device if device is None else device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"mla.transformers: device is {self.device}, allowed: cpu cuda")
        dtype = "bf16" if first.dtype is torch.bfloat16 else "f32"
        self.model = self._config(config)
        self.index_format = index_cache or dtype
        self.options = options or _mla.PlanOptions(compute=dtype, index_format=self.index_format)
        self.spec = _mla.cache_spec(self.model, cache or dtype, page_size)
        place = str(self.device)
        self._weights = [
            _mla.prepare(self.model, _tensors(layer), dtype=dtype, device=place)
            for layer in self.layers
        ]
        self._positions = 0
        self._rotary_for(config.max_position_embeddings)
        self.pages = _Pages(self, page_size, pages)
        self.step: _Step | None = None
        self._sequences: weakref.WeakKeyDictionary[Any, _Sequences] = weakref.WeakKeyDictionary()
        self._signature = inspect.signature(type(self._base).forward)
        for number, decoder in enumerate(self._decoders):
            decoder.self_attn = MlaAttention(self, number, self._weights[number])
        self._hooks = [
            self._base.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._base.register_forward_hook(self._end, always_call=True),
        ]

    def detach(self) -> None:
        """Gives the model its own attention back. Caches filled meanwhile are of no use."""
        for hook in self._hooks:
            hook.remove()
        for decoder, layer in zip(self._decoders, self.layers, strict=True):
            decoder.self_attn = layer
        self._hooks = []
        self.step = None

    def _config(self, config: Any) -> _mla.ModelConfig:
        model = _mla.parse_config(json.dumps(config.to_dict()), "the model's config")
        layer = self.layers[0]
        model.rms_eps = layer.kv_a_layernorm.variance_epsilon
        rotary = model.rotary
        # V2 always rotates interleaved pairs, V3 says which, and V3.2's indexer has its own way.
        rotary.interleaved = bool(getattr(config, "rope_interleave", True))
        model.rotary = rotary
        if model.indexer is not None:
            indexer = model.indexer
            indexer.interleaved = False
            model.indexer = indexer
        if abs(model.softmax_scale - layer.scaling) > 1e-6 * layer.scaling:
            raise UnsupportedError(
                f"mla.transformers: the model's softmax scale is {layer.scaling}, its "
                f"config gives {model.softmax_scale}"
            )
        return model

    def _rotary_for(self, positions: int) -> None:
        if positions <= self._positions:
            return
        self._positions = max(positions, 2 * self._positions)
        place = str(self.device)
        self._rotary = _mla.RotaryTable(self.model, self._positions, device=place)
        self._index_rotary = None
        if self.model.indexer is not None:
            self._index_rotary = _mla.RotaryTable(
                self.model, self._positions, indexer=True, device=place
            )

    # A step of the model.

    def _begin(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = self._signature.bind(module, *args, **kwargs).arguments
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        if tokens is None:
            return args, kwargs  # the model itself refuses
        past = given.get("past_key_values")
        use_cache = given.get("use_cache")
        if past is None and (module.config.use_cache if use_cache is None else use_cache):
            past = kwargs["past_key_values"] = DynamicCache(config=module.config)
        self.step = self._plan(tokens.shape[0], tokens.shape[1], given.get("attention_mask"), past)
        return args, kwargs

    def _end(self, *_: Any) -> None:
        if self.step is not None:
            self.pages.free.extend(self.step.temporary)
        self.step = None

    def _plan(self, batch: int, new: int, mask: Any, past: Any) -> _Step:
        old = self._past(past, batch)
        total = old.shape[1] + new
        real = torch.ones((batch, new), dtype=torch.bool)
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.shape != (batch, total):
                shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
                raise UnsupportedError(
                    f"mla.transformers: attention_mask is {shape}, one of tokens "
                    f"[{batch}, {total}] is needed"
                )
            real = mask[:, -new:].ne(0).cpu()
        held = None
        if past is not None:
            held = self._sequences.get(past)
            if held is None:
                held = self._sequences[past] = _Sequences(set())
                weakref.finalize(past, self.pages.free.extend, held.pages)
        size = self.pages.size
        counts = real.sum(dim=1).tolist()
        tables: list[list[int]] = []
        slots = torch.full((batch, new), -1, dtype=torch.int32)
        lengths = []
        past_slots = [row[row >= 0] for row in old]
        past_tables = [(row[::size] // size).tolist() for row in past_slots]
        owners = Counter(page for table in past_tables for page in table)
        for row, table in enumerate(past_tables):
            context = len(past_slots[row])
            # A last page that is not full, and another row's too (of a beam), is copied.
            if context % size and counts[row] and owners[table[-1]] > 1:
                owners[table[-1]] -= 1
                table[-1] = self._own(past, row, table[-1], held)
            fresh = self.pages.take(-(-(context + counts[row]) // size) - len(table))
            if held is not None:
                held.pages.update(fresh)
            table += fresh
            at = torch.arange(context, context + counts[row])
            pages = torch.tensor(table, dtype=torch.int64)
            slots[row, real[row]] = (pages[at // size] * size + at % size).to(torch.int32)
            tables.append(table)
            lengths.append(context + counts[row])
        if held is not None:
            used = {page for table in tables for page in table}
            self.pages.free.extend(held.pages - used)
            held.pages.intersection_update(used)
        temporary = [page for table in tables for page in table] if held is None else []

        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        columns = max(1, max(len(table) for table in tables))
        block_table = torch.full((batch, columns), -1, dtype=torch.int32)
        for row, table in enumerate(tables):
            block_table[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        self._rotary_for(max(lengths))
        rows = None
        if starts[-1] != batch * new:
            rows = real.reshape(-1).nonzero().squeeze(1).to(self.device)
        plan = _mla.plan(
            self.model, self.pages.caches[0],
            _mla.Batch(starts, lengths, block_table, slots[real].contiguous()),
            stream=stream_for(torch.empty(0, device=self.device)), options=self.options,
        )
        return _Step(
            plan, batch, new, rows, slots[:, None, :, None], self._rotary, self._index_rotary,
            temporary,
        )

    def _past(self, past: Any, batch: int) -> torch.Tensor:
        """Slots of the tokens that a cache holds, [batch, tokens], -1 for padding."""
        none = torch.empty((batch, 0), dtype=torch.int32)
        if past is None:
            return none
        if not isinstance(past, DynamicCache):
            raise UnsupportedError(
                f"mla.transformers: past_key_values is a {type(past).__name__}, a DynamicCache "
                "is needed"
            )
        number = self.layers[0].layer_idx
        if past.get_seq_length(number) == 0:
            return none
        keys = past.layers[number].keys
        if past not in self._sequences or keys.dtype is not torch.int32:
            raise UnsupportedError(
                "mla.transformers: past_key_values was filled by another attention, or copied"
            )
        if keys.shape[0] != batch:
            raise InputError(
                f"mla.transformers: past_key_values has {keys.shape[0]} rows, the batch {batch}"
            )
        slots: torch.Tensor = keys[:, 0, :, 0]
        return slots

    def _own(self, past: Any, row: int, page: int, held: _Sequences | None) -> int:
        """A copy of a row's last page, which its cached slots then name."""
        copy = self.pages.take(1)[0]
        self.pages.copy(page, copy)
        assert held is not None
        held.pages.add(copy)
        for layer in past.layers:
            slots = layer.keys[row, 0, :, 0]
            moved = slots // self.pages.size == page
            slots[moved] += (copy - page) * self.pages.size
        return copy


def attach(
    model: Any,
    cache: str | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> Attachment:
    """Replaces the attention of a DeepSeek V2, V3 or V3.2 model of transformers by libmla's layer.

    cache: the latent cache's format, by default f32 or bf16 as the model's weights are. device:
    where attention runs, by default where its weights lie; other devices' hidden states are copied
    to and fro. page_size: tokens a page. pages: of the cache, to begin with; it grows. index_cache:
    format of the index cache of V3.2's indexer, by default as the weights. options: PlanOptions,
    whose compute and index_format are otherwise those of the weights and of index_cache.

    The weights are copied into libmla's layout; the model's own stay with its attention modules,
    which detach() puts back. UnsupportedError for other models and for biases.
    """
    return Attachment(model, cache, device, **options)


__all__ = ["Attachment", "MODEL_TYPES", "MlaAttention", "attach"]
