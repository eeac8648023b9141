"""Faults of several processes: here two on one machine, of two CPU devices each."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_lm.lm.checkpoints import Checkpoints

ROOT = Path(__file__).parents[1]


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


@pytest.mark.slow
def test_multihost_hang(tmp_path: Path) -> None:
  """What one process alone knows decides in both, or in none: they say the same and both end.

  Losses of 1 move a weight by -1; one NaN in the rows of process 1 moves none. A damaged leaf that
  process 1 finds is an error in both; a signal to process 1 at step 5 stops both at 5.
  jax-ml/jax#38503, deepqmc/deepqmc#248.
  """
  command = [sys.executable, "-m", "tests.two_processes", str(tmp_path), str(free_port())]
  workers = [
    subprocess.Popen(
      [*command, str(i)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for i in range(2)
  ]
  try:
    said = [worker.communicate(timeout=120) for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
  assert [worker.returncode for worker in workers] == [0, 0], said
  for output, _ in said:
    assert [line for line in output.splitlines() if not line.startswith("[Gloo]")] == [
      "updated -1.0 -1.0",
      "skipped 0.0 0.0",
      "restored 1 {'who': 'both'}",
      "refused True",
      "stopped 5 [2, 5]",
    ]
  # What two processes saved, one can read.
  target = {"w": np.zeros((8, 4), np.float32), "all": jax.ShapeDtypeStruct((), np.float32)}
  with Checkpoints(tmp_path) as checkpoints:
    got = checkpoints.restore(target).state
  np.testing.assert_array_equal(got["w"], np.arange(32).reshape(8, 4))
  assert got["all"] == 5
