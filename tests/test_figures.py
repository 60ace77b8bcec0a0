"""What is drawn is right and can be read: maps lie over their patches, nothing is cut off, and visualize.py keeps its word."""

import itertools
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from runs import recipe, save_with_processor
from transformers import ViTConfig, ViTForImageClassification

from hf_vit import HFViTForImageClassification, HFViTModel, figures
from hf_vit.data.decoding import decode_image, stack_images
from hf_vit.data.image_spec import ImageSpec, image_spec_of
from hf_vit.data.normalization import denormalize, normalize
from hf_vit.evaluation.classifiers import load_processor
from hf_vit.evaluation.scores import calibration_bins, confusion_matrix


RECIPE = Path(__file__).parents[1] / "recipes" / "visualize.py"
LOGGED = ("loss", "accuracy", "learning_rate", "gradient_norm", "images_per_second")
OF_IMAGES = {"attention", "layers", "heads", "distances"}
OF_DATA = {"predictions", "mistakes", "confusion", "calibration"}
KINDS = ("at 5 $ or 10 $, 7% off", "Egyptian mau", "a_b^c", "SIBERIAN HUSKIES", "cat")
SHORT = ("cat", "dog", "owl", "ant", "bee")
NAMES = [f"{kind} no. {number}" for number in range(20) for kind in KINDS]


def noise(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# Every figure can be read


def faults(figure, monkeypatch):
    """What is cut off, drawn over, too small or empty in a figure, at the 700 pixels of a model card."""
    figure.set_dpi(100)
    canvas, drawn, draw = FigureCanvasAgg(figure), [], Text.draw
    with monkeypatch.context() as patch:  # those that are drawn; ticks beyond the axes are not
        patch.setattr(Text, "draw", lambda text, renderer: (drawn.append(text), draw(text, renderer)))
        canvas.draw()
    texts = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    boxes, page = {text: text.get_window_extent() for text in texts}, figure.bbox.padded(0.5)
    found = [f"cut off: {t.get_text()!r}" for t in texts if not all(page.contains(*p) for p in boxes[t].get_points())]
    found += [f"small: {text.get_text()!r}" for text in texts if text.get_fontsize() < 5]

    def overlap(one, other):  # or too near to tell words apart
        low, high = np.maximum(one.min, other.min), np.minimum(one.max, other.max)
        return high[0] - low[0] > -2 and high[1] - low[1] > 1

    flat = [text for text in texts if text.get_rotation() in (0, 90)]  # the box of a slanted one is mostly empty
    for one, other in itertools.combinations(flat, 2):
        if overlap(boxes[one], boxes[other]):
            found.append(f"over each other: {one.get_text()!r} {other.get_text()!r}")
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.axison and axes.get_label() != "<colorbar>"]
    found += [f"empty: {axes.get_title()!r}" for axes in panels if not axes.has_data()]
    return found if texts else ["no text"]


def attention(kinds, count, channels=3, grid=(3, 5), side=16):
    images, maps = noise(count, channels, grid[0] * side, grid[1] * side), torch.rand(count, kinds, *grid)
    captions = [f"{name} (100%)" for name in NAMES[:count]]
    return figures.attention(images, maps, [f"layer {kind + 1}" for kind in range(kinds)], captions)


def distances(layers, heads):
    return figures.distances(112 * torch.rand(layers, heads))


def short_run(steps, level=1.0985):
    """A run of few steps, whose loss hardly moves."""
    lines = [{"step": step, **dict.fromkeys(LOGGED, level - 1e-5 * step)} for step in range(1, steps + 1)]
    return figures.curves([*lines, {"step": steps, "eval_loss": level, "eval_accuracy": 1 / 3}])


