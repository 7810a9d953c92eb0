"""The linearised network: a frozen network and its exact first-order change.

A network `g` with pre-trained parameters ψ0 becomes `g_lin(x; ψ) = g(x; ψ0) + D_ψ g(x; ψ0)·ψ`: linear in ψ. Only ψ is
learned; it starts at zero. One forward-mode pass computes both terms for any `nn.Module`.

References:
    Mu, Liang, Li, "Gradients as Features for Deep Representation Learning" (2020), https://arxiv.org/abs/2004.05529
    Achille et al., "LQF: Linear Quadratic Fine-Tuning" (2021), https://arxiv.org/abs/2012.11140
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from dlcft.network.forward_mode import LeavesTorch, Passing, forward_mode_kernels, passing
from dlcft.network.inputs import AnyLayout, functional_call, use_channels_last
from dlcft.network.prepare import drop_caches, require_statistics

Selection = Callable[[str], bool] | Iterable[str] | str | None


class Frozen(nn.Module):
    """A module built on a network that it never changes, its `base`."""

    base: nn.Module

    def train(self, mode: bool = True) -> Frozen:
        """Set the mode of everything but `base`, which stays in evaluation mode."""
        self.training = mode
        for child in self.children():
            child.train(mode and child is not self.base)
        return self


class Linearized(Frozen):
    """`base(x) + J(x)·delta`, with `base` frozen and `delta` (the paper's ψ) trainable.

    The network is copied; the caller's does not change. `base` is always in evaluation mode, also after `train()`: it
    gets no gradient, its buffers do not change and dropout is off. Fold BatchNorm first (`fold_batchnorm`) unless its
    scale and shift shall be learned.

    Layers below the first trainable parameter run as one plain forward pass.

    Args:
        module: the pre-trained network; it may take any arguments.
        train: which parameters get a `delta`: None for all; a predicate on the name; or names, module prefixes
            (`"layer4"`) and patterns (`"*.bias"`).
        output: which tensor is linearised when the network returns several: an index, a key or attribute name
            (`"pooler_output"`), or a function from the returned object to a tensor.

    Raises:
        ValueError: when nothing is trainable, a name is unknown, or a normalisation layer mixes the samples of
            a batch. Calling the network raises it too, naming the module that has no forward-mode derivative.
        TypeError: when `module` is not an `nn.Module`.

    Example:
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> linear = Linearized(network)
        >>> x = torch.ones(1, 3)
        >>> torch.equal(linear(x), network(x))  # delta is zero at first
        True
        >>> [name for name, _ in Linearized(network, train="*.bias").delta.named_parameters()]
        ['0.bias', '2.bias']
    """

    def __init__(
        self, module: nn.Module, *, train: Selection = None, output: int | str | Callable[[Any], Tensor] | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"Linearized takes an nn.Module, not {type(module).__name__}.")
        super().__init__()
        self.base = copy.deepcopy(module).requires_grad_(False).eval()
        self.output = output
        self._norms = [(name, m) for name, m in self.base.named_modules() if isinstance(m, _BatchNorm)]
        require_statistics(self.base)
        self._in_place = [m for m in self.base.modules() if getattr(m, "inplace", None) is True]
        drop_caches(self.base)
        use_channels_last(self.base)
        parameters = dict(self.base.named_parameters())
        self.delta = _tree({name: torch.zeros_like(parameters[name]) for name in select(parameters, train)})
        self._recalled: tuple[Tensor, Callable[[], Passing]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The value and the first-order change, added."""
        value, tangent = self.split(*args, **kwargs)
        return value + tangent

    def value(self, *args: Any, **kwargs: Any) -> Tensor:
        """`base(x)` alone."""
        self._decide_in_place(args, kwargs)
        with forward_mode_kernels():
            return choose_output(self.base(*args, **kwargs), self.output)

    def split(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The two terms apart: `base(x)` and `J(x)·delta`."""
        for name, norm in self._norms:
            if norm.training:
                raise ValueError(
                    f"{name!r} ({type(norm).__name__}) is in training mode: the base of a linearised network stays "
                    "in evaluation mode; call eval() on it."
                )
        self._decide_in_place(args, kwargs)
        recalled = self._recalled
        by = recalled[1]() if recalled and args and args[0] is recalled[0] else None
        try:
            with passing(by):
                return self._split(args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, LeavesTorch) as error:
            with torch.no_grad(), AnyLayout():
                self.base(*args, **kwargs)  # raises if the plain network fails too
            name = self._innermost(args, kwargs)
            kind = type(self.base.get_submodule(name)).__name__
            why = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
            raise ValueError(f"cannot linearise {name or 'the network'!r} ({kind}): {why}.") from error

    @contextmanager
    def recalling(self, x: Tensor, begin: Callable[[], Passing]) -> Iterator[None]:
        """Inside this context a call with `x` itself takes its layers' values from a pass that `begin` gives."""
        self._recalled = x, begin
        try:
            yield
        finally:
            self._recalled = None

    def change_by(self, delta: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """`J(x)·delta` for another delta."""
        return self._split((x,), {}, delta)[1]

    def extra_repr(self) -> str:
        """How many parameters are trainable."""
        trainable = sum(p.numel() for p in self.delta.parameters())
        total = sum(p.numel() for p in self.base.parameters())
        return f"trainable={trainable:,} of {total:,}"

    @torch.no_grad()
    def _decide_in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At the first call: switch in-place activations off, because forward mode would copy value and tangent again.

        They stay on if the outputs depend on it: a network may read a tensor again that an activation has changed.
        """
        if not self._in_place:
            return

        def outputs(in_place: bool) -> Tensor:
            for m in self._in_place:
                m.inplace = in_place  # type: ignore[assignment]
            own = tree_map_only(Tensor, torch.clone, (args, kwargs))
            with forward_mode_kernels():
                return choose_output(self.base(*own[0], **own[1]), self.output)

        if not torch.equal(outputs(True), outputs(False)):
            outputs(True)
        self._in_place = []

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], delta: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        delta = dict(self.delta.named_parameters()) if delta is None else delta
        base = dict(self.base.named_parameters())
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with (
            torch.inference_mode(False),  # inference mode would switch forward mode off
            torch.set_grad_enabled(recorded),
            forward_mode_kernels(),
            forward_ad.dual_level(),
        ):
            duals = {name: forward_ad.make_dual(base[name], d) for name, d in delta.items()}
            chosen = choose_output(functional_call(self.base, duals, args, kwargs), self.output)
            value, tangent = forward_ad.unpack_dual(chosen)
        if tangent is None:
            more = f" and {len(duals) - 3} more" if len(duals) > 3 else ""
            raise ValueError(f"no trainable parameter reaches the output: {', '.join(list(duals)[:3])}{more}.")
        return value, tangent

    def _innermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The name of the module in which the forward-mode pass fails, found by a second pass."""
        running = [""]
        handles = []
        for name, module in self.base.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
        try:
            self._split(args, kwargs)
        except (RuntimeError, LeavesTorch):
            return running[-1]
        finally:
            for handle in handles:
                handle.remove()
        return ""


def select(names: Iterable[str], chosen: Selection) -> list[str]:
    """The names that a selection matches: see `Linearized(train=…)`."""
    names = list(names)
    if chosen is None:
        kept = names
    elif callable(chosen):
        kept = [name for name in names if chosen(name)]
    else:
        entries = [chosen] if isinstance(chosen, str) else list(chosen)
        for entry in entries:
            if not any(_matches(entry, name) for name in names):
                prefixes = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
                near = difflib.get_close_matches(str(entry), sorted({*names, *prefixes}), n=3)
                hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
                raise ValueError(f"no parameter is named or lies under {entry!r}.{hint}")
        kept = [name for name in names if any(_matches(entry, name) for entry in entries)]
    if not kept:
        raise ValueError(f"no parameter is trainable: the network has {len(names)}, and train={chosen!r} keeps none.")
    return kept


def choose_output(returned: Any, output: int | str | Callable[[Any], Tensor] | None) -> Tensor:
    """The tensor that `output` selects from a network's return value: see `Linearized(output=…)`."""
    if callable(output):
        chosen = output(returned)
    elif output is None:
        chosen = returned
    else:
        by_attribute = isinstance(output, str) and not isinstance(returned, Mapping)
        try:
            chosen = getattr(returned, str(output)) if by_attribute else returned[output]
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"the network returned {_describe(returned)}, which has no output {output!r}.") from error
    if not isinstance(chosen, Tensor):
        raise ValueError(
            f"the network returned {_describe(chosen)}; say which tensor is meant with output= (an index, a key, or "
            "a function)."
        )
    if not chosen.is_floating_point():
        raise ValueError(f"the chosen output has dtype {chosen.dtype}; a floating-point tensor is needed.")
    return chosen


def _tree(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A bare module that holds each tensor as a parameter under its dotted name."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        parent = root
        for part in path:
            parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        parent.register_parameter(leaf, nn.Parameter(tensor))
    return root


def _matches(entry: str, name: str) -> bool:
    return name == entry or name.startswith(f"{entry}.") or fnmatchcase(name, entry)


def _describe(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} with keys {list(returned)}"
    if isinstance(returned, list | tuple):
        return f"a {type(returned).__name__} of {len(returned)}"
    return f"a {type(returned).__name__}"
