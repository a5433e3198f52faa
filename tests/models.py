"""Odd models, one function each: containers, wrappers and framework objects seen in the field.

Each gives a model, a way to get at its arrays, and what else has to survive. Within most of them
some arrays are tied; which ones, brute force finds out from the original.
"""

from __future__ import annotations

import collections
import functools
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch

Arrays = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Odd:
    build: Callable[[], Any]
    arrays: Arrays
    settings: Callable[[Any], Any]


ODD: dict[str, Odd] = {}


def odd(arrays: Arrays, settings: Callable[[Any], Any] = lambda m: None) -> Any:
    """Enter a model into the table.

    Args:
        arrays: Its arrays, in a fixed order.
        settings: Anything that has to be equal before and after; identities as booleans.
    """

    def enter(build: Callable[[], Any]) -> Callable[[], Any]:
        ODD[build.__name__] = Odd(build, arrays, settings)
        return build

    return enter


def matrix() -> np.ndarray:
    return np.arange(12.0).reshape(3, 4)


def tensor() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


class Layer:
    """A layer of the user's own, with one weight read twice."""

    def __init__(self, w: Any) -> None:
        self.w = w
        self.wt = w.T
        self.scale = 2

    def forward(self, x: Any) -> Any:
        return self.scale * (self.w @ x)


# ------------------------------------------------------------------------------ Python's own


@odd(lambda m: m[:2], lambda m: m[2] is m)
def list_that_holds_itself() -> Any:
    w = matrix()
    model: list[Any] = [w, w.T]
    model.append(model)
    return model


@odd(lambda m: [m[0], m[1][0][0]], lambda m: m[1][0] is m)
def tuple_in_a_cycle() -> Any:
    w = matrix()
    inner: list[Any] = []
    model = (w, inner)
    inner.append(model)
    return model


@odd(
    lambda m: [m["p"], *m["state"], *(s["m"] for s in m["state"].values())],
    lambda m: next(iter(m["state"])) is m["p"],
)
def dict_with_array_keys() -> Any:
    p, q = torch.nn.Parameter(tensor()), torch.nn.Parameter(tensor())
    moment = torch.zeros(3, 4)
    return {"p": p, "state": {p: {"m": moment}, q: {"m": moment[1]}}}


@odd(lambda m: list(m), lambda m: m.maxlen)
def deque_with_a_bound() -> Any:
    w = matrix()
    return collections.deque([w[0], w[1], w], maxlen=3)


@odd(lambda m: [*m.args, *m.keywords.values()], lambda m: m.func)
def partial() -> Any:
    w = matrix()
    return functools.partial(np.add, w, out=w[:, ::-1])


def closure_over(w: Any) -> Callable[[Any], Any]:
    return lambda x: w @ x


@odd(
    lambda m: [m["w"], m["f"].__closure__[0].cell_contents],
    lambda m: m["f"](np.ones(4)).tolist(),
)
def closure() -> Any:
    w = matrix()
    return {"w": w, "f": closure_over(w)}


@odd(
    lambda m: [m["w"], *m["f"].__defaults__, *m["f"].__kwdefaults__.values()],
    lambda m: m["f"].__name__,
)
def function_with_array_defaults() -> Any:
    w = matrix()

    def f(x: Any, bias: Any = w[0], *, scale: Any = w) -> Any:
        return x @ scale + bias

    return {"w": w, "f": f}


@odd(
    lambda m: [m["layer"].w, m["call"].__self__.w],
    lambda m: (m["call"].__self__ is m["layer"], m["call"](np.ones(4)).tolist()),
)
def bound_method() -> Any:
    layer = Layer(matrix())
    return {"call": layer.forward, "layer": layer}


@odd(lambda m: [m["layer"].w, m["ref"]().w], lambda m: m["ref"]() is m["layer"])
def weak_reference() -> Any:
    layer = Layer(matrix())
    return {"layer": layer, "ref": weakref.ref(layer)}


@odd(lambda m: [m["a"], m["b"][0]], lambda m: (m.default_factory, list(m)))
def default_dict() -> Any:
    w = matrix()
    return collections.defaultdict(list, {"a": w, "b": [w.T]})


