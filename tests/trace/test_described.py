"""A workload in a line: whoever reads it knows what ran, and on how many devices."""

import pytest

from sim.layout import lay_out
from sim.trace.described import workload_text
from workloads.transformer import transformer

PLAIN = "gpt2-small, batch 4, sequence 16, precision fp32, attention sdpa"


def step(**options):
    return transformer("gpt2", batch=4, sequence=16, **options)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, ""),
        ({"optimizer": "sgd", "micro_batches": 2}, ", optimizer sgd, micro-batches 2"),
        ({"lora_rank": 4}, ", LoRA rank 4"),
        ({"frozen": ["h0*", "h1*"]}, ", frozen h0* h1*"),
    ],
)
def test_options_are_named_where_they_are_not_the_usual_ones(options, more):
    assert workload_text(step(**options).meta) == PLAIN + more


def test_inference_is_not_taken_for_a_training_step():
    assert "sequence 16, inference, tokens generated 3, precision" in workload_text(step(generate=3).meta)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ({"dp": 2, "tp": 2}, ", on 4 devices: dp 2, tp 2"),
        ({"dp": 4, "zero": 3}, ", on 4 devices: dp 4, zero 3"),
        ({"pp": 2, "micro_batches": 4, "schedule": "gpipe"}, ", on 2 devices: pp 2, schedule gpipe, micro-batches 4"),
        ({"pp": 2, "layers": [5, 7]}, ", on 2 devices: pp 2, layers 5 7"),
        ({"micro_batches": 2}, ", micro-batches 2"),
        ({"dp": 1}, ""),
    ],
)
def test_a_layout_is_named_with_the_devices_that_it_takes(layout, more):
    trace, _ = lay_out(step(), "h100", layout)
    assert workload_text(trace.meta) == PLAIN + more


def test_what_a_trace_does_not_know_is_not_named():
    assert workload_text({}) == "trace"
    assert workload_text({"model": "net", "batch": 2, "optimizer": None, "layout": "?"}) == "net, batch 2"
