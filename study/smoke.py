"""Is Hopper's attention kernel right? Small calls of every kind against the reference, on a GPU.

    python study/smoke.py compile [-j PROCESSES]   compile what all groups need; launch nothing
    python study/smoke.py GROUP    failures and a count; status 3 is a hang, 1 a failure

A hung kernel blocks its process for good: run each group in a process of its own.
"""

import argparse
import sys
import time
from dataclasses import replace

import launching
import torch

from octavo.kernels.attention.config import GluonConfig, default_gluon
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerHead
from octavo.testing.cases import AttentionCase, PackedCase
from octavo.testing.inputs import make_attention_inputs, make_packed_inputs
from octavo_testkit.kernels.attention_checks import check

E4M3 = torch.float8_e4m3fn
EXACT, CODES = AttentionSpec(exponentials="exact"), AttentionSpec(exponentials="codes")
ONE = {"promote_every": None}
SIZES = ((200, 300), (64, 1100), (5, 0), (193, 128))
PACKED = {"q_lens": (300, 1, 0, 130, 64), "kv_lens": (300, 400, 7, 0, 64)}


def dense(spec, head_dim, config=None, sizes=SIZES, **fields):
    for q_len, kv_len in sizes:
        yield (
            AttentionCase(q_len=q_len, kv_len=kv_len, spec=spec, head_dim=head_dim, **fields),
            config,
        )


def packed(spec, head_dim, config=None, **fields):
    yield PackedCase(**{**PACKED, **fields}, spec=spec, head_dim=head_dim), config


def groups():
    """Cases by group; what is wanted most comes first."""
    causal = {"causal": True}
    made = {
        "codes": [
            *(dense(CODES, d) for d in (128, 64, 72, 96, 80, 104)),
            dense(CODES, 128, GluonConfig(encodes_first=True)),
            *(dense(CODES, d, GluonConfig()) for d in (64, 72, 96)),
        ],
        "wide": [
            *(dense(CODES, d) for d in (256, 192, 160, 224)),
            dense(CODES, 256, GluonConfig(block_n=64, part_width=64)),
            dense(CODES, 256, GluonConfig(block_n=32, num_stages=8)),
        ],
        "exact": [dense(EXACT, d) for d in (128, 64, 72, 96, 192, 256)],
        "causal": [
            dense(replace(spec, **causal), d, sizes=((450, 450), (450, 100), (70, 520)))
            for spec in (CODES, EXACT)
            for d in (128, 64, 256)
        ],
        "one-level": [
            dense(replace(spec, **ONE), d) for spec in (CODES, EXACT) for d in (128, 256)
        ],
        "packed": [
            packed(replace(spec, causal=True), d, has_sinks=True)
            for spec in (CODES, EXACT)
            for d in (128, 72, 192)
        ],
        "masks": [
            dense(replace(spec, **use), 128, sizes=((450, 450), (70, 520)))
            for spec in (CODES, EXACT)
            for use in ({"window": 40}, {"causal": True, "window": 170}, {"softcap": 3.0})
        ],
        # Many jobs for each of the programs: batch by heads by tiles of rows is about 500.
        "persistent": [
            dense(spec, d, config, sizes=((300, 300),), batch=20, num_heads=8)
            for spec, d, config in (
                (CODES, 64, GluonConfig(is_persistent=True, encodes_first=True)),
                (CODES, 128, GluonConfig(is_persistent=True, encodes_first=True)),
                (replace(CODES, causal=True), 128, GluonConfig(is_persistent=True)),
                (
                    replace(CODES, causal=True),
                    128,
                    GluonConfig(is_persistent=True, is_longest_first=True, encodes_first=True),
                ),
                (EXACT, 72, default_gluon(72, EXACT)),
                (EXACT, 128, GluonConfig(is_persistent=True)),
                (CODES, 256, GluonConfig(is_persistent=True, block_n=64)),
            )
        ],
        "three": [
            dense(spec, 64, GluonConfig(block_n=64, num_consumers=3, **how))
            for spec, how in (
                (CODES, {}),
                (CODES, {"encodes_first": True}),
                (CODES, {"encodes_first": True, "is_persistent": True}),
                (EXACT, {"has_ones": True}),
            )
        ],
        "stages": [
            dense(spec, d, GluonConfig(num_stages=num, **how))
            for num in (2, 8)
            for spec, d, how in ((CODES, 64, {"encodes_first": True}), (EXACT, 64, {}))
        ],
    }
    return {name: [case for cases in of for case in cases] for name, of in made.items()}


def inputs_of(case):
    make = make_packed_inputs if isinstance(case, PackedCase) else make_attention_inputs
    return make(case, dtype=E4M3, granularity=PerHead(), device="cuda")


def key_of(case, config):
    """What is compiled in, as text."""
    config = config or default_gluon(case.head_dim, case.spec)
    uses = (case.spec.window is None, case.spec.softcap is None, case.has_sinks)
    return str((type(case), case.head_dim, replace(case.spec, window=None), uses, config))


def compile_one(group, index):
    from octavo.kernels.attention.gluon_sm90 import attention
    from octavo_testkit.kernels.attention_checks import run

    case, config = groups()[group][index]
    started = time.time()
    run(attention, inputs_of(case), config)
    return time.time() - started


def compile_all(num_processes):
    started, wanted = time.time(), {}
    for group, cases in groups().items():
        for index, (case, config) in enumerate(cases):
            if getattr(case, "num_keys", 1) > 0:
                wanted.setdefault(key_of(case, config), (group, index))
    with launching.compilers(num_processes) as pool:
        futures = {pool.submit(compile_one, *place): place for place in wanted.values()}
        for future, place in futures.items():
            try:
                future.result()
            except Exception as error:
                print("NOT COMPILED", place, groups()[place[0]][place[1]], str(error)[-500:])
    print(f"{len(wanted)} kernels of smoke compiled in {time.time() - started:.0f} s", flush=True)


def run_group(group):
    from octavo.kernels.attention.gluon_sm90 import attention

    num_failed = 0
    for case, config in groups()[group]:
        with launching.at_most(45, f"{group} {case} {config}"):
            try:
                for _ in range(3):  # a race need not show at once
                    # Sums in the model are exact: at these lengths the accumulator changes little.
                    check(attention, inputs_of(case), config, accumulator=None)
                torch.cuda.synchronize()
            except BaseException as error:
                num_failed += 1
                print("FAIL", group, case, config, str(error)[:300].replace("\n", " "), flush=True)
    print(f"{group}: {len(groups()[group])} calls, {num_failed} failed", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=["compile", *groups()])
    parser.add_argument("-j", type=int, default=16)
    args = parser.parse_args()
    if args.group == "compile":
        compile_all(args.j)
    else:
        sys.exit(run_group(args.group))