class Config(dict):  # type: ignore[type-arg]
    """A dict with attributes beside its items."""


@odd(lambda m: [m["w"], m.best], lambda m: m.name)
def dict_subclass_with_attributes() -> Any:
    w = matrix()
    model = Config(w=w)
    model.best, model.name = w[1:], "config"
    return model


class Slots:
    __slots__ = ("unset", "w", "wt")

    def __init__(self) -> None:
        raise AssertionError("__init__ must not run again")


@odd(lambda m: [m.w, m.wt], lambda m: hasattr(m, "unset"))
def slots_with_one_unset() -> Any:
    model = Slots.__new__(Slots)
    model.w = matrix()
    model.wt = model.w.T
    return model


class Pair(NamedTuple):
    encoder: Any
    decoder: Any


@odd(lambda m: list(m), lambda m: m._fields)
def named_tuple() -> Any:
    w = matrix()
    return Pair(w, w.T)


@dataclass(frozen=True)
class FrozenRecord:
    w: Any
    wt: Any = field(init=False)
    tag: str = "frozen"

    def __post_init__(self) -> None:
        object.__setattr__(self, "wt", self.w.T)


@odd(lambda m: [m.w, m.wt], lambda m: m.tag)
def frozen_dataclass_with_a_derived_field() -> Any:
    return FrozenRecord(matrix(), "kept")


@odd(lambda m: [m.w, m.row])
def simple_namespace() -> Any:
    w = matrix()
    return types.SimpleNamespace(w=w, row=w[2])


@odd(lambda m: [m["w"], m["t"]], lambda m: type(m.data))
def user_dict() -> Any:
    w = matrix()
    return collections.UserDict(w=w, t=w.T)


@odd(lambda m: [m["w"].w, m["w"].wt], lambda m: m["w"].lock.locked())
def object_with_a_lock() -> Any:
    layer = Layer(matrix())
    layer.lock = threading.Lock()
    return {"w": layer}


# ------------------------------------------------------------------------------------- NumPy


@odd(lambda m: [m["a"].data, m["a"].mask, m["plain"]], lambda m: (m["a"].fill_value, type(m["a"])))
def masked_array() -> Any:
    w = matrix()
    return {"a": np.ma.masked_array(w, mask=w > 5, fill_value=-1.0), "plain": w}


@odd(
    lambda m: [a for s in m for a in (s.data, s.indices, s.indptr)],
    lambda m: [(s.format, s.shape, s.toarray().tolist()) for s in m],
)
def sparse_matrices() -> Any:
    a = scipy.sparse.csr_array(np.eye(4) * 3)
    b = scipy.sparse.csc_array((a.data, a.indices, a.indptr), shape=(4, 4))
    return [a, b]


@odd(lambda m: [m["w"], m["w.T"]], lambda m: type(m["w"]).__name__)
def matrix_subclass() -> Any:
    w = matrix().view(np.matrix)
    return {"w": w, "w.T": w.T}


@odd(lambda m: [m["r"], m["x"]], lambda m: (type(m["r"]), m["r"].dtype.names))
def record_array() -> Any:
    r = np.array([(1, 2.0), (3, 4.0)], dtype=[("n", "i4"), ("x", "f8")]).view(np.recarray)
    return {"r": r, "x": r["x"].view(np.ndarray)}


@odd(lambda m: m)
def zero_dimensional() -> Any:
    w = matrix()
    return [w[1, 2, ...], w, np.array(5.0)]


@odd(lambda m: m)
def empties() -> Any:
    w = np.zeros((0, 3))
    return [w, w.T, np.zeros(0), matrix()[1:1]]


@odd(lambda m: m.reshape(-1)[:2].tolist(), lambda m: (m.shape, m.dtype, m[1, 0], m[1, 1]))
def object_array() -> Any:
    w = matrix()
    model = np.empty((2, 2), dtype=object)
    model[0, 0], model[0, 1], model[1, 0], model[1, 1] = w, w.T, None, "text"
    return model


@odd(
    lambda m: [m["w"], m["row"]],
    lambda m: [a.flags.writeable for a in m.values()],
)
def read_only() -> Any:
    w = matrix()
    w.flags.writeable = False
    return {"w": w, "row": w[0]}


