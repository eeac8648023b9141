"""The reference itself: numbers worked out by hand, and slopes against central differences."""

import math

import pytest

from tests import reference as ref
from tests.ragged import logits_rows, normal, policies


def near(x, rel=1e-6):
  return pytest.approx(x, rel=rel, abs=1e-12)


# -------------------------------------------------------------------------------- worked by hand


def test_sum_and_mean_of_logprobs():
  """-2.2320 - 2.8010 - 3.9580 - 3.3960 - 2.2290 = -14.616; / 5 = -2.9232. The second response,
  -4.4220 - 1.5100 - 3.0590 = -8.991; / 3 = -2.997: sum and mean disagree on the better one."""
  first, second = [-2.2320, -2.8010, -3.9580, -3.3960, -2.2290], [-4.4220, -1.5100, -3.0590]
  assert ref.sequence_logprob(first) == near(-14.616)
  assert ref.mean_logprob(first) == near(-2.9232)
  assert ref.sequence_logprob(second) == near(-8.991)
  assert ref.mean_logprob(second) == near(-2.997)


def test_temperature():
  """Logits 2, 1, 0 at T = 0.5 are 4, 2, 0: 4 - log(e^4 + e^2 + 1) = -0.142932."""
  assert ref.token_logprobs([[2.0, 1.0, 0.0]], [0], 0.5) == [near(-0.142932, 1e-5)]


def test_next_token():
  """Position t - 1 scores token t: log .1, log .6, log .5."""
  probabilities = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.9, 0.05, 0.05]]
  logits = [[math.log(p) for p in row] for row in probabilities]
  logprobs = ref.next_token_logprobs(logits, [0, 2, 1, 2])
  assert logprobs == near([0.0, math.log(0.1), math.log(0.6), math.log(0.5)])


def test_response_mask_keeps_the_first_stop():
  assert ref.response_mask([5, 2, 2, 2], [2]) == [True, True, False, False]
  assert ref.response_mask([2, 7, 7, 7], [2]) == [True, False, False, False]
  assert ref.response_mask([5, 3, 9], [2]) == [True, True, True]


def test_ppo_and_dual_clip():
  """Ratio 5, band 0.2, cap 3. A = 1: 1.2. A = -1: -5, capped at -3. A = 0: 0."""
  d = math.log(5)
  assert [ref.ppo_clip(d, a, d) for a in (1.0, -1.0, 0.0)] == near([1.2, -5.0, 0.0])
  assert [ref.dual_clip(d, a, d) for a in (1.0, -1.0, 0.0)] == near([1.2, -3.0, 0.0])
  assert [ref.ppo_clip_slope(d, a, d) for a in (1.0, -1.0)] == near([0.0, -5.0])
  assert [ref.dual_clip_slope(d, a, d) for a in (1.0, -1.0)] == near([0.0, 0.0])


def test_gspo():
  """d = 0.2, -0.4: s = e^-0.1 = 0.904837, and each token's share of its gradient is half."""
  row = ref.ALGORITHMS["GSPO"]._replace(constants={})
  rows = [[-1.0, -2.0]], [[-1.2, -1.6]], [[1.0, 1.0]]
  loss, gradients, _ = ref.objective_loss(row, *rows, ref.sequence_mean(rows[0]))
  assert loss == near(-0.904837)
  assert gradients[0] == near([-0.452419, -0.452419])


def test_sequence_weight_of_a_long_row():
  """2000 tokens of -0.01: e^-20 = 2.06e-9 for the sequence, e^-0.01 = 0.990050 per token."""
  d = [-0.01] * 2000
  assert math.exp(ref.per_sequence(d)[0]) == near(2.06115e-9)
  assert math.exp(ref.per_sequence_geometric(d)[0]) == near(0.990050)


