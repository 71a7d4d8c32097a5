"""How many values have saturated, brought from the device without waiting for it."""

import torch

from octavo.integrations.linear import find_counters
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.integrations.transformers.saturation import find_counting
from octavo.layers.saturation import HostCopy
from octavo.serving.engine.request import Saturated


class SaturationTotals:
    """Adds up the counters of a model's layers; `last` is what the last reading found."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._pending: tuple[HostCopy, bool, int | None] | None = None
        self.last = Saturated()

    def read(self) -> None:
        """Take what the call before has asked the device for, if it has arrived; ask again.

        Numbers of a CPU arrive at once.
        """
        self._take()
        if self._pending is None:
            self._begin()
            self._take()

    @torch.inference_mode()
    def _begin(self) -> None:
        layers = [layer.saturated.double() for layer in find_counting(self._model.model).values()]
        # Layers that are one product share a counter.
        counters = {id(one): one for one in find_counters(self._model.model).values()}.values()
        inputs = [one.counts[:1] for one in counters if one.counts is not None]
        if layers or counters:
            none = torch.zeros(1, dtype=torch.float64, device=self._model.device)
            both = torch.stack(layers).sum(0) if layers else none.expand(2)
            linear = torch.stack(inputs).sum(0) if inputs else none
            num_checked = sum(one.num_values for one in counters) if counters else None
            self._pending = (HostCopy(torch.cat((both, linear))), bool(layers), num_checked)

    def _take(self) -> None:
        if self._pending is None or not self._pending[0].is_ready:
            return
        copy, has_cache, num_checked = self._pending
        keys, values, inputs = map(int, copy.tolist())
        self._pending = None
        self.last = Saturated(
            keys=keys if has_cache else None,
            values=values if has_cache else None,
            linear_inputs=None if num_checked is None else inputs,
            checked_linear_inputs=num_checked or 0,
        )
