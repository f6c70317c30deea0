"""Small results of the libraries under the engine and the solvers: where a release gives the same, answers stand.

A release's own number says too much: most patches change no result of this program, and each would make every saved
answer look stale.
"""

from __future__ import annotations

import contextlib
import hashlib
from functools import cache

import numpy as np

STEP = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 16, "n_positions": 8}
"""The model of a training step that takes milliseconds."""


@cache
def engine_results() -> str:
    """A hash of the logs of two runs: one replayed event by event, under pressure, and one at once."""
    from sim.experiment import simulate
    from sim.hardware.profile import load_profile
    from workloads.transformer import transformer

    trace, platform = transformer(STEP, batch=2, sequence=8), load_profile("mt3000_survey")
    whole = simulate(trace, platform, "keep_all")
    pressed = simulate(trace, platform, "dtr", budget=whole.summary()["peak_bytes"] * 19 // 20)
    tables = [table for run in (whole, pressed) for table in (run.log.intervals, run.log.changes)]
    return hashlib.sha256(b"".join(table.tobytes() for table in tables)).hexdigest()


@cache
def solver_results() -> str:
    """What each installed solver chooses of a knapsack that has several best answers."""
    value = np.array([6, 10, 12, 6, 10, 12, 9, 9, 15, 15, 7, 7])
    weight = np.array([1, 2, 3, 1, 2, 3, 2, 2, 4, 4, 2, 2])
    found = []
    with contextlib.suppress(ImportError):
        from scipy.optimize import Bounds, LinearConstraint, linprog, milp

        within = LinearConstraint(weight[None, :], ub=13)
        found.append(np.rint(milp(-value, constraints=within, bounds=Bounds(0, 1), integrality=np.ones(12)).x).tolist())
        found.append(np.round(linprog(-value, A_ub=weight[None, :], b_ub=13, bounds=(0, 1)).x, 6).tolist())
    with contextlib.suppress(ImportError):
        from ortools.sat.python import cp_model

        model, solver = cp_model.CpModel(), cp_model.CpSolver()
        chosen = [model.new_bool_var(f"x{i}") for i in range(12)]
        model.add(sum(int(w) * x for w, x in zip(weight, chosen, strict=True)) <= 13)
        model.maximize(sum(int(v) * x for v, x in zip(value, chosen, strict=True)))
        solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
        solver.solve(model)
        found.append([solver.value(x) for x in chosen])
    return repr(found)