def test_kl_of_a_known_pair():
  """pi = .7 .2 .1, ref = .2 .3 .5. KL(pi || ref) = .7 log 3.5 + .2 log 2/3 + .1 log .2 = 0.634897.
  E k1 = E k3 = KL. Expected gradients in the logits: of k1 nothing, of k2 that of KL(pi || ref), of
  k3 that of KL(ref || pi), pi - ref."""
  pi, q = [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]
  z, y = [math.log(p) for p in pi], [math.log(p) for p in q]

  def expected(fn):
    return sum(p * fn(a, b) for p, a, b in zip(pi, z, y, strict=True))

  def gradient(slope):
    """sum_v p_v slope_v d log p_v / d z."""
    scores = [p * slope(a, b) for p, a, b in zip(pi, z, y, strict=True)]
    return [s - p * sum(scores) for s, p in zip(scores, pi, strict=True)]

  assert ref.exact_kl([z], [y]) == near([0.634897], 1e-5)
  assert [expected(k) for k in (ref.kl_k1, ref.kl_k3)] == near([0.634897] * 2, 1e-5)
  assert expected(ref.kl_k2) == near(0.695250, 1e-5)
  exact = [0.432506, -0.208072, -0.224434]
  assert ref.exact_kl_slope([z], [y])[0] == near(exact, 1e-5)
  assert gradient(ref.reverse_kl_slope) == near(exact, 1e-5)
  assert gradient(ref.kl_k1_slope) == near([0.0, 0.0, 0.0])
  assert gradient(ref.kl_k3_slope) == near([0.5, -0.1, -0.4])


def test_loss_weights():
  """Token losses 1..6 in one row and 10, 20 in another: sum 51, 8 tokens; row means 3.5 and 15."""
  losses = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [10.0, 20.0], []]

  def reduce(weights):
    return sum(w * x for w, x in zip(ref.flat(weights), ref.flat(losses), strict=True))

  assert reduce(ref.token_mean(losses)) == near(6.375)
  assert reduce(ref.token_sum(losses)) == near(51.0)
  assert reduce(ref.sequence_mean(losses)) == near(9.25)
  assert reduce(ref.sequence_mean(losses, count_empty=True)) == near(18.5 / 3)
  assert reduce(ref.sequence_sum(losses)) == near(25.5)
  assert reduce(ref.constant_length(losses, 8)) == near(51.0 / 16)
  assert reduce(ref.length_power(losses, 0.5)) == near((21 / 6**0.5 + 30 / 2**0.5) / 2)
  groups = [[losses[0], losses[1]], [losses[1], losses[2]]]
  weights = ref.group_token_mean(groups)
  assert ref.flat(weights) == [near([1 / 16] * 6), near([1 / 16] * 2), near([1 / 4] * 2), []]


def test_advantages():
  """Rewards 1, 0, 0, 1: mean 1/2; std (ddof 1) sqrt(1/3); others of the first 1/3. The best of
  2 of (1, 0, 0, 0): 3 of 6 pairs hold the first and gain 1 from it: 4 / 6 x 3 = 2."""
  rewards = [1.0, 0.0, 0.0, 1.0]
  assert ref.group_centered(rewards) == [0.5, -0.5, -0.5, 0.5]
  assert ref.group_normalized(rewards, eps=0.0)[0] == near(0.5 * 3**0.5)
  assert ref.leave_one_out(rewards) == near([2 / 3, -2 / 3, -2 / 3, 2 / 3])
  assert ref.mean_normalized(rewards) == [1.0, -1.0, -1.0, 1.0]
  assert ref.pass_at_k([1.0, 0.0, 0.0, 0.0], 2) == near([2.0, 0.0, 0.0, 0.0])
  assert ref.signal_scaled([rewards, [1.0, 1.0]])[0] == near([0.75, -0.75, -0.75, 0.75])
  assert ref.length_weighted_baseline([1.0, 0.0], [3.0, 1.0]) == [0.25, -0.75]
  assert ref.leave_one_out_normalized([1.0, 0.0, 2.0], eps=0.0)[0] == 0.0
  assert ref.leave_one_out_normalized([1.0, 0.0], eps=0.0) == [1.0, -1.0]
  for estimator in (ref.group_centered, ref.group_normalized, ref.leave_one_out):
    assert estimator([2.0]) == [0.0]
    assert estimator([0.1] * 3) == [0.0] * 3
    assert estimator([]) == []


