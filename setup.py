"""What pyproject.toml cannot say: recipes/ and configs/ are installed inside the package.

In a checkout, and in an editable installation of one, they stay where they are; a wheel holds them
as megatron_kd/recipes and megatron_kd/configs, side by side, so that a recipe's
`include: ../configs/...` leads to the same file. `megatron_kd.recipe_file.find_recipe` knows both.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        for folder in ("recipes", "configs"):
            for source in sorted(Path(folder).rglob("*.yaml")):
                target = Path(self.build_lib, "megatron_kd", source)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(source), str(target))


setup(cmdclass={"build_py": BuildWithRecipes})
