"""Advice: what is chosen, what is warned of, and the command that serves it."""

import json
import shlex
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

import transformers

from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.traced_work import LinearWork
from octavo.integrations.transformers.cache_layers import CacheLayer
from octavo.integrations.transformers.model_work import DecoderWork, ExpertWork, tower_of_config
from octavo.kernels.device import CPU
from octavo.measure.advise import advice as words
from octavo.measure.advise.advice import serve_command
from octavo.measure.advise.advise import advise
from octavo.measure.advise.cost import DecoderPlan, decode_cost, prefill_cost
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.measured import check_measurable
from octavo.measure.advise.predict import Predictor
from octavo.measure.advise.shape import ModelShape, Workload, find_model, known_models, parse_size
from octavo.measure.advise.speeds import Speeds
from octavo.measure.records import Machine, Measurement
from octavo.recipe import Recipe

H200 = find_gpu("h200")
LONG = Workload(context=32768, concurrency=8)


def decoder(*, head_dim=128, window=None, num_layers=32, **changes):
    """Sizes of Llama-3.1-8B; window: of every other layer."""
    layers = tuple(
        CacheLayer(f"layers.{i}.self_attn", i, 8, head_dim, window if i % 2 else None)
        for i in range(num_layers)
    )
    sizes = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
    linear = tuple(LinearWork(f"{i}", *size) for i, size in enumerate(sizes * num_layers))
    work = DecoderWork(
        layers=layers,
        num_heads=32,
        linear=linear,
        head=LinearWork("lm_head", 4096, 128256, is_reached=False),
        weight_bytes=16 * 10**9,
        max_length=131072,
    )
    return ModelShape("a-model", replace(work, **changes))


def warned(advice):
    return " ".join(advice.warnings)


def test_a_long_context_has_an_fp8_cache_and_a_short_one_has_not():
    found = advise(decoder(), H200, LONG)
    assert found.recipe.kv_cache is not None and found.recipe.linear is not None
    assert found.expectations[0].speedup > 1.3 and "below break-even" not in warned(found)
    short = advise(decoder(), H200, Workload(context=128))
    assert short.recipe.kv_cache is None
    assert "below break-even: an FP8 cache saves 1 % of a token's time from about" in warned(short)
    assert short.expectations[1].speedup is None  # launches on the host
    assert not any(short.expectations[1].parts) and all(short.expectations[0].parts)


def test_small_windows_are_skipped():
    found = advise(decoder(window=128), H200, LONG)
    assert found.recipe.skip_layers == ("sliding_window",)
    assert "window of 128 tokens are skipped" in " ".join(found.reasons)


def test_warnings_name_what_the_model_is():
    assert "no QK norm" in warned(advise(decoder(), H200, LONG))
    assert "no QK norm" not in warned(advise(decoder(has_qk_norm=True), H200, LONG))
    assert "head_dim 256: prompts" in warned(advise(decoder(head_dim=256), H200, LONG))
    assert "uncalibrated" in warned(advise(decoder(), H200, LONG))
    too_long = advise(decoder(max_length=1024), H200, LONG)
    assert "made for 1,024 tokens, fewer than 33,280" in warned(too_long)
    quantized = replace(decoder(), quantized="mxfp4", unknown_tower="got a SiglipVisionConfig")
    assert "quantized already (mxfp4)" in warned(advise(quantized, H200, LONG))
    assert "got a SiglipVisionConfig" in warned(advise(quantized, H200, LONG))
    experts = ExpertWork(num_layers=32, num_experts=8, num_per_token=2, num_weights=10**7)
    with_experts = advise(decoder(experts=experts), H200, LONG)
    assert "Experts in one tensor" in " ".join(with_experts.reasons)
    assert "Experts are counted" in warned(with_experts)
    assert "stated shares" in warned(with_experts)


@pytest.mark.parametrize(("percent", "is_low"), [(93.0, True), (97.0, False)])
def test_a_low_recovery_asks_for_calibration(percent, is_low):
    record = Measurement(
        op="perplexity",
        impl="transformers",
        case={"model": "a-model", "recipe": "unit"},
        values={"recovery_percent": percent},
        machine=Machine.current(),
        command="planted",
    )
    text = warned(advise(decoder(), H200, LONG, [record]))
    assert (f"recovery of {percent:.1f} % (unit), under 95 %: calibrate" in text) == is_low
    assert "Quality is not measured" not in text
    assert "Quality is not measured" in warned(advise(decoder(), H200, LONG))


