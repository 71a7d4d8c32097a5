"""Scale files made to hurt: always a ScaleSet or a CheckpointError, in bounded time and memory."""

import json
import os
import time
import tracemalloc
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.calibration import scale_document, scale_file
from octavo.calibration.scale_file import (
    MAX_FILE_BYTES,
    MAX_FILE_VALUES,
    LayerScales,
    ScaleSet,
    load_scales,
    save_scales,
)
from octavo.errors import CheckpointError

ENTRY = b'{"q": 1.5, "k": 2.5, "v": 3.5}'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "scales.json"


def load_error(path):
    with pytest.raises(CheckpointError) as caught:
        load_scales(path, strict=True)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected JSON in UTF-8"),
        (b" \n\t ", "expected JSON in UTF-8"),
        (b"\x00" * 100, "expected JSON in UTF-8"),
        (b"{", "expected JSON in UTF-8"),
        (b'{"a": ' + ENTRY + b"} trailing", "Extra data"),
        (b'{"a": ' + ENTRY + b",}", "expected JSON in UTF-8"),
        (b"{'a': 1}", "expected JSON in UTF-8"),
        (b"\xff\xfe\x00", "can't decode byte 0xff"),
        (b'{"\xc3\x28": ' + ENTRY + b"}", "can't decode byte"),
        (b'{"\xed\xa0\x80": ' + ENTRY + b"}", "can't decode byte"),
        ('{"a": 1.5}'.encode("utf-16"), "can't decode byte"),
        (b'\xef\xbb\xbf{"a": ' + ENTRY + b"}", "BOM"),
        (b'{"\\ud800": ' + ENTRY + b"}", "lone surrogate"),
        (b'{"a\x01": ' + ENTRY + b"}", "control character"),
        (b"[" * 200_000, "recursion"),
        (b'{"a":' * 200_000, "recursion"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "layer 'a': expected an object"),
        (b'{"a": {"q": ' + b"9" * 5000 + b"}}", "4300 digits"),
        (b'{"a": {"q": -' + b"9" * 4000 + b', "k": 1, "v": 1}}', "expected q to be a positive"),
        (b'{"a": {"q": 1' + b"0" * 10**6 + b'.5, "k": 1, "v": 1}}', "got inf"),
        (b'{"a": {"q": 0x10, "k": 1, "v": 1}}', "expected JSON in UTF-8"),
        (b'{"' + b"x" * 10**7 + b'": ' + ENTRY + b"}", "1 to 1000 characters"),
        (b'{"a": "' + b"x" * 10**7 + b'"}', "layer 'a': expected an object"),
        (b'{"a": {"' + b"x" * 10**7 + b'": 1}}', "layer 'a': expected only"),
        (b'{"layers": {"a": ' + ENTRY + b'}, "' + b"x" * 10**7 + b'": 1}', "nothing beside"),
        (b'{"a": {"q": "' + b"x" * 10**7 + b'", "k": 1, "v": 1}}', "expected q to be a positive"),
        (b'{"a": {"q": 1, "k": 1, "v": 1, "q_heads": ["' + b"x" * 10**7 + b'"]}}', "q_heads"),
        (b'{"' + b"x" * 10**6 + b'": 1, "' + b"x" * 10**6 + b'": 1}', "appears twice"),
        (b"[" + b"1," * 100_000 + b"1]", "expected an object of layers"),
        (b"null", "expected an object of layers, got None"),
    ],
    ids=lambda value: ascii(value[:16]),
)
def test_hostile_content(content, said, path):
    path.write_bytes(content)
    start = time.process_time()
    assert said in load_error(path)
    assert time.process_time() - start < 5


def test_no_file(path):
    assert "No such file" in load_error(path)


def test_a_folder(tmp_path):
    assert "something that is no file" in load_error(tmp_path)


def test_a_pipe_does_not_hang(path):
    os.mkfifo(path)
    assert "something that is no file" in load_error(path)


def test_a_device_does_not_hang():
    assert "something that is no file" in load_error("/dev/zero")


def test_a_name_that_no_file_can_have():
    assert "expected a scale file: embedded null byte" in load_error("a\0b")
    assert "File name too long" in load_error("x" * 100_000)


def test_a_file_that_cannot_be_read(path, monkeypatch):
    path.write_bytes(b"{}")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert "Permission denied" in load_error(path)


