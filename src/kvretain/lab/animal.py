"""The laboratory animal: a small Llama whose first weights can look back and recall."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .recipe import Recipe
from .vocabulary import IDS, WORDS

LABEL = (
    "laboratory animal: a tiny model, trained by `kvretain lab train` on synthetic chains of arithmetic alone, to "
    "study what a KV cache must retain; it can do nothing else"
)


def build(recipe: Recipe) -> Any:
    """The untrained model, a ``LlamaForCausalLM`` in float32; the recipe's seed decides its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=recipe.width,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.groups,
        head_dim=recipe.width // recipe.heads,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.theta},
        tie_word_embeddings=True,
        pad_token_id=IDS["<pad>"],
        bos_token_id=IDS["<bos>"],
        eos_token_id=IDS["<eos>"],
    )
    config.kvretain_lab = LABEL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(config)
        if recipe.wired:
            wire(model)
    return model


OFFSETS = (1, 2, 5, 9)
"""How far the heads of the first layer look back at first: to the name before a digit; from a step's name at its end to
the operands' digits (2, 5) and the operator (9); from a step's last word to its name (2), and from the start of a
definition in the prompt to the name that the one before it defines (5)."""

LATER = {1: 3, 3: 4}
"""How far two heads of the second layer look back at first: from a definition's operator (3), and from its right
operand (4), to the name that it defines."""

GAIN = 1.6
"""Of the second layer's rotary queries and keys, whose input is that much longer than the first one's."""


def wire(model: Any) -> None:
    """Sets the first weights of the first three layers, so that they recall a value by its name, find the definition
    that comes next, and copy its right operand, before any training.

    Recall takes two heads in a row: one that marks each digit with the word before it (the name), and one that looks
    from a name for the digit with that mark and copies it. What comes next takes two as well: from the end of the step
    for ``x``, the definition in the prompt that follows the one of ``x``. The right operand of ``x`` takes two more: it
    is the word in the prompt 4 after ``x``. Gradient descent finds such pairs late or, in the hours that there are, not
    at all; everything else it finds within minutes. So they are put there, and only put there: all weights are trained
    afterwards.

    Embeddings get three parts: a constant first component, codes in the rest of the first half, and next to nothing in
    the second half, where marks go.

    - Layer 0: queries and keys read the constant alone, in the four fastest pairs of rotary dimensions, so that each
      head looks back by a distance of :data:`OFFSETS`. Each copies the code it finds, head 0 into the room for marks,
      the others into the room beside them.
    - Layer 1, head 0: the query is the code of the current word, the key is the mark, both in the slowest half of the
      rotary dimensions, where position hardly turns them. It copies the code of the word it finds.
    - Layer 1, head 2: the query is the word 2 before, the key the word 5 before. It copies likewise, half as strongly.
    - Layer 1, heads 1 and 3: as the heads of layer 0, by the distances of :data:`LATER`.
    - Layer 2, head 0: the query is the word 3 before, the key the word 4 before. It copies as layer 1, head 2.

    Raises:
        ValueError: the model has other than four query and two KV heads of an even width, or fewer than three layers.
    """
    config = model.config
    width, size = config.hidden_size, config.head_dim
    if (config.num_attention_heads, config.num_key_value_heads) != (4, 2) or width != 4 * size or size % 16:
        raise ValueError("the first weights are made for 4 query heads, 2 KV heads and a head size divisible by 16")
    if len(model.model.layers) < 3:
        raise ValueError(f"the first weights fill 3 layers, and this model has {len(model.model.layers)}")
    first, second, third = model.model.layers[:3]
    half, pairs = width // 2, size // 2
    constant, code = 0.4, 0.1
    scale = math.sqrt((constant**2 + (half - 1) * code**2) / width)  # of an embedding: what the norm divides by

    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.normal_(0, code)
        embedding[:, half:] *= 0.1
        embedding[:, 0] = constant
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3

        room = _orthonormal(half, half)
        marks, beside = room[:, :size], room[:, size:]
        bases = {OFFSETS[0]: marks} | {offset: beside @ _orthonormal(half - size, size) for offset in OFFSETS[1:]}
        bases |= {offset: room @ _orthonormal(half, size) for offset in LATER.values()}
        codes = _orthonormal(half - 1, size).T
        amplitude, fast, slow = 6 * scale / constant, 4, pairs - pairs * 7 // 16
        turn = model.model.rotary_emb.inv_freq[:fast]
        slowest = torch.cat([torch.arange(pairs - slow, pairs), torch.arange(2 * pairs - slow, 2 * pairs)])
        names, found = slice(1, half), slice(half, width)  # where embeddings hold codes, and what first heads found

        def look_back(query: Tensor, key: Tensor, head: int, offset: int, amplitude: float) -> None:
            query[head, :fast, 0] = amplitude * torch.cos(turn * offset)
            query[head, pairs : pairs + fast, 0] = -amplitude * torch.sin(turn * offset)
            key[:, :fast, 0] = amplitude
            key[:, pairs : pairs + fast, 0] = 0

        def look_up(query: Tensor, key: Tensor, place: slice, asked: Tensor, sought: Tensor) -> None:
            query[slowest], key[slowest] = 0, 0
            query[slowest, place] = 2 * asked[: 2 * slow]
            key[slowest, found] = 2 * sought[: 2 * slow]

        query, key, value, output = _heads(first.self_attn, config)
        query *= 0.3
        key *= 0.3
        value.zero_()
        output.zero_()
        value[:, :, names] = codes
        for head, offset in enumerate(OFFSETS):
            look_back(query, key, head, offset, amplitude)
            output[found, head] = bases[offset] * scale

        query, key, value, output = _heads(second.self_attn, config)
        for part in (query, key):
            part[:, :fast], part[:, pairs : pairs + fast] = 0, 0
        value.zero_()
        value[:, :, names] = codes
        output.zero_()
        look_up(query[0], key[0], names, codes, bases[1].T)
        look_up(query[2], key[1], found, bases[2].T, bases[5].T)
        for head, strength in ((0, 4), (2, 2)):
            output[names, head] = strength * scale * codes.T
        for head, offset in LATER.items():
            query[head] *= 0.3
            look_back(query, key, head, offset, GAIN * amplitude)
            output[found, head] = 3 * bases[offset] * scale

        query, key, value, output = _heads(third.self_attn, config)
        value[0], output[:, 0] = 0, 0
        value[0, :, names] = codes
        look_up(query[0], key[0], found, bases[3].T, bases[4].T)
        output[names, 0] = 2 * scale * codes.T


def _heads(attention: Any, config: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the projections: queries, keys, values ``(heads, size, width)``, output ``(width, heads, size)``."""
    width, size = config.hidden_size, config.head_dim
    rows = [getattr(attention, f"{name}_proj").weight.view(-1, size, width) for name in "qkv"]
    return rows[0], rows[1], rows[2], attention.o_proj.weight.view(width, -1, size)


def _orthonormal(rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns))[0]
