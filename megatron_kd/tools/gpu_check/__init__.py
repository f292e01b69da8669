"""Check a machine with GPUs, part by part, into one report (`megatron-kd dev gpu-check`)."""
