"""`python -m sim` is `tiersim`."""

from sim.cli import program

program()
