"""Wrote the golden files, once, with octavo at commit ead51fe; see README.md.

    PYTHONPATH=<octavo at ead51fe>/src:tests python tests/golden/write.py NEW_FOLDER SCRATCH_FOLDER

Kept to show how each file came about, and to write a further generation into a folder of its own
when a format gets a new version. It never writes over files that are there.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from octavo import OctavoConfig, calibrate_linear
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, save_state
from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet, save_scales
from octavo.calibration.state import StateFile
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.diffusers import OctavoDiffusersConfig
from octavo.measure import store
from octavo.measure.evaluate.language import Client
from octavo.measure.evaluate.task_data import generated_choice_questions
from octavo.measure.records import Machine, Measurement
from octavo_testkit.golden_content import ATTENTION, RECIPES, SCALE_SETS

RESULTS = Path(__file__).parents[2] / "results"


def write_recipes(folder: Path) -> None:
    for name, recipe in RECIPES.items():
        recipe.save(folder / f"{name}.json")
        recipe.save(folder / f"{name}.toml")


def write_scale_files(folder: Path) -> None:
    for name, scale_set in SCALE_SETS.items():
        save_scales(folder / f"{name}.json", scale_set)


def write_state(folder: Path) -> None:
    """An interrupted calibration, and the scale file that it would have ended in."""
    calibration = Calibration(["a"], CalibrationSettings(rotate_keys=True))
    q = torch.linspace(-1.0, 1.0, 3 * 4 * 8).reshape(1, 3, 4, 8)
    calibration.see("a", q, 2 * q[:, :, :2], -q[:, :, 2:] / 3)
    calibration.num_prompts = 5
    save_state(calibration, StateFile(path=folder / "kv.json.partial", key={"model": "tiny"}))
    header = ScaleHeader(kind="kv_cache", model="tiny")
    save_scales(folder / "kv.json", calibration.result(header).scales)


def make_llama(**sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            **sizes,
        }
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model


def write_checkpoints(folder: Path, scratch: Path) -> None:
    ids = torch.arange(2, 34).reshape(2, 16) * 7 % 64
    rows: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
        "channel": ({}, {"weight_only_layers": ["down_proj"]}),
        "static": ({}, {"linear": {"weight": "tensor", "scaling": "static"}}),
        "blocks": (
            {"hidden_size": 144, "intermediate_size": 16, "num_attention_heads": 1},
            {"linear": {"weight": "block 128x128"}, "ignored_layers": ["k_proj"]},
        ),
    }
    for name, (sizes, settings) in rows.items():
        model = make_llama(**sizes)
        model.save_pretrained(scratch / name)
        if name == "static":
            settings["scales"] = calibrate_linear(model, [{"input_ids": ids}])
        quantized = AutoModelForCausalLM.from_pretrained(
            scratch / name, quantization_config=OctavoConfig(**settings)
        )
        quantized.save_pretrained(folder / f"llama-{name}")
        run_model = {
            kind: each(input_ids=ids, use_cache=False).logits.contiguous()
            for kind, each in (("output", quantized), ("plain_output", model))
        }
        save_file({"input_ids": ids, **run_model}, folder / f"llama-{name}.safetensors")
    write_flux(folder, scratch / "flux")


def flux_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=generator),
        "pooled_projections": torch.randn(1, 32, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.tensor([[0.0, i // 4, i % 4] for i in range(16)]),
        "txt_ids": torch.zeros(8, 3),
    }


def write_flux(folder: Path, scratch: Path) -> None:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    model.save_pretrained(scratch)
    config = OctavoDiffusersConfig("fp8", weight_only_layers=["modulation"])
    quantized = FluxTransformer2DModel.from_pretrained(scratch, quantization_config=config)
    quantized.save_pretrained(folder / "flux-transformer")
    inputs = flux_inputs()
    run_model = {
        kind: each(**inputs).sample.contiguous()
        for kind, each in (("output", quantized), ("plain_output", model))
    }
    save_file({**inputs, **run_model}, folder / "flux-transformer.safetensors")


def write_exports(folder: Path, scratch: Path) -> None:
    make_llama(num_key_value_heads=2).save_pretrained(scratch / "plain")
    layer = LayerScales(q=(0.3, 0.2), k=(0.1, 0.7), v=1 / 3)
    save_scales(scratch / "heads.json", ScaleSet({ATTENTION.format(0): layer}))
    layer = LayerScales(q=None, k=0.1, v=1 / 3)
    save_scales(scratch / "tensor.json", ScaleSet({ATTENTION.format(0): layer}))
    for kind, scales in (("compressed-tensors", "heads"), ("modelopt", "tensor")):
        words = [str(scratch / "plain"), "--scales", str(scratch / f"{scales}.json")]
        words += ["--format", kind, "-o", str(folder / f"export-{kind}")]
        assert run(make_app(COMMANDS), ["export", *words]) == 0


def write_records(folder: Path) -> None:
    """A row of each operation in the records that were measured, and rows at the edges."""
    kinds: dict[tuple[str, str], Measurement] = {}
    for row in store.read(RESULTS):
        kinds.setdefault((row.op, row.impl), row)
    store.append(folder / "one_of_each.jsonl", [kinds[key] for key in sorted(kinds)])
    machine = Machine(cpu="c", python="3.11.7", platform="Linux aarch64", versions={"torch": "2"})
    edges = Measurement(
        op="edges",
        impl="é 🙂",
        case={"text": 'a "b"\n', "count": 2**60, "ratio": 0.1, "is_true": True},
        values={"nan": float("nan"), "inf": float("inf"), "low": float("-inf"), "tiny": 5e-324},
        machine=machine,
        command="octavo",
        date="2026-11-17T10:00:00Z",
    )
    store.append(folder / "edges.jsonl", [edges])


def write_answers(folder: Path) -> None:
    """Two tasks asked of a server that knows what to say, with their records."""
    right = {question.text: question.answer for question in generated_choice_questions()}

    def ask(self: Client, method: str, path: str, body: Any = None) -> Any:
        prompt = body["messages"][-1]["content"]
        text = "Well: $\\boxed{12}$ ☕"
        for question, answer in right.items():
            if question in prompt:
                line = next(line for line in prompt.splitlines() if line.endswith(answer))
                text = f"<think>hm</think>\n**Answer: {line[0]}**"
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"completion_tokens": len(text)}}

    with mock.patch.object(Client, "_ask", ask):
        for kind, flags in (("choice", ["--temperature", "0.7"]), ("math", [])):
            words = ["eval", kind, "--endpoint", "golden=http://localhost:8000", "-n", "3"]
            words += ["--served-model-name", "tiny", "--max-concurrency", "1", *flags]
            words += ["--answers", str(folder / f"{kind}.jsonl")]
            words += ["-o", str(folder / f"{kind}_records.jsonl")]
            assert run(make_app(COMMANDS), words) == 0


@torch.no_grad()
def main() -> None:
    target, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    parts = ("recipes", "scales", "state", "checkpoints", "records", "answers")
    for name in parts:
        (target / name).mkdir(parents=True)
    write_recipes(target / "recipes")
    write_scale_files(target / "scales")
    write_state(target / "state")
    write_checkpoints(target / "checkpoints", scratch)
    write_exports(target / "checkpoints", scratch)
    write_records(target / "records")
    write_answers(target / "answers")


if __name__ == "__main__":
    main()
