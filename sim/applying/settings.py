"""What frameworks with switches can be told: each setting with the policy that simulates what it does.

Sources, all of them code or documentation of the project named:

- transformers 5.23, `modeling_utils.py`, `training_args.py` and pull request 48444: `activation_checkpointing`, called
  `gradient_checkpointing` before, round each layer, with `every_n_layers` round those whose number is a multiple;
  `offload` wraps them in `save_on_cpu(pin_memory=True)`, which copies the layers' inputs while the device waits.
- torchtune bd2a0fc7, recipes and `training/_activation_offloading.py`: `enable_activation_checkpointing` round each
  layer, `enable_activation_offloading` of what is saved, which they refuse without checkpoints, `optimizer_in_bwd`.
- DeepSpeed edaa7221, `runtime/activation_checkpointing/checkpointing.py` and the documentation of its JSON: reentrant
  checkpoints where the model calls `deepspeed.checkpointing.checkpoint`, `cpu_checkpointing` of their inputs; optimizer
  and parameters on the host or a drive (`offload_optimizer`, `offload_param`).
- Megatron-LM d98e8a64, `arguments.py`, `transformer_config.py`: full recomputation, `uniform` in groups of n layers or
  `block` of the first n; selective of the attention core; offloading of the first n layers; the optimizer on the CPU.
- MindSpeed, documentation of its features: those of Megatron-LM, `--swap-attention`, `--recompute-activation-function`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """One way to configure a framework.

    options: its options; a flag's value is True.
    policy: what simulates it, as a policy or composition is written.
    recomputes, moves: the layers in which it recomputes, or moves.
    partly: it does that to a part of what backward needs there.
    note: what else it needs, as a sentence; "" for nothing.
    """

    options: Options
    policy: str
    recomputes: Sequence[int] = ()
    moves: Sequence[int] = ()
    partly: bool = False
    note: str = ""


@dataclass(frozen=True)
class Framework:
    """A framework with switches.

    suffix: of the file that holds its options.
    settings: all that it can be told, for a number of layers.
    text: options as that file.
    """

    suffix: str
    settings: Callable[[int], Iterator[Setting]]
    text: Callable[[Options], str]


def every(layers: int, step: int) -> str:
    """Checkpoints round the layers whose number is a multiple of a step."""
    if step == 1:
        return "full_recompute"
    return f"layers {' '.join(str(i) for i in range(0, layers, step))}: full_recompute; rest: keep_all"


def first(layers: int, count: int, policy: str = "full_recompute", part: str = "") -> str:
    """A policy for the first layers, or a part of them."""
    if count == layers and not part:
        return policy
    return f"layers 0-{count - 1}{part}: {policy}; rest: keep_all"


INPUTS = "checkpoints: offload_activations(checkpointed=True{})"
"""Offloads what enters the checkpointed layers."""


def _transformers(layers: int) -> Iterator[Setting]:
    yield Setting({"gradient_checkpointing": False}, "keep_all")
    plain: dict[str, Any] = {"use_reentrant": False}
    # the names of version 4, which 5 still takes
    all_layers = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": plain}
    yield Setting(all_layers, every(layers, 1), range(layers))
    for step in range(2, layers + 1):
        yield Setting(_newer({**plain, "every_n_layers": step}), every(layers, step), range(0, layers, step), note=NEW)
    policy = f"full_recompute; {INPUTS.format(', use_streams=False')}"
    yield Setting(_newer({**plain, "offload": True}), policy, range(layers), note=NEW)


NEW = "It needs transformers 5.23 or later."


def _newer(kwargs: Options) -> Options:
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}


def _torchtune(layers: int) -> Iterator[Setting]:
    def options(checkpoint: bool, offload: bool, backward: bool) -> Options:
        return {
            "enable_activation_checkpointing": checkpoint,
            "enable_activation_offloading": offload,
            "optimizer_in_bwd": backward,
        }

    for backward, before in ((False, ""), (True, "optimizer_in_backward + ")):
        yield Setting(options(False, False, backward), "optimizer_in_backward" if backward else "keep_all")
        yield Setting(options(True, False, backward), f"{before}full_recompute", range(layers))
        yield Setting(options(True, True, backward), f"{before}full_recompute; {INPUTS.format('')}", range(layers))


CALLS = "It takes effect where the model calls deepspeed.checkpointing.checkpoint round each layer."
DRIVE = "nvme_path has to be a folder on the drive."


def _deepspeed(layers: int) -> Iterator[Setting]:
    host = {"device": "cpu", "pin_memory": True}
    drive = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
    states: tuple[tuple[Options, str, str], ...] = (
        ({}, "", ""),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": host}}, "zero_offload", ""),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host}},
            "zero_infinity(states=host, weights=host)",
            "",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": drive, "offload_param": drive}},
            "zero_infinity(states=nvme, weights=nvme)",
            DRIVE,
        ),
    )
    for state, policy, note in states:
        yield Setting(state, policy or "keep_all", note=note)
        before = f"{policy} + " if policy else ""
        for on_host in (False, True):
            checkpoints = {"partition_activations": False, "cpu_checkpointing": on_host}
            activations = "full_recompute(reentrant=True)" + ("; checkpoints: swap_all" if on_host else "")
            options = {**state, "activation_checkpointing": checkpoints}
            yield Setting(options, before + activations, range(layers), note=f"{CALLS} {note}".strip())


def _recomputation(layers: int) -> Iterator[Setting]:
    for count in range(1, layers + 1):
        full = {"--recompute-granularity": "full", "--recompute-num-layers": count}
        if layers % count == 0:
            policy = "full_recompute" if count == 1 else f"every_k(k={count})"
            yield Setting({**full, "--recompute-method": "uniform"}, policy, range(layers))
        if count < layers:
            yield Setting({**full, "--recompute-method": "block"}, first(layers, count), range(count))
    core = {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
    yield Setting(core, "selective_recompute(recompute=attention_core)", range(layers), partly=True)


OPTIMIZER = {
    "--optimizer-cpu-offload": True,
    "--use-precision-aware-optimizer": True,  # asked for by the first, and asks for the next
    "--use-distributed-optimizer": True,
}


def _megatron(layers: int) -> Iterator[Setting]:
    yield Setting({}, "keep_all")
    yield from _recomputation(layers)
    for count in range(1, layers):
        yield Setting({"--cpu-offloading-num-layers": count}, f"layer_offload(layers={count})", (), range(count))
    yield Setting(OPTIMIZER, "zero_offload")
    full = {"--recompute-granularity": "full", "--recompute-num-layers": 1, "--recompute-method": "uniform"}
    yield Setting({**OPTIMIZER, **full}, "zero_offload + full_recompute", range(layers))


def _mindspeed(layers: int) -> Iterator[Setting]:
    yield Setting({}, "keep_all")
    yield from _recomputation(layers)
    yield Setting({"--swap-attention": True}, "swap_attention", (), range(layers), True, "It needs flash attention.")
    for count in range(1, layers + 1):
        function = {"--recompute-activation-function": True, "--recompute-activation-function-num-layers": count}
        yield Setting(function, first(layers, count, part=" & *.mlp.act*"), range(count), partly=True)


# ---- as text -------------------------------------------------------------------------------------


def as_json(options: Options) -> str:
    """Options as a JSON object."""
    return json.dumps(options, indent=2) + "\n"


def as_yaml(options: Options) -> str:
    """Options as lines of YAML; values are numbers or booleans."""
    return "".join(f"{key}: {value}\n" for key, value in options.items())


def as_flags(options: Options) -> str:
    """Flags of a command line, one per line."""
    return "".join(f"{key}\n" if value is True else f"{key} {value}\n" for key, value in options.items())


FRAMEWORKS: Mapping[str, Framework] = {
    "transformers": Framework(".json", _transformers, as_json),
    "torchtune": Framework(".yaml", _torchtune, as_yaml),
    "deepspeed": Framework(".json", _deepspeed, as_json),
    "megatron": Framework(".txt", _megatron, as_flags),
    "mindspeed": Framework(".txt", _mindspeed, as_flags),
}
"""The frameworks with switches, by name."""
