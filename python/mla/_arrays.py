"""New arrays like the caller's, and the stream that serves an array when none is given."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ._mla import Communicator, ShapeError, Stream, UnsupportedError

_CPU = ("cpu", 0)
_streams: dict[tuple[str, int], Stream] = {}
_rank_streams: weakref.WeakKeyDictionary[Communicator, Stream] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _torch_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _cupy_array(array: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def _jax_on_gpu(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array) and array.device.platform != "cpu"


def require_rank(name: str, array: Any, dims: str) -> None:
    """ShapeError unless an array has as many dimensions as "[rows, heads]" names."""
    if not hasattr(array, "ndim"):
        raise ShapeError(
            f"{name}: is a {type(array).__name__}, an array of a framework with DLPack is needed"
        )
    if array.ndim != dims.count(",") + 1:
        raise ShapeError(f"{name}: has shape {list(array.shape)}, {dims} is needed")


def require_array(name: str, array: Any, dims: str) -> None:
    """The same, of an array whose dtype is looked at here: a memoryview, say, has none."""
    require_rank(name, array, dims)
    if not hasattr(getattr(array, "dtype", None), "itemsize"):
        raise ShapeError(
            f"{name}: is a {type(array).__name__}, an array of NumPy, torch, CuPy or JAX is needed"
        )


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """An array of `like`'s framework and device, of its dtype or of the one named.

    NumPy's for JAX arrays of the CPU.
    """
    if _torch_tensor(like):
        if dtype is None:
            return like.new_empty(shape)
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    # ml_dtypes has given its names to NumPy by the time that an array of them exists.
    element = np.dtype(dtype) if dtype else like.dtype
    if _cupy_array(like):
        return sys.modules["cupy"].empty(shape, element)
    if _jax_on_gpu(like):
        jax = sys.modules["jax"]
        return jax.numpy.empty(shape, element, device=like.device).block_until_ready()
    return np.empty(shape, element)


def cast(array: Any, dtype: str) -> Any:
    """The array's values in another dtype."""
    if _torch_tensor(array):
        return array.to(getattr(sys.modules["torch"], dtype))
    return array.astype(np.dtype(dtype))


@functools.cache
def _no_gradient() -> Any:
    """torch's function for a call whose backward raises."""

    class NoGradient(sys.modules["torch"].autograd.Function):
        @staticmethod
        def forward(ctx: Any, name: str, call: Callable[..., Any], *arrays: Any) -> Any:
            ctx.name = name
            return call(*(array.detach() for array in arrays))

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise UnsupportedError(f"{ctx.name}: has no gradient")

    return NoGradient


def without_gradient(name: str, call: Callable[..., Any], *arrays: Any) -> Any:
    """call(*arrays). Results of torch tensors that ask for a gradient ask for one, too, and refuse
    it in words, where they would otherwise be constants to a backward pass."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.is_grad_enabled() and any(
        _torch_tensor(array) and array.requires_grad for array in arrays
    ):
        return _no_gradient().apply(name, call, *arrays)
    return call(*arrays)


def cuda_stream(array: Any) -> tuple[int, int] | None:
    """A CUDA array's device and its framework's current cudaStream_t there; None for others.

    0 is CUDA's legacy default stream, which also serves JAX: its own is not to be had, see
    `settle`.
    """
    if _torch_tensor(array):
        if not array.is_cuda:
            return None
        index = array.device.index
        return index, sys.modules["torch"]._C._cuda_getCurrentRawStream(index)
    if _cupy_array(array):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(array.device.id):
            return array.device.id, cupy.cuda.get_current_stream().ptr
    return (array.device.local_hardware_id, 0) if _jax_on_gpu(array) else None


def settle(*arrays: Any) -> None:
    """Before a call: JAX's queued work on its arrays is done. Other frameworks share a stream."""
    if "jax" in sys.modules:
        for array in arrays:
            if array is not None and _jax_on_gpu(array):
                array.block_until_ready()


def finish(array: Any) -> None:
    """After a call: it is done before JAX, which does not know of it, uses its results."""
    if "jax" in sys.modules and _jax_on_gpu(array):
        stream_for(array).synchronize()


def place(array: Any) -> tuple[Any, Any, bool]:
    """Where a single op on an array runs, and whether the array is f16.

    A Stream of the CPU and None, or on a GPU the framework's current cudaStream_t and a function
    that gives so many bytes there.
    """
    if _torch_tensor(array):
        torch = sys.modules["torch"]
        half = array.dtype is torch.float16
        if not array.is_cuda:
            return _cpu_stream(), None, half
        native = torch._C._cuda_getCurrentRawStream(array.get_device())
        return native, lambda size: array.new_empty((size,), dtype=torch.uint8), half
    half = array.dtype == np.float16
    current = cuda_stream(array)
    if current is None:
        return _cpu_stream(), None, half
    return current[1], lambda size: empty(array, (size,), "uint8"), half


def _cpu_stream() -> Stream:
    return _streams.get(_CPU) or stream_for(None)


def stream_for(array: Any, ranks: Communicator | None = None) -> Stream:
    """The stream that work on an array runs on.

    Of a CUDA array its framework's current stream, held once for each. Of the CPU one with a thread
    for each of the process's cores; of a rank of several one of its own, with its share of them:
    ranks that are threads would otherwise wait for each other's calls to end.
    """
    device, native = _CPU
    current = None if array is None else cuda_stream(array)
    if ranks is not None and current is None:
        stream = _rank_streams.get(ranks)
        if stream is None:
            stream = Stream(max(1, len(os.sched_getaffinity(0)) // ranks.ranks))
            stream = _rank_streams.setdefault(ranks, stream)
        return stream
    if current is not None:
        device = f"cuda:{current[0]}"
        # A framework's default stream is CUDA's legacy one, 0 to it. Here 0 asks for a stream of
        # its own, and 1 is CUDA's other name for the legacy one (cudaStreamLegacy).
        native = current[1] or 1
    key = (device, native)
    stream = _streams.get(key)
    if stream is None:
        with _lock:
            stream = _streams.get(key)
            if stream is None:
                if device == "cpu":
                    stream = Stream(len(os.sched_getaffinity(0)))
                else:
                    stream = Stream(device=device, native=native)
                _streams[key] = stream
    return stream


def _forget_streams() -> None:
    # A forked child has none of its parent's threads: both start anew.
    _streams.clear()
    _rank_streams.clear()


os.register_at_fork(before=_forget_streams)
# torch keeps its operators, and with them this module, to the very end.
atexit.register(_forget_streams)
