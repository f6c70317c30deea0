"""Traces of a transformer: one training iteration, or a prompt and the tokens generated from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from sim.arguments import explained
from sim.errors import TraceError, WorkloadError, closest, closest_divisor, near
from sim.trace.builder import TraceBuilder
from sim.trace.graph import Trace
from sim.trace.tensor import TOKENS
from workloads.adapters import FROZEN_DTYPES, Tuning, tuning_of
from workloads.attention import FLASH, Core
from workloads.backward import backward
from workloads.experts import routing
from workloads.families import Config
from workloads.layers import Model
from workloads.losses import LOSSES
from workloads.models import HasDict, read_config
from workloads.optimizers import OPTIMIZERS, update
from workloads.other_models import NotBuiltIn
from workloads.parameters import make_parameters
from workloads.passes import loss_of
from workloads.precision import PRECISIONS, Precision
from workloads.sizes import at_sizes, named
from workloads.stacks import STACKS, as_workload
from workloads.tape import Tape, Value

ATTENTIONS = ("eager", "sdpa", *FLASH)
CHOICES: Mapping[str, Collection[str]] = {
    "precision": PRECISIONS,
    "attention": ATTENTIONS,
    "optimizer": OPTIMIZERS,
    "loss": LOSSES,
    "stack": STACKS,
    "frozen_dtype": FROZEN_DTYPES,
}
"""The valid values of arguments that are names: the registries themselves, so that additions there are valid here."""


@explained
def transformer(
    config: str | Path | Mapping[str, Any] | HasDict,
    *,
    batch: int,
    sequence: int,
    precision: str = "fp32",
    attention: str = "sdpa",
    dropout: float | None = None,
    optimizer: str = "adamw_foreach",
    loss: str = "torch",
    stack: str = "eager",
    micro_batches: int = 1,
    frozen: str | Sequence[str] | None = None,
    frozen_dtype: str | None = None,
    lora_rank: int | None = None,
    lora_targets: str | Sequence[str] | None = None,
    lora_dropout: float = 0.0,
    routing_seed: int = 0,
    routing_skew: float = 0.0,
    generate: int | None = None,
) -> Trace:
    """One training iteration of a transformer in its steady state: forward, loss, backward, optimizer step.

    With `generate` it is inference, see `workloads.inference`.

    config: name of a model (`model_names()`), path of a Hugging Face `config.json`, a dict with its keys, or a
        configuration object of `transformers` (anything with `to_dict()`). With `model_type: "megatron"` the keys are
        arguments of Megatron-LM (`workloads.megatron`).
    batch: samples per iteration.
    sequence: tokens per sample.
    precision: fp32, bf16, fp16 (everything in that type, the optimizer's state included), tf32 (as fp32, but products
        are rounded to TF32 where a chip has it: `torch.set_float32_matmul_precision("high")`), amp_bf16, amp_fp16 (fp32
        weights under autocast), mixed_bf16, mixed_fp16 (16-bit weights and gradients, fp32 master weights and state),
        megatron_bf16 (as mixed_bf16, but the gradients of weights are kept in fp32), mixed_fp8, megatron_fp8 (as
        those in bf16, but linear layers multiply in FP8, see `workloads.eight_bits`); with `generate` fp8 and int8
        (weights of linear layers in 8 bits, which multiply quantised inputs), too.
    attention: eager, sdpa, flash or flash_repeat, see `workloads.attention`.
    dropout: replaces all probabilities of the config.
    optimizer: one of `workloads.optimizers.OPTIMIZERS`.
    loss: torch, fused, vocab_parallel or chunked, see `workloads.losses`.
    stack: what runs it: eager, compiled (torch.compile) or fused (the kernels of Megatron-LM, Apex and Transformer
        Engine), see `workloads.stacks`.
    micro_batches: gradients are accumulated over that many parts of the batch.
    frozen: weights that are not trained: names of weights or of parts of the model (`h0`, `h0.attn`, `wte.weight`), or
        patterns of these (`h[0-5]`, `*.weight`), as a list or with commas. By default none; with adapters all others.
    frozen_dtype: in which type frozen weights are stored; by default as the trained ones. `bf16` with `amp_bf16` is a
        16-bit model with fp32 adapters under autocast. `nf4` and `nf4_double` (QLoRA, without and with double
        quantisation) store the matrices of linear layers but the head in 4 bits, and all else in the type of matrix
        products; each use of a matrix, forward and backward, first converts it to that type.
    lora_rank: rank of LoRA's adapters (PEFT: r); by default there are none.
    lora_targets: the linear layers that have adapters: names (`attn.q`), PEFT's (`q_proj`), or `all-linear`, as a list
        or with commas; by default PEFT's for the family, which are queries and values.
    lora_dropout: probability of the dropout before each adapter.
    routing_seed, routing_skew: loads of experts, see `workloads.experts.routing`.
    generate: tokens to generate per sample after a prompt of `sequence` tokens: no loss, gradients or optimizer. The
        parts of the batch that `micro_batches` makes run one after another, and `frozen_dtype` is the type of all
        weights.

    A keep-all replay of an eager trace uses as much memory as PyTorch does for Hugging Face's model. Not modelled:
    padding and attention masks for it, sliding windows shorter than the sequence, except in training with `flash`
    (refused), loss scaling, workspaces inside kernels, and rounding by the allocator.

    Raises WorkloadError naming what is wrong and the nearest valid value.
    """
    c = read_config(config)
    given = {"precision": precision, "attention": attention, "optimizer": optimizer, "loss": loss, "stack": stack}
    for axis, name in given.items():
        if name not in CHOICES[axis]:
            raise WorkloadError(f"{axis} {name!r} is unknown{near(str(name), CHOICES[axis])}")
    _check_eight_bits(PRECISIONS[precision], generate is not None)
    batch, sequence = _count("batch", batch), _count("sequence", sequence)
    micro_batches = _count("micro_batches", micro_batches)
    if batch % micro_batches:
        raise WorkloadError(
            f"micro_batches: {micro_batches} does not divide batch {batch}{closest_divisor(micro_batches, batch)}"
        )
    if c.learned and sequence > c.positions:
        longer = f"sequence: {sequence} is longer than the {c.positions} positions of {c.name!r}"
        raise WorkloadError(f"{longer}{closest(sequence, 1, c.positions)}")
    if c.window and sequence > c.window and (attention not in FLASH or generate is not None):
        raise NotBuiltIn(
            f"sequence: {sequence} is longer than the sliding window of {c.window} tokens of {c.name!r}, which is "
            f"modelled in training with attention 'flash'; up to {c.window} it makes no difference"
        )
    if routing_skew < 0:
        raise WorkloadError(f"routing_skew: needs a number of at least 0, has {routing_skew!r}")
    if dropout is not None:
        dropout = _probability("dropout", dropout)
        c = c.dropping(dropout)
    if generate is not None:
        trained = {"frozen": frozen, "lora_rank": lora_rank, "lora_targets": lora_targets, "lora_dropout": lora_dropout}
        for argument, value in trained.items():
            if value:
                raise WorkloadError(f"{argument}: is about training, and with generate nothing is trained")
    tuning = tuning_of(
        c.family,
        frozen="*" if generate is not None else frozen,
        frozen_dtype=frozen_dtype,
        lora_rank=0 if lora_rank is None else _count("lora_rank", lora_rank),
        lora_targets=lora_targets,
        lora_dropout=_probability("lora_dropout", lora_dropout),
    )
    if generate is not None:
        from workloads.inference import inference

        parts = (batch, micro_batches)
        route = (routing_seed, routing_skew)
        trace = inference(
            c, PRECISIONS[precision], tuning, parts, sequence, _count("generate", generate), attention, route
        )
        return as_workload(trace, stack)
    route, types = (routing_seed, routing_skew), PRECISIONS[precision]
    try:
        trace = at_sizes(
            repr((c, types, tuning, attention, optimizer, loss, micro_batches, route)),
            lambda builder, samples, tokens: _build(
                builder, c, types, tuning, samples, tokens, attention, optimizer, loss, micro_batches, route
            ),
            batch,
            sequence,
        )
    except TraceError as error:  # sizes that no trace holds
        raise WorkloadError(f"model {c.name!r}: {error}") from None
    return as_workload(trace, stack)


def _check_eight_bits(precision: Precision, generates: bool) -> None:
    """Raise WorkloadError for 8 bits of the wrong kind, naming the right one."""
    if precision.stored and not generates:
        raise WorkloadError(
            f"precision {precision.name!r} stores weights in 8 bits, for inference: give generate, or train in FP8 "
            "with 'mixed_fp8' or 'megatron_fp8'"
        )
    if precision.linear and not precision.stored and generates:
        raise WorkloadError(f"precision {precision.name!r} is for training; with generate it is {precision.linear!r}")


def _count(argument: str, value: object) -> int:
    """A positive integer, NumPy's included. Raises WorkloadError."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < 1:
        raise WorkloadError(f"{argument}: needs an integer of at least 1, has {value!r}{closest(value, 1)}")
    return index(value)


