"""What is drawn is right and can be read: maps lie over their patches, nothing is cut off, and visualize.py keeps its word."""

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hf_vit import HFViTModel, data, figures, metrics
from hf_vit.augment import as_bytes, normalize


RECIPE = Path(__file__).parents[1] / "recipes" / "visualize.py"
NAMES = [f"{kind} no. {number}" for number in range(20) for kind in ("at 5 $ or 10 $, 7% off", "Egyptian mau", "a_b^c", "SIBERIAN HUSKIES", "cat")]  # fmt: skip


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
    assert texts
    boxes = {text: text.get_window_extent() for text in texts}
    page = figure.bbox.padded(0.5)
    found = [f"cut off: {t.get_text()!r}" for t, box in boxes.items() if not (page.contains(*box.min) and page.contains(*box.max))]  # fmt: skip
    found += [f"small: {text.get_text()!r} {text.get_fontsize()}" for text in texts if text.get_fontsize() < 5]

    def overlap(one, other):  # by more than the border of a letter
        return min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 1

    flat = [text for text in texts if text.get_rotation() in (0, 90)]  # the box of a slanted one is mostly empty
    found += [
        f"over each other: {one.get_text()!r} {other.get_text()!r}"
        for number, one in enumerate(flat) for other in flat[:number] if overlap(boxes[one], boxes[other])
    ]  # fmt: skip
    for axes in figure.axes:
        if axes.axison and not axes.has_data() and axes.get_label() != "<colorbar>":
            found.append(f"empty: {axes.get_title()!r}")
        area = axes.get_window_extent()
        if axes.has_data():
            found += [f"over a panel: {t.get_text()!r}" for t in flat if t.axes is not axes and overlap(boxes[t], area)]  # fmt: skip
            if min(area.width, area.height) < 20 and axes.get_label() != "<colorbar>":
                found.append(f"a panel of {area.width:.0f} x {area.height:.0f} pixels")
    return found


def drawn_attention(kinds, count, channels=3, grid=(3, 5), side=16):
    images = noise(count, channels, grid[0] * side, grid[1] * side)
    return figures.attention(images, torch.rand(count, kinds, *grid), [f"layer {kind + 1}" for kind in range(kinds)], [f"{figures.shorten(name)}\n100%" for name in NAMES[:count]])  # fmt: skip


def drawn_inside(grid=(4, 4), channels=3, patch=7, width=32, layers=4, heads=4, kernel=True, positions=True):
    return figures.inside(
        torch.randn(width, channels, patch, patch) if kernel else None,
        torch.randn(grid[0] * grid[1], width) if positions else None, grid, 112 * torch.rand(layers, heads),
    )  # fmt: skip


