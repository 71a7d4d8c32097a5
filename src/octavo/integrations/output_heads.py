"""Output heads: the linear layers whose results leave a model, such as logits of its classes."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

OUTPUT_HEAD = "an output head"
# What heads are called where a model does not say: in torchvision (fc, classifier, heads, head) and
# transformers (classifier, score, class_labels_classifier beside bbox_predictor, …). A
# pre_classifier feeds a classifier.
_NAMES = re.compile(r"fc|heads?|head_dist|score|(?!pre_)(.+_)?(classifier|head|predictor)")


def find_heads(model: nn.Module) -> Iterator[str]:
    """The names of a model's output heads.

    A model, or a part of it, that says which they are is believed: get_output_embeddings of
    transformers, get_classifier or the config of timm. Else the modules at the end of a model are
    its heads if they are called so.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for part in model.modules():
        for head in _declared(part):
            yield from (names[id(x)] for x in _linears(head) if id(x) in names)
    yield from (names[id(head)] for head in _last_layers(model))


def _declared(part: nn.Module) -> list[nn.Module]:
    """The heads that a module names itself; timm has several in distilled models."""
    found: list[Any] = []
    for hook in ("get_output_embeddings", "get_classifier"):
        if callable(find := getattr(part, hook, None)) and _takes_nothing(find):
            found += _as_tuple(find())
    if not found:
        for attribute in ("pretrained_cfg", "default_cfg"):  # of timm: a mapping or a dataclass
            config: Any = getattr(part, attribute, None)
            is_mapping = isinstance(config, Mapping)
            named = config.get("classifier") if is_mapping else getattr(config, "classifier", None)
            names = [name for name in _as_tuple(named) if isinstance(name, str)]
            modules = part.named_modules() if names else ()
            found += [module for name, module in modules if name in names]
    return [head for head in found if isinstance(head, nn.Module)]


def _takes_nothing(hook: Any) -> bool:
    """Whether a method can be called without arguments: else it is somebody else's of that name."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(hook).parameters.values()
    return all(x.default is not x.empty or x.kind in kinds for x in parameters)


def _last_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """The last linear layer of each module called like a head that only such modules follow."""
    parts = [(name, part) for name, part in model.named_children() if _linears(part)]
    if len(parts) == 1 and not _NAMES.fullmatch(parts[0][0]):
        yield from _last_layers(parts[0][1])  # a wrapper
        return
    for name, part in reversed(parts):
        if not _NAMES.fullmatch(name):
            return
        layers = [part, *part.children()]  # deeper ones are those of a pooler or a whole network
        yield from [layer for layer in layers if isinstance(layer, nn.Linear)][-1:]


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)
