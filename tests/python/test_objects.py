"""Models, caches, pages, and arrays from elsewhere than NumPy."""

import copy
import ctypes
import os
import pickle

import numpy as np
import pytest

import mla


def test_models(tmp_path):
    assert "deepseek-v3.2" in mla.preset_names()
    for name in mla.preset_names():
        mla.preset(name).validate()
    model = mla.preset("deepseek-v3")
    assert (model.hidden, model.heads, model.latent, model.rope) == (7168, 128, 512, 64)
    assert model.query_key == 192 and model.entry == 576 and model.indexer is None
    assert model.rotary.yarn and model.rotary.factor == 40
    assert 192**-0.5 < model.softmax_scale < 2 * 192**-0.5
    assert mla.preset("deepseek-v3.2").indexer.topk == 2048
    other = mla.ModelConfig(model)
    other.heads = 16
    assert model.heads == 128 and "heads=16" in repr(other)
    other.rope = 63
    with pytest.raises(mla.ShapeError, match="rope.*63"):
        other.validate()
    with pytest.raises(mla.InputError, match="unknown model 'deepseek'"):
        mla.preset("deepseek")
    with pytest.raises(mla.CheckpointError, match="nowhere.json"):
        mla.read_config(tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(mla.CheckpointError, match="config.json"):
        mla.read_config(tmp_path / "config.json")
    with pytest.raises(mla.CheckpointError, match="^here"):
        mla.parse_config("[]", "here")
    with pytest.raises(mla.Error):
        mla.Checkpoint(tmp_path)


def test_paths(tmp_path):
    class Like:
        def __fspath__(self):
            return str(file)

    file = tmp_path / "h\u00f6he.json"
    file.write_text('{"model_type": "deepseek_v3"}')
    for path in (file, str(file), os.fsencode(file), Like()):
        assert mla.read_config(path).hidden == 7168
    for bad in (None, 3, "a\0b", b"a\0b", object()):
        for call in (mla.read_config, mla.Checkpoint):
            with pytest.raises(TypeError, match=r"incompatible.*arguments[^$]*str \| os.PathLike"):
                call(bad)


def test_configs_of_families():
    unknown = '{"model_type": "deepseek_v3", "attention_twist": 3}'
    with pytest.raises(mla.UnsupportedError, match="attention_twist is 3"):
        mla.parse_config(unknown)
    assert mla.parse_config(unknown, allow_unknown=True).hidden == 7168
    longcat = mla.parse_config('{"model_type": "longcat_flash", "num_layers": 2}')
    assert longcat.layers == 4 and longcat.attentions_per_layer == 2 and longcat.query_scale == 2
    assert longcat.attention_name(3) == "layers.1.self_attn.1." and longcat.model_layer(3) == 1
    with pytest.raises(mla.InputError, match="attention is 4"):
        longcat.attention_name(4)
    kimi = mla.parse_config('{"model_type": "kimi_linear", "num_hidden_layers": 9}')
    assert kimi.layers == 2 and kimi.model_layers == [4, 8] and not kimi.rotary.rotate
    mistral = mla.parse_config('{"model_type": "mistral4"}')
    assert mistral.query_growth(8191) == 1 and mistral.query_growth(8192) > 1.06
    rotary = mla.preset("minicpm3").rotary
    assert rotary.scaling == "longrope" and not rotary.yarn and len(rotary.long_factors) == 16
    with pytest.raises(mla.InputError, match="unknown rope scaling 'ntk'"):
        rotary.scaling = "ntk"
    yarn = '{"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 4, "mscale": 2}}'
    assert "magnitude" in mla.parse_config(yarn).notes[0]


def fields(config):
    """A config's fields that can be written, other configs within as theirs."""
    found = {}
    for name, member in vars(type(config)).items():
        if isinstance(member, property) and member.fset:
            value = getattr(config, name)
            found[name] = fields(value) if type(value).__module__ == "mla._mla" else value
    return found


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))]
)
def test_configs_are_copied_whole(again):
    """Every field, at other than its default."""

    def changed(config):
        for name, value in fields(config).items():
            if isinstance(value, bool):
                setattr(config, name, not value)
            elif isinstance(value, (int, float)):
                setattr(config, name, type(value)(value + 3))
            elif name == "scaling":
                config.scaling = "longrope"
            elif isinstance(value, str):
                setattr(config, name, value + "3")
            elif isinstance(value, list):
                setattr(config, name, [*value, "3" if name == "notes" else 3])
        return config

    model = changed(mla.preset("deepseek-v3.2"))
    model.rotary, model.indexer = changed(model.rotary), changed(model.indexer)
    assert fields(model)["indexer"]["topk"] == 2051 and len(fields(model)) >= 12
    for config in (model, model.rotary, model.indexer):
        other = again(config)
        assert other is not config and type(other) is type(config)
        assert fields(other) == fields(config)
    other = again(model)
    other.heads = 1
    assert model.heads == 131
    model.indexer = None
    assert again(model).indexer is None


