"""GGUF files in every command: the same model as the one of transformers that they came from."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf

from octavo import LLM, CheckpointError, Recipe
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.transformers import gguf_file, load
from octavo.integrations.transformers.cache_layers import read_cached_model
from octavo.integrations.transformers.text_model import load_text_model
from octavo.measure import store
from octavo.measure.advise.shape import find_model
from octavo.numerics.error import relative_rms
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.models.gguf_files import Type, write_gguf
from octavo_testkit.models.text_models import (
    make_decoder,
    make_prompts,
    make_tokenizer,
    save_decoder,
)

TEXT = "A long text is cut into windows, and a chat goes through its template."


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def plain():
    return make_decoder("llama", vocab_size=300, num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, plain):
    """A folder with the model as transformers saves it, and one with a GGUF file of it."""
    folder = tmp_path_factory.mktemp("gguf")
    save_decoder(folder / "saved", plain)
    (folder / "one").mkdir()
    write_gguf(folder / "one" / "tiny.gguf", plain, make_tokenizer())
    (folder / "text").write_text(f"{TEXT} " * 20)
    return folder


def logits(model):
    return model(input_ids=make_prompts(1, 23)["input_ids"]).logits


def octavo(*args):
    return run(make_app(COMMANDS), list(map(str, args)))


@pytest.mark.parametrize("name", ["one/tiny.gguf", "one"])
def test_a_file_and_its_folder_are_the_model_that_they_came_from(folder, plain, name):
    found = load_text_model(str(folder / name), device="cpu")
    assert (found.name, found.dtype, found.max_length) == ("tiny", "float32", 1024)
    assert relative_rms(logits(found.model), logits(plain)) < 1e-5
    tokenizer = make_tokenizer()
    assert found.tokenizer(TEXT).input_ids == tokenizer(TEXT).input_ids  # with its BOS
    assert found.tokenizer.chat_template == tokenizer.chat_template


def test_quantized_blocks_are_dequantized(tmp_path, plain):
    write_gguf(tmp_path / "q8.gguf", plain, make_tokenizer(), dtype=Type.Q8_0)
    found = load_text_model(str(tmp_path), dtype="float32", device="cpu").model
    name = "model.layers.1.mlp.down_proj.weight"
    blocks = gguf.quants.quantize(plain.get_parameter(name).numpy(), Type.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, Type.Q8_0))
    assert torch.equal(found.get_parameter(name), expected)
    assert not hasattr(found.config, "quantization_config")


def test_a_server_names_it_by_its_file_and_answers_as_the_model(folder, plain):
    tokens = make_prompts(1, 23)["input_ids"][0].tolist()
    sampling = Sampling(max_tokens=6, temperature=0.0)
    llm = object.__new__(LLM)
    llm.engine = load_engine(
        str(folder / "one"), Recipe(), EngineSettings(), dtype="auto", device="cpu"
    )
    llm._num_requests = 0
    assert llm.engine.model_name == "tiny"
    other = LLM(str(folder / "saved"), dtype="float32", device="cpu")
    assert (
        llm.generate([tokens], sampling)[0].tokens == other.generate([tokens], sampling)[0].tokens
    )


def test_an_fp8_cache_and_fp8_layers_run(folder):
    recipe = Recipe(kv_cache={"scaling": "dynamic", "granularity": "token"}, linear="fp8")
    llm = LLM(str(folder / "one" / "tiny.gguf"), recipe=recipe, device="cpu")
    assert len(llm.generate([TEXT], Sampling(max_tokens=3))[0].tokens) == 3


def test_an_evaluation_of_it(folder, tmp_path):
    found = []
    for name in ("one/tiny.gguf", "saved"):
        path = tmp_path / f"{len(found)}.jsonl"
        args = ("--data", folder / "text", "--context", 60, "--chunk", 30, "-n", 1)
        args += ("--recipe", "baseline", "--dtype", "float32", "-o", path)
        assert octavo("eval", "perplexity", folder / name, *args) == 0
        found.append(store.read(path)[0])
    assert found[0].values["perplexity"] == pytest.approx(found[1].values["perplexity"], rel=1e-4)
    assert found[0].case["model"] == "tiny"


@pytest.mark.parametrize("name", ["one/tiny.gguf", "one"])
def test_advise_and_doctor_read_its_metadata_alone(folder, plain, name, capsys, monkeypatch):
    monkeypatch.setattr(load, "load_gguf", lambda *args: pytest.fail("weights are loaded"))
    expected, found = (find_model(str(folder / part)) for part in ("saved", name))
    assert found.name == "tiny" and found.quantized is None
    assert found.decoder == expected.decoder
    cached, saved = (read_cached_model(str(folder / part)) for part in (name, "saved"))
    assert cached.layers == saved.layers and cached.max_length == saved.max_length
    assert cached.weight_bytes == 2 * plain.num_parameters()  # as it is loaded on a GPU, in BF16
    args = ("--gpu", "h200", "--context", "1k", "--concurrency", 1)
    assert octavo("advise", folder / name, *args) == 0
    assert f"octavo serve {folder / name}" in " ".join(capsys.readouterr().out.split())
    assert octavo("doctor", folder / name, "--context", "1k", "--gpu-memory", "24GiB") == 0


def test_several_files_are_listed(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"got 'a.gguf', 'b.gguf': name one of them, such as"):
        load_text_model(str(tmp_path))
    assert gguf_file.find_gguf(str(tmp_path / "b.gguf")) == tmp_path / "b.gguf"
    (tmp_path / "model.safetensors").touch()  # what transformers takes
    assert gguf_file.find_gguf(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.gguf", "expected a GGUF file, got no file"),
        ("x-00001-of-00003.gguf", "got a part of one: llama-gguf-split --merge"),
        ("broken.gguf", "is damaged: its content ends too early or is no GGUF"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, message):
    if name != "nothing.gguf":
        (tmp_path / name).write_bytes(b"GGUF but not really, and rather short")
    with pytest.raises(CheckpointError, match=message):
        load_text_model(str(tmp_path / name))


def test_frequencies_of_the_file_are_used(tmp_path, plain):
    factors = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0]
    write_gguf(tmp_path / "x.gguf", plain, make_tokenizer(), rope_factors=factors)
    model = load_text_model(str(tmp_path), device="cpu").model
    before = plain.model.rotary_emb.inv_freq
    assert torch.allclose(model.model.rotary_emb.inv_freq, before / torch.tensor(factors))


def test_a_scaling_of_positions_that_would_be_lost_raises(tmp_path, plain):
    scaling = gguf.RopeScalingType.YARN
    write_gguf(tmp_path / "x.gguf", plain, make_tokenizer(), scaling=scaling)
    with pytest.raises(CheckpointError, match="scaling 'yarn': take the checkpoint in safetensors"):
        load_text_model(str(tmp_path), device="cpu")
