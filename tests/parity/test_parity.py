"""Every recorded result of six libraries: reproduced in value and gradient, or an exception."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity import compositions, exceptions, report, results

RECORDS = results.all_records()
COVERED = [key for key, record in RECORDS.items() if compositions.of(record) is not None]
REPRODUCED = [key for key in COVERED if key not in exceptions.BY_RECORD]


@pytest.mark.parametrize("record_id", REPRODUCED)
def test_a_record_is_reproduced(record_id):
  errors = results.errors(record_id)
  assert errors, "the record has no result to compare with"
  tolerance = results.tolerance(record_id)
  assert max(errors.values()) <= tolerance, f"{errors} > {tolerance}: {RECORDS[record_id].settings}"


@pytest.mark.parametrize("record_id", COVERED)
def test_the_gradient_at_masked_positions_is_exactly_zero(record_id):
  record = RECORDS[record_id]
  for name, value in results.outputs(record_id).items():
    if name.startswith("grad") and name != "grad_weight" and record.rows:
      off = ~record.inputs["mask"]
      np.testing.assert_array_equal(np.asarray(value)[off], 0.0, err_msg=name)


@pytest.mark.parametrize("record_id", exceptions.BY_RECORD)
def test_an_exception_is_one_and_ours_is_right(record_id):
  assert not results.reproduced(record_id), "reproduced after all: take it off the list"
  ours = {name: np.asarray(value) for name, value in results.outputs(record_id).items()}
  assert all(np.all(np.isfinite(value)) for value in ours.values())
  exceptions.BY_RECORD[record_id].right(RECORDS[record_id], ours)


def test_exceptions_are_few():
  assert set(exceptions.BY_RECORD) <= set(COVERED)
  assert len(exceptions.BY_RECORD) == sum(len(cause.ids) for cause in exceptions.CAUSES)
  assert len(exceptions.BY_RECORD) <= 0.05 * len(COVERED)
  left_out = {compositions.NO_FUNCTION[r.function] for k, r in RECORDS.items() if k not in COVERED}
  assert left_out == {
    "V-trace", "n-step returns", "optimal token baseline", "cosine similarity"
  }  # fmt: skip


def test_the_table_in_the_docs_is_current():
  assert report.PATH.read_text() == report.text(), "run `python -m tests.parity.report`"