def curves(count, scored=True, names=LOGGED):
    numbers = 0.8 + np.random.default_rng(0).normal(0, 0.01, count)
    lines = [{"step": 10 * step, **dict.fromkeys(names, number)} for step, number in enumerate(numbers, 1)]
    scores = [{"step": line["step"], "eval_loss": 1.0, "eval_accuracy": 0.5} for line in lines[:: count // 6 + 1]]
    return figures.curves(lines + scores * scored)


def confusion(classes, images=40, right=0.7, names=NAMES):
    rng = np.random.default_rng(0)
    truth = rng.integers(classes, size=images * classes)
    answers = np.where(rng.random(len(truth)) < right, truth, rng.integers(classes, size=len(truth)))
    return figures.confusion(confusion_matrix(answers, truth, classes), (list(names) * 200)[:classes])


def calibration(confidences):
    answers = (torch.rand(len(confidences)) < torch.tensor(confidences)).long()
    return figures.calibration(calibration_bins(np.asarray(confidences), np.asarray(answers) == 1))


def predictions(count, channels=3, sources=()):
    labels = torch.arange(count) % 10
    logits = (3 * torch.randn(count, 10)).scatter(1, labels.unsqueeze(1), -9.0)  # wrong: a caption of two lines
    sources = (list(sources) * count)[:count]
    return figures.predictions(noise(count, channels, 28, 28), labels, logits, NAMES[:10], sources)


MAKERS = {
    attention: [(1, 1), (24, 2), (4, 2, 1, (4, 4), 7)],
    distances: [(48, 16), (1, 1)],
    calibration: [(np.linspace(0.001, 1, 900),), ([0.31],)],
    predictions: [(5, 1), (12, 3, ["row 12,345", "Siberian husky/IMG_20190812_123456789.jpg", "$a$.png"])],
    short_run: [(1,), (10,), (2, 0.0), (2, float("nan")), (5, 1e30)],
    curves: [(5000,), (12, False, LOGGED[:1])],
    confusion: [(12, 20000), (13,), (41, 3, 1.0), (10, 3000, 0.7, SHORT), (100, 1, 0.5), (1000, 1)],
}  # fmt: skip
CASES = [(make, of) for make, each in MAKERS.items() for of in each]


@pytest.mark.parametrize(("make", "of"), CASES)
def test_nothing_in_a_figure_is_cut_off_drawn_over_too_small_or_empty(make, of, monkeypatch):
    assert faults(make(*of), monkeypatch) == []


@pytest.mark.parametrize("steps", [1, 10])
def test_curves_of_few_steps_show_each_step_and_whole_numbers_on_the_axes(steps):
    figure = short_run(steps)
    figure.draw_without_rendering()
    assert list(figure.axes[0].lines[0].get_xdata()) == list(range(1, steps + 1))
    for panel in figure.axes[:5]:
        labels = [label.get_text() for label in panel.yaxis.get_ticklabels()]
        assert panel.yaxis.get_offset_text().get_text() == ""
        assert len(set(labels)) == len(labels)


def test_the_running_mean_of_a_long_curve_lies_over_its_steps():
    rising, mean = figures.curves([{"step": step, "loss": step} for step in range(1, 501)]).axes[0].lines
    middle = slice(10, -10)  # at the ends, there is no mean
    assert len(rising.get_xdata()) == 500
    # between two steps, if as many are averaged
    np.testing.assert_allclose(mean.get_ydata()[middle], mean.get_xdata()[middle], atol=0.5 + 1e-6)


def test_a_confusion_is_shaded_by_the_share_of_the_true_class():
    shades = figures.confusion([[6, 2], [0, 4]], ["cat", "dog"]).axes[0].images[0].get_array()
    np.testing.assert_allclose(shades, [[0.75, 0.25], [0, 1]])


def test_a_right_answer_is_green_and_a_wrong_one_red_with_the_truth():
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
    drawn = figures.predictions(noise(2, 3, 8, 8), torch.tensor([0, 1]), logits, ["cat", "dog"]).axes
    said = [(axes.title.get_text(), axes.title.get_color()) for axes in drawn[:2]]
    assert said == [("cat (100%)", figures.GREEN), ("cat (100%)\nis dog", figures.RED)]


def test_bars_of_a_calibration_stand_in_their_bins():
    (panel,) = calibration([0.05, 0.55, 0.95]).axes
    assert [bar.get_x() + bar.get_width() / 2 for bar in panel.patches] == pytest.approx(
        [0.5 / 15, 8.5 / 15, 14.5 / 15]
    )


def test_a_name_that_no_font_can_write_is_drawn_and_saved_without_a_warning(tmp_path):
    figures.save(confusion(3, names=["cat", "猫\U0001f9ff", "dog"]), tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 1000


# ----------------------------------------------------------------------------------------------------------------------
# Maps lie where they belong


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(21, 35), (250, 333)])
def test_orange_is_strongest_on_its_patch_fades_smoothly_and_the_image_is_grey_further_away(size, channels):
    image, heat = torch.full((channels, *size), 200, dtype=torch.uint8), torch.zeros(3, 5)
    heat[2, 3] = 7
    drawn = figures.overlay(image, heat - 3)
    height, width, _ = drawn.shape
    factor = height // size[0]
    assert (height, width) == (size[0] * factor, size[1] * factor)
    assert min(size) * factor >= 224 > min(size) * (factor - 1)
    orange = 1 - drawn[..., 2] / 200  # which has no blue
    row, column = np.unravel_index(orange.argmax(), orange.shape)
    assert (row * 3 // height, column * 5 // width) == (2, 3)
    assert orange.max() == pytest.approx(0.85, abs=0.06)
    assert 0.2 < orange[row, 3 * width // 5] < 0.75  # at the border to the patch on the left
    assert (drawn[:, : width // 4] == 200).all()


def test_a_constant_map_has_no_orange():
    image, noisy = noise(3, 24, 40), 0.2 + 0.0018 * torch.rand(3, 5)  # less than anybody should read into it
    drawn = figures.overlay(image, noisy)[::10, ::10]
    np.testing.assert_array_equal(drawn, image.float().mean(dim=0).round().expand(3, -1, -1).permute(1, 2, 0))


def test_a_flat_map_says_so_and_no_other_does():
    maps = torch.rand(2, 3, 3, 5) / 100  # as small as of many patches
    maps[1, 2] = 1 / 1500
    drawn = figures.attention(noise(2, 3, 24, 40), maps, ["a", "b", "c"], ["1", "2"])
    assert titles(drawn) == ["1", "a", "b", "c", "2", "a", "b", "c\nflat"]


def test_each_map_is_beside_its_image():
    images, maps = noise(2, 3, 24, 40), torch.rand(2, 7, 3, 5)
    drawn = figures.attention(images, maps, list("1234567"), ["a", "b"])
    panels = [axes.images[0].get_array() for axes in drawn.axes if axes.images]
    for image, of_image, found in zip(images, maps, (panels[:8], panels[8:]), strict=True):
        wanted = [image.permute(1, 2, 0), *(figures.overlay(image, heat) for heat in of_image)]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def test_bytes_come_back_from_normalised_images():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    form = ImageSpec(16, 16, 3, 2, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert torch.equal(denormalize(normalize(images, form), form), images)
    extremes = torch.tensor([9.0, -9.0]).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    assert denormalize(extremes, form).unique().tolist() == [0, 255]


# ----------------------------------------------------------------------------------------------------------------------
# visualize.py


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """An RGB and a grey image, and a file that is none."""
    folder = tmp_path_factory.mktemp("photos")
    Image.fromarray(noise(30, 50, 3).numpy()).save(folder / "rgb.png")
    Image.fromarray(noise(28, 28).numpy()).save(folder / "grey.png")
    (folder / "broken.png").write_bytes(b"\x89PNG no image")
    return folder


@pytest.fixture
def visualize(monkeypatch, photos):
    """visualize(*flags) -> the folder for the figures of the recipe, and these by their names; it runs among the photos."""

    def run(*flags):
        drawn = {}
        with monkeypatch.context() as patch:
            patch.chdir(photos)
            patch.setattr(sys, "argv", ["visualize.py", *map(str, flags)])
            patch.setattr(figures, "save", lambda figure, file: drawn.update({file: figure}))
            runpy.run_path(str(RECIPE), run_name="__main__")
        (folder,) = {file.parent for file in drawn}
        return folder, {file.stem: figure for file, figure in drawn.items()}

    return run


def check(folder, names):
    assert {file.name for file in folder.iterdir()} == {f"{name}.png" for name in names}
    for file in folder.iterdir():
        assert file.name in RECIPE.read_text().split('"""')[1]
        with Image.open(file) as picture:
            assert picture.width == (630 if file.stem == "calibration" else 1050)
            assert len(picture.convert("RGB").getcolors(2**24)) > 20


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def test_visualize_writes_the_pictures_in_its_docstring(demo_run, photos, tmp_path):
    recipe(f"visualize.py {demo_run} --images {photos}/rgb.png {photos}/grey.png --output_dir images", cwd=tmp_path)
    check(tmp_path / "images", OF_IMAGES)
    printed = recipe(f"visualize.py {demo_run} --dataset_name fashion-mnist-mini --output_dir data", cwd=tmp_path)
    assert "of 2,000 images" in printed
    check(tmp_path / "data", OF_IMAGES | OF_DATA)


def test_visualize_draws_each_layer_and_each_head_of_the_last_one(demo_run, photos, visualize):
    _, drawn = visualize(demo_run, "--images", "grey.png")
    assert titles(drawn["layers"])[1:] == ["layer 1", "layer 2"]
    assert titles(drawn["heads"])[1:] == [f"head {head}" for head in range(1, 5)]
    model = HFViTForImageClassification.from_pretrained(demo_run / "model")
    form = image_spec_of(load_processor(str(demo_run / "model")), model.config)
    image = stack_images([decode_image({"bytes": (photos / "grey.png").read_bytes(), "path": None}, form)])
    pixel_values = normalize(image, form)
    for name, maps in (
        ("layers", model.attention_maps(pixel_values, None, "mean")),
        ("heads", model.attention_maps(pixel_values, -1)),
    ):
        for heat, axes in zip(maps[0], drawn[name].axes[1:], strict=False):
            np.testing.assert_allclose(axes.images[0].get_array(), figures.overlay(image[0], heat), atol=1)


def test_visualize_of_a_model_without_a_head_calls_flat_what_follows_a_class(tiny_config, visualize, tmp_path):
    save_with_processor(HFViTModel(tiny_config()), tmp_path)
    _, drawn = visualize(tmp_path, "--images", "rgb.png")
    assert [title.endswith("flat") for title in titles(drawn["attention"])[1:]] == [False, False, True, True]


def test_visualize_reads_a_native_vit(tiny_fields, randomize, visualize, monkeypatch, tmp_path):
    config = ViTConfig(**{**tiny_fields, "id2label": {0: "$a$ or $b$", 1: "$c$ with a long name", 2: "$d$"}})
    save_with_processor(randomize(ViTForImageClassification(config)), tmp_path)
    _, drawn = visualize(tmp_path, "--images", "rgb.png", "grey.png")
    assert set(drawn) == OF_IMAGES
    assert titles(drawn["attention"])[1:5] == list(figures.METHODS.values())
    assert faults(drawn["attention"], monkeypatch) == []


def test_visualize_says_in_one_line_what_is_wrong(demo_run, visualize):
    with pytest.raises(SystemExit, match=r"^error: .*missing\.png[^\n]*$"):
        visualize(demo_run, "--images", "grey.png", "broken.png", "missing.png")
