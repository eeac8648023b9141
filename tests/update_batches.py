"""A small policy with a critic, and ragged batches for its updates."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import lm

CONFIG = lm.PolicyConfig(
  vocab_size=8,
  hidden_size=8,
  intermediate_size=8,
  num_layers=1,
  num_heads=2,
  num_kv_heads=2,
  head_dim=4,
  max_length=16,
  qkv_bias=True,
)
WITH_VALUES = dataclasses.replace(CONFIG, scalar_head=True)
WIDTH, TIME = 3, 5
# A full row, single tokens, empty rows. In four parts (rows k, k + 4) the last has no token at all.
LENGTHS = (5, 1, 3, 0, 2, 5, 1, 0)

# Compiling is nearly all of the time here.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@cache
def network(config: lm.PolicyConfig = CONFIG, seed: int = 0) -> tuple[lm.Model, Any]:
  """A model with parameters large enough for its distributions to be far from uniform."""
  model, abstract = lm.abstract_params(config)
  rng = np.random.default_rng(seed)
  return model, jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0.3, 0.5, x.shape).astype(x.dtype)), abstract
  )


def ragged(seed: int = 0, lengths: Any = LENGTHS, garbage: float = np.nan) -> lm.Batch:
  """A batch with every field, and garbage wherever nothing may be read.

  The log-probs are of no policy: not far from those of `network`, on either side.
  """
  rng = np.random.default_rng(seed)
  rows = len(lengths)
  mask = np.arange(TIME) < np.asarray(lengths)[:, None]
  prompt_mask = np.arange(WIDTH) >= rng.integers(0, WIDTH, rows)[:, None]

  def numbers(center: float, spread: float) -> jax.Array:
    drawn = rng.normal(center, spread, mask.shape)
    return jnp.asarray(np.where(mask, drawn, garbage), jnp.float32)

  weights = np.where(mask, rng.uniform(0.5, 1.5, mask.shape), 0) / max(mask.sum(), 1)
  return lm.Batch(
    prompts=jnp.asarray(np.where(prompt_mask, rng.integers(0, 8, prompt_mask.shape), -9)),
    prompt_mask=jnp.asarray(prompt_mask),
    tokens=jnp.asarray(np.where(mask, rng.integers(0, 8, mask.shape), -100)),
    mask=jnp.asarray(mask),
    advantages=numbers(0.0, 1.0),
    loss_weights=jnp.asarray(weights, jnp.float32),
    old_logprobs=numbers(-2.0, 0.3),
    sampler_logprobs=numbers(-2.0, 0.3),
    ref_logprobs=numbers(-2.0, 0.3),
    importance_weights=numbers(1.0, 0.1),
    old_values=numbers(0.0, 0.5),
    returns=numbers(0.5, 0.5),
  )


def near_policy(batch: lm.Batch, model: Any, params: Any, spread: float = 0.2) -> lm.Batch:
  """The batch with old log-probs of the policy, moved by less than a clip or by more."""
  rows = (batch.prompts, batch.prompt_mask, batch.tokens, batch.mask)
  logprobs = jit(partial(lm.response_logprobs, model))(params, *rows)
  noise = np.random.default_rng(1).normal(0.0, spread, logprobs.shape)
  return batch._replace(old_logprobs=logprobs + jnp.asarray(noise, jnp.float32))


def assert_trees_close(got: Any, want: Any, rtol: float, atol: float = 0.0) -> None:
  """Normwise, leaf by leaf: max |a - b| <= rtol max |b| + atol."""
  paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(want))
  others = jax.tree.leaves(got)
  assert len(others) == len(leaves)
  for path, a, b in zip(paths, others, leaves):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    bound = rtol * np.abs(b[np.isfinite(b)]).max(initial=0) + atol
    np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))


def assert_same_bits(got: Any, want: Any) -> None:
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
