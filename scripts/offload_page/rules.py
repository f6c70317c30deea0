"""Why a policy that may do what `swap_all` does is slower on some machine: the published rule, and what it is for."""

from __future__ import annotations

import inspect
import re

from sim.policies import policy_class

RULES = {
    "save_on_cpu": "the device waits for every copy; it needs no stream and no order of events, and was published as an"
    " example of hooks",
    "offload_activations": "each backward op is fetched one op ahead; that holds the least memory, and hooks know no"
    " graph to look further",
    "layer_offload": "the first layers leave whole, and forward waits for them at set layers; the device then never"
    " holds more than so many layers",
    "swap_attention": "a layer waits for its own copies when its forward ends, and fetches them in its own backward;"
    " no tensor is on the device outside its layer",
    "lru_tiering": "nothing leaves before memory is short, and nothing returns before it is read; it knows no future",
    "uvm": "a page moves when it is touched; the program needs no change, and nobody is asked",
    "vdnn": "each layer ends when its copies have, so that what it freed is certainly free for the next; and `all`"
    " offloads every layer's input, whatever the link carries",
    "vdnn_pp": "prefetches begin beside set layers, found by vDNN's search, later than a block ahead; no offload is"
    " given up",
    "cdma": "vDNN's moments and waits, with fewer bytes; the hardware was to be invisible to software",
    "cswap": "vDNN's moments and waits; only what each copy carries is chosen",
    "tflms": "one distance in the graph for all tensors decides what leaves and when it returns; four numbers are tuned"
    " instead of each tensor's times",
    "swapadvisor": "buffers of fixed size classes, and a search that ends; in return it chooses order, allocation and"
    " copies together",
    "modnn": "what is away longest leaves, which need not be what costs least, and copies queue; sub-batches run every"
    " op once for each part, with its launch: it goes below the memory of a single batch",
    "flashneuron": "all that leaves goes to drives, which are slower than the link to the host; in return the host's"
    " memory, and its bandwidth, stay free for what the host does",
    "autotm": "a copy runs beside one op, or holds the device: the device waits for each that takes longer",
    "zero_offload": "states and the update live on the host: its CPU updates at the pace of its memory",
    "zero_infinity": "all states live below the device, and are fetched for each op",
    "patrickstar": "chunks of states share the device with activations; the update is the CPU's where they do not fit",
    "stronghold": "layers' states pass through a window, and the CPU updates",
    "gist": "encodings are computed on the device, and hold less; nothing is offloaded",
    "smartpool": "it assigns addresses and moves nothing",
}
"""Policy -> rule and reason; of others, their own docstring says it."""


def rule_of(name: str) -> str:
    """The rule by which a policy is slower than `swap_all` where it is, "" where nothing says it."""
    if name in RULES:
        return RULES[name]
    text = " ".join((inspect.getdoc(policy_class(name)) or "").split())
    said = [one.strip() for one in re.findall(r"[^.:]*lower than `swap_all`[^.]*", text) if "ever slower" not in one]
    return said[0] if said else ""
