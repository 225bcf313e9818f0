"""What Canon layers cost in a training step:   python benchmarks/step.py

Each row compares a model with the same Transformer without Canon layers. The two train in turn, a
step each; `ratio` divides their median times. On a GPU: Depo's paper model, 12 layers of 768 dims,
on 16 x 2,048 tokens, compiled, in bfloat16; also with the convolution in plain PyTorch, and Hugging
Face's Llama of the same shape. On a CPU: the nano models, compiled and eager.
"""

import itertools

import torch
from common import Benchmark, times_in_turn

from canon_gpt import CANONS, Canon, CanonGPT, Config
from kernels import causal_conv_pytorch
from tasks import make_task


class PyTorchCanon(Canon):
    """Canon that torch.compile may fuse with its neighbours."""

    def forward(self, x, state=None):
        return causal_conv_pytorch(x, self.weight, self.residual)


CANONS["pytorch"] = PyTorchCanon

MODELS = {
    "Canon-ABCD": dict(canon="abcd"),
    "Canon-AC": dict(canon="ac"),
    "Canon-ABCD in PyTorch": dict(canon="abcd", canon_type="pytorch"),
}


def ours(task, **options):
    """A model, and its loss as a function of (forward, tokens, targets, mask)."""
    sizes = dict(vocab_size=task.vocab_size, block_size=task.block_size)
    model = CanonGPT(Config(**sizes, **task.model, **options))
    return model, lambda forward, *batch: forward(*batch)[1]


def llama(task):
    """Hugging Face's Llama, likewise."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Compiled, its "sdpa" makes a mask, which rules out flash attention; by another name it won't.
    ALL_ATTENTION_FUNCTIONS.register("causal", sdpa_attention_forward)
    D, n_head = task.model["d_model"], task.model["n_head"]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=task.vocab_size, hidden_size=D, intermediate_size=8 * round(D / 3),
        num_hidden_layers=task.model["n_layer"], num_attention_heads=n_head,
        max_position_embeddings=task.block_size, attn_implementation="causal", use_cache=False,
    ))  # fmt: skip

    def loss(forward, tokens, targets, mask):
        targets = targets.masked_fill(~mask, -100)
        return forward(input_ids=tokens, labels=targets, shift_labels=targets).loss

    return model, loss


def training_step(model, loss, compiled, batches, device):
    """A function that trains the model by one step."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            nats = loss(forward, *next(batches))
        nats.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # compile
    return step


def compare(bench, task, batch_size, compiled, names, rounds):
    torch._dynamo.reset()
    device, batches = bench.device, []
    for number in range(4):
        tokens, mask = (torch.from_numpy(a).to(device) for a in task.batch(0, number, batch_size))
        batches.append((tokens[:, :-1], tokens[:, 1:], mask[:, 1:]))
    batches = itertools.cycle(batches)
    without = training_step(*ours(task), compiled, batches, device)
    for name in names:
        with bench.optional(name):
            model, loss = llama(task) if name == "Llama" else ours(task, **MODELS[name])
            step = training_step(model, loss, compiled, batches, device)
            ms = times_in_turn({"without": without, "with": step}, device, rounds)
            bench.add(
                what=name, task=task.name, how="compiled" if compiled else "eager", B=batch_size,
                T=task.block_size, parameters=sum(p.numel() for p in model.parameters()),
                without_ms=ms["without"], ms=ms["with"], ratio=ms["with"][1] / ms["without"][1],
                tokens_per_s=batch_size * task.block_size / ms["with"][1] * 1e3,
            )  # fmt: skip


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    if bench.toy:
        compare(bench, make_task("copy"), 2, False, [*MODELS, "Llama"], 3)
    elif bench.device == "cuda":
        compare(bench, make_task("depo1", "paper"), 16, True, [*MODELS, "Llama"], 30)
    else:
        for compiled in (True, False):
            for task in map(make_task, ("depo1", "copy")):
                compare(bench, task, task.training["batch_size"], compiled, ["Canon-ABCD"], 60)


if __name__ == "__main__":
    main()