def test_nothing_without_kernels_for_it():
    found = advise(decoder(), find_gpu("a100"), LONG)
    assert found.recipe.is_empty and found.command == "octavo serve MODEL"
    assert "no FP8 cache for NVIDIA A100" in found.reasons[0]
    assert all(one.speedup == 1 for one in found.expectations)


def test_a_cache_that_does_not_fit_is_made_smaller():
    """Memory decides where time does not: below break-even, with room for one and a half."""
    sequence = 32 * 128 * 2 * 8 * 128 * 2  # two pages in each layer
    room = replace(H200, memory_bytes=int((16 * 10**9 + 1.6 * sequence) / 0.9))
    workload = Workload(context=64, concurrency=2, output_len=1)
    assert advise(decoder(linear=()), H200, workload).recipe.kv_cache is None
    found = advise(decoder(linear=()), room, workload)
    assert found.recipe.kv_cache is not None
    assert "2 sequences of 64 tokens do not fit in BF16" in " ".join(found.reasons)
    assert (found.memory[-1].before, found.memory[-1].after) == (1, 3)


def test_bytes_and_flops_of_a_token_and_a_prompt():
    """With records of nothing, a token is what its bytes take at the stated shares."""
    model, speeds = decoder().decoder, Speeds([], H200)
    plain, fp8 = (
        decode_cost(model, speeds, DecoderPlan(is_kv_fp8=is_fp8), context=131072, batch=8)
        for is_fp8 in (False, True)
    )
    kv_bytes = 32 * 2 * 8 * 131072 * 8 * 128 * 2
    assert plain.parts["keys and values"] == pytest.approx(
        32 * 0.006 + 1e3 * kv_bytes / (0.95 * 4540e9)
    )
    assert fp8.parts["keys and values"] / plain.parts["keys and values"] == pytest.approx(
        0.5, rel=0.01
    )
    assert fp8.parts["weights"] == plain.parts["weights"]
    short, long = (
        prefill_cost(model, speeds, DecoderPlan(prefill_impl="fastest"), num_tokens=n).parts
        for n in (8192, 16384)
    )
    # Causal: half of 4 · heads · head_dim · tokens².
    flops = 32 * 4 * 32 * 128 * 8192**2 / 2
    assert short["attention"] == pytest.approx(1e3 * flops / (0.95 * 694e12))
    assert long["attention"] / short["attention"] == pytest.approx(4)
    windows = decoder(window=512).decoder
    some = prefill_cost(windows, speeds, DecoderPlan(prefill_impl="fastest"), num_tokens=8192)
    # The first 512 tokens see a triangle, the others 512 each.
    of_window = (2 * 512 * 8192 - 512**2) / 8192**2
    assert some.parts["attention"] / short["attention"] == pytest.approx((1 + of_window) / 2)
    assert long["linear layers"] / short["linear layers"] == pytest.approx(2)


def test_a_models_own_records_decide():
    """Where FP8 was slower than predicted, it is not advised."""

    def rows(fp8_ms):
        machine = Machine.current(gpu=H200.name, capability=(9, 0))
        about = {"model": "a-model", "layers": 32, "input_len": 32768, "output_len": 16}
        for name, dtype, ms in (("auto", "auto", 13.0), ("fp8", "fp8_e4m3", fp8_ms)):
            case = {**about, "batch_size": 8, "row": name, "kv_cache_dtype": dtype}
            values = {"median_itl_ms": ms, "median_ttft_ms": 1200.0}
            yield Measurement(
                op="latency", impl="octavo", case=case, values=values, machine=machine, command="x"
            )

    good, bad = (advise(decoder(), H200, LONG, list(rows(ms))) for ms in (8.0, 40.0))
    assert good.recipe.kv_cache is not None and bad.recipe.kv_cache is None
    assert good.expectations[0].before.ms == pytest.approx(13.0, rel=0.02)
    assert good.expectations[0].based_on == ["a-model"]
    left_out = advise(decoder(), H200, LONG, list(rows(40.0)), leave_out=["a-model"])
    assert left_out.recipe.kv_cache is not None


