#!/usr/bin/env python3
"""Compares a source's greedy answers in `nq rank` with those of transformers, token by token.

    NQ_HOME=/tmp/home target/release/nq rank FOLDER FILE --windows 1
    benches/greedy.py FOLDER /tmp/home/cache/rank/*.json [--device cuda]

FOLDER is the source, in f32 on either side. The files are what `nq rank` keeps; the one with the source's answers is
taken. Prints a line for each prompt whose answers part, and how many are equal. Needs torch and transformers.
"""

import argparse
import json
import sys

import torch
from transformers import AutoModelForCausalLM, __version__

LONGEST = 300


def kept(paths):
    """The prompts and answers of the source in what `nq rank` keeps: a line with a hash, then JSON."""
    for path in paths:
        value = json.loads(open(path).read().split("\n", 1)[1])["value"]
        if isinstance(value.get("answers"), list):
            return value["answers"]
    sys.exit("none of these files has the source's answers")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("kept", nargs="+")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).to(args.device).eval()
    answers, equal, tokens = kept(args.kept), 0, 0
    for index, answer in enumerate(answers):
        prompt = torch.tensor([answer["prompt"]], device=args.device)
        most = min(LONGEST, model.config.max_position_embeddings - prompt.shape[1])
        with torch.no_grad():
            found = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=most)
        found = found[0, prompt.shape[1]:].tolist()
        expected = answer["tokens"][:most]
        same = next((i for i, (a, b) in enumerate(zip(expected, found)) if a != b), min(len(expected), len(found)))
        tokens += len(expected)
        if expected == found:
            equal += 1
        else:
            print(f"prompt {index}: equal for {same} of {len(expected)} tokens (transformers has {len(found)})")
    print(f"{equal} of {len(answers)} answers are equal, {tokens} tokens; transformers {__version__}")


if __name__ == "__main__":
    main()
