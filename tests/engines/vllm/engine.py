"""One real vLLM engine as a process that takes commands: JSON lines on stdin, a JSON line on file descriptor 3 for each.

``{"do": "generate", "prompts": [{"tokens": [...], "salt": ..., "lora": ..., "params": {...}, "priority": ...}], "max_tokens": n}``
answers with tokens, top logprobs, cached tokens and times of each prompt; ``metrics`` with vLLM's own Prometheus numbers; ``quit`` ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two wait for each other at barriers, for long when cores are shared

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

from dpurt.engines.vllm.link import _links as links

OUT = os.fdopen(3, "w", buffering=1)


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        if "kv_events_config" in arguments:
            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        self.llm = LLM(enforce_eager=True, disable_log_stats=False, seed=0, **arguments)

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        prompts = [as_prompt(each) for each in command["prompts"]]
        sampling = [as_sampling(each, command["max_tokens"]) for each in command["prompts"]]
        loras = [as_lora(each.get("lora")) for each in command["prompts"]]
        priorities = [each.get("priority", 0) for each in command["prompts"]]
        began = time.monotonic()
        outputs = self.llm.generate(
            prompts, sampling, lora_request=loras if any(loras) else None, use_tqdm=False,
            priority=priorities if any(priorities) else None,
        )  # fmt: skip
        return {"outputs": [as_json(o) for o in outputs], "seconds": time.monotonic() - began}

    def metrics(self, command: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
                key = metric.name + (json.dumps(labels, sort_keys=True) if labels else "")
                found[key] = found.get(key, 0) + value
        return found

    def sleep(self, command: dict[str, Any]) -> dict[str, Any]:
        time.sleep(command["seconds"])
        return {}

    def connected(self, command: dict[str, Any]) -> dict[str, Any]:
        """Wait until the connector has found its node."""
        deadline = time.monotonic() + 120
        while not any(link.state == "up" for link in links.values()):
            assert time.monotonic() < deadline, "no node"
            time.sleep(0.05)
        return {}

    def settle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Step until vLLM has nothing left to do: what it offloads after a request ended, too."""
        deadline = time.monotonic() + 30
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests() and time.monotonic() < deadline:
            core.step()
        assert not core.scheduler.has_requests(), "vLLM does not come to rest"
        return {}

    def reset(self, command: dict[str, Any]) -> dict[str, Any]:
        """Empty the engine's own prefix cache."""
        self.settle(command)
        assert self.llm.reset_prefix_cache()
        return {}


def as_prompt(each: dict[str, Any]) -> Any:
    prompt = TokensPrompt(prompt_token_ids=each["tokens"])
    if each.get("salt"):
        prompt["cache_salt"] = each["salt"]
    return prompt


def as_sampling(each: dict[str, Any], max_tokens: int) -> SamplingParams:
    extra = {"kv_transfer_params": each["params"]} if each.get("params") else None
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=5,
        detokenize=False,
        extra_args=extra,
    )


def as_lora(lora: dict[str, Any] | None) -> Any:
    return LoRARequest(lora["name"], lora["id"], lora["path"]) if lora else None


def as_json(output: Any) -> dict[str, Any]:
    [one] = output.outputs
    stats = output.metrics
    return {
        "tokens": list(one.token_ids),
        "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in one.logprobs],
        "cached": output.num_cached_tokens,
        "ttft_s": stats.first_token_latency if stats is not None else None,
        "transfer": output.kv_transfer_params,
        "finish": one.finish_reason,
    }


def main() -> None:
    began = time.monotonic()
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready_s": time.monotonic() - began}), file=OUT)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            answer = getattr(engine, command["do"])(command)
        except Exception as error:  # the test wants to see it, and go on
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=OUT)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
