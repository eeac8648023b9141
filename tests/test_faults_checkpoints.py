"""Faults that users of other libraries have reported of checkpoints.

As `test_faults.py`: every test is named after a kind of fault and cites a public report of it; its
docstring is the arithmetic of the right value.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_lm.lm.checkpoints import Checkpoints


def test_orbax_types(tmp_path: Path) -> None:
  """An Adam state stays one, {0: ..., 1: ...} keeps its numbers, 16777217 = 2^24 + 1 stays exact.

  A float32 target turns it into 16777216 and is refused; a typed key draws the same numbers. A read
  without a target gives lists, text keys and untyped words. google/orbax#2540, google/orbax#2561.
  """
  params = {"layers": {0: jnp.ones((2, 3)), 1: jnp.zeros(3, jnp.bfloat16)}}
  optimiser = optax.adam(1e-3)
  state = (params, optimiser.init(params), jnp.int32(16777217), jax.random.key(7), None)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, state)
    target = jax.eval_shape(lambda: state)
    _, got, _ = checkpoints.restore(target)
    with pytest.raises(ValueError, match=r"\[2\]: saved int32\[\], wanted float32\[\]"):
      checkpoints.restore((*state[:2], jnp.float32(0), *state[3:]), cast=True)
  assert jax.tree.structure(got) == jax.tree.structure(state)
  assert isinstance(got[1][0], optax.ScaleByAdamState)
  assert [int(x) for x in (got[2], got[1][0].count)] == [16777217, 0]
  assert (got[2].dtype, got[0]["layers"][1].dtype) == (jnp.int32, jnp.bfloat16)
  np.testing.assert_array_equal(jax.random.bits(got[3], (4,)), jax.random.bits(state[3], (4,)))
  optimiser.update(params, got[1], got[0])  # a list of dicts has no `mu`