def test_returns():
  """r = 0, 1, v = .1, .2, lambda .95: deltas .1, .8; .1 + .95 x .8 = .86. With a value of .8
  after the last token and r = 0, v = .4, .6: deltas .2, .2; .4, .2."""
  assert ref.gae([0.0, 1.0], [0.1, 0.2], 1.0, 0.95) == near([0.86, 0.8])
  assert ref.gae([0.0, 0.0], [0.4, 0.6], bootstrap=0.8) == near([0.4, 0.2])
  assert ref.gae([0.0, 0.0], [0.4, 0.6]) == near([-0.4, -0.6])
  assert ref.discounted_returns([1.0, 2.0, 4.0], 0.5) == near([3.0, 4.0, 4.0])
  assert ref.whiten([[3.0, 1.0]], ddof=1, eps=0.0)[0] == near([0.5**0.5, -(0.5**0.5)])
  assert ref.whiten([[3.0, 1.0]], ddof=0, eps=0.0)[0] == near([1.0, -1.0])
  assert [ref.overlong_penalty(n, 20, 5) for n in (15, 18, 20, 21)] == near([0, -0.6, -1, -1])
  assert ref.length_adaptive_lambda(40, 0.05) == 0.5


def test_corrections():
  """Sampler -1.2, trainer -1.0: w = e^0.2 = 1.2214."""
  log_weights = ref.token_log_ratio([-1.0], [-1.2])
  assert ref.truncated(log_weights, 2.0) == near([1.221403])
  assert ref.truncated(log_weights, 1.1) == [1.1]
  assert ref.banded(log_weights, 0.5, 1.2) == [0.0]
  assert ref.self_normalised([[1.0, 3.0]], [[0.5, 0.5]]) == [[0.5, 1.5]]
  assert ref.off_policy_mask([-0.3, -0.1], -1.0, 0.15) == [0.0, 0.0]
  assert ref.off_policy_mask([-0.3, -0.1], 1.0, 0.15) == [1.0, 1.0]


def test_clip_fractions_look_at_the_sign():
  """Ratios 1.5, 1.5, .5, .5 with A = 1, -1, 1, -1: the first and the last are clipped."""
  d = [math.log(r) for r in (1.5, 1.5, 0.5, 0.5)]
  assert ref.clip_fractions(d, [1.0, -1.0, 1.0, -1.0], 0.2, 0.2) == (1, 1)
  assert ref.effective_sample_size([0.0, 0.0]) == 1.0
  assert ref.effective_sample_size([0.0, -500.0]) == near(0.5)


# ------------------------------------------------------------- slopes against central differences

STEP = 1e-6

# Those with a detached coefficient have no derivative to be compared with: there the slope is
# the coefficient times A, and the gain the coefficient times A times the score.
DIFFERENTIABLE = {
  "reinforce": {},
  "importance_weighted": {},
  "ppo_clip": {},
  "dual_clip": {"ratio_cap": 1.5},
  "sapo": {},
  "dro": {"beta": 0.4},
  "clip_cov": {},
  "kl_cov": {"kl_coef": 0.3},
}
SCORE_FORM = {
  "cispo": {"clip_low": 0.2, "clip_high": 0.2},
  "topr": {},
  "vespo": {},
  "dppo_tv": {"clip_low": 0.1, "clip_high": 0.1, "ratio_cap": 1.2},
  "dppo_kl": {"clip_low": 0.02, "clip_high": 0.02, "ratio_cap": 1.2},
}


