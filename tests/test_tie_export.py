"""Programs made of tied modules: compiled, exported, traced, functional, ONNX.

The tie is an operation in the program, and the program holds the source once. T93 and T94 are
numbers of the project's list of field reports.
"""

from __future__ import annotations

import copy
import io
import zipfile
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, stack_module_state, vmap
from torch.nn.utils import parametrize

import tied
from tying import KINDS, Autoencoder, Kind, get

# How a tie reaches a program: nothing, a transpose, slices (six of them), two ties in a row,
# a computation, several sources.
NAMES = ("same", "transpose", "slices", "chain", "triu", "several")
every_kind = pytest.mark.parametrize("kind", [KINDS[name] for name in NAMES], ids=NAMES)

# PyTorch's own exporters and compilers use what PyTorch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning"),
]


def by_hand(kind: Kind, model: Any, x: torch.Tensor) -> torch.Tensor:
    """What a model gives where each target is an ordinary parameter of the right value."""
    values = dict(model.named_parameters()) | kind.expected(model)
    twin = kind.plain().to(next(iter(values.values())).dtype)
    twin.load_state_dict({name: values[name] for name in twin.state_dict()})
    result: torch.Tensor = twin(x)
    return result.detach()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.detach(), b.detach())


def losses(model: Any, call: Any, kind: Kind) -> list[float]:
    """Trains for three steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(kind.inputs).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch.compile


@every_kind
def test_compiled_without_a_break(kind: Kind) -> None:
    model = kind.model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(kind.inputs), by_hand(kind, model, kind.inputs))


@every_kind
def test_a_training_step_under_compile(kind: Kind) -> None:
    model, eager = kind.model(), kind.model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert losses(model, compiled, kind) == pytest.approx(losses(eager, eager, kind), rel=1e-5)
    assert kind.holds(model)
    for name, parameter in eager.named_parameters():
        close(get(model, name), parameter)


@pytest.mark.parametrize("name", ["transpose", "chain"])
def test_the_second_call_compiles_nothing(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    compiled(kind.inputs)
    assert counter.frame_count == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    close(compiled(kind.inputs), by_hand(kind, model, kind.inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["transpose", "slices"])
def test_copies_and_casts_of_a_compiled_model(name: str) -> None:
    kind = KINDS[name]
    model = kind.model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = compiled(kind.inputs).detach()
    other = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    x = kind.inputs.double()
    again = torch.compile(other, fullgraph=True, backend="aot_eager")
    close(again(x), by_hand(kind, other, x))
    close(compiled(kind.inputs), before)
    model.double()
    close(compiled(x), by_hand(kind, model, x))


def test_inductor() -> None:
    kind = KINDS["transpose"]
    model = kind.model()
    with torch.no_grad():
        close(torch.compile(model, fullgraph=True)(kind.inputs), by_hand(kind, model, kind.inputs))


# torch.export (T94)


@every_kind
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_a_program_holds_each_source_once(kind: Kind, strict: bool) -> None:
    model = kind.model()
    program = torch.export.export(model, (kind.inputs,), strict=strict)
    assert sorted(program.state_dict) == sorted(kind.names())
    assert sorted(program.graph_signature.parameters) == sorted(kind.names())
    close(program.module()(kind.inputs), by_hand(kind, model, kind.inputs))


@every_kind
def test_a_saved_program_holds_each_source_once(kind: Kind, tmp_path: Path) -> None:
    model = kind.model()
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (kind.inputs,)), file)
    weights = [
        entry.file_size
        for entry in zipfile.ZipFile(file).infolist()
        if "/data/weights/weight_" in entry.filename
    ]
    assert sorted(weights) == sorted(parameter.nbytes for parameter in model.parameters())
    loaded = torch.export.load(file)
    assert sorted(loaded.state_dict) == sorted(kind.names())
    close(loaded.module()(kind.inputs), by_hand(kind, model, kind.inputs))


def test_a_tie_written_out_by_hand_exports() -> None:
    """T94, pytorch#127357: `F.linear(h, encoder.weight.t())`; the same weight under two names."""
    kind = KINDS["transpose"]
    model = kind.model()
    program = torch.export.export(model, (kind.inputs,))
    assert [str(spec.target) for spec in program.graph_signature.input_specs if spec.target] == [
        "encoder.weight", "encoder.bias", "decoder.bias",
    ]  # fmt: skip
    trained = program.module()
    trained(kind.inputs).sum().backward()
    model(kind.inputs).sum().backward()
    close(dict(trained.named_parameters())["encoder.weight"].grad, model.encoder.weight.grad)


@pytest.mark.parametrize("name", ["transpose", "slices"])
def test_an_unflattened_program_holds_each_source_once(name: str) -> None:
    """T94, pytorch#125758: unflatten made copies of shared weights."""
    kind = KINDS[name]
    model = kind.model()
    program = torch.export.export(model, (kind.inputs,))
    module = torch.export.unflatten(program)
    assert sorted(n for n, _ in module.named_parameters()) == sorted(kind.names())
    with torch.no_grad():
        for parameter in (*model.parameters(), *module.parameters()):
            parameter.mul_(2)
    close(module(kind.inputs), by_hand(kind, model, kind.inputs))


# torch.jit.trace


@every_kind
def test_traced(kind: Kind) -> None:
    model = kind.model()
    traced = torch.jit.trace(model, kind.inputs)
    assert [name for name, _ in traced.named_parameters()] == kind.names()
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert sum(p.nbytes for p in loaded.parameters()) == sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        for parameter in (*model.parameters(), *loaded.parameters()):
            parameter.mul_(2)
    close(loaded(kind.inputs), by_hand(kind, model, kind.inputs))


