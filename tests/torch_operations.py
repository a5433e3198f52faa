"""PyTorch's own operations on a module, each with what it makes of the memory under the members.

None of them knows of `tied`: this is what a user types. They are run on a module as PyTorch has it
and on one that went through `tied.tie`, and both results are judged alike.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import safetensors
import safetensors.torch
import torch
import torch.distributed
import torch.multiprocessing
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tied
import torch_judge
from kinds import KINDS
from torch_judge import RATE, Change, Pair, Program, Tensors, X, build, fill, gradient, loss, trains

Run = Callable[[Pair, str], Any]


@dataclass(frozen=True)
class Op:
    """An operation: its words in the table, how it runs, and what it makes of the memory.

    `memory` is given the kind's name; None where the elements are not set. `on` says which kinds it
    can be done to at all.
    """

    title: str
    run: Run
    memory: Callable[[str], Change | None] = lambda name: lambda a: a
    on: Callable[[str], bool] = lambda name: not KINDS[name].meta


def everywhere(name: str) -> bool:
    return True


def prepared(name: str, adopt: bool) -> Pair:
    model = build(name)
    if adopt:
        tied.tie(model)
        model.adopted = True
    return model


def like(model: Pair, name: str) -> Pair:
    """A fresh model with other values, prepared in the same way."""
    fresh = prepared(name, model.adopted)
    fill(fresh, name, lambda a: a * 0)
    return fresh


# ------------------------------------------------------------------------ casts and devices


def rounded(dtype: Any) -> Callable[[str], Change]:
    """The casts by name leave complex parameters as they are."""
    return lambda name: lambda a: a if a.dtype.kind == "c" else a.astype(dtype)


def to_float64(model: Pair, name: str) -> Any:
    return model.to(torch.float64)


def meta_and_back(model: Pair, name: str) -> Any:
    state = {key: x.clone() for key, x in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    return model


CASTS = {
    "to_dtype": Op("`.to(float64)`", to_float64, lambda name: lambda a: a.real.astype(np.float64)),
    "double": Op("`.double()`", lambda m, name: m.double(), rounded(np.float64)),
    "half": Op("`.half()`", lambda m, name: m.half(), rounded(np.float16)),
    "bfloat16": Op("`.bfloat16()`", lambda m, name: m.bfloat16(), rounded(ml_dtypes.bfloat16)),
    "to_empty": Op(
        '`.to("meta")`, `.to_empty`', lambda m, name: m.to("meta").to_empty(device="cpu"),
        lambda name: None, everywhere,
    ),
    "meta_and_back": Op("`to_empty`, `load_state_dict`", meta_and_back),
}  # fmt: skip

# ----------------------------------------------------------------------------- copies, files


def through_file(model: Pair, name: str) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_file(model: Pair, name: str) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return loaded(like(model, name), torch.load(file, weights_only=True))


def through_safetensors(model: Pair, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        safetensors.torch.save_file(model.state_dict(), file)
        return loaded(like(model, name), safetensors.torch.load_file(file))


def in_a_process(connection: Any) -> None:
    """Judges, in a process of its own, the models that arrive until None does."""
    while (message := connection.recv()) is not None:
        model, name = message
        connection.send(torch_judge.judge_module(model, name, lambda a: a))


class Child:
    """One spawned process for all models, as it takes seconds to start."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=in_a_process, args=(other,))
        self.process.start()
        other.close()  # so that the end of the child ends `recv`

    def judge(self, model: Pair, name: str) -> str:
        self.connection.send((model, name))
        return self.connection.recv()

    def close(self) -> None:
        self.connection.send(None)
        self.process.join()
        assert self.process.exitcode == 0


@contextlib.contextmanager
def spawned() -> Iterator[Child]:
    child = Child()
    try:
        yield child
    finally:
        child.close()


COPIES = {
    "deepcopy": Op("`deepcopy`", lambda m, name: copy.deepcopy(m), on=everywhere),
    "pickle": Op("`pickle`", lambda m, name: pickle.loads(pickle.dumps(m)), on=everywhere),
    "save_module": Op("`torch.save(module)`", through_file, on=everywhere),
    "save_state": Op("`torch.save(state_dict)`", through_state_file),
    "safetensors": Op("safetensors `save_file`", through_safetensors),
}

# ------------------------------------------------------------------------------- checkpoints


