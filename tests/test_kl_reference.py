"""jaxrl_lm.kl against the reference: values, and the gradient each estimator really has."""

import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import Checker, logits_rows, normal, policies

ESTIMATORS = ["kl_k1", "kl_k2", "kl_k3", "kl_abs"]


def per_pair(fn, *rows):
  return [[fn(*xs) for xs in zip(*row, strict=True)] for row in zip(*rows, strict=True)]


def times(cotangents, slopes):
  return per_pair(lambda c, s: c * s, cotangents, slopes)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator(name):
  lp, lr = policies(1, 0.7)
  cotangents = normal(2)
  slopes = per_pair(getattr(ref, name + "_slope"), lp, lr)
  check = Checker(lambda lp, lr, mask: getattr(rl, name)(lp, lr, mask))
  expected = per_pair(getattr(ref, name), lp, lr)
  check.tokens(expected, {"lp": times(cotangents, slopes)}, cotangents, lp=lp, lr=lr)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_with_reverse_kl_gradient(name):
  lp, lr = policies(3, 0.7)
  cotangents = normal(4)
  estimator = rl.with_reverse_kl_gradient(getattr(rl, name))
  check = Checker(lambda lp, lr, mask: estimator(lp, lr, mask))
  expected = per_pair(getattr(ref, name), lp, lr)
  slopes = per_pair(ref.reverse_kl_slope, lp, lr)
  check.tokens(expected, {"lp": times(cotangents, slopes)}, cotangents, lp=lp, lr=lr)


def test_k3_off_policy():
  lp, lr = policies(5, 0.7)
  _, lo = policies(6, 0.4)
  cotangents = normal(7)
  check = Checker(lambda lp, lr, lo, mask: rl.kl_k3_off_policy(lp, lr, mask, old_logprobs=lo))
  expected = per_pair(ref.kl_k3_off_policy, lp, lr, lo)
  slopes = per_pair(ref.kl_k3_off_policy_slope, lp, lr, lo)
  check.tokens(expected, {"lp": times(cotangents, slopes)}, cotangents, lp=lp, lr=lr, lo=lo)


def scaled(cotangents, vectors):
  """A cotangent per token times a vector per token."""
  return [
    [[c * x for x in v] for c, v in zip(cs, vs, strict=True)]
    for cs, vs in zip(cotangents, vectors, strict=True)
  ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_kl(temperature):
  z, y, cotangents = logits_rows(8), logits_rows(9), normal(10)
  check = Checker(lambda z, y, mask: rl.exact_kl(z, y, mask=mask, temperature=temperature))
  pairs = list(zip(z, y, strict=True))
  expected = [ref.exact_kl(p, q, temperature) for p, q in pairs]
  slopes = [ref.exact_kl_slope(p, q, temperature) for p, q in pairs]
  check.tokens(expected, {"z": scaled(cotangents, slopes)}, cotangents, z=z, y=y)


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (3, 0.7), (6, 1.0)])
def test_top_k_kl(k, temperature):
  z, y, cotangents = logits_rows(11), logits_rows(12), normal(13)
  check = Checker(lambda z, y, mask: rl.top_k_kl(z, y, k=k, mask=mask, temperature=temperature))
  pairs = list(zip(z, y, strict=True))
  expected = [ref.top_k_kl(p, q, k, temperature) for p, q in pairs]
  slopes = [ref.top_k_kl_slope(p, q, k, temperature) for p, q in pairs]
  check.tokens(expected, {"z": scaled(cotangents, slopes)}, cotangents, z=z, y=y)
