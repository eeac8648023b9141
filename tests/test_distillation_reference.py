"""jaxrl_lm.distillation against the reference: values and gradients, on padded ragged rows."""

import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests import reference_distillation as truth
from tests.ragged import LENGTHS, Checker, logits_rows, normal, policies

# Names of the constant, and where it is compared.
CONSTANTS = {
  "forward_kl": (),
  "skewed_forward_kl": (("skew", 0.1),),
  "skewed_reverse_kl": (("skew", 0.6),),
  "jensen_shannon": (("beta", 0.3),),
}


def scaled(cotangents, vectors):
  return [
    [[c * x for x in v] for c, v in zip(cs, vs, strict=True)]
    for cs, vs in zip(cotangents, vectors, strict=True)
  ]


@pytest.mark.parametrize("name", CONSTANTS)
def test_divergence(name):
  constants, temperature = dict(CONSTANTS[name]), 0.7
  z, y, cotangents = logits_rows(21), logits_rows(22), normal(23)
  check = Checker(
    lambda z, y, mask: getattr(rl, name)(z, y, mask=mask, temperature=temperature, **constants)
  )
  rows = [
    truth.divergence(name, a, b, temperature, *constants.values())
    for a, b in zip(z, y, strict=True)
  ]
  slopes = scaled(cotangents, [slope for _, slope in rows])
  check.tokens([value for value, _ in rows], {"z": slopes}, cotangents, z=z, y=y)


def kept_of(teacher, temperature, k):
  """Ids of the teacher's top k in each token, and their log-probs."""
  ids, logprobs = [], []
  for row in teacher:
    full = [ref.log_softmax(y, temperature) for y in row]
    ids.append([sorted(range(len(lp)), key=lambda v, lp=lp: -lp[v])[:k] for lp in full])
    logprobs.append(
      [[float(np.float32(lp[v])) for v in kept] for lp, kept in zip(full, ids[-1], strict=True)]
    )
  return ids, logprobs


BUCKETS = CONSTANTS | {"exact_kl": ()}


@pytest.mark.parametrize("k", [1, 3])
def test_top_k_with_tail(k):
  """Every divergence over the same buckets: their sum has the sum of the gradients."""
  temperature, cotangents = 0.7, normal(26)
  z, y = logits_rows(24), logits_rows(25)
  ids, logprobs = kept_of(y, temperature, k)

  def losses(z, lps, ids, mask):
    buckets = rl.top_k_with_tail(z, lps, ids, mask=mask, temperature=temperature)
    return sum(getattr(rl, name)(*buckets, mask=mask, **dict(c)) for name, c in BUCKETS.items())

  values = [[0.0] * n for n in LENGTHS]
  slopes = [[[0.0] * 6 for _ in range(n)] for n in LENGTHS]
  for name, constants in BUCKETS.items():
    for i, row in enumerate(zip(z, logprobs, ids, strict=True)):
      value, slope = truth.bucket_divergence(name, *row, temperature, *dict(constants).values())
      values[i] = [a + b for a, b in zip(values[i], value, strict=True)]
      slopes[i] = [
        [a + b for a, b in zip(u, v, strict=True)] for u, v in zip(slopes[i], slope, strict=True)
      ]
  slopes = {"z": scaled(cotangents, slopes)}
  Checker(losses).tokens(values, slopes, cotangents, z=z, lps=logprobs, ids=ids)


def test_supervised_losses():
  """Both losses of a token, and what on-policy distillation would make of it, in one sum."""
  lp, teacher = policies(27, 0.7)
  cotangents = normal(28)

  def losses(lp, teacher, mask):
    advantages = rl.distillation_advantages(lp, teacher, mask)
    return rl.sft_loss(lp, mask) + 2.0 * rl.dft_loss(lp, mask) + 4.0 * advantages

  expected, slopes = [], []
  for s, t, cs in zip(lp, teacher, cotangents, strict=True):
    parts = truth.sft_loss(s), truth.dft_loss(s), truth.distillation_advantages(s, t)
    expected.append([a + 2 * b + 4 * c for a, b, c in zip(*parts, strict=True)])
    dft = truth.dft_loss_slope(s)
    slopes.append([c * (-1 + 2 * slope) for c, slope in zip(cs, dft, strict=True)])
  Checker(losses).tokens(expected, {"lp": slopes}, cotangents, lp=lp, teacher=teacher)


# The slopes of the reference itself, against central differences.

STEP = 1e-6


@pytest.mark.parametrize("name", BUCKETS)
def test_slopes_of_the_reference(name):
  constants = dict(BUCKETS[name]).values()
  z, y = logits_rows(30)[1][:3], logits_rows(31)[1][:3]
  kept = [[4, 1]] * 3
  logprobs = [[-1.0, -2.0]] * 3
  for t in range(3):
    for v in range(6):
      moved = [[x + s * (u == v) for u, x in enumerate(z[t])] for s in (STEP, -STEP)]
      for value in (
        lambda row, t=t: truth.divergence(name, [row], [y[t]], 0.7, *constants),
        lambda row, t=t: truth.bucket_divergence(
          name, [row], [logprobs[t]], [kept[t]], 0.7, *constants
        ),
      ):
        above, below = (value(row)[0][0] for row in moved)
        slope = value(z[t])[1][0][v]
        assert slope == pytest.approx((above - below) / (2 * STEP), rel=1e-6, abs=1e-8)