def test_inverse_frequencies():
    model = mla.preset("deepseek-v2-lite")
    rotary = model.rotary
    rotary.yarn = False
    model.rotary = rotary
    np.testing.assert_allclose(
        model.inverse_frequencies(), rotary.theta ** -(np.arange(0, 64, 2) / 64), rtol=1e-12
    )
    assert model.rotary_magnitude == 1


def test_weights_are_copied_and_not_pickled(small_model):
    weights = mla.prepare(small_model, mla.random_layer(small_model))
    assert copy.copy(weights) is weights and copy.deepcopy(weights) is weights  # never changed
    with pytest.raises(mla.UnsupportedError, match="LayerWeights: not to be pickled"):
        pickle.dumps(weights)


def test_objects_say_what_they_are(small_model, stream):
    spec = mla.cache_spec(small_model, "fp8_ds_mla")
    cache = mla.Cache(spec, 3)
    batch = mla.Batch([0, 1, 41], [100, 40], [[0, 1], [2]], [99, *range(128, 168)])
    sparse = mla.preset("deepseek-v3.2")
    options = mla.PlanOptions(path="by_length", compute="bf16")
    for found, wanted in (
        (spec, "mla.CacheSpec('fp8_ds_mla', latent=512, rope=64, page_size=64)"),
        (cache, "mla.Cache('fp8_ds_mla', pages=3, page_size=64, device='cpu')"),
        (mla.IndexCache(sparse, mla.Cache(mla.cache_spec(sparse), 2)),
         "mla.IndexCache('fp8', pages=2, page_size=64, device='cpu')"),
        (batch, "mla.Batch(requests=2, tokens=41)"),
        (mla.plan(small_model, cache, batch, stream=stream, options=options),
         "mla.Plan('deepseek-v2-lite', tokens=41, latent=1, expanded=1, device='cpu')"),
        (options,
         "mla.PlanOptions(path='by_length', split='fast', compute='bf16', sparse='automatic')"),
        (mla.prepare(small_model, mla.random_layer(small_model)),
         "mla.LayerWeights('deepseek-v2-lite', dtype='bf16', absorption='runtime', device='cpu')"),
        (mla.RotaryTable(small_model, 100),
         "mla.RotaryTable(positions=100, pairs=32, device='cpu')"),
    ):
        assert repr(found) == wanted


def test_prompts_take_a_path_of_their_own(small_model, stream):
    cache = mla.Cache(mla.cache_spec(small_model, "bf16"), 3)
    options = mla.PlanOptions(path="by_prompt", split="batch_invariant")

    def plan(prompt_lens):
        batch = mla.Batch([0, 1, 41], [100, 40], [[0, 1], [2]], [99, *range(128, 168)], prompt_lens)
        return repr(mla.plan(small_model, cache, batch, stream=stream, options=options))

    assert "latent=1, expanded=1" in plan([60, 64])
    assert "tokens=41, expanded=2" in plan(np.array([100, 40]))
    with pytest.raises(mla.BatchError, match="request 1: brings tokens 0 to 39 of a prompt of 30"):
        plan([60, 30])
    with pytest.raises(mla.BatchError, match="needs prompt_lens"):
        plan(None)
    with pytest.raises(mla.ShapeError, match="prompt_lens length is 1"):
        plan([60])


