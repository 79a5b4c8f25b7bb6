"""What mla.flash_mla must give, in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

F64 = np.float64


def decode_rows(cache: np.ndarray, head_dim: int) -> np.ndarray:
    """A cache [blocks, page, 1, row] as float64 [slots, head_dim]."""
    blocks, page, _, row = cache.shape
    if cache.dtype.itemsize > 1 or row == head_dim:
        return cache.reshape(blocks * page, row).astype(F64)
    raw = np.ascontiguousarray(cache).view(np.uint8).reshape(blocks, page * row)
    if row == 656:
        tokens = raw.reshape(-1, 656)
        codes = tokens[:, :512].copy().view(ml_dtypes.float8_e4m3fn).astype(F64)
        scales = tokens[:, 512:528].copy().view(np.float32).astype(F64)
        rope = tokens[:, 528:].copy().view(ml_dtypes.bfloat16).astype(F64)
        return np.concatenate([codes * scales.repeat(128, axis=1), rope], axis=1)
    rows = raw[:, : page * 576].reshape(-1, 576)
    codes = rows[:, :448].copy().view(ml_dtypes.float8_e4m3fn).astype(F64)
    rope = rows[:, 448:].copy().view(ml_dtypes.bfloat16).astype(F64)
    exponents = raw[:, page * 576 :].reshape(-1, 8)[:, :7].astype(F64) - 127
    return np.concatenate([codes * (2.0**exponents).repeat(64, axis=1), rope], axis=1)


def encode_rows(rows: np.ndarray, page: int, kind: str) -> np.ndarray:
    """[slots, head_dim] as a cache of pages."""
    slots, head_dim = rows.shape
    blocks = slots // page
    if kind in ("float32", "float16", "bfloat16", "float8_e4m3fn"):
        return rows.astype(np.dtype(kind)).reshape(blocks, page, 1, head_dim)
    width, group = (512, 128) if kind == "fp8_ds_mla" else (448, 64)
    parts = rows[:, :width].reshape(slots, -1, group)
    exponents = np.ceil(np.log2(np.maximum(np.abs(parts).max(axis=2) / 448, 1e-4)))
    codes = (parts / 2.0 ** exponents[:, :, None]).astype(ml_dtypes.float8_e4m3fn)
    codes = codes.reshape(slots, width).view(np.uint8)
    rope = rows[:, width:].astype(ml_dtypes.bfloat16).view(np.uint8)
    if kind == "fp8_ds_mla":
        scales = (2.0**exponents).astype(np.float32).view(np.uint8)
        return np.concatenate([codes, scales, rope], axis=1).reshape(blocks, page, 1, 656)
    scales = np.zeros((slots, 8), np.uint8)
    scales[:, :7] = exponents + 127
    body = np.concatenate([codes, rope], axis=1).reshape(blocks, -1)
    return np.concatenate([body, scales.reshape(blocks, -1)], axis=1).reshape(blocks, page, 1, 584)


def attend(
    q: np.ndarray, rows: np.ndarray, value: int, scale: float, sink: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query row [heads, head_dim] over rows [keys, head_dim]: out, max_logits, lse."""
    heads = q.shape[0]
    if len(rows) == 0:
        none = np.full(heads, np.inf)
        return np.zeros((heads, value)), -none, none
    logits = q.astype(F64) @ rows.T * scale
    largest = logits.max(axis=1)
    weights = np.exp(logits - largest[:, None])
    total = weights.sum(axis=1)
    out = weights @ rows[:, :value] / total[:, None]
    lse = largest + np.log(total)
    if sink is not None:
        with np.errstate(over="ignore"):
            out /= (1 + np.exp(sink.astype(F64) - lse))[:, None]
    return out, largest, lse


def chosen(slots: np.ndarray, length: int | None, count: int) -> np.ndarray:
    slots = slots if length is None else slots[:length]
    return slots[(slots >= 0) & (slots < count)]


def assert_near(found: np.ndarray, wanted: np.ndarray, what: str, rounding: float) -> None:
    """Infinities exactly; the rest to a relative and an absolute part of `rounding`."""
    found, wanted = found.astype(F64), np.asarray(wanted)
    assert found.shape == wanted.shape, what
    infinite = np.isinf(wanted)
    np.testing.assert_array_equal(found[infinite], wanted[infinite], err_msg=what)
    np.testing.assert_allclose(
        found[~infinite], wanted[~infinite], rtol=rounding, atol=rounding, err_msg=what
    )
