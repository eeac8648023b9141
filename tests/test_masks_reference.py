"""jaxrl_lm.masks and jaxrl_lm.loss_weights against the reference."""

import jax
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import GROUPS, LENGTHS, PACKED, PADDED, Checker, normal

LAYOUTS = pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
ROWS = normal(1)


def test_zero_masked():
  cotangents = normal(2)
  check = Checker(lambda x, mask: rl.zero_masked(x, mask))
  check.tokens(ROWS, {"x": cotangents}, cotangents, x=ROWS)


def test_masked_sum_and_mean():
  n = sum(LENGTHS)
  check = Checker(lambda x, mask: rl.masked_sum(x, mask))
  check.scalar(ref.total(ref.flat(ROWS)), {"x": [[1.0] * len(row) for row in ROWS]}, x=ROWS)
  check = Checker(lambda x, mask: rl.masked_mean(x, mask))
  check.scalar(ref.mean(ref.flat(ROWS)), {"x": [[1.0 / n] * len(row) for row in ROWS]}, x=ROWS)


def test_masked_sum_and_mean_of_rows():
  check = Checker(lambda x, mask: rl.masked_sum(x, mask, axis=-1))
  check.reduced([ref.total(row) for row in ROWS], x=ROWS)
  check = Checker(lambda x, mask: rl.masked_mean(x, mask, axis=-1))
  check.reduced([ref.masked_mean(row) for row in ROWS], x=ROWS)


def test_lengths():
  Checker(lambda mask: rl.lengths(mask)).reduced(list(LENGTHS))


@LAYOUTS
def test_last_token_mask(layout):
  fn = lambda mask, segment_ids=None: rl.last_token_mask(mask, segment_ids=segment_ids)
  Checker(fn, layout).values([[t == n - 1 for t in range(n)] for n in LENGTHS])


@LAYOUTS
def test_segment_total(layout):
  cotangents = normal(3)
  fn = lambda x, mask, segment_ids=None: rl.segment_total(x, mask, segment_ids)
  expected = [ref.segment_total(row) for row in ROWS]
  pulled = [ref.segment_total(row) for row in cotangents]
  Checker(fn, layout).tokens(expected, {"x": pulled}, cotangents, x=ROWS)


@LAYOUTS
def test_segment_mean(layout):
  cotangents = normal(5)
  fn = lambda x, mask, segment_ids=None: rl.segment_mean(x, mask, segment_ids)
  expected = [ref.segment_mean(row) for row in ROWS]
  pulled = [ref.segment_mean(row) for row in cotangents]
  Checker(fn, layout).tokens(expected, {"x": pulled}, cotangents, x=ROWS)


@LAYOUTS
def test_segment_max(layout):
  cotangents = normal(4)
  fn = lambda x, mask, segment_ids=None: rl.segment_max(x, mask, segment_ids)
  expected = [ref.segment_max(row) for row in ROWS]
  pulled = [ref.segment_max_vjp(*rows) for rows in zip(ROWS, cotangents, strict=True)]
  Checker(fn, layout).tokens(expected, {"x": pulled}, cotangents, x=ROWS)


@LAYOUTS
def test_segment_count(layout):
  fn = lambda mask, segment_ids=None: rl.segment_count(mask, segment_ids)
  Checker(fn, layout).values([ref.segment_count(row) for row in ROWS])


# The response begins after the prompt, whose own stop tokens do not end it.
PROMPTS = ([4, 2], [2], [1, 3, 2, 2])
RESPONSES = ([5, 2, 2, 2], [2, 1, 3, 5, 1], [1, 3])
STOPS = ([2], [3, 5], [7])


@pytest.mark.parametrize("stop_tokens", STOPS)
def test_response_mask_and_is_finished(stop_tokens):
  width, stops = 6, np.array(stop_tokens)
  tokens, within = np.zeros((3, width), np.int32), np.zeros((3, width), bool)
  mask, finished = np.zeros((3, width), bool), []
  for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
    start, end = len(prompt), len(prompt) + len(response)
    tokens[i, :start], tokens[i, start:end] = prompt, response
    within[i, start:end] = True
    mask[i, start:end] = ref.response_mask(response, stop_tokens)
    finished.append(ref.is_finished(response, stop_tokens))
  fns = [jax.jit(fn) for fn in (rl.response_mask, rl.is_finished)]
  actual = [fn(tokens, stop_tokens=stops, within=within) for fn in fns]
  np.testing.assert_array_equal(actual[0], mask)
  np.testing.assert_array_equal(actual[1], finished)
  alone = [fn(np.array(RESPONSES[1]), stop_tokens=stops) for fn in fns]
  np.testing.assert_array_equal(alone[0], ref.response_mask(RESPONSES[1], stop_tokens))
  assert bool(alone[1]) == ref.is_finished(RESPONSES[1], stop_tokens)


# ---------------------------------------------------------------------------------- loss_weights

COUNTED = [
  ("sequence_mean", {}),
  ("sequence_sum", {}),
  ("constant_length", {"length": 20}),
  ("length_power", {"alpha": 0.0}),
  ("length_power", {"alpha": 0.4}),
  ("length_power", {"alpha": 1.0}),
]


@pytest.mark.parametrize("name", ["token_mean", "token_sum"])
def test_token_weights(name):
  Checker(lambda mask: getattr(rl, name)(mask)).values(getattr(ref, name)(ROWS))


@pytest.mark.parametrize("count_empty", [False, True])
@pytest.mark.parametrize(("name", "constants"), COUNTED)
def test_sequence_weights(name, constants, count_empty):
  fn, constants = getattr(rl, name), {**constants, "count_empty": count_empty}
  Checker(lambda mask: fn(mask, **constants)).values(getattr(ref, name)(ROWS, **constants))


@pytest.mark.parametrize("count_empty", [False, True])
def test_group_token_mean(count_empty):
  prompts, size = GROUPS
  groups = [ROWS[p * size : (p + 1) * size] for p in range(prompts)]
  check = Checker(lambda mask: rl.group_token_mean(mask, count_empty=count_empty))
  check.values(ref.flat(ref.group_token_mean(groups, count_empty)))


def test_an_empty_group():
  mask = PADDED.mask.copy()
  mask[1] = False
  groups = [[row if p != 1 else [] for row in ROWS[p * 4 : p * 4 + 4]] for p in range(3)]
  for count_empty in (False, True):
    truth = ref.flat(ref.flat(ref.group_token_mean(groups, count_empty)))
    actual = np.asarray(rl.group_token_mean(mask, count_empty=count_empty))
    np.testing.assert_allclose(actual[mask], np.float32(truth), rtol=2e-5)
    assert not np.any(actual[~mask])
