"""What every test runs under: eight CPU devices, no silent broadcasting, quick compilation.

The settings that JAX reads from the environment are made before it is imported, and so reach the
processes that a test starts. One that is already set stays as it is.
"""

import os
from pathlib import Path

# Compiling dominates the suite, and most of it is LLVM's: at its lowest level a file needs a fifth
# less time. Users run at the highest, and so does .ci/run in its last stage.
_XLA_FLAGS = {
  "--xla_force_host_platform_device_count": "8",
  "--xla_backend_optimization_level": "0",
}
_SET = os.environ.get("XLA_FLAGS", "")
_ADDED = [f"{flag}={value}" for flag, value in _XLA_FLAGS.items() if flag not in _SET]
os.environ["XLA_FLAGS"] = " ".join(filter(None, [_SET, *_ADDED]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Every program is kept, however small or quick to compile.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# The first call of a shape compiles, so time says nothing. The same examples every time: a run
# that fails can be repeated.
hypothesis.settings.register_profile(
  "jaxrl_lm",
  deadline=None,
  derandomize=True,
  database=None,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jaxrl_lm")


SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Marks the tests of slow.txt, beside those that are marked where they stand."""
  listed = {line for line in SLOW.read_text().splitlines() if not line.startswith("#")}
  for item in items:
    if item.nodeid in listed:
      item.add_marker(pytest.mark.slow)


@pytest.fixture
def x64():
  """64-bit numbers for one test."""
  with jax.enable_x64(True):
    yield
