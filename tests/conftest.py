"""Settings for all tests: several CPU devices, faults in the plan raise, implicit promotion too."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HCOMPILE_RAISE_FAULTS"] = "1"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import pytest

import hcompile

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def fresh_caches():
    """Each test counts its own traces and compiles."""
    hcompile.clear_caches()
    yield
    hcompile.clear_caches()
