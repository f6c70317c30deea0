"""What PaddlePaddle 2.5 and the programs of FlagPerf do otherwise than the code that a trace follows.

Pool: what building the model has taken of a card stays taken (`pool_of_building`).
"""

from __future__ import annotations

from sim.trace import Trace

BYTES = {"fp32": 4, "fp16": 2}


def pool_of_building(trace: Trace, device: int, built: str) -> int:
    """The bytes that building and wrapping a model leave with PaddlePaddle's allocator on a device, at least.

    built: the type in which the weights are made, on the card; one more of the largest is made as they are filled
        (PaddleNLP, llm/gpt-3/modeling.py @0830030, `_init_weights`). GPT is built in fp32 (FlagPerf,
        gpt3_6.7B/paddle/run_pretraining.py @e0db9b7: `model_class(gpt_config)`), LLaMA in fp16 (llama1_7B, @45c4220).

    `amp.decorate` casts one weight after the other, into what the ones before have left. Stage 2 then takes all of a
    rank's to the CPU and back into one buffer for each rank (group_sharded_storage.py @02a3002, `add_rank_params`).
    The allocator's chunks are as large as what was asked for, are never joined, and are given back only where memory is
    short (paddle/fluid/memory/allocation/auto_growth_best_fit_allocator.cc @07e721e): so no buffer fits into them where
    it is larger than the largest weight. Left out: masters, which fit into the chunks of a model built in fp32.
    """
    c, tensors = trace.op_columns, trace.tensors
    own = {t for op in range(len(c.name)) if c.device[op] == device for t in trace.reads(op)}
    stored = [tensors[t].bytes for t in own if tensors[t].role == "weight" and trace.producer[t] < 0]
    scale = BYTES[built] // BYTES["fp16"]
    buffers = sum(stored) if int(trace.meta.get("zero", 0)) == 2 else 0
    return scale * (sum(stored) + max(stored)) + buffers
