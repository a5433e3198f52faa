"""accelerate after tie: empty weights, offload to CPU and disk, and every weight in the file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import modeling
from accelerate.utils.other import clean_state_dict_for_safetensors
from safetensors.torch import load_file, save_file
from torch import nn

import tied
from tying import KINDS, PURE, Autoencoder, LanguageModel, get

TWO = ("same", "transpose")


@pytest.fixture
def accelerator() -> Iterator[Any]:
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def checkpoint(name: str, folder: Path, *, both: bool = False) -> Any:
    """A file of a tied model's weights, and the model."""
    model = KINDS[name].model(1)
    state = {**model.state_dict(), **(KINDS[name].expected(model) if both else {})}
    folder.mkdir()
    save_file({n: t.clone(memory_format=torch.contiguous_format) for n, t in state.items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    return model


# ------------------------------------------------------------------------------------ empty weights


@pytest.mark.parametrize("name", KINDS)
def test_T14_a_tie_inside_init_empty_weights_holds(name: str) -> None:
    """accelerate#3668, #2737: assigning the Parameter inside the context is no tie."""
    kind = KINDS[name]
    with init_empty_weights():
        model = kind.model()
    assert all(p.is_meta for p in model.parameters())
    assert list(model.state_dict()) == kind.names()
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    assert kind.holds(model)


def test_T14_assigning_inside_the_context_is_adopted() -> None:
    """Both sides are Parameters of their own there, over one meta storage."""
    with init_empty_weights():
        model = LanguageModel()
        model.lm_head.weight = model.wte.weight
    assert model.lm_head.weight is not model.wte.weight
    made = tied.tie(model).made
    assert [(m.first, m.second) for m in made] == [("wte.weight", "lm_head.weight")]
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.wte.weight


@pytest.mark.parametrize("name", KINDS)
def test_a_model_tied_outside_is_emptied_and_loaded(name: str, tmp_path: Path) -> None:
    wanted = checkpoint(name, tmp_path / "m")
    with init_empty_weights(include_buffers=True):
        model = KINDS[name].plain()
    KINDS[name].tie(model)
    model = load_checkpoint_and_dispatch(model, str(tmp_path / "m"), device_map={"": "cpu"})
    assert torch.equal(model(KINDS[name].inputs), wanted(KINDS[name].inputs))
    assert KINDS[name].holds(model)


# ------------------------------------------------------------------------------- dispatch, offload

ATTENTION = ("c_attn", "q", "k", "v")
MAPS: dict[str, dict[str, dict[str, str]]] = {
    "same": {
        "cpu": {"wte": "cpu", "lm_head": "cpu"},
        "source_on_disk": {"wte": "disk", "lm_head": "cpu"},
    },
    "transpose": {
        "cpu": {"encoder": "cpu", "decoder": "cpu"},
        "source_on_disk": {"encoder": "disk", "decoder": "cpu"},
        "target_on_disk": {"encoder": "cpu", "decoder": "disk"},
    },
    "slices": {
        "source_on_disk": {n: "disk" if n == "c_attn" else "cpu" for n in ATTENTION},
    },
}
PLACED = [(name, where) for name, maps in MAPS.items() for where in maps]


@pytest.mark.parametrize(("name", "where"), PLACED)
def test_T97_a_dispatched_model_computes_what_the_whole_one_does(
    name: str, where: str, tmp_path: Path
) -> None:
    """accelerate#2984, #1000, #1204, #2137, #2330; #4083: all that was on disk got one value."""
    kind = KINDS[name]
    wanted = checkpoint(name, tmp_path / "m")
    with init_empty_weights():
        model = kind.model()
    model = load_checkpoint_and_dispatch(
        model, str(tmp_path / "m"), device_map=MAPS[name][where],
        offload_folder=str(tmp_path / "off"),
    )  # fmt: skip
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(kind.inputs), wanted(kind.inputs))
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert names == kind.names()
    assert [p.is_meta for p in model.parameters()] == [
        MAPS[name][where][n.partition(".")[0]] == "disk" for n in names
    ]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_a_model_that_is_offloaded_whole(name: str, way: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model, wanted = kind.model(), kind.model()
    here = torch.device("cpu")
    if way == "cpu":
        model = accelerate.cpu_offload(model, execution_device=here)
    else:
        model = accelerate.disk_offload(model, str(tmp_path), execution_device=here)
    assert all(p.is_meta for p in model.parameters())
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(kind.inputs), wanted(kind.inputs))
        assert all(p.is_meta for p in model.parameters())


def test_an_offloaded_source_is_used_by_a_target_that_is_not_offloaded() -> None:
    model, wanted = KINDS["transpose"].model(), KINDS["transpose"].model()
    x = torch.ones(2, 4)
    accelerate.cpu_offload(model.encoder, execution_device=torch.device("cpu"))
    assert model.encoder.weight.is_meta
    with torch.no_grad():
        assert torch.equal(model(x), wanted(x))
        assert torch.equal(model.decoder(torch.ones(1, 3)), wanted.decoder(torch.ones(1, 3)))


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["loaded", "placed"])
@pytest.mark.parametrize("name", TWO)
def test_a_file_with_both_names_is_dispatched_too(
    name: str, device_map: Any, tmp_path: Path
) -> None:
    wanted = checkpoint(name, tmp_path / "m", both=True)
    model = KINDS[name].model()
    model = load_checkpoint_and_dispatch(model, str(tmp_path / "m"), device_map=device_map)
    assert torch.equal(model(KINDS[name].inputs), wanted(KINDS[name].inputs))
    assert KINDS[name].holds(model)


