"""Vision towers inside a model that run by CUDA graphs: plain `generate` replays them.

As in `fused_vision`, a forward is put on the instance, where it hides the class's own. Budgets are
no field of a recipe: a recipe says what is computed and travels with a model, budgets are those of
a machine and its requests.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.autosave import savers_of
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.vision_graphs import GRAPHS, SUPPORTED, VisionGraphs


def use_graphs_(model: nn.Module, budgets: Sequence[int], *, max_sequences: int = 8) -> list[str]:
    """Let a model's vision tower run by CUDA graphs, in place; returns the names of its towers.

    budgets, max_sequences: as of VisionGraphs. `apply_` comes first: attention must be one that
    does not ask the device for lengths. A request that fits no budget runs eagerly. Copies of the
    model, pickled ones too, capture graphs of their own.
    """
    if find_graphed(model):
        raise ConfigError("expected a model without graphs, got one that has them: drop_graphs_")
    towers = {n: m for n, m in model.named_modules() if type(m).__name__ in SUPPORTED}
    if not towers:
        raise UnsupportedError(
            f"expected a model with a vision tower, one of {', '.join(SUPPORTED)}; got "
            f"{type(model).__name__} with none"
        )
    made = {}
    for name, tower in towers.items():
        _check_tower(name, tower)
        made[name] = VisionGraphs(tower, budgets, max_sequences=max_sequences)
        if objection := made[name].objection():
            raise UnsupportedError(objection)
    for name, graphs in made.items():
        # A partial, not a method: those lose themselves when a module is pickled.
        vars(towers[name]).update({GRAPHS: graphs, "forward": partial(graphed_forward, graphs)})
    return list(made)


def drop_graphs_(model: nn.Module) -> list[str]:
    """Undo `use_graphs_`: free the graphs; returns the names of the towers that had them."""
    found = find_graphed(model)
    if not found:
        raise ConfigError("expected a model that use_graphs_ has changed, got one without graphs")
    for tower in found.values():
        del vars(tower)["forward"], vars(tower)[GRAPHS]
    return list(found)


def find_graphed(model: nn.Module) -> dict[str, nn.Module]:
    """The towers that run by graphs, by name; ConfigError if something hides their forward."""
    found = {name: m for name, m in model.named_modules() if GRAPHS in vars(m)}
    for name, tower in found.items():
        forward = vars(tower).get("forward")
        if not isinstance(forward, partial) or forward.func is not graphed_forward:
            raise ConfigError(
                f"{name or type(tower).__name__}: expected the forward that use_graphs_ put there, "
                "got another: undo what replaced it first"
            )
    return found


def graphed_forward(
    graphs: VisionGraphs, hidden_states: Tensor, grid_thw: Tensor, **options: Any
) -> Any:
    """The forward of a tower by the graph of a request's budget, or by its class's if none fits."""
    tower = graphs.tower
    if tower.training or (torch.is_grad_enabled() and hidden_states.requires_grad):
        raise UnsupportedError(
            "CUDA graphs are for inference: expected a model in evaluation mode and pixels without "
            "gradients, got others: model.eval(), or drop_graphs_(model)"
        )
    if objection := graphs.objection():
        raise UnsupportedError(f"{objection}; or drop_graphs_(model)")
    plan = graphs.plan(grid_thw)
    if plan.budget is None:
        return type(tower).forward(tower, hidden_states, grid_thw, **options)
    default = getattr(tower.config, "return_dict", True)
    is_tuple = options.pop("return_dict", default) is False
    options.pop("use_cache", None)  # `generate` tells every part of a model; a tower has none
    # None and False are what a graph does anyway; whatever else is asked for, it cannot know.
    if given := sorted(n for n, x in options.items() if x is not None and x is not False):
        raise UnsupportedError(
            f"expected hidden_states, grid_thw and return_dict for a tower that runs by CUDA "
            f"graphs, got {', '.join(given)}: drop_graphs_(model)"
        )
    result = graphs.replay(hidden_states, grid_thw, plan.budget)
    for saver in savers_of(tower):
        if not saver.is_watching(tower):  # who watches the tower sees this very call
            saver.step()
    return result.to_tuple() if is_tuple else result


def _check_tower(name: str, tower: nn.Module) -> None:
    if "forward" in vars(tower):
        raise UnsupportedError(
            f"{name or type(tower).__name__}: expected the forward of its class, got another: use "
            "graphs before what replaces it"
        )
