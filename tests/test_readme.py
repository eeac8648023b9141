"""The README tells the truth: its code runs, its table is the code's, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import algorithm_table

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^<!-- run -->\n```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def run(code: str) -> dict[str, Any]:
  """All blocks, one after another, as a reader would type them."""
  names: dict[str, Any] = {}
  before = jax.sharding.get_mesh()
  try:
    exec(compile(code, "README.md", "exec"), names)
    return names
  finally:
    jax.set_mesh(before)


def test_every_python_block_is_run():
  assert len(BLOCKS) == README.count("```python")


def test_the_code_runs_and_the_training_step_trains_the_same_on_eight_devices_and_on_one():
  eight = run("\n".join(BLOCKS))
  one = run("\n".join(BLOCKS).replace("jax.device_count()", "1"))
  assert (eight["mesh"].devices.size, one["mesh"].devices.size) == (8, 1)
  assert eight["params"]["head"].sharding.spec[-1] == "vocab"
  np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-4)
  for name in ("embed", "head"):
    got, want = (np.asarray(x["params"][name]) for x in (eight, one))
    np.testing.assert_allclose(got, want, atol=1e-5)
  # After a step of Adam the ratios of some, not all, responses have left GSPO's narrow band.
  assert 0 < float(eight["clipped"]["clipped"].mean()) < 1


def test_the_table_is_current():
  between = README.split(algorithm_table.TABLE_BEGINS)[1].split(algorithm_table.TABLE_ENDS)[0]
  assert between.strip() == algorithm_table.markdown(), "run `make tables`"


def test_links_lead_somewhere():
  root = Path(__file__).parents[1]
  for target in re.findall(r"\]\(([^)#:]+)\)", README):
    assert (root / target).exists(), target
