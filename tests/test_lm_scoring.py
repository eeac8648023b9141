"""Scorers agree with each other and with the full forward pass, token by token."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from jaxrl_lm import lm
from tests import update_batches
from tests.update_batches import assert_trees_close, jit

BATCH = update_batches.ragged()
ROWS = (BATCH.prompts, BATCH.prompt_mask, BATCH.tokens, BATCH.mask)


def unpadded() -> Any:
  """Prompt and response of every row that has both, without padding."""
  for i in np.flatnonzero(np.asarray(BATCH.mask).any(axis=1)):
    prompt, response = (
      np.asarray(ids)[i][np.asarray(mask)[i]] for ids, mask in (ROWS[:2], ROWS[2:])
    )
    yield int(i), prompt, response


def sums(score: Any, model: Any) -> Any:
  """Scores, and the gradient of a weighted sum of both parts."""
  weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, *BATCH.mask.shape)), jnp.float32)

  def total(params: Any) -> tuple[jax.Array, Any]:
    scores = score(model, params, *ROWS, temperature=0.7)
    return jnp.sum(weights[0] * scores.logprobs + weights[1] * scores.entropy), scores

  return jit(jax.grad(total, has_aux=True))


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_or_tiles_give_the_same_scores_and_gradients(tied: bool) -> None:
  model, params = update_batches.network(dataclasses.replace(update_batches.CONFIG, tied=tied))
  plain, tiles = (
    sums(score, model)(params) for score in (lm.response_scores, lm.linear_response_scores)
  )
  # The logits of a tile and of the whole matrix differ by their order of summation.
  assert_trees_close(tiles, plain, rtol=2e-6, atol=1e-6)
  logprobs = jit(partial(lm.response_logprobs, model, temperature=0.7))(params, *ROWS)
  np.testing.assert_allclose(plain[1].logprobs, logprobs, rtol=1e-6)
  assert not np.asarray(plain[1].logprobs)[~np.asarray(BATCH.mask)].any()
  assert not np.asarray(tiles[1].entropy)[~np.asarray(BATCH.mask)].any()


@pytest.mark.slow
def test_entropy_is_of_the_distribution_that_the_token_was_drawn_from() -> None:
  model, params = update_batches.network()
  entropy = jit(partial(lm.response_scores, model, temperature=0.7))(params, *ROWS).entropy
  forward = jit(lambda tokens: model.logits(params, model.apply(params, tokens).hidden))
  for i, prompt, response in unpadded():
    tokens = np.concatenate([prompt, response])
    padded = np.zeros((1, 8), np.int32)
    padded[0, : tokens.size] = tokens
    logits = forward(padded)[0, prompt.size - 1 : tokens.size - 1]
    want = rl.token_entropy(logits, temperature=0.7)
    np.testing.assert_allclose(entropy[i, : response.size], want, rtol=1e-5)


def test_a_value_is_that_of_the_state_before_its_token() -> None:
  """Index 0: after the prompt, wherever its padding is. The last token's own value is of no use."""
  model, params = update_batches.network(update_batches.WITH_VALUES, 1)
  found = np.asarray(jit(partial(lm.response_values, model))(params, *ROWS))
  forward = jit(lambda tokens: model.apply(params, tokens).values)
  for i, prompt, response in unpadded():
    tokens = np.concatenate([prompt, response])
    padded = np.zeros((1, 8), np.int32)
    padded[0, : tokens.size] = tokens
    after = np.asarray(forward(padded))[0]
    want = after[prompt.size - 1 : tokens.size - 1]
    np.testing.assert_allclose(found[i, : response.size], want, rtol=1e-5)
    assert np.abs(np.diff(after[: tokens.size])).max() > 0.1
  assert not found[~np.asarray(BATCH.mask)].any()
