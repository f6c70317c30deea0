"""A million ops: loaded, replayed under keep_all and summarised in 15 s within 1.2 GB, in a process of its own.

GPT-3 on 64 devices: laid out, planned and replayed in 20 s within 2 GB.
"""

import json
import subprocess
import sys

import pytest

from tests.clocks import least

BUILD = """
import sys
from sim.trace import TraceBuilder
from sim.trace.io import save
b = TraceBuilder()
last = b.tensor("x", 4096, "input")
held = []
for i in range({ops}):
    made = b.tensor(f"t{{i}}", 4096 + i % 7 * 512)
    reads = [last] if i % 3 else [last, held[-1] if held else last]
    b.op(f"op{{i}}", "matmul", reads=list(dict.fromkeys(reads)), writes=[made], flops=1000 * (i % 11), layer=i // 1000)
    if i % 5 == 0:
        held.append(made)
    last = made
save(b.build(), sys.argv[1])
"""

MEASURE = """
import json, resource, sys, time
import simpy
from sim.analysis.summary import summarize
from sim.engine.replay import replay
from sim.hardware.profile import load_profile
from sim.plan import Plan
from sim.trace.io import load
began = time.process_time()
trace = load(sys.argv[1])
loaded = time.process_time()
log = replay(Plan(trace), load_profile("a100_80_sxm"))
replayed = time.process_time()
figures = summarize(log)
done = time.process_time()
env = simpy.Environment()
def bare():
    for _ in range(100_000):
        yield env.timeout(1)
env.process(bare())
env.run()
bare_us = (time.process_time() - done) * 10
try:  # ru_maxrss of a child begins with what its parent held when it was started
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = dict(ops=len(trace.ops), load_s=loaded - began, replay_s=replayed - loaded, summary_s=done - replayed)
print(json.dumps(dict(**found, peak=peak, bare_us=bare_us, fits=figures.fits)))
"""


@pytest.mark.alone
@pytest.mark.parametrize("ops", [200_000, pytest.param(10**6, marks=pytest.mark.slow)])
def test_a_large_trace_loads_and_replays_within_its_limits(ops, tmp_path):
    path = tmp_path / "big.jsonl"
    subprocess.run([sys.executable, "-c", BUILD.format(ops=ops), str(path)], check=True)

    part = ops / 10**6

    def shares():
        """Of its limits of time, for the replay and in all."""
        run = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
        found = json.loads(run.stdout)
        assert found["ops"] == ops
        assert found["fits"], found
        assert found["peak"] < 0.2e9 + 1e9 * part, found
        # the limits are for a machine where SimPy's bare timeout takes 0.47 us; a slower or busier one gets more
        unit = part * max(1.0, found["bare_us"] / 0.47)
        return max(found["replay_s"] / 3, (found["load_s"] + found["replay_s"] + found["summary_s"]) / 15) / unit

    assert least(1, shares, tries=3) < 1


CLASSES = """
import json, resource, time
import simpy
from sim import simulate
from sim.layout import lay_out
from workloads import transformer
began = time.process_time()
step = dict(precision="mixed_bf16", attention="flash", loss="fused", optimizer="adamw_fused")
base = transformer("gpt3-175b", batch=64, sequence=2048, **step)
layout = {"tp": 8, "pp": 8, "micro_batches": 64, "sequence_parallel": True}
trace, machine = lay_out(base, "a100_80_sxm", layout)
ran = simulate(trace, machine, "full_recompute")
took = time.process_time() - began
env = simpy.Environment()
def bare():
    for _ in range(100_000):
        yield env.timeout(1)
env.process(bare())
bare_began = time.process_time()
env.run()
bare_us = (time.process_time() - bare_began) * 10
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(dict(ops=len(trace.ops), took=took, peak=peak, bare_us=bare_us, end=ran.log.end)))
"""


@pytest.mark.alone
@pytest.mark.slow
def test_gpt3_on_64_devices_is_laid_out_planned_and_replayed_within_its_limits():
    """By classes of symmetric ranks: eight of tensor parallelism, eight stages, 64 microbatches, full recomputation."""

    def share():
        run = subprocess.run([sys.executable, "-c", CLASSES], capture_output=True, text=True, check=True)
        found = json.loads(run.stdout)
        assert found["ops"] == 445_414
        assert found["peak"] < 2e9, found
        return found["took"] / (20 * max(1.0, found["bare_us"] / 0.47))

    assert least(1, share, tries=3) < 1
