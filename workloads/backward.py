"""From the tape of a forward pass to its backward ops.

Autograd runs the most recently recorded node first. This is the reverse of the forward order wherever gradients are
ready, which here they always are; it ends at the first op that depends on a trained weight. When a second gradient
arrives for a value, the two are added out of place into a new tensor (autograd's InputBuffer), and both addends are
released. A weight used twice (tied embeddings) therefore has
three gradients resident for a moment. With several microbatches the gradient of a weight stays, and later ones are
accumulated into it in place (AccumulateGrad). Where gradients are kept in fp32 (Megatron-LM's main_grad; its kernel
that accumulates as it multiplies is of the stack `fused`), each is added to that one; the buffers are made when they
are first needed, while Megatron-LM's exist from the start, which the peak of an iteration of one microbatch leaves out.
"""

from __future__ import annotations

from workloads.costs import element_flops
from workloads.tape import Tape, Value


def backward(tape: Tape, loss: Value, gradients: dict[int, Value]) -> None:
    """Append the backward ops of all nodes on `tape`, newest first, and remove the nodes from it.

    tape: a recorded forward pass.
    loss: the value to differentiate.
    gradients: the gradient of each weight so far, by the weight's slot; updated in place.
    """
    tape.phase, tape.layer = "backward", -1
    tape.accumulating = bool(gradients)
    seed = tape.gradient(loss)
    tape.op("loss.bwd", "elementwise", [loss], [seed])
    tape.finish_node()
    tape.waiting = waiting = {loss.slot: seed}
    uses_left, tape.left = tape.left, {}
    tape.shared = {slot for slot, uses in uses_left.items() if uses > 1}
    while tape.nodes:
        node = tape.nodes.pop()
        tape.layer = node.layer
        arrived = [waiting.pop(out.slot, None) for out in node.outputs]
        if all(gradient is None for gradient in arrived):
            continue
        node_gradients = node.rule(*arrived)
        tape.finish_node(arrived)
        for value, gradient in zip(node.inputs, node_gradients, strict=True):
            if gradient is None or not tape.needs_gradient(value):
                continue
            uses_left[value.slot] -= 1
            if value.slot in waiting:
                gradient = _sum(tape, value, waiting.pop(value.slot), gradient, last=not uses_left[value.slot])
            if not value.parameter or uses_left[value.slot]:
                waiting[value.slot] = gradient
            elif not tape.accumulating or value.slot not in gradients:  # an expert may have had no tokens before
                gradients[value.slot] = tape.main_gradient(value, gradient)
            else:
                gradients[value.slot] = _accumulate(tape, value, gradients[value.slot], gradient)
    tape.phase, tape.layer = "forward", -1


def _sum(tape: Tape, value: Value, a: Value, b: Value, *, last: bool) -> Value:
    if value.parameter and last:
        tape.shared.discard(value.slot)  # this is the sum: the gradient itself
    out = tape.gradient(value)
    name = value.name.removeprefix(tape.prefix)
    tape.op(f"{name}.grad.add", "elementwise", [a, b], [out], flops=element_flops("add", value.elements))
    tape.finish_node()
    return out


def _accumulate(tape: Tape, value: Value, total: Value, gradient: Value) -> Value:
    out = tape.overwrite(total, f"{value.name}.grad", "gradient")
    name = f"{value.name}.grad.accumulate"
    tape.op(name, "elementwise", [total, gradient], [out], flops=element_flops("add", value.elements))
    tape.finish_node()
    return out
