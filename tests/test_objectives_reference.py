"""Every named row of jaxrl_lm.objectives against the reference: loss and analytic gradients."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_lm as rl
from tests import reference as ref
from tests.ragged import PACKED, PADDED, Checker, f32, per_row, policies, uniform

NAMES = sorted(ref.ALGORITHMS)
# Not centred: a loss near 0 would say nothing about float32.
ADVANTAGES = f32([1.7, -0.4, 1.0, -0.6, 1.9, -0.5, 1.5, -0.1, 0.0, 1.5, -0.8, 1.1])


def objective_of(row: ref.Algorithm) -> rl.Objective:
  name = row.level.removesuffix("_token") if row.level != "per_token" else row.level
  level = getattr(rl, name)
  if name != row.level:
    level = rl.with_token_gradient(level)
  surrogate = getattr(rl, row.surrogate)
  return rl.Objective(
    advantages=getattr(rl, row.advantages),
    level=level,
    surrogate=partial(surrogate, **row.constants) if row.constants else surrogate,
    loss_weights=getattr(rl, row.loss_weights),
  )


@pytest.mark.parametrize("name", NAMES)
def test_slots(name):
  """The table holds the published functions and constants."""
  assert getattr(rl, name) == objective_of(ref.ALGORITHMS[name])


def test_dr_grpo():
  row = ref.ALGORITHMS["GRPO"]._replace(advantages="group_centered")
  expected = objective_of(row)
  weights = partial(rl.constant_length, length=20)
  assert rl.dr_grpo(20) == rl.Objective(
    expected.advantages, expected.level, expected.surrogate, weights
  )


def selection(name, seed):
  if name not in ("CLIP_COV", "KL_COV"):
    return {}
  return {"selected": [[u < 0.3 for u in row] for row in uniform(seed, 0, 1)]}


def weights_of(name, rows):
  return getattr(ref, ref.ALGORITHMS[name].loss_weights)(rows)


# Rows whose tokens act on each other are packed too; of the others, one.
COUPLED = ["GRPO", "GSPO", "GSPO_TOKEN", "LUSPO", "GMPO", "VESPO", "TOPR", "DRO"]
LOSSES = [pytest.param(name, PADDED, id=f"{name}-padded") for name in NAMES]
LOSSES += [
  pytest.param(
    name, PACKED, id=f"{name}-packed", marks=[] if name == "GSPO" else [pytest.mark.slow]
  )
  for name in COUPLED
]


def some_fast(names):
  """One row of each kind of surrogate by default, the others in the slow suite: compiling costs."""
  fast = ("GRPO", "GSPO_TOKEN", "GMPO", "VESPO", "DPPO_KL", "DRO", "KL_COV")
  return [x if x in fast else pytest.param(x, marks=pytest.mark.slow) for x in names]


@pytest.mark.parametrize(("name", "layout"), LOSSES)
def test_loss(name, layout):
  """Every term at once; importance weights on the policy term alone."""
  objective = getattr(rl, name)

  def fn(lp, lo, a, w, iw, lr, h, mask, segment_ids=None, selected=None):
    return rl.objective_loss(
      objective, lp, lo, a, mask, loss_weights=w, importance_weights=iw, ref_logprobs=lr,
      kl=rl.kl_k3, kl_coef=0.05, entropy=h, entropy_coef=0.01, segment_ids=segment_ids,
      selected=selected,
    )[0]  # fmt: skip

  check = Checker(fn, layout)
  for seed, scale in enumerate((0.3, 2e-3)):
    lp, lo = policies(seed, scale)
    inputs = {"lp": lp, "lo": lo, "a": per_row(ADVANTAGES), "w": weights_of(name, lp)}
    inputs |= {"iw": uniform(seed + 10, 0.5, 2.0), "lr": policies(seed + 20, 0.5)[1]}
    inputs |= {"h": uniform(seed + 30, 0.0, 1.5)}
    loss, gradients, entropy_gradients = ref.objective_loss(
      ref.ALGORITHMS[name], lp, lo, inputs["a"], inputs["w"], inputs["iw"], inputs["lr"],
      "kl_k3", 0.05, inputs["h"], 0.01, **selection(name, seed),
    )  # fmt: skip
    inputs |= selection(name, seed)
    check.scalar(loss, {"lp": gradients, "h": entropy_gradients}, **inputs)


@pytest.mark.parametrize("name", some_fast(NAMES))
def test_on_policy(name):
  """Without old log-probs the ratio is 1, and the gradient that of REINFORCE."""
  objective = getattr(rl, name)

  def fn(lp, a, w, mask, selected=None):
    loss, _ = rl.objective_loss(objective, lp, None, a, mask, loss_weights=w, selected=selected)
    return loss

  lp, a = policies(3, 0.3)[0], per_row(ADVANTAGES)
  w, chosen = weights_of(name, lp), selection(name, 4)
  loss, gradients, _ = ref.objective_loss(ref.ALGORITHMS[name], lp, None, a, w, **chosen)
  if not chosen:
    pull = ref.LEVELS[ref.ALGORITHMS[name].level][1]
    policy_gradient = [
      pull([-x * y for x, y in zip(*row, strict=True)]) for row in zip(w, a, strict=True)
    ]
    assert ref.flat(gradients) == pytest.approx(ref.flat(policy_gradient), rel=1e-12)
  check = Checker(fn, dtypes=["float64"])
  check.scalar(loss, {"lp": gradients}, lp=lp, a=a, w=w, **chosen)


@pytest.mark.parametrize("name", some_fast(name for name in NAMES if name != "GMPO"))
def test_tokens_of_no_weight(name):
  """A token whose importance weight is 0 takes no part in the policy term, and only in that."""
  objective = getattr(rl, name)

  def fn(lp, lo, a, w, iw, lr, mask, selected=None):
    return rl.objective_loss(
      objective, lp, lo, a, mask, loss_weights=w, importance_weights=iw, ref_logprobs=lr,
      kl=rl.kl_k2, kl_coef=0.05, selected=selected,
    )[0]  # fmt: skip

  lp, lo = policies(5, 0.3)
  a, w, chosen = per_row(ADVANTAGES), weights_of(name, lp), selection(name, 7)
  lr = policies(6, 0.5)[1]
  iw = [[float(u < 0.6) for u in row] for row in uniform(8, 0, 1)]
  loss, gradients, _ = ref.objective_loss(
    ref.ALGORITHMS[name], lp, lo, a, w, iw, lr, "kl_k2", 0.05, **chosen
  )
  inputs = {"lp": lp, "lo": lo, "a": a, "w": w, "iw": iw, "lr": lr} | chosen
  Checker(fn, dtypes=["float64"]).scalar(loss, {"lp": gradients}, **inputs)


def test_gmpo_takes_its_mean_over_the_tokens_of_some_weight():
  """Its clip and its mean are one function, so a token left out is left out of the mean too."""

  def fn(lp, lo, a, w, iw, mask):
    return rl.objective_loss(
      rl.GMPO, lp, lo, a, mask, loss_weights=w, importance_weights=iw
    )[0]  # fmt: skip

  lp, lo = policies(5, 0.3)
  a, w = per_row(ADVANTAGES), weights_of("GMPO", lp)
  iw = [[float(u < 0.6) for u in row] for row in uniform(8, 0, 1)]

  def left(rows):
    return [[x for x, y in zip(*pair, strict=True) if y] for pair in zip(rows, iw, strict=True)]

  loss, gradients, _ = ref.objective_loss(ref.ALGORITHMS["GMPO"], *map(left, (lp, lo, a, w)))
  slopes = [iter(row) for row in gradients]
  spread = [[next(s) if y else 0.0 for y in row] for s, row in zip(slopes, iw, strict=True)]
  check = Checker(fn, dtypes=["float64"])
  check.scalar(loss, {"lp": spread}, lp=lp, lo=lo, a=a, w=w, iw=iw)


@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["GRPO", "GSPO", "GMPO", "VESPO"])
def test_aux(name, layout):
  objective, row = getattr(rl, name), ref.ALGORITHMS[name]

  def fn(lp, lo, a, w, lr, mask, segment_ids=None):
    _, aux = rl.objective_loss(
      objective, lp, lo, a, mask, loss_weights=w, ref_logprobs=lr, kl=rl.kl_k1,
      segment_ids=segment_ids,
    )  # fmt: skip
    return jnp.stack(aux, axis=-1)

  (lp, lo), lr, a = policies(9, 0.3), policies(10, 0.5)[1], per_row(ADVANTAGES)
  level = ref.LEVELS[row.level][0]
  d = [level(ref.token_log_ratio(x, y)) for x, y in zip(lp, lo, strict=True)]
  rows = zip(d, a, lp, strict=True)
  gains = [ref.surrogate_row(row.surrogate, x, y, s, row.constants) for x, y, s in rows]
  kl = [[ref.kl_k1(*pair) for pair in zip(*x, strict=True)] for x in zip(lp, lr, strict=True)]
  expected = [list(zip(*parts, strict=True)) for parts in zip(d, gains, kl, strict=True)]
  w = ref.token_mean(lp)
  Checker(fn, layout).values(expected, lp=lp, lo=lo, a=a, w=w, lr=lr)


def test_advantages_of_the_sequence():
  """[..., 1] and [..., T] are the same loss."""
  lp, lo = policies(11, 0.3)

  def fn(lp, lo, a, w, mask):
    return rl.objective_loss(rl.GRPO, lp, lo, a[..., None], mask, loss_weights=w)[0]

  w = weights_of("GRPO", lp)
  loss, gradients, _ = ref.objective_loss(ref.ALGORITHMS["GRPO"], lp, lo, per_row(ADVANTAGES), w)
  a = np.reshape(ADVANTAGES, PADDED.shape[:-1])
  Checker(fn).scalar(loss, {"lp": gradients}, lp=lp, lo=lo, a=a, w=w)
