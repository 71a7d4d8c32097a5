"""Layer names of checkpoints and of models: which are the same layer."""

import pytest

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.kv_scales import match_layers, missing_layers, split_number

TEXT = "model.layers.0.self_attn"
NEW = "model.language_model.layers.0.self_attn"
OLD = "language_model.model.layers.0.self_attn"
VISION = "model.vision_tower.layers.0.self_attn"


@pytest.mark.parametrize(
    "name", [TEXT, NEW, OLD, "layers.0.self_attn", "backbone.layers.0.self_attn"]
)
@pytest.mark.parametrize("target", [TEXT, NEW, OLD])
def test_modules_around_the_language_model_carry_no_meaning(name, target):
    assert match_layers([name], [VISION, target]) == {name: target}


@pytest.mark.parametrize(
    ("names", "targets", "said"),
    [
        ([TEXT], [NEW, OLD], f"expected one layer that '{TEXT}' stands for, got '{NEW}', '{OLD}'"),
        ([NEW, OLD], [TEXT], f"expected the scales of '{TEXT}' once, got '{NEW}' and '{OLD}'"),
        ([VISION], [TEXT], f"expected scales for '{TEXT}', got some for '{VISION}'"),
        ([TEXT], ["model.layers.1.self_attn"], "got some for"),
        ([TEXT], ["model.layers.0.cross_attn"], "got some for"),
        ([TEXT], ["talker.model.layers.0.self_attn"], "got some for"),
        ([TEXT], [], "expected scales for no layer"),
        (["attn"], ["self_attn"], "got some for 'attn'"),
    ],
)
def test_names_that_do_not_match(names, targets, said):
    with pytest.raises(CheckpointError) as info:
        match_layers(names, targets)
    assert said in str(info.value)


def test_the_same_name_comes_first():
    assert match_layers([TEXT, NEW], [NEW, TEXT]) == {TEXT: TEXT, NEW: NEW}
    assert match_layers([], [TEXT]) == {}
    assert match_layers(["attn"], ["attn"]) == {"attn": "attn"}


def test_layers_of_the_same_stack():
    stack = [f"model.layers.{number}.self_attn" for number in range(3)]
    assert split_number(stack[2]) == ("model.layers.*.self_attn", 2)
    assert missing_layers(stack[:1], [*stack, VISION], None) == stack[1:]
    assert missing_layers(stack[:1], [*stack, VISION], 2) == stack[1:2]
    assert missing_layers(stack[:1], [], 2) == stack[1:2]
    assert missing_layers(stack, stack, 3) == []
