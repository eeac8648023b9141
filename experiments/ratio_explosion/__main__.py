"""Run as `python -m experiments.ratio_explosion`."""

from configs.ratio_explosion import CONFIGS
from experiments.harness import run
from experiments.ratio_explosion import main

run.cli(main, CONFIGS)