@pytest.mark.parametrize("name", TWO)
def test_a_file_with_only_the_other_name_is_refused(name: str, tmp_path: Path) -> None:
    """accelerate fills in weights by name, before the module sees them."""
    target, source, _ = KINDS[name].ties[0]
    checkpoint(name, tmp_path / "m", both=True)
    state = load_file(tmp_path / "m" / "model.safetensors")
    del state[source]
    save_file(state, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(tied.TieError) as caught:
        modeling.load_checkpoint_in_model(KINDS[name].model(), str(tmp_path / "m"))
    assert caught.value.paths == (source, target)
    with pytest.raises(ValueError, match="does not have a parameter or a buffer named weight"):
        modeling.load_checkpoint_in_model(
            KINDS[name].model(), str(tmp_path / "m"), device_map={"": "cpu"}, strict=True
        )
    model = KINDS[name].model()
    model.load_state_dict(state)
    assert torch.equal(get(model, target), state[target])


@pytest.mark.parametrize("name", KINDS)
def test_T97_sizes_count_a_storage_once(name: str) -> None:
    """accelerate#3308, #2330: memory was planned and taken twice."""
    kind = KINDS[name]
    model, plain = kind.model(), kind.plain()
    sizes = modeling.compute_module_sizes(model)
    assert sizes[""] == sum(4 * get(plain, n).numel() for n in kind.names())
    assert modeling.find_tied_parameters(model) == []
    placed = accelerate.infer_auto_device_map(model, {"cpu": sizes[""] + 1000})
    assert set(placed.values()) == {"cpu"}


# ------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("size", [10**9, 100], ids=["one_file", "sharded"])
@pytest.mark.parametrize("name", KINDS)
def test_T46_T47_save_model_writes_every_weight(
    name: str, size: int, tmp_path: Path, accelerator: Any
) -> None:
    """accelerate#2155, #2807, #2684, Amphion#149: the alias was dropped and then asked for."""
    kind = KINDS[name]
    model = kind.model(1)
    accelerator.save_model(model, str(tmp_path), max_shard_size=size)
    files = sorted(tmp_path.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    assert sorted(found) == sorted(kind.names())
    assert all(torch.equal(found[n], get(model, n)) for n in found)
    again = kind.model(2)
    modeling.load_checkpoint_in_model(again, str(tmp_path), strict=True)
    assert torch.equal(again(kind.inputs), model(kind.inputs))
    assert kind.holds(again)


@pytest.mark.parametrize("name", ["same", "transpose", "slices"])
def test_T47_save_state_and_load_state(name: str, tmp_path: Path, accelerator: Any) -> None:
    """accelerate#2155: save_state dropped the alias, load_state demanded it."""
    kind = KINDS[name]
    model = kind.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(kind.inputs).square().sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert kind.holds(model)


def halves() -> Any:
    """Two parameters that are disjoint rows of one buffer: no tie, and one storage object."""
    base = torch.randn(4, 3)
    return nn.ParameterDict({"a": nn.Parameter(base[:2]), "b": nn.Parameter(base[2:])})


def test_T46_accelerate_drops_disjoint_slices_of_a_plain_model(
    tmp_path: Path, accelerator: Any
) -> None:
    """The loss that the next test is about."""
    accelerator.save_model(halves(), str(tmp_path))
    assert list(load_file(tmp_path / "model.safetensors")) == ["a"]


PREPARED = {
    "copy": tied.copy,
    "split": lambda m: tied.split(m)[0].merge(tied.split(tied.copy(m))[1]),
    "f64": tied.f64,
}


@pytest.mark.parametrize("way", PREPARED)
def test_T46_a_model_prepared_with_tied_is_saved_whole(
    way: str, tmp_path: Path, accelerator: Any
) -> None:
    model = PREPARED[way](halves())
    accelerator.save_model(model, str(tmp_path))
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["a", "b"]
    assert all(torch.equal(found[n], p) for n, p in model.items())


def test_T46_a_tied_model_with_disjoint_slices_is_prepared_by_copy(
    tmp_path: Path, accelerator: Any
) -> None:
    """tie leaves what is no tie where it is; copy gives each storage memory of its own."""
    model = nn.ModuleList([halves(), KINDS["transpose"].model()])
    assert tied.tie(model).made == ()
    accelerator.save_model(tied.copy(model), str(tmp_path))
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["0.a", "0.b", "1.decoder.bias", "1.encoder.bias", "1.encoder.weight"]
    assert all(torch.equal(found[n], t) for n, t in model.state_dict().items())


def test_T46_the_state_dict_of_slices_after_tie_has_nothing_to_clean() -> None:
    for name in PURE:
        state = KINDS[name].model().state_dict()
        assert list(clean_state_dict_for_safetensors(dict(state))) == KINDS[name].names()


def test_T46_q_k_and_v_that_share_a_projection_are_in_the_file(
    tmp_path: Path, accelerator: Any
) -> None:
    """q, k and v as slices of a weight that is in the model too: all of it is written."""
    from test_field_torch_ties import Attention

    model = Attention()
    del model.c_attn
    plain = copy.deepcopy(tied.split(model)[1])
    accelerator.save_model(tied.copy(model), str(tmp_path))
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == sorted(plain)
    assert len(found) == 6


def test_a_prepared_model_trains_tied(accelerator: Any) -> None:
    model, twin = Autoencoder(), Autoencoder()
    for m in (model, twin):
        tied.tie(m, "decoder.weight", "encoder.weight", tied.transpose)
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.ones(2, 4)
    accelerator.backward(model(x).square().sum())
    twin(x).square().sum().backward()
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert torch.equal(accelerator.unwrap_model(model).decoder.weight, twin.decoder.weight)
