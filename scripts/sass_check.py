"""sass_check.py NVDISASM CUBIN...: for each kernel a line with its name, the instructions of one iteration of its inner
loop with tensor-core work, and the number of its GPU-wide fences outside of such loops; and a line for each such fence,
local load and local store inside of them.

An iteration is the path that passes the most tensor-core instructions and of these the shortest: masks, caps and failed polls are
branches off it. In SASS a loop is a branch to a lower address."""
import os
import re
import subprocess
import sys

TENSOR = re.compile(r"[HIQ]GMMA|HMMA|IMMA")
FENCE = re.compile(r"MEMBAR\.(ALL|SC)\.(GPU|SYS)")
LOCAL = re.compile(r"STL|LDL")


def read(text):
    """The instructions as (opcode, next instructions)."""
    code, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_\S+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@\S+\s+)?(\S+)(.*);", line):
            code.append(instruction.groups())
    for i, (predicate, opcode, operands) in enumerate(code):
        target = re.search(r"`\((\.L_\S+)\)", operands) if opcode.startswith("BRA") else None
        # `BRA P0, target` is conditional too.
        conditional = predicate or re.match(r"(\.\S+)?\s+!?U?P\d", operands)
        ends = opcode.startswith(("BRA", "EXIT", "RET")) and not conditional
        yield opcode, ([] if ends else [i + 1]) + ([labels[target[1]]] if target else [])


def iteration(code, head, tail):
    """(tensor-core instructions negated, instructions) of the best path forward from head to tail; None without one."""
    best = {head: (0, 1)}
    for i in range(head, tail):
        for j in code[i][1] if i in best else []:
            if i < j <= tail:
                tensor, length = best[i]
                found = (tensor - bool(TENSOR.match(code[j][0])), length + 1)
                best[j] = min(found, best.get(j, found))
    return best.get(tail)


def report(name, code):
    loops = []
    for tail, (_, targets) in enumerate(code):
        for head in targets:
            if head <= tail and (found := iteration(code, head, tail)) and found[0]:
                loops.append((found, head, tail))
    # A loop over tiles contains the one over keys.
    within = lambda a, b: a != b and b[1] <= a[1] and a[2] <= b[2]
    loops = [loop for loop in loops if not any(within(other, loop) for other in loops)]
    inside = {i for _, head, tail in loops for i in range(head, tail + 1)}
    fences = [i for i, (opcode, _) in enumerate(code) if FENCE.match(opcode)]
    print(name, min(loops)[0][1] if loops else "-", len([i for i in fences if i not in inside]))
    for i in sorted(inside):
        if FENCE.match(code[i][0]) or LOCAL.match(code[i][0]):
            print(f"{name}: {code[i][0]} in the inner loop")


for cubin in sys.argv[2:]:
    text = subprocess.run([sys.argv[1], "-c", cubin], check=True, capture_output=True, text=True).stdout
    report(os.path.basename(cubin).removesuffix(".cubin"), list(read(text)))