def test_what_does_not_fit_is_said():
    long = replace(LONG, context=131072 - 512)
    assert "sequences fit" not in warned(advise(decoder(), H200, LONG))
    found = advise(decoder(), H200, replace(long, concurrency=64))
    fit = found.memory[-1].after
    assert 0 < fit < 64 and f"{fit} of 64 sequences fit on one NVIDIA H200" in warned(found)
    large = advise(decoder(weight_bytes=400 * 10**9), H200, LONG)
    assert "The weights and one sequence do not fit on one NVIDIA H200" in warned(large)


def test_what_is_borrowed_is_said():
    machine = Machine.current(gpu=H200.name, capability=(9, 0))
    case = {"operands": "BF16", "scales": "none", "shape": "4096x4096x4096"}
    values = {"median_ms": 0.2, "flops": 2 * 4096.0**3}
    row = Measurement(
        op="scaled_mm", impl="torch", case=case, values=values, machine=machine, command="x"
    )
    said = "no records of kernels on NVIDIA L40S: times take the shares"
    assert said in warned(advise(decoder(), find_gpu("l40s"), LONG, [row]))
    assert "no records of kernels on" not in warned(advise(decoder(), H200, LONG, [row]))
    # A whole model's record says nothing of kernels.
    about = {"model": "other", "layers": 10, "input_len": 256, "output_len": 16, "batch_size": 1}
    whole = replace(
        row,
        op="latency",
        case={**about, "row": "auto", "kv_cache_dtype": "auto"},
        values={"median_itl_ms": 1.0, "median_ttft_ms": 20.0},
    )
    said = warned(advise(decoder(), H200, LONG, [whole]))
    assert "No records of kernels were found" in said and "kernels on" not in said


def test_an_empty_recipe_says_so():
    found = advise(decoder(), find_gpu("a100"), LONG)
    assert words.recipe_text(found) == "# nothing is quantized\n"
    assert "[kv_cache]" in words.recipe_text(advise(decoder(), H200, LONG))


def test_the_hosts_time_is_that_of_one_short_prompt():
    def row(input_len, batch_size, ttft_ms):
        about = {"model": "other", "layers": 10, "input_len": input_len, "output_len": 16}
        return Measurement(
            op="latency",
            impl="octavo",
            case={**about, "batch_size": batch_size, "row": "auto", "kv_cache_dtype": "auto"},
            values={"median_itl_ms": 1.0, "median_ttft_ms": ttft_ms},
            machine=Machine.current(gpu=H200.name, capability=(9, 0)),
            command="x",
        )

    rows = [row(256, 1, 20.0), row(256, 16, 90.0), row(8192, 1, 200.0)]
    assert Predictor(rows, H200).host_ms_per_layer == 2.0
    rows = [row(128, 16, 90.0), row(256, 1, 30.0)]
    assert Predictor(rows, H200).host_ms_per_layer == 3.0


def parsed(command):
    """The recipe that `octavo serve` makes of a command's flags."""
    from octavo.cli.main import COMMANDS
    from octavo.cli.model_options import LinearOptions
    from octavo.cli.serve import CacheOptions, make_recipe
    from octavo.integrations.transformers.encoder_options import EncoderOptions

    (serve,) = (row.load() for row in COMMANDS if row.name == "serve")
    flags = serve.make_context("serve", shlex.split(command)[2:]).params

    def made(settings):
        """The settings of the flags; what may be given more than once is a tuple there."""
        names = settings.__dataclass_fields__.keys() & flags.keys()
        values = {name: flags[name] for name in names}
        return settings(**{n: tuple(v) if type(v) is list else v for n, v in values.items()})

    if flags["omni"]:
        return Recipe(linear=flags["quantization"], attention=flags["attention"])
    return make_recipe(made(LinearOptions), made(CacheOptions), made(EncoderOptions))


