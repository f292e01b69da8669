"""Knowledge distillation for NVIDIA Megatron-Bridge and Megatron-Core."""

from megatron_kd.extras import explain_missing_packages

__version__ = "0.1.0"

explain_missing_packages()
