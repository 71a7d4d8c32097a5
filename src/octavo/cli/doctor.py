"""octavo doctor: what this machine has, and which implementation each op would use."""

import platform
from typing import TYPE_CHECKING

from octavo.cli.console import out
from octavo.cli.tables import print_table

if TYPE_CHECKING:
    from octavo.kernels.device import Device


def doctor() -> None:
    """Show GPU, versions and environment, and which implementation each op would use and why."""
    from octavo import env
    from octavo.kernels.device import default_device
    from octavo.measure.records import Machine
    from octavo.measure.report.tables import Table
    from octavo.ops.explain import explain

    device = default_device()
    machine = Machine.current(gpu=device.gpu, capability=device.capability)
    facts = {
        "GPU": _describe_gpu(device),
        "CPU": machine.cpu,
        "Python": f"{machine.python} on {platform.system()} {platform.machine()}",
        **machine.versions,
    }
    print_table(Table(caption="This machine", header=("what", "found"), rows=tuple(facts.items())))
    print_table(
        Table(
            caption="What each op runs here",
            header=("op", "operands", "impl", "why"),
            rows=tuple(
                (row.op, row.operands, row.selection.impl if row.selection else "none", row.reason)
                for row in explain(device)
            ),
        )
    )
    print_table(
        Table(
            caption="Environment variables",
            header=("variable", "value", "meaning"),
            rows=tuple((v.name, v.read(), v.meaning) for v in env.VARIABLES),
        )
    )
    for name in env.unknown_variables():
        out.print(f"warning: {name} is set, but octavo has no such variable", style="yellow")


def _describe_gpu(device: "Device") -> str:
    if device.capability is None:
        return "none that torch can use"
    major, minor = device.capability
    memory = f"{device.memory_bytes / 2**30:.0f} GiB"
    return f"{device.name}, compute capability {major}.{minor}, {device.num_sms} SMs, {memory}"
