"""Where the scripts, presets and embedded images are: recipes/ of a clone, or the package that a wheel makes of it."""

from pathlib import Path


SITE = Path(__file__).resolve().parents[2]
RECIPES = installed if (installed := SITE / "hf_vit_recipes").is_dir() else SITE / "recipes"
