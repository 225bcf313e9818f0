"""What a GPU would execute for the Triton kernels:   python benchmarks/machine_code.py

Compiles them for an H100 or H200 (compute capability 9.0) and reads the machine code. This needs
Triton 3.3 or later, but no GPU.

    registers     per thread; at 128, a multiprocessor's 65,536 hold sixteen warps of 32 threads
    spilled       bytes per thread that did not fit in registers
    barriers      places where warps wait for each other
    instructions  in the loop, per element of y
    allowed       what an H200 can issue in the time that its memory needs for that element: 12.5
                  for each bfloat16 number that is read or written, since 132 multiprocessors issue
                  4 x 32 a cycle (30e12 per second at 1.8 GHz) and 4.8 TB/s are 2.4e12 numbers
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter makes no machine code

import torch  # noqa: E402
from common import Benchmark  # noqa: E402

import kernels  # noqa: E402

POINTERS = dict(x_ptr="*bf16", dy_ptr="*bf16", y_ptr="*bf16", dx_ptr="*bf16",
                w_ptr="*fp32", dw_ptr="*fp32")  # fmt: skip
# their tiles, and how many tensors they read and write
KERNELS = {"forward": (kernels.FORWARD_TILES, 2), "backward": (kernels.BACKWARD_TILES, 3)}


def machine_code(kernel, settings):
    """Resource usage and code of a Triton kernel, as cuobjdump prints them."""
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    num_warps = settings.pop("num_warps")
    names = kernel.arg_names
    kinds = {name: POINTERS.get(name, "constexpr" if name in settings else "i32") for name in names}
    aligned = {  # pointers and strides are multiples of 16 when a model runs
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in POINTERS or name.endswith("_stride")
    }
    source = ASTSource(fn=kernel, signature=kinds, constexprs=settings, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    binary = compile(source, target=target, options={"num_warps": num_warps}).asm["cubin"]
    dump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        commands = ([dump, what, file.name] for what in ("-res-usage", "-sass"))
        return [subprocess.check_output(command, text=True) for command in commands]


def count(name, kernel_size, D):
    """A row of the table."""
    import triton  # noqa: F401  (or say that it is not installed)

    tiles, tensors = KERNELS[name]
    x, weight = torch.empty(16, 2048, D, device="meta"), torch.empty(kernel_size, D)
    settings = kernels.launch_for(x, weight, **tiles)[3] | {"RESIDUAL": True}
    elements = settings["ROWS"] * settings["COLS"] / 32  # per thread and turn of the loop
    usage, code = machine_code(getattr(kernels, f"{name}_kernel"), settings)
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
    branch = r"/\*([0-9a-f]{4,5})\*/[^;]*\bBRA[^;]*0x([0-9a-f]+)[^;]*;"
    jumps = [(int(here, 16), int(to, 16)) for here, to in re.findall(branch, code)]
    loop = max((here - to) // 16 + 1 for here, to in jumps if to < here)  # 16 bytes each
    return dict(what=name, D=D, kernel=kernel_size, registers=registers, spilled=stack,
                barriers=len(re.findall(r"\bBAR\b", code)), instructions=loop / elements,
                allowed=12.5 * tensors)  # fmt: skip


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv, device="sm_90")
    for kernel_size, D in [(4, 768)] if bench.toy else [(4, 768), (4, 2304), (4, 4096), (8, 2304)]:
        for name in KERNELS:
            with bench.optional("machine_code.py"):
                bench.add(**count(name, kernel_size, D))


if __name__ == "__main__":
    main()