def drawn_curves(count, step=10, scored=True, speed=True):
    rng, lines = np.random.default_rng(0), []
    for number in range(count):
        values = {"loss": 2.3 / (1 + number / 50) + rng.normal(0, 0.1), "accuracy": rng.random(), "learning_rate": 1e-3 * (1 - number / count)}  # fmt: skip
        values |= {"gradient_norm": rng.random()} | ({"images_per_second": 812.3 + rng.normal(0, 9)} if speed else {})
        lines.append({"step": step * (number + 1), **values})
        if scored and number % max(1, count // 6) == 0:
            lines.append({"step": step * (number + 1), "eval_loss": rng.random(), "eval_accuracy": rng.random()})
    return figures.curves(lines)


def drawn_confusion(classes, images=40):
    rng = np.random.default_rng(0)
    truth = rng.integers(classes, size=images * classes)
    answers = np.where(rng.random(len(truth)) < 0.7, truth, rng.integers(classes, size=len(truth)))
    names = [f"{NAMES[label % len(NAMES)]} {label}" for label in range(classes)]
    return figures.confusion(metrics.confusion_matrix(answers, truth, classes), names)


def drawn_calibration(confidences, bins=15):
    answers = (torch.rand(len(confidences)) < torch.tensor(confidences)).long()
    return figures.calibration(metrics.calibration_bins(answers, [1] * len(confidences), confidences, bins))


def drawn_predictions(count, channels=3):
    return figures.predictions(noise(count, channels, 28, 28), torch.arange(count) % 10, 3 * torch.randn(count, 10), NAMES[:10])  # fmt: skip


def drawn_augmentations(count, channels=3):
    targets = torch.eye(10)[torch.arange(count)]
    mixed = figures.in_shares(0.7 * targets + 0.3 * targets.roll(1, dims=1), NAMES[:10])
    versions = [noise(count, channels, 48, 80) for _ in range(5)]
    return figures.augmentations(noise(count, channels, 60, 100), versions, [[figures.shorten(name, 14) for name in NAMES[:count]], *[mixed] * 5])


CASES = {
    **{f"attention {k} {n}": (drawn_attention, k, n) for k, n in ((1, 1), (1, 6), (4, 4), (6, 3), (7, 2), (12, 1), (24, 2))},
    "attention grey": (drawn_attention, 4, 2, 1, (4, 4), 7),
    "inside": (drawn_inside,),
    "inside grey 14x14": (drawn_inside, (14, 14), 1, 16, 192, 12, 12),
    "inside 4 channels 37x37": (drawn_inside, (37, 37), 4, 14, 64, 48, 16),
    "inside 3x5 tiny": (drawn_inside, (3, 5), 3, 2, 6, 1, 1),
    "inside no kernel": (lambda: drawn_inside(kernel=False),),
    "inside no positions": (lambda: drawn_inside(positions=False),),
    "inside neither": (lambda: drawn_inside(kernel=False, positions=False, layers=1),),
    "positions": (lambda: figures.positions(torch.randn(196, 192), "sincos2d"),),
    "positions tiny": (lambda: figures.positions(torch.zeros(4, 6), "learned"),),
    "calibration": (drawn_calibration, np.linspace(0.001, 1, 900)),
    "calibration one bin": (drawn_calibration, [0.93, 0.95, 0.97]),
    "calibration one image": (drawn_calibration, [0.31]),
    "calibration of one": (drawn_calibration, [0.31, 0.8, 0.9], 1),
    "augmentations": (drawn_augmentations, 4),
    "augmentations grey": (drawn_augmentations, 1, 1),
    "predictions": (drawn_predictions, 12),
    "predictions grey": (drawn_predictions, 5, 1),
    "predictions one": (drawn_predictions, 1),
    "curves": (drawn_curves, 40),
    "curves one": (drawn_curves, 1),
    "curves 5000": (drawn_curves, 5000),
    "curves no scoring": (drawn_curves, 12, 1000, False),
    "curves no speed": (drawn_curves, 101, 10, True, False),
    **{f"confusion {classes}": (drawn_confusion, classes) for classes in (2, 10, 12, 13, 40, 41, 200)},
    "confusion of many": (drawn_confusion, 12, 20000),
    "confusion without mistakes": (lambda: figures.confusion(np.diag([3] * 41), NAMES[:41]),),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_a_figure_is_cut_off_drawn_over_too_small_or_empty(name, monkeypatch):
    make, *values = CASES[name]
    figure = make(*values)
    assert faults(figure, monkeypatch) == []


# ----------------------------------------------------------------------------------------------------------------------
# Maps lie where they belong


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(21, 35), (16, 22), (28, 28), (250, 333), (107, 109)])
def test_orange_lies_over_its_patch_and_the_image_is_grey_elsewhere(size, channels):
    image, orange = noise(channels, *size), 255 * np.array(to_rgb(figures.ORANGE))
    for row, column in ((0, 4), (1, 0), (2, 3)):
        heat = torch.zeros(3, 5)
        heat[row, column] = 7
        drawn = figures.overlay(image, heat - 3)
        factor = len(drawn) // size[0]
        assert drawn.shape == (size[0] * factor, size[1] * factor, 3)
        assert min(size) * factor >= 224 > min(size) * (factor - 1)
        y, x = (np.arange(side) + 0.5 for side in drawn.shape[:2])  # a pixel belongs to the patch that its middle is in
        hot = (y * 3 // len(y) == row)[:, None] & (x * 5 // len(x) == column)  # (H', W')
        grey = image.float().mean(dim=0).numpy().repeat(factor, 0).repeat(factor, 1)[:, :, None]
        np.testing.assert_allclose(drawn[~hot], np.broadcast_to(grey, drawn.shape)[~hot], atol=0.51)
        np.testing.assert_allclose(drawn[hot], (0.15 * grey + 0.85 * orange)[hot], atol=0.51)


def test_a_constant_map_has_no_orange():
    image = noise(3, 24, 40)
    for value in (0, 0.2, 1e-30):
        drawn = figures.overlay(image, torch.full((3, 5), value))
        assert (drawn == drawn[:, :, :1]).all()
        np.testing.assert_array_equal(drawn[::10, ::10, 0], image.float().mean(dim=0).round())


def test_each_map_is_beside_its_image_under_its_title():
    images, maps, titles = noise(2, 3, 24, 40), torch.rand(2, 7, 3, 5), [f"layer {kind}" for kind in range(7)]
    panels = [axes for axes in figures.attention(images, maps, titles, ["a", "b"]).axes if axes.images]
    for image, of_image, (first, *others) in zip(images, maps, (panels[:8], panels[8:]), strict=True):
        np.testing.assert_array_equal(first.images[0].get_array(), image.permute(1, 2, 0))
        assert [axes.get_title() for axes in others] == titles
        for heat, axes in zip(of_image, others, strict=True):
            np.testing.assert_array_equal(axes.images[0].get_array(), figures.overlay(image, heat))


@pytest.mark.parametrize("grid", [(3, 5), (4, 4), (14, 9)])
def test_the_similarity_of_a_position_is_largest_at_its_own_row_and_column(grid):
    table = torch.randn(grid[0] * grid[1], 64)
    panel = figures.inside(None, table, grid, torch.rand(2, 2)).axes[0]
    tiles, seen = np.array(panel.images[0].get_array().filled(np.nan)), 0
    for y, row in zip(panel.get_yticks(), panel.get_yticklabels(), strict=True):
        for x, column in zip(panel.get_xticks(), panel.get_xticklabels(), strict=True):
            top, left = round(y - (grid[0] - 1) / 2), round(x - (grid[1] - 1) / 2)
            tile = tiles[top : top + grid[0], left : left + grid[1]]
            place = int(row.get_text()) - 1, int(column.get_text()) - 1
            alike = torch.cosine_similarity(table, table[place[0] * grid[1] + place[1]], dim=1).view(grid)
            np.testing.assert_allclose(tile, alike, atol=1e-5)
            assert divmod(int(tile.argmax()), grid[1]) == place
            seen += 1
    assert seen == min(7, grid[0]) * min(7, grid[1])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_first_component_of_filters_of_one_pattern_is_the_pattern(channels):
    pattern = torch.randn(channels, 5, 5)
    first = figures.filters(torch.randn(40, 1, 1, 1) * pattern + torch.randn(channels, 5, 5))[0]  # (5, 5, 3)
    shown = (pattern if channels == 3 else pattern.mean(dim=0, keepdim=True)).expand(3, 5, 5).permute(1, 2, 0)
    wanted = ((shown - shown.min()) / (shown.max() - shown.min())).numpy()
    assert min(abs(first - wanted).max(), abs(1 - first - wanted).max()) < 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# Values behind the pictures


def test_mistakes_are_the_wrong_answers_surest_first():
    labels, logits = torch.randint(5, (200,)), 3 * torch.randn(200, 5)
    chances = logits.softmax(dim=1)
    wrong = [row for row in range(200) if logits[row].argmax() != labels[row]]
    wanted = sorted(wrong, key=lambda row: -chances[row].max().item())
    assert figures.mistakes(labels, logits).tolist() == wanted[:12]
    assert figures.mistakes(labels, logits, 10**6).tolist() == wanted
    assert figures.mistakes(logits.argmax(dim=1), logits).tolist() == []


def test_targets_in_words():
    names = ["Coat", "Bag", "a very long name of a class", "$ or $"]
    rows = [[1, 0, 0, 0], [0.925, 0.025, 0.025, 0.025], [0.3, 0.7, 0, 0], [0, 0, 0.5, 0.1], [0, 0, 0, 1]]
    said = ["Coat", "Coat", "70% Bag\n30% Coat", "50% a very long n…\n10% \\$ or \\$", "\\$ or \\$"]
    assert figures.in_shares(torch.tensor(rows), names) == said
    assert figures.in_shares(torch.ones(1, 1), ["only"]) == ["only"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_bins_of_confidence_hold_what_a_loop_counts_up_to_their_borders(dtype):
    for bins in (1, 2, 10, 15, 20):
        borders = np.arange(bins + 1) / bins
        confidences = np.concatenate([borders, np.random.default_rng(bins).random(50)]).astype(dtype)
        answers = np.random.default_rng(1).integers(2, size=len(confidences))
        rows, error = metrics.calibration_bins(answers, np.ones(len(answers), int), confidences, bins), 0
        assert sum(row["images"] for row in rows) == len(answers)
        for number, row in enumerate(rows):
            low, high = dtype(number / bins), dtype((number + 1) / bins)
            inside = [i for i, c in enumerate(confidences) if low < c <= high or c == number == 0]
            assert row["images"] == len(inside)
            assert row["up_to"] == (number + 1) / bins
            said, right = confidences[inside].mean(dtype=float), answers[inside].mean()
            assert (row["confidence"], row["accuracy"]) == (pytest.approx(said), pytest.approx(right))
            error += len(inside) / len(answers) * abs(said - right)
        got = metrics.calibration_error(answers, np.ones(len(answers), int), confidences, bins)
        assert got == pytest.approx(error, abs=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_come_back_from_normalised_images(channels):
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, channels, 1, 1)
    for mean, std in (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3), ((0.286,) * 3, (0.353,) * 3)):  # fmt: skip
        form = data.ImageForm(16, 16, channels, 2, mean[:channels], std[:channels])
        assert torch.equal(as_bytes(normalize(images, form), form), images)
        assert as_bytes(torch.tensor([-9.0, 9.0]).view(1, 1, 1, 2).repeat(1, channels, 1, 1), form).unique().tolist() == [0, 255]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# visualize.py


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """An RGB and a grey image, and a file that is none."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    Image.fromarray(rng.integers(256, size=(30, 50, 3), dtype=np.uint8)).save(folder / "rgb.png")
    Image.fromarray(rng.integers(256, size=(28, 28), dtype=np.uint8)).save(folder / "grey.png")
    (folder / "broken.png").write_bytes(b"\x89PNG no image")
    return folder


def written(folder, *flags):
    """Run the recipe as a user would: the names of the pictures it wrote, each of which holds something."""
    command = [sys.executable, "-W", "ignore", RECIPE, *flags, "--output_dir", "out"]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for file in (folder / "out").iterdir():
        assert f"out/{file.name}" in done.stdout
        with Image.open(file) as picture:
            assert picture.width == (630 if file.stem == "calibration" else 1050)
            assert len(picture.convert("RGB").getcolors(2**24)) > 20
    return {file.stem for file in (folder / "out").iterdir()}, done.stdout


OF_IMAGES = {"attention", "layers", "heads", "inside", "positions"}


def test_visualize_writes_what_it_says_of_image_files(demo_run, photos, tmp_path):
    names, said = written(tmp_path, demo_run, "--images", photos / "rgb.png", photos / "grey.png")
    assert names == OF_IMAGES
    assert all(f"{name}.png" in runpy_doc() for name in names)
    assert "the attention is that of" in said


def test_visualize_writes_what_it_says_of_a_data_set(demo_run, tmp_path):
    names, said = written(tmp_path, demo_run, "--dataset", "fashion-mnist-mini", "--count", 2)
    assert names == OF_IMAGES | {"predictions", "mistakes", "confusion", "calibration"}
    assert all(f"{name}.png" in runpy_doc() for name in names)
    assert "of 2,000 images" in said


def runpy_doc():
    return RECIPE.read_text().split('"""')[1]


@pytest.fixture
def visualize(monkeypatch, tmp_path):
    """visualize(*flags) -> the figures that the recipe would write, by their names."""

    def run(*flags):
        drawn = {}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["visualize.py", *map(str, flags), "--output_dir", str(tmp_path / "out")])
            patch.setattr(sys, "path", sys.path[:])
            patch.setattr(figures, "save", lambda figure, file: drawn.update({file.stem: figure}))
            runpy.run_path(str(RECIPE), run_name="__main__")
        return drawn

    return run


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def test_visualize_follows_the_class_and_the_layers_asked_for(demo_run, photos, visualize):
    from hf_vit import HFViTForImageClassification, training

    file = photos / "grey.png"
    drawn = visualize(demo_run, "--images", file, "--method", "grad_cam", "--label", "Bag", "--layers", 0, -1)
    assert titles(drawn["layers"]) == ["layer 1", "layer 2"]
    assert titles(drawn["heads"]) == [f"head {head}" for head in range(1, 5)]
    model = HFViTForImageClassification.from_pretrained(demo_run / "model")
    form = data.image_form(training.load_processor(str(demo_run / "model")), model.config)
    image = torch.from_numpy(np.array(Image.open(file)))[None, None]
    maps = model.attention_maps(normalize(image, form), [0, 1], "grad_cam", labels=model.config.label2id["Bag"])[0]
    for heat, axes in zip(maps, drawn["layers"].axes[1:], strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), figures.overlay(image[0], heat))


