import numpy as np
import pytest

import mla


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def stream() -> mla.Stream:
    return mla.Stream(threads=2)


@pytest.fixture(scope="session")
def small_model() -> mla.ModelConfig:
    """A model of deepseek-v2-lite's form, small enough for a float64 layer in NumPy."""
    model = mla.preset("deepseek-v2-lite")
    model.hidden, model.heads = 256, 4
    return model
