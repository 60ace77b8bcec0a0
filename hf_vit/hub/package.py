"""The package: every file that a push sends to a repository, assembled in a folder from a finished run."""

import shutil
from pathlib import Path

import torch

from hf_vit import figures
from hf_vit.data.image_spec import image_spec_of
from hf_vit.evaluation.classifiers import load_processor
from hf_vit.evaluation.results import Results
from hf_vit.evaluation.scores import format_prediction
from hf_vit.hub.card import write_card
from hf_vit.hub.pictures import draw_mistakes
from hf_vit.hub.run_results import (
    FIGURES,
    FIGURES_WITH_IMAGES,
    TRAINING_FILES,
    load_samples,
    num_channels,
    read_redacted,
    read_run,
    read_samples,
    thresholds_of_run,
    weights_file,
    without_paths,
)
from hf_vit.hub.verification import NUM_PROBES, compare_logits, load_without_code, verify, write_probes
from hf_vit.model.configuration_hf_vit import HFViTConfig, as_pair
from hf_vit.model.modeling_hf_vit import HFViTForImageClassification
from hf_vit.system import run_files
from hf_vit.system.errors import UserError, as_user_errors
from hf_vit.system.files import checksum
from hf_vit.system.hub_names import refuse_mistyped_path
from hf_vit.system.run_files import NUMBER, OPTIONAL, SAMPLES


MISTAKES = ("mistaken_images", "mistaken_labels", "mistaken_logits")  # tensors of the samples
EXPORT_SHAPE = {  # the part of export.json that a card shows
    "weights_sha256": str,
    "data": (OPTIONAL, {"split": str, "images": int}),
    "files": {
        str: {
            "megabytes": NUMBER,
            **dict.fromkeys(("accuracy", "mean_average_precision"), (OPTIONAL, NUMBER)),
            "interval": (OPTIONAL, [NUMBER, 2]),
        }
    },
}


@torch.no_grad()
def build_package(
    run: Path,
    folder: Path,
    template: Path,
    repo: str,
    *,
    revision: str | None = None,
    layout: str | None = None,
    license: str | None = None,
    data_license: str | None = None,
    with_images: bool = True,
) -> str:
    """Write everything that a push sends into `folder`; return a sentence on the layout. The run is only read.

    Args:
        run: the folder of a finished run.
        template, repo, revision, license: see `write_card`.
        layout: None, "native" or "code", see `choose_layout`.
        data_license: replaces the licence of the data in the results.
        with_images: whether evaluated images are published: four probes, an example and some figures. Otherwise, the probes
            are noise.

    Raises:
        ValueError: if the run is not finished or is damaged, or if the saved model does not reproduce the run's logits.
    """
    results, config = read_run(run)
    if data_license is not None:
        results.data["license"] = data_license
    model = load_merged_model(run / "model").float()
    saved, reason = choose_layout(model, layout)
    saved.save_pretrained(folder)
    shutil.copy(run / "model" / "preprocessor_config.json", folder)
    _copy_training_files(run, folder, results, config)
    (folder / "figures").mkdir()
    for name in FIGURES:
        file = run / "model" / "figures" / f"{name}.png"
        if file.is_file() and name == "mistakes" and with_images:  # without the names of the owner's files
            spec = image_spec_of(load_processor(str(run / "model")), model.config)
            figure = draw_mistakes(
                read_samples(run / SAMPLES, *MISTAKES),
                results.data["labels"],
                spec,
                thresholds=thresholds_of_run(results),
            )
            figures.save(figure, folder / "figures" / file.name)
        elif file.is_file() and (with_images or name not in FIGURES_WITH_IMAGES):
            shutil.copy(file, folder / "figures")
    if with_images:
        pixel_values, logits = load_samples(run, model.config)
        if (run / "model" / "example.png").is_file():
            shutil.copy(run / "model" / "example.png", folder)
        tolerance = 1e-3 if results.mixed_precision == "no" else 0.1
        message = f"the logits of {run / 'model'} are not those of its run"
        compare_logits(model(pixel_values).logits, logits, tolerance, message)
    else:
        size = (NUM_PROBES, num_channels(run / "model"), *as_pair(model.config.image_size))
        pixel_values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    pixel_values = pixel_values[:NUM_PROBES].contiguous()
    logits = model(pixel_values).logits
    write_probes(folder, pixel_values, logits)
    verify(folder)
    prediction = format_prediction(logits[0], results.data["labels"], thresholds_of_run(results))
    shown = dict(prediction=prediction, layout=reason, license=license, export=_copy_export(run, folder))
    write_card(folder, template, results, config, repo=repo, revision=revision, **shown)
    return reason


@as_user_errors()
def load_merged_model(folder: Path):
    """The classifier of a run; a LoRA adapter is merged into its base model."""
    if not (folder / "adapter_config.json").is_file():
        return load_without_code(folder)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UserError(
            f"{folder} holds a LoRA adapter, and PEFT merges it into its base: pip install peft"
        ) from error
    adapter = run_files.read_json(folder / "adapter_config.json", {"base_model_name_or_path": str})
    base = refuse_mistyped_path(adapter["base_model_name_or_path"], f"the base of {folder}")
    model = HFViTForImageClassification.from_pretrained(base, config=HFViTConfig.from_pretrained(folder))
    return PeftModel.from_pretrained(model, folder).merge_and_unload().eval()


def choose_layout(model, layout: str | None = None) -> tuple[object, str]:
    """The model to save, our own or its native twin in transformers, and a sentence that says why.

    Args:
        layout: "native", "code", or None for native where possible.

    Raises:
        ValueError: if "native" is asked for and no native architecture can express the model.
    """
    why = "as was asked for"
    if layout != "code":
        try:
            native = model.to_transformers().eval()
        except ValueError as error:
            if layout == "native":
                raise UserError(f"--layout native: {error}; --layout code publishes it") from error
            why = f"because {error}".partition(" (the closest")[0]
        else:
            return native, (
                f"It is stored as the native `{native.config.model_type}` of transformers, which computes the same: no code "
                "comes with it, and no `trust_remote_code` is needed."
            )
    return model, (
        f"The code of the model lies beside its weights, {why}; loading it takes `trust_remote_code=True`, or the package: "
        "after `import hf_vit` it loads without."
    )


def _copy_training_files(run: Path, folder: Path, results: Results, config: str):
    (folder / "training").mkdir()
    results, config = without_paths(results, config)
    texts = {"results.json": results.to_json(), "config.yaml": config}
    for name in TRAINING_FILES:
        text = texts.get(name) or read_redacted(run / name)
        (folder / "training" / name).write_text(text, encoding="utf-8")


def _copy_export(run: Path, folder: Path) -> dict | None:
    """Copy the ONNX files that recipes/export.py made of these very weights; return its export.json, None if there is none."""
    file = run / "export" / "export.json"
    if not file.is_file():
        return None
    export = run_files.read_json(file, EXPORT_SHAPE)
    if export["weights_sha256"] != checksum(weights_file(run / "model")):
        raise UserError(
            f"{run / 'export'} was made of other weights than those of the run: export it again, or delete it"
        )
    shutil.copytree(run / "export" / "onnx", folder / "onnx")
    return export
