"""Terms of a divergence: their sums against the reference, one that excludes, and wrong input.

Their derivatives in both arguments are in `test_gradients.py`, sums over logits in
`test_distillation.py`.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference_distillation as truth

INF = math.inf
# The name in the reference, and the constants.
TERMS = {
  rl.reverse_kl_terms: ("exact_kl", {}),
  rl.forward_kl_terms: ("forward_kl", {}),
  rl.skewed_forward_kl_terms: ("skewed_forward_kl", {"skew": 0.1}),
  rl.skewed_reverse_kl_terms: ("skewed_reverse_kl", {"skew": 0.6}),
  rl.jensen_shannon_terms: ("jensen_shannon", {"beta": 0.3}),
}
every_term = pytest.mark.parametrize("terms", TERMS, ids=lambda x: x.__name__)


@every_term
def test_sum_over_the_vocabulary(terms) -> None:
  name, constants = TERMS[terms]
  z, y = np.random.default_rng(1).normal(size=(2, 1, 6))
  (want,), _ = truth.divergence(name, z.tolist(), y.tolist(), 1.0, *constants.values())
  both = (jnp.asarray(x - np.log(np.exp(x).sum()), jnp.float32) for x in (z, y))
  np.testing.assert_allclose(terms(*both, **constants).sum(), want, rtol=1e-5)


@every_term
def test_an_impossible_token_adds_nothing(terms) -> None:
  """Excluded by both: 0 with gradient 0, which `linear_divergence` builds on."""
  none = jnp.full(2, -INF)
  terms = partial(terms, **TERMS[terms][1])
  value, pull = jax.vjp(terms, none, none)
  for x in (value, *pull(jnp.ones(2))):
    np.testing.assert_array_equal(x, [0, 0])


def test_shapes_are_the_same() -> None:
  with pytest.raises(ValueError, match=r"teacher_logprobs is \(1, 3\), logprobs is \(3,\)"):
    rl.forward_kl_terms(jnp.zeros(3), jnp.zeros((1, 3)))