def loaded(model: Pair, state: Tensors, **how: Any) -> Pair:
    model.load_state_dict(state, **how)
    return model


def separate(name: str) -> Tensors:
    """A checkpoint from elsewhere: every name, each with memory of its own."""
    return {key: x.detach().clone() for key, x in build(name).state_dict().items()}


def from_both(model: Pair, name: str) -> Any:
    return loaded(like(model, name), separate(name))


def from_second(model: Pair, name: str) -> Any:
    return loaded(like(model, name), {KINDS[name].paths[1]: separate(name)[KINDS[name].paths[1]]})


def has_second(name: str) -> bool:
    """Whether the second name can stand for the tie in a checkpoint."""
    kind = KINDS[name]
    return kind.tied and "a" not in kind.holds


CHECKPOINTS = {
    "load": Op(
        "`load_state_dict`", lambda m, name: loaded(like(m, name), m.state_dict())
    ),
    "load_assign": Op(
        "`load_state_dict(assign=True)`",
        lambda m, name: loaded(like(m, name), m.state_dict(), assign=True),
    ),
    "load_assign_both": Op(
        "both names, `assign=True`",
        lambda m, name: loaded(like(m, name), separate(name), assign=True),
    ),
    "load_both": Op("both names", from_both),
    "load_second": Op("the second name alone", from_second, on=has_second),
}  # fmt: skip

# ---------------------------------------------------------------------------------- programs


def weights_of(module: torch.nn.Module) -> Tensors:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def in_place(module: torch.nn.Module) -> Program:
    """A module whose weights are written to for a call, and then back."""
    weights = weights_of(module)

    def call(values: Tensors) -> list[torch.Tensor]:
        with torch.no_grad():
            before = {key: weights[key].clone() for key in values}
            for key, value in values.items():
                weights[key].copy_(value)
            outputs = [y.clone() for y in module(X)]
            for key, value in before.items():
                weights[key].copy_(value)
        return outputs

    return Program(weights, call)


def functional(model: Pair, name: str) -> Program:
    weights = {key: x.detach().clone() for key, x in weights_of(model).items()}
    return Program(weights, lambda values: functional_call(model, weights | values, (X,)))


def graded(model: Pair, name: str) -> Program:
    """One step with torch.func.grad, on a dict of parameters."""
    weights = {key: x.detach() for key, x in model.named_parameters()}
    grads = torch.func.grad(lambda w: loss(functional_call(model, w, (X,)), name))(weights)
    weights = {key: x - RATE * grads[key] for key, x in weights.items()}
    return Program(weights, lambda values: functional_call(model, weights | values, (X,)))


def vmapped(model: Pair, name: str) -> Program:
    """The second of two models in one batch."""
    base = copy.deepcopy(model).to("meta")
    parameters, buffers = torch.func.stack_module_state([model, model])
    stacked = {key: x.detach() for key, x in (parameters | buffers).items()}
    weights = {key: x[1] for key, x in stacked.items()}

    def call(values: Tensors) -> list[torch.Tensor]:
        other = {key: torch.stack([stacked[key][0], value]) for key, value in values.items()}
        batch = torch.vmap(lambda w: functional_call(base, w, (X,)))(stacked | other)
        return [y[1] for y in batch]

    return Program(weights, call)


def compiled(model: Pair, name: str, backend: str = "aot_eager") -> Any:
    """A step on the gradients of the compiled module; then its outputs are the members'."""
    torch._dynamo.reset()
    program = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    if trains(name):
        loss(program(X), name).backward()
        torch.optim.SGD(model.parameters(), lr=RATE).step()
    return in_place(program)


def exported(model: Pair, name: str) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), (X,))


def through_pt2(model: Pair, name: str) -> Program:
    file = io.BytesIO()
    torch.export.save(exported(model, name), file)
    file.seek(0)
    return in_place(torch.export.load(file).module())


def to_onnx(model: Pair, name: str) -> Program:
    # The optimizer would compute what hangs on small constants; weights are larger than that.
    how = {"dynamo": True, "verbose": False, "optimize": False}
    proto = torch.onnx.export(model.eval(), (X,), **how).model_proto
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    initializers = {x.name: x for x in proto.graph.initializer}
    weights = {key: torch.tensor(onnx.numpy_helper.to_array(x)) for key, x in initializers.items()}

    def call(values: Tensors) -> list[torch.Tensor]:
        other = onnx.ModelProto()
        other.CopyFrom(proto)
        for initializer in other.graph.initializer:
            if initializer.name in values:
                array = values[initializer.name].numpy()
                initializer.CopyFrom(onnx.numpy_helper.from_array(array, initializer.name))
        session = onnxruntime.InferenceSession(other.SerializeToString(), options)
        inputs = {x.name: X.numpy() for x in session.get_inputs()}
        return [torch.from_numpy(y) for y in session.run(None, inputs)]

    return Program(weights, call)


