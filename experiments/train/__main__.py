"""Run as `python -m experiments.train`."""

from experiments.train.command import command

command()
