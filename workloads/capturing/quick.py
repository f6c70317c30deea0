"""Ops under fake tensors, without what PyTorch does for each: a step of a recurrent model has a hundred thousand.

A fake tensor's shape, strides and type follow from those of the operands. PyTorch (2.13) keeps them per op and
operands, too, and takes longer to look them up and to build the result, since it provides for symbolic sizes, other
devices and other kinds of tensors. Where an op has none of these, its result is made here: the same tensor, of a
storage of its own, or the same view of its operand's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_VIEWS = "select unsqueeze squeeze slice t transpose permute expand view _unsafe_view detach alias"
VIEWS = frozenset(_VIEWS.split())
"""Ops whose result is a view of their first operand, and that have a kernel for shapes alone."""

SHAPED_BY = {"select_backward": 3, "slice_backward": 3}
"""How many of an op's arguments its result's shape depends on; the others say where in it the operand lies."""

MOST = 50_000
"""Results whose shapes are kept."""


class Unlike(Exception):
    """An operand is not a plain fake tensor, or not a plain value."""


class QuickDispatch:
    """Runs ops on fake tensors of one mode as `func(*args, **kwargs)` would."""

    def __init__(self) -> None:
        torch: Any = import_module("torch")
        fake = import_module("torch._subclasses.fake_tensor")
        self._torch, self._kind = torch, fake.FakeTensor
        self._leaves = import_module("torch.utils._pytree").tree_leaves
        self._cpu = torch.device("cpu")
        self._plain = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format)
        self._pure: dict[Any, bool] = {}
        self._known: dict[Any, tuple[Any, Any, Any]] = {}
        self._attributes: dict[Any, dict[str, Any]] = {}  # per mode those of any fake tensor

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op's result."""
        pure = self._pure.get(func)
        if pure is None:
            pure = self._pure[func] = self._is_pure(func)
        view = func._opname in VIEWS
        if not (pure or view) or not args or type(args[0]) is not self._kind:
            return func(*args, **kwargs)
        mode = args[0].fake_mode
        try:
            shaping = args[: SHAPED_BY.get(func._opname)]
            key = (func, self._key(shaping, mode), self._key(tuple(kwargs.items()), mode) if kwargs else ())
        except Unlike:
            return func(*args, **kwargs)
        if view:
            return self._of_shape(mode, func, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            shape, strides, dtype = known
            return self._of_shape(mode, self._torch.empty_strided, (shape, strides), {"dtype": dtype, "device": "meta"})
        out = func(*args, **kwargs)
        if len(self._known) < MOST and self._is_whole(out, mode) and not self._shares(out, (args, kwargs)):
            self._known[key] = (tuple(out.shape), out.stride(), out.dtype)
        return out

    def made(self, mode: Any, shape: Any, strides: Any, dtype: Any) -> Any:
        """A new fake tensor."""
        known = {"dtype": dtype, "device": "meta"}
        return self._of_shape(mode, self._torch.empty_strided, (shape, strides), known)

    def _of_shape(self, mode: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """The fake tensor round a result that has a shape alone.

        PyTorch's own manager of such calls and its constructor do this, too, and ask more before.
        """
        c = self._torch._C
        before = mode.in_kernel_invocation
        with c._DisableTorchDispatch(), c._PreserveDispatchKeyGuard():
            mode.in_kernel_invocation = True
            c._set_meta_in_tls_dispatch_include(True)
            try:
                seen = run(*args, **kwargs)
            finally:
                mode.in_kernel_invocation = before
        attributes = self._attributes.get(mode)
        if attributes is None:
            out = self._kind(mode, seen, self._cpu)
            self._attributes[mode] = dict(vars(out))
            return out
        out = self._torch.Tensor._make_subclass(
            self._kind, seen, seen.requires_grad, dispatch_device=True, device_for_backend_keys=self._cpu
        )
        if mode._allow_unsafe_data_ptr_access:
            c._set_warn_deprecated_on_mutable_data_ptr(out)
        else:
            c._set_throw_on_mutable_data_ptr(out)
        vars(out).update(attributes)
        return out

    def _shares(self, out: Any, given: Any) -> bool:
        """Whether a result lies in an operand's storage, which not every op's schema tells."""
        storage = out.untyped_storage()._cdata
        return any(type(x) is self._kind and x.untyped_storage()._cdata == storage for x in self._leaves(given))

    def _is_pure(self, func: Any) -> bool:
        """Whether an op returns one new tensor whose shape does not depend on values."""
        schema, tags = func._schema, self._torch.Tag
        writes_or_shares = any(x.alias_info is not None for x in (*schema.arguments, *schema.returns))
        depends = {tags.data_dependent_output, tags.dynamic_output_shape} & set(func.tags)
        one = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        return func.namespace == "aten" and one and not writes_or_shares and not depends

    def _key(self, value: Any, mode: Any) -> Any:
        kind = type(value)
        if kind is self._kind:
            if value.constant is not None or value.fake_mode is not mode or value.fake_device != self._cpu:
                raise Unlike
            return value.shape, value.stride(), value.dtype, value.layout
        if kind is tuple or kind is list:
            return tuple([self._key(each, mode) for each in value])
        if kind in self._plain:
            return kind, value
        raise Unlike

    def _is_whole(self, out: Any, mode: Any) -> bool:
        """Whether a result is a plain fake tensor that fills a storage of its own."""
        if type(out) is not self._kind or out.fake_mode is not mode or out.constant is not None:
            return False
        if out.layout != self._torch.strided or out.fake_device != self._cpu or out.storage_offset():
            return False
        reach = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
        needed = reach * out.element_size() if out.numel() else 0
        return bool(out.untyped_storage().nbytes() == needed) and not (out.is_conj() or out.is_neg())
