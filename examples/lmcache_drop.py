"""Token dropping in LMCache with a kvretain policy: prefill, edit the cached keys and values, decode from what stays.

It needs LMCache (0.5.6 was tried) beside kvretain, and two servers:

    lmcache server --l1-size-gb 1 --eviction-policy LRU --chunk-size 32 --port 6555 --http-port 8080

    vllm serve MODEL --port 8000 --no-enable-prefix-caching --enforce-eager --return-tokens-as-token-ids \\
        --kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
                               "kv_connector_extra_config": {"lmcache.mp.port": 6555}}'

    python examples/lmcache_drop.py MODEL context.txt "What is the code?" --policy keydiff@model --ratio 0.5

vLLM must run on a GPU: LMCache's SDK learns the layout of the cache from the server, which knows it of such engines
only. docs/integrations.md says what else to know, and what has been run.

Policies of keys and values need nothing more. One that reads queries (snapkv@model) also needs the server's option
`--enable transfer_query`, `"lmcache.mp.transfer_intermediate_tensors": true` in the connector's configuration,
LMCache's patch of vLLM that hands queries over, and `--queries` here.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import torch
from lmcache import sdk
from lmcache.sdk.request import TokenEvent
from transformers import AutoConfig, AutoTokenizer

from kvretain.integrations.lmcache import dropper
from kvretain.rope import Rope


def completions(url: str, model: str) -> Callable[[list[int], dict, str], Iterator[TokenEvent]]:
    """The SDK's ``post_completion``: streams the tokens that the engine generates after a prompt."""

    def post(prompt_token_ids: list[int], sampling_params: dict, cache_salt: str) -> Iterator[TokenEvent]:
        asked = {"model": model, "prompt": list(prompt_token_ids), "stream": True, "logprobs": 0, **sampling_params}
        if cache_salt:
            asked["cache_salt"] = cache_salt
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    # With --return-tokens-as-token-ids a token reads "token_id:123".
                    for token in (choice.get("logprobs") or {}).get("tokens", ()):
                        yield TokenEvent(int(token.rpartition(":")[2]), "")

    return post


def rotation(config: Any) -> tuple[int, Rope]:
    """Head size and rotation of a model with plain rotary positions (Llama, Qwen, ...)."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    if parameters["rope_type"] != "default":
        raise SystemExit(
            f"rope type {parameters['rope_type']}: give Rope.plain the frequencies of the model's inv_freq"
        )
    return size, Rope.plain(parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size))


def main() -> None:
    """Runs the example from the command line."""
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("model", help="the model's folder or name, as vLLM serves it")
    read.add_argument("context", help="text file that is cached and thinned out")
    read.add_argument("question", help="asked after the context, from what stays of it")
    read.add_argument("--policy", default="keydiff@model")
    read.add_argument("--ratio", type=float, default=0.5, help="fraction of the context that goes")
    read.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    read.add_argument("--queries", action="store_true", help="fetch queries, for policies that need them")
    read.add_argument("--served-name", help="if vLLM serves the model under another name")
    read.add_argument("--vllm", default="http://127.0.0.1:8000")
    read.add_argument("--lmcache", default="tcp://127.0.0.1:6555")
    read.add_argument("--lmcache-http", default="http://127.0.0.1:8080")
    asked = read.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    head_size, rope = rotation(AutoConfig.from_pretrained(asked.model))
    with open(asked.context, encoding="utf-8") as file:
        context = tokenizer(file.read())["input_ids"]
    question = tokenizer(asked.question, add_special_tokens=False)["input_ids"]

    connect = {"url": asked.lmcache, "http_url": asked.lmcache_http, "model_name": asked.model}
    contexts = [sdk.kvcache.connect(**connect)]
    if asked.queries:
        contexts.append(sdk.qcache.connect(**connect))
    stream = sdk.request.create_request(
        contexts=contexts,
        post_completion=completions(asked.vllm, asked.served_name or asked.model),
        prompt_token_ids=context,
        # The edited entries are stored under the ids of the kept tokens alone: no other request may find them.
        cache_salt=uuid.uuid4().hex,
    )
    stream.generate({"max_tokens": 1, "temperature": 0})
    del stream.tokens[len(context) :]  # the prefill's one token is no part of the context
    edit = dropper(asked.policy, head_size=head_size, rope=rope, ratio=asked.ratio, chunk=contexts[0].chunk_size)
    stream.modify_kv(edit)
    kept = len(stream.tokens)
    before = kept + len(question) + len(stream.suffix_tokens)
    stream.generate({"max_tokens": asked.tokens, "temperature": 0}, suffix_tokens=question)
    print(f"context: {len(context)} tokens, of which {kept + len(context) % contexts[0].chunk_size} stay")
    print(f"answer: {tokenizer.decode(stream.tokens[before:])}")
    for each in contexts:
        each.close()


if __name__ == "__main__":
    main()
