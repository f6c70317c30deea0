"""Settings of all tests: Hypothesis has no deadline (the machine may be busy) and leaves no database behind."""

import matplotlib
from hypothesis import settings

matplotlib.use("Agg")
settings.register_profile("tiersim", deadline=None, database=None, derandomize=True)
settings.load_profile("tiersim")
