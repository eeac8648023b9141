"""Run as `python -m experiments.stories`."""

from configs.stories import CONFIGS
from experiments.harness import compilation_cache, run
from experiments.stories import main

compilation_cache.switch_on()
run.cli(main, CONFIGS)
