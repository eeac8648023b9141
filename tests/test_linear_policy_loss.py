"""Objectives from hidden states: one sweep and two sweeps against logits in memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from experiments import algorithm_table

P, G, T, WIDTH, VOCABULARY = 2, 3, 6, 4, 37
ENTROPY_COEF, KL_COEF = 0.1, 0.05
# A block of logits of 5 tokens, and tiles of 5 tokens and 7 ids.
BLOCK, TILE = 4 * 5 * VOCABULARY, 3 * 4 * 5 * 7
OBJECTIVES = algorithm_table.named_objectives()


@pytest.fixture(scope="module")
def batch():
  rng = np.random.default_rng(0)
  lengths = np.array([[6, 1, 4], [3, 0, 5]])
  mask = np.arange(T) < lengths[..., None]
  hidden = np.where(mask[..., None], rng.normal(size=(P, G, T, WIDTH)), np.inf)
  arrays = {
    "hidden": hidden.astype(np.float32),
    "unembedding": rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
    "tokens": np.where(mask, rng.integers(0, VOCABULARY, mask.shape), -100),
    "mask": mask,
    "noise": rng.normal(scale=0.3, size=mask.shape).astype(np.float32),
    "ref_noise": rng.normal(scale=0.3, size=mask.shape).astype(np.float32),
    "advantages": rng.normal(size=(P, G, 1)).astype(np.float32),
    "importance_weights": rng.uniform(0.5, 1.5, size=mask.shape).astype(np.float32),
    "selected": mask & (rng.random(mask.shape) < 0.3),
  }
  return jax.tree.map(jnp.asarray, arrays)


def logits_of(hidden, unembedding, batch):
  return jnp.where(batch["mask"][..., None], hidden, 0) @ unembedding.T


def terms_of(objective, batch):
  """Every option of `objective_loss` switched on."""
  mask = batch["mask"]
  clean = logits_of(batch["hidden"], batch["unembedding"], batch)
  logprobs = rl.token_logprobs(clean, batch["tokens"], mask=mask)
  takes_selected = objective in (rl.CLIP_COV, rl.KL_COV)
  return logprobs, {
    "loss_weights": objective.loss_weights(mask),
    "importance_weights": batch["importance_weights"],
    "ref_logprobs": logprobs + batch["ref_noise"],
    "kl": rl.kl_k2,
    "kl_coef": KL_COEF,
    "entropy_coef": ENTROPY_COEF,
    **({"selected": batch["selected"]} if takes_selected else {}),
  }


def composed(objective, old, hidden, unembedding, batch, terms):
  logits = logits_of(hidden, unembedding, batch)
  return rl.objective_loss(
    objective,
    rl.token_logprobs(logits, batch["tokens"], mask=batch["mask"]),
    old,
    batch["advantages"],
    batch["mask"],
    entropy=rl.token_entropy(logits, mask=batch["mask"]),
    **terms,
  )[0]


def two_sweeps(objective, old, hidden, unembedding, batch, terms):
  stats = rl.linear_token_stats(
    hidden, unembedding, batch["tokens"], mask=batch["mask"], memory_budget=TILE
  )
  return rl.objective_loss(
    objective,
    stats.logprobs,
    old,
    batch["advantages"],
    batch["mask"],
    entropy=stats.entropy,
    **terms,
  )[0]


def one_sweep(objective, old, hidden, unembedding, batch, terms, logprobs):
  return rl.linear_policy_loss(
    objective,
    hidden,
    unembedding,
    batch["tokens"],
    logprobs,
    old,
    batch["advantages"],
    batch["mask"],
    memory_budget=BLOCK,
    **terms,
  )[0]


def assert_same(got, want, rtol=2e-5):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(jnp.max(jnp.abs(b))))


KEY_CASES = (("GRPO", "on_policy"), ("GSPO", "stale"))
# On-policy the ratio is 1 and objectives differ little: every one of them is compared stale.
CASES = [(name, "stale") for name in OBJECTIVES]
CASES += [(name, "on_policy") for name in ("GRPO", "GSPO", "CISPO", "REINFORCE")]


@pytest.mark.parametrize(
  ("name", "regime"),
  [pytest.param(*case, marks=() if case in KEY_CASES else pytest.mark.slow) for case in CASES],
)
def test_every_objective_with_every_option(name, regime, batch):
  """Value and gradient of the three paths, old log-probs equal to the policy's and moved away."""
  objective = OBJECTIVES[name]

  @jax.jit
  def all_paths(batch):
    logprobs, terms = terms_of(objective, batch)
    old = None if regime == "on_policy" else logprobs + batch["noise"]
    paths = (
      partial(composed, objective, old),
      partial(two_sweeps, objective, old),
      partial(one_sweep, objective, old, logprobs=logprobs),
    )
    clean = jnp.where(batch["mask"][..., None], batch["hidden"], 0)
    return [
      jax.value_and_grad(path, argnums=(0, 1))(hidden, batch["unembedding"], batch, terms)
      for path, hidden in zip(paths, (clean, batch["hidden"], batch["hidden"]), strict=True)
    ]

  want, two, one = all_paths(batch)
  assert np.any(want[1][0])
  assert_same(two, want)
  assert_same(one, want)


