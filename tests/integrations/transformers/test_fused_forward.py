"""Forwards of transformers that ours replace: their code is what ours was written after."""

import ast
import inspect
import textwrap
from importlib import import_module

import pytest

pytest.importorskip("transformers")

from octavo.integrations.transformers import fused_decoder

LLAMA = "transformers.models.llama.modeling_llama"


class Plain(ast.NodeTransformer):
    """A forward without what families differ in: norms of heads, and options of attention."""

    def __init__(self):
        self.options, self.norms = {}, set()

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node  # a docstring

    def visit_Call(self, node):
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name in ("self.q_norm", "self.k_norm"):
            self.norms.add(name)
            return node.args[0]
        if name == "attention_interface":
            known = [word for word in node.keywords if word.arg in ("sliding_window", "softcap")]
            self.options |= {word.arg: ast.unparse(word.value) for word in known}
            node.keywords = [word for word in node.keywords if word not in known]
        return node

    def visit_IfExp(self, node):
        same = "self.attention_dropout if self.training else 0.0"
        return ast.parse(same, mode="eval").body if ast.unparse(node) == SAME_DROPOUT else node

    def visit_Assign(self, node):
        self.generic_visit(node)
        is_nothing = ast.unparse(node.targets[0]) == ast.unparse(node.value)
        return None if is_nothing else node


SAME_DROPOUT = "0.0 if not self.training else self.attention_dropout"
OPTIONS = {
    "_no_options": {},
    "_own_window": {"sliding_window": "self.sliding_window"},
    "_window_of_config": {"sliding_window": "getattr(self.config, 'sliding_window', None)"},
    "_window_and_cap": {
        "sliding_window": "self.sliding_window",
        "softcap": "self.attn_logit_softcapping",
    },
}


def plain(function):
    """A function's code in one form, and what was left out of it."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    reader = Plain()
    body = [reader.visit(node) for node in tree.body]
    return [ast.unparse(node) for node in body if node is not None], reader


@pytest.mark.parametrize("name", fused_decoder._KNOWN)
def test_known_forwards_are_as_transformers_wrote_them(name):
    """That of Llama, but for norms and windows; rotary embedding turns the same pairs."""
    path, kind, _ = name.rsplit(".", 2)
    module, llama = import_module(path), import_module(LLAMA)
    expected, _ = plain(llama.LlamaAttention.forward)
    found, left_out = plain(getattr(module, kind).forward)
    assert found == expected
    forward, children = fused_decoder._KNOWN[name]
    assert left_out.options == OPTIONS[forward.args[0].__name__]
    assert bool(left_out.norms) == ("q_norm" in children)
    for function in ("apply_rotary_pos_emb", "rotate_half"):
        ours, theirs = (plain(getattr(m, function))[0] for m in (llama, module))
        assert ours == theirs
