"""What PaddlePaddle 2.5 and the programs of FlagPerf do otherwise than the code that a trace follows.

Biases: `paddle.nn.functional.linear` is a product and an addition, two kernels (PaddlePaddle/Paddle,
paddle/fluid/pybind/eager_custom_python_api.h @0a13b72, `eager_api_linear`); so is a divided layer, whose bias is added
to the sum over its ranks where it is divided by rows (python/paddle/distributed/fleet/layers/mpu/mp_layers.py @0524262,
`RowParallelLinear`). Nothing fuses them here: `fused_linear` is false by default (PaddlePaddle/PaddleNLP,
llm/gpt-3/configuration.py @0830030), and FlagPerf's program does not pass it on (FlagOpen/FlagPerf,
training/benchmarks/gpt3_6.7B/paddle/run_pretraining.py @e0db9b7). It takes the model from `paddlenlp.transformers`, of
which no version of that time was at hand: what llm/gpt-3 says stands for it.

Sums: stage 2 reduces each gradient to the rank that keeps it, once backward has made it
(meta_parallel/sharding/group_sharded_stage2.py @03eadcf, `_get_reduce_fn`), and broadcasts each rank's new weights
(group_sharded_optimizer_stage2.py @00e74b2, `_broadcast_params`). To or from one rank all bytes go over each link,
where a reduce-scatter or an all-gather moves (p - 1) / p of them (NVIDIA/nccl-tests, doc/PERFORMANCE.md: factors 1 and
(n - 1) / n). The kernels wait for each (`dist.reduce(sync_op=not self._reduce_overlap)`; their stream waits for that of
NCCL: paddle/fluid/distributed/collective, `NCCLTask::Wait`), unless `sharding_parallel_config` has
`enable_stage2_overlap` (paddlenlp/trainer/trainer.py @000c999), which no configuration of FlagPerf sets. So they do in
a trace, in all micro-batches but the first, where the next op adds what was summed to the sums of those before. They
wait for sums of tensor parallelism, too, which run on their own stream (mpu/mp_ops.py @009e8cf, `use_calc_stream`).
Gradients that do not fit into a buffer of 2^23 elements, 16 MiB, are reduced alone (`_setup_use_grad_storage`): that is
the `bucket` of these rows, in which small ones go with the next large one, where theirs go last.

Loss: the softmax of fp32 logits is a tensor of its own, saved for backward (cross_entropy_with_softmax and, with tensor
parallelism, `softmax->mutable_data` in paddle/fluid/operators/collective/c_softmax_with_cross_entropy_op.cu @032655e);
Megatron-LM's is in place, and goes through as many operands. The gradient is in its place (backward.yaml @00bf5d9,
`cross_entropy_with_softmax_grad`: `inplace`); with tensor parallelism it is a copy, which is left out: as much is there
in forward.

Attention: version 1 of FlashAttention. Version 2 came with pull request 55758, picked into an older branch by 56015 of
2023-08-07 (PaddlePaddle/Paddle); 2.5.1 was there to install on 2023-07-27 (PaddlePaddle/docs, pull request 6069).

Reads: with tensor parallelism and no stages `distributed_dataloader` reads sizes from the device before each
micro-batch. FlagPerf sets it for GPT, and for LLaMA in all but the first version of its configuration
(llama1_7B/paddle/config/_base.py @572fd7d; not @45c4220, whose program had no model for stages yet).

Pool: what building the model has taken of a card stays taken (`pool_of_building`).
"""

from __future__ import annotations

from sim.rewrites.rewriter import Rewriter, with_columns
from sim.trace import Trace
from sim.trace.op import PHASE_CODE
from sim.trace.origin import Same

SUMMED = "data"
"""The axis along which stage 2 reduces gradients to one rank, and broadcasts weights from one."""
SOFTMAX = "loss.softmax"
"""How the op of the loss is named that makes the softmax."""
BYTES = {"fp32": 4, "fp16": 2}


