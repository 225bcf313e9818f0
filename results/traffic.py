"""What a compiled training step moves through a GPU's memory, counted without a GPU:   python results/traffic.py

torch.compile decides which operations become one kernel when it compiles, so the bytes that its kernels read and write can be counted before
anything runs. Here it compiles for an H200 that does not exist: tensors are PyTorch's "fake" ones (shapes without data), and what PyTorch
and Triton ask of the driver is answered by hand. Needs Linux, g++, Triton and PyTorch's CPU build; the answers are made for 2.13.

Counted is, for each kernel, what it reads and what it writes. Of a tensor that a kernel of torch.compile's own reads, these are as many numbers
as it reads, but no more than the tensor has (so caches are taken to serve what is read twice); an operator that it calls is charged with its
whole arguments and results. The unit is one pass over 768 channels of all tokens in bfloat16 (a layer's width): 50 MB for 16 x 2,048 tokens,
0.0105 ms at an H200's 4.8 TB/s. Given are the numbers of one layer among others.
"""

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

# PyTorch's CPU build refuses tensors on "cuda". This library says that there is such a device, on which nothing ever has to wait.
STAND_IN = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
constexpr auto CUDA = DeviceType::CUDA;
struct Guard : NoOpDeviceGuardImpl<CUDA> {
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Device getDevice() const override { return Device(CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = event; }
  void block(void*, const Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
static Guard guard;
static DeviceGuardImplRegistrar registrar(CUDA, &guard);
}  // namespace c10::impl

namespace at {
struct Hooks : CUDAHooksInterface {
  Hooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);
}  // namespace at
"""


def load_stand_in():
    """Before torch is imported, as PyTorch asks only once."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "stand_in.cpp", Path(folder) / "stand_in.so"
        source.write_text(STAND_IN)
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", source, f"-L{torch_folder}/lib",
                        f"-Wl,-rpath,{torch_folder}/lib", "-lc10", "-ltorch_cpu", "-o", library], check=True)  # fmt: skip
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


if importlib.util.find_spec("triton") is None or shutil.which("g++") is None:
    raise SystemExit("traffic.py: needs Triton (pip install triton) and g++")
load_stand_in()
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
import torch._dynamo.device_interface  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import torch._inductor.fx_passes.fuse_attention  # noqa: E402
import torch._inductor.fx_passes.pad_mm  # noqa: E402
import torch._inductor.graph  # noqa: E402
import torch.utils._triton  # noqa: E402
import triton  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import canon_gpt  # noqa: E402
import kernels  # noqa: E402
from canon_gpt import CanonGPT, Config  # noqa: E402
from step_time import FORMS, use  # noqa: E402


def pretend():
    """Answer for the GPU that is not there."""
    h200 = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=141 << 30, gcnArchName="",
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    )  # fmt: skip
    cuda, interface = torch.cuda, torch._dynamo.device_interface.CudaInterface
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": h200, "get_device_capability": (9, 0),
        "_lazy_init": None, "_exchange_device": 0, "set_device": None, "set_rng_state": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_compute_capability": 90, "raise_if_triton_unavailable": None, "get_raw_stream": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        if hasattr(cuda, name):
            setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
        for owner in (interface, interface.Worker):
            if hasattr(owner, name):
                setattr(owner, name, staticmethod(lambda *args, answer=answer, **kwargs: answer))
    cuda._maybe_exchange_device = lambda device: 0
    torch.version.cuda = "12.8"
    fake_tensor.init_gpu_context = lambda *args: None
    torch.utils._triton.has_triton = lambda *args: True
    sizes = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    triton.runtime.driver.set_active(SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: sizes), get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_active_torch_device=lambda: torch.device("cuda", 0),
    ))  # fmt: skip
    # what would compute with real numbers on the device while compiling; none of it concerns these models
    torch._inductor.fx_passes.fuse_attention._sfdp_init = torch._inductor.fx_passes.pad_mm._pad_mm_init = lambda *args: None
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.graph.GraphLowering.compile_to_module = count_kernels