def _probability(argument: str, value: float) -> float:
    """A number from 0 up to 1. Raises WorkloadError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise WorkloadError(
            f"{argument}: needs a number from 0 up to 1, has {value!r}{closest(value, 0, 0.99, whole=False)}"
        )
    return value


def _build(
    builder: TraceBuilder,
    c: Config,
    precision: Precision,
    tuning: Tuning,
    batch: int,
    sequence: int,
    attention: str,
    optimizer: str,
    loss: str,
    micro_batches: int,
    route: tuple[int, float],
) -> Trace:
    tape = Tape(builder, precision)
    weights = make_parameters(tape, c, tuning)
    trained = [(value, layer) for value, layer in tape.parameters if tape.needs_gradient(value)]
    samples = batch // micro_batches
    gradients: dict[int, Value] = {}
    if micro_batches == 1:
        tape.samples = samples
    loads = []
    for i in range(micro_batches):
        tape.prefix = f"mb{i}." if micro_batches > 1 else ""
        core = Core(
            implementation=attention,
            batch=samples,
            sequence=named(sequence, TOKENS),
            heads=c.heads,
            kv_heads=c.kv_heads,
            head=c.head,
            dropout=c.attention_dropout,
            softmax_fp32=c.of_family.softmax_fp32,
            mask=None,
            causal=c.of_family.causal,
            window=c.window,
            by_head=c.of_family.joins_heads,
        )
        load = routing(c, samples * sequence, seed=route[0] + i, skew=route[1]) if c.experts else {}
        loads.append(load)
        result = loss_of(tape, Model(c, weights, core, load, tuning), loss)
        if not tape.needs_gradient(result):
            raise WorkloadError("frozen: the loss depends on no trained weight: nothing is left to train")
        tape.leave_autocast()
        backward(tape, result, gradients)
    tape.prefix = ""
    update(builder, precision, optimizer, trained, gradients)
    builder.meta.update(
        model=c.name,
        family=c.family,
        batch=batch,
        sequence=sequence,
        tokens=batch * sequence,
        samples=batch,
        micro_batches=micro_batches,
        precision=precision.name,
        attention=attention,
        optimizer=optimizer,
        loss=loss,
        layers=c.layers,
        parameters=sum(value.elements for value, _ in tape.parameters),
        model_flops=tape.product_flops,
        source=c.source,
    )
    if len(trained) < len(tape.parameters):
        builder.meta |= {
            "trainable_parameters": sum(value.elements for value, _ in trained),
            "frozen": list(tuning.frozen),
            "frozen_dtype": tuning.stored(precision, of_linear=True),
        }
    if tuning.rank:
        adapters = {"lora_rank": tuning.rank, "lora_targets": list(tuning.targets), "lora_dropout": tuning.dropout}
        builder.meta |= adapters
    if c.experts:
        builder.meta["expert_loads"] = [{str(layer): list(load) for layer, load in part.items()} for part in loads]
    return builder.build()
