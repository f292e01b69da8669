"""Hand containers that a user changed to `distill`: refuse_containers.py RECIPE, and on standard
input a JSON list of settings, each [key, value]. A key is one of the container (section.field),
`peft` (the host's adapters, whatever the value) or `kd.bridge`. Prints for each a line of JSON: the
refusal, or "accepted".
"""

import dataclasses
import json
import sys
from unittest import mock

from own_container import users_container

from megatron_kd.config import from_recipe
from megatron_kd.host.cpu import backend as cpu_backend


def main() -> None:
    cpu_backend.activate()
    from megatron.bridge.peft.lora import LoRA

    from megatron_kd.host import train
    from megatron_kd.typed_mapping import ConfigError

    recipe = dataclasses.replace(from_recipe(sys.argv[1], []), bridge={})
    for key, value in json.load(sys.stdin):
        kd, container = recipe, users_container(recipe.student.hf_path)
        if key == "peft":
            container.peft = LoRA()
        elif key == "kd.bridge":
            kd = dataclasses.replace(kd, bridge=value)
        else:
            section, name = key.split(".")
            setattr(getattr(container, section), name, value)
        answer = "accepted"
        with mock.patch.object(train, "run"):  # what is accepted is not started
            try:
                train.distill(container, kd)
            except ConfigError as error:
                answer = str(error)
        print(f"ANSWER {json.dumps(answer)}")


if __name__ == "__main__":
    main()
