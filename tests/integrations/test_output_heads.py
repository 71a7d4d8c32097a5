"""Output heads of classifiers stay as they are; layers that are only called like one do not."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from octavo import calibrate_linear, quantize_
from octavo.layers.linear import Fp8Linear

HEAD = "an output head"


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(self.fc1(x).relu())


class TimmViT(nn.Module):
    """Names of timm's VisionTransformer; distilled ones have a second head."""

    def __init__(self, width=32, num_classes=40, is_distilled=False):
        super().__init__()
        self.blocks = nn.Sequential(Mlp(width), Mlp(width))
        self.norm, self.fc_norm, self.head_drop = nn.LayerNorm(width), nn.Identity(), nn.Identity()
        self.head = nn.Linear(width, num_classes) if num_classes else nn.Identity()
        if is_distilled:
            self.head_dist = nn.Linear(width, num_classes)
        self.is_distilled = is_distilled
        self.default_cfg = self.pretrained_cfg = {"classifier": "head", "num_classes": num_classes}

    def get_classifier(self):
        return (self.head, self.head_dist) if self.is_distilled else self.head

    def forward(self, x):
        x = self.norm(self.blocks(x))
        out = self.head(self.head_drop(self.fc_norm(x)))
        return (out + self.head_dist(x)) / 2 if self.is_distilled else out


class ClassifierHead(nn.Module):
    """timm's NormMlpClassifierHead: a hidden layer in front of the classes."""

    def __init__(self, width, num_classes):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pre_logits = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.pre_logits(self.norm(x)))


class TimmConvNeXt(nn.Module):
    """Names of timm's ConvNeXt."""

    def __init__(self, width=32, num_classes=40):
        super().__init__()
        self.stages = nn.Sequential(Mlp(width), Mlp(width))
        self.norm_pre, self.head = nn.Identity(), ClassifierHead(width, num_classes)
        self.default_cfg = {"classifier": "head.fc"}

    def get_classifier(self):
        return self.head.fc

    def forward(self, x):
        return self.head(self.norm_pre(self.stages(x)))


class TimmResNet(nn.Module):
    """Names of timm's and torchvision's ResNet, with linear layers for convolutions."""

    def __init__(self, width=32, num_classes=40):
        super().__init__()
        self.layer1, self.layer2 = Mlp(width), Mlp(width)
        self.global_pool, self.fc = nn.Identity(), nn.Linear(width, num_classes)

    def get_classifier(self, name_only=False):
        return "fc" if name_only else self.fc

    def forward(self, x):
        return self.fc(self.global_pool(self.layer2(self.layer1(x))))


class Named(nn.Module):
    """Modules that run one after the other, in the order and under the names they are given."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def classifier():
    """As in torchvision's VGG and MobileNet."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 40))


def heads_of(model):
    changes = quantize_(model.eval())
    found = {name for name, reason in changes.left["linear"].items() if reason == HEAD}
    for name, module in model.named_modules():
        assert isinstance(module, Fp8Linear) == (name in changes.layers["linear"])
    with torch.inference_mode():
        assert model(torch.randn(3, 32)).isfinite().all()
    return found


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (TimmViT(), {"head"}),
        (TimmViT(is_distilled=True), {"head", "head_dist"}),
        (TimmConvNeXt(), {"head.fc"}),
        (TimmResNet(), {"fc"}),
    ],
    ids=["vit", "distilled vit", "convnext", "resnet"],
)
def test_classifiers_of_timm(model, expected):
    assert heads_of(model) == expected


def test_in_a_model_around_it():
    assert heads_of(Named(before=Mlp(32), net=TimmViT(num_classes=32), after=Mlp(32))) == {
        "net.head"
    }


def test_without_classes_nothing_is_a_head():
    assert heads_of(TimmViT(num_classes=0)) == set()


@pytest.mark.parametrize("kind", [dict, SimpleNamespace], ids=["dict", "dataclass"])
@pytest.mark.parametrize(
    ("name", "expected"), [("last", {"last"}), (("last", "mid"), {"last", "mid"}), (None, set())]
)
def test_the_config_of_timm_names_a_head(kind, name, expected):
    model = Named(mid=nn.Linear(32, 32), body=Mlp(32), last=nn.Linear(32, 40))
    model.pretrained_cfg = kind(classifier=name, num_classes=40)
    assert heads_of(model) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"body": Mlp(32), "fc": nn.Linear(32, 40)}, {"fc"}),
        ({"features": Mlp(32), "classifier": classifier()}, {"classifier.3"}),
        ({"encoder": Mlp(32), "heads": nn.Sequential(nn.Linear(32, 40))}, {"heads.0"}),
        ({"model": Mlp(32), "score": nn.Linear(32, 40)}, {"score"}),
        (
            {"bert": Mlp(32), "pre_classifier": nn.Linear(32, 32), "classifier": classifier()},
            {"classifier.3"},
        ),
        (
            {"m": Mlp(32), "cls_classifier": nn.Linear(32, 32), "head": nn.Linear(32, 40)},
            {"cls_classifier", "head"},
        ),
        ({"net": Named(body=Mlp(32), fc=nn.Linear(32, 40))}, {"net.fc"}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_names_at_the_end_of_a_model(parts, expected):
    assert heads_of(Named(**parts)) == expected


@pytest.mark.parametrize(
    "model",
    [
        Named(head=nn.Linear(32, 32), body=Mlp(32)),  # in front
        Named(body=Mlp(32), head=nn.Linear(32, 32), proj=nn.Linear(32, 40)),  # in the middle
        Named(a=Mlp(32), attn=Named(qkv=nn.Linear(32, 32), head=nn.Linear(32, 32))),  # of a block
        Named(a=Mlp(32), proj=nn.Linear(32, 32), header=nn.Linear(32, 40)),  # another word
        Named(a=Mlp(32), head=Named(norm=nn.LayerNorm(32), mlp=Mlp(32))),  # SigLIP's pooler
    ],
    ids=["in front", "in the middle", "of a block", "another word", "a pooler"],
)
def test_what_is_only_called_like_a_head(model):
    assert heads_of(model) == set()


def test_a_method_of_that_name_which_wants_something():
    class Model(Named):
        def get_classifier(self, which):
            raise AssertionError(which)

    assert heads_of(Model(a=Mlp(32), b=Mlp(32))) == set()


def test_calibration_leaves_heads_out():
    scales = calibrate_linear(TimmViT().eval(), [torch.randn(4, 32)])
    assert set(scales.inputs) == {f"blocks.{i}.{fc}" for i in range(2) for fc in ("fc1", "fc2")}


def test_classifiers_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_labels": 20}
    image = {"image_size": 16, "patch_size": 8}
    text = {"vocab_size": 50, "pad_token_id": 0}
    expected = {
        transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **image)): {
            "classifier"
        },
        transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes, **text)): {
            "score"
        },
        transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**sizes, **text)
        ): {"classifier.out_proj"},
        transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, **image)): set(),
    }
    for model, names in expected.items():
        left = quantize_(model).left["linear"]
        assert {name for name, reason in left.items() if reason == HEAD} == names
