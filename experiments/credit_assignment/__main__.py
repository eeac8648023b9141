"""Run as `python -m experiments.credit_assignment`."""

from configs.credit_assignment import CONFIGS
from experiments.credit_assignment import main
from experiments.harness import run

run.cli(main, CONFIGS)