def test_weights_are_a_function_of_their_seed(small_model):
    a, b, c = (mla.random_layer(small_model, 0, seed).arrays() for seed in (1, 1, 2))
    assert set(a) == {"query", "kv_down", "kv_norm", "kv_up", "output"}
    assert a["kv_down"].shape == (576, 256) and a["kv_down"].dtype == np.float32
    np.testing.assert_array_equal(a["query"], b["query"])
    assert np.any(a["query"] != c["query"])
    weights = mla.prepare(small_model, mla.random_layer(small_model), absorption="full_fp8")
    assert (weights.absorption, weights.dtype, weights.device) == ("full_fp8", "bf16", "cpu")
    assert weights.nbytes > 0 and weights.model.heads == 4
    fp8 = mla.prepare(small_model, mla.random_layer(small_model), products="fp8")
    assert fp8.nbytes < 0.7 * mla.prepare(small_model, mla.random_layer(small_model)).nbytes
    mla.PlanOptions(activations="fp8_128")
    with pytest.raises(mla.InputError, match="fp8.*fp8_128"):
        mla.PlanOptions(activations="fp8")
    with pytest.raises(mla.InputError, match="half.*runtime"):
        mla.prepare(small_model, mla.random_layer(small_model), absorption="half")
    with pytest.raises(mla.DeviceError if mla.gpu_count() else mla.Error):
        mla.prepare(small_model, mla.random_layer(small_model), device="cuda:99")


def test_cache_memory_is_shared():
    spec = mla.CacheSpec("fp8_ds_mla", page_size=3)
    assert spec.page_bytes == 3 * 656 and spec.value_width == 512
    cache = mla.Cache(spec, 4)
    memory = cache.memory
    assert memory.shape == (4, 3 * 656) and memory.dtype == np.uint8 and not memory.any()
    memory[2] = 9
    assert np.all(cache.memory[2] == 9) and not cache.memory[3].any()
    del cache
    assert np.all(memory[2] == 9)

    own = np.zeros((4, 2, 3 * 656), np.uint8)
    cache = mla.Cache(spec, memory=own[:, 0])
    cache.memory[3, 5] = 1
    assert own[3, 0, 5] == 1 and cache.pages == 4 and not own[:, 1].any()


@pytest.mark.parametrize(
    "error,make",
    [
        (mla.InputError, lambda: mla.CacheSpec("fp9")),
        (mla.UnsupportedError, lambda: mla.CacheSpec("fp8_ds_mla", latent=256)),
        (mla.ShapeError, lambda: mla.CacheSpec(page_size=0)),
        (mla.ShapeError, lambda: mla.Cache(mla.CacheSpec(), -1)),
        (mla.ShapeError, lambda: mla.Cache(mla.CacheSpec(), 2**40)),
        (mla.InputError, lambda: mla.Cache(mla.CacheSpec())),
        (mla.InputError, lambda: mla.Cache(mla.CacheSpec(), 1, memory=np.zeros((1, 2), np.uint8))),
        (mla.InputError, lambda: mla.Cache(mla.CacheSpec(), 1, device="gpu")),
        (mla.ShapeError, lambda: mla.Cache(mla.CacheSpec(), memory=np.zeros((1, 7), np.uint8))),
        (mla.ShapeError, lambda: mla.Cache(mla.CacheSpec(), memory=np.zeros(7, np.uint8))),
        (mla.ShapeError, lambda: mla.Cache(mla.CacheSpec(), memory=np.zeros((1, 73728), "f4"))),
        (
            mla.ShapeError,
            lambda: mla.Cache(
                mla.CacheSpec(), memory=np.broadcast_to(np.zeros(73728, np.uint8), (9, 73728))
            ),
        ),
        (mla.InputError, lambda: mla.Stream(0)),
        (mla.InputError, lambda: mla.Stream(device="cuda:x")),
        (mla.Error, lambda: mla.Stream(device="cuda:99")),
        (mla.InputError, lambda: mla.PageAllocator(2).release(7)),
        (
            mla.UnsupportedError,
            lambda: mla.IndexCache(
                mla.preset("deepseek-v3"), mla.Cache(mla.cache_spec(mla.preset("deepseek-v3")), 1)
            ),
        ),
    ],
)
def test_bad_objects(error, make):
    with pytest.raises(error) as raised:
        make()
    assert str(raised.value) and "\n" not in str(raised.value)


