"""Beside packages that people use today, on one CUDA GPU:   python results/peers.py

    the convolution         causal-conv1d (CUDA), flash-linear-attention (Triton)
    the linear recurrences  flash-linear-attention (Triton), beside our chunked form through torch.compile
    a training step         Hugging Face's LlamaForCausalLM, beside CanonGPT of the same shape: 12 layers, 768 dims, RoPE, 2,048 tokens

None of them is needed for anything else here: what is not installed is left out, and said to be. Before anything is timed, the two results
are compared. `--toy` runs all of it at tiny shapes, on a CPU as well as may be: for trying this script, not for numbers.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from canon_gpt import CanonGPT, Config, chunked_linear_attention  # noqa: E402
from kernels import causal_conv, device_name, json_file, quartiles_ms, relative_error  # noqa: E402
from step_time import take_step  # noqa: E402
from train import make_optimizer  # noqa: E402


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def train_once(f, arguments, dy):
    """f's result and the gradients of its arguments."""
    y = f(*arguments)
    return y, torch.autograd.grad(y, arguments, dy)


def against(name, ours, peers, arguments, device, theirs=lambda arguments: arguments, back=lambda gradients: gradients):
    """Times of ours and of each peer, forward and backward together: a list of dicts. Peers are {package: function}; `theirs` lays arguments
    out as peers want them, before anything is timed, and `back` their gradients as ours."""
    y = ours(*arguments)
    dy = torch.randn_like(y)
    (y, gradients), found = train_once(ours, arguments, dy), []
    for package, f in {"canon-gpt": ours, **peers}.items():
        given = arguments if f is ours else theirs(arguments)
        if package != "canon-gpt" and not version(package):
            print(f"{name:36}{package:26}not installed")
            continue
        try:
            result, got = train_once(f, given, dy)
        except Exception as error:  # of another version's, or on a device it does not know
            print(f"{name:36}{package:26}failed: {str(error).splitlines()[0][:80]}")
            continue
        pairs = zip([result, *(got if f is ours else back(got))], [y, *gradients])
        errors = [relative_error(a.double(), b.double()) for a, b in pairs]
        row = {"what": name, "package": package, "difference": max(errors)}
        for part, g in (("forward", lambda: f(*given)), ("both", lambda: train_once(f, given, dy))):
            row[f"{part}_ms"] = list(quartiles_ms(g, device))
        found.append(row)
        print(f"{name:36}{package:26}forward {row['forward_ms'][1]:8.3f} ms   with backward {row['both_ms'][1]:8.3f} ms   "
              f"differs by {max(errors):.0e}", flush=True)  # fmt: skip
    return found


def convolutions(device, dtype, shapes):
    def causal_conv1d_package(x, weight):  # it has no residual
        from causal_conv1d import causal_conv1d_fn

        return x + causal_conv1d_fn(x.transpose(1, 2), weight).transpose(1, 2)

    def fla_package(x, weight):
        from fla.modules.convolution import causal_conv1d

        y = causal_conv1d(x, weight, residual=x)
        return y[0] if isinstance(y, tuple) else y

    def theirs(arguments):  # weights (D, K), the last on the current token
        x, weight = arguments
        return [x, weight.detach().t().flip(1).contiguous().requires_grad_()]

    def back(gradients):
        return [gradients[0], gradients[1].flip(1).t()]

    peers = {"causal-conv1d": causal_conv1d_package, "flash-linear-attention": fla_package}
    found = []
    for B, T, D in shapes:
        x = torch.randn(B, T, D, device=device, dtype=dtype, requires_grad=True)
        weight = ((torch.rand(4, D, device=device) * 2 - 1) / 2).to(dtype).requires_grad_()
        found += against(f"convolution ({B}, {T}, {D})", causal_conv, peers, [x, weight], device, theirs, back)
    return found