def tokens(seed):
  new, old = policies(seed, 0.6)
  d = [x - y for x, y in zip(ref.flat(new), ref.flat(old), strict=True)]
  return zip(d, ref.flat(normal(seed + 1)), ref.flat(new), strict=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_surrogate_slope(name):
  gain, slope = getattr(ref, name), getattr(ref, name + "_slope")
  for selected in (True, False):
    flags = (selected,) if name in ("clip_cov", "kl_cov") else ()
    for d, a, score in tokens(1):
      above = gain(d + STEP, a, score + STEP, *flags, **DIFFERENTIABLE[name])
      below = gain(d - STEP, a, score - STEP, *flags, **DIFFERENTIABLE[name])
      expected = (above - below) / (2 * STEP)
      assert slope(d, a, score, *flags, **DIFFERENTIABLE[name]) == near(expected, 1e-6)


@pytest.mark.parametrize("name", SCORE_FORM)
def test_score_form(name):
  gain, slope = getattr(ref, name), getattr(ref, name + "_slope")
  weights = set()
  for d, a, score in tokens(2):
    coefficient = slope(d, a, score, **SCORE_FORM[name])
    assert gain(d, a, score, **SCORE_FORM[name]) == near(coefficient * score, 1e-12)
    weights.add(round(coefficient / a, 6))
  assert len(weights) > 2
  on_policy = slope(0.0, 1.7, -0.5, **SCORE_FORM[name])
  assert on_policy == near(1.7)


def pulled_by_differences(fn, x, cotangents):
  """The transposed derivative of fn: rows -> rows, by central differences."""

  def weighted(row):
    return sum(c * y for c, y in zip(cotangents, fn(row), strict=True))

  def moved(u, step):
    return [v + step * (u == t) for t, v in enumerate(x)]

  moves = [(moved(u, STEP), moved(u, -STEP)) for u in range(len(x))]
  return [(weighted(above) - weighted(below)) / (2 * STEP) for above, below in moves]


LEVELS = ["per_token", "per_prefix", "per_sequence", "per_sequence_geometric"]


@pytest.mark.parametrize("name", LEVELS)
def test_level_vjp(name):
  level, vjp = ref.LEVELS[name]
  for d, cotangents in zip(normal(3), normal(4), strict=True):
    assert vjp(cotangents) == near(pulled_by_differences(level, d, cotangents), 1e-7)


def test_gmpo_vjp():
  for d, a, cotangents in zip(normal(5, 0.5), normal(6), normal(7), strict=True):
    expected = pulled_by_differences(lambda row, a=a: ref.gmpo(row, a), d, cotangents)
    assert ref.gmpo_vjp(d, a, cotangents) == near(expected, 1e-6)


@pytest.mark.parametrize("name", ["kl_k1", "kl_k2", "kl_k3", "kl_abs"])
def test_kl_slope(name):
  value, slope = getattr(ref, name), getattr(ref, name + "_slope")
  for lp, lr in zip(*map(ref.flat, policies(8, 0.6)), strict=True):
    expected = (value(lp + STEP, lr) - value(lp - STEP, lr)) / (2 * STEP)
    assert slope(lp, lr) == near(expected, 1e-6)


def test_kl_k3_off_policy_slope():
  lo = ref.flat(policies(9, 0.6)[0])
  for lp, lr, old in zip(*map(ref.flat, policies(10, 0.6)), lo, strict=True):
    above, below = (ref.kl_k3_off_policy(lp + h, lr, old) for h in (STEP, -STEP))
    assert ref.kl_k3_off_policy_slope(lp, lr, old) == near((above - below) / (2 * STEP), 1e-6)


VECTOR_SLOPES = {
  "token_logprobs": lambda z: [2],
  "token_entropy": lambda z: None,
  "exact_kl": lambda z: [z[::-1]],
  "top_k_kl": lambda z: [z[::-1]],
}


@pytest.mark.parametrize("name", VECTOR_SLOPES)
def test_slopes_in_logits(name):
  constants = {"k": 2} if name == "top_k_kl" else {}
  value, slope = getattr(ref, name), getattr(ref, name + "_slope")
  for z in ref.flat(logits_rows(11))[:20]:
    other = VECTOR_SLOPES[name](z)
    others = () if other is None else (other,)

    def fn(z, others=others):
      return value([z], *others, temperature=0.7, **constants)

    # A central difference is exact to about epsilon / STEP = 2e-10 of the value, no better.
    expected = pytest.approx(pulled_by_differences(fn, z, [1.0]), rel=1e-6, abs=1e-8)
    assert slope([z], *others, temperature=0.7, **constants)[0] == expected


@pytest.mark.parametrize("name", ["PPO", "GSPO", "LUSPO", "GMPO", "SAPO", "KL_COV"])
def test_objective_gradient(name):
  """Of the objectives without a detached coefficient, by moving each log-prob."""
  row = ref.ALGORITHMS[name]
  lp, lo = policies(12, 2e-3 if name in ("GSPO", "LUSPO") else 0.3)
  a, w = normal(13), getattr(ref, row.loss_weights)(lp)
  selected = [[x > 0 for x in r] for r in normal(14)] if name == "KL_COV" else None

  def loss(lp):
    return ref.objective_loss(row, lp, lo, a, w, kl="kl_k3", ref_logprobs=lo, kl_coef=0.1,
                              selected=selected)  # fmt: skip

  step, gradients = 1e-7, loss(lp)[1]
  for i in (0, 3, 4, 8):
    for t in range(len(lp[i])):
      above, below = ([list(r) for r in lp] for _ in range(2))
      above[i][t] += step
      below[i][t] -= step
      expected = (loss(above)[0] - loss(below)[0]) / (2 * step)
      assert gradients[i][t] == pytest.approx(expected, rel=1e-5, abs=1e-7)