def test_on_policy_any_logprobs_do(batch):
  """The ratio is 1 and no KL term asks: the sampler's log-probs give the same coefficients."""
  terms = {"loss_weights": rl.GRPO.loss_weights(batch["mask"]), "entropy_coef": ENTROPY_COEF}
  logprobs, _ = terms_of(rl.GRPO, batch)

  @jax.jit
  def gradient(logprobs):
    path = partial(one_sweep, rl.GRPO, None, logprobs=logprobs)
    return jax.value_and_grad(path, argnums=(0, 1))(
      batch["hidden"], batch["unembedding"], batch, terms
    )

  assert_same(gradient(logprobs + batch["noise"]), gradient(logprobs), rtol=1e-6)


@pytest.mark.slow
def test_parts_of_a_batch_sum_to_the_whole(batch):
  terms = {"loss_weights": rl.DAPO.loss_weights(batch["mask"])}
  logprobs, _ = terms_of(rl.DAPO, batch)

  def of(rows):
    part = {k: x if k == "unembedding" else x[:, rows] for k, x in batch.items()}
    weights = {"loss_weights": terms["loss_weights"][:, rows]}
    path = partial(one_sweep, rl.DAPO, None, logprobs=logprobs[:, rows])
    value, slope = jax.value_and_grad(path, argnums=1)(
      part["hidden"], part["unembedding"], part, weights
    )
    return value, slope

  parts = [of(slice(0, 2)), of(slice(2, 3))]
  assert_same(jax.tree.map(jnp.add, *parts), of(slice(0, 3)))


def test_weighted_logprobs_are_the_cross_entropy(batch):
  """Coefficients -1 / N: the mean cross-entropy, and its gradient times the cotangent."""
  clean = jnp.where(batch["mask"][..., None], batch["hidden"], 0)
  coefficients = jnp.where(batch["mask"], -0.1, jnp.nan)
  loss = lambda h, w: rl.linear_weighted_logprobs(
    h, w, batch["tokens"], coefficients, mask=batch["mask"], memory_budget=BLOCK
  )[0]
  want = lambda h, w: (
    -0.1 * jnp.sum(rl.token_logprobs(h @ w.T, batch["tokens"], mask=batch["mask"]))
  )
  gradient = lambda f: jax.value_and_grad(lambda h, w: 3.0 * f(h, w), argnums=(0, 1))
  assert_same(
    gradient(loss)(batch["hidden"], batch["unembedding"]),
    gradient(want)(clean, batch["unembedding"]),
  )


def test_impossible_tokens_have_no_weight_where_their_coefficient_is_0():
  bias = jnp.array([0.0, -jnp.inf])
  total, stats = rl.linear_weighted_logprobs(
    jnp.ones((2, 1)), jnp.ones((2, 1)), jnp.array([0, 1]), jnp.array([1.0, 0.0]), bias=bias
  )
  assert total == 0
  np.testing.assert_array_equal(stats.logprobs, [0.0, -np.inf])


def test_statistics_are_constants(batch):
  loss = lambda h: jnp.sum(
    rl.linear_weighted_logprobs(
      h, batch["unembedding"], batch["tokens"], batch["noise"], mask=batch["mask"]
    )[1].logprobs
  )
  assert not np.any(jax.grad(loss)(batch["hidden"]))


def test_no_token():
  total, stats = rl.linear_weighted_logprobs(
    jnp.ones((0, 2)), jnp.ones((3, 2)), jnp.zeros(0, int), jnp.zeros(0)
  )
  assert total == 0
  assert stats.logprobs.shape == (0,)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      {"coefficients": jnp.ones(3)},
      r"mask is \(2,\), coefficients is \(3,\)|coefficients is \(3,\)",
    ),
    ({"entropy_coefficients": jnp.ones((2, 1))}, "entropy_coefficients"),
    ({"memory_budget": 0}, "memory_budget must lie in"),
  ],
)
def test_errors_name_the_argument(change, message):
  arguments = {
    "hidden": jnp.ones((2, 3)),
    "unembedding": jnp.ones((5, 3)),
    "tokens": jnp.zeros(2, int),
    "coefficients": jnp.ones(2),
  }
  with pytest.raises(ValueError, match=message):
    rl.linear_weighted_logprobs(**arguments | change)


def test_memory_is_a_block_of_logits():
  """N' V logits and the tiles, whatever N: the budget."""
  shapes = lambda n: (
    jax.ShapeDtypeStruct((n, 32), jnp.float32),
    jax.ShapeDtypeStruct((8192, 32), jnp.float32),
    jax.ShapeDtypeStruct((n,), jnp.int32),
    jax.ShapeDtypeStruct((n,), jnp.float32),
  )
  budget = 128 * 8192 * 4
  loss = lambda h, w, y, c: rl.linear_weighted_logprobs(h, w, y, c, memory_budget=budget)[0]
  gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  taken = [
    gradient.lower(*shapes(n)).compile().memory_analysis().temp_size_in_bytes for n in (2048, 4096)
  ]
  tile = 3 * 128 * 8192 * 4
  assert taken[0] < budget + tile
  assert taken[1] - taken[0] < 2048 * 32 * 4
