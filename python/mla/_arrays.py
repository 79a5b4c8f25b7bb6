"""New arrays like the caller's, and the stream that serves an array when none is given."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np

from ._mla import Stream

_streams: dict[tuple[str, int], Stream] = {}
_lock = threading.Lock()


def _torch_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _framework(array: Any) -> Any:
    """The module of an array's own functions: torch, cupy or numpy."""
    if _torch_tensor(array):
        return sys.modules["torch"]
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """An array of `like`'s framework and device, of its dtype or of the one named."""
    if _torch_tensor(like):
        if dtype is None:
            return like.new_empty(shape)
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    # ml_dtypes has given its names to NumPy by the time that an array of them exists.
    return _framework(like).empty(shape, np.dtype(dtype) if dtype else like.dtype)


def cast(array: Any, dtype: str) -> Any:
    """The array's values in another dtype."""
    if _torch_tensor(array):
        return array.to(getattr(sys.modules["torch"], dtype))
    return array.astype(np.dtype(dtype))


def is_half(array: Any) -> bool:
    if _torch_tensor(array):
        return bool(array.dtype == sys.modules["torch"].float16)
    return bool(array.dtype == np.float16)


def cuda_stream(array: Any) -> tuple[int, int] | None:
    """A CUDA array's device and its framework's current cudaStream_t there; None for others.

    0 is CUDA's legacy default stream.
    """
    if _torch_tensor(array):
        if not array.is_cuda:
            return None
        index = array.device.index
        return index, sys.modules["torch"]._C._cuda_getCurrentRawStream(index)
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        return None
    index = array.device.id
    with cupy.cuda.Device(index):
        return index, cupy.cuda.get_current_stream().ptr


def stream_for(array: Any) -> Stream:
    """The stream that work on an array runs on.

    Of a CUDA array its framework's current stream, held once for each. Of the CPU one with a thread
    for each of the process's cores.
    """
    device, native = "cpu", 0
    current = None if array is None else cuda_stream(array)
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


os.register_at_fork(before=_forget_streams)
