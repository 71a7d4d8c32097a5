"""Prefill over pages by Hopper's attention kernel, for FP8 queries and pages."""

from functools import partial

from octavo.kernels.attention.gluon_sm90 import attention
from octavo.kernels.prefill.triton import prefill as gather_and_attend

prefill = partial(gather_and_attend, attend=attention)
