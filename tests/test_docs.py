"""The code in docs/ runs, and shows what the text says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxrl_lm as rl
from jaxrl_lm import exact

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^<!-- run -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def laboratory() -> dict[str, Any]:
  """The names that the code of laboratory.md leaves behind."""
  text = (DOCS / "laboratory.md").read_text()
  blocks = BLOCK.findall(text)
  assert len(blocks) == text.count("```python")
  names: dict[str, Any] = {}
  before = jax.config.jax_enable_x64
  try:
    exec(compile("\n".join(blocks), "laboratory.md", "exec"), names)
  finally:
    jax.config.update("jax_enable_x64", before)
  return names


def test_the_laboratory_shows_what_its_page_says(laboratory: dict[str, Any]) -> None:
  exact, robust, policy = (laboratory[name] for name in ("exact", "robust", "policy"))
  with jax.enable_x64(True):
    binary = exact.bias_variance(robust, policy, laboratory["rewards"], group_size=8)
  np.testing.assert_allclose(binary.cosine, 1.0, rtol=1e-12)
  biased = laboratory["mine"].rescaled().relative_bias  # with partial credit
  assert np.all((biased > 1e-5) & (biased < 0.05))
  assert np.all(laboratory["rloo"].relative_bias < 1e-12)
  assert np.all(laboratory["found"].cosine > 0.85)  # of the surrogate that is not in the table


@pytest.mark.slow
def test_a_sampled_response_is_scored_and_trained_on_as_the_page_says() -> None:
  text = (DOCS / "lm.md").read_text()
  blocks = BLOCK.findall(text)
  assert len(blocks) == text.count("```python")
  names: dict[str, Any] = {}
  exec(compile("\n".join(blocks), "lm.md", "exec"), names)
  samples, gradient = names["samples"], jax.tree.leaves(names["gradient"])
  assert samples.tokens.shape == (8, 12)
  np.testing.assert_allclose(names["log_ratio"], 0.0, atol=1e-5)
  assert all(np.isfinite(x).all() for x in gradient)
  assert any(np.abs(x).max() > 1e-4 for x in gradient)


def test_links_lead_somewhere() -> None:
  for page in DOCS.glob("*.md"):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
      assert (DOCS / target).exists(), (page.name, target)


def test_the_map_names_what_exists() -> None:
  text = (DOCS / "map.md").read_text()
  functions = re.findall(r"`(rl|exact)\.(\w+)`", text)
  assert len(functions) > 25
  room = {"rl": rl, "exact": exact}
  assert [name for home, name in functions if name not in room[home].__all__] == []
  experiments = set(re.findall(r"experiments\.(\w+)", text)) - {"md"}
  assert [name for name in experiments if not importlib.util.find_spec(f"experiments.{name}")] == []
  rows = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("| ")]
  assert len(rows) == 1 + 13
  assert all(len(row) == 6 and all(cell.strip() for cell in row) for row in rows)
