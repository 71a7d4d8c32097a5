"""What evaluations with images are asked for. As requests.py: settings alone, no torch."""

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.measure.evaluate.requests import GENERATED, Request, check_least


@dataclass(frozen=True, kw_only=True)
class ChartRequest(Request):
    """Questions about charts, and rows of a model that answers them.

    Attributes:
        data: Questions: 'generated' charts, a .parquet or .jsonl file or a folder of them (columns
            image, query, label), or a data set such as HuggingFaceM4/ChartQA.
        num_questions: How many, from the first on.
        recipe: A row of the table, see docs/reference/rows.md; may be given more than once.
        scales: Scale file for rows with static scales; left out, scales are calibrated on charts of
            another distribution first.
        batch_size: Questions in one call of the model.
    """

    task = "chartqa"

    data: str = GENERATED
    num_questions: int = 500
    recipe: tuple[str, ...] = ("bf16", "dynamic", "static")
    scales: Path | None = None
    batch_size: int = 16
    prompts: PromptSettings = PromptSettings()

    def __post_init__(self) -> None:
        check_least(self, num_questions=1, batch_size=1)


@dataclass(frozen=True, kw_only=True)
class ImageRequest(Request):
    """Images that rows of a pipeline draw, and how they are compared. model: None is the small one.

    Attributes:
        prompts: A prompt in each line. The small image model has a list of its own.
        prompt: A prompt; may be given more than once.
        num_pictures: How many; prompts serve again, with other seeds, once all are used. Left out:
            an image for each prompt.
        row: A row of the table, see docs/reference/rows.md; may be given more than once.
        num_inference_steps: Left out: the pipeline's own default.
        height: In pixels.
        width: In pixels.
        guidance_scale: Left out: the pipeline's own.
        seed: Of the first image's noise.
        device: Left out: the GPU if there is one.
        dtype: The pipeline is loaded in.
        lpips: Left out: LPIPS if its package is installed.
        clip: A CLIP model's folder or name, for the CLIP score.
        min_psnr: Exit with 1 if the mean PSNR of a row is below this many dB.
        save_pictures: Write all images to this folder, a sheet with rows and prompts, and for each
            row a JPEG beside the first row, which its record names for octavo report.
    """

    task = "images"
    unsaid = ("device", "lpips", "min_psnr", "save_pictures")

    prompts: Path | None = None
    prompt: tuple[str, ...] = ()
    num_pictures: int | None = None
    row: tuple[str, ...] = ()
    num_inference_steps: int | None = None
    height: int | None = None
    width: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    device: str | None = None
    dtype: str = "bfloat16"
    lpips: bool | None = None
    clip: str | None = None
    min_psnr: float | None = None
    save_pictures: Path | None = None

    def __post_init__(self) -> None:
        check_least(self, num_pictures=1, num_inference_steps=1, height=1, width=1, seed=0)
        if self.seed >= 2**63:
            raise ConfigError(f"expected --seed below 2**63, got {self.seed}")
        if self.prompts is not None and self.prompt:
            raise ConfigError("expected --prompts FILE or --prompt TEXT, got both")
