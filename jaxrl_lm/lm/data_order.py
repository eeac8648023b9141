"""Which prompts come when, and which rows share a minibatch: functions of numbers, without a state.

An order is a pure function of (seed, epoch) or of (seed, step, pass), so that one integer, the
number of prompts consumed, says where a run stands: a run that is resumed sees what the straight
run would have seen. The bits are those of NumPy's Philox, whose stream is fixed for ever, sorted;
`Generator.permutation` may change from one version of NumPy to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# The first of the numbers that key a permutation: two uses of one seed share no bits.
_PROMPTS, _ROWS = 0, 1


def prompt_indices(size: int, *, seed: int, cursor: int, count: int) -> np.ndarray:
  """The next prompts: every epoch is a permutation of its own of all of them.

  A step that reaches the end of an epoch goes on with the next one, so that no prompt is left
  out; a prompt can then stand in a step twice, and does if there are fewer than `count`.

  Args:
    size: number of prompts there are.
    seed: of the run, >= 0.
    cursor: prompts consumed since the run began.
    count: how many to take.

  Returns:
    [count] int64 indices in [0, size).

  Raises:
    ValueError: size or count is below 1, or seed or cursor negative.

  Example:
    >>> straight = prompt_indices(3, seed=0, cursor=0, count=6)
    >>> sorted(straight[:3].tolist()), sorted(straight[3:].tolist())
    ([0, 1, 2], [0, 1, 2])
    >>> bool((prompt_indices(3, seed=0, cursor=2, count=4) == straight[2:]).all())
    True
  """
  if size < 1 or count < 1:
    raise ValueError(f"size and count must be at least 1, got {size} and {count}")
  if seed < 0 or cursor < 0:
    raise ValueError(f"seed and cursor must be at least 0, got {seed} and {cursor}")
  first, last = cursor // size, (cursor + count - 1) // size
  order = np.concatenate([_permutation(size, _PROMPTS, seed, e) for e in range(first, last + 1)])
  return order[cursor - first * size :][:count]


def row_order(rows: int, *, seed: int, step: int, epoch: int) -> np.ndarray:
  """The order in which one pass over the rows of a step visits them.

  Args:
    rows: number of rows of the step.
    seed: of the run, >= 0.
    step: of the run.
    epoch: which pass over the rows of this step.

  Returns:
    [rows] int64, a permutation.
  """
  return _permutation(rows, _ROWS, seed, step, epoch)


def fingerprint(prompts: Iterable[tuple[Sequence[int], Any]]) -> str:
  """A digest of a data set and of its order: a cursor means nothing in another one.

  Args:
    prompts: token ids and reference (anything with a stable `repr`) of each prompt, in their order.

  Returns:
    64 hexadecimal digits, to be stored with a cursor and compared on resuming.

  Example:
    >>> fingerprint([([1], None), ([2], None)]) == fingerprint([([2], None), ([1], None)])
    False
  """
  digest = hashlib.sha256()
  for tokens, reference in prompts:
    digest.update(repr(([int(token) for token in tokens], reference)).encode())
  return digest.hexdigest()


def _permutation(size: int, *numbers: int) -> np.ndarray:
  bits = np.random.Philox(np.random.SeedSequence(numbers)).random_raw(size)
  return np.argsort(bits, kind="stable")
