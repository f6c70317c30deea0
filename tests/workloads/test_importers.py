"""Traces of other tools become what their files say: peaks to the byte, times to the nanosecond."""

from __future__ import annotations

import gzip
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sim import load_profile, save_trace, simulate
from sim.errors import TraceError
from sim.trace import Trace, TraceBuilder
from tests.workloads.test_import_fuzz import DOCUMENTS, content
from workloads import load_trace, uniform_chain
from workloads.importers.any_format import FORMATS
from workloads.importers.aten import flops_of, results_of
from workloads.importers.chrome import read_chrome
from workloads.importers.dtr import read_dtr
from workloads.importers.execution_trace import read_execution_trace

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]
OPTRACES = ("resnet-50", "gpt2-small")


def raw(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def peak(trace: Trace) -> int:
    log = simulate(trace, load_profile("h200")).log
    memory = log.memory
    return int(memory[memory.tier == log.platform.home(0).name].used_bytes.max())


def at_start(trace: Trace, *roles: str) -> int:
    return sum(t.bytes for t in trace.tensors if trace.producer[t.id] < 0 and t.role in (roles or (t.role,)))


# ---- op-level JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTRACES)
def test_an_op_trace_replays_to_the_peak_that_pytorch_measured(name: str) -> None:
    assert peak(load_trace(DATA / f"{name}.optrace.json.gz")) == raw(f"{name}.optrace.json.gz")["truth"]["peak_total"]


@pytest.mark.parametrize("name", OPTRACES)
def test_flops_from_shapes_are_those_that_pytorch_counts(name: str) -> None:
    ops = raw(f"{name}.optrace.json.gz")["ops"]
    for op in ops:
        shapes = [[entry[1] for entry in op[side]] for side in ("ins", "outs")]
        assert flops_of(op["op"].replace("aten.", "aten::", 1), *shapes) == op["flops"], op["op"]
    assert sum(op["flops"] > 0 for op in ops) > 100


# ---- profiler traces ---------------------------------------------------------------------------------


def test_a_profiler_trace_replays_to_the_peak_of_the_real_allocator() -> None:
    trace = load_trace(DATA / "smallcnn.chrome.json.gz")
    assert peak(trace) == raw("smallcnn.chrome.json.gz")["oracle"]["max_total_allocated_bytes"] == 2_492_336
    assert {op.phase for op in trace.ops} == {"forward", "backward", "update"}


def test_the_ops_of_a_profiler_trace_take_all_the_time_of_its_outermost_calls() -> None:
    rows = raw("smallcnn.chrome.json.gz")["traceEvents"]
    calls = sorted((e["ts"], -e["dur"], e["name"]) for e in rows if e.get("cat") == "cpu_op")
    until, outermost = 0.0, []
    for start, minus, name in calls:
        if start >= until:
            until = start - minus
            outermost.append((name, -minus))
    trace = read_chrome(DATA / "smallcnn.chrome.json.gz")
    taken = sum(op.duration or 0 for op in trace.ops)
    everything = round(1000 * sum(span for _, span in outermost))
    # calls that only make views or pass a gradient on are no ops; they are few and short
    assert 0.95 * everything < taken <= everything + len(calls)
    # a wrapper's own time goes to the call that does the work
    convolution = next(e for e in rows if e.get("name") == "aten::conv2d")
    assert trace.ops[0].name == "0.aten::mkldnn_convolution"
    assert trace.ops[0].duration == pytest.approx(1000 * convolution["dur"], abs=1)


def call(name: str, start: float, span: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": start, "dur": span, "args": args}


def memory(time: float, size: int, address: int, total: int, kind: int = 0) -> dict[str, Any]:
    args = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Type": kind, "Device Id": -1}
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": time, "args": args}


def shapes(*dims: list[int]) -> dict[str, Any]:
    return {"Input type": ["float"] * len(dims), "Input Dims": list(dims)}


def chrome(folder: Path, *events: dict[str, Any]) -> Trace:
    return load_trace(write(folder, "t.json", {"traceEvents": list(events)}))


def test_allocations_of_a_profiler_trace_become_tensors_and_workspace(tmp_path: Path) -> None:
    trace = chrome(
        tmp_path,
        call("aten::mm", 10, 5, **shapes([2, 4], [4, 8])),
        memory(11, 64, 1, 64),
        memory(12, 1000, 2, 1064),
        memory(13, -1000, 2, 64),
        call("aten::relu", 20, 4, **shapes([2, 8])),
        memory(21, 64, 3, 128),
        memory(25, -64, 1, 64),
        call("aten::sum", 30, 1, **shapes([2, 8])),
    )
    mm, relu, total = trace.ops
    assert (mm.kind, mm.flops, mm.duration, mm.workspace) == ("matmul", 2 * 2 * 4 * 8, 5000, 1000)
    assert relu.reads == mm.writes
    assert total.reads == relu.writes
    assert [t.bytes for t in trace.tensors] == [64, 64]
    assert trace.outputs == relu.writes
    assert peak(trace) == 1064
    assert trace.meta["between_ops_ns"] == 21_000 - 10_000


def test_an_op_that_allocates_after_a_release_never_holds_both(tmp_path: Path) -> None:
    trace = chrome(
        tmp_path,
        call("aten::mm", 10, 5),
        memory(11, 600, 1, 600),
        call("aten::mul", 20, 5),
        memory(21, -600, 1, 0),
        memory(22, 500, 2, 500),
    )
    assert peak(trace) == 600
    assert [op.name.split(".")[1] for op in trace.ops] == ["aten::mm", "aten::mul", "aten::mul"]
    assert sum(op.duration or 0 for op in trace.ops) == 10_000


def test_what_was_allocated_before_the_recording_stays_or_goes_as_recorded(tmp_path: Path) -> None:
    events = (call("aten::mm", 10, 5), memory(11, 10, 1, 1110), call("aten::mul", 20, 5), memory(21, -100, 9, 1010))
    trace = chrome(tmp_path, *events, call("aten::mul", 30, 5), memory(31, 50, 2, 1060))
    assert trace.meta["assumed"]["bytes allocated before the recording"] == 1000
    assert peak(trace) == 1110


def test_a_callers_own_time_is_an_op_only_if_it_is_the_longest(tmp_path: Path) -> None:
    wrapper = (call("aten::linear", 0, 10), call("aten::t", 1, 2), call("aten::addmm", 3, 6))
    worker = (call("aten::norm", 20, 30), call("aten::copy_", 21, 4), call("aten::empty", 40, 1))
    trace = chrome(tmp_path, *wrapper, *worker, memory(60, 8, 1, 8))
    assert [(op.name.split(".")[1], op.duration) for op in trace.ops] == [
        ("aten::addmm", 10_000),
        ("aten::copy_", 5_000),
        ("aten::norm", 25_000),
    ]


def test_what_only_calls_others_for_autograd_is_never_an_op_however_long_it_took(tmp_path: Path) -> None:
    wrapper = [call("autograd::engine::evaluate_function: MmBackward0", 0, 100), call("MmBackward0", 5, 90)]
    trace = chrome(tmp_path, *wrapper, call("aten::mm", 10, 10, **shapes([2, 2])), memory(11, 16, 1, 16))
    assert [(op.name, op.duration) for op in trace.ops] == [("0.aten::mm", 100_000)]


@pytest.mark.parametrize("own", [2, 30])
def test_what_allocates_its_result_itself_is_an_op_however_short_it_is_and_what_has_a_copy_made_is_none(
    own: int, tmp_path: Path
) -> None:
    """x * scalar, whose scalar is converted first; then a clone: the ops are the same in a quick and a slow run."""
    first = [call("aten::mm", 0, 5, **shapes([4, 4], [4, 4])), memory(1, 64, 1, 64)]
    product = [call("aten::mul", 10, 12 + own, **shapes([4, 4], [])), memory(21 + own, 64, 3, 136)]
    converted = [call("aten::to", 11, 10), call("aten::_to_copy", 11, 10), call("aten::empty_strided", 12, 1)]
    converted += [memory(12.5, 8, 2, 72), call("aten::copy_", 14, 5, **shapes([], []))]
    clone = [call("aten::clone", 60, 10 + own, **shapes([4, 4])), call("aten::empty_like", 61, 1)]
    clone += [memory(61.5, 64, 4, 200), call("aten::copy_", 63, 6, **shapes([4, 4], [4, 4]))]
    trace = chrome(tmp_path, *first, *product, *converted, *clone)
    names = [op.name.split("::")[1] for op in trace.ops]
    assert names == ["mm", "copy_", "mul", "copy_"]
    assert trace.ops[2].reads == trace.ops[0].writes
    assert [trace.tensors[t].bytes for t in trace.ops[2].writes] == [64]


def test_an_update_that_asks_for_its_counters_is_an_op_however_long_that_took(tmp_path: Path) -> None:
    first = [call("aten::mm", 0, 5, **shapes([4, 4], [4, 4])), memory(1, 64, 1, 64)]
    update = [call("aten::_fused_adamw_", 10, 40, **shapes([4, 4], [4, 4]))]
    for i in range(4):
        update += [call("aten::item", 12 + 8 * i, 7), call("aten::_local_scalar_dense", 13 + 8 * i, 5)]
    trace = chrome(tmp_path, *first, *update)
    assert [op.name.split("::")[1] for op in trace.ops] == ["mm", "_fused_adamw_"]
    assert trace.ops[1].duration == 40_000


def test_kernels_give_the_op_that_launched_them_its_time(tmp_path: Path) -> None:
    def launch(time: float, number: int) -> dict[str, Any]:
        args = {"correlation": number}
        return {"ph": "X", "cat": "cuda_runtime", "name": "l", "pid": 1, "tid": 1, "ts": time, "dur": 1, "args": args}

    def kernel(time: float, span: float, number: int) -> dict[str, Any]:
        args = {"correlation": number}
        return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": time, "dur": span, "args": args}

    trace = chrome(
        tmp_path,
        call("aten::mm", 10, 5),
        call("aten::mul", 20, 5),
        *(launch(12, 1), launch(21, 2), launch(23, 3)),
        *(kernel(100, 40, 1), kernel(140, 7, 2), kernel(150, 2, 3), kernel(160, 9, 99)),
        memory(11, 512, 1, 512, kind=1),
        memory(11, 8, 1, 8, kind=0),
    )
    assert [op.duration for op in trace.ops] == [40_000, 9_000]
    assert trace.meta["left_out"] == {"kernels without a launch": 1, "memory events of other devices": 1}
    assert [t.bytes for t in trace.tensors] == [512]


def test_backward_ops_read_what_their_forward_op_touched(tmp_path: Path) -> None:
    def sequence(number: int, *dims: list[int]) -> dict[str, Any]:
        return {"Sequence number": number, **shapes(*dims)}

    trace = chrome(
        tmp_path,
        call("aten::sigmoid", 10, 1, **sequence(1)),
        memory(10.5, 64, 1, 64),
        call("aten::sigmoid", 20, 1, **sequence(2, [16])),
        memory(20.5, 64, 2, 128),
        call("aten::ones", 30, 1),
        memory(30.5, 64, 3, 192),
        call("autograd::engine::evaluate_function: SigmoidBackward0", 40, 9, **{"Sequence number": 1}),
        call("aten::sigmoid_backward", 41, 5, **shapes([16], [16])),
        memory(42, 64, 4, 256),
    )
    backward = trace.ops[-1]
    assert (backward.phase, backward.name) == ("backward", "3.aten::sigmoid_backward")
    assert set(backward.reads) == {trace.ops[2].writes[0], trace.ops[0].writes[0]}


def test_a_small_product_is_an_op_and_the_copy_of_its_bias_writes_what_was_allocated_for_it(tmp_path: Path) -> None:
    before = [call("aten::mul", 0, 5, **shapes([4, 4])), memory(1, 64, 1, 64)]
    product = [call("aten::addmm", 10, 20, **shapes([4], [4, 4], [4, 4])), memory(11, 64, 2, 128)]
    copied = call("aten::copy_", 12, 15, **shapes([4, 4], [4]))
    trace = chrome(tmp_path, *before, *product, copied)
    assert [op.name for op in trace.ops] == ["0.aten::mul", "1.aten::copy_", "2.aten::addmm"]
    assert trace.ops[2].flops == 2 * 4 * 4 * 4
    assert trace.ops[1].writes == (1,)
    assert trace.tensors[1].replaces is None


def test_a_copy_of_a_bias_reads_no_other_storage_and_the_product_writes_what_it_has_filled(tmp_path: Path) -> None:
    before = [call("aten::mul", 0, 5, **shapes([4, 8])), memory(1, 128, 1, 128)]
    product = [call("aten::addmm", 10, 20, **shapes([8], [4, 16], [16, 8])), memory(11, 128, 2, 256)]
    expanded = {**shapes([4, 8], [4, 8]), "Input Strides": [[8, 1], [0, 1]]}
    trace = chrome(tmp_path, *before, *product, call("aten::copy_", 12, 15, **expanded))
    copied, added = trace.ops[1:]
    assert copied.reads == ()
    assert added.reads == copied.writes
    assert trace.tensors[added.writes[0]].replaces == copied.writes[0]


def test_parts_of_a_tensor_are_read_as_the_whole_once(tmp_path: Path) -> None:
    made = [call("aten::mm", 0, 5, **shapes([2, 4], [4, 12])), memory(1, 96, 1, 96)]
    other = [call("aten::mul", 10, 5, **shapes([2, 12])), memory(11, 32, 2, 128), memory(12, 96, 3, 224)]
    parts = {**shapes([2, 4], [2, 4]), "Input Strides": [[12, 1], [12, 1]]}
    released = memory(26, -96, 1, 128)
    trace = chrome(tmp_path, *made, *other, call("aten::add", 20, 5, **parts), released)
    assert trace.ops[2].reads == trace.ops[0].writes


def test_what_a_call_of_backward_allocates_before_its_calls_is_not_the_previous_ops(tmp_path: Path) -> None:
    engine = call("autograd::engine::evaluate_function: AddmmBackward0", 0, 60)
    product = [call("aten::mm", 1, 20, **shapes([4, 4], [4, 4])), memory(2, 64, 1, 64)]
    total = [call("aten::sum", 30, 20, **shapes([4, 4])), memory(31, 16, 2, 80), call("aten::fill_", 32, 5)]
    trace = chrome(tmp_path, engine, *product, *total)
    assert [[trace.tensors[t].bytes for t in op.writes] for op in trace.ops if op.name[2:] == "aten::mm"] == [[64]]
    assert {trace.tensors[t].bytes for op in trace.ops if op.name[2:] != "aten::mm" for t in op.writes} == {16}


def test_what_is_written_in_place_keeps_its_role_and_is_not_what_is_released_then(tmp_path: Path) -> None:
    made = [call("aten::mm", 0, 5, **shapes([4, 4])), memory(1, 64, 1, 64)]
    added = [call("aten::mm", 10, 5, **shapes([4, 4])), memory(11, 64, 2, 128)]
    trace = chrome(tmp_path, *made, *added, call("aten::add_", 20, 5, **shapes([4, 4], [4, 4])), memory(26, -64, 2, 64))
    (result,) = trace.ops[2].writes
    assert trace.tensors[result].replaces == trace.ops[0].writes[0]
    assert trace.tensors[result].role == "activation"


def test_gradients_are_what_autograd_stores_and_what_it_adds_to_them(tmp_path: Path) -> None:
    events, time = [], 0
    for address in (1, 2):
        stored = "torch::autograd::AccumulateGrad"
        engine = "autograd::engine::evaluate_function: "
        events += [call(f"{engine}MmBackward0", time, 10), call("aten::mm", time + 1, 5, **shapes([4, 4]))]
        events += [memory(time + 2, 64, address, 64 * address), memory(time + 3, 64, 10 + address, 0)]
        events += [call(f"{engine}{stored}", time + 20, 9), call(stored, time + 21, 7, **shapes([4, 4]))]
        events += [memory(time + 6, -64, 10 + address, 0)]  # what the product has written beside it
        time += 100
    events += [call("aten::add_", 122, 4, **shapes([4, 4], [4, 4])), memory(126, -64, 2, 64)]
    trace = chrome(tmp_path, *events)
    assert [t.role for t in trace.tensors] == ["gradient"] * 3
    assert trace.ops[-1].reads == (1, 0)
    assert trace.tensors[trace.ops[-1].writes[0]].replaces == 0


@pytest.mark.parametrize(
    ("name", "dims", "values", "results"),
    [
        ("aten::convolution", [[2, 3, 9, 9], [8, 3, 3, 3]], ["[2, 2]", "[1, 1]", "[1, 1]", "False"], [(2, 8, 5, 5)]),
        ("aten::convolution", [[2, 3, 9, 9], [8, 3, 3, 3]], ["[1, 1]", "[0, 0]", "[2, 2]", "False"], [(2, 8, 5, 5)]),
        ("aten::convolution", [[2, 3, 9, 9], [3, 8, 3, 3]], ["[1, 1]", "[0, 0]", "[1, 1]", "True"], []),
        ("aten::convolution", [[2, 3, 9, 9], [8, 3, 3, 3]], ["[0, 0]", "[0, 0]", "[1, 1]", "False"], []),
        ("aten::convolution", [[2, 3, 9, 9], [8, 3, 3, 3]], ["nothing", "[0, 0]"], []),
        ("aten::relu", [[2, 3]], [], []),
    ],
)
def test_the_result_of_a_convolution_follows_from_its_arguments(
    name: str, dims: Any, values: Any, results: Any
) -> None:
    assert results_of(name, dims, ["", "", "", *values]) == results


def step(number: int, start: float, span: float) -> dict[str, Any]:
    return {**call(f"ProfilerStep#{number}", start, span), "cat": "user_annotation"}


def two_steps_and_a_bit() -> list[dict[str, Any]]:
    """Step 3 holds 600 B at most, step 4 900 B beside 100 B of before; step 5 is cut off after its first op."""
    return [
        *(step(3, 0, 100), step(4, 100, 100), step(5, 200, 11)),
        *(call("aten::mm", 10, 5), memory(11, 600, 1, 600), call("aten::mul", 20, 5), memory(21, -500, 1, 100)),
        *(call("aten::mul", 30, 5), call("aten::mul", 40, 5)),
        *(call("aten::mm", 110, 5), memory(111, 900, 2, 1000), call("aten::mul", 120, 7), memory(121, -900, 2, 100)),
        *(call("aten::mul", 130, 5), call("aten::mul", 140, 5)),
        *(call("aten::mm", 210, 5), memory(210.5, 5000, 3, 5100)),
    ]


def test_one_step_of_a_profile_is_read_by_default_the_last_complete_one(tmp_path: Path) -> None:
    path = write(tmp_path, "t.json", {"traceEvents": two_steps_and_a_bit()})
    last = load_trace(path)
    assert (last.meta["step"], last.meta["steps"]) == (4, [3, 4, 5])
    assert [op.duration for op in last.ops] == [5000, 7000, 5000, 5000]
    assert peak(last) == 1000
    assert peak(load_trace(path, step=3)) == 600
    assert peak(read_chrome(path, step=5)) == 5100
    with pytest.raises(TraceError, match=r"t\.json: step 7: is not in the recording; there are 3, 4, 5"):
        load_trace(path, step=7)


def test_a_step_of_what_has_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "t.json", {"traceEvents": [call("aten::mm", 10, 5), memory(11, 8, 1, 8)]})
    assert "step" not in load_trace(path).meta
    with pytest.raises(TraceError, match="it has no marked steps"):
        load_trace(path, step=1)
    for name in ("smallcnn.et.json.gz", "resnet-50.optrace.json.gz"):
        with pytest.raises(TraceError, match="step 1: only a profiler's Chrome JSON has steps"):
            load_trace(DATA / name, step=1)


def test_a_profile_without_memory_is_refused_naming_what_to_record(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="profile_memory=True, record_shapes=True"):
        chrome(tmp_path, call("aten::mm", 10, 5))


def test_products_whose_flops_the_shapes_do_not_tell_are_noted(tmp_path: Path) -> None:
    known = call("aten::mm", 10, 5, **shapes([2, 4], [4, 8]))
    trace = chrome(tmp_path, known, call("aten::mm", 20, 5), call("aten::mul", 30, 5), memory(11, 8, 1, 8))
    assert trace.meta["uncounted"] == {"aten::mm": 1}


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::_grouped_mm", [(64, 32), (4, 32, 16), (4,)], 2 * 64 * 32 * 16),
        ("aten::_grouped_mm", [(32, 64), (64, 16), (4,)], 2 * 64 * 32 * 16),
        ("aten::_grouped_mm", [(4, 16, 32), (4, 32, 8)], 4 * 2 * 16 * 32 * 8),
        ("aten::addbmm", [(3, 5), (2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        ("aten::mv", [(3, 4), (4,)], 2 * 3 * 4),
        (
            "aten::mkldnn_rnn_layer",
            [(5, 2, 3), (16, 3), (16, 4), (16,), (16,), (2, 4), (2, 4)],
            2 * 5 * 2 * 16 * (3 + 4),
        ),
        ("aten::_cudnn_rnn_backward", [(5, 2, 3), (16, 3), (16, 4), (16,), (16,), (176,)], 4 * 5 * 2 * 16 * (3 + 4)),
        ("aten::addmv", [(3,), (3, 4), (4,)], 2 * 3 * 4),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [(2, 3, 8, 16)] * 3, 4 * 2 * 3 * 8 * 8 * 16),
    ],
)
def test_flops_of_products_that_the_counter_of_pytorch_does_not_know(name: str, shapes: Any, flops: int) -> None:
    assert flops_of(name, shapes, ()) == flops


# ---- execution traces --------------------------------------------------------------------------------


def test_an_execution_trace_replays_to_the_ledgers_peak_within_16_bytes() -> None:
    oracle = raw("smallcnn.chrome.json.gz")["oracle"]  # another iteration of the same model
    trace = read_execution_trace(DATA / "smallcnn.et.json.gz")
    held = peak(trace) - at_start(trace)
    assert 0 <= oracle["ledger_peak_bytes"] - held <= 16  # released after the last reader: never above
    # parameters and Adam's state; two counters of the batch norms are written too and count as buffers
    assert at_start(trace, "weight", "optimizer_state") - 16 == oracle["start_bytes_params_and_opt_state"]
    assert at_start(trace, "optimizer_state") == oracle["start_bytes_params_and_opt_state"] - oracle["param_bytes"]


def node(number: int, name: str, schema: str, inputs: list[Any], outputs: list[Any], parent: int = 1) -> dict[str, Any]:
    def side(values: list[Any]) -> dict[str, Any]:
        return {"values": values, "shapes": [[v[3]] for v in values], "types": ["Tensor(float)"] * len(values)}

    attrs = [{"name": "op_schema", "type": "string", "value": schema}]
    return {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": side(inputs),
        "outputs": side(outputs),
        "attrs": attrs,
    }


def tensor(number: int, storage: int, elements: int = 4, offset: int = 0) -> list[Any]:
    return [number, storage, offset, elements, 4, "cuda:0"]


def execution(folder: Path, *nodes: dict[str, Any]) -> Trace:
    return load_trace(write(folder, "et.json", {"schema": "1.1.1-chakra.0.0.4", "nodes": list(nodes)}))


def test_views_fold_into_their_storage_and_writes_in_place_take_it_over(tmp_path: Path) -> None:
    trace = execution(
        tmp_path,
        node(2, "aten::relu", "aten::relu(Tensor self) -> Tensor", [tensor(10, 100)], [tensor(11, 101)]),
        node(3, "aten::view", "aten::view(Tensor(a) self) -> Tensor(a)", [tensor(11, 101)], [tensor(12, 101)]),
        node(
            4,
            "aten::add_",
            "aten::add_(Tensor(a!) self, Tensor o) -> Tensor(a!)",
            [tensor(12, 101)] * 2,
            [tensor(12, 101)],
        ),
        node(5, "aten::sum", "aten::sum(Tensor self) -> Tensor", [tensor(12, 101, 2, 2)], [tensor(13, 102, 1)]),
    )
    assert [op.name for op in trace.ops] == ["2.aten::relu", "4.aten::add_", "5.aten::sum"]
    new = trace.tensors[trace.ops[1].writes[0]]
    assert new.replaces == trace.ops[0].writes[0]
    assert trace.ops[2].reads == (new.id,)
    assert [t.bytes for t in trace.tensors] == [16, 16, 16, 4]


def test_an_address_that_is_used_again_is_another_storage(tmp_path: Path) -> None:
    trace = execution(
        tmp_path,
        node(2, "aten::relu", "aten::relu(Tensor self) -> Tensor", [tensor(1, 100)], [tensor(2, 101)]),
        node(3, "aten::relu", "aten::relu(Tensor self) -> Tensor", [tensor(2, 101)], [tensor(3, 102)]),
        node(4, "aten::relu", "aten::relu(Tensor self) -> Tensor", [tensor(3, 102)], [tensor(4, 101, 8)]),
    )
    assert [t.bytes for t in trace.tensors] == [16, 16, 16, 32]
    assert all(t.replaces is None for t in trace.tensors)


def test_a_call_that_reads_what_its_calls_do_not_is_an_op_after_them(tmp_path: Path) -> None:
    schema = "aten::addmm(Tensor bias, Tensor a, Tensor b) -> Tensor"
    trace = execution(
        tmp_path,
        node(2, "aten::linear", "aten::linear(Tensor)", [tensor(1, 100), tensor(2, 101)], [tensor(4, 103)]),
        node(3, "aten::addmm", schema, [tensor(1, 100), tensor(2, 101), tensor(3, 102)], [tensor(4, 103)], parent=2),
        node(
            4, "aten::copy_", "aten::copy_(Tensor(a!) self, Tensor src)", [tensor(4, 103), tensor(1, 100)], [], parent=3
        ),
    )
    copy, addmm = trace.ops
    assert (copy.name, addmm.name) == ("4.aten::copy_", "3.aten::addmm")
    assert trace.tensors[addmm.writes[0]].replaces == copy.writes[0]


def test_the_old_layout_of_an_execution_trace_is_read_too(tmp_path: Path) -> None:
    rows = [{"id": 2, "name": "aten::relu", "parent": 1, "op_schema": "aten::relu(Tensor self) -> Tensor"}]
    rows[0] |= {"inputs": [tensor(1, 100)], "input_shapes": [[4]], "input_types": ["Tensor(float)"]}
    rows[0] |= {"outputs": [tensor(2, 101)], "output_shapes": [[4]], "output_types": ["Tensor(float)"]}
    trace = load_trace(write(tmp_path, "old.json", {"schema": "1.0.1", "nodes": rows}))
    assert [t.bytes for t in trace.tensors] == [16, 16]


# ---- DTR logs ----------------------------------------------------------------------------------------

LOG = """
{"INSTRUCTION": "CONSTANT", "NAME": "old"}
{"INSTRUCTION": "MEMORY", "NAME": "old", "MEMORY": "9"}
{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
{"INSTRUCTION": "CONSTANT", "NAME": "w"}
{"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "100"}
{"INSTRUCTION": "CALL", "NAME": "relu", "ARGS": ["w"], "RESULT": ["x"], "TIME": "7"}
{"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "40"}
{"INSTRUCTION": "ALIAS", "NAME": "x", "ALIAS": "-1"}
{"INSTRUCTION": "CALL", "NAME": "view", "ARGS": ["x"], "RESULT": ["y"], "TIME": "1"}
{"INSTRUCTION": "MEMORY", "NAME": "y", "MEMORY": "40"}
{"INSTRUCTION": "ALIAS", "NAME": "y", "ALIAS": "0"}
{"INSTRUCTION": "RELEASE", "NAME": "x"}
{"INSTRUCTION": "CALL", "NAME": "exp", "ARGS": ["y"], "RESULT": ["z"], "TIME": "5"}
{"INSTRUCTION": "MEMORY", "NAME": "z", "MEMORY": "30"}
{"INSTRUCTION": "ALIAS", "NAME": "z", "ALIAS": "-1"}
{"INSTRUCTION": "COPY", "DST": "z2", "SRC": "z"}
{"INSTRUCTION": "RELEASE", "NAME": "z"}
{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"}
{"INSTRUCTION": "MUTATE", "NAME": "sub_", "ARGS": ["w", "z2"], "MUTATE": [0], "TIME": "3"}
{"INSTRUCTION": "RELEASE", "NAME": "y"}
{"INSTRUCTION": "RELEASE", "NAME": "z2"}
"""


def test_a_dtr_log_becomes_its_calls_with_views_as_ops_and_names_counted(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "dtr.log", LOG.lstrip()))
    assert [(op.name, op.kind, op.duration, op.phase) for op in trace.ops] == [
        ("0.relu", "elementwise", 7, "forward"),
        ("1.view", "elementwise", 1, "forward"),
        ("2.exp", "elementwise", 5, "forward"),
        ("3.sub_", "elementwise", 3, "backward"),
    ]
    w, x, y, z, new = trace.tensors
    assert [t.bytes for t in (w, x, y, z, new)] == [100, 40, 0, 30, 100]
    assert trace.view_of == {y.id: x.id}
    assert trace.ops[2].reads == (y.id, x.id)
    assert new.replaces is None  # what is mutated is a new value, made of the old one
    assert trace.ops[3].reads == (w.id, z.id)
    assert trace.ops[3].releases == (x.id, z.id)  # x is held until then, though nothing reads it
    assert trace.outputs == (new.id,)
    assert trace.carry == ()
    assert peak(trace) == 270
    assert peak(read_dtr(tmp_path / "dtr.log", hold=False)) == 230
    assert read_dtr(tmp_path / "dtr.log", hold=False).ops[3].releases == ()


