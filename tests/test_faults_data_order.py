"""A fault that users of other libraries have reported of resumed runs; as `test_faults.py`."""

from __future__ import annotations

import numpy as np

from jaxrl_lm.lm import data_order


def test_data_order() -> None:
  """8 prompts, 2 in a step, seed 1, stopped after 5 steps: the rest is that of the straight run.

  The stop is in the second epoch. A resume that keeps the position and not the permutation gives
  other prompts, one that keeps neither the first ones again; every epoch has all 8. And a cursor of
  one data set is not one of another: their fingerprints differ. verl-project/verl#3457.
  """
  size, count, seed = 8, 2, 1
  straight = [
    data_order.prompt_indices(size, seed=seed, cursor=count * step, count=count).tolist()
    for step in range(12)
  ]
  cursor = 5 * count  # all that a resumed run knows
  resumed = []
  while len(resumed) < 7:
    resumed.append(data_order.prompt_indices(size, seed=seed, cursor=cursor, count=count).tolist())
    cursor += count
  assert resumed == straight[5:]
  epochs = np.reshape(straight, (3, size)).tolist()
  assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 3
  prompts = [((token,), None) for token in range(size)]
  assert data_order.fingerprint(prompts) != data_order.fingerprint(prompts[::-1])
