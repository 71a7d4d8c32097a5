"""Lets PyPI's torchvision, whose library is made for CUDA, be imported beside a torch for CPUs.

torchvision_ops.pth imports this as Python starts, in each of vLLM's processes. Nothing is imported
before torchvision is: then the two ops that it asks for are declared, if its library has not.
"""

import sys
from importlib.abc import MetaPathFinder


class _Declare(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision._autograd_registrations":  # after the library, before the others
            sys.meta_path.remove(self)
            _declare()


def _declare():
    global _library  # ops live as long as it does
    import torch

    _library = torch.library.Library("torchvision", "FRAGMENT")
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            _library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declare())
