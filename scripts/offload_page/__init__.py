"""The parts of scripts/make_offload.py: what is run, the bound, the rows, the tables and the sentences."""
