"""Knowledge distillation for NVIDIA Megatron-Bridge and Megatron-Core."""

__version__ = "0.1.0"
