"""See a trained model answer:   python sample.py out/RUN

Shows instances of the run's task with the model's answers, right or wrong:

    <bos> 3 1 , 2 4 , 4 3 , 1 2 , <query_2> 2 [<ans> 3 ✓] <query_1> 3 [<ans> 4 ✗ <ans> 1]

A cross stands between what the model said and what is right. With --prompt the model goes on after
a text of your own, in the task's words:

    python sample.py out/RUN --prompt "<bos> 3 1 , 1 2 , 2 3 , <query_1> 3 <ans>"

`load_model` is for notebooks: it returns the task and the model of a run.
"""

import argparse
import contextlib
import json
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from canon_gpt import CanonGPT, Config, Refused
from tasks import SAMPLES, device_of, make_task, require, wrapped


def load_model(folder):
    """(task, model) of a run, the model on the CPU, with the weights of its last checkpoint.

    Raises Refused if there is no run in this folder, or if its task or mixer is unknown.
    """
    with reading(folder):
        run = json.loads(Path(folder, "config.json").read_text())
        saved = torch.load(Path(folder, "ckpt.pt"), map_location="cpu", weights_only=True)
    # Outside, as an error in a task or layer of your own is not the file's.
    task = make_task(**run["task"], run_seed=run["seed"])
    model = CanonGPT(Config(**run["model"]))
    with reading(folder):
        model.load_state_dict(saved["model"])
    return task, model.eval()


@contextlib.contextmanager
def reading(path):
    """Raises Refused, whatever error comes up inside: a damaged file fails in many ways."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
        raise Refused(f"{path} holds no such run, or is damaged: {reason}") from None


def register(program):
    """Run a file of your own for the tasks, mixers and other parts that it registers. What stands
    under `if __name__ == "__main__"` does not run, so it does not train."""
    require(Path(program).is_file(), "program", str(program), "no such file")
    sys.path.insert(0, str(Path(program).resolve().parent))  # it may import what stands beside it
    runpy.run_path(str(program), run_name="program")


def answered(task, model, seed, temperature=0.0):
    """One instance of the task in words, with the model's answers in it: of a hundred the longest.

    temperature   0 takes the likeliest tokens, 1 samples
    """
    rng = np.random.default_rng([seed, SAMPLES])  # other numbers than training's and evaluation's
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
        answer = go_on(task, model, asked, length, temperature, generator)
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
    """The prompt in words, and up to a hundred tokens that the model writes after it."""
    tokens = task.encode(prompt)
    room = room_after(task, tokens)
    allowed = f"allowed: 1 to {task.block_size} tokens"
    require(tokens and room > 0, "prompt", f"{len(tokens)} tokens", allowed)
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    answer = go_on(task, model, tokens, min(100, room), temperature, generator)
    return f"{task.decode(tokens)}{task.space}[{task.decode(answer)}]"


def room_after(task, tokens):
    """How many more tokens fit: one more than it reads, as a model never reads its last one."""
    return task.block_size + 1 - len(tokens)


def go_on(task, model, tokens, length, temperature, generator):
    """What the model writes after these tokens: a list of tokens, up to and including `stop`."""
    prompt = torch.tensor([tokens], device=device_of(model))
    whole = model.generate(prompt, length, temperature, task.stop, generator)
    return whole[0, len(tokens) :].tolist()


def show(text):
    """Print a text, with ? in place of what the terminal's encoding lacks, such as ✓."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there may be no stdout
    print(text.encode(encoding, errors="replace").decode(encoding))


def parser_of(program, doc):
    """A parser whose `error(message)` ends the program with one line, without argparse's usage.
    Status 2 means bad input."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def end(message):
        parser.exit(2, f"{program}: {message}\n")

    parser.error = end
    return parser


def main(argv=None):
    parser = parser_of("sample.py", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder, such as out/copy_nano_rope_abcd_s0")
    parser.add_argument("--count", type=int, default=3, help="how many instances (3)")
    parser.add_argument("--prompt", help="a text of your own, in the task's words")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the instances (0)")
    parser.add_argument("--program", type=Path, help="a file that registers parts of your own")
    args = parser.parse_args(argv)
    try:
        require(args.count > 0, "count", args.count, "allowed: 1 or more")
        require(0 <= args.seed < 2**32, "seed", args.seed, f"allowed: 0 to {2**32 - 1:,}")
        if args.program is not None:
            register(args.program)
        task, model = load_model(args.run)
        if args.prompt is not None:
            show(wrapped(continued(task, model, args.prompt, args.temperature, args.seed)))
            return
        for number in range(args.count):
            show(wrapped(answered(task, model, args.seed + number, args.temperature)) + "\n")
    except Refused as error:
        parser.error(error)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `sample.py .. | head` ends quietly
    main()
