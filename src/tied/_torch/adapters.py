"""What other tools would do to a tie through a wrapper around a module, and may not.

A tied module refuses by itself what a tool does *to it* (see `dressed`), as far as it is asked.
PEFT writes into the weight of the layer that it wraps, through `.data`: an adapter that is merged
into one side of a tie would change the other side too. The older weight and spectral normalisation
take a parameter out of PyTorch's own table. And torchao puts quantized tensors in the place of a
source, which can't be read through a view.

Nothing is marked on modules, so that nothing is lost when they are copied, pickled or replaced:
every tie that is alive is known here, and is asked when something happens. PEFT is never imported;
its classes are found when it registers a module.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from tied._errors import TieError

_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()

_guarded = False


def watch(reads: Any) -> None:
    """Enters a tie (a `Reads`, which need not be filled yet) among those that are asked."""
    _ALIVE.add(reads)
    guard()


def guard() -> None:
    """Sees to it that PEFT and torchao ask before they write into a tie. Does it once."""
    global _guarded
    if _guarded:
        return
    _guarded = True
    for name in ("weight_norm", "spectral_norm"):
        _guard_norm(sys.modules[f"torch.nn.utils.{name}"])
    hooks.register_module_module_registration_hook(_on_module)
    hooks.register_module_parameter_registration_hook(_on_parameter)
    if (tuners := _peft()) is not None:  # its layers may stand in a model already
        for base in (tuners.BaseTuner, tuners.BaseTunerLayer):
            _guard_below(base)


def _guard_norm(module: Any) -> None:
    """Makes an older normalisation ask; it takes a tensor out of a table of PyTorch's itself."""
    cls = module.WeightNorm if hasattr(module, "WeightNorm") else module.SpectralNorm
    apply = cls.apply

    @functools.wraps(apply)
    def asked(part: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        for tie in _ties_on(part, name):
            raise tie.refused(f"{cls.__name__} can't be put on {tie.target}, which is tied")
        return apply(part, name, *args, **kwargs)

    cls.apply = staticmethod(asked)


def _peft() -> Any:
    found = sys.modules.get("peft.tuners.tuners_utils")
    return found if hasattr(found, "BaseTunerLayer") else None  # it may be only half imported


def _guard_below(base: Any) -> None:
    _guard_class(base)
    for cls in base.__subclasses__():
        _guard_below(cls)


def _on_module(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Looks at each module that gets a submodule; PEFT's get the layer or model they wrap."""
    tuners = _peft()
    if tuners is None or module is None:
        return
    if isinstance(parent, (tuners.BaseTuner, tuners.BaseTunerLayer)):
        for cls in type(parent).__mro__:
            if issubclass(cls, (tuners.BaseTuner, tuners.BaseTunerLayer)):
                _guard_class(cls)
    elif name == "original_module" and _saves(parent) and _ties_in(module):
        parent.register_forward_pre_hook(_check_saved)


def _guard_class(cls: type) -> None:
    """Puts a question before each method of a class of PEFT's that writes into a weight."""
    for name, ask in _QUESTIONS.items():
        method = vars(cls).get(name)
        if method is not None and not hasattr(method, "tied"):
            setattr(cls, name, _asking(method, ask))


def _asking(method: Callable[..., Any], ask: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        ask(self, method.__name__, kwargs.get("config"))
        return method(self, *args, **kwargs)

    asked.tied = True  # type: ignore[attr-defined]
    return asked


def _ask_model(tuner: Any, method: str, config: Any) -> None:
    """Asks for all layers before the first is merged, so that a refusal changes nothing."""
    layers = _peft().BaseTunerLayer
    for part in tuner.model.modules():
        if isinstance(part, layers):
            _ask_layer(part, "merge", None)


def _ask_layer(layer: Any, method: str, config: Any) -> None:
    """Raises if the weight of the layer that an adapter wraps is one side of a tie."""
    base = layer.get_base_layer()
    # For models of transformers, PEFT gives a target the rows that it trains of its source.
    taken = getattr(layer, "tied_adapter", None) is not None
    tie = None if taken else next(iter(_ties_in(base)), None) or _reader_of(base)
    if tie is None:
        return
    if method == "merge":
        message = "merging an adapter into one side of a tie would change the other side"
    else:
        message = f"{method} writes into one side of a tie, which would change the other side"
    raise tie.refused(message)


def _ask_variant(layer: Any, method: str, config: Any) -> None:
    """Asks for the one variant of LoRA that changes the weight before it is trained."""
    if getattr(config, "kasa_config", None) is not None:
        _ask_layer(layer, "KaSA", config)


def _ask_parameter(layer: Any, method: str, config: Any) -> None:
    """Raises if a parametrization is to be put on a tied tensor, as `target_parameters` asks."""
    for tie in _ties_on(layer.get_base_layer(), getattr(layer, "parameter_name", "")):
        raise tie.refused(f"an adapter of {tie.target} itself needs a tensor of its own there")


_STARTS = ("pissa_init", "olora_init", "loftq_init", "corda_init", "lora_ga_init")
_QUESTIONS: dict[str, Callable[[Any, str, Any], None]] = {
    "_check_merge_allowed": _ask_model,
    "merge": _ask_layer,
    **dict.fromkeys(_STARTS, _ask_layer),
    "resolve_lora_variant": _ask_variant,
    "update_layer": _ask_parameter,
}
"""What is asked before the methods of PEFT's classes that write into a weight that they wrap."""


def _ties_in(module: nn.Module) -> list[Any]:
    """Returns the ties whose targets lie in a module."""
    return [part for part in module.modules() if part in _ALIVE]


def _ties_on(module: nn.Module, name: str) -> list[Any]:
    """Returns the tie of a module's own tensor, if it is tied."""
    parts = module.__dict__["_modules"].get("parametrizations")
    if not isinstance(parts, nn.ModuleDict) or name not in parts:
        return []
    return [part for part in parts[name].children() if part in _ALIVE]


def _filled() -> list[Any]:
    """Returns the ties that are alive and not still being made."""
    return [tie for tie in list(_ALIVE) if "sources" in tie.__dict__]


def _in_force(tie: Any) -> bool:
    """Returns whether the target still stands in the module that holds both sides.

    A tie that was undone, or whose target was replaced, may live on in a cycle or a traceback.
    """
    roots = {id(source.root): source.root for source in tie.sources if source.root is not None}
    return any(part is tie for root in roots.values() for part in root.modules())


def _reader_of(module: nn.Module) -> Any:
    """Returns a tie that reads a tensor of a module; None if there is none."""
    own = {id(x) for x in (*module.parameters(), *module.buffers())}
    for tie in _filled():
        try:
            sources = tie.roots()
        except TieError:  # a tie that reads nothing any more, perhaps of another model
            continue
        if any(id(source) in own for source in sources) and _in_force(tie):
            return tie
    return None


def _saves(module: nn.Module) -> bool:
    return any(cls.__name__ == "ModulesToSaveWrapper" for cls in type(module).__mro__)


def _check_saved(wrapper: Any, inputs: Any) -> None:
    """Raises if PEFT is to train a copy of a tied module, but not one of what it reads.

    The copy reads what the original reads. What else is copied is known only when the model runs.
    """
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return
    for tie in _ties_in(wrapper.original_module):
        if not any(_saves(part) for source in tie.sources for part in source.passed()):
            sources = ", ".join(tie.names)
            raise tie.refused(
                f"a copy in modules_to_save can't train {tie.target}: it reads {sources}",
                hint=f"Name the module of {sources} in modules_to_save too, or untie first: "
                f'tied.untie(model, "{tie.target}")',
            )
    for key, hook in list(wrapper._forward_pre_hooks.items()):
        if hook is _check_saved:
            del wrapper._forward_pre_hooks[key]


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Refuses a parameter in the place of a source if it can't be read as the ties read it."""
    if param is None or type(param) is nn.Parameter or type(param).__module__.startswith("torch."):
        return
    for tie in _filled():
        for source in tie.sources:
            if source.leaf == name and source.owner is module and _in_force(tie):
                _try(tie, source.name, param)


def _try(tie: Any, source: str, param: nn.Parameter) -> None:
    if tie.view is None or len(tie.sources) > 1:
        return
    try:
        with torch.no_grad():
            tie.view(param)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        kind = type(param).__name__
        raise tie.refused(
            f"{source} can't become a {kind}: {tie.target} can't be read from that"
        ) from error
