"""Run transformers' own common tests, unmodified, on our four classes in the architectures of testers.py.

    make upstream        (or python tests/upstream/run.py)

The tests come from the sdist of the installed transformers, which pip downloads once. Those that are `EXCEPTIONS` in testers.py
must fail, and count as "xfailed"; those that need a GPU, a text model or a package that is not installed skip themselves.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import transformers


TESTERS = Path(__file__).with_name("testers.py")
CACHE = Path(sys.prefix) / "upstream"

# What the common tests import and the sdist lacks. The arguments are those of PreTrainedConfig, none at its default.
COMMON_ARGUMENTS = dict(
    return_dict=False, output_hidden_states=True, output_attentions=True, dtype="float16", chunk_size_feed_forward=5,
    architectures=["AModel"], id2label={0: "label"}, label2id={"label": "0"}, problem_type="regression",
)  # fmt: skip
TINY_MODELS = {"HFViTForImageClassification": dict(tokenizer_classes=[], processor_classes=["ViTImageProcessorPil"])}
STAND_INS = {
    "tests/__init__.py": "",
    "tests/exporters/test_export.py": "class ExportTesterMixin: pass",
    "tests/generation/test_utils.py": "class GenerationTesterMixin: pass",
    "tests/utils/test_configuration_utils.py": f"config_common_kwargs = {COMMON_ARGUMENTS}",
    "tests/pipelines/test_pipelines_image_classification.py": "from tests.test_modeling_hf_vit import ImageClassificationPipelineTests",
    "tiny_models/reports/tiny_model_summary.json": json.dumps(TINY_MODELS),
}


def download() -> Path:
    """The sdist of the installed transformers."""
    version = importlib.metadata.version("transformers")
    sdist = CACHE / f"transformers-{version}.tar.gz"
    if not sdist.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        subprocess.run([*command, "--dest", CACHE, f"transformers=={version}"], check=True)
    return sdist


def lay_out(sdist: Path) -> Path:
    """Unpack the tests with their pytest settings, add what they import, and our testers beside them."""
    root = CACHE / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(root, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        wanted = (f"{root.name}/tests/", f"{root.name}/pyproject.toml")
        archive.extractall(CACHE, [file for file in archive if file.name.startswith(wanted)], filter="data")
    for name, text in STAND_INS.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as opened:  # never over a file of the sdist
            opened.write(text + "\n")
    (root / "src").mkdir()  # where the pipeline tests look for the package
    (root / "src" / "transformers").symlink_to(Path(transformers.__file__).parent)
    shutil.copy(TESTERS, root / "tests" / "test_modeling_hf_vit.py")
    return root


def main() -> int:
    CACHE.mkdir(exist_ok=True)
    root = lay_out(download())
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_TINY_MODEL_PATH": str(root / "tiny_models"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--disable-warnings", "-o", "log_cli=false"]
    return subprocess.run([*command, "tests/test_modeling_hf_vit.py"], cwd=root, env=os.environ | settings).returncode


if __name__ == "__main__":
    sys.exit(main())
