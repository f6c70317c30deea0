"""What C code prints while a solver runs does not reach standard output, where answers are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINTS = """
import ctypes, json, sys
import scipy.optimize
libc, milp = ctypes.CDLL(None), scipy.optimize.milp

def chatty(*given, **options):
    libc.printf(b"a line of the solver's\\n")  # which a pipe keeps in the C library's buffer
    return milp(*given, **options)

scipy.optimize.milp = chatty
from sim.solvers.knapsack import by_ilp
from sim.solvers.linear import LinearProgram
from sim.solvers.silence import off_stdout
print("before", flush=True)
libc.printf(b"of C itself\\n")
program = LinearProgram()
program.row([(program.column(cost=-1.0), 1.0)], most=0.5)
assert program.solve().fun == -0.5
assert by_ilp([1, 2], [3, 4], 2) == [False, True]
try:
    with off_stdout():
        libc.printf(b"before a fault\\n")
        raise ValueError
except ValueError:
    pass
print("after")
"""


def run(program: str) -> tuple[list[str], list[str]]:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.skipif(os.name != "posix", reason="the C library is reached as on POSIX systems")
def test_lines_of_a_solver_go_to_standard_error():
    out, err = run(PRINTS)
    assert out == ["before", "of C itself", "after"]
    assert err == ["a line of the solver's"] * 2 + ["before a fault"]


@pytest.mark.skipif(os.name != "posix", reason="the C library is reached as on POSIX systems")
def test_without_the_guard_they_would_soil_an_answer():
    unguarded = "import contextlib, sim.solvers.silence as s\ns.off_stdout = contextlib.nullcontext\n"
    out, err = run(unguarded + PRINTS)
    assert out.count("a line of the solver's") == 2
    assert err == []


THREADS = """
import threading
from sim.solvers.silence import off_stdout
inside, go = threading.Barrier(2), threading.Event()

def first():
    with off_stdout():
        inside.wait()
    go.set()

thread = threading.Thread(target=first)
thread.start()
with off_stdout():
    inside.wait()
    go.wait()
thread.join()
print("restored")
"""


def test_two_solvers_at_once_leave_standard_output_as_it_was():
    assert run(THREADS) == (["restored"], [])


def test_a_program_without_standard_output_solves_all_the_same():
    program = "import os\nos.close(1)\nfrom sim.solvers.knapsack import by_ilp\nassert by_ilp([1], [3], 2) == [True]"
    assert run(program) == ([], [])
