"""Sweeps: thousands of runs from one study; no finished cell is lost.

    from sim import sweep
    table = sweep("study.toml", out="results", jobs=4)

`study` reads what to run, `cell` runs one, `execute` runs many, `store` keeps them, `frame` and `index` show them.
"""

from sim.sweeps.axes import StudyError
from sim.sweeps.frame import frame, write_csv, write_parquet
from sim.sweeps.index import query
from sim.sweeps.store import Store, StoreError
from sim.sweeps.study import Cell, Study, load_study
from sim.sweeps.sweep import Progress, Swept, run_sweep, sweep

__all__ = [
    "Cell",
    "Progress",
    "Store",
    "StoreError",
    "Study",
    "StudyError",
    "Swept",
    "frame",
    "load_study",
    "query",
    "run_sweep",
    "sweep",
    "write_csv",
    "write_parquet",
]
