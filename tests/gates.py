"""Random gates for tiny models, and the plain loops that a gate must agree with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvretain import artefacts
from kvretain.gate import Gate, LayerGate


def random_layer(seed: int, width: int, heads: int, group: int, size: int = 16, sinks: int = 16) -> LayerGate:
    """Every parameter random and large enough to matter."""
    rng = torch.Generator().manual_seed(seed)
    gate = LayerGate(width, heads, group, size, sinks).requires_grad_(False)
    for parameter in gate.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return gate


def random_gate(net, seed: int = 0, **metadata: str) -> Gate:
    """Gates that fit the tiny model ``net`` and say so."""
    layers = (
        [i for i, kind in enumerate(net.config.layer_types or ()) if kind == "full_attention"]
        if hasattr(net.config, "layer_types")
        else range(net.config.num_hidden_layers)
    )
    heads = net.config.num_key_value_heads
    group = net.config.num_attention_heads // heads
    made = tuple(random_layer(seed + i, net.config.hidden_size, heads, group) for i in range(len(layers)))
    return Gate(made, {"fingerprint": artefacts.fingerprint(net), **metadata})


def loop(gate: LayerGate, x: Tensor) -> Tensor:
    """The gate's scores ``(H,)`` of one hidden state ``(E,)``, as the paper writes them, number by number."""

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / math.sqrt(float((v * v).mean()) + 1e-6) * weight

    d, out = gate.size, []
    queries, keys = gate.q_proj.weight @ x + gate.q_proj.bias, gate.k_proj.weight @ x
    for head in range(gate.heads):
        k = norm(keys[head * d : (head + 1) * d], gate.k_norm.weight)
        total = 0.0
        for member in range(gate.group):
            at = (head * gate.group + member) * d
            q = norm(queries[at : at + d], gate.q_norm.weight)
            own = float(q @ k) / math.sqrt(d) + float(gate.b[head, 0, member])
            sinks = [float(base @ q) / math.sqrt(d) for base in gate.k_base[head, 0]]
            total += 1 / (1 + sum(math.exp(sink - own) for sink in sinks))
        out.append(total / gate.group)
    return torch.tensor(out)
