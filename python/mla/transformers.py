"""libmla's attention in Hugging Face's models with Multi-head Latent Attention.

    attachment = mla.transformers.attach(model, cache="fp8_ds_mla")
    model.generate(...)
    attachment.detach()

MODEL_TYPES lists the families. Every layer's attention is then libmla's layer over a paged latent
cache: 576 elements a token and layer instead of keys and values of every head. Steps of the model's
forward are planned once, for all layers. Beam search, assisted generation and continued caches
work: transformers' DynamicCache holds tokens' slots and positions in the place of keys and values.

The model keeps its modules and their weights: state_dict, parameters and save_pretrained are as
before. libmla computes with a copy in its own layout, so attention's weights are held twice. Those
that change (load_state_dict, an optimizer, new Parameters) are copied again at the next step; a
change of their dtype or device is refused. Writes that torch does not count, through .data or
NumPy, are noticed by a sample of each tensor's values; call refresh() after one that changes a few.

Padding tokens take no cache, and their outputs are 0. Refused by name, as results would be others
than the model's: positions of a row that do not follow one another, masks with holes that positions
count, masks that show or hide cached tokens otherwise than when they were cached, masks of other
than two dimensions, output_attentions, dropout, gradients.
"""

from __future__ import annotations

import copy
import inspect
import json
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from . import _mla
from ._arrays import empty, stream_for
from ._mla import InputError, UnsupportedError


@dataclass(frozen=True)
class _Family:
    """What a family's attention class does whatever the config says."""

    interleaved: bool | None = True  # pairs (2i, 2i+1) are rotated; None: as rope_interleave says
    index_interleaved: bool = False
    results: int = 2  # of a module's forward, hidden states first; the others are None here


_FAMILIES = {
    "axk1": _Family(interleaved=None),
    "deepseek_v2": _Family(),
    "deepseek_v3": _Family(interleaved=None),
    "deepseek_v32": _Family(),
    "glm4_moe_lite": _Family(interleaved=None),
    "glm_moe_dsa": _Family(index_interleaved=True, results=3),
    "kimi_linear": _Family(),
    "longcat_flash": _Family(),
    "minicpm3": _Family(interleaved=False),
    "mistral4": _Family(interleaved=None),
    "youtu": _Family(interleaved=None),
}
MODEL_TYPES = tuple(_FAMILIES)


def _attentions(base: Any) -> list[Any]:
    """A decoder's modules of latent attention, in the order in which they are called."""
    found = []
    for decoder in base.layers:
        attention = decoder.self_attn
        several = isinstance(attention, torch.nn.ModuleList)
        found += [a for a in (attention if several else [attention])
                  if hasattr(a, "kv_a_proj_with_mqa")]
    return found


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


_QUERY = ("q_b_proj.weight", "q_proj.weight")  # with a query latent, and without
_READ = {*_TENSORS.values(), *_QUERY}


