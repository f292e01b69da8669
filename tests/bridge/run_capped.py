"""Run one recipe on one rank, the models capping their logits: run_capped.py CAP RECIPE key=value …

Student and teacher are the recipe's, with the host's own Gemma-2 output layer as its provider of
that family puts it in place.
"""

import sys


def main() -> None:
    cap = float(sys.argv.pop(1))
    from megatron_kd.host.cpu import backend as cpu_backend

    cpu_backend.activate()
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2OutputLayer
    from megatron.bridge.models.gemma.modules import extend_instance
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provide = GPTModelProvider.provide

    def provide_capped(provider, *args, **kwargs):
        provider.final_logit_softcapping = cap
        model = provide(provider, *args, **kwargs)
        if model.post_process:
            extend_instance(model.output_layer, Gemma2OutputLayer)
        return model

    GPTModelProvider.provide = provide_capped
    import run_case

    run_case.main()


if __name__ == "__main__":
    main()