def biases_apart(trace: Trace) -> Trace:
    """The trace in which a linear layer adds its bias by a kernel of its own, forward.

    Backward stays: the sum of the bias's gradient is a kernel of its own in either, and that of the product is the
    gradient of the sum itself, in place (`add_grad`, paddle/phi/api/yaml/backward.yaml: `inplace`).
    """
    new = Rewriter(trace)
    ids, tensors = new.all_tensors(), trace.tensors
    for op in trace.ops:
        reads, writes = ([ids[t] for t in some] for some in (op.reads, op.writes))
        biased = op.kind == "matmul" and op.phase == "forward" and op.reads[2:]
        if not biased:
            new.op(op, reads=reads, writes=writes)
            continue
        out = tensors[op.writes[0]]
        product = new.tensor(out, Same(out.id), name=f"{op.name}.product", role="temporary", saved_for="")
        new.op(op, reads=reads[:2], writes=[product])
        fields = {"phase": op.phase, "layer": op.layer, "device": op.device, "dtype": out.dtype, "splits": op.splits}
        elements = out.bytes // BYTES[out.dtype]
        new.glue(f"{op.name}.bias", "elementwise", [product, *reads[2:]], writes, flops=elements, **fields)
    carry = [(ids[old], ids[fresh]) for old, fresh in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def softmax_apart(trace: Trace) -> Trace:
    """The trace in which the loss, Megatron-LM's, makes its softmax beside the logits, and not in their place."""
    new, tensors = Rewriter(trace), trace.tensors
    made = [op.writes[0] for op in trace.ops if op.name.endswith(SOFTMAX)]
    ids = new.all_tensors(without=made)
    for t in made:
        ids[t] = new.tensor(tensors[t])
    for t in tensors:
        if t.replaces in made:  # the gradient, in the place of the softmax
            new.builder.take_over(ids[t.id], ids[t.replaces])
    for op in trace.ops:
        new.op(op, reads=[ids[t] for t in op.reads], writes=[ids[t] for t in op.writes])
    carry = [(ids[old], ids[fresh]) for old, fresh in trace.carry]
    return new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def reducing_to_one(trace: Trace) -> Trace:
    """The trace of a rank of stage 2 in which each sum of gradients goes to one rank, and new weights come from one."""
    c, size, moved = trace.op_columns, trace.tensor_columns.bytes, trace.op_columns.bytes.copy()
    for op, ring in c.ring.items():
        if ring.axis == SUMMED:
            whole = trace.writes(op) if c.phase[op] == PHASE_CODE["update"] else trace.reads(op)
            moved[op] = sum(int(size[t]) for t in whole)
    return with_columns(trace, bytes=moved)


def pool_of_building(trace: Trace, device: int, built: str) -> int:
    """The bytes that building and wrapping a model leave with PaddlePaddle's allocator on a device, at least.

    built: the type in which the weights are made, on the card; one more of the largest is made as they are filled
        (PaddleNLP, llm/gpt-3/modeling.py @0830030, `_init_weights`). GPT is built in fp32 (FlagPerf,
        gpt3_6.7B/paddle/run_pretraining.py @e0db9b7: `model_class(gpt_config)`), LLaMA in fp16 (llama1_7B, @45c4220).

    `amp.decorate` casts one weight after the other, into what the ones before have left. Stage 2 then takes all of a
    rank's to the CPU and back into one buffer for each rank (group_sharded_storage.py @02a3002, `add_rank_params`).
    The allocator's chunks are as large as what was asked for, are never joined, and are given back only where memory is
    short (paddle/fluid/memory/allocation/auto_growth_best_fit_allocator.cc @07e721e): so no buffer fits into them where
    it is larger than the largest weight. Left out: masters, which fit into the chunks of a model built in fp32, but not
    of one built in fp16, which leaves up to a seventh more; of no run here is that more than training takes.
    """
    c, tensors = trace.op_columns, trace.tensors
    own = {t for op in range(len(c.name)) if c.device[op] == device for t in trace.reads(op)}
    stored = [tensors[t].bytes for t in own if tensors[t].role == "weight" and trace.producer[t] < 0]
    scale = BYTES[built] // BYTES["fp16"]
    buffers = sum(stored) if int(trace.meta.get("zero", 0)) == 2 else 0
    return scale * (sum(stored) + max(stored)) + buffers
