"""Scores of packed rows are those of their sequences alone; what has no score is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_lm import lm
from jaxrl_lm.lm.packing import pack_rows, unpack_tokens
from tests import update_batches
from tests.update_batches import jit

BATCH = update_batches.ragged()
# Rows of 24 tokens, segments of up to 8: twice the context, and a window shorter than a segment.
LENGTH = 24
CONFIG = dataclasses.replace(update_batches.WITH_VALUES, max_length=8, sliding_window=3)


def rows_of(batch: lm.Batch) -> tuple[Any, ...]:
  return batch.prompts, batch.prompt_mask, batch.tokens, batch.mask


def everything(model: Any) -> Any:
  """All scorers, of (params, rows, segment ids or None)."""

  def scores(params: Any, rows: Any, segment_ids: Any = None) -> Any:
    packed = {"segment_ids": segment_ids}
    plain = lm.response_scores(model, params, *rows, temperature=0.8, **packed)
    return {
      "logprobs": lm.response_logprobs(model, params, *rows, temperature=0.8, **packed),
      "plain": plain.logprobs,
      "entropy": plain.entropy,
      "tiles": lm.linear_response_scores(model, params, *rows, temperature=0.8, **packed).logprobs,
      "values": lm.response_values(model, params, *rows, **packed),
    }

  return jit(scores)


@pytest.fixture(scope="module")
def scored() -> Any:
  model, params = update_batches.network(CONFIG)
  return model, params, everything(model)


def test_every_scorer(scored: Any) -> None:
  _, params, scores = scored
  packed = pack_rows(BATCH, LENGTH)
  assert packed.segment_ids.max() > 2
  want = scores(params, rows_of(BATCH))
  found = scores(params, rows_of(packed), packed.segment_ids)
  for name, x in found.items():
    assert not np.asarray(x)[~packed.mask].any(), name
    back = unpack_tokens(x, BATCH, LENGTH)
    # Sums over 24 keys in place of 8, of which 16 are 0.
    np.testing.assert_allclose(back, want[name], rtol=1e-5, atol=2e-6, err_msg=name)


def test_a_counted_token_that_nothing_predicts_is_nan(scored: Any) -> None:
  """The first of its segment, padding, and what is beyond the context of its own segment."""
  _, params, scores = scored
  ids = np.ones((1, LENGTH), np.int32)
  ids[0, 9:] = 2
  ids[0, 20:] = 0
  packed = lm.Batch(*(np.zeros((1, 0), x) for x in (int, bool)), *(np.ones_like(ids),) * 4)
  packed = packed._replace(mask=ids >= 0)
  found = scores(params, rows_of(packed), ids)
  undefined = np.zeros(LENGTH, bool)
  undefined[[0, 8, 9, *range(17, 24)]] = True
  for name, x in found.items():
    np.testing.assert_array_equal(np.isnan(x[0]), undefined, err_msg=name)


PACKED = jax.tree.map(np.asarray, pack_rows(BATCH, LENGTH))
IDS = PACKED.segment_ids


@pytest.mark.parametrize(
  ("rows", "options", "error", "message"),
  [
    (rows_of(BATCH), {"segment_ids": IDS}, ValueError, r"prompts \[B, 0\], got None and .*\(8, 3"),
    (rows_of(PACKED), {"segment_ids": IDS, "seen": IDS > 0}, ValueError, "got seen and"),
    (rows_of(PACKED), {}, ValueError, r"prompts must be \[B, P\] with B, P >= 1"),
    (rows_of(PACKED), {"segment_ids": IDS[:, 1:]}, ValueError, "segment_ids"),
    (rows_of(PACKED), {"segment_ids": IDS > 0}, TypeError, "segment_ids must"),
    (rows_of(PACKED), {"segment_ids": IDS * 0}, ValueError, r"first token .* in rows \[0, 1\]"),
    ((*rows_of(PACKED)[:3], IDS > 0), {"segment_ids": IDS}, ValueError, "which nothing predicts"),
    (rows_of(PACKED), {"segment_ids": IDS * 0 + 1}, ValueError, r"longer than the context: .* 8"),
  ],
)
def test_what_is_wrong_is_an_error(
  scored: Any, rows: Any, options: Any, error: type[Exception], message: str
) -> None:
  model, params, _ = scored
  with pytest.raises(error, match=message):
    lm.response_logprobs(model, params, *rows, **options)
