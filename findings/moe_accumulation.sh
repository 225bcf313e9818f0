#!/usr/bin/env bash
# transformers 5.24.0: with gradient accumulation, Trainer multiplies the balancing loss of experts.
#
# Mixtral and other mixtures of experts add a loss that is least if each expert gets equally many
# tokens: router_aux_loss_coef times a mean over the batch. If a step is made of several
# micro-batches, Trainer tells the model how many targets they have together, and doesn't divide the
# loss by the number of micro-batches, because the model has divided the cross-entropy by the number
# of targets. But the balancing loss is still a mean over one micro-batch, so the step has the sum
# of these means. With eight micro-batches it pulls eight times as hard, and the logged loss is
# larger, too. There is no warning.
#
# One would expect the same step, however it is cut. (Issue 48690 there reports the same for several
# GPUs.)
#
# Here all rows are equal, so each way to cut a step of eight should have the same gradients. The
# cross-entropy's is read at the output head, with router_aux_loss_coef=0. The balancing loss's is
# that of the routers with router_aux_loss_coef=1, minus that with 0.
#
# Seen on 2026-11-28 (PyTorch 2.13.0, a CPU), compared with a step of one micro-batch:
#
#   micro-batches   cross-entropy's gradient   balancing loss's gradient   logged loss
#               1                     x 1.00                      x 1.00          6.17
#               2                     x 1.00                      x 2.00          8.18
#               4                     x 1.00                      x 4.00         12.19
#               8                     x 1.00                      x 8.00         20.22
#
# Ends with status 0 if this is still so, and with an error if not.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 \
    numpy==2.4.6
cd "$folder"
venv/bin/python - 2>warnings.txt <<'PYTHON' || { cat warnings.txt; exit 1; }
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments

transformers.logging.set_verbosity_error()
ROWS = 8


class KeepGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        routers = [layer.mlp.gate.weight.grad.flatten() for layer in model.model.layers]
        self.routers = torch.cat(routers)  # a copy, because the step clears gradients
        self.head = model.lm_head.weight.grad.flatten().clone()


def one_step(micro_batches, balancing):
    """(gradient of the output head, of the routers, logged loss)"""
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=balancing,
        )
    )
    row = torch.randint(64, (16,), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=1,
        per_device_train_batch_size=ROWS // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    kept = KeepGradients()
    examples = [{"input_ids": row, "labels": row}] * ROWS
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[kept])
    trainer.remove_callback(transformers.PrinterCallback)
    loss = trainer.train().training_loss
    return kept.head, kept.routers, loss


def gradients_and_loss(micro_batches):
    """(gradient of the cross-entropy, of the balancing loss, logged loss with both)"""
    head, without, _ = one_step(micro_batches, balancing=0.0)
    _, routers, loss = one_step(micro_batches, balancing=1.0)
    return head, routers - without, loss


def factor(gradient, whole):
    return (gradient @ whole / (whole @ whole)).item()


steps = {micro_batches: gradients_and_loss(micro_batches) for micro_batches in (1, 2, 4, 8)}
whole_head, whole_balancing, _ = steps[1]
print("micro-batches   cross-entropy's gradient   balancing loss's gradient   logged loss")
for n, (head, balancing, loss) in steps.items():
    of_head, of_balancing = factor(head, whole_head), factor(balancing, whole_balancing)
    print(f"{n:13}{'x':>22} {of_head:.2f}{'x':>23} {of_balancing:.2f}{loss:14.2f}")
    assert abs(of_head - 1) < 0.01 and abs(of_balancing - n) < 0.01
PYTHON
