"""How alike value signatures are: can α's penalty tell entries apart, or does a common part make it constant?

    python benchmarks/signatures.py --model smollm2-135m --model gemma3-270m \
        --model models/lab-seed0 --model models/lab-seed1        # a minute on one CPU thread

Cosines of all pairs of entries of one reading, with signatures over all full-attention layers and heads (α, one set for
the whole model) and for each head alone (`trig/diverse`). Language models read a chapter of *Alice*; the laboratory's
read 20 solved chains of 14 steps, one after another and with a cache of their own. Nothing is evicted. `nearest` is an
entry's largest cosine to any other one, averaged.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvretain import load_model
from kvretain.data import chapter
from kvretain.lab.chains import series
from kvretain.lab.vocabulary import tokenizer as lab_tokenizer
from kvretain.observe.measures import cosines
from kvretain.select.signatures import mean_values


def texts(tokenizer: object, tokens: int) -> list[Tensor]:
    """What a model reads, ``(1, N)`` each."""
    own = lab_tokenizer().get_vocab() == tokenizer.get_vocab()  # type: ignore[attr-defined]
    parts = [f"{c.prompt} {c.solution}" for c in series(20, steps=14, seed=-2)] if own else [chapter()]
    return [tokenizer(part, return_tensors="pt")["input_ids"][:, :tokens] for part in parts]  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n")
    print(
        "| model | signature | mean | standard deviation | 5 % | 95 % | nearest | centred: mean | standard deviation |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.model:
        model, tokenizer = load_model(name)
        shared, apart = [], []
        for ids in texts(tokenizer, args.tokens):
            cache = DynamicCache(config=model.config)
            with torch.inference_mode():
                model(ids, past_key_values=cache, logits_to_keep=1)
            values = [layer.values.float() for layer in cache.layers if type(layer) is DynamicLayer]
            shared.append(mean_values(values)[0])
            apart += [head for layer in values for head in layer[0]]
        for kind, vectors in (("all layers and heads", shared), ("each head", apart)):
            plain, centred = ([cosines(v, centre=centre) for v in vectors] for centre in (False, True))
            pairs, nearest = (torch.cat(part) for part in zip(*plain, strict=True))
            free = torch.cat([pair for pair, _ in centred])
            order = pairs.sort().values
            low, high = (float(order[int(share * (len(order) - 1))]) for share in (0.05, 0.95))
            print(
                f"| `{name}` | {kind} | {pairs.mean():.3f} | {pairs.std():.3f} | {low:.2f} | {high:.2f} | "
                f"{nearest.mean():.2f} | {free.mean():.3f} | {free.std():.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