def stepped(name: str) -> Change:
    return torch_judge.descended(name) if trains(name) else lambda a: a


PROGRAMS = {
    "functional_call": Op("`functional_call`", functional),
    "func_grad": Op("`torch.func.grad`", graded, stepped, trains),
    "vmap": Op("`torch.vmap`", vmapped),
    "compile": Op("`torch.compile`", compiled, stepped),
    "export": Op("`torch.export`", lambda m, name: in_place(exported(m, name).module())),
    "pt2": Op("a `.pt2` file", through_pt2),
    "onnx": Op("ONNX", to_onnx),
    "trace": Op("`jit.trace`", lambda m, name: in_place(torch.jit.trace(m, X))),
}

# ---------------------------------------------------------------------------------- training


def step(model: Pair, name: str, optimizer: type[torch.optim.Optimizer], **settings: Any) -> Pair:
    loss(model(X), name).backward()
    optimizer(model.parameters(), lr=RATE, **settings).step()
    return model


def clipped(model: Pair, name: str) -> Pair:
    loss(model(X), name).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return model


def averaged(model: Pair, name: str) -> Pair:
    """An average with weight 1/2 of the model and of itself with other values."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    fill(model, name, lambda a: a * 3)
    average.update_parameters(model)
    return average.module


def as_a_vector(model: Pair, name: str) -> Pair:
    vector_to_parameters(2 * parameters_to_vector(model.parameters()), model.parameters())
    return model


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """This process as a group of its own, for DDP."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        # Gloo's threads need the interpreter's lock to let go of the last gradients, and the group
        # waits for them with the lock held.
        time.sleep(0.2)
        torch.distributed.destroy_process_group()


def in_parallel(model: Pair, name: str) -> Pair:
    """One step of DDP, within `process_group`."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    loss(wrapped(X), name).backward()
    torch.optim.SGD(wrapped.parameters(), lr=RATE).step()
    return wrapped.module


def signs(a: np.ndarray) -> np.ndarray:
    return np.sign(a.real) + 1j * np.sign(a.imag) if a.dtype.kind == "c" else np.sign(a)


def length(name: str) -> float:
    """The norm of the gradient of all memory; two pieces of it have the same each."""
    return np.sqrt((np.abs(gradient(name)) ** 2).sum() * len(set(KINDS[name].bases))) or 1.0


def moved(by: Callable[[np.ndarray, np.ndarray, str], Any]) -> Callable[[str], Change]:
    return lambda name: lambda a: (a - RATE * by(a, gradient(name), name)).astype(a.dtype)


TRAINING = {
    "sgd": Op(
        "SGD", lambda m, name: step(m, name, torch.optim.SGD), moved(lambda a, g, _: g), trains
    ),
    "adam": Op(
        "Adam", lambda m, name: step(m, name, torch.optim.Adam),
        moved(lambda a, g, _: signs(g)), trains,
    ),
    "weight_decay": Op(
        "weight decay", lambda m, name: step(m, name, torch.optim.SGD, weight_decay=0.1),
        moved(lambda a, g, _: g + 0.1 * a), trains,
    ),
    "clipping": Op(
        "`clip_grad_norm_`", clipped, moved(lambda a, g, name: g / length(name)), trains
    ),
    "average": Op("EMA", averaged, lambda name: lambda a: a * 2, trains),
    "vector": Op("`parameters_to_vector`", as_a_vector, lambda name: lambda a: a * 2, trains),
    "ddp": Op("DDP", in_parallel, moved(lambda a, g, _: g), trains),
}  # fmt: skip

GROUPS = {
    "Casts and devices": CASTS,
    "Copies and files": COPIES,
    "Checkpoints": CHECKPOINTS,
    "Programs": PROGRAMS,
    "Training": TRAINING,
}
OPS = {key: op for group in GROUPS.values() for key, op in group.items()}