def test_a_huge_file_is_refused_unread(path):
    with open(path, "wb") as file:
        file.truncate(2**40)  # sparse: takes no space on the disk
    tracemalloc.start()
    try:
        assert f"expected at most {MAX_FILE_BYTES} bytes, got {2**40}" in load_error(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_too_many_values_are_refused_undecoded(path):
    path.write_bytes(b"[" + b"[]," * MAX_FILE_VALUES + b"[]]")
    tracemalloc.start()
    try:
        assert f"expected at most {MAX_FILE_VALUES} values" in load_error(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_FILE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_the_worst_that_is_decoded_stays_in_bounds(path):
    path.write_bytes(b"[" + b"[]," * (MAX_FILE_VALUES - 1) + b"[]]")
    start = time.process_time()
    assert "expected an object of layers" in load_error(path)
    assert time.process_time() - start < 20


@pytest.mark.slow
def test_a_hundred_thousand_layers(path):
    names = [f"model.layers.{i}.self_attn.attn" for i in range(100_000)]
    scales = ScaleSet({name: LayerScales(0.1, 0.2, 0.3) for name in names})
    save_scales(path, scales)
    start = time.process_time()
    loaded = load_scales(path)
    assert time.process_time() - start < 5  # 1.3 s on a busy machine with two cores
    assert loaded == scales
    start = time.process_time()
    with pytest.raises(CheckpointError, match="the 100000 layers with scales are"):
        loaded.layer("model.layers.7.self_atn")
    assert time.process_time() - start < 2


def test_what_could_not_be_read_is_not_written(path, monkeypatch):
    scales = ScaleSet({f"layers.{i}": LayerScales(0.1, 0.2, 0.3) for i in range(100)})
    monkeypatch.setattr(scale_file, "MAX_FILE_BYTES", 1000)
    with pytest.raises(CheckpointError, match="expected at most 1000 bytes"):
        save_scales(path, scales)
    assert not path.exists()


def test_a_number_too_long_to_print():
    with pytest.raises(CheckpointError, match="got a huge number"):
        ScaleSet.from_dict({"a": {"q": 10**5000, "k": 1.0, "v": 1.0}})


def test_five_thousand_layers(path):
    scales = ScaleSet({f"layers.{i}": LayerScales(0.1, 0.2, 0.3) for i in range(5000)})
    save_scales(path, scales)
    assert load_scales(path) == scales
    path.write_bytes(path.read_bytes().replace(b'layers.4999"', b'layers.4998"'))
    assert "'layers.4998' appears twice" in load_error(path)


VALID = json.dumps(
    {
        "octavo": {"format_version": 1, "model": "m", "margin": 1.5, "date": "2026-08-22"},
        "layers": {
            "blocks.0": {"q": 0.5, "k": 1.5, "v": 2.5},
            "blocks.1": {"q_scale": 0.5, "k": 1.5, "v": 2.5, "q_heads": [0.5, 0.25]},
        },
    }
).encode()

NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 0.5, 10**400])
KEYS = st.text(max_size=4) | st.sampled_from(sorted(scale_document._ALL_KEYS))
ENTRIES = st.fixed_dictionaries(
    {"q": NUMBERS, "k": NUMBERS, "v": NUMBERS}, optional={"q_heads": st.lists(NUMBERS, max_size=3)}
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | ENTRIES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)
SCALES = st.floats(2.0**-100, 2.0**100)
LAYERS = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.fixed_dictionaries({"q": SCALES, "k_scale": SCALES, "v": SCALES}),
    min_size=1,
    max_size=3,
)
DOCUMENTS = (
    LAYERS
    | st.fixed_dictionaries({"layers": LAYERS}, optional={"octavo": st.just({"format_version": 1})})
    | VALUES
    | st.dictionaries(st.text(max_size=4), ENTRIES | VALUES, max_size=3)
    | st.fixed_dictionaries(
        {"layers": st.dictionaries(st.text(max_size=4), ENTRIES, max_size=2) | VALUES},
        optional={"octavo": st.dictionaries(KEYS | st.just("format_version"), VALUES) | VALUES},
    )
)
MUTATIONS = st.lists(
    st.tuples(st.integers(0, len(VALID)), st.integers(0, 4), st.binary(max_size=3)),
    min_size=1,
    max_size=4,
)


def check_content(path, content):
    """A ScaleSet that survives another round, or a CheckpointError of bounded length."""
    for strict in (True, False):
        check_reading(path, content, strict)


def check_reading(path, content, strict):
    path.write_bytes(content)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scales = load_scales(path, strict=strict)
        assert all(len(str(each.message)) < 4000 for each in caught)
        assert not (strict and caught)
    except CheckpointError as error:
        assert 0 < len(str(error)) < 4000
        return
    save_scales(path, scales)
    assert load_scales(path) == scales


def mutated(mutations):
    content = VALID
    for start, length, replacement in mutations:
        content = content[:start] + replacement + content[start + length :]
    return content


QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LONG = settings(QUICK, max_examples=1500)


@QUICK
@given(DOCUMENTS)
def test_any_json(path, document):
    check_content(path, json.dumps(document).encode())


@QUICK
@given(MUTATIONS)
def test_mutated_files(path, mutations):
    check_content(path, mutated(mutations))


@QUICK
@given(st.binary(max_size=60))
def test_any_bytes(path, content):
    check_content(path, content)


@pytest.mark.slow
@LONG
@given(DOCUMENTS)
def test_any_json_for_long(path, document):
    check_content(path, json.dumps(document).encode())


@pytest.mark.slow
@LONG
@given(MUTATIONS)
def test_mutated_files_for_long(path, mutations):
    check_content(path, mutated(mutations))
