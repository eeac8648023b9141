"""A GRPO step of a small transformer in PyTorch, written plainly: eager, float32, on the CPU.

The same model, sizes and mathematics as the step of `jaxrl_lm.lm.training` that `benchmarks.
training` times: responses drawn with a cache of keys and values, rewards, advantages of groups,
old log-probs by one forward pass, then AdamW on the clipped loss of each minibatch. It does less:
it keeps no log-probs of the sampler, no entropy and no metrics, and knows of no padding.

As a program it reads sizes, parameters and a batch from a folder, says what it is, and answers
each line of its input: "check" with the errors of loss and gradient on that batch, a number of
threads with the seconds of one step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

CLIP, MAX_NORM, EPS = 0.2, 1.0, 1e-6
Keys = list[tuple[Tensor, Tensor]]  # keys and values [B, H, S, D] of each layer


class Network(nn.Module):
  """The parameters under the names that `jaxrl_lm` has for them, with dots for levels."""

  def __init__(self, sizes: dict[str, Any], weights: dict[str, np.ndarray]):
    super().__init__()
    self.sizes = sizes
    self.weights = nn.ParameterDict(
      {name.replace(".", "/"): nn.Parameter(torch.from_numpy(x)) for name, x in weights.items()}
    )
    half = np.arange(0, sizes["head_dim"], 2) / sizes["head_dim"]
    angles = np.outer(np.arange(sizes["max_length"]), sizes["theta"] ** -half)
    self.cos, self.sin = (torch.tensor(f(angles), dtype=torch.float32) for f in (np.cos, np.sin))

  def forward(self, tokens: Tensor, start: int = 0, cache: Keys | None = None) -> Tensor:
    """Hidden states [B, T, D]; keys and values are written into the cache from `start` on."""
    x = self.weights["embedding"][tokens]
    for i in range(self.sizes["num_layers"]):
      layer = f"layers/{i}/"
      y = self._normalised(x, layer + "attention_norm/scale")
      x = x + self._attention(y, layer + "attention/", start, cache and cache[i])
      y = self._normalised(x, layer + "mlp_norm/scale")
      gate, up = self._linear(y, layer + "mlp/gate"), self._linear(y, layer + "mlp/up")
      x = x + self._linear(silu(gate) * up, layer + "mlp/down")
    return self._normalised(x, "norm/scale")

  def logits(self, hidden: Tensor) -> Tensor:
    return linear(hidden, self.weights["embedding"])

  def _normalised(self, x: Tensor, name: str) -> Tensor:
    return rms_norm(x, x.shape[-1:], self.weights[name], self.sizes["norm_eps"])

  def _linear(self, x: Tensor, name: str) -> Tensor:
    return x @ self.weights[f"{name}/kernel"]

  def _attention(
    self, x: Tensor, name: str, start: int, cache: tuple[Tensor, Tensor] | None
  ) -> Tensor:
    rows, count, _ = x.shape
    stop = start + count

    def heads(part: str) -> Tensor:
      y = self._linear(x, name + part)
      return y.view(rows, count, -1, self.sizes["head_dim"]).transpose(1, 2)

    queries, keys = (self._rotated(heads(x), start) for x in ("query", "key"))
    values = heads("value")
    if cache is not None:
      cache[0][:, :, start:stop], cache[1][:, :, start:stop] = keys, values
      keys, values = cache[0][:, :, :stop], cache[1][:, :, :stop]
    out = scaled_dot_product_attention(queries, keys, values, is_causal=count > 1)
    return self._linear(out.transpose(1, 2).reshape(rows, count, -1), name + "output")

  def _rotated(self, x: Tensor, start: int) -> Tensor:
    cos, sin = (table[start : start + x.shape[2]] for table in (self.cos, self.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def sample(network: Network, prompts: Tensor, count: int) -> Tensor:
  """[B, count] tokens at temperature 1."""
  rows, width = prompts.shape
  sizes = network.sizes
  shape = (rows, sizes["num_heads"], width + count, sizes["head_dim"])
  cache = [(torch.empty(shape), torch.empty(shape)) for _ in range(sizes["num_layers"])]
  drawn: list[Tensor] = []
  hidden = network(prompts, 0, cache)
  for i in range(count):
    probabilities = network.logits(hidden[:, -1]).softmax(-1)
    drawn.append(torch.multinomial(probabilities, 1))
    if i + 1 < count:
      hidden = network(drawn[-1], width + i, cache)
  return torch.cat(drawn, dim=1)


def score(network: Network, prompts: Tensor, tokens: Tensor) -> Tensor:
  """[B, T] log-probs of the responses."""
  hidden = network(torch.cat([prompts, tokens], dim=1))
  before = hidden[:, prompts.shape[1] - 1 : -1]
  logprobs = network.logits(before).log_softmax(-1)
  return logprobs.gather(-1, tokens[..., None])[..., 0]


def clipped_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
  """Mean over the tokens of a response, then over responses, which are all of one length."""
  ratio = (logprobs - old_logprobs).exp()
  gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
  return -gain.mean()


class Loop:
  """The policy, its optimiser, and one step of training."""

  def __init__(self, sizes: dict[str, Any], weights: dict[str, np.ndarray], prompts: np.ndarray):
    self.sizes = sizes
    self.network = Network(sizes, weights)
    self.optimizer = torch.optim.AdamW(
      self.network.parameters(), lr=sizes["learning_rate"], eps=1e-8, weight_decay=0.0
    )
    self.prompts = torch.from_numpy(prompts).long()
    self.random = np.random.default_rng(0)

  def step(self) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of each part."""
    sizes, seconds = self.sizes, {}
    with _timed(seconds, "sampling"):
      chosen = self.random.permutation(len(self.prompts))[: sizes["num_prompts"]]
      prompts = self.prompts[chosen].repeat_interleave(sizes["group_size"], dim=0)
      tokens = sample(self.network, prompts, sizes["max_new_tokens"])
      rewards = torch.from_numpy((tokens.numpy() % 2 == 0).mean(1, dtype=np.float32))
    with _timed(seconds, "scoring"):
      with torch.no_grad():
        old = score(self.network, prompts, tokens)
      groups = rewards.view(-1, sizes["group_size"])
      centred = groups - groups.mean(1, keepdim=True)
      advantages = (centred / (groups.std(1, keepdim=True) + EPS)).view(-1, 1)
    with _timed(seconds, "update"):
      order = torch.from_numpy(self.random.permutation(len(groups)))
      for part in order.chunk(sizes["minibatches"]):
        rows = (part[:, None] * sizes["group_size"] + torch.arange(sizes["group_size"])).view(-1)
        self._update(prompts[rows], tokens[rows], old[rows], advantages[rows])
    return seconds

  def _update(self, prompts: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor) -> None:
    self.optimizer.zero_grad()
    clipped_loss(score(self.network, prompts, tokens), old, advantages).backward()
    nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)
    self.optimizer.step()

  def errors(self, batch: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[float]:
    """Of the loss, and the largest of the gradients', relative to the largest number of each."""
    prompts, tokens = (torch.from_numpy(batch[x]).long() for x in ("prompts", "tokens"))
    old, advantages = (torch.from_numpy(batch[x]) for x in ("old_logprobs", "advantages"))
    self.optimizer.zero_grad()
    loss = clipped_loss(score(self.network, prompts, tokens), old, advantages)
    loss.backward()
    gradients = {x.replace("/", "."): p.grad.numpy() for x, p in self.network.weights.items()}
    self.optimizer.zero_grad()
    largest = [np.abs(g - wanted[x]).max() / np.abs(wanted[x]).max() for x, g in gradients.items()]
    of_loss = abs(loss.item() - batch["loss"]) / abs(batch["loss"])
    return [float(of_loss), float(max(largest))]


@contextmanager
def _timed(seconds: dict[str, tuple[float, float]], name: str) -> Iterator[None]:
  wall, cpu = time.perf_counter(), time.process_time()
  yield
  seconds[name] = time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
  folder = Path(sys.argv[1])
  sizes = json.loads((folder / "sizes.json").read_text())
  weights, wanted, batch = (
    dict(np.load(folder / f"{name}.npz")) for name in ("weights", "gradient", "batch")
  )
  torch.manual_seed(0)
  loop = Loop(sizes, weights, batch["all_prompts"])
  print(json.dumps(f"torch {torch.__version__}"), flush=True)
  for line in sys.stdin:
    question = json.loads(line)
    if question == "check":
      print(json.dumps(loop.errors(batch, wanted)), flush=True)
    else:
      torch.set_num_threads(question)
      print(json.dumps(loop.step()), flush=True)


if __name__ == "__main__":
  main()