def test_visualize_of_a_model_without_a_head_leaves_out_what_follows_a_class(tiny_config, photos, tmp_path, visualize):
    HFViTModel(tiny_config()).save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size=dict(height=16, width=16)).save_pretrained(tmp_path / "model")
    drawn = visualize(tmp_path / "model", "--images", photos / "rgb.png")
    assert titles(drawn["attention"]) == ["attention, last layer", "rollout"]
    assert drawn["attention"].axes[0].get_title(loc="left") == ""
    with pytest.raises(SystemExit, match="error: the head of the model is all zero, so grad_cam has no gradient"):
        visualize(tmp_path / "model", "--images", photos / "rgb.png", "--method", "grad_cam")


def test_visualize_reads_a_native_vit(tiny_fields, randomize, photos, tmp_path, visualize):
    fields = {**tiny_fields, "id2label": {0: "100% $a$ or $b$", 1: "a class with a long name", 2: "c"}}
    fields.pop("num_labels")
    randomize(ViTForImageClassification(ViTConfig(**fields))).save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size=dict(height=16, width=16)).save_pretrained(tmp_path / "model")
    drawn = visualize(tmp_path / "model", "--images", photos / "rgb.png", photos / "grey.png")
    assert titles(drawn["attention"]) == list(figures.METHODS.values())
    assert set(drawn) == OF_IMAGES
    assert drawn["attention"].axes[0].get_title(loc="left").endswith("%")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--images", "grey.png", "--method", "grad_cam", "--label", "Sock"], "--label Sock is no class of the model; wanted one of"),
        (["--images", "grey.png", "--layers", 2], "layers is [2]; wanted None, a number from -2 to 1"),
        (["--images", "grey.png", "broken.png"], "(broken.png) cannot be read as an image: no known format"),
        (["--images", "missing.png"], "No such file"),
    ],
)  # fmt: skip
def test_visualize_says_in_one_sentence_what_is_wrong(flags, sentence, demo_run, photos, visualize, monkeypatch):
    monkeypatch.chdir(photos)
    with pytest.raises(SystemExit) as stop:
        visualize(demo_run, *flags)
    assert stop.value.code.startswith("error: ")
    assert sentence in stop.value.code
    assert "\n" not in stop.value.code


def test_visualize_wants_a_model_and_one_source_of_images(demo_run, photos, visualize, capsys):
    with pytest.raises(SystemExit) as stop:
        visualize(photos / "nowhere", "--images", photos / "grey.png")
    assert stop.value.code.startswith("error: ")
    assert "nowhere" in stop.value.code
    with pytest.raises(SystemExit, match="2"):
        visualize(demo_run, "--images", photos / "grey.png", "--dataset", "fashion-mnist-mini")
    assert "not allowed with argument --images" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        visualize(demo_run)
    assert "one of the arguments --images --dataset_name/--dataset is required" in capsys.readouterr().err
