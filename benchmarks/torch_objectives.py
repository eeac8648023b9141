"""The named objectives written plainly in PyTorch: what a user would write by hand.

Eager, float32, autograd; one formula per line, as in the papers; a value of a sequence keeps a
time axis of 1. Masked positions must hold finite numbers, and weigh nothing: there is none of
the care that `jaxrl_lm` takes. A yardstick of speed for `benchmarks.objectives`, which checks that
value and gradient agree before it times them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
  """One update batch, [P, G, T] each; advantages also [P, G, 1]."""

  logprobs: Tensor
  old_logprobs: Tensor
  advantages: Tensor
  mask: Tensor
  loss_weights: Tensor
  selected: Tensor | None = None
  segment_ids: Tensor | None = None  # 1, 2, ... from left to right


# Levels: batch -> log-ratio.


def token(batch: Batch) -> Tensor:
  return batch.logprobs - batch.old_logprobs


def prefix(batch: Batch) -> Tensor:
  log_ratio = token(batch) * batch.mask
  if batch.segment_ids is None:
    return log_ratio.cumsum(-1)
  totals = _segment_totals(log_ratio, batch.segment_ids)
  before = totals.cumsum(-1) - totals
  return log_ratio.cumsum(-1) - before.gather(-1, batch.segment_ids)


def sequence(batch: Batch) -> Tensor:
  log_ratio = token(batch) * batch.mask
  if batch.segment_ids is None:
    return log_ratio.sum(-1, keepdim=True)
  return _segment_totals(log_ratio, batch.segment_ids).gather(-1, batch.segment_ids)


def geometric(batch: Batch) -> Tensor:
  return sequence(batch) / _lengths(batch)


def with_token_gradient(level: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
  return level(batch).detach() + batch.logprobs - batch.logprobs.detach()


def _segment_totals(x: Tensor, segment_ids: Tensor) -> Tensor:
  """[..., S + 1], the sum of each segment."""
  shape = (*x.shape[:-1], int(segment_ids.max()) + 1)
  return torch.zeros(shape, dtype=x.dtype).scatter_add(-1, segment_ids, x)


def _lengths(batch: Batch) -> Tensor:
  if batch.segment_ids is None:
    return batch.mask.sum(-1, keepdim=True).clamp(min=1)
  counts = _segment_totals(batch.mask.float(), batch.segment_ids)
  return counts.gather(-1, batch.segment_ids).clamp(min=1)


# Gains: batch -> what is weighted and summed.


def reinforce(batch: Batch) -> Tensor:
  return batch.advantages * batch.logprobs


def ppo_clip(batch: Batch, low: float, high: float, level: Callable = token) -> Tensor:
  ratio = level(batch).exp()
  clipped = ratio.clamp(1 - low, 1 + high)
  return torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def dual_clip(batch: Batch, low: float, high: float, cap: float) -> Tensor:
  gain = ppo_clip(batch, low, high)
  return torch.where(batch.advantages < 0, torch.maximum(gain, cap * batch.advantages), gain)


def clip_cov(batch: Batch, low: float, high: float) -> Tensor:
  return ppo_clip(batch, low, high) * ~batch.selected


def kl_cov(batch: Batch, kl_coef: float) -> Tensor:
  log_ratio = token(batch)
  return log_ratio.exp() * batch.advantages - kl_coef * log_ratio.abs() * batch.selected


def sapo(batch: Batch, tau_pos: float, tau_neg: float) -> Tensor:
  tau = torch.where(batch.advantages > 0, tau_pos, tau_neg)
  gate = torch.sigmoid(tau * (token(batch).exp() - 1))
  return batch.advantages * (4 / tau) * gate


def gmpo(batch: Batch, low: float, high: float) -> Tensor:
  log_ratio = token(batch)
  positive = batch.advantages > 0
  clipped = torch.where(positive, log_ratio.clamp(max=high), log_ratio.clamp(min=-low)) * batch.mask
  if batch.segment_ids is None:
    total = clipped.sum(-1, keepdim=True)
  else:
    total = _segment_totals(clipped, batch.segment_ids).gather(-1, batch.segment_ids)
  return batch.advantages * (total / _lengths(batch)).exp()


def cispo(batch: Batch, highest: float) -> Tensor:
  weight = token(batch).detach().exp().clamp(max=highest)
  return weight * batch.advantages * batch.logprobs


def topr(batch: Batch) -> Tensor:
  ratio = sequence(batch).detach().exp().clamp(max=1)
  return torch.where(batch.advantages > 0, 1.0, ratio) * batch.advantages * batch.logprobs


def vespo(batch: Batch, k_pos: float, lam_pos: float, k_neg: float, lam_neg: float) -> Tensor:
  log_ratio = sequence(batch).detach()
  positive = batch.advantages >= 0
  power, decay = torch.where(positive, k_pos, k_neg), torch.where(positive, lam_pos, lam_neg)
  weight = (power * log_ratio + decay * (1 - log_ratio.exp())).exp()
  return weight * batch.advantages * batch.logprobs


def dro(batch: Batch, beta: float) -> Tensor:
  log_ratio = sequence(batch)
  score = log_ratio + (batch.logprobs - log_ratio).detach()
  return batch.advantages * score - beta / 2 * log_ratio**2


@torch.no_grad()
def _tv(batch: Batch) -> Tensor:
  return batch.logprobs.exp() - batch.old_logprobs.exp()


@torch.no_grad()
def _signed_kl(batch: Batch) -> Tensor:
  log_ratio, p, old_p = token(batch), batch.logprobs.exp(), batch.old_logprobs.exp()
  kl = (1 - old_p) * (torch.log1p(-old_p) - torch.log1p(-p)) - old_p * log_ratio
  return torch.where(log_ratio > 0, kl, -kl)


def dppo(batch: Batch, divergence: Callable[[Batch], Tensor], width: float) -> Tensor:
  moved = divergence(batch)
  keep = torch.where(batch.advantages > 0, moved <= width, moved >= -width)
  weight = token(batch).detach().exp() * keep
  return weight * batch.advantages * batch.logprobs


PPO = partial(ppo_clip, low=0.2, high=0.2)

GAINS: dict[str, Callable[[Batch], Tensor]] = {
  **dict.fromkeys(("GRPO", "DR_GRPO", "BNPO", "PPO"), PPO),
  **dict.fromkeys(("REINFORCE_PP", "REINFORCE_PP_BASELINE"), PPO),
  **dict.fromkeys(("REINFORCE", "RLOO", "REMAX", "OPO", "GPG"), reinforce),
  "DAPO": partial(ppo_clip, low=0.2, high=0.28),
  "GSPO": partial(ppo_clip, low=3e-4, high=4e-4, level=geometric),
  "GSPO_TOKEN": partial(
    ppo_clip, low=3e-4, high=4e-4, level=partial(with_token_gradient, geometric)
  ),
  "LUSPO": partial(ppo_clip, low=2e-3, high=2.5e-3, level=geometric),
  "GMPO": partial(gmpo, low=0.4, high=0.4),
  "CISPO": partial(cispo, highest=5.0),
  "SAPO": partial(sapo, tau_pos=1.0, tau_neg=1.05),
  "VESPO": partial(vespo, k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0),
  "DPPO_TV": partial(dppo, divergence=_tv, width=0.2),
  "DPPO_KL": partial(dppo, divergence=_signed_kl, width=0.05),
  "CLIP_COV": partial(clip_cov, low=0.2, high=0.2),
  "KL_COV": partial(kl_cov, kl_coef=1.0),
  "TOPR": topr,
  "DRO": partial(dro, beta=0.1),
  "DUAL_CLIP_PPO": partial(dual_clip, low=0.2, high=0.2, cap=3.0),
  "per_prefix": partial(PPO, level=prefix),
  "per_sequence": partial(PPO, level=sequence),
  "per_sequence_geometric": partial(PPO, level=geometric),
}


def loss_and_gradient(name: str, batch: Batch) -> tuple[Tensor, Tensor]:
  """Loss of the objective and its gradient in every token's log-prob."""
  logprobs = batch.logprobs.detach().requires_grad_()
  loss = -(batch.loss_weights * GAINS[name](batch._replace(logprobs=logprobs))).sum()
  return loss.detach(), torch.autograd.grad(loss, logprobs)[0]
