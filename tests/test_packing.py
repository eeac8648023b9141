"""Sequences go into rows whole, with everything that belongs to their tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_lm import lm
from jaxrl_lm.lm.packing import few_shapes, pack_rows, unpack_tokens
from tests import update_batches

BATCH = update_batches.ragged()


def sequences(batch: lm.Batch) -> list[list[Any]]:
  """Of each row with a response: token, counted or not, and its numbers where it is counted."""
  found = []
  seen = np.asarray(batch.mask if batch.seen is None else batch.seen)
  for i in range(len(batch.tokens)):
    if not seen[i].any():
      continue
    prompt = [
      (int(t), False) for t in np.asarray(batch.prompts)[i][np.asarray(batch.prompt_mask[i])]
    ]
    for t in np.flatnonzero(seen[i]):
      counted = bool(batch.mask[i, t])
      numbers = numbers_at(batch, i, t) if counted else ()
      prompt.append((int(batch.tokens[i, t]), counted, *numbers))
    found.append(prompt)
  return found


def numbers_at(batch: lm.Batch, i: int, t: int) -> tuple[float, ...]:
  names = ("advantages", "loss_weights", "old_logprobs", "importance_weights", "returns")
  arrays = (np.asarray(getattr(batch, name)) for name in names)
  return tuple(float(x[i, min(t, x.shape[1] - 1)]) for x in arrays)


def segments(packed: lm.Batch) -> list[list[Any]]:
  """The same of a packed batch, segment by segment."""
  found = []
  for i, ids in enumerate(np.asarray(packed.segment_ids)):
    for segment in range(1, ids.max(initial=0) + 1):
      (where,) = np.nonzero(ids == segment)
      np.testing.assert_array_equal(where, np.arange(where[0], where[-1] + 1))
      found.append(
        [
          (int(packed.tokens[i, t]), True, *numbers_at(packed, i, t))
          if packed.mask[i, t]
          else (int(packed.tokens[i, t]), False)
          for t in where
        ]
      )
  return found


def test_every_sequence_is_in_one_segment_with_its_numbers() -> None:
  batch = BATCH._replace(advantages=np.arange(8.0)[:, None])
  packed = pack_rows(batch, 12)
  assert packed.prompts.shape == (3, 0)
  assert packed.tokens.shape == packed.advantages.shape == packed.segment_ids.shape == (3, 12)
  assert sorted(segments(packed)) == sorted(sequences(batch))
  # 3 tokens of a prompt at most, 17 of responses; the rest is padding, and holds nothing.
  padding = packed.segment_ids == 0
  assert not any(x[padding].any() for x in packed if x is not None and x.shape == (3, 12))


def test_what_a_tool_wrote_stays_where_it_was_and_does_not_count() -> None:
  mask = np.asarray(BATCH.mask).copy()
  mask[0, 1:3] = False
  batch = BATCH._replace(mask=mask, seen=BATCH.mask)
  packed = pack_rows(batch, 9)
  assert packed.seen is None
  assert sorted(segments(packed)) == sorted(sequences(batch))
  assert packed.mask.sum() == mask.sum()
  # A response of which nothing counts is still a sequence, if it is seen.
  assert len(segments(pack_rows(batch._replace(mask=mask & False), 9))) == 6


def test_what_was_computed_comes_back_to_its_token() -> None:
  packed = pack_rows(BATCH, 12)
  back = unpack_tokens(lm.pad_rows(packed, 4).old_logprobs, BATCH, 12)
  mask = np.asarray(BATCH.mask)
  np.testing.assert_array_equal(back[mask], np.asarray(BATCH.old_logprobs)[mask])
  assert not back[~mask].any()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(8, 20), st.integers(0, 99))
def test_rows_are_few_and_nothing_is_lost(lengths: list[int], length: int, seed: int) -> None:
  batch = update_batches.ragged(seed=seed, lengths=lengths)
  packed = jax.tree.map(np.asarray, pack_rows(batch, length))
  prompts = np.asarray(batch.prompt_mask).sum(axis=1)
  sizes = np.where(np.asarray(lengths) > 0, prompts + np.asarray(lengths), 0)
  rows = len(packed.tokens)
  assert (packed.segment_ids > 0).sum() == sizes.sum()
  # No two rows would fit into one: so no more than twice the fewest.
  held = np.sort((packed.segment_ids > 0).sum(axis=1))
  assert rows == 1 or held[0] + held[1] > length
  assert rows == 1 or held.all()
  np.testing.assert_array_equal(unpack_tokens(packed.mask, batch, length), np.asarray(batch.mask))


@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_few_numbers_of_rows(multiple: int) -> None:
  """Four in every doubling; at most a quarter more than the multiple asks for."""
  found = {rows: few_shapes(rows, multiple) for rows in range(1, 1000)}
  for rows, padded in found.items():
    needed = -(-rows // multiple)
    assert padded % multiple == 0
    assert needed <= padded // multiple < 1.25 * needed + 1e-9
  octaves = np.log2(999 / multiple)
  assert len(set(found.values())) <= 4 * (octaves + 1)


def test_empty_rows_are_added_to_packed_ones() -> None:
  padded = lm.pad_rows(pack_rows(BATCH, 12), 4)
  assert padded.tokens.shape == (4, 12)
  assert not padded.mask[3].any()
  assert not padded.segment_ids[3].any()


def test_a_batch_of_empty_rows_is_one() -> None:
  nothing = BATCH._replace(mask=np.zeros((8, update_batches.TIME), bool))
  packed = pack_rows(nothing, 8)
  assert packed.tokens.shape == (1, 8)
  assert not packed.segment_ids.any()


@pytest.mark.parametrize(
  ("batch", "length", "message"),
  [
    (BATCH, 7, "row 5 has 8 tokens, prompt and response, and a packed row 7"),
    (BATCH, 0, "length must"),
    (
      BATCH._replace(mask=np.asarray(BATCH.mask)[:, ::-1]),
      8,
      r"mask must be True from .* rows \[1",
    ),
    (BATCH._replace(seen=np.asarray(BATCH.mask) & False), 8, r"mask must be False where seen"),
    (BATCH._replace(prompt_mask=BATCH.prompt_mask & False), 8, "every prompt needs"),
    (BATCH._replace(segment_ids=BATCH.tokens), 8, "packed already"),
    (BATCH._replace(advantages=np.ones(update_batches.TIME)), 8, "advantages must have a row"),
    (BATCH._replace(returns=np.ones((1, 1))), 8, "returns must have a row"),
    (BATCH._replace(mask=BATCH.mask[:1]), 8, "mask must have a row"),
    (BATCH._replace(seen=BATCH.mask[:, 1:]), 8, "seen"),
  ],
)
def test_what_cannot_be_packed_is_an_error(batch: lm.Batch, length: int, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    pack_rows(batch, length)


@pytest.mark.parametrize("name", ["mask", "seen"])
def test_a_mask_of_numbers_is_an_error(name: str) -> None:
  with pytest.raises(TypeError, match=f"{name} must be"):
    pack_rows(BATCH._replace(**{name: np.asarray(BATCH.mask, np.int32)}), 8)
