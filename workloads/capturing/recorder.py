"""Observes a step as PyTorch dispatches it: which op allocates, reads and writes which storage, and when each is freed.

A storage is identified by its `UntypedStorage` object. A weak reference to it tells when PyTorch releases it, whoever
held it last: Python, autograd or an optimizer.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from inspect import signature
from math import prod
from typing import Any

from sim.errors import TiersimError, WorkloadError
from workloads.capturing import asked, packed
from workloads.capturing.arithmetic import PACKED, executed_of, flops_of
from workloads.capturing.calls import LayerCalls
from workloads.capturing.kernels import counts_on_host
from workloads.capturing.making import in_constructor
from workloads.capturing.places import called_of_torch, is_of_autograd, line_of
from workloads.capturing.products import has_channels_last, rounded_to_tf32
from workloads.capturing.quick import QuickDispatch
from workloads.capturing.record import Kernel, Recording, Storage
from workloads.capturing.selections import Selected, Selections, chosen, note_reduced, read
from workloads.capturing.unbound import Clock, nothing_saved, unbound
from workloads.importers.optrace import DTYPES

IGNORED = ("prim", "profiler")
ALLOCATES = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"))
OF_ONE_TYPE = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution"))
"""Products that PyTorch refuses where operands differ in type, but not under fake tensors."""
OVERWRITES = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"))
LOOKUPS = frozenset(("embedding", "index", "index_select", "gather"))
WHOLE = ("scaled_dot_product_attention", "dropout")
"""Composed ops that are mapped to kernels (see `workloads.capturing.kernels`) before they are decomposed."""
RUNNING = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
"""Positions of running statistics, which these ops write in place in training (argument 5) although their schema does
not say so. The write is recorded as a separate op, so that the norm itself can be recomputed."""
AS_LONG = "packed sequences are as long as the longest may be"
RESERVED = "what the kernel of a recurrent layer keeps for backward beside its results is unknown, and left out"
OTHER_DTYPES = {"bool": "bool", "int64": "int64", "int32": "int32", "uint8": "uint8", "int16": "int16"}


class Recorder:
    """Records a step from `begin` on; before that it only tracks storages.

    What the module is, `know_module` says, at the latest before `begin`.

    cuda: whether the step stands for one on a GPU.
    selected: what is taken of conditions on values, as for `workloads.capture.capture`.
    """

    def __init__(self, *, cuda: bool, selected: Selected = None) -> None:
        self.torch: Any = import_module("torch")
        self.leaves = import_module("torch.utils._pytree").tree_leaves
        self.flops = import_module("torch.utils.flop_counter").flop_registry
        self.fake: Any = import_module("torch._subclasses.fake_tensor")
        self._asks_device = self.torch.ops.prim.device.default
        self._quick = QuickDispatch()
        self._ask_value = (self.torch.ops.aten._local_scalar_dense.default, self.torch.ops.aten.item.default)
        self.cuda = cuda
        self._selections = Selections(selected)
        self.recording = Recording(version=str(self.torch.__version__), tf32=rounded_to_tf32(self.torch))
        self.names: dict[int, str] = {}
        self.calls = LayerCalls(self.torch.nn.Module())
        self.parameters: dict[int, str] = {}
        self._sizes: dict[int, tuple[str, int]] = {}  # address of a parameter's storage -> name and elements
        self.active = False
        self.updating = False
        self.in_backward = False
        self.after_backward = False
        self._root: Any = self.torch.nn.Module()
        self._mode: Any = None
        self._kept: dict[int, Any] = {}  # per storage the number that a module last stored in it
        self._outer = -1  # the backward pass in which an optimizer runs
        self._evaluating = False  # an optimizer calls the step's own function
        self._stack: list[str] = []
        self._running: list[Any] = []
        self._since: list[int] = []  # sequence number of the next autograd node when …
        self._path: list[str] = []  # … this module became the innermost one
        self._call: list[int] = []  # … in this layer
        self._ids: dict[int, int] = {}  # address of a storage -> its id
        self._weak: dict[int, Any] = {}
        self._shared: dict[int, Any] = {}  # of fake tensors that stand for one with data
        self._host: set[int] = set()
        self._next = 0
        self._clock: Clock | None = None  # of the iteration that runs, if it is watched
        self._unsaved = Clock()  # of the one before in which nothing was saved

    # ---- what is known in advance ------------------------------------------------------------

    def know(self, tensor: Any, name: str, role: str) -> None:
        """Set the name and the role of a tensor, and track it from now on."""
        i = self._id(tensor)
        if i is None:
            i = self._follow(tensor, name, role, -1)
        if role == "input":
            asked.of_batch(tensor)
        storage = self.recording.storages[i]
        storage.name, storage.role, storage.layer = name, role, self.calls.first(name)

    def know_module(self, root: Any, layers: str | Sequence[str] | None = None, apart: Sequence[str] = ()) -> None:
        """Name all parameters and buffers of the module; tied ones get their first name.

        layers: which parts of it are layers; an op belongs to the layer in which its module is.
        apart: parts that are models of their own. Those that the step never calls (an average of another's weights)
            have no layers, and their parameters are not counted.
        """
        self._root = root
        self.names = {id(module): name for name, module in root.named_modules()}
        self.calls = LayerCalls(root, layers, apart)
        self._sizes = {}
        for name, parameter in root.named_parameters():
            self.parameters[id(parameter)] = name
            self._sizes[parameter.untyped_storage()._cdata] = name, parameter.numel()
            self.know(parameter, name, "weight")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_arrived)
        for name, buffer in root.named_buffers():
            self.know(buffer, name, "weight")

    def _know_weights_again(self) -> None:
        """Name the storages that parameters and buffers were given since: `p.data = …`, `self.average = …`."""
        for name, tensor in (*self._root.named_parameters(), *self._root.named_buffers()):
            i = self._id(tensor)
            known = None if i is None else self.recording.storages.get(i)
            if (known is None or known.role != "weight") and hasattr(tensor, "fake_mode"):
                self.know(tensor, name, "weight")

    def rehearse(self, iteration: Callable[[], Any]) -> None:
        """Run an iteration before the captured one to see until when the program's own variables hold what is saved.

        It is repeated as it is where it can't do without what autograd saves.
        """
        self._clock = Clock()
        try:
            with nothing_saved(self.torch, self.fake.FakeTensor, self._stand_in) as unsaved:
                iteration()
        except TiersimError:
            raise
        except Exception:
            self._clock, self.updating, self._evaluating = None, False, False
        else:
            if not unsaved.again:
                self._unsaved, self._clock = self._clock, None
                return
        self._clock = None
        iteration()

    def _stand_in(self, mode: Any, shape: Any, strides: Any, dtype: Any) -> Any:
        """A tensor that the step does not make."""
        tensor = self._quick.made(mode, shape, strides, dtype)
        self._follow(tensor, "saved", "temporary", -1)
        return tensor

    def begin(self) -> None:
        """Start recording; the storages that live now exist from the start."""
        self.recording.kernels.clear()
        self.recording.mapped.clear()
        self.recording.assumed.clear()
        self.recording.summed.clear()
        self.recording.folded = 0
        self.calls.settle()
        self.recording.parameters = sum(size for name, size in self._sizes.values() if self.calls.is_used(name))
        self._know_weights_again()
        alive = {i: s for i, s in self.recording.storages.items() if s.freed is None}
        for storage in alive.values():
            storage.made, storage.mutated, storage.saved_for = -1, False, ""
            storage.layer = self.calls.first(storage.name)
            if storage.role == "activation":
                storage.role = "temporary"
        self.recording.storages = alive
        self.active, self.after_backward, self._clock = True, False, Clock()

    def finish(self) -> Recording:
        """Stop recording."""
        self._know_weights_again()
        self.active = False
        assert self._clock is not None
        for i, end in unbound(self._clock, self._unsaved, len(self.recording.kernels)).items():
            if i in self.recording.storages:
                self.recording.storages[i].unbound = end
        self.recording.host = len(self._host)
        self.recording.layers, order = self.calls.in_order(kernel.layer for kernel in self.recording.kernels)
        for kernel in self.recording.kernels:
            kernel.layer = order[kernel.layer]
        for storage in self.recording.storages.values():
            storage.layer = order.get(storage.layer, -1)  # of a call before this iteration
        return self.recording

    def count(self, kernel: str) -> None:
        """Record that a call was sent to a GPU's kernel."""
        self.recording.mapped[kernel] = self.recording.mapped.get(kernel, 0) + 1

    def assume(self, what: str) -> None:
        """Record that the step asked for something that is unknown without data."""
        self.recording.assumed[what] = self.recording.assumed.get(what, 0) + 1

    # ---- hooks -------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe modules, optimizers and dispatched ops while the context lasts."""
        modules = import_module("torch.nn.modules.module")
        optimizers = import_module("torch.optim.optimizer")
        from unittest.mock import patch  # brings asyncio with it

        with ExitStack() as stack:
            stack.callback(lambda: self.calls.close())
            for handle in (
                modules.register_module_forward_pre_hook(self._enter),
                modules.register_module_forward_hook(self._leave, always_call=True),
                optimizers.register_optimizer_step_pre_hook(self._begin_update),
                optimizers.register_optimizer_step_post_hook(self._end_update),
            ):
                stack.callback(handle.remove)
            autograd = self.torch.autograd
            stack.enter_context(patch.object(autograd, "backward", self._backward(autograd.backward)))
            stack.enter_context(patch.object(autograd, "grad", self._gradients(autograd.grad)))
            stack.enter_context(patch.object(self.fake.FakeTensor, "get_nested_int", self._refuse_jagged))
            self._mode = stack.enter_context(_dispatch_mode(self._dispatched))
            yield

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """PyTorch's backward pass, whose ops include the one that creates the first gradient."""

        @wraps(run)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.in_backward = True
            try:
                return run(*args, **kwargs)
            finally:
                self.in_backward = self._evaluating = False

        return backward

    def _gradients(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.autograd.grad`, after which a forward pass goes on if its result is differentiated again."""
        takes = signature(run)

        @wraps(run)
        def grad(*args: Any, **kwargs: Any) -> Any:
            before = self.after_backward
            out = run(*args, **kwargs)
            if takes.bind(*args, **kwargs).arguments.get("create_graph"):
                self.after_backward = before
            return out

        return grad

    def _enter(self, module: Any, args: Any) -> None:
        path, node = self.names.get(id(module)), self._node()
        if path is None:  # made as it is called: a part of the module that calls it
            path = ".".join(filter(None, (*self._stack[-1:], type(module).__name__)))
        if node is not None:
            self.calls.entered_again(path, self._place_of(node)[1])
        else:
            if self.after_backward and not self._stack:
                self.calls.restart()
            self.calls.entered(path)
        if not self._stack:
            self.after_backward, self._evaluating = False, self.updating
        self._running.append(module)
        self._stack.append(path)
        self._mark()

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        self._stack.pop()
        self._running.pop()
        self._mark()

    def _mark(self) -> None:
        self._since.append(self.torch.autograd._get_sequence_nr())
        self._path.append(self._stack[-1] if self._stack else "")
        self._call.append(self.calls.number(self._path[-1]))

    def _begin_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._know_state(optimizer)  # of an optimizer that has been used before
        self.updating, self._outer = True, self.torch._C._current_graph_task_id()

    def _end_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.updating = self._evaluating = False
        self._know_state(optimizer)

    def _know_state(self, optimizer: Any) -> None:
        """Name an optimizer's state, and leave out counters of steps that a GPU's optimizer keeps on the host."""
        groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
        for parameter, state in optimizer.state.items():
            name = self.parameters.get(id(parameter), "parameter")
            group = groups.get(id(parameter), {})
            for key, value in state.items() if isinstance(state, dict) else ():
                if not isinstance(value, self.torch.Tensor):
                    continue
                if self.cuda and key == "step" and counts_on_host(group):
                    self._leave_out(value)
                elif self._id(value) not in self._host:
                    self.know(value, f"{name}.{key}", "optimizer_state")

    def _gradient_arrived(self, parameter: Any) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self.know(parameter.grad, f"{self.parameters[id(parameter)]}.grad", "gradient")

    # ---- storages ----------------------------------------------------------------------------

    def _id(self, tensor: Any) -> int | None:
        return self._ids.get(tensor.untyped_storage()._cdata)

    def _follow(self, tensor: Any, name: str, role: str, made: int) -> int:
        storage = tensor.untyped_storage()
        i, address = self._next, storage._cdata
        self._next += 1
        self.recording.storages[i] = Storage(
            storage.nbytes(), role, name, _dtype(tensor.dtype), tuple(tensor.shape), made, layer=self.calls.first(name)
        )
        self._ids[address] = i
        self._weak[i] = weakref.ref(storage, lambda _: self._released(i, address))
        return i

    def _released(self, i: int, address: int) -> None:
        if self._ids.get(address) == i:
            del self._ids[address]
        self._weak.pop(i, None)
        self._host.discard(i)
        if self._clock is not None:
            self._clock.released(i)
        if self.active and i in self.recording.storages:
            self.recording.storages[i].freed = len(self.recording.kernels) - 1
        else:
            self.recording.storages.pop(i, None)

    def _leave_out(self, tensor: Any) -> None:
        i = self._id(tensor)
        if i is None:
            i = self._follow(tensor, "host", "temporary", -1)
        if i not in self._host:
            self._host.add(i)
            self.recording.storages.pop(i, None)

    def _resized(self, tensor: Any, i: int) -> bool:
        """Whether a storage changed its size; it then counts as released, and as a new storage from then on."""
        known = self.recording.storages.get(i)
        if known is None or known.bytes == tensor.untyped_storage().nbytes():
            return False
        self._released(i, tensor.untyped_storage()._cdata)
        return True

    # ---- ops ---------------------------------------------------------------------------------

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is self._asks_device and type(args[0]) is self.fake.FakeTensor:
            return args[0].fake_device  # two of three calls: answered here, for speed
        if packed.is_on_host(types, args):
            return packed.on_host(func, args, kwargs)
        if any(kind is not self.fake.FakeTensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper: the ops that it dispatches for its parts are observed
        if self.torch.is_inference_mode_enabled() and func._opname not in WHOLE and func._can_decompose():
            with self._mode:  # autograd, which is left out in this mode, decomposes them elsewhere
                return func.decompose(*args, **kwargs)
        if func._opname != "lift_fresh":
            args = self._without_data(args)
        try:
            out = self._quick(func, args, kwargs)
        except TiersimError:
            raise
        except (
            self.fake.UnsupportedFakeTensorException,
            self.fake.DataDependentOutputException,
            self.fake.DynamicOutputShapeException,
            self.fake.UnsupportedOperatorException,
        ) as error:
            if func in self._ask_value and self._stack and (kept := self._kept_in(args[0])) is not None:
                self.assume(asked.KEPT_NUMBER)
                return kept
            if func in self._ask_value and (number := packed.number_of(args[0])) is not None:
                return number
            if func in self._ask_value and self._may_answer(args[0]):
                value, assumed = asked.answer(args[0], inside=bool(self._stack))
                self.assume(assumed)
                return value
            out, assumed = self._sized(func, args)
            if out is None:
                raise self._refusal(func, args, error) from error
            if assumed:
                self.assume(assumed)
            if func in self._ask_value:
                return out
        if func._opname == "lift_fresh":
            self._lifted(args[0], out)
        if func._opname in ("fill_", "zero_", "copy_", "add_", "remainder_"):
            self._note_kept(func._opname, args)
        asked.note(func._opname, args, out, inside=bool(self._stack))
        packed.note(func, args, kwargs, out)
        note_reduced(func._opname, args, out)
        if not self._stack and func._opname in asked.BATCHES:
            asked.of_batch(out)
        if func.namespace not in IGNORED:
            self._record(func, args, kwargs, out)
        return out

    def _without_data(self, args: Any) -> Any:
        """An op's arguments, with a fake tensor for each that has data (an array's), which counts as of its storage."""
        if not any(type(x) is self.torch.Tensor or type(x) in (list, tuple) for x in args):
            return args
        return tuple(
            self._twin(x)
            if type(x) is self.torch.Tensor
            else type(x)(self._without_data(x))
            if type(x) in (list, tuple)
            else x
            for x in args
        )

    def _twin(self, tensor: Any) -> Any:
        """The fake tensor for one that has data; that itself where no fake one can stand for it."""
        mode = self.torch._C._get_dispatch_mode(self.torch._C._TorchDispatchModeKey.FAKE)
        if mode is None or hasattr(tensor, packed.HOST) or tensor.layout != self.torch.strided:
            return tensor
        if not tensor.untyped_storage().nbytes():
            return tensor
        twin = self._quick.made(mode, tensor.shape, tensor.stride(), tensor.dtype)
        self._share(twin, tensor)
        return twin

    def _lifted(self, tensor: Any, fake: Any) -> None:
        """What had data on the host, and counted there, is a fake tensor from now on."""
        if type(tensor) is self.torch.Tensor and hasattr(fake, "fake_mode") and self._id(tensor) is not None:
            self._share(fake, tensor)

    def _share(self, fake: Any, tensor: Any) -> None:
        """A fake tensor has the storage of one with data, which lives as long."""
        i = self._id(tensor)
        if i is None:
            i = self._follow(tensor, f"constant{self._next}", "temporary", -1)
            self.recording.storages[i].appeared = len(self.recording.kernels)
        storage = fake.untyped_storage()
        address = storage._cdata
        storage.tiersim_data = tensor
        self._ids[address] = i
        self._shared[address] = weakref.ref(storage, lambda _: self._unshared(address, i))

    def _unshared(self, address: int, i: int) -> None:
        self._shared.pop(address, None)
        if self._ids.get(address) == i:
            del self._ids[address]

    def _sized(self, func: Any, args: Any) -> tuple[Any, str]:
        """The result of an op whose size depends on values, and what is assumed by it; None where nothing is known."""
        if func._opname == packed.PACK:
            rows, sizes, known = packed.packed(*args)
            return (rows, sizes), "" if known else packed.LONG
        out, assumed = asked.selected(func._opname, args)
        return (out, assumed) if out is not None else self._taken(func, args)

    def _taken(self, func: Any, args: Any) -> tuple[Any, str]:
        """What a condition on values yields under the share that is given for it, and that in words; None for none."""
        given = self._selections.share()
        if given is None:
            return None, ""
        share, place = given
        note = f"a condition on values holds for {100 * share:g} % of them, as said of {place}"
        return self._under(share, func, args), note

    def _under(self, share: float, func: Any, args: Any) -> Any:
        return read(args[0], share) if func in self._ask_value else chosen(func._opname, args, share)

    def _refusal(self, func: Any, args: Any, error: Exception) -> WorkloadError:
        line = f" at {place}" if (place := line_of()) else ""
        share = (
            "say for which share of the elements it holds (selected=, --selected), "
            if self._can_be_said(func, args)
            else ""
        )
        why, variant = _way_out(func)
        return WorkloadError(
            f"op {func} in {self._where()} cannot run without data{line}: {type(error).__name__}; {why}: {share}"
            f"{variant}, or import a trace of a real run"
        )

    def _refuse_jagged(self, *_: Any, **__: Any) -> Any:
        """What a jagged tensor asks first of the tensor of its offsets: a size that stands for their differences."""
        line = f" at {place}" if (place := line_of()) else ""
        raise WorkloadError(
            f"op {called_of_torch()} in {self._where()} cannot run without data{line}: the sizes of a nested tensor "
            "(torch.nested) depend on data: capture a variant with padded tensors and a mask, or import a trace of a "
            "real run"
        )

    def _can_be_said(self, func: Any, args: Any) -> bool:
        """Whether a share would do."""
        with self.torch._C._DisableTorchDispatch():
            return self._under(0.5, func, args) is not None

    def _where(self) -> str:
        """The running module in words; the outermost has no path, only a class."""
        if path := self._module():
            return f"module {path!r}"
        return f"the module {type(self._running[-1]).__name__}" if self._running else "the step"

    def _unstored(self, func: Any, tensor: Any) -> WorkloadError:
        layout, where = _plain(tensor.layout), self._where()
        line = f" at {place}" if (place := line_of()) else ""
        way = "sparse=False" if "sparse" in layout else "strided tensors"
        return WorkloadError(
            f"op {func} in {where}{line}: {layout} tensors have no storage of their own; capture a variant with {way}"
        )

    def _check_types(self, func: Any, args: Any) -> None:
        """Raises WorkloadError for a product of tensors of different types."""
        kinds = dict.fromkeys(_plain(x.dtype) for x in self._tensors_in(args) if x.dtype.is_floating_point)
        if len(kinds) > 1:
            line = f" at {place}" if (place := line_of()) else ""
            raise WorkloadError(
                f"op {func} in {self._where()}{line}: its operands are of the types {' and '.join(kinds)}, which "
                "PyTorch refuses when it runs: cast one, or use torch.autocast"
            )

    def _kept_in(self, tensor: Any) -> Any:
        """The integer that a module keeps in a buffer of one element, None for any other tensor."""
        if not self._stack or tensor.dtype.is_floating_point or tensor.layout != self.torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.element_size():
            return None
        buffers = (buffer for module in self._running for buffer in module.buffers(recurse=False))
        if all(buffer.untyped_storage()._cdata != storage._cdata for buffer in buffers):
            return None
        number = self._kept.get(i, 0) if (i := self._id(tensor)) is not None else 0
        return bool(number) if tensor.dtype == self.torch.bool else number

    def _note_kept(self, op: str, args: Any) -> None:
        if self._kept_in(args[0]) is None or (i := self._id(args[0])) is None:
            return
        stored = 0 if op == "zero_" else args[1]
        number = stored if isinstance(stored, int) else getattr(stored, asked.NUMBER, None)
        if number is None or op not in ("zero_", "fill_", "copy_"):
            self._kept.pop(i, None)
        else:
            self._kept[i] = number

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        short = func._opname
        outputs = self._tensors_in((out,))
        if short in OF_ONE_TYPE:
            self._check_types(func, args)
        if not self.active:
            new = self._follow_new(outputs, short)
            if self._clock is not None and not self.updating and (new or self._written(func, args, kwargs)):
                self._clock.ran(short, new)
            return
        # lift_fresh reads the number that a new tensor is made from, not a tensor of the model
        inputs = [] if short == "lift_fresh" else self._tensors_in((*args, *kwargs.values()))
        for tensor in (*inputs, *outputs):
            if tensor.layout != self.torch.strided:
                raise self._unstored(func, tensor)
        (module, layer), phase = self._place(), self._phase(inputs)
        written = self._written(func, args, kwargs)
        whole = short in OVERWRITES and len(written) == 1 and _covers(written[0])
        positions = RUNNING[short] if short in RUNNING and args[5] else ()
        statistics = [args[position] for position in positions if args[position] is not None]
        reads = self._reads(inputs, statistics, written[0] if whole else None)
        changed = [i for x in written if (i := self._id(x)) is not None and not self._resized(x, i)]
        allocated = self._allocate(outputs, module, short, phase)
        if self._clock is not None and not self.updating and (allocated or written):
            self._clock.ran(short, allocated, len(self.recording.kernels))
        allocated, changed, reads = (
            [i for i in dict.fromkeys(x) if i not in self._host] for x in (allocated, changed, reads)
        )
        if not allocated and not changed:
            self.recording.folded += 1
            return
        storages = self.recording.storages
        for i in changed:
            storages[i].mutated = True
        for i in allocated:
            storages[i].layer = layer
        node = self._node()
        for i in reads if node is not None else ():
            if storages[i].role == "activation" and not storages[i].saved_for:
                storages[i].saved_for = node.name()
        if short == "add" and phase == "backward" and not self._stack and is_of_autograd():
            self.recording.summed.add(len(self.recording.kernels))
        flops = flops_of(self.flops, func, args, kwargs, out)
        self._note(func, args)
        self.recording.kernels.append(
            Kernel(
                op=str(func),
                module=module,
                phase=phase,
                layer=layer if phase != "update" else -1,
                reads=tuple(i for i in reads if i not in allocated),
                made=tuple(allocated),
                changed=tuple(changed),
                flops=flops,
                executed=executed_of(func, args, kwargs, flops),
                touched=0 if short in ALLOCATES else _touched(short, inputs, outputs),
                dtype=next((d for x in (*inputs, *outputs) if (d := DTYPES.get(_plain(x.dtype)))), ""),
                random=self.torch.Tag.nondeterministic_seeded in func.tags,
                allocates=short in ALLOCATES,
                recomputed=phase == "backward" and bool(self._stack),
            )
        )
        if statistics:
            self._update_statistics(statistics, module, phase, layer, allocated[1:])

    def _note(self, func: Any, args: Any) -> None:
        """Note what is assumed of a kernel, and whether it convolves images with channels last."""
        if func._opname == "convolution":
            last = has_channels_last(self.torch, args)
            self.recording.convolutions[last] = self.recording.convolutions.get(last, 0) + 1
        if func._overloadpacket.__name__ in PACKED:
            self.assume(AS_LONG)
        if func._opname == "mkldnn_rnn_layer" and args[-1]:  # it trains
            self.assume(RESERVED)

    def _tensors_in(self, values: Iterable[Any]) -> list[Any]:
        """The tensors among an op's arguments or results, which nest as lists and tuples alone."""
        found = []
        for value in values:
            if isinstance(value, self.torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += self._tensors_in(value)
        return found

    def _follow_new(self, outputs: Sequence[Any], short: str) -> list[int]:
        """What comes to be before the captured iteration."""
        new = []
        for tensor in outputs:
            if tensor.layout != self.torch.strided or not tensor.untyped_storage().nbytes():
                continue
            if self._id(tensor) is None:
                new.append(self._follow(tensor, short, "temporary", -1))
        return new

    def _reads(self, inputs: Sequence[Any], statistics: Sequence[Any], overwritten: Any) -> list[int]:
        """The storages that an op reads.

        statistics: tensors that it updates apart. overwritten: the one whose values it replaces without reading them.
        """
        reads = []
        for tensor in inputs:
            if any(tensor is x for x in statistics):
                continue
            i = self._id(tensor)
            if i is None and tensor.untyped_storage().nbytes():
                i = self._follow(tensor, f"constant{self._next}", "temporary", -1)
                self.recording.storages[i].appeared = len(self.recording.kernels)
            if i is not None and tensor is not overwritten:
                reads.append(i)
        return reads

    def _allocate(self, outputs: Sequence[Any], module: str, short: str, phase: str) -> list[int]:
        """The storages that an op allocates."""
        allocated: list[int] = []
        role, index = {"forward": "activation"}.get(phase, "temporary"), len(self.recording.kernels)
        for tensor in outputs:
            if self._id(tensor) is None and tensor.untyped_storage().nbytes():
                name = ".".join(filter(None, (module, short, f"out{len(allocated) or ''}")))
                allocated.append(self._follow(tensor, name, role, index))
                if self.cuda and (packed.is_on_host((), (tensor,)) or (short == "lift_fresh" and self.updating)):
                    self._leave_out(tensor)  # of a packed sequence, or a number
        return allocated

    def _update_statistics(self, tensors: list[Any], module: str, phase: str, layer: int, batch: Iterable[int]) -> None:
        """Record that running statistics are updated with those of this batch."""
        ids = tuple(i for x in tensors if (i := self._id(x)) in self.recording.storages and i is not None)
        storages = self.recording.storages
        for i in ids:
            storages[i].mutated = True
        touched = sum(storages[i].bytes for i in (*ids, *ids, *batch))
        kernel = Kernel(
            op="aten.running_statistics",
            module=module,
            phase=phase,
            layer=layer,
            reads=(*ids, *batch),
            made=(),
            changed=ids,
            flops=0,
            executed=0,
            touched=touched,
            dtype="fp32",
            random=False,
            allocates=False,
            recomputed=phase == "backward" and bool(self._stack),
        )
        if ids:
            self.recording.kernels.append(kernel)

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """The tensors that an op writes in place."""
        written: list[Any] = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                written += value if isinstance(value, (list, tuple)) else [value]
        return [x for x in written if isinstance(x, self.torch.Tensor)]

    def _may_answer(self, tensor: Any) -> bool:
        """Whether a value that is unknown may be made up: it does not decide on what a module is or computes."""
        if self._stack:
            return asked.known_value(tensor) is not None
        return not in_constructor(self.torch)

    # ---- where the step is -------------------------------------------------------------------

    def _node(self) -> Any:
        """The running autograd node, None outside the backward pass."""
        if self.torch._C._current_graph_task_id() == -1:
            return None
        return self.torch._C._current_autograd_node()

    def _phase(self, inputs: Iterable[Any]) -> str:
        task = self.torch._C._current_graph_task_id()
        if self.updating and task == self._outer:
            return "forward" if self._evaluating else "update"
        if self.in_backward or task != -1:
            self.after_backward = True
            return "backward"
        if self.after_backward and not self._stack:
            # between backward and the next forward pass: clipping and the like, unless it prepares the next batch
            roles = [self.recording.storages[i].role for x in inputs if (i := self._id(x)) in self.recording.storages]
            return "forward" if roles and set(roles) <= {"input"} else "update"
        return "forward"

    def _module(self) -> str:
        return self._place()[0]

    def _place(self) -> tuple[str, int]:
        """Path of the running module and number of its layer; in backward, of what created the autograd node."""
        if self._stack:
            return self._stack[-1], self.calls.number(self._stack[-1])
        node = self._node()
        return ("", -1) if node is None else self._place_of(node)

    def _place_of(self, node: Any) -> tuple[str, int]:
        """Path of the module whose forward pass created an autograd node, and number of its layer."""
        if hasattr(node, "variable"):
            path = self.parameters.get(id(node.variable), "").rpartition(".")[0]
            return path, self.calls.first(path)
        index = bisect_right(self._since, node._sequence_nr()) - 1
        return (self._path[index], self._call[index]) if index >= 0 else ("", -1)


def _way_out(func: Any) -> tuple[str, str]:
    """Why an op can't run without data, and which step could be captured instead."""
    if func._opname == "_local_scalar_dense":
        return "what it reads decides on what is computed", "capture a variant in which that is fixed"
    variant = (
        "capture a variant with a fixed one (a mask instead of a selection, padded sequences instead of packed ones)"
    )
    return "the shape of its result depends on data", variant


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(dtype: Any) -> str:
    plain = _plain(dtype)
    return DTYPES.get(plain) or OTHER_DTYPES.get(plain, plain)


def _covers(tensor: Any) -> bool:
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


def _touched(short: str, inputs: list[Any], outputs: list[Any]) -> int:
    """Bytes of all operands; of a broadcast or partial view, the bytes it shows; of a lookup, its rows."""

    def size(tensor: Any) -> int:
        shown = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        return int(min(shown * tensor.element_size(), tensor.untyped_storage().nbytes()))

    if short in LOOKUPS:
        return sum(map(size, inputs[1:])) + 2 * sum(map(size, outputs))
    return sum(map(size, inputs)) + sum(map(size, outputs))


def _dispatch_mode(handle: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """A dispatch mode that passes each op to `handle`."""
    base: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Mode(base):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing is compiled here, and the guard would take as long as the handler

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handle(func, types, args, kwargs or {})

    return Mode()
