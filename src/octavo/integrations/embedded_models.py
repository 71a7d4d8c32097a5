"""The small models that come with octavo, by name: octavo.demo holds them, and is loaded on use."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ASSETS = Path(__file__).parents[1] / "demo" / "assets"


@dataclass(frozen=True)
class EmbeddedModel:
    """A model of octavo.demo, and how folders of its kind are recognized.

    Attributes:
        name: What users call the one that comes with octavo.
        mark: A file that every folder of this kind has, the last one to be written.
        folder: Where the one that comes with octavo lies.
        loader: The function that loads a folder, as "module:function".
    """

    name: str
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
        module, _, function = self.loader.partition(":")
        folder = self.folder if name is None or str(name) == self.name else Path(name)
        return getattr(import_module(module), function)(folder, dtype)


CHART_READER = EmbeddedModel(
    name="chart-reader",
    mark="chart_reader.json",
    folder=ASSETS / "chart_reader",
    loader="octavo.demo.chart_reader:load_chart_reader",
)
SMALL_IMAGE_MODEL = EmbeddedModel(
    name="small-image",
    mark="small_image.json",
    folder=ASSETS / "small_image",
    loader="octavo.demo.small_image:load_small_image_model",
)
