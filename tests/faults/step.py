"""The step of step.c in Python, with flash_mla's calls: the first may fail, with an exception that this prints.

The others must not, with the same numbers, and hold nothing that was not held before. On a GPU (step.py CHECKPOINT cuda)
the arrays are PyTorch's, and what the driver holds is its own.
"""

import ctypes
import gc
import hashlib
import os
import sys

import numpy as np

import mla
from mla import flash_mla

program = ctypes.CDLL(None)
window = getattr(program, "fault_window", lambda on: None)
live = getattr(program, "fault_live", lambda: 0)
CONFIG = (
    '{"model_type":"deepseek_v3","hidden_size":64,"num_hidden_layers":1,"num_attention_heads":2,'
    '"kv_lora_rank":32,"qk_nope_head_dim":16,"qk_rope_head_dim":16,"v_head_dim":16,'
    '"rope_scaling":{"type":"yarn","factor":4,"original_max_position_embeddings":64}}'
)
PAGE = 16
HIDDEN = (np.arange(5 * 64, dtype=np.float32) % 13 * 0.125 - 0.5).reshape(5, 64)
STARTS, LENGTHS, TABLE, SLOTS = (
    np.array(x, np.int32) for x in ([0, 4, 5], [4, 1], [[0], [1]], [0, 1, 2, 3, PAGE])
)
Q = np.sin(np.arange(2 * 1 * 3 * 576, dtype=np.float32)).reshape(2, 1, 3, 576)
KEYS = np.cos(np.arange(2 * PAGE * 576, dtype=np.float32)).reshape(2, PAGE, 1, 576)
CROWD = 32  # with 0 an allocation of nanobind's tables fails, too: see main
CHOICE = np.array([[[0, 7, -1, 3]], [[16, 2, 2, 30]]], np.int32)


GPU = len(sys.argv) > 2 and sys.argv[2] == "cuda"
if GPU:
    import torch


def step_on_gpu(folder: str) -> list[np.ndarray]:
    checkpoint = mla.Checkpoint(folder)
    model = checkpoint.config
    device = "cuda:0"
    weights = mla.prepare(model, checkpoint.layer(0), dtype="bf16", device=device)
    rotary = mla.RotaryTable(model, 64, device=device)
    cache = mla.Cache(mla.cache_spec(model, "bf16", PAGE), 2, device=device)
    hidden, q = (torch.from_numpy(x).to(device, torch.bfloat16) for x in (HIDDEN, Q))
    keys = torch.from_numpy(KEYS).to(device, torch.bfloat16)
    table, lengths, choice = (torch.from_numpy(x).to(device) for x in (TABLE, LENGTHS, CHOICE))
    options = mla.PlanOptions(compute="bf16")
    batch = mla.Batch(STARTS, LENGTHS, TABLE, SLOTS)
    plan = mla.plan(model, cache, batch, stream=mla.stream_for(hidden), options=options)
    outs = [mla.forward(plan, weights, rotary, cache, hidden)]
    outs += flash_mla.flash_mla_with_kvcache(q, keys, table, lengths)
    outs += flash_mla.flash_mla_with_kvcache(q, keys, None, None, indices=choice)
    torch.cuda.synchronize()
    return [out.float().cpu().numpy() for out in outs]


def step(folder: str) -> list[np.ndarray]:
    if GPU:
        return step_on_gpu(folder)
    stream = mla.Stream(threads=3)
    checkpoint = mla.Checkpoint(folder)
    model = checkpoint.config
    weights = mla.prepare(model, checkpoint.layer(0))
    drawn = mla.parse_config(CONFIG)
    mla.prepare(drawn, mla.random_layer(drawn, 0, 1), dtype="bf16")
    rotary = mla.RotaryTable(model, 64)
    cache = mla.Cache(mla.cache_spec(model, "bf16", PAGE), 2)
    plan = mla.plan(model, cache, mla.Batch(STARTS, LENGTHS, TABLE, SLOTS), stream=stream)
    outs = [np.empty_like(HIDDEN)]
    mla.forward(plan, weights, rotary, cache, HIDDEN, outs[0], stream=stream)
    outs += flash_mla.flash_mla_with_kvcache(Q, KEYS, TABLE, LENGTHS)
    outs += flash_mla.flash_mla_with_kvcache(Q, KEYS, None, None, indices=CHOICE)
    return outs


def attempt(folder: str, window=lambda on: None) -> list[np.ndarray] | Exception:
    window(1)
    try:
        found = step(folder)
    except (mla.Error, MemoryError) as error:
        found = error.with_traceback(None)
    finally:
        window(0)
    return found


def digest(outs: list[np.ndarray]) -> bytes:
    return hashlib.sha256(b"".join(out.tobytes() for out in outs)).digest()


def held() -> tuple[int, int]:
    gc.collect()
    if GPU:
        return 0, len(os.listdir("/proc/self/fd"))
    return live(), len(os.listdir("/proc/self/fd"))


def broken(what: str) -> int:
    print(f"step: {what}", file=sys.stderr)
    return 3


def main(folder: str) -> int:
    # nanobind's tables of types, of instances and of what these keep alive grow as they are used and shrink once most of it
    # is gone, and end the process where they cannot. They keep their size while these objects live.
    crowd = [mla.ModelConfig().rotary for _ in range(CROWD)]
    first = attempt(folder)
    if isinstance(first, Exception):
        return broken(f"fails without a fault: {first}")
    first = attempt(folder, window)
    numbers, holds = [], []
    for _ in range(4):
        found = attempt(folder)
        if isinstance(found, Exception):
            return broken(f"a later call fails: {found}")
        numbers.append(digest(found))
        del found
        holds.append(held())
    if len(set(numbers)) > 1:
        return broken("numbers differ after a failure")
    # Python's own first uses are over by then.
    if holds[2] != holds[3]:
        return broken(f"stays held: {holds} blocks and files")
    if isinstance(first, Exception):
        text = str(first)
        print(f"step: {text} ({type(first).__name__})", file=sys.stderr)
        return 2 if text else broken("an exception without a text")
    if digest(first) != numbers[0]:
        return broken("numbers differ under a failure")
    return 0


sys.exit(main(sys.argv[1]))
