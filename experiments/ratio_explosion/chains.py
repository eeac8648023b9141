"""What `experiments.ratio_explosion` measures on Markov chains and on real responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import jaxrl_lm as rl
from configs.ratio_explosion import Bands, Chain, Rollouts
from jaxrl_lm.exact import chains
from jaxrl_lm.exact import ratio_distributions as distributions
from jaxrl_lm.exact.chains import MarkovChain

TRAINERS = {"float32 trainer": "logp_f32", "bfloat16 trainer": "logp_bf16"}


def pair(chain: Chain, rate: float) -> tuple[MarkovChain, MarkovChain]:
  """Behaviour, and the target at this KL per token from it."""
  rng = np.random.default_rng(chain.seed)
  size = chain.vocabulary
  rows = np.log(rng.dirichlet(np.full(size, chain.concentration), size=size + 1))
  behaviour = MarkovChain(rows[0], rows[1:])
  direction = np.random.default_rng(chain.direction_seed).normal(size=rows.shape)
  return behaviour, chains.at_kl_rate(behaviour, direction[0], direction[1:], rate=rate)


def edges(width: tuple[float, float]) -> np.ndarray:
  """[2] log-ratios at the ends of the band [1 - low, 1 + high]."""
  return np.log1p([-width[0], width[1]])


def response_edges(bands: Bands, length: int) -> dict[str, np.ndarray]:
  """Bands on a whole response: their edges in terms of log rho, nats."""
  clip = edges(bands.clip)
  return {
    "sequence": clip,
    "root": clip * np.sqrt(length / bands.root_length),
    "GSPO": length * edges(bands.gspo),
    "LUSPO": length * edges(bands.luspo),
  }


def chain_moments(chain: Chain, rate: float) -> dict[str, Any]:
  """Moments of rho and of log rho; arrays [L] over the lengths."""
  behaviour, target = pair(chain, rate)
  at = np.asarray(chain.lengths) - 1
  horizon = max(chain.lengths)
  first, second = (chains.log_moments(behaviour, target, k, horizon=horizon) for k in (1, 2))
  mean, variance = chains.log_ratio_moments(behaviour, target, horizon=horizon)
  # Of all first tokens and transitions: no token of any response is beyond these.
  token = np.exp(np.concatenate([(p - q).ravel() for p, q in zip(target, behaviour, strict=True)]))
  return {
    "log_first_moment": first[at],
    "log_second_moment": second[at],
    "mean": mean[at],
    "variance": variance[at],
    "growth": float(second[-1] - second[-2]),
    "perron": chains.log_moment_rate(behaviour, target, 2),
    "token_ratios": np.array([token.min(), token.max()]),
  }


def chain_clipping(chain: Chain, bands: Bands, rate: float) -> dict[str, np.ndarray]:
  """Fractions [L, 2] below and above each band; of tokens for token and prefix."""
  behaviour, target = pair(chain, rate)
  low, high = edges(bands.clip)
  result: dict[str, list[Any]] = {}
  for length in chain.lengths:
    points = response_edges(bands, length)
    cdf, _ = distributions.log_ratio_cdf(
      behaviour, target, length, np.stack(list(points.values())), resolution=chain.resolution
    )
    found = dict(zip(points, np.stack([cdf[:, 0], 1 - cdf[:, 1]], axis=1), strict=True))
    token = distributions.token_band(behaviour, target, length, low, high)
    prefix = distributions.prefix_band(
      behaviour, target, length, low, high, resolution=chain.resolution
    )
    found |= {"token": (token.below, token.above), "prefix": (prefix.below, prefix.above)}
    for name, fractions in found.items():
      result.setdefault(name, []).append(fractions)
  return {name: np.array(fractions) for name, fractions in result.items()}


def gates(chain: Chain, bands: Bands, rate: float) -> dict[str, np.ndarray]:
  """Fractions [L, 2] of responses below and above the bands, up to great lengths."""
  behaviour, target = pair(chain, rate)
  result: dict[str, list[Any]] = {"sequence": [], "GSPO": [], "LUSPO": []}
  for length in chain.gate_lengths:
    points = response_edges(bands, length)
    cdf, _ = distributions.log_ratio_cdf(
      behaviour,
      target,
      length,
      np.stack([points[name] for name in result]),
      resolution=chain.resolution,
    )
    for fractions, (below, inside) in zip(result.values(), cdf, strict=True):
      fractions.append((below, 1 - inside))
  return {name: np.array(fractions) for name, fractions in result.items()}


def gate_length(rate: float, width: tuple[float, float]) -> float:
  """Tokens after which the spread of log rho / T is its distance from the low edge of the band.

  The spread is sqrt(2 KL / T), the mean -KL.
  """
  return 2 * rate / (rate + float(edges(width)[0])) ** 2


def rollouts(settings: Rollouts, bands: Bands, path: Path) -> dict[str, Any]:
  """Of both trainers against the sampler: KL, growth of Var log rho, clipping, sample size."""
  with np.load(path) as data:
    mask = data["mask"]
    sampler = data["logp_sampler_bf16w"].astype(np.float64)
    trainers = {name: data[key].astype(np.float64) for name, key in TRAINERS.items()}
  return {name: _mismatch(settings, bands, x, sampler, mask) for name, x in trainers.items()}


def _mismatch(
  settings: Rollouts, bands: Bands, trainer: np.ndarray, sampler: np.ndarray, mask: np.ndarray
) -> dict[str, Any]:
  rng = np.random.default_rng(settings.seed)
  tokens = mask.sum(axis=1)
  draws = rng.integers(0, len(mask), (settings.resamples, len(mask)))
  log_ratio = np.asarray(rl.token_log_ratio(trainer, sampler, mask))
  prefix = np.asarray(rl.per_prefix(log_ratio, mask))
  # KL(sampler || trainer) from its own samples: unbiased, and unbiased with little variance.
  per_row = {
    "k1": np.asarray(rl.kl_k1(sampler, trainer, mask)).sum(axis=1),
    "k3": np.asarray(rl.kl_k3(sampler, trainer, mask)).sum(axis=1),
    "square": (log_ratio**2).sum(axis=1),
    "sum": log_ratio.sum(axis=1),
  }

  def token_variance(rows: np.ndarray) -> np.ndarray:
    """[...] Var of a token's log-ratio, from rows [..., n]."""
    total = tokens[rows].sum(axis=-1)
    mean = per_row["sum"][rows].sum(axis=-1) / total
    return per_row["square"][rows].sum(axis=-1) / total - mean**2

  result: dict[str, Any] = {"largest": float(np.abs(log_ratio).max()), "tokens": int(tokens.sum())}
  for name in ("k1", "k3"):
    by_draw = per_row[name][draws].sum(axis=1) / tokens[draws].sum(axis=1)
    result[name] = np.array([per_row[name].sum() / tokens.sum(), *_interval(by_draw)])
  result["token_variance"] = np.array(
    [token_variance(np.arange(len(mask))), *_interval(token_variance(draws))]
  )
  by_length: dict[str, list[Any]] = {}
  for length in settings.lengths:
    rows = np.flatnonzero(tokens >= length)
    total = prefix[rows, length - 1]
    chosen = rows[rng.integers(0, len(rows), (settings.resamples, len(rows)))]
    resampled = prefix[chosen, length - 1]
    spread = total.var(ddof=1) / (length * token_variance(rows))
    resampled_spread = resampled.var(axis=1, ddof=1) / (length * token_variance(chosen))
    first = log_ratio[:, :length]
    correlation = total.var(ddof=1) / first[rows].var(axis=0, ddof=1).sum()
    resampled_correlation = resampled.var(axis=1, ddof=1) / _summed_variance(first, chosen)
    weights = np.exp(total)
    row = {
      "rows": len(rows),
      "variance": (total.var(ddof=1), *_interval(resampled.var(axis=1, ddof=1))),
      "spread": (spread, *_interval(resampled_spread)),
      "correlation": (correlation, *_interval(resampled_correlation)),
      "mean": (total.mean(), *_interval(resampled.mean(axis=1))),
      "sample_size": weights.sum() ** 2 / np.sum(weights**2) / len(rows),
    }
    ends = edges(bands.clip)
    seen = {"token": log_ratio[rows, :length], "prefix": prefix[rows, :length]}
    seen_edges = {"token": ends, "prefix": ends} | response_edges(bands, length)
    for band, (low, high) in seen_edges.items():
      values = seen.get(band, total)
      row[band] = (np.mean(values < low), np.mean(values > high))
    for name, value in row.items():
      by_length.setdefault(name, []).append(value)
  return result | {name: np.array(values) for name, values in by_length.items()}


def _summed_variance(values: np.ndarray, draws: np.ndarray) -> np.ndarray:
  """[D] sum over positions of the variance over rows, of each draw of rows [D, n]."""
  counts = np.stack([np.bincount(draw, minlength=len(values)) for draw in draws])
  number = draws.shape[1]
  mean, square = (counts @ x / number for x in (values, values**2))
  return np.sum(square - mean**2, axis=1) * number / (number - 1)


def _interval(values: np.ndarray) -> np.ndarray:
  """95 % of resampled values."""
  return np.quantile(values, [0.025, 0.975])
