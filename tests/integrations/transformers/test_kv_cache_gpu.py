"""KV caches of transformers models on a GPU: the same as on a CPU, without waiting, in graphs."""

import pytest
import torch

pytest.importorskip("transformers")


from transformers import DynamicCache, StaticCache

from octavo import CalibrationSettings, Recipe, apply_, calibrate_kv, restore_
from octavo.integrations.transformers import kv_cache
from octavo.testing.asserts import assert_no_waiting
from octavo_testkit.models.text_models import make_decoder, make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the model brings no scales"),
    pytest.mark.filterwarnings("ignore:.*cudaMalloc.*"),
]
FAMILIES = ("llama", "gpt_oss", "gemma2", "gemma3_text")
SETTINGS = {
    "tensor": "fp8",
    "e5m2": "fp8_e5m2",
    "head": {"granularity": "head", "scaling": "unit"},
    "token": {"granularity": "token"},
    "rotated": {"granularity": "token", "rotate_keys": True},
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make(family, dtype=torch.bfloat16):
    """Heads of 64, which kernels take."""
    return make_decoder(family, dtype, head_dim=64)


def forward_in_parts(model, prompts, splits, cache=None):
    device = model.device
    mask = prompts["attention_mask"].to(device)
    ids, positions = prompts["input_ids"].to(device), (mask.cumsum(1) - 1).clamp(min=0)
    parts, start = [], 0
    for stop in (*splits, mask.shape[1]):
        result = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache, start = result.past_key_values, stop
        parts.append(result.logits.float().cpu())
    return torch.cat(parts, 1)


def error(found, exact, prompts):
    real = prompts["attention_mask"].bool()
    return float((found[real] - exact[real]).norm() / exact[real].norm())


@pytest.mark.parametrize("settings", [None, *SETTINGS])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_err_as_the_reference_does(family, settings):
    prompts, splits = make_prompts(3, 330), (290, 327, 328, 329)
    exact = forward_in_parts(make(family, torch.float32), prompts, ())
    model = make(family)
    errors = {}
    for device in ("cpu", "cuda"):
        model.to(device)
        if settings is None:
            kv_cache.attach(model, None)
        else:
            apply_(model, Recipe(kv_cache=SETTINGS[settings]))
        errors[device] = error(forward_in_parts(model, prompts, splits), exact, prompts)
        kv_cache.detach(model)
    assert errors["cuda"] <= 1.2 * errors["cpu"] + 0.003 and errors["cpu"] < 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_waits_for_nothing(family):
    model, prompts = make(family).to("cuda"), make_prompts(2, 30)
    apply_(model, Recipe(kv_cache="fp8"))
    cache = DynamicCache(config=model.config)
    forward_in_parts(model, prompts, (28, 29), cache)  # kernels are compiled
    mask = torch.ones(2, 31, dtype=torch.int64, device="cuda")
    step = {
        "input_ids": torch.tensor([[5], [7]], device="cuda"),
        "attention_mask": mask,
        "position_ids": torch.full((2, 1), 30, device="cuda"),
    }
    torch.cuda.synchronize()
    with assert_no_waiting():
        model(**step, past_key_values=cache)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", ["tensor", "token"])
def test_decode_steps_in_a_cuda_graph(family, settings):
    model, prompts = make(family).to("cuda"), make_prompts(2, 40)
    apply_(model, Recipe(kv_cache=SETTINGS[settings]))
    tokens = torch.randint(2, 200, (2, 80), device="cuda")
    starts = prompts["attention_mask"].sum(1, keepdim=True).cuda()

    def prefilled():
        cache = StaticCache(config=model.config, max_cache_len=256)
        forward_in_parts(model, prompts, (), cache)
        return cache

    cache, expected = prefilled(), []
    for i in range(80):
        result = model(
            input_ids=tokens[:, i : i + 1], position_ids=starts + i, past_key_values=cache
        )
        expected.append(result.logits.clone())
    cache, ids, positions = prefilled(), tokens[:, :1].clone(), starts.clone()
    step = {"input_ids": ids, "position_ids": positions, "past_key_values": cache}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(**step)
    torch.cuda.current_stream().wait_stream(stream)
    cache.reset()
    forward_in_parts(model, prompts, (), cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(**step).logits
    for i in range(80):
        ids.copy_(tokens[:, i : i + 1])
        positions.copy_(starts + i)
        graph.replay()
        assert torch.equal(logits, expected[i]), i


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own compiler
def test_generate_compiles_a_static_cache():
    model, prompts = make("llama").to("cuda"), make_prompts(2, 40)
    apply_(model, Recipe(kv_cache="fp8"))
    inputs = {name: x.cuda() for name, x in prompts.items()}
    options = {"max_new_tokens": 10, "do_sample": False, "output_scores": True}
    options |= {"return_dict_in_generate": True}
    eager = model.generate(**inputs, **options)
    compiled = model.generate(**inputs, **options, cache_implementation="static")
    first = torch.stack(eager.scores)[0], torch.stack(compiled.scores)[0]
    torch.testing.assert_close(*first, rtol=0, atol=0.05)
    assert restore_(model).layers["kv_cache"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_centered_keys_in_passes_of_a_few_tokens(size):
    prompts = {name: x[:1] for name, x in make_prompts(2, 40).items()}
    exact = forward_in_parts(make("llama", torch.float32), prompts, ())
    batches = [{"input_ids": make_prompts(1, 100, seed)["input_ids"]} for seed in (7, 8)]
    options = {"rotate_keys": True, "center_keys": True}
    scales = calibrate_kv(make("llama", torch.float32), batches, CalibrationSettings(**options))
    recipe = Recipe(kv_cache={"scaling": "static", **options}, scales=scales.to_dict())
    errors = []
    for device in ("cpu", "cuda"):
        model = make("llama").to(device)
        apply_(model, recipe)
        splits = tuple(range(20, 40, size))
        errors.append(error(forward_in_parts(model, prompts, splits), exact, prompts))
    assert 0 < errors[1] < 1.3 * errors[0] < 0.2