def recurrences(device, dtype, B, T):
    """At the head shapes of 768-wide models."""

    def gla(q, k, v, g):
        from fla.ops.gla import chunk_gla

        return chunk_gla(q, k, v, g, scale=1.0)[0]

    def mamba2(q, k, v, g):  # theirs wants queries and keys for every head
        from fla.ops.simple_gla import chunk_simple_gla

        q, k = (u.expand(-1, -1, v.shape[2], -1) for u in (q, k))
        return chunk_simple_gla(q.contiguous(), k.contiguous(), v, g, scale=1.0)[0]

    def delta(q, k, v, g, beta):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0)[0]

    compiled = torch.compile(chunked_linear_attention, dynamic=False)

    def ours(*arguments):  # with products in bfloat16, as in training, and as theirs are
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            return compiled(*arguments)[0]

    found = []
    for name, peer, heads, H, K, V in (("GLA", gla, 4, 4, 96, 192), ("Mamba2", mamba2, 1, 16, 64, 96), ("GDN", delta, 6, 6, 96, 192)):
        q, k = torch.randn(2, B, T, heads, K, device=device, dtype=dtype)
        v = torch.randn(B, T, H, V, device=device, dtype=dtype)
        g = -0.1 * torch.rand(B, T, H, *([K] if name == "GLA" else []), device=device)
        arguments = [q * K**-0.5, F.normalize(k.float(), dim=-1).to(dtype), v, g]
        if name == "GDN":
            arguments.append(torch.rand(B, T, H, device=device))
        arguments = [u.detach().requires_grad_() for u in arguments]
        found += against(f"{name} ({B}, {T}, {H} x {K} x {V})", ours, {"flash-linear-attention": peer}, arguments, device)
    return found


def llama(n_layer, n_head, D, vocabulary, T):
    """Hugging Face's Llama of these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Its "sdpa" makes a mask when compiled, with which PyTorch cannot use flash attention; under another name the same function gets none.
    ALL_ATTENTION_FUNCTIONS.register("causal", sdpa_attention_forward)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=D, intermediate_size=8 * round(D / 3), num_hidden_layers=n_layer, num_attention_heads=n_head,
        max_position_embeddings=T, attn_implementation="causal", use_cache=False,
    ))  # fmt: skip


def llama_loss(forward, tokens, targets):
    return forward(input_ids=tokens, labels=targets, shift_labels=targets).loss


def training_steps(device, B, T, n_layer, n_head, D, vocabulary, steps):
    """A step of ours, without Canon and with ABCD, and of Hugging Face's Llama: compiled, bfloat16, fused AdamW, gradients clipped."""
    shape = f"{n_layer}L{D}D ({B}, {T})"
    config = Config(vocab_size=vocabulary, block_size=T, n_layer=n_layer, n_head=n_head, d_model=D)
    makers = {"canon-gpt": lambda: CanonGPT(config), "canon-gpt, ABCD": lambda: CanonGPT(Config(**{**vars(config), "canon": "abcd"}))}
    if version("transformers"):
        makers["transformers"] = lambda: llama(n_layer, n_head, D, vocabulary, T)
    else:
        print(f"{'training step ' + shape:36}{'transformers':26}not installed")
    training = dict(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    tokens, targets = torch.randint(vocabulary, (2, B, T), device=device)
    found = []
    for name, make in makers.items():
        torch._dynamo.reset()
        model = make().to(device)
        optimizer = make_optimizer(model, training, device)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = training["lr"]
        forward = torch.compile(model)
        losses = {"transformers": lambda: llama_loss(forward, tokens, targets)}
        times = []
        for number in range(steps + 5):  # five to compile and warm up
            began = time.perf_counter()
            loss = take_step(model, optimizer, losses.get(name, lambda: forward(tokens, targets)[1]), device)
            times.append((time.perf_counter() - began) * 1e3)
        low, median, high = torch.tensor(times[5:]).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        count = sum(p.numel() for p in model.parameters())
        found.append({"what": f"training step {shape}", "package": name, "parameters": count, "ms": [low, median, high],
                      "tokens_per_s": B * T / median * 1e3})  # fmt: skip
        print(f"{'training step ' + shape:36}{name:26}{median:8.2f} ms ({low:.2f}-{high:.2f})   {B * T / median:.0f}k tokens/s   "
              f"{count:,} parameters   loss {loss.item():.2f}", flush=True)  # fmt: skip
        del model, optimizer, forward
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="save the numbers there, too")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.toy:
        parser.error("needs a CUDA GPU (or --toy)")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    name = device_name(device)
    packages = {p: version(p) for p in ("torch", "triton", "causal-conv1d", "flash-linear-attention", "transformers")}
    print("; ".join([name, *(f"{p} {v or 'not installed'}" for p, v in packages.items())]) + "\n")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if args.toy:
        rows = training_steps(device, 2, 32, 1, 2, 32, 50, 2) + recurrences(device, dtype, 1, 128)
        rows += convolutions(device, dtype, [(2, 16, 64)])
    else:
        rows = convolutions(device, dtype, [(16, 2048, 768), (16, 2048, 2304), (16, 2048, 4096)])
        rows += recurrences(device, dtype, 16, 2048) + training_steps(device, 16, 2048, 12, 12, 768, 1024, 30)
    if args.json:
        args.json.write_text(json.dumps({"device": name, **packages, "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