@odd(lambda m: m, lambda m: [a.dtype.str for a in m])
def strange_dtypes() -> Any:
    days = np.array(["2020-01-01", "2021-02-02"], "datetime64[D]")
    words = np.array([["a", "bc"], ["d", "e"]])
    return [days, days[1:], words, words.T]


@odd(lambda m: m, lambda m: [a.dtype.str for a in m])
def big_endian() -> Any:
    w = np.arange(4, dtype=">f8")
    return [w, w[::2]]


# ------------------------------------------------------------------------------------- torch


class TiedCoder(torch.nn.Module):
    """The thread's model: the decoder reads the transpose of the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(4, 3)
        self.decoder = torch.nn.Linear(3, 4)
        self.decoder.weight = torch.nn.Parameter(self.encoder.weight.detach().T)
        self.register_buffer("row", self.encoder.weight.detach()[0])
        self.plain = self.encoder.weight.detach()[:, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x).relu())


@odd(
    lambda m: [*m.parameters(), m.row, m.plain],
    lambda m: (m.training, [name for name, _ in m.named_parameters()], m(torch.ones(4)).tolist()),
)
def torch_module() -> Any:
    torch.manual_seed(0)
    return TiedCoder().eval()


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq", "step")]


@odd(
    lambda m: [*m[0].parameters(), *m[1].param_groups[0]["params"], *m[1].state, *moments(m[1])],
    lambda m: (m[1].param_groups[0]["lr"], m[1].param_groups[0]["params"][0] is m[0].weight),
)
def torch_optimizer_with_state() -> Any:
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.25)
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


@odd(
    lambda m: [*m.parameters(), *m._flat_weights],
    lambda m: [w is p for w, p in zip(m._flat_weights, m.parameters(), strict=True)],
)
def torch_lstm() -> Any:
    torch.manual_seed(0)
    return torch.nn.LSTM(4, 3, num_layers=2, bidirectional=True)


@odd(
    lambda m: list(m.parameters()),
    lambda m: (type(m.head).__name__, m.head(torch.ones(4)).tolist()),
)
def torch_parametrized() -> Any:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.head = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3))
    module.other = torch.nn.Parameter(module.head.parametrizations.weight.original1.detach()[0])
    return module


class Tagged(torch.Tensor):
    """A tensor subclass without inner tensors."""


@odd(lambda m: [m["w"], m["row"]], lambda m: (type(m["w"]), m["w"].tag))
def torch_subclass() -> Any:
    w = tensor()
    tagged = w.as_subclass(Tagged)
    tagged.tag = "kept"
    return {"w": tagged, "row": w[0]}


@odd(
    lambda m: [m["t"].a, m["t"].b, m["row"]],
    lambda m: (type(m["t"]).__name__, m["t"].shape),
)
def torch_wrapper_subclass() -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    w = tensor()
    return {"t": TwoTensor(w, w.clone()), "row": w[0]}


@odd(
    lambda m: [m[0].weight, m[2].weight, m[0].bias],
    lambda m: (m[0] is m[2], len(m)),
)
def torch_sequential_with_one_layer_twice() -> Any:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    return torch.nn.Sequential(layer, torch.nn.ReLU(), layer)


@odd(
    lambda m: [m.list[0], m.list[1], m.dict["again"]],
    lambda m: (type(m.list), type(m.dict), m.list[0] is m.dict["again"]),
)
def torch_parameter_containers() -> Any:
    p = torch.nn.Parameter(tensor())
    module = torch.nn.Module()
    module.list = torch.nn.ParameterList([p, torch.nn.Parameter(p.detach()[0])])
    module.dict = torch.nn.ParameterDict({"again": p})
    return module


@odd(
    lambda m: [m.weight, m.weight.mine],
    lambda m: (m.weight.requires_grad, m.bias.requires_grad, m.weight.tag),
)
def torch_parameter_with_attributes() -> Any:
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3)
    module.bias.requires_grad_(False)
    module.weight.mine = module.weight.detach()[0]
    module.weight.tag = "kept"
    return module
