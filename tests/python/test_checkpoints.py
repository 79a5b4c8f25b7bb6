"""Checkpoints in quantised forms, and the scales that come with them."""

import json
import struct

import numpy as np
import pytest

import mla

SIZES = {
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
}
PREFIX = "model.layers.0.self_attn."


def write(folder, quantisation, output, more=()):
    """A checkpoint whose o_proj [16, 32] is made of `output`: part -> (dtype, array)."""
    (folder / "config.json").write_text(json.dumps(SIZES | {"quantization_config": quantisation}))
    plain = {"q_proj": (16, 16), "kv_a_proj_with_mqa": (12, 16), "kv_a_layernorm": (8,), "kv_b_proj": (40, 8)}
    tensors = {f"{name}.weight": ("F32", np.full(shape, 0.5, np.float32)) for name, shape in plain.items()}
    tensors |= {f"o_proj.{part}": tensor for part, tensor in output.items()} | dict(more)
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[PREFIX + name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return mla.Checkpoint(folder)


def pack(codes, order=range(8)):
    """Eight integers of the last axis to a word."""
    words = np.zeros(codes.shape[:-1] + (codes.shape[-1] // 8,), np.uint32)
    for place, which in enumerate(order):
        words |= codes[..., which::8].astype(np.uint32) << np.uint32(4 * place)
    return words


def test_awq(tmp_path):
    random = np.random.default_rng(1)
    codes, zeros = random.integers(0, 16, (32, 16)), random.integers(0, 16, (4, 16))
    scales = random.random((4, 16)).astype(np.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    checkpoint = write(
        tmp_path,
        {"quant_method": "awq", "bits": 4, "group_size": 8},
        {
            "qweight": ("I32", pack(codes, order)),
            "qzeros": ("I32", pack(zeros, order)),
            "scales": ("F16", scales),
        },
    )
    tensors = checkpoint.layer(0)
    expected = ((codes - zeros.repeat(8, 0)) * scales.astype(np.float64).repeat(8, 0)).T
    np.testing.assert_array_equal(tensors.arrays()["output"], expected.astype(np.float32))
    mla.prepare(checkpoint.config, tensors)


def test_a_part_is_read_by_itself(tmp_path):
    codes = np.random.default_rng(2).integers(0, 0x70, (16, 32)).astype(np.uint8)
    scales = np.arange(1, 17, dtype=np.float32).reshape(16, 1) / 3
    checkpoint = write(
        tmp_path,
        {"quant_method": "compressed-tensors"},
        {"weight": ("F8_E4M3", codes), "weight_scale": ("F32", scales)},
    )
    assert checkpoint.bytes_read == 0
    whole = checkpoint.layer(0)
    all_bytes = checkpoint.bytes_read
    part = checkpoint.layer(0, heads=(1, 1))
    read = checkpoint.bytes_read - all_bytes
    # Half of q_proj's and kv_b_proj's f32 and of o_proj's codes.
    assert all_bytes - read == (16 * 16 + 40 * 8) // 2 * 4 + 16 * 32 // 2
    wanted = mla.part_of(checkpoint.config, whole, (1, 1)).arrays()
    found = part.arrays()
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    with pytest.raises(mla.InputError, match="heads 1 and the 2 from there on"):
        checkpoint.layer(0, heads=(1, 2))


def test_fp8_by_rows(tmp_path):
    codes = np.full((16, 32), 0x3C, np.uint8)  # 1.5
    scales = np.arange(1, 17, dtype=np.float32).reshape(16, 1) / 3
    parts = {"weight": ("F8_E4M3", codes), "weight_scale": ("F32", scales)}
    checkpoint = write(tmp_path, {"quant_method": "compressed-tensors"}, parts)
    expected = (1.5 * scales.astype(np.float64)).astype(np.float32).repeat(32, 1)
    np.testing.assert_array_equal(checkpoint.layer(0).arrays()["output"], expected)
    mla.prepare(checkpoint.config, checkpoint.layer(0), products="fp8")
    scales[3] = np.nan
    with pytest.raises(mla.CheckpointError, match="o_proj.weight_scale' is nan at element 3"):
        write(tmp_path, {}, parts).layer(0)
    with pytest.raises(mla.UnsupportedError, match="quant_method is 'hqq'"):
        write(tmp_path, {"quant_method": "hqq"}, parts)


def test_scales(tmp_path):
    weight = {"weight": ("F32", np.ones((16, 32), np.float32))}
    checkpoint = write(tmp_path, {}, weight)
    assert checkpoint.scales(0) == {}
    more = {
        "k_proj.k_scale": ("F32", np.float32(0.25).reshape(())),
        "v_proj.v_scale": ("F32", np.array([1, 2], np.float32)),
    }
    checkpoint = write(tmp_path, {}, weight, more)
    assert checkpoint.scales(0) == {"k": [0.25], "v": [1.0, 2.0]}
    with pytest.raises(mla.InputError, match="layer is 1"):
        checkpoint.scales(1)
    more["k_proj.k_scale"] = ("F32", np.float32(-1).reshape(()))
    with pytest.raises(mla.CheckpointError, match="k_scale' is -1.000000 at element 0"):
        write(tmp_path, {}, weight, more).scales(0)
