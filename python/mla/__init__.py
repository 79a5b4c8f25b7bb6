"""Multi-head Latent Attention for LLM serving.

A step is planned on the host as plain data, then executed:

    stream = mla.Stream(threads=2)
    step = mla.plan(model, cache, batch, stream=stream)
    out = mla.forward(step, weights, rotary, cache, hidden, stream=stream)

Arrays are NumPy's (bfloat16 and float8_e4m3fn by ml_dtypes) or anything with DLPack, torch tensors
among them; none is copied. Bad input raises a subclass of `mla.Error` that names value and limit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _mla
from ._arrays import empty, finish, require_array, settle, stream_for
from ._bench import bench
from ._command import command_path
from ._mla import VERSION as __version__
from ._mla import (
    Batch,
    BatchError,
    Cache,
    CacheSharding,
    CacheSpec,
    Checkpoint,
    CheckpointError,
    Communicator,
    DeviceError,
    Error,
    IndexCache,
    IndexerConfig,
    InputError,
    LayerTensors,
    LayerWeights,
    ModelConfig,
    OutOfPages,
    PageAllocator,
    Plan,
    PlanOptions,
    Profile,
    RankError,
    RopeConfig,
    RotaryTable,
    ShapeError,
    Stream,
    UnsupportedError,
    cache_formats,
    cache_spec,
    chain_hash,
    gpu_count,
    head_share,
    parse_config,
    part_of,
    prepare,
    preset,
    preset_names,
    random_layer,
    read_config,
    thread_communicators,
)


def plan(
    model: ModelConfig,
    cache: Cache,
    batch: Batch,
    *,
    stream: Stream | None = None,
    options: PlanOptions | None = None,
) -> Plan:
    """Validates a batch and plans its step for a stream, by default the CPU's.

    BatchError, ShapeError or UnsupportedError on anything that does not fit. The batch's arrays are
    those of its construction; the plan keeps them.
    """
    return _mla.plan(model, cache, batch, stream=stream or stream_for(None), options=options)


def step_memory(
    model: ModelConfig,
    cache: Cache,
    *,
    requests: int,
    tokens: int,
    query_len: int,
    seq_len: int,
    stream: Stream | None = None,
    options: PlanOptions | None = None,
) -> tuple[int, int]:
    """Bytes of workspace and of selection that are enough for every step within these maxima.

    requests, and tokens: new ones of all requests together. query_len: new tokens of one request.
    seq_len: its cached and new tokens, at least query_len. Of the cache its format and page size
    are looked at. No batch is needed: an engine sizes its memory by it, once. ShapeError for a
    number below 0 or past 32 bits.
    """
    return _mla.step_memory(
        model,
        cache,
        stream=stream or stream_for(None),
        requests=requests,
        tokens=tokens,
        query_len=query_len,
        seq_len=seq_len,
        options=options,
    )


def forward(
    plan: Plan,
    weights: LayerWeights,
    rotary: RotaryTable,
    cache: Cache,
    hidden: Any,
    out: Any = None,
    *,
    stream: Stream | None = None,
    index_cache: IndexCache | None = None,
    index_rotary: RotaryTable | None = None,
    profile: Profile | None = None,
    ranks: Communicator | None = None,
    rank_seconds: float = 60.0,
) -> Any:
    """The layer from hidden states to hidden states.

    hidden: [tokens or more, hidden], f32 or bf16, or what PlanOptions.activation_dtype says. out:
    the same, f32, bf16 or that dtype, written and returned; without it a new array like `hidden`.
    Rows past the plan's tokens are neither read nor written.
    Appends the step's rows to the cache. A model with an indexer needs index_cache and
    index_rotary in layers that have one. stream: by default that of hidden's device.

    ranks: of a plan with tensor_parallel above 1, this rank's place among as many; `out` is then the
    sum over all of them; with PlanOptions.sums own, of plan.own_rows alone. rank_seconds: that a call between them waits for the others, at most:
    RankError then. A rank's default stream on the CPU is its own.
    """
    if out is None:
        require_array("hidden", hidden, "[tokens, hidden]")
        rows = hidden.shape[0] if plan.own_rows[1] == plan.tokens else plan.own_rows[1]
        out = empty(hidden, (rows, *hidden.shape[1:]))
    settle(hidden, out)
    _mla.forward(
        stream or stream_for(hidden, ranks), plan, weights, rotary, cache, hidden, out,
        index_cache=index_cache, index_rotary=index_rotary, profile=profile,
        ranks=ranks, rank_seconds=rank_seconds,
    )
    finish(hidden)
    return out


def attend(
    plan: Plan,
    weights: LayerWeights,
    rotary: RotaryTable,
    cache: Cache,
    q: Any,
    kv_c: Any,
    k_pe: Any,
    out: Any = None,
    *,
    stream: Stream | None = None,
    index_cache: IndexCache | None = None,
    index_rotary: RotaryTable | None = None,
    profile: Profile | None = None,
    ranks: Communicator | None = None,
    rank_seconds: float = 60.0,
) -> Any:
    """The attention alone, between the projections.

    q: [tokens, heads, nope + rope], rotated; kv_c: [tokens, latent], normed; k_pe: [tokens, rope],
    rotated; all f32 (on a GPU the plan's compute dtype), or what PlanOptions.activation_dtype says.
    out: [tokens, heads, value], f32, bf16 or f16, written and returned; without it a new f32 array.
    Appends [kv_c | k_pe] first. Sparse rows attend to what `select` chose.

    With PlanOptions.cache_use "read" the rows are in the cache already: kv_c and k_pe may be None,
    unless the plan has requests on the expanded path.

    ranks: of a plan whose cache is split over ranks (PlanOptions.sharding), as in `forward`.
    """
    if out is None:
        require_array("q", q, "[tokens, heads, nope + rope]")
        out = empty(q, (q.shape[0], q.shape[1], plan.model.value), "float32")
    settle(q, kv_c, k_pe, out)
    _mla.attend(
        stream or stream_for(q, ranks), plan, weights, rotary, cache, q, kv_c, k_pe, out,
        index_cache=index_cache, index_rotary=index_rotary, profile=profile,
        ranks=ranks, rank_seconds=rank_seconds,
    )
    finish(q)
    return out


class KvScales(NamedTuple):
    """Static scales: of PlanOptions, of cache_spec, and of values that are held apart from keys."""

    q_scale: float
    k_scale: float
    v_scale: float


def calc_kv_scales(
    q: Any,
    kv_c: Any,
    *,
    q_divisor: float = 200.0,
    k_divisor: float = 200.0,
    v_divisor: float = 100.0,
    stream: Stream | None = None,
) -> KvScales:
    """Scales of fp8 queries and caches from observed activations: largest magnitudes over divisors.

    q: [tokens, heads, nope + rope], or None, whose scale is then 1; kv_c: [tokens, latent]; each
    f32, bf16 or f16. k_scale and v_scale are of kv_c. NaN does not count; where nothing but zeros
    was seen the scale is 1. InputError for an infinity. A GPU reads its arrays itself, on their
    framework's current stream, and is waited for; it must not be capturing.
    """
    settle(q, kv_c)
    return KvScales(*_mla.calc_kv_scales(
        stream or stream_for(kv_c), q, kv_c, q_divisor, k_divisor, v_divisor
    ))


def select(
    plan: Plan,
    weights: LayerWeights,
    rotary: RotaryTable,
    cache: Cache,
    positions: Any,
    *,
    stream: Stream | None = None,
    index_cache: IndexCache | None = None,
    index_rotary: RotaryTable | None = None,
) -> None:
    """Puts a choice of one's own in the place of the indexer's: positions [tokens, topk], int32.

    Counted from each token's request's start, unused entries negative. For the attention form, and
    for layers without an indexer. UnsupportedError where the plan masks rows (sparse "masked", and
    "automatic" in the block form): plan with "mixed", "direct" or "upconvert".
    """
    settle(positions)
    _mla.select(
        stream or stream_for(positions), plan, weights, rotary, cache, positions,
        index_cache=index_cache, index_rotary=index_rotary,
    )


__all__ = [
    "Batch", "BatchError", "Cache", "CacheSharding", "CacheSpec", "Checkpoint", "CheckpointError",
    "Communicator", "DeviceError", "Error", "IndexCache", "IndexerConfig", "InputError", "KvScales",
    "LayerTensors", "LayerWeights", "ModelConfig", "OutOfPages", "PageAllocator", "Plan",
    "PlanOptions", "Profile", "RankError", "RopeConfig", "RotaryTable", "ShapeError", "Stream",
    "UnsupportedError", "__version__", "attend", "bench", "cache_formats", "cache_spec",
    "calc_kv_scales",
    "chain_hash", "command_path", "forward", "gpu_count", "head_share", "parse_config", "part_of",
    "plan", "prepare", "preset", "preset_names", "random_layer", "read_config", "select",
    "step_memory", "stream_for", "thread_communicators",
]


def __dir__() -> list[str]:
    return __all__