KINDS = {"canon": "convolution", "attention": "attention", "mm": "products"}  # of kernels that torch.compile calls; those it writes are "fused"
COLUMNS = ("fused", *KINDS.values(), "other")
counted = []  # a dict for each graph: forward, then backward


def count_kernels(graph):
    """In place of writing kernels to a file: what they would read and write, by kind, in bytes."""
    graph.codegen()
    found = dict.fromkeys(COLUMNS, 0)
    for node, quarter_of_bytes in graph.count_bytes()[1]:
        kind = "fused"
        if type(node).__name__.startswith("Extern"):
            called = str(getattr(node.node, "python_kernel_name", ""))
            kind = next((kind for word, kind in KINDS.items() if word in called), "other")
        found[kind] += 4 * quarter_of_bytes
    counted.append(found)
    return SimpleNamespace(call=lambda args: None, __file__=__file__, runner=None)


def backend(graph, inputs):
    def inner(graph, *args, **kwargs):
        torch._inductor.compile_fx.compile_fx_inner(graph, *args, **kwargs)
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)  # what "runs" is the graph itself, on fake tensors

    return torch._inductor.compile_fx.compile_fx(graph, inputs, inner_compile=inner)


def flash_attention(q, k, v, **options):
    """What scaled_dot_product_attention calls on such a GPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


B, T, D = 16, 2048, 768
UNIT = B * T * D * 2  # bytes of a pass


def layer(make, loss=lambda forward, tokens, targets: forward(tokens, targets)[1]):
    """{"forward": {kind: units}, "backward": ..} of one layer: models of three layers, less those of two; make(n_layer) makes one."""
    totals = []
    for n_layer in (2, 3):
        torch._dynamo.reset()
        counted.clear()
        model = make(n_layer)
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, u in tensors.items():
                        if u is not None:
                            fake = torch.empty(u.shape, device="cuda")
                            tensors[name] = torch.nn.Parameter(fake) if tensors is module._parameters else fake
            tokens = torch.zeros(B, T, dtype=torch.int64, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                nats = loss(torch.compile(model, backend=backend), tokens, tokens)
            nats.backward()
        totals.append(list(counted))
    return {part: {kind: (three[kind] - two[kind]) / UNIT for kind in two} for part, two, three in zip(("forward", "backward"), *totals)}


def row(name, found, base=None):
    cells = "".join(f"{sum(part[kind] for part in found.values()):13.1f}" for kind in COLUMNS)
    parts = [sum(part.values()) for part in found.values()]
    more = "" if base is None else f"{(sum(parts) - base) * 12 * UNIT / 1e9:10.1f} GB"
    print(f"{name:34}{cells}{parts[0]:10.1f}{parts[1]:10.1f}{sum(parts):8.1f}{more}", flush=True)
    return sum(parts)


def ours(canon="", mixer="attention", form=kernels.causal_conv_triton):
    def make(n_layer):
        use(form)
        return CanonGPT(Config(vocab_size=111, block_size=T, n_layer=n_layer, canon=canon, mixer=mixer))

    return make


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    pretend()
    canon_gpt.F.scaled_dot_product_attention = flash_attention
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton", "transformers") if importlib.util.find_spec(name)]
    print(f"{', '.join(versions)}, for an NVIDIA H200; passes over {B} x {T} x {D} numbers of bfloat16, in one layer\n")
    print(f"{'':34}{''.join(f'{kind:>13}' for kind in COLUMNS)}{'forward':>10}{'backward':>10}{'all':>8}{'12 layers':>13}")
    base = row("RoPE", layer(ours()))
    for name, form in FORMS.items():
        for canon in ("ac", "b", "d", "abcd") if name != "Triton, D apart" else ("d", "abcd"):
            row(f"  Canon-{canon.upper()}, {name}", layer(ours(canon, form=form)), base)
    for mixer in ("gla", "mamba2", "gdn"):
        row(mixer, layer(ours(mixer=mixer)))
    if importlib.util.find_spec("transformers"):
        from peers import llama, llama_loss

        row("transformers' Llama", layer(lambda n_layer: llama(n_layer, 12, D, 111, T), llama_loss))


if __name__ == "__main__":
    main()
