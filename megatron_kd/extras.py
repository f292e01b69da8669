"""Which extra of this package brings which optional package, and the one sentence that says so.

`pip install megatron-kd` brings what `megatron_kd.losses` and the reader and writer of
`megatron_kd.cache` import; everything else stands in an extra of pyproject.toml, named after what
it serves. An import statement of ours that finds such a package missing raises `MissingExtra`,
wherever it stands, through `explain_missing_packages`: no module has to guard its imports.
"""

import sys

REMOTE = frozenset({"fsspec"})
CACHE = REMOTE | {"matplotlib", "rich"}
DATA = REMOTE | {"datasets", "jinja2", "pyarrow", "rich", "tokenizers", "transformers", "yaml"}
MODELS = DATA | {"huggingface_hub"}
CAPTURE = MODELS | {"aiohttp"}
TRAIN = MODELS | {"omegaconf", "packaging", "pydantic", "tqdm", "typing_extensions"}
EXTRAS = {
    # extra: the packages it brings, as they are imported
    "remote": REMOTE,
    "cache": CACHE,
    "data": DATA,
    "models": MODELS,
    "capture": CAPTURE,
    "train": TRAIN,
    "tools": TRAIN | CACHE,
    "gguf": MODELS | {"gguf"},
    "vllm": CAPTURE | {"vllm"},
    "sglang": CAPTURE | {"sglang"},
    "eval": TRAIN | CACHE | {"lm_eval"},
}
ROOMS = {
    # first part of a module's name inside this package: the extra that serves it
    "cache": "cache",
    "config": "train",
    "data": "data",
    "host": "train",
    "models": "models",
    "recipe_file": "train",
    "sections": "train",
    "teacher": "capture",
    "tools": "tools",
}
# The training host, as it is imported and as importlib.metadata names it. No extra: pip would build
# CUDA packages for it.
HOST = ("megatron", "megatron-bridge", "modelopt")
HOST_REMEDY = (
    "install Megatron-Bridge: scripts/setup.sh on a machine without a GPU, the image of "
    "container/Dockerfile on GPUs"
)


class MissingExtra(ModuleNotFoundError):
    """An optional package is not installed; the message says who needs it and what brings it."""


def remedy(name: str, rooms: tuple[str, ...] = ()) -> str | None:
    """What to install where a package is missing; None where no extra brings it.

    Args:
        name: Name of the package or module that was not found.
        rooms: Parts of this package that led to the import, the outermost first: of several
            extras that bring the package, the first one's is named.
    """
    package = name.split(".")[0]
    if package in HOST:
        return HOST_REMEDY
    bringing = [extra for extra, packages in EXTRAS.items() if package in packages]
    if not bringing:
        return None
    for room in rooms:
        if ROOMS.get(room) in bringing:
            return f"pip install 'megatron-kd[{ROOMS[room]}]'"
    return f"pip install 'megatron-kd[{bringing[0]}]'"


def _importers() -> list[str]:
    """Names of the modules whose code is running, the innermost first, without the import system's
    own frozen frames: the first one holds the import statement."""
    names = []
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name != __name__ and not name.startswith("importlib._bootstrap"):
            names.append(name)
        frame = frame.f_back
    return names


class _MissingPackages:
    """The last finder of `sys.meta_path`: it is asked for what no other finder has."""

    def find_spec(self, fullname, path=None, target=None):
        if "." in fullname or (fullname not in HOST and remedy(fullname) is None):
            return None
        importer, *others = _importers()
        if not importer.startswith("megatron_kd."):
            return None  # others may look whether a package is there, and so may we by find_spec
        ours = [n.split(".")[1] for n in (importer, *others) if n.startswith("megatron_kd.")]
        raise MissingExtra(
            f"{importer} needs the package {fullname}, which is not installed: "
            f"{remedy(fullname, tuple(reversed(ours)))}",
            name=fullname,
        )


def explain_missing_packages() -> None:
    """From now on an import statement of this package that finds an optional package missing
    raises `MissingExtra`. What other packages import, and what anyone looks for with
    `importlib.util.find_spec`, is left alone."""
    if not any(isinstance(finder, _MissingPackages) for finder in sys.meta_path):
        sys.meta_path.append(_MissingPackages())