def test_a_constant_after_a_call_takes_its_space_at_its_line_and_stays(tmp_path: Path) -> None:
    late = """
{"INSTRUCTION": "CONSTANT", "NAME": "c"}
{"INSTRUCTION": "MEMORY", "NAME": "c", "MEMORY": "50"}
{"INSTRUCTION": "RELEASE", "NAME": "c"}
"""
    trace = load_trace(write(tmp_path, "dtr.log", LOG.strip() + late))
    assert (trace.ops[4].name, trace.ops[4].duration, trace.ops[4].reads) == ("4.constant", 0, ())
    assert [trace.tensors[t].name for t in trace.outputs] == ["w$", "c"]
    assert trace.carry == ()
    assert peak(trace) == 270  # x and z go before it comes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"INSTRUCTION": "CALL", "NAME": "f", "ARGS": ["q"], "RESULT": [], "TIME": 1}',
            "line 1: ARGS: there is no tensor 'q'",
        ),
        ('{"INSTRUCTION": "CONSTANT", "NAME": "w"}', "line 1: expected the MEMORY of 'w' after it"),
        ('{"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": 1}', "line 1: MEMORY does not follow its CONSTANT or CALL"),
        (
            '{"INSTRUCTION": "CALL", "NAME": "f", "ARGS": [], "RESULT": [], "TIME": -1}',
            "line 1: TIME: -1 is out of range",
        ),
    ],
)
def test_a_wrong_line_of_a_dtr_log_is_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(write(tmp_path, "dtr.log", line + "\n"))
    assert message in str(caught.value)
    assert "dtr.log" in str(caught.value)


