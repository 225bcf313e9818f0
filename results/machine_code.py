"""What a GPU would execute for the Triton kernels:   python results/machine_code.py

Compiles them for an H100 or H200 (compute capability 9.0), which needs Triton 3.3 or later but no GPU, and reads off the machine code:

    registers     a thread; a multiprocessor has 65,536, so at 128 sixteen warps of 32 threads run side by side
    spilled       bytes of a thread that did not fit in registers and travel to memory
    barriers      places where warps wait for each other
    instructions  in the loop, for each element of a tile. An H200's 132 multiprocessors issue four a cycle for 32 threads each, 30 * 10^12 a
                  second at 1.8 GHz. Its memory's 4.8 TB/s are 1.2 * 10^12 elements forward (in bfloat16, one read and one written) and
                  0.8 * 10^12 backward (two read, one written): more than 25 or 38 instructions an element, and the memory waits. Of the two
                  kernels of the SiLU's backward pass, which pass dz on in float32, 50.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent.parent))
from kernels import WARPS, backward_kernel, forward_kernel  # noqa: E402

DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FORWARD = dict(x_ptr="*bf16", w_ptr="*fp32", dy_ptr="*bf16", y_ptr="*bf16")  # what the pointers point to
BACKWARD = dict(dy_ptr="*bf16", x_ptr="*bf16", w_ptr="*fp32", dx_ptr="*bf16", dw_ptr="*fp32")
KERNELS = {
    "forward": (forward_kernel, FORWARD, dict(RESIDUAL=True, SILU=False, GRADIENT=False)),
    "backward": (backward_kernel, BACKWARD, dict(RESIDUAL=True)),
    "forward, SiLU": (forward_kernel, FORWARD, dict(RESIDUAL=False, SILU=True, GRADIENT=False)),
    "dy * silu'(z)": (forward_kernel, {**FORWARD, "y_ptr": "*fp32"}, dict(RESIDUAL=False, SILU=True, GRADIENT=True)),
    "backward from that": (backward_kernel, {**BACKWARD, "dy_ptr": "*fp32"}, dict(RESIDUAL=False)),
}


def count(name, rows, cols):
    """Of the kernel of this name, in tiles of rows x cols: registers, bytes spilled, barriers, instructions an element."""
    kernel, pointers, constants = KERNELS[name]
    constants = {**constants, "K": 4, "ROWS": rows, "COLS": cols}
    signature = {a: pointers.get(a, "constexpr" if a in constants else "i32") for a in kernel.arg_names}
    # pointers, sizes and strides are multiples of 16, as Triton finds them when a model runs
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a not in constants and a != "tiles"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (subprocess.run([DUMP, what, file.name], capture_output=True, text=True, check=True).stdout for what in ("-res-usage", "-sass"))
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
    jumps = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"/\*([0-9a-f]{4,5})\*/[^;]*\bBRA[^;]*0x([0-9a-f]+)[^;]*;", code)]
    loop = max((a - b) // 16 + 1 for a, b in jumps if b < a)  # an instruction is 16 bytes
    return registers, stack, len(re.findall(r"\bBAR\b", code)), loop / (rows * cols / (32 * WARPS))


def main():
    print(f"triton {triton.__version__}, compute capability 9.0, bfloat16, K = 4, {WARPS} warp a program\n")
    print(f"{'':20}{'tile':>9}{'registers':>12}{'spilled':>10}{'barriers':>10}{'instructions':>14}")
    for rows, cols in ((4, 256), (8, 256), (8, 128)):
        for name in KERNELS:
            registers, stack, barriers, instructions = count(name, rows, cols)
            print(f"{name:20}{f'{rows} x {cols}':>9}{registers:12}{stack:10}{barriers:10}{instructions:14.1f}", flush=True)


if __name__ == "__main__":
    main()
