"""Compare shrunken copies of configurations on the host with transformers, in one process: reads a
JSON list of [configuration, options] from standard input and prints for each a line of JSON, the
proof or the refusal.

Options: "unmended" converts as the host does alone; "layer_by_layer" compares as on GPUs with
experts; "settings" are overrides of the recipe.
"""

import json
import sys
import tempfile
from pathlib import Path

from megatron_kd.host.cpu import backend as cpu_backend


def main() -> None:
    cpu_backend.activate()
    from megatron_kd.host import container, versions
    from megatron_kd.host.parity import host_model, proof

    versions.apply_patches()
    mend, depart = container.correct_conversion, host_model.departures
    for configuration, options in json.load(sys.stdin):
        by_layer = options.get("layer_by_layer", False)
        container.correct_conversion = (lambda *_: None) if options.get("unmended") else mend
        host_model.departures = lambda *args, layer_by_layer, chosen=by_layer: depart(
            *args, layer_by_layer=chosen
        )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(configuration))
            subject = {"layout": {}, "settings": options.get("settings", {})}
            try:
                with proof.process_group():
                    answer = proof.prove_shrunken("student", folder, subject)
            except ValueError as error:
                answer = str(error)
        print(f"ANSWER {json.dumps(answer)}")


if __name__ == "__main__":
    main()