# ---- any format --------------------------------------------------------------------------------------


def test_our_own_files_are_read_whatever_their_name(tmp_path: Path) -> None:
    trace = uniform_chain(4)
    save_trace(trace, tmp_path / "a.jsonl")
    (tmp_path / "b.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert load_trace(tmp_path / "a.jsonl") == load_trace(tmp_path / "b.gz") == trace
    (tmp_path / "b.gz").rename(tmp_path / "c")
    with pytest.raises(TraceError, match=r"must end in '\.gz'"):
        load_trace(tmp_path / "c")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95 a pickle",
        b"hello",
        b"{}",
        b"[1, 2]",
        b'"text"',
        b"3",
        b"{",
        b"\x00\x00\x00",
        b"\x1f\x8b junk",
        b"\xff\xfe",
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(TraceError) as caught:
        load_trace(tmp_path / "f")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "f") in str(caught.value)


def test_the_error_for_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"accepted: tiersim JSON lines; op-trace-1 JSON; .*Chakra.*DTR"):
        load_trace(write(tmp_path, "f.json", {"some": "thing"}))


def test_the_error_for_a_format_that_is_named_and_unknown_names_it_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"whose format is 'op-trace-2' \(valid: 'op-trace-1'\)\); accepted"):
        load_trace(write(tmp_path, "f.json", {"format": "op-trace-2", "ops": []}))
    with pytest.raises(TraceError, match=r"a JSON object with the keys 'format', 'ops'"):
        load_trace(write(tmp_path, "f.json", {"format": ["op-trace-1"], "ops": []}))


