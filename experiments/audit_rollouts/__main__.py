"""Run as `python -m experiments.audit_rollouts FILES...`."""

from experiments.audit_rollouts import command

command.cli()
