"""No model brings Python code of its own: trust_remote_code is off, by name, in every call."""

import ast
import json
from pathlib import Path

import pytest

import octavo
from octavo.errors import CheckpointError

SRC = Path(octavo.__file__).parent
# Whose caller may decide otherwise; left out it is off.
BY_CALLER = {"integrations/transformers/load.py": 'options.pop("trust_remote_code", False)'}
# diffusers' models and schedulers have no code but their class's, and no such argument.
OF_DIFFUSERS = {
    "integrations/diffusers/full_size.py",
    "demo/small_image.py",
}


def objections(name: str, source: str) -> list[str]:
    """Where a file loads or makes a model without saying that its code is not trusted."""
    tree, found = ast.parse(source), []
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    loaders = {"from_pretrained"} | (set() if name in OF_DIFFUSERS else {"from_config"})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in loaders:
            continue
        call = called.get(id(node))
        values = [k.value for k in call.keywords if k.arg == "trust_remote_code"] if call else []
        is_off = (
            len(values) == 1 and isinstance(values[0], ast.Constant) and values[0].value is False
        )
        if not is_off and not (values and BY_CALLER.get(name, "\0") in source):
            found.append(f"{name}:{node.lineno}")
    return found


def test_every_call_says_so():
    files = {p.relative_to(SRC).as_posix(): p.read_text() for p in SRC.rglob("*.py")}
    assert sum(text.count(".from_pretrained(") for text in files.values()) >= 7
    assert [where for name, text in files.items() for where in objections(name, text)] == []


@pytest.mark.parametrize(
    "source",
    [
        "AutoModel.from_pretrained(name)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=None)",
        "AutoModel.from_pretrained(name, **options)",
        "load = AutoModel.from_pretrained",
        "AutoModel.from_config(config)",
    ],
)
def test_what_is_found(source):
    assert objections("x.py", source) == ["x.py:1"]


@pytest.fixture
def folder(tmp_path):
    """A model of a kind that only its own code knows; the code leaves a trace if it runs."""
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    classes |= {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    config = {"model_type": "own_kind", "auto_map": classes}
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    yield tmp_path
    assert not (tmp_path / "ran").exists()


def test_a_folder_with_code_is_refused(folder):
    transformers = pytest.importorskip("transformers")
    from octavo import load_fp8
    from octavo.integrations.transformers.cache_layers import read_cached_model
    from octavo.integrations.transformers.text_model import load_text_model, load_tokenizer

    said = r"needs Python code of its own \(auto_map\), which octavo does not run"
    for load in (load_text_model, load_tokenizer, read_cached_model):
        with pytest.raises(CheckpointError, match=said):
            load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "octavo"}}
    (folder / "config.json").write_text(json.dumps(config | quantized))
    with pytest.raises(CheckpointError, match=said):
        load_fp8(transformers.AutoModelForCausalLM, folder)


def test_a_pipeline_with_code_is_refused(tmp_path):
    pytest.importorskip("diffusers")
    from octavo.integrations.diffusers.load import load_pipeline

    index = {"_class_name": ["own", "OwnPipeline"], "_diffusers_version": "0.42.0"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="needs Python code of its own"):
        load_pipeline(tmp_path)
    assert not (tmp_path / "ran").exists()