def test_a_profile_with_a_key_named_format_is_still_a_profile(tmp_path: Path) -> None:
    document = {"format": "kineto", **raw("smallcnn.chrome.json.gz")}
    assert load_trace(write(tmp_path, "f.json", document)).meta["format"] == "chrome"


def test_every_format_says_what_it_carries_in_its_module_and_in_the_how_to() -> None:
    table = (ROOT / "docs" / "how-to" / "import-a-trace.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
    own, *foreign = FORMATS
    assert own not in rows
    assert {name.partition(" (")[0] for name in foreign} == rows - {"format", "---"}
    for module in FORMATS.values():
        assert len((import_module(module).__doc__ or "").splitlines()) > 1


def test_a_document_of_every_format_is_mutated_by_the_fuzz_tests(tmp_path: Path) -> None:
    formats = set()
    for name, document in DOCUMENTS.items():
        (tmp_path / "f").write_bytes(content(name, document))
        formats.add(load_trace(tmp_path / "f").meta.get("format", ""))
    assert len(formats) == len(FORMATS), f"one document of each, named in the trace's meta: {formats}"


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        load_trace(tmp_path / "missing.json")
    with pytest.raises(TraceError, match="is a folder"):
        load_trace(tmp_path)


def test_a_file_that_unpacks_to_more_than_allowed_is_refused_before_it_is_held(tmp_path: Path) -> None:
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b"[" + b" " * 30_000_000 + b"]"))
    with pytest.raises(TraceError, match="larger than 1,000,000 bytes unpacked"):
        load_trace(tmp_path / "bomb.json.gz", max_bytes=1_000_000)