def _parameters(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an attention module by name; UnsupportedError for what would not be computed."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            continue
        if prefix + name not in _READ:
            what = "a bias" if name.endswith("bias") else "a tensor"
            raise UnsupportedError(
                f"mla.transformers: attention has {what} that libmla does not read: {prefix}{name}"
            )
        yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is None:
            continue
        if child._forward_hooks or child._forward_pre_hooks:
            raise UnsupportedError(
                f"mla.transformers: attention's {prefix}{name} has forward hooks; it is not called"
            )
        yield from _parameters(child, f"{prefix}{name}.")


@dataclass
class _Seen:
    """A tensor as it was when it was copied. `alias` keeps its memory, so that no other gets it."""

    name: str
    tensor: torch.Tensor
    alias: torch.Tensor
    version: int
    probe: torch.Tensor  # about 64 values spread over it, as integers: NaN equals itself

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Seen:
        if tensor.is_inference():
            raise UnsupportedError(
                f"mla.transformers: {name} was made under torch.inference_mode(), which counts no "
                "changes; load the model outside it"
            )
        if tensor.device.type == "meta":
            raise UnsupportedError(f"mla.transformers: {name} is on the meta device, no values")
        alias = tensor.detach()
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        flat = alias.view(bits[alias.element_size()])
        # An odd step, so that not all of a matrix's values are of one column.
        probe = flat.flatten()[:: flat.numel() // 64 | 1] if flat.is_contiguous() else flat
        return cls(name, tensor, alias, tensor._version, probe)

    def holds(self) -> bool:
        tensor, alias = self.tensor, self.alias
        return (
            tensor._version == self.version
            and tensor.data_ptr() == alias.data_ptr()
            and tensor.dtype is alias.dtype
        )


class _Watch:
    """A module's tensors as they were when they were copied, and whether they still are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seen = [_Seen.of(name, tensor) for name, tensor in _parameters(module)]
        self._modules = list(module.modules())
        parts = [part for m in self._modules for part in (m._parameters, m._modules)]
        self._parts = [(part, [*map(id, part.values())]) for part in parts]

    def holds(self) -> bool:
        for module in self._modules[1:]:
            if module._forward_hooks or module._forward_pre_hooks:
                return False
        for part, ids in self._parts:
            if [*map(id, part.values())] != ids:
                return False
        return all([s.holds() for s in self.seen])


class _Weights:
    """All layers' weights in libmla's layout, and whether they are the modules' still."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._watches: list[_Watch | None] = [None] * len(attachment.layers)
        self._places: list[dict[str, tuple[torch.dtype, torch.device]]] = []
        self._samples: list[torch.Tensor] = []
        self.layers: list[_mla.LayerWeights] = []
        for layer in attachment.layers:
            found = dict(_parameters(layer))
            self._places.append({name: (t.dtype, t.device) for name, t in found.items()})
        self.refresh()

    def refresh(self) -> None:
        for number in range(len(self._attachment.layers)):
            self._copy(number)
        self._samples = self._sampled()

    def update(self) -> None:
        """Copies what has changed since it was copied."""
        changed = [n for n, w in enumerate(self._watches) if w is None or not w.holds()]
        for number in changed:
            self._copy(number)
        samples = self._sampled()
        if changed:
            self._samples = samples
        elif not all(map(torch.equal, samples, self._samples)):
            self.refresh()

    def of(self, attachment: Attachment) -> _Weights:
        """The same for a copied model, whose tensors are yet to be looked at."""
        twin = copy.copy(self)
        twin._attachment = attachment
        twin._watches = [None] * len(self._watches)
        twin.layers = list(self.layers)
        return twin

    def _copy(self, number: int) -> None:
        a = self._attachment
        found = dict(_parameters(a.layers[number]))
        for name, tensor in found.items():
            place = self._places[number].get(name)
            if place is not None and place != (tensor.dtype, tensor.device):
                raise UnsupportedError(
                    f"mla.transformers: {name} of layer {number} was {place[0]} on {place[1]} and "
                    f"is {tensor.dtype} on {tensor.device}; detach(), and attach again"
                )
        watch = _Watch(a.layers[number])
        arrays = {role: found[name] for role, name in _TENSORS.items() if name in found}
        arrays["query"] = next(found[name] for name in _QUERY if name in found)
        weights = _mla.prepare(
            a.model,
            _mla.LayerTensors({r: t.detach().cpu().contiguous() for r, t in arrays.items()}),
            dtype=a.dtype, device=str(a.device),
        )
        self._watches[number] = watch
        self.layers[number : number + 1] = [weights]

    def _sampled(self) -> list[torch.Tensor]:
        parts: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for watch in self._watches:
            assert watch is not None
            for s in watch.seen:
                parts.setdefault((s.probe.dtype, s.probe.device), []).append(s.probe.flatten())
        return [torch.cat(p) for p in parts.values()]


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
    positions: torch.Tensor  # [batch, 1, new, 1] int64, as the model counts them
    rotary: _mla.RotaryTable
    index_rotary: _mla.RotaryTable | None
    temporary: list[int]  # pages to be given back once the step is done


def _require_close(what: str, found: float, own: float, bound: float = 1e-6) -> None:
    if not abs(found - own) <= bound * abs(own):
        raise UnsupportedError(
            f"mla.transformers: {what} is {found} in the model, {own} by its config as libmla "
            "reads it"
        )


class _Forward:
    """A layer's attention in the place of its module's forward."""

    def __init__(self, attachment: Attachment, number: int) -> None:
        self._attachment = attachment
        self._number = number

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        past_key_values: Any = None,
        **__: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        attachment = self._attachment
        step = attachment.step
        if step is None:
            raise InputError("mla: a layer's attention is called outside its model's forward")
        layer = attachment.layers[self._number]
        if torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(p.requires_grad for p in layer.parameters())
        ):
            raise UnsupportedError("mla: gradients; call the model under torch.no_grad()")
        batch, new, width = hidden_states.shape
        x = hidden_states.detach().reshape(batch * new, width).to(attachment.device)
        if step.rows is not None:
            x = x.index_select(0, step.rows)
        if x.dtype is torch.float16:
            x = x.float()
        out = empty(x, tuple(x.shape))
        _mla.forward(
            stream_for(x), step.plan, attachment.weights.layers[self._number], step.rotary,
            attachment.pages.caches[self._number], x, out,
            index_cache=attachment.pages.index_caches[self._number],
            index_rotary=step.index_rotary,
        )
        if past_key_values is not None:
            past_key_values.update(step.slots, step.positions, layer.layer_idx)
        out = out.to(hidden_states.device, hidden_states.dtype)
        if step.rows is not None:
            full = torch.zeros_like(hidden_states).view(batch * new, width)
            out = full.index_copy_(0, step.rows.to(full.device), out)
        return out.view(batch, new, width), *attachment.no_results

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "mla.transformers: an attached model is not to be pickled; detach() first, or "
            "save_pretrained()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self._attachment, memo), self._number)


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
        allow_unknown: bool = False,
    ) -> None:
        config = model.config.get_text_config()
        if config.model_type not in MODEL_TYPES:
            raise UnsupportedError(
                f"mla.transformers: model_type is {config.model_type!r}, allowed: "
                + " ".join(MODEL_TYPES)
            )
        self._family = _FAMILIES[config.model_type]
        self.no_results = (None,) * (self._family.results - 1)
        self._rotary_seen: _Seen | None = None
        self._base = model.get_decoder()
        self.layers = _attentions(self._base)
        if not self.layers:
            raise UnsupportedError("mla.transformers: the model has no layer of latent attention")
        if any(isinstance(layer.forward, _Forward) for layer in self.layers):
            raise InputError("mla.transformers: the model is attached already")
        for layer in self.layers:
            dict(_parameters(layer))
        first = self.layers[0].o_proj.weight
        self.device = torch.device(first.device if device is None else device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"mla.transformers: device is {self.device}, allowed: cpu cuda")
        self.dtype = "bf16" if first.dtype is torch.bfloat16 else "f32"
        self.model = self._config(config, allow_unknown)
        self.index_format = index_cache or self.dtype
        self.options = options or _mla.PlanOptions(
            compute=self.dtype, index_format=self.index_format
        )
        self.spec = _mla.cache_spec(self.model, cache or self.dtype, page_size)
        self._require_plannable()
        self.weights = _Weights(self)
        self._rotary: dict[bool, tuple[_mla.RotaryTable, _mla.RotaryTable | None]] = {}
        self.pages = _Pages(self, page_size, pages)
        self.step: _Step | None = None
        self._sequences: weakref.WeakKeyDictionary[Any, _Sequences] = weakref.WeakKeyDictionary()
        self._signature = inspect.signature(type(self._base).forward)
        self._hooks: list[Any] = []
        self._attach()

    def _attach(self) -> None:
        # An instance's own forward may be there already, of a library that moves tensors.
        self._forwards = [layer.__dict__.get("forward") for layer in self.layers]
        for number, layer in enumerate(self.layers):
            layer.forward = _Forward(self, number)
        self._hooks = [
            self._base.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._base.register_forward_hook(self._end, always_call=True),
        ]

    def detach(self) -> None:
        """Gives the model its own attention back. Caches filled meanwhile are of no use."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        for layer, forward in zip(self.layers, self._forwards, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
        self._hooks = []
        self.step = None

    def refresh(self) -> None:
        """Copies all weights from the model's modules again."""
        self.weights.refresh()

    def __repr__(self) -> str:
        state = "" if self._hooks else ", detached"
        return (
            f"mla.transformers.Attachment({self.model.name!r}, layers={len(self.layers)}, "
            f"cache={self.spec.format!r}, device={str(self.device)!r}{state})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Of a copied model: with pages of its own, empty, and weights that are copied at once."""
        twin = memo[id(self)] = object.__new__(Attachment)
        twin.__dict__.update(self.__dict__)
        twin._base = copy.deepcopy(self._base, memo)
        twin.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        twin._hooks = copy.deepcopy(self._hooks, memo)
        twin.weights = self.weights.of(twin)
        twin.pages = _Pages(twin, self.pages.size, self.pages.count)
        twin.step = None
        twin._sequences = weakref.WeakKeyDictionary()
        return twin

    def _config(self, config: Any, allow_unknown: bool) -> _mla.ModelConfig:
        """What the modules compute, which is compared with what the config says."""
        keys = config.to_dict()
        if all(getattr(layer, "indexer", None) is None for layer in self.layers):
            # A class without an indexer computes none, whatever its config carries.
            keys = {k: v for k, v in keys.items() if not k.startswith("index_")}
        model = _mla.parse_config(
            json.dumps(keys), "the model's config", allow_unknown=allow_unknown
        )
        rotary = model.rotary
        interleaved = self._family.interleaved
        rotary.interleaved = config.rope_interleave if interleaved is None else interleaved
        model.rotary = rotary
        if model.indexer is not None:
            indexer = model.indexer
            indexer.interleaved = self._family.index_interleaved
            model.indexer = indexer
        model.rms_eps = self.layers[0].kv_a_layernorm.variance_epsilon
        for layer in self.layers:
            self._require_same(model, layer)
        self._require_same_rotary(model)
        return model

    def _require_same(self, model: _mla.ModelConfig, layer: Any) -> None:
        number = layer.layer_idx
        norms = [layer.kv_a_layernorm, getattr(layer, "q_a_layernorm", None)]
        for norm in norms:
            if norm is not None:
                _require_close(f"a latent norm's eps of layer {number}", norm.variance_epsilon,
                               model.rms_eps)
        _require_close(f"the softmax scale of layer {number}", layer.scaling, model.softmax_scale)
        for what, found, own in (
            ("the factor of queries", getattr(layer, "mla_scale_q_lora", 1.0), model.query_scale),
            ("the factor of latents", getattr(layer, "mla_scale_kv_lora", 1.0), model.latent_scale),
        ):
            _require_close(f"{what} of layer {number}", found, own)
        indexer = getattr(layer, "indexer", None)
        if indexer is None:
            return
        if model.indexer is None:
            raise UnsupportedError(
                f"mla.transformers: layer {number} has an indexer, the config no index_topk"
            )
        _require_close(f"the index key norm's eps of layer {number}", indexer.k_norm.eps, 1e-6)
        _require_close(f"the index scale of layer {number}", indexer.softmax_scale,
                       model.indexer.dim**-0.5)
        _require_close(f"index_topk of layer {number}", indexer.index_topk, model.indexer.topk)

    def _require_same_rotary(self, model: _mla.ModelConfig) -> None:
        rotary = getattr(self._base, "rotary_emb", None)
        if (rotary is not None) != model.rotary.rotate:
            does = "rotates" if rotary is not None else "does not rotate"
            raise UnsupportedError(
                f"mla.transformers: the model {does}, by its config as libmla reads it it "
                + ("does" if model.rotary.rotate else "does not")
            )
        if rotary is None:
            return
        inv_freq = rotary.inv_freq.detach().cpu()
        found = inv_freq.double()
        own = [
            torch.tensor(self._with_choice(model, long).inverse_frequencies(), dtype=torch.double)
            for long in ((False, True) if model.rotary.scaling == "longrope" else (False,))
        ]
        if found.shape != own[0].shape:
            raise UnsupportedError(
                f"mla.transformers: the model rotates {2 * found.numel()} dimensions, its config "
                f"gives {2 * own[0].numel()}"
            )
        # A model that was cast has rounded its frequencies, which makes its rotation coarser.
        bound = max(1e-5, torch.finfo(inv_freq.dtype).eps)
        nearest = min(own, key=lambda o: float(((found - o) / o).abs().max()))
        for i in range(found.numel()):
            _require_close(f"inverse frequency {i}", found[i].item(), nearest[i].item(), bound)
        _require_close(
            "the magnitude of cos and sin", rotary.attention_scaling, model.rotary_magnitude
        )
        self._rotary_seen = _Seen.of("inv_freq", rotary.inv_freq)

    @staticmethod
    def _with_choice(model: _mla.ModelConfig, long: bool) -> _mla.ModelConfig:
        """A model that uses longrope's short divisors, or its long ones."""
        other = _mla.ModelConfig(model)
        rotary = other.rotary
        rotary.max_position = rotary.original_max_position + long
        other.rotary = rotary
        return other

    def _require_plannable(self) -> None:
        """Refuses here what every step would refuse."""
        _mla.plan(
            self.model, _mla.Cache(self.spec, 1),
            _mla.Batch([0, 1], [1], torch.zeros((1, 1), dtype=torch.int32), [0]),
            stream=stream_for(None), options=self.options,
        )

    def _long(self, positions: torch.Tensor) -> bool:
        """Whether longrope's long divisors hold for a step: as its class says, by its positions."""
        rotary = self.model.rotary
        if rotary.scaling != "longrope" or not positions.numel():
            return False
        return bool(positions.max() >= rotary.original_max_position)

    def _rotary_for(
        self, positions: int, long: bool = False
    ) -> tuple[_mla.RotaryTable, _mla.RotaryTable | None]:
        """Tables of at least so many positions, of the attention and of its indexer."""
        tables = self._rotary.get(long)
        if tables is None or tables[0].positions < positions:
            model = self._with_choice(self.model, long)
            positions = max(positions, 2 * tables[0].positions if tables else 4096)
            place, index = str(self.device), model.indexer is not None
            tables = self._rotary[long] = (
                _mla.RotaryTable(model, positions, device=place),
                _mla.RotaryTable(model, positions, indexer=True, device=place) if index else None,
            )
        return tables

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
        extra = given.get("kwargs", {})
        config = module.config
        if extra.get("output_attentions", getattr(config, "output_attentions", False)):
            raise UnsupportedError(
                "mla.transformers: output_attentions is set, and attention weights are never made"
            )
        if extra.get("is_causal") is False:
            raise UnsupportedError("mla.transformers: is_causal is False, attention is causal")
        if module.training and getattr(config, "attention_dropout", 0):
            raise UnsupportedError(
                f"mla.transformers: attention_dropout is {config.attention_dropout} in training; "
                "call model.eval()"
            )
        past = given.get("past_key_values")
        use_cache = given.get("use_cache")
        if past is None and (config.use_cache if use_cache is None else use_cache):
            past = kwargs["past_key_values"] = DynamicCache(config=config)
        self.weights.update()
        seen = self._rotary_seen
        if seen is not None and not (
            seen.tensor is self._base.rotary_emb.inv_freq and seen.holds()
        ):
            self._require_same_rotary(self.model)
        self.step = self._plan(
            tokens.shape[0], tokens.shape[1], given.get("attention_mask"),
            given.get("position_ids"), past,
        )
        return args, kwargs

    def _end(self, *_: Any) -> None:
        if self.step is not None:
            self.pages.free.extend(self.step.temporary)
        self.step = None

    def _plan(self, batch: int, new: int, mask: Any, position_ids: Any, past: Any) -> _Step:
        old, old_positions = self._past(past, batch)
        real = self._real(mask, old, new)
        positions = self._positions_of(position_ids, real, old, old_positions)
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
        try:
            long = self._long(positions)
            rotary, index_rotary = self._rotary_for(max(lengths), long)
            plan = _mla.plan(
                self._with_choice(self.model, long), self.pages.caches[0],
                _mla.Batch(starts, lengths, block_table, slots[real].contiguous()),
                stream=stream_for(torch.empty(0, device=self.device)), options=self.options,
            )
        except BaseException:
            self.pages.free.extend(temporary)
            raise
        rows = None
        if starts[-1] != batch * new:
            rows = real.reshape(-1).nonzero().squeeze(1).to(self.device)
        return _Step(
            plan, batch, new, rows, slots[:, None, :, None], positions[:, None, :, None],
            rotary, index_rotary, temporary,
        )

    def _real(self, mask: Any, old: torch.Tensor, new: int) -> torch.Tensor:
        """Which new tokens are no padding, [batch, new], by a mask over cached and new tokens."""
        batch, cached = old.shape
        if mask is None:
            mask = torch.ones((batch, cached + new), dtype=torch.bool)
        if not isinstance(mask, torch.Tensor) or mask.shape != (batch, cached + new):
            shape = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedError(
                f"mla.transformers: attention_mask is {shape}, one of tokens "
                f"[{batch}, {cached + new}] is needed"
            )
        mask = mask.ne(0).cpu()
        changed = mask[:, :cached] != (old >= 0)
        if changed.any():
            row, token = changed.nonzero()[0].tolist()
            was, now = ("padding", "shown") if mask[row, token] else ("a token", "hidden")
            raise UnsupportedError(
                f"mla.transformers: attention_mask of row {row}: token {token} was {was} when it "
                f"was cached, and is {now} now"
            )
        real: torch.Tensor = mask[:, cached:]
        return real

    def _positions_of(
        self, given: Any, real: torch.Tensor, old: torch.Tensor, old_positions: torch.Tensor
    ) -> torch.Tensor:
        """Positions of new tokens as the model counts them, [batch, new].

        libmla counts a row's tokens without its padding. That is the same rotation as long as the
        row's positions follow one another, from wherever.
        """
        batch, new = real.shape
        name = "position_ids"
        if given is None:
            name = "positions, without position_ids,"
            given = torch.arange(new) + old.shape[1]
        elif (
            not isinstance(given, torch.Tensor)
            or given.is_floating_point()
            or given.shape not in ((new,), (1, new), (batch, new))
        ):
            found = type(given).__name__
            if isinstance(given, torch.Tensor):
                found = f"{given.dtype} {list(given.shape)}"
            raise UnsupportedError(
                f"mla.transformers: position_ids is {found}, integers [{batch}, {new}] are needed"
            )
        positions: torch.Tensor = given.to("cpu", torch.int64).expand(batch, new)
        self._require_same_growth(positions, real, old)
        every = torch.cat([old_positions, positions], dim=1)
        shown = torch.cat([old >= 0, real], dim=1)
        for row in range(batch):
            at = shown[row].nonzero().squeeze(1)
            p = every[row, at]
            broken = (p[1:] - p[:-1]).ne(1).nonzero()
            if len(broken):
                i = int(broken[0])
                raise UnsupportedError(
                    f"mla.transformers: {name} of row {row}: token {int(at[i + 1])} is at "
                    f"{int(p[i + 1])} and the token before it at {int(p[i])}; a row's tokens must "
                    "follow one another"
                )
        return positions

    def _require_same_growth(
        self, positions: torch.Tensor, real: torch.Tensor, old: torch.Tensor
    ) -> None:
        """Mistral's queries grow with the position itself: a row's count of tokens must do."""
        length = self.model.query_growth_length
        if not self.model.query_growth_beta or not length:
            return
        counted = (old >= 0).sum(1, keepdim=True) + real.cumsum(1) - 1
        other = (positions // length != counted // length) & real
        if other.any():
            row, token = other.nonzero()[0].tolist()
            raise UnsupportedError(
                f"mla.transformers: row {row}: new token {token} is at position "
                f"{int(positions[row, token])} and is the row's token {int(counted[row, token])}; "
                f"queries grow with every {length} positions, and must be counted without padding"
            )

    def _past(self, past: Any, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots, -1 for padding, and positions of what a cache holds, each [batch, tokens]."""
        none = torch.empty((batch, 0), dtype=torch.int32)
        if past is None:
            return none, none
        if not isinstance(past, DynamicCache):
            raise UnsupportedError(
                f"mla.transformers: past_key_values is a {type(past).__name__}, a DynamicCache "
                "is needed"
            )
        number = self.layers[0].layer_idx
        if past.get_seq_length(number) == 0:
            return none, none
        keys, values = past.layers[number].keys, past.layers[number].values
        if past not in self._sequences or keys.dtype is not torch.int32:
            raise UnsupportedError(
                "mla.transformers: past_key_values was filled by another attention, or copied"
            )
        if keys.shape[0] != batch:
            raise InputError(
                f"mla.transformers: past_key_values has {keys.shape[0]} rows, the batch {batch}"
            )
        return keys[:, 0, :, 0], values[:, 0, :, 0]

    def _own(self, past: Any, row: int, page: int, held: _Sequences | None) -> int:
        """A copy of a row's last page, which its cached slots then name."""
        copy = self.pages.take(1)[0]
        self.pages.copy(page, copy)
        assert held is not None
        held.pages.add(copy)
        for layer in self.layers:
            slots = past.layers[layer.layer_idx].keys[row, 0, :, 0]
            moved = slots // self.pages.size == page
            slots[moved] += (copy - page) * self.pages.size
        return copy


def attach(
    model: Any,
    cache: str | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> Attachment:
    """Puts libmla's layer in the place of a transformers model's latent attention: MODEL_TYPES.

    cache: the latent cache's format, by default f32 or bf16 as the model's weights are. device:
    where attention runs, by default where its weights lie; other devices' hidden states are copied
    to and fro. page_size: tokens a page. pages: of the cache, to begin with; it grows. index_cache:
    format of the index cache of a sparse model, by default as the weights. options: PlanOptions,
    whose compute and index_format are otherwise those of the weights and of index_cache.
    allow_unknown: goes on past keys of the config that are not understood.

    The weights are copied into libmla's layout; the model's own stay where they are. Rotary
    frequencies, their magnitude, softmax scale and norms' eps are compared with the modules', and
    attach refuses, with both numbers, where they differ. UnsupportedError also for other models,
    for biases and for every other tensor of attention that libmla does not read.

    longrope's divisors are chosen as the model's class does it: at every call, by its positions.
    """
    return Attachment(model, cache, device, **options)


__all__ = ["Attachment", "MODEL_TYPES", "attach"]