def test_errors_form_a_tree():
    for name in (
        "ShapeError", "UnsupportedError", "BatchError", "CheckpointError", "InputError",
        "OutOfPages", "DeviceError",
    ):
        assert issubclass(getattr(mla, name), mla.Error)
    assert issubclass(mla.Error, RuntimeError)


def test_pages():
    pages = mla.PageAllocator(4, reserve_null_page=True)
    assert pages.available == 3
    first = pages.allocate(2)
    assert 0 not in first and pages.available == 1
    with pytest.raises(mla.OutOfPages, match="2 wanted, 1 of 3"):
        pages.allocate(2)
    hashes = [mla.chain_hash(0, 5)]
    hashes.append(mla.chain_hash(hashes[0], 6))
    for page, h in zip(first, hashes, strict=True):
        pages.publish(page, h)
    assert pages.match_prefix(hashes) == 2 and pages.match_prefix(hashes[1:] + [1]) == 1
    assert pages.acquire_prefix(hashes) == first and pages.references(first[0]) == 2
    page, copy = pages.make_writable(first[1])
    assert copy and page not in first
    pages.release_all([first[0], page])
    pages.release_all(first[:1])
    assert pages.references(first[0]) == 0
    counts = pages.counts
    assert counts["total"] == 3 and counts["copies"] == 1 and counts["hits"] == 2


def test_sharding():
    sharding = mla.CacheSharding(3, interleave=2)
    assert repr(sharding) == "mla.CacheSharding(ranks=3, interleave=2)"
    assert (sharding.ranks, sharding.interleave) == (3, 2) and mla.CacheSharding(4).interleave == 1
    table, held = np.array([9, 4, 6], np.int32), [0, 0, 0]
    for p in range(17):
        rank, index = sharding.owner(p), sharding.index(p)
        assert (rank, index) == (p // 2 % 3, held[rank])
        assert sharding.position(rank, index) == p
        held[rank] += 1
        assert [sharding.length(r, p + 1) for r in range(3)] == held
        assert [sharding.pages(r, p + 1, 4) for r in range(3)] == [-(-n // 4) for n in held]
        slots = [sharding.slot(r, p, table.tolist(), 4) for r in range(3)]
        assert slots[rank] == table[index // 4] * 4 + index % 4 and slots.count(-1) == 2
        assert sharding.slot_position(rank, slots[rank], table.tolist(), 4) == p
    with pytest.raises(mla.InputError, match="interleave is 0, allowed 1 to 2147483647"):
        mla.CacheSharding(2, 0)
    with pytest.raises(mla.InputError, match="rank is 3, allowed 0 to 2"):
        sharding.length(3, 1)


class Dlpack:
    """Memory of a NumPy array given by DLPack alone, as bf16 where it holds uint16."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        if self.array.dtype == np.uint16:
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            # data, device, ndim, then the element's type code: 4 is kDLBfloat
            ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = 4
        return capsule


def test_dlpack(small_model, stream):
    weights = mla.prepare(small_model, mla.random_layer(small_model))
    rotary = mla.RotaryTable(small_model, 16)
    cache = mla.Cache(mla.cache_spec(small_model), 1)
    batch = mla.Batch([0, 3], [3], np.zeros((1, 1), np.int32), [0, 1, 2])
    step = mla.plan(small_model, cache, batch, stream=stream)
    arguments = (step, weights, rotary, cache)
    hidden = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    import ml_dtypes

    narrow = hidden.astype(ml_dtypes.bfloat16)
    wanted = mla.forward(*arguments, narrow, np.empty((3, 256), np.float32), stream=stream)
    found = np.empty((3, 256), np.float32)
    mla.forward(*arguments, Dlpack(narrow.view(np.uint16)), Dlpack(found), stream=stream)
    np.testing.assert_array_equal(found, wanted)
