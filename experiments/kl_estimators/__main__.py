"""Run as `python -m experiments.kl_estimators`."""

from configs.kl_estimators import CONFIGS
from experiments.harness import run
from experiments.kl_estimators import main

run.cli(main, CONFIGS)
