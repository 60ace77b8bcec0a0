"""The package: every file that a push sends to a repository, assembled in a folder from a finished run."""

import json
import shutil
from pathlib import Path

import torch

from hf_vit.card import FIGURES, num_channels, weights_file, without_paths, write_card
from hf_vit.data.image_spec import image_spec_of
from hf_vit.evaluation.classifiers import load_classifier, load_processor
from hf_vit.evaluation.scores import format_prediction
from hf_vit.figures import save
from hf_vit.hub.finished_run import (
    FIGURES_WITH_IMAGES,
    TRAINING_FILES,
    read_redacted,
    read_run,
    read_samples,
)
from hf_vit.hub.push import content_tag
from hf_vit.hub.verification import NUM_PROBES, compare_outputs, is_pretrained, outputs_of, write_probes
from hf_vit.model.configuration_hf_vit import HFViTConfig, as_pair
from hf_vit.model.masked_autoencoder import HFViTForPreTraining
from hf_vit.model.modeling_hf_vit import HFViTForImageClassification
from hf_vit.run_figures import image_figure
from hf_vit.system.errors import UserError, as_user_errors
from hf_vit.system.files import checksum
from hf_vit.system.hub_names import refuse_mistyped_path


@torch.no_grad()
def build_package(
    run: Path,
    folder: Path,
    templates: Path,
    repo: str,
    *,
    revision: str | None = None,
    layout: str | None = None,
    license: str | None = None,
    with_images: bool = True,
    pinned: bool = True,
) -> str:
    """Write everything that a push sends into `folder`; return a sentence on the layout. The run is only read.

    Args:
        run: the folder of a finished run.
        templates: the folder of the cards.
        repo, revision, license: see `write_card`.
        layout: None, "native" or "code", see `choose_layout`.
        with_images: whether evaluated images are published: four probes, an example and some figures. Otherwise, the probes
            are noise.
        pinned: whether the card of a model with code names the tag of what it holds, for main may hold other code tomorrow.

    Raises:
        ValueError: if the run is not finished, or if the saved model does not reproduce the run's logits.
    """
    results, config = read_run(run)
    saved, reason = choose_layout(load_merged_model(run / "model").float(), layout)
    saved.save_pretrained(folder)
    shutil.copy(run / "model" / "preprocessor_config.json", folder)
    export = _copy_export(run, folder)
    _copy_record(run, folder, results, config)
    pixel_values = _copy_images(run, folder, results, saved.config, with_images)
    write_probes(folder, pixel_values, outputs := outputs_of(folder, pixel_values))
    shown = dict(repo=repo, revision=revision, license=license)
    if pinned and (folder / "modeling_hf_vit.py").is_file():
        shown["revision"] = content_tag(folder)
    kind = "pretraining" if is_pretrained(folder) else "regression" if "r2" in results.metrics else "model"
    if kind == "model":
        thresholds = torch.tensor(results.thresholds) if results.thresholds else None
        shown["prediction"] = format_prediction(outputs[0], results.data["labels"], thresholds)
    write_card(folder, templates / f"{kind}_card.md", results, config, layout=reason, export=export, **shown)
    return reason


@as_user_errors()
def load_merged_model(folder: Path):
    """The model of a run; a LoRA adapter is merged into its base model."""
    if (folder / "adapter_config.json").is_file():
        from peft import PeftModel

        adapter = json.loads((folder / "adapter_config.json").read_text())
        base = refuse_mistyped_path(adapter["base_model_name_or_path"], f"the base of {folder}")
        model = HFViTForImageClassification.from_pretrained(base, config=HFViTConfig.from_pretrained(folder))
        return PeftModel.from_pretrained(model, folder).merge_and_unload().eval()
    if is_pretrained(folder):
        return HFViTForPreTraining.from_pretrained(folder).eval()
    return load_classifier(str(folder), regression=True).eval()


def choose_layout(model, layout: str | None = None) -> tuple[object, str]:
    """The model to save, our own or its native twin in transformers, and a sentence that says why.

    Args:
        layout: "native", "code", or None for native where possible; a model without a classifier keeps its code.

    Raises:
        ValueError: if "native" is asked for and no native architecture can express the model.
    """
    why = "as was asked for"
    if isinstance(model, HFViTForPreTraining):
        why = "because it has a decoder"
    elif layout != "code":
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


def _copy_record(run: Path, folder: Path, results, config: str):
    (folder / "training").mkdir()
    results, config = without_paths(results, config)
    texts = {"results.json": results.to_json(), "config.yaml": config}
    for name in TRAINING_FILES:
        if (run / name).is_file():
            text = texts.get(name) or read_redacted(run / name)
            (folder / "training" / name).write_text(text, encoding="utf-8")


def _copy_images(run: Path, folder: Path, results, config, with_images: bool) -> torch.Tensor:
    """Copy figures and the example, and return the images of the probes (n, C, H, W): some of the run's, or noise.

    A classifier must give the logits for them that it gave in its run.
    """
    figures_of_run = run / "model" / "figures"
    (folder / "figures").mkdir()
    for name in FIGURES:
        if (figures_of_run / f"{name}.png").is_file() and (with_images or name not in FIGURES_WITH_IMAGES):
            shutil.copy(figures_of_run / f"{name}.png", folder / "figures")
    if not with_images:
        size = (NUM_PROBES, num_channels(folder), *as_pair(config.image_size))
        return torch.randn(size, generator=torch.Generator().manual_seed(0))
    samples, spec = read_samples(run), image_spec_of(load_processor(str(run / "model")), config)
    pixel_values = spec.normalize(samples["images"])
    if (folder / "figures" / "mistakes.png").is_file():  # without the names of the owner's files
        thresholds = torch.tensor(results.thresholds) if results.thresholds else None
        figure = image_figure(samples, "mistaken_", results.data["labels"], spec, thresholds=thresholds)
        save(figure, folder / "figures" / "mistakes.png")
    if (run / "model" / "example.png").is_file():
        shutil.copy(run / "model" / "example.png", folder)
    if "logits" in samples:
        tolerance = 1e-3 if results.mixed_precision == "no" else 0.1
        message = f"the logits of {run / 'model'} are not those of its run"
        compare_outputs(outputs_of(folder, pixel_values), samples["logits"], tolerance, message)
    return pixel_values[:NUM_PROBES].contiguous()


def _copy_export(run: Path, folder: Path) -> dict | None:
    """Copy the ONNX files that recipes/export.py made of these very weights; return its export.json, None if there is none."""
    file = run / "export" / "export.json"
    if not file.is_file():
        return None
    export = json.loads(file.read_text())
    if export["weights_sha256"] != checksum(weights_file(run / "model")):
        raise UserError(
            f"{run / 'export'} was made of other weights than those of the run: export it again, or delete it"
        )
    shutil.copytree(run / "export" / "onnx", folder / "onnx")
    return export
