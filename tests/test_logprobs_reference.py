"""jaxrl_lm.logprobs against the reference."""

import jax
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import (
  GARBAGE,
  TOLERANCE,
  VOCABULARY,
  Checker,
  assert_close,
  logits_rows,
  normal,
  token_rows,
)


def scaled(cotangents, vectors):
  rows = zip(cotangents, vectors, strict=True)
  return [[[c * x for x in v] for c, v in zip(cs, vs, strict=True)] for cs, vs in rows]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs(temperature):
  z, y, cotangents = logits_rows(1), token_rows(2), normal(3)
  check = Checker(lambda z, y, mask: rl.token_logprobs(z, y, mask=mask, temperature=temperature))
  rows = list(zip(z, y, strict=True))
  slopes = [ref.token_logprobs_slope(*row, temperature) for row in rows]
  expected = [ref.token_logprobs(*row, temperature) for row in rows]
  check.tokens(expected, {"z": scaled(cotangents, slopes)}, cotangents, z=z, y=y)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_entropy(temperature):
  z, cotangents = logits_rows(4), normal(5)
  check = Checker(lambda z, mask: rl.token_entropy(z, mask=mask, temperature=temperature))
  slopes = [ref.token_entropy_slope(row, temperature) for row in z]
  expected = [ref.token_entropy(row, temperature) for row in z]
  check.tokens(expected, {"z": scaled(cotangents, slopes)}, cotangents, z=z)


@pytest.mark.parametrize("name", ["sequence_logprob", "mean_logprob"])
def test_logprob_of_the_sequence(name):
  rows = normal(6)
  check = Checker(lambda x, mask: getattr(rl, name)(x, mask))
  check.reduced([getattr(ref, name)(row) for row in rows], x=rows)


# Whole sequences, prompt and response: which of their tokens are scored. The first token of a
# sequence is given: it scores 0 even where it counts.
SCORED = (
  [False, False, True, True, True],
  [True, True],
  [False, True, True, False, True, False, True],
  [False],
  [False, False, False, True],
)


def sequences(places, shape, dtype):
  """Logits, tokens and mask with garbage wherever nothing may be read, and the truth."""
  rng = np.random.default_rng(8)
  logits = np.resize(np.array(GARBAGE, dtype), (*shape, VOCABULARY)).copy()
  tokens, mask = np.full(shape, -100, np.int32), np.zeros(shape, bool)
  value, slope = np.zeros(shape), np.zeros((*shape, VOCABULARY))
  for (row, start), scored in zip(places, SCORED, strict=True):
    z = np.float32(2 * rng.normal(size=(len(scored), VOCABULARY))).astype(float).tolist()
    y = rng.integers(VOCABULARY, size=len(scored)).tolist()
    logprobs = ref.next_token_logprobs(z, y)
    slopes = ref.token_logprobs_slope(z[:-1], y[1:])
    for t, counts in enumerate(scored):
      if counts:
        mask[row, start + t], tokens[row, start + t] = True, y[t]
        value[row, start + t] = logprobs[t]
        if t:
          logits[row, start + t - 1], slope[row, start + t - 1] = z[t - 1], slopes[t - 1]
  return logits, tokens, mask, value, slope


PLACES = {
  "padded": ([(i, 0) for i in range(5)], (5, 7), None),
  "packed": (
    [(0, 0), (0, 5), (1, 0), (1, 7), (1, 8)],
    (2, 12),
    np.array([[3] * 5 + [9] * 2 + [0] * 5, [1] * 7 + [8] + [2] * 4], np.int32),
  ),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", PLACES)
def test_next_token_logprobs(layout, dtype):
  places, shape, segment_ids = PLACES[layout]
  logits, tokens, mask, value, slope = sequences(places, shape, dtype)

  @jax.jit
  def value_and_pullback(logits, tokens, mask, segment_ids, cotangent):
    def fn(z):
      return rl.next_token_logprobs(z, tokens, mask=mask, segment_ids=segment_ids)

    value, pull = jax.vjp(fn, logits)
    return value, pull(cotangent)[0]

  with jax.enable_x64(dtype == "float64"):
    cotangent = np.float32(np.random.default_rng(9).normal(size=shape)).astype(dtype)
    actual, gradient = value_and_pullback(logits, tokens, mask, segment_ids, cotangent)
    assert_close(actual, value, dtype)
    assert not np.any(np.asarray(actual)[~mask])
    shifted = np.roll(cotangent, -1, axis=-1)[..., None]
    assert_close(gradient, shifted * slope, dtype, "gradient")
    assert not np.any(np.asarray(gradient)[slope == 0])