@pytest.mark.parametrize(
    ("recipe", "is_omni"),
    [
        (Recipe(), False),
        (Recipe(kv_cache="fp8", skip_layers=["sliding_window"], linear="fp8"), False),
        (Recipe(kv_cache="fp8", vision_attention="fp8"), False),
        (Recipe(linear="fp8", ignored_layers=["visual"]), False),
        (Recipe(linear="fp8", attention="fp8"), True),
    ],
)
def test_the_command_means_the_recipe(recipe, is_omni):
    assert parsed(serve_command("m", recipe, is_omni=is_omni)) == recipe


def test_a_recipe_without_flags_is_served_from_its_file():
    command = serve_command("m", Recipe(vision_attention="bf16"))
    assert command == "octavo serve m --recipe recipe.toml"


def test_json_has_all_of_it():
    found = advise(decoder(window=128), H200, LONG)
    document = json.loads(found.to_json())
    assert Recipe.from_json(json.dumps(document["recipe"])) == found.recipe
    assert document["expectations"][0]["speedup"] == found.expectations[0].speedup
    assert document["gpu"] == "h200" and document["command"] == found.command
    assert document["warnings"] == list(found.warnings)


def test_folders_are_read(tmp_path):
    config = transformers.Gemma2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=32,
        vocab_size=100,
    )
    config.save_pretrained(tmp_path)
    found = find_model(str(tmp_path))
    assert found.name == tmp_path.name and found.parts == "a language model"
    assert found.decoder.head_dim == 256 and found.decoder.windows == (32,)
    # The head is the embedding: it is counted once.
    layer = 64 * (2 * 256 * 2 + 2 * 256) + 3 * 64 * 128
    norms = 4 * 64
    assert found.decoder.weight_bytes == 2 * (100 * 64 + 2 * (layer + norms) + 64)
    assert sum(one.num_weights for one in found.decoder.linear) == 2 * layer


def test_a_model_of_images_has_a_tower_beside(tmp_path):
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    vision = {"depth": 4, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [1]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    config.save_pretrained(tmp_path)
    found = find_model(str(tmp_path))
    assert found.parts == "a language model and a vision tower"
    assert found.decoder.has_qk_norm and found.decoder.other_parts == ("visual",)
    assert (found.tower.depth, found.tower.head_dim, found.tower.num_heads) == (4, 32, 2)
    # qkv, the output and the MLP of four blocks; two layers each of one merger and one deepstack.
    assert len(found.tower.linear) == 4 * 4 + 2 + 2
    assert found.tower.attention_bytes > found.tower.other_bytes > 0
    advice = advise(found, H200, Workload(context=2**17, concurrency=64, image_size=(2160, 3840)))
    if advice.recipe.linear is not None:
        assert advice.recipe.ignored_layers == ("visual",)
    with pytest.raises(UnsupportedError, match="got SiglipVisionConfig"):
        tower_of_config(transformers.SiglipVisionConfig())


def test_unknown_models_are_errors_that_list_the_known(tmp_path):
    names = known_models()
    assert {"llama-3.1-8b", "qwen3-vl-8b", "gpt-oss-like"} <= set(names)
    with pytest.raises(ConfigError, match="llama-3.1-8b.*got 'llama-4'"):
        find_model("llama-4")
    with pytest.raises(CheckpointError, match=r"expected a config.json"):
        find_model(str(tmp_path))


def test_image_sizes():
    assert parse_size("1920x1080") == parse_size("FullHD") == (1080, 1920)
    with pytest.raises(ConfigError, match="hd, fullhd, qhd, 4k; got 'large'"):
        parse_size("large")


def test_measuring_needs_the_gpu_that_was_asked_for():
    with pytest.raises(UnsupportedError, match=r"cannot measure the engine's latency at 8 × 32,76"):
        check_measurable(decoder(), H200, LONG, CPU)
    other = find_gpu("l40s")
    with pytest.raises(ConfigError, match="expected --gpu l40s, got NVIDIA L40S here and --gpu h2"):
        check_measurable(decoder(), H200, LONG, other.device)
    unknown = replace(other.device, name="NVIDIA L4")
    with pytest.raises(ConfigError, match="expected a GPU of h200, .*a100, got NVIDIA L4 here"):
        check_measurable(decoder(), H200, LONG, unknown)
    check_measurable(decoder(), H200, LONG, H200.device)
