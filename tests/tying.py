"""Small PyTorch models that are built without ties, and the ties that the tests put on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import tied


class Autoencoder(nn.Module):
    """An encoder and a decoder, whose weight may be the encoder's transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.decoder = nn.Linear(3, 4)

    def forward(self, x: Any) -> Any:
        return self.decoder(torch.relu(self.encoder(x)))


class LanguageModel(nn.Module):
    """An embedding and a head, whose weight may be the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)

    def forward(self, x: Any) -> Any:
        return self.lm_head(self.wte(x))


class Attention(nn.Module):
    """GPT-2's combined projection, and q, k and v, which may read parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(4, 12)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.c_attn(x).sum() + 2 * self.q(x) + 3 * self.k(x) * self.v(x)


class Pair(nn.Module):
    """Two parameters; `extra` shapes are further ones."""

    def __init__(self, source: Any, target: Any, **extra: Any) -> None:
        super().__init__()
        self.source = nn.Parameter(torch.randn(source))
        self.target = nn.Parameter(torch.randn(target))
        for name, shape in extra.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Any) -> Any:
        return x * (self.source.square().sum() + 3 * self.target.square().sum())


class Trio(Pair):
    """Three parameters, of which one may read another that reads the third."""

    def __init__(self) -> None:
        super().__init__((4, 3), (3, 4), last=(2, 4))

    def forward(self, x: Any) -> Any:
        return x * ((self.source @ self.target).sum() + self.last.square().sum())


def thirds(name: str) -> list[tuple[str, str, Any]]:
    """The ties of q, k and v to a parameter of c_attn."""
    return [
        (f"q.{name}", f"c_attn.{name}", lambda w: w[:4]),
        (f"k.{name}", f"c_attn.{name}", lambda w: w[4:8]),
        (f"v.{name}", f"c_attn.{name}", lambda w: w[8:]),
    ]


@dataclass(frozen=True)
class Kind:
    """A model, the ties to put on it, and something to call it with."""

    build: Callable[[], nn.Module]
    ties: tuple[tuple[Any, ...], ...]
    inputs: torch.Tensor
    pure: bool = True

    def plain(self, seed: int = 0) -> Any:
        """The model without a tie."""
        torch.manual_seed(seed)
        return self.build()

    def model(self, seed: int = 0) -> Any:
        """The model with all of its ties."""
        return self.tie(self.plain(seed))

    def tie(self, model: Any) -> Any:
        for target, source, view in self.ties:
            tied.tie(model, target, source, view)
        return model

    @property
    def targets(self) -> list[str]:
        return [target for target, _, _ in self.ties]

    def names(self) -> list[str]:
        """The parameters that are left, in the module's own order."""
        return [n for n, _ in self.plain().named_parameters() if n not in self.targets]

    def expected(self, model: Any) -> dict[str, torch.Tensor]:
        """What each target has to read: the view of the sources' present values."""
        found = {}
        for target, source, view in self.ties:
            sources = [source] if isinstance(source, str) else source
            values = [found.get(name, get(model, name)).detach() for name in sources]
            found[target] = values[0] if view is None else view(*values)
        return found

    def holds(self, model: Any) -> bool:
        """Whether every target reads what it has to, bit for bit."""
        return all(torch.equal(get(model, n), v) for n, v in self.expected(model).items())


def get(model: Any, path: str) -> Any:
    """The tensor at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(model.get_submodule(module), name)


def put(model: Any, path: str, value: Any) -> None:
    module, _, name = path.rpartition(".")
    setattr(model.get_submodule(module), name, value)


def bent(x: torch.Tensor) -> torch.Tensor:
    """A function that computes; at the module's top level, so that pickle can name it."""
    return x.tanh()


def unbent(x: torch.Tensor) -> torch.Tensor:
    return x.atanh()


def low_rank(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


PAIR = torch.ones(2)
KINDS: dict[str, Kind] = {
    "same": Kind(
        LanguageModel, (("lm_head.weight", "wte.weight", None),), torch.tensor([[1, 2, 6]])
    ),
    "transpose": Kind(
        Autoencoder,
        (("decoder.weight", "encoder.weight", tied.transpose),),
        torch.tensor([[2.0, -1.0, 3.0, 1.0], [-2.0, 1.0, -3.0, -1.0]]),  # no relu is dead for both
    ),
    "slices": Kind(Attention, tuple(thirds("weight") + thirds("bias")), torch.ones(2, 4)),
    "diagonal": Kind(lambda: Pair((4, 4), 4), (("target", "source", torch.diagonal),), PAIR),
    "overlap": Kind(
        lambda: Pair(8, 5, other=5),
        (("target", "source", lambda v: v[:5]), ("other", "source", lambda v: v[3:])),
        PAIR,
    ),
    "chain": Kind(
        Trio,
        (("target", "source", tied.transpose), ("last", "target", lambda w: w[1:])),
        PAIR,
    ),
    "triu": Kind(
        lambda: Pair((4, 4), (4, 4)), (("target", "source", torch.triu),), PAIR, pure=False
    ),
    "several": Kind(
        lambda: Pair((4, 2), (4, 5), b=(2, 5)),
        (("target", ("source", "b"), low_rank),),
        PAIR,
        pure=False,
    ),
}
PURE = [name for name, kind in KINDS.items() if kind.pure]
