"""What a GPU would execute for the Triton kernels:   python results/machine_code.py

Compiles them for an H100 or H200 (compute capability 9.0), which needs Triton 3.3 or later but no GPU, and reads off the machine code:

    registers     a thread; a multiprocessor has 65,536, so at 128 sixteen warps of 32 threads run side by side
    spilled       bytes of a thread that did not fit in registers and travel to memory
    barriers      places where warps wait for each other
    instructions  in the loop, for each element of y, and how many the memory allows: an H200's 132 multiprocessors issue four a cycle for 32
                  threads each, 30 * 10^12 a second at 1.8 GHz, while its memory moves 2.4 * 10^12 bfloat16 numbers, 4.8 TB. So with more than
                  12.5 instructions for each number that is read or written, the memory waits.
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
from kernels import backward_kernel, forward_kernel, swiglu_backward_kernel, swiglu_forward_kernel  # noqa: E402

DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = dict(x_ptr="*bf16", w_ptr="*fp32", dy_ptr="*bf16", y_ptr="*bf16", dx_ptr="*bf16", dw_ptr="*fp32")  # what they point to
KERNELS = {  # and how many numbers each reads and writes for an element of y
    "forward": (forward_kernel, dict(RESIDUAL=True, SILU=False), 2),
    "backward": (backward_kernel, dict(RESIDUAL=True, SILU=False), 3),
    "forward, SiLU": (forward_kernel, dict(RESIDUAL=False, SILU=True), 2),
    "backward, SiLU": (backward_kernel, dict(RESIDUAL=False, SILU=True), 3),
    "forward, SwiGLU": (swiglu_forward_kernel, dict(RESIDUAL=True), 3),
    "backward, SwiGLU": (swiglu_backward_kernel, dict(RESIDUAL=True), 5),
}


def count(name, cols):
    """Of the kernel of this name, in strips of `cols` channels: registers, bytes spilled, barriers, instructions for an element of y,
    instructions that the memory allows."""
    kernel, constants, numbers = KERNELS[name]
    constants = {**constants, "K": 4, "COLS": cols, "W" if "SwiGLU" in name else "D": 2048}
    signature = {a: POINTERS.get(a, "constexpr" if a in constants else "i32") for a in kernel.arg_names}
    # pointers and strides are multiples of 16, as Triton finds them when a model runs
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a.startswith("x_") or a.endswith("_ptr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (subprocess.run([DUMP, what, file.name], capture_output=True, text=True, check=True).stdout for what in ("-res-usage", "-sass"))
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
    jumps = [(int(a, 16), int(b, 16)) for a, b in re.findall(r"/\*([0-9a-f]{4,5})\*/[^;]*\bBRA[^;]*0x([0-9a-f]+)[^;]*;", code)]
    loop = max((a - b) // 16 + 1 for a, b in jumps if b < a)  # an instruction is 16 bytes
    return registers, stack, len(re.findall(r"\bBAR\b", code)), loop / (4 * cols / 32), 12.5 * numbers  # a step is four rows


def main():
    print(f"triton {triton.__version__}, compute capability 9.0, bfloat16, K = 4, one warp a program\n")
    print(f"{'':20}{'channels':>10}{'registers':>12}{'spilled':>10}{'barriers':>10}{'instructions':>14}{'allowed':>10}")
    for cols in (64, 128, 256):
        for name in KERNELS:
            registers, stack, barriers, instructions, allowed = count(name, cols)
            print(f"{name:20}{cols:10}{registers:12}{stack:10}{barriers:10}{instructions:14.1f}{allowed:10.1f}", flush=True)


if __name__ == "__main__":
    main()
