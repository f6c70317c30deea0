"""The workload of a trace in a line: the head of a page, the footer of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNSAID: Mapping[str, Any] = {
    "optimizer": "adamw_foreach",
    "loss": "torch",
    "stack": "eager",
    "micro_batches": 1,
    "frozen": None,
    "lora_rank": None,
}
"""Of a workload what is named where it is another value."""
WORDS = {
    "generate": "inference, tokens generated",
    "micro_batches": "micro-batches",
    "lora_rank": "LoRA rank",
    "sequence_parallel": "sequence parallel",
}
"""Keys of a workload and of a layout that are written otherwise."""


def workload_text(meta: Mapping[str, Any]) -> str:
    """A short description of a trace's workload, and of the devices that it is divided among.

    meta: of the trace. What is as usual, or not known, is left out.
    """
    names = ("batch", "sequence", "generate", "precision", "attention", *UNSAID)
    known = [f"{WORDS.get(key, key)} {_listed(meta[key])}" for key in names if _is_said(meta, key)]
    text = ", ".join([str(meta.get("model", "trace")), *known])
    table = meta.get("layout")
    if not isinstance(table, Mapping):
        return text
    divided = ", ".join(f"{WORDS.get(key, key)} {_listed(table[key])}" for key in table if key != "devices")
    count = table.get("devices")
    return f"{text}, {divided}" if count == 1 else f"{text}, on {count} devices: {divided}"


def _is_said(meta: Mapping[str, Any], key: str) -> bool:
    """Whether a key of a workload is worth a word: of those that have a usual value, where it is another."""
    if key == "frozen" and meta.get("lora_rank") is not None:
        return False  # adapters freeze all else
    return meta.get(key) is not None and meta[key] != UNSAID.get(key)


def _listed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