@pytest.mark.parametrize("name", ["smallcnn.chrome.json.gz", "smallcnn.et.json.gz", "resnet-50.optrace.json.gz"])
def test_what_is_imported_says_so_and_survives_a_save(name: str, tmp_path: Path) -> None:
    trace = load_trace(DATA / name)
    save_trace(trace, tmp_path / "t.jsonl.gz")
    assert load_trace(tmp_path / "t.jsonl.gz") == trace
    assert trace.meta["source"] == f"import of {name}"
    assert "left_out" in trace.meta


def test_a_policy_can_plan_for_an_imported_trace() -> None:
    trace = load_trace(DATA / "smallcnn.chrome.json.gz")
    roomy = simulate(trace, load_profile("h200"))
    tight = simulate(trace, load_profile("h200"), policy="dtr", budget=2_300_000)
    assert tight.summary()["peak_bytes"] <= 2_300_000 < roomy.summary()["peak_bytes"]


def test_a_hand_made_trace_is_told_from_chakra_by_its_keys(tmp_path: Path) -> None:
    builder = TraceBuilder()
    x = builder.tensor("x", 8, "input")
    builder.op("f", reads=[x])
    save_trace(builder.build(), tmp_path / "t")
    assert len(load_trace(tmp_path / "t").ops) == 1


def test_what_comes_before_a_backward_pass_is_a_forward_pass_in_each_micro_batch_and_step(tmp_path: Path) -> None:
    events, time = [], 10

    def one(name: str, above: str = "") -> None:
        nonlocal time
        if above:
            events.append(call(above, time, 9))
        events.append(call(name, time + 1, 6))
        events.append(memory(time + 2, 512, time, 512 * len(events)))
        time += 20

    for _ in range(2):  # a step of two micro-batches, the gradients clipped, and an update
        for _ in range(2):
            one("aten::mm")
            one("aten::mm", "autograd::engine::evaluate_function: MmBackward0")
        one("aten::mul")
        one("aten::add_", "Optimizer.step#SGD.step")
    step = ["forward", "backward"] * 2 + ["update"] * 2
    trace = chrome(tmp_path, *events)
    assert [op.phase for op in trace.ops if op.name[0].isdigit()] == step * 2
    assert trace.meta["assumed"]["optimizer steps read as one iteration, since prof.step() marks none"] == 2
    assert not any("optimizer steps" in key for key in chrome(tmp_path, *events[: len(events) // 2]).meta["assumed"])
