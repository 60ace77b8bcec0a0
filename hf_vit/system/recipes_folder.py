"""Where scripts, presets and embedded data sets are: recipes/ of a clone, or the package that a wheel makes of it."""

from pathlib import Path


SITE = Path(__file__).resolve().parents[2]
RECIPES = installed if (installed := SITE / "hf_vit_recipes").is_dir() else SITE / "recipes"
EMBEDDED = {"fashion-mnist-mini": RECIPES / "data" / "fashion-mnist-mini"}  # data sets, by name
