"""PEFT's adapters on one side of a tie, on both, and elsewhere.

An adapter adds to what its layer computes, and leaves the tied weight alone: it trains, is saved
and is loaded. Merged into the weight, it would change the other side too: that is refused, before
anything is merged. T87 to T91 are numbers of the project's list of field reports.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from peft.tuners.lora.config import KasaConfig
from torch import nn

import tied
from adapting import (
    MERGE,
    TOKENS,
    Autoencoder,
    X,
    alike,
    autoencoder,
    close,
    language_model,
    lora,
    refused,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'corda':UserWarning")

SIDES = [["decoder"], ["encoder"], ["encoder", "decoder"], ["mid", "decoder"]]
every_side = pytest.mark.parametrize("sides", SIDES, ids=" ".join)


# LoRA


@every_side
def test_lora_trains_as_on_an_untied_model(sides: list[str]) -> None:
    """Its base is frozen, so the tie makes no difference."""
    model = autoencoder()
    before = model.encoder.weight.detach().clone()
    adapted, plain = lora(model, sides), lora(alike(autoencoder(), Autoencoder()), sides)
    start = adapted(X).detach()
    close(start, plain(X))
    train(adapted, X)
    train(plain, X)
    assert not torch.allclose(adapted(X), start, atol=1e-3)
    close(adapted(X), plain(X))
    assert torch.equal(model.encoder.weight, before)
    assert torch.equal(model.decoder.weight, before.t())


@every_side
@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload", "safe"])
def test_merging_is_refused_and_changes_nothing(sides: list[str], how: str) -> None:
    adapted = lora(autoencoder(), sides)
    state = {name: value.clone() for name, value in adapted.state_dict().items()}
    result = adapted(X)
    call = adapted.merge_and_unload if how == "merge_and_unload" else adapted.merge_adapter
    refused(MERGE, lambda: call(safe_merge=how == "safe"))
    assert all(torch.equal(value, state[name]) for name, value in adapted.state_dict().items())
    assert not any(getattr(part, "merged_adapters", None) for part in adapted.modules())
    assert torch.equal(adapted(X), result)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_merging_a_layer_by_itself_is_refused(side: str) -> None:
    """As diffusers does."""
    model = autoencoder()
    lora(model, [side])
    refused(MERGE, getattr(model, side).merge)
    refused(MERGE, lambda: getattr(model, side).merge(safe_merge=True))


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_copies_refuse_too(side: str) -> None:
    adapted = lora(autoencoder(), [side])
    for other in (copy.deepcopy(adapted), pickle.loads(pickle.dumps(adapted))):
        close(other(X), adapted(X))
        refused(MERGE, other.merge_adapter)


@every_side
def test_unloaded_the_model_is_as_before(sides: list[str]) -> None:
    model = autoencoder()
    before = model(X)
    adapted = lora(model, sides)
    train(adapted, X)
    base = adapted.unload()
    assert base is model
    assert torch.equal(base(X), before)
    assert list(base.state_dict()) == list(autoencoder().state_dict())
    with torch.no_grad():
        base.encoder.weight.mul_(2)
    assert torch.equal(base.decoder.weight, base.encoder.weight.t())


def test_unloading_from_a_tie_that_can_not_be_inverted() -> None:
    """PEFT assigns the weight to the layer that has it already."""
    model = alike(autoencoder(), Autoencoder())
    tied.tie(model, "decoder.weight", "encoder.weight", lambda w: w.t().tanh())
    before = model(X)
    assert torch.equal(lora(model, ["encoder", "decoder"]).unload()(X), before)


@every_side
def test_untied_an_adapter_merges(sides: list[str]) -> None:
    """What the error says to type."""
    model = autoencoder()
    adapted = lora(model, sides)
    result = adapted(X)
    tied.untie(model, "decoder.weight")
    merged = adapted.merge_and_unload()
    close(merged(X), result)
    assert list(merged.state_dict()) == list(Autoencoder().state_dict())
    assert not torch.equal(merged.decoder.weight, merged.encoder.weight.t())


def test_an_adapter_elsewhere_merges() -> None:
    model = autoencoder()
    adapted = lora(model, ["mid"])
    result = adapted(X)
    adapted.merge_adapter()
    close(adapted(X), result)
    adapted.unmerge_adapter()
    close(adapted(X), result)
    merged = adapted.merge_and_unload()
    close(merged(X), result)
    assert torch.equal(merged.decoder.weight, merged.encoder.weight.t())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_tie_made_after_the_adapter_is_guarded(side: str) -> None:
    model = alike(autoencoder(), Autoencoder())
    adapted = lora(model, [side])
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    refused(MERGE, adapted.merge_adapter)


@every_side
def test_adapters_are_saved_and_loaded(sides: list[str], tmp_path: Path) -> None:
    adapted = lora(autoencoder(), sides)
    train(adapted, X)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(autoencoder(), tmp_path)
    assert torch.equal(loaded(X), adapted(X))
    refused(MERGE, loaded.merge_adapter)
    # The base holds the same values, so an untied one does as well.
    plain = PeftModel.from_pretrained(alike(autoencoder(), Autoencoder()), tmp_path)
    close(plain(X), adapted(X))


# Other adapters, and other starts of LoRA

OTHERS: dict[str, Callable[[list[str]], Any]] = {
    "dora": lambda m: LoraConfig(r=2, target_modules=m, use_dora=True, init_lora_weights=False),
    "ia3": lambda m: peft.IA3Config(target_modules=m, feedforward_modules=m),
    "loha": lambda m: peft.LoHaConfig(r=2, target_modules=m, init_weights=False),
    "oft": lambda m: peft.OFTConfig(target_modules=m, oft_block_size=1, init_weights=False),
    "vera": lambda m: peft.VeraConfig(r=2, target_modules=m, init_weights=False),
}


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("adapter", OTHERS)
def test_other_adapters(adapter: str, side: str) -> None:
    config = OTHERS[adapter]([side])
    adapted = get_peft_model(autoencoder(), config)
    train(adapted, X)
    result = adapted(X)
    refused(MERGE, adapted.merge_adapter)
    refused(MERGE, adapted.merge_and_unload)
    assert torch.equal(adapted(X), result)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("start", ["pissa", "olora", "corda", "loftq"])
def test_starts_that_write_into_the_weight_are_refused(start: str, side: str) -> None:
    model = autoencoder()
    options = {"loftq_config": {"loftq_bits": 4}} if start == "loftq" else {}
    text = f"""
        {start}_init writes into one side of a tie, which would change the other side
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """
    before = model.encoder.weight.detach().clone()
    refused(text, lambda: lora(model, [side], init_lora_weights=start, **options))
    assert torch.equal(model.encoder.weight, before)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_variant_that_writes_into_the_weight_is_refused(side: str) -> None:
    model = autoencoder()
    text = """
        KaSA writes into one side of a tie, which would change the other side
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """
    before = model.encoder.weight.detach().clone()
    refused(text, lambda: lora(model, [side], kasa_config=KasaConfig()))
    assert torch.equal(model.encoder.weight, before)


def test_an_adapter_of_a_parameter() -> None:
    """`target_parameters` puts a parametrization on the parameter itself, in every call."""
    model = autoencoder()
    text = """
        an adapter of decoder.weight itself needs a tensor of its own there
          tie  decoder.weight reads encoder.weight
          Untie it first: tied.untie(model, "decoder.weight")
        """
    refused(text, lambda: lora(model, [], target_parameters=["decoder.weight"]))
    model, plain = autoencoder(), alike(autoencoder(), Autoencoder())
    adapted, other = (lora(one, [], target_parameters=["encoder.weight"]) for one in (model, plain))
    close(adapted(X), other(X))
    refused(MERGE, adapted.merge_adapter)


# modules_to_save: PEFT trains a copy of the module


def saving(model: nn.Module, names: list[str]) -> Any:
    return lora(model, ["mid"], modules_to_save=names)


@pytest.mark.parametrize("names", [["encoder"], ["encoder", "decoder"]], ids=" ".join)
def test_a_target_follows_the_copy_of_its_source(names: list[str], tmp_path: Path) -> None:
    """T90: the two copies do not part."""
    model = autoencoder()
    before = model.encoder.weight.detach().clone()
    adapted = saving(model, names)
    train(adapted, X)
    trained = model.encoder.modules_to_save["default"].weight
    assert not torch.equal(trained, before)
    assert torch.equal(model.decoder.weight, trained.t())
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(autoencoder(), tmp_path)
    assert torch.equal(loaded(X), adapted(X))
    with adapted.disable_adapter():
        close(adapted(X), autoencoder()(X)) if "decoder" in names else adapted(X)
    merged = adapted.merge_and_unload()
    close(merged(X), loaded(X))
    assert list(merged.state_dict()) == list(autoencoder().state_dict())
    with torch.no_grad():
        merged.encoder.weight.mul_(2)
    assert torch.equal(merged.decoder.weight, merged.encoder.weight.t())


def test_a_copy_of_the_target_alone_is_refused() -> None:
    """It would train all but the weight, and say nothing."""
    adapted = saving(autoencoder(), ["decoder"])
    with pytest.raises(tied.TieError) as caught:
        adapted(X)
    assert str(caught.value).splitlines() == [
        "a copy in modules_to_save can't train decoder.weight: it reads encoder.weight",
        "  tie  decoder.weight reads encoder.weight",
        "  Name the module of encoder.weight in modules_to_save too, or untie first: "
        'tied.untie(model, "decoder.weight")',
    ]
    with adapted.disable_adapter():
        close(adapted(X), autoencoder()(X))


# Single tokens


@pytest.mark.parametrize("side", ["wte", "lm_head"])
def test_trained_tokens_are_not_merged(side: str) -> None:
    model = language_model()
    config = TrainableTokensConfig(token_indices=[1, 5], target_modules=[side])
    adapted = get_peft_model(model, config)
    before = adapted(TOKENS).detach()
    train(adapted, TOKENS)
    result = adapted(TOKENS)
    assert not torch.allclose(result, before, atol=1e-3)
    text = """
        merging an adapter into one side of a tie would change the other side
          tie  lm_head.weight reads wte.weight
          Untie it first: tied.untie(model, "lm_head.weight")
        """
    refused(text, adapted.merge_and_unload)
    tied.untie(model, "lm_head.weight")
    close(adapted.merge_and_unload()(TOKENS), result)


def test_trained_tokens_of_a_source_are_seen_by_the_target() -> None:
    """Beside LoRA, where PEFT's wrapper of the source gives the rows that are trained."""
    model = language_model()
    adapted = lora(model, ["mid"], trainable_token_indices={"wte": [1, 5]})
    train(adapted, TOKENS)
    result, weight = adapted(TOKENS), model.lm_head.weight.detach().clone()
    assert torch.equal(weight, model.wte.token_adapter.get_merged_weights(["default"]))
    merged = adapted.merge_and_unload()
    close(merged(TOKENS), result)
    assert torch.equal(merged.wte.weight, weight)
    assert merged.lm_head.weight is merged.wte.weight


# Another process, where nothing of this library has run but what pickle imports


def test_a_pickled_model_is_guarded_where_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "model.pickle"
    model = nn.ModuleDict({"encoder": nn.Linear(4, 3), "decoder": nn.Linear(3, 4)})
    tied.tie(model, "decoder.weight", "encoder.weight", tied.transpose)
    file.write_bytes(pickle.dumps(model))
    code = f"""
        import pickle
        from pathlib import Path
        model = pickle.loads(Path({str(file)!r}).read_bytes())
        from peft import LoraConfig, get_peft_model
        try:
            get_peft_model(model, LoraConfig(r=2, target_modules=["encoder"])).merge_adapter()
        except Exception as error:
            print(type(error).__name__, error.paths)
        """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "TieError ('encoder.weight', 'decoder.weight')\n"
