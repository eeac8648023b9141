"""Compiled programs, kept from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def switch_on() -> Path:
  """Keeps every compiled program in the user's cache folder, unless JAX was told of another one.

  Returns:
    The folder.
  """
  if jax.config.jax_compilation_cache_dir is None:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(home / "jaxrl_lm" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  return Path(jax.config.jax_compilation_cache_dir)
