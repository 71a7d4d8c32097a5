"""The small models that come with octavo, by name: octavo.demo holds them, and is loaded on use."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ASSETS = Path(__file__).parents[1] / "demo" / "assets"


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A model of octavo.demo: what users call it, and the module that makes it."""

    name: str
    module: str

    def load_module(self) -> Any:
        """The module that makes it, with whatever else belongs to the model."""
        return importlib.import_module(self.module)


@dataclass(frozen=True, kw_only=True)
class StoredModel(EmbeddedModel):
    """An embedded model with weights in a folder; users may have other folders of its kind.

    mark: a file that every such folder has, written last. loader: the module's function that loads
    one.
    """

    mark: str
    folder: Path
    loader: str

    def matches(self, name: str | Path) -> bool:
        """Whether this is the model's name, or a folder of its kind."""
        return str(name) == self.name or (Path(name) / self.mark).is_file()

    @property
    def is_installed(self) -> bool:
        """Whether the weights are there."""
        return (self.folder / self.mark).is_file()

    def load(self, name: str | Path | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
        """The model that comes with octavo, or that of a folder, on the CPU."""
        folder = self.folder if name is None or str(name) == self.name else Path(name)
        return getattr(self.load_module(), self.loader)(folder, dtype)


CHART_READER = StoredModel(
    name="chart-reader",
    module="octavo.demo.chart_reader",
    mark="chart_reader.json",
    folder=ASSETS / "chart_reader",
    loader="load_chart_reader",
)
SMALL_IMAGE_MODEL = StoredModel(
    name="small-image",
    module="octavo.demo.small_image",
    mark="small_image.json",
    folder=ASSETS / "small_image",
    loader="load_small_image_model",
)
RETRIEVAL_MODEL = EmbeddedModel(name="retrieval-model", module="octavo.demo.retrieval_model")
