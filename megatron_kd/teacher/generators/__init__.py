"""The engines that generate, by the name that `megatron-kd generate --engine` takes.

A further one is a file, a line here, and its row in the table of docs/generate.md.
"""

from megatron_kd.teacher.generators.base import Generator

GENERATORS: dict[str, str | type[Generator]] = {
    "transformers": "megatron_kd.teacher.generators.transformers:TransformersGenerator",
    "vllm": "megatron_kd.teacher.generators.vllm:VllmGenerator",
    "vllm-server": "megatron_kd.teacher.generators.vllm_server:VllmServerGenerator",
    "sglang": "megatron_kd.teacher.generators.sglang:SglangGenerator",
    "openai": "megatron_kd.teacher.generators.openai:OpenaiGenerator",
}
