"""Run as `python -m experiments.token_vs_sequence`."""

from configs.token_vs_sequence import CONFIGS
from experiments.harness import run
from experiments.token_vs_sequence import main

run.cli(main, CONFIGS)
