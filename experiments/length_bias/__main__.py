"""Run as `python -m experiments.length_bias`."""

from configs.length_bias import CONFIGS
from experiments.harness import run
from experiments.length_bias import main

run.cli(main, CONFIGS)
