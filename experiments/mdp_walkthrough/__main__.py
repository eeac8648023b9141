"""Run as `python -m experiments.mdp_walkthrough`."""

from configs.mdp_walkthrough import CONFIGS
from experiments.harness import run
from experiments.mdp_walkthrough import main

run.cli(main, CONFIGS)
