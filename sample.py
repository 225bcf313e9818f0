"""See a trained model answer:   python sample.py out/RUN

Shows instances of the run's task with the model's answers, right or wrong:

    <bos> 3 1 , 2 4 , 4 3 , 1 2 , <query_2> 2 [<ans> 3 ✓] <query_1> 3 [<ans> 4 ✗ <ans> 1]

A cross separates what the model said from what is right. With --prompt the model continues your
own text, in the task's words:

    python sample.py out/RUN --prompt "<bos> 3 1 , 1 2 , 2 3 , <query_1> 3 <ans>"

`load_model` is for notebooks: it returns the task and the model of a run. If the run has a part of
your own, import the file that defines it first:

    python -c "import examples.gated, sample; sample.main(['out/RUN'])"
"""

import argparse
import difflib
import json
from pathlib import Path

import numpy as np
import torch

from canon_gpt import CanonGPT, Config, Refused, require
from tasks import SAMPLES, device_of, make_task, wrapped

# ---- 1. A run's folder -----------------------------------------------------


def load_model(folder):
    """(task, model) of a run, the model on the CPU, with the weights of its last checkpoint.

    Raises Refused if there is no run in this folder, if its task or mixer is unknown, or if its
    checkpoint is missing or damaged.
    """
    task, config = task_and_config(read_config(folder))
    model = CanonGPT(config)
    read_checkpoint(folder, model)
    return task, model.eval()


def read_config(folder):
    """What config.json says of a run, a dict."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise no_run_in(folder)
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Refused(f"{path} is damaged: {error}") from None


def no_run_in(place):
    """The error for a place without runs, which names the runs here that it resembles most."""
    here = [str(config.parent) for config in Path().glob("*/*/config.json")]
    nearest = difflib.get_close_matches(str(place), here, n=5, cutoff=0)
    return Refused(f"no run in {place}; runs here: {', '.join(nearest) or 'none'}")


def task_and_config(about):
    """The Task and the model's Config, given what config.json says."""
    try:
        task = make_task(**about["task"], run_seed=about["training"]["seed"])
        return task, Config(**about["model"])
    except Refused as error:  # your own part may not have been imported
        raise Refused(f"{error}. The run was begun by: {about['command']}") from None


def read_checkpoint(folder, model, optimizer=None):
    """Give the model the weights of the last checkpoint, and the optimizer, if any, its state.
    Returns all that the checkpoint holds."""
    path = Path(folder, "ckpt.pt")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)  # a pickle could run code
        model.load_state_dict(saved["model"])
        if optimizer is not None:
            optimizer.load_state_dict(saved["optimizer"])
    except Exception as error:  # a damaged file fails in many ways
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
        raise Refused(f"{path} is missing, damaged or another model's: {reason}") from None
    return saved


# ---- 2. Answers ------------------------------------------------------------


def instance_with_answers(task, model, seed, temperature=0.0):
    """One instance of the task, the longest of a hundred, in words and with the model's answers.

    temperature   0 takes the likeliest tokens, 1 samples
    """
    rng = np.random.default_rng([seed, SAMPLES])  # not those of training or evaluation
    document = max(task.documents(rng, 100), key=lambda document: len(document.tokens))
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    text = ""
    shown = 0  # how many of the document's tokens are in the text
    for start, stop in task.answer_spans(document):
        asked = document.tokens[:start]  # with right answers to earlier questions
        expected = document.tokens[start:stop]
        length = stop - start
        if task.stop is not None:  # the answer ends at `stop`, or where the window is full
            length = room_after(task, asked)
        answer = continuation(task, model, asked, length, temperature, generator)
        text += task.decode(document.tokens[shown:start]) + task.space
        verdict = task.is_right(document, (start, stop), answer)
        if verdict is None:  # there is no right or wrong
            text += f"[{task.decode(answer)}]"
        elif verdict:
            text += f"[{task.decode(answer)} ✓]"
        else:
            text += f"[{task.decode(answer)} ✗ {task.decode(expected)}]"
        text += task.space
        shown = stop
    return text + task.decode(document.tokens[shown:])


def continued(task, model, prompt, temperature, seed):
    """The prompt in words, and up to 160 tokens that the model writes after it."""
    tokens = task.encode(prompt)
    room = room_after(task, tokens)
    allowed = f"allowed: 1 to {task.block_size} tokens"
    require(tokens and room > 0, "prompt", f"{len(tokens)} tokens", allowed)
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    answer = continuation(task, model, tokens, min(160, room), temperature, generator)
    return f"{task.decode(tokens)}{task.space}[{task.decode(answer)}]"


def room_after(task, tokens):
    """How many more tokens fit. A text may have one more than block_size, because the model never
    reads the last token that it writes."""
    return task.block_size + 1 - len(tokens)


def continuation(task, model, tokens, length, temperature, generator):
    """What the model writes after these tokens: a list of tokens, up to and including `stop`."""
    prompt = torch.tensor([tokens], device=device_of(model))
    whole = model.generate(prompt, length, temperature, task.stop, generator)
    return whole[0, len(tokens) :].tolist()


# ---- 3. The command line ---------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="sample.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,  # so that an error is one line
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="a run's folder, such as out/copy_nano_rope_abcd_s0")
    parser.add_argument("--count", type=int, default=3, help="how many instances (3)")
    parser.add_argument("--prompt", help="your own text, in the task's words")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the instances (0)")
    args = parser.parse_args(argv)
    try:
        require(args.count > 0, "count", args.count, "allowed: 1 or more")
        require(0 <= args.seed < 2**32, "seed", args.seed, "allowed: 0 to 2^32 - 1")
        task, model = load_model(args.run)
        if args.prompt is not None:
            print(wrapped(continued(task, model, args.prompt, args.temperature, args.seed)))
            return
        for number in range(args.count):
            text = instance_with_answers(task, model, args.seed + number, args.temperature)
            print(wrapped(text) + "\n")
    except Refused as error:
        parser.error(error)


if __name__ == "__main__":
    main()
