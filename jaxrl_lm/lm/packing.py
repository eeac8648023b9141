r"""Several sequences in a row: an update of them computes with far less padding.

  packed = pack_rows(batch, 512)          a batch of fewer rows, for the same `update`
  of_old = unpack_tokens(x, batch, 512)   what was computed of it, in the rows of the old batch

Advantages and loss weights are made before, on whole groups, and lie with their tokens: loss,
gradient and metrics are those of the batch that is not packed, to rounding. (But a selection that
draws, draws other tokens: its lots go by the place in the array.) On the host, in NumPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxrl_lm import checks
from jaxrl_lm.lm import micro_batches, scoring
from jaxrl_lm.lm.micro_batches import Batch


class _Places(NamedTuple):
  """Where the tokens go that are there, [M] each, and how many rows that takes.

  Attributes:
    sources: their indices in the old rows, prompt and response in one: two arrays.
    targets: their indices in the packed rows: two arrays.
    segment_ids: counted from 1 in each packed row.
    rows: number of packed rows, at least 1.
  """

  sources: tuple[np.ndarray, np.ndarray]
  targets: tuple[np.ndarray, np.ndarray]
  segment_ids: np.ndarray
  rows: int


def pack_rows(batch: Batch, length: int) -> Batch:
  """The sequences of a batch, prompt and response, one after the other in rows of a length.

  The longest first, each into the first row that has room (first-fit decreasing); none is cut. A
  sequence without a token of its response is left out: nothing would be learnt from it.

  Args:
    batch: R rows, not packed, with the weights of its loss.
    length: of the packed rows, tokens.

  Returns:
    A batch with `segment_ids`, [R', length] each, of as many rows as that takes: at most 11/9 of
    the fewest possible, and one. `pad_rows(_, few_shapes(R', multiple))` makes their number even.

  Raises:
    ValueError: shapes do not match, a sequence is longer than a row (the message names it), there
      is a gap in a response, a token counts and is not seen, or the batch is packed.
    TypeError: a mask is not boolean.

  Reference: Johnson 1973, "Near-optimal bin packing algorithms"; Dosa 2007 for the bound.
  """
  places, old = _places(batch, length), batch
  count, width = np.shape(old.prompts)

  def packed(x: Any, before: Any = 0) -> Any:
    """[R, T] or [R, 1], with something at the prompt, in the packed rows."""
    x = np.broadcast_to(np.asarray(x), np.shape(old.tokens))
    before = np.broadcast_to(np.asarray(before, x.dtype), (count, width))
    out = np.zeros((places.rows, length), x.dtype)
    out[places.targets] = np.concatenate([before, x], axis=1)[places.sources]
    return out

  numbers = {
    name: packed(x)
    for name, x in old._asdict().items()
    if x is not None and name not in ("prompts", "prompt_mask", "tokens", "seen")
  }
  segment_ids = np.zeros((places.rows, length), np.int32)
  segment_ids[places.targets] = places.segment_ids
  wide = np.promote_types(np.asarray(old.prompts).dtype, np.asarray(old.tokens).dtype)
  arrays: dict[str, Any] = numbers | {
    "prompts": np.zeros((places.rows, 0), wide),
    "prompt_mask": np.zeros((places.rows, 0), np.bool_),
    "tokens": packed(np.asarray(old.tokens, wide), old.prompts),
    "segment_ids": segment_ids,
  }
  return Batch(**arrays)


def unpack_tokens(x: Any, batch: Batch, length: int) -> np.ndarray:
  """An array of the rows of `pack_rows(batch, length)`, back in the rows of the batch.

  Args:
    x: [R', length] or with more rows.
    batch: as it was packed.
    length: as it was packed.

  Returns:
    [R, T]; 0 where there is no token.

  Raises:
    ValueError, TypeError: as `pack_rows`.
  """
  x, places = np.asarray(x), _places(batch, length)
  (count, width), time = np.shape(batch.prompts), np.shape(batch.tokens)[1]
  out = np.zeros((count, width + time), x.dtype)
  out[places.sources] = x[places.targets]
  return out[:, width:]


def few_shapes(rows: int, multiple: int) -> int:
  """A number of rows to pad to, such that there are few of them: each is a compilation.

  4, 5, 6 or 7 times a power of two, times the multiple: four in every doubling, and at most a
  quarter of the rows more than up to the multiple alone.

  Args:
    rows: >= 1.
    multiple: that the number must be of: micro-batches times devices.

  Returns:
    At least `rows`.

  Example:
    >>> [few_shapes(rows, 1) for rows in (1, 7, 9, 16, 17)], few_shapes(9, 4)
    ([1, 7, 10, 16, 20], 12)
  """
  checks.check_range("rows", rows, low=1)
  checks.check_range("multiple", multiple, low=1)
  count = -(-rows // multiple)
  step = 2 ** max(count.bit_length() - 3, 0)
  return -(-count // step) * step * multiple


def _places(batch: Batch, length: int) -> _Places:
  prompt_mask, seen = _checked(batch)
  there = np.concatenate([prompt_mask & seen.any(axis=1, keepdims=True), seen], axis=1)
  sizes = there.sum(axis=1)
  checks.check_range("length", length, low=1)
  if (longest := sizes.max()) > length:
    raise ValueError(
      f"row {int(sizes.argmax())} has {longest} tokens, prompt and response, and a packed row "
      f"{length}: sequences are not cut"
    )
  row, start, segment, rows = _first_fit(sizes, length)
  source, index = np.nonzero(there)
  column = start[source] + there.cumsum(axis=1)[source, index] - 1
  return _Places((source, index), (row[source], column), segment[source], rows)


def _first_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
  """Row, first column and segment id of each sequence, and the number of rows."""
  free, held = np.full(len(sizes), length), np.zeros(len(sizes), np.int32)
  row, start, segment = (np.zeros(len(sizes), np.int32) for _ in range(3))
  for i in np.argsort(-sizes, kind="stable"):
    if not sizes[i]:
      break
    first = int(np.argmax(free >= sizes[i]))
    held[first] += 1
    row[i], start[i], segment[i] = first, length - free[first], held[first]
    free[first] -= sizes[i]
  return row, start, segment, max(int((held > 0).sum()), 1)


def _checked(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  """Which tokens of prompts and of responses are there."""
  if batch.segment_ids is not None:
    raise ValueError("the batch is packed already: it has segment_ids")
  micro_batches.check_rows(batch, 1)
  _, prompt_mask = scoring.check_prompts(batch.prompts, batch.prompt_mask)
  mask = np.asarray(checks.check_mask(batch.mask, tokens=batch.tokens))
  seen = mask
  if batch.seen is not None:
    seen = np.asarray(checks.check_mask(batch.seen, name="seen", tokens=batch.tokens))
  if rows := np.flatnonzero((seen[:, 1:] & ~seen[:, :-1]).any(axis=1)).tolist():
    raise ValueError(
      f"{'mask' if batch.seen is None else 'seen'} must be True from index 0 on without a gap, "
      f"and rows {rows} have one"
    )
  if rows := np.flatnonzero((mask & ~seen).any(axis=1)).tolist():
    raise ValueError(f"mask must be False where seen is, and in rows {rows} it is not")
  return np.asarray(prompt_mask), seen