# torch.func


@every_kind
def test_functional_call_gives_the_tie_the_given_source(kind: Kind) -> None:
    model = kind.model()
    given = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    other = kind.model(seed=1)
    other.load_state_dict(given)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    close(functional_call(model, given, (kind.inputs,)), by_hand(kind, other, kind.inputs))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@every_kind
def test_gradients_of_functions(kind: Kind) -> None:
    model = kind.model()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, parameters, (kind.inputs,)).square().sum()

    model(kind.inputs).square().sum().backward()
    found, rows = grad(loss)(parameters), jacrev(loss)(parameters)
    assert list(found) == kind.names()
    for name, parameter in model.named_parameters():
        close(found[name], parameter.grad)
        close(rows[name], parameter.grad)


def test_hessian_of_a_tie() -> None:
    """The two uses of a tied weight meet in the second derivative: x.T @ W.T @ W @ x."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    tied.tie(model, "1.weight", "0.weight", tied.transpose)
    x = torch.tensor([1.0, 2.0])

    def energy(w: torch.Tensor) -> torch.Tensor:
        return x @ functional_call(model, {"0.weight": w}, (x,))

    w = torch.randn(3, 2)
    expected = torch.einsum("ik,j,l->ijkl", torch.eye(3), x, x) * 2
    close(hessian(energy)(w), expected)


@every_kind
def test_an_ensemble(kind: Kind) -> None:
    # In a Sequential, since stack_module_state asks for models of one class, and a module that has
    # a parametrized tensor itself has a class of its own.
    models = [nn.Sequential(kind.model(seed)) for seed in range(3)]
    parameters, buffers = stack_module_state(models)
    assert list(parameters) == [f"0.{name}" for name in kind.names()]
    skeleton = copy.deepcopy(models[0]).to("meta")

    def call(parameters: Any, buffers: Any) -> Any:
        return functional_call(skeleton, (parameters, buffers), (kind.inputs,))

    found = vmap(call)(parameters, buffers)
    for row, (model,) in zip(found, models, strict=True):
        close(row, by_hand(kind, model, kind.inputs))


# torch.nn.utils.parametrize.cached


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return w.t()


def test_cached_computes_a_tie_once() -> None:
    model, view = Autoencoder(), Counted()
    tied.tie(model, "decoder.weight", "encoder.weight", view)
    view.calls = 0
    with parametrize.cached():
        assert model.decoder.weight is model.decoder.weight
        model(torch.ones(2, 4))
        assert view.calls == 1
    with torch.no_grad():
        model.encoder.weight.mul_(2)
    assert torch.equal(model.decoder.weight, model.encoder.weight.t())


def test_copies_keep_apart_what_they_have_cached() -> None:
    kind = KINDS["triu"]
    model = kind.model()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.source.mul_(3)
    with parametrize.cached():
        values = [one.target for one in (model, other, model)]
    assert torch.equal(values[1], torch.triu(other.source))
    assert torch.equal(values[0], torch.triu(model.source))
    assert values[2] is values[0]


def test_cached_around_a_compiled_model() -> None:
    kind = KINDS["transpose"]
    model = kind.model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with parametrize.cached():
            close(compiled(kind.inputs), by_hand(kind, model, kind.inputs))
        with torch.no_grad():
            model.encoder.weight.mul_(2)
    close(compiled(kind.inputs), by_hand(kind, model, kind.inputs))


# ONNX (T93)


class Wide(nn.Module):
    """ONNX's optimizer makes a constant of the transpose of a weight of up to 8192 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(128, 96), nn.Linear(96, 128)

    def forward(self, x: Any) -> Any:
        return self.decoder(torch.relu(self.encoder(x)))


def wide() -> Any:
    torch.manual_seed(0)
    model = Wide().eval()
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    return model


ONNX: dict[str, dict[str, Any]] = {
    "dynamo": {"dynamo": True, "verbose": False},
    "small": {"dynamo": True, "verbose": False, "optimize": False},
    "torchscript": {"dynamo": False},
}


@pytest.mark.parametrize("how", ONNX)
def test_an_onnx_file_holds_a_transposed_tie_once(how: str, tmp_path: Path) -> None:
    kind = KINDS["transpose"]
    model = kind.model().eval() if how == "small" else wide()
    x = torch.randn(2, model.encoder.in_features)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, external_data=False, **ONNX[how])
    held = onnx.load(file).graph.initializer
    assert sorted(one.name for one in held) == ["decoder.bias", "encoder.bias", "encoder.weight"]
    # Untied, or with the transpose folded into a constant, it is a whole weight larger.
    data = sum(parameter.nbytes for parameter in model.parameters())
    assert data < file.stat().st_size < data + 8_000
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_an_onnx_file_holds_slices_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"all": nn.Linear(128, 96), "k": nn.Linear(128, 32)}).eval()
    tied.tie(model, "k.weight", "all.weight", lambda w: w[32:64])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Any) -> Any:
            return self.parts["all"](x).sum() + self.parts["k"](x)

    x, both = torch.randn(2, 128), Both().eval()
    file = tmp_path / "model.onnx"
    torch.onnx.export(both, (x,), file, external_data=False, dynamo=True, verbose=False)
    floats = [one for one in onnx.load(file).graph.initializer if one.data_type == 1]
    sizes = sorted(onnx.numpy_helper.to_array(one).nbytes for one in floats)
    assert sizes == sorted(parameter.nbytes for parameter in model.parameters())
    session = onnxruntime.InferenceSession(file)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), both(x).detach(), rtol=1e-4, atol=1e-5)
