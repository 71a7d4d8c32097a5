"""Where products, waits, spills and branches lie in /tmp/k.o, run-length encoded."""
import re, subprocess, os, triton, sys
tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
sass = subprocess.run([tool, "-sass", "/tmp/k.o"], capture_output=True, text=True).stdout
rows = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z0-9_.]+)\s*([^;]*);", sass, re.M)
labels = {}
out, last, n = [], None, 0
def kind(op, args, addr):
    base = op.split(".")[0]
    if base in ("BRA",):
        m = re.search(r"0x([0-9a-f]+)", args); back = m and int(m[1], 16) < int(addr, 16)
        return f"BRA{'^' if back else ''}({m[1] if m else '?'})"
    if base in ("QGMMA", "LDL", "STL", "WARPGROUP", "SYNCS", "SHFL", "VOTE", "BAR", "MUFU", "EXIT", "WARPSYNC"): return op if base in ("WARPGROUP",) else base
    return "."
prev, cnt, start = None, 0, None
for addr, p, op, args in rows:
    k = kind(op, args, addr)
    if k == prev: cnt += 1; continue
    if prev: print(f"{start}:{prev}x{cnt}", end=" ")
    prev, cnt, start = k, 1, addr
print()
