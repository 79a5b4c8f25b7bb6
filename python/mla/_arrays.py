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


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """An array of `like`'s framework and device, of its dtype or of the one named."""
    if _torch_tensor(like):
        torch = sys.modules["torch"]
        return torch.empty(
            shape, dtype=getattr(torch, dtype) if dtype else like.dtype, device=like.device
        )
    # ml_dtypes has given its names to NumPy by the time that an array of them exists.
    return np.empty(shape, np.dtype(dtype) if dtype else like.dtype)


def stream_for(array: Any) -> Stream:
    """The stream that work on an array runs on.

    Of a CUDA tensor torch's current stream, held once for each. Of the CPU one with a thread for
    each of the process's cores.
    """
    device, native = "cpu", 0
    if array is not None and _torch_tensor(array) and array.is_cuda:
        torch = sys.modules["torch"]
        device = f"cuda:{array.device.index}"
        # torch's default stream is CUDA's legacy one, 0 to torch. Here 0 asks for a stream of its
        # own, and 1 is CUDA's other name for the legacy one (cudaStreamLegacy).
        native = torch.cuda.current_stream(array.device).cuda_stream or 1
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
